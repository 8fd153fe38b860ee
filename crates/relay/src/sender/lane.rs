//! One connection: a thread that reads from the program, and one that writes to the wire.

use std::io;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::event::{PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use socket2::SockRef;

use super::shared::{Next, Shared};
use crate::block::Block;
use crate::error::RelayError;
use crate::frame::Frame;
use crate::multifd::Walker;
use crate::queue::Outgoing;
use crate::sockets::{spawn, wait_for};
use crate::wire::Wire;

/// How long a block may wait for more to fill it.
pub(super) const FILL_WAIT: Duration = Duration::from_millis(1);

pub(super) const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Begins to relay a connection of the program.
pub(super) fn begin(shared: &Arc<Shared>, lane: usize, program: UnixStream) -> io::Result<()> {
    shared.program.add(&program)?;
    program.set_read_timeout(Some(FILL_WAIT))?;
    let (reading, writing) = (Arc::clone(shared), Arc::clone(shared));
    spawn(format!("relay-read-{lane}"), move || {
        if let Err(error) = read(&reading, lane, &program) {
            reading.fail(RelayError::Local(Arc::new(error)));
        }
    })?;
    spawn(format!("relay-write-{lane}"), move || match write(&writing, lane) {
        Ok(()) => writing.ended(),
        Err(error) => writing.fail(error),
    })
}

fn read(shared: &Shared, lane: usize, program: &UnixStream) -> io::Result<()> {
    let mut walker = Walker::new();
    while let Some(mut block) = shared.empty_block(lane) {
        wait_for(program, PollFlags::IN, None)?;
        block.begin(&walker);
        if !fill(program, &mut block, &mut walker)? {
            shared.end(lane);
            return Ok(());
        }
        shared.push(lane, block);
    }
    Ok(())
}

/// Fills a block with whole pages, as far as there is room, up to a sync; or with what has come by the read
/// timeout. False if the program has closed the connection and sent nothing more.
fn fill(program: &UnixStream, block: &mut Block, walker: &mut Walker) -> io::Result<bool> {
    loop {
        let rest = block.rest(walker);
        let wanted = rest.len();
        if wanted == 0 {
            return Ok(true);
        }
        let came = match recv(program, rest, RecvFlags::WAITALL) {
            Ok((came, _)) => came,
            Err(Errno::INTR) => continue,
            Err(Errno::AGAIN) if !block.is_empty() => return Ok(true),
            Err(Errno::AGAIN) => {
                wait_for(program, PollFlags::IN, None)?;
                continue;
            }
            Err(error) => return Err(error.into()),
        };
        block.came(came, walker);
        if came < wanted || walker.syncs() > block.syncs() {
            return Ok(came > 0 || !block.is_empty());
        }
    }
}

fn write(shared: &Shared, lane: usize) -> Result<(), RelayError> {
    let mut wire = shared.settings.connect(lane, &shared.wire, &shared.counters)?;
    let mut unsent_bytes = 0;
    // The first block as if the wire were the limit: if it is none, that costs a moment, once.
    let mut is_first = true;
    loop {
        shared.wait_front(lane);
        let limit = shared.unsent_bytes.load(Ordering::Relaxed);
        if limit != unsent_bytes {
            SockRef::from(wire.socket()).set_tcp_notsent_lowat(limit).map_err(RelayError::wire)?;
            unsent_bytes = limit;
        }
        wait_for_wire(shared, lane, wire.socket()).map_err(RelayError::wire)?;
        shared.wait_pace(lane);
        match shared.next(lane, std::mem::take(&mut is_first)) {
            Next::Block(frame, block) => send(shared, &mut wire, frame, block)?,
            Next::End => {
                wire.send(&Frame::End.encode(), &[])?;
                return wire.finish();
            }
            Next::Closed => return Ok(()),
        }
    }
}

/// Waits until the kernel has little left to send: what goes out is chosen only then.
fn wait_for_wire(shared: &Shared, lane: usize, wire: &TcpStream) -> io::Result<()> {
    if !wait_for(wire, PollFlags::OUT, Some(&AT_ONCE))? {
        shared.waits_for_wire(lane);
        // A wire that takes nothing any more is for the owner to see; breaking wakes it.
        wait_for(wire, PollFlags::OUT, None)?;
    }
    Ok(())
}

fn send(shared: &Shared, wire: &mut Wire, frame: Frame, block: Outgoing) -> Result<(), RelayError> {
    let codec = block.packed.as_ref().and_then(|packed| packed.codec);
    let wire_bytes = wire.send(&frame.encode(), block.bytes())?;
    shared.counters.sent(block.raw.len(), wire_bytes, codec);
    if block.is_overtaken {
        shared.counters.overtaken(block.raw.len());
    }
    shared.sent(block);
    Ok(())
}
