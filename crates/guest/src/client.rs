//! What the host asks of the guest: the heartbeat and the control service.
//!
//! Both reach the guest from a network namespace of choice, so a lab's client need not be a
//! process of its own. Whatever the guest answers is checked: after a failed migration it may be
//! anything.

pub use self::control::{Control, ControlError};
pub use self::gaps::{GAP_MIN, GAPS_LISTED_MAX, Gap, Statistics};
pub use self::heartbeat::{Heartbeat, HeartbeatError};
pub use self::namespace::NamespaceError;

mod control;
mod gaps;
mod heartbeat;
mod namespace;
