//! QMP, QEMU's control protocol: JSON objects, one per line, over a Unix socket.
//!
//! ```text
//! QEMU → greeting          {"QMP": {"version": …}}
//! we   → command           {"execute": "qmp_capabilities", "id": 0}
//! QEMU → response          {"return": {}, "id": 0}      or {"error": {"class": …, "desc": …}, "id": 0}
//! QEMU → event, any time   {"event": "STOP", "data": {…}, "timestamp": {…}}
//! ```
//!
//! `codec` knows the lines and does no I/O; `client` owns the socket.

mod client;
mod codec;
mod error;
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) mod fuzzing;

pub use client::QmpClient;
pub use error::QmpError;
