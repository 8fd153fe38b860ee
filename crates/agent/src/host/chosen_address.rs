//! The migration address that an agent chooses if none is configured: unique-local IPv6 (RFC 4193), the same at each
//! start, and another one on each host of the fleet.

use std::net::Ipv6Addr;

use ring::digest::{SHA256, digest};

/// `fd00::/8`: unique-local, with a global identifier of one's own choice.
const UNIQUE_LOCAL: u8 = 0xfd;

/// Bytes of the global identifier.
const GLOBAL_ID_BYTES: usize = 5;

/// Bytes of the host's part.
const HOST_BYTES: usize = 8;

/// The address of `host` in a fleet whose authority has this public key.
///
/// The global identifier comes from the key, so that two fleets do not share addresses, and the host's
/// part from the host's name. The subnet between them is 0.
pub(crate) fn choose(authority_key: &[u8], host: &str) -> Ipv6Addr {
    let mut octets = [0; 16];
    octets[0] = UNIQUE_LOCAL;
    octets[1..=GLOBAL_ID_BYTES].copy_from_slice(&hash(authority_key)[..GLOBAL_ID_BYTES]);
    octets[16 - HOST_BYTES..].copy_from_slice(&hash(host.as_bytes())[..HOST_BYTES]);
    Ipv6Addr::from(octets)
}

fn hash(bytes: &[u8]) -> [u8; 32] {
    digest(&SHA256, bytes).as_ref().try_into().expect("SHA-256 has 32 bytes")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn it_is_the_same_at_each_start() {
        let address = choose(b"a key", "a");
        // SHA-256 of "a key" begins with 8fa3aab2fa, that of "a" with ca978112ca1bbdca.
        assert_eq!(address, "fd8f:a3aa:b2fa:0:ca97:8112:ca1b:bdca".parse::<Ipv6Addr>().unwrap());
    }

    proptest! {
        #[test]
        fn hosts_share_a_prefix_and_no_address(key: [u8; 8], one in "[a-z]{1,9}", other in "[a-z]{1,9}") {
            let addresses = [choose(&key, &one), choose(&key, &other)];
            prop_assert_eq!(&addresses[0].segments()[..4], &addresses[1].segments()[..4]);
            prop_assert_eq!(addresses[0] == addresses[1], one == other);
            prop_assert!(addresses[0].is_unique_local());
        }
    }
}
