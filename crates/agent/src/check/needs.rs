//! What VMs need of this host besides memory, CPU, files and bridges, and whether it is here.

use std::net::IpAddr;
use std::path::{Component, Path};

use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::Need;
use drainpipe_net::Link;

use super::Checks;
use crate::vms::QMP_DEADLINE;

/// Needs of one VM. A domain with a hundred disks of a pool each has some more than that.
const NEEDS_MAX: usize = 256;

/// Where packages put firmware. Elsewhere another host may not have this one look.
const FIRMWARE_DIRECTORIES: [&str; 3] = ["/usr/share", "/usr/lib", "/usr/libexec"];

/// Those that are not here, by their places.
pub(super) async fn lacking(checks: &Checks, needs: &[Need], links: &[Link]) -> Result<Vec<usize>, Problem> {
    if needs.len() > NEEDS_MAX {
        return Err(Problem::bad_input(format!("at most {NEEDS_MAX} needs of one VM")));
    }
    let of_manager = checks.vms.hypervisor().lacking(needs, QMP_DEADLINE).await.map_err(Problem::failed)?;
    let is_lacking = |(index, need): (usize, &Need)| of_manager.contains(&index) || !host_has(need, links);
    Ok((0..).zip(needs).filter(|one| is_lacking(*one)).map(|(index, _)| index).collect())
}

/// What is the manager's to say counts as there.
fn host_has(need: &Need, links: &[Link]) -> bool {
    match need {
        Need::Link(name) => links.iter().any(|link| link.name == *name),
        Need::Address(address) => has_address(*address, links),
        Need::Firmware(path) => !is_of_a_package(path) || path.exists(),
        Need::Cpu(number) => Path::new(&format!("/sys/devices/system/cpu/cpu{number}")).exists(),
        Need::NumaNode(number) => Path::new(&format!("/sys/devices/system/node/node{number}")).exists(),
        Need::Network(_) | Need::Volume { .. } | Need::Secret(_) | Need::Socket(_) => true,
    }
}

fn has_address(address: IpAddr, links: &[Link]) -> bool {
    links.iter().flat_map(|link| &link.addresses).any(|own| own.addr() == address)
}

fn is_of_a_package(path: &Path) -> bool {
    let goes_down = path.components().all(|part| matches!(part, Component::RootDir | Component::Normal(_)));
    goes_down && FIRMWARE_DIRECTORIES.iter().any(|directory| path.starts_with(directory))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_host_itself_has_is_looked_for() {
        let missing = [
            Need::Link("no-such-link".into()),
            Need::Address("192.0.2.7".parse().unwrap()),
            Need::Firmware("/usr/share/no-such-firmware.fd".into()),
            Need::Cpu(1_000_000),
            Need::NumaNode(1_000_000),
        ];
        assert!(missing.iter().all(|need| !host_has(need, &[])));
        assert!(host_has(&Need::Cpu(0), &[]));
    }

    #[test]
    fn other_hosts_learn_of_no_other_files() {
        for path in ["/root/secret", "/usr/share/../../root/secret", "usr/share/x"] {
            assert!(host_has(&Need::Firmware(path.into()), &[]), "{path}");
        }
    }
}
