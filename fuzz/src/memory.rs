//! How much memory an input takes, to the byte: libFuzzer itself looks once a second, at what the process has.
//!
//! Counts what Rust allocates. zstd allocates by itself, once for each of its contexts.

use std::alloc::{GlobalAlloc, Layout, System};
use std::sync::atomic::{AtomicUsize, Ordering};

static HELD_BYTES: AtomicUsize = AtomicUsize::new(0);
static MOST_BYTES: AtomicUsize = AtomicUsize::new(0);

#[global_allocator]
static ALLOCATOR: Counting = Counting;

/// Runs something, which may hold so many bytes at most.
pub fn within(bytes_max: usize, run: impl FnOnce()) {
    let before = HELD_BYTES.load(Ordering::Relaxed);
    MOST_BYTES.store(before, Ordering::Relaxed);
    run();
    let held_bytes = MOST_BYTES.load(Ordering::Relaxed) - before;
    assert!(held_bytes <= bytes_max, "{held_bytes} bytes of memory, more than {bytes_max}");
}

/// The system's allocator, counted.
struct Counting;

#[expect(unsafe_code, reason = "an allocator cannot be written without; each call is passed on as it is")]
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        add(layout.size());
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        HELD_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.dealloc(pointer, layout) }
    }

    // For a moment there may be both.
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        add(new_size);
        HELD_BYTES.fetch_sub(layout.size(), Ordering::Relaxed);
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

fn add(bytes: usize) {
    let held = HELD_BYTES.fetch_add(bytes, Ordering::Relaxed) + bytes;
    MOST_BYTES.fetch_max(held, Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use std::panic::catch_unwind;

    use super::*;

    #[test]
    fn who_holds_more_is_found() {
        // Far more than other tests take meanwhile. Nobody touches it, so it is never there.
        within(1 << 29, || drop(vec![0_u8; 1 << 28]));
        catch_unwind(|| within(1 << 29, || drop(vec![0_u8; 1 << 30]))).unwrap_err();
    }
}
