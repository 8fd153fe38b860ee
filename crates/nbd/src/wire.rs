//! Reading and writing with a deadline on every step.

use std::future::Future;
use std::io::{self, IoSlice};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::time::timeout;

async fn within<T>(patience: Duration, step: impl Future<Output = io::Result<T>>) -> io::Result<T> {
    timeout(patience, step).await.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))
}

/// Fills all of it. Any progress is enough for another while.
pub(crate) async fn read_full(
    reader: &mut (impl AsyncRead + Unpin),
    mut bytes: &mut [u8],
    patience: Duration,
) -> io::Result<()> {
    while !bytes.is_empty() {
        let count = within(patience, reader.read(bytes)).await?;
        if count == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        bytes = &mut bytes[count..];
    }
    Ok(())
}

/// Writes a header, and what belongs to it, as one. Any progress is enough for another while.
pub(crate) async fn write_both(
    writer: &mut (impl AsyncWrite + Unpin),
    header: &[u8],
    payload: &[u8],
    patience: Duration,
) -> io::Result<()> {
    let mut slices = [IoSlice::new(header), IoSlice::new(payload)];
    let mut left = &mut slices[..];
    // What is empty counts as written.
    IoSlice::advance_slices(&mut left, 0);
    while !left.is_empty() {
        let count = within(patience, writer.write_vectored(left)).await?;
        if count == 0 {
            return Err(io::ErrorKind::WriteZero.into());
        }
        IoSlice::advance_slices(&mut left, count);
    }
    // A TLS stream may keep it back otherwise.
    within(patience, writer.flush()).await
}

/// Waits as long as it takes for a header's first byte, and then as long for others as patience lasts. None at the end
/// of the stream.
pub(crate) async fn read_next<const N: usize>(
    reader: &mut (impl AsyncRead + Unpin),
    patience: Duration,
) -> io::Result<Option<[u8; N]>> {
    let mut header = [0; N];
    let count = reader.read(&mut header).await?;
    if count == 0 {
        return Ok(None);
    }
    read_full(reader, &mut header[count..], patience).await?;
    Ok(Some(header))
}
