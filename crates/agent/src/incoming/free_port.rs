//! A listener on a free port of the migration range, on the link by which the source comes.

use std::future::ready;
use std::net::{IpAddr, TcpListener};

use drainpipe_api_types::ConnectionRequest;
use drainpipe_engine::problem::Problem;

use super::Incoming;
use crate::host::ports;
use crate::paths::link_socket::on_link;

pub(super) async fn bind_free_port(
    incoming: &Incoming,
    request: &ConnectionRequest,
    address: IpAddr,
) -> Result<(TcpListener, u16), Problem> {
    let link = &request.plan.paths.first().link;
    let own = incoming.host.name();
    let bind = |port| {
        let bound = on_link(link, address, port).and_then(TcpListener::bind);
        let bound = ports::unless_in_use(bound).map(|listener| Some((listener?, port)));
        ready(bound.map_err(|error| Problem::failed(format!("{own} cannot listen on {address}: {error}"))))
    };
    incoming.host.ports.take(bind).await
}
