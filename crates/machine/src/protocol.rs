//! What is said over a port: one program's run, from [`Message::Open`] to [`Message::Ended`].
//!
//! ```text
//!   outside                          machine
//!   Open ──────────────────────────▶ starts the program
//!        ◀────────────────────────── Started, or Refused
//!   Input ─────────────────────────▶ writes it to the program
//!        ◀────────────────────────── InputTaken: the next may come
//!   InputEnd ──────────────────────▶ closes its input
//!        ◀──────────── Output, Errors, …, Ended
//!   disconnects                      ends what has not ended
//! ```
//!
//! There is one [`Message::Input`] on its way at most, so the machine never has to keep more than that for a program that
//! does not read, and always reads what comes next.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use crate::frames;

/// What a message carries of a program's input or output at most.
pub const CHUNK_BYTES: usize = 16 << 10;

/// Tells one user of a port from the next.
pub type Session = u32;

/// A program to run.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Request {
    /// The program, looked up in the machine's `PATH`, and its arguments.
    pub words: Vec<String>,
    /// The directory that it starts in, if the machine has it; else it is the root.
    pub directory: PathBuf,
}

/// What either side says.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// Run this.
    Open(Request),
    /// For the program's standard input.
    Input(Vec<u8>),
    /// There is no more input.
    InputEnd,
    /// It runs.
    Started,
    /// It cannot be run, for this reason.
    Refused(String),
    /// The program has taken its input.
    InputTaken,
    /// From its standard output.
    Output(Vec<u8>),
    /// From its standard error.
    Errors(Vec<u8>),
    /// It has ended with this code, or with 128 and the number of a signal, as a shell says it.
    Ended(i32),
}

impl Message {
    /// As a frame of this session.
    pub fn encode(&self, session: Session) -> Vec<u8> {
        let (kind, payload) = match self {
            Self::Open(request) => (0, serde_json::to_vec(request).expect("words are JSON")),
            Self::Input(bytes) => (1, bytes.clone()),
            Self::InputEnd => (2, vec![]),
            Self::Started => (3, vec![]),
            Self::Refused(reason) => (4, reason.clone().into_bytes()),
            Self::InputTaken => (5, vec![]),
            Self::Output(bytes) => (6, bytes.clone()),
            Self::Errors(bytes) => (7, bytes.clone()),
            Self::Ended(code) => (8, code.to_le_bytes().to_vec()),
        };
        let mut content = session.to_le_bytes().to_vec();
        content.push(kind);
        content.extend(payload);
        frames::encode(&content)
    }

    /// What a frame says, and in which session; `None` if it says nothing.
    pub fn decode(content: &[u8]) -> Option<(Session, Self)> {
        let (session, content) = content.split_first_chunk()?;
        let (kind, payload) = content.split_first()?;
        let message = match kind {
            0 => Self::Open(serde_json::from_slice(payload).ok()?),
            1 => Self::Input(payload.to_vec()),
            2 => Self::InputEnd,
            3 => Self::Started,
            4 => Self::Refused(String::from_utf8_lossy(payload).into_owned()),
            5 => Self::InputTaken,
            6 => Self::Output(payload.to_vec()),
            7 => Self::Errors(payload.to_vec()),
            8 => Self::Ended(i32::from_le_bytes(payload.try_into().ok()?)),
            _ => return None,
        };
        Some((Session::from_le_bytes(*session), message))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::frames::Decoder;

    fn messages() -> impl Strategy<Value = Message> {
        prop_oneof![
            (prop::collection::vec(any::<String>(), 1..4), any::<String>())
                .prop_map(|(words, directory)| Message::Open(Request { words, directory: directory.into() })),
            any::<Vec<u8>>().prop_map(Message::Input),
            Just(Message::InputEnd),
            Just(Message::Started),
            any::<String>().prop_map(Message::Refused),
            Just(Message::InputTaken),
            any::<Vec<u8>>().prop_map(Message::Output),
            any::<Vec<u8>>().prop_map(Message::Errors),
            any::<i32>().prop_map(Message::Ended),
        ]
    }

    proptest! {
        #[test]
        fn messages_arrive_as_they_were(session: Session, message in messages()) {
            let frame = Decoder::default().push(&message.encode(session)).pop().unwrap();
            prop_assert_eq!(Message::decode(&frame), Some((session, message)));
        }

        #[test]
        fn noise_is_no_panic(bytes: Vec<u8>) {
            let _ = Message::decode(&bytes);
        }
    }
}
