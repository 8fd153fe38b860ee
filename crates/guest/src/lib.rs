//! The lab's guest: known memory, known dirtying, a heartbeat; and its client.
