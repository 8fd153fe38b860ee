//! One connection: a thread that reads from the program, and one that writes to the wire.

use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;
use std::{io, mem};

use rustix::event::{PollFlags, Timespec};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};
use socket2::SockRef;

use super::shared::{Next, Shared};
use crate::block::Block;
use crate::error::RelayError;
use crate::figures::{Counters, PastCodec};
use crate::frame::Frame;
use crate::multifd::Walker;
use crate::pace::{PacedSocket, SendQuota};
use crate::queue::{Content, Outgoing, Packed};
use crate::sockets::{spawn, wait_for};
use crate::wire::Outward;

/// How long a block may wait for more to fill it.
pub(super) const FILL_WAIT: Duration = Duration::from_millis(1);

pub(super) const AT_ONCE: Timespec = Timespec { tv_sec: 0, tv_nsec: 0 };

/// Begins to relay a connection of the program.
pub(super) fn begin(shared: &Arc<Shared>, stream: usize, program: UnixStream) -> io::Result<()> {
    shared.program.add(&program)?;
    program.set_read_timeout(Some(FILL_WAIT))?;
    let (reading, writing) = (Arc::clone(shared), Arc::clone(shared));
    let answered = program.try_clone()?;
    spawn(format!("relay-read-{stream}"), move || {
        if let Err(error) = read(&reading, stream, &program) {
            reading.fail(RelayError::Local(Arc::new(error)));
        }
        if reading.is_closed() {
            reading.rest.take(&program);
        }
    })?;
    spawn(format!("relay-write-{stream}"), move || match write(&writing, stream, &answered) {
        Ok(()) => writing.ended(),
        Err(error) => writing.fail(error),
    })
}

fn read(shared: &Shared, stream: usize, program: &UnixStream) -> io::Result<()> {
    let mut walker = Walker::new();
    while let Some(mut block) = shared.empty_block(stream) {
        wait_for(program, PollFlags::IN, None)?;
        block.begin(&walker);
        if !fill(program, &mut block, &mut walker)? {
            shared.end(stream);
            return Ok(());
        }
        shared.push(stream, block);
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

fn write(shared: &Shared, stream: usize, program: &UnixStream) -> Result<(), RelayError> {
    let mut wire = shared.settings.connect(stream, program, &shared.wire, &shared.counters)?;
    let (mut paced, mut unsent_bytes) = (PacedSocket::new(), 0);
    // The first block as if the wire were the limit: if it is none, that costs a moment, once.
    let mut is_first = true;
    loop {
        shared.wait_front(stream);
        let limit = shared.unsent_bytes.load(Ordering::Relaxed);
        if limit != unsent_bytes {
            SockRef::from(wire.socket()).set_tcp_notsent_lowat(limit).map_err(RelayError::wire)?;
            unsent_bytes = limit;
        }
        wait_for_wire(shared, stream, wire.socket()).map_err(RelayError::wire)?;
        shared.wait_pace(stream);
        match shared.next(stream, mem::take(&mut is_first)) {
            Next::Block(frame, block, quota) => {
                let wire_bytes = send(shared, stream, &mut wire, &mut paced, quota, frame, &block)?;
                count(&shared.counters, &block, wire_bytes);
                shared.sent(block);
            }
            Next::End => {
                wire.send(&Frame::End.encode(), &[])?;
                return wire.finish();
            }
            Next::Closed => return Ok(()),
        }
    }
}

/// Waits until the kernel has little left to send: what goes out is chosen only then.
fn wait_for_wire(shared: &Shared, stream: usize, wire: &TcpStream) -> io::Result<()> {
    if !wait_for(wire, PollFlags::OUT, Some(&AT_ONCE))? {
        shared.waits_for_wire(stream);
        // A wire that takes nothing any more is for the owner to see; breaking wakes it.
        wait_for(wire, PollFlags::OUT, None)?;
    }
    Ok(())
}

/// Part by part, as the limit has it, of which the first one's turn has come. What has gone out; not all, once all is over.
fn send(
    shared: &Shared,
    stream: usize,
    wire: &mut Outward,
    paced: &mut PacedSocket,
    first: SendQuota,
    frame: Frame,
    block: &Outgoing,
) -> Result<usize, RelayError> {
    let header = frame.encode();
    let mut left = block.bytes();
    let mut quota = SendQuota { bytes: first.bytes.saturating_sub(header.len()), ..first };
    let (mut header, mut wire_bytes) = (&header[..], 0);
    loop {
        paced.pace(wire.socket(), quota.socket_bytes_per_s).map_err(RelayError::wire)?;
        let (part, rest) = left.split_at(left.len().min(quota.bytes));
        wire_bytes += wire.send(mem::take(&mut header), part)?;
        left = rest;
        if left.is_empty() {
            return Ok(wire_bytes);
        }
        let Some(next) = shared.take_quota(stream, left.len()) else { return Ok(wire_bytes) };
        quota = next;
    }
}

fn count(counters: &Counters, block: &Outgoing, wire_bytes: usize) {
    counters.sent(block.raw_bytes, wire_bytes);
    if let Content::Packed(Packed { codec, past_codec, .. }) = &block.content {
        let PastCodec { plain_bytes, changed_bytes } = *past_codec;
        counters.packed_by_changes(changed_bytes);
        if let Some(codec) = codec {
            counters.packed_by(*codec, block.raw_bytes - plain_bytes - changed_bytes);
        }
    }
    if block.is_overtaken {
        counters.overtaken(block.raw_bytes);
    }
}

#[cfg(test)]
mod tests {
    use drainpipe_engine::transfer::codec::Codec;

    use super::*;
    use crate::entropy_filter::tests::noise;
    use crate::figures::Figures;
    use crate::multifd::{PAGE_BYTES, PageAt, PageId};
    use crate::page_cache::PageCache;
    use crate::queue::Streams;
    use crate::sender::compressors::{Tools, pack};
    use crate::sender::shared::Order;

    /// A block with these pages is packed, sent, and counted.
    fn send(counters: &Counters, cache: &mut PageCache, raw: &[u8], pages: &[PageAt], syncs: u64) {
        let mut streams = Streams::new(1);
        streams.push(0, Block::from(raw));
        streams.set_waits_for_wire(0, true);
        let (work, taken) = (streams.take_work().unwrap(), cache.take(pages, syncs));
        let order = Order { work, codec: Codec::Zstd1, trier: None, taken };
        let done = pack(&mut Tools::new(), order).unwrap();
        streams.finish(&done.work, done.packed).unwrap();
        let mut block = streams.pop(0).unwrap();
        if let Some(change) = block.take_change() {
            cache.change(change);
        }
        count(counters, &block, block.bytes().len());
    }

    #[test]
    fn a_page_told_by_what_has_changed_of_it_did_not_go_as_it_was() {
        let page = PageAt { at: 0, id: PageId { ram_block: 1, offset: 0 } };
        let (mut cache, counters) = (PageCache::new(PAGE_BYTES), Counters::default());
        let mut raw = noise(PAGE_BYTES);
        for round in 0..2 {
            raw[7] = 2;
            send(&counters, &mut cache, &raw, &[page], round);
        }
        let Figures { raw_bytes, delta_bytes, packed, .. } = counters.read();
        assert_eq!((raw_bytes, delta_bytes), (2 * PAGE_BYTES as u64, PAGE_BYTES as u64), "whole at first");
        assert_eq!((packed.lz4, packed.zstd), (0, 0));
    }

    #[test]
    fn what_is_kept_from_the_codec_goes_as_it_was() {
        let (noise, words) = (noise(4 * PAGE_BYTES), b"the and for was ".repeat(PAGE_BYTES / 16));
        let half: Vec<u8> = noise.chunks(PAGE_BYTES).flat_map(|page| [page, &words].concat()).collect();
        let pages: Vec<PageAt> = (0..8)
            .map(|page| page * PAGE_BYTES)
            .map(|at| PageAt { at, id: PageId { ram_block: 1, offset: at as u64 } })
            .collect();
        for pages in [&[][..], &pages] {
            let (mut cache, counters) = (PageCache::new(half.len()), Counters::default());
            send(&counters, &mut cache, &half, pages, 0);
            let Figures { raw_bytes, packed, delta_bytes, .. } = counters.read();
            let bytes = half.len() as u64;
            assert_eq!((raw_bytes, packed.zstd, packed.lz4, delta_bytes), (bytes, bytes / 2, 0, 0));
        }
    }
}
