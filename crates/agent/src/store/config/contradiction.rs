//! Contradictions in a configuration, and on which line they are.

use std::collections::HashSet;
use std::net::IpAddr;
use std::path::PathBuf;

use drainpipe_engine::bandwidth::BandwidthWindow;
use drainpipe_engine::transfer::throttle::THROTTLE_PERCENT_MAX;
use toml::de::DeTable;

use super::{Config, DrainBounds, Hooks, Limits};
use drainpipe_api_types::TRANSFERS_MAX;

/// The most memory that copies of pages may take, in MiB: what a large VM rewrites all the time.
const PAGE_CACHE_MIB_MAX: u32 = 1 << 18;

/// A value that cannot be meant.
pub(super) struct Contradiction {
    /// Where in the file it is, such as `peer.1.name`.
    key: String,
    message: String,
}

fn at(key: impl Into<String>, message: impl Into<String>) -> Contradiction {
    Contradiction { key: key.into(), message: message.into() }
}

impl Contradiction {
    /// In words, with the line of the text that says it.
    pub(super) fn in_words(&self, text: &str) -> String {
        let line = line_of(text, &self.key).map(|line| format!("line {line}: ")).unwrap_or_default();
        format!("{line}{}", self.message)
    }
}

fn line_of(text: &str, key: &str) -> Option<usize> {
    let document = DeTable::parse(text).ok()?;
    let mut keys = key.split('.');
    let mut value = document.get_ref().get(keys.next()?)?;
    for key in keys {
        let inner = value.get_ref();
        value = match key.parse::<usize>() {
            Ok(index) => inner.get(index)?,
            Err(_) => inner.get(key)?,
        };
    }
    Some(text.get(..value.span().start)?.matches('\n').count() + 1)
}

impl Config {
    pub(super) fn contradiction(&self) -> Option<Contradiction> {
        let checks = [
            Self::in_name,
            Self::in_peers,
            Self::in_links,
            Self::in_migration_address,
            Self::in_limits,
            Self::in_drain,
            Self::in_bandwidth,
            Self::in_compression,
            Self::in_vms,
            Self::in_disks,
            Self::in_hooks,
        ];
        checks.iter().find_map(|check| check(self))
    }

    fn in_name(&self) -> Option<Contradiction> {
        let error = drainpipe_identity::check_name(&self.name).err()?;
        Some(at("name", format!("name: {error}")))
    }

    fn in_peers(&self) -> Option<Contradiction> {
        if let Some(index) = self.peers.iter().position(|peer| peer.name == self.name) {
            let message = format!("[[peer]] `{}` is this host itself: remove it", self.name);
            return Some(at(format!("peer.{index}.name"), message));
        }
        let (index, name) = first_repeated(self.peers.iter().map(|peer| peer.name.as_str()))?;
        let message = format!("two [[peer]] entries are named `{name}`: keep one");
        Some(at(format!("peer.{index}.name"), message))
    }

    fn in_links(&self) -> Option<Contradiction> {
        if let Some((index, name)) = first_repeated(self.links.iter().map(|link| link.name.as_str())) {
            let message = format!("two [[link]] entries are named `{name}`: keep one");
            return Some(at(format!("link.{index}.name"), message));
        }
        if !self.links.is_empty() && !self.exclude_links.is_empty() {
            let message = "exclude_links is for hosts without [[link]] entries: remove one of the two";
            return Some(at("exclude_links", message));
        }
        let index = self.links.iter().position(|link| link.speed_mbps == Some(0))?;
        let message = "speed_mbps = 0: leave the line out if the speed is not known";
        Some(at(format!("link.{index}.speed_mbps"), message))
    }

    fn in_migration_address(&self) -> Option<Contradiction> {
        let unusable =
            |address: &IpAddr| address.is_unspecified() || address.is_loopback() || address.is_multicast();
        let address = self.migration_address.filter(unusable)?;
        let message = format!(
            "migration_address {address} is not the address of a single host: choose a free private one"
        );
        Some(at("migration_address", message))
    }

    fn in_limits(&self) -> Option<Contradiction> {
        let Limits { deadline_s, stall_s, decision_s, throttle_max_percent } = self.limits;
        let seconds = [("deadline_s", deadline_s), ("stall_s", stall_s), ("decision_s", decision_s)];
        if let Some((key, _)) = seconds.iter().find(|(_, seconds)| *seconds == 0) {
            let message = "[limits]: 0 seconds would end every migration: leave the line out";
            return Some(at(format!("limits.{key}"), message));
        }
        let message = format!("[limits]: throttle_max_percent may be 0 to {THROTTLE_PERCENT_MAX}");
        (throttle_max_percent > THROTTLE_PERCENT_MAX).then(|| at("limits.throttle_max_percent", message))
    }

    fn in_drain(&self) -> Option<Contradiction> {
        let DrainBounds { outbound, inbound, attempts } = self.drain;
        let bounds = [("outbound", outbound), ("inbound", inbound), ("attempts", attempts)];
        let (key, _) = bounds.iter().find(|(_, bound)| !(1..=TRANSFERS_MAX).contains(bound))?;
        Some(at(format!("drain.{key}"), format!("[drain]: {key} may be 1 to {TRANSFERS_MAX}")))
    }

    fn in_bandwidth(&self) -> Option<Contradiction> {
        let schedule = &self.bandwidth;
        let of_window = |(index, window): (usize, &BandwidthWindow)| {
            let table = format!("bandwidth.window.{index}");
            if window.mbps.is_none() && window.storage_mbps.is_none() {
                return Some(at(
                    table,
                    "[[bandwidth.window]]: it limits nothing: give it mbps or storage_mbps",
                ));
            }
            in_limits_of(&table, window.mbps, window.storage_mbps)
        };
        in_limits_of("bandwidth", schedule.mbps, schedule.storage_mbps)
            .or_else(|| schedule.windows.iter().enumerate().find_map(of_window))
    }

    fn in_compression(&self) -> Option<Contradiction> {
        if self.compression.cores == Some(0) {
            let message = "[compression]: cores = 0 would compress nothing: give at least 1";
            return Some(at("compression.cores", message));
        }
        let message = format!("[compression]: page_cache_mib may be 0 to {PAGE_CACHE_MIB_MAX}");
        (self.compression.page_cache_mib > PAGE_CACHE_MIB_MAX)
            .then(|| at("compression.page_cache_mib", message))
    }

    fn in_hooks(&self) -> Option<Contradiction> {
        let Hooks { before_pause, before_pause_s, after, after_s } = &self.hooks;
        let programs = [("before_pause", before_pause), ("after", after)];
        let is_relative = |program: &Option<PathBuf>| program.as_ref().is_some_and(|path| path.is_relative());
        if let Some((key, _)) = programs.iter().find(|(_, program)| is_relative(program)) {
            return Some(at(
                format!("hooks.{key}"),
                format!("[hooks]: {key} must be the absolute path of a program"),
            ));
        }
        let seconds = [
            ("before_pause_s", before_pause_s, Hooks::BEFORE_PAUSE_S_MAX),
            ("after_s", after_s, Hooks::AFTER_S_MAX),
        ];
        let (key, _, max) = seconds.iter().find(|(_, seconds, max)| !(1..=*max).contains(*seconds))?;
        Some(at(format!("hooks.{key}"), format!("[hooks]: {key} may be 1 to {max}")))
    }

    fn in_vms(&self) -> Option<Contradiction> {
        let (key, message) = self.vms.contradiction()?;
        Some(at(format!("vms.{key}"), message))
    }

    fn in_disks(&self) -> Option<Contradiction> {
        Some(at("disks.places", self.disks.places.contradiction(&self.vms)?))
    }
}

fn in_limits_of(table: &str, mbps: Option<u64>, storage_mbps: Option<u64>) -> Option<Contradiction> {
    let limits = [("mbps", mbps), ("storage_mbps", storage_mbps)];
    let (key, _) = limits.into_iter().find(|(_, limit)| *limit == Some(0))?;
    let message = format!("[bandwidth]: {key} = 0 would keep migrations from ever ending: give at least 1");
    Some(at(format!("{table}.{key}"), message))
}

/// The first name that came before, and which one it is.
fn first_repeated<'a>(names: impl Iterator<Item = &'a str>) -> Option<(usize, &'a str)> {
    let mut seen = HashSet::new();
    names.enumerate().find(|(_, name)| !seen.insert(*name))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn contradictions_are_found_and_name_the_line() {
        let base = "name = \"a\"\nlisten = \"10.0.0.1:7420\"\n";
        for (more, line, expected) in [
            ("[[peer]]\nname = \"a\"\naddress = \"10.0.0.2:7420\"", 4, "itself"),
            ("[[link]]\nname = \"e0\"\n[[link]]\nname = \"e0\"", 6, "two [[link]]"),
            ("exclude_links = [\"e1\"]\n[[link]]\nname = \"e0\"", 3, "exclude_links is for hosts without"),
            ("exclude_links = [\"10.0.0.0/99\"]", 3, "neither a link's name nor a subnet"),
            ("encryption = \"no\"", 3, "unknown variant `no`, expected one of `required`, `allowed`, `off`"),
            ("trusted_networks = [\"10.0.0.0/99\"]", 3, "neither a link's name nor a subnet"),
            ("migration_address = \"0.0.0.0\"", 3, "not the address of a single host"),
            ("[[link]]\nname = \"e0\"\nspeed_mbps = 0", 5, "speed_mbps = 0"),
            ("[vms]\n\ndirectories = [\"srv\"]", 5, "`srv` in `directories`"),
            ("[disks]\n[disks.places]\n\"/images\" = \"/etc\"", 4, "`/etc` is not in a directory"),
            ("[hooks]\n\nafter = \"after\"", 5, "absolute path"),
            ("[hooks]\nbefore_pause_s = 61", 4, "1 to 60"),
            ("[limits]\ndeadline_s = 9\nstall_s = 0", 5, "[limits]: 0 seconds"),
            ("limits.throttle_max_percent = 100", 3, "0 to 99"),
            ("[drain]\ninbound = 0", 4, "inbound may be 1 to 8"),
            ("[drain]\noutbound = 9", 4, "outbound may be 1 to 8"),
            ("[bandwidth]\nmbps = 0", 4, "[bandwidth]: mbps = 0"),
            ("[bandwidth]\nmbps = 1\nstorage_mbps = 0", 5, "[bandwidth]: storage_mbps = 0"),
            ("[[bandwidth.window]]\nfrom = \"08:00\"\nuntil = \"20:00\"", 3, "it limits nothing"),
            (
                "[bandwidth]\nwindow = [{ mbps = 0, from = \"08:00\", until = \"20:00\" }]",
                4,
                "[bandwidth]: mbps = 0",
            ),
            ("[compression]\ncores = 0", 4, "[compression]: cores = 0"),
            ("[compression]\npage_cache_mib = 262145", 4, "0 to 262144"),
            ("[compression]\ncpus = \"4-2\"", 4, "not a list of CPUs"),
            ("[[bandwidth.window]]\nmbps = 1\nfrom = \"8\"\nuntil = \"20:00\"", 5, "from = \"8\""),
        ] {
            let error = Config::parse(&format!("{base}{more}"), Path::new("agent.toml")).unwrap_err();
            let error = error.to_string();
            assert!(error.contains(expected), "{error}");
            assert!(error.contains(&format!("line {line}")), "{more}: {error}");
        }
    }
}
