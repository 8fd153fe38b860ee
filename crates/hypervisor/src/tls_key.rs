//! The key of a migration that the hypervisor encrypts itself.

use serde::{Deserialize, Serialize};

/// The key of one migration, 256 bits. Says nothing of itself in `Debug`; as text it is 64 hexadecimal digits.
#[derive(Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct TlsKey([u8; 32]);

/// Not 64 hexadecimal digits.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("a key of an encrypted migration has 64 hexadecimal digits")]
pub struct BadTlsKey;

impl TlsKey {
    /// A key of these bytes, which nobody can guess.
    pub const fn new(bytes: [u8; 32]) -> Self {
        Self(bytes)
    }
}

impl std::fmt::Debug for TlsKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("TlsKey(…)")
    }
}

impl From<TlsKey> for String {
    fn from(TlsKey(bytes): TlsKey) -> Self {
        bytes
            .iter()
            .flat_map(|byte| [byte >> 4, byte & 15])
            .filter_map(|digit| char::from_digit(digit.into(), 16))
            .collect()
    }
}

impl TryFrom<String> for TlsKey {
    type Error = BadTlsKey;

    fn try_from(text: String) -> Result<Self, BadTlsKey> {
        if text.len() != 64 || !text.bytes().all(|byte| byte.is_ascii_hexdigit()) {
            return Err(BadTlsKey);
        }
        let mut bytes = [0; 32];
        for (index, byte) in bytes.iter_mut().enumerate() {
            *byte = u8::from_str_radix(&text[2 * index..2 * index + 2], 16).map_err(|_| BadTlsKey)?;
        }
        Ok(Self(bytes))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_travels_as_text_and_is_not_told_in_a_log() {
        let key = TlsKey::new(std::array::from_fn(|index| u8::try_from(index).unwrap() * 7));
        let text = String::from(key);
        assert_eq!(text.len(), 64);
        assert_eq!(TlsKey::try_from(text.clone()), Ok(key));
        assert!(!format!("{key:?}").contains(&text[..4]));
        let short = text[..62].to_owned();
        let signed = format!("+{}", &text[1..]);
        for bad in [String::new(), short, signed, "g".repeat(64), "é".repeat(32)] {
            assert_eq!(TlsKey::try_from(bad), Err(BadTlsKey));
        }
    }
}
