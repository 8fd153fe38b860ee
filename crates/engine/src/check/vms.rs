//! What keeps a running VM from moving to the target, or makes it move badly.

use std::collections::BTreeSet;

use super::Pair;
use super::facts::CheckFacts;
use super::hosts::{NEWER_QEMU, dotted, numbers};
use super::vm::{Notice, Obstacle, VmCheck, VmFacts};
use crate::finding::code::FindingCode;
use crate::finding::{Finding, Place, on};
use crate::format::{bytes, mib, mib_free, mib_needed};
use crate::host::facts::HugePages;

mod cpu;
mod files;

/// From this machine type on, multifd's channels do not wait for each other.
const FREE_CHANNELS: [u32; 2] = [8, 1];

/// From this size on, a guest feels it when its memory is in pages of 4 KiB: the tables for it no longer
/// fit in the CPU's caches.
const HUGE_BYTES: u64 = 64 << 30;

/// A smaller guest stands still for so short a time that nobody feels it.
const PADDED_FELT_BYTES: u64 = 1 << 30;

pub(super) fn check(pair: Pair<'_>) -> Vec<Finding> {
    let mut findings: Vec<Finding> = pair.vms.iter().flat_map(|checked| of_vm(pair, checked)).collect();
    findings.extend(memory_of_all(pair));
    findings.extend(huge_pages_of_all(pair));
    findings
}

fn of_vm(pair: Pair<'_>, checked: &VmCheck) -> Vec<Finding> {
    let vm = &checked.vm;
    let single = [
        name_taken(pair, checked),
        obstacle(pair, checked),
        cpu::check(pair, checked),
        memory(pair, vm),
        huge_pages(pair, vm),
        old_machine(pair, vm),
        newer_qemu(pair, vm),
        small_pages(pair, vm),
        padded(pair, vm),
        missing_bridge(pair, checked),
        bridge_not_allowed(pair, checked),
    ];
    single.into_iter().flatten().chain(files::check(pair, checked)).chain(notices(pair, checked)).collect()
}

/// The VM, on the host that it would go to.
fn there(pair: Pair<'_>, vm: &VmFacts) -> [Place; 1] {
    [Place::vm(pair.target.name(), &vm.name)]
}

fn name_taken(pair: Pair<'_>, checked: &VmCheck) -> Option<Finding> {
    let (target, name) = (pair.target.name(), &checked.vm.name);
    checked.fit.name_taken.then(|| {
        Finding::new(FindingCode::VmNameTaken, there(pair, &checked.vm))
            .what(format!("{target} has a VM {name} already"))
            .effect("the VM is refused there")
            .remedy("rename or remove one of the two; drainpipe vms shows both")
    })
}

fn obstacle(pair: Pair<'_>, checked: &VmCheck) -> Option<Finding> {
    let (vm, target) = (&checked.vm, pair.target.name());
    let qemu = &pair.target.host.hypervisor.version;
    let finding = |code| Finding::new(code, there(pair, vm)).effect("the VM is refused there");
    Some(match checked.fit.obstacle.as_ref()? {
        Obstacle::MachineUnknown { newest } => finding(FindingCode::VmMachineUnknown)
            .what(format!(
                "QEMU {qemu} of {target} has no machine type {}, which VM {} has; {}",
                vm.machine,
                vm.name,
                newest.as_ref().map_or_else(
                    || "it has no type of this kind".into(),
                    |newest| format!("its newest of this kind is {newest}")
                )
            ))
            .remedy(format!(
                "{}; or stop the VM and give it an older `machine`",
                on(target, format!("install a newer QEMU ({NEWER_QEMU})"))
            )),
        Obstacle::NoKvm => finding(FindingCode::VmKvmMissing)
            .what(format!("VM {} uses KVM, which {target} cannot", vm.name))
            .remedy(format!("{} shows why; or move it to another host", on(target, "ls -l /dev/kvm; lscpu"))),
        Obstacle::LosesWrites => finding(FindingCode::VmWritesLost)
            .what(format!(
                "QEMU {qemu} of {target} would lose writes of VM {} when it moves on, because the VM runs by emulation \
                 and was booted without memory_padding_kib = 8",
                vm.name
            ))
            .remedy(on(target, "install QEMU 9.0 or later; or set that, and boot the VM again")),
    })
}

/// What the VM's own host says of it.
fn notices(pair: Pair<'_>, checked: &VmCheck) -> impl Iterator<Item = Finding> {
    let (vm, target) = (&checked.vm, pair.target.name());
    let here = [Place::vm(pair.source.name(), &vm.name)];
    let finding = |code, Notice { what, remedy }: &Notice| {
        Finding::new(code, here.clone()).what(format!("VM {}: {what}", vm.name)).remedy(remedy.clone())
    };
    let obstacle = |notice| {
        finding(FindingCode::VmCannotMigrate, notice)
            .effect("it stays where it is; a migration is refused at once")
    };
    let doubt = |notice| {
        finding(FindingCode::VmMayNotMigrate, notice)
            .effect("its migration may fail, and the VM keeps running where it is")
    };
    let mut found: Vec<Finding> = vm.obstacles.iter().map(obstacle).collect();
    found.extend(vm.doubts.iter().map(doubt));
    let lacking = checked.fit.lacking.iter().filter_map(|need| vm.needs.get(*need));
    found.extend(lacking.map(|Notice { what, remedy }| {
        Finding::new(FindingCode::VmNeedMissing, there(pair, vm))
            .what(format!("{target} lacks what VM {} needs: {what}", vm.name))
            .effect("libvirt does not start the VM there")
            .remedy(on(target, remedy))
    }));
    found.into_iter()
}

fn padded(pair: Pair<'_>, vm: &VmFacts) -> Option<Finding> {
    (vm.padding_bytes > 0 && vm.memory_bytes >= PADDED_FELT_BYTES).then(|| {
        Finding::new(FindingCode::VmMemoryPadded, [Place::vm(pair.source.name(), &vm.name)])
            .what(format!(
                "VM {} runs without KVM and was booted for a QEMU before 9.0: it has {} more memory than asked for, so \
                 that QEMU sees all its writes",
                vm.name,
                bytes(vm.padding_bytes as f64)
            ))
            .effect(
                "it may stall for some seconds when copying begins, while QEMU goes through its memory page by page",
            )
            .remedy("shut it down and boot it again on a host with QEMU 9.0 or later, with memory_padding_kib = 0")
    })
}

fn missing_bridge(pair: Pair<'_>, checked: &VmCheck) -> Option<Finding> {
    let (vm, target) = (&checked.vm, pair.target.name());
    let bridges = checked.fit.missing_bridges.join(", ");
    (!bridges.is_empty()).then(|| {
        let make = format!("ip link add {0} type bridge; ip link set {0} up", checked.fit.missing_bridges[0]);
        Finding::new(FindingCode::VmBridgeMissing, there(pair, vm))
            .what(format!("{target} has no bridge {bridges}, which a NIC of VM {} joins", vm.name))
            .effect("the VM cannot be started there")
            .remedy(format!("{}; and add the link to the guests' network to it", on(target, make)))
    })
}

fn bridge_not_allowed(pair: Pair<'_>, checked: &VmCheck) -> Option<Finding> {
    let (vm, target) = (&checked.vm, pair.target.name());
    let bridges = checked.fit.bridges_not_allowed.join(", ");
    (!bridges.is_empty()).then(|| {
        Finding::new(FindingCode::VmBridgeNotAllowed, there(pair, vm))
            .what(format!("VMs may not join {bridges} on {target}, which a NIC of VM {} joins", vm.name))
            .effect("the VM is refused there")
            .remedy(format!(
                "add it to `bridges` of [vms] in agent.toml of {target} and restart the agent there, if VMs may join it"
            ))
    })
}

fn memory(pair: Pair<'_>, vm: &VmFacts) -> Option<Finding> {
    let (needed, free) = (vm.needs().bytes, pair.target.host.memory_available_bytes);
    (free < needed).then(|| {
        Finding::new(FindingCode::VmMemoryShort, there(pair, vm))
            .what(format!(
                "{} is short of memory for VM {}: {} needed, {} available",
                pair.target.name(),
                vm.name,
                mib_needed(needed),
                mib_free(free)
            ))
            .effect("the VM is refused there")
            .remedy("stop or move VMs there first; drainpipe hosts shows what each host has free")
    })
}

/// Where each fits alone, and not all of them do.
fn memory_of_all(pair: Pair<'_>) -> Option<Finding> {
    let needed = || pair.vms.iter().map(|checked| checked.vm.needs().bytes);
    let (all, largest) = (needed().fold(0, u64::saturating_add), needed().max()?);
    let free = pair.target.host.memory_available_bytes;
    (largest <= free && free < all).then(|| {
        Finding::new(FindingCode::VmsMemoryShort, [Place::host(pair.target.name())])
            .what(format!(
                "the {} VMs of {} need {} together, {} has {} available",
                pair.vms.len(),
                pair.source.name(),
                mib_needed(all),
                pair.target.name(),
                mib_free(free)
            ))
            .effect("the last ones are refused there")
            .remedy("move some of them to another host")
    })
}

fn huge_pages(pair: Pair<'_>, vm: &VmFacts) -> Option<Finding> {
    let HugePages { size_mib, count } = vm.needs().huge_pages?;
    let (target, free) = (pair.target.name(), pair.target.host.huge_pages_of(size_mib));
    (free < count).then(|| {
        Finding::new(FindingCode::VmHugePagesShort, there(pair, vm))
            .what(format!(
                "{target} is short of huge pages for VM {}: {count} of {} needed, {free} free",
                vm.name,
                mib(size_mib)
            ))
            .effect("the VM is refused there")
            .remedy(set_aside(target, HugePages { size_mib, count: count - free }))
    })
}

/// Where each fits alone, and not all of them do.
fn huge_pages_of_all(pair: Pair<'_>) -> Vec<Finding> {
    let each = || pair.vms.iter().filter_map(|checked| checked.vm.needs().huge_pages);
    let sizes: BTreeSet<u64> = each().map(|pages| pages.size_mib).collect();
    let short = |size_mib: u64| {
        let needed = || each().filter(|pages| pages.size_mib == size_mib).map(|pages| pages.count);
        let (all, largest) = (needed().fold(0, u64::saturating_add), needed().max()?);
        let (target, free) = (pair.target.name(), pair.target.host.huge_pages_of(size_mib));
        (largest <= free && free < all).then(|| {
            Finding::new(FindingCode::VmsHugePagesShort, [Place::host(target)])
                .what(format!(
                    "the VMs of {} need {all} huge pages of {} together, {target} has {free} free",
                    pair.source.name(),
                    mib(size_mib)
                ))
                .effect("the last ones are refused there")
                .remedy(set_aside(target, HugePages { size_mib, count: all - free }))
        })
    };
    sizes.into_iter().filter_map(short).collect()
}

fn set_aside(host: &str, more: HugePages) -> String {
    let HugePages { size_mib, count } = more;
    let directory = format!("/sys/kernel/mm/hugepages/hugepages-{}kB", size_mib << 10);
    on(
        host,
        format!(
            "echo $(($(cat {directory}/nr_hugepages) + {count})) > {directory}/nr_hugepages; if memory is \
            too fragmented, set them aside at boot: hugepagesz={size_mib}M hugepages=NUMBER"
        ),
    )
}

fn old_machine(pair: Pair<'_>, vm: &VmFacts) -> Option<Finding> {
    let version = vm.machine.rsplit('-').next().and_then(numbers)?;
    if !pair.multichannel || version >= FREE_CHANNELS {
        return None;
    }
    let both_have_newer = [pair.source, pair.target]
        .iter()
        .all(|facts| numbers(&facts.host.hypervisor.version).is_some_and(|version| version >= FREE_CHANNELS));
    let newer = dotted(FREE_CHANNELS);
    // Without a QEMU that has a newer one, there is nothing that could be done now.
    let (code, place) = (FindingCode::VmMachineOld, there(pair, vm));
    let (finding, remedy) = if both_have_newer {
        (Finding::new(code, place), String::new())
    } else {
        (Finding::milder(code, place), format!("install QEMU {newer} or later on both hosts, then "))
    };
    let finding = finding
        .what(format!("VM {} has the machine type {}, older than {newer}", vm.name, vm.machine))
        .effect(
            "with multichannel, all connections wait for each other, so one path that becomes slow \
            slows all of them",
        )
        .remedy(format!("{remedy}stop the VM, give it `machine` {newer} or later, and start it"));
    Some(finding)
}

/// The hosts' own finding reports the installed versions.
fn newer_qemu(pair: Pair<'_>, vm: &VmFacts) -> Option<Finding> {
    let target = &pair.target.host.hypervisor.version;
    let [runs, installed, there_installed] =
        [&vm.qemu_version, &pair.source.host.hypervisor.version, target].map(|version| numbers(version));
    (installed? <= there_installed? && runs? > there_installed?).then(|| {
        Finding::new(FindingCode::VmQemuNewer, there(pair, vm))
            .what(format!(
                "VM {} runs in QEMU {}, newer than QEMU {target} of {}",
                vm.name,
                vm.qemu_version,
                pair.target.name()
            ))
            .effect("moving to an older QEMU is not tested, and may fail half-way")
            .remedy(on(pair.target.name(), "install the newer QEMU again"))
    })
}

fn small_pages(pair: Pair<'_>, vm: &VmFacts) -> Option<Finding> {
    let never = |facts: &&CheckFacts| facts.huge_pages.as_deref() == Some("never");
    (vm.huge_page_mib.is_none() && vm.memory_bytes >= HUGE_BYTES && never(&pair.target)).then(|| {
        let target = pair.target.name();
        Finding::new(FindingCode::VmSmallPages, there(pair, vm))
            .what(format!(
                "VM {} has {}, and {target} gives no huge pages (transparent_hugepage is `never`)",
                vm.name,
                bytes(vm.memory_bytes as f64)
            ))
            .effect(
                "its memory would be in pages of 4 KiB there: the VM would run slower, and so would its \
                next migration",
            )
            .remedy(format!(
                "{}; or give it `huge_page_mib` and boot it again",
                on(target, "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled")
            ))
    })
}
