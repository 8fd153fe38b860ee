//! Peers of other releases: those too far apart are refused, and what only they know breaks nothing.

use axum::routing::get;
use axum::{Json, Router};
use drainpipe_engine::check::CheckReport;
use drainpipe_engine::finding::Finding;
use drainpipe_engine::host::capabilities::Committer;
use drainpipe_engine::host::facts::HostFacts;
use drainpipe_engine::plan::LimitKeeper;
use drainpipe_engine::problem::{Problem, ProblemKind};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::harness::{TestAgent, Who};
use drainpipe_api_types::{
    HandOverView, Holding, HostView, IncomingPermit, IncomingRequest, IncomingView, VmList, VmState,
};

const ID: &str = "66666666-6666-4666-8666-666666666666";

fn vm() -> Value {
    json!({ "name": "web", "memory_mib": 64, "vcpus": 1, "machine": "pc-q35-7.2", "uuid": ID, "accelerator": "tcg",
            "memory_padding_kib": 8 })
}

/// A host of a release that says everything else differently.
fn two_releases_on() -> Router {
    let said = json!({
        "agent_version": "0.4.0", "protocols": { "oldest": 3, "newest": 4 }, "facts": ["another"], "host": ["shape"]
    });
    let answer = get(async || Json(said));
    Router::new().route("/v1/host", answer.clone()).route("/v1/check/facts", answer)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_target_too_far_apart_is_refused_in_step_1_with_what_to_upgrade() {
    let Some(agent) = TestAgent::start_beside(Some(two_releases_on())).await else { return };
    let made = agent.say(Who::Root, "POST", "/v1/vms", &json!({ "spec": vm() }).to_string()).await;
    assert_eq!(made.status, 200, "{made:?}");
    let request = json!({ "vm": "web", "target": "target" }).to_string();
    let planned = agent.say(Who::Root, "POST", "/v1/migrations/plan", &request).await;
    let Problem { kind, message, .. } = planned.problem();
    assert_eq!(kind, ProblemKind::Refused, "{message}");
    let own = env!("CARGO_PKG_VERSION");
    for words in [
        &format!("here runs drainpipe {own}"),
        "target runs drainpipe 0.4.0",
        "upgrade here, one release at a time, to 0.4.0",
    ] {
        assert!(message.contains(words), "{message}");
    }
    let listed = agent.say(Who::Root, "GET", "/v1/hosts", "").await;
    assert!(listed.body.contains("target runs drainpipe 0.4.0"), "{listed:?}");
    let checked = agent.say(Who::Root, "POST", "/v1/check", &json!({ "target": "target" }).to_string()).await;
    let CheckReport { findings, .. } = serde_json::from_str(&checked.body).unwrap();
    let found: Vec<_> = findings.iter().map(|one| (one.code.as_str(), one.refuses_migration)).collect();
    assert_eq!(found, [("agents-too-far-apart", true)]);
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_too_far_apart_is_refused_in_step_2_and_one_release_apart_is_not() {
    let Some(agent) = TestAgent::start().await else { return };
    let sent = |oldest: u32, newest: u32| {
        let release = json!({ "version": "0.9.0", "protocols": { "oldest": oldest, "newest": newest } });
        json!({ "id": ID, "spec": vm(), "definition": vm(), "release": release }).to_string()
    };
    let refused = agent.say(Who::Source, "POST", "/v1/incoming", &sent(3, 4)).await;
    assert_eq!(refused.problem().kind, ProblemKind::Refused, "{refused:?}");
    assert!(refused.body.contains("upgrade here, one release at a time, to 0.9.0"), "{refused:?}");
    let senseless = agent.say(Who::Source, "POST", "/v1/incoming", &sent(3, 2)).await;
    assert_eq!(senseless.problem().kind, ProblemKind::BadInput, "{senseless:?}");
    let by_order = sent(2, 3).replace(r#"{"newest":3,"oldest":2}"#, "[2,3]");
    let listed = agent.say(Who::Source, "POST", "/v1/incoming", &by_order).await;
    assert_eq!(listed.problem().kind, ProblemKind::BadInput, "{by_order}: {listed:?}");
    let granted = agent.say(Who::Source, "POST", "/v1/incoming", &sent(2, 3)).await;
    assert_eq!(granted.status, 200, "{granted:?}");
    agent.stop().await;
}

/// 0.1.0 refuses a field that it does not know.
#[test]
fn what_0_1_0_is_asked_in_step_2_has_the_fields_that_it_knows() {
    let known = json!({
        "id": ID, "spec": vm(), "definition": vm(), "may_wait": true, "cores_taken": 0.5
    });
    let request: IncomingRequest = serde_json::from_value(known.clone()).unwrap();
    let said = serde_json::to_value(request).unwrap();
    let keys = |value: &Value| value.as_object().unwrap().keys().cloned().collect::<Vec<_>>();
    assert_eq!(keys(&said), keys(&known));
}

fn read<T: DeserializeOwned>(value: Value) -> Result<T, String> {
    serde_json::from_value(value).map_err(|error| error.to_string())
}

/// Nobody may decide anything by a value of these that is not understood.
#[test]
fn what_decides_and_is_not_known_is_an_error_that_names_it() {
    let news = || json!("of-a-newer-release");
    let errors = [
        read::<IncomingPermit>(news()).unwrap_err(),
        read::<IncomingView>(news()).unwrap_err(),
        read::<HandOverView>(news()).unwrap_err(),
        read::<Holding>(news()).unwrap_err(),
        read::<HostFacts>(with(facts(), "encryption", news())).unwrap_err(),
        read::<Committer>(news()).unwrap_err(),
        read::<LimitKeeper>(news()).unwrap_err(),
    ];
    for error in errors {
        assert!(error.starts_with("unknown variant `of-a-newer-release`"), "{error}");
    }
}

#[test]
fn what_only_tells_people_something_and_is_not_known_is_left_out() {
    let news = || json!({ "of-a-newer-release": [1] });
    let problem = json!({ "kind": "melted", "message": "too warm", "since": 1 });
    let problem: Problem = read(problem).unwrap();
    assert_eq!((problem.kind, problem.message.as_str()), (ProblemKind::Failed, "too warm"));

    let vm = json!({ "name": "web", "host": "b", "state": "hibernating", "memory_mib": 64, "vcpus": 1, "more": 1 });
    let list: VmList = read(json!({ "vms": [vm], "errors": [], "more": 1 })).unwrap();
    assert_eq!(list.vms[0].state, VmState::Unknown);

    let read_facts: HostFacts =
        read(with(with(facts(), "no_packing", news()), "no_migration_address", json!("x"))).unwrap();
    assert_eq!((read_facts.no_packing, read_facts.no_migration_address), (None, None));

    let finding = json!({ "severity": "warning", "code": "new", "places": [], "what": "", "effect": "", "remedy": "",
                          "fix": { "fix": "by-magic" } });
    assert_eq!(read::<Finding>(finding).unwrap().fix, None);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_says_its_release_and_one_that_does_not_is_0_1_0() {
    let Some(agent) = TestAgent::start().await else { return };
    let said = agent.say(Who::Source, "GET", "/v1/host", "").await;
    let mut said: Value = serde_json::from_str(&said.body).unwrap();
    assert_eq!(said["protocols"], json!({ "oldest": 1, "newest": 2 }));
    said.as_object_mut().unwrap().remove("protocols");
    let silent: HostView = read(with(said, "of_a_newer_release", json!(1))).unwrap();
    assert_eq!(silent.protocols.to_string(), "protocol 1");
    agent.stop().await;
}

fn with(mut object: Value, key: &str, value: impl Serialize) -> Value {
    object[key] = json!(value);
    object
}

/// The least that a host says about itself.
fn facts() -> Value {
    json!({
        "name": "b", "cores": 2, "memory_available_bytes": 1, "links": [], "management_links": [], "rdma_devices": [],
        "hypervisor": { "name": "QEMU", "version": "7.2.22", "rdma": false }
    })
}
