//! Packets: a length, which counts itself, a header, and what the program makes of the rest.

use crate::xdr::{Decoder, Encoder, Malformed};

/// Everything about domains and the host.
pub(crate) const REMOTE_PROGRAM: u32 = 0x2000_8086;
/// What only QEMU has, such as a guest's agent.
pub(crate) const QEMU_PROGRAM: u32 = 0x2000_8087;
/// Whether the other side is there.
pub(crate) const KEEP_ALIVE_PROGRAM: u32 = 0x6b65_6570;
/// The version of each of them.
const PROGRAM_VERSION: u32 = 1;

/// The bytes of the length itself, which it counts.
const LENGTH_BYTES: usize = 4;
const HEADER_BYTES: usize = 24;
/// Bytes after the length at most (`VIR_NET_MESSAGE_MAX`).
const REST_BYTES_MAX: usize = 32 << 20;
/// Bytes of a call's arguments, or of what came of it, at most.
pub(crate) const PAYLOAD_BYTES_MAX: usize = REST_BYTES_MAX - HEADER_BYTES;

/// What a packet is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kind {
    Call,
    Reply,
    Message,
    /// What we never ask for: streams, and replies that bring open files.
    Other(i32),
}

impl From<i32> for Kind {
    fn from(number: i32) -> Self {
        match number {
            0 => Self::Call,
            1 => Self::Reply,
            2 => Self::Message,
            other => Self::Other(other),
        }
    }
}

impl From<Kind> for i32 {
    fn from(kind: Kind) -> Self {
        match kind {
            Kind::Call => 0,
            Kind::Reply => 1,
            Kind::Message => 2,
            Kind::Other(number) => number,
        }
    }
}

/// What every packet begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Header {
    pub(crate) program: u32,
    pub(crate) procedure: i32,
    pub(crate) kind: Kind,
    /// What a reply has from its call.
    pub(crate) serial: u32,
    pub(crate) is_error: bool,
}

/// One packet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Packet {
    pub(crate) header: Header,
    pub(crate) payload: Vec<u8>,
}

impl Packet {
    /// As it goes out.
    pub(crate) fn encode(&self) -> Vec<u8> {
        let header = self.header;
        let length = LENGTH_BYTES + HEADER_BYTES + self.payload.len();
        let mut to = Encoder::default();
        to.u32(u32::try_from(length).expect("callers keep to the limit"));
        to.u32(header.program);
        to.u32(PROGRAM_VERSION);
        to.i32(header.procedure);
        to.i32(header.kind.into());
        to.u32(header.serial);
        to.bool(header.is_error);
        to.fixed(&self.payload);
        to.finish().expect("nothing in it has a limit of its own")
    }

    fn decode(rest: &[u8]) -> Result<Self, Malformed> {
        let (header, payload) = rest.split_at(HEADER_BYTES);
        let mut from = Decoder::new(header);
        let program = from.u32()?;
        let version = from.u32()?;
        if version != PROGRAM_VERSION {
            return Err(unknown("version that we speak", version));
        }
        let (procedure, kind, serial) = (from.i32()?, Kind::from(from.i32()?), from.u32()?);
        let is_error = match (from.u32()?, kind) {
            // A stream's packets have a third, and nobody reads them.
            (_, Kind::Other(_)) | (0, _) => false,
            (1, _) => true,
            (number, _) => return Err(unknown("status of a packet", number)),
        };
        let header = Header { program, procedure, kind, serial, is_error };
        Ok(Self { header, payload: payload.to_vec() })
    }
}

fn unknown(what: &'static str, number: u32) -> Malformed {
    Malformed::Unknown { what, number: number.into() }
}

/// Cuts what comes over a socket into packets.
#[derive(Debug, Default)]
pub(crate) struct PacketBuffer {
    bytes: Vec<u8>,
}

impl PacketBuffer {
    /// Adds what has come.
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend(bytes);
    }

    /// The next packet, if all of it has come. After an error nothing more can be read.
    pub(crate) fn next_packet(&mut self) -> Result<Option<Packet>, Malformed> {
        let Some(length) = self.bytes.first_chunk().copied().map(u32::from_be_bytes) else { return Ok(None) };
        let length = check_length(length)?;
        if self.bytes.len() < length {
            return Ok(None);
        }
        let packet = Packet::decode(&self.bytes[LENGTH_BYTES..length])?;
        self.bytes.drain(..length);
        // One large packet is no reason to keep as much for ever.
        self.bytes.shrink_to(self.bytes.len().max(64 << 10));
        Ok(Some(packet))
    }
}

fn check_length(length: u32) -> Result<usize, Malformed> {
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    let (least, most) = (LENGTH_BYTES + HEADER_BYTES, LENGTH_BYTES + REST_BYTES_MAX);
    if length < least {
        return Err(Malformed::Short { missing: least - length });
    }
    if length > most { Err(Malformed::TooLong { length, most }) } else { Ok(length) }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn packets() -> impl Strategy<Value = Packet> {
        let header = (any::<(u32, i32, u32, bool)>(), 0..3_i32);
        let units = proptest::collection::vec(any::<[u8; 4]>(), 0..40);
        (header, units).prop_map(|(((program, procedure, serial, is_error), kind), units)| Packet {
            header: Header { program, procedure, kind: kind.into(), serial, is_error },
            payload: units.concat(),
        })
    }

    fn header() -> Header {
        Header { program: REMOTE_PROGRAM, procedure: 1, kind: Kind::Call, serial: 7, is_error: false }
    }

    #[test]
    fn a_call_is_what_libvirt_says_it_is() {
        let bytes = Packet { header: header(), payload: vec![0, 0, 0, 9] }.encode();
        let words = [32, 0x2000_8086, 1, 1, 0, 7, 0, 9];
        assert_eq!(bytes, words.map(u32::to_be_bytes).concat());
    }

    #[test]
    fn lengths_that_cannot_be_are_refused_at_once() {
        for (length, is_fine) in
            [(0, false), (27, false), (28, true), ((32 << 20) + 4, true), ((32 << 20) + 5, false)]
        {
            let mut buffer = PacketBuffer::default();
            buffer.push(&u32::to_be_bytes(length));
            assert_eq!(buffer.next_packet().is_ok(), is_fine, "{length}");
        }
    }

    #[test]
    fn another_version_is_refused() {
        let mut bytes = Packet { header: header(), payload: vec![] }.encode();
        bytes[11] = 2;
        let mut buffer = PacketBuffer::default();
        buffer.push(&bytes);
        buffer.next_packet().unwrap_err();
    }

    proptest! {
        #[test]
        fn packets_come_as_they_were_sent_however_they_are_cut(
            sent in proptest::collection::vec(packets(), 1..5),
            piece_bytes in 1..100_usize,
        ) {
            let bytes: Vec<u8> = sent.iter().flat_map(Packet::encode).collect();
            let (mut buffer, mut come) = (PacketBuffer::default(), vec![]);
            for piece in bytes.chunks(piece_bytes) {
                buffer.push(piece);
                while let Some(packet) = buffer.next_packet().unwrap() {
                    come.push(packet);
                }
            }
            prop_assert_eq!(come, sent);
        }
    }
}
