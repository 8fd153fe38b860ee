//! Step 5: a hypervisor that should listen.

use std::net::SocketAddr;

use drainpipe_hypervisor::Address;
use drainpipe_hypervisor::fake::{Act, Fault};
use serde_json::json;

use super::*;
use drainpipe_api_types::ConnectionRequest;

pub(super) fn over_loopback() -> ConnectionRequest {
    let path =
        json!({ "link": "lo", "address": "127.0.0.1", "peer_link": "lo", "peer_address": "127.0.0.1" });
    let plan = json!({ "requested_option": "tcp", "option": "tcp", "spread": "in_turn", "paths": [path] });
    serde_json::from_value(json!({ "plan": plan })).unwrap()
}

#[test]
fn where_somebody_has_a_port_the_next_one_is_tried() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_come(&host, &life);
    vm.fails_once(Act::Listen, Fault::PortTaken);
    let endpoint = life.block_on(connect(&life.parts.incoming, ID, over_loopback())).unwrap();
    let listens_at = SocketAddr::new(endpoint.address, endpoint.port);
    assert_eq!(vm.listens_at(), Some(Address::Tcp(listens_at)));
    assert_eq!(vm.acts(), [Act::Listen; 2]);
    life.block_on(discard(&life.parts.incoming, ID)).unwrap();
}

#[test]
fn a_hypervisor_that_refuses_to_listen_is_not_asked_for_every_port() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_come(&host, &life);
    vm.fails(Act::Listen, Fault::Refused);
    let refused = life.block_on(connect(&life.parts.incoming, ID, over_loopback())).unwrap_err();
    assert!(refused.message.contains("here cannot listen on 127.0.0.1"), "{refused}");
    assert_eq!(vm.acts(), [Act::Listen]);
    life.block_on(discard(&life.parts.incoming, ID)).unwrap();
}

#[test]
fn nothing_listens_for_one_that_was_given_up() {
    let host = TestHost::new();
    let life = host.start();
    let vm = let_come(&host, &life);
    life.block_on(discard(&life.parts.incoming, ID)).unwrap();
    life.block_on(connect(&life.parts.incoming, ID, over_loopback())).unwrap_err();
    assert_eq!(vm.acts(), [Act::DestroyUnrun]);
}
