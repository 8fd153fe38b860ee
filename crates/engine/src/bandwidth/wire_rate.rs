//! How much the wire carries for a relay that does not always fill it.
//!
//! Where the cores are the limit, the wire carries less than it could. If the relay took that for all it can carry, it
//! would wait longer for blocks to be packed, and choose a codec that packs more and takes longer; the wire would
//! carry even less, and so on.

/// A wire that was full for this part of the time has carried all that it takes.
const FULL_SHARE: f64 = 0.8;

/// Follows the rate of a wire.
#[derive(Debug, Clone, Copy, Default)]
pub struct WireRate {
    bytes_per_second: f64,
}

impl WireRate {
    /// What the wire takes, in bytes per second, when it has carried so much recently and was full for `full_share`
    /// of the time, 0 to 1. None while it takes all that comes.
    pub fn follow(&mut self, carried_bytes_per_second: f64, full_share: f64) -> Option<f64> {
        if full_share >= FULL_SHARE || carried_bytes_per_second > self.bytes_per_second {
            self.bytes_per_second = carried_bytes_per_second;
        }
        (full_share > 0.0).then_some(self.bytes_per_second)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_wire_that_is_not_filled_is_no_slower() {
        let mut rate = WireRate::default();
        assert_eq!(rate.follow(90.0, 0.0), None, "it takes all");
        assert_eq!(rate.follow(100.0, 1.0), Some(100.0));
        assert_eq!(rate.follow(60.0, 0.5), Some(100.0));
        assert_eq!(rate.follow(120.0, 0.5), Some(120.0), "it has carried that");
    }

    #[test]
    fn a_wire_that_is_full_takes_what_it_carries() {
        let mut rate = WireRate::default();
        rate.follow(200.0, 1.0);
        assert_eq!(rate.follow(100.0, 0.9), Some(100.0), "a path was lost");
        assert_eq!(rate.follow(180.0, 0.9), Some(180.0), "and is back");
    }
}
