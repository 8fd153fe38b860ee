//! Tables and charts of migration results, for people; the numbers themselves are
//! [`bench::BenchReport`], for programs.
//!
//! Everything here is pure: values in, text out.

pub mod bench;
mod findings;
pub mod html;
#[cfg(test)]
mod sample;
pub mod summary;
pub mod table;

pub use bench::{BenchReport, Conditions, GuestConditions, HostConditions, LinkConditions};
