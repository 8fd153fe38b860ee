use std::collections::HashMap;
use std::io::{self, IoSlice};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use drainpipe_hypervisor::{Version, VmEvent};
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags, sendmsg};
use serde::de::{DeserializeOwned, IgnoredAny};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt, Interest};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, broadcast, mpsc, oneshot};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};

use super::codec::{CodecError, CommandError, Execution, LineBuffer, Message, decode, encode};
use super::error::QmpError;

/// Events kept for a receiver that falls behind; past it the receiver is told how many it missed.
const EVENTS_KEPT: usize = 256;
/// Commands written but not yet taken by the socket.
const COMMANDS_QUEUED: usize = 16;
const READ_BYTES: usize = 16 * 1024;

/// Questions that may wait in QEMU at a time. A QEMU that does not answer reads nothing more, not even what is out of
/// band, once it has eight commands in its queue (7.2, 10.0).
const QUESTIONS_MAX: usize = 4;
const CONNECTING: &str = "the connection";

/// How often it is tried to get into the queue of a QEMU that takes no connection at present.
const QUEUE_EVERY: Duration = Duration::from_millis(50);

/// One client of one QEMU's control socket.
///
/// Commands of several tasks may be under way at once. Dropping the client closes the socket and
/// leaves QEMU as it is.
#[derive(Debug)]
pub struct QmpClient {
    version: Version,
    next_id: AtomicU64,
    waiting: Arc<Mutex<Waiting>>,
    lines: mpsc::Sender<Line>,
    /// Weak, so that receivers learn of the connection's end.
    events: broadcast::WeakSender<VmEvent>,
    tasks: [JoinHandle<()>; 2],
    takes_out_of_band: bool,
    questions: Arc<Semaphore>,
}

/// A command as it is written, and what QEMU gets open with it.
#[derive(Debug)]
struct Line {
    bytes: Vec<u8>,
    descriptor: Option<OwnedFd>,
}

/// A command that waits for its answer.
#[derive(Debug)]
struct Pending {
    answer: oneshot::Sender<Answer>,
    execution: Execution,
    // Given back when QEMU has answered, whether or not somebody waits for that still.
    _question: Option<OwnedSemaphorePermit>,
}

/// The commands that wait for their answer.
#[derive(Debug, Default)]
struct Waiting {
    by_id: HashMap<u64, Pending>,
    /// Since when QEMU's main thread owes an answer and has given none.
    owed_since: Option<Instant>,
    /// Why no answer will ever come any more.
    ended: Option<StreamEnd>,
}

impl Waiting {
    fn add(&mut self, id: u64, pending: Pending) {
        if pending.execution == Execution::InTurn {
            self.owed_since.get_or_insert_with(Instant::now);
        }
        self.by_id.insert(id, pending);
    }

    fn remove(&mut self, id: u64) -> Option<Pending> {
        let removed = self.by_id.remove(&id)?;
        let owes = self.by_id.values().any(|pending| pending.execution == Execution::InTurn);
        self.owed_since = self.owed_since.filter(|_| owes);
        Some(removed)
    }

    /// As [`Self::remove`]; and what is still owed is owed from now on.
    fn answered(&mut self, id: u64) -> Option<Pending> {
        let answered = self.remove(id)?;
        if answered.execution == Execution::InTurn {
            self.owed_since = self.owed_since.map(|_| Instant::now());
        }
        Some(answered)
    }
}

type Answer = Result<Value, Failure>;

#[derive(Debug)]
enum Failure {
    Refused(CommandError),
    Ended(StreamEnd),
}

#[derive(Debug, Clone)]
enum StreamEnd {
    Closed,
    Malformed(String),
}

impl QmpClient {
    /// Connects to a QEMU that is up, waits for the greeting and leaves the negotiation of
    /// capabilities behind; all of it within `deadline`.
    pub async fn connect(path: &Path, deadline: Duration) -> Result<Self, QmpError> {
        let connected = async {
            let stream =
                queue_at(path).await.map_err(|source| QmpError::Connect { path: path.to_owned(), source })?;
            Self::negotiate(stream, deadline).await
        };
        within(deadline, connected).await
    }

    /// As [`Self::connect`], over a connection that QEMU got when it was started.
    pub(crate) async fn over(connection: UnixStream, deadline: Duration) -> Result<Self, QmpError> {
        within(deadline, Self::negotiate(connection, deadline)).await
    }

    async fn negotiate(stream: UnixStream, deadline: Duration) -> Result<Self, QmpError> {
        let (read_half, write_half) = stream.into_split();
        let mut reader = LineReader::new(read_half);
        let version = reader.greeting().await.map_err(|end| end.into_error(CONNECTING))?;
        let mut client = Self::spawn(version, reader, write_half);
        let out_of_band = json!({ "enable": ["oob"] });
        match client.execute::<IgnoredAny>("qmp_capabilities", out_of_band, deadline).await {
            Ok(_) => client.takes_out_of_band = true,
            // One whose connection has no thread of its own.
            Err(QmpError::Command { .. }) => {
                client.execute::<IgnoredAny>("qmp_capabilities", Value::Null, deadline).await?;
            }
            Err(error) => return Err(error),
        }
        Ok(client)
    }

    fn spawn(version: Version, reader: LineReader, socket: OwnedWriteHalf) -> Self {
        let waiting = Arc::new(Mutex::new(Waiting::default()));
        let (lines, queue) = mpsc::channel(COMMANDS_QUEUED);
        let (events, _) = broadcast::channel(EVENTS_KEPT);
        let weak_events = events.downgrade();
        let tasks = [
            tokio::spawn(read_messages(reader, Arc::clone(&waiting), events)),
            tokio::spawn(write_lines(queue, socket)),
        ];
        let next_id = AtomicU64::new(0);
        Self {
            version,
            next_id,
            waiting,
            lines,
            events: weak_events,
            tasks,
            takes_out_of_band: false,
            questions: Arc::new(Semaphore::new(QUESTIONS_MAX)),
        }
    }

    /// The version that this QEMU says it is.
    pub fn version(&self) -> Version {
        self.version
    }

    /// Events from now on. A receiver that falls more than 256 events behind gets
    /// `RecvError::Lagged` with the number it missed, and `RecvError::Closed` once the connection
    /// has ended, which mostly means that QEMU has.
    pub fn events(&self) -> broadcast::Receiver<VmEvent> {
        match self.events.upgrade() {
            Some(events) => events.subscribe(),
            None => broadcast::channel(1).1,
        }
    }

    /// Since when QEMU's main thread owes an answer and has given none; none while it owes nothing.
    pub fn owes_since(&self) -> Option<Instant> {
        lock(&self.waiting).owed_since
    }

    /// Runs one command and reads its result as `T`.
    ///
    /// Arguments of `Value::Null` mean none. After [`QmpError::Deadline`] or [`QmpError::Closed`]
    /// the command may have taken effect nevertheless.
    pub async fn execute<T: DeserializeOwned>(
        &self,
        command: &str,
        arguments: Value,
        deadline: Duration,
    ) -> Result<T, QmpError> {
        self.execute_as(Execution::InTurn, command, arguments, None, deadline).await
    }

    /// As [`Self::execute`]; QEMU gets a duplicate of what is open here.
    pub async fn execute_with<T: DeserializeOwned>(
        &self,
        command: &str,
        arguments: Value,
        descriptor: OwnedFd,
        deadline: Duration,
    ) -> Result<T, QmpError> {
        self.execute_as(Execution::InTurn, command, arguments, Some(descriptor), deadline).await
    }

    /// As [`Self::execute`], at once, also while QEMU's main thread stands still. For commands that QEMU allows that for.
    pub async fn execute_out_of_band<T: DeserializeOwned>(
        &self,
        command: &str,
        arguments: Value,
        deadline: Duration,
    ) -> Result<T, QmpError> {
        let execution = if self.takes_out_of_band { Execution::OutOfBand } else { Execution::InTurn };
        self.execute_as(execution, command, arguments, None, deadline).await
    }

    async fn execute_as<T: DeserializeOwned>(
        &self,
        execution: Execution,
        command: &str,
        arguments: Value,
        descriptor: Option<OwnedFd>,
        deadline: Duration,
    ) -> Result<T, QmpError> {
        let value = timeout(deadline, self.execute_unbounded(execution, command, &arguments, descriptor))
            .await
            .unwrap_or_else(|_| Err(QmpError::Deadline { command: command.into(), deadline }))?;
        serde_json::from_value(value)
            .map_err(|error| QmpError::Malformed { command: command.into(), detail: error.to_string() })
    }

    async fn execute_unbounded(
        &self,
        execution: Execution,
        command: &str,
        arguments: &Value,
        descriptor: Option<OwnedFd>,
    ) -> Result<Value, QmpError> {
        let id = self.next_id.fetch_add(1, Ordering::Relaxed);
        let (answer, answered) = oneshot::channel();
        let ended = || StreamEnd::Closed.into_error(command);
        let question = if command.starts_with("query-") {
            let questions = Arc::clone(&self.questions);
            Some(questions.acquire_owned().await.map_err(|_| ended())?)
        } else {
            None
        };
        let is_question = question.is_some();
        if let Some(end) = self.wait_for(id, Pending { answer, execution, _question: question }) {
            return Err(end.into_error(command));
        }
        let mut forget = ForgetOnDrop { waiting: &self.waiting, id: Some(id) };
        let line = Line { bytes: encode(command, arguments, id, execution), descriptor };
        self.lines.send(line).await.map_err(|_| ended())?;
        if is_question {
            // From now on it is in QEMU's queue, also if nobody waits for the answer.
            forget.id = None;
        }
        match answered.await.map_err(|_| ended())? {
            Ok(value) => Ok(value),
            Err(Failure::Ended(end)) => Err(end.into_error(command)),
            Err(Failure::Refused(CommandError { class, desc })) => {
                Err(QmpError::Command { command: command.into(), class, desc })
            }
        }
    }

    fn wait_for(&self, id: u64, pending: Pending) -> Option<StreamEnd> {
        let mut waiting = lock(&self.waiting);
        if waiting.ended.is_none() {
            waiting.add(id, pending);
        }
        waiting.ended.clone()
    }
}

/// QEMU lets one connection wait, which those who have given up stay in too until it takes them (`EAGAIN`, see
/// connect(2)).
async fn queue_at(path: &Path) -> io::Result<UnixStream> {
    loop {
        match UnixStream::connect(path).await {
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => sleep(QUEUE_EVERY).await,
            connected => return connected,
        }
    }
}

async fn within<T>(
    deadline: Duration,
    connecting: impl Future<Output = Result<T, QmpError>>,
) -> Result<T, QmpError> {
    timeout(deadline, connecting)
        .await
        .unwrap_or_else(|_| Err(QmpError::Deadline { command: CONNECTING.into(), deadline }))
}

impl Drop for QmpClient {
    fn drop(&mut self) {
        self.tasks.iter().for_each(JoinHandle::abort);
    }
}

/// Takes a command off the list also when its caller gave up.
struct ForgetOnDrop<'a> {
    waiting: &'a Mutex<Waiting>,
    // None for one that is taken off by its answer only.
    id: Option<u64>,
}

impl Drop for ForgetOnDrop<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            lock(self.waiting).remove(id);
        }
    }
}

impl StreamEnd {
    fn into_error(self, command: &str) -> QmpError {
        let command = command.to_owned();
        match self {
            Self::Closed => QmpError::Closed { command },
            Self::Malformed(detail) => QmpError::Malformed { command, detail },
        }
    }
}

impl From<CodecError> for StreamEnd {
    fn from(error: CodecError) -> Self {
        Self::Malformed(error.to_string())
    }
}

/// Every change of the list is one insert, remove or drain, so a panic elsewhere leaves it whole.
fn lock(waiting: &Mutex<Waiting>) -> MutexGuard<'_, Waiting> {
    waiting.lock().unwrap_or_else(PoisonError::into_inner)
}

struct LineReader {
    socket: OwnedReadHalf,
    buffer: LineBuffer,
    chunk: Box<[u8]>,
}

impl LineReader {
    fn new(socket: OwnedReadHalf) -> Self {
        let chunk = vec![0; READ_BYTES].into_boxed_slice();
        Self { socket, buffer: LineBuffer::default(), chunk }
    }

    async fn message(&mut self) -> Result<Message, StreamEnd> {
        loop {
            if let Some(line) = self.buffer.next_line()? {
                return Ok(decode(&line)?);
            }
            match self.socket.read(&mut self.chunk).await {
                Ok(0) | Err(_) => return Err(StreamEnd::Closed),
                Ok(length) => self.buffer.push(&self.chunk[..length]),
            }
        }
    }

    async fn greeting(&mut self) -> Result<Version, StreamEnd> {
        match self.message().await? {
            Message::Greeting(version) => Ok(version),
            _ => Err(StreamEnd::Malformed("the first line is not QEMU's greeting".into())),
        }
    }
}

async fn read_messages(
    mut reader: LineReader,
    waiting: Arc<Mutex<Waiting>>,
    events: broadcast::Sender<VmEvent>,
) {
    let end = loop {
        match reader.message().await {
            Ok(Message::Response { id, result }) => answer(&waiting, id, result),
            // Without receivers an event has nobody to go to, which is fine.
            Ok(Message::Event(event)) => drop(events.send(event)),
            Ok(Message::Greeting(_)) => break StreamEnd::Malformed("a second greeting".into()),
            Err(end) => break end,
        }
    };
    let mut waiting = lock(&waiting);
    (waiting.ended, waiting.owed_since) = (Some(end.clone()), None);
    for (_, command) in waiting.by_id.drain() {
        // A caller that gave up no longer listens.
        drop(command.answer.send(Err(Failure::Ended(end.clone()))));
    }
}

fn answer(waiting: &Mutex<Waiting>, id: u64, result: Result<Value, CommandError>) {
    if let Some(command) = lock(waiting).answered(id) {
        // A caller that gave up no longer listens.
        drop(command.answer.send(result.map_err(Failure::Refused)));
    }
}

async fn write_lines(mut queue: mpsc::Receiver<Line>, mut socket: OwnedWriteHalf) {
    while let Some(line) = queue.recv().await {
        if write_line(&line, &mut socket).await.is_err() {
            return;
        }
    }
}

async fn write_line(Line { bytes, descriptor }: &Line, socket: &mut OwnedWriteHalf) -> io::Result<()> {
    let sent_bytes = match descriptor {
        None => 0,
        Some(descriptor) => {
            let stream: &UnixStream = (*socket).as_ref();
            let send = || send_with(stream.as_fd(), bytes, descriptor.as_fd());
            stream.async_io(Interest::WRITABLE, send).await?
        }
    };
    socket.write_all(&bytes[sent_bytes..]).await
}

/// How much of it was sent; what is open goes with its first byte.
fn send_with(socket: BorrowedFd<'_>, bytes: &[u8], descriptor: BorrowedFd<'_>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    control.push(SendAncillaryMessage::ScmRights(&descriptors));
    Ok(sendmsg(socket, &[IoSlice::new(bytes)], &mut control, SendFlags::NOSIGNAL)?)
}
