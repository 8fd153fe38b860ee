//! Tests against a daemon that answers as the test wants.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::broadcast::error::RecvError;

use super::*;
use crate::domain::Domain;
use crate::events::Lifecycle;
use crate::xdr::Encode;

const DEADLINE: Duration = Duration::from_secs(20);
const SHORT: Duration = Duration::from_millis(20);
const AUTH_LIST: i32 = 66;
const HOSTNAME: i32 = 59;

/// The other end of a connection.
struct Daemon {
    stream: UnixStream,
    buffer: PacketBuffer,
}

impl Daemon {
    async fn next(&mut self) -> Option<Packet> {
        loop {
            if let Some(packet) = self.buffer.next_packet().unwrap() {
                return Some(packet);
            }
            let mut chunk = [0; 1000];
            match self.stream.read(&mut chunk).await.unwrap() {
                0 => return None,
                length => self.buffer.push(&chunk[..length]),
            }
        }
    }

    /// The next call, without pings.
    async fn called(&mut self) -> Packet {
        loop {
            let packet = self.next().await.expect("it is open");
            if packet.header.kind == Kind::Call {
                return packet;
            }
        }
    }

    async fn send(&mut self, header: Header, payload: Vec<u8>) {
        self.stream.write_all(&Packet { header, payload }.encode()).await.unwrap();
    }

    async fn answer(&mut self, called: &Packet, write: impl FnOnce(&mut Encoder)) {
        self.send(Header { kind: Kind::Reply, ..called.header }, written(write)).await;
    }

    async fn say(&mut self, program: u32, procedure: i32, write: impl FnOnce(&mut Encoder)) {
        let header = Header { program, procedure, kind: Kind::Message, serial: 0, is_error: false };
        self.send(header, written(write)).await;
    }

    /// Answers the calls that open a connection.
    async fn open(&mut self, way: i32) {
        let called = self.called().await;
        assert_eq!(called.header.procedure, AUTH_LIST);
        let write = |to: &mut Encoder| {
            to.u32(1);
            to.i32(way);
        };
        self.answer(&called, write).await;
        if way == 0 {
            let called = self.called().await;
            self.answer(&called, |to| to.i32(1)).await;
            let called = self.called().await;
            self.answer(&called, |_| {}).await;
        }
    }
}

fn written(write: impl FnOnce(&mut Encoder)) -> Vec<u8> {
    let mut to = Encoder::default();
    write(&mut to);
    to.finish().unwrap()
}

async fn try_open(way: i32) -> (Result<Connection, Error>, Daemon) {
    let (ours, theirs) = UnixStream::pair().unwrap();
    let mut daemon = Daemon { stream: theirs, buffer: PacketBuffer::default() };
    let opening = Connection::over(ours, Path::new("socket"), "qemu:///system", Silence::EndsIt, DEADLINE);
    let (connection, ()) = tokio::join!(opening, daemon.open(way));
    (connection, daemon)
}

async fn open() -> (Connection, Daemon) {
    let (connection, daemon) = try_open(0).await;
    (connection.unwrap(), daemon)
}

fn asks_hostname(connection: &Connection) -> JoinHandle<Result<String, Error>> {
    let connection = connection.clone();
    tokio::spawn(async move { connection.hostname(DEADLINE).await })
}

#[tokio::test]
async fn answers_reach_their_callers_in_any_order() {
    let (connection, mut daemon) = open().await;
    let asking = [asks_hostname(&connection), asks_hostname(&connection), asks_hostname(&connection)];
    let calls = [daemon.called().await, daemon.called().await, daemon.called().await];
    for called in calls.iter().rev() {
        let serial = called.header.serial;
        daemon.answer(called, |to| to.text(&serial.to_string())).await;
    }
    let mut answers = vec![];
    for asked in asking {
        answers.push(asked.await.unwrap().unwrap());
    }
    assert_eq!(answers, calls.map(|called| called.header.serial.to_string()));
}

#[tokio::test]
async fn who_gives_up_gets_nothing_later_and_leaves_the_place_taken_until_then() {
    let (connection, mut daemon) = open().await;
    for _ in 0..CALLS_MAX {
        let given_up = connection.hostname(SHORT).await.unwrap_err();
        assert!(matches!(given_up, Error::TimedOut { what: "hostname", .. }), "{given_up}");
    }
    connection.hostname(SHORT).await.unwrap_err();
    let calls = [daemon.called().await, daemon.called().await, daemon.called().await];
    let asking = asks_hostname(&connection);
    for called in &calls {
        daemon.answer(called, |to| to.text("late")).await;
    }
    let called = daemon.called().await;
    assert!(calls.iter().all(|earlier| earlier.header.serial != called.header.serial));
    daemon.answer(&called, |to| to.text("in time")).await;
    assert_eq!(asking.await.unwrap().unwrap(), "in time");
    assert_eq!(connection.inner.shared.lock().by_serial.len(), 0);
}

#[tokio::test]
async fn what_ends_something_has_a_place() {
    let (connection, mut daemon) = open().await;
    let domain = Domain { name: "vm".into(), uuid: [1; 16], id: Some(1) };
    let asking: Vec<_> = (0..10).map(|_| asks_hostname(&connection)).collect();
    for _ in 0..CALLS_MAX {
        assert_eq!(daemon.called().await.header.procedure, HOSTNAME);
    }
    let (aborted, ()) = tokio::join!(connection.abort_job(&domain, DEADLINE), async {
        let called = daemon.called().await;
        daemon.answer(&called, |_| {}).await;
    });
    aborted.unwrap();
    drop(daemon);
    for asked in asking {
        assert!(matches!(asked.await.unwrap(), Err(Error::Closed(_))));
    }
}

#[tokio::test]
async fn what_libvirt_refuses_is_an_error_of_libvirt() {
    let (connection, mut daemon) = open().await;
    let asking = asks_hostname(&connection);
    let called = daemon.called().await;
    let refusal = written(|to| {
        to.i32(42);
        to.i32(10);
        to.optional_text(Some("no such domain"));
        to.i32(2);
        to.fixed(&[0; 16]);
        to.u64(0);
        to.bool(false);
    });
    daemon.send(Header { kind: Kind::Reply, is_error: true, ..called.header }, refusal).await;
    assert!(asking.await.unwrap().unwrap_err().is_no_domain());
}

#[tokio::test]
async fn an_answer_that_cannot_be_read_is_one_call_s_matter() {
    let (connection, mut daemon) = open().await;
    for is_error in [false, true] {
        let asking = asks_hostname(&connection);
        let called = daemon.called().await;
        daemon.send(Header { kind: Kind::Reply, is_error, ..called.header }, vec![0xff; 8]).await;
        assert!(matches!(asking.await.unwrap(), Err(Error::Protocol(_))));
    }
    assert!(!connection.is_closed());
}

#[tokio::test]
async fn what_is_no_packet_ends_the_connection() {
    let (connection, mut daemon) = open().await;
    let mut events = connection.events();
    let asking = asks_hostname(&connection);
    daemon.called().await;
    daemon.stream.write_all(&[0xff; 40]).await.unwrap();
    let ended = asking.await.unwrap().unwrap_err().to_string();
    assert!(ended.contains("not a packet: a length of 4294967295"), "{ended}");
    connection.closed().await;
    assert_eq!(events.recv().await, Err(RecvError::Closed));
    assert!(connection.hostname(DEADLINE).await.unwrap_err().is_outcome_unknown());
    assert_eq!(daemon.stream.read(&mut [0; 9]).await.unwrap(), 0);
}

#[tokio::test]
async fn an_answer_to_something_else_ends_the_connection() {
    let (connection, mut daemon) = open().await;
    let asking = asks_hostname(&connection);
    let called = daemon.called().await;
    daemon.send(Header { kind: Kind::Reply, procedure: 1, ..called.header }, vec![]).await;
    let ended = asking.await.unwrap().unwrap_err().to_string();
    assert!(ended.contains("as if it were procedure 1"), "{ended}");
    connection.closed().await;
}

#[tokio::test]
async fn what_nobody_asked_for_is_passed_over() {
    let (connection, mut daemon) = open().await;
    let header = Header { program: 77, procedure: 1, kind: Kind::Other(3), serial: 9, is_error: false };
    daemon.send(header, vec![1; 8]).await;
    let header = Header { program: REMOTE_PROGRAM, kind: Kind::Reply, ..header };
    daemon.send(header, vec![]).await;
    daemon.say(REMOTE_PROGRAM, 999, |_| {}).await;
    daemon.say(REMOTE_PROGRAM, 318, |_| {}).await;
    let asking = asks_hostname(&connection);
    let called = daemon.called().await;
    daemon.answer(&called, |to| to.text("here")).await;
    assert_eq!(asking.await.unwrap().unwrap(), "here");
}

#[tokio::test]
async fn events_are_passed_on() {
    let (connection, mut daemon) = open().await;
    let (mut events, domain) = (connection.events(), Domain { name: "vm".into(), uuid: [1; 16], id: None });
    let write = |to: &mut Encoder| {
        to.i32(0);
        domain.encode(to);
        to.i32(5);
        to.i32(1);
    };
    daemon.say(REMOTE_PROGRAM, 318, write).await;
    let expected = DomainEvent::Lifecycle { domain: domain.clone(), change: Lifecycle::Stopped, detail: 1 };
    assert_eq!(events.recv().await, Ok(expected));
}

#[tokio::test]
async fn a_ping_is_answered() {
    let (_connection, mut daemon) = open().await;
    daemon.say(KEEP_ALIVE_PROGRAM, PING, |_| {}).await;
    loop {
        let said = daemon.next().await.unwrap().header;
        if (said.program, said.procedure) == (KEEP_ALIVE_PROGRAM, PONG) {
            return;
        }
    }
}

#[tokio::test]
async fn a_daemon_that_is_silent_for_half_a_minute_is_given_up() {
    let (connection, daemon) = open().await;
    tokio::time::pause();
    connection.closed().await;
    let ended = connection.hostname(DEADLINE).await.unwrap_err().to_string();
    assert!(ended.contains("said nothing for 30 s"), "{ended}");
    drop(daemon);
}

#[tokio::test]
async fn the_socket_is_closed_with_the_last_clone() {
    let (connection, mut daemon) = open().await;
    let clone = connection.clone();
    drop(connection);
    assert!(!clone.is_closed());
    drop(clone);
    while daemon.next().await.is_some() {}
}

#[tokio::test]
async fn closing_says_goodbye() {
    let (connection, mut daemon) = open().await;
    let ((), called) = tokio::join!(connection.close(SHORT), daemon.called());
    assert_eq!(called.header.procedure, 2);
    assert!(connection.is_closed());
}

#[tokio::test]
async fn a_daemon_that_wants_a_password_is_told_of() {
    let (opened, _daemon) = try_open(1).await;
    let refused = opened.unwrap_err().to_string();
    assert!(refused.contains("(sasl)") && refused.contains("auth_unix_rw"), "{refused}");
}

#[tokio::test]
async fn a_daemon_that_does_not_answer_is_not_waited_for() {
    let directory = tempfile::tempdir().unwrap();
    let socket = directory.path().join("socket");
    let absent = Connection::open(&socket, "qemu:///system", SHORT).await.unwrap_err().to_string();
    assert!(absent.contains("is its daemon running"), "{absent}");
    let _listener = tokio::net::UnixListener::bind(&socket).unwrap();
    let mute = Connection::open(&socket, "qemu:///system", SHORT).await.unwrap_err();
    assert!(matches!(mute, Error::TimedOut { .. }), "{mute}");
}

#[tokio::test]
async fn what_is_too_long_is_not_sent() {
    let (connection, _daemon) = open().await;
    let xml = "x".repeat((4 << 20) + 1);
    let refused = connection.define(&xml, DEADLINE).await.unwrap_err();
    assert!(matches!(refused, Error::Protocol(_)), "{refused}");
    assert!(!connection.is_closed());
}
