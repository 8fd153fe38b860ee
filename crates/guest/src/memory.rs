//! The filled memory: pages whose content is always known.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::mix::{Layout, Mix, RUN_PAGES};
use crate::page::{Content, Identity, PAGE_BYTES, PAGE_WORDS, Page};
use crate::protocol::{BadPage, Verification};

/// A bad page is compared with so many generations before its own.
const GENERATIONS_TRIED: u32 = 1000;

/// How many words are compared to find the generation of a wrong word. Not all to the page's end: a page that was
/// copied while it was written has two generations.
const WORDS_COMPARED: usize = 4;

/// A run of pages and how often each was rewritten. The lock is held for one run at a time, so a
/// check and a rewrite never see each other's half-written page, and neither waits long.
struct Run {
    pages: &'static mut [Page],
    generations: [u32; RUN_PAGES],
}

/// The memory of the guest that is filled, dirtied and checked.
pub struct Memory {
    runs: Vec<Mutex<Run>>,
    layout: Layout,
    seed: u64,
    rewrite_words: usize,
    pages: usize,
    filled: AtomicUsize,
}

/// Why the memory could not be checked or changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MemoryError {
    /// The fill goes on.
    #[error("memory is still being filled ({filled} of {pages} pages); ask again when it is ready")]
    Filling {
        /// Pages filled so far.
        filled: usize,
        /// Pages to fill.
        pages: usize,
    },
    /// No such page.
    #[error("there is no page {page}; the pages are 0 to {last}")]
    NoPage {
        /// The page asked for.
        page: usize,
        /// The last page.
        last: usize,
    },
}

impl Memory {
    /// Reserves `pages` pages, at least one. They live as long as the program, and take no memory
    /// before [`Memory::fill`].
    pub fn reserve(pages: usize, mix: Mix, seed: u64) -> Self {
        let pages = pages.max(1);
        let words: &'static mut [u64] = vec![0; (pages + 1) * PAGE_WORDS].leak();
        let start = words.as_ptr().align_offset(PAGE_BYTES);
        let (all, _) = words[start..].as_chunks_mut::<PAGE_WORDS>();
        let runs = all[..pages]
            .chunks_mut(RUN_PAGES)
            .map(|pages| Mutex::new(Run { pages, generations: [0; RUN_PAGES] }))
            .collect();
        Self {
            runs,
            layout: Layout::new(mix),
            seed,
            rewrite_words: PAGE_WORDS,
            pages,
            filled: AtomicUsize::new(0),
        }
    }

    /// From now on a rewrite changes so many words at the beginning of a page, 1 to [`PAGE_WORDS`], and leaves the
    /// rest of its first content.
    #[must_use]
    pub fn rewriting(self, words: usize) -> Self {
        Self { rewrite_words: words.clamp(1, PAGE_WORDS), ..self }
    }

    /// How many pages there are.
    pub fn pages(&self) -> usize {
        self.pages
    }

    /// How many pages are filled so far.
    pub fn filled(&self) -> usize {
        self.filled.load(Ordering::Acquire)
    }

    /// How many pages started as each kind, in the order of [`crate::mix::Kind::ALL`].
    pub fn count_by_kind(&self) -> [u64; 4] {
        self.layout.count(self.pages)
    }

    /// Gives every page its first content.
    pub fn fill(&self) {
        for (number, run) in self.runs.iter().enumerate() {
            let mut run = lock(run);
            for (offset, page) in run.pages.iter_mut().enumerate() {
                self.content(number, offset, 0).write(page);
            }
            self.filled.fetch_add(run.pages.len(), Ordering::Release);
        }
    }

    /// Gives a page the content of its next generation.
    pub fn rewrite(&self, page: usize) -> Result<(), MemoryError> {
        self.expect_page(page)?;
        let (number, offset) = (page / RUN_PAGES, page % RUN_PAGES);
        let mut run = lock(&self.runs[number]);
        run.generations[offset] = run.generations[offset].wrapping_add(1);
        let content = self.content(number, offset, run.generations[offset]);
        content.write(&mut run.pages[offset][..self.rewrite_words]);
        Ok(())
    }

    /// Flips one bit of a page, so that a test can see it found.
    pub fn corrupt(&self, page: usize) -> Result<(), MemoryError> {
        self.expect_page(page)?;
        lock(&self.runs[page / RUN_PAGES]).pages[page % RUN_PAGES][PAGE_WORDS / 2] ^= 1;
        Ok(())
    }

    /// Checks every page. The dirtier may go on meanwhile.
    pub fn verify(&self) -> Result<Verification, MemoryError> {
        self.expect_filled()?;
        let mut found = Verification { pages: self.pages as u64, bad: 0, first_bad: None };
        for (number, run) in self.runs.iter().enumerate() {
            let run = lock(run);
            for (offset, (page, generation)) in run.pages.iter().zip(run.generations).enumerate() {
                if !self.is_good(page, number, offset, generation) {
                    found.bad += 1;
                    found.first_bad.get_or_insert_with(|| self.describe(page, number, offset, generation));
                }
            }
        }
        Ok(found)
    }

    fn is_good(&self, page: &Page, number: usize, offset: usize, generation: u32) -> bool {
        let (rewritten, rest) = page.split_at(if generation == 0 { 0 } else { self.rewrite_words });
        self.content(number, offset, generation).matches(rewritten, 0)
            && self.content(number, offset, 0).matches(rest, rewritten.len())
    }

    fn describe(&self, page: &Page, number: usize, offset: usize, generation: u32) -> BadPage {
        let expected = self.expected(number, offset, generation);
        let wrong_word = page.iter().zip(expected).take_while(|(found, expected)| *found == expected).count();
        let compared = wrong_word..PAGE_WORDS.min(wrong_word + WORDS_COMPARED);
        let holds = |earlier: &u32| {
            page[compared.clone()] == self.expected(number, offset, *earlier)[compared.clone()]
        };
        let earlier = generation.saturating_sub(GENERATIONS_TRIED)..generation;
        BadPage {
            page: (number * RUN_PAGES + offset) as u64,
            generation,
            wrong_word: wrong_word as u64,
            found_generation: earlier.rev().find(holds),
        }
    }

    fn expected(&self, number: usize, offset: usize, generation: u32) -> Page {
        let mut page = [0; PAGE_WORDS];
        self.content(number, offset, 0).write(&mut page);
        if generation > 0 {
            self.content(number, offset, generation).write(&mut page[..self.rewrite_words]);
        }
        page
    }

    fn content(&self, number: usize, offset: usize, generation: u32) -> Content {
        let identity = Identity {
            kind: self.layout.kind(number),
            index: (number * RUN_PAGES + offset) as u64,
            rank: (self.layout.rank(number) * RUN_PAGES + offset) as u64,
        };
        Content::new(self.seed, identity, generation)
    }

    fn expect_filled(&self) -> Result<(), MemoryError> {
        match self.filled() {
            filled if filled < self.pages => Err(MemoryError::Filling { filled, pages: self.pages }),
            _ => Ok(()),
        }
    }

    fn expect_page(&self, page: usize) -> Result<(), MemoryError> {
        self.expect_filled()?;
        if page < self.pages { Ok(()) } else { Err(MemoryError::NoPage { page, last: self.pages - 1 }) }
    }
}

fn lock(run: &Mutex<Run>) -> MutexGuard<'_, Run> {
    // A thread that died inside a run left a half-written page: the check reports it.
    run.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mix::Kind;
    use std::sync::atomic::AtomicBool;

    const MIXED: &str = "zero:20,text:30,random:40,shared:10";

    fn filled(pages: usize) -> Memory {
        let memory = Memory::reserve(pages, MIXED.parse().unwrap(), 42);
        memory.fill();
        memory
    }

    fn swap(memory: &Memory, one: usize, other: usize) {
        let copy = lock(&memory.runs[one]).pages[0];
        let mut run = lock(&memory.runs[other]);
        let kept = std::mem::replace(&mut run.pages[0], copy);
        drop(run);
        lock(&memory.runs[one]).pages[0] = kept;
    }

    #[test]
    fn nothing_is_checked_or_rewritten_before_the_fill() {
        let memory = Memory::reserve(20, Mix::only(Kind::Random), 1);
        let filling = MemoryError::Filling { filled: 0, pages: 20 };
        assert_eq!(memory.verify(), Err(filling));
        assert_eq!(memory.rewrite(0), Err(filling));
    }

    #[test]
    fn every_page_is_checked_the_last_odd_one_too() {
        for pages in [1, 15, 16, 17, 1601] {
            let memory = filled(pages);
            let good = Verification { pages: pages as u64, bad: 0, first_bad: None };
            assert_eq!(memory.verify(), Ok(good));
            memory.corrupt(pages - 1).unwrap();
            let first_bad = BadPage {
                page: pages as u64 - 1,
                generation: 0,
                wrong_word: PAGE_WORDS as u64 / 2,
                found_generation: None,
            };
            assert_eq!(memory.verify(), Ok(Verification { bad: 1, first_bad: Some(first_bad), ..good }));
        }
    }

    #[test]
    fn pages_start_at_page_boundaries() {
        let memory = filled(3);
        assert_eq!(lock(&memory.runs[0]).pages.as_ptr().align_offset(PAGE_BYTES), 0);
    }

    #[test]
    fn swapped_pages_are_both_bad() {
        let memory = Memory::reserve(64, Mix::only(Kind::Text), 1);
        memory.fill();
        swap(&memory, 0, 3);
        assert_eq!(memory.verify().unwrap().bad, 2);
    }

    #[test]
    fn a_page_of_which_a_part_is_rewritten_is_checked_whole() {
        let memory = filled(160).rewriting(8);
        let before = lock(&memory.runs[3]).pages[2];
        memory.rewrite(50).unwrap();
        memory.rewrite(50).unwrap();
        let after = lock(&memory.runs[3]).pages[2];
        assert!(before[..8] != after[..8] && before[8..] == after[8..]);
        assert_eq!(memory.verify().unwrap().bad, 0);
        for word in [0, 7, 8, PAGE_WORDS - 1] {
            lock(&memory.runs[3]).pages[2][word] ^= 1;
            assert_eq!(memory.verify().unwrap().bad, 1, "{word}");
            lock(&memory.runs[3]).pages[2][word] ^= 1;
        }
        lock(&memory.runs[3]).pages[2] = before;
        assert_eq!(memory.verify().unwrap().bad, 1, "a lost rewrite");
    }

    #[test]
    fn a_bad_page_says_from_where_on_it_is_how_old() {
        let memory = filled(160);
        memory.rewrite(50).unwrap();
        let stale = lock(&memory.runs[3]).pages[2];
        memory.rewrite(50).unwrap();
        memory.rewrite(50).unwrap();
        for wrong_word in [0, 1, 300] {
            lock(&memory.runs[3]).pages[2][wrong_word..].copy_from_slice(&stale[wrong_word..]);
            let Verification { bad, first_bad, .. } = memory.verify().unwrap();
            let found =
                BadPage { page: 50, generation: 3, wrong_word: wrong_word as u64, found_generation: Some(1) };
            assert_eq!((bad, first_bad), (1, Some(found)));
            lock(&memory.runs[3]).pages[2] = memory.expected(3, 2, 3);
        }
    }

    #[test]
    fn a_bad_page_of_two_generations_says_that_of_its_first_wrong_word() {
        let memory = filled(160);
        memory.rewrite(50).unwrap();
        memory.rewrite(50).unwrap();
        lock(&memory.runs[3]).pages[2] = memory.expected(3, 2, 0);
        lock(&memory.runs[3]).pages[2][..7].copy_from_slice(&memory.expected(3, 2, 1)[..7]);
        let found = memory.verify().unwrap().first_bad.unwrap();
        assert_eq!((found.wrong_word, found.found_generation), (0, Some(1)));
    }

    #[test]
    fn a_lost_rewrite_is_bad_until_the_page_is_rewritten() {
        let memory = filled(160);
        memory.rewrite(50).unwrap();
        let stale = lock(&memory.runs[3]).pages[2];
        memory.rewrite(50).unwrap();
        assert_eq!(memory.verify().unwrap().bad, 0);
        lock(&memory.runs[3]).pages[2] = stale;
        assert_eq!(memory.verify().unwrap().bad, 1);
        memory.rewrite(50).unwrap();
        assert_eq!(memory.verify().unwrap().bad, 0);
    }

    #[test]
    fn a_page_beyond_the_end_is_refused() {
        let memory = filled(16);
        assert_eq!(memory.rewrite(16), Err(MemoryError::NoPage { page: 16, last: 15 }));
        assert_eq!(
            memory.corrupt(usize::MAX).unwrap_err().to_string(),
            format!("there is no page {}; the pages are 0 to 15", usize::MAX)
        );
    }

    #[test]
    fn a_check_beside_rewrites_finds_nothing_wrong() {
        let memory = filled(320);
        let done = AtomicBool::new(false);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut page = 0;
                while !done.load(Ordering::Relaxed) {
                    memory.rewrite(page).unwrap();
                    page = (page + 7) % 320;
                }
            });
            let checks: Vec<_> = (0..20).map(|_| memory.verify().unwrap().bad).collect();
            done.store(true, Ordering::Relaxed);
            assert_eq!(checks, [0; 20]);
        });
    }
}
