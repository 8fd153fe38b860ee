//! A block in which pages that the other end has are sent as changes only.
//!
//! ```text
//! pages (1 byte), for each: where it begins (4), slot (4), changes of the slot before (4), length that follows (2);
//! the bytes before the first page, what follows of it, the bytes up to the next one, …
//! ```
//!
//! What follows of a page is the page as it is, if it is as long as one, or else a [delta](crate::delta) to what
//! its slot holds. Numbers are little-endian.

use std::ops::Range;
use std::sync::Arc;

use crate::block::BLOCK_BYTES_MAX;
use crate::delta;
use crate::error::RelayError;
use crate::figures::PastCodec;
use crate::multifd::PAGE_BYTES;
use crate::page_cache::TakenSlot;
use crate::page_slots::PageSlots;

const ENTRY_BYTES: usize = 14;

/// Pages of one block at most.
pub(crate) const PAGES_MAX: usize = BLOCK_BYTES_MAX / PAGE_BYTES;

/// What the pages add at most.
pub(crate) const OVERHEAD_BYTES_MAX: usize = entries_bytes(PAGES_MAX);

/// Length of what says where so many pages are, before all that follows.
pub(crate) const fn entries_bytes(pages: usize) -> usize {
    1 + pages * ENTRY_BYTES
}

/// What the slots of these pages of `raw` hold then.
pub(crate) fn contents(raw: &[u8], taken: &[TakenSlot]) -> Vec<Arc<[u8]>> {
    taken.iter().map(|TakenSlot { page, .. }| Arc::from(&raw[page.at..page.at + PAGE_BYTES])).collect()
}

/// Writes `raw` with its pages that have slots, which are in order and do not overlap, to `paged`: no more than
/// [`OVERHEAD_BYTES_MAX`] beyond its own length.
pub(crate) fn encode(raw: &[u8], taken: &[TakenSlot], paged: &mut Vec<u8>) {
    let mut at = 0;
    let mut entry_at = paged.len() + 1;
    paged.reserve_exact(entries_bytes(taken.len()) + raw.len());
    paged.push(u8::try_from(taken.len()).unwrap_or(u8::MAX));
    paged.resize(entry_at + taken.len() * ENTRY_BYTES, 0);
    for TakenSlot { page, slot, changes, base, .. } in taken {
        let bytes = &raw[page.at..page.at + PAGE_BYTES];
        paged.extend_from_slice(&raw[at..page.at]);
        let begin = paged.len();
        if !base.as_ref().is_some_and(|base| delta::encode(base, bytes, paged)) {
            paged.extend_from_slice(bytes);
        }
        let length = u16::try_from(paged.len() - begin).unwrap_or(u16::MAX);
        let page_at = u32::try_from(page.at).unwrap_or(u32::MAX);
        let entry = paged[entry_at..entry_at + ENTRY_BYTES].iter_mut();
        let numbers = [page_at, *slot, *changes].into_iter().flat_map(u32::to_le_bytes);
        entry.zip(numbers.chain(length.to_le_bytes())).for_each(|(byte, number)| *byte = number);
        entry_at += ENTRY_BYTES;
        at = page.at + PAGE_BYTES;
    }
    paged.extend_from_slice(&raw[at..]);
}

/// Bytes of the pages that `paged`, by [`encode`], tells by what has changed of them.
pub(crate) fn changed_bytes(paged: &[u8]) -> usize {
    deltas(paged).len() * PAGE_BYTES
}

/// What these parts of `paged`, by [`encode`], tell of the block. Where they have some of a delta, as much of its page.
pub(crate) fn past_codec(paged: &[u8], parts: impl Iterator<Item = Range<usize>>) -> PastCodec {
    let (entries, deltas) = (0..entries_bytes(count(paged)), deltas(paged));
    let mut past = PastCodec::default();
    for part in parts {
        past.plain_bytes += part.len() - shared_bytes(&part, &entries);
        for delta in &deltas {
            let bytes = shared_bytes(&part, delta);
            past.plain_bytes -= bytes;
            past.changed_bytes += PAGE_BYTES * bytes / delta.len().max(1);
        }
    }
    past
}

fn shared_bytes(one: &Range<usize>, other: &Range<usize>) -> usize {
    one.end.min(other.end).saturating_sub(one.start.max(other.start))
}

/// Where the deltas are in `paged`, by [`encode`].
fn deltas(paged: &[u8]) -> Vec<Range<usize>> {
    let (mut follows_at, mut raw_at) = (entries_bytes(count(paged)), 0);
    let (entries, _) = paged.get(1..follows_at).unwrap_or_default().as_chunks::<ENTRY_BYTES>();
    let followed = entries.iter().map(|[a0, a1, a2, a3, .., l0, l1]| {
        let page_at = u32::from_le_bytes([*a0, *a1, *a2, *a3]) as usize;
        let begin = follows_at + page_at - raw_at;
        follows_at = begin + usize::from(u16::from_le_bytes([*l0, *l1]));
        raw_at = page_at + PAGE_BYTES;
        begin..follows_at
    });
    followed.filter(|page| page.len() < PAGE_BYTES).collect()
}

/// Pages that `paged` tells of.
fn count(paged: &[u8]) -> usize {
    paged.first().map_or(0, |count| usize::from(*count))
}

/// Writes the block that `paged` tells to `raw`, and changes the slots. Trusts nothing.
pub(crate) fn decode(paged: &[u8], slots: &PageSlots, raw: &mut Vec<u8>) -> Result<(), RelayError> {
    let malformed = || RelayError::Malformed("pages that no block has");
    let (count, rest) = paged.split_first().ok_or_else(malformed)?;
    let (entries, mut follows) =
        rest.split_at_checked(usize::from(*count) * ENTRY_BYTES).ok_or_else(malformed)?;
    raw.clear();
    let (entries, _) = entries.as_chunks::<ENTRY_BYTES>();
    for entry in entries {
        let [a0, a1, a2, a3, s0, s1, s2, s3, c0, c1, c2, c3, l0, l1] = *entry;
        let at = u32::from_le_bytes([a0, a1, a2, a3]) as usize;
        let slot = u32::from_le_bytes([s0, s1, s2, s3]) as usize;
        let changes = u32::from_le_bytes([c0, c1, c2, c3]);
        let length = usize::from(u16::from_le_bytes([l0, l1]));
        let before = at.checked_sub(raw.len()).ok_or_else(malformed)?;
        let (between, rest) = follows.split_at_checked(before).ok_or_else(malformed)?;
        let (page, rest) = rest.split_at_checked(length).ok_or_else(malformed)?;
        if at + PAGE_BYTES > BLOCK_BYTES_MAX {
            return Err(malformed());
        }
        raw.extend_from_slice(between);
        slots.change(slot, changes, page, raw)?;
        follows = rest;
    }
    if raw.len() + follows.len() > BLOCK_BYTES_MAX {
        return Err(malformed());
    }
    raw.extend_from_slice(follows);
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use proptest::prelude::*;

    use super::*;
    use crate::multifd::{PageAt, PageId};
    use crate::page_cache::{PageCache, PageChange};

    const STREAMS: usize = 3;
    const PAGES: usize = 12;

    /// A page rewritten in a round of a migration, and how it goes.
    #[derive(Debug, Clone)]
    struct Rewrite {
        page: usize,
        stream: usize,
        at: usize,
        bytes: usize,
        goes_raw: bool,
    }

    fn rewrites() -> impl Strategy<Value = Rewrite> {
        (0..PAGES, 0..STREAMS, 0..PAGE_BYTES, 0..3000_usize, prop::bool::weighted(0.2))
            .prop_map(|(page, stream, at, bytes, goes_raw)| Rewrite { page, stream, at, bytes, goes_raw })
    }

    /// What one connection carries in one round: paged blocks, with what they become.
    type Sent = Vec<(Vec<u8>, Vec<u8>)>;

    fn send(
        cache: &mut PageCache,
        memory: &mut [Vec<u8>],
        round: u64,
        rewrites: &[Rewrite],
    ) -> [Sent; STREAMS] {
        let mut sent = [const { vec![] }; STREAMS];
        let mut gone = [false; PAGES];
        for Rewrite { page, stream, at, bytes, goes_raw } in rewrites {
            // Each page goes once in a round.
            if std::mem::replace(&mut gone[*page], true) {
                continue;
            }
            let end = (at + bytes).min(PAGE_BYTES);
            memory[*page][*at..end].iter_mut().for_each(|byte| *byte = byte.wrapping_mul(7).wrapping_add(1));
            let raw = [&b"head"[..], &memory[*page], b"tail"].concat();
            let id = PageId { ram_block: 1, offset: (page * PAGE_BYTES) as u64 };
            let taken = cache.take(&[PageAt { at: 4, id }], round);
            let mut paged = vec![];
            let contents = contents(&raw, &taken);
            encode(&raw, &taken, &mut paged);
            let change = PageChange { taken, contents, syncs: round };
            if *goes_raw {
                cache.release(&change.taken);
            } else {
                cache.change(change);
                sent[*stream].push((paged, raw));
            }
        }
        sent
    }

    proptest! {
        #[test]
        fn whichever_connection_is_faster_each_block_becomes_what_it_was(
            rounds in prop::collection::vec(prop::collection::vec(rewrites(), 0..15), 1..8),
            slots in 1..PAGES + 3,
        ) {
            let mut cache = PageCache::new(slots * PAGE_BYTES);
            let mut memory: Vec<Vec<u8>> = (0..PAGES).map(|page| page.to_le_bytes().repeat(PAGE_BYTES / 8)).collect();
            let sent: Vec<_> = rounds
                .iter()
                .zip(0..)
                .map(|(rewrites, round)| send(&mut cache, &mut memory, round, rewrites))
                .collect();
            let (received, sync) = (PageSlots::new(slots * PAGE_BYTES), Barrier::new(STREAMS));
            let all_are_as_they_were = thread::scope(|scope| {
                let streams: Vec<_> = (0..STREAMS)
                    .map(|stream| {
                        let (sent, received, sync) = (&sent, &received, &sync);
                        scope.spawn(move || {
                            let (mut block, mut is_same) = (vec![], true);
                            for round in sent {
                                for (paged, raw) in &round[stream] {
                                    is_same &= decode(paged, received, &mut block).is_ok() && block == *raw;
                                }
                                sync.wait();
                            }
                            is_same
                        })
                    })
                    .collect();
                streams.into_iter().all(|stream| stream.join().unwrap())
            });
            prop_assert!(all_are_as_they_were);
        }

        #[test]
        fn arbitrary_bytes_never_panic_nor_grow(
            mut paged in prop::collection::vec(any::<u8>(), 0..20_000),
            pages in 0..4_u8,
        ) {
            if let Some(first) = paged.first_mut() {
                *first = pages;
            }
            // Places, slots and counts that may be right.
            for entry in paged.iter_mut().skip(1).take(3 * ENTRY_BYTES).enumerate().filter(|(at, _)| {
                !matches!(at % ENTRY_BYTES, 0 | 1 | 4 | 12 | 13)
            }) {
                *entry.1 = 0;
            }
            let slots = PageSlots::new(4 * PAGE_BYTES);
            // Nobody may wait for what never comes.
            slots.close();
            let mut block = vec![];
            if decode(&paged, &slots, &mut block).is_ok() {
                prop_assert!(block.len() <= BLOCK_BYTES_MAX);
            }
        }
    }

    #[test]
    fn what_comes_again_is_told_by_what_has_changed() {
        let mut cache = PageCache::new(PAGE_BYTES);
        let page = PageAt { at: 0, id: PageId { ram_block: 1, offset: 0 } };
        let mut raw: Vec<u8> = (0..PAGE_BYTES / 8).flat_map(|word| (word * word).to_le_bytes()).collect();
        let (mut lengths, mut changed) = (vec![], vec![]);
        for round in 0..3 {
            let taken = cache.take(&[page], round);
            let mut paged = vec![];
            let contents = contents(&raw, &taken);
            encode(&raw, &taken, &mut paged);
            lengths.push(paged.len());
            changed.push(changed_bytes(&paged));
            cache.change(PageChange { taken, contents, syncs: round });
            assert!(cache.take(&[page], round).is_empty(), "nothing of it again before the next sync");
            raw[100] ^= u8::from(round == 0);
        }
        let head = 1 + ENTRY_BYTES;
        assert_eq!(lengths, [head + PAGE_BYTES, head + 4 + 8, head]);
        assert_eq!(changed, [0, PAGE_BYTES, PAGE_BYTES], "at first it goes whole");
    }

    #[test]
    fn each_part_of_a_paged_block_tells_some_of_it() {
        let mut cache = PageCache::new(3 * PAGE_BYTES);
        let id = |page: usize| PageId { ram_block: 1, offset: (page * PAGE_BYTES) as u64 };
        let three = [0, 1, 2].map(|page| PageAt { at: 7 + page * PAGE_BYTES, id: id(page) });
        let (before, mut after) = (vec![1; 7 + 3 * PAGE_BYTES], vec![1; 7 + 3 * PAGE_BYTES]);
        after[7..7 + 16].fill(5);
        after[7 + PAGE_BYTES..7 + 2 * PAGE_BYTES].fill(5);
        let mut paged = vec![];
        for (raw, syncs) in [(before, 0), (after, 1)] {
            let taken = cache.take(&three, syncs);
            paged.clear();
            let contents = contents(&raw, &taken);
            encode(&raw, &taken, &mut paged);
            cache.change(PageChange { taken, contents, syncs });
        }
        // Too much of the second page has changed, and nothing of the third one.
        let head = 1 + 3 * ENTRY_BYTES;
        let delta = head + 7..head + 7 + 4 + 16;
        assert_eq!(paged.len(), delta.end + PAGE_BYTES);
        let past = |parts: &[[usize; 2]]| {
            let parts = parts.iter().map(|[from, to]| *from..*to);
            let PastCodec { plain_bytes, changed_bytes } = past_codec(&paged, parts);
            (plain_bytes, changed_bytes)
        };
        assert_eq!(past(&[[0, head]]), (0, 0), "where the pages are");
        assert_eq!(past(&[[0, head + 2], [head + 3, head + 7]]), (6, 0), "what is before them");
        assert_eq!(past(&[[0, delta.start + 10]]), (7, PAGE_BYTES / 2), "half of a delta");
        assert_eq!(past(&[[0, delta.start], [delta.start, delta.end]]), (7, PAGE_BYTES));
        assert_eq!(past(&[[delta.start + 10, paged.len()]]), (PAGE_BYTES, PAGE_BYTES / 2));
        assert_eq!(changed_bytes(&paged), 2 * PAGE_BYTES);
    }

    #[test]
    fn what_no_sender_says_is_refused() {
        let slots = PageSlots::new(2 * PAGE_BYTES);
        slots.close();
        let paged = |at: u32, slot: u32, changes: u32, page: &[u8]| {
            let length = u16::try_from(page.len()).unwrap();
            [
                &[1],
                &at.to_le_bytes()[..],
                &slot.to_le_bytes(),
                &changes.to_le_bytes(),
                &length.to_le_bytes(),
                page,
            ]
            .concat()
        };
        let (whole, mut block) = (vec![5; PAGE_BYTES], vec![]);
        let most = u32::try_from(BLOCK_BYTES_MAX).unwrap();
        for (paged, what) in [
            (vec![], "nothing"),
            (vec![1], "an entry too few"),
            (paged(0, 2, 0, &whole), "no such slot"),
            (paged(0, 0, 1, &whole), "a change before was left out"),
            (paged(0, 0, 0, &[]), "a change of no page"),
            (paged(9, 0, 0, &whole), "bytes before it are missing"),
            (paged(most, 0, 0, &whole), "beyond the end of a block"),
        ] {
            assert!(decode(&paged, &slots, &mut block).is_err(), "{what}");
        }
        decode(&paged(0, 1, 0, &whole), &slots, &mut block).unwrap();
        assert_eq!(block, whole);
        assert!(
            decode(&paged(0, 1, 1, &[255, 255, 1, 0, 9]), &slots, &mut block).is_err(),
            "outside of the page"
        );
        let again = decode(&paged(0, 1, 0, &whole), &slots, &mut block).unwrap_err();
        assert!(again.to_string().contains("has changed since"), "not waited for: {again}");
    }
}
