//! Which packet sizes to send, to find the largest that gets through.
//!
//! Sizes are those of IP packets in bytes, as an MTU counts.

use std::collections::BTreeMap;

/// Sent in any case: smaller than any MTU that exists, as the packets of a ping are.
pub const SMALL_BYTES: u16 = 128;

/// Sizes at which paths commonly end: IPv6's least, tunnels, `PPPoE`, Ethernet, jumbo frames.
const COMMON_BYTES: [u16; 8] = [1280, 1400, 1450, 1492, 1500, 4000, 8000, 9000];

/// How many sizes are tried at once between one that passes and one that does not.
const PARTS: u16 = 8;

/// What arrived at the other end: for each size, how many packets of it.
pub type Arrived = BTreeMap<u16, u32>;

/// The sizes to send first by a link of this MTU.
pub fn first_sizes(mtu_bytes: u16) -> Vec<u16> {
    let mut sizes: Vec<u16> = [SMALL_BYTES].into_iter().chain(COMMON_BYTES).collect();
    sizes.retain(|size| *size < mtu_bytes);
    sizes.push(mtu_bytes);
    sizes
}

/// The sizes to send next; none when the largest that passes is known.
pub fn next_sizes(mtu_bytes: u16, sent: &[u16], arrived: &Arrived) -> Vec<u16> {
    let Some(passes) = largest(arrived).filter(|passes| *passes < mtu_bytes) else { return vec![] };
    let fails = sent.iter().copied().filter(|size| *size > passes).min().unwrap_or(mtu_bytes);
    let gap = fails - passes;
    let parts = PARTS.min(gap - 1);
    (1..=parts).map(|part| passes + portion(gap, part, parts + 1)).collect()
}

/// The size of the largest packet that arrived.
pub fn largest(arrived: &Arrived) -> Option<u16> {
    arrived.last_key_value().map(|(size, _)| *size)
}

fn portion(gap: u16, part: u16, parts: u16) -> u16 {
    let portion = u32::from(gap) * u32::from(part) / u32::from(parts);
    u16::try_from(portion).expect("a portion of a gap is less than the gap")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_largest_that_passes_is_found_in_a_few_rounds(mtu in 1280_u16.., limit in SMALL_BYTES..) {
            let mut sent = first_sizes(mtu);
            let mut arrived = Arrived::new();
            let mut sizes = sent.clone();
            for _ in 0..8 {
                arrived.extend(sizes.iter().filter(|size| **size <= limit).map(|size| (*size, 1)));
                sizes = next_sizes(mtu, &sent, &arrived);
                prop_assert!(sizes.iter().all(|size| *size < mtu && !sent.contains(size)));
                sent.extend(&sizes);
            }
            prop_assert!(sizes.is_empty());
            prop_assert_eq!(largest(&arrived), Some(mtu.min(limit)));
        }
    }

    #[test]
    fn where_nothing_or_everything_passes_no_more_is_sent() {
        let sent = first_sizes(1500);
        assert_eq!(sent, [128, 1280, 1400, 1450, 1492, 1500]);
        assert!(next_sizes(1500, &sent, &Arrived::new()).is_empty());
        assert!(next_sizes(1500, &sent, &Arrived::from([(1500, 1)])).is_empty());
    }
}
