//! One stream's NBD connection to the disk's server.

use std::io;
use std::sync::Mutex;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpStream, UnixStream};
use tokio::sync::{Notify, mpsc};
use tokio::time::{Instant, timeout};

use super::{DiskServer, ServerAddress, Shared};
use crate::buffers::Buffer;
use crate::command::{Command, Operation};
use crate::digest::Digest;
use crate::error::{Malformed, SplitterError};
use crate::frame::{Answer, HANDLE_MAX, StreamNumber};
use crate::limits::{DISK_ANSWERS, FLUSH_EVERY, GREETING};
use crate::nbd::{self, REPLY_BYTES, Reply};
use crate::requests::RequestsInFlight;
use crate::wire::{read_full, read_next, write_both};

/// The handle of the flush that ends a connection. No source gives it.
const LAST_FLUSH: u64 = HANDLE_MAX + 1;

/// The handle of the flushes before it. No source gives it either.
const FLUSH: u64 = HANDLE_MAX + 2;

/// Bytes that go both ways.
pub(super) trait Connection: AsyncRead + AsyncWrite + Unpin + Send {}

impl<C: AsyncRead + AsyncWrite + Unpin + Send> Connection for C {}

/// Connects, and chooses the disk.
pub(super) async fn open(disk: &DiskServer) -> Result<Box<dyn Connection>, SplitterError> {
    let opening = async {
        let mut connection = connect(&disk.address).await.map_err(|error| {
            SplitterError::Open(format!("{error}; does its QEMU run, and is the disk exported?"))
        })?;
        nbd::open(&mut connection, &disk.export_name, disk.size_bytes).await?;
        Ok(connection)
    };
    let late = || SplitterError::Open(format!("no answer within {} s", GREETING.as_secs()));
    timeout(GREETING, opening).await.unwrap_or_else(|_| Err(late()))
}

async fn connect(address: &ServerAddress) -> io::Result<Box<dyn Connection>> {
    match address {
        ServerAddress::Tcp(address) => {
            let stream = TcpStream::connect(address).await?;
            stream.set_nodelay(true)?;
            Ok(Box::new(stream))
        }
        ServerAddress::Unix(path) => Ok(Box::new(UnixStream::connect(path).await?)),
    }
}

/// For the disk.
#[derive(Debug)]
pub(super) struct Task {
    pub(super) handle: u64,
    pub(super) command: Command,
    pub(super) payload: Option<Buffer>,
}

/// For the source, with what was read.
#[derive(Debug)]
pub(super) struct AnswerWithData {
    pub(super) answer: Answer,
    pub(super) data: Option<Buffer>,
}

impl AnswerWithData {
    pub(super) fn bare(answer: Answer) -> Self {
        Self { answer, data: None }
    }
}

/// What a stream and its connection share.
pub(super) struct Window<'shared> {
    pub(super) shared: &'shared Shared,
    pub(super) number: StreamNumber,
    pub(super) requests: Mutex<RequestsInFlight>,
    /// The disk has answered something.
    pub(super) answered: Notify,
}

impl Window<'_> {
    /// Changes what is held.
    pub(super) fn hold<T>(&self, change: impl FnOnce(&mut RequestsInFlight) -> T) -> T {
        change(&mut self.requests.lock().expect("nothing panics with it"))
    }
}

/// Has the disk do what comes, until nothing more will, and then flush. Without an error, nothing is left to be done.
pub(super) async fn drive(
    connection: Box<dyn Connection>,
    window: &Window<'_>,
    tasks: mpsc::Receiver<Task>,
    answers: &mpsc::Sender<AnswerWithData>,
) -> Result<(), SplitterError> {
    let (reader, mut writer) = tokio::io::split(connection);
    let asking = async {
        ask(&mut writer, window, tasks).await?;
        // The answer to the last flush ends it.
        std::future::pending().await
    };
    tokio::select! {
        asked = asking => asked,
        heard = hear(reader, window, answers) => heard,
    }?;
    // Not before: the server would go without an answer to the flush. All is done now, whether it hears this or not.
    write_both(&mut writer, &nbd::DISCONNECT, &[], DISK_ANSWERS).await.ok();
    Ok(())
}

async fn ask(
    writer: &mut (impl AsyncWrite + Unpin),
    window: &Window<'_>,
    mut tasks: mpsc::Receiver<Task>,
) -> Result<(), SplitterError> {
    loop {
        match timeout(FLUSH_EVERY, tasks.recv()).await {
            Ok(Some(task)) => ask_one(writer, window, task).await?,
            Ok(None) => break,
            Err(_) => {}
        }
        if window.shared.flushes.begin(Instant::now()) {
            let flush = nbd::encode_request(FLUSH, &Command::FLUSH);
            let wrote = write_both(writer, &flush, &[], DISK_ANSWERS).await;
            wrote.map_err(|error| SplitterError::disk(&error))?;
        }
    }
    // A flush covers what is answered, and no more.
    while window.hold(|requests| requests.at_disk()) > 0 {
        window.answered.notified().await;
    }
    let last = nbd::encode_request(LAST_FLUSH, &Command::FLUSH);
    let wrote = write_both(writer, &last, &[], DISK_ANSWERS).await;
    wrote.map_err(|error| SplitterError::disk(&error))
}

async fn ask_one(
    writer: &mut (impl AsyncWrite + Unpin),
    window: &Window<'_>,
    Task { handle, command, payload }: Task,
) -> Result<(), SplitterError> {
    let header = nbd::encode_request(handle, &command);
    let payload = payload.as_deref().unwrap_or_default();
    let wrote = write_both(writer, &header, payload, DISK_ANSWERS).await;
    wrote.map_err(|error| SplitterError::disk(&error))?;
    window.shared.counting.has_sent(window.number, header.len() + payload.len());
    Ok(())
}

async fn hear(
    mut reader: impl AsyncRead + Unpin,
    window: &Window<'_>,
    answers: &mpsc::Sender<AnswerWithData>,
) -> Result<(), SplitterError> {
    loop {
        let header: Option<[u8; REPLY_BYTES]> =
            read_next(&mut reader, DISK_ANSWERS).await.map_err(|error| SplitterError::disk(&error))?;
        let header = header.ok_or_else(|| SplitterError::Disk("it closed the connection".into()))?;
        let reply = nbd::decode_reply(&header).map_err(of_reply)?;
        // The next flush for which somebody waits reports one that failed.
        if reply.cookie == FLUSH && window.shared.flushes.end() {
            continue;
        }
        if reply.cookie == LAST_FLUSH && window.hold(|requests| requests.at_disk()) == 0 {
            let failed = |_| SplitterError::Disk("it cannot flush; look at the storage of the target".into());
            return reply.error.map_or(Ok(()), |error| Err(failed(error)));
        }
        let answered = answer(&mut reader, window, reply).await?;
        // Not when it is sent: a flush covers what is answered.
        window.shared.flushes.has_written();
        window.hold(|requests| requests.is_answered(reply.cookie));
        window.answered.notify_one();
        // Where nobody takes answers any more, the stream is lost, and there is room for all in any case.
        answers.try_send(answered).ok();
    }
}

async fn answer(
    reader: &mut (impl AsyncRead + Unpin),
    window: &Window<'_>,
    reply: Reply,
) -> Result<AnswerWithData, SplitterError> {
    let Reply { cookie: handle, error } = reply;
    let command = window.hold(|requests| requests.asked(handle)).map_err(of_reply)?;
    let brings_data = matches!(command.operation, Operation::Read | Operation::Compare);
    if error.is_some() || !brings_data {
        window.shared.counting.is_done(&command);
        // What cannot be read may be written all the same.
        let differs = command.operation == Operation::Compare;
        return Ok(AnswerWithData::bare(if differs {
            Answer::Differs { handle }
        } else {
            Answer::Done { handle, error }
        }));
    }
    let mut data = window.shared.buffers.take(command.length as usize);
    read_full(reader, &mut data, DISK_ANSWERS).await.map_err(|error| SplitterError::disk(&error))?;
    window.shared.counting.is_done(&command);
    if command.operation == Operation::Compare {
        return Ok(AnswerWithData::bare(compared(window, handle, Digest::of(&data))));
    }
    Ok(AnswerWithData { answer: Answer::Data { handle, length: command.length }, data: Some(data) })
}

fn compared(window: &Window<'_>, handle: u64, there: Digest) -> Answer {
    if window.hold(|requests| requests.is_same(handle, there)) {
        Answer::Done { handle, error: None }
    } else {
        Answer::Differs { handle }
    }
}

fn of_reply(error: Malformed) -> SplitterError {
    SplitterError::Disk(format!("it sent what is not understood: {error}"))
}
