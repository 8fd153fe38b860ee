//! What this host's journal may be believed: docs/decisions/0051.
//!
//! ```text
//! heard      what other hosts have told of their journals
//! telling    tells them of this one, and hears what they know of it
//! judging    journal, witnesses and live QEMUs compared, when the agent starts
//! unbelieved what an agent says and does whose journal is not believed
//! adoption   an operator has this host go on with what is there
//! beside     what stands beside a QEMU in the runtime directory, for that
//! holding    whether another host has a VM that is to be started here
//! ```

mod adoption;
pub(crate) mod beside;
mod heard;
pub(crate) mod holding;
mod judging;
mod telling;
mod unbelieved;

pub(crate) use self::adoption::nothing_to_adopt;
pub(crate) use self::heard::Heard;
pub(crate) use self::judging::judge;
pub(crate) use self::telling::{Proof, keep_telling};
pub(crate) use self::unbelieved::{Answering, starting, unbelieved};
