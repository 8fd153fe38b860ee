//! What XML from another host must not make this host's libvirt do, which runs as root: only what is known to stay
//! within the specification is accepted.
//!
//! Somebody with a host's certificate may send any XML. libvirt would change the owner of what it names, write to it,
//! or run it. So each path must be in the specification, which `[vms]` allows, or be one of libvirt's own.

use std::path::{Component, Path};

use drainpipe_hypervisor::spec::VmSpec;

use super::disks::{self, Disk, DiskSource};
use super::element::{self, Element};
use super::error::DomainXmlError;
use super::words::plain;

/// Elements of a domain, each at most once, but for labels.
const OF_DOMAIN: &[&str] = &[
    "blkiotune",
    "clock",
    "cpu",
    "cputune",
    "currentMemory",
    "defaultiothread",
    "description",
    "devices",
    "features",
    "genid",
    "hwuuid",
    "iothreadids",
    "iothreads",
    "launchSecurity",
    "maxMemory",
    "memory",
    "memoryBacking",
    "memtune",
    "metadata",
    "name",
    "numatune",
    "on_crash",
    "on_lockfailure",
    "on_poweroff",
    "on_reboot",
    "os",
    "perf",
    "pm",
    "resource",
    "seclabel",
    "sysinfo",
    "throttlegroups",
    "title",
    "uuid",
    "vcpu",
    "vcpus",
];
/// What is in these is for people and programs, not for libvirt.
const FREE: &[&str] = &["description", "metadata", "title"];
const DEVICES: &[&str] = &[
    "audio",
    "channel",
    "console",
    "controller",
    "crypto",
    "disk",
    "emulator",
    "graphics",
    "hub",
    "input",
    "interface",
    "iommu",
    "memballoon",
    "memory",
    "panic",
    "parallel",
    "redirdev",
    "redirfilter",
    "rng",
    "serial",
    "smartcard",
    "sound",
    "tpm",
    "video",
    "vsock",
    "watchdog",
];
const CHARACTER_DEVICES: &[&str] = &["channel", "console", "parallel", "serial"];
/// Repeated elements: some readers of XML might take the first and others the last.
const ONCE_IN_A_DEVICE: &[&str] =
    &["backend", "backingStore", "driver", "format", "log", "mirror", "readonly", "source", "target"];
/// Attributes that are paths, whatever they begin with.
const PATHS: &[&str] = &[
    "dir",
    "evdev",
    "file",
    "keyfile",
    "logFile",
    "path",
    "rendernode",
    "socket",
    "tap",
    "template",
    "vhost",
    "xauth",
];

const FIRMWARE: &[&str] = &["/usr/share/"];
const VARIABLES: &[&str] = &["/var/lib/libvirt/qemu/nvram/"];
const LOGS: &[&str] = &["/var/log/libvirt/"];
/// libvirt replaces what is there. Beside them are what it keeps of other domains, and its own socket.
const SOCKETS: &[&str] =
    &["/run/libvirt/qemu/channel/", "/var/lib/libvirt/qemu/channel/", "/var/run/libvirt/qemu/channel/"];
const SOCKETS_WITHOUT_DIRECTORY: &str = "/var/lib/libvirt/qemu";
/// The socket of the helper that reserves a host's SCSI disks for its guests.
const RESERVATIONS_SOCKET: &str = "/run/qemu-pr-helper.sock";
const VHOST_USER_SOCKETS: &[&str] = &[
    "/run/openvswitch/",
    "/run/vhost/",
    "/run/vpp/",
    "/var/lib/vhost_sockets/",
    "/var/run/openvswitch/",
    "/var/run/vhost/",
    "/var/run/vpp/",
];

/// The parts of a domain's XML that a host accepts from no other host.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Untrusted {
    /// It is no domain's.
    #[error("{0}")]
    Xml(DomainXmlError),
    /// libvirt might hand it to QEMU as it is.
    #[error(
        "the domain's XML has {}, which is not libvirt's own: outside of <metadata> no other host may send that. Remove it \
         with `virsh edit`, and start the domain again",
        plain(.0)
    )]
    Foreign(String),
    /// An element that may give it what `[vms]` does not see.
    #[error(
        "the domain's XML has {}, which no other host may send: it may reach what `[vms]` does not allow. \
        Remove it with \
         `virsh edit`, and start the domain again",
        plain(.0)
    )]
    Element(String),
    /// Readers might take one or the other.
    #[error("the domain's XML has <{}> twice in the same element, or text beside elements, which libvirt never writes", plain(.0))]
    Ambiguous(String),
    /// A path that is not the specification's, and not libvirt's own.
    #[error(
        "the domain's XML names `{}` in <{}>, which no other host may have opened here. Use a path that libvirt chooses, or \
         of a disk in a directory of `[vms]`, with `virsh edit`, and start the domain again",
        plain(path),
        plain(element)
    )]
    Path {
        /// The element that names it.
        element: String,
        /// The path.
        path: String,
    },
    /// Nothing says whether the target's VMs may use it.
    #[error(
        "its disk {}, `{}`, may be missing here, so that `[vms]` is not asked for it; then it must be raw, and in the \
         directory of another disk of the domain. Eject it with `virsh change-media`, or remove its startupPolicy",
        plain(target),
        plain(path)
    )]
    OptionalDisk {
        /// The guest's name for the disk.
        target: String,
        /// Its path.
        path: String,
    },
}

/// Why a domain whose specification was let in does not come here by this XML; the first reason.
pub fn refusal(xml: &str, spec: &VmSpec) -> Option<Untrusted> {
    match element::parse(xml) {
        Ok(document) => check(Element::root(&document), spec).err(),
        Err(error) => Some(Untrusted::Xml(error)),
    }
}

/// As [`refusal`], of a domain in other XML.
pub(super) fn check(domain: Element<'_>, spec: &VmSpec) -> Result<(), Untrusted> {
    check_own(domain)?;
    check_once(domain, OF_DOMAIN.iter().filter(|name| **name != "seclabel"))?;
    for element in domain.elements() {
        check_own(element)?;
        check_known(element, OF_DOMAIN)?;
        match element.name() {
            name if FREE.contains(&name) => {}
            "devices" => element.elements().try_for_each(|device| check_device(device, spec))?,
            "seclabel" => check_label(element)?,
            _ => element.within().try_for_each(|part| check_part(element, part, spec))?,
        }
    }
    Ok(())
}

pub(super) fn check_known(element: Element<'_>, known: &[&str]) -> Result<(), Untrusted> {
    if known.contains(&element.name()) { Ok(()) } else { Err(Untrusted::Element(tag(element, &[]))) }
}

/// libvirt takes elements and attributes of other namespaces for its own in places.
pub(super) fn check_own(element: Element<'_>) -> Result<(), Untrusted> {
    let is_own = element.namespace().is_none() && !element.has_foreign_attributes();
    if is_own { Ok(()) } else { Err(Untrusted::Foreign(tag(element, &[]))) }
}

pub(super) fn check_once<'a>(
    parent: Element<'_>,
    names: impl IntoIterator<Item = &'a &'a str>,
) -> Result<(), Untrusted> {
    let mut names = names.into_iter();
    let twice = names.find(|name| parent.all(name).nth(1).is_some());
    twice.map_or(Ok(()), |name| Err(Untrusted::Ambiguous((*name).to_owned())))
}

/// Anything but a label that libvirt makes for each domain, since others may let QEMU do more.
fn check_label(label: Element<'_>) -> Result<(), Untrusted> {
    label.within().try_for_each(check_own)?;
    let is_ordinary = |base: Element<'_>| {
        base.text().is_some_and(|base| matches!(base.split(':').nth(2), Some("svirt_t" | "svirt_tcg_t")))
    };
    if label.attribute("type") == Some("dynamic") && label.all("baselabel").all(is_ordinary) {
        return Ok(());
    }
    Err(Untrusted::Element(tag(label, &["type", "model"])))
}

fn check_device(device: Element<'_>, spec: &VmSpec) -> Result<(), Untrusted> {
    check_own(device)?;
    check_known(device, DEVICES)?;
    device.within().try_for_each(|part| check_part(device, part, spec))?;
    let is_allowed = match device.name() {
        "emulator" => is_qemu(&device.text().unwrap_or_default()),
        "disk" => return check_disk(&disks::parse(device), spec),
        "interface" => is_allowed_interface(device, spec),
        "redirdev" | "smartcard" => device.attribute("type") == Some("spicevmc"),
        "rng" => device.all("backend").all(is_allowed_backend),
        "tpm" => device.all("backend").all(|backend| backend.attribute("type") == Some("emulator")),
        "input" => !matches!(device.attribute("type"), Some("passthrough" | "evdev")),
        "audio" => matches!(device.attribute("type"), Some("none" | "spice")),
        "graphics" => device.attribute("type") != Some("dbus"),
        "memory" => !device.has("source/path"),
        name if CHARACTER_DEVICES.contains(&name) => is_allowed_character_device(device),
        _ => true,
    };
    if is_allowed { Ok(()) } else { Err(Untrusted::Element(tag(device, &["type", "mode", "model"]))) }
}

fn is_qemu(path: &str) -> bool {
    let name = path.rsplit('/').next().unwrap_or_default();
    is_below(path, &["/usr/"]) && (name.contains("qemu") || name.starts_with("kvm"))
}

fn is_allowed_interface(interface: Element<'_>, spec: &VmSpec) -> bool {
    match interface.attribute("type") {
        Some("bridge") => {
            let bridge = interface.at("source").and_then(|source| source.attribute("bridge"));
            spec.nics.iter().any(|nic| Some(nic.bridge.as_str()) == bridge)
        }
        Some("direct" | "ethernet" | "network" | "user" | "vhostuser") => true,
        _ => false,
    }
}

fn is_allowed_backend(backend: Element<'_>) -> bool {
    match backend.attribute("model") {
        Some("random") => matches!(backend.text().as_deref(), None | Some("/dev/random" | "/dev/urandom")),
        other => other == Some("builtin"),
    }
}

fn is_allowed_character_device(device: Element<'_>) -> bool {
    let mode = device.at("source").and_then(|source| source.attribute("mode"));
    match device.attribute("type") {
        Some("file" | "null" | "pty" | "qemu-vdagent" | "spiceport" | "spicevmc" | "vc") => true,
        // To connect would hand the guest another program's socket, such as libvirt's.
        Some("unix") => matches!(mode, None | Some("bind")),
        _ => false,
    }
}

fn check_disk(disk: &Disk, spec: &VmSpec) -> Result<(), Untrusted> {
    let sources = std::iter::once(&disk.source).chain(disk.backing.iter().map(|backing| &backing.source));
    for source in sources {
        if let DiskSource::Directory { .. } | DiskSource::Nvme | DiskSource::Other(_) = source {
            let kind = format!("a disk {} of a directory, a controller or an unknown kind", disk.target);
            return Err(Untrusted::Element(kind));
        }
    }
    let Some(path) = disk.source.path().filter(|_| disk.is_dropped_if_missing) else { return Ok(()) };
    if is_like_others(disk, path, spec) {
        return Ok(());
    }
    let (target, path) = (disk.target.clone(), path.display().to_string());
    Err(Untrusted::OptionalDisk { target, path })
}

/// An image may name any file, and nobody has looked into this one.
fn is_like_others(disk: &Disk, path: &Path, spec: &VmSpec) -> bool {
    let is_file = matches!(disk.source, DiskSource::File { .. }) && !path.starts_with("/dev");
    let is_raw = matches!(disk.format.as_deref(), None | Some("raw")) && disk.backing.is_empty();
    let is_beside = spec.disks.iter().any(|other| other.path.parent() == path.parent());
    is_file && is_raw && is_beside && is_plain(path)
}

/// An element in a device, or in another part of a domain.
pub(super) fn check_part(of: Element<'_>, part: Element<'_>, spec: &VmSpec) -> Result<(), Untrusted> {
    check_own(part)?;
    let text = part.text().filter(|text| !text.trim().is_empty());
    if text.is_some() && part.elements().next().is_some() {
        return Err(Untrusted::Ambiguous(part.name().to_owned()));
    }
    if !matches!(of.name(), "features" | "cpu") {
        check_once(part, ONCE_IN_A_DEVICE)?;
    }
    if part.name() == "seclabel" && part.has("label") {
        return Err(Untrusted::Element("<seclabel> with a <label> of a device's own".into()));
    }
    let refused = |path: &str| Untrusted::Path { element: part.name().to_owned(), path: path.to_owned() };
    if let Some(text) = text.filter(|text| !is_allowed_text(of, part, text, spec)) {
        return Err(refused(&text));
    }
    let mut attributes = part.attributes();
    match attributes.find(|(name, value)| !is_allowed_attribute(of, part, (name, value), spec)) {
        Some((_, path)) => Err(refused(path)),
        None => Ok(()),
    }
}

fn is_allowed_text(of: Element<'_>, part: Element<'_>, text: &str, spec: &VmSpec) -> bool {
    match (of.name(), part.name()) {
        ("os", "kernel") => spec.kernel.as_deref() == Some(Path::new(text)),
        ("os", "initrd") => spec.initramfs.as_deref() == Some(Path::new(text)),
        // Code that the guest could change would be every domain's.
        ("os", "loader") => {
            let is_flash = part.attribute("type") == Some("pflash");
            is_below(text, FIRMWARE) && (!is_flash || part.attribute("readonly") == Some("yes"))
        }
        ("os", "nvram") => is_below(text, VARIABLES),
        ("os", "dtb" | "shim" | "table") => false,
        // `check_device` looks at the first two.
        ("emulator", _)
        | ("rng", "backend")
        | ("os", "cmdline")
        | ("sysinfo", "entry")
        | ("resource", "partition") => true,
        ("blkiotune", "path") => is_below(text, &["/dev/"]),
        _ => !text.trim_start().starts_with('/'),
    }
}

fn is_allowed_attribute(
    of: Element<'_>,
    part: Element<'_>,
    (name, value): (&str, &str),
    spec: &VmSpec,
) -> bool {
    let is_image = |path: &str| {
        // One that may be missing is in no specification; `check_disk` looks at it.
        let is_optional = || {
            let disk = disks::parse(of);
            disk.is_dropped_if_missing && disk.source.path() == Some(Path::new(path))
        };
        spec.disks.iter().any(|disk| disk.path == Path::new(path)) || is_optional()
    };
    let is_source = part.name() == "source";
    match (of.name(), part.name(), name) {
        _ if value.is_empty() => true,
        ("disk", "source", "file" | "dev") => is_image(value),
        // The name of an image on the network.
        ("disk", "source", "name" | "query") => true,
        ("disk", "source", "path") => is_below(value, VHOST_USER_SOCKETS) || value == RESERVATIONS_SOCKET,
        ("disk", "config", "file") => is_below(value, &["/etc/ceph/"]),
        ("os", "nvram", "template") => is_below(value, FIRMWARE),
        ("os", "source", "file") => is_below(value, VARIABLES),
        ("interface", "source", "path") => is_below(value, VHOST_USER_SOCKETS),
        ("interface", "backend", "tap") => value == "/dev/net/tun",
        ("interface", "backend", "vhost") => value == "/dev/vhost-net",
        ("interface", "backend", "logFile") | (_, "log", "file") => is_below(value, LOGS),
        ("graphics", _, "socket") => is_socket(value),
        ("graphics" | "video", _, "rendernode") => is_below(value, &["/dev/dri/"]),
        ("console", "console", "tty") => is_below(value, &["/dev/pts/"]),
        (device, _, "path") if is_source && CHARACTER_DEVICES.contains(&device) => is_allowed_end(of, value),
        _ => !PATHS.contains(&name) && !value.trim_start().starts_with('/'),
    }
}

/// The host's end of a character device.
fn is_allowed_end(device: Element<'_>, path: &str) -> bool {
    match device.attribute("type") {
        Some("pty") => is_below(path, &["/dev/pts/"]),
        Some("file") => is_below(path, LOGS),
        Some("unix") => is_socket(path),
        _ => false,
    }
}

fn is_socket(path: &str) -> bool {
    let is_beside = Path::new(path).parent() == Some(Path::new(SOCKETS_WITHOUT_DIRECTORY));
    is_plain(Path::new(path)) && (is_beside || is_below(path, SOCKETS))
}

fn is_below(path: &str, directories: &[&str]) -> bool {
    is_plain(Path::new(path)) && directories.iter().any(|directory| path.starts_with(directory))
}

/// Absolute, and without a way up.
fn is_plain(path: &Path) -> bool {
    path.is_absolute() && !path.components().any(|part| part == Component::ParentDir)
}

/// As it is written, with those of these attributes that it has.
fn tag(element: Element<'_>, attributes: &[&str]) -> String {
    let said = attributes.iter().filter_map(|name| Some((name, element.attribute(name)?)));
    let said: Vec<String> = said.map(|(name, value)| format!(" {name}='{value}'")).collect();
    format!("<{}{}>", element.name(), said.concat())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::domain::DomainDescription;

    const DEBIAN: &str = include_str!("../../tests/domains/debian.xml");
    const CLOUD: &str = include_str!("../../tests/domains/cloud.xml");
    const NUMA: &str = include_str!("../../tests/domains/numa.xml");
    const WINDOWS: &str = include_str!("../../tests/domains/windows.xml");

    fn refused(xml: &str) -> Option<Untrusted> {
        let description = DomainDescription::parse(xml).expect("a domain");
        refusal(xml, &description.vm_spec().expect("a specification"))
    }

    /// What is said about Debian's server with one text replaced.
    fn said(from: &str, to: &str) -> String {
        assert!(DEBIAN.contains(from), "{from}");
        refused(&DEBIAN.replacen(from, to, 1)).map(|why| why.to_string()).unwrap_or_default()
    }

    fn said_of_device(device: &str) -> String {
        said("</devices>", &format!("{device}</devices>"))
    }

    #[test]
    fn what_people_have_comes() {
        for xml in [DEBIAN, CLOUD, NUMA] {
            assert_eq!(refused(xml), None);
        }
        assert_eq!(refused(&WINDOWS.replace(" startupPolicy='optional'", "")), None);
    }

    #[test]
    fn what_libvirt_prints_of_ordinary_devices_comes() {
        for device in [
            "<serial type='file'><source path='/var/log/libvirt/qemu/web.console' append='on'/></serial>",
            "<serial type='pty'><source path='/dev/pts/3'/><log file='/var/log/libvirt/qemu/web.log'/></serial>",
            "<channel type='unix'><source mode='bind' path='/var/lib/libvirt/qemu/channel/target/domain-1-web/a.0'/></channel>",
            "<channel type='unix'><source mode='bind' path='/var/lib/libvirt/qemu/web.agent'/></channel>",
            "<channel type='unix'><target type='virtio' name='org.qemu.guest_agent.0'/></channel>",
            "<channel type='spiceport'><source channel='org.spice-space.webdav.0'/></channel>",
            "<redirdev bus='usb' type='spicevmc'/>",
            "<smartcard mode='passthrough' type='spicevmc'/>",
            "<rng model='virtio'><backend model='builtin'/></rng>",
            "<vsock model='virtio'><cid auto='yes' address='3'/></vsock>",
            "<graphics type='vnc' socket='/run/libvirt/qemu/channel/vnc'><listen type='none'/></graphics>",
            "<graphics type='spice'><gl enable='no' rendernode='/dev/dri/renderD128'/></graphics>",
            "<sound model='ich9'/><audio id='2' type='spice'/>",
            "<interface type='ethernet'><backend tap='/dev/net/tun' vhost='/dev/vhost-net'/></interface>",
        ] {
            assert_eq!(said_of_device(device), "", "{device}");
        }
        for label in [
            "<seclabel type='dynamic' model='dac' relabel='yes'><label>+64055:+64055</label></seclabel>",
            "<seclabel type='dynamic' model='selinux'><baselabel>system_u:system_r:svirt_t:s0</baselabel></seclabel>",
        ] {
            assert_eq!(said("</domain>", &format!("{label}</domain>")), "", "{label}");
        }
    }

    #[test]
    fn devices_that_reach_into_the_host_stay_out() {
        for device in [
            "<filesystem type='mount'><source dir='/'/><target dir='x'/></filesystem>",
            "<hostdev mode='subsystem' type='usb'><source><vendor id='0x1'/></source></hostdev>",
            "<shmem name='ring' role='master'><model type='ivshmem-plain'/></shmem>",
            "<lease><key>k</key><target path='/etc/passwd'/></lease>",
            "<pstore backend='acpi-erst'><path>/etc/passwd</path></pstore>",
            "<interface type='hostdev'><source><address type='pci'/></source></interface>",
            "<interface type='vdpa'><source dev='x'/></interface>",
            "<interface type='server'><source address='127.0.0.1' port='1'/></interface>",
            "<redirdev bus='usb' type='tcp'><source mode='connect' host='x' service='1'/></redirdev>",
            "<smartcard mode='host'/>",
            "<rng model='virtio'><backend model='egd' type='unix'/></rng>",
            "<rng model='virtio'><backend model='random'>/dev/sda</backend></rng>",
            "<tpm model='tpm-crb'><backend type='external'/></tpm>",
            "<input type='evdev'/>",
            "<input type='passthrough' bus='virtio'/>",
            "<audio id='2' type='file'/>",
            "<graphics type='dbus' address='unix:path=x'/>",
            "<serial type='tcp'><source mode='connect' host='x' service='1'/></serial>",
            "<serial type='udp'/>",
            "<serial type='stdio'/>",
            "<serial type='dev'/>",
            "<parallel type='pipe'/>",
            "<channel type='unix'><source mode='connect' path='/var/lib/libvirt/qemu/x'/></channel>",
            "<emulator>/srv/vms/qemu</emulator>",
            "<emulator>/usr/../srv/qemu</emulator>",
            "<emulator>/usr/bin/python3</emulator>",
            "<disk type='nvme'><readonly/><source type='pci'/><target dev='vdx'/></disk>",
            "<disk type='newer'><source name='x'/><target dev='vdx'/></disk>",
            "<newer/>",
        ] {
            let said = said_of_device(device);
            assert!(
                said.contains("no other host may send") || said.contains("no other host may have"),
                "{device}: {said}"
            );
        }
    }

    #[test]
    fn paths_beside_the_specifications_stay_out() {
        for device in [
            "<serial type='file'><source path='/etc/cron.d/x'/></serial>",
            "<console type='file'><source path='/var/log/libvirt/../../../etc/cron.d/x'/></console>",
            "<serial type='file'><source path='etc/cron.d/x'/></serial>",
            "<serial type='pty'><log file='/etc/cron.d/x'/></serial>",
            "<serial type='null'><source path='/etc/cron.d/x'/></serial>",
            "<channel type='unix'><source mode='bind' path='/run/libvirt/libvirt-sock'/></channel>",
            "<channel type='unix'><source mode='bind' path='/var/lib/libvirt/dnsmasq/x.conf'/></channel>",
            "<interface type='ethernet'><script path='/srv/x'/></interface>",
            "<interface type='user'><backend type='passt' logFile='/etc/x'/></interface>",
            "<interface type='vhostuser'><source type='unix' path='/etc/x' mode='server'/></interface>",
            "<memory model='nvdimm'><source><path>/dev/sda</path></source></memory>",
            "<graphics type='sdl' xauth='/root/.Xauthority'/>",
            "<graphics type='vnc' socket='/etc/x'/>",
            "<tpm model='tpm-crb'><backend type='emulator'><source type='dir' path='/etc'/></backend></tpm>",
            "<disk type='network'><source protocol='nbd'><host transport='unix' socket='/run/x'/></source><target dev='vdx'/></disk>",
            "<disk type='network'><source protocol='ssh' name='x'><identity keyfile='/root/k'/></source><target dev='vdx'/></disk>",
            "<disk type='dir'><source dir='/etc'/><target dev='vdx'/></disk>",
            "<disk type='vhostuser'><source type='unix' path='/run/docker.sock'/><target dev='vdx'/></disk>",
            "<disk type='volume'><source pool='a' volume='b' file='/etc/x'/><target dev='vdx'/></disk>",
        ] {
            let said = said_of_device(device);
            assert!(said.contains("which no other host may have opened here"), "{device}: {said}");
        }
        for (from, to) in [
            ("<boot dev='hd'/>", "<loader type='rom'>/srv/vms/x</loader>"),
            ("<boot dev='hd'/>", "<loader type='pflash' readonly='no'>/usr/share/OVMF/OVMF_CODE.fd</loader>"),
            ("<boot dev='hd'/>", "<nvram>/etc/shadow</nvram>"),
            ("<boot dev='hd'/>", "<nvram type='file'><source file='/etc/shadow'/></nvram>"),
            ("<boot dev='hd'/>", "<nvram template='/etc/shadow'>/var/lib/libvirt/qemu/nvram/x.fd</nvram>"),
            ("<boot dev='hd'/>", "<dtb>x</dtb>"),
            ("<boot dev='hd'/>", "<acpi><table type='slic'>x</table></acpi>"),
            (
                "<features>",
                "<sysinfo type='fwcfg'><entry name='opt/x' file='/etc/shadow'/></sysinfo><features>",
            ),
        ] {
            assert!(said(from, to).contains("which no other host may have opened here"), "{to}");
        }
    }

    #[test]
    fn other_labels_than_libvirts_own_stay_out() {
        for label in [
            "<seclabel type='none'/>",
            "<seclabel type='none' model='dac'/>",
            "<seclabel type='static' model='dac'><label>+0:+0</label></seclabel>",
            "<seclabel model='dac'/>",
            "<seclabel type='dynamic' model='selinux'><baselabel>u:system_r:unconfined_t:s0</baselabel></seclabel>",
        ] {
            let said = said("</domain>", &format!("{label}</domain>"));
            assert!(said.contains("has <seclabel"), "{label}: {said}");
        }
        let of_disk = "<source file='/srv/vms/web-1.qcow2'><seclabel model='dac'><label>0:0</label></seclabel></source>";
        assert!(said("<source file='/srv/vms/web-1.qcow2' index='2'/>", of_disk).contains("<seclabel>"));
    }

    #[test]
    fn other_namespaces_than_libvirts_stay_out() {
        for to in [
            "<q:commandline xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'/></domain>",
            "<q:override xmlns:q='http://libvirt.org/schemas/domain/qemu/1.0'/></domain>",
            "<seclabel xmlns:x='x' x:type='none' type='dynamic'/></domain>",
        ] {
            assert!(said("</domain>", to).contains("not libvirt's own"), "{to}");
        }
        assert!(said_of_device("<x:hostdev xmlns:x='x'/>").contains("not libvirt's own"));
        assert!(said("</domain>", "<bootloader>/srv/x</bootloader></domain>").contains("<bootloader>"));
    }

    #[test]
    fn what_could_be_read_in_two_ways_stays_out() {
        let emulator = "<emulator>/usr/bin/qemu<x>/../../srv/qemu</x></emulator>";
        for device in [emulator, "<serial type='pty'><source/><source/></serial>"] {
            assert!(said_of_device(device).contains("twice"), "{device}");
        }
        assert!(said("</domain>", "<devices/></domain>").contains("twice"));
    }

    #[test]
    fn images_are_those_of_the_specification() {
        let spec = DomainDescription::parse(DEBIAN).expect("a domain").vm_spec().expect("a specification");
        for path in ["/srv/vms/web-1.qcow2", "/srv/vms/debian-12.qcow2", "/srv/vms/debian-12.raw"] {
            let other = DEBIAN.replacen(path, "/etc/shadow", 1);
            let why = refusal(&other, &spec).map(|why| why.to_string()).unwrap_or_default();
            assert!(why.contains("`/etc/shadow` in <source>"), "{why}");
        }
    }

    #[test]
    fn a_disk_that_may_be_missing_is_a_raw_one_beside_another() {
        let disk = |kind: &str, source: &str| {
            said_of_device(&format!(
                "<disk type='{kind}'><source {source} startupPolicy='optional'/><target dev='vdx'/></disk>"
            ))
        };
        assert_eq!(disk("file", "file='/srv/vms/tools.iso'"), "");
        for (kind, source) in [
            ("block", "dev='/dev/sda'"),
            ("file", "file='/etc/shadow'"),
            ("file", "file='/srv/vms/../../etc/shadow'"),
            ("block", "dev='/srv/vms/x'"),
        ] {
            assert!(disk(kind, source).contains("its disk vdx"), "{source}");
        }
        let image = "<disk type='file'><driver type='qcow2'/><source file='/srv/vms/x' startupPolicy='optional'/></disk>";
        assert!(said_of_device(image).contains("must be raw"));
        assert!(refused(WINDOWS).is_some_and(|why| why.to_string().contains("virtio-win.iso")));
    }
}
