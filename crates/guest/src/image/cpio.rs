//! Writes an initramfs archive, as Documentation/driver-api/early-userspace/buffer-format.rst of
//! the kernel describes: cpio "newc", every number as eight hexadecimal digits.

const MAGIC: &str = "070701";
const FOLDER: u32 = 0o040_000;
const REGULAR: u32 = 0o100_000;
const CHARACTER_DEVICE: u32 = 0o020_000;

/// An archive in the making. Owner is root and times are zero, so that the same input gives the
/// same bytes.
pub(super) struct Archive {
    bytes: Vec<u8>,
    inode: u32,
}

impl Archive {
    pub(super) fn new() -> Self {
        Self { bytes: Vec::new(), inode: 0 }
    }

    pub(super) fn folder(&mut self, path: &str) {
        self.entry(path, FOLDER | 0o755, (0, 0), &[]);
    }

    pub(super) fn file(&mut self, path: &str, permissions: u32, content: &[u8]) {
        self.entry(path, REGULAR | permissions, (0, 0), content);
    }

    pub(super) fn character_device(&mut self, path: &str, major: u32, minor: u32) {
        self.entry(path, CHARACTER_DEVICE | 0o600, (major, minor), &[]);
    }

    pub(super) fn finish(mut self) -> Vec<u8> {
        self.entry("TRAILER!!!", 0, (0, 0), &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, device: (u32, u32), content: &[u8]) {
        let length = |bytes: &[u8]| u32::try_from(bytes.len()).expect("an initramfs is below 4 GiB");
        self.inode += 1;
        let links = if mode & FOLDER == FOLDER { 2 } else { 1 };
        self.bytes.extend(MAGIC.bytes());
        let [user, group, time, major, minor, check] = [0; 6];
        for field in [
            self.inode,
            mode,
            user,
            group,
            links,
            time,
            length(content),
            major,
            minor,
            device.0,
            device.1,
            length(path.as_bytes()) + 1,
            check,
        ] {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(path.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn entries_are_as_the_kernel_documents_them() {
        let mut archive = Archive::new();
        archive.file("init", 0o755, b"hello");
        let bytes = archive.finish();
        let expected = "07070100000001000081ed000000000000000000000001000000000000000500000000\
                        0000000000000000000000000000000500000000init\0\0hello\0\0\0";
        assert_eq!(&bytes[..124], expected.as_bytes());
        assert_eq!(&bytes[124 + 110..124 + 120], b"TRAILER!!!");
        assert_eq!(bytes.len() % 4, 0);
    }
}
