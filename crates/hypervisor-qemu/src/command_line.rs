//! QEMU's command line, from a specification. Pure: equal specifications give equal machines on
//! source and target.

use std::collections::BTreeSet;
use std::ffi::OsString;
use std::os::fd::RawFd;
use std::path::PathBuf;

use drainpipe_hypervisor::Role;
use drainpipe_hypervisor::spec::{Disk, DiskFormat, MacAddress, ResolvedSpec, VmName};
use serde_json::{Value, json};

use crate::numbers::Numbers;

/// QEMU starts no guest by itself.
const NOT_BY_ITSELF: &str = "-S";

/// QEMU waits for the state of a guest.
const WAITS: &str = "-incoming";

/// First PCI slots, above those that the machine types use themselves. They are part of what the
/// guest sees, so they are given, not left to QEMU.
const NIC_SLOT_FIRST: usize = 0x03;
const DISK_SLOT_FIRST: usize = 0x10;

/// Serial output kept. In QEMU's memory, not in a file: a guest must not fill the host's disk.
const CONSOLE_BYTES: u32 = 64 * 1024;

/// Id of the character device that holds the serial output.
pub(crate) const CONSOLE_ID: &str = "console";

/// Name of the tap device of one NIC: unique per host, and within Linux' 15 characters.
pub(crate) fn tap_name(vm: &VmName, nic_index: usize) -> String {
    let hash = vm.derived_uuid().simple().to_string();
    format!("dp{}n{nic_index}", &hash[..10])
}

/// Arguments of QEMU for this VM.
///
/// Standard input is the control connection of the agent that starts this QEMU, standard output the
/// listening socket for agents after it; it has all else open under [`Numbers`]. QEMU never starts the guest by itself:
/// taps are attached first, and a target waits for the decision to take over.
///
/// `block_devices` are the paths of those disks that are block devices on this host: QEMU (since 6.0) opens nothing but
/// regular files by the driver for files.
pub(crate) fn command_line(
    spec: &ResolvedSpec,
    role: Role,
    block_devices: &BTreeSet<PathBuf>,
) -> Vec<OsString> {
    let numbers = Numbers::of(spec.spec());
    let mut arguments = Arguments::default();
    arguments.flags(&["-nodefaults", "-no-user-config", NOT_BY_ITSELF]);
    arguments.option("-display", "none");
    arguments.option("-name", format!("guest={},debug-threads=on", spec.spec().name));
    arguments.option("-msg", "timestamp=on");
    arguments.option("-sandbox", "on,obsolete=deny,elevateprivileges=deny,spawn=deny,resourcecontrol=deny");
    arguments.control_socket("start", "fd=0");
    arguments.control_socket("qmp", "fd=1,server=on,wait=off");
    arguments.control_socket("guard", &format!("fd={},server=on,wait=off", numbers.guard));
    arguments.machine(spec);
    arguments.boot(spec, &numbers);
    for (index, (disk, number)) in spec.spec().disks.iter().zip(numbers.disks).enumerate() {
        arguments.disk(spec, index, disk, number, block_devices.contains(&disk.path));
    }
    for (index, (mac, number)) in spec.macs().iter().zip(numbers.nics).enumerate() {
        arguments.nic(spec, index, *mac, number);
    }
    if role == Role::Incoming {
        arguments.option(WAITS, "defer");
    }
    arguments.0
}

/// The VM for which a QEMU was started, by its command line in `/proc`; none if that is not one of ours.
pub(crate) fn role_of(command_line: &[u8]) -> Option<Role> {
    let has = |flag: &str| command_line.split(|byte| *byte == 0).any(|argument| argument == flag.as_bytes());
    has(NOT_BY_ITSELF).then(|| if has(WAITS) { Role::Incoming } else { Role::Fresh })
}

#[derive(Default)]
struct Arguments(Vec<OsString>);

impl Arguments {
    fn flags(&mut self, names: &[&str]) {
        self.0.extend(names.iter().map(OsString::from));
    }

    fn option(&mut self, name: &str, value: impl Into<OsString>) {
        self.0.extend([name.into(), value.into()]);
    }

    /// Options in JSON need no escaping of commas in paths.
    fn json_option(&mut self, name: &str, value: &Value) {
        self.option(name, value.to_string());
    }

    fn control_socket(&mut self, id: &str, address: &str) {
        self.option("-chardev", format!("socket,id={id},{address}"));
        self.option("-mon", format!("chardev={id},mode=control"));
    }

    fn machine(&mut self, spec: &ResolvedSpec) {
        let vm = spec.spec();
        self.option("-uuid", spec.uuid().to_string());
        let backend = self.memory_backend(spec);
        self.option("-machine", format!("{},usb=off,vmport=off,dump-guest-core=off{backend}", vm.machine));
        self.option("-accel", spec.hardware().as_str());
        self.option("-cpu", &vm.cpu_model);
        self.option("-smp", format!("cpus={0},sockets=1,cores={0},threads=1", vm.vcpus));
        self.option("-m", format!("size={}K", spec.memory_kib()));
        self.option("-rtc", "base=utc");
        self.option("-chardev", format!("ringbuf,id={CONSOLE_ID},size={CONSOLE_BYTES}"));
        self.option("-serial", format!("chardev:{CONSOLE_ID}"));
    }

    /// Memory in huge pages; what the machine is to be told of it. Reserved as soon as QEMU starts, so that the
    /// guest never finds a page missing. The name is part of QEMU's stream, and that of ordinary memory.
    fn memory_backend(&mut self, spec: &ResolvedSpec) -> &'static str {
        let Some(size_mib) = spec.spec().huge_page_mib else { return "" };
        self.json_option(
            "-object",
            &json!({
                "qom-type": "memory-backend-memfd", "id": "pc.ram", "size": spec.memory_kib() << 10,
                "hugetlb": true, "hugetlbsize": size_mib << 20, "reserve": true, "dump": false,
            }),
        );
        ",memory-backend=pc.ram"
    }

    fn boot(&mut self, spec: &ResolvedSpec, numbers: &Numbers) {
        for (option, number) in [("-kernel", numbers.kernel), ("-initrd", numbers.initramfs)] {
            if let Some(number) = number {
                self.option(option, Numbers::file_path(number));
            }
        }
        if let Some(line) = &spec.spec().kernel_command_line {
            self.option("-append", line);
        }
    }

    fn disk(&mut self, spec: &ResolvedSpec, index: usize, disk: &Disk, number: RawFd, is_device: bool) {
        let [file, node] = [format!("disk{index}-file"), format!("disk{index}")];
        self.option("-add-fd", format!("fd={number},set={number}"));
        let names = [file, node.clone()];
        for description in disk_nodes(&names, &Numbers::disk_path(number), disk, is_device) {
            self.json_option("-blockdev", &description);
        }
        self.json_option(
            "-device",
            &json!({
                "driver": "virtio-blk-pci", "id": device_name(index), "drive": node,
                "bus": spec.spec().machine.pci_bus(), "addr": slot(DISK_SLOT_FIRST + index),
            }),
        );
    }

    fn nic(&mut self, spec: &ResolvedSpec, index: usize, mac: MacAddress, number: RawFd) {
        let netdev = format!("net{index}");
        self.option("-netdev", format!("tap,id={netdev},fd={number},vhost=off"));
        // Without its boot ROM: it would be loaded at every start, and migrated.
        self.json_option(
            "-device",
            &json!({
                "driver": "virtio-net-pci", "id": format!("nic{index}"), "netdev": netdev,
                "mac": mac.to_string(), "romfile": "",
                "bus": spec.spec().machine.pci_bus(), "addr": slot(NIC_SLOT_FIRST + index),
            }),
        );
    }
}

/// What a disk's device is called.
pub(crate) fn device_name(disk: usize) -> String {
    format!("blk{disk}")
}

/// The nodes of a disk that is open there: of its file, and of what that holds.
pub(crate) fn disk_nodes(
    [file, node]: &[String; 2],
    open_at: &str,
    disk: &Disk,
    is_device: bool,
) -> [Value; 2] {
    let file_driver = if is_device { "host_device" } else { "file" };
    let driver = match disk.format {
        DiskFormat::Raw => "raw",
        DiskFormat::Qcow2 => "qcow2",
    };
    // Two hosts' page caches of shared storage would not agree: bypass them.
    let cache = json!({ "direct": true, "no-flush": false });
    [
        json!({
            "driver": file_driver, "node-name": file, "filename": open_at,
            "read-only": disk.read_only, "discard": "unmap", "cache": cache,
        }),
        json!({
            "driver": driver, "node-name": node, "file": file,
            "read-only": disk.read_only, "discard": "unmap", "cache": cache,
        }),
    ]
}

fn slot(number: usize) -> String {
    format!("{number:#x}")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use drainpipe_hypervisor::spec::VmSpec;

    fn arguments(role: Role) -> String {
        arguments_with("", role)
    }

    fn arguments_with(more: &str, role: Role) -> String {
        arguments_on(&[], more, role)
    }

    fn arguments_on(block_devices: &[&str], more: &str, role: Role) -> String {
        let text = r#"
name = "web"
uuid = "5a8f6c0e-0f0f-4c8c-9d5f-000000000001"
memory_mib = 512
memory_padding_kib = 0
vcpus = 2
machine = "pc-q35-7.2"
accelerator = "tcg"
kernel = "/k"
[[disk]]
path = "/disks/a,b.qcow2"
format = "qcow2"
[[nic]]
bridge = "br0"
mac = "52:54:00:00:00:01"
"#;
        let spec = VmSpec::from_toml(&format!("{more}{text}"), Path::new("web.toml")).expect("valid");
        let spec = ResolvedSpec::try_from(spec).expect("nothing is open");
        let block_devices = block_devices.iter().map(PathBuf::from).collect();
        let strings: Vec<String> = command_line(&spec, role, &block_devices)
            .into_iter()
            .map(|argument| argument.into_string().expect("UTF-8"))
            .collect();
        strings.join(" ")
    }

    #[test]
    fn source_and_target_differ_in_nothing_but_the_wait() {
        assert_eq!(arguments(Role::Incoming), format!("{} -incoming defer", arguments(Role::Fresh)));
    }

    #[test]
    fn a_block_device_has_a_driver_of_its_own_and_else_nothing() {
        let file = arguments(Role::Fresh);
        let device = arguments_on(&["/disks/a,b.qcow2"], "", Role::Fresh);
        assert!(
            file.contains(r#""driver":"file""#) && device.contains(r#""driver":"host_device""#),
            "{device}"
        );
        assert_eq!(device.replace("host_device", "file"), file);
    }

    #[test]
    fn memory_in_huge_pages_is_a_file_in_memory_of_the_same_name() {
        assert!(!arguments(Role::Fresh).contains("-object"));
        let line = arguments_with("huge_page_mib = 2\n", Role::Fresh);
        for part in [r#""hugetlbsize":2097152"#, r#""size":536870912"#, ",memory-backend=pc.ram"] {
            assert!(line.contains(part), "{part}: {line}");
        }
    }

    #[test]
    fn the_guest_never_starts_by_itself() {
        assert!(arguments(Role::Fresh).contains(" -S "));
    }

    #[test]
    fn devices_have_fixed_slots_and_come_open() {
        let line = arguments(Role::Fresh);
        assert!(
            line.contains("-add-fd fd=5,set=5 ") && line.contains(r#""filename":"/dev/fdset/5""#),
            "{line}"
        );
        assert!(line.contains("-kernel /proc/self/fd/4 ") && line.contains("tap,id=net0,fd=6,"), "{line}");
        assert!(line.contains("socket,id=guard,fd=3,server=on"), "{line}");
        assert!(!line.contains("/disks/") && !line.contains("ifname"), "{line}");
        assert!(line.contains(r#""addr":"0x3""#) && line.contains(r#""addr":"0x10""#), "{line}");
    }

    #[test]
    fn tap_names_fit_and_differ() {
        let name = |text: &str| text.parse::<VmName>().expect("a valid name");
        assert!(tap_name(&name(&"x".repeat(50)), 7).len() <= 15);
        assert_ne!(tap_name(&name("a"), 0), tap_name(&name("a"), 1));
        assert_ne!(tap_name(&name("a"), 0), tap_name(&name("b"), 0));
    }

    #[test]
    fn a_command_line_tells_what_its_qemu_is_for() {
        for role in [Role::Fresh, Role::Incoming] {
            let words = arguments(role).replace(' ', "\0");
            assert_eq!(role_of(format!("qemu-system-x86_64\0{words}\0").as_bytes()), Some(role));
        }
        for other in [&b""[..], b"sh\0-c\0sleep 1\0"] {
            assert_eq!(role_of(other), None);
        }
    }
}
