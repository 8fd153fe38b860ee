//! Requests and answers of other hosts over the API.

use drainpipe_engine::check::facts::CheckFacts;
use drainpipe_engine::host::facts::{MemoryNeeds, MigrationLink};
use drainpipe_engine::paths::path::Path;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::VmSpec;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use uuid::Uuid;

use super::handlers::between_agents::check_paths;
use crate::check::{Round, RoundResult, SessionRequest, SessionView, VmsRequest, WayBack};
use crate::incoming::check_described;
use crate::paths::discovery::{DiscoveryPorts, DiscoveryRequest};
use crate::paths::probe::{ProbePorts, ProbeRequest};
use crate::transfer::transport::{connections, transport};
use crate::vms::needs;
use drainpipe_api_types::fleet_list::FleetList;
use drainpipe_api_types::{
    BandwidthShare, BandwidthView, CheckRequest, ConnectionRequest, DrainRequest, DrainView, Endpoint,
    FleetNews, HandOverView, HostView, IncomingPermit, IncomingRequest, IncomingView, JoinRequest,
    MigrateRequest, MigrationView, ReclaimRequest, RenewalRequest, TargetUse, TrackedRequest, TrackedTaken,
    VmList, WatchEnd, WatchRequest,
};

/// What a message of a few kilobytes takes, in all the forms that it has.
pub const MESSAGES_HOLD_BYTES: usize = 4 << 20;

/// Whatever one agent says to another, or to who lets it in.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Message {
    Incoming(Box<IncomingRequest>),
    Connection(Box<ConnectionRequest>),
    Watch(WatchRequest),
    Probe(ProbeRequest),
    Discovery(DiscoveryRequest),
    Session(SessionRequest),
    Round(Round),
    Vms(VmsRequest),
    Migrate(MigrateRequest),
    Check(CheckRequest),
    Drain(DrainRequest),
    Reclaim(ReclaimRequest),
    Join(JoinRequest),
    Fleet(FleetNews),
    List(FleetList),
    Renewal(RenewalRequest),
    Tracked(TrackedRequest),
    Answer(Box<Answer>),
}

#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
enum Answer {
    Host(HostView),
    CheckFacts(CheckFacts),
    Vms(VmList),
    Permit(IncomingPermit),
    ProbePorts(ProbePorts),
    DiscoveryPorts(DiscoveryPorts),
    Session(SessionView),
    RoundResult(RoundResult),
    WayBack(WayBack),
    Endpoint(Endpoint),
    WatchEnd(WatchEnd),
    Incoming(IncomingView),
    HandOver(HandOverView),
    TargetUse(TargetUse),
    TrackedTaken(TrackedTaken),
    Share(BandwidthShare),
    Bandwidth(BandwidthView),
    Migration(Box<MigrationView>),
    Drain(Box<DrainView>),
    Problem(Problem),
}

/// The messages from one agent to another, as JSON.
///
/// Holds: what is understood is passed on as it was understood. A VM that may come is one that this host can keep,
/// needs no more memory than it was said to need, and uses what it was said to use. Paths that are taken go over this host's links only.
pub fn messages(data: &[u8]) {
    let Ok(message) = serde_json::from_slice::<Message>(data) else { return };
    let said = serde_json::to_value(&message).expect("a message has a form in JSON");
    let again: Message = serde_json::from_value(said.clone()).expect("our own JSON");
    assert_eq!(serde_json::to_value(&again).expect("a message has a form in JSON"), said);
    match message {
        Message::Incoming(request) => check_incoming(&request),
        Message::Connection(request) => {
            check_over_own_links(&request.plan.paths);
            transport(&request.plan, None);
            assert!(connections(&request.plan) >= 1);
        }
        Message::Watch(WatchRequest { paths, .. })
        | Message::Probe(ProbeRequest { paths })
        | Message::Session(SessionRequest { paths, .. }) => check_over_own_links(&paths),
        // Where there is no authority, nobody signs for it.
        Message::Fleet(FleetNews { list: Some(list), .. }) => assert!(list.verified(&[]).is_err()),
        Message::Tracked(TrackedRequest { connections, .. }) => {
            for believed in connections.iter().filter_map(|connection| connection.believable()) {
                assert_eq!(believed.believable(), Some(believed));
            }
        }
        _ => {}
    }
}

/// Whether it is understood.
#[cfg(test)]
pub(crate) fn is_message(data: &[u8]) -> bool {
    serde_json::from_slice::<Message>(data).is_ok()
}

fn check_incoming(request: &IncomingRequest) {
    let IncomingRequest { id, spec, definition, .. } = request;
    assert_eq!(id.parse().as_ref().map(Uuid::to_string), Ok(id.clone()));
    if check_described(request).is_err() {
        return;
    }
    assert_eq!(definition.validate(), Ok(()));
    let MemoryNeeds { bytes, huge_pages } = needs(definition);
    let in_huge_pages = huge_pages.map_or(0, |pages| pages.count * (pages.size_mib << 20));
    assert!(bytes + in_huge_pages >= spec.memory_kib() << 10);
    let uses =
        |vm: &VmSpec| (vm.disks.clone(), [vm.kernel.clone(), vm.initramfs.clone()], vm.machine.clone());
    assert_eq!(uses(spec.spec()), uses(definition));
    let bridges = |vm: &VmSpec| vm.nics.iter().map(|nic| nic.bridge.clone()).collect::<Vec<_>>();
    assert_eq!(bridges(spec.spec()), bridges(definition));
}

fn check_over_own_links(paths: &[Path]) {
    let links = own_links();
    if check_paths(&links, paths).is_err() {
        return;
    }
    for path in paths {
        let link = links.iter().find(|link| link.name == path.link).expect("it goes over a link of ours");
        assert!(link.addresses.iter().any(|net| net.addr() == path.address));
    }
    assert!(paths.len() <= links.len());
}

fn own_links() -> [MigrationLink; 2] {
    [1, 2].map(|number| MigrationLink {
        name: format!("e{number}"),
        addresses: [format!("10.0.{number}.2/24"), format!("fe80::{number}/64")]
            .map(|net| net.parse().expect("an address with its prefix"))
            .to_vec(),
        speed_mbps: Some(1_000),
        mtu: 1500,
        usable: true,
        is_trusted: false,
        card: None,
        rdma: None,
    })
}

/// One of each kind that has something in it.
pub fn messages_seeds() -> Vec<Vec<u8>> {
    let id = "33333333-3333-4333-8333-333333333333";
    let path = |number: u8| {
        json!({
            "link": format!("e{number}"), "address": format!("10.0.{number}.2"), "peer_link": "e9",
            "peer_address": format!("10.0.{number}.1"), "speed_mbps": 1000, "is_spare": false,
        })
    };
    let paths = [path(1), path(2)];
    let watch = json!({"token": id, "paths": [{"port": 49152, "was_heard": true}, null]});
    let definition = json!({
        "name": "web", "memory_mib": 64, "vcpus": 1, "machine": "pc-q35-7.2", "accelerator": "tcg",
        "disk": [{"path": "/disks/web", "format": "raw"}], "nic": [{"bridge": "br0", "mac": "52:54:00:00:00:01"}],
        "placement": {"apart": ["db"]}, "uuid": id,
    });
    let mut spec = definition.clone();
    spec["memory_padding_kib"] = json!(8);
    spec["placement"] = json!({});
    let plan = json!({
        "requested_option": "auto", "option": "compression", "reason": "two paths", "paths": paths, "spread": "routed",
        "multifd_channels": 16, "is_compressed": true, "encryption": {"is_encrypted": true, "why": "asked for"},
    });
    let ports = json!({"token": id, "ports": [{"open": 49152}, {"refused": "taken"}]});
    let requests = [
        json!({"incoming": {"id": id, "spec": spec, "definition": definition, "may_wait": true, "cores_taken": 0.5}}),
        json!({"connection": {"plan": plan, "migration_address": "10.9.0.1", "watch": watch}}),
        json!({"watch": {"paths": paths, "migration_address": "fd00::1", "watch": watch}}),
        json!({"probe": {"paths": paths}}),
        json!({"discovery": {"links": ["e1", "e2"]}}),
        json!({"session": {"token": id, "paths": paths, "ports": [49152, 0]}}),
        json!({"round": {"sizes": [[128, 1500], []]}}),
        json!({"vms": {"specs": [spec]}}),
        json!({"migrate": {"vm": "web", "target": "b", "option": "multichannel", "deadline_s": 60}}),
        json!({"drain": {"to": ["b", "c"], "transfers": 2}}),
        json!({"join": {
            "secret": "9c".repeat(16), "name": "b", "address": "10.0.1.2:7420", "certificate_request": "-----BEGIN",
        }}),
        json!({"fleet": {"version": 2, "list": {"list": "{\"version\":2}", "signature": [48, 0]}}}),
        json!({"renewal": {"certificate_request": "-----BEGIN"}}),
        json!({"tracked": {"addresses": ["10.0.0.5", "2001:db8::5"], "connections": [
            {"source": "10.0.0.5:40000", "destination": "10.0.9.9:443", "transport": {"tcp": {
                "state": 3, "source": {"window_scale": 7, "flags": 11}, "destination": {"window_scale": 9, "flags": 3},
            }}, "is_answered": true, "is_assured": true, "timeout_s": 431_990, "mark": 7, "zone": 1},
            {"source": "[2001:db8::5]:5000", "destination": "[2001:db8::9]:53", "transport": "udp", "is_answered": false,
                "is_assured": false, "timeout_s": 30},
        ]}}),
    ];
    let vm = json!({
        "name": "web", "host": "b", "state": "running", "memory_mib": 64, "vcpus": 1, "migration": null,
        "placement": {"stays": "licence"}, "heartbeat": null, "control": null,
    });
    let answers = [
        json!({"vms": {"vms": [vm], "errors": []}}),
        json!({"permit": {"crowded": "others wait"}}),
        json!({"probe_ports": ports}),
        json!({"session": {"datagrams": [{"open": 49153}], "connections": ports}}),
        json!({"round_result": {"arrived": [{"128": 3}]}}),
        json!({"endpoint": {
            "address": "10.0.1.2", "port": 49152, "watch": watch, "relay_token": id, "relay_page_cache_mib": 64,
        }}),
        json!({"incoming": "ready"}),
        json!({"target_use": {"vmm_cpu_seconds": 1.5, "agent_cpu_seconds": 0.1}}),
        json!({"tracked_taken": {"taken": 2, "why": "b refused one"}}),
        json!({"problem": {"kind": "refused", "message": "no"}}),
    ];
    let answers = answers.map(|answer| json!({"answer": answer}));
    requests.iter().chain(&answers).map(|message: &Value| message.to_string().into_bytes()).collect()
}
