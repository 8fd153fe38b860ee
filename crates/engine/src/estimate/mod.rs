//! Estimates of a migration before it has begun, or of one whose rounds do not end.
//!
//! ```text
//! prediction    how long it takes by its plan
//! convergence   whether its rounds come to an end
//! load          what a VM has to send
//! sending       how long bytes take over the paths, and the steps beside them
//! cores         what a migration has of two hosts' cores
//! experience    what earlier migrations say of compression
//! ```

pub mod convergence;
pub mod cores;
pub mod experience;
pub(crate) mod load;
pub mod prediction;
pub mod sending;
