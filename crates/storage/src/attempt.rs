//! What becomes of one method.

use std::io;

use rustix::io::Errno;

/// A method was tried.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Attempt {
    /// All is there.
    Done,
    /// This storage cannot, and why: the next method is tried.
    Unable(String),
}

/// What the kernel says where it, or the storage, has no such thing.
const UNABLE: [Errno; 7] =
    [Errno::OPNOTSUPP, Errno::NOTTY, Errno::NOSYS, Errno::INVAL, Errno::XDEV, Errno::TXTBSY, Errno::BADF];

/// A refusal that leaves other methods to try; any other error ends it all.
pub(crate) fn unable(error: io::Error) -> io::Result<Attempt> {
    let errno = error.raw_os_error().map(Errno::from_raw_os_error);
    match errno.filter(|errno| UNABLE.contains(errno)) {
        Some(Errno::XDEV) => Ok(Attempt::Unable("they are on two file systems".into())),
        Some(_) => Ok(Attempt::Unable("the storage does not offer it".into())),
        None => Err(error),
    }
}
