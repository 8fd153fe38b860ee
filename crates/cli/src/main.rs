//! The `drainpipe` program.
fn main() {}
