//! Migrations whose guest runs on the target while its memory is still on the way.

use drainpipe_hypervisor::Connections;
use std::net::{Ipv4Addr, SocketAddr, TcpListener};
use std::time::Duration;

use drainpipe_hypervisor::{
    HypervisorFacts, MigrationStatus, Role, RunState, SourceSettings, TlsKey, TransferStatus, Transport,
};
use drainpipe_hypervisor_qemu::Vmm;
use drainpipe_hypervisor_qemu::migration::{self, MigrationError};
use rustix::process::Signal;
use serde_json::{Value, json};
use tokio::time::{Instant, sleep};

use crate::host::{DEADLINE, Host, qemus, small_vm};
use crate::memory_sample::have_it_write;
use crate::migration::{CONTENT_BYTES, PLAIN, Pair, SETTINGS, listen, signal, state, wait_for};
use crate::userfaultfd::Allowed;

/// So slow that the content would take minutes.
const SLOW: SourceSettings = SourceSettings { bandwidth_mbps: Some(1), ..SETTINGS };

const CLEAR: Transport = Transport::CLEAR_POST_COPY;
const ENCRYPTED: Transport = Transport::PostCopy { tls: Some(TlsKey::new([0xa5; 32])) };

/// Every QEMU whose process may fetch pages here.
async fn qemus_with_post_copy() -> (Allowed, Vec<HypervisorFacts>) {
    let allowed = Allowed::begin();
    let mut able = Vec::new();
    for facts in qemus().await {
        let host = Host::new(&facts);
        let target = host.start(&small_vm("able"), Role::Incoming).await;
        let path = target.paths().incoming_relay().of_hypervisor;
        match migration::listen(&target, CLEAR, path, DEADLINE).await {
            Err(error @ MigrationError::NoPostCopy(_)) => {
                eprintln!("SKIPPED: QEMU {}: {error}", facts.version);
            }
            listening => {
                listening.expect("listens");
                drop(target);
                able.push(facts);
            }
        }
    }
    (allowed, able)
}

/// A guest that writes to half of its memory, and its incoming VM.
async fn writing_pair(source: &HypervisorFacts, target: &HypervisorFacts, name: &str) -> Pair {
    let pair = Pair::booting(source, target, name, have_it_write).await;
    wait_until_it_writes(&pair.source).await;
    pair
}

async fn monitor(vmm: &Vmm, command: &str) -> String {
    let arguments = json!({ "command-line": command });
    vmm.qmp().execute("human-monitor-command", arguments, DEADLINE).await.expect("an answer")
}

/// The guest has many pages, and they may arrive slowly. So this looks at the page at which it is.
async fn wait_until_it_writes(vmm: &Vmm) {
    let look = async || {
        let registers = monitor(vmm, "info registers").await;
        let page = registers.split_whitespace().find(|word| word.starts_with("EDI=")).map(str::to_owned);
        registers.contains("CS =1020").then_some(page).flatten()
    };
    let end = Instant::now() + DEADLINE;
    let mut before = None;
    loop {
        let now = look().await;
        if before.is_some() && now.is_some() && now != before {
            return;
        }
        assert!(Instant::now() < end, "the guest stands still: {now:?}");
        before = now.or(before);
        sleep(Duration::from_millis(2)).await;
    }
}

/// Checks that the content to which the guest does not write is in `vmm`'s memory as it was loaded.
async fn check_content(vmm: &Vmm) {
    let spec = vmm.spec().spec();
    let content = std::fs::read(spec.initramfs.as_ref().expect("it has one")).expect("readable");
    let content = &content[CONTENT_BYTES / 2..];
    // As QEMU names it from its working directory, where it may write.
    let dump = vmm.paths().directory().join("qemu/own/dump");
    let arguments = json!({ "val": 0, "size": spec.memory_mib << 20, "filename": "own/dump" });
    vmm.qmp().execute::<Value>("pmemsave", arguments, DEADLINE).await.expect("written");
    let memory = std::fs::read(dump).expect("readable");
    let is_there = (0..memory.len()).step_by(4096).any(|page| memory[page..].starts_with(content));
    assert!(is_there, "memory did not arrive as it was");
}

/// Begins a post-copy: the source waits in pre-switchover, with nearly all of its memory.
async fn stop_for_post_copy(pair: &Pair, transport: Transport) -> SocketAddr {
    let address = listen(&pair.target, transport, Ipv4Addr::LOCALHOST.into()).await;
    migration::start(&pair.source, transport, address, SLOW, DEADLINE).await.expect("begun");
    wait_for(&pair.source, MigrationStatus::Active).await;
    assert_eq!(state(&pair.source).await, RunState::Running);
    assert!(migration::start_post_copy(&pair.source, DEADLINE).await.expect("it is on"));
    wait_for(&pair.source, MigrationStatus::PreSwitchover).await;
    assert_eq!(state(&pair.source).await, RunState::FinishMigrate);
    assert!(!may_run(&pair.target).await);
    address
}

fn free_address() -> SocketAddr {
    TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).and_then(|socket| socket.local_addr()).expect("a free port")
}

async fn may_run(target: &Vmm) -> bool {
    let status = migration::status(target, DEADLINE).await.expect("an answer").status;
    status.lets_run(&state(target).await)
}

async fn wait_until_it_may_run(target: &Vmm) {
    let end = Instant::now() + DEADLINE;
    while !may_run(target).await {
        assert!(Instant::now() < end, "the state does not come");
        sleep(Duration::from_millis(2)).await;
    }
}

/// Continues from pre-switchover until the target may run. Most of the memory is still to come then.
async fn leave(pair: &Pair) {
    migration::switch_over(&pair.source, DEADLINE).await.expect("goes on");
    wait_for(&pair.source, MigrationStatus::PostcopyActive).await;
    assert_eq!(state(&pair.source).await, RunState::FinishMigrate);
    wait_until_it_may_run(&pair.target).await;
    wait_for(&pair.target, MigrationStatus::PostcopyActive).await;
    assert_eq!(state(&pair.target).await, RunState::Paused, "the target waits for the commit");
}

async fn run_on_target(pair: &Pair) {
    migration::run(&pair.target, DEADLINE).await.expect("runs");
    assert_eq!(state(&pair.target).await, RunState::Running);
}

/// Lets the rest of the memory be sent.
async fn finish(pair: &Pair) -> TransferStatus {
    migration::set_bandwidth(&pair.source, None, DEADLINE).await.expect("set");
    let sent = wait_for(&pair.source, MigrationStatus::Completed).await;
    wait_for(&pair.target, MigrationStatus::Completed).await;
    assert_eq!(state(&pair.source).await, RunState::Postmigrate);
    sent
}

async fn counter(source: &Vmm, name: &str) -> u64 {
    let status: Value = source.qmp().execute("query-migrate", Value::Null, DEADLINE).await.expect("a status");
    status["ram"][name].as_u64().expect("a counter")
}

/// Some memory is sent whatever the limit is.
async fn wait_for_more_post_copy(source: &Vmm) {
    let before = counter(source, "postcopy-bytes").await;
    let end = Instant::now() + DEADLINE;
    while counter(source, "postcopy-bytes").await == before {
        assert!(Instant::now() < end, "no page is sent");
        sleep(Duration::from_millis(2)).await;
    }
}

async fn parameters(vmm: &Vmm) -> Value {
    vmm.qmp().execute("query-migrate-parameters", Value::Null, DEADLINE).await.expect("parameters")
}

fn has_left<T: std::fmt::Debug>(result: &Result<T, MigrationError>, expected: &MigrationStatus) {
    assert!(
        matches!(result, Err(MigrationError::LeftForPostCopy(status)) if status == expected),
        "{result:?}"
    );
}

#[tokio::test]
async fn the_guest_runs_on_the_target_while_its_memory_is_on_the_way() {
    let (_allowed, qemus) = qemus_with_post_copy().await;
    let pairs = qemus.iter().flat_map(|a| qemus.iter().map(move |b| (a, b)));
    for ((source, target), transport) in pairs.flat_map(|pair| [(pair, CLEAR), (pair, ENCRYPTED)]) {
        let pair = writing_pair(source, target, "post-copy").await;
        stop_for_post_copy(&pair, transport).await;
        for vmm in [&pair.source, &pair.target] {
            let parameters = parameters(vmm).await;
            assert_eq!(parameters["tls-creds"] != "", transport == ENCRYPTED, "{parameters}");
        }
        leave(&pair).await;
        run_on_target(&pair).await;
        wait_until_it_writes(&pair.target).await;
        let underway = wait_for(&pair.source, MigrationStatus::PostcopyActive).await;
        let ram = underway.ram.expect("counters");
        assert!(ram.remaining_bytes > CONTENT_BYTES as u64 / 2, "{ram:?}");
        assert!(counter(&pair.source, "postcopy-requests").await > 0, "the guest fetches pages");
        let sent = finish(&pair).await;
        eprintln!("{} → {}: {underway:?}, {sent:?}", source.version, target.version);
        let ram = sent.ram.expect("counters");
        assert!(ram.post_copy_bytes > CONTENT_BYTES as u64 / 2, "{ram:?}");
        assert_eq!(state(&pair.target).await, RunState::Running);
        wait_until_it_writes(&pair.target).await;
        check_content(&pair.target).await;
    }
}

#[tokio::test]
async fn a_limit_holds_in_post_copy() {
    let (_allowed, qemus) = qemus_with_post_copy().await;
    for facts in qemus {
        let pair = Pair::new(&facts, &facts, "limited").await;
        stop_for_post_copy(&pair, CLEAR).await;
        leave(&pair).await;
        // The guest is halted, so it fetches nothing by itself.
        run_on_target(&pair).await;
        for limit_mbps in [2, 1] {
            migration::set_bandwidth(&pair.source, Some(limit_mbps), DEADLINE).await.expect("set");
            let set = parameters(&pair.source).await["max-postcopy-bandwidth"].as_u64().expect("bytes/s");
            // The rest is for the packets' headers.
            let limit = limit_mbps * 1_000_000 / 8;
            assert!((limit * 9 / 10..limit).contains(&set), "{set} of {limit}");
            wait_for_more_post_copy(&pair.source).await;
        }
        let held_back = wait_for(&pair.source, MigrationStatus::PostcopyActive).await.ram.expect("counters");
        assert!(held_back.remaining_bytes > CONTENT_BYTES as u64 / 2, "{held_back:?}");
        let sent = finish(&pair).await.ram.expect("counters");
        assert!(sent.post_copy_bytes >= held_back.post_copy_bytes + CONTENT_BYTES as u64 / 2, "{sent:?}");
        check_content(&pair.target).await;
    }
}

#[tokio::test]
async fn a_broken_connection_is_made_anew() {
    let (_allowed, qemus) = qemus_with_post_copy().await;
    for facts in qemus {
        for (runs, transport) in [(false, CLEAR), (true, CLEAR), (true, ENCRYPTED)] {
            let pair = writing_pair(&facts, &facts, "broken").await;
            let address = stop_for_post_copy(&pair, transport).await;
            leave(&pair).await;
            if runs {
                run_on_target(&pair).await;
                wait_until_it_writes(&pair.target).await;
            }
            assert_eq!(
                pair.source.process().cut(address).expect("QEMU is ours"),
                1,
                "all over one connection"
            );
            wait_for(&pair.source, MigrationStatus::PostcopyPaused).await;
            wait_for(&pair.target, MigrationStatus::PostcopyPaused).await;
            assert_eq!(may_run(&pair.target).await, !runs);
            has_left(&migration::run(&pair.source, DEADLINE).await, &MigrationStatus::PostcopyPaused);

            // Nobody listens there.
            migration::resume(&pair.source, free_address(), DEADLINE).await.expect("tried");
            sleep(Duration::from_millis(200)).await;
            wait_for(&pair.source, MigrationStatus::PostcopyPaused).await;

            let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
            let port = taken.local_addr().expect("an address");
            let error = migration::recover_listen(&pair.target, port, DEADLINE).await;
            assert!(matches!(error, Err(MigrationError::PortTaken(is)) if is == port), "{error:?}");
            let foreign: SocketAddr = "192.0.2.1:49152".parse().expect("an address");
            let error = migration::recover_listen(&pair.target, foreign, DEADLINE).await;
            assert!(matches!(error, Err(MigrationError::CannotListen { .. })), "{error:?}");

            // QEMU already listens there.
            let error = migration::recover_listen(&pair.target, address, DEADLINE).await;
            assert!(matches!(error, Err(MigrationError::PortTaken(is)) if is == address), "{error:?}");
            // Once more, as when the source did not come.
            let (unused, address) = (free_address(), free_address());
            for address in [unused, address] {
                migration::recover_listen(&pair.target, address, DEADLINE).await.expect("listens again");
            }
            migration::resume(&pair.source, address, DEADLINE).await.expect("begun");
            wait_for(&pair.source, MigrationStatus::PostcopyActive).await;
            let remaining = counter(&pair.source, "remaining").await;
            assert!(remaining > CONTENT_BYTES as u64 / 2, "the limit still holds: {remaining}");
            wait_for(&pair.target, MigrationStatus::PostcopyActive).await;

            // Again, and where the target listens as it is.
            assert_eq!(pair.source.process().cut(address).expect("QEMU is ours"), 1);
            wait_for(&pair.source, MigrationStatus::PostcopyPaused).await;
            wait_for(&pair.target, MigrationStatus::PostcopyPaused).await;
            migration::resume(&pair.source, address, DEADLINE).await.expect("begun");
            wait_for(&pair.source, MigrationStatus::PostcopyActive).await;
            wait_for(&pair.target, MigrationStatus::PostcopyActive).await;
            if !runs {
                wait_until_it_may_run(&pair.target).await;
                run_on_target(&pair).await;
            }
            wait_until_it_writes(&pair.target).await;
            finish(&pair).await;
            assert_eq!(state(&pair.target).await, RunState::Running);
            wait_until_it_writes(&pair.target).await;
            check_content(&pair.target).await;
        }
    }
}

#[tokio::test]
async fn until_the_switchover_the_guest_comes_back_and_may_leave_later() {
    let (_allowed, qemus) = qemus_with_post_copy().await;
    for facts in qemus {
        let mut pair = Pair::new(&facts, &facts, "not-left").await;
        stop_for_post_copy(&pair, CLEAR).await;
        let status = migration::cancel(&pair.source, DEADLINE).await.expect("ends");
        assert_eq!(status, MigrationStatus::Cancelled);
        migration::run(&pair.source, DEADLINE).await.expect("runs");
        assert_eq!(state(&pair.source).await, RunState::Running);

        // The earlier request is forgotten: everything is sent before the switchover.
        start_target_anew(&mut pair).await;
        pair.transfer(CLEAR).await;
        wait_for(&pair.source, MigrationStatus::PreSwitchover).await;
        let sent = pair.commit().await;
        assert_eq!(sent.ram.expect("counters").post_copy_bytes, 0, "{sent:?}");
    }
}

async fn start_target_anew(pair: &mut Pair) {
    let spec = pair.target.spec().spec().clone();
    pair.target.destroy(DEADLINE).await.expect("ends");
    pair.target = pair.target_host.start(&spec, Role::Incoming).await;
}

/// How soon a target ends that takes its last bytes for lost.
const EXITS_WITHIN: Duration = Duration::from_secs(3);

/// QEMU 7.2 seems to keep the return path of a post-copy migration that was cancelled: the next target mostly gets a reset
/// at the end, as one does whose last bytes nobody reads.
#[tokio::test]
async fn after_a_cancelled_post_copy_others_go_with_a_failure_in_old_qemus() {
    let (_allowed, qemus) = qemus_with_post_copy().await;
    for facts in qemus {
        let mut pair = Pair::new(&facts, &facts, "other-transport").await;
        stop_for_post_copy(&pair, CLEAR).await;
        migration::cancel(&pair.source, DEADLINE).await.expect("ends");
        migration::run(&pair.source, DEADLINE).await.expect("runs");
        start_target_anew(&mut pair).await;
        if facts.version.major < 8 {
            pair.transfer(PLAIN).await;
            wait_for(&pair.source, MigrationStatus::PreSwitchover).await;
            migration::switch_over(&pair.source, DEADLINE).await.expect("goes on");
            if pair.target.wait_exit(EXITS_WITHIN).await.is_none() {
                eprintln!("{}: it went well this time", facts.version);
                continue;
            }
            migration::run(&pair.source, DEADLINE).await.expect("runs");
            start_target_anew(&mut pair).await;
        }
        pair.transfer(PLAIN).await;
        wait_for(&pair.source, MigrationStatus::PreSwitchover).await;
        pair.commit().await;
    }
}

#[tokio::test]
async fn after_the_switchover_the_source_never_runs_its_guest_again() {
    let (_allowed, qemus) = qemus_with_post_copy().await;
    for facts in qemus {
        let pair = writing_pair(&facts, &facts, "left").await;
        stop_for_post_copy(&pair, CLEAR).await;
        leave(&pair).await;
        has_left(&migration::run(&pair.source, DEADLINE).await, &MigrationStatus::PostcopyActive);
        run_on_target(&pair).await;
        wait_until_it_writes(&pair.target).await;

        signal(&pair.target, Signal::KILL);
        wait_for(&pair.source, MigrationStatus::PostcopyPaused).await;
        has_left(&migration::run(&pair.source, DEADLINE).await, &MigrationStatus::PostcopyPaused);
        // Somebody else cancels. QEMU 7.2 obeys, and then waits for a target that no longer exists.
        let answer = pair.source.qmp().execute::<Value>("migrate_cancel", Value::Null, DEADLINE).await;
        eprintln!("{}: {answer:?}", facts.version);
        let status =
            if answer.is_ok() { MigrationStatus::Cancelling } else { MigrationStatus::PostcopyPaused };
        has_left(&migration::run(&pair.source, DEADLINE).await, &status);
    }
}

#[tokio::test]
async fn once_all_was_sent_a_guest_that_did_not_run_at_the_target_runs_again_at_the_source() {
    let (_allowed, qemus) = qemus_with_post_copy().await;
    for facts in qemus {
        let pair = writing_pair(&facts, &facts, "unused").await;
        stop_for_post_copy(&pair, CLEAR).await;
        leave(&pair).await;
        finish(&pair).await;
        assert!(may_run(&pair.target).await);
        // By now, it has the disks.
        pair.target.destroy(DEADLINE).await.expect("ends");
        migration::run(&pair.source, DEADLINE).await.expect("runs");
        wait_until_it_writes(&pair.source).await;
    }
}

/// More than the kernel holds for a target that does not read.
const NEARLY_ALL_BYTES: u64 = 1 << 20;

#[tokio::test]
async fn a_source_whose_connection_breaks_at_the_very_end_does_not_run_its_guest() {
    let (_allowed, qemus) = qemus_with_post_copy().await;
    for facts in qemus {
        for transport in [CLEAR, ENCRYPTED] {
            // A halted guest's pages are sent in their order, the content last.
            let pair = Pair::new(&facts, &facts, "at-the-end").await;
            let address = stop_for_post_copy(&pair, transport).await;
            leave(&pair).await;
            run_on_target(&pair).await;
            migration::set_downtime_limit(&pair.source, 0, DEADLINE).await.expect("set");
            // Slow at the end, so that the target is stopped in time.
            for (limit_mbps, left_bytes) in [(100, 2 * NEARLY_ALL_BYTES), (11, NEARLY_ALL_BYTES)] {
                migration::set_bandwidth(&pair.source, Some(limit_mbps), DEADLINE).await.expect("set");
                while counter(&pair.source, "remaining").await > left_bytes {
                    sleep(Duration::from_millis(2)).await;
                }
            }
            signal(&pair.target, Signal::STOP);
            migration::set_bandwidth(&pair.source, None, DEADLINE).await.expect("set");
            let end = Instant::now() + DEADLINE;
            while counter(&pair.source, "remaining").await > 0 {
                assert!(Instant::now() < end, "the kernel does not take it");
                sleep(Duration::from_millis(2)).await;
            }
            // Now it waits for its target's last message.
            sleep(Duration::from_millis(200)).await;
            wait_for(&pair.source, MigrationStatus::PostcopyActive).await;
            assert_eq!(pair.source.process().cut(address).expect("QEMU is ours"), 1);
            sleep(Duration::from_millis(500)).await;
            let (now, is) = (migration::status(&pair.source, DEADLINE).await, state(&pair.source).await);
            eprintln!("{}: {now:?}, {is}", facts.version);
            assert!(matches!(is, RunState::Paused | RunState::FinishMigrate), "{is}");
            // What was sent by then arrives nevertheless.
            signal(&pair.target, Signal::CONT);
            wait_for(&pair.target, MigrationStatus::Completed).await;
            check_content(&pair.target).await;
        }
    }
}
