//! What 0.1.0 reports about its host, in today's terms. Only here does a hypervisor's name mean something:
//! `scripts/layers` knows this file. It goes when 0.1.0 is no longer supported.

use super::capabilities::{Capabilities, PostCopy};

/// The capabilities of a hypervisor with this name and version, if its agent does not report them: it is 0.1.0, which
/// has QEMU only.
pub(super) fn capabilities(hypervisor: &str, version: &str) -> Capabilities {
    match hypervisor {
        "QEMU" => of_qemu(version.split('.').next().and_then(|major| major.parse().ok())),
        _ => Capabilities::NONE,
    }
}

/// What a QEMU of this major version can do for 0.1.0; if that is not known, what each can that 0.1.0 works with.
pub(super) fn of_qemu(major: Option<u32>) -> Capabilities {
    let is_from = |first| major.is_some_and(|major| major >= first);
    Capabilities {
        tells_connections_apart: is_from(8),
        zero_pages_in_parallel: is_from(9),
        post_copy: Some(PostCopy { in_parallel: false, encrypts: true }),
        ..Capabilities::ALL
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_qemu_tells_no_connections_apart_and_has_zero_pages_in_the_main_one() {
        for (version, tells, zero) in [
            ("7.2.22", false, false),
            ("8.0.0", true, false),
            ("9.0.0", true, true),
            ("10.0.2", true, true),
            ("11", true, true),
            ("", false, false),
            ("new", false, false),
        ] {
            let expected = Capabilities {
                tells_connections_apart: tells,
                zero_pages_in_parallel: zero,
                ..of_qemu(None)
            };
            assert_eq!(capabilities("QEMU", version), expected, "{version}");
        }
    }

    #[test]
    fn of_another_hypervisor_nothing_is_taken_for_granted() {
        assert_eq!(capabilities("libvirt", "9.0.0"), Capabilities::NONE);
    }
}
