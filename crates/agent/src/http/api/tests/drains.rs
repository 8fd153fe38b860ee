//! Drains and failbacks that cannot begin, and what drains do not bring.

use std::time::Duration;

use drainpipe_engine::drain::status::{DrainStatus, MoveState, MoveStatus};
use drainpipe_engine::problem::ProblemKind;
use jiff::Timestamp;
use serde_json::json;
use tokio::time::timeout;

use super::harness::{TestAgent, Who};
use drainpipe_api_types::{DrainKind, DrainRequest, DrainView};

fn a_move(state: MoveState) -> MoveStatus {
    MoveStatus {
        vm: "web".into(),
        target: "target".into(),
        state,
        migration: Some("of web".into()),
        attempts: 1,
        error: None,
        waits: None,
        memory_bytes: 1 << 28,
        sent_bytes: 7,
        predicted_bytes: 7,
        predicted_ms: 100.0,
        transfer_ms: None,
        compression: None,
        disks: None,
    }
}

/// Leaves the host as after a drain to `target` with this outcome.
fn drained(agent: &TestAgent, swap_with: Option<&str>, state: MoveState) {
    let journal = agent.journal();
    let request = DrainRequest { swap_with: swap_with.map(str::to_owned), ..DrainRequest::default() };
    journal.begin_drain("one", Timestamp::UNIX_EPOCH, &request).unwrap();
    journal.record_drain("one", &DrainStatus::begun(), &[(0, &a_move(state))], &[]).unwrap();
    journal.end_drain("one", Timestamp::UNIX_EPOCH).unwrap();
}

async fn view(agent: &TestAgent) -> DrainView {
    serde_json::from_str(&agent.say(Who::Root, "GET", "/v1/drain", "").await.body).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn who_waits_for_the_end_is_answered_at_once_where_nothing_is_under_way() {
    let Some(agent) = TestAgent::start().await else { return };
    drained(&agent, None, MoveState::Moved);
    let wait = async |wait_ms: &str| {
        let path = format!("/v1/drain?wait_ms={wait_ms}");
        timeout(Duration::from_secs(4), agent.say(Who::Root, "GET", &path, "")).await
    };
    assert_eq!(wait("5000").await.expect("nothing is waited for").status, 200);
    assert_eq!(wait("5001").await.expect("it is refused").problem().message, "wait_ms: at most 5000");
    assert_eq!(wait("soon").await.expect("it is refused").problem().kind, ProblemKind::BadInput);
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_way_back_that_cannot_begin_leaves_the_host_cordoned_and_says_so() {
    let Some(agent) = TestAgent::start().await else { return };
    drained(&agent, None, MoveState::Moved);
    let resume = || agent.say(Who::Root, "POST", "/v1/resume", "{\"failback\": true}");
    let refuse = "CREATE TRIGGER full BEFORE INSERT ON drain_moves BEGIN SELECT RAISE(ABORT, 'no room'); END";
    agent.database().execute_batch(refuse).unwrap();
    let message = resume().await.problem().message;
    assert!(message.contains("no room") && message.contains("here stays cordoned"), "{message}");
    let refused = view(&agent).await;
    assert_eq!((refused.cordoned, refused.kind), (true, Some(DrainKind::Drain)));
    agent.database().execute_batch("DROP TRIGGER full").unwrap();
    assert_eq!(resume().await.status, 200);
    let begun = view(&agent).await;
    assert_eq!((begun.cordoned, begun.kind), (false, Some(DrainKind::Failback)));
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_way_back_has_left_open_is_told_by_where_it_is() {
    let Some(agent) = TestAgent::start().await else { return };
    let journal = agent.journal();
    // One left in doubt by the drain and settled since, one on its way when the agent stopped, and one whose turn had
    // not come.
    let moves = ["web", "db", "mail"].into_iter().zip([
        MoveState::InDoubt,
        MoveState::Transferring,
        MoveState::Waiting,
    ]);
    let moves = moves.map(|(vm, state)| MoveStatus { vm: vm.into(), ..a_move(state) }).collect();
    let begun = DrainStatus { moves, ..DrainStatus::begun() };
    journal.begin_failback("back", Timestamp::UNIX_EPOCH, &DrainRequest::default(), &begun).unwrap();
    journal.interrupt_drains(Timestamp::UNIX_EPOCH).unwrap();
    let reported = view(&agent).await;
    assert_eq!(reported.kind, Some(DrainKind::Failback));
    let rows = reported.status.unwrap().moves;
    assert!(rows.iter().all(|row| row.state == MoveState::Waiting), "{rows:#?}");
    let errors: Vec<String> =
        rows.into_iter().map(|row| row.error.map_or(String::new(), |error| error.message)).collect();
    assert!(
        errors[0].contains("has not come to here") && errors[0].contains("target had it last"),
        "{errors:?}"
    );
    assert_eq!((&errors[1], errors[2].as_str()), (&errors[0], ""));
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_drain_that_is_carried_on_and_refused_lets_in_whom_it_let_in() {
    let Some(agent) = TestAgent::start().await else { return };
    drained(&agent, Some("source"), MoveState::Transferring);
    let before = agent.journal().last_run().unwrap();
    // The fate of its VM cannot be read, so the drain cannot continue.
    let spoil =
        "INSERT INTO migrations (id, vm, target, result) VALUES ('of web', 'web', 'target', 'no JSON')";
    agent.database().execute_batch(spoil).unwrap();
    let answer = agent.say(Who::Root, "POST", "/v1/drain", "{\"swap_with\": \"target\"}").await;
    let message = answer.problem().message;
    assert!(message.contains("does not make sense"), "{message}");
    assert_eq!(agent.journal().last_run().unwrap(), before);
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn two_drains_do_not_bring_together_what_must_be_apart() {
    let Some(agent) = TestAgent::start().await else { return };
    let request = |number: u8, may_wait: bool| {
        let id = format!("33333333-3333-4333-8333-33333333333{number}");
        let spec = json!({
            "name": format!("db{number}"), "uuid": id, "memory_mib": 64, "vcpus": 1, "machine": "pc-q35-7.2",
            "placement": { "apart": ["db"] },
        });
        let mut resolved = spec.clone();
        let more = json!({ "accelerator": "tcg", "memory_padding_kib": 8 });
        resolved.as_object_mut().unwrap().append(&mut more.as_object().unwrap().clone());
        json!({ "id": id, "spec": resolved, "definition": spec, "may_wait": may_wait }).to_string()
    };
    let ask = async |body: String| agent.say(Who::Source, "POST", "/v1/incoming", &body).await;
    let taken = ask(request(1, true)).await;
    assert_eq!(taken.status, 200, "{taken:?}");
    let refused = ask(request(2, true)).await;
    assert!(refused.problem().message.contains("db2 must be apart from db1"), "{refused:?}");
    assert_eq!(ask(request(3, false)).await.status, 200, "somebody's own decision");
    agent.stop().await;
}
