//! The firmware of a domain.

use std::path::PathBuf;

use super::element::Element;

/// A domain's firmware.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Firmware {
    /// QEMU's own BIOS, or another one that has no state.
    Bios,
    /// UEFI.
    Uefi {
        /// The firmware's code, on every host.
        loader: Option<PathBuf>,
        /// Its variables, a file of this domain. Its contents travel with the guest.
        nvram: Option<PathBuf>,
        /// What a new file of variables is copied from.
        template: Option<PathBuf>,
    },
}

/// A kernel that is booted without a boot loader.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct DirectBoot {
    /// The kernel.
    pub kernel: Option<PathBuf>,
    /// Its initial RAM file system.
    pub initramfs: Option<PathBuf>,
    /// Its command line.
    pub command_line: Option<String>,
}

pub(super) fn parse(os: Option<Element<'_>>) -> Firmware {
    let Some(os) = os else { return Firmware::Bios };
    let loader = os.at("loader");
    let is_flash = loader.is_some_and(|loader| loader.attribute("type") == Some("pflash"));
    if !is_flash && os.attribute("firmware") != Some("efi") {
        return Firmware::Bios;
    }
    let nvram = os.at("nvram");
    Firmware::Uefi {
        loader: loader.and_then(path),
        nvram: nvram.and_then(|nvram| nvram.at("source").and_then(source).or_else(|| path(nvram))),
        template: nvram.and_then(|nvram| nvram.path_of("template")),
    }
}

pub(super) fn direct_boot(os: Option<Element<'_>>) -> DirectBoot {
    let at = |name| os.and_then(|os| os.at(name));
    DirectBoot {
        kernel: at("kernel").and_then(path),
        initramfs: at("initrd").and_then(path),
        command_line: at("cmdline").and_then(Element::text),
    }
}

fn path(element: Element<'_>) -> Option<PathBuf> {
    let text = element.text()?;
    Some(text.trim()).filter(|text| !text.is_empty()).map(PathBuf::from)
}

fn source(source: Element<'_>) -> Option<PathBuf> {
    source.path_of("file").or_else(|| source.path_of("dev"))
}
