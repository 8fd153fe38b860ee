//! Messages of a local client, which is trusted no more than necessary.

use super::DISK_BYTES;
use crate::command::{Command, Operation};
use crate::limits::DATA_BYTES_MAX;
use crate::nbd::{self, REPLY_BYTES, REQUEST_BYTES, Reply, Request};

/// The answer to an option.
pub const CLIENT_HOLDS_BYTES: usize = 1 << 20;

const NAME: &str = "a name that is not guessed";

/// An option, a request, and a reply of a server's, from the same bytes.
///
/// Holds: only the right name opens the disk; what is asked lies within it; what is understood is said again as it was.
pub fn client(data: &[u8]) {
    if let Some((number, option)) = data.split_first() {
        let is_open = nbd::answers((*number).into(), option, NAME);
        let is_named = option.windows(NAME.len()).any(|name| name == NAME.as_bytes());
        assert!(is_named || !is_open);
    }
    if let Some(request) = data.first_chunk::<REQUEST_BYTES>() {
        request_holds(request);
    }
    if let Some(reply) = data.first_chunk::<REPLY_BYTES>()
        && let Ok(reply) = nbd::decode_reply(reply)
    {
        assert_eq!(nbd::decode_reply(&nbd::encode_reply(reply)), Ok(reply));
    }
}

fn request_holds(request: &[u8; REQUEST_BYTES]) {
    match nbd::decode_request(request, DISK_BYTES) {
        Ok(Request::Command { cookie, command }) => {
            assert!(command.end() <= DISK_BYTES && command.held_bytes() <= DATA_BYTES_MAX as usize);
            let again = nbd::decode_request(&nbd::encode_request(cookie, &command), DISK_BYTES);
            assert_eq!(again, Ok(Request::Command { cookie, command }));
        }
        Ok(Request::Unserved(unserved)) => assert!(unserved.data_bytes <= DATA_BYTES_MAX),
        Ok(Request::Disconnect) | Err(_) => {}
    }
}

/// GO with the right name, requests of each kind, a reply.
pub fn client_seeds() -> Vec<Vec<u8>> {
    let length = u32::try_from(NAME.len()).expect("it is short").to_be_bytes();
    let go = [&[7][..], &length, NAME.as_bytes(), &[0, 1, 0, 3]].concat();
    let name = [&[1], NAME.as_bytes()].concat();
    let command = |operation| Command { operation, offset: 4096, length: 4096, ..Command::FLUSH };
    let operations = [Operation::Read, Operation::Write, Operation::WriteZeroes, Operation::Trim];
    let mut seeds = vec![go, name, nbd::DISCONNECT.into(), nbd::encode_request(1, &Command::FLUSH).into()];
    seeds.extend(operations.map(|operation| nbd::encode_request(7, &command(operation)).into()));
    seeds.push(nbd::encode_reply(Reply { cookie: 9, error: None }).into());
    seeds
}
