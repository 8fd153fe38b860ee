//! Messages of a QEMU, which a guest may have taken over.

use serde_json::json;

use super::codec::{CodecError, Execution, LINE_BYTES_MAX, LineBuffer, decode, encode};

/// A line that has come in part, one that is cut off from it, and what is read of it.
pub const QMP_HOLDS_BYTES: usize = 4 << 20;

/// What comes over a control socket, in pieces as long as the first byte says.
///
/// Holds: lines are what was sent, in their order, and none is longer than it may be. Each is understood or refused.
pub fn qmp(data: &[u8]) {
    let (first, stream) = data.split_first().unwrap_or((&0, &[]));
    let (mut lines, mut cut) = (LineBuffer::default(), 0);
    for piece in stream.chunks(1 + usize::from(*first)) {
        lines.push(piece);
        loop {
            match lines.next_line() {
                Ok(Some(line)) => {
                    assert!(line.len() <= LINE_BYTES_MAX);
                    assert!(stream[cut..].starts_with(&line) && stream[cut + line.len()] == b'\n');
                    cut += line.len() + 1;
                    drop(decode(&line));
                }
                Ok(None) => break,
                Err(error) => {
                    assert_eq!(error, CodecError::LineTooLong);
                    return;
                }
            }
        }
    }
    assert!(!stream[cut..].contains(&b'\n'), "a whole line was kept back");
}

/// A greeting, answers and events, and what we would send.
pub fn qmp_seeds() -> Vec<Vec<u8>> {
    let said = [
        json!({"QMP": {"version": {"qemu": {"micro": 22, "minor": 2, "major": 7}, "package": ""}, "capabilities": []}}),
        json!({"return": {"status": "running"}, "id": 1}),
        json!({"error": {"class": "GenericError", "desc": "no"}, "id": 2}),
        json!({"event": "MIGRATION", "data": {"status": "completed"}, "timestamp": {"seconds": 1, "microseconds": 2}}),
    ];
    let lines: Vec<String> = said.iter().map(|line| format!("{line}\n")).collect();
    vec![
        [&[255], lines.concat().as_bytes()].concat(),
        [&[6], lines.concat().as_bytes()].concat(),
        [&[40], &encode("migrate", &json!({"uri": "defer"}), 3, Execution::InTurn)[..]].concat(),
    ]
}
