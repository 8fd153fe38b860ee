//! Requests to the kernel, each with a deadline.

use std::future::Future;
use std::time::Duration;

use futures_util::{Stream, TryStreamExt};
use rustix::io::Errno;

use crate::Error;

/// The kernel answers from memory; a longer wait means that the connection's task is starved
/// or that a driver hangs, and the caller must hear of it.
const REQUEST_DEADLINE: Duration = Duration::from_secs(5);

/// Before a list is asked for again; one takes the kernel well below 1 ms.
pub(crate) const BUSY_PAUSE: Duration = Duration::from_millis(1);

/// Waits for `request`, whose purpose is `operation`, until the deadline.
pub(crate) async fn within_deadline<T>(
    operation: &str,
    request: impl Future<Output = T>,
) -> Result<T, Error> {
    tokio::time::timeout(REQUEST_DEADLINE, request)
        .await
        .map_err(|_| Error::Timeout { operation: operation.to_owned(), after: REQUEST_DEADLINE })
}

/// Carries out a request that changes something.
pub(crate) async fn execute(
    operation: &str,
    request: impl Future<Output = Result<(), rtnetlink::Error>>,
) -> Result<(), Error> {
    within_deadline(operation, request).await?.map_err(|error| Error::netlink(operation, error))
}

/// Collects every answer to a request that reads something.
///
/// The kernel lists one thing at a time to each socket and refuses another with EBUSY, so a request
/// that comes while another is being answered is sent again.
pub(crate) async fn collect<T, S>(operation: &str, request: impl Fn() -> S) -> Result<Vec<T>, Error>
where
    S: Stream<Item = Result<T, rtnetlink::Error>>,
{
    within_deadline(operation, async {
        loop {
            let answers = request().try_collect().await.map_err(|error| Error::netlink(operation, error));
            match answers {
                Err(error) if error.errno() == Some(Errno::BUSY) => tokio::time::sleep(BUSY_PAUSE).await,
                answers => return answers,
            }
        }
    })
    .await?
}
