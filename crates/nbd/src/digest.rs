//! What tells whether two hosts have the same bytes, without sending them: SHA-256, so that no guest can make different
//! ones look alike.

use ring::digest::{SHA256, digest};

/// The size of a digest, whatever the size of the data.
pub(crate) const DIGEST_BYTES: usize = 32;

/// The digest of some data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Digest(pub(crate) [u8; DIGEST_BYTES]);

impl Digest {
    pub(crate) fn of(data: &[u8]) -> Self {
        let digest = digest(&SHA256, data);
        Self(digest.as_ref().try_into().expect("SHA-256 has so many bytes"))
    }
}
