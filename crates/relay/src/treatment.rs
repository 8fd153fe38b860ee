//! What a relay does with the bytes that pass.

/// What a relay does with the bytes that pass. `T` is how they are encrypted.
#[derive(Debug, Clone)]
pub enum Treatment<T> {
    /// Packed, as far as that makes them faster, in the clear.
    Packed,
    /// Encrypted, and nothing else.
    Encrypted(T),
    /// Packed, as far as that makes them faster, then encrypted.
    PackedAndEncrypted(T),
}

impl<T> Treatment<T> {
    pub(crate) fn is_packed(&self) -> bool {
        !matches!(self, Self::Encrypted(_))
    }

    pub(crate) fn encryption(&self) -> Option<&T> {
        match self {
            Self::Packed => None,
            Self::Encrypted(encryption) | Self::PackedAndEncrypted(encryption) => Some(encryption),
        }
    }
}
