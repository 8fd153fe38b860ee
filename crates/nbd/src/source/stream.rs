//! One stream, as the source sees it.

use std::io;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, AsyncWriteExt, ReadHalf, WriteHalf};
use tokio::sync::Notify;
use tokio::time::{Instant, timeout};

use super::payload::Payload;
use super::shared::Shared;
use super::wire_load::{PATIENCE_MAX, WatchedWriter};
use crate::command::{Command, Operation};
use crate::digest::Digest;
use crate::error::{Malformed, SplitterError};
use crate::frame::{ANSWER_BYTES, Answer, PACKED_LENGTH_BYTES, QUESTION_BYTES, Question, StreamNumber};
use crate::greeting::{Greeting, WELCOME_BYTES, decode_welcome};
use crate::limits::{GREETING, HEARTBEAT, LINGER, SILENCE};
use crate::pace::Turn;
use crate::scheduler::Outgoing;
use crate::wire::{read_full, write_both};

/// How long others wait for the turn of a stream that takes nothing.
const OTHERS_WAIT: Duration = Duration::from_millis(2);

/// Carries requests until the disk is done with, or the stream is lost.
pub(super) async fn carry<S>(
    shared: Arc<Shared>,
    number: StreamNumber,
    stream: S,
) -> Result<(), SplitterError>
where
    S: AsyncRead + AsyncWrite + Unpin + Send,
{
    let (mut reader, mut writer) = tokio::io::split(stream);
    let greeting = greet(&shared, number, &mut reader, &mut writer);
    timeout(GREETING, greeting).await.map_err(|_| SplitterError::Silent)??;
    let waker = Arc::new(Notify::new());
    shared.join(number, Arc::clone(&waker));
    let mut writer = WatchedWriter::new(writer, &shared.wire_load);
    let mut hearing = pin!(hear(&shared, number, &mut reader));
    let ended = tokio::select! {
        // Why it takes nothing more may be said already.
        asked = ask(&shared, number, &waker, &mut writer) => timeout(LINGER, hearing).await.unwrap_or(asked),
        heard = &mut hearing => heard,
    };
    shared.lose(number);
    ended
}

async fn greet<S: AsyncRead + AsyncWrite>(
    shared: &Shared,
    number: StreamNumber,
    reader: &mut ReadHalf<S>,
    writer: &mut WriteHalf<S>,
) -> Result<(), SplitterError> {
    let export = shared.export();
    let greeting = Greeting { session: export.session, number, disk_bytes: export.size_bytes }.encode();
    write_both(writer, &greeting, &[], SILENCE).await.map_err(SplitterError::stream)?;
    let mut welcome = [0; WELCOME_BYTES];
    read_full(reader, &mut welcome, SILENCE).await.map_err(SplitterError::stream)?;
    decode_welcome(&welcome)?.map_or(Ok(()), |refusal| Err(SplitterError::Refused(refusal)))
}

async fn ask(
    shared: &Shared,
    number: StreamNumber,
    waker: &Notify,
    writer: &mut WatchedWriter<'_, impl AsyncWrite + Unpin>,
) -> Result<(), SplitterError> {
    loop {
        while let Some(outgoing) = shared.next(number) {
            send(shared, number, &outgoing, writer).await?;
        }
        if shared.is_ending() {
            return end(writer).await.map_err(SplitterError::stream);
        }
        // Nothing within this time is the usual case, and no error.
        if timeout(HEARTBEAT, waker.notified()).await.is_err() {
            say_alive(writer).await?;
        }
    }
}

async fn say_alive(writer: &mut (impl AsyncWrite + Unpin)) -> Result<(), SplitterError> {
    let alive = Question::Alive.encode();
    write_both(writer, &alive, &[], SILENCE).await.map_err(SplitterError::stream)
}

/// Within the limit, if there is one: in its turn, and in parts.
async fn send(
    shared: &Shared,
    number: StreamNumber,
    outgoing: &Outgoing<Payload>,
    writer: &mut WatchedWriter<'_, impl AsyncWrite + Unpin>,
) -> Result<(), SplitterError> {
    let pace = &shared.export().pace;
    let (mut turn, mut patience) = (None, writer.patience());
    if pace.is_limited() {
        turn = Some(wait_for_turn(shared, writer).await?);
        let bytes = outgoing.payload.as_ref().map_or(0, |data| data.bytes().len());
        patience = Some(pace.time_of(bytes).min(PATIENCE_MAX));
    }
    let message = Message::of(shared, outgoing, patience).await;
    let (mut header, mut left) = (message.header(), message.body.bytes());
    let (bytes, begun) = (header.len() + left.len(), Instant::now());
    loop {
        let (part, rest) = left.split_at(left.len().min(pace.part_bytes()));
        pace.take(header.len() + part.len()).await;
        let mut writing = pin!(write_both(writer, header, part, SILENCE));
        let wrote = if let Ok(wrote) = timeout(OTHERS_WAIT, &mut writing).await {
            wrote
        } else {
            turn = None;
            writing.await
        };
        wrote.map_err(SplitterError::stream)?;
        shared.counting.has_sent(number, header.len() + part.len());
        if turn.is_some() {
            shared.advances();
        }
        if rest.is_empty() {
            break;
        }
        (header, left) = (&[], rest);
    }
    writer.has_written(bytes, begun);
    Ok(())
}

/// Says meanwhile that somebody is there.
async fn wait_for_turn<'shared>(
    shared: &'shared Shared,
    writer: &mut (impl AsyncWrite + Unpin),
) -> Result<Turn<'shared>, SplitterError> {
    let mut turn = pin!(shared.export().pace.turn());
    loop {
        if let Ok(turn) = timeout(HEARTBEAT, &mut turn).await {
            return Ok(turn);
        }
        shared.advances();
        say_alive(writer).await?;
    }
}

/// What follows a question.
enum Body {
    Nothing,
    /// In the place of data that are compared.
    Digest(Digest),
    Data(Payload),
    Packed(Arc<Vec<u8>>),
}

impl Body {
    async fn of(command: &Command, data: Payload, patience: Option<Duration>) -> Self {
        if command.operation == Operation::Compare {
            return Self::Digest(Digest::of(data.bytes()));
        }
        match data.packed(patience).await {
            Some(packed) => Self::Packed(packed),
            None => Self::Data(data),
        }
    }

    fn bytes(&self) -> &[u8] {
        match self {
            Self::Nothing => &[],
            Self::Digest(digest) => &digest.0,
            Self::Data(data) => data.bytes(),
            Self::Packed(packed) => packed,
        }
    }
}

/// A question as it goes out.
struct Message {
    header: [u8; QUESTION_BYTES + PACKED_LENGTH_BYTES],
    body: Body,
}

impl Message {
    /// Data wait so long to be packed.
    async fn of(shared: &Shared, outgoing: &Outgoing<Payload>, patience: Option<Duration>) -> Self {
        let (mut question, mut body) = (outgoing.question, Body::Nothing);
        if let (Question::Command { handle, command }, Some(data)) = (question, &outgoing.payload) {
            body = Body::of(&command, data.clone(), patience).await;
            if matches!(body, Body::Packed(_)) {
                question = Question::Packed { handle, command };
                shared.counting.is_packed(&command);
            }
        }
        let mut header = [0; _];
        header[..QUESTION_BYTES].copy_from_slice(&question.encode());
        let length = u32::try_from(body.bytes().len()).expect("a request's length was checked");
        header[QUESTION_BYTES..].copy_from_slice(&length.to_le_bytes());
        Self { header, body }
    }

    fn header(&self) -> &[u8] {
        let is_packed = matches!(self.body, Body::Packed(_));
        if is_packed { &self.header } else { &self.header[..QUESTION_BYTES] }
    }
}

/// Says that nothing more comes; the answer ends the stream.
async fn end(writer: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
    write_both(writer, &Question::End.encode(), &[], SILENCE).await?;
    writer.shutdown().await?;
    std::future::pending().await
}

async fn hear(
    shared: &Shared,
    number: StreamNumber,
    reader: &mut (impl AsyncRead + Unpin),
) -> Result<(), SplitterError> {
    loop {
        let mut header = [0; ANSWER_BYTES];
        read_full(reader, &mut header, SILENCE).await.map_err(SplitterError::stream)?;
        match Answer::decode(&header)? {
            Answer::Done { handle, error } => {
                shared.answered(number, handle, error.map_or(Ok(None), Err))?;
            }
            Answer::Data { handle, length } => {
                let data = read_data(shared, number, handle, length, reader).await?;
                shared.answered(number, handle, Ok(Some(data)))?;
            }
            Answer::Differs { handle } => shared.differs(number, handle)?,
            Answer::Fenced(fenced) => shared.fenced(number, fenced)?,
            Answer::Alive => {}
            Answer::Ended if shared.is_ending() => return Ok(()),
            Answer::Ended => return Err(Malformed("an end that nobody asked for").into()),
            Answer::Failed => return Err(SplitterError::DiskElsewhere),
        }
    }
}

/// Checked before memory is taken for it.
async fn read_data(
    shared: &Shared,
    number: StreamNumber,
    handle: u64,
    length: u32,
    reader: &mut (impl AsyncRead + Unpin),
) -> Result<Payload, SplitterError> {
    let command = shared.asked(number, handle)?;
    if command.operation != Operation::Read || command.length != length {
        return Err(Malformed("data that were not asked for").into());
    }
    let mut buffer = shared.buffers.take(length as usize);
    read_full(reader, &mut buffer, SILENCE).await.map_err(SplitterError::stream)?;
    Ok(Payload::whole(buffer))
}
