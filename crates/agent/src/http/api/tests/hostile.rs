//! Requests that make no sense: each is refused with a problem, and nothing breaks.

use drainpipe_engine::journal::GENERATION_MAX;
use drainpipe_engine::problem::ProblemKind;
use drainpipe_hypervisor::qcow2::fuzzing::header;
use proptest::prelude::*;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};

use super::harness::{TestAgent, Who};
use crate::http::api::extract::BODY_BYTES_MAX;

const JSON: &str = "content-type: application/json\r\n";
const ID: &str = "33333333-3333-4333-8333-333333333333";

#[tokio::test(flavor = "multi_thread")]
async fn what_makes_no_sense_is_a_problem_with_the_right_status() {
    let Some(agent) = TestAgent::start().await else { return };
    let long = format!("{{\"vm\": \"{}\"}}", "x".repeat(BODY_BYTES_MAX));
    let deep = "[".repeat(10_000);
    let fix = |fix: &str| format!("{{\"fixes\": [{{\"fix\": {fix}}}]}}");
    let migrate = |more: &str| format!("{{\"vm\": \"web\", \"target\": \"target\"{more}}}");
    for (method, path, headers, body, status, says) in [
        ("GET", "/", "", "", 404, "openapi.json"),
        ("GET", "/v1/vms/", "", "", 404, "openapi.json"),
        ("PUT", "/v1/vms", "", "", 405, "PUT"),
        ("DELETE", "/v1/incoming", "", "", 405, "DELETE"),
        ("GET", "/v1/vms/%ff", "", "", 400, "UTF-8"),
        ("GET", "/v1/vms/a%2fb", "", "", 400, "not a VM name"),
        ("GET", "/v1/vms/absent", "", "", 404, "no VM absent"),
        ("GET", "/v1/migrations/1", "", "", 404, "no migration 1 on"),
        (
            "GET",
            "/v1/migrations/w1",
            "",
            "",
            400,
            "neither a migration's identifier nor the beginning of one",
        ),
        ("GET", "/v1/migrations?limit=4294967295", "", "", 400, "at most 1000"),
        ("GET", "/v1/migrations?limit=-1", "", "", 400, "limit"),
        ("GET", "/v1/migrations?limit=1&limit=2", "", "", 400, "duplicate"),
        ("GET", "/v1/vms?scop=all", "", "", 400, "scop"),
        ("GET", "/v1/vms?host=here&scope=some", "", "", 400, "some"),
        ("GET", "/v1/vms?host=here&host=target", "", "", 400, "once"),
        ("GET", "/v1/vms?host=%68ere", "", "", 400, "host"),
        ("GET", "/v1/vms?host=nobody", "", "", 404, "nobody"),
        ("POST", "/v1/migrations", JSON, "", 400, "EOF"),
        ("POST", "/v1/migrations", JSON, deep.as_str(), 400, "invalid type"),
        ("POST", "/v1/migrations", JSON, long.as_str(), 413, "length limit"),
        ("POST", "/v1/migrations?host=target", JSON, long.as_str(), 413, "bytes"),
        ("POST", "/v1/migrations", "content-type: text/plain\r\n", migrate("").as_str(), 415, "json"),
        ("POST", "/v1/migrations", "", migrate("").as_str(), 415, "json"),
        ("POST", "/v1/migrations", JSON, migrate(", \"optoin\": 1").as_str(), 400, "optoin"),
        ("POST", "/v1/migrations", JSON, migrate(", \"deadline_s\": 0").as_str(), 400, "86400"),
        ("POST", "/v1/migrations", JSON, "{\"vm\": \"\\u001b\", \"target\": \"b\"}", 400, "VM name"),
        ("POST", "/v1/vms", JSON, "{\"spec\": {}, \"more\": 1}", 400, "name"),
        ("POST", "/v1/check", JSON, "{\"target\": \"../b\"}", 400, "../b"),
        ("POST", "/v1/check", JSON, "{\"target\": \"here\"}", 400, "itself"),
        ("POST", "/v1/check", JSON, "{\"target\": \"nobody\"}", 404, "nobody"),
        (
            "POST",
            "/v1/fixes",
            JSON,
            fix("\"tcp_send_buffer\", \"bytes_max\": 4294967296").as_str(),
            400,
            "at most",
        ),
        (
            "POST",
            "/v1/fixes",
            JSON,
            fix("\"loose_reverse_path_filter\", \"link\": \"../x\"").as_str(),
            400,
            "not a migration link",
        ),
        ("POST", "/v1/fixes", JSON, fix("\"kernel.core_pattern\"").as_str(), 400, "unknown variant"),
        ("POST", "/v1/fixes", JSON, "{\"fixes\": [[\"tcp_send_buffer\", 4096]]}", 400, "sequence"),
        ("POST", "/v1/drain", JSON, "[]", 400, "sequence"),
        ("POST", "/v1/drain/plan", JSON, "[]", 400, "sequence"),
        ("POST", "/v1/resume", JSON, "[]", 400, "sequence"),
        ("POST", "/v1/migrations", JSON, "[\"web\", \"target\"]", 400, "sequence"),
        ("POST", "/v1/vms", JSON, "{\"spec\": [\"web\"]}", 400, "sequence"),
    ] {
        let answer = agent.say_with(Who::Root, method, path, headers, body).await;
        assert_eq!(answer.status, status, "{method} {path}: {answer:?}");
        assert!(answer.problem().message.contains(says), "{method} {path} should say {says}: {answer:?}");
    }
    let answer = agent.say(Who::Root, "PATCH", "/v1/vms/web", "").await;
    assert!(answer.head.contains("allow: "), "{answer:?}");
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_whose_plan_contradicts_itself_is_told_how() {
    let Some(agent) = TestAgent::start().await else { return };
    let path = serde_json::json!({
        "link": "e0", "address": "10.0.0.2", "peer_link": "e0", "peer_address": "10.0.0.1",
    });
    let plan = serde_json::json!({
        "requested_option": "tcp", "option": "multichannel", "paths": [path], "spread": "in_turn",
        "multifd_channels": 16, "post_copy": true,
    });
    let body = serde_json::json!({ "plan": plan }).to_string();
    for what in ["connection", "reconnection"] {
        let answer = agent.say(Who::Source, "POST", &format!("/v1/incoming/{ID}/{what}"), &body).await;
        assert_eq!(answer.problem().kind, ProblemKind::BadInput, "{what}: {answer:?}");
        assert!(answer.problem().message.contains("multichannel with post-copy"), "{what}: {answer:?}");
    }
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_check_sends_nothing_but_over_migration_links() {
    let Some(agent) = TestAgent::start().await else { return };
    let path = |own: &str| {
        format!(
            "{{\"link\": \"lo\", \"address\": \"{own}\", \"peer_link\": \"e0\", \"peer_address\": \"127.0.0.1\"}}"
        )
    };
    let session = |paths: &[String], ports: &str| {
        format!("{{\"token\": \"{ID}\", \"paths\": [{}], \"ports\": [{ports}]}}", paths.join(", "))
    };
    for body in [
        session(&[path("127.0.0.1")], "9"),
        session(&vec![path("127.0.0.1"); 65], "9"),
        session(&[], "9"),
        session(&[], "99999"),
    ] {
        let answer = agent.say(Who::Source, "POST", "/v1/check/sessions", &body).await;
        assert_eq!(answer.problem().kind, ProblemKind::BadInput, "{body}: {answer:?}");
    }
    agent.say(Who::Source, "POST", "/v1/check/sessions", &session(&[], "")).await;
    let rounds = format!("/v1/check/sessions/{ID}/rounds");
    let answer = agent.say(Who::Source, "POST", &rounds, "{\"sizes\": [[1500]]}").await;
    assert_eq!(answer.problem().kind, ProblemKind::BadInput, "{answer:?}");
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_host_takes_part_in_checks_without_end() {
    let Some(agent) = TestAgent::start().await else { return };
    let ids: Vec<String> =
        (0..20).map(|number| ID.replace("3333-4333", &format!("{number:04}-4333"))).collect();
    let session = |id: &str| format!("{{\"token\": \"{id}\", \"paths\": [], \"ports\": []}}");
    let mut begun = vec![];
    for id in &ids {
        let answer = agent.say(Who::Source, "POST", "/v1/check/sessions", &session(id)).await;
        match answer.status {
            200 => begun.push(id),
            _ => assert_eq!(answer.problem().kind, ProblemKind::Conflict, "{answer:?}"),
        }
    }
    assert_eq!(begun.len(), 2);
    // It does not keep others out.
    let answer = agent.say(Who::Other, "POST", "/v1/check/sessions", &session(ID)).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    let over = format!("/v1/check/sessions/{}", begun[0]);
    assert_eq!(agent.say(Who::Source, "DELETE", &over, "").await.status, 200);
    let answer = agent.say(Who::Source, "POST", "/v1/check/sessions", &session(&ids[19])).await;
    assert_eq!(answer.status, 200, "{answer:?}");
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn ports_are_opened_on_migration_links_only() {
    let Some(agent) = TestAgent::start().await else { return };
    let links = |names: &[&str]| serde_json::json!({ "links": names }).to_string();
    let opened = agent.say(Who::Source, "POST", "/v1/discovery", &links(&["lo", "../all", ""])).await;
    assert_eq!((opened.status, opened.body.matches("\"refused\"").count()), (200, 3), "{opened:?}");
    let too_many = agent.say(Who::Source, "POST", "/v1/discovery", &links(&["lo"; 17])).await;
    assert_eq!(too_many.problem().kind, ProblemKind::BadInput, "{too_many:?}");
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_hosts_identifiers_are_uuids_or_refused() {
    let Some(agent) = TestAgent::start().await else { return };
    for id in ["1", "..", "a%0ab", "'%20OR%201=1", "%00"] {
        for (method, path) in [("DELETE", ""), ("POST", "/run"), ("GET", "/received?wait_ms=0")] {
            let answer = agent.say(Who::Source, method, &format!("/v1/incoming/{id}{path}"), "").await;
            assert_eq!(answer.problem().kind, ProblemKind::BadInput, "{id}: {answer:?}");
        }
    }
    let body = "{\"id\": \"../../vms\", \"spec\": {}, \"definition\": {}}";
    let answer = agent.say(Who::Source, "POST", "/v1/incoming", body).await;
    assert!(answer.status == 400 && answer.body.contains("UUID"), "{answer:?}");
    // Two spellings of one migration would be two migrations.
    let shouted = format!("/v1/incoming/{}", ID.replace('3', "A"));
    let whispered = shouted.to_lowercase();
    let spec = json!({ "name": "web", "memory_mib": 64, "vcpus": 1, "machine": "pc-q35-7.2" });
    let spec = serde_json::from_value(spec).unwrap();
    agent.journal().begin_incoming(&ID.replace('3', "a"), "source", &spec).unwrap();
    assert_eq!(agent.say(Who::Source, "DELETE", &shouted, "").await.status, 200);
    assert_eq!(agent.say(Who::Source, "GET", &whispered, "").await.body, "\"discarded\"");
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn no_host_tells_of_a_journal_further_than_any_comes() {
    let Some(agent) = TestAgent::start().await else { return };
    let tell = |generation: u64| {
        let mark = json!({ "identity": "one", "generation": generation });
        json!({ "told": { "mark": mark, "replaces": [] } }).to_string()
    };
    for generation in [GENERATION_MAX + 1, u64::MAX] {
        let answer = agent.say(Who::Source, "POST", "/v1/journal/marks", &tell(generation)).await;
        assert_eq!(answer.problem().kind, ProblemKind::BadInput, "{generation}: {answer:?}");
        assert!(answer.body.contains("generation"), "{answer:?}");
    }
    // Nothing of the claim is kept.
    let answer = agent.say(Who::Source, "POST", "/v1/journal/marks", &tell(GENERATION_MAX)).await;
    assert_eq!(answer.body, "{\"heard\":null}");
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_asked_of_unknown_migrations_leaves_no_record_and_promises_nothing() {
    let Some(agent) = TestAgent::start().await else { return };
    let path = format!("/v1/incoming/{ID}");
    for who in [Who::Source, Who::Other] {
        for (method, what) in [("DELETE", ""), ("POST", "/run"), ("POST", "/finish"), ("POST", "/memory")] {
            let answer = agent.say(who, method, &format!("{path}{what}"), "").await;
            assert_eq!(answer.problem().kind, ProblemKind::NotFound, "{method} {what}: {answer:?}");
        }
        assert_eq!(agent.say(who, "GET", &path, "").await.body, "\"unknown\"");
    }
    assert_eq!(agent.journal().incoming_state(ID).unwrap(), None);
    agent.stop().await;
}

/// A VM with these fields and those.
fn with(mut first: Value, more: Value) -> Value {
    let mut spec = json!({ "name": "web", "memory_mib": 64, "vcpus": 1, "machine": "pc-q35-7.2" });
    let mut more = more;
    for values in [&mut first, &mut more] {
        spec.as_object_mut().unwrap().append(values.as_object_mut().unwrap());
    }
    spec
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vm_that_is_two_or_none_does_not_come() {
    let Some(agent) = TestAgent::start().await else { return };
    let spec = |more: Value| with(json!({ "uuid": ID }), more);
    let resolved = spec(json!({ "uuid": ID, "accelerator": "tcg", "memory_padding_kib": 8 }));
    for (wrong, says) in [
        (json!({ "memory_mib": 32 }), "`memory_mib`"),
        (json!({ "memory_mib": 1 }), "out of range"),
        (json!({ "memory_mib": (1_u64 << 44) + 64 }), "out of range"),
        (json!({ "huge_page_mib": 2 }), "`huge_page_mib`"),
        (json!({ "name": "other" }), "different VMs"),
        (json!({ "uuid": null }), "`uuid`"),
        (json!({ "kernel": "boot" }), "absolute"),
        (json!({ "kernel": "/etc/shadow" }), "`kernel`"),
        (json!({ "kernel": "/k", "kernel_command_line": "init=/bin/sh" }), "`kernel`"),
        (json!({ "disk": [{ "path": "/etc/shadow", "format": "raw" }] }), "`disk`"),
        (json!({ "nic": [{ "bridge": "br0" }] }), "`nic.bridge`"),
        (json!({ "vcpus": 255 }), "`vcpus`"),
        (json!({ "machine": "pc-q35-7.1" }), "`machine`"),
        (json!({ "cpu_model": "host" }), "`cpu_model`"),
        (json!({ "accelerator": "kvm" }), "`accelerator`"),
        (json!({ "memory_padding_kib": 16 }), "`memory_padding_kib`"),
        (json!({ "guest": { "heartbeat": "127.0.0.1:1", "control": "127.0.0.1:2" } }), "`guest`"),
        (json!({ "placement": { "stays": "\u{1b}[2J" } }), "one line"),
    ] {
        let body = json!({ "id": ID, "spec": resolved, "definition": spec(wrong) }).to_string();
        let answer = agent.say(Who::Source, "POST", "/v1/incoming", &body).await;
        assert!(answer.problem().message.contains(says), "{body}: {answer:?}");
        assert_eq!(answer.problem().kind, ProblemKind::BadInput, "{body}: {answer:?}");
    }
    agent.stop().await;
}

prop_compose! {
    fn path()(
        start in prop_oneof!["/v1/vms", "/v1/migrations", "/v1/incoming", "/v1/handovers", "/[a-z]{0,5}"],
        rest in prop_oneof![
            Just(String::new()),
            Just(format!("/{ID}")),
            Just(format!("/{ID}/probe")),
            Just(format!("/{ID}/connection")),
            "(/[!-\"$->@-~]{0,12}){0,3}",
        ],
        query in prop_oneof![Just(String::new()), "\\?(limit|scope|wait_ms|force)=[!-\"$-~]{0,9}", "\\?[!-\"$-~]{0,20}"],
    ) -> String {
        format!("{start}{rest}{query}")
    }
}

/// Whether the request is HTTP at all; if not, it does not reach the API.
fn is_http(path: &str) -> bool {
    path.parse::<axum::http::Uri>().is_ok()
}

fn body() -> impl Strategy<Value = String> {
    let word = prop_oneof![
        "vm",
        "target",
        "option",
        "id",
        "spec",
        "definition",
        "plan",
        "paths",
        "addresses",
        ".{0,8}"
    ];
    let leaf = prop_oneof![
        any::<bool>().prop_map(serde_json::Value::from),
        any::<i64>().prop_map(serde_json::Value::from),
        any::<f64>().prop_map(serde_json::Value::from),
        ".{0,9}".prop_map(serde_json::Value::from),
        Just(serde_json::Value::from(ID)),
        Just(serde_json::Value::Null),
    ];
    let value = leaf.prop_recursive(4, 24, 6, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(serde_json::Value::from),
            prop::collection::hash_map(word.clone(), inner, 0..6)
                .prop_map(|entries| serde_json::Value::Object(entries.into_iter().collect())),
        ]
    });
    prop_oneof![value.prop_map(|value| value.to_string()), ".{0,60}"]
}

#[test]
fn any_request_gets_an_answer_and_any_refusal_is_a_problem() {
    let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build().unwrap();
    let Some(agent) = runtime.block_on(TestAgent::start()) else { return };
    let method = prop_oneof![Just("GET"), Just("POST"), Just("DELETE"), Just("PATCH")];
    let who = prop_oneof![Just(Who::Root), Just(Who::Source)];
    let config = Config { cases: 300, failure_persistence: None, ..Config::default() };
    TestRunner::new(config)
        .run(
            &(who, method, path().prop_filter("HTTP", |path| is_http(path)), body()),
            |(who, method, path, body)| {
                let answer = runtime.block_on(agent.say(who, method, &path, &body));
                prop_assert!(answer.status == 200 || (400..500).contains(&answer.status), "{:?}", answer);
                if answer.status != 200 {
                    prop_assert!(!answer.problem().message.is_empty());
                }
                Ok(())
            },
        )
        .unwrap();
    runtime.block_on(agent.stop());
}

/// When a file was last read.
fn accessed(path: &std::path::Path) -> std::time::SystemTime {
    std::fs::metadata(path).unwrap().accessed().unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn no_host_has_another_open_what_its_vms_may_not_use() {
    let Some(agent) = TestAgent::start().await else { return };
    let (disks, outside) = (agent.disks(), agent.disks().with_file_name("outside"));
    std::fs::write(&outside, "secret").unwrap();
    std::fs::write(disks.join("good"), "kernel").unwrap();
    std::os::unix::fs::symlink(&outside, disks.join("link")).unwrap();
    let backing = header(3, outside.to_str(), &[(0xe279_2aca, "raw")]);
    std::fs::write(disks.join("image"), backing).unwrap();
    let seen = accessed(&outside);
    let named = |file: &str| disks.join(file).display().to_string();
    let disk = |path: &str, format: &str| json!({ "disk": [{ "path": path, "format": format }] });
    for (uses, says) in [
        (disk("/etc/shadow", "raw"), "in a directory that VMs may use"),
        (disk(outside.to_str().unwrap(), "raw"), "in a directory that VMs may use"),
        (disk(&named("../outside"), "raw"), "in a directory that VMs may use"),
        (disk("/dev/sda", "raw"), "in a directory that VMs may use"),
        (json!({ "kernel": "/etc/shadow" }), "in a directory that VMs may use"),
        (json!({ "kernel": named("link") }), "symbolic link"),
        (json!({ "kernel": named("good"), "initramfs": "/etc/shadow" }), "not in a directory"),
        (disk(&named("link"), "raw"), "symbolic link"),
        (disk(&named("image"), "qcow2"), "which VMs may not use"),
        (disk(&named("nothing"), "raw"), "there is no"),
        (json!({ "nic": [{ "bridge": "office", "mac": "52:54:00:00:00:01" }] }), "`bridges`"),
    ] {
        let spec = with(json!({ "uuid": ID, "accelerator": "tcg", "memory_padding_kib": 8 }), uses);
        let body = json!({ "id": ID, "spec": spec, "definition": spec }).to_string();
        let answer = agent.say(Who::Source, "POST", "/v1/incoming", &body).await;
        assert_eq!(answer.problem().kind, ProblemKind::Refused, "{spec}: {answer:?}");
        assert!(answer.problem().message.contains(says), "{spec} should say {says}: {answer:?}");
        let nothing = says.contains("there is no");
        let answer = agent.say(Who::Root, "POST", "/v1/vms", &json!({ "spec": spec }).to_string()).await;
        assert_eq!(answer.status, if nothing { 200 } else { 422 }, "{spec}: {answer:?}");
        if nothing {
            let answer = agent.say(Who::Root, "POST", "/v1/vms/web/start", "").await;
            assert!(answer.status == 422 && answer.problem().message.contains(says), "{answer:?}");
            assert_eq!(agent.say(Who::Root, "DELETE", "/v1/vms/web", "").await.status, 200);
        }
    }
    assert_eq!(agent.journal().incoming_state(ID).unwrap(), None, "nothing was begun");
    assert_eq!(accessed(&outside), seen, "it was read");
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_may_not_be_used_is_not_told_of_either() {
    let Some(agent) = TestAgent::start().await else { return };
    let disks = agent.disks();
    std::fs::write(disks.join("disk"), "disk").unwrap();
    let named = disks.join("disk").display().to_string();
    let own = disks.with_file_name("state").join("journal.sqlite").display().to_string();
    let paths = ["/etc/shadow", "/etc/nothing", own.as_str(), named.as_str()];
    let spec_of = |path: &&str| {
        let disk = json!([{ "path": path, "format": "raw" }]);
        with(json!({ "uuid": ID, "accelerator": "tcg", "memory_padding_kib": 8 }), json!({ "disk": disk }))
    };
    let specs: Vec<Value> = paths.iter().map(spec_of).collect();
    let answer =
        agent.say(Who::Source, "POST", "/v1/check/vms", &json!({ "specs": specs }).to_string()).await;
    let fits: Vec<Value> = serde_json::from_str(&answer.body).unwrap();
    let nothing = json!([{ "index": 0, "why": "outside" }]);
    for fit in &fits[..3] {
        assert_eq!((&fit["files"], &fit["files_not_allowed"]), (&json!(["missing"]), &nothing), "{fit}");
    }
    assert_eq!(
        (&fits[3]["files"][0]["present"]["size_bytes"], &fits[3]["files_not_allowed"]),
        (&json!(4), &json!([]))
    );
    agent.stop().await;
}
