//! Hosts that come to the fleet and leave it.

use std::fmt;
use std::net::SocketAddr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize};
use utoipa::ToSchema;

pub use crate::fleet_list::SignedList;

/// A token that lets one host join.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct TokenView {
    /// The token: this host's name, the authority's fingerprint and a secret.
    pub token: String,
    /// Where the new host asks.
    pub address: String,
    /// Until when (RFC 3339).
    pub ends_at: String,
}

/// For how long a token is to be good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenRequest {
    /// Seconds, a day at most.
    #[schema(minimum = 1, maximum = 86_400)]
    pub life_s: u32,
}

/// What a host says that wants to join.
#[derive(Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct JoinRequest {
    /// The secret of a token.
    pub secret: String,
    /// Its name.
    pub name: String,
    /// Where its agent listens.
    #[schema(value_type = String)]
    pub address: SocketAddr,
    /// A request for a certificate (PKCS #10, PEM). Of it, nothing but the key counts.
    pub certificate_request: String,
}

/// Not the secret.
impl fmt::Debug for JoinRequest {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "JoinRequest({} at {})", self.name, self.address)
    }
}

/// What a host gets that has joined.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct JoinAnswer {
    /// Its certificate, in PEM.
    pub certificate: String,
    /// The authority's, in PEM.
    pub authority: String,
    /// The hosts of the fleet.
    pub list: SignedList,
}

/// A request for a new certificate, by a host whose own is about to end.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RenewalRequest {
    /// As when it joined, for a new key.
    pub certificate_request: String,
}

/// A new certificate.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct RenewalAnswer {
    /// In PEM.
    pub certificate: String,
}

/// Which list of hosts somebody has.
#[derive(Debug, Clone, Default, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct FleetNews {
    /// Its version; 0 for none.
    #[serde(deserialize_with = "version")]
    pub version: u64,
    /// The list itself, for who has an older one.
    pub list: Option<SignedList>,
}

/// The fleet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct FleetView {
    /// The host that has the authority's key: new hosts ask there, and certificates are renewed there.
    pub authority: String,
    /// Version of this list: it goes up with each change.
    pub version: u64,
    /// Its hosts.
    pub members: Vec<MemberView>,
    /// The names whose certificates were revoked.
    pub revoked: Vec<RevokedView>,
}

/// A host of the fleet.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct MemberView {
    /// Its name.
    pub name: String,
    /// Where its agent listens.
    pub address: String,
    /// Since when it is one (RFC 3339).
    pub since: String,
    /// The host that let it in.
    pub by: String,
}

/// Somebody whose certificates are no longer valid.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct RevokedView {
    /// `host a`, or `operator ann`.
    pub holder: String,
    /// Those that were made until then (RFC 3339).
    pub at: String,
}

/// The names whose certificates are to be revoked.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct RevocationRequest {
    /// A host's or an operator's name.
    pub name: String,
    /// Whether it is an operator's.
    #[serde(default)]
    pub is_operator: bool,
}

/// How a host is to leave.
#[derive(Debug, Clone, Copy, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct DepartureRequest {
    /// Although it has VMs.
    #[serde(default)]
    pub force: bool,
}

/// No list comes as far as the API's document does not go (`int64`).
fn version<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u64, D::Error> {
    let version = u64::deserialize(deserializer)?;
    if i64::try_from(version).is_err() {
        return Err(D::Error::custom(format!("version: 0 to {} is allowed", i64::MAX)));
    }
    Ok(version)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_further_than_any_is_refused() {
        let news = |version: &str| {
            serde_json::from_str::<FleetNews>(&format!("{{\"version\": {version}, \"list\": null}}"))
        };
        assert_eq!(news("9223372036854775807").unwrap().version, 9_223_372_036_854_775_807);
        assert!(news("9223372036854775808").unwrap_err().to_string().contains("version: 0 to"));
    }
}
