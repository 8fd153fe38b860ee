//! Which CPU is whose, in a lab whose hosts have one each.

use rustix::thread::{CpuSet, sched_getaffinity};

use crate::error::Error;
use crate::spec::{LabSpec, SpecError};

/// The CPU on which the programs of `node` run; none if they may run on all.
pub(crate) fn cpu_of(spec: &LabSpec, node: &str) -> Result<Option<usize>, Error> {
    let Some(host) = spec.hosts.iter().position(|host| host == node).filter(|_| spec.own_cpus) else {
        return Ok(None);
    };
    let usable = usable()?;
    match usable.get(host) {
        Some(cpu) => Ok(Some(*cpu)),
        None => Err(SpecError::Cpus { hosts: spec.hosts.len(), cpus: usable.len() }.into()),
    }
}

/// Those on which this program may run, the first one first.
fn usable() -> Result<Vec<usize>, Error> {
    let set =
        sched_getaffinity(None).map_err(|error| Error::io("read the CPUs of", "/proc/self")(error.into()))?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_host_has_one_of_its_own_and_the_client_any() {
        let spec = LabSpec { own_cpus: true, ..LabSpec::of_two_hosts("x", vec![]) };
        let usable = usable().unwrap();
        assert_eq!(cpu_of(&spec, "a").unwrap(), Some(usable[0]));
        assert_eq!(cpu_of(&spec, crate::CLIENT).unwrap(), None);
        assert_eq!(cpu_of(&LabSpec { own_cpus: false, ..spec.clone() }, "a").unwrap(), None);
        let hosts = (0..=usable.len()).map(|index| format!("h{index}")).collect();
        let error = cpu_of(&LabSpec { hosts, ..spec }, &format!("h{}", usable.len())).unwrap_err();
        assert!(error.to_string().contains("needs as many CPUs"), "{error}");
    }
}
