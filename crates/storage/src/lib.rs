//! Large disks, made and copied by the storage itself where it can, and measured: who moved the bytes is never taken
//! on trust.
//!
//! [`method`] decides, by what both ends are, what is tried and in which order. The other modules do it.

mod attempt;
pub mod copy;
mod copy_range;
pub mod create;
pub mod device;
mod end;
mod error;
mod extended_copy;
mod in_use;
pub mod measured;
pub mod method;
mod new_file;
pub mod outcome;
pub mod pace;
mod pieces;
mod reflink;
mod refusals;
pub mod size;
pub mod task;
mod threads;
mod traffic;
mod zero_runs;
mod zeroes;

pub use copy::{CopyRequest, copy};
pub use create::{CreateRequest, create};
pub use device::IdleDevice;
pub use error::DiskError;
pub use outcome::DiskResult;
pub use task::Task;
