//! One connection: a thread that reads from the program, and one that writes to the wire.

use std::io;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::{PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use socket2::SockRef;

use super::shared::{Next, Shared};
use crate::error::RelayError;
use crate::frame::{Frame, Packing};
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
    while let Some(mut block) = shared.empty_block(lane) {
        wait_for(program, PollFlags::IN, None)?;
        // With the read timeout: a full block, or what has come by then.
        match recv(program, spare_capacity(&mut block), RecvFlags::WAITALL) {
            Ok((0, _)) => {
                shared.end(lane);
                return Ok(());
            }
            Ok(_) => shared.push(lane, block),
            Err(Errno::INTR | Errno::AGAIN) => {}
            Err(error) => return Err(error.into()),
        }
    }
    Ok(())
}

fn write(shared: &Shared, lane: usize) -> Result<(), RelayError> {
    let mut wire = shared.settings.connect(lane, &shared.wire, &shared.counters)?;
    let (mut unsent_bytes, mut waited) = (0, false);
    // The first block as if the wire were the limit: if it is none, that costs a moment, once.
    let mut is_first = true;
    loop {
        shared.wait_front(lane);
        let limit = shared.unsent_bytes.load(Ordering::Relaxed);
        if limit != unsent_bytes {
            SockRef::from(wire.socket()).set_tcp_notsent_lowat(limit).map_err(RelayError::wire)?;
            unsent_bytes = limit;
        }
        waited = wait_for_wire(shared, lane, wire.socket(), waited).map_err(RelayError::wire)?;
        waited |= shared.wait_pace(lane);
        match shared.next(lane, waited || std::mem::take(&mut is_first)) {
            Next::Block(block) => send(shared, &mut wire, block)?,
            Next::End => {
                shared.set_waits_for_wire(lane, false);
                wire.send(&Frame::End.encode(), &[])?;
                return wire.finish();
            }
            Next::Closed => return Ok(()),
        }
    }
}

/// Waits until the kernel has little left to send: what goes out is chosen only then. Gives whether it had
/// to wait; `before`, whether it had to the last time.
fn wait_for_wire(shared: &Shared, lane: usize, wire: &TcpStream, before: bool) -> io::Result<bool> {
    let is_ready = wait_for(wire, PollFlags::OUT, Some(&AT_ONCE))?;
    if !is_ready || before {
        shared.set_waits_for_wire(lane, !is_ready);
    }
    if !is_ready {
        // A wire that takes nothing any more is for the owner to see; breaking wakes it.
        wait_for(wire, PollFlags::OUT, None)?;
    }
    Ok(!is_ready)
}

fn send(shared: &Shared, wire: &mut Wire, block: Outgoing) -> Result<(), RelayError> {
    let codec = block.packed.as_ref().map(|packed| packed.codec);
    let packing = codec.map_or(Packing::Raw, Packing::from);
    let (bytes, raw_bytes) = (block.bytes(), block.raw.len());
    let header = Frame::Block { packing, raw_bytes, wire_bytes: bytes.len() }.encode();
    let wire_bytes = wire.send(&header, bytes)?;
    shared.counters.sent(raw_bytes, wire_bytes, codec);
    shared.sent(block);
    Ok(())
}
