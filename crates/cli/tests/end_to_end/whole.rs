//! The short form of these tests, which `make test` runs, and the whole, which `make test-whole` runs. The short form
//! shows each mechanism once; the whole has the same faults at other ends, by other means and with other options.

use libtest_mimic::Trial;

use crate::with_libvirt;

/// The variable that makes all of them run.
const WHOLE: &str = "DRAINPIPE_TEST_WHOLE";

/// Tests that the short form leaves out, each with a test that shows its mechanism there.
const LEFT_OUT: &[(&str, &str)] = &[
    ("bad_luck::a_link_that_is_silent_from_the_start_is_left_out", "path_loss::a_link_falls_silent"),
    (
        "bad_luck::an_agent_is_killed_and_its_program_replaced_while_its_vm_runs",
        "with_libvirt::bad_luck::an_agent_is_killed_and_its_program_replaced_while_its_vm_runs",
    ),
    ("bad_luck::the_agents_lose_each_other", "path_loss::all_links_are_silent_for_longer_than_the_bound"),
    ("device_disks::a_cancelled_copy_to_a_block_device_goes_on", A_CANCELLED_COPY),
    ("drain::a_target_becomes_full", "drain::a_target_that_takes_no_more_is_replaced"),
    ("drain::a_targets_agent_is_killed", "drain_losses::a_target_is_rebooted"),
    ("drain::the_way_back_leaves_alone_what_has_moved_on", "drain::all_vms_leave_and_come_back"),
    ("drain_faults::the_agent_from_which_vms_come_back_is_started_anew", A_DRAINED_HOSTS_AGENT),
    ("drain_faults::the_agent_is_killed_on_the_way_back", A_DRAINED_HOSTS_AGENT),
    ("drain_faults::the_disk_under_the_journal_is_full_on_the_way_back", A_FULL_DISK),
    ("drain_faults::the_drained_host_is_rebooted", A_DRAINED_HOSTS_AGENT),
    ("drain_losses::a_target_goes_down_and_is_started_later", "drain_losses::a_target_is_rebooted"),
    ("drain_losses::a_targets_qemu_is_killed", "drain_losses::the_qemus_of_two_vms_are_killed"),
    ("drain_meetings::a_drain_is_cancelled_while_its_journal_is_full", A_FULL_DISK),
    (
        "drain_meetings::the_way_back_is_cancelled_and_carried_on",
        "drain::a_drain_is_cancelled_and_carried_on",
    ),
    (
        "drain_meetings::two_hosts_are_emptied_into_a_third_which_takes_one_at_a_time",
        "drain_meetings::two_hosts_are_emptied_into_each_other",
    ),
    ("drained_disks::a_drain_with_disks_is_carried_on_after_a_crash", A_DRAINED_HOSTS_AGENT),
    ("emulated::a_vm_moves_between_machines_and_is_intact", "emulated::a_vm_moves_by_rdma_or_says_why_not"),
    (
        "emulated::a_vm_whose_rdma_is_cut_stays_and_then_moves_without",
        "emulated::a_vm_moves_by_rdma_or_says_why_not",
    ),
    ("held_writes::a_vm_that_writes_nothing_moves_with_its_disks", HELD_WRITES),
    ("held_writes::agent_and_guard_die", "held_writes::the_agent_dies"),
    ("held_writes::it_is_cancelled", A_CANCELLED_COPY),
    ("held_writes::the_agent_dies_once_all_is_there", "held_writes::the_agent_dies"),
    ("held_writes::the_targets_agent_dies", "held_writes::the_targets_qemu_dies"),
    (
        "idle_paths::a_link_local_path_that_is_not_found_any_more_is_told",
        "idle_paths::a_dead_path_is_told_and_so_is_its_return",
    ),
    (
        "interrupted_copies::a_copy_whose_links_fail_goes_on",
        "interrupted_copies::a_copy_whose_agent_dies_goes_on",
    ),
    (
        "interrupted_copies::a_copy_whose_target_dies_goes_on",
        "interrupted_copies::a_copy_whose_agent_dies_goes_on",
    ),
    ("later_rounds::nothing_arrives_any_more", "later_rounds::with_another_qemu"),
    (
        "leaving::a_vm_leaves_though_its_arrival_could_not_be_recorded",
        "leaving::a_vm_leaves_before_its_source_has_heard",
    ),
    (
        "libvirt_kills::a_domain_that_its_owner_suspends_stays_suspended",
        "libvirt_kills::others_meddle_with_a_domain_that_moves",
    ),
    ("libvirt_kills::a_domain_whose_qemu_dies_is_defined_on_one_host", AGENTS_OF_A_DOMAIN),
    ("libvirt_kills::a_libvirt_is_mute_for_a_while", LIBVIRT_ENDS),
    ("libvirt_kills::agents_are_killed_while_a_domain_is_copied", AGENTS_OF_A_DOMAIN),
    ("libvirt_kills::libvirt_ends_as_the_guest_is_paused", LIBVIRT_ENDS),
    ("libvirt_kills::libvirt_ends_at_the_hand_over_of_a_domain", LIBVIRT_ENDS),
    ("libvirt_kills::libvirt_ends_while_a_domain_is_copied", LIBVIRT_ENDS),
    (
        "libvirt_relayed::a_domain_is_moved_encrypted",
        "libvirt_relayed::a_domain_of_another_user_is_moved_encrypted",
    ),
    (
        "libvirt_relayed::a_relayed_domain_runs_on_without_an_agent",
        "relayed::whatever_befalls_the_relay_in_flight",
    ),
    (
        "libvirt_snapshots::agents_are_killed_while_snapshots_go_along",
        "libvirt_snapshots::snapshots_come_back_with_a_domain_that_stays",
    ),
    (
        "link_addresses::agents_are_started_anew_in_flight",
        "shared_paths::an_agent_is_started_anew_while_two_vms_come",
    ),
    ("link_addresses::both", "link_addresses::link_local_with_and_without_configuration"),
    ("lost_journal::a_source_that_loses_its_journal_after_the_hand_over_ends_with_one_copy", A_LOST_JOURNAL),
    ("lost_journal::a_target_that_loses_its_journal_as_the_qemu_starts", A_LOST_JOURNAL),
    (
        "lost_journal::a_target_that_loses_its_journal_once_the_vm_runs_there_ends_with_one_copy",
        A_LOST_JOURNAL,
    ),
    ("mute_qemu::as_its_agent_starts", A_MUTE_QEMU),
    ("mute_qemu::at_the_target_that_it_was_handed_over_to", A_MUTE_QEMU),
    ("newer_libvirt::moves", "libvirt_moves::a_domain_is_moved_by_its_phases"),
    (
        "path_loss::a_link_that_is_made_again_is_used_again",
        "link_addresses::what_is_removed_in_flight_is_made_again",
    ),
    (
        "path_loss::all_links_are_lost_for_five_seconds",
        "path_loss::all_links_are_silent_for_longer_than_the_bound",
    ),
    (
        "post_copy::a_drain_takes_it_where_it_is_allowed_and_fetches_the_vm_back_so",
        "post_copy::a_vm_that_converges_goes_whole_and_another_one_in_parts",
    ),
    (
        "post_copy::a_path_that_falls_silent_is_left_for_another",
        "post_copy::a_connection_that_breaks_is_made_anew",
    ),
    ("post_copy::a_target_whose_agent_stands_still_at_the_switchover_gets_the_vm_later", POST_COPYS_AGENTS),
    ("post_copy::agents_that_are_killed_meanwhile_where_they_encrypt", POST_COPYS_AGENTS),
    ("post_copy::an_agent_that_is_killed_as_the_vm_is_told_to_run_there", POST_COPYS_AGENTS),
    ("shared_paths::an_agent_is_started_anew_while_one_vm_comes_and_one_goes", TWO_VMS_COME),
    (
        "shared_paths::one_of_two_is_cancelled_and_a_link_falls_silent_as_they_pass_each_other",
        "shared_paths::two_vms_go_and_their_agent_is_killed_or_a_link_falls_silent",
    ),
    ("shared_paths::the_target_agent_is_started_anew_in_flight", TWO_VMS_COME),
    ("switch_over_faults::a_journal_is_full_when_a_vm_comes_or_in_flight", A_FULL_DISK),
    ("writing_guests::a_link_is_cut", WRITES),
    ("writing_guests::agent_and_guard_die", AN_AGENT_OF_DISKS),
    ("writing_guests::it_is_cancelled_in_the_copy", A_CANCELLED_COPY),
    ("writing_guests::it_is_cancelled_once_all_is_there", A_CANCELLED_COPY),
    ("writing_guests::it_is_cancelled_while_writes_wait", A_CANCELLED_COPY),
    ("writing_guests::the_agent_dies_in_the_copy", AN_AGENT_OF_DISKS),
    ("writing_guests::the_agent_dies_while_writes_wait", AN_AGENT_OF_DISKS),
    ("writing_guests::the_targets_agent_dies_in_the_copy", AN_AGENT_OF_DISKS),
    ("writing_guests::the_targets_agent_dies_once_all_is_there", AN_AGENT_OF_DISKS),
    ("writing_guests::the_targets_qemu_dies_in_the_copy", AN_AGENT_OF_DISKS),
    ("writing_guests::the_targets_qemu_dies_once_all_is_there", AN_AGENT_OF_DISKS),
];

const A_CANCELLED_COPY: &str = "interrupted_copies::a_copy_that_is_cancelled_goes_on_or_is_given_up";
const A_DRAINED_HOSTS_AGENT: &str = "drain::the_drained_hosts_agent_is_killed_or_stopped";
const A_FULL_DISK: &str = "drain_faults::the_disk_under_the_journal_is_full";
const A_LOST_JOURNAL: &str =
    "lost_journal::a_target_that_loses_its_journal_as_the_source_waits_ends_with_one_copy";
const A_MUTE_QEMU: &str = "mute_qemu::for_its_target_is_killed_or_as_it_is_told_to_run";
const AGENTS_OF_A_DOMAIN: &str = "libvirt_kills::agents_are_killed_at_the_hand_over_of_a_domain";
const AN_AGENT_OF_DISKS: &str = "writing_guests::the_agent_dies_once_all_is_there";
const HELD_WRITES: &str = "held_writes::a_vm_that_writes_much_moves_with_its_disks";
const LIBVIRT_ENDS: &str = "newer_libvirt::libvirt_ends_at_the_hand_over";
const POST_COPYS_AGENTS: &str = "post_copy::agents_that_are_killed_meanwhile";
const TWO_VMS_COME: &str = "shared_paths::an_agent_is_started_anew_while_two_vms_come";
const WRITES: &str = "writing_guests::their_disks_move_whole";

/// Whether the whole form runs; `make test-libvirt` always runs it.
pub(crate) fn is_wanted() -> bool {
    std::env::var_os(WHOLE).is_some() || with_libvirt::is_wanted()
}

/// The cases that a test goes through one by one; in the short form, the first `short` of them.
pub(crate) fn first_or_all<T>(short: usize, all: &[T]) -> &[T] {
    if is_wanted() { all } else { &all[..short] }
}

/// The tests of this run.
///
/// # Panics
///
/// If a test that is left out does not exist, or if the one that shows its mechanism does not, or is left out too.
pub(crate) fn wanted(mut trials: Vec<Trial>) -> Vec<Trial> {
    let is_left_out = |name: &str| LEFT_OUT.iter().any(|(left_out, _)| name == *left_out);
    for (left_out, instead) in LEFT_OUT {
        for name in [left_out, instead] {
            assert!(trials.iter().any(|trial| trial.name() == *name), "there is no test {name}");
        }
        assert!(!is_left_out(instead), "{instead} stands for {left_out}, and is left out");
    }
    trials.retain(|trial| is_wanted() || !is_left_out(trial.name()));
    trials
}
