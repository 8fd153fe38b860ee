//! The daemons of libvirt's that a lab may have.

use std::path::Path;

/// The daemon of a libvirt that does not say another.
pub(crate) const LIBVIRTD: &str = "libvirtd";

/// What a modular libvirt has beside `virtqemud`, each in a daemon of its own: what domains use. They stay as they are when
/// `virtqemud` is ended and started.
const BESIDE_VIRTQEMUD: [&str; 3] = ["virtnetworkd", "virtsecretd", "virtstoraged"];

/// A daemon of libvirt's that has QEMU's domains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DaemonKind {
    /// Of all of libvirt.
    Libvirtd,
    /// Of QEMU alone.
    Virtqemud,
}

impl DaemonKind {
    /// By the name of its program.
    pub(crate) fn of(program: &Path) -> Option<Self> {
        match program.file_name()?.to_str()? {
            LIBVIRTD => Some(Self::Libvirtd),
            "virtqemud" => Some(Self::Virtqemud),
            _ => None,
        }
    }

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Libvirtd => LIBVIRTD,
            Self::Virtqemud => "virtqemud",
        }
    }

    pub(crate) fn socket(self) -> &'static str {
        match self {
            Self::Libvirtd => "libvirt-sock",
            Self::Virtqemud => "virtqemud-sock",
        }
    }

    /// Those that are started with it, from the same directory.
    pub(crate) fn beside(self) -> &'static [&'static str] {
        match self {
            Self::Libvirtd => &[],
            Self::Virtqemud => &BESIDE_VIRTQEMUD,
        }
    }
}
