//! Memory for data on their way, used again and again: the kernel would have to clear new pages each time.

use std::collections::HashMap;
use std::ops::{Deref, DerefMut};
use std::sync::{Arc, Mutex};

use crate::limits::HELD_BYTES_MAX;

/// What is shorter costs nothing to make again.
const KEPT_BYTES_MIN: usize = 64 << 10;

/// Buffers that nobody uses now.
#[derive(Debug, Clone, Default)]
pub(crate) struct Buffers {
    idle: Arc<Mutex<Idle>>,
}

#[derive(Debug, Default)]
struct Idle {
    // By length, a power of two each, so that none is more than twice as long as what it is taken for.
    buffers: HashMap<usize, Vec<Vec<u8>>>,
    bytes: usize,
}

impl Buffers {
    /// One of this length, with anything in it.
    pub(crate) fn take(&self, length: usize) -> Buffer {
        if length < KEPT_BYTES_MIN {
            return Buffer { bytes: vec![0; length], length, home: self.clone() };
        }
        let rounded = length.next_power_of_two();
        let bytes = self.pop(rounded).unwrap_or_else(|| vec![0; rounded]);
        Buffer { bytes, length, home: self.clone() }
    }

    fn pop(&self, length: usize) -> Option<Vec<u8>> {
        let mut idle = self.idle.lock().expect("nothing panics with it");
        let bytes = idle.buffers.get_mut(&length)?.pop()?;
        idle.bytes -= bytes.len();
        Some(bytes)
    }

    fn give_back(&self, bytes: Vec<u8>) {
        let mut idle = self.idle.lock().expect("nothing panics with it");
        if bytes.len() >= KEPT_BYTES_MIN && idle.bytes + bytes.len() <= HELD_BYTES_MAX {
            idle.bytes += bytes.len();
            idle.buffers.entry(bytes.len()).or_default().push(bytes);
        }
    }
}

/// Some memory, given back when it is dropped.
#[derive(Debug)]
pub(crate) struct Buffer {
    bytes: Vec<u8>,
    length: usize,
    home: Buffers,
}

impl Deref for Buffer {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes[..self.length]
    }
}

impl DerefMut for Buffer {
    fn deref_mut(&mut self) -> &mut [u8] {
        &mut self.bytes[..self.length]
    }
}

impl Drop for Buffer {
    fn drop(&mut self) {
        self.home.give_back(std::mem::take(&mut self.bytes));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_is_used_again_and_bounded() {
        let buffers = Buffers::default();
        let first = buffers.take(100_000).as_ptr();
        assert_eq!(buffers.take(131_072).as_ptr(), first);
        assert_eq!(buffers.take(70_000).len(), 70_000);
        assert!(buffers.take(140_000).bytes.len() < 280_000);
        let many: Vec<Buffer> = (0..5).map(|_| buffers.take(HELD_BYTES_MAX / 4)).collect();
        drop(many);
        assert!(buffers.idle.lock().unwrap().bytes <= HELD_BYTES_MAX);
    }
}
