//! XDR (RFC 4506), as far as libvirt uses it: everything is big-endian and fills units of four bytes.

/// Bytes of one text at most (`REMOTE_STRING_MAX`).
pub(crate) const TEXT_BYTES_MAX: usize = 4 << 20;
/// Bytes of a migration's cookie at most (`REMOTE_MIGRATE_COOKIE_MAX`).
pub(crate) const COOKIE_BYTES_MAX: usize = 4 << 20;

const UNIT_BYTES: usize = 4;

/// Why bytes are not what they should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub(crate) enum Malformed {
    #[error("it ends {missing} bytes too early")]
    Short { missing: usize },
    #[error("{left} bytes are left over")]
    LeftOver { left: usize },
    #[error("a length of {length} is more than {most}")]
    TooLong { length: usize, most: usize },
    #[error("a text is not UTF-8")]
    NotText,
    #[error("{number} is no yes or no")]
    NotBool { number: u32 },
    #[error("{number} is no {what}")]
    Unknown { what: &'static str, number: i64 },
}

/// What can be written as XDR.
pub(crate) trait Encode {
    fn encode(&self, to: &mut Encoder);
}

/// What can be read from XDR.
pub(crate) trait Decode: Sized {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed>;
}

/// Bytes in the making.
#[derive(Debug, Default)]
pub(crate) struct Encoder {
    bytes: Vec<u8>,
    // The first that no daemon would take.
    too_long: Option<Malformed>,
}

impl Encoder {
    pub(crate) fn u32(&mut self, number: u32) {
        self.bytes.extend(number.to_be_bytes());
    }

    pub(crate) fn i32(&mut self, number: i32) {
        self.bytes.extend(number.to_be_bytes());
    }

    pub(crate) fn u64(&mut self, number: u64) {
        self.bytes.extend(number.to_be_bytes());
    }

    pub(crate) fn i64(&mut self, number: i64) {
        self.bytes.extend(number.to_be_bytes());
    }

    pub(crate) fn f64(&mut self, number: f64) {
        self.bytes.extend(number.to_be_bytes());
    }

    pub(crate) fn bool(&mut self, it_is: bool) {
        self.u32(u32::from(it_is));
    }

    /// Bytes whose number both sides know.
    pub(crate) fn fixed(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(UNIT_BYTES), 0);
    }

    pub(crate) fn text(&mut self, text: &str) {
        self.counted(text.as_bytes(), TEXT_BYTES_MAX);
    }

    pub(crate) fn cookie(&mut self, cookie: &[u8]) {
        self.counted(cookie, COOKIE_BYTES_MAX);
    }

    fn counted(&mut self, bytes: &[u8], most: usize) {
        self.length(bytes.len(), most);
        self.fixed(bytes);
    }

    fn length(&mut self, length: usize, most: usize) {
        if length > most {
            self.too_long.get_or_insert(Malformed::TooLong { length, most });
        }
        self.u32(u32::try_from(length).unwrap_or(u32::MAX));
    }

    pub(crate) fn optional_text(&mut self, text: Option<&str>) {
        self.bool(text.is_some());
        if let Some(text) = text {
            self.text(text);
        }
    }

    pub(crate) fn list<T: Encode>(&mut self, all: &[T], most: usize) {
        self.length(all.len(), most);
        for one in all {
            one.encode(self);
        }
    }

    /// All of it, unless something is longer than a daemon takes.
    pub(crate) fn finish(self) -> Result<Vec<u8>, Malformed> {
        self.too_long.map_or(Ok(self.bytes), Err)
    }
}

/// Bytes that are yet to be read.
#[derive(Debug)]
pub(crate) struct Decoder<'a> {
    left: &'a [u8],
}

impl<'a> Decoder<'a> {
    pub(crate) fn new(bytes: &'a [u8]) -> Self {
        Self { left: bytes }
    }

    /// All of it as one value, with nothing left over.
    pub(crate) fn whole<T: Decode>(bytes: &'a [u8]) -> Result<T, Malformed> {
        let mut decoder = Self::new(bytes);
        let value = T::decode(&mut decoder)?;
        match decoder.left.len() {
            0 => Ok(value),
            left => Err(Malformed::LeftOver { left }),
        }
    }

    fn take(&mut self, length: usize) -> Result<&'a [u8], Malformed> {
        let missing = length.saturating_sub(self.left.len());
        let (taken, left) = self.left.split_at_checked(length).ok_or(Malformed::Short { missing })?;
        self.left = left;
        Ok(taken)
    }

    /// Bytes whose number both sides know.
    pub(crate) fn fixed<const LENGTH: usize>(&mut self) -> Result<[u8; LENGTH], Malformed> {
        let taken = self.take(LENGTH.next_multiple_of(UNIT_BYTES))?;
        Ok(*taken.first_chunk().expect("at least as long"))
    }

    pub(crate) fn u32(&mut self) -> Result<u32, Malformed> {
        self.fixed().map(u32::from_be_bytes)
    }

    pub(crate) fn i32(&mut self) -> Result<i32, Malformed> {
        self.fixed().map(i32::from_be_bytes)
    }

    pub(crate) fn u64(&mut self) -> Result<u64, Malformed> {
        self.fixed().map(u64::from_be_bytes)
    }

    pub(crate) fn i64(&mut self) -> Result<i64, Malformed> {
        self.fixed().map(i64::from_be_bytes)
    }

    pub(crate) fn f64(&mut self) -> Result<f64, Malformed> {
        self.fixed().map(f64::from_be_bytes)
    }

    /// Whether something follows, in XDR's strict sense.
    pub(crate) fn bool(&mut self) -> Result<bool, Malformed> {
        match self.u32()? {
            0 => Ok(false),
            1 => Ok(true),
            number => Err(Malformed::NotBool { number }),
        }
    }

    /// What C takes for a yes.
    pub(crate) fn truth(&mut self) -> Result<bool, Malformed> {
        self.i32().map(|number| number != 0)
    }

    pub(crate) fn text(&mut self) -> Result<String, Malformed> {
        let bytes = self.counted(TEXT_BYTES_MAX)?;
        str::from_utf8(bytes).map(ToOwned::to_owned).map_err(|_| Malformed::NotText)
    }

    /// A text for people, which may quote what is none.
    pub(crate) fn any_text(&mut self) -> Result<String, Malformed> {
        self.counted(TEXT_BYTES_MAX).map(|bytes| String::from_utf8_lossy(bytes).into_owned())
    }

    pub(crate) fn cookie(&mut self) -> Result<Vec<u8>, Malformed> {
        self.counted(COOKIE_BYTES_MAX).map(<[u8]>::to_vec)
    }

    fn counted(&mut self, most: usize) -> Result<&'a [u8], Malformed> {
        let length = self.length(most)?;
        let padded = self.take(length.next_multiple_of(UNIT_BYTES))?;
        Ok(&padded[..length])
    }

    fn length(&mut self, most: usize) -> Result<usize, Malformed> {
        let length = usize::try_from(self.u32()?).unwrap_or(usize::MAX);
        if length <= most { Ok(length) } else { Err(Malformed::TooLong { length, most }) }
    }

    pub(crate) fn optional<T>(
        &mut self,
        read: impl FnOnce(&mut Self) -> Result<T, Malformed>,
    ) -> Result<Option<T>, Malformed> {
        if self.bool()? { read(self).map(Some) } else { Ok(None) }
    }

    /// Takes memory for what is there, not for what is announced.
    pub(crate) fn list<T: Decode>(&mut self, most: usize) -> Result<Vec<T>, Malformed> {
        let length = self.length(most)?;
        (0..length).map(|_| T::decode(self)).collect()
    }
}

/// A reply that says only that the call was done.
impl Decode for () {
    fn decode(_: &mut Decoder<'_>) -> Result<Self, Malformed> {
        Ok(())
    }
}

impl Decode for String {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        from.text()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn read<'a, T>(
        bytes: &'a [u8],
        read: impl FnOnce(&mut Decoder<'a>) -> Result<T, Malformed>,
    ) -> Result<T, Malformed> {
        read(&mut Decoder::new(bytes))
    }

    fn written(write: impl FnOnce(&mut Encoder)) -> Vec<u8> {
        let mut encoder = Encoder::default();
        write(&mut encoder);
        encoder.finish().unwrap()
    }

    #[test]
    fn a_text_is_counted_and_fills_units() {
        let bytes = written(|to| to.text("libvirt"));
        assert_eq!(bytes, *b"\0\0\0\x07libvirt\0");
        assert_eq!(read(&bytes, Decoder::text), Ok("libvirt".into()));
    }

    #[test]
    fn a_length_is_checked_before_it_is_believed() {
        let bytes = [0xff; 8];
        let most = TEXT_BYTES_MAX;
        assert_eq!(read(&bytes, Decoder::text), Err(Malformed::TooLong { length: 0xffff_ffff, most }));
        let bytes = written(|to| to.u32(1 << 20));
        assert_eq!(read(&bytes, Decoder::text), Err(Malformed::Short { missing: 1 << 20 }));
        assert_eq!(
            read(&bytes, |from| from.list::<String>(100)),
            Err(Malformed::TooLong { length: 1 << 20, most: 100 })
        );
    }

    #[test]
    fn what_no_daemon_takes_is_not_sent() {
        let mut encoder = Encoder::default();
        encoder.text(&"x".repeat(TEXT_BYTES_MAX + 1));
        encoder.finish().unwrap_err();
    }

    #[test]
    fn nothing_may_be_left_over() {
        assert_eq!(Decoder::whole::<()>(&[0; 4]), Err(Malformed::LeftOver { left: 4 }));
        assert_eq!(read(&[0, 0, 0, 2], Decoder::bool), Err(Malformed::NotBool { number: 2 }));
        assert_eq!(read(&[0, 0, 0, 1, 0xff, 0, 0, 0], Decoder::text), Err(Malformed::NotText));
    }

    proptest! {
        #[test]
        fn what_is_written_is_read(
            numbers in any::<(u32, i32, u64, i64)>(),
            float in any::<f64>(),
            text in ".{0,40}",
            optional in proptest::option::of(".{0,9}"),
            cookie in any::<Vec<u8>>(),
        ) {
            let bytes = written(|to| {
                to.u32(numbers.0);
                to.i32(numbers.1);
                to.u64(numbers.2);
                to.i64(numbers.3);
                to.f64(float);
                to.text(&text);
                to.optional_text(optional.as_deref());
                to.cookie(&cookie);
            });
            let mut from = Decoder::new(&bytes);
            prop_assert_eq!((from.u32(), from.i32(), from.u64(), from.i64()), (
                Ok(numbers.0), Ok(numbers.1), Ok(numbers.2), Ok(numbers.3)
            ));
            prop_assert_eq!(from.f64().map(f64::to_bits), Ok(float.to_bits()));
            prop_assert_eq!(from.text(), Ok(text));
            prop_assert_eq!(from.optional(Decoder::text), Ok(optional));
            prop_assert_eq!(from.cookie(), Ok(cookie));
            prop_assert_eq!(from.left.len(), 0);
        }

        #[test]
        fn whatever_comes_is_read_or_refused(bytes in any::<Vec<u8>>()) {
            drop(read(&bytes, Decoder::text));
            drop(read(&bytes, Decoder::cookie));
            drop(read(&bytes, |from| from.list::<String>(TEXT_BYTES_MAX)));
        }
    }
}
