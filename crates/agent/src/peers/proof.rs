//! Whether this host's journal may be believed: docs/decisions/0051.
//!
//! ```text
//! heard    what other hosts have told of their journals
//! telling  tells them of this one, and hears what they know of it
//! judging  journal, witnesses and live QEMUs compared, when the agent starts
//! adoption an operator has this host go on with what is there
//! ```

mod adoption;
mod heard;
mod judging;
mod telling;

pub(crate) use self::adoption::{adopt, nothing_to_adopt, view};
pub(crate) use self::heard::Heard;
pub(crate) use self::judging::{Judged, judge};
pub(crate) use self::telling::{ANSWER_DEADLINE, Proof, keep_telling};
