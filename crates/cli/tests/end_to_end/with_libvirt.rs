//! The tests of Drainpipe's own VMs with libvirt's domains: the same bodies. A reason stands beside each that cannot be
//! the same.
//!
//! `make test` has a few of them, `make test-libvirt` all.

use std::path::PathBuf;

use libtest_mimic::{Completion, Trial};

use crate::backend::Backend;
use crate::{Named, domains, no_other_qemu, real_guest, trial, with_labs_alone, writing_guests};

/// The variable that makes all of them run, and otherwise only tests of domains. If it is a path, all libvirts use the
/// daemon there.
const ALL: &str = "DRAINPIPE_TEST_WITH_LIBVIRT";

/// The tests that every run includes.
const IN_EVERY_RUN: [&str; 2] = [
    "bad_luck::an_agent_is_killed_and_its_program_replaced_while_its_vm_runs",
    "writing_guests::their_disks_move_whole",
];

const WRITES_NEVER_WAIT: &str = "a domain's writes cannot wait for its target";

const AT_ITS_USUAL_SOCKET: &str =
    "agents that `init` and `join` start look for libvirt at its usual socket, where a lab's is not";

const ENDS_WITH_ITS_AGENT: &str =
    "libvirt ends a domain that comes with the connection of the target's agent";

const ENDS_WITH_ITS_HOST: &str = "a lab's libvirt does not come back with its host";

const NOT_FORESEEN: &str = "the memory of domains is not sampled, so that it is not foreseen";

const END_NOT_REPORTED: &str = "how a QEMU of libvirt's has ended, its host does not learn";

/// The modules and tests that differ with domains, and why.
const NOT_THE_SAME: &[(&str, &str)] = &[
    ("bad_input", "no VM takes part"),
    ("bad_luck::an_agent_is_killed_as_it_starts_a_vm", "`virsh start` starts a domain"),
    ("chaos", "it makes, starts and ends VMs by `drainpipe vm`, and knows the QEMUs by their files"),
    ("check_fix", "no VM takes part"),
    ("check_hosts", "the hosts' own findings; of VMs that do not fit `libvirt_fit` has what domains need"),
    ("check_vms", "`libvirt_fit` has what is found of domains"),
    ("completion", "it completes what `drainpipe vm` takes"),
    ("confined", "libvirt confines its QEMUs, as its configuration says"),
    ("drain_faults::the_agent_is_killed_on_the_way_back", ENDS_WITH_ITS_AGENT),
    ("drain_faults::the_drained_host_is_rebooted", ENDS_WITH_ITS_HOST),
    ("drain_losses::a_target_goes_down_and_is_started_later", ENDS_WITH_ITS_HOST),
    ("drain_losses::a_target_is_rebooted", ENDS_WITH_ITS_HOST),
    ("drain_losses::the_qemus_of_two_vms_are_killed", END_NOT_REPORTED),
    ("drain_meetings::who_changes_too_fast_goes_last_and_is_throttled", NOT_FORESEEN),
    ("held_writes", "of a domain nothing is held back"),
    ("joining::from_nothing_to_the_first_drain", AT_ITS_USUAL_SOCKET),
    ("joining::two_hosts_come_to_know_each_other", AT_ITS_USUAL_SOCKET),
    ("keeper", "libvirt starts the QEMUs of domains"),
    ("lab_cli", "it is about labs"),
    ("link_addresses::agents_are_started_anew_in_flight", ENDS_WITH_ITS_AGENT),
    ("lost", END_NOT_REPORTED),
    (
        "lost_journal::a_dead_host_keeps_no_vm_from_starting",
        "`virsh start` starts a domain, wherever its definition is",
    ),
    (
        "lost_journal::a_journal_that_proves_nothing_is_not_believed_and_its_vm_runs_on",
        "what domains there are, libvirt says, and not the journal",
    ),
    ("lost_journal::a_target_that_loses_its_journal_as_the_qemu_starts", ENDS_WITH_ITS_AGENT),
    (
        "lost_journal::an_older_journal_on_the_source_starts_no_second_copy",
        "`virsh start` starts a domain, wherever its definition is",
    ),
    ("mute_qemu", "libvirt is mute with it, and has its control sockets"),
    ("options::auto_and_bench", "a domain does not say where its guest is asked"),
    ("outpaced", NOT_FORESEEN),
    ("post_copy", "domains cannot move by post-copy"),
    ("shared_paths::an_agent_is_started_anew_while_one_vm_comes_and_one_goes", ENDS_WITH_ITS_AGENT),
    ("shared_paths::an_agent_is_started_anew_while_two_vms_come", ENDS_WITH_ITS_AGENT),
    ("shared_paths::the_target_agent_is_started_anew_in_flight", ENDS_WITH_ITS_AGENT),
    ("service", "no VM takes part"),
    (
        "switch_over_faults::all_links_fall_silent_at_the_switch_over",
        "libvirt goes on from the pause by itself, while agent and guard stand still",
    ),
    ("writing_guests::it_is_cancelled_while_writes_wait", WRITES_NEVER_WAIT),
    ("writing_guests::the_agent_dies_while_writes_wait", WRITES_NEVER_WAIT),
    ("writing_guests::the_target_is_full", "the small file system would have to be its libvirt's, too"),
];

/// Whether all of them are to run, and none of Drainpipe's own VMs.
pub(crate) fn is_wanted() -> bool {
    std::env::var_os(ALL).is_some()
}

/// The daemon that all libvirts of this run use, if it is not the distribution's.
pub(crate) fn daemon() -> Option<PathBuf> {
    let daemon = std::env::var_os(ALL).map(PathBuf::from);
    daemon.filter(|path| path.components().count() > 1)
}

/// Whether the other parts of libvirt, such as networks, have their own daemons.
pub(crate) fn is_modular() -> bool {
    daemon().is_some_and(|path| path.ends_with("virtqemud"))
}

/// The tests of this run. On a machine that lacks something, all are reported as ignored for that reason.
pub(crate) fn trials(missing: Option<&String>) -> Vec<Trial> {
    let no_newer_qemu = missing.cloned().or_else(no_other_qemu);
    let all = with_labs_alone().map(|test| (test, missing));
    let all = all.chain(with_disks().map(|test| (test, no_newer_qemu.as_ref())));
    let wanted = all.filter(|((name, _), _)| is_wanted() || IN_EVERY_RUN.contains(&name.as_str()));
    let made = wanted.map(|((name, test), missing)| match why_not(&name) {
        Some(why) => Trial::ignorable_test(with_libvirt(&name), move || Ok(Completion::ignored_with(why))),
        None => trial(with_libvirt(&name), move || Backend::Libvirt.run(test), missing.cloned()),
    });
    made.collect()
}

/// The tests with a whole Debian.
pub(crate) fn real_guest(missing: Option<&String>) -> impl Iterator<Item = Trial> {
    let missing = missing.cloned().or_else(domains::missing);
    real_guest::TESTS.iter().map(move |(name, test)| {
        let name = with_libvirt(&format!("real_guest::{name}"));
        trial(name, move || Backend::Libvirt.run(*test), missing.clone())
    })
}

/// The tests of guests that move with their disks.
fn with_disks() -> impl Iterator<Item = Named> {
    writing_guests::WITH_NEWER_QEMU.iter().map(|(name, test)| (format!("writing_guests::{name}"), *test))
}

fn with_libvirt(name: &str) -> String {
    format!("with_libvirt::{name}")
}

fn why_not(name: &str) -> Option<&'static str> {
    let is_of = |what: &str| name == what || name.split("::").next() == Some(what);
    NOT_THE_SAME.iter().find(|(what, _)| is_of(what)).map(|(_, why)| *why)
}
