//! Domains as users have them, and how Drainpipe describes them.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::mpsc;
use std::time::Duration;
use std::{fs, io, thread};

use drainpipe_hypervisor::spec::{Accelerator, DiskFormat, VmSpec};
use drainpipe_hypervisor_libvirt::domain::{
    Backing, Bound, CpuChoice, DiskDevice, DiskSource, DomainDescription, DomainXmlError, Doubt, Firmware,
    InterfaceKind, MemorySource, Need, Obstacle, PlacementError, Tpm,
};
use uuid::Uuid;

const SECRET_OF_DISK: Uuid = Uuid::from_u128(0x5a8f_6c0e_0f0f_4c8c_9d5f_0000_0000_00c1);
const SECRET_OF_TPM: Uuid = Uuid::from_u128(0x5a8f_6c0e_0f0f_4c8c_9d5f_0000_0000_00a1);

/// Parsing takes at most a second; a machine would have to be very busy.
const HANGS_AFTER: Duration = Duration::from_mins(5);

fn directory() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/domains")
}

fn xml(name: &str) -> String {
    let path = directory().join(format!("{name}.xml"));
    fs::read_to_string(&path).unwrap_or_else(|error| panic!("{}: {error}", path.display()))
}

fn domain(name: &str) -> DomainDescription {
    DomainDescription::parse(&xml(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// A domain in whose XML one text is replaced.
fn changed(name: &str, from: &str, to: &str) -> Result<DomainDescription, DomainXmlError> {
    let xml = xml(name);
    assert!(xml.contains(from), "{name} has no {from}");
    DomainDescription::parse(&xml.replacen(from, to, 1))
}

fn file(path: &str) -> DiskSource {
    DiskSource::File { path: path.into() }
}

fn spec(domain: &DomainDescription) -> VmSpec {
    domain.vm_spec().unwrap_or_else(|reasons| panic!("{}: {reasons:?}", domain.name))
}

/// The reasons why there is no specification.
fn reasons(domain: &DomainDescription) -> String {
    let reasons = domain.vm_spec().expect_err("it has none");
    reasons.iter().map(ToString::to_string).collect::<Vec<_>>().join("\n")
}

#[test]
fn a_server_of_debian() {
    let domain = domain("debian");
    assert_eq!((domain.name.as_str(), domain.hypervisor.as_str()), ("web-1", "kvm"));
    assert_eq!(domain.title.as_deref(), Some("Shop front end"));
    assert_eq!(domain.description.as_deref(), Some("Owned by the shop team; see wiki/Shop"));
    assert_eq!(domain.machine.kind.as_deref(), Some("pc-q35-7.2"));
    assert_eq!(domain.machine.architecture.as_deref(), Some("x86_64"));
    assert_eq!(domain.machine.emulator.as_deref(), Some(Path::new("/usr/bin/qemu-system-x86_64")));
    assert_eq!((domain.memory.bytes, domain.memory.current_bytes), (4 << 30, 4 << 30));
    assert_eq!((domain.cpus.most, domain.cpus.current), (2, 2));
    assert_eq!(domain.cpus.choice, CpuChoice::Custom { model: "Skylake-Server-IBRS".into() });
    assert_eq!(domain.machine.firmware, Firmware::Bios);
    assert!(domain.devices.has_guest_agent && domain.devices.tpm.is_none() && !domain.has_qemu_arguments);
    assert_eq!((domain.obstacles(), domain.doubts(), domain.needs()), (vec![], vec![], BTreeSet::new()));
}

#[test]
fn a_disk_and_what_it_is_based_on() {
    let [disk, drive] = domain("debian").devices.disks.try_into().expect("two");
    assert_eq!((disk.target.as_str(), &disk.device), ("vda", &DiskDevice::Disk));
    assert_eq!(disk.source, file("/srv/vms/web-1.qcow2"));
    assert_eq!((disk.format.as_deref(), disk.is_read_only), (Some("qcow2"), false));
    let backing = |format: &str, path| Backing { format: Some(format.into()), source: file(path) };
    let images = [backing("qcow2", "/srv/vms/debian-12.qcow2"), backing("raw", "/srv/vms/debian-12.raw")];
    assert_eq!(disk.backing, images);
    assert_eq!((drive.device, drive.source, drive.is_read_only), (DiskDevice::Cdrom, DiskSource::None, true));
}

#[test]
fn an_interface_on_a_bridge() {
    let [interface] = domain("debian").devices.interfaces.try_into().expect("one");
    assert_eq!(interface.kind, InterfaceKind::Bridge { name: "br-guest".into(), is_openvswitch: false });
    assert_eq!(interface.mac.map(|mac| mac.to_string()).as_deref(), Some("52:54:00:11:22:33"));
    assert_eq!((interface.target.as_deref(), interface.model.as_deref()), (Some("vnet4"), Some("virtio")));
    assert_eq!((interface.queues, interface.mtu), (Some(2), Some(9000)));
}

#[test]
fn a_specification_stands_for_a_domain() {
    let spec = spec(&domain("debian"));
    assert_eq!((spec.name.as_str(), spec.memory_mib, spec.vcpus), ("web-1", 4096, 2));
    assert_eq!(spec.uuid, Some(Uuid::from_u128(0x5a8f_6c0e_0f0f_4c8c_9d5f_0000_0000_0001)));
    assert_eq!((spec.machine.as_str(), spec.cpu_model.as_str()), ("pc-q35-7.2", "Skylake-Server-IBRS"));
    assert_eq!((spec.accelerator, spec.huge_page_mib), (Accelerator::Kvm, None));
    let disks: Vec<(Option<&str>, DiskFormat, bool)> =
        spec.disks.iter().map(|disk| (disk.path.to_str(), disk.format, disk.read_only)).collect();
    let expected = [
        (Some("/srv/vms/web-1.qcow2"), DiskFormat::Qcow2, false),
        (Some("/srv/vms/debian-12.qcow2"), DiskFormat::Qcow2, true),
        (Some("/srv/vms/debian-12.raw"), DiskFormat::Raw, true),
    ];
    assert_eq!(disks, expected);
    assert_eq!(spec.nics[0].bridge, "br-guest");
    let apart: Vec<String> = spec.placement.apart.iter().map(ToString::to_string).collect();
    assert_eq!(apart, ["shop-front", "web"]);
    assert_eq!(spec.placement.together.len(), 1);
}

#[test]
fn windows_with_uefi_and_a_tpm() {
    let domain = domain("windows");
    assert_eq!((domain.memory.bytes, domain.memory.current_bytes), (8 << 30, 6 << 30));
    assert_eq!((domain.cpus.most, domain.cpus.current), (8, 4));
    assert_eq!(domain.cpus.choice, CpuChoice::HostModel);
    let firmware = Firmware::Uefi {
        loader: Some("/usr/share/OVMF/OVMF_CODE_4M.ms.fd".into()),
        nvram: Some("/var/lib/libvirt/qemu/nvram/win2022_VARS.fd".into()),
        template: Some("/usr/share/OVMF/OVMF_VARS_4M.ms.fd".into()),
    };
    assert_eq!(domain.machine.firmware, firmware);
    let tpm = Tpm::Emulator { version: Some("2.0".into()), secret: Some(SECRET_OF_TPM) };
    assert_eq!(domain.devices.tpm, Some(tpm));
    let rbd = DiskSource::Network { protocol: "rbd".into(), name: Some("vms/win2022-data".into()) };
    assert_eq!(domain.devices.disks[2].source, rbd);
    assert!(!domain.devices.has_guest_agent);
    assert_eq!((domain.obstacles(), domain.doubts()), (vec![], vec![]));
}

#[test]
fn what_a_target_must_have_is_said() {
    let needs = domain("windows").needs();
    let expected = [
        Need::Network("default".into()),
        Need::Secret(SECRET_OF_DISK),
        Need::Secret(SECRET_OF_TPM),
        Need::Firmware("/usr/share/OVMF/OVMF_CODE_4M.ms.fd".into()),
        Need::Address("192.0.2.7".parse().expect("an address")),
    ];
    assert_eq!(needs, BTreeSet::from(expected));
    // The target may lack its CD-ROM, and its data are on Ceph.
    let spec = spec(&domain("windows"));
    let [disk] = spec.disks.as_slice() else { panic!("{:?}", spec.disks) };
    assert_eq!(disk.path.to_str(), Some("/dev/vg-san/win2022"));
    assert_eq!(spec.nics, []);
}

#[test]
fn a_cloud_image_of_a_pool_with_its_seed() {
    let domain = domain("cloud");
    assert_eq!(domain.memory.bytes, 1_000_000_000);
    let volume = DiskSource::Volume { pool: "vms".into(), volume: "cloud.qcow2".into() };
    assert_eq!(domain.devices.disks[0].source, volume);
    assert!(domain.devices.disks[2].is_shareable);
    assert_eq!(domain.devices.interfaces[0].kind, InterfaceKind::User);
    let needs = [Need::Volume { pool: "vms".into(), volume: "cloud.qcow2".into() }];
    assert_eq!((domain.needs(), domain.obstacles()), (BTreeSet::from(needs), vec![]));
    let spec = spec(&domain);
    assert_eq!(
        (spec.memory_mib, spec.accelerator, spec.cpu_model.as_str()),
        (954, Accelerator::Tcg, "qemu64")
    );
    assert_eq!(spec.kernel.as_deref(), Some(Path::new("/srv/boot/vmlinuz")));
    assert_eq!(spec.initramfs.as_deref(), Some(Path::new("/srv/boot/initrd")));
    assert_eq!(spec.kernel_command_line.as_deref(), Some("console=ttyS0 root=/dev/vda1"));
    let read_only: Vec<(Option<&str>, bool)> =
        spec.disks.iter().map(|disk| (disk.path.to_str(), disk.read_only)).collect();
    assert_eq!(read_only, [(Some("/srv/vms/cloud-seed.iso"), true), (Some("/srv/vms/quorum.raw"), false)]);
}

#[test]
fn huge_pages_numa_and_interfaces_beside_bridges() {
    let domain = domain("numa");
    let memory = &domain.memory;
    assert_eq!((memory.bytes, memory.max_bytes), (20 << 30, Some(64 << 30)));
    assert_eq!(memory.huge_pages[0].page_kib, Some(1 << 20));
    assert_eq!(memory.huge_pages[0].guest_nodes.as_deref(), Some("0-1"));
    assert!(memory.source == MemorySource::Memfd && memory.is_shared && memory.is_locked);
    assert_eq!((memory.devices[0].bytes, memory.devices[0].has_address), (Some(4 << 30), true));
    assert_eq!((domain.cpus.guest_nodes, &domain.cpus.choice), (2, &CpuChoice::HostPassthrough));
    assert_eq!(domain.bound, Bound { highest_cpu: Some(17), highest_node: Some(1) });
    let direct = InterfaceKind::Direct { link: "eno2".into(), mode: Some("bridge".into()) };
    assert_eq!(domain.devices.interfaces[1].kind, direct);
    let needs = [
        Need::Link("eno2".into()),
        Need::Socket("/run/vhost/db.sock".into()),
        Need::Cpu(17),
        Need::NumaNode(1),
    ];
    // It has an invariant time stamp counter with a frequency.
    assert_eq!((domain.needs(), domain.obstacles()), (BTreeSet::from(needs), vec![]));
    let spec = spec(&domain);
    assert_eq!((spec.memory_mib, spec.huge_page_mib, spec.cpu_model.as_str()), (20_480, Some(1024), "host"));
    assert_eq!(spec.nics.iter().map(|nic| nic.bridge.as_str()).collect::<Vec<_>>(), ["ovs-br0"]);
    assert_eq!(spec.placement.stays.as_deref(), Some("licence bound to this host"));
}

#[test]
fn memory_is_whole_huge_pages() {
    let domain = changed("numa", "<memory unit='GiB'>20<", "<memory unit='MiB'>20100<").expect("a domain");
    assert_eq!(spec(&domain).memory_mib, 20_480);
    let ordinary = changed("numa", "size='1048576'", "size='4'").expect("a domain");
    assert_eq!(spec(&ordinary).huge_page_mib, None);
    let two = "<page size='2048' nodeset='0'/><page size='1048576' unit='KiB' nodeset='1'/>";
    let mixed = changed("numa", "<page size='1048576' unit='KiB' nodeset='0-1'/>", two).expect("a domain");
    assert!(reasons(&mixed).contains("several sizes"));
    let odd = changed("numa", "size='1048576'", "size='16384'").expect("a domain");
    assert!(reasons(&odd).contains("use 2 or 1024"), "{}", reasons(&odd));
}

#[test]
fn everything_that_keeps_a_domain_where_it_is() {
    let domain = domain("host-devices");
    let device =
        |kind: &str, address: &str| Obstacle::HostDevice { kind: kind.into(), address: address.into() };
    let expected = [
        device("pci", "0000:65:00.0"),
        device("mdev", "5a8f6c0e-0f0f-4c8c-9d5f-0000000000e1"),
        Obstacle::HostInterface { address: "0000:03:02.1".into() },
        Obstacle::Vdpa,
        Obstacle::NvmeDisk { target: "vda".into() },
        Obstacle::TransientDisk { target: "vdb".into() },
        Obstacle::BlockJob { target: "vdc".into() },
        Obstacle::Virtiofs { tag: "share".into() },
        Obstacle::SharedMemory { name: "ring".into() },
        Obstacle::EncryptedMemory { by: "sev".into() },
        Obstacle::InvariantTsc,
        Obstacle::DimmWithoutAddress,
        Obstacle::HostDraws,
        Obstacle::HostTpm,
    ];
    assert_eq!(domain.obstacles(), expected);
    let doubts = [
        Doubt::NineP { tag: "old".into() },
        Doubt::UsbDevice { address: "0x0781:0x5567".into() },
        Doubt::QemuArguments,
    ];
    assert_eq!(domain.doubts(), doubts);
    let words = domain.obstacles()[0].to_string();
    assert!(words.contains("pci 0000:65:00.0"), "{words}");
    assert!(words.contains("cannot migrate a domain with <hostdev mode='subsystem' type='pci'>"), "{words}");
}

#[test]
fn what_libvirt_lets_pass_is_no_obstacle() {
    for (name, from, to) in [
        // QEMU drops what the host has cached.
        ("debian", "discard='unmap'", "cache='writeback'"),
        ("debian", "<target dev='vda' bus='virtio'/>", "<target dev='vda' bus='virtio'/><shareable/>"),
        ("numa", "<memory model='dimm'>", "<memory model='nvdimm'>"),
        (
            "debian",
            "</devices>",
            "<shmem name='ring' role='master'><model type='ivshmem-plain'/></shmem></devices>",
        ),
        ("debian", "<feature policy='disable' name='mpx'/>", "<feature policy='disable' name='invtsc'/>"),
    ] {
        assert_eq!(changed(name, from, to).expect("a domain").obstacles(), [], "{to}");
    }
}

#[test]
fn why_a_domain_has_no_specification() {
    let spaced = changed("host-devices", "<name>GPU_worker<", "<name>GPU worker<").expect("a domain");
    let spaced = reasons(&spaced);
    assert!(
        spaced.contains("`GPU worker` is not a VM name") && spaced.contains("virsh domrename"),
        "{spaced}"
    );
    for (name, from, to, says) in [
        ("debian", "type='kvm'", "type='xen'", "its hypervisor is xen"),
        ("debian", "machine='pc-q35-7.2'", "machine='pc q35'", "`pc q35` is not a machine type"),
        ("debian", "machine='pc-q35-7.2'", "", "names no machine type"),
        ("debian", "type='qcow2' discard", "type='vmdk' discard", "its disk vda has the format vmdk"),
        ("debian", "<vcpu placement='static'>2", "<vcpu placement='static'>300", "300 is out of range"),
        ("debian", "bridge='br-guest'", "bridge='a/b'", "`a/b` is not the name of a bridge"),
        ("numa", "licence bound to this host", " ", "say why the VM must stay"),
    ] {
        let domain = changed(name, from, to).expect("a domain");
        assert!(reasons(&domain).contains(says), "{}", reasons(&domain));
    }
    let both = changed("debian", "<name>web-1<", "<name>Web\u{202e}<").expect("a domain");
    assert!(reasons(&both).contains(r"`Web\u{202e}`"), "{}", reasons(&both));
}

#[test]
fn our_metadata_is_understood_or_refused() {
    let unknown = PlacementError::UnknownElement { element: "nearby".into() };
    for (from, to, error) in [
        ("<drainpipe:apart>web</drainpipe:apart>", "<drainpipe:nearby/>", unknown.clone()),
        ("<drainpipe:apart>web</drainpipe:apart>", "<x:nearby xmlns:x='y'/>", unknown),
        (
            "</metadata>",
            "<placement xmlns='urn:drainpipe:placement:1'/></metadata>",
            PlacementError::Twice { element: "placement" },
        ),
        (
            "<drainpipe:apart>web</drainpipe:apart>",
            "<drainpipe:stays>a</drainpipe:stays><drainpipe:stays>b</drainpipe:stays>",
            PlacementError::Twice { element: "stays" },
        ),
    ] {
        let domain = changed("debian", from, to).expect("a domain");
        assert_eq!(domain.placement, Err(error.clone()), "{to}");
        assert_eq!(reasons(&domain), error.to_string());
    }
    let group = changed("debian", ">web</drainpipe:apart>", ">We b</drainpipe:apart>").expect("a domain");
    assert!(reasons(&group).starts_with("`<apart>` in the metadata"), "{}", reasons(&group));
    // `virsh metadata --set` leaves inner elements this way.
    let plain = changed("debian", "<drainpipe:apart>web</drainpipe:apart>", "<apart xmlns=''>web</apart>");
    assert_eq!(plain.expect("a domain").placement, domain("debian").placement);
}

#[test]
fn what_is_no_domain() {
    for (from, to, says) in [
        ("<uuid>", "<uuid>x", "`<uuid>` of the domain's XML"),
        ("<memory unit='KiB'>", "<memory unit='KiB'>-", "is not an amount of memory"),
        ("<vcpu placement='static'>2", "<vcpu placement='static'>two", "`two` is not a number of CPUs"),
        ("<name>web-1</name>", "", "no `<name>`"),
        ("<name>web-1</name>", "<name>&boom;</name>", "cannot be parsed"),
        ("<domain type", "<!DOCTYPE d [<!ENTITY boom 'b'>]><domain type", "a document type"),
        ("</domain>", "", "cannot be parsed"),
    ] {
        let error = changed("debian", from, to).expect_err(to).to_string();
        assert!(error.contains(says), "{error}");
    }
    let network = DomainDescription::parse("<network/>").expect_err("a network").to_string();
    assert!(network.contains("its root is `<network>`"), "{network}");
}

/// Uses libvirt's own schema, if that and its reader are installed (Debian's `libvirt0` and `libxml2-utils`).
#[test]
fn libvirt_takes_these_for_domains() {
    let schema = Path::new("/usr/share/libvirt/schemas/domain.rng");
    if !schema.exists() {
        return;
    }
    let files =
        fs::read_dir(directory()).expect("there are some").map(|entry| entry.expect("readable").path());
    let validate = Command::new("xmllint").args(["--noout", "--relaxng"]).arg(schema).args(files).output();
    match validate {
        Ok(output) => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
        Err(error) if error.kind() == io::ErrorKind::NotFound => {}
        Err(error) => panic!("xmllint: {error}"),
    }
}

/// The worst XML that the limits allow: as many namespaces, attributes and elements as possible. Without limits, the
/// parser would need hours for it.
#[test]
fn hostile_xml_does_not_keep_the_parser_busy() {
    let declared: Vec<String> = (0..16).map(|number| format!(" xmlns:n{number}='u{number}'")).collect();
    let open = format!("<a{}>", declared.concat()).repeat(4);
    let attributes: Vec<String> = (0..32).map(|number| format!(" n15:a{number}=''")).collect();
    let element = format!("<b{}/>", attributes.concat());
    let many = element.repeat((3 << 20) / element.len());
    let hostile = format!("{open}{many}{}", "</a>".repeat(4));
    let deep = format!("{}{}", "<backingStore type='file'>".repeat(500), "</backingStore>".repeat(500));
    let deep = xml("debian").replacen("<backingStore/>", &deep, 1);
    let empty = format!("<domain>{}</domain>", "<a/>".repeat(60_000));
    for xml in [hostile, deep, empty] {
        let (tells, parsed) = mpsc::channel();
        thread::spawn(move || tells.send(DomainDescription::parse(&xml).is_ok()));
        parsed.recv_timeout(HANGS_AFTER).expect("the parser is busy still");
    }
}
