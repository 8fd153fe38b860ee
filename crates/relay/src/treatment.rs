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
    /// Of something that is packed or not, and encrypted or not; none where it would do nothing.
    pub fn of(is_packed: bool, encryption: Option<T>) -> Option<Self> {
        match (is_packed, encryption) {
            (true, None) => Some(Self::Packed),
            (true, Some(encryption)) => Some(Self::PackedAndEncrypted(encryption)),
            (false, Some(encryption)) => Some(Self::Encrypted(encryption)),
            (false, None) => None,
        }
    }

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
