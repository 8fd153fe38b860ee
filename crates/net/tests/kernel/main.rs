//! The crate against the real kernel, in network namespaces of its own.

#![expect(clippy::unwrap_used, reason = "clippy.toml allows it in test functions; these are their helpers")]

mod announcements;
mod conntrack;
mod hosts;
mod links;
mod multichannel;
