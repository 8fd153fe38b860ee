//! Which other files QEMU opens for a qcow2 image: the image itself names them. Pure, of the image's first cluster
//! (`docs/interop/qcow2.rst` of QEMU).

const MAGIC: &[u8] = b"QFI\xfb";

/// Bytes of the fixed part of a header of version 2.
const VERSION_2_BYTES: usize = 72;

/// Bytes that a header of version 3 has at least.
const VERSION_3_BYTES: usize = 104;

/// By so many bytes an image tells how large its clusters are.
pub const LENGTH_TOLD_BYTES: usize = 24;

/// Clusters have 512 bytes to 2 MiB. All that is looked at is in the first one.
const CLUSTER_BITS: std::ops::RangeInclusive<u32> = 9..=21;

/// Longest name of a backing file.
const NAME_BYTES_MAX: usize = 1023;

/// Incompatible feature: the guest's data is in another file.
const EXTERNAL_DATA: u64 = 1 << 2;

/// Extensions of the header.
const END: u32 = 0;
const BACKING_FORMAT: u32 = 0xe279_2aca;
const DATA_FILE: u32 = 0x4441_5441;

/// What QEMU opens besides the image.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct OtherFiles {
    /// Holds what the image does not.
    pub backing: Option<Backing>,
    /// Holds the guest's data in place of the image; always raw.
    pub data: Option<String>,
}

/// The image below an image.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Backing {
    /// As the image has it: a path, from the image's directory if it is relative, or what QEMU makes something else
    /// of ([`is_path`]).
    pub file: String,
    /// Its format; without it QEMU would guess by what is in the file.
    pub format: Option<String>,
}

/// Why it cannot be said what QEMU opens for an image.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ImageError {
    /// It does not begin like one.
    #[error("it does not begin as a qcow2 image")]
    NoImage,
    /// A version that is not known here.
    #[error("its version is {0}, and only 2 and 3 are known")]
    Version(u32),
    /// What it says of itself cannot be.
    #[error("its header is damaged: {0}")]
    Damaged(&'static str),
}

/// Whether QEMU takes the name of a file for a path, and not for a protocol (`nbd://…`), options (`json:…`), or
/// nothing.
pub fn is_path(name: &str) -> bool {
    let first = name.split('/').next().unwrap_or_default();
    !name.is_empty() && !first.contains(':')
}

/// How large the first cluster of an image is that begins with these bytes; [`LENGTH_TOLD_BYTES`] are enough.
pub fn first_cluster_bytes(beginning: &[u8]) -> Result<usize, ImageError> {
    if !beginning.starts_with(MAGIC) {
        return Err(ImageError::NoImage);
    }
    let bits = number(beginning, 20)?;
    if !CLUSTER_BITS.contains(&bits) {
        return Err(ImageError::Damaged("its cluster size is not possible"));
    }
    Ok(1 << bits)
}

/// What the guest sees of an image that begins with these bytes.
pub fn size_bytes(beginning: &[u8]) -> Result<u64, ImageError> {
    first_cluster_bytes(beginning)?;
    long(beginning, 24)
}

/// What QEMU opens besides an image that begins with these bytes: its first cluster, or the whole of a shorter one.
pub fn other_files(beginning: &[u8]) -> Result<OtherFiles, ImageError> {
    let cluster_bytes = first_cluster_bytes(beginning)?;
    let version = number(beginning, 4)?;
    let header_bytes = match version {
        2 => VERSION_2_BYTES,
        3 => usize::try_from(number(beginning, 100)?).unwrap_or(usize::MAX),
        _ => return Err(ImageError::Version(version)),
    };
    if version == 3 && header_bytes < VERSION_3_BYTES {
        return Err(ImageError::Damaged("its length is too small"));
    }
    let first = &beginning[..beginning.len().min(cluster_bytes)];
    let file = backing_file(first)?;
    let extensions_end = file.as_ref().map_or(cluster_bytes, |(at, _)| *at);
    let extensions = extensions(first, header_bytes, extensions_end)?;
    let has_data_file = version == 3 && long(first, 72)? & EXTERNAL_DATA != 0;
    if has_data_file && extensions.data.is_none() {
        return Err(ImageError::Damaged("the name of its data file is missing"));
    }
    let backing = file.map(|(_, file)| Backing { file, format: extensions.format });
    Ok(OtherFiles { backing, data: extensions.data.filter(|_| has_data_file) })
}

/// Where the name of the backing file is, and the name.
fn backing_file(first: &[u8]) -> Result<Option<(usize, String)>, ImageError> {
    let at = usize::try_from(long(first, 8)?).unwrap_or(usize::MAX);
    let bytes = usize::try_from(number(first, 16)?).unwrap_or(usize::MAX);
    if at == 0 {
        return Ok(None);
    }
    let name =
        at.checked_add(bytes).and_then(|end| first.get(at..end)).filter(|name| name.len() <= NAME_BYTES_MAX);
    let name = name.ok_or(ImageError::Damaged("the name of its backing file is out of place"))?;
    Ok(Some((at, text(name)?)))
}

#[derive(Default)]
struct Extensions {
    format: Option<String>,
    data: Option<String>,
}

/// QEMU reads them from the end of the header to the name of the backing file, or the end of the first cluster.
fn extensions(first: &[u8], mut at: usize, end: usize) -> Result<Extensions, ImageError> {
    const CUT: ImageError = ImageError::Damaged("its extensions are cut off");
    let mut found = Extensions::default();
    while at < end {
        let kind = number(first, at)?;
        let bytes = usize::try_from(number(first, at + 4)?).unwrap_or(usize::MAX);
        if kind == END {
            break;
        }
        let begin = at + 8;
        let until = begin.checked_add(bytes).filter(|until| *until <= end).ok_or(CUT)?;
        let content = first.get(begin..until).ok_or(CUT)?;
        match kind {
            BACKING_FORMAT => found.format = Some(text(content)?),
            DATA_FILE => found.data = Some(text(content)?),
            _ => {}
        }
        at = until.next_multiple_of(8);
    }
    Ok(found)
}

/// A name as QEMU has it: to its first NUL.
fn text(bytes: &[u8]) -> Result<String, ImageError> {
    let name = bytes.split(|byte| *byte == 0).next().unwrap_or_default();
    String::from_utf8(name.to_vec()).map_err(|_| ImageError::Damaged("a name in it is not text"))
}

fn number(bytes: &[u8], at: usize) -> Result<u32, ImageError> {
    let found = at.checked_add(4).and_then(|end| bytes.get(at..end)?.try_into().ok());
    found.map(u32::from_be_bytes).ok_or(ImageError::Damaged("it is too short"))
}

fn long(bytes: &[u8], at: usize) -> Result<u64, ImageError> {
    Ok(u64::from(number(bytes, at)?) << 32 | u64::from(number(bytes, at + 4)?))
}

/// Bytes of a number in a table.
const ENTRY_BYTES: u64 = 8;

/// Bits of a count of references, by the power of two that the header has; QEMU's default.
const COUNT_ORDER: u32 = 4;
const COUNT_BYTES: u64 = 2;

/// Largest table that QEMU opens an image with.
const TABLE_BYTES_MAX: u64 = 32 << 20;

/// An image that holds nothing yet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct EmptyImage {
    /// Size of its file.
    pub file_bytes: u64,
    /// What stands where in it; all else is zero.
    pub parts: Vec<(u64, Vec<u8>)>,
}

/// A disk too large for such clusters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error(
    "a qcow2 image of {bytes} bytes cannot have clusters of {cluster_bytes} bytes: give the disk larger ones"
)]
pub struct TooLarge {
    bytes: u64,
    cluster_bytes: u64,
}

/// An empty image of version 3 for a disk of so many bytes.
///
/// ```text
/// header │ table of reference counts │ its first block │ L1 table
/// ```
pub fn empty(bytes: u64, cluster_bytes: u64) -> Result<EmptyImage, TooLarge> {
    let too_large = TooLarge { bytes, cluster_bytes };
    let bits = cluster_bytes.trailing_zeros();
    if !cluster_bytes.is_power_of_two() || !CLUSTER_BITS.contains(&bits) {
        return Err(too_large);
    }
    // Each entry of the L1 table stands for a cluster of entries, and each of those for a cluster.
    let entries = bytes.div_ceil(cluster_bytes * (cluster_bytes / ENTRY_BYTES)).max(1);
    let clusters = 3 + (entries * ENTRY_BYTES).div_ceil(cluster_bytes);
    if clusters > cluster_bytes / COUNT_BYTES || entries * ENTRY_BYTES > TABLE_BYTES_MAX {
        return Err(too_large);
    }
    let [counts_at, block_at, table_at] = [1, 2, 3].map(|cluster| cluster * cluster_bytes);
    let entries = u32::try_from(entries).map_err(|_| too_large)?;
    let header = [
        MAGIC,
        &3_u32.to_be_bytes(),
        &[0; 12],
        &bits.to_be_bytes(),
        &bytes.to_be_bytes(),
        &[0; 4],
        &entries.to_be_bytes(),
        &table_at.to_be_bytes(),
        &counts_at.to_be_bytes(),
        &1_u32.to_be_bytes(),
        &[0; 36],
        &COUNT_ORDER.to_be_bytes(),
        &104_u32.to_be_bytes(),
    ]
    .concat();
    let counted = (0..clusters).flat_map(|_| 1_u16.to_be_bytes()).collect();
    let parts = vec![(0, header), (counts_at, block_at.to_be_bytes().to_vec()), (block_at, counted)];
    Ok(EmptyImage { file_bytes: clusters * cluster_bytes, parts })
}

#[cfg(any(test, feature = "fuzzing"))]
pub mod fuzzing {
    //! What an image is whose storage others write to.

    use super::{NAME_BYTES_MAX, first_cluster_bytes, other_files};

    /// What an image takes, in all the forms that it has.
    pub const IMAGE_HOLDS_BYTES: usize = 4 << 20;

    /// The beginning of an image.
    ///
    /// Holds: names have no NUL and are no longer than the cluster. What lies beyond the first cluster changes nothing.
    pub fn image(data: &[u8]) {
        let Ok(found) = other_files(data) else { return };
        let cluster = first_cluster_bytes(data).expect("it was understood");
        let names = found.backing.iter().map(|backing| &backing.file);
        assert!(names.clone().all(|name| name.len() <= NAME_BYTES_MAX));
        assert!(names.chain(&found.data).all(|name| !name.contains('\0') && name.len() <= cluster));
        if data.len() >= cluster {
            assert_eq!(other_files(&data[..cluster]), Ok(found.clone()));
            assert_eq!(other_files(&[data, &[0xff; 9]].concat()), Ok(found));
        }
    }

    /// Images of both versions, with and without others.
    pub fn image_seeds() -> Vec<Vec<u8>> {
        vec![
            header(2, None, &[]),
            header(3, None, &[]),
            header(3, Some("base.qcow2"), &[(super::BACKING_FORMAT, "qcow2")]),
            header(3, None, &[(super::DATA_FILE, "/srv/data.raw")]),
        ]
    }

    /// The first cluster of an image, of 512 bytes.
    pub fn header(version: u32, backing: Option<&str>, extensions: &[(u32, &str)]) -> Vec<u8> {
        let mut bytes = vec![0; 512];
        let mut put = |at: usize, content: &[u8]| bytes[at..at + content.len()].copy_from_slice(content);
        put(0, super::MAGIC);
        put(4, &version.to_be_bytes());
        put(20, &9_u32.to_be_bytes());
        let mut at = super::VERSION_2_BYTES;
        if version == 3 {
            let has_data = extensions.iter().any(|(kind, _)| *kind == super::DATA_FILE);
            put(72, &(if has_data { super::EXTERNAL_DATA } else { 0 }).to_be_bytes());
            put(100, &104_u32.to_be_bytes());
            at = super::VERSION_3_BYTES;
        }
        for (kind, content) in extensions {
            put(at, &kind.to_be_bytes());
            put(at + 4, &u32::try_from(content.len()).expect("short").to_be_bytes());
            put(at + 8, content.as_bytes());
            at += 8 + content.len().next_multiple_of(8);
        }
        if let Some(backing) = backing {
            let begin = at + 8;
            put(8, &u64::try_from(begin).expect("small").to_be_bytes());
            put(16, &u32::try_from(backing.len()).expect("short").to_be_bytes());
            put(begin, backing.as_bytes());
        }
        bytes
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use proptest::prelude::*;

    use super::fuzzing::{header, image, image_seeds};
    use super::*;

    #[test]
    fn what_an_image_names_is_found() {
        assert_eq!(other_files(&header(2, None, &[])), Ok(OtherFiles::default()));
        let found = other_files(&header(3, Some("/etc/shadow"), &[(BACKING_FORMAT, "raw")])).unwrap();
        let backing = Backing { file: "/etc/shadow".into(), format: Some("raw".into()) };
        assert_eq!(found, OtherFiles { backing: Some(backing), data: None });
        let found = other_files(&header(3, None, &[(DATA_FILE, "/etc/shadow")])).unwrap();
        assert_eq!(found.data.as_deref(), Some("/etc/shadow"));
        let unused = [
            &header(3, None, &[(DATA_FILE, "x")])[..72],
            &[0; 8],
            &header(3, None, &[(DATA_FILE, "x")])[80..],
        ];
        assert_eq!(other_files(&unused.concat()), Ok(OtherFiles::default()), "the feature is off");
    }

    #[test]
    fn what_qemu_makes_is_understood() {
        let directory = tempfile::tempdir().unwrap();
        let image = |name: &str, options: &[&str]| {
            let made = Command::new("qemu-img")
                .current_dir(&directory)
                .args(["create", "-q", "-f", "qcow2"])
                .args(options)
                .args([name, "1M"])
                .status();
            made.is_ok_and(|made| made.success()).then(|| std::fs::read(directory.path().join(name)).unwrap())
        };
        let Some(base) = image("base", &[]) else {
            eprintln!("SKIPPED: no qemu-img");
            return;
        };
        assert_eq!(other_files(&base), Ok(OtherFiles::default()));
        let top = other_files(&image("top", &["-b", "base", "-F", "qcow2"]).unwrap()).unwrap();
        assert_eq!(top.backing, Some(Backing { file: "base".into(), format: Some("qcow2".into()) }));
        let apart = other_files(&image("apart", &["-o", "data_file=apart.raw"]).unwrap()).unwrap();
        assert_eq!(apart.data.as_deref(), Some("apart.raw"));
    }

    #[test]
    fn an_empty_image_is_one_to_qemu() {
        use std::os::unix::fs::FileExt;
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("image");
        for (bytes, cluster_bytes) in
            [(1 << 20, 512), (10 << 30, 64 << 10), (1 << 40, 2 << 20), (12_345_344, 4096)]
        {
            let made = empty(bytes, cluster_bytes).unwrap();
            let file = std::fs::File::create(&path).unwrap();
            file.set_len(made.file_bytes).unwrap();
            made.parts.iter().for_each(|(at, content)| file.write_all_at(content, *at).unwrap());
            let first = std::fs::read(&path).unwrap();
            assert_eq!(other_files(&first), Ok(OtherFiles::default()));
            assert_eq!(u64::try_from(first_cluster_bytes(&first).unwrap()), Ok(cluster_bytes));
            let ask = |words: &[&str]| Command::new("qemu-img").args(words).arg(&path).output();
            let Ok(check) = ask(&["check", "-f", "qcow2"]) else {
                eprintln!("SKIPPED: no qemu-img");
                return;
            };
            assert!(check.status.success(), "{check:?}");
            let info = ask(&["info", "--output=json"]).unwrap();
            let info = String::from_utf8(info.stdout).unwrap();
            assert!(info.contains(&format!("\"virtual-size\": {bytes}")), "{info}");
        }
    }

    #[test]
    fn no_image_is_made_that_qemu_would_not_open() {
        for (bytes, cluster_bytes) in
            [(1 << 40, 512), (1 << 20, 1000), (1 << 20, 256), (1 << 20, 4 << 20), (u64::MAX, 64 << 10)]
        {
            assert!(empty(bytes, cluster_bytes).is_err(), "{bytes} {cluster_bytes}");
        }
    }

    #[test]
    fn damaged_images_are_refused() {
        let good = header(3, Some("base"), &[(BACKING_FORMAT, "raw")]);
        let with = |at: usize, bytes: &[u8]| {
            let mut bad = good.clone();
            bad[at..at + bytes.len()].copy_from_slice(bytes);
            other_files(&bad).unwrap_err()
        };
        assert_eq!(with(0, b"x"), ImageError::NoImage);
        assert_eq!(with(4, &4_u32.to_be_bytes()), ImageError::Version(4));
        assert!(matches!(with(8, &[0xff; 8]), ImageError::Damaged(_)));
        assert!(matches!(with(16, &[0xff; 4]), ImageError::Damaged(_)));
        assert!(matches!(with(20, &40_u32.to_be_bytes()), ImageError::Damaged(_)));
        assert!(matches!(with(100, &[0; 4]), ImageError::Damaged(_)));
        assert!(matches!(with(108, &[0xff; 4]), ImageError::Damaged(_)));
        assert!(matches!(other_files(&good[..90]), Err(ImageError::Damaged(_))));
    }

    #[test]
    fn a_protocol_is_no_path() {
        for path in ["base", "../a:b", "/srv/a:b", "./nbd:x"] {
            assert!(is_path(path), "{path}");
        }
        for other in ["", "json:{}", "nbd://h/x", "file:/etc/shadow", "nbd:unix:/x"] {
            assert!(!is_path(other), "{other}");
        }
    }

    proptest! {
        #[test]
        fn nothing_in_an_image_breaks_its_reader(seed in 0_usize..4, at in 0_usize..200, with in proptest::collection::vec(any::<u8>(), 1..9)) {
            let mut data = image_seeds()[seed].clone();
            data[at..at + with.len()].copy_from_slice(&with);
            image(&data);
            image(&data[..at]);
        }
    }
}
