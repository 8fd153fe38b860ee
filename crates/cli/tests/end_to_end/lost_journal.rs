//! A journal that is lost, empty, damaged, replaced, or older than what others know. It is not believed, nothing is
//! ended or started because of it, and an operator continues with what is there. One copy of each VM runs, whatever
//! happens.

use std::fs;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use drainpipe_api_types::{JournalView, VmState};
use drainpipe_engine::migration::result::Outcome;
use drainpipe_hypervisor::RunState;
use rusqlite::Connection;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;

use crate::Test;
use crate::drain::{ask, start_small};
use crate::guest::Guest;
use crate::kills::qemu_of;
use crate::program::{DRAINPIPE, Output, REFUSED};
use crate::scene::{
    Scene, assert_failed, hold_journal, impatient_lab, is_told_to_run, journal, result_of,
    wait_until_handed_over,
};
use crate::support::{TestLab, eventually};
use crate::switch_over_faults::run_state;
use crate::whole;

pub(crate) const TESTS: &[Test] = &[
    (
        "a_journal_that_proves_nothing_is_not_believed_and_its_vm_runs_on",
        a_journal_that_proves_nothing_is_not_believed_and_its_vm_runs_on,
    ),
    (
        "a_target_that_loses_its_journal_as_the_source_waits_ends_with_one_copy",
        a_target_that_loses_its_journal_as_the_source_waits_ends_with_one_copy,
    ),
    (
        "a_target_that_loses_its_journal_once_the_vm_runs_there_ends_with_one_copy",
        a_target_that_loses_its_journal_once_the_vm_runs_there_ends_with_one_copy,
    ),
    (
        "a_source_that_loses_its_journal_after_the_hand_over_ends_with_one_copy",
        a_source_that_loses_its_journal_after_the_hand_over_ends_with_one_copy,
    ),
    (
        "an_older_journal_on_the_source_starts_no_second_copy",
        an_older_journal_on_the_source_starts_no_second_copy,
    ),
    (
        "a_target_that_loses_its_journal_as_the_qemu_starts",
        a_target_that_loses_its_journal_as_the_qemu_starts,
    ),
    ("a_dead_host_keeps_no_vm_from_starting", a_dead_host_keeps_no_vm_from_starting),
];

/// How an agent describes such a journal.
const OLDER: &str = "it is older";

/// How soon an agent mostly sends an order, and another one obeys it. If it takes longer, the test tries again.
const ORDERS_WITHIN: Duration = Duration::from_millis(100);
const OBEYS_WITHIN: Duration = Duration::from_millis(300);

/// All files of a host's journal.
fn files(lab: &TestLab, host: &str) -> [PathBuf; 3] {
    let file = journal(lab, host).display().to_string();
    ["", "-wal", "-shm"].map(|ending| PathBuf::from(format!("{file}{ending}")))
}

fn delete_journal(lab: &TestLab, host: &str) {
    for file in files(lab, host) {
        let _not_there = fs::remove_file(file);
    }
}

/// A copy of a host's journal as it is now.
#[track_caller]
fn copy_journal(lab: &TestLab, host: &str) -> PathBuf {
    let copy = lab.files().join(format!("{host}.sqlite"));
    let _none_before = fs::remove_file(&copy);
    Connection::open(journal(lab, host))
        .unwrap()
        .execute("VACUUM INTO ?1", [copy.to_str().unwrap()])
        .unwrap();
    copy
}

#[track_caller]
fn put_journal(lab: &TestLab, host: &str, copy: &PathBuf) {
    delete_journal(lab, host);
    fs::copy(copy, journal(lab, host)).unwrap();
}

/// Removes from the runtime directory what tells of the time before.
#[track_caller]
fn forget_boot(lab: &TestLab, host: &str) {
    // An agent that does not believe its journal has written none.
    let _not_there = fs::remove_file(lab.directory(host).join("run/journal.json"));
}

fn journal_view(lab: &TestLab, host: &str) -> Option<JournalView> {
    ask(lab, host, "/v1/journal", None).ok()
}

/// Starts an agent whose journal is not to be believed.
#[track_caller]
fn start_unbelieved(lab: &TestLab, host: &str) -> JournalView {
    lab.spawn_agent(host, &[DRAINPIPE]);
    wait_until_unbelieved(lab, host)
}

#[track_caller]
fn wait_until_unbelieved(lab: &TestLab, host: &str) -> JournalView {
    eventually("the agent does not believe its journal", || {
        journal_view(lab, host).is_some_and(|view| !view.doubts.is_empty())
    });
    journal_view(lab, host).expect("it answered a moment ago")
}

#[track_caller]
fn at(lab: &TestLab, host: &str, arguments: &[&str]) -> Output {
    lab.drainpipe(&[arguments, &["--agent", &lab.agent_socket(host)]].concat())
}

#[track_caller]
fn adopt(lab: &TestLab, host: &str) {
    at(lab, host, &["journal", "adopt"]).refused(2, &["add --yes"]);
    at(lab, host, &["journal", "adopt", "--yes"]).done();
    lab.wait_for_agent(host);
    at(lab, host, &["journal", "show"]).done();
    at(lab, host, &["journal", "adopt", "--yes"]).refused(REFUSED, &["nothing to adopt"]);
}

fn a_journal_that_proves_nothing_is_not_believed_and_its_vm_runs_on() {
    let lab = TestLab::fast();
    let guest = lab.start_guest("web", 160, "");
    let specification = lab.files().join("web.toml").display().to_string();
    let older = copy_journal(&lab, "a");
    lab.create(&guest.specification(160, "").replace("\"web\"", "\"other\""), "other");
    let of_b = copy_journal(&lab, "b");
    let write = |text: &[u8]| fs::write(journal(&lab, "a"), text).unwrap();
    let ways: [(&str, &dyn Fn()); _] = [
        ("there is none", &|| delete_journal(&lab, "a")),
        ("it is empty", &|| {
            delete_journal(&lab, "a");
            write(b"");
        }),
        ("cannot be read", &|| {
            delete_journal(&lab, "a");
            write(&[b'x'; 8192]);
        }),
        (OLDER, &|| put_journal(&lab, "a", &older)),
        ("it is not the journal", &|| put_journal(&lab, "a", &of_b)),
        ("it does not know: of VM web", &|| {
            let forget = "DELETE FROM vms WHERE name = 'web'";
            assert_eq!(Connection::open(journal(&lab, "a")).unwrap().execute(forget, []).unwrap(), 1);
        }),
    ];
    for (doubt, spoil) in ways {
        if doubt == OLDER {
            // Its identity is the one that the last adoption gave the journal.
            older_than_it_is(&lab, &older);
        }
        it_is_not_believed(&lab, &guest, &specification, doubt, spoil);
    }
    let moved = lab.migrate("web", "b", &[]);
    assert_eq!(moved.outcome, Outcome::Completed);
    guest.assert_intact();
}

/// Takes the copy again, and then adds a record to the journal.
#[track_caller]
fn older_than_it_is(lab: &TestLab, copy: &PathBuf) {
    assert_eq!(&copy_journal(lab, "a"), copy);
    let specification = fs::read_to_string(lab.files().join("other.toml")).unwrap();
    lab.create(&specification.replace("\"other\"", "\"more\""), "more");
}

#[track_caller]
fn it_is_not_believed(lab: &TestLab, guest: &Guest, specification: &str, doubt: &str, spoil: &dyn Fn()) {
    let qemu = lab.qemu_pid("a", "web");
    lab.stop_agent("a", Signal::KILL);
    spoil();
    let view = start_unbelieved(lab, "a");
    assert!(view.doubts.iter().any(|found| found.contains(doubt)), "{doubt}: {view:#?}");
    assert_eq!(
        view.live.iter().map(|live| (&live.vm[..], live.runs)).collect::<Vec<_>>(),
        [("web", Some(true))]
    );
    let expected = &["is not believed", doubt, "drainpipe journal adopt"];
    let commands = [
        &["vms"][..],
        &["vm", "start", "web"],
        &["hosts"],
        &["vm", "create", specification],
        &["vm", "stop", "web", "--force"],
        &["vm", "rm", "web"],
        &["migrate", "web", "b"],
        &["drain", "a", "--yes"],
    ];
    // Whatever the doubt is, the agents ask the same.
    let asked = if doubt == OLDER { &commands[..] } else { whole::first_or_all(2, &commands) };
    for command in asked {
        lab.drainpipe(command).refused(REFUSED, expected);
    }
    let shown = lab.drainpipe(&["journal", "show"]);
    assert_eq!(shown.code, REFUSED, "{shown:#?}");
    assert!(shown.stdout.contains(doubt) && shown.stdout.contains("web"), "{shown:#?}");
    // Other hosts hear why.
    let elsewhere = at(lab, "b", &["vms"]);
    assert!(elsewhere.stderr.contains("is not believed"), "{elsewhere:#?}");
    assert_eq!(lab.qemu_pid("a", "web"), qemu);
    guest.assert_answers();
    adopt(lab, "a");
    lab.assert_runs_on("web", "a");
    assert_eq!(lab.qemu_pid("a", "web"), qemu);
    lab.drainpipe(&["vm", "start", "web"]).refused(REFUSED, &["already running"]);
    guest.assert_intact();
}

fn a_target_that_loses_its_journal_as_the_source_waits_ends_with_one_copy() {
    the_target_loses_its_journal(&Scene::in_lab(impatient_lab()), false);
}

fn a_target_that_loses_its_journal_once_the_vm_runs_there_ends_with_one_copy() {
    the_target_loses_its_journal(&Scene::in_lab(impatient_lab()), true);
}

/// Does not compare the network: nobody undoes changes on a host that has lost its journal.
#[track_caller]
fn assert_one_copy_on_b(scene: &Scene) {
    let only_on_b = || {
        let list = scene.lab.vms();
        list.errors.is_empty() && list.vms.iter().map(|vm| &vm.host[..]).eq(["b"])
    };
    eventually("the other host has it no more", only_on_b);
    scene.lab.assert_runs_on("web", "b");
    scene.guest.assert_intact();
}

/// The source's agent is frozen when the VM is to run on the target, whose journal is lost before or after it lets the
/// VM run.
#[track_caller]
fn the_target_loses_its_journal(scene: &Scene, runs_there: bool) {
    let lab = &scene.lab;
    let migrating = scene.migrate(&[]);
    let held = hold_journal(lab, "b");
    wait_until_handed_over(lab);
    let source = lab.agent_pid("a").unwrap();
    kill_process(source, Signal::STOP).unwrap();
    if runs_there {
        held.release();
        wait_until_ordered(lab, source);
        eventually("it runs on b", || run_state(lab, "b", "web") == RunState::Running);
        lab.stop_agent("b", Signal::KILL);
    } else {
        lab.stop_agent("b", Signal::KILL);
        held.release();
    }
    delete_journal(lab, "b");
    let view = start_unbelieved(lab, "b");
    assert_eq!(view.live.len(), 1, "{view:#?}");
    kill_process(source, Signal::CONT).unwrap();
    let output = migrating.wait();
    // The answer from the first agent of b may have waited for the source to read it.
    let is_known = runs_there && result_of(&output).outcome == Outcome::Completed;
    if !is_known {
        assert_eq!((output.code, result_of(&output).outcome), (4, Outcome::InDoubt), "{output:#?}");
        // Nobody has promised that the VM does not run on b.
        assert_eq!(run_state(lab, "a", "web"), RunState::Postmigrate);
    }
    assert_eq!(run_state(lab, "b", "web") == RunState::Running, runs_there);
    adopt(lab, "b");
    eventually("the source hears of it", || {
        let newest = scene.migrations().remove(0);
        newest.progress.is_none() && newest.result.is_some_and(|result| result.outcome == Outcome::Completed)
    });
    assert_one_copy_on_b(scene);
}

/// The QEMU that waits for the VM has not answered its agent yet when that ends.
fn a_target_that_loses_its_journal_as_the_qemu_starts() {
    let lab = TestLab::fast();
    let guest = lab.start_guest("web", 160, "");
    let migrating = lab.start(&["migrate", "web", "b", "--json"]);
    let qemu = qemu_of(&lab, "b");
    kill_process(qemu, Signal::STOP).unwrap();
    lab.stop_agent("b", Signal::KILL);
    kill_process(qemu, Signal::CONT).unwrap();
    assert_failed(&migrating.wait(), "the agent of b");
    delete_journal(&lab, "b");
    // A QEMU that is not ready yet may stay mute to whoever connects.
    thread::sleep(Duration::from_secs(2));
    let view = start_unbelieved(&lab, "b");
    assert!(view.live[0].will_be.contains("on its way here from a"), "{view:#?}");
    adopt(&lab, "b");
    eventually("b has given it up", || lab.vms().vms.iter().map(|vm| &vm.host[..]).eq(["a"]));
    assert_eq!(lab.qemu_pid("b", "web"), None);
    lab.migrate("web", "b", &[]);
    guest.assert_intact();
}

/// An agent that was frozen when it had recorded the hand-over may not have ordered b yet to run the VM. It runs for a
/// moment, in which b can neither obey nor answer, until b has obeyed.
#[track_caller]
fn wait_until_ordered(lab: &TestLab, source: Pid) {
    eventually("b is told to run the VM", || {
        thread::sleep(OBEYS_WITHIN);
        let held = hold_journal(lab, "b");
        let is_told = is_told_to_run(lab);
        if !is_told {
            kill_process(source, Signal::CONT).unwrap();
            thread::sleep(ORDERS_WITHIN);
            kill_process(source, Signal::STOP).unwrap();
        }
        held.release();
        is_told
    });
}

fn a_source_that_loses_its_journal_after_the_hand_over_ends_with_one_copy() {
    let scene = Scene::in_lab(impatient_lab());
    let lab = &scene.lab;
    let _migrating = scene.migrate(&[]);
    let held = hold_journal(lab, "b");
    wait_until_handed_over(lab);
    let target = lab.agent_pid("b").unwrap();
    kill_process(target, Signal::STOP).unwrap();
    held.release();
    lab.stop_agent("a", Signal::KILL);
    delete_journal(lab, "a");
    let view = start_unbelieved(lab, "a");
    assert!(view.live[0].will_be.contains("on its way to b"), "{view:#?}");
    adopt(lab, "a");
    assert_ne!(run_state(lab, "a", "web"), RunState::Running);
    kill_process(target, Signal::CONT).unwrap();
    assert_eq!(scene.last_result().outcome, Outcome::Completed);
    assert_one_copy_on_b(&scene);
}

fn an_older_journal_on_the_source_starts_no_second_copy() {
    let lab = TestLab::fast();
    let guest = lab.start_guest("web", 160, "");
    let older = copy_journal(&lab, "a");
    lab.migrate("web", "b", &["--option", "multichannel"]);
    eventually("b has heard of it", || {
        let heard = fs::read_to_string(lab.directory("b").join("state/heard.json")).unwrap_or_default();
        let mark = journal_view(&lab, "a").and_then(|view| view.mark).expect("it is believed");
        heard.contains(&format!("\"generation\":{}", mark.generation))
    });
    put_back(&lab, &older);
    let view = start_unbelieved(&lab, "a");
    assert!(view.doubts[0].contains("host b has heard"), "{view:#?}");
    // If b cannot be asked, a knows no better, and starts nothing that b may have.
    let target = lab.agent_pid("b").unwrap();
    kill_process(target, Signal::STOP).unwrap();
    put_back(&lab, &older);
    lab.start_agent("a");
    at(&lab, "a", &["vm", "start", "web"]).refused(REFUSED, &["b may have it", "--although-unreachable b"]);
    // It hears of it as soon as b answers.
    kill_process(target, Signal::CONT).unwrap();
    wait_until_unbelieved(&lab, "a");
    // Even after the journal is adopted, b has the VM.
    adopt(&lab, "a");
    let list = lab.vms();
    let states: Vec<_> = list.vms.iter().map(|vm| (&vm.host[..], vm.state)).collect();
    assert_eq!(states, [("a", VmState::Stopped), ("b", VmState::Running)]);
    at(&lab, "a", &["vm", "start", "web"]).refused(REFUSED, &["b has it"]);
    at(&lab, "a", &["vm", "start", "web", "--although-unreachable", "b"]).refused(REFUSED, &["b has it"]);
    guest.assert_intact();
    // The host that has it is lost, and an operator says so.
    lab.stop_agent("b", Signal::KILL);
    kill_process(lab.qemu_pid("b", "web").unwrap(), Signal::KILL).unwrap();
    at(&lab, "a", &["vm", "start", "web"]).refused(REFUSED, &["b may have it", "--although-unreachable b"]);
    at(&lab, "a", &["vm", "start", "web", "--although-unreachable", "b"]).done();
    guest.wait_until_ready();
    assert!(lab.agent_log("a").contains("on an operator's word"));
    lab.start_agent("b");
    let refused = ask::<()>(&lab, "b", "/v1/vms/web/start", Some(Value::Null)).unwrap_err();
    assert!(refused.message.contains("a has it"), "{refused}");
}

/// Makes host `a` boot, in effect, with an old journal.
#[track_caller]
fn put_back(lab: &TestLab, older: &PathBuf) {
    lab.stop_agent("a", Signal::KILL);
    put_journal(lab, "a", older);
    forget_boot(lab, "a");
}

fn a_dead_host_keeps_no_vm_from_starting() {
    let lab = TestLab::fast();
    start_small(&lab, "web", "");
    lab.drainpipe(&["vm", "stop", "web", "--force"]).done();
    lab.stop_agent("b", Signal::KILL);
    let start_and_stop = || {
        lab.drainpipe(&["vm", "start", "web"]).done();
        lab.drainpipe(&["vm", "stop", "web", "--force"]).done();
    };
    start_and_stop();
    lab.stop_agent("a", Signal::KILL);
    lab.start_agent("a");
    start_and_stop();
    // After a boot, only another host can have said that something is missing.
    lab.stop_agent("a", Signal::TERM);
    forget_boot(&lab, "a");
    lab.start_agent("a");
    lab.drainpipe(&["vm", "start", "web"]).refused(REFUSED, &["b may have it"]);
    lab.start_agent("b");
    start_and_stop();
    lab.stop_agent("b", Signal::KILL);
    start_and_stop();
}
