//! Whether a migration is encrypted: by what both hosts want, what was asked for, and which networks it uses.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};
use utoipa::openapi::RefOr;
use utoipa::openapi::schema::Schema;
use utoipa::{PartialSchema, ToSchema};

use crate::host::encryption_policy::EncryptionPolicy;
use crate::host::facts::HostFacts;
use crate::paths::path::Path;

/// Whether a migration is encrypted, and why.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(from = "WireEncryption", into = "WireEncryption")]
pub enum Encryption {
    /// It is.
    Encrypted(WhyEncrypted),
    /// It is not.
    Clear(WhyClear),
}

/// Why a migration is encrypted.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WhyEncrypted {
    /// Hosts require it, and not both trust the network of a path.
    Required {
        /// These hosts.
        by: Vec<String>,
        /// Such a path.
        path: String,
    },
    /// It was asked for.
    AskedFor,
    /// What another host says.
    Stated(String),
}

/// Why a migration goes in the clear.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum WhyClear {
    /// Nobody requires it to be encrypted, or has asked for it.
    NotRequired,
    /// It is required, but for networks that both hosts trust.
    Trusted,
    /// What another host says.
    Stated(String),
}

/// Whether a migration is encrypted, and why.
#[derive(Serialize, Deserialize, ToSchema)]
struct WireEncryption {
    /// Whether it is.
    is_encrypted: bool,
    /// Why, in words.
    why: String,
}

impl Encryption {
    /// Whether it is.
    pub fn is_encrypted(&self) -> bool {
        matches!(self, Self::Encrypted(_))
    }

    /// Why, in words.
    pub fn why(&self) -> String {
        match self {
            Self::Encrypted(why) => why.to_string(),
            Self::Clear(why) => why.to_string(),
        }
    }
}

impl fmt::Display for WhyEncrypted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Required { by, path } => {
                let verb = if by.len() == 1 { "requires" } else { "require" };
                let hosts = by.join(" and ");
                write!(f, "{hosts} {verb} it, and not both hosts trust the network of {path}")
            }
            Self::AskedFor => f.write_str("asked for"),
            Self::Stated(words) => f.write_str(words),
        }
    }
}

impl fmt::Display for WhyClear {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::NotRequired => "neither host requires it, and it was not asked for",
            Self::Trusted => "both hosts trust the networks of all paths",
            Self::Stated(words) => words,
        })
    }
}

impl From<WireEncryption> for Encryption {
    fn from(WireEncryption { is_encrypted, why }: WireEncryption) -> Self {
        if is_encrypted {
            Self::Encrypted(WhyEncrypted::Stated(why))
        } else {
            Self::Clear(WhyClear::Stated(why))
        }
    }
}

impl From<Encryption> for WireEncryption {
    fn from(encryption: Encryption) -> Self {
        Self { is_encrypted: encryption.is_encrypted(), why: encryption.why() }
    }
}

impl Default for Encryption {
    fn default() -> Self {
        Self::Clear(WhyClear::Stated(String::new()))
    }
}

impl PartialSchema for Encryption {
    fn schema() -> RefOr<Schema> {
        WireEncryption::schema()
    }
}

impl ToSchema for Encryption {
    fn name() -> Cow<'static, str> {
        "Encryption".into()
    }
}

/// Whether a migration over these paths, seen from the source, is encrypted. The stricter host decides. Fails
/// where it was asked for and a host has it off: it goes encrypted or not at all.
pub(crate) fn decide(
    source: &HostFacts,
    target: &HostFacts,
    is_asked_for: bool,
    paths: &[Path],
) -> Result<Encryption, String> {
    let hosts = [source, target];
    let with = |policy| hosts.iter().filter(move |host| host.encryption == policy).map(|host| &*host.name);
    let requiring: Vec<String> = with(EncryptionPolicy::Required).map(str::to_owned).collect();
    let untrusted = paths.iter().find(|path| !is_trusted(source, target, path));
    if let (false, Some(path)) = (requiring.is_empty(), untrusted) {
        let why = WhyEncrypted::Required { by: requiring, path: path.to_string() };
        return Ok(Encryption::Encrypted(why));
    }
    if is_asked_for {
        return match with(EncryptionPolicy::Off).next() {
            Some(host) => Err(host.to_owned()),
            None => Ok(Encryption::Encrypted(WhyEncrypted::AskedFor)),
        };
    }
    Ok(Encryption::Clear(if requiring.is_empty() { WhyClear::NotRequired } else { WhyClear::Trusted }))
}

fn is_trusted(source: &HostFacts, target: &HostFacts, path: &Path) -> bool {
    trusts(source, &path.link) && trusts(target, &path.peer_link)
}

fn trusts(host: &HostFacts, link: &str) -> bool {
    host.link(link).is_some_and(|link| link.is_trusted)
}

/// Why a host cannot take part in a migration over these paths, seen from that host, that is not encrypted.
/// A target does not rely on what the source has decided, nor on a full list of paths: no path is not a trusted one.
pub fn refuses_clear(host: &HostFacts, paths: &[Path]) -> Option<String> {
    if host.encryption != EncryptionPolicy::Required {
        return None;
    }
    if paths.is_empty() {
        return Some(format!(
            "{} requires encryption, and no path of the plan is over a trusted network",
            host.name
        ));
    }
    let path = paths.iter().find(|path| !trusts(host, &path.link))?;
    Some(format!(
        "{} requires encryption and does not trust the network of {}: run the same Drainpipe on both hosts, or add \
         it to trusted_networks",
        host.name, path.link
    ))
}

/// The same of paths that are to be watched while a migration that is not encrypted goes on. Those that are `absent` are
/// not taken before they are there again.
pub fn refuses_clear_again(host: &HostFacts, paths: &[Path], absent: &[Path]) -> Option<String> {
    let there: Vec<Path> = paths.iter().filter(|path| !absent.contains(path)).cloned().collect();
    let takes_nothing = there.is_empty() && !paths.is_empty();
    if takes_nothing { None } else { refuses_clear(host, &there) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::fixtures;
    use crate::host::facts::MigrationLink;

    fn host(name: &str, encryption: EncryptionPolicy, trusted: [bool; 2]) -> HostFacts {
        let link = |(index, is_trusted)| MigrationLink { is_trusted, ..fixtures::link(&format!("e{index}")) };
        let links = trusted.into_iter().enumerate().map(link).collect();
        HostFacts { links, encryption, ..fixtures::host(name) }
    }

    fn path(index: usize) -> Path {
        fixtures::path(&format!("e{index}"))
    }

    fn policy() -> impl Strategy<Value = EncryptionPolicy> {
        prop::sample::select(vec![
            EncryptionPolicy::Required,
            EncryptionPolicy::Allowed,
            EncryptionPolicy::Off,
        ])
    }

    proptest! {
        #[test]
        fn the_stricter_host_decides(
            own in policy(),
            other in policy(),
            own_trust: [bool; 2],
            other_trust: [bool; 2],
            is_asked_for: bool,
            count in 1..=2_usize,
        ) {
            let (a, b) = (host("a", own, own_trust), host("b", other, other_trust));
            let paths: Vec<Path> = (0..count).map(path).collect();
            let decided = decide(&a, &b, is_asked_for, &paths);
            let back = decide(&b, &a, is_asked_for, &paths);
            prop_assert_eq!(decided.is_ok(), back.is_ok());
            let is_required = [own, other].contains(&EncryptionPolicy::Required);
            let is_off = [own, other].contains(&EncryptionPolicy::Off);
            let all_trusted = (0..count).all(|index| own_trust[index] && other_trust[index]);
            match decided {
                Ok(decided) => {
                    prop_assert_eq!(decided.is_encrypted(), back.unwrap().is_encrypted());
                    prop_assert_eq!(decided.is_encrypted(), is_asked_for || is_required && !all_trusted);
                    if !decided.is_encrypted() {
                        for host in [&a, &b] {
                            prop_assert_eq!(refuses_clear(host, &paths), None);
                        }
                    }
                }
                Err(_) => prop_assert!(is_asked_for && is_off && (!is_required || all_trusted)),
            }
        }
    }

    proptest! {
        #[test]
        fn in_the_clear_go_only_plans_of_which_a_strict_host_trusts_every_path(
            policy in policy(),
            trust: [bool; 2],
            count in 0..=2_usize,
        ) {
            let paths: Vec<Path> = (0..count).map(path).collect();
            let is_trusted = count > 0 && trust[..count].iter().all(|trusts| *trusts);
            let refused = refuses_clear(&host("b", policy, trust), &paths).is_some();
            prop_assert_eq!(refused, policy == EncryptionPolicy::Required && !is_trusted);
        }
    }

    #[test]
    fn it_says_why() {
        use EncryptionPolicy::{Allowed, Off, Required};
        let decided = |own, other, trusted, asked| {
            decide(&host("a", own, trusted), &host("b", other, [true; 2]), asked, &[path(0), path(1)])
        };
        let why = |own, other, trusted, asked| decided(own, other, trusted, asked).unwrap().why();
        let required = "it, and not both hosts trust the network of e1–e1";
        assert_eq!(why(Off, Required, [true, false], false), format!("b requires {required}"));
        assert_eq!(why(Required, Required, [true, false], true), format!("a and b require {required}"));
        assert_eq!(why(Required, Required, [true; 2], false), "both hosts trust the networks of all paths");
        assert_eq!(why(Required, Allowed, [true; 2], true), "asked for");
        assert_eq!(
            why(Off, Allowed, [false; 2], false),
            "neither host requires it, and it was not asked for"
        );
        assert_eq!(decided(Allowed, Off, [true; 2], true), Err("b".into()));
    }

    #[test]
    fn its_reason_goes_over_the_wire_in_words() {
        let asked_for = Encryption::Encrypted(WhyEncrypted::AskedFor);
        let wire = serde_json::json!({ "is_encrypted": true, "why": "asked for" });
        assert_eq!(serde_json::to_value(asked_for).unwrap(), wire);
        let read: Encryption = serde_json::from_value(wire).unwrap();
        assert_eq!(read, Encryption::Encrypted(WhyEncrypted::Stated("asked for".into())));
    }

    #[test]
    fn a_target_looks_for_itself() {
        let paths = [path(0), path(1)];
        let refusal = |policy, trusted| refuses_clear(&host("b", policy, trusted), &paths);
        assert!(refusal(EncryptionPolicy::Required, [true, false]).unwrap().contains("network of e1"));
        assert_eq!(refusal(EncryptionPolicy::Required, [true, true]), None);
        assert_eq!(refusal(EncryptionPolicy::Off, [false, false]), None);
    }

    #[test]
    fn a_target_looks_again_at_the_paths_that_it_is_to_watch() {
        let paths = [path(0), path(1)];
        let required = host("b", EncryptionPolicy::Required, [true, false]);
        let refuses = |absent: &[Path]| refuses_clear_again(&required, &paths, absent).is_some();
        assert!(refuses(&[]) && refuses(&paths[..1]));
        assert!(!refuses(&paths[1..]), "it is asked again once the other one is there");
        assert!(!refuses(&paths), "nothing is taken");
        assert!(refuses_clear_again(&required, &[], &[]).is_some());
        let off = host("b", EncryptionPolicy::Off, [false, false]);
        assert_eq!(refuses_clear_again(&off, &paths, &[]), None);
    }
}
