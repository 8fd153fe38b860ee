//! The blocks of a sender on their way from the program to the wire, and which of them to pack. Knows
//! neither threads nor sockets.
//!
//! The wire takes whatever is at the front of a stream, packed or not. So the cores begin at the back, with the block
//! that has the longest time left: if they do not keep up, the wire never meets a half-packed block. But blocks that a
//! wire waits for come first. They must be packed fast, and so must all blocks while many wait; otherwise there is
//! time to pack them small.

use std::collections::VecDeque;
use std::sync::Arc;

use drainpipe_engine::transfer::codec::Codec;

use crate::block::{BLOCK_BYTES_MAX, Block};
use crate::figures::PastCodec;
use crate::frame::{Frame, Packing};
use crate::multifd::PAGE_BYTES;
use crate::page_cache::PageChange;

/// Where more than one in so many blocks waits to be packed, those that pack are behind.
const BEHIND_ONE_IN: usize = 4;

/// The streams of a sender, one for each connection.
#[derive(Debug)]
pub(crate) struct Streams {
    streams: Vec<Stream>,
    next_number: u64,
}

#[derive(Debug, Default)]
struct Stream {
    blocks: VecDeque<Queued>,
    waits_for_wire: bool,
    is_wanted: bool,
    has_ended: bool,
}

#[derive(Debug)]
struct Queued {
    number: u64,
    raw_bytes: usize,
    state: BlockState,
}

#[derive(Debug)]
enum BlockState {
    Waiting(Arc<Block>),
    InWork(Arc<Block>),
    // As it was is not needed any more.
    Packed(Packed),
    /// It does not shrink.
    Plain(Arc<Block>),
}

/// A packed block.
#[derive(Debug)]
pub(crate) struct Packed {
    /// None if only the changes of its pages are sent.
    pub(crate) codec: Option<Codec>,
    pub(crate) bytes: Vec<u8>,
    /// Length before packing by the codec.
    pub(crate) unpacked_bytes: usize,
    /// Whether some of it is as it was, see [`crate::entropy_filter`].
    pub(crate) is_parted: bool,
    pub(crate) past_codec: PastCodec,
    /// What the other end learns by it of pages.
    pub(crate) change: Option<PageChange>,
}

/// A block to be packed.
#[derive(Debug)]
pub(crate) struct Work {
    stream: usize,
    number: u64,
    pub(crate) raw: Arc<Block>,
    /// Whether it is to be packed fast rather than small: the wire waits for it, or many others are to be packed before
    /// the wire takes them.
    pub(crate) is_urgent: bool,
}

/// What is at the front of a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Front {
    /// Nothing yet.
    Empty,
    /// Nothing, and nothing will come.
    End,
    /// A block of which nobody knows yet whether it shrinks.
    Waiting,
    /// A block that is being packed.
    InWork,
    /// A block that is as short as it will be.
    Ready,
}

impl Packed {
    /// What the sender's copies of pages take, from when it is packed until it goes out, beside the copies that they
    /// replace.
    fn copies_bytes(&self) -> usize {
        let taken = self.change.iter().flat_map(|change| &change.taken);
        taken.filter(|taken| taken.replaces).count() * PAGE_BYTES
    }
}

/// What a block is sent as.
#[derive(Debug)]
pub(crate) enum Content {
    Raw(Arc<Block>),
    Packed(Packed),
}

/// A block that goes out.
#[derive(Debug)]
pub(crate) struct Outgoing {
    /// Length as it came from the program.
    pub(crate) raw_bytes: usize,
    pub(crate) content: Content,
    /// Whether it goes before it was packed, or found not to shrink.
    pub(crate) is_overtaken: bool,
}

impl Outgoing {
    /// The data to send: packed, if it is.
    pub(crate) fn bytes(&self) -> &[u8] {
        match &self.content {
            Content::Raw(raw) => raw,
            Content::Packed(packed) => &packed.bytes,
        }
    }

    /// What the other end learns by it of pages, once.
    pub(crate) fn take_change(&mut self) -> Option<PageChange> {
        match &mut self.content {
            Content::Raw(_) => None,
            Content::Packed(packed) => packed.change.take(),
        }
    }

    /// What is said of it.
    pub(crate) fn frame(&self) -> Frame {
        let wire_bytes = self.bytes().len();
        let Content::Packed(packed) = &self.content else {
            return Frame::Block {
                packing: Packing::Raw,
                is_paged: false,
                is_parted: false,
                raw_bytes: wire_bytes,
                wire_bytes,
            };
        };
        let packing = packed.codec.map_or(Packing::Raw, Packing::from);
        Frame::Block {
            packing,
            is_paged: packed.change.is_some(),
            is_parted: packed.is_parted,
            raw_bytes: packed.unpacked_bytes,
            wire_bytes,
        }
    }
}

impl Streams {
    pub(crate) fn new(count: usize) -> Self {
        Self { streams: std::iter::repeat_with(Stream::default).take(count).collect(), next_number: 0 }
    }

    pub(crate) fn count(&self) -> usize {
        self.streams.len()
    }

    /// Blocks that wait in a stream.
    pub(crate) fn depth(&self, stream: usize) -> usize {
        self.streams[stream].blocks.len()
    }

    /// A block came from the program.
    pub(crate) fn push(&mut self, stream: usize, raw: Block) {
        let (raw_bytes, state) = (raw.len(), BlockState::Waiting(Arc::new(raw)));
        let block = Queued { number: self.next_number, raw_bytes, state };
        self.next_number += 1;
        self.streams[stream].blocks.push_back(block);
    }

    /// The program has closed its connection.
    pub(crate) fn end(&mut self, stream: usize) {
        self.streams[stream].has_ended = true;
    }

    /// The wire takes nothing of this stream for now, or takes again. Only where it does not is there time to
    /// pack.
    pub(crate) fn set_waits_for_wire(&mut self, stream: usize, waits: bool) {
        self.streams[stream].waits_for_wire = waits;
    }

    /// Whether the wire takes nothing of some stream for now.
    fn wire_holds_up_some(&self) -> bool {
        self.streams.iter().any(|stream| stream.waits_for_wire)
    }

    /// Whether the wire takes nothing of half of the streams at least. Otherwise most wait for something else, and
    /// those that the wire holds up have only had more to send than others.
    pub(crate) fn is_wire_full(&self) -> bool {
        let held_up = self.streams.iter().filter(|stream| stream.waits_for_wire).count();
        2 * held_up >= self.streams.len()
    }

    /// The wire waits for the front of a stream to be packed, or does no longer.
    pub(crate) fn set_wanted(&mut self, stream: usize, is_wanted: bool) {
        self.streams[stream].is_wanted = is_wanted;
    }

    /// Whether the wire waits for the front of a stream to be packed.
    pub(crate) fn is_wanted(&self, stream: usize) -> bool {
        self.streams[stream].is_wanted
    }

    /// The block that the wire has waited for the longest; or else the one that has the longest time until the
    /// wire takes it.
    pub(crate) fn take_work(&mut self) -> Option<Work> {
        let wanted = self.wanted();
        let (at, index) = wanted.or_else(|| self.deepest())?;
        let block = &mut self.streams[index].blocks[at];
        let BlockState::Waiting(raw) = &block.state else { return None };
        let raw = Arc::clone(raw);
        block.state = BlockState::InWork(Arc::clone(&raw));
        let number = block.number;
        Some(Work { stream: index, number, raw, is_urgent: wanted.is_some() || self.is_behind() })
    }

    /// How often [`Self::take_work`] would give some in a row, of so many times at most.
    pub(crate) fn work_up_to(&self, most: usize) -> usize {
        let is_for_all = self.wire_holds_up_some();
        let streams = self.streams.iter();
        let blocks = streams.flat_map(|stream| {
            let count = if is_for_all { stream.blocks.len() } else { usize::from(stream.is_wanted) };
            stream.blocks.iter().take(count)
        });
        blocks.filter(|block| matches!(block.state, BlockState::Waiting(_))).take(most).count()
    }

    fn is_behind(&self) -> bool {
        let blocks = self.streams.iter().flat_map(|stream| &stream.blocks);
        let waiting = blocks.filter(|block| matches!(block.state, BlockState::Waiting(_))).count();
        waiting * BEHIND_ONE_IN > self.streams.iter().map(|stream| stream.blocks.len()).sum()
    }

    fn wanted(&self) -> Option<(usize, usize)> {
        let wanted = self.streams.iter().enumerate().filter(|(_, stream)| stream.is_wanted);
        let fronts = wanted.filter_map(|(index, stream)| match stream.blocks.front()? {
            Queued { number, state: BlockState::Waiting(_), .. } => Some((*number, index)),
            _ => None,
        });
        fronts.min().map(|(_, index)| (0, index))
    }

    fn deepest(&self) -> Option<(usize, usize)> {
        if !self.wire_holds_up_some() {
            return None;
        }
        let deepest = self.streams.iter().enumerate().filter_map(|(index, stream)| {
            let at = stream.blocks.iter().rposition(|block| matches!(block.state, BlockState::Waiting(_)))?;
            Some((at, index))
        });
        deepest.max()
    }

    /// Work was done: packed, or found not to shrink. Gives the stream in which the block still waits; what was
    /// packed if it went out meanwhile.
    pub(crate) fn finish(&mut self, work: &Work, packed: Option<Packed>) -> Result<usize, Option<Packed>> {
        let blocks = &mut self.streams[work.stream].blocks;
        let Some(block) = blocks.iter_mut().find(|block| block.number == work.number) else {
            return Err(packed);
        };
        block.state = packed.map_or_else(|| BlockState::Plain(Arc::clone(&work.raw)), BlockState::Packed);
        Ok(work.stream)
    }

    /// What all blocks that wait take more than as they came, in bytes: by copies of pages. One that is being packed
    /// is taken to have the most copies that it may have.
    pub(crate) fn extra_bytes(&self) -> usize {
        let blocks = self.streams.iter().flat_map(|stream| &stream.blocks);
        blocks
            .map(|block| match &block.state {
                BlockState::Waiting(_) | BlockState::Plain(_) => 0,
                BlockState::InWork(_) => BLOCK_BYTES_MAX,
                BlockState::Packed(packed) => {
                    (packed.bytes.capacity() + packed.copies_bytes()).saturating_sub(BLOCK_BYTES_MAX)
                }
            })
            .sum()
    }

    pub(crate) fn front(&self, stream: usize) -> Front {
        let stream = &self.streams[stream];
        match stream.blocks.front() {
            Some(block) => match block.state {
                BlockState::Waiting(_) => Front::Waiting,
                BlockState::InWork(_) => Front::InWork,
                BlockState::Packed(_) | BlockState::Plain(_) => Front::Ready,
            },
            None if stream.has_ended => Front::End,
            None => Front::Empty,
        }
    }

    /// Takes what is at the front, as far as it is packed.
    pub(crate) fn pop(&mut self, stream: usize) -> Option<Outgoing> {
        let Queued { raw_bytes, state, .. } = self.streams[stream].blocks.pop_front()?;
        let is_overtaken = matches!(state, BlockState::Waiting(_) | BlockState::InWork(_));
        let content = match state {
            BlockState::Packed(packed) => Content::Packed(packed),
            BlockState::Waiting(raw) | BlockState::InWork(raw) | BlockState::Plain(raw) => Content::Raw(raw),
        };
        Some(Outgoing { raw_bytes, content, is_overtaken })
    }
}

#[cfg(test)]
mod simulation;

#[cfg(test)]
mod tests {
    use super::*;

    fn streams(blocks: &[u8]) -> Streams {
        let mut streams = Streams::new(2);
        for block in blocks {
            streams.push(0, Block::from(&[*block][..]));
        }
        streams
    }

    pub(super) fn packed(bytes: Vec<u8>, unpacked_bytes: usize) -> Packed {
        Packed {
            codec: Some(Codec::Lz4),
            bytes,
            unpacked_bytes,
            is_parted: false,
            past_codec: PastCodec::default(),
            change: None,
        }
    }

    #[test]
    fn nothing_is_packed_while_the_wire_takes_all() {
        let mut streams = streams(&[1, 2]);
        assert!(streams.take_work().is_none());
        streams.set_waits_for_wire(0, true);
        assert!(streams.take_work().is_some());
    }

    #[test]
    fn the_cores_begin_where_the_wire_comes_last_and_the_order_stays() {
        let mut streams = streams(&[1, 2, 3]);
        streams.push(1, Block::from(&[9][..]));
        streams.set_waits_for_wire(0, true);
        streams.set_waits_for_wire(1, true);
        let last = streams.take_work().unwrap();
        assert_eq!(**last.raw, [3]);
        let second = streams.take_work().unwrap();
        assert_eq!(**second.raw, [2]);
        assert_eq!(streams.finish(&last, Some(packed(vec![30], 1))).unwrap(), 0);
        assert_eq!(streams.front(0), Front::Waiting);
        assert_eq!(streams.pop(0).unwrap().bytes(), [1]);
        assert_eq!(streams.front(0), Front::InWork);
        let taken = streams.pop(0).unwrap();
        assert!(matches!(&taken.content, Content::Raw(raw) if ***raw == [2]));
        let gone = streams.finish(&second, Some(packed(vec![20], 1))).unwrap_err();
        assert_eq!(gone.unwrap().bytes, [20], "it is gone as it was");
        let Content::Packed(third) = streams.pop(0).unwrap().content else { panic!("it was packed in time") };
        assert_eq!(third.bytes, [30]);
        assert_eq!(streams.front(0), Front::Empty);
        streams.end(0);
        assert_eq!(streams.front(0), Front::End);
        assert_eq!((streams.depth(0), streams.depth(1)), (0, 1));
    }

    #[test]
    fn what_the_wire_waits_for_comes_first() {
        let mut streams = streams(&[1, 2, 3]);
        streams.push(1, Block::from(&[9][..]));
        streams.set_waits_for_wire(0, true);
        streams.set_waits_for_wire(1, true);
        streams.set_wanted(1, true);
        streams.set_wanted(0, true);
        assert_eq!((streams.work_up_to(9), streams.work_up_to(3)), (4, 3));
        let taken = [(); 3].map(|()| *streams.take_work().unwrap().raw.first().unwrap());
        assert_eq!(taken, [1, 9, 3], "the fronts by age, then from the back");
        assert_eq!(streams.work_up_to(9), 1);
        streams.set_wanted(0, false);
        assert_eq!(streams.front(0), Front::InWork);
    }

    #[test]
    fn what_the_wire_waits_for_is_urgent_and_so_is_all_while_many_wait() {
        let mut streams = streams(&[0; 8]);
        streams.set_waits_for_wire(0, true);
        let urgent: Vec<bool> = (0..7).map(|_| streams.take_work().unwrap().is_urgent).collect();
        assert_eq!(urgent, [true, true, true, true, true, false, false], "three of eight waited, then two");
        streams.set_wanted(0, true);
        assert!(streams.take_work().unwrap().is_urgent);
    }

    #[test]
    fn what_does_not_shrink_is_tried_once() {
        let mut streams = streams(&[1]);
        streams.set_waits_for_wire(0, true);
        let work = streams.take_work().unwrap();
        streams.finish(&work, None).unwrap();
        assert!(streams.take_work().is_none());
        assert!(matches!(streams.pop(0).unwrap().content, Content::Raw(_)));
    }
}
