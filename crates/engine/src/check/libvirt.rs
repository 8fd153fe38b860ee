//! Which versions of libvirt, and of QEMU below it, keep domains from moving.

use super::Pair;
use super::facts::CheckFacts;
use super::hosts::{both, dotted, here, numbers, three_numbers};
use crate::finding::code::FindingCode;
use crate::finding::{Finding, on};

/// The oldest that is tested.
const OLDEST: [u32; 2] = [9, 0];

/// Since this version QEMU says itself that a guest's CPU has `ht`, and not with the CPU model any more.
const SAYS_HT: [u32; 2] = [10, 0];

/// Since this version libvirt expects that of a QEMU that a domain comes to (its NEWS of 11.10).
const EXPECTS_HT: [u32; 2] = [11, 10];

/// QEMU's mirror of a qcow2 image loses writes of the guest as it begins, from the one to before the other, where it is
/// told to discard, as libvirt tells it (docs/decisions/0096).
const MIRROR_LOSES_WRITES: [[u32; 3]; 2] = [[8, 0, 0], [10, 2, 2]];

pub(super) fn check(pair: Pair<'_>) -> Vec<Finding> {
    let of_hosts = [pair.source, pair.target].into_iter().flat_map(|facts| [too_old(facts), mirror(facts)]);
    of_hosts.chain([unexpected_ht(pair)]).flatten().collect()
}

fn too_old(facts: &CheckFacts) -> Option<Finding> {
    let version = facts.libvirt_version.as_ref()?;
    let old = numbers(version)? < OLDEST;
    old.then(|| {
        Finding::new(FindingCode::LibvirtOld, here(facts))
            .what(format!("libvirt {version} of {} is older than {}", facts.name(), dotted(OLDEST)))
            .effect("none for Drainpipe's own VMs; with so old a libvirt, Drainpipe is not tested")
            .remedy(on(facts.name(), "apt install libvirt-daemon-system (Debian 12 has 9.0)"))
    })
}

fn mirror(facts: &CheckFacts) -> Option<Finding> {
    facts.host.libvirt.as_ref()?;
    let version = &facts.host.hypervisor.version;
    let [since, before] = MIRROR_LOSES_WRITES;
    (since..before).contains(&three_numbers(version)?).then(|| {
        Finding::new(FindingCode::LibvirtCopiesNoQcow2, here(facts))
            .what(format!(
                "QEMU {version} of {} can lose writes of a guest as libvirt begins to copy its qcow2 image (8.0 to 10.2.1 do)",
                facts.name()
            ))
            .effect(
                "`--copy-storage` refuses libvirt's domains with qcow2 disks; raw disks, and Drainpipe's own VMs, are \
                 copied safely",
            )
            .remedy(on(
                facts.name(),
                "install QEMU 10.2.2 or newer and boot these domains again; or `qemu-img convert` their images to raw",
            ))
    })
}

fn unexpected_ht(pair: Pair<'_>) -> Option<Finding> {
    pair.source.host.libvirt.as_ref()?;
    let libvirt = &pair.target.host.libvirt.as_ref()?.version;
    let [from, to] = [pair.source, pair.target].map(|facts| &facts.host.hypervisor.version);
    let bites = numbers(from)? < SAYS_HT && numbers(to)? >= SAYS_HT && numbers(libvirt)? < EXPECTS_HT;
    bites.then(|| {
        let (source, target) = (pair.source.name(), pair.target.name());
        Finding::new(FindingCode::LibvirtHt, both(pair))
            .what(format!(
                "{source} has QEMU {from}, {target} the newer {to} with libvirt {libvirt}, which is older than {}",
                dotted(EXPECTS_HT)
            ))
            .effect(format!(
                "libvirt on {target} may refuse a domain whose CPU has several cores or threads in a socket: \"guest \
                 CPU doesn't match specification: extra features: ht\"; it stays on {source} then, and runs"
            ))
            .remedy(on(
                target,
                format!(
                    "install libvirt {} or newer, or a package of your distribution that has this mended; or shut such a \
                     domain down, and define and boot it there",
                    dotted(EXPECTS_HT)
                ),
            ))
    })
}
