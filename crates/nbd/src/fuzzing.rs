//! What parses a peer's bytes, as functions of bytes: each says what holds whatever the bytes are, and panics where
//! it does not. `make fuzz` looks for such bytes; see `fuzz/` and docs/architecture.md.
