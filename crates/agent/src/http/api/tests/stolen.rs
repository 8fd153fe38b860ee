//! What a thief with another host's certificate can do to a host: each sentence of docs/security.md about it is a test.
//! Files, devices and bridges are in `hostile.rs`; the whole table of paths is in `authorization.rs`.

use drainpipe_engine::problem::ProblemKind;
use serde_json::{Value, json};

use super::harness::{TestAgent, Who};

const ID: &str = "55555555-5555-4555-8555-555555555555";

/// The thief: the certificate is that of the host `source`.
const THIEF: Who = Who::Source;

fn vm(name: &str) -> Value {
    json!({ "name": name, "memory_mib": 64, "vcpus": 1, "machine": "pc-q35-7.2", "uuid": ID, "accelerator": "tcg",
            "memory_padding_kib": 8 })
}

/// A VM that the thief sends.
fn sent(name: &str) -> String {
    json!({ "id": ID, "spec": vm(name), "definition": vm(name) }).to_string()
}

async fn create(agent: &TestAgent, name: &str) {
    let made = agent.say(Who::Root, "POST", "/v1/vms", &json!({ "spec": vm(name) }).to_string()).await;
    assert_eq!(made.status, 200, "{made:?}");
}

#[tokio::test(flavor = "multi_thread")]
async fn may_look_at_everything_but_keys_and_disks() {
    let Some(agent) = TestAgent::start().await else { return };
    create(&agent, "web").await;
    let definition = agent.say(THIEF, "GET", "/v1/vms/web/definition", "").await;
    assert_eq!(serde_json::from_str::<Value>(&definition.body).unwrap()["uuid"], ID);
    for path in
        ["/v1/vms", "/v1/host", "/v1/hosts", "/v1/migrations", "/v1/drain", "/v1/bandwidth", "/v1/journal"]
    {
        let answer = agent.say(THIEF, "GET", path, "").await;
        assert_ne!(answer.status, 403, "{path}: {answer:?}");
        assert!(!answer.body.contains("PRIVATE KEY"), "{path}");
    }
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn may_fetch_any_vm_to_the_host_of_the_certificate_and_to_no_other() {
    let Some(agent) = TestAgent::start().await else { return };
    create(&agent, "web").await;
    let fetch = |target: &str| json!({ "vm": "web", "target": target }).to_string();
    let own = agent.say(THIEF, "POST", "/v1/migrations", &fetch("source")).await;
    assert!(own.problem().kind == ProblemKind::Conflict && own.body.contains("does not run"), "{own:?}");
    let other = agent.say(THIEF, "POST", "/v1/migrations", &fetch("target")).await;
    assert_eq!(other.problem().kind, ProblemKind::Forbidden, "{other:?}");
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn may_have_a_host_run_a_vm_that_uses_what_vms_may_use_there() {
    let Some(agent) = TestAgent::start().await else { return };
    let disk = agent.disks().join("of-another-vm");
    std::fs::write(&disk, vec![0; 1 << 20]).unwrap();
    let mut spec = vm("evil");
    spec["disk"] = json!([{ "path": disk, "format": "raw", "read_only": false }]);
    let body = json!({ "id": ID, "spec": spec, "definition": spec }).to_string();
    let permit = agent.say(THIEF, "POST", "/v1/incoming", &body).await;
    assert_eq!((permit.status, permit.body.as_str()), (200, "\"granted\""), "{permit:?}");
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn may_hold_memory_and_names_until_it_is_silent() {
    let Some(agent) = TestAgent::start().await else { return };
    let free = async || {
        let host = agent.say(Who::Root, "GET", "/v1/check/facts", "").await;
        let facts: Value = serde_json::from_str(&host.body).unwrap();
        facts["host"]["memory_available_bytes"].as_u64().unwrap()
    };
    let before = free().await;
    // So much that nothing else on this machine matters.
    let mut half = vm("web");
    half["memory_mib"] = json!(before >> 21);
    let body = json!({ "id": ID, "spec": half, "definition": half }).to_string();
    assert_eq!(agent.say(THIEF, "POST", "/v1/incoming", &body).await.status, 200);
    assert_eq!(agent.say(THIEF, "POST", &format!("/v1/incoming/{ID}/memory"), "").await.status, 200);
    assert!(free().await < before / 4 * 3);
    let taken = agent.say(Who::Root, "POST", "/v1/vms", &json!({ "spec": vm("web") }).to_string()).await;
    assert_eq!(taken.problem().kind, ProblemKind::Conflict, "{taken:?}");
    assert_eq!(agent.say(THIEF, "DELETE", &format!("/v1/incoming/{ID}"), "").await.status, 200);
    create(&agent, "web").await;
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn may_not_manage_vms_or_the_host() {
    let Some(agent) = TestAgent::start().await else { return };
    create(&agent, "web").await;
    for (method, path, body) in [
        ("POST", "/v1/vms", json!({ "spec": vm("more") }).to_string()),
        ("POST", "/v1/vms/web/start", String::new()),
        ("POST", "/v1/vms/web/stop", String::new()),
        ("DELETE", "/v1/vms/web", String::new()),
        ("POST", "/v1/vms/web/reclaim", json!({ "lost": "target" }).to_string()),
        ("POST", "/v1/drain", "{}".into()),
        ("POST", "/v1/drain/cancel", String::new()),
        ("POST", "/v1/resume", "{}".into()),
        ("POST", "/v1/bandwidth", json!({ "setting": "unlimited" }).to_string()),
        ("POST", "/v1/fixes", json!({ "fixes": [] }).to_string()),
        ("DELETE", "/v1/fixes", String::new()),
        ("POST", "/v1/journal/adoption", String::new()),
    ] {
        let answer = agent.say(THIEF, method, path, &body).await;
        assert_eq!(answer.problem().kind, ProblemKind::Forbidden, "{method} {path}: {answer:?}");
    }
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn may_not_send_or_carry_on_in_the_name_of_another() {
    let Some(agent) = TestAgent::start().await else { return };
    // Its certificate says who sends. What another host has begun belongs to that host.
    assert_eq!(agent.say(Who::Target, "POST", "/v1/incoming", &sent("web")).await.status, 200);
    for (method, what) in [("DELETE", ""), ("POST", "/memory"), ("POST", "/skeleton"), ("POST", "/run")] {
        let answer = agent.say(THIEF, method, &format!("/v1/incoming/{ID}{what}"), "").await;
        assert_eq!(answer.problem().kind, ProblemKind::Forbidden, "{method} {what}: {answer:?}");
    }
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn may_not_have_a_request_passed_on() {
    let Some(agent) = TestAgent::start().await else { return };
    for (method, path) in [("GET", "/v1/vms"), ("POST", "/v1/vms/web/stop"), ("DELETE", "/v1/vms/web")] {
        let answer = agent.say(THIEF, method, &format!("{path}?host=target"), "").await;
        assert_eq!(answer.problem().kind, ProblemKind::Forbidden, "{method} {path}: {answer:?}");
    }
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn may_speak_of_the_journal_of_its_own_host_only() {
    let Some(agent) = TestAgent::start().await else { return };
    let tell = async |who: Who, identity: &str, generation: u64| {
        let mark = json!({ "identity": identity, "generation": generation });
        let request = json!({ "told": { "mark": mark, "replaces": [] } }).to_string();
        let answer = agent.say(who, "POST", "/v1/journal/marks", &request).await;
        serde_json::from_str::<Value>(&answer.body).unwrap()["heard"]["generation"].as_u64()
    };
    assert_eq!(tell(Who::Target, "one", 5).await, None);
    // That host's own agent would find its journal older than what others have heard.
    assert_eq!(tell(THIEF, "two", 1 << 40).await, None);
    assert_eq!(tell(THIEF, "two", 1 << 40).await, Some(1 << 40));
    assert_eq!(tell(Who::Target, "one", 6).await, Some(5));
    agent.stop().await;
}
