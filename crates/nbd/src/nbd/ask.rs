//! The client's side of the negotiation.

use std::io;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::{
    ABILITIES, FIXED_NEWSTYLE, INFO_EXPORT, MAGIC, NO_ZEROES, OPTION_BYTES_MAX, OPTION_GO, OPTION_MAGIC,
    OPTION_REPLY_MAGIC, OPTIONS_MAX, READ_ONLY, REPLY_ACK, REPLY_ERROR, REPLY_INFO, REPLY_UNKNOWN, take,
};
use crate::error::{Malformed, SplitterError};

/// Chooses an export, which must be of this size and writable.
///
/// The client does not ask for block sizes: then the server itself aligns what is not aligned.
pub(crate) async fn open<S>(stream: &mut S, name: &str, disk_bytes: u64) -> Result<(), SplitterError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let broke = |error: io::Error| SplitterError::Open(error.to_string());
    let mut magic = [0; 16];
    stream.read_exact(&mut magic).await.map_err(broke)?;
    let flags = stream.read_u16().await.map_err(broke)?;
    if magic[..8] != MAGIC || magic[8..] != OPTION_MAGIC || flags & FIXED_NEWSTYLE == 0 {
        return Err(SplitterError::Open("no NBD server of the fixed newstyle is there".into()));
    }
    let flags = u32::from(flags & (FIXED_NEWSTYLE | NO_ZEROES));
    stream.write_all(&[&flags.to_be_bytes()[..], &go(name)].concat()).await.map_err(broke)?;
    let mut export = None;
    for _ in 0..OPTIONS_MAX {
        let (kind, data) = read_reply(stream).await?;
        match kind {
            REPLY_INFO => {
                let named = export_of_info(&data).map_err(|error| SplitterError::Open(error.to_string()))?;
                export = named.or(export);
            }
            REPLY_ACK => return check(export, disk_bytes),
            REPLY_UNKNOWN => return Err(SplitterError::Open("the server has no export of that name".into())),
            kind if kind & REPLY_ERROR != 0 => {
                return Err(SplitterError::Open(format!("the server refused: error {}", kind - REPLY_ERROR)));
            }
            _ => return Err(SplitterError::Open("the server gave an unknown reply".into())),
        }
    }
    Err(SplitterError::Open("the server told without end".into()))
}

/// Size and flags of an export.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Export {
    size_bytes: u64,
    flags: u16,
}

fn go(name: &str) -> Vec<u8> {
    let length = u32::try_from(name.len()).expect("a name is short");
    let data = [&length.to_be_bytes()[..], name.as_bytes(), &[0, 0]].concat();
    let numbers = [OPTION_GO, length + 6].map(u32::to_be_bytes).concat();
    [&OPTION_MAGIC[..], &numbers, &data].concat()
}

async fn read_reply(stream: &mut (impl AsyncRead + Unpin)) -> Result<(u32, Vec<u8>), SplitterError> {
    let broke = |error: io::Error| SplitterError::Open(error.to_string());
    let magic = stream.read_u64().await.map_err(broke)?;
    let option = stream.read_u32().await.map_err(broke)?;
    let kind = stream.read_u32().await.map_err(broke)?;
    let length = stream.read_u32().await.map_err(broke)?;
    if magic != OPTION_REPLY_MAGIC || option != OPTION_GO || length > OPTION_BYTES_MAX {
        return Err(SplitterError::Open("the server's reply is none".into()));
    }
    let mut data = vec![0; length as usize];
    stream.read_exact(&mut data).await.map_err(broke)?;
    Ok((kind, data))
}

/// What an INFO says of the export, if it is about that.
fn export_of_info(mut data: &[u8]) -> Result<Option<Export>, Malformed> {
    if u16::from_be_bytes(take(&mut data)?) != INFO_EXPORT {
        return Ok(None);
    }
    let size_bytes = u64::from_be_bytes(take(&mut data)?);
    let flags = u16::from_be_bytes(take(&mut data)?);
    if data.is_empty() {
        Ok(Some(Export { size_bytes, flags }))
    } else {
        Err(Malformed("an export too long"))
    }
}

fn check(export: Option<Export>, disk_bytes: u64) -> Result<(), SplitterError> {
    let Some(Export { size_bytes, flags }) = export else {
        return Err(SplitterError::Open("the server did not say how large the disk is".into()));
    };
    if size_bytes != disk_bytes {
        let wrong = format!("the disk there has {size_bytes} bytes, but must have {disk_bytes}");
        return Err(SplitterError::Open(wrong));
    }
    if flags & READ_ONLY != 0 {
        return Err(SplitterError::Open("it is read-only there; export it writable".into()));
    }
    if flags & ABILITIES != ABILITIES {
        return Err(SplitterError::Open("the server lacks flushes, FUA, TRIM or WRITE_ZEROES".into()));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const DISK: Export = Export { size_bytes: 1 << 20, flags: ABILITIES };

    #[test]
    fn only_the_right_disk_is_opened() {
        assert!(check(Some(DISK), 1 << 20).is_ok());
        assert!(check(Some(DISK), 1 << 21).is_err());
        assert!(check(Some(Export { flags: ABILITIES | READ_ONLY, ..DISK }), 1 << 20).is_err());
        assert!(check(Some(Export { flags: 1, ..DISK }), 1 << 20).is_err());
        assert!(check(None, 1 << 20).is_err());
    }

    proptest! {
        #[test]
        fn no_information_breaks_it(data: Vec<u8>) {
            if let Ok(Some(_)) = export_of_info(&data) {
                prop_assert!(data.len() == 12 && data[..2] == [0, 0]);
            }
        }
    }
}
