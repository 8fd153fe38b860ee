//! A check led from here: facts of both hosts, tests of each path from both ends, findings.

use drainpipe_engine::check::facts::CheckFacts;
use drainpipe_engine::check::path_report::PathReport;
use drainpipe_engine::check::sizes::{Arrived, first_sizes, next_sizes};
use drainpipe_engine::check::trial::{PacketTrial, PathTrial};
use drainpipe_engine::check::{CheckReport, NotReached, Pair, check, paths_to_try, unreachable};
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::paths::path::Path;
use drainpipe_engine::problem::{Problem, ProblemKind};
use futures_util::future::join_all;
use tokio::net::UdpSocket;
use tracing::debug;
use uuid::Uuid;

use super::packets::{COPIES, PacketEnd};
use super::session::{ROUNDS_MAX, Round, RoundResult, SessionRequest, SessionView, arrived_at, send_all};
use super::{Checks, facts, vms, way_back};
use crate::paths::discovery::discover;
use crate::paths::link_socket::on_link;
use crate::paths::path_watch;
use crate::paths::probe::{self, Load, ProbePort};
use crate::peers::client::{ApiClient, in_plain_words};
use crate::peers::release::NoAnswer;
use crate::store::config::DEFAULT_PORT;

/// Checks everything between this host and `target`, for one running VM or for all.
pub(crate) async fn run(checks: &Checks, target: &str, vm: Option<&str>) -> Result<CheckReport, Problem> {
    checks.host.check_not_stopping()?;
    let source = checks.host.name();
    if source == target {
        return Err(Problem::bad_input(format!("{target} cannot be checked against itself: name two hosts")));
    }
    let peer = checks.peers.get(target).ok_or_else(|| {
        Problem::not_found(format!("{source} knows no host {target}; `drainpipe hosts` lists them"))
    })?;
    let running = match vm {
        Some(name) => vec![checks.vms.get_running(name)?],
        None => checks.vms.all_running(),
    };
    let _slot = checks.begin()?;
    let report =
        |findings, paths| CheckReport { source: source.into(), target: target.into(), findings, paths };
    let (target_facts, clock) = match facts::ask(checks, &peer, target).await {
        Ok(answer) => answer,
        Err(NoAnswer::TooFarApart(apart)) => return Ok(report(vec![apart.finding()], vec![])),
        Err(NoAnswer::Problem(problem)) if problem.kind == ProblemKind::Unreachable => {
            let reason =
                NotReached { is_for_certificates: problem.is_for_certificates, why: problem.message };
            let finding = unreachable(source, target, agent_port(checks, target), &reason);
            return Ok(report(vec![finding], vec![]));
        }
        Err(NoAnswer::Problem(problem)) => {
            return Err(problem.context(format!("asking {target} what to check")));
        }
    };
    let source_facts = facts::read(checks).await?;
    let vms = vms::ask(checks, &peer, target, &running).await?;
    let trials = try_paths(checks, &peer, &source_facts, &target_facts);
    let (trials, way_back) = tokio::join!(trials, way_back::ask(checks, &peer, target));
    let trials = trials?;
    let paths: Vec<Path> = trials.iter().map(|trial| trial.path.clone()).collect();
    let pair = Pair {
        source: &source_facts,
        target: &target_facts,
        paths: &paths,
        trials: Some(&trials),
        vms: &vms,
        multichannel: trials.len() > 1,
        may_use_all: true,
        clock,
    };
    let mut findings = check(pair);
    findings.extend(way_back);
    findings.sort_by_key(|finding| finding.severity);
    let reports = trials.into_iter().map(|trial| PathReport::of(trial, &source_facts, &target_facts));
    Ok(report(findings, reports.collect()))
}

/// Where a peer's agent listens.
fn agent_port(checks: &Checks, peer: &str) -> u16 {
    let peer = checks.host.peers().into_iter().find(|known| known.name == peer);
    peer.map_or(DEFAULT_PORT, |peer| peer.address.port())
}

async fn try_paths(
    checks: &Checks,
    peer: &ApiClient,
    source: &CheckFacts,
    target: &CheckFacts,
) -> Result<Vec<PathTrial>, Problem> {
    let reaches = discover(&checks.host, peer, [&source.host, &target.host], RequestedOption::Auto).await;
    let paths = paths_to_try(source, target, &reaches);
    if paths.is_empty() {
        return Ok(vec![]);
    }
    let token = Uuid::new_v4();
    let sockets: Vec<Option<UdpSocket>> = join_all(paths.iter().map(|path| bind(checks, path))).await;
    let own_ports = sockets.iter().map(|socket| port_of(socket.as_ref())).collect();
    let view = begin_session(peer, target.name(), token, &paths, own_ports).await?;
    let ends = ends(&paths, sockets, &view.datagrams, token);
    let directions = Directions::new(&paths, source, target);
    let round_trips = join_all(ends.iter().map(|end| round_trip_ms(end.as_ref())));
    // How large packets may be is tried for itself.
    let connections = probe::try_paths(&checks.host.network, &paths, &view.connections, Load::Small);
    let (connections, round_trips) = tokio::join!(connections, round_trips);
    let sized = directions.play(peer, token, &ends).await;
    end_session(peer, token).await;
    let packets = sized?;
    let results = paths.into_iter().zip(connections).zip(round_trips).zip(packets);
    Ok(results
        .map(|(((path, connection), round_trip_ms), [forward, backward])| PathTrial {
            path,
            tcp_round_trip: connection.as_ref().ok().copied().flatten(),
            connection_error: connection.err().map(|why| in_plain_words(&why)),
            forward,
            backward,
            round_trip_ms,
        })
        .collect())
}

/// Has the host `target` open ports on each path. `ports` are those of this host for datagrams, 0 for none.
pub(super) async fn begin_session(
    peer: &ApiClient,
    target: &str,
    token: Uuid,
    paths: &[Path],
    ports: Vec<u16>,
) -> Result<SessionView, Problem> {
    let request = SessionRequest { token, paths: paths.iter().map(Path::reversed).collect(), ports };
    let view: SessionView = peer.post("/v1/check/sessions", &request).await?;
    if [view.datagrams.len(), view.connections.ports.len()] != [paths.len(); 2] {
        return Err(Problem::refused(format!("{target} has opened other ports than requested")));
    }
    Ok(view)
}

/// Has the other host close its ports.
pub(super) async fn end_session(peer: &ApiClient, token: Uuid) {
    if let Err(problem) = peer.delete::<()>(&format!("/v1/check/sessions/{token}")).await {
        debug!(%problem, "the other host's part of the check will end by itself");
    }
}

/// A path without a socket is left to the trial by TCP, whose failure says why.
async fn bind(checks: &Checks, path: &Path) -> Option<UdpSocket> {
    let bound = path_watch::bind(&checks.host, path).await;
    bound.inspect_err(|problem| debug!(%problem, "a path cannot be tested with datagrams")).ok()
}

fn port_of(socket: Option<&UdpSocket>) -> u16 {
    socket.and_then(|socket| socket.local_addr().ok()).map_or(0, |address| address.port())
}

fn ends(
    paths: &[Path],
    sockets: Vec<Option<UdpSocket>>,
    ports: &[ProbePort],
    token: Uuid,
) -> Vec<Option<PacketEnd>> {
    let each = paths.iter().zip(sockets).zip(ports);
    each.map(|((path, socket), port)| match port {
        ProbePort::Open(port) => {
            let peer = on_link(&path.link, path.peer_address, *port).ok()?;
            PacketEnd::begin(socket?, peer, token).ok()
        }
        ProbePort::Refused(_) => None,
    })
    .collect()
}

async fn round_trip_ms(end: Option<&PacketEnd>) -> Option<f64> {
    let round_trip = end?.round_trip().await?;
    Some(round_trip.as_secs_f64() * 1_000.0)
}

/// One direction of one path: what was sent, and what arrived.
#[derive(Debug, Clone)]
struct Direction {
    mtu_bytes: u16,
    sent: Vec<u16>,
    arrived: Arrived,
}

impl Direction {
    fn new(mtu_bytes: u32) -> Self {
        let mtu_bytes = u16::try_from(mtu_bytes).unwrap_or(u16::MAX);
        Self { mtu_bytes, sent: vec![], arrived: Arrived::new() }
    }

    fn next(&mut self) -> Vec<u16> {
        let sizes = if self.sent.is_empty() {
            first_sizes(self.mtu_bytes)
        } else {
            next_sizes(self.mtu_bytes, &self.sent, &self.arrived)
        };
        self.sent.extend(&sizes);
        sizes
    }

    fn sum_up(&self) -> PacketTrial {
        PacketTrial::sum_up(&self.sent, COPIES, &self.arrived)
    }
}

/// Both directions of each path.
struct Directions {
    forward: Vec<Direction>,
    backward: Vec<Direction>,
}

impl Directions {
    fn new(paths: &[Path], source: &CheckFacts, target: &CheckFacts) -> Self {
        let mtu = |facts: &CheckFacts, name: &str| facts.host.link(name).map_or(0, |link| link.mtu);
        let forward = paths.iter().map(|path| Direction::new(mtu(source, &path.link)));
        let backward = paths.iter().map(|path| Direction::new(mtu(target, &path.peer_link)));
        Self { forward: forward.collect(), backward: backward.collect() }
    }

    /// Sends and counts until the largest size that passes is known of each.
    async fn play(
        mut self,
        peer: &ApiClient,
        token: Uuid,
        ends: &[Option<PacketEnd>],
    ) -> Result<Vec<[PacketTrial; 2]>, Problem> {
        for _ in 0..ROUNDS_MAX {
            let forward: Vec<Vec<u16>> = self.forward.iter_mut().map(Direction::next).collect();
            let backward: Vec<Vec<u16>> = self.backward.iter_mut().map(Direction::next).collect();
            if forward.iter().chain(&backward).all(Vec::is_empty) {
                break;
            }
            send_all(ends, &forward).await;
            // The other host waits for stragglers before it answers, so there are none here either.
            let path = format!("/v1/check/sessions/{token}/rounds");
            let result: RoundResult = peer.post(&path, &Round { sizes: backward }).await?;
            take(&mut self.forward, result.arrived);
            take(&mut self.backward, arrived_at(ends));
        }
        let both = self.forward.iter().zip(&self.backward);
        Ok(both.map(|(forward, backward)| [forward.sum_up(), backward.sum_up()]).collect())
    }
}

/// Only what was sent can have arrived, whatever the other host claims.
fn take(directions: &mut [Direction], arrived: Vec<Arrived>) {
    for (direction, mut arrived) in directions.iter_mut().zip(arrived) {
        arrived.retain(|size, _| direction.sent.contains(size));
        direction.arrived = arrived;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_did_not_leave_here_cannot_have_arrived_there() {
        let mut directions = [Direction::new(1500)];
        let sent = directions[0].next();
        assert_eq!(sent.last(), Some(&1500));
        take(&mut directions, vec![Arrived::from([(128, 3), (1400, 900), (9000, 3)]), Arrived::new()]);
        assert_eq!(directions[0].arrived, Arrived::from([(128, 3), (1400, 900)]));
        let summed_up = directions[0].sum_up();
        assert_eq!((summed_up.arrived_bytes_max, summed_up.arrived), (Some(1400), 2 * COPIES));
    }
}
