//! Certificates of hosts and operators, and the TLS made of them.
//!
//! One certificate authority per fleet signs one certificate per host and one per operator.
//! A certificate says who its holder is in a URI among its alternative names:
//!
//! | holder | URI | DNS name | may be |
//! |---|---|---|---|
//! | host | `drainpipe:host:<name>` | `<name>` | TLS server and client |
//! | operator | `drainpipe:operator:<name>` | none | TLS client |
//!
//! A connection is made to a *name*: whoever answers at the address must hold the certificate of
//! the host that was meant. Addresses are in no certificate, so a host may change its own.

pub mod authority;
mod credential;
mod explain;
mod files;
mod identity;
mod joined;
mod name;
mod narrowed;
mod one_host;
mod peer;
mod pinned;
mod revocation;
mod suites;
mod token;
mod validity;

pub use explain::{explain, explain_join, is_for_certificates};
pub use files::{FileError, check_unchangeable};
pub use identity::{Identity, LoadError};
pub use joined::{JoinedFiles, KeyRequest};
pub use name::{InvalidName, check_name};
pub use peer::{Peer, PeerError};
pub use pinned::{JOIN_PROTOCOL, join_config};
pub use revocation::Revocations;
pub use token::{Fingerprint, InvalidToken, JoinSecret, JoinToken};
pub use validity::Validity;
