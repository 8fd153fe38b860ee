//! How a link's rate is kept: parameters of the kernel's token bucket filter (tc-tbf(8)).

/// Two of the largest GSO packets with their headers (64 KiB, some 69 kB on the wire). A packet
/// larger than the burst would be cut into MTU-sized ones before it may pass, at a multiple of
/// the CPU cost.
const MIN_BURST_BYTES: u64 = 128 << 10;

/// The timer that releases the next packet may fire some milliseconds late when two cores carry
/// sender, receiver and guests; what passed meanwhile is made up for only as far as the burst
/// reaches. At 1 Gb/s on a machine busy with compilers (median of 5 runs, one stream, bbr and
/// cubic): 2 ms gave 0.950 of the rate, 4 ms 0.956; 8 ms could not be told from 4, at 5 Gb/s
/// either.
const BURST_MS: u64 = 4;

/// What may wait, before packets are dropped. One TCP stream is held back by its own socket
/// (TCP small queues: about 1 ms of its rate) and never fills this; sixteen started at once lost
/// hundreds of packets in a queue of 10 ms, and next to none in one of 20 ms.
const QUEUE_MS: u64 = 20;
/// 0.2 s at 20 Mb/s. With 1 MiB it was 0.4 s there, which came and went in a moment when connections that had paused
/// went on all at once; the hellos of a path's watch behind them were late enough for a silence.
const MIN_QUEUE_BYTES: u64 = 512 << 10;

/// The `tc` command that makes `interface` send at `rate_mbps`.
///
/// The rate counts Ethernet frames, every GSO segment with its own header (Linux >= 3.9), but not
/// preamble and gap. So with an MTU of 1500 TCP can carry at most 1448 / 1514 = 0.956 of it.
/// Measured (Linux 6.18, two quiet cores, one stream, bbr as well as cubic, 0.1 to 5 Gb/s): 0.94 to
/// 0.96, no drops.
pub(crate) fn set_rate(interface: &str, rate_mbps: u64) -> String {
    let bytes_per_ms = rate_mbps * 125;
    let burst = MIN_BURST_BYTES.max(bytes_per_ms * BURST_MS);
    let limit = MIN_QUEUE_BYTES.max(bytes_per_ms * QUEUE_MS);
    format!("qdisc replace dev {interface} root tbf rate {rate_mbps}mbit burst {burst} limit {limit}")
}

/// The `tc` commands that make `interface` send as fast as it can. Deleting a root qdisc fails
/// where there is none, so one is put there first; after it, veth is back at its `noqueue`.
pub(crate) fn remove_rate(interface: &str) -> [String; 2] {
    [format!("qdisc replace dev {interface} root pfifo"), format!("qdisc delete dev {interface} root")]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gigabit_is_shaped_as_measured() {
        assert_eq!(
            set_rate("e0", 1000),
            "qdisc replace dev e0 root tbf rate 1000mbit burst 500000 limit 2500000"
        );
    }

    #[test]
    fn a_slow_link_passes_gso_packets_whole() {
        assert!(set_rate("e0", 10).contains("burst 131072 limit 524288"));
    }
}
