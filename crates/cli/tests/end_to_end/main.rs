//! The real program in real labs with real guests, as a user runs it.
//!
//! Needs root, QEMU, the tools that labs need, and the image that `scripts/guest` makes. If one of these is missing,
//! every test is reported as ignored, with the reason. Each test makes its own labs, and removes them even if it fails.

#![expect(clippy::unwrap_used, reason = "a test stops at what it did not expect")]

mod backend;
mod bad_input;
mod bad_luck;
mod bandwidth;
mod burner;
mod captured;
mod chaos;
mod check;
mod check_fix;
mod check_hosts;
mod check_vms;
mod completion;
mod confined;
mod copied_disks;
mod device_disks;
mod domains;
mod drain;
mod drain_cli;
mod drain_faults;
mod drain_losses;
mod drain_meetings;
mod drained_disks;
mod emulated;
mod encrypted;
mod flooded;
mod guest;
mod guest_network;
mod held_writes;
mod huge_pages;
mod idle_paths;
mod interrupted_copies;
mod joining;
mod keeper;
mod kills;
mod lab_cli;
mod later_rounds;
mod leaving;
mod libvirt_announced;
mod libvirt_disks;
mod libvirt_fit;
mod libvirt_kills;
mod libvirt_lab;
mod libvirt_moves;
mod libvirt_relayed;
mod libvirt_snapshots;
mod limited_disks;
mod link_addresses;
mod link_rate;
mod lost;
mod lost_journal;
mod measure_auto;
mod measure_both;
mod measure_busy;
mod measure_conntrack;
mod measure_disks;
mod measure_domains;
mod measure_drain;
mod measure_faults;
mod measure_flood;
mod measure_limits;
mod measure_moments;
mod measure_pause;
mod measure_post_copy;
mod measure_tls;
mod measure_writers;
mod measured_guest;
mod moved_disks;
mod mute_qemu;
mod options;
mod other_traffic;
mod outpaced;
mod path_loss;
mod post_copy;
mod program;
mod real_guest;
mod relayed;
mod released;
mod scene;
mod service;
mod shared_paths;
mod short_of_memory;
mod silences;
mod support;
mod switch_over_faults;
mod taken_route;
mod tls_certificates;
mod unauthenticated;
#[path = "../../../hypervisor-qemu/tests/qemu/userfaultfd.rs"]
mod userfaultfd;
mod whole;
mod with_libvirt;
mod writing_guests;

use std::process::{Command, ExitCode, Stdio};
use std::time::Instant;

use libtest_mimic::{Arguments, Completion, Trial};

/// Tests wait for two thirds of their time: one after the other they would take 3,800 s, of which they use a core for
/// 1,200 s. With four threads, two cores were idle for a fifth of 16 minutes.
const THREADS: usize = 6;

/// Tests that run one by one after all others. Some check whether something is packed, which uses idle time only, and
/// beside other tests there is none; in the last three, two emulated machines take turns.
const NEED_IDLE_CORES: [&str; 6] = [
    "options::compression",
    "relayed::over_one_path",
    "relayed::packing_keeps_to_its_cpus_and_progress_tells_of_it",
    "emulated::a_vm_moves_between_machines_and_is_intact",
    "emulated::a_vm_moves_by_rdma_or_says_why_not",
    "emulated::a_vm_whose_rdma_is_cut_stays_and_then_moves_without",
];

/// A test and its name.
type Test = (&'static str, fn());

/// Modules whose tests need nothing but labs.
const MODULES: &[(&str, &[Test])] = &[
    // The longest tests of these come first.
    ("chaos", chaos::TESTS),
    ("options", options::TESTS),
    ("other_traffic", other_traffic::TESTS),
    ("bad_luck", bad_luck::TESTS),
    ("leaving", leaving::TESTS),
    ("lost_journal", lost_journal::TESTS),
    ("lost", lost::TESTS),
    ("mute_qemu", mute_qemu::TESTS),
    ("outpaced", outpaced::TESTS),
    ("path_loss", path_loss::TESTS),
    ("later_rounds", later_rounds::TESTS),
    ("post_copy", post_copy::TESTS),
    ("switch_over_faults", switch_over_faults::TESTS),
    ("taken_route", taken_route::TESTS),
    ("shared_paths", shared_paths::TESTS),
    ("bad_input", bad_input::TESTS),
    ("flooded", flooded::TESTS),
    ("guest_network", guest_network::TESTS),
    ("unauthenticated", unauthenticated::TESTS),
    ("check", check::TESTS),
    ("check_fix", check_fix::TESTS),
    ("check_hosts", check_hosts::TESTS),
    ("check_vms", check_vms::TESTS),
    ("completion", completion::TESTS),
    ("confined", confined::TESTS),
    ("held_writes", held_writes::TESTS),
    ("moved_disks", moved_disks::TESTS),
    ("drain", drain::TESTS),
    ("drain_cli", drain_cli::TESTS),
    ("drain_meetings", drain_meetings::TESTS),
    ("drain_faults", drain_faults::TESTS),
    ("drain_losses", drain_losses::TESTS),
    ("joining", joining::TESTS),
    ("keeper", keeper::TESTS),
    ("lab_cli", lab_cli::TESTS),
    ("service", service::TESTS),
    ("link_addresses", link_addresses::TESTS),
    ("bandwidth", bandwidth::TESTS),
    ("idle_paths", idle_paths::TESTS),
    ("relayed", relayed::TESTS),
    ("encrypted", encrypted::TESTS),
];

/// Modules about hosts, agents and links, for which all QEMUs are alike. The short form uses the newer QEMU, if there
/// is one: before 9.0, QEMU goes through all memory of a guest without KVM at each start of a migration
/// (docs/decisions/0019).
const WITH_ANY_QEMU: [&str; 15] = [
    "bandwidth",
    "drain",
    "drain_cli",
    "drain_faults",
    "drain_losses",
    "drain_meetings",
    "flooded",
    "idle_paths",
    "joining",
    "leaving",
    "link_addresses",
    "lost_journal",
    "path_loss",
    "shared_paths",
    "unauthenticated",
];

fn has_any_qemu(test: &str) -> bool {
    !whole::is_wanted() && WITH_ANY_QEMU.iter().any(|module| test.split("::").next() == Some(*module))
}

/// A test of a module.
type Named = (String, fn());

/// All tests of this run that need nothing but labs.
fn with_labs_alone() -> impl Iterator<Item = Named> {
    MODULES.iter().flat_map(|(module, tests)| {
        tests.iter().map(move |(name, test)| (format!("{module}::{name}"), *test))
    })
}

fn main() -> ExitCode {
    let mut arguments = Arguments::from_args();
    arguments.test_threads.get_or_insert(THREADS);
    let missing = missing();
    let _post_copy = missing.is_none().then(userfaultfd::Allowed::begin);
    if let Some(missing) = &missing
        && !arguments.list
    {
        eprintln!("SKIPPED: {missing}");
    }
    if measures(arguments.filter.as_deref().unwrap_or_default()) {
        return ExitCode::SUCCESS;
    }
    if with_libvirt::is_wanted() {
        let mut trials = libvirt_trials(missing.as_ref(), arguments.list);
        let no_real_guest = no_real_guest(missing.as_ref(), arguments.list);
        trials.extend(with_libvirt::real_guest(no_real_guest.as_ref()));
        return run(arguments, trials);
    }
    let mut trials = Vec::new();
    let no_real_guest = no_real_guest(missing.as_ref(), arguments.list);
    for (name, test) in real_guest::TESTS {
        trials.push(trial(format!("real_guest::{name}"), *test, no_real_guest.clone()));
    }
    let no_released = missing.clone().or_else(released::missing);
    if let (None, Some(absent), false) = (&missing, &no_released, arguments.list) {
        eprintln!("SKIPPED, those with the last release: {absent}");
    }
    // Including long ones.
    for (name, test) in released::TESTS {
        trials.push(trial(format!("released::{name}"), *test, no_released.clone()));
    }
    trials.extend(libvirt_trials(missing.as_ref(), arguments.list));
    for (name, test) in with_labs_alone() {
        let run: fn(fn()) = if has_any_qemu(&name) { backend::with_newer_qemu } else { |test: fn()| test() };
        trials.push(trial(name, move || run(test), missing.clone()));
    }
    let no_machines = missing.clone().or_else(emulated::missing);
    if let (None, Some(absent), false) = (&missing, &no_machines, arguments.list) {
        eprintln!("SKIPPED, those with emulated machines: {absent}");
    }
    for (name, test) in emulated::TESTS {
        trials.push(trial(format!("emulated::{name}"), *test, no_machines.clone()));
    }
    let killed = short_of_memory::the_kernel_kills_the_targets_qemu;
    let no_groups = missing.clone().or_else(short_of_memory::missing);
    trials.push(trial("short_of_memory::the_kernel_kills_the_targets_qemu".into(), killed, no_groups));
    let vlans = link_addresses::a_card_and_its_vlans_are_one_path;
    let no_vlans = missing.clone().or_else(link_addresses::no_vlans);
    trials.push(trial("link_addresses::a_card_and_its_vlans_are_one_path".into(), vlans, no_vlans));
    let no_other_qemu = missing.or_else(no_other_qemu);
    trials.push(trial("options::another_qemu".into(), options::another_qemu, no_other_qemu.clone()));
    let stalled = later_rounds::with_another_qemu;
    // It takes longest: if it began last, it would run alone at the end.
    trials.insert(0, trial("later_rounds::with_another_qemu".into(), stalled, no_other_qemu.clone()));
    for (name, test) in limited_disks::WITH_NEWER_QEMU {
        trials.push(trial(format!("limited_disks::{name}"), *test, no_other_qemu.clone()));
    }
    for (name, test) in device_disks::WITH_NEWER_QEMU {
        trials.push(trial(format!("device_disks::{name}"), *test, no_other_qemu.clone()));
    }
    for (name, test) in interrupted_copies::WITH_NEWER_QEMU {
        trials.push(trial(format!("interrupted_copies::{name}"), *test, no_other_qemu.clone()));
    }
    for (name, test) in drained_disks::WITH_NEWER_QEMU {
        trials.push(trial(format!("drained_disks::{name}"), *test, no_other_qemu.clone()));
    }
    for (name, test) in writing_guests::WITH_NEWER_QEMU {
        trials.push(trial(format!("writing_guests::{name}"), *test, no_other_qemu.clone()));
    }
    for (name, test) in moved_disks::WITH_NEWER_QEMU {
        trials.push(trial(format!("moved_disks::{name}"), *test, no_other_qemu.clone()));
    }
    for (name, test) in copied_disks::WITH_NEWER_QEMU {
        trials.push(trial(format!("copied_disks::{name}"), *test, no_other_qemu.clone()));
    }
    let older = check_vms::an_older_qemu;
    trials.push(trial("check_vms::an_older_qemu".into(), older, no_other_qemu.clone()));
    let huge = huge_pages::a_vm_in_huge_pages_is_checked_refused_and_moved;
    trials.push(trial("huge_pages::a_vm_is_checked_refused_and_moved".into(), huge, no_other_qemu.clone()));
    let slow = path_loss::a_link_that_becomes_slow_gets_a_smaller_share;
    trials.push(trial(
        "path_loss::a_link_that_becomes_slow_gets_a_smaller_share".into(),
        slow,
        no_other_qemu,
    ));
    run(arguments, whole::wanted(trials))
}

/// Runs the tests that need idle cores after all others.
fn run(mut arguments: Arguments, trials: Vec<Trial>) -> ExitCode {
    let (alone, together): (Vec<_>, Vec<_>) =
        trials.into_iter().partition(|trial| NEED_IDLE_CORES.iter().any(|name| trial.name().ends_with(name)));
    let first = libtest_mimic::run(&arguments, together);
    arguments.test_threads = Some(1);
    let second = libtest_mimic::run(&arguments, alone);
    if first.has_failed() { first.exit_code() } else { second.exit_code() }
}

/// A measurement. It takes a number (repetitions or seconds) and a word; it leaves out rows without that word.
type Measurement = fn(usize, &str);

/// Measurements, which are not tests, by the variable that asks for them and gives the number.
const MEASUREMENTS: &[(&str, Measurement)] = &[
    ("DRAINPIPE_MEASURE_FAULTS", measure_faults::run),
    ("DRAINPIPE_MEASURE_AUTO", measure_auto::run),
    ("DRAINPIPE_MEASURE_BOTH", |repeats, _| measure_both::run(repeats)),
    ("DRAINPIPE_MEASURE_BUSY", |repeats, _| measure_busy::run(repeats)),
    ("DRAINPIPE_MEASURE_LIMITS", measure_limits::run),
    ("DRAINPIPE_MEASURE_FLOOD", |repeats, _| measure_flood::run(repeats)),
    ("DRAINPIPE_MEASURE_POST_COPY", |repeats, _| measure_post_copy::run(repeats)),
    ("DRAINPIPE_MEASURE_MOMENTS", measure_moments::run),
    ("DRAINPIPE_MEASURE_PAUSE", measure_pause::run),
    ("DRAINPIPE_MEASURE_KILLS", |_, filter| kills::run(filter)),
    ("DRAINPIPE_MEASURE_CAPTURE", |_, _| captured::run()),
    ("DRAINPIPE_MEASURE_TLS", |repeats, _| measure_tls::run(repeats)),
    ("DRAINPIPE_MEASURE_CONNTRACK", |repeats, _| measure_conntrack::run(repeats)),
    ("DRAINPIPE_MEASURE_DISKS", measure_disks::run),
    ("DRAINPIPE_MEASURE_DOMAINS", measure_domains::run),
    ("DRAINPIPE_MEASURE_WRITERS", measure_writers::run),
    ("DRAINPIPE_MEASURE_HELD_WRITERS", measure_writers::run_held),
    ("DRAINPIPE_MEASURE_DRAIN", |repeats, _| measure_drain::run(repeats)),
    ("DRAINPIPE_MEASURE_SCENARIOS", chaos::measure),
    ("DRAINPIPE_CHAOS_SECONDS", |seconds, _| chaos::run_for(seconds)),
];

/// Runs the measurement that the environment asks for; returns whether there was one.
fn measures(filter: &str) -> bool {
    let number = |variable: &str| -> Option<usize> { std::env::var(variable).ok()?.parse().ok() };
    let asked_for = MEASUREMENTS.iter().find_map(|(variable, run)| Some((run, number(variable)?)));
    if let Some((run, number)) = asked_for {
        run(number, filter);
    }
    asked_for.is_some()
}

/// The tests with libvirt in their labs. If they cannot run, they are reported as ignored even if all else is.
fn libvirt_trials(missing: Option<&String>, is_list: bool) -> Vec<Trial> {
    let no_libvirt = domains::missing();
    if let (None, Some(absent), false) = (missing, &no_libvirt, is_list) {
        eprintln!("SKIPPED, those with libvirt: {absent}");
    }
    let no_libvirt = missing.cloned().or(no_libvirt);
    let modules = [
        ("libvirt_fit", libvirt_fit::TESTS),
        ("libvirt_kills", libvirt_kills::TESTS),
        ("libvirt_lab", libvirt_lab::TESTS),
        ("libvirt_moves", libvirt_moves::TESTS),
        ("libvirt_relayed", libvirt_relayed::TESTS),
        ("libvirt_announced", libvirt_announced::TESTS),
        ("libvirt_snapshots", libvirt_snapshots::TESTS),
    ];
    let tests = modules.iter().flat_map(|(module, tests)| tests.iter().map(move |test| (module, test)));
    let mut trials: Vec<Trial> = tests
        .map(|(module, (name, test))| trial(format!("{module}::{name}"), *test, no_libvirt.clone()))
        .collect();
    trials.extend(with_libvirt::trials(no_libvirt.as_ref()));
    trials.extend(newer_libvirt_trials(no_libvirt.as_ref(), is_list));
    let moves = libvirt_lab::a_domain_moves_with_another_qemu;
    let absent = no_libvirt.clone().or_else(no_other_qemu);
    trials.push(trial("libvirt_lab::a_domain_moves_with_another_qemu".into(), moves, absent.clone()));
    for (name, test) in libvirt_disks::WITH_NEWER_QEMU {
        trials.push(trial(format!("libvirt_disks::{name}"), *test, absent.clone()));
    }
    let stays = libvirt_fit::a_domain_of_which_qemu_loses_writes_stays;
    let is_new = || {
        let qemu = domains::DISTRIBUTIONS_QEMU;
        (!domains::loses_writes(qemu)).then(|| format!("{qemu} is no QEMU before 9.0"))
    };
    let absent = no_libvirt.or_else(is_new);
    trials.push(trial("libvirt_fit::a_domain_of_which_qemu_loses_writes_stays".into(), stays, absent));
    trials
}

/// Tests of domains that show whether a newer libvirt works. `make test-libvirt` runs all tests with the one that it is
/// given.
const WITH_NEWER_LIBVIRT: &[Test] = &[
    ("libvirt_ends_at_the_hand_over", libvirt_kills::libvirt_ends_at_the_hand_over_of_a_domain),
    ("moves", libvirt_moves::a_domain_is_moved_by_its_phases),
];

fn newer_libvirt_trials(no_libvirt: Option<&String>, is_list: bool) -> Vec<Trial> {
    if with_libvirt::is_wanted() {
        return vec![];
    }
    let none =
        options::newer_libvirt().is_none().then(|| "DRAINPIPE_TEST_LIBVIRT names no newer libvirt".into());
    if let (None, Some(absent), false) = (no_libvirt, &none, is_list) {
        eprintln!("SKIPPED, those with a newer libvirt: {absent}");
    }
    let absent = no_libvirt.cloned().or(none);
    let named = WITH_NEWER_LIBVIRT.iter().map(|(name, test)| (format!("newer_libvirt::{name}"), *test));
    named.map(|(name, test)| trial(name, move || backend::with_newer_libvirt(test), absent.clone())).collect()
}

/// Why the Debian guest is missing. Its tests are reported as ignored even if all else is.
fn no_real_guest(missing: Option<&String>, is_list: bool) -> Option<String> {
    let absent = real_guest::missing();
    if let (None, Some(absent), false) = (missing, &absent, is_list) {
        eprintln!("SKIPPED, the one with Debian and PostgreSQL: {absent}");
    }
    missing.cloned().or(absent).or_else(no_other_qemu)
}

fn no_other_qemu() -> Option<String> {
    options::other_qemu().is_none().then(|| "DRAINPIPE_TEST_QEMU names no other QEMU".into())
}

fn trial(name: String, test: impl FnOnce() + Send + 'static, missing: Option<String>) -> Trial {
    Trial::ignorable_test(name.clone(), move || {
        if let Some(missing) = missing {
            return Ok(Completion::ignored_with(missing));
        }
        let began = Instant::now();
        test();
        if std::env::var_os("DRAINPIPE_TEST_TIMES").is_some() {
            eprintln!("{:7.1} s {name}", began.elapsed().as_secs_f64());
        }
        Ok(Completion::Completed)
    })
}

/// What this machine lacks to run the tests.
fn missing() -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("labs are made of network namespaces, which need root".into());
    }
    if let Some(file) = guest::image().iter().find(|file| !file.exists()) {
        return Some(format!("{} is missing: run scripts/guest", file.display()));
    }
    let tools = ["qemu-system-x86_64", "ip", "nft"];
    let absent = tools.into_iter().find(|tool| !is_installed(tool));
    absent.map(|tool| format!("{tool} is not installed: run scripts/setup"))
}

fn is_installed(tool: &str) -> bool {
    let flag = if tool == "ip" { "-V" } else { "--version" };
    let ran = Command::new(tool).arg(flag).stdout(Stdio::null()).stderr(Stdio::null()).status();
    ran.is_ok_and(|status| status.success())
}
