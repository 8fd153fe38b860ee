//! The QMP client against sockets that are dead, hostile or slow.

use std::path::PathBuf;
use std::time::Duration;

use drainpipe_hypervisor::Happening;
use drainpipe_hypervisor_qemu::qmp::{QmpClient, QmpError};
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::broadcast::error::RecvError;

use crate::host::DEADLINE;

const GREETING: &str = "{\"QMP\": {\"version\": {\"qemu\": {\"major\": 9, \"minor\": 0, \"micro\": 1}}}}\n";
const BRIEF: Duration = Duration::from_millis(100);

struct FakeQemu {
    listener: UnixListener,
    path: PathBuf,
    _directory: tempfile::TempDir,
}

impl FakeQemu {
    fn new() -> Self {
        let directory = tempfile::tempdir().expect("a directory");
        let path = directory.path().join("qmp.sock");
        let listener = UnixListener::bind(&path).expect("a socket");
        Self { listener, path, _directory: directory }
    }

    /// A client after the greeting, and the other end of its socket.
    async fn connected(&self) -> (QmpClient, BufReader<UnixStream>) {
        let serve = async {
            let (stream, _) = self.listener.accept().await.expect("a client");
            let mut stream = BufReader::new(stream);
            stream.write_all(GREETING.as_bytes()).await.expect("sent");
            let id = read_command(&mut stream).await["id"].clone();
            reply(&mut stream, &json!({ "return": {}, "id": id })).await;
            stream
        };
        let (client, stream) = tokio::join!(QmpClient::connect(&self.path, DEADLINE), serve);
        (client.expect("connected"), stream)
    }

    /// The error of connecting when the greeting is `bytes`.
    async fn greet_with(&self, bytes: &[u8], deadline: Duration) -> QmpError {
        let serve = async {
            let (mut stream, _) = self.listener.accept().await.expect("a client");
            // The client may hang up in the middle.
            let _ = stream.write_all(bytes).await;
            stream
        };
        let (client, _stream) = tokio::join!(QmpClient::connect(&self.path, deadline), serve);
        client.expect_err("no proper greeting")
    }
}

async fn read_command(stream: &mut BufReader<UnixStream>) -> Value {
    let mut line = String::new();
    stream.read_line(&mut line).await.expect("a command");
    serde_json::from_str(&line).expect("JSON")
}

async fn reply(stream: &mut BufReader<UnixStream>, message: &Value) {
    stream.write_all(format!("{message}\n").as_bytes()).await.expect("sent");
}

#[tokio::test]
async fn no_socket_and_no_listener_are_told_as_such() {
    let fake = FakeQemu::new();
    let missing = QmpClient::connect(&fake.path.with_extension("none"), DEADLINE).await;
    assert!(matches!(missing, Err(QmpError::Connect { .. })), "{missing:?}");
    drop(fake.listener);
    let dead = QmpClient::connect(&fake.path, DEADLINE).await;
    assert!(matches!(dead, Err(QmpError::Connect { .. })), "{dead:?}");
}

#[tokio::test]
async fn greetings_that_are_none() {
    let fake = FakeQemu::new();
    let silent = fake.greet_with(b"", BRIEF).await;
    assert!(matches!(silent, QmpError::Deadline { .. }), "{silent}");
    let endless = fake.greet_with(&vec![b'x'; 2 << 20], DEADLINE).await;
    assert!(matches!(endless, QmpError::Malformed { .. }), "{endless}");
    for bytes in ["\n", "{}\n", "[]\n", "{\"QMP\": []}\n", "{\"event\": \"STOP\"}\n", "\u{0}\n"] {
        let malformed = fake.greet_with(bytes.as_bytes(), DEADLINE).await;
        assert!(matches!(malformed, QmpError::Malformed { .. }), "{bytes}: {malformed}");
    }
}

#[tokio::test]
async fn answers_find_their_commands_in_any_order_between_events() {
    let fake = FakeQemu::new();
    let (client, mut stream) = fake.connected().await;
    let mut events = client.events();
    let serve = async {
        let (first, second) = (read_command(&mut stream).await, read_command(&mut stream).await);
        reply(&mut stream, &json!({ "return": second["execute"], "id": second["id"] })).await;
        reply(&mut stream, &json!({ "event": "NEW_EVENT", "data": { "a": 1 } })).await;
        reply(&mut stream, &json!({ "return": "nobody asked", "id": 999 })).await;
        reply(&mut stream, &json!({ "return": first["execute"], "id": first["id"] })).await;
    };
    let one = client.execute::<String>("one", Value::Null, DEADLINE);
    let two = client.execute::<String>("two", Value::Null, DEADLINE);
    let (one, two, ()) = tokio::join!(one, two, serve);
    assert_eq!((one.expect("answered"), two.expect("answered")), ("one".into(), "two".into()));
    let event = events.recv().await.expect("an event");
    assert_eq!(event.what, Happening::Other("NEW_EVENT".into()));
}

#[tokio::test]
async fn a_late_answer_is_not_taken_for_another() {
    let fake = FakeQemu::new();
    let (client, mut stream) = fake.connected().await;
    let late = client.execute::<String>("late", Value::Null, BRIEF).await;
    assert!(matches!(late, Err(QmpError::Deadline { .. })), "{late:?}");
    let serve = async {
        let (first, second) = (read_command(&mut stream).await, read_command(&mut stream).await);
        reply(&mut stream, &json!({ "return": "late", "id": first["id"] })).await;
        reply(&mut stream, &json!({ "return": "in time", "id": second["id"] })).await;
    };
    let (next, ()) = tokio::join!(client.execute::<String>("next", Value::Null, DEADLINE), serve);
    assert_eq!(next.expect("answered"), "in time");
}

#[tokio::test]
async fn a_refusal_and_a_wrong_answer_are_told_apart() {
    let fake = FakeQemu::new();
    let (client, mut stream) = fake.connected().await;
    let serve = async {
        let id = read_command(&mut stream).await["id"].clone();
        reply(&mut stream, &json!({ "error": { "class": "GenericError", "desc": "no" }, "id": id })).await;
        let id = read_command(&mut stream).await["id"].clone();
        reply(&mut stream, &json!({ "return": [], "id": id })).await;
    };
    let ask = async {
        let refused = client.execute::<String>("refused", Value::Null, DEADLINE).await;
        (refused, client.execute::<String>("wrong", Value::Null, DEADLINE).await)
    };
    let ((refused, wrong), ()) = tokio::join!(ask, serve);
    assert!(matches!(refused, Err(QmpError::Command { ref desc, .. }) if desc == "no"), "{refused:?}");
    assert!(matches!(wrong, Err(QmpError::Malformed { .. })), "{wrong:?}");
}

#[tokio::test]
async fn a_socket_that_closes_or_talks_nonsense_ends_all_commands() {
    for nonsense in ["", "nonsense\n"] {
        let fake = FakeQemu::new();
        let (client, mut stream) = fake.connected().await;
        let mut events = client.events();
        let serve = async {
            read_command(&mut stream).await;
            stream.write_all(nonsense.as_bytes()).await.expect("sent");
            drop(stream);
        };
        let (now, ()) = tokio::join!(client.execute::<Value>("now", Value::Null, DEADLINE), serve);
        let later = client.execute::<Value>("later", Value::Null, DEADLINE).await;
        assert_eq!(events.recv().await, Err(RecvError::Closed));
        assert_eq!(client.events().recv().await, Err(RecvError::Closed));
        for answer in [now, later] {
            let is_right = match &answer {
                Err(QmpError::Closed { .. }) => nonsense.is_empty(),
                Err(QmpError::Malformed { .. }) => !nonsense.is_empty(),
                _ => false,
            };
            assert!(is_right, "{answer:?}");
        }
    }
}

#[tokio::test]
async fn a_receiver_that_falls_behind_is_told() {
    let fake = FakeQemu::new();
    let (client, mut stream) = fake.connected().await;
    let mut events = client.events();
    for _ in 0..1000 {
        reply(&mut stream, &json!({ "event": "STOP" })).await;
    }
    let serve = async {
        let id = read_command(&mut stream).await["id"].clone();
        reply(&mut stream, &json!({ "return": {}, "id": id })).await;
    };
    let (answer, ()) = tokio::join!(client.execute::<Value>("all-read", Value::Null, DEADLINE), serve);
    answer.expect("answered after the events");
    let lagged = events.recv().await;
    assert!(matches!(lagged, Err(RecvError::Lagged(744))), "{lagged:?}");
}
