//! The address plan. Labs are isolated from each other, so every lab has the same one.

use std::net::Ipv4Addr;

use ipnet::Ipv4Net;

/// Hosts and client reach each other here, unshaped.
pub const MANAGEMENT_NETWORK: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(10, 77, 0, 0), 24);

/// Guests and client reach each other here. Addresses from .2 on are free for guests.
pub const GUEST_NETWORK: Ipv4Net = Ipv4Net::new_assert(Ipv4Addr::new(10, 77, 100, 0), 24);

const FIRST_HOST: u8 = 11;

/// The links' third octets lie between the management network's (0) and the guest network's (100).
pub(crate) const MAX_LINKS: usize = 64;
/// Hosts are .11, .12 and so on.
pub(crate) const MAX_HOSTS: usize = 64;

/// The client's address on the management network.
pub const fn client_management_address() -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 0, 1)
}

/// The client's address on the guest network.
pub const fn client_guest_address() -> Ipv4Addr {
    Ipv4Addr::new(10, 77, 100, 1)
}

/// The address of host number `host` on the management network.
pub(crate) fn management_address(host: usize) -> Ipv4Addr {
    host_address(0, host)
}

/// The network of link number `link`.
pub(crate) fn link_network(link: usize) -> Ipv4Net {
    Ipv4Net::new_assert(Ipv4Addr::new(10, 77, octet(1 + link), 0), 24)
}

/// The address of host number `host` on link number `link`.
pub(crate) fn link_address(link: usize, host: usize) -> Ipv4Addr {
    host_address(octet(1 + link), host)
}

fn host_address(network: u8, host: usize) -> Ipv4Addr {
    Ipv4Addr::new(10, 77, network, octet(usize::from(FIRST_HOST) + host))
}

fn octet(value: usize) -> u8 {
    u8::try_from(value).expect("a validated LabSpec has at most MAX_HOSTS hosts, MAX_LINKS links")
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn the_first_hosts_have_the_documented_addresses() {
        assert_eq!(management_address(0).to_string(), "10.77.0.11");
        assert_eq!(link_address(0, 0).to_string(), "10.77.1.11");
        assert_eq!(link_address(1, 1).to_string(), "10.77.2.12");
        assert_eq!(link_network(1).to_string(), "10.77.2.0/24");
    }

    #[test]
    fn no_address_is_given_twice_in_the_largest_lab() {
        let mut addresses = HashSet::from([client_management_address(), client_guest_address()]);
        for host in 0..MAX_HOSTS {
            assert!(addresses.insert(management_address(host)));
            assert!(MANAGEMENT_NETWORK.contains(&management_address(host)));
            for link in 0..MAX_LINKS {
                let address = link_address(link, host);
                assert!(addresses.insert(address));
                assert!(link_network(link).contains(&address));
                assert!(!GUEST_NETWORK.contains(&address));
            }
        }
    }
}
