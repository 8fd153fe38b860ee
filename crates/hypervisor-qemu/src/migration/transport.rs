//! How a migration's bytes travel, as QEMU's capabilities and parameters. Pure.

use drainpipe_hypervisor::{Address, SourceSettings, Transport, ZeroPages, Zstd};
use serde_json::{Value, json};

/// More than any network carries, in bytes per second. QEMU's own default would slow a migration
/// down: 128 MiB/s, and 32 MiB/s before QEMU 5.2.
const BANDWIDTH_UNLIMITED: u64 = 1 << 40;

/// How much of a link is left for QEMU's bytes by Ethernet, IPv6 and TCP with an MTU of 1500: 1428 of
/// 1538 bytes. QEMU counts its own bytes alone.
const PAYLOAD_SHARE: (u64, u64) = (1428, 1538);

/// The least that holds QEMU back: it spends a tenth every 100 ms, and takes 0 bytes for no limit.
const BANDWIDTH_LEAST: u64 = 10;

/// QEMU's `max-bandwidth` for so many Mb/s of the links: the bytes per second that TCP carries there.
pub fn bandwidth_bytes_per_s(limit_mbps: Option<u64>) -> u64 {
    let (payload, frame) = PAYLOAD_SHARE;
    let bytes = limit_mbps.map(|mbps| mbps.saturating_mul(1_000_000 / 8).saturating_mul(payload) / frame);
    bytes.map_or(BANDWIDTH_UNLIMITED, |bytes| bytes.clamp(BANDWIDTH_LEAST, BANDWIDTH_UNLIMITED))
}

/// QEMU's limits for so many Mb/s, before and after a switchover to post-copy. The second is none by default.
pub(super) fn bandwidth_parameters(limit_mbps: Option<u64>) -> Value {
    let limit = bandwidth_bytes_per_s(limit_mbps);
    json!({ "max-bandwidth": limit, "max-postcopy-bandwidth": limit })
}

/// The two ends of a migration.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Source(SourceSettings),
    Target,
}

/// Whether a capability is on. All others are switched off, so that nothing of an earlier, cancelled
/// attempt stays: `auto-converge` too, since [`crate::VcpuThrottle`] holds a guest back.
pub(super) fn wants(transport: Transport, side: Side, capability: &str) -> bool {
    match capability {
        "events" => true,
        "multifd" => transport.parallel().is_some(),
        "postcopy-ram" => transport.is_post_copy(),
        // The source stops before the last part and waits for `switch_over`.
        "pause-before-switchover" => side != Side::Target,
        // The target takes the disks only when its guest runs, not when the state has arrived. In post-copy it takes
        // them with the state nevertheless: the source has given them up by then, for good.
        "late-block-activate" => side == Side::Target,
        _ => false,
    }
}

/// Parameters of one side, all that matter, also those at their default: an earlier attempt may
/// have changed them.
pub(super) fn parameters(transport: Transport, side: Side) -> Value {
    let multifd = transport.parallel();
    let compression = multifd.and_then(|multifd| multifd.compression);
    let mut parameters = bandwidth_parameters(match side {
        Side::Source(settings) => settings.bandwidth_mbps,
        Side::Target => None,
    });
    parameters["multifd-compression"] = if compression.is_some() { "zstd" } else { "none" }.into();
    if let Some(multifd) = multifd {
        parameters["multifd-channels"] = multifd.channels.into();
    }
    if let Some(Zstd { level }) = compression {
        parameters["multifd-zstd-level"] = level.into();
    }
    if let Side::Source(SourceSettings { downtime_limit_ms, zero_pages, .. }) = side {
        parameters["downtime-limit"] = downtime_limit_ms.into();
        if let Some(zero_pages) = zero_pages {
            parameters["zero-page-detection"] = match zero_pages {
                ZeroPages::InMain => "legacy",
                ZeroPages::InParallel => "multifd",
            }
            .into();
        }
    }
    parameters
}

/// QEMU's name for an address. multifd's connections use the same one.
pub(super) fn uri(transport: Transport, address: &Address) -> String {
    match address {
        Address::Tcp(address) if transport == Transport::Rdma => format!("rdma:{address}"),
        Address::Tcp(address) => format!("tcp:{address}"),
        Address::Unix(path) => format!("unix:{}", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use std::net::SocketAddr;
    use std::path::PathBuf;

    use drainpipe_hypervisor::Parallel;

    use super::*;

    const SOURCE: Side =
        Side::Source(SourceSettings { downtime_limit_ms: 300, bandwidth_mbps: None, zero_pages: None });

    fn multifd(compression: Option<Zstd>) -> Transport {
        Transport::Parallel(Parallel { channels: 8, compression })
    }

    #[test]
    fn a_limit_counts_what_goes_over_the_links() {
        assert_eq!(bandwidth_bytes_per_s(Some(1000)), 116_059_817);
        assert_eq!(bandwidth_bytes_per_s(Some(0)), 10, "a tenth below 1 would be none");
        assert_eq!(bandwidth_bytes_per_s(Some(u64::MAX)), BANDWIDTH_UNLIMITED);
        assert_eq!(bandwidth_bytes_per_s(None), BANDWIDTH_UNLIMITED);
    }

    #[test]
    fn a_limit_holds_from_the_first_byte() {
        let limited = SourceSettings { downtime_limit_ms: 300, bandwidth_mbps: Some(1000), zero_pages: None };
        for phase in ["max-bandwidth", "max-postcopy-bandwidth"] {
            let of = |side| parameters(Transport::CLEAR_POST_COPY, side)[phase].clone();
            assert_eq!(of(Side::Source(limited)), 116_059_817);
            assert_eq!(
                (of(SOURCE), of(Side::Target)),
                (BANDWIDTH_UNLIMITED.into(), BANDWIDTH_UNLIMITED.into())
            );
        }
    }

    #[test]
    fn post_copy_is_for_both_sides() {
        for side in [SOURCE, Side::Target] {
            assert!(wants(Transport::CLEAR_POST_COPY, side, "postcopy-ram"));
            assert!(!wants(Transport::CLEAR_POST_COPY, side, "multifd"));
        }
        assert!(wants(Transport::CLEAR_POST_COPY, SOURCE, "pause-before-switchover"));
    }

    #[test]
    fn only_the_source_pauses_and_only_the_target_leaves_disks_alone() {
        let plain = Transport::default();
        assert!(wants(plain, SOURCE, "pause-before-switchover"));
        assert!(!wants(plain, Side::Target, "pause-before-switchover"));
        assert!(wants(plain, Side::Target, "late-block-activate"));
        assert!(!wants(plain, SOURCE, "late-block-activate"));
    }

    #[test]
    fn a_source_that_can_choose_is_told_where_zero_pages_are_said() {
        let said = |zero_pages| {
            let settings = SourceSettings { downtime_limit_ms: 300, bandwidth_mbps: None, zero_pages };
            parameters(multifd(None), Side::Source(settings))["zero-page-detection"].clone()
        };
        assert_eq!(said(Some(ZeroPages::InParallel)), "multifd");
        assert_eq!(said(Some(ZeroPages::InMain)), "legacy", "an earlier attempt may have changed it");
        assert_eq!(said(None), Value::Null, "QEMU 7.2 has no such parameter");
    }

    #[test]
    fn qemu_holds_no_guest_back() {
        for transport in [Transport::Single, multifd(None), Transport::CLEAR_POST_COPY] {
            assert!(!wants(transport, SOURCE, "auto-converge"), "{transport:?}");
        }
    }

    #[test]
    fn what_is_not_asked_for_is_off() {
        assert!(!wants(Transport::default(), SOURCE, "multifd"));
        assert!(!wants(Transport::default(), SOURCE, "postcopy-ram"));
        assert!(!wants(multifd(None), SOURCE, "postcopy-ram"));
        assert!(!wants(multifd(None), SOURCE, "from-the-future"));
        assert_eq!(parameters(multifd(None), SOURCE)["multifd-compression"], "none");
        assert_eq!(parameters(Transport::default(), Side::Target)["multifd-compression"], "none");
    }

    #[test]
    fn both_sides_get_the_same_channels() {
        let transport = multifd(Some(Zstd { level: 3 }));
        for side in [SOURCE, Side::Target] {
            let parameters = parameters(transport, side);
            assert_eq!(parameters["multifd-channels"], 8);
            assert_eq!(parameters["multifd-compression"], "zstd");
            assert_eq!(parameters["multifd-zstd-level"], 3);
        }
    }

    #[test]
    fn addresses_of_all_families() {
        let address = |text: &str| Address::from(text.parse::<SocketAddr>().expect("an address"));
        let uri_of = |text: &str| uri(Transport::Single, &address(text));
        assert_eq!(uri_of("10.0.0.1:49152"), "tcp:10.0.0.1:49152");
        assert_eq!(uri_of("[fd00::1]:49152"), "tcp:[fd00::1]:49152");
        let socket = PathBuf::from("/run/vms/web/relay.sock").into();
        assert_eq!(uri(Transport::Single, &socket), "unix:/run/vms/web/relay.sock");
        assert_eq!(uri(Transport::Rdma, &address("10.0.0.1:49152")), "rdma:10.0.0.1:49152");
    }
}
