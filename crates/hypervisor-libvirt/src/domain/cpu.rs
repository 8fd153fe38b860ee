//! The CPUs of a domain, and the CPUs of the host to which they are pinned.

use super::element::Element;
use super::error::DomainXmlError;
use super::words::plain;

/// CPUs of a domain.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Cpus {
    /// The most that the guest may have.
    pub most: u32,
    /// What it has now.
    pub current: u32,
    /// What they are like.
    pub choice: CpuChoice,
    /// Whether their time stamp counter is invariant, without a frequency: QEMU does not migrate that.
    pub has_bare_invariant_tsc: bool,
    /// NUMA nodes of the guest.
    pub guest_nodes: usize,
}

/// What a domain's CPUs are like.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CpuChoice {
    /// Nothing is said, so it is QEMU's default.
    Default,
    /// The host's CPU as it is.
    HostPassthrough,
    /// What libvirt made of the host's CPU. A running domain's XML says [`Self::Custom`] instead.
    HostModel,
    /// All that the hypervisor can.
    Maximum,
    /// A model by name.
    Custom {
        /// Its name.
        model: String,
    },
    /// Something of a newer libvirt.
    Other(String),
}

/// The things of the host that a domain is bound to. Without them, libvirt does not start it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bound {
    /// The highest number of a host's CPU among those that its threads are bound to.
    pub highest_cpu: Option<u32>,
    /// The highest number of a host's NUMA node among those that its memory is bound to.
    pub highest_node: Option<u32>,
}

pub(super) fn parse(domain: Element<'_>) -> Result<Cpus, DomainXmlError> {
    let element = domain.at("vcpu").ok_or(DomainXmlError::Missing { element: "vcpu" })?;
    let text = element.text().unwrap_or_default();
    let most = text.trim().parse().map_err(|_| DomainXmlError::Invalid {
        element: "vcpu",
        message: format!("`{}` is not a number of CPUs", plain(text.trim())),
    })?;
    Ok(Cpus {
        most,
        current: element.parsed("current").unwrap_or(most),
        choice: choice(domain.at("cpu")),
        has_bare_invariant_tsc: has_invariant_tsc(domain) && !has_tsc_frequency(domain),
        guest_nodes: domain.at("cpu/numa").map_or(0, |numa| numa.all("cell").count()),
    })
}

fn choice(cpu: Option<Element<'_>>) -> CpuChoice {
    let Some(cpu) = cpu else { return CpuChoice::Default };
    let model = cpu.at("model").and_then(Element::text);
    match (cpu.attribute("mode"), model) {
        (Some("host-passthrough"), _) => CpuChoice::HostPassthrough,
        (Some("host-model"), _) => CpuChoice::HostModel,
        (Some("maximum"), _) => CpuChoice::Maximum,
        (None | Some("custom"), Some(model)) => CpuChoice::Custom { model: model.trim().to_owned() },
        (None | Some("custom"), None) => CpuChoice::Default,
        (Some(other), _) => CpuChoice::Other(other.to_owned()),
    }
}

fn has_invariant_tsc(domain: Element<'_>) -> bool {
    let features = domain.at("cpu").into_iter().flat_map(|cpu| cpu.all("feature"));
    let mut invariant = features.filter(|feature| feature.attribute("name") == Some("invtsc"));
    invariant.any(|feature| !matches!(feature.attribute("policy"), Some("disable" | "forbid" | "optional")))
}

fn has_tsc_frequency(domain: Element<'_>) -> bool {
    let mut timers = domain.at("clock").into_iter().flat_map(|clock| clock.all("timer"));
    timers.any(|timer| {
        timer.attribute("name") == Some("tsc")
            && timer.parsed::<u64>("frequency").is_some_and(|hertz| hertz > 0)
    })
}

/// What pins a domain's threads and memory to parts of a host.
pub(super) fn bound(domain: Element<'_>) -> Bound {
    let tune = domain.at("cputune");
    let pins = ["vcpupin", "emulatorpin", "iothreadpin"];
    let pinned = pins.into_iter().flat_map(|pin| tune.into_iter().flat_map(move |tune| tune.all(pin)));
    let cpus = pinned.chain(domain.at("vcpu")).filter_map(|pin| pin.attribute("cpuset"));
    let numa = domain.at("numatune");
    let names = ["memory", "memnode"];
    let memory = names.into_iter().flat_map(|name| numa.into_iter().flat_map(move |numa| numa.all(name)));
    let nodes = memory.filter_map(|memory| memory.attribute("nodeset"));
    Bound { highest_cpu: cpus.filter_map(highest).max(), highest_node: nodes.filter_map(highest).max() }
}

/// The highest number in a set such as `0-3,^2,8`. What it leaves out again counts too.
fn highest(set: &str) -> Option<u32> {
    let numbers = set.split([',', '-']).map(|number| number.trim().trim_start_matches('^'));
    numbers.filter_map(|number| number.parse().ok()).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_highest_number_of_a_set() {
        for (set, number) in
            [("3", Some(3)), ("0-3,^2,8", Some(8)), ("", None), ("x", None), ("0-4294967295", Some(u32::MAX))]
        {
            assert_eq!(highest(set), number, "{set}");
        }
    }
}
