//! The target's side on a fake hypervisor, with a journal of its own.

mod arrived;
mod connect;
mod domains;
mod kept;
mod order;
mod post_copy;
mod silence;

use std::path::Path;
use std::time::Duration;

use axum::routing::get;
use axum::{Json, Router};
use drainpipe_engine::migration::target::silence::GIVE_UP_AFTER_MS;
use drainpipe_engine::migration::target::{IncomingState, IncomingView, Memory, Received};
use drainpipe_hypervisor::fake::FakeVm;
use drainpipe_hypervisor::{MigrationStatus, Vm};

use super::*;
use crate::test_host::{Life, TestHost, definition};
use drainpipe_api_types::{HandOverView, IncomingRequest};

/// The migration that brings a VM.
const ID: &str = "11111111-1111-4111-8111-111111111111";

/// Steps 2 to 4: the VM may come, and waits for its state.
fn let_come(host: &TestHost, life: &Life) -> Arc<FakeVm> {
    let_come_as(definition("web"), host, life)
}

fn let_come_as(definition: VmSpec, host: &TestHost, life: &Life) -> Arc<FakeVm> {
    let incoming = &life.parts.incoming;
    let request = IncomingRequest {
        id: ID.into(),
        spec: definition.resolve(life.parts.vms.facts()).unwrap(),
        definition,
        may_wait: false,
        cores_taken: None,
        disks: vec![],
        release: None,
    };
    life.block_on(async {
        permit(incoming, "source", request).await.unwrap();
        build_incoming_vm(incoming, ID).await.unwrap();
    });
    host.vm("web")
}

/// What the journal says about the VM.
fn state(life: &Life) -> Option<IncomingState> {
    life.parts.journal.incoming_state(ID).unwrap().map(|(_, state)| state)
}

/// How much of the VM has arrived by now.
fn received(life: &Life) -> Result<IncomingView, Problem> {
    life.block_on(wait_received(&life.parts.incoming, ID, false, Duration::ZERO))
}

/// A source that says this about each hand-over.
fn says_of_hand_over(said: HandOverView) -> Router {
    Router::new().route("/v1/handovers/{id}", get(async move || Json(said)))
}

fn coming() -> (IncomingVms, Arc<IncomingVm>) {
    let spec = "name = \"web\"\nmemory_mib = 64\nvcpus = 1\nmachine = \"pc-q35-7.2\"\n";
    let definition = VmSpec::from_toml(spec, Path::new("web.toml")).unwrap();
    let entry = Arc::new(IncomingVm::new("1".into(), "a".into(), definition));
    let incoming = IncomingVms::default();
    lock(&incoming.by_id).insert(entry.id.clone(), Arc::clone(&entry));
    (incoming, entry)
}

#[test]
fn one_that_has_arrived_receives_no_more_though_it_is_not_known_whose_it_is() {
    let (incoming, entry) = coming();
    assert!(incoming.are_receiving());
    entry.memory().note(Received::Whole);
    assert!(!incoming.are_receiving());
    assert_eq!(incoming.definitions().len(), 1);
}

#[test]
fn nothing_comes_from_a_source_that_is_gone() {
    let (incoming, entry) = coming();
    be_silent(&entry);
    assert!(!incoming.are_receiving());
}

#[test]
fn what_another_host_says_is_no_sign_of_life_of_the_source() {
    let (incoming, entry) = coming();
    be_silent(&entry);
    incoming.heard("1", "c");
    assert!(!incoming.are_receiving());
    incoming.heard("1", "a");
    assert!(incoming.are_receiving());
}

/// Makes its source look silent for long.
fn be_silent(entry: &IncomingVm) {
    *entry.memory() = Memory::new(-GIVE_UP_AFTER_MS);
}
