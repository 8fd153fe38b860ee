//! Which names hosts and operators may have.

/// Longest name, in bytes: a DNS name's limit.
const LENGTH_MAX: usize = 253;
/// Longest part between dots, in bytes: a DNS label's limit.
const LABEL_LENGTH_MAX: usize = 63;

/// A name that no host or operator may have.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{name:?} is not a usable name: {reason}; use lower-case letters, digits and hyphens, \
     in parts joined by dots, such as \"node-1\" or \"node-1.rack2.example\""
)]
pub struct InvalidName {
    /// The name, shortened if it is very long.
    pub name: String,
    /// What is wrong with it.
    pub reason: &'static str,
}

/// Checks that `name` may name a host or an operator: a DNS name in lower case.
///
/// Such a name is also a safe file name, and cannot be taken for an IP address.
pub fn check_name(name: &str) -> Result<(), InvalidName> {
    problem(name).map_or(Ok(()), |reason| {
        Err(InvalidName { name: name.chars().take(LABEL_LENGTH_MAX).collect(), reason })
    })
}

fn problem(name: &str) -> Option<&'static str> {
    if name.is_empty() {
        return Some("it is empty");
    }
    if name.len() > LENGTH_MAX {
        return Some("it is longer than 253 characters");
    }
    if let Some(reason) = name.split('.').find_map(label_problem) {
        return Some(reason);
    }
    let last_label = name.rsplit('.').next().unwrap_or(name);
    last_label
        .bytes()
        .all(|byte| byte.is_ascii_digit())
        .then_some("its last part has digits only, as an IP address has")
}

fn label_problem(label: &str) -> Option<&'static str> {
    let allowed = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    if label.is_empty() {
        Some("it has an empty part")
    } else if label.len() > LABEL_LENGTH_MAX {
        Some("it has a part longer than 63 characters")
    } else if label.bytes().any(|byte| byte.is_ascii_uppercase()) {
        Some("it has upper-case letters")
    } else if !label.bytes().all(allowed) {
        Some("it has characters that are not allowed")
    } else if label.starts_with('-') || label.ends_with('-') {
        Some("it has a part that begins or ends with a hyphen")
    } else {
        None
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use rustls::pki_types::ServerName;

    use super::*;

    #[test]
    fn host_names_are_accepted() {
        for name in ["a", "node-1", "10g", "node-1.rack2.example", "1.a"] {
            assert_eq!(check_name(name), Ok(()), "{name}");
        }
    }

    #[test]
    fn what_is_wrong_is_said() {
        let long_label = "a".repeat(64);
        let long_name = "a.".repeat(130);
        for (name, part) in [
            ("", "empty"),
            ("Node", "upper-case"),
            ("a b", "not allowed"),
            ("../etc", "empty part"),
            ("a/b", "not allowed"),
            ("-a", "hyphen"),
            ("192.168.1.1", "IP address"),
            ("grün", "not allowed"),
            (long_label.as_str(), "63"),
            (long_name.as_str(), "253"),
        ] {
            let error = check_name(name).expect_err(name);
            assert!(error.reason.contains(part), "{name}: {error}");
        }
    }

    proptest! {
        /// TLS takes the same names as DNS names, or a host could not be connected to.
        #[test]
        fn accepted_names_are_server_names(name in "[a-z0-9.A-Z_-]{0,70}") {
            if check_name(&name).is_ok() {
                let server_name = ServerName::try_from(name).expect("a DNS name");
                prop_assert!(matches!(server_name, ServerName::DnsName(_)));
            }
        }

        #[test]
        fn any_text_is_judged(name in any::<String>()) {
            let _ = check_name(&name);
        }
    }
}
