//! From the program to the program, by the sender's own parts and the receiver's, without threads and sockets: who
//! comes when, is decided.

use std::cell::RefCell;
use std::collections::HashMap;

use drainpipe_engine::transfer::codec::Codec;

use super::compressors::{Tools, pack};
use super::shared::{Done, Order};
use crate::block::{BLOCK_BYTES_MAX, Block};
use crate::choices::Choices;
use crate::frame::UNPACKED_BYTES_MAX;
use crate::multifd::samples::{initial, packet};
use crate::multifd::{PAGE_BYTES, Walker};
use crate::page_cache::PageCache;
use crate::page_slots::PageSlots;
use crate::queue::{Packed, Streams};
use crate::unpacking::Unpacking;

const STREAMS: usize = 3;

/// Few, so that the same ones come again.
const PAGES: usize = 6;

/// So that one input does not take long.
const STEPS_MAX: usize = 96;

/// What all blocks of an input hold, before they are packed and after; the receiver's buffers; and what the sender
/// knows of pages that came from places far apart.
pub const ROUND_TRIP_HOLDS_BYTES: usize =
    STEPS_MAX * 2 * BLOCK_BYTES_MAX + 4 * STREAMS * UNPACKED_BYTES_MAX + (4 << 20);

thread_local! {
    // zstd asks the processor what it can do for each context, and a virtual one takes its time to answer.
    static TOOLS: RefCell<Tools> = RefCell::new(Tools::new());
    static UNPACKING: RefCell<[Unpacking; STREAMS]> =
        RefCell::new([(); STREAMS].map(|()| Unpacking::new().expect("there is memory")));
}

/// What a guest's memory becomes over some connections: pages, rewritten between syncs, and what is no multifd, cut
/// into blocks, packed by any codec or sent before that, and received in any order that connections may have.
///
/// Holds: each connection brings what was sent. There is always one that need not wait for another.
pub fn round_trip(data: &[u8]) {
    let mut choices = Choices::new(data);
    let slots = 1 + choices.below(PAGES + 2);
    let mut sender = TheSender::new(slots * PAGE_BYTES);
    for _ in 0..STEPS_MAX {
        if choices.are_used_up() {
            break;
        }
        sender.step(&mut choices);
    }
    sender.send_all();
    UNPACKING.with_borrow_mut(|unpacking| {
        TheReceiver::new(&sender, slots * PAGE_BYTES, unpacking).receive_all(&mut choices);
    });
}

/// Rounds of pages that come again, packed in time and not; a connection that is opaque; pages far away.
pub fn round_trip_seeds() -> Vec<Vec<u8>> {
    let rewrite = |stream: u8, page: u8| [PACKET, stream, 1, page, 7, 3, 0x40 | 2, 1, 1, page];
    let forward = |stream: u8| [FILL, stream, 255, TAKE, 2, PACK, 0, SEND, stream];
    let round = [&rewrite(0, 1)[..], &rewrite(1, 2), &forward(0), &forward(1), &[SYNC]].concat();
    let far = [PACKET, 1, 1, 255, 255, 255, 255, 0, 1, 1, 1, 1];
    vec![
        [&[8][..], &round, &round, &round].concat(),
        [&[2][..], &round, &rewrite(2, 1), &[FILL, 2, 9, TAKE, 1, SEND, 2, PACK, 0], &round].concat(),
        [&[4][..], &[OPAQUE, 1, 0x40 | 2, 4, 3, 1, 2, 3], &round, &far, &round].concat(),
    ]
}

const PACKET: u8 = 0;
const SYNC: u8 = 1;
const OPAQUE: u8 = 2;
const FILL: u8 = 3;
const TAKE: u8 = 4;
const PACK: u8 = 5;
const SEND: u8 = 6;

/// A block on its way.
struct Sent {
    wire: Vec<u8>,
    /// The slots that it changes, and how often each of them has changed before.
    changes: Vec<(u32, u32)>,
}

struct TheSender {
    memory: Vec<Vec<u8>>,
    // What the program sends in each stream, and how much of it has been read.
    programs: [(Vec<u8>, usize); STREAMS],
    walkers: [Walker; STREAMS],
    streams: Streams,
    page_cache: PageCache,
    in_work: Vec<Order>,
    sent: [Vec<Sent>; STREAMS],
}

impl TheSender {
    fn new(page_cache_bytes: usize) -> Self {
        let mut streams = Streams::new(STREAMS);
        (0..STREAMS).for_each(|stream| streams.set_waits_for_wire(stream, true));
        Self {
            memory: vec![vec![0; PAGE_BYTES]; PAGES],
            programs: [(); STREAMS].map(|()| (initial(), 0)),
            walkers: [(); STREAMS].map(|()| Walker::new()),
            streams,
            page_cache: PageCache::new(page_cache_bytes),
            in_work: vec![],
            sent: [(); STREAMS].map(|()| vec![]),
        }
    }

    fn step(&mut self, choices: &mut Choices<'_>) {
        match choices.byte() % 7 {
            PACKET => {
                let stream = choices.below(STREAMS);
                let pages: Vec<_> = (0..choices.byte() % 5).map(|_| self.rewrite(choices)).collect();
                self.programs[stream].0.extend(packet(0, &pages));
            }
            SYNC => self.programs.iter_mut().for_each(|(program, _)| program.extend(packet(1, &[]))),
            OPAQUE => {
                let stream = choices.below(STREAMS);
                self.programs[stream].0.extend(choices.content(3 * PAGE_BYTES));
            }
            FILL => {
                let stream = choices.below(STREAMS);
                let most = choices.byte();
                self.fill(stream, (1 + usize::from(most)) << 9);
            }
            TAKE => self.take(usize::from(choices.byte())),
            PACK => {
                let number = choices.byte();
                self.pack(usize::from(number));
            }
            _ => {
                let stream = choices.below(STREAMS);
                self.send(stream);
            }
        }
    }

    /// The guest writes to a page; or it is one from anywhere.
    fn rewrite(&mut self, choices: &mut Choices<'_>) -> (u64, Vec<u8>) {
        let number = usize::from(choices.byte());
        let at = choices.below(PAGE_BYTES);
        if number >= 250 {
            let offset = choices.bytes(6).iter().fold(0, |offset, byte| offset << 8 | u64::from(*byte));
            return (offset, vec![choices.byte(); PAGE_BYTES]);
        }
        let number = number % PAGES;
        let page = &mut self.memory[number];
        let content = choices.content(PAGE_BYTES - at);
        page[at..at + content.len()].copy_from_slice(&content);
        ((number * PAGE_BYTES) as u64, page.clone())
    }

    /// As a stream's reader does.
    fn fill(&mut self, stream: usize, bytes_max: usize) {
        let (program, read) = &mut self.programs[stream];
        let walker = &mut self.walkers[stream];
        let mut rest = &program[*read..];
        rest = &rest[..bytes_max.min(rest.len())];
        let mut block = Block::new();
        block.begin(walker);
        loop {
            let room = block.rest(walker);
            let (wanted, came) = (room.len(), room.len().min(rest.len()));
            room[..came].copy_from_slice(&rest[..came]);
            rest = &rest[came..];
            block.came(came, walker);
            if wanted == 0 || came < wanted || walker.syncs() > block.syncs() {
                break;
            }
        }
        *read += block.len();
        if !block.is_empty() {
            self.streams.push(stream, block);
        }
    }

    /// As those that pack take work.
    fn take(&mut self, codec: usize) {
        let Some(work) = self.streams.take_work() else { return };
        let taken = self.page_cache.take(work.raw.pages(), work.raw.syncs());
        let codec = Codec::ALL[codec % Codec::ALL.len()];
        self.in_work.push(Order { work, codec, trier: None, taken });
    }

    /// As those that pack finish it.
    fn pack(&mut self, number: usize) {
        if self.in_work.is_empty() {
            return;
        }
        let order = self.in_work.swap_remove(number % self.in_work.len());
        let done = TOOLS.with_borrow_mut(|tools| pack(tools, order));
        let Done { work, packed, .. } = done.expect("there is room for what is packed");
        if let Err(Some(Packed { change: Some(change), .. })) = self.streams.finish(&work, packed) {
            self.page_cache.release(&change.taken);
        }
    }

    /// As a stream's writer does.
    fn send(&mut self, stream: usize) {
        let Some(mut block) = self.streams.pop(stream) else { return };
        let wire = [&block.frame().encode(), block.bytes()].concat();
        let change = block.take_change();
        let taken = change.iter().flat_map(|change| &change.taken);
        let changes = taken.map(|taken| (taken.slot, taken.changes)).collect();
        if let Some(change) = change {
            self.page_cache.change(change);
        }
        self.sent[stream].push(Sent { wire, changes });
    }

    fn send_all(&mut self) {
        for stream in 0..STREAMS {
            while self.programs[stream].1 < self.programs[stream].0.len() {
                self.fill(stream, BLOCK_BYTES_MAX);
            }
            while self.streams.depth(stream) > 0 {
                self.send(stream);
            }
        }
    }
}

struct TheReceiver<'a> {
    sender: &'a TheSender,
    slots: PageSlots,
    // How often each slot has changed.
    changes: HashMap<u32, u32>,
    unpacking: &'a mut [Unpacking; STREAMS],
    // How many blocks have come in each stream, and how many bytes they were.
    came: [(usize, usize); STREAMS],
}

impl<'a> TheReceiver<'a> {
    fn new(sender: &'a TheSender, page_cache_bytes: usize, unpacking: &'a mut [Unpacking; STREAMS]) -> Self {
        let slots = PageSlots::new(page_cache_bytes);
        // Closed, so that nothing waits for room in them.
        slots.close();
        Self { sender, slots, changes: HashMap::new(), unpacking, came: [(0, 0); STREAMS] }
    }

    fn receive_all(&mut self, choices: &mut Choices<'_>) {
        loop {
            let next = |stream: &usize| self.sender.sent[*stream].get(self.came[*stream].0);
            let coming: Vec<usize> = (0..STREAMS).filter(|stream| next(stream).is_some()).collect();
            let is_due = |(slot, changes): &(u32, u32)| self.changes.get(slot).unwrap_or(&0) == changes;
            let may = |stream: &usize| next(stream).is_some_and(|sent| sent.changes.iter().all(is_due));
            let ready: Vec<usize> = coming.iter().copied().filter(may).collect();
            match ready.as_slice() {
                [] => {
                    assert!(coming.is_empty(), "all wait for each other");
                    break;
                }
                ready => self.receive(ready[choices.below(ready.len())]),
            }
        }
        for ((program, _), (_, bytes)) in self.sender.programs.iter().zip(self.came) {
            assert_eq!(program.len(), bytes);
        }
    }

    fn receive(&mut self, stream: usize) {
        let (number, bytes) = &mut self.came[stream];
        let Sent { wire, changes } = &self.sender.sent[stream][*number];
        let mut rest = &wire[..];
        let read_exact = |bytes: &mut [u8]| {
            let (read, left) = rest.split_at(bytes.len());
            bytes.copy_from_slice(read);
            rest = left;
            Ok(())
        };
        let block = self.unpacking[stream].next(read_exact, &self.slots);
        let block = block.expect("it was sent").expect("it is no end");
        assert!(self.sender.programs[stream].0[*bytes..].starts_with(block), "it is another one");
        *bytes += block.len();
        *number += 1;
        assert!(rest.is_empty());
        for (slot, _) in changes {
            *self.changes.entry(*slot).or_default() += 1;
        }
    }
}
