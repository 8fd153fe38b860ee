use std::collections::HashMap;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore, broadcast, mpsc, oneshot, watch};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use crate::error::{Error, RemoteError};
use crate::events::{DomainEvent, Subject, read_event};
use crate::packet::{
    Header, KEEP_ALIVE_PROGRAM, Kind, PAYLOAD_BYTES_MAX, Packet, PacketBuffer, QEMU_PROGRAM, REMOTE_PROGRAM,
};
use crate::procedure::{Procedure, Urgency};
use crate::xdr::{Decode, Decoder, Encoder};

/// Events kept for a receiver that falls behind; past it the receiver is told how many it missed.
const EVENTS_KEPT: usize = 256;
/// Packets that the socket has not taken yet.
const PACKETS_QUEUED: usize = 16;
const READ_BYTES: usize = 16 << 10;

/// Calls that may be under way at a time. A daemon that has five of a connection reads nothing more from it, not even
/// what keeps it alive (`max_client_requests`, libvirt 9.0).
const CALLS_MAX: usize = 3;
/// And one that ends something, for which there is always a place.
const URGENT_CALLS_MAX: usize = 1;

const PING: i32 = 1;
const PONG: i32 = 2;
const PING_EVERY: Duration = Duration::from_secs(5);
/// Pings in a row after which nothing came from the daemon.
const PINGS_MISSED_MAX: u32 = 6;

/// What it means that the other end of a connection says nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Silence {
    EndsIt,
    MeansNothing,
}

/// One connection to one libvirt daemon; its clones are the same connection.
///
/// Calls of several tasks may be under way at once, and more wait for a place; one that ends something waits for no
/// other kind. Who gives up waiting for an answer leaves his place taken until the daemon has answered. The socket is
/// closed when the last clone is dropped. That ends jobs which the daemon knows by this connection, such as a migration:
/// each should have a connection of its own, which the calls of others do not wait for.
#[derive(Debug, Clone)]
pub struct Connection {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    shared: Arc<Shared>,
    packets: mpsc::Sender<Vec<u8>>,
    /// Weak, so that receivers learn of the connection's end.
    events: broadcast::WeakSender<DomainEvent>,
    places: Arc<Semaphore>,
    urgent_places: Arc<Semaphore>,
    subscribed: tokio::sync::Mutex<Vec<Subject>>,
    task: JoinHandle<()>,
}

/// What the calls share with what reads and writes the socket.
#[derive(Debug)]
struct Shared {
    calls: Mutex<Calls>,
    /// Why nothing will come any more.
    ended: watch::Sender<Option<String>>,
    closing: Notify,
    /// Told once the daemon has said that it answers pings.
    pinging: Notify,
    has_heard: AtomicBool,
}

/// The calls that wait for their answer.
#[derive(Debug, Default)]
struct Calls {
    by_serial: HashMap<u32, Pending>,
    last_serial: u32,
}

/// A call that waits for its answer.
#[derive(Debug)]
struct Pending {
    procedure: Procedure,
    answer: oneshot::Sender<Answer>,
    // Given back when the daemon has answered, whether or not somebody waits for that still.
    _place: OwnedSemaphorePermit,
}

type Answer = Result<Vec<u8>, Error>;

impl Connection {
    /// Connects to a daemon, and opens the hypervisor that `uri` names, such as `qemu:///system`.
    pub async fn open(socket: &Path, uri: &str, deadline: Duration) -> Result<Self, Error> {
        Self::open_with(socket, uri, Silence::EndsIt, deadline).await
    }

    /// The same, and neither end takes silence for its end: a program that stands still for 30 s has it still. Whether the
    /// daemon is there is not known between two calls.
    pub async fn open_for_long(socket: &Path, uri: &str, deadline: Duration) -> Result<Self, Error> {
        Self::open_with(socket, uri, Silence::MeansNothing, deadline).await
    }

    async fn open_with(
        socket: &Path,
        uri: &str,
        silence: Silence,
        deadline: Duration,
    ) -> Result<Self, Error> {
        let opening = async {
            let stream = UnixStream::connect(socket)
                .await
                .map_err(|source| Error::CannotConnect { socket: socket.into(), source })?;
            Self::over(stream, socket, uri, silence, deadline).await
        };
        timeout(deadline, opening).await.unwrap_or(Err(Error::TimedOut { what: "open", after: deadline }))
    }

    async fn over(
        stream: UnixStream,
        socket: &Path,
        uri: &str,
        silence: Silence,
        deadline: Duration,
    ) -> Result<Self, Error> {
        let connection = Self::spawn(stream);
        connection.authenticate(socket, deadline).await?;
        // A daemon that is asked pings too, and closes what does not answer.
        if silence == Silence::EndsIt && connection.asks_for_keep_alive(deadline).await? {
            connection.inner.shared.pinging.notify_one();
        }
        connection.open_hypervisor(uri, deadline).await?;
        Ok(connection)
    }

    fn spawn(stream: UnixStream) -> Self {
        let shared = Arc::new(Shared {
            calls: Mutex::default(),
            ended: watch::Sender::new(None),
            closing: Notify::new(),
            pinging: Notify::new(),
            has_heard: AtomicBool::new(true),
        });
        let (packets, queue) = mpsc::channel(PACKETS_QUEUED);
        let (events, _) = broadcast::channel(EVENTS_KEPT);
        let inner = Inner {
            packets: packets.clone(),
            events: events.downgrade(),
            places: Arc::new(Semaphore::new(CALLS_MAX)),
            urgent_places: Arc::new(Semaphore::new(URGENT_CALLS_MAX)),
            subscribed: tokio::sync::Mutex::default(),
            task: tokio::spawn(run(stream, Arc::clone(&shared), packets, queue, events)),
            shared,
        };
        Self { inner: Arc::new(inner) }
    }

    /// Says goodbye, and closes the socket. All calls that are under way end.
    pub async fn close(&self, deadline: Duration) {
        // The socket is closed in any case.
        drop(self.close_hypervisor(deadline).await);
        self.inner.shared.closing.notify_one();
        self.closed().await;
    }

    /// Whether the socket is closed, by whomever.
    pub fn is_closed(&self) -> bool {
        self.inner.shared.ended.borrow().is_some()
    }

    /// Waits until it is.
    pub async fn closed(&self) {
        let mut ended = self.inner.shared.ended.subscribe();
        // The sender lives as long as we do.
        drop(ended.wait_for(Option::is_some).await);
    }

    /// Events from now on, if somebody subscribes or has subscribed. A receiver that falls more than 256 events behind
    /// gets `RecvError::Lagged` with the number it missed, and `RecvError::Closed` once the connection has ended.
    pub fn events(&self) -> broadcast::Receiver<DomainEvent> {
        match self.inner.events.upgrade() {
            Some(events) => events.subscribe(),
            None => broadcast::channel(1).1,
        }
    }

    /// Has the daemon say what happens to its domains. Once is enough; again does nothing.
    ///
    /// If it fails for lack of an answer, events may come twice after the next try.
    pub async fn subscribe(&self, deadline: Duration) -> Result<(), Error> {
        let subscribing = async {
            let mut subscribed = self.inner.subscribed.lock().await;
            for subject in Subject::ALL {
                if !subscribed.contains(&subject) {
                    self.subscribe_to(subject, deadline).await?;
                    subscribed.push(subject);
                }
            }
            Ok(())
        };
        timeout(deadline, subscribing)
            .await
            .unwrap_or(Err(Error::TimedOut { what: "subscribe", after: deadline }))
    }

    /// Calls a procedure with what `write` writes, and reads what comes of it.
    pub(crate) async fn call<T: Decode>(
        &self,
        procedure: Procedure,
        write: impl FnOnce(&mut Encoder),
        deadline: Duration,
    ) -> Result<T, Error> {
        let payload = arguments(procedure, write)?;
        let answer = timeout(deadline, self.exchange(procedure, payload))
            .await
            .unwrap_or(Err(Error::TimedOut { what: procedure.name, after: deadline }))?;
        // The connection goes on: where the next packet begins is known nevertheless.
        Decoder::whole(&answer)
            .map_err(|error| Error::Protocol(format!("the answer to `{}`: {error}", procedure.name)))
    }

    async fn exchange(&self, procedure: Procedure, payload: Vec<u8>) -> Answer {
        let place = self.place(procedure.urgency).await;
        let Ok(slot) = self.inner.packets.reserve().await else { return Err(self.inner.shared.has_ended()) };
        // From here on nobody gives up between the list and the queue.
        let (serial, answered) = self.inner.shared.wait_for(procedure, place)?;
        slot.send(procedure.packet(serial, payload).encode());
        answered.await.unwrap_or_else(|_| Err(self.inner.shared.has_ended()))
    }

    async fn place(&self, urgency: Urgency) -> OwnedSemaphorePermit {
        let places = Arc::clone(&self.inner.places);
        if urgency == Urgency::EndsSomething
            && let Ok(place) = Arc::clone(&places).try_acquire_owned()
        {
            return place;
        }
        let places = if urgency == Urgency::InTurn { places } else { Arc::clone(&self.inner.urgent_places) };
        places.acquire_owned().await.expect("nobody closes it")
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl Procedure {
    fn packet(self, serial: u32, payload: Vec<u8>) -> Packet {
        let header = Header {
            program: self.program,
            procedure: self.number,
            kind: Kind::Call,
            serial,
            is_error: false,
        };
        Packet { header, payload }
    }
}

fn arguments(procedure: Procedure, write: impl FnOnce(&mut Encoder)) -> Result<Vec<u8>, Error> {
    let mut to = Encoder::default();
    write(&mut to);
    let too_long = |what: String| Error::Protocol(format!("the arguments of `{}`: {what}", procedure.name));
    let payload = to.finish().map_err(|error| too_long(error.to_string()))?;
    if payload.len() > PAYLOAD_BYTES_MAX {
        return Err(too_long(format!("{} bytes are more than a packet has", payload.len())));
    }
    Ok(payload)
}

impl Shared {
    /// Every change of the list is one insert, remove or drain, so a panic elsewhere leaves it whole.
    fn lock(&self) -> MutexGuard<'_, Calls> {
        self.calls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn has_ended(&self) -> Error {
        let why = self.ended.borrow().clone();
        Error::Closed(why.unwrap_or_else(|| "it is being closed".into()))
    }

    fn wait_for(
        &self,
        procedure: Procedure,
        place: OwnedSemaphorePermit,
    ) -> Result<(u32, oneshot::Receiver<Answer>), Error> {
        let mut calls = self.lock();
        if self.ended.borrow().is_some() {
            return Err(self.has_ended());
        }
        let (answer, answered) = oneshot::channel();
        let serial = calls.free_serial();
        calls.by_serial.insert(serial, Pending { procedure, answer, _place: place });
        Ok((serial, answered))
    }

    /// Gives an answer to whoever waits for it. An error ends the connection.
    fn answer(&self, packet: Packet) -> Result<(), String> {
        let header = packet.header;
        let Some(pending) = self.lock().by_serial.remove(&header.serial) else { return Ok(()) };
        let called = pending.procedure;
        if (called.program, called.number) != (header.program, header.procedure) {
            let why = format!("it answered `{}` as if it were procedure {}", called.name, header.procedure);
            drop(pending.answer.send(Err(Error::Closed(why.clone()))));
            return Err(why);
        }
        let answer = if header.is_error { Err(refusal(called, &packet.payload)) } else { Ok(packet.payload) };
        // A caller that gave up no longer listens.
        drop(pending.answer.send(answer));
        Ok(())
    }

    fn end(&self, why: String) {
        let pending = {
            let mut calls = self.lock();
            self.ended.send_replace(Some(why));
            std::mem::take(&mut calls.by_serial)
        };
        for call in pending.into_values() {
            // A caller that gave up no longer listens.
            drop(call.answer.send(Err(self.has_ended())));
        }
    }
}

impl Calls {
    /// One that no call under way has. There are few of them.
    fn free_serial(&mut self) -> u32 {
        loop {
            self.last_serial = self.last_serial.wrapping_add(1);
            // Pings have 0.
            if self.last_serial != 0 && !self.by_serial.contains_key(&self.last_serial) {
                return self.last_serial;
            }
        }
    }
}

fn refusal(called: Procedure, payload: &[u8]) -> Error {
    match RemoteError::decode(&mut Decoder::new(payload)) {
        Ok(error) => Error::Libvirt(error),
        Err(error) => Error::Protocol(format!("the error in the answer to `{}`: {error}", called.name)),
    }
}

/// Reads and writes the socket until there is a reason to close it.
async fn run(
    stream: UnixStream,
    shared: Arc<Shared>,
    packets: mpsc::Sender<Vec<u8>>,
    queue: mpsc::Receiver<Vec<u8>>,
    events: broadcast::Sender<DomainEvent>,
) {
    let (read_half, write_half) = stream.into_split();
    let why = tokio::select! {
        why = read_packets(read_half, &shared, &packets, &events) => why,
        why = write_packets(queue, write_half) => why,
        why = keep_alive(&shared, &packets) => why,
        () = shared.closing.notified() => "it was closed here".into(),
    };
    shared.end(why);
}

async fn read_packets(
    mut socket: OwnedReadHalf,
    shared: &Shared,
    packets: &mpsc::Sender<Vec<u8>>,
    events: &broadcast::Sender<DomainEvent>,
) -> String {
    let (mut buffer, mut chunk) = (PacketBuffer::default(), vec![0; READ_BYTES]);
    loop {
        match socket.read(&mut chunk).await {
            Ok(0) => return "the daemon closed it".into(),
            Ok(length) => buffer.push(&chunk[..length]),
            Err(error) => return error.to_string(),
        }
        loop {
            match buffer.next_packet() {
                Ok(Some(packet)) => {
                    shared.has_heard.store(true, Ordering::Relaxed);
                    if let Err(why) = take(packet, shared, packets, events) {
                        return why;
                    }
                }
                Ok(None) => break,
                Err(error) => return format!("the daemon sent something that is not a packet: {error}"),
            }
        }
    }
}

fn take(
    packet: Packet,
    shared: &Shared,
    packets: &mpsc::Sender<Vec<u8>>,
    events: &broadcast::Sender<DomainEvent>,
) -> Result<(), String> {
    match (packet.header.program, packet.header.kind) {
        (REMOTE_PROGRAM | QEMU_PROGRAM, Kind::Reply) => shared.answer(packet)?,
        (KEEP_ALIVE_PROGRAM, Kind::Message) if packet.header.procedure == PING => {
            send_keep_alive(packets, PONG);
        }
        _ => match read_event(&packet) {
            // Without receivers an event has nobody to go to, which is fine.
            Some(Ok(event)) => drop(events.send(event)),
            Some(Err(error)) => tracing::warn!(%error, "libvirt sent an event that cannot be read"),
            // What a later release says, and nobody asked for.
            None => {}
        },
    }
    Ok(())
}

async fn write_packets(mut queue: mpsc::Receiver<Vec<u8>>, mut socket: OwnedWriteHalf) -> String {
    while let Some(packet) = queue.recv().await {
        if let Err(error) = socket.write_all(&packet).await {
            return error.to_string();
        }
    }
    "nobody uses it any more".into()
}

/// Asks every 5 s whether the daemon is there. Anything that it says is an answer.
async fn keep_alive(shared: &Shared, packets: &mpsc::Sender<Vec<u8>>) -> String {
    shared.pinging.notified().await;
    let mut missed = 0;
    while missed < PINGS_MISSED_MAX {
        send_keep_alive(packets, PING);
        sleep(PING_EVERY).await;
        missed = if shared.has_heard.swap(false, Ordering::Relaxed) { 0 } else { missed + 1 };
    }
    format!("the daemon has said nothing for {} s", (PING_EVERY * PINGS_MISSED_MAX).as_secs())
}

/// A queue that is full holds packets that say as much.
fn send_keep_alive(packets: &mpsc::Sender<Vec<u8>>, procedure: i32) {
    let header =
        Header { program: KEEP_ALIVE_PROGRAM, procedure, kind: Kind::Message, serial: 0, is_error: false };
    drop(packets.try_send(Packet { header, payload: vec![] }.encode()));
}

#[cfg(test)]
mod tests;
