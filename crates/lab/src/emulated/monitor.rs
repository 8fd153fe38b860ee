//! Commands to QEMU about a running machine, over its QMP socket.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use serde_json::{Value, json};

use super::command_line::{MONITOR, card};
use crate::error::Error;

/// QEMU answers in milliseconds.
const LIMIT: Duration = Duration::from_secs(10);

/// Plugs the cable of a card in, or pulls it. The machine sees its carrier come or go.
pub(super) fn set_link(directory: &Path, cable: &str, is_plugged: bool) -> Result<(), Error> {
    let socket = directory.join(MONITOR);
    let arguments = json!({ "name": card(cable), "up": is_plugged });
    let executed = UnixStream::connect(&socket).and_then(|monitor| execute(&monitor, "set_link", &arguments));
    executed.map_err(Error::io("tell the QEMU at", socket))
}

fn execute(mut monitor: &UnixStream, command: &str, arguments: &Value) -> io::Result<()> {
    monitor.set_read_timeout(Some(LIMIT))?;
    let mut answers = BufReader::new(monitor).lines();
    for (command, arguments) in [("qmp_capabilities", &json!({})), (command, arguments)] {
        writeln!(monitor, "{}", json!({ "execute": command, "arguments": arguments }))?;
        let answer = loop {
            let line = answers.next().ok_or(io::ErrorKind::UnexpectedEof)??;
            if let Some(answer) = answer(&line) {
                break answer;
            }
        };
        answer.map_err(io::Error::other)?;
    }
    Ok(())
}

/// What a line answers to a command; none for a greeting or an event.
fn answer(line: &str) -> Option<Result<(), String>> {
    let message: Value = serde_json::from_str(line).ok()?;
    if let Some(error) = message.get("error") {
        return Some(Err(error["desc"].as_str().unwrap_or("an error without a text").to_owned()));
    }
    message.get("return").map(|_| Ok(()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_told_from_events() {
        assert_eq!(answer(r#"{"return": {}}"#), Some(Ok(())));
        assert_eq!(answer(r#"{"QMP": {"version": {}}}"#), None);
        assert_eq!(answer(r#"{"event": "RTC_CHANGE"}"#), None);
        let error = r#"{"error": {"class": "DeviceNotFound", "desc": "Device 'x' not found"}}"#;
        assert_eq!(answer(error), Some(Err("Device 'x' not found".to_owned())));
    }
}
