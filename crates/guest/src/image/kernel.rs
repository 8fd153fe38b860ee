//! The kernel out of its bzImage, for QEMU to put into the guest's memory (PVH, as the ELF note of a kernel with
//! `CONFIG_PVH` asks for). A guest under TCG that has to unpack it itself needs 0.5 to 0.8 s of CPU more: of 2.0 s from
//! its start to its end with QEMU 7.2, and of 2.5 s with 10.0.

use std::io::{self, Write};
use std::process::{Command, Stdio};
use std::thread;

use lz4_flex::block::{DecompressError, decompress_into};

/// Where a bzImage says what it is (the kernel's `arch/x86/boot.rst`).
const MAGIC: (usize, &[u8]) = (0x202, b"HdrS");
const SETUP_SECTORS: usize = 0x1f1;
const PAYLOAD_OFFSET: usize = 0x248;
const PAYLOAD_LENGTH: usize = 0x24c;

const SECTOR_BYTES: usize = 512;

/// LZ4's legacy frame, the one that kernels are packed into: this, then blocks with their lengths.
const LEGACY_FRAME: &[u8] = &[0x02, 0x21, 0x4c, 0x18];

/// The beginning of what xz(1) packs.
const XZ: &[u8] = b"\xfd7zXZ\0";

/// What a block of a legacy frame holds at most.
const BLOCK_BYTES_MAX: usize = 8 << 20;

/// Behind the last block is the length of what is unpacked.
const LENGTH_BYTES: usize = 4;

/// Why a kernel cannot be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// It is no bzImage, or a part of one.
    #[error("it is no whole bzImage")]
    NoBzImage,
    /// Another program packed it.
    #[error("it is compressed neither with LZ4 nor, as the kernels of Debian 12, with xz")]
    UnknownPacking,
    /// It is packed with xz(1), which does not unpack it.
    #[error("xz does not unpack it: {0}; install the package xz-utils")]
    Xz(io::Error),
    /// A block is damaged.
    #[error("a block of it cannot be unpacked: {0}")]
    Block(#[from] DecompressError),
    /// It is an ELF file of another length, or none.
    #[error("what was decompressed is not the kernel that was compressed")]
    NoKernel,
}

/// The ELF file that `bzimage` holds.
pub(super) fn unpack(bzimage: &[u8]) -> Result<Vec<u8>, KernelError> {
    let packed = payload(bzimage).ok_or(KernelError::NoBzImage)?;
    let (packed, length) = packed.split_last_chunk::<LENGTH_BYTES>().ok_or(KernelError::NoBzImage)?;
    let kernel = if packed.starts_with(XZ) {
        unpack_xz(packed).map_err(KernelError::Xz)?
    } else {
        unpack_lz4(packed.strip_prefix(LEGACY_FRAME).ok_or(KernelError::UnknownPacking)?)?
    };
    let is_whole = u32::try_from(kernel.len()) == Ok(u32::from_le_bytes(*length));
    if is_whole && kernel.starts_with(b"\x7fELF") { Ok(kernel) } else { Err(KernelError::NoKernel) }
}

fn unpack_xz(packed: &[u8]) -> io::Result<Vec<u8>> {
    let mut xz = Command::new("xz")
        .args(["--decompress", "--stdout"])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let mut input = xz.stdin.take().expect("it was piped");
    // What it prints, and how it ends, is looked at below.
    let output = thread::scope(|scope| {
        scope.spawn(move || input.write_all(packed));
        xz.wait_with_output()
    })?;
    if output.status.success() { Ok(output.stdout) } else { Err(io::ErrorKind::InvalidData.into()) }
}

fn unpack_lz4(mut blocks: &[u8]) -> Result<Vec<u8>, KernelError> {
    let mut block = vec![0; BLOCK_BYTES_MAX];
    let mut kernel = vec![];
    while let Some((length, rest)) = blocks.split_first_chunk() {
        let length = usize::try_from(u32::from_le_bytes(*length)).map_err(|_| KernelError::NoBzImage)?;
        let (packed, rest) = rest.split_at_checked(length).ok_or(KernelError::NoBzImage)?;
        let unpacked_bytes = decompress_into(packed, &mut block)?;
        kernel.extend_from_slice(&block[..unpacked_bytes]);
        blocks = rest;
    }
    Ok(kernel)
}

fn payload(bzimage: &[u8]) -> Option<&[u8]> {
    let (at, magic) = MAGIC;
    if bzimage.get(at..)?.get(..magic.len())? != magic {
        return None;
    }
    // 0 means 4, says the boot protocol.
    let setup_sectors = match *bzimage.get(SETUP_SECTORS)? {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let begin = (setup_sectors + 1) * SECTOR_BYTES + number(bzimage, PAYLOAD_OFFSET)?;
    bzimage.get(begin..)?.get(..number(bzimage, PAYLOAD_LENGTH)?)
}

fn number(bzimage: &[u8], at: usize) -> Option<usize> {
    let bytes = bzimage.get(at..)?.first_chunk()?;
    usize::try_from(u32::from_le_bytes(*bytes)).ok()
}

#[cfg(test)]
mod tests {
    use lz4_flex::block::compress;
    use proptest::prelude::*;

    use super::*;

    /// A bzImage that holds this, in blocks of that many bytes.
    fn bzimage(kernel: &[u8], block_bytes: usize) -> Vec<u8> {
        let mut payload = LEGACY_FRAME.to_vec();
        for block in kernel.chunks(block_bytes) {
            let packed = compress(block);
            payload.extend(u32::try_from(packed.len()).unwrap().to_le_bytes());
            payload.extend(packed);
        }
        payload.extend(u32::try_from(kernel.len()).unwrap().to_le_bytes());
        let mut image = vec![0; 3 * SECTOR_BYTES];
        image[SETUP_SECTORS] = 1;
        image[MAGIC.0..MAGIC.0 + 4].copy_from_slice(MAGIC.1);
        image[PAYLOAD_OFFSET..PAYLOAD_OFFSET + 4].copy_from_slice(&512_u32.to_le_bytes());
        let length = u32::try_from(payload.len()).unwrap();
        image[PAYLOAD_LENGTH..PAYLOAD_LENGTH + 4].copy_from_slice(&length.to_le_bytes());
        image.extend(payload);
        image.extend([7; 99]);
        image
    }

    proptest! {
        #[test]
        fn what_was_packed_is_unpacked(rest: Vec<u8>, block_bytes in 1_usize..50) {
            let kernel = [b"\x7fELF", &rest[..]].concat();
            prop_assert_eq!(unpack(&bzimage(&kernel, block_bytes)).unwrap(), kernel);
        }

        #[test]
        fn what_is_damaged_is_refused_or_unpacked(at in 0_usize..3000, byte: u8, length in 0_usize..3000) {
            let mut image = bzimage(&[b"\x7fELF".as_slice(), &[5; 2000]].concat(), 700);
            if let Some(damaged) = image.get_mut(at) {
                *damaged = byte;
            }
            image.truncate(length);
            let _ = unpack(&image);
        }
    }

    #[test]
    fn what_is_something_else_is_named() {
        let message = |image: &[u8]| unpack(image).unwrap_err().to_string();
        assert!(message(b"").contains("no whole bzImage"));
        assert!(message(&[0; 4096]).contains("no whole bzImage"));
        let image = bzimage(b"\x7fELF and more", 5);
        assert!(message(&image[..image.len() - 100]).contains("no whole bzImage"));
        assert!(message(&bzimage(b"a text", 9)).contains("not the kernel"));
        let mut other = image;
        other[3 * SECTOR_BYTES] = 0xfd;
        assert!(message(&other).contains("neither with LZ4"));
        other[3 * SECTOR_BYTES..][..XZ.len()].copy_from_slice(XZ);
        assert!(message(&other).contains("xz does not unpack it"));
    }
}
