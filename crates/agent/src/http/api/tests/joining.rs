//! An agent's answers to a client without a certificate that wants one.

use std::sync::Arc;

use drainpipe_identity::{JOIN_PROTOCOL, JoinSecret, JoinToken, KeyRequest, join_config};
use rustls::ClientConfig;
use rustls::pki_types::ServerName;
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::harness::{Answer, TestAgent, Who, parse};
use drainpipe_api_types::TokenView;

async fn token(agent: &TestAgent) -> JoinToken {
    let opened = agent.say(Who::Root, "POST", "/v1/fleet/tokens", &json!({ "life_s": 60 }).to_string()).await;
    let view: TokenView = serde_json::from_str(&opened.body).unwrap();
    view.token.parse().unwrap()
}

/// Sends a request without a certificate; `None` if the agent does not listen to it.
async fn say(agent: &TestAgent, config: ClientConfig, request: &str) -> Option<Answer> {
    let stream = TcpStream::connect(agent.address()).await.unwrap();
    let here = ServerName::try_from("here").unwrap();
    let mut tls = TlsConnector::from(Arc::new(config)).connect(here, stream).await.ok()?;
    // Only now does a client hear that the server refuses it.
    tls.write_all(request.as_bytes()).await.ok()?;
    let mut answer = Vec::new();
    // It may be refused before all of it is read.
    let _cut_off = tls.read_to_end(&mut answer).await;
    (!answer.is_empty()).then(|| parse(&String::from_utf8(answer).unwrap()))
}

fn request(method: &str, path: &str, body: &str) -> String {
    let length = body.len();
    format!(
        "{method} {path} HTTP/1.1\r\nhost: here\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
    )
}

fn to_join(secret: &JoinSecret, name: &str) -> String {
    let asked = json!({
        "secret": secret.to_string(), "name": name, "address": "192.0.2.9:7420",
        "certificate_request": KeyRequest::new().unwrap().request_pem,
    });
    request("POST", "/v1/join", &asked.to_string())
}

#[tokio::test(flavor = "multi_thread")]
async fn who_has_no_certificate_reaches_nothing_but_the_way_in_and_that_only_while_it_is_open() {
    let Some(agent) = TestAgent::start_founded().await else { return };
    let secret = JoinSecret::random().unwrap();
    assert!(say(&agent, join_config(agent.authority()), &to_join(&secret, "b")).await.is_none());
    let open = token(&agent).await;
    let config = || join_config(open.authority);
    // The ordinary protocol still demands a certificate.
    let mut ordinary = config();
    for protocols in [vec![], vec![b"http/1.1".to_vec()], vec![b"drainpipe-join/2".to_vec()]] {
        ordinary.alpn_protocols = protocols;
        assert!(say(&agent, ordinary.clone(), &request("GET", "/v1/host", "")).await.is_none());
    }
    for (method, path) in
        [("GET", "/v1/host"), ("GET", "/v1/fleet"), ("POST", "/v1/fleet/tokens"), ("POST", "/v1/join/../vms")]
    {
        let answer = say(&agent, config(), &request(method, path, "")).await.unwrap();
        assert_eq!(answer.status, 404, "{path}: {answer:?}");
    }
    // No other connection offers joining.
    assert_eq!(agent.say(Who::Root, "POST", "/v1/join", "{}").await.status, 404);
    let wrong = say(&agent, config(), &to_join(&JoinSecret::random().unwrap(), "b")).await.unwrap();
    assert_eq!(wrong.status, 422, "{wrong:?}");
    for name in ["here", "source", "B", "../b"] {
        let refused = say(&agent, config(), &to_join(&open.secret, name)).await.unwrap();
        assert!((400..500).contains(&refused.status), "{name}: {refused:?}");
    }
    let joined = say(&agent, config(), &to_join(&open.secret, "b")).await.unwrap();
    assert_eq!(joined.status, 200, "{joined:?}");
    let answer: Value = serde_json::from_str(&joined.body).unwrap();
    assert!(!answer.to_string().contains("PRIVATE KEY"));
    let again = say(&agent, config(), &to_join(&open.secret, "c")).await.unwrap();
    assert_eq!(again.status, 422, "a token is good once: {again:?}");
    assert!(config().alpn_protocols == [JOIN_PROTOCOL]);
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn what_makes_no_sense_is_refused_and_uses_no_token_up() {
    let Some(agent) = TestAgent::start_founded().await else { return };
    let open = token(&agent).await;
    let config = || join_config(open.authority);
    let long = "x".repeat(64 << 10);
    let without_request = json!({
        "secret": open.secret.to_string(), "name": "b", "address": "192.0.2.9:7420", "certificate_request": "none",
    });
    for body in ["", "{}", "[]", "null", &long, &without_request.to_string()] {
        let answer = say(&agent, config(), &request("POST", "/v1/join", body)).await.unwrap();
        assert!((400..500).contains(&answer.status), "{answer:?}");
    }
    let joined = say(&agent, config(), &to_join(&open.secret, "b")).await.unwrap();
    assert_eq!(joined.status, 200, "{joined:?}");
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_used_token_brings_no_revoked_host_back() {
    let Some(agent) = TestAgent::start_founded().await else { return };
    let open = token(&agent).await;
    let config = || join_config(open.authority);
    let asked = to_join(&open.secret, "b");
    let renewed = |answer: Option<Answer>| answer.map(|answer| answer.status);
    assert_eq!(renewed(say(&agent, config(), &asked).await), Some(200));
    // The answer may have been lost.
    assert_eq!(renewed(say(&agent, config(), &asked).await), Some(200));
    let revocation = json!({ "name": "b", "is_operator": false }).to_string();
    let revoked = agent.say(Who::Root, "POST", "/v1/fleet/revocations", &revocation).await;
    assert_eq!(revoked.status, 200, "{revoked:?}");
    assert_eq!(renewed(say(&agent, config(), &asked).await), Some(422));
    agent.stop().await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_name_that_has_a_certificate_by_hand_is_no_joiners() {
    let Some(agent) = TestAgent::start_founded().await else { return };
    let open = token(&agent).await;
    let authority = agent.disks().with_file_name("state").join("authority");
    std::fs::create_dir_all(authority.join("hosts/b")).unwrap();
    let config = || join_config(open.authority);
    let refused = say(&agent, config(), &to_join(&open.secret, "b")).await.unwrap();
    assert_eq!(refused.status, 409, "{refused:?}");
    let nowhere = to_join(&open.secret, "c").replace("192.0.2.9:7420", "192.0.2.9:0000");
    let refused = say(&agent, config(), &nowhere).await.unwrap();
    assert_eq!(refused.status, 400, "{refused:?}");
    let joined = say(&agent, config(), &to_join(&open.secret, "c")).await.unwrap();
    assert_eq!(joined.status, 200, "{joined:?}");
    agent.stop().await;
}
