//! Frames in a stream of bytes that outlives its users.
//!
//! A port of a virtio console is one stream for all who ever connect to it. One who is killed may leave half a frame
//! there. So frames are stuffed (COBS: Cheshire and Baker, 1999) and end with a zero, which is nowhere else: whoever
//! comes next begins with a zero, and is understood.

/// What ends a frame, and may begin one.
const DELIMITER: u8 = 0;

/// What follows one byte of overhead at most.
const BLOCK_BYTES: usize = 254;

/// What a frame holds at most; a longer one is noise.
pub const FRAME_BYTES_MAX: usize = 64 << 10;

/// `content` as a frame, with a delimiter before and after.
pub fn encode(content: &[u8]) -> Vec<u8> {
    let mut frame = vec![DELIMITER];
    let mut runs = content.split(|&byte| byte == DELIMITER).peekable();
    while let Some(mut run) = runs.next() {
        while run.len() >= BLOCK_BYTES {
            let (block, rest) = run.split_at(BLOCK_BYTES);
            frame.push(u8::MAX);
            frame.extend_from_slice(block);
            run = rest;
            if run.is_empty() && runs.peek().is_none() {
                frame.push(DELIMITER);
                return frame;
            }
        }
        frame.push(u8::try_from(run.len() + 1).expect("a run is shorter than a block"));
        frame.extend_from_slice(run);
    }
    frame.push(DELIMITER);
    frame
}

/// What the bytes between two delimiters hold; `None` if they are no whole frame.
fn decode(stuffed: &[u8]) -> Option<Vec<u8>> {
    let mut content = Vec::with_capacity(stuffed.len());
    let mut rest = stuffed;
    while let Some((&code, after)) = rest.split_first() {
        let (run, after) = after.split_at_checked(usize::from(code).checked_sub(1)?)?;
        content.extend_from_slice(run);
        rest = after;
        if code != u8::MAX && !rest.is_empty() {
            content.push(DELIMITER);
        }
    }
    Some(content)
}

/// Finds frames in what is read piece by piece.
#[derive(Debug, Default)]
pub struct Decoder {
    begun: Vec<u8>,
}

impl Decoder {
    /// The frames that these bytes complete. What is no frame is left out.
    pub fn push(&mut self, bytes: &[u8]) -> Vec<Vec<u8>> {
        let mut frames = Vec::new();
        for &byte in bytes {
            if byte != DELIMITER {
                self.begun.push(byte);
                // Nothing that we send is so long.
                if self.begun.len() > 2 * FRAME_BYTES_MAX {
                    self.begun.clear();
                }
            } else if !self.begun.is_empty() {
                frames.extend(decode(&std::mem::take(&mut self.begun)));
            }
        }
        frames
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_encoded_is_decoded_in_whatever_pieces_it_comes(
            contents in prop::collection::vec(prop::collection::vec(prop_oneof![Just(0), any::<u8>()], 1..600), 1..5),
            piece in 1_usize..700,
        ) {
            let stream: Vec<u8> = contents.iter().flat_map(|content| encode(content)).collect();
            let mut decoder = Decoder::default();
            let decoded: Vec<Vec<u8>> = stream.chunks(piece).flat_map(|bytes| decoder.push(bytes)).collect();
            prop_assert_eq!(decoded, contents);
        }

        #[test]
        fn what_a_killed_one_left_hides_nothing(left: Vec<u8>, content in prop::collection::vec(any::<u8>(), 1..300)) {
            let mut decoder = Decoder::default();
            decoder.push(&left);
            prop_assert_eq!(decoder.push(&encode(&content)).pop(), Some(content));
        }
    }

    #[test]
    fn long_runs_without_a_zero_are_cut() {
        for length in [253, 254, 255, 508, 509] {
            let content = vec![7; length];
            assert_eq!(Decoder::default().push(&encode(&content)), vec![content.clone()]);
            let content = [&content[..], &[0]].concat();
            assert_eq!(Decoder::default().push(&encode(&content)), vec![content]);
        }
    }
}
