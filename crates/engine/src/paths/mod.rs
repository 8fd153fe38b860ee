//! Which link of one host reaches which of the other, and how well.

pub(crate) mod pairing;
pub mod path;
pub mod path_record;
pub mod speed;
pub mod watch;
