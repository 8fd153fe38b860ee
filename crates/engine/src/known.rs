//! Fields that only inform people, and for which a newer peer may know values that this release does not.

use serde::de::IgnoredAny;
use serde::{Deserialize, Deserializer};

/// Reads such a field: a value that is not known counts as absent.
pub(crate) fn if_known<'de, D, T>(deserializer: D) -> Result<Option<T>, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de>,
{
    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Value<T> {
        Known(Option<T>),
        Other(IgnoredAny),
    }
    Ok(match Value::deserialize(deserializer)? {
        Value::Known(value) => value,
        Value::Other(_) => None,
    })
}
