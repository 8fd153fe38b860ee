//! Lines of QMP, without any I/O.

use std::time::{Duration, SystemTime};

use drainpipe_hypervisor::{Happening, Version, VmEvent};
use serde::Deserialize;
use serde_json::{Map, Value};

/// The longest line accepted. The longest that QEMU 10.0 sends, its own schema, has 236 kB.
pub(super) const LINE_BYTES_MAX: usize = 1 << 20;

/// One line from QEMU.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Message {
    Greeting(Version),
    Response { id: u64, result: Result<Value, CommandError> },
    Event(VmEvent),
}

/// QEMU's refusal of a command.
#[derive(Debug, Clone, PartialEq, Deserialize)]
pub(super) struct CommandError {
    pub(super) class: String,
    pub(super) desc: String,
}

/// Why a line, or a stream of them, is not QMP.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub(super) enum CodecError {
    #[error("line of more than {LINE_BYTES_MAX} bytes")]
    LineTooLong,
    #[error("not a JSON object: {0}")]
    NotJson(String),
    #[error("neither greeting, response nor event")]
    UnknownMessage,
    #[error("`{0}` does not have the form that QMP gives it")]
    WrongForm(&'static str),
}

/// Reads one line.
pub(super) fn decode(line: &[u8]) -> Result<Message, CodecError> {
    let mut object: Map<String, Value> =
        serde_json::from_slice(line).map_err(|error| CodecError::NotJson(error.to_string()))?;
    if let Some(name) = object.remove("event") {
        let at = object.remove("timestamp").and_then(|timestamp| decode_timestamp(&timestamp));
        return decode_event(name, object.get("data"), at);
    }
    if let Some(greeting) = object.remove("QMP") {
        return decode_greeting(&greeting);
    }
    if let Some(value) = object.remove("return") {
        return Ok(Message::Response { id: decode_id(&object)?, result: Ok(value) });
    }
    if let Some(error) = object.remove("error") {
        let error = serde_json::from_value(error).map_err(|_| CodecError::WrongForm("error"))?;
        return Ok(Message::Response { id: decode_id(&object)?, result: Err(error) });
    }
    Err(CodecError::UnknownMessage)
}

fn decode_event(name: Value, data: Option<&Value>, at: Option<SystemTime>) -> Result<Message, CodecError> {
    let Value::String(name) = name else {
        return Err(CodecError::WrongForm("event"));
    };
    let status = data.and_then(|data| data.get("status")?.as_str());
    let what = match (&*name, status) {
        ("MIGRATION", Some(status)) => Happening::Migration(status.to_owned().into()),
        ("RESUME", _) => Happening::Resumed,
        ("SHUTDOWN", _) => Happening::Ending,
        _ => Happening::Other(name),
    };
    Ok(Message::Event(VmEvent { what, at }))
}

/// QEMU writes −1 for what it cannot read.
fn decode_timestamp(timestamp: &Value) -> Option<SystemTime> {
    let part = |name: &str| timestamp.get(name)?.as_u64();
    let since_epoch =
        Duration::from_secs(part("seconds")?).checked_add(Duration::from_micros(part("microseconds")?))?;
    SystemTime::UNIX_EPOCH.checked_add(since_epoch)
}

fn decode_greeting(greeting: &Value) -> Result<Message, CodecError> {
    let version = greeting.pointer("/version/qemu").ok_or(CodecError::WrongForm("QMP"))?;
    Version::deserialize(version).map(Message::Greeting).map_err(|_| CodecError::WrongForm("QMP"))
}

fn decode_id(object: &Map<String, Value>) -> Result<u64, CodecError> {
    object.get("id").and_then(Value::as_u64).ok_or(CodecError::WrongForm("id"))
}

/// When QEMU is to obey.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Execution {
    /// When its main thread comes to it.
    InTurn,
    /// At once, by another thread. Few commands may be given so.
    OutOfBand,
}

/// Writes one command as a line.
pub(super) fn encode(command: &str, arguments: &Value, id: u64, execution: Execution) -> Vec<u8> {
    let execute = match execution {
        Execution::InTurn => "execute",
        Execution::OutOfBand => "exec-oob",
    };
    let mut object = serde_json::json!({ execute: command, "id": id });
    if !arguments.is_null() {
        object["arguments"] = arguments.clone();
    }
    let mut line = object.to_string().into_bytes();
    line.push(b'\n');
    line
}

/// Cuts a stream of bytes into lines, and holds at most one line of [`LINE_BYTES_MAX`] and what
/// was pushed after it.
#[derive(Debug, Default)]
pub(super) struct LineBuffer {
    bytes: Vec<u8>,
    /// Bytes at the start known to hold no line end, so that a long line is searched once.
    searched: usize,
}

impl LineBuffer {
    pub(super) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// The next whole line without its end, if there is one.
    pub(super) fn next_line(&mut self) -> Result<Option<Vec<u8>>, CodecError> {
        let end = self.bytes[self.searched..].iter().position(|byte| *byte == b'\n');
        match end.map(|offset| self.searched + offset) {
            Some(end) if end <= LINE_BYTES_MAX => {
                let rest = self.bytes.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.bytes, rest);
                line.pop();
                self.searched = 0;
                Ok(Some(line))
            }
            None if self.bytes.len() <= LINE_BYTES_MAX => {
                self.searched = self.bytes.len();
                Ok(None)
            }
            _ => Err(CodecError::LineTooLong),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use drainpipe_hypervisor::MigrationStatus;

    use super::*;

    fn decode_json(value: &Value) -> Result<Message, CodecError> {
        decode(value.to_string().as_bytes())
    }

    #[test]
    fn reads_the_greeting_of_debian_12() {
        let greeting = br#"{"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": "Debian 1:7.2+dfsg-7+deb12u18+b3"}, "capabilities": ["oob"]}}"#;
        assert_eq!(decode(greeting), Ok(Message::Greeting(Version { major: 7, minor: 2, micro: 22 })));
    }

    #[test]
    fn reads_responses_and_refusals() {
        assert_eq!(
            decode_json(&json!({"return": {"a": 1}, "id": 7})),
            Ok(Message::Response { id: 7, result: Ok(json!({"a": 1})) })
        );
        let refusal = CommandError { class: "GenericError".into(), desc: "no".into() };
        assert_eq!(
            decode_json(&json!({"error": {"class": "GenericError", "desc": "no"}, "id": 8})),
            Ok(Message::Response { id: 8, result: Err(refusal) })
        );
    }

    #[test]
    fn keeps_events_of_future_versions() {
        let Ok(Message::Event(event)) = decode_json(&json!({"event": "FROM_THE_FUTURE"})) else {
            panic!("an unknown event is an event")
        };
        assert_eq!(event.what, Happening::Other("FROM_THE_FUTURE".into()));
    }

    #[test]
    fn events_are_in_the_words_of_every_hypervisor() {
        let what = |line: Value| match decode_json(&line) {
            Ok(Message::Event(event)) => event.what,
            other => panic!("{other:?}"),
        };
        let migration = |data: Value| what(json!({ "event": "MIGRATION", "data": data }));
        assert_eq!(
            migration(json!({ "status": "pre-switchover" })),
            Happening::Migration(MigrationStatus::PreSwitchover)
        );
        assert_eq!(migration(json!({})), Happening::Other("MIGRATION".into()));
        assert_eq!(what(json!({ "event": "RESUME" })), Happening::Resumed);
        assert_eq!(what(json!({ "event": "SHUTDOWN", "data": { "guest": true } })), Happening::Ending);
        assert_eq!(what(json!({ "event": "STOP" })), Happening::Other("STOP".into()));
    }

    #[test]
    fn an_event_has_the_time_that_qemu_gives_it() {
        let at = |timestamp: Value| match decode_json(&json!({"event": "RESUME", "timestamp": timestamp})) {
            Ok(Message::Event(event)) => event.at,
            other => panic!("{other:?}"),
        };
        let expected = SystemTime::UNIX_EPOCH + Duration::from_millis(1_700_000_000_250);
        assert_eq!(at(json!({"seconds": 1_700_000_000, "microseconds": 250_000})), Some(expected));
        for unknown in [
            json!({"seconds": -1, "microseconds": -1}),
            json!({"seconds": u64::MAX, "microseconds": u64::MAX}),
            json!({"seconds": 1}),
            json!(null),
        ] {
            assert_eq!(at(unknown.clone()), None, "{unknown}");
        }
    }

    #[test]
    fn refuses_what_is_not_qmp() {
        for value in [
            json!({}),
            json!({"event": 1}),
            json!({"return": {}}),
            json!({"return": {}, "id": "x"}),
            json!({"error": "no", "id": 1}),
            json!({"QMP": {}}),
            json!({"QMP": null}),
            json!({"QMP": [1]}),
            json!([1]),
        ] {
            assert!(decode_json(&value).is_err(), "{value}");
        }
    }

    #[test]
    fn refuses_an_endless_line() {
        let mut buffer = LineBuffer::default();
        buffer.push(&vec![b'x'; LINE_BYTES_MAX]);
        assert_eq!(buffer.next_line(), Ok(None));
        buffer.push(b"x");
        assert_eq!(buffer.next_line(), Err(CodecError::LineTooLong));
    }

    proptest! {
        #[test]
        fn decoding_never_panics(line in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = decode(&line);
        }

        #[test]
        fn a_command_is_one_line(command in ".*", text in ".*", id in any::<u64>()) {
            let line = encode(&command, &json!({ "text": text }), id, Execution::InTurn);
            prop_assert_eq!(line.iter().position(|byte| *byte == b'\n'), Some(line.len() - 1));
            let back: Value = serde_json::from_slice(&line).expect("our own JSON");
            prop_assert_eq!(&back["execute"], &json!(command));
            prop_assert_eq!(&back["arguments"]["text"], &json!(text));
            prop_assert_eq!(&back["id"], &json!(id));
        }

        #[test]
        fn lines_do_not_depend_on_how_the_stream_is_cut(
            lines in proptest::collection::vec("[^\n]{0,40}", 0..10),
            chunk in 1_usize..30,
        ) {
            let stream = lines.iter().fold(String::new(), |stream, line| stream + line + "\n");
            let mut buffer = LineBuffer::default();
            let mut seen = Vec::new();
            for bytes in stream.as_bytes().chunks(chunk) {
                buffer.push(bytes);
                while let Some(line) = buffer.next_line().expect("short lines") {
                    seen.push(String::from_utf8(line).expect("cut at line ends only"));
                }
            }
            prop_assert_eq!(seen, lines);
        }
    }
}
