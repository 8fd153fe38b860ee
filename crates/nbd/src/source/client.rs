//! The local QEMU: one client, who knows the disk's name.

use std::io;
use std::sync::Arc;

use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc;
use tokio::task::JoinSet;
use tokio::time::timeout;
use tracing::debug;

use super::Entrance;
use super::payload::Payload;
use super::shared::{Reply, Shared};
use crate::command::{Command, Operation};
use crate::error::SplitterError;
use crate::limits::{CANDIDATES_MAX, CLIENT_COMES, DISK_ANSWERS, GREETING};
use crate::nbd::{self, Offered, REQUEST_BYTES, Request, Unserved};
use crate::wire::{read_full, read_next, write_both};

/// Waits for the client, and serves it until it disconnects.
pub(super) async fn serve(
    entrance: Entrance,
    shared: Arc<Shared>,
    replies: mpsc::Receiver<Reply>,
) -> Result<(), SplitterError> {
    let chosen = enter(entrance, &shared);
    let stream = timeout(CLIENT_COMES, chosen).await.map_err(|_| SplitterError::NoClient)??;
    let (reader, writer) = stream.into_split();
    tokio::select! {
        read = read_requests(reader, &shared) => read,
        wrote = write_replies(writer, &shared, replies) => wrote,
    }
}

async fn enter(entrance: Entrance, shared: &Arc<Shared>) -> Result<TcpStream, SplitterError> {
    match entrance {
        // Once one is chosen, the kernel refuses others.
        Entrance::Own(listener) => choose(&listener, shared).await,
        Entrance::Reception(client) => client.await.map_err(|_| SplitterError::NoClient),
    }
}

/// The first client that knows the name. Others are turned away, and hold up nobody.
async fn choose(listener: &TcpListener, shared: &Arc<Shared>) -> Result<TcpStream, SplitterError> {
    let mut candidates = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept(), if candidates.len() < CANDIDATES_MAX => {
                let (stream, _) = accepted.map_err(SplitterError::client)?;
                candidates.spawn(timeout(GREETING, negotiate(stream, Arc::clone(shared))));
            }
            Some(tried) = candidates.join_next() => match tried {
                Ok(Ok(Ok(stream))) => return Ok(stream),
                Ok(Ok(Err(error))) => debug!(%error, "refused an NBD client"),
                Ok(Err(_)) | Err(_) => debug!("an NBD client took too long to say what it wants"),
            }
        }
    }
}

async fn negotiate(mut stream: TcpStream, shared: Arc<Shared>) -> Result<TcpStream, SplitterError> {
    stream.set_nodelay(true).map_err(SplitterError::client)?;
    let offered = Offered { name: shared.name().to_owned(), disk_bytes: shared.export().size_bytes };
    nbd::offer(&mut stream, &[offered]).await?;
    Ok(stream)
}

/// Ends when the client disconnects, once all is replied to.
async fn read_requests(mut reader: impl AsyncRead + Unpin, shared: &Shared) -> Result<(), SplitterError> {
    loop {
        let header: Option<[u8; REQUEST_BYTES]> =
            read_next(&mut reader, DISK_ANSWERS).await.map_err(SplitterError::client)?;
        let header = header.ok_or_else(|| SplitterError::client(io::ErrorKind::UnexpectedEof.into()))?;
        let request = nbd::decode_request(&header, shared.export().size_bytes);
        match request.map_err(SplitterError::ClientMalformed)? {
            Request::Command { cookie, command } => take(&mut reader, shared, cookie, command).await?,
            Request::Unserved(unserved) => refuse(&mut reader, shared, unserved).await?,
            Request::Disconnect => {
                shared.all_replied().await;
                return Ok(());
            }
        }
    }
}

async fn take(
    reader: &mut (impl AsyncRead + Unpin),
    shared: &Shared,
    cookie: u64,
    command: Command,
) -> Result<(), SplitterError> {
    shared.make_room(command.held_bytes()).await;
    let data = match command.operation {
        Operation::Write => Some(read_data(reader, shared, command.length).await?),
        _ => None,
    };
    shared.submit(cookie, command, data);
    Ok(())
}

async fn read_data(
    reader: &mut (impl AsyncRead + Unpin),
    shared: &Shared,
    length: u32,
) -> Result<Payload, SplitterError> {
    let mut buffer = shared.buffers.take(length as usize);
    read_full(reader, &mut buffer, DISK_ANSWERS).await.map_err(SplitterError::client)?;
    Ok(Payload::whole(buffer))
}

async fn refuse(
    reader: &mut (impl AsyncRead + Unpin),
    shared: &Shared,
    unserved: Unserved,
) -> Result<(), SplitterError> {
    shared.make_room(0).await;
    read_data(reader, shared, unserved.data_bytes).await?;
    shared.reply(Reply { cookie: unserved.cookie, error: Some(unserved.error), data: None, command: None });
    Ok(())
}

async fn write_replies(
    mut writer: impl AsyncWrite + Unpin,
    shared: &Shared,
    mut replies: mpsc::Receiver<Reply>,
) -> Result<(), SplitterError> {
    loop {
        let reply = replies.recv().await.expect("the other end is in what is shared");
        let header = nbd::encode_reply(nbd::Reply { cookie: reply.cookie, error: reply.error });
        // Without an error a READ has its data, and nothing else has any.
        let data = reply.data.as_ref().filter(|_| reply.error.is_none());
        let data = data.map_or(&[][..], Payload::bytes);
        write_both(&mut writer, &header, data, DISK_ANSWERS).await.map_err(SplitterError::client)?;
        shared.has_replied(&reply);
    }
}
