//! A host with a valid certificate that tries to make another host forget its records.

use std::thread::{self, JoinHandle};

use drainpipe_agent::peers::client::ApiClient;
use drainpipe_engine::problem::Problem;
use drainpipe_identity::Identity;
use serde_json::{Value, json};

use super::random::Random;
use crate::support::TestLab;

/// Together with those of earlier runs in the same lab, more than the settled records that a journal keeps.
const REQUESTS: usize = 2_500;

/// Requests of one host to another, one after the other.
pub(super) struct Flood(JoinHandle<Result<(), String>>);

impl Flood {
    /// Begins to send requests from one host to another.
    pub(super) fn begin(lab: &TestLab, from: &str, to: &str) -> Self {
        let pki = lab.directory(from).join("pki");
        let identity =
            Identity::load(&pki.join("host.pem"), &pki.join("host.key"), &pki.join("ca.pem")).unwrap();
        let (address, lab) = (lab.agent_address(to), lab.lab());
        let (from, to) = (from.to_owned(), to.to_owned());
        Self(thread::spawn(move || {
            let ran = lab.run_in(&from, || {
                let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
                let client = ApiClient::over_tls(&to, address, &identity).unwrap();
                runtime.block_on(ask(&client))
            });
            ran.map_err(|error| error.to_string())?.map_err(|problem| problem.to_string())
        }))
    }

    /// Waits for the end of the flood, and returns what went wrong.
    pub(super) fn end(self) -> Option<String> {
        self.0.join().expect("it does not panic").err()
    }
}

/// Has migrations discarded that never existed, and one permitted, which makes the target tidy up its journal.
async fn ask(client: &ApiClient) -> Result<(), Problem> {
    let mut random = Random(super::monitor::now_us());
    for _ in 0..REQUESTS {
        // The answer does not matter: the migration is unknown, or will not run.
        let _ = client.delete::<Value>(&format!("/v1/incoming/{}", id(&mut random))).await;
    }
    let id = id(&mut random);
    let permit: Value = client.post("/v1/incoming", &unknown_vm(&id)).await?;
    let _ = client.delete::<Value>(&format!("/v1/incoming/{id}")).await;
    if permit == "granted" { Ok(()) } else { Err(Problem::failed(permit)) }
}

fn id(random: &mut Random) -> String {
    let [high, low] = [random.next(), random.next()];
    let hex = format!("{high:016x}{low:016x}");
    format!("{}-{}-4{}-8{}-{}", &hex[..8], &hex[8..12], &hex[13..16], &hex[17..20], &hex[20..])
}

/// A VM that only this host knows.
fn unknown_vm(id: &str) -> Value {
    let definition = json!({ "name": "unknown", "memory_mib": 64, "vcpus": 1, "machine": "pc-q35-7.2" });
    let mut spec = definition.clone();
    for (field, value) in
        [("uuid", json!(id)), ("accelerator", json!("tcg")), ("memory_padding_kib", json!(8))]
    {
        spec[field] = value;
    }
    json!({ "id": id, "definition": definition, "spec": spec })
}
