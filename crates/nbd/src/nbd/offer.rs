//! The server's side of the negotiation: exports whose names only the right client knows, or that let only the right
//! client in.

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::{
    ABILITIES, FIXED_NEWSTYLE, INFO_BLOCK_SIZE, INFO_EXPORT, MAGIC, NO_ZEROES, OPTION_ABORT,
    OPTION_BYTES_MAX, OPTION_EXPORT_NAME, OPTION_GO, OPTION_INFO, OPTION_MAGIC, OPTION_REPLY_MAGIC,
    OPTIONS_MAX, REPLY_ACK, REPLY_INFO, REPLY_INVALID, REPLY_UNKNOWN, REPLY_UNSUPPORTED, take,
};
use crate::error::{Malformed, SplitterError};
use crate::limits::DATA_BYTES_MAX;

/// What QEMU aligns long requests to.
const PREFERRED_BYTES: u32 = 64 << 10;

/// One export.
#[derive(Debug, Clone)]
pub(crate) struct Offered {
    pub(crate) name: String,
    pub(crate) disk_bytes: u64,
}

/// Negotiates until the client has chosen one of these exports, and says which. An error is one client's only.
pub(crate) async fn offer<S>(stream: &mut S, exports: &[Offered]) -> Result<usize, SplitterError>
where
    S: AsyncRead + AsyncWrite + Unpin,
{
    let flags = (FIXED_NEWSTYLE | NO_ZEROES).to_be_bytes();
    stream.write_all(&[&MAGIC[..], &OPTION_MAGIC, &flags].concat()).await.map_err(SplitterError::client)?;
    let flags = stream.read_u32().await.map_err(SplitterError::client)?;
    if flags & !u32::from(FIXED_NEWSTYLE | NO_ZEROES) != 0 || flags & u32::from(FIXED_NEWSTYLE) == 0 {
        return Err(SplitterError::ClientMalformed(Malformed("a client of another style")));
    }
    let has_padding = flags & u32::from(NO_ZEROES) == 0;
    for _ in 0..OPTIONS_MAX {
        let option = read_option(stream).await?;
        let reply = reply_to(&option, exports, has_padding).map_err(SplitterError::ClientMalformed)?;
        stream.write_all(&reply.says).await.map_err(SplitterError::client)?;
        if let Some(chosen) = reply.chosen {
            return Ok(chosen);
        }
    }
    Err(SplitterError::ClientMalformed(Malformed("options without end")))
}

/// What a client asks for before it chooses.
struct ClientOption {
    number: u32,
    data: Vec<u8>,
}

async fn read_option(stream: &mut (impl AsyncRead + Unpin)) -> Result<ClientOption, SplitterError> {
    let mut magic = [0; 8];
    stream.read_exact(&mut magic).await.map_err(SplitterError::client)?;
    let number = stream.read_u32().await.map_err(SplitterError::client)?;
    let length = stream.read_u32().await.map_err(SplitterError::client)?;
    if magic != OPTION_MAGIC || length > OPTION_BYTES_MAX {
        return Err(SplitterError::ClientMalformed(Malformed("no option, or one that is too long")));
    }
    let mut data = vec![0; length as usize];
    stream.read_exact(&mut data).await.map_err(SplitterError::client)?;
    Ok(ClientOption { number, data })
}

/// The answer to an option, and the export that is chosen by it.
struct OptionReply {
    says: Vec<u8>,
    chosen: Option<usize>,
}

fn reply_to(option: &ClientOption, exports: &[Offered], has_padding: bool) -> Result<OptionReply, Malformed> {
    match option.number {
        OPTION_EXPORT_NAME => {
            let (at, disk_bytes) =
                find(exports, &option.data).ok_or(Malformed("a name that was given to nobody"))?;
            let padding: &[u8] = if has_padding { &[0; 124] } else { &[] };
            let says = [&disk_bytes.to_be_bytes()[..], &ABILITIES.to_be_bytes(), padding].concat();
            Ok(OptionReply { says, chosen: Some(at) })
        }
        OPTION_ABORT => Err(Malformed("it wants no export")),
        OPTION_INFO | OPTION_GO => Ok(match asked_name(&option.data).map(|name| find(exports, name)) {
            Ok(Some((at, disk_bytes))) => informed(option.number, at, disk_bytes),
            Ok(None) => refused(option.number, REPLY_UNKNOWN),
            Err(_) => refused(option.number, REPLY_INVALID),
        }),
        _ => Ok(refused(option.number, REPLY_UNSUPPORTED)),
    }
}

fn find(exports: &[Offered], name: &[u8]) -> Option<(usize, u64)> {
    let at = exports.iter().position(|export| export.name.as_bytes() == name)?;
    Some((at, exports[at].disk_bytes))
}

/// The name in INFO or GO, after which comes what the client wants to know about it.
fn asked_name(mut data: &[u8]) -> Result<&[u8], Malformed> {
    let length = u32::from_be_bytes(take(&mut data)?) as usize;
    let (name, mut rest) = data.split_at_checked(length).ok_or(Malformed("a name longer than its option"))?;
    let wishes = usize::from(u16::from_be_bytes(take(&mut rest)?));
    if rest.len() == 2 * wishes { Ok(name) } else { Err(Malformed("wishes of another length")) }
}

fn informed(option: u32, at: usize, disk_bytes: u64) -> OptionReply {
    let export =
        [&INFO_EXPORT.to_be_bytes()[..], &disk_bytes.to_be_bytes(), &ABILITIES.to_be_bytes()].concat();
    let sizes = [1, PREFERRED_BYTES, DATA_BYTES_MAX].map(u32::to_be_bytes).concat();
    let sizes = [&INFO_BLOCK_SIZE.to_be_bytes()[..], &sizes].concat();
    let says = [
        reply(option, REPLY_INFO, &export),
        reply(option, REPLY_INFO, &sizes),
        reply(option, REPLY_ACK, &[]),
    ];
    OptionReply { says: says.concat(), chosen: (option == OPTION_GO).then_some(at) }
}

fn refused(option: u32, why: u32) -> OptionReply {
    OptionReply { says: reply(option, why, &[]), chosen: None }
}

fn reply(option: u32, kind: u32, data: &[u8]) -> Vec<u8> {
    let length = u32::try_from(data.len()).expect("a reply is short");
    let numbers = [option, kind, length].map(u32::to_be_bytes).concat();
    [&OPTION_REPLY_MAGIC.to_be_bytes()[..], &numbers, data].concat()
}

/// Whether some bytes of a client's can be answered, for fuzzing.
#[cfg(any(test, feature = "fuzzing"))]
pub(crate) fn answers(number: u32, data: &[u8], name: &str) -> bool {
    let option = ClientOption { number, data: data.to_vec() };
    let others = ["another", name, "a third"];
    let exports = others.map(|name| Offered { name: name.into(), disk_bytes: 1 << 30 });
    reply_to(&option, &exports, false).is_ok_and(|reply| reply.chosen == Some(1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn go(name: &str, wishes: &[u16]) -> Vec<u8> {
        let length = u32::try_from(name.len()).unwrap().to_be_bytes();
        let count = u16::try_from(wishes.len()).unwrap().to_be_bytes();
        let wishes: Vec<u8> = wishes.iter().flat_map(|wish| wish.to_be_bytes()).collect();
        [&length[..], name.as_bytes(), &count, &wishes].concat()
    }

    #[test]
    fn only_who_knows_the_name_gets_the_export() {
        assert!(answers(OPTION_GO, &go("secret", &[]), "secret"));
        assert!(answers(OPTION_GO, &go("secret", &[0, 3]), "secret"));
        assert!(answers(OPTION_EXPORT_NAME, b"secret", "secret"));
        for (number, data) in [
            (OPTION_GO, go("", &[])),
            (OPTION_GO, go("secret2", &[])),
            (OPTION_GO, b"secret".to_vec()),
            (OPTION_INFO, go("secret", &[])),
            (OPTION_EXPORT_NAME, vec![]),
            (8, vec![]),
        ] {
            assert!(!answers(number, &data, "secret"), "{number}");
        }
    }

    proptest! {
        #[test]
        fn no_option_breaks_it(number in 0..12_u32, data: Vec<u8>) {
            prop_assert!(!answers(number, &data, "a name that chance does not find"));
        }
    }
}
