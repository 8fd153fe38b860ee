//! Whether the guest finds its CPU on the target.

use super::there;
use crate::check::Pair;
use crate::check::vm::{CpuFeatures, VmCheck};
use crate::finding::Finding;
use crate::finding::code::FindingCode;

/// How many features a finding names; further ones are counted.
const NAMED_MAX: usize = 12;

pub(super) fn check(pair: Pair<'_>, checked: &VmCheck) -> Option<Finding> {
    let (source, target) = (checked.vm.cpu.as_ref()?, checked.fit.cpu.as_ref()?);
    let (vm, host) = (&checked.vm, pair.target.name());
    let remedy = "stop the VM and give it a `cpu_model` that both hosts can provide, such as qemu64; or \
        move it to a host \
                  with an equal CPU and QEMU";
    if source.known && !target.known {
        return Some(
            Finding::new(FindingCode::VmCpuUnknown, there(pair, vm))
                .what(format!(
                    "QEMU {} of {host} knows no CPU model {} of VM {}",
                    pair.target.host.hypervisor.version, vm.cpu_model, vm.name
                ))
                .effect("the VM cannot be started there")
                .remedy(remedy),
        );
    }
    let missing = missing(source, target);
    (!missing.is_empty()).then(|| {
        Finding::new(FindingCode::VmCpuFeatures, there(pair, vm))
            .what(format!(
                "VM {} has CPU features that {host} cannot give it ({}): {}",
                vm.name,
                vm.cpu_model,
                in_words(&missing)
            ))
            .effect("the guest fails as soon as it uses one of them there")
            .remedy(remedy)
    })
}

/// What a guest has on the source and would not have on the target. Left out is what the source's QEMU has
/// no name for, as it gives it to no guest, and what the target's has none for, as that may be the same
/// feature by another name.
fn missing<'a>(source: &'a CpuFeatures, target: &'a CpuFeatures) -> Vec<&'a str> {
    let named_by_both = target.lacking.intersection(&source.named);
    named_by_both.filter(|feature| !source.lacking.contains(*feature)).map(String::as_str).collect()
}

fn in_words(features: &[&str]) -> String {
    let named = features.iter().take(NAMED_MAX).copied().collect::<Vec<_>>().join(", ");
    match features.len().saturating_sub(NAMED_MAX) {
        0 => named,
        more => format!("{named} and {more} more"),
    }
}
