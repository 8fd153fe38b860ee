//! How memory goes over the paths: by which option, encrypted or not, compressed or not, and how long that takes.

pub mod codec;
pub mod convergence;
pub mod encryption;
pub mod experience;
pub mod option;
pub mod prediction;
pub mod relayed;
pub mod throttle;
