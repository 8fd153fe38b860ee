//! Checks, once no fault is left, whether everything is over, and reported as it is.

use drainpipe_api_types::{DrainView, MigrationView, VmList, VmState, VmView};

use super::copies::Copy;
use super::faults::Faults;
use super::monitor::Monitor;
use crate::drain::ask;
use crate::support::TestLab;

/// Why what the agents say about their VMs may still change, or needs an operator.
pub(super) enum Unsettled {
    /// It may settle by itself.
    Yet(String),
    /// A fault ended this VM, which is reported as off: it has to be started.
    Ended { vm: String, host: String },
    /// The definition of such a VM was in a journal that is lost.
    Forgotten { vm: String },
    /// An older journal lists a VM that has gone since.
    Stale { vm: String, host: String },
    /// A drain was interrupted, and its host has to accept VMs again.
    Cordoned { host: String },
}

/// The first thing that is not settled.
pub(super) fn unsettled(
    lab: &TestLab,
    hosts: &[String],
    vms: &[String],
    monitor: &Monitor,
    faults: &Faults<'_>,
) -> Option<Unsettled> {
    let yet = |why: String| Some(Unsettled::Yet(why));
    let mut vm_views = Vec::new();
    // Each VM's last migrations: there and on.
    let last_migrations = format!("/v1/migrations?limit={}", 4 * vms.len());
    for host in hosts {
        let views: Vec<MigrationView> = match ask(lab, host, &last_migrations, None) {
            Ok(views) => views,
            Err(problem) => return yet(format!("{host} does not answer: {problem}")),
        };
        if let Some(view) = views.iter().find(|view| view.progress.is_some()) {
            return yet(format!("{host} has a migration under way: {view:#?}"));
        }
        match ask::<VmList>(lab, host, "/v1/vms", None) {
            Ok(list) => vm_views.extend(list.vms),
            Err(problem) => return yet(format!("{host} does not list its VMs: {problem}")),
        }
        match ask::<DrainView>(lab, host, "/v1/drain", None) {
            Ok(view) if view.started_at.is_some() && view.ended_at.is_none() => {
                return yet(format!("{host} is being drained, or gets back what left it: {view:#?}"));
            }
            Ok(view) if view.cordoned => return Some(Unsettled::Cordoned { host: host.clone() }),
            Ok(_) => {}
            Err(problem) => return yet(format!("{host} does not tell of its drain: {problem}")),
        }
    }
    // Asked after the agents, so that changes in between show the next time.
    let copies = monitor.copies();
    for vm in vms {
        let of_vm: Vec<_> = vm_views.iter().filter(|view| view.name == *vm).collect();
        let living: Vec<_> = copies.living(vm).collect();
        if of_vm.is_empty() && living.is_empty() && faults.may_be_lost(vm) && faults.spoiled().is_some() {
            return Some(Unsettled::Forgotten { vm: vm.clone() });
        }
        if let Some(host) = stale(&of_vm, &living, faults) {
            return Some(Unsettled::Stale { vm: vm.clone(), host });
        }
        let [one] = of_vm[..] else {
            return yet(format!("{vm} is told of by {} hosts: {of_vm:#?}", of_vm.len()));
        };
        match (one.state, &living[..]) {
            (VmState::Running, [copy]) if copy.is_running() && copy.identity.host == one.host => {}
            (VmState::Stopped, []) if faults.may_be_lost(vm) => {
                return Some(Unsettled::Ended { vm: vm.clone(), host: one.host.clone() });
            }
            (state, copies) => {
                let copies: Vec<String> = copies.iter().map(ToString::to_string).collect();
                return yet(format!("{vm} is told as {state:?} on {}; its QEMUs: {copies:#?}", one.host));
            }
        }
    }
    drop(copies);
    // This searches all processes of the machine, so it comes last.
    hosts.iter().find_map(|host| {
        let guards = lab.pids(host, &[" guard --migration "]);
        (!guards.is_empty()).then(|| Unsettled::Yet(format!("{host} has guards left: {guards:?}")))
    })
}

/// The host with the older journal, if it lists a VM that another host certainly has: running, or off when no QEMU of
/// it is left.
fn stale(of_vm: &[&VmView], living: &[&Copy], faults: &Faults<'_>) -> Option<String> {
    let spoiled = faults.spoiled()?;
    let is_listed = |host: &str, state| of_vm.iter().any(|view| (view.host == host) && view.state == state);
    let another_has_it = of_vm.iter().any(|view| {
        let runs = view.state == VmState::Running
            && living.iter().any(|copy| copy.is_running() && copy.identity.host == view.host);
        view.host != spoiled && (runs || (view.state == VmState::Stopped && living.is_empty()))
    });
    (is_listed(spoiled, VmState::Stopped) && another_has_it).then(|| spoiled.to_owned())
}
