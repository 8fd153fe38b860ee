//! The frame that tells switches where a machine is: a question of its own that nobody needs to answer (RFC 903).

/// The shortest frame that Ethernet takes, without its checksum.
const FRAME_BYTES: usize = 60;

const BROADCAST: [u8; 6] = [0xff; 6];
const ETHERTYPE_RARP: [u8; 2] = [0x80, 0x35];
const HARDWARE_ETHERNET: [u8; 2] = [0, 1];
const PROTOCOL_IPV4: [u8; 2] = [8, 0];
const ADDRESS_LENGTHS: [u8; 2] = [6, 4];
const REQUEST_REVERSE: [u8; 2] = [0, 3];
const NO_ADDRESS: [u8; 4] = [0; 4];

/// From a machine to everybody, as QEMU sends it for its guest: switches learn from the sender's address, and no machine
/// learns anything of what it knows already.
pub(crate) fn announcement(mac: [u8; 6]) -> [u8; FRAME_BYTES] {
    let fields: [&[u8]; 11] = [
        &BROADCAST,
        &mac,
        &ETHERTYPE_RARP,
        &HARDWARE_ETHERNET,
        &PROTOCOL_IPV4,
        &ADDRESS_LENGTHS,
        &REQUEST_REVERSE,
        &mac,
        &NO_ADDRESS,
        &mac,
        &NO_ADDRESS,
    ];
    let mut frame = [0; FRAME_BYTES];
    for (to, byte) in frame.iter_mut().zip(fields.concat()) {
        *to = byte;
    }
    frame
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAC: [u8; 6] = [0x52, 0x54, 0, 0xd0, 0, 0x32];

    #[test]
    fn it_is_a_broadcast_from_the_machine() {
        let frame = announcement(MAC);
        assert_eq!(frame[..6], [0xff; 6]);
        assert_eq!(frame[6..12], MAC);
        assert_eq!(frame[12..14], 0x8035_u16.to_be_bytes());
    }

    #[test]
    fn it_asks_in_reverse_for_the_machine_itself() {
        let frame = announcement(MAC);
        let (hardware, protocol, lengths, operation) = ([0, 1], [8, 0], [6, 4], [0, 3]);
        assert_eq!(frame[14..22], [hardware, protocol, lengths, operation].concat());
        assert_eq!((&frame[22..28], &frame[28..32]), (&MAC[..], &[0; 4][..]), "the sender");
        assert_eq!((&frame[32..38], &frame[38..42]), (&MAC[..], &[0; 4][..]), "who is asked for");
        assert_eq!(frame[42..], [0; 18], "padding");
    }
}
