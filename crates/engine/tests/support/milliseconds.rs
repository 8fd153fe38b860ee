//! Time as simulations count it.

use std::time::Duration;

/// This duration in ms.
pub(crate) const fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
