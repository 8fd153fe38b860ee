//! What only sysfs knows about a link: duplex, queues, teams.
//!
//! `/sys/class/net` shows the network namespace in which sysfs was mounted. If that is not the agent's, a link of the
//! same name may be another one; so nothing is read unless the index matches netlink's.

use std::collections::BTreeSet;
use std::fs;
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use drainpipe_engine::check::facts::{BondFacts, Duplex};

/// More than any kernel is built for.
const CORES_MAX: u32 = 8_192;

/// A link's directory.
#[derive(Debug)]
pub(super) struct SysfsLink(PathBuf);

impl SysfsLink {
    /// Reads the link with this name and index.
    pub(super) fn of(name: &str, index: u32) -> Option<Self> {
        Self::below(Path::new("/sys/class/net"), name, index)
    }

    fn below(class: &Path, name: &str, index: u32) -> Option<Self> {
        let link = Self(class.join(name));
        (link.text("ifindex")?.parse() == Ok(index)).then_some(link)
    }

    /// What the driver negotiated. Without a carrier, reading fails with EINVAL.
    pub(super) fn duplex(&self) -> Option<Duplex> {
        match self.text("duplex")?.as_str() {
            "full" => Some(Duplex::Full),
            "half" => Some(Duplex::Half),
            _ => None,
        }
    }

    /// Receive queues, and whether any of them spreads over cores (RPS).
    pub(super) fn receive_queues(&self) -> Option<(u32, bool)> {
        let queues: Vec<PathBuf> = fs::read_dir(self.0.join("queues"))
            .ok()?
            .filter_map(|entry| Some(entry.ok()?.path()))
            .filter(|path| path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"rx-")))
            .collect();
        let steered = queues.iter().any(|queue| {
            let mask = fs::read_to_string(queue.join("rps_cpus")).unwrap_or_default();
            mask.chars().any(|digit| matches!(digit, '1'..='9' | 'a'..='f'))
        });
        Some((u32::try_from(queues.len()).ok()?, steered))
    }

    /// How many cores its interrupts go to, by the files below `/proc/irq`.
    pub(super) fn interrupt_cores(&self, interrupts: &Path) -> Option<u32> {
        let numbers = fs::read_dir(self.0.join("device/msi_irqs")).ok()?.flatten();
        let lists = numbers.filter_map(|number| {
            fs::read_to_string(interrupts.join(number.file_name()).join("effective_affinity_list")).ok()
        });
        let cores: BTreeSet<u32> = lists.flat_map(|list| cores_in(&list)).collect();
        u32::try_from(cores.len()).ok().filter(|count| *count > 0)
    }

    /// The team, if it is one.
    pub(super) fn bond(&self) -> Option<BondFacts> {
        let first_word = |text: String| text.split_whitespace().next().map(str::to_owned);
        let members = self.text("bonding/slaves")?;
        Some(BondFacts {
            mode: first_word(self.text("bonding/mode")?)?,
            transmit_hash: self.text("bonding/xmit_hash_policy").and_then(first_word),
            members: u32::try_from(members.split_whitespace().count()).ok()?,
        })
    }

    fn text(&self, file: &str) -> Option<String> {
        fs::read_to_string(self.0.join(file)).ok().map(|text| text.trim().to_owned())
    }
}

/// The kernel writes lists of cores as `0-3,8`.
fn cores_in(text: &str) -> Vec<u32> {
    let range = |part: &str| -> Option<RangeInclusive<u32>> {
        let (first, last) = part.split_once('-').unwrap_or((part, part));
        let (first, last) = (first.parse().ok()?, last.parse::<u32>().ok()?);
        Some(first..=last.min(CORES_MAX))
    };
    text.trim().split(',').filter_map(range).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link(files: &[(&str, &str)]) -> (tempfile::TempDir, Option<SysfsLink>) {
        let class = tempfile::tempdir().unwrap();
        for (file, text) in [("ifindex", "7\n")].iter().chain(files) {
            let file = class.path().join("eth0").join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        let link = SysfsLink::below(class.path(), "eth0", 7);
        (class, link)
    }

    #[test]
    fn a_link_of_another_namespace_is_not_read() {
        let (class, link) = link(&[]);
        assert!(link.is_some());
        assert!(SysfsLink::below(class.path(), "eth0", 8).is_none());
        assert!(SysfsLink::below(class.path(), "eth1", 7).is_none());
    }

    #[test]
    fn a_bond_tells_mode_hash_and_members() {
        let (_class, link) = link(&[
            ("bonding/mode", "802.3ad 4\n"),
            ("bonding/xmit_hash_policy", "layer3+4 1\n"),
            ("bonding/slaves", "eth1 eth2\n"),
            ("duplex", "full\n"),
        ]);
        let link = link.unwrap();
        let bond = BondFacts { mode: "802.3ad".into(), transmit_hash: Some("layer3+4".into()), members: 2 };
        assert_eq!(link.bond(), Some(bond));
        assert_eq!(link.duplex(), Some(Duplex::Full));
        assert_eq!(link.receive_queues(), None);
    }

    #[test]
    fn cores_that_take_interrupts_are_counted_once() {
        assert_eq!(cores_in("0-3,8\n"), [0, 1, 2, 3, 8]);
        assert_eq!(cores_in("x,-,5"), [5]);
        let (class, link) = link(&[("device/msi_irqs/40", ""), ("device/msi_irqs/41", "")]);
        for (interrupt, cores) in [("40", "2\n"), ("41", "2\n"), ("42", "7\n")] {
            let directory = class.path().join(interrupt);
            fs::create_dir(&directory).unwrap();
            fs::write(directory.join("effective_affinity_list"), cores).unwrap();
        }
        let link = link.unwrap();
        assert_eq!(link.interrupt_cores(class.path()), Some(1));
        fs::write(class.path().join("41/effective_affinity_list"), "2-3").unwrap();
        assert_eq!(link.interrupt_cores(class.path()), Some(2));
        assert_eq!(link.interrupt_cores(Path::new("/nonexistent")), None);
    }

    #[test]
    fn queues_are_counted_and_steering_is_any_bit() {
        let queues = [("queues/rx-0/rps_cpus", "00000000,00000000\n"), ("queues/tx-0/xps_cpus", "3\n")];
        assert_eq!(link(&queues).1.unwrap().receive_queues(), Some((1, false)));
        let steered = [("queues/rx-0/rps_cpus", "0,00000000\n"), ("queues/rx-1/rps_cpus", "0,0000000e\n")];
        assert_eq!(link(&steered).1.unwrap().receive_queues(), Some((2, true)));
        let plain = link(&[]);
        assert_eq!(plain.1.unwrap().bond(), None);
    }
}
