//! Each path for each caller: allowed, or refused as forbidden.

use std::collections::BTreeSet;

use jiff::Timestamp;
use serde_json::json;

use super::harness::{TestAgent, Who};
use crate::http::api::openapi;

const ALL: &[Who] = &Who::ALL;
const MANAGERS: &[Who] = &[Who::Root, Who::Operator];
const HOSTS: &[Who] = &[Who::Source, Who::Target, Who::Other];
const SOURCE: &[Who] = &[Who::Source];

/// A migration that the agent had sent to `target`, and one that it was sent by `source`.
const SENT: &str = "11111111-1111-4111-8111-111111111111";
const RECEIVED: &str = "22222222-2222-4222-8222-222222222222";

/// A check that `source` leads.
const CHECK: &str = "44444444-4444-4444-8444-444444444444";

fn spec() -> serde_json::Value {
    json!({ "name": "web", "memory_mib": 64, "vcpus": 1, "machine": "pc-q35-7.2" })
}

/// A VM that `source` sends.
fn incoming() -> String {
    let mut definition = spec();
    definition["uuid"] = json!(RECEIVED);
    json!({
        "id": RECEIVED,
        "definition": definition,
        "spec": { "uuid": RECEIVED, "accelerator": "tcg", "name": "web", "memory_mib": 64, "memory_padding_kib": 8, "vcpus": 1,
                  "machine": "pc-q35-7.2" },
    })
    .to_string()
}

/// An unencrypted connection.
fn connection() -> String {
    json!({
        "plan": {
            "requested_option": "tcp", "option": "tcp", "spread": "in_turn",
            "paths": [{ "link": "lo", "address": "127.0.0.1", "peer_link": "lo", "peer_address": "127.0.0.1" }],
        },
    })
    .to_string()
}

fn watch() -> String {
    json!({
        "paths": [], "migration_address": "10.99.0.1", "watch": { "token": CHECK, "paths": [] },
    })
    .to_string()
}

/// Method, path in the document, body, and who is allowed.
fn table() -> Vec<(&'static str, &'static str, String, &'static [Who])> {
    let none = String::new;
    let migrate = json!({ "vm": "web", "target": "target" }).to_string();
    let check = json!({ "target": "target" }).to_string();
    let session = json!({ "token": CHECK, "paths": [], "ports": [] }).to_string();
    vec![
        ("POST", "/v1/check", check, ALL),
        ("GET", "/v1/check/facts", none(), ALL),
        ("POST", "/v1/check/vms", json!({ "specs": [] }).to_string(), HOSTS),
        ("GET", "/v1/check/way-back", none(), HOSTS),
        ("POST", "/v1/check/sessions", session, HOSTS),
        // The owner of a check is known only while it is under way.
        ("POST", "/v1/check/sessions/{id}/rounds", json!({ "sizes": [] }).to_string(), HOSTS),
        ("DELETE", "/v1/check/sessions/{id}", none(), HOSTS),
        ("GET", "/v1/fixes", none(), ALL),
        ("POST", "/v1/fixes", json!({ "fixes": [] }).to_string(), MANAGERS),
        ("DELETE", "/v1/fixes", none(), MANAGERS),
        ("GET", "/v1/bandwidth", none(), ALL),
        ("POST", "/v1/bandwidth", json!({ "setting": "unlimited" }).to_string(), MANAGERS),
        ("GET", "/v1/drain", none(), ALL),
        ("POST", "/v1/drain", "{}".into(), MANAGERS),
        ("POST", "/v1/drain/plan", "{}".into(), ALL),
        ("POST", "/v1/drain/cancel", none(), MANAGERS),
        ("POST", "/v1/resume", "{}".into(), MANAGERS),
        ("POST", "/v1/discovery", json!({ "links": [] }).to_string(), HOSTS),
        ("GET", "/v1/fleet", none(), ALL),
        ("POST", "/v1/fleet/tokens", json!({ "life_s": 60 }).to_string(), MANAGERS),
        ("POST", "/v1/fleet/revocations", json!({ "name": "c" }).to_string(), MANAGERS),
        ("POST", "/v1/fleet/departure", "{}".into(), MANAGERS),
        ("POST", "/v1/fleet/list", json!({ "version": 0, "list": null }).to_string(), HOSTS),
        ("POST", "/v1/fleet/certificate", json!({ "certificate_request": "" }).to_string(), HOSTS),
        ("POST", "/v1/fleet/departures", none(), HOSTS),
        ("GET", "/v1/host", none(), ALL),
        ("GET", "/v1/hosts", none(), ALL),
        ("GET", "/v1/openapi.json", none(), ALL),
        ("GET", "/v1/journal", none(), ALL),
        ("POST", "/v1/journal/adoption", none(), MANAGERS),
        ("POST", "/v1/journal/marks", "{}".into(), HOSTS),
        ("GET", "/v1/holdings/{name}", none(), HOSTS),
        ("GET", "/v1/vms", none(), ALL),
        ("POST", "/v1/vms", json!({ "spec": spec() }).to_string(), MANAGERS),
        ("GET", "/v1/vms/{name}", none(), ALL),
        ("GET", "/v1/vms/{name}/definition", none(), ALL),
        ("DELETE", "/v1/vms/{name}", none(), MANAGERS),
        ("GET", "/v1/vms/{name}/disk-move", none(), ALL),
        ("POST", "/v1/vms/{name}/disk-move", json!({ "disk": "vda", "to": "/srv/x" }).to_string(), MANAGERS),
        ("POST", "/v1/vms/{name}/disk-move/cancel", none(), MANAGERS),
        ("POST", "/v1/vms/{name}/start", none(), MANAGERS),
        ("POST", "/v1/vms/{name}/stop", none(), MANAGERS),
        ("POST", "/v1/vms/{name}/reclaim", json!({ "lost": "target" }).to_string(), MANAGERS),
        ("GET", "/v1/migrations", none(), ALL),
        ("POST", "/v1/migrations", migrate.clone(), &[Who::Root, Who::Operator, Who::Target]),
        ("POST", "/v1/migrations/plan", migrate, ALL),
        ("GET", "/v1/migrations/{id}", none(), ALL),
        // Some callers may not do this, but only while there is something to cancel.
        ("POST", "/v1/migrations/{id}/cancel", none(), ALL),
        ("POST", "/v1/incoming", incoming(), HOSTS),
        ("GET", "/v1/incoming/{id}", none(), HOSTS),
        ("DELETE", "/v1/incoming/{id}", none(), SOURCE),
        ("POST", "/v1/incoming/{id}/memory", none(), SOURCE),
        ("POST", "/v1/incoming/{id}/skeleton", none(), SOURCE),
        ("POST", "/v1/incoming/{id}/probe", json!({ "paths": [] }).to_string(), SOURCE),
        ("POST", "/v1/incoming/{id}/connection", connection(), SOURCE),
        ("POST", "/v1/incoming/{id}/watch", watch(), SOURCE),
        ("GET", "/v1/incoming/{id}/bandwidth", none(), SOURCE),
        ("POST", "/v1/incoming/{id}/complete", "{}".into(), SOURCE),
        ("GET", "/v1/incoming/{id}/received", none(), SOURCE),
        (
            "POST",
            "/v1/incoming/{id}/tracked",
            json!({ "addresses": [], "connections": [] }).to_string(),
            SOURCE,
        ),
        ("POST", "/v1/incoming/{id}/run", none(), SOURCE),
        ("POST", "/v1/incoming/{id}/close-disks", none(), SOURCE),
        ("GET", "/v1/disks/left", none(), ALL),
        ("POST", "/v1/disks/left/remove", none(), MANAGERS),
        ("POST", "/v1/incoming/{id}/reconnection", connection(), SOURCE),
        ("POST", "/v1/incoming/{id}/end", none(), SOURCE),
        ("POST", "/v1/incoming/{id}/finish", none(), SOURCE),
        ("GET", "/v1/handovers/{id}", none(), &[Who::Target]),
    ]
}

#[test]
fn every_path_is_in_the_table_of_who_may() {
    let mut documented = BTreeSet::new();
    // `joining.rs` has the answers to clients without a certificate.
    for (path, item) in openapi::document().paths.paths.iter().filter(|(path, _)| *path != "/v1/join") {
        for (method, operation) in [("GET", &item.get), ("POST", &item.post), ("DELETE", &item.delete)] {
            if operation.is_some() {
                documented.insert((method, path.as_str()));
            }
        }
        assert!(item.put.is_none() && item.patch.is_none() && item.head.is_none(), "{path}");
    }
    let tested: BTreeSet<(&str, &str)> = table().iter().map(|(method, path, ..)| (*method, *path)).collect();
    assert_eq!(tested, documented);
}

#[tokio::test(flavor = "multi_thread")]
async fn everybody_may_what_they_may_and_nothing_else() {
    let Some(agent) = TestAgent::start_over_loopback().await else { return };
    let request = serde_json::from_value(json!({"vm": "gone", "target": "target"})).unwrap();
    agent.journal().begin_migration(SENT, &request, Timestamp::UNIX_EPOCH).unwrap();
    let known = serde_json::from_value(spec()).unwrap();
    agent.journal().begin_incoming(RECEIVED, "source", &known).unwrap();
    for (method, template, body, allowed) in table() {
        let id = if template.starts_with("/v1/handovers") { SENT } else { RECEIVED };
        let path = template.replace("{name}", "absent").replace("{id}", id);
        for who in Who::ALL {
            let answer = agent.say(who, method, &path, &body).await;
            let described = format!("{method} {path} by {who:?}: {answer:?}");
            assert_eq!(answer.status != 403, allowed.contains(&who), "{described}");
            assert!(answer.status == 200 || !answer.problem().message.is_empty(), "{described}");
            // The table's bodies and paths are valid, so a refusal is due to the caller.
            assert!(answer.status != 400, "{described}");
        }
    }
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn nobody_speaks_as_a_host_through_its_agent() {
    let Some(agent) = TestAgent::start().await else { return };
    for (method, path) in [
        ("POST", "/v1/incoming/22222222-2222-4222-8222-222222222222/run"),
        ("DELETE", "/v1/vms/..\\incoming\\22222222-2222-4222-8222-222222222222"),
        ("DELETE", "/v1/vms/..%5cincoming%5c22222222-2222-4222-8222-222222222222"),
        ("GET", "/v1/vms/%2e%2e"),
    ] {
        for who in Who::ALL {
            let answer = agent.say(who, method, &format!("{path}?host=target"), "").await;
            // 502 would mean that the request was passed on.
            assert!(matches!(answer.status, 400 | 403), "{method} {path} by {who:?}: {answer:?}");
            answer.problem();
        }
    }
    let on_its_way = agent.say(Who::Operator, "GET", "/v1/vms?host=target", "").await;
    assert_eq!(on_its_way.status, 502, "{on_its_way:?}");
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_source_gets_nothing_in_the_clear_from_a_host_that_requires_encryption() {
    let Some(agent) = TestAgent::start_over_loopback().await else { return };
    let permit = agent.say(Who::Source, "POST", "/v1/incoming", &incoming()).await;
    assert_eq!(permit.status, 200, "{permit:?}");
    for (what, body) in [("connection", connection()), ("watch", watch())] {
        let path = format!("/v1/incoming/{RECEIVED}/{what}");
        let refused = agent.say(Who::Source, "POST", &path, &body).await;
        assert_eq!(refused.status, 422, "{what}: {refused:?}");
        assert!(refused.problem().message.contains("requires encryption"), "{what}: {refused:?}");
    }
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_check_is_carried_on_by_the_host_that_began_it() {
    let Some(agent) = TestAgent::start().await else { return };
    let session = json!({ "token": CHECK, "paths": [], "ports": [] }).to_string();
    let begun = agent.say(Who::Source, "POST", "/v1/check/sessions", &session).await;
    assert_eq!(begun.status, 200, "{begun:?}");
    let again = agent.say(Who::Other, "POST", "/v1/check/sessions", &session).await;
    assert_eq!(again.status, 409, "{again:?}");
    let (path, rounds) =
        (format!("/v1/check/sessions/{CHECK}"), format!("/v1/check/sessions/{CHECK}/rounds"));
    for (who, status) in [(Who::Other, 403), (Who::Operator, 403), (Who::Source, 200)] {
        let played = agent.say(who, "POST", &rounds, "{\"sizes\": []}").await;
        assert_eq!(played.status, status, "{who:?}: {played:?}");
        let ended = agent.say(who, "DELETE", &path, "").await;
        assert_eq!(ended.status, status, "{who:?}: {ended:?}");
    }
    assert_eq!(agent.say(Who::Source, "DELETE", &path, "").await.status, 404);
    agent.stop().await;
}
