//! Netlink's attributes: values with a length and a kind, one after the other, some within others.

use netlink_packet_core::{NLA_F_NESTED, NLA_HEADER_SIZE, NlasIterator};

/// The attributes in some bytes, as far as these make sense.
#[derive(Debug, Clone, Copy)]
pub(super) struct Attributes<'a>(pub(super) &'a [u8]);

impl<'a> Attributes<'a> {
    /// The value of the first of this kind.
    pub(super) fn value(self, kind: u16) -> Option<&'a [u8]> {
        self.iter().find_map(|(of, value)| (of == kind).then_some(value))
    }

    /// What is within it.
    pub(super) fn within(self, kind: u16) -> Option<Self> {
        self.value(kind).map(Self)
    }

    /// A value of so many bytes.
    pub(super) fn array<const BYTES: usize>(self, kind: u16) -> Option<[u8; BYTES]> {
        self.value(kind)?.try_into().ok()
    }

    /// Each kind with its value, up to the first that makes no sense.
    fn iter(self) -> impl Iterator<Item = (u16, &'a [u8])> {
        NlasIterator::new(self.0).map_while(|attribute| {
            let attribute = attribute.ok()?;
            let (kind, length) = (attribute.kind(), usize::from(attribute.length()));
            attribute.into_inner().get(NLA_HEADER_SIZE..length).map(|value| (kind, value))
        })
    }
}

/// Where what follows so many bytes begins.
pub(super) fn aligned(length: usize) -> usize {
    length.next_multiple_of(4)
}

/// Appends one.
pub(super) fn put(bytes: &mut Vec<u8>, kind: u16, value: &[u8]) {
    put_by(bytes, kind, |bytes| bytes.extend_from_slice(value));
}

/// Appends one with others within it.
pub(super) fn nest(bytes: &mut Vec<u8>, kind: u16, within: impl FnOnce(&mut Vec<u8>)) {
    put_by(bytes, kind | NLA_F_NESTED, within);
}

fn put_by(bytes: &mut Vec<u8>, kind: u16, value: impl FnOnce(&mut Vec<u8>)) {
    let start = bytes.len();
    bytes.extend_from_slice(&[0; 2]);
    bytes.extend_from_slice(&kind.to_ne_bytes());
    value(bytes);
    let length = u16::try_from(bytes.len() - start).expect("what is written here are numbers and addresses");
    bytes[start..start + 2].copy_from_slice(&length.to_ne_bytes());
    bytes.resize(aligned(bytes.len()), 0);
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_written_is_read(values in vec((1..100_u16, vec(any::<u8>(), 0..40)), 0..8)) {
            let mut bytes = vec![];
            nest(&mut bytes, 7, |bytes| values.iter().for_each(|(kind, value)| put(bytes, *kind, value)));
            let within = Attributes(&bytes).within(7).unwrap();
            let read: Vec<_> = within.iter().map(|(kind, value)| (kind, value.to_vec())).collect();
            prop_assert_eq!(read, values);
            prop_assert_eq!(bytes.len() % 4, 0);
        }

        #[test]
        fn whatever_the_bytes_it_ends(bytes in vec(any::<u8>(), 0..200)) {
            prop_assert!(Attributes(&bytes).iter().count() <= bytes.len() / NLA_HEADER_SIZE);
        }
    }

    #[test]
    fn a_length_that_cannot_be_ends_the_list() {
        for bytes in [&[0, 0, 1, 0][..], &[3, 0, 1, 0], &[9, 0, 1, 0, 1, 2, 3, 4], &[4, 0, 1]] {
            assert_eq!(Attributes(bytes).iter().count(), 0, "{bytes:?}");
        }
        let (_, value) = Attributes(&[5, 0, 1, 0, 9]).iter().next().unwrap();
        assert_eq!(value, [9], "the last needs no padding");
    }
}
