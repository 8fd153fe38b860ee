//! The names of a VM's disks: `vda`, `vdb`, as in a Linux guest.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// What stands before a disk's letter.
const PREFIX: &str = "vd";

/// As many as there are letters.
const COUNT: u8 = 26;

/// A VM's disk, by its place among them: the first is `vda`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct DiskName(u8);

/// No name of a disk.
#[derive(Debug, Clone, PartialEq, Eq, Error)]
#[error("`{0}` is not the name of a disk: the first of a VM's disks is vda, the second vdb, to vdz")]
pub struct NoDiskName(String);

impl DiskName {
    /// The name of the disk at this place, from 0; none if there are no more letters.
    pub fn at(index: usize) -> Option<Self> {
        u8::try_from(index).ok().filter(|index| *index < COUNT).map(Self)
    }

    /// Its place among the VM's disks, from 0.
    pub fn index(self) -> usize {
        usize::from(self.0)
    }
}

impl fmt::Display for DiskName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{PREFIX}{}", char::from(b'a' + self.0))
    }
}

impl FromStr for DiskName {
    type Err = NoDiskName;

    fn from_str(text: &str) -> Result<Self, NoDiskName> {
        match text.strip_prefix(PREFIX).map(str::as_bytes) {
            Some(&[letter @ b'a'..=b'z']) => Ok(Self(letter - b'a')),
            _ => Err(NoDiskName(text.chars().take(COUNT.into()).collect())),
        }
    }
}

impl TryFrom<String> for DiskName {
    type Error = NoDiskName;

    fn try_from(text: String) -> Result<Self, NoDiskName> {
        text.parse()
    }
}

impl From<DiskName> for String {
    fn from(name: DiskName) -> Self {
        name.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_disk_has_a_name_and_each_name_a_disk() {
        for index in 0..COUNT.into() {
            let name = DiskName::at(index).unwrap();
            assert_eq!((name.index(), name.to_string().parse()), (index, Ok(name)));
        }
        assert_eq!(DiskName::at(0).unwrap().to_string(), "vda");
        assert_eq!(DiskName::at(COUNT.into()), None);
    }

    #[test]
    fn nothing_else_is_a_name() {
        for text in ["", "vd", "vdA", "vdaa", "sda", "vd\u{e4}", "a", "vd0"] {
            assert!(text.parse::<DiskName>().is_err(), "{text}");
        }
    }
}
