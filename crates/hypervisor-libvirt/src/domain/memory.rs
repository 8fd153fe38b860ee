//! How much memory a domain has, and what provides it.

use super::element::Element;
use super::error::DomainXmlError;
use super::words::plain;

/// Memory of a domain.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Memory {
    /// All that the guest may have, by devices too: what its host must be able to give (`<memory>`).
    pub bytes: u64,
    /// What its balloon leaves it now (`<currentMemory>`).
    pub current_bytes: u64,
    /// Up to where devices may be added (`<maxMemory>`).
    pub max_bytes: Option<u64>,
    /// Huge pages that hold it.
    pub huge_pages: Vec<HugePages>,
    /// What it is made of.
    pub source: MemorySource,
    /// Whether other processes map it, as vhost-user and virtiofs need.
    pub is_shared: bool,
    /// Whether it is locked in the host's memory.
    pub is_locked: bool,
    /// Devices that are memory.
    pub devices: Vec<MemoryDevice>,
}

/// Huge pages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HugePages {
    /// Their size; `None` is the host's default.
    pub page_kib: Option<u64>,
    /// For which of the guest's NUMA nodes; `None` is all.
    pub guest_nodes: Option<String>,
}

/// What a guest's memory is made of (`<memoryBacking><source>`).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub enum MemorySource {
    /// Nothing is said, so libvirt chooses.
    #[default]
    Default,
    /// Memory without a name.
    Anonymous,
    /// Files.
    File,
    /// Memory with a descriptor.
    Memfd,
    /// Something of a newer libvirt.
    Other(String),
}

/// A device that is memory, such as a DIMM.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryDevice {
    /// `dimm`, `nvdimm`, `virtio-mem` and so on.
    pub model: String,
    /// Its size.
    pub bytes: Option<u64>,
    /// Whether it has a slot and a base address.
    pub has_address: bool,
}

pub(super) fn parse(domain: Element<'_>) -> Result<Memory, DomainXmlError> {
    let size = |element| domain.at(element).map(|found| bytes(found, element)).transpose();
    let total = size("memory")?.ok_or(DomainXmlError::Missing { element: "memory" })?;
    let backing = |path: &str| domain.at("memoryBacking").and_then(|backing| backing.at(path));
    let devices = domain.at("devices").into_iter().flat_map(|devices| devices.all("memory"));
    Ok(Memory {
        bytes: total,
        current_bytes: size("currentMemory")?.unwrap_or(total),
        max_bytes: size("maxMemory")?,
        huge_pages: backing("hugepages").map_or_else(Vec::new, huge_pages),
        source: backing("source").map_or(MemorySource::Default, source),
        is_shared: backing("access").is_some_and(|access| access.attribute("mode") == Some("shared")),
        is_locked: backing("locked").is_some(),
        devices: devices.map(device).collect(),
    })
}

fn bytes(element: Element<'_>, name: &'static str) -> Result<u64, DomainXmlError> {
    let text = element.text().unwrap_or_default();
    let unit = element.attribute("unit").unwrap_or("KiB");
    scaled(&text, unit).ok_or_else(|| DomainXmlError::Invalid {
        element: name,
        message: format!("`{} {}` is not an amount of memory", plain(text.trim()), plain(unit)),
    })
}

/// By libvirt's rule: `KB` is 1000 bytes, `k` and `KiB` are 1024, in whatever case.
fn scaled(number: &str, unit: &str) -> Option<u64> {
    let number: u64 = number.trim().parse().ok()?;
    let unit = unit.to_ascii_lowercase();
    if matches!(unit.as_str(), "b" | "byte" | "bytes") {
        return Some(number);
    }
    let power = u32::try_from("kmgtpe".find(unit.chars().next()?)?).ok()? + 1;
    let base: u64 = match unit.get(1..)? {
        "" | "ib" => 1024,
        "b" => 1000,
        _ => return None,
    };
    number.checked_mul(base.checked_pow(power)?)
}

fn huge_pages(element: Element<'_>) -> Vec<HugePages> {
    let pages: Vec<HugePages> = element.all("page").map(page).collect();
    if pages.is_empty() { vec![HugePages { page_kib: None, guest_nodes: None }] } else { pages }
}

fn page(page: Element<'_>) -> HugePages {
    let unit = page.attribute("unit").unwrap_or("KiB");
    let bytes = page.attribute("size").and_then(|size| scaled(size, unit));
    HugePages { page_kib: bytes.map(|bytes| bytes >> 10), guest_nodes: page.text_of("nodeset") }
}

fn source(source: Element<'_>) -> MemorySource {
    match source.attribute("type") {
        None => MemorySource::Default,
        Some("anonymous") => MemorySource::Anonymous,
        Some("file") => MemorySource::File,
        Some("memfd") => MemorySource::Memfd,
        Some(other) => MemorySource::Other(other.to_owned()),
    }
}

fn device(device: Element<'_>) -> MemoryDevice {
    let size = device.at("target/size");
    MemoryDevice {
        model: device.text_of("model").unwrap_or_default(),
        bytes: size.and_then(|size| bytes(size, "size").ok()),
        has_address: device.at("address").is_some_and(|address| address.attribute("type") == Some("dimm")),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_are_libvirts() {
        for (number, unit, bytes) in [
            ("1", "b", Some(1)),
            ("2", "KiB", Some(2048)),
            ("2", "k", Some(2048)),
            (" 2 ", "KB", Some(2000)),
            ("1", "G", Some(1 << 30)),
            ("1", "gib", Some(1 << 30)),
            ("1", "TB", Some(1_000_000_000_000)),
            ("15", "EiB", Some(15 << 60)),
            ("16", "EiB", None),
            ("-1", "b", None),
            ("1", "", None),
            ("1", "kilo", None),
            ("1", "é", None),
            ("1", "ké", None),
        ] {
            assert_eq!(scaled(number, unit), bytes, "{number} {unit}");
        }
    }
}
