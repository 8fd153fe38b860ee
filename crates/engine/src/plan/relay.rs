//! The relay between QEMU and the network.

/// What a relay on either host does with the connections.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Relay {
    /// It packs, as far as that makes them faster.
    Packs,
    /// It encrypts, and nothing else.
    Encrypts,
    /// It packs, as far as that makes them faster, then encrypts.
    PacksAndEncrypts,
}

impl Relay {
    /// Whether it packs.
    pub fn packs(self) -> bool {
        self != Self::Encrypts
    }
}
