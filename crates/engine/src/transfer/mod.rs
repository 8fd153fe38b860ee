//! How memory goes over the paths: encrypted or not, packed or not, how much of it may wait on its way, how long the
//! VM is paused at the end, and how it is throttled if its memory gets dirty too fast.

pub mod codec;
pub mod downtime;
pub mod encryption;
pub mod memory_sample;
pub mod queue;
pub mod relayed;
pub mod throttle;
pub mod transferred;
