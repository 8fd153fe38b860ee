//! The QEMU of a machine, as a command line: values in, words out.

use std::path::Path;

use drainpipe_machine::layout::{
    ADDITIONS_TAG, HOSTNAME_PARAMETER, PORTS, ROOT_TAG, SHARED_PARAMETER, SHARED_TAG, port_name,
};

use crate::spec::{LabSpec, MachineSpec};
use crate::state;
use crate::topology::{cables, tap};

/// In the directory of boot files.
pub(super) const KERNEL: &str = "vmlinux";
pub(super) const INITRAMFS: &str = "initramfs.img";
pub(super) const ADDITIONS: &str = "additions";

/// In the machine's directory.
pub(super) const CONSOLE: &str = "console.log";
pub(super) const MONITOR: &str = "monitor.sock";

/// Cards are in slots from here on, so that the kernel finds them in this order, and after all else.
const FIRST_CARD_SLOT: usize = 0x10;

/// What a card says of itself on a link without a rate.
const UNLIMITED_MBPS: u64 = 10_000;

/// The first four bytes of the cards' addresses; QEMU's own prefix.
const CARD_PREFIX: &str = "52:54:00:77";

/// The program and its arguments for the machine of host number `host`.
pub(super) fn arguments(
    spec: &LabSpec,
    machines: &MachineSpec,
    host: usize,
    directory: &Path,
) -> Vec<String> {
    let mut words = vec![machines.qemu.display().to_string()];
    words.extend(hardware(spec, machines, host));
    words.extend(boot(spec, machines, host));
    words.extend(console(directory));
    words.extend(file_systems(spec, machines, host));
    words.extend(ports(directory));
    words.extend(cards(spec, host));
    words
}

fn option(name: &str, value: impl Into<String>) -> [String; 2] {
    [name.to_owned(), value.into()]
}

/// `max` has SVM also without KVM, so that VMs in a machine may have KVM.
fn hardware(spec: &LabSpec, machines: &MachineSpec, host: usize) -> Vec<String> {
    let accelerator = if machines.kvm { "kvm" } else { "tcg" };
    let mut words = option("-name", format!("machine-{}-{}", spec.name, spec.hosts[host])).to_vec();
    words.extend(["-nodefaults", "-no-user-config", "-no-reboot"].map(str::to_owned));
    words.extend(option("-display", "none"));
    words.extend(option("-machine", format!("q35,accel={accelerator}")));
    words.extend(option("-cpu", "max"));
    words.extend(option("-smp", machines.cpus.to_string()));
    words.extend(option("-m", machines.memory_mib.to_string()));
    words.extend(option("-device", "virtio-rng-pci"));
    words
}

fn boot(spec: &LabSpec, machines: &MachineSpec, host: usize) -> Vec<String> {
    let name = &spec.hosts[host];
    let shared = state::directory(&spec.name).join(name);
    // Where the emulator does not get on while the kernel counts its first interrupts, the kernel (6.1) takes the timer
    // for broken and panics, unless it is told not to look.
    let command_line = format!(
        "console=ttyS0 quiet panic=-1 no_timer_check {HOSTNAME_PARAMETER}{name} {SHARED_PARAMETER}{}",
        shared.display()
    );
    let file = |name: &str| machines.boot_files.join(name).display().to_string();
    [option("-kernel", file(KERNEL)), option("-initrd", file(INITRAMFS)), option("-append", command_line)]
        .concat()
}

fn console(directory: &Path) -> Vec<String> {
    [
        option("-chardev", format!("file,id=console,path={}", escaped(&directory.join(CONSOLE)))),
        option("-serial", "chardev:console"),
        option("-qmp", format!("unix:{},server=on,wait=off", escaped(&directory.join(MONITOR)))),
    ]
    .concat()
}

/// Shares all file systems of this machine's root, whose inodes may have the same numbers.
fn file_systems(spec: &LabSpec, machines: &MachineSpec, host: usize) -> Vec<String> {
    let shared = state::directory(&spec.name).join(&spec.hosts[host]);
    let exports = [
        (ROOT_TAG, escaped(Path::new("/")), "readonly=on,multidevs=remap"),
        (ADDITIONS_TAG, escaped(&machines.boot_files.join(ADDITIONS)), "readonly=on"),
        (SHARED_TAG, escaped(&shared), "readonly=off"),
    ];
    let export = |(tag, path, options): (&str, String, &str)| {
        [
            option("-fsdev", format!("local,id={tag},path={path},security_model=none,{options}")),
            option("-device", format!("virtio-9p-pci,fsdev={tag},mount_tag={tag}")),
        ]
        .concat()
    };
    exports.into_iter().flat_map(export).collect()
}

fn ports(directory: &Path) -> Vec<String> {
    // Port 0 is a console's.
    let mut words = option("-device", format!("virtio-serial-pci,max_ports={}", PORTS + 1)).to_vec();
    for name in (0..PORTS).map(port_name) {
        let socket = escaped(&directory.join(&name).with_extension("sock"));
        words.extend(option("-chardev", format!("socket,id={name},path={socket},server=on,wait=off")));
        words.extend(option("-device", format!("virtserialport,chardev={name},name={name}")));
    }
    words
}

/// The id of a card, by which QEMU pulls its cable.
pub(super) fn card(cable: &str) -> String {
    format!("card-{cable}")
}

/// A card that does not say how fast it is, and that it is so in both directions, is not used by LACP.
fn speed_mbps(spec: &LabSpec, cable: &str) -> u64 {
    let rate_mbps = spec.link_index(cable).ok().and_then(|link| spec.links[link].rate_mbps);
    rate_mbps.unwrap_or(UNLIMITED_MBPS)
}

fn cards(spec: &LabSpec, host: usize) -> Vec<String> {
    let card = |(number, cable): (usize, String)| {
        let (card, tap, speed) = (card(&cable), tap(&cable), speed_mbps(spec, &cable));
        let address = format!("{CARD_PREFIX}:{:02x}:{number:02x}", host + 1);
        let slot = FIRST_CARD_SLOT + number;
        [
            option("-netdev", format!("tap,id={cable},ifname={tap},script=no,downscript=no,vhost=off")),
            option(
                "-device",
                format!(
                    "virtio-net-pci,id={card},netdev={cable},mac={address},addr={slot:#x},speed={speed},duplex=full,\
                     romfile="
                ),
            ),
        ]
        .concat()
    };
    cables(spec).into_iter().enumerate().flat_map(card).collect()
}

/// As the value of one of QEMU's options, in which a comma is written twice.
fn escaped(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;
    use crate::spec::{LinkSpec, MAX_MACHINE_LINKS};

    fn machines() -> MachineSpec {
        MachineSpec {
            qemu: "qemu-system-x86_64".into(),
            boot_files: "/files, of mine".into(),
            memory_mib: 1024,
            cpus: 2,
            kvm: false,
        }
    }

    fn line(links: usize, host: usize) -> Vec<String> {
        let mut spec = LabSpec::of_two_hosts("x", vec![LinkSpec::default(); links]);
        spec.links[0].rate_mbps = Some(1000);
        arguments(&spec, &machines(), host, Path::new("/run/drainpipe/lab/x/a/machine"))
    }

    fn values<'a>(line: &'a [String], key: &str) -> Vec<&'a str> {
        let words = line.iter().flat_map(|word| word.split(','));
        words.filter_map(|word| word.strip_prefix(key)).collect()
    }

    #[test]
    fn each_card_has_a_tap_a_slot_and_an_address_of_its_own() {
        let line = line(MAX_MACHINE_LINKS, 1);
        let slots = values(&line, "addr=");
        assert_eq!(slots.first().zip(slots.last()), Some((&"0x10", &"0x1d")));
        // Slot 0x1f is the chipset's.
        assert_eq!(slots.len(), MAX_MACHINE_LINKS + 2);
        let addresses: HashSet<&str> = values(&line, "mac=").into_iter().collect();
        assert_eq!(addresses.len(), slots.len());
        assert!(addresses.contains("52:54:00:77:02:00"));
        assert_eq!(values(&line, "ifname=")[..3], ["mgmt-tap", "uplink-tap", "e0-tap"]);
        assert_eq!(values(&line, "speed=")[1..4], ["10000", "1000", "10000"]);
    }

    #[test]
    fn hosts_differ_in_name_and_addresses() {
        let (first, second) = (line(2, 0), line(2, 1));
        assert!(first.iter().any(|word| word.contains("drainpipe.hostname=a ")));
        assert!(second.iter().any(|word| word.contains("drainpipe.hostname=b ")));
        let addresses = |line: &[String]| -> HashSet<String> {
            values(line, "mac=").into_iter().map(str::to_owned).collect()
        };
        assert!(addresses(&first).is_disjoint(&addresses(&second)));
    }

    #[test]
    fn this_machines_root_is_read_only_and_commas_are_kept() {
        let line = line(1, 0);
        let exports: Vec<&String> = line.iter().filter(|word| word.starts_with("local,")).collect();
        let writable: Vec<_> = exports.iter().filter(|export| export.contains("readonly=off")).collect();
        assert_eq!((exports.len(), writable.len()), (3, 1));
        assert!(writable[0].contains("path=/run/drainpipe/lab/x/a,"));
        assert!(line.iter().any(|word| word.contains("path=/files,, of mine/additions,")));
    }
}
