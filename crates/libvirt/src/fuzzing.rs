//! What a daemon says, as a function of bytes: it says what holds whatever the bytes are, and panics where it does not.
//! `make fuzz` looks for such bytes; see `fuzz/`.

use std::fmt::Debug;

use crate::calls::fuzzing::read_answers;
use crate::domain::Domain;
use crate::error::RemoteError;
use crate::events::read_event;
use crate::packet::{Header, Kind, Packet, PacketBuffer, REMOTE_PROGRAM};
use crate::parameters::{PARAMETERS_MAX, Parameter, Value};
use crate::xdr::{Decode, Decoder, Encode, Encoder};

/// A packet that has come in part, one that is cut off from it, and what is read of it: the smallest element of a list
/// has 28 bytes of its own, and 200 of ours.
pub const PACKETS_HOLDS_BYTES: usize = 4 << 20;

/// What comes over a daemon's socket, in pieces as long as the first byte says.
///
/// Holds: packets are what was sent, in their order. Each is understood or refused, as the answer to any call and as an
/// event; what is understood is said again as it was.
pub fn packets(data: &[u8]) {
    let (first, stream) = data.split_first().unwrap_or((&0, &[]));
    let (mut buffer, mut cut) = (PacketBuffer::default(), 0);
    for piece in stream.chunks(1 + usize::from(*first)) {
        buffer.push(piece);
        while let Some(packet) = match buffer.next_packet() {
            Ok(packet) => packet,
            Err(_) => return,
        } {
            let length_bytes = 28 + packet.payload.len();
            let sent = &stream[cut..cut + length_bytes];
            assert_eq!(sent[..4], u32::try_from(length_bytes).expect("short").to_be_bytes());
            assert_eq!(sent[28..], packet.payload);
            cut += length_bytes;
            check(&packet);
        }
    }
}

fn check(packet: &Packet) {
    drop(read_event(packet));
    drop(RemoteError::decode(&mut Decoder::new(&packet.payload)));
    read_answers(&packet.payload);
    says_again::<Domain>(&packet.payload);
    says_again::<Parameter>(&packet.payload);
}

fn says_again<T: Decode + Encode + Debug>(payload: &[u8]) {
    let Ok(read) = Decoder::whole::<T>(payload) else { return };
    let again: T = Decoder::whole(&written(|to| read.encode(to))).expect("we wrote it");
    // A number that is none is not equal to itself.
    assert_eq!(format!("{read:?}"), format!("{again:?}"));
}

fn written(write: impl FnOnce(&mut Encoder)) -> Vec<u8> {
    let mut to = Encoder::default();
    write(&mut to);
    to.finish().expect("short")
}

/// Answers, an error and events.
pub fn packets_seeds() -> Vec<Vec<u8>> {
    let domain = Domain { name: "vm".into(), uuid: [7; 16], id: Some(3) };
    let parameters = [
        Parameter::text("errmsg", "no"),
        Parameter::int("operation", 5),
        Parameter::large("downtime", 300),
        Parameter { name: "success".into(), value: Value::Boolean(true) },
        Parameter { name: "ratio".into(), value: Value::Double(0.5) },
    ];
    let list = written(|to| {
        to.list(&[domain.clone(), domain.clone()], 2);
        to.u32(2);
    });
    let begun = written(|to| {
        to.cookie(b"<qemu-migration/>\0");
        to.text("<domain/>");
    });
    let error = written(|to| {
        to.i32(42);
        to.i32(10);
        to.optional_text(Some("no such domain"));
        to.i32(2);
        to.fixed(&[0; 28]);
    });
    let stats = written(|to| {
        to.i32(2);
        to.list(&parameters, PARAMETERS_MAX);
    });
    let lifecycle = written(|to| {
        to.i32(0);
        domain.encode(to);
        to.u64(5);
    });
    let completed = written(|to| {
        to.i32(0);
        domain.encode(to);
        to.list(&parameters, PARAMETERS_MAX);
    });
    let header =
        Header { program: REMOTE_PROGRAM, procedure: 273, kind: Kind::Reply, serial: 1, is_error: false };
    let event = |procedure| Header { procedure, kind: Kind::Message, serial: 0, ..header };
    let said = [
        (header, list),
        (header, begun),
        (header, stats),
        (header, written(|to| domain.encode(to))),
        (header, written(|to| parameters[0].encode(to))),
        (Header { is_error: true, ..header }, error),
        (event(318), lifecycle),
        (event(363), completed),
    ];
    let packets: Vec<Vec<u8>> =
        said.map(|(header, payload)| Packet { header, payload }.encode()).into_iter().collect();
    let mut seeds: Vec<Vec<u8>> = packets.iter().map(|packet| [&[255], &packet[..]].concat()).collect();
    seeds.push([&[6], &packets.concat()[..]].concat());
    seeds
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn it_holds_for_the_seeds() {
        for seed in packets_seeds() {
            packets(&seed);
        }
    }

    proptest! {
        #[test]
        fn it_holds_for_what_is_like_them(
            seed in 0..packets_seeds().len(),
            at in any::<prop::sample::Index>(),
            byte in any::<u8>(),
        ) {
            let mut seed = packets_seeds().swap_remove(seed);
            let at = at.index(seed.len());
            seed[at] = byte;
            packets(&seed);
        }
    }
}
