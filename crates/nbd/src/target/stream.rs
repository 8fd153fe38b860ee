//! One stream, as the target sees it.

use std::io;
use std::pin::pin;
use std::sync::Mutex;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf, copy, sink};
use tokio::sync::{Notify, mpsc};
use tokio::time::timeout;

use super::Shared;
use super::disk::{self, AnswerWithData, Connection, Task, Window};
use super::registry::Open;
use super::unpacking::Unpacking;
use crate::buffers::Buffer;
use crate::command::{Command, Operation};
use crate::digest::{DIGEST_BYTES, Digest};
use crate::error::{Malformed, Refusal, SplitterError};
use crate::frame::{Answer, QUESTION_BYTES, Question, StreamNumber, packed_bytes};
use crate::greeting::{GREETING_BYTES, Greeting, encode_welcome};
use crate::limits::{DISK_ANSWERS, GREETING, HEARTBEAT, LINGER, PIECES_PER_STREAM_MAX, SILENCE, STREAMS_MAX};
use crate::requests::RequestsInFlight;
use crate::wire::{read_full, write_both};

/// Answers that may wait for the wire: to all that is held, to fences, and the last.
const ANSWERS_MAX: usize = PIECES_PER_STREAM_MAX + 2 * STREAMS_MAX + 1;

pub(super) async fn serve<S>(shared: &Shared, stream: S) -> Result<(), SplitterError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let (mut reader, mut writer) = tokio::io::split(stream);
    let (open, number, connection) = match welcome(shared, &mut reader).await {
        Ok(welcomed) => welcomed,
        Err((refusal, error)) => {
            // A peer that is refused may be gone already.
            write_both(&mut writer, &encode_welcome(Some(refusal)), &[], SILENCE).await.ok();
            return Err(error);
        }
    };
    shared.counting.is_live(number, true);
    let window =
        Window { shared, number, requests: Mutex::new(RequestsInFlight::default()), answered: Notify::new() };
    let ended = carry(&window, open, connection, reader, writer).await;
    shared.counting.is_live(number, false);
    ended
}

/// Whoever it is, and the disk for it.
async fn welcome<'shared, S: AsyncRead>(
    shared: &'shared Shared,
    reader: &mut ReadHalf<S>,
) -> Result<(Open<'shared>, StreamNumber, Box<dyn Connection>), (Refusal, SplitterError)> {
    let mut greeting = [0; GREETING_BYTES];
    let read = timeout(GREETING, read_full(reader, &mut greeting, GREETING)).await;
    let read = read.unwrap_or_else(|_| Err(std::io::ErrorKind::TimedOut.into()));
    read.map_err(|error| (Refusal::NoSplitter, SplitterError::stream(error)))?;
    let refused = |refusal| (refusal, SplitterError::Refused(refusal));
    let number =
        Greeting::decode(&greeting, &shared.disk.session, shared.disk.size_bytes).map_err(refused)?;
    let connection = disk::open(&shared.disk).await.map_err(|error| (Refusal::Disk, error))?;
    let open = shared.registry.open(number).map_err(refused)?;
    Ok((open, number, connection))
}

/// How the questions of a stream ended.
enum End {
    /// The source has said so.
    Asked,
    /// The stream is lost, or fenced.
    Lost(SplitterError),
}

async fn carry<S: AsyncRead + AsyncWrite>(
    window: &Window<'_>,
    open: Open<'_>,
    connection: Box<dyn Connection>,
    mut reader: ReadHalf<S>,
    writer: WriteHalf<S>,
) -> Result<(), SplitterError> {
    let (answers, to_tell) = mpsc::channel(ANSWERS_MAX);
    let deaf = Notify::new();
    let telling = async {
        // Whoever does not hear is lost, which is known by this.
        if tell(writer, window, to_tell).await.is_err() {
            deaf.notify_one();
        }
    };
    let (ended, ()) = tokio::join!(work(window, open, connection, &mut reader, &deaf, answers), telling);
    if ended.is_err() {
        // If it were closed with something unread, TCP would drop the last answers to the source.
        timeout(LINGER, copy(&mut reader, &mut sink())).await.ok();
    }
    ended
}

/// Has the disk do all that comes. Whatever ends the stream, what was taken is done and flushed before it counts as
/// ended.
async fn work(
    window: &Window<'_>,
    open: Open<'_>,
    connection: Box<dyn Connection>,
    reader: &mut (impl AsyncRead + Unpin),
    deaf: &Notify,
    answers: mpsc::Sender<AnswerWithData>,
) -> Result<(), SplitterError> {
    let (tasks, to_do) = mpsc::channel(PIECES_PER_STREAM_MAX);
    let mut driving = pin!(disk::drive(connection, window, to_do, &answers));
    let end = tokio::select! {
        end = take_until_end(window, reader, deaf, tasks, &answers) => end,
        driven = &mut driving => {
            let early = || SplitterError::Disk("it answers what was not asked".into());
            return Err(fail(window, driven.err().unwrap_or_else(early), &answers));
        }
    };
    let driven = timeout(DISK_ANSWERS, driving).await.unwrap_or(Err(SplitterError::DiskSilent));
    if let Err(error) = driven {
        return Err(fail(window, error, &answers));
    }
    open.has_ended();
    let (last, ended) = match end {
        End::Asked => (Answer::Ended, Ok(())),
        End::Lost(error) => (Answer::Failed, Err(error)),
    };
    answers.try_send(AnswerWithData::bare(last)).ok();
    ended
}

/// Nobody knows what the disk has done.
fn fail(window: &Window<'_>, error: SplitterError, answers: &mpsc::Sender<AnswerWithData>) -> SplitterError {
    window.shared.registry.fail(error.clone());
    answers.try_send(AnswerWithData::bare(Answer::Failed)).ok();
    error
}

async fn take_until_end(
    window: &Window<'_>,
    reader: &mut (impl AsyncRead + Unpin),
    deaf: &Notify,
    tasks: mpsc::Sender<Task>,
    answers: &mpsc::Sender<AnswerWithData>,
) -> End {
    let (fences, to_fence) = mpsc::channel(STREAMS_MAX);
    let lost = tokio::select! {
        taken = take(window, reader, &tasks, &fences) => match taken {
            Ok(()) => return End::Asked,
            Err(error) => error,
        },
        () = deaf.notified() => SplitterError::stream(io::ErrorKind::BrokenPipe.into()),
        error = window.shared.registry.shut(window.number) => error,
        error = tell_fences(window, to_fence, answers) => error,
    };
    End::Lost(lost)
}

/// Ends when the source says that nothing more will come.
async fn take(
    window: &Window<'_>,
    reader: &mut (impl AsyncRead + Unpin),
    tasks: &mpsc::Sender<Task>,
    fences: &mpsc::Sender<StreamNumber>,
) -> Result<(), SplitterError> {
    let mut unpacking = Unpacking::default();
    loop {
        let mut header = [0; QUESTION_BYTES];
        read_full(reader, &mut header, SILENCE).await.map_err(SplitterError::stream)?;
        match Question::decode(&header, window.shared.disk.size_bytes)? {
            Question::Command { handle, command } => {
                let task = take_command(window, reader, handle, command).await?;
                // Where the disk has ended, that is what ends the stream.
                tasks.try_send(task).ok();
            }
            Question::Packed { handle, command } => {
                let task = take_packed(window, reader, &mut unpacking, handle, command).await?;
                tasks.try_send(task).ok();
            }
            Question::Fence(number) if number == window.number => {
                return Err(Malformed("a fence for the stream that it comes by").into());
            }
            Question::Fence(number) => {
                window.shared.registry.fence(number);
                fences.try_send(number).map_err(|_| Malformed("more fences than streams"))?;
            }
            Question::Alive => {}
            Question::End => return Ok(()),
        }
    }
}

async fn take_command(
    window: &Window<'_>,
    reader: &mut (impl AsyncRead + Unpin),
    handle: u64,
    command: Command,
) -> Result<Task, SplitterError> {
    // Before memory is taken for its data.
    window.hold(|requests| requests.take(handle, command))?;
    let mut payload = None;
    match command.operation {
        Operation::Write => payload = Some(read_data(window, reader, command.length as usize).await?),
        Operation::Compare => {
            let mut digest = [0; DIGEST_BYTES];
            read_full(reader, &mut digest, SILENCE).await.map_err(SplitterError::stream)?;
            window.hold(|requests| requests.is_compared_with(handle, Digest(digest)));
        }
        Operation::Read | Operation::WriteZeroes | Operation::Trim | Operation::Flush => {}
    }
    Ok(to_disk(window, Task { handle, command, payload }))
}

/// What was begun and never came is not waited for.
fn to_disk(window: &Window<'_>, task: Task) -> Task {
    window.hold(|requests| requests.goes_to_disk(task.handle));
    window.shared.counting.has_begun(0);
    task
}

async fn read_data(
    window: &Window<'_>,
    reader: &mut (impl AsyncRead + Unpin),
    bytes: usize,
) -> Result<Buffer, SplitterError> {
    let mut data = window.shared.buffers.take(bytes);
    read_full(reader, &mut data, SILENCE).await.map_err(SplitterError::stream)?;
    Ok(data)
}

/// A WRITE whose data are packed. A stream holds those of one at a time, beside what they become.
async fn take_packed(
    window: &Window<'_>,
    reader: &mut (impl AsyncRead + Unpin),
    unpacking: &mut Unpacking,
    handle: u64,
    command: Command,
) -> Result<Task, SplitterError> {
    window.hold(|requests| requests.take(handle, command))?;
    let mut length = [0; _];
    read_full(reader, &mut length, SILENCE).await.map_err(SplitterError::stream)?;
    let packed = read_data(window, reader, packed_bytes(length, command.length)?).await?;
    let raw = window.shared.buffers.take(command.length as usize);
    let payload = Some(unpacking.unpack(packed, raw).await?);
    Ok(to_disk(window, Task { handle, command, payload }))
}

/// Answers each fence when its stream has ended. Ends when nobody knows that of one.
async fn tell_fences(
    window: &Window<'_>,
    mut to_fence: mpsc::Receiver<StreamNumber>,
    answers: &mpsc::Sender<AnswerWithData>,
) -> SplitterError {
    let mut awaited: Vec<StreamNumber> = vec![];
    loop {
        tokio::select! {
            Some(number) = to_fence.recv(), if awaited.len() < STREAMS_MAX => awaited.push(number),
            ended = window.shared.registry.any_ended(&awaited) => match ended {
                Ok(number) => {
                    awaited.retain(|other| *other != number);
                    answers.try_send(AnswerWithData::bare(Answer::Fenced(number))).ok();
                }
                Err(error) => return error,
            },
        }
    }
}

/// Tells the source what comes, and that somebody is there while nothing does.
async fn tell(
    mut writer: impl AsyncWrite + Unpin,
    window: &Window<'_>,
    mut to_tell: mpsc::Receiver<AnswerWithData>,
) -> io::Result<()> {
    write_both(&mut writer, &encode_welcome(None), &[], SILENCE).await?;
    loop {
        let reply = match timeout(HEARTBEAT, to_tell.recv()).await {
            Ok(Some(reply)) => reply,
            Ok(None) => return writer.shutdown().await,
            Err(_) => AnswerWithData::bare(Answer::Alive),
        };
        // Before it is written: once the source has it, it may send as much again.
        if let Answer::Done { handle, .. } | Answer::Data { handle, .. } | Answer::Differs { handle } =
            reply.answer
        {
            window.hold(|requests| requests.let_go(handle));
        }
        let data = reply.data.as_deref().unwrap_or_default();
        write_both(&mut writer, &reply.answer.encode(), data, SILENCE).await?;
    }
}
