//! One connection: a thread that reads from the program, and one that writes to the wire.

use std::io;
use std::net::{Shutdown, TcpStream};
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
use crate::preamble;
use crate::queue::Outgoing;
use crate::sockets::{spawn, wait_for, write_all};

/// How long the receiver may take to accept a connection.
const CONNECT_DEADLINE: Duration = Duration::from_secs(5);

/// How long a block may wait for more to fill it.
const FILL_WAIT: Duration = Duration::from_millis(1);

const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

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
    let wire = connect(shared, lane)?;
    let broke = |error: io::Error| RelayError::Wire(Arc::new(error));
    let (mut unsent_bytes, mut waited) = (0, false);
    // The first block as if the wire were the limit: if it is none, that costs a moment, once.
    let mut is_first = true;
    loop {
        shared.wait_front(lane);
        let limit = shared.unsent_bytes.load(Ordering::Relaxed);
        if limit != unsent_bytes {
            SockRef::from(&wire).set_tcp_notsent_lowat(limit).map_err(broke)?;
            unsent_bytes = limit;
        }
        waited = wait_for_wire(shared, lane, &wire, waited).map_err(broke)?;
        waited |= shared.wait_pace(lane);
        match shared.next(lane, waited || std::mem::take(&mut is_first)) {
            Next::Block(block) => send(shared, &wire, block).map_err(broke)?,
            Next::End => {
                shared.set_waits_for_wire(lane, false);
                write_all(&wire, &Frame::End.encode(), &[]).map_err(broke)?;
                return wire.shutdown(Shutdown::Write).map_err(broke);
            }
            Next::Closed => return Ok(()),
        }
    }
}

fn connect(shared: &Shared, lane: usize) -> Result<TcpStream, RelayError> {
    let address = shared.settings.destination;
    let failed = |error: io::Error| RelayError::Connect { address, source: Arc::new(error) };
    let wire = TcpStream::connect_timeout(&address, CONNECT_DEADLINE).map_err(failed)?;
    shared.wire.add(&wire).map_err(failed)?;
    wire.set_nodelay(true).map_err(failed)?;
    let index = u8::try_from(lane).expect("a sender has no more connections than CONNECTIONS_MAX");
    write_all(&wire, &preamble::encode(&shared.settings.token, index), &[]).map_err(failed)?;
    Ok(wire)
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

fn send(shared: &Shared, wire: &TcpStream, block: Outgoing) -> io::Result<()> {
    let codec = block.packed.as_ref().map(|packed| packed.codec);
    let packing = codec.map_or(Packing::Raw, Packing::from);
    let (bytes, raw_bytes) = (block.bytes(), block.raw.len());
    let header = Frame::Block { packing, raw_bytes, wire_bytes: bytes.len() }.encode();
    write_all(wire, &header, bytes)?;
    shared.counters.sent(raw_bytes, header.len() + bytes.len(), codec);
    shared.sent(block);
    Ok(())
}
