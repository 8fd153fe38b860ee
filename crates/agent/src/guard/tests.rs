//! A guard on a fake hypervisor, with a journal in a temporary directory.

use std::sync::{Arc, Mutex};

use axum::Router;
use axum::extract::Path;
use axum::routing::post;
use drainpipe_hypervisor::fake::{Act, FakeVm, Fault};
use drainpipe_hypervisor::{Exit, Parcel, Role, RunState, SourceSettings, SourceVm, Transport};
use jiff::Timestamp;

use super::*;
use crate::test_host::{TestHost, definition, migrate};

const ID: &str = "11111111-1111-4111-8111-111111111111";

/// A VM that is paused for its last bytes, and its agent's hold of its guard.
struct Guarded {
    host: TestHost,
    journal: Journal,
    vm: Arc<FakeVm>,
    agent: UnixStream,
    heard: UnixStream,
    // The other end of its own connections, if the guard has to deal with them.
    peer: Option<SocketAddr>,
    // Where in the agent it copies disks to.
    disks: Vec<SocketAddr>,
}

impl Guarded {
    fn new() -> Self {
        Self::on(TestHost::new())
    }

    fn on(host: TestHost) -> Self {
        let config = host.config();
        let journal = Journal::open(&config.state_directory, &config.runtime_directory).unwrap();
        journal.begin_migration(ID, &migrate("web"), Timestamp::UNIX_EPOCH).unwrap();
        let vm = host.block_on(async {
            let facts = host.hypervisor.probe(QMP_DEADLINE).await.unwrap();
            let spec = definition("web").resolve(&facts).unwrap();
            host.hypervisor.start(spec, b"{}", Role::Fresh, QMP_DEADLINE).await.unwrap();
            let vm = host.vm("web");
            let settings = SourceSettings { downtime_limit_ms: 300, bandwidth_mbps: None, zero_pages: None };
            vm.start_transfer(Transport::Single, peer().into(), settings, Parcel::default(), QMP_DEADLINE)
                .await
                .unwrap();
            vm.converges();
            vm
        });
        let (heard, agent) = UnixStream::pair().unwrap();
        Self { host, journal, vm, agent, heard, peer: Some(peer()), disks: vec![] }
    }

    /// The agent has everything sent, and records that the VM is the target's.
    fn is_handed_over(&self) {
        self.host.block_on(self.vm.switch_over(QMP_DEADLINE)).unwrap();
        assert!(self.journal.hand_over(ID).unwrap());
    }

    fn is_the_targets(&self) -> bool {
        self.journal.open_migration(ID).unwrap().expect("nobody has ended it").handed_over
    }

    /// The agent says only this, and ends. Returns how its guard ends.
    fn agent_ends(&mut self, after: &[u8]) -> Result<(), Problem> {
        self.agent.write_all(after).unwrap();
        self.agent.shutdown(std::net::Shutdown::Both).unwrap();
        let Config { tls, peers, state_directory, runtime_directory, .. } = self.host.config();
        let orders = Orders {
            migration: ID.into(),
            vm: "web".into(),
            peer: self.peer,
            disks: self.disks.clone(),
            target: peers[1].clone(),
            tls,
            state_directory,
            runtime_directory,
        };
        let hypervisor: Arc<dyn Hypervisor> = self.host.hypervisor.clone();
        let source = Source::new(hypervisor, definition("web").name, orders.peer, orders.disks.clone());
        let journal = Journal::open(&orders.state_directory, &orders.runtime_directory).unwrap();
        let guard = Executor { orders: &orders, journal, source, problem: None };
        self.host.block_on(guard.run(&self.heard))
    }
}

fn peer() -> SocketAddr {
    ([10, 0, 0, 2], 49152).into()
}

/// What an agent asked of its VM before it ended.
const SENT: [Act; 1] = [Act::StartTransfer];

#[test]
fn the_vm_of_an_agent_that_has_ended_runs_here_and_cannot_be_handed_over_any_more() {
    let mut guarded = Guarded::new();
    guarded.agent_ends(&[ALIVE]).unwrap();
    assert_eq!(guarded.vm.state(), RunState::Running);
    let done = [Act::DiscardUnsent, Act::Cancel, Act::Cut, Act::Run];
    assert_eq!(guarded.vm.acts(), [&SENT[..], &done].concat());
    assert!(!guarded.journal.hand_over(ID).unwrap());
}

#[test]
fn connections_that_are_not_ours_are_left_alone() {
    let mut guarded = Guarded::new();
    guarded.peer = None;
    guarded.vm.keeps_connections_to_itself();
    guarded.agent_ends(&[SWITCHES_OVER]).unwrap();
    assert_eq!(guarded.vm.state(), RunState::Running);
    assert_eq!(guarded.vm.acts(), [&SENT[..], &[Act::Cancel, Act::Run]].concat());
}

#[test]
fn a_guard_that_is_dismissed_does_nothing() {
    let mut guarded = Guarded::new();
    guarded.agent_ends(&[ALIVE, DISMISSED]).unwrap();
    assert_eq!(guarded.vm.acts(), SENT);
    assert!(guarded.journal.hand_over(ID).unwrap());
}

#[test]
fn a_vm_that_was_handed_over_is_run_by_its_target_and_not_here() {
    let ordered = Arc::new(Mutex::new(vec![]));
    let seen = Arc::clone(&ordered);
    let run = post(async move |Path(id): Path<String>| seen.lock().unwrap().push(id));
    let mut host = TestHost::new();
    host.target_answers(Router::new().route("/v1/incoming/{id}/run", run));
    let mut guarded = Guarded::on(host);
    guarded.is_handed_over();
    guarded.agent_ends(&[SWITCHES_OVER]).unwrap();
    assert_eq!(*ordered.lock().unwrap(), [ID]);
    assert!(guarded.is_the_targets());
    assert_eq!(guarded.vm.state(), RunState::Postmigrate);
}

#[test]
fn a_vm_that_ran_on_here_though_the_journal_hands_it_over_stays_here() {
    let mut guarded = Guarded::new();
    assert!(guarded.journal.hand_over(ID).unwrap());
    // The agent believes that its record failed, as with a full disk.
    guarded.host.block_on(guarded.vm.cancel(QMP_DEADLINE)).unwrap();
    guarded.agent_ends(&[]).unwrap();
    assert!(!guarded.is_the_targets());
    assert_eq!(guarded.vm.state(), RunState::Running);
}

#[test]
fn one_that_does_not_say_whose_the_vm_is_is_asked_until_it_does() {
    let ordered = Arc::new(Mutex::new(0));
    let seen = Arc::clone(&ordered);
    let mut host = TestHost::new();
    let run = post(async move || *seen.lock().unwrap() += 1);
    host.target_answers(Router::new().route("/v1/incoming/{id}/run", run));
    let mut guarded = Guarded::on(host);
    guarded.is_handed_over();
    guarded.vm.fails_once(Act::Hold, Fault::Mute);
    guarded.agent_ends(&[]).unwrap();
    assert_eq!(*ordered.lock().unwrap(), 1);
    assert_eq!(guarded.vm.state(), RunState::Postmigrate);
}

#[test]
fn one_that_is_mute_while_its_last_bytes_go_is_cut_off_and_asked_once_more() {
    let mut guarded = Guarded::new();
    guarded.host.hypervisor.fails_once(Act::Attach, Fault::Mute);
    guarded.agent_ends(&[SWITCHES_OVER]).unwrap();
    assert_eq!(guarded.vm.state(), RunState::Running);
    let done = [Act::Cut, Act::DiscardUnsent, Act::Cancel, Act::Cut, Act::Run];
    assert_eq!(guarded.vm.acts(), [&SENT[..], &done].concat());
}

#[test]
fn copies_of_its_disks_are_cut_before_it_is_asked_for_anything() {
    let mut guarded = Guarded::new();
    guarded.disks = vec![([127, 0, 0, 1], 40001).into()];
    guarded.agent_ends(&[ALIVE]).unwrap();
    let done = [Act::Cut, Act::DiscardUnsent, Act::Cancel, Act::Cut, Act::Run];
    assert_eq!(guarded.vm.acts(), [&SENT[..], &done].concat());
}

#[test]
fn one_that_somebody_has_stopped_is_not_cut_off() {
    let mut guarded = Guarded::new();
    guarded.vm.is_stopped_by_somebody(true);
    guarded.host.hypervisor.fails_once(Act::Attach, Fault::Mute);
    guarded.agent_ends(&[SWITCHES_OVER]).unwrap();
    assert!(!guarded.vm.acts().contains(&Act::Cut));
    assert_eq!(guarded.vm.state(), RunState::Running);
}

#[test]
fn a_vm_whose_transfer_cannot_be_stopped_is_tried_again() {
    let mut guarded = Guarded::new();
    guarded.vm.fails_once(Act::Cancel, Fault::Fails);
    guarded.vm.fails_once(Act::Run, Fault::Fails);
    guarded.agent_ends(&[]).unwrap();
    assert_eq!(guarded.vm.state(), RunState::Running);
}

#[test]
fn with_one_that_has_ended_nothing_is_left_to_do() {
    let mut guarded = Guarded::new();
    guarded.vm.ends(Exit::Signal(9));
    guarded.agent_ends(&[]).unwrap();
    assert_eq!(guarded.vm.acts(), SENT);
}

#[test]
fn a_word_silence_and_the_end_are_told_apart() {
    let (heard, mut agent) = UnixStream::pair().unwrap();
    agent.write_all(&[ALIVE, ALIVE, DISMISSED]).unwrap();
    assert_eq!(listen(&heard, &mut AgentMessages::default()), GuardEvent::Dismissed);
    let (heard, mut agent) = UnixStream::pair().unwrap();
    agent.write_all(&[ALIVE]).unwrap();
    let mut messages = AgentMessages::default();
    assert_eq!(listen(&heard, &mut messages), GuardEvent::Silent { is_switching_over: false });
    agent.write_all(&[SWITCHES_OVER]).unwrap();
    drop(agent);
    assert_eq!(listen(&heard, &mut messages), GuardEvent::AgentEnded);
    assert!(messages.switches_over);
}

#[test]
fn a_guard_that_ends_before_its_post_is_noticed() {
    let (heard, word) = io::pipe().unwrap();
    drop(word);
    let error = wait_until_at_post(heard).unwrap_err();
    assert!(error.to_string().contains("ended at once"), "{error}");
}
