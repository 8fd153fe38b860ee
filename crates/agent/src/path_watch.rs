//! Watches the paths of a migration in flight, and keeps this host's route to those that are good.
//!
//! Each host sends a datagram on each path every 50 ms, from a port of the migration range to one of
//! the other host's; [`drainpipe_engine::watch`] judges. Only the route changes: no connection is
//! reset, and the kernel sends what was lost by the new way.

use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::path::Path;
use drainpipe_engine::problem::Problem;
use drainpipe_engine::speed::{READ_EVERY_MS, SpeedWatch};
use drainpipe_engine::watch::{HELLO_EVERY_MS, Hello, PathNews, PathWatch};
use serde::{Deserialize, Serialize};
use socket2::{Domain, Protocol, Socket, Type};
use tokio::net::UdpSocket;
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tracing::{debug, info, warn};
use utoipa::ToSchema;
use uuid::Uuid;

use crate::agent::Agent;
use crate::multichannel;

/// Most datagrams read from one path between two hellos; a flood of them costs no more. More than a socket
/// holds by default, so that nothing old is left after the agent stood still.
const READ_MAX: usize = 1024;

/// How soon a route that could not be set is tried again, and one that is gone is noticed.
const ROUTE_EVERY_MS: f64 = 1_000.0;

/// Token, sequence, flags, loss.
const DATAGRAM_BYTES: usize = 26;

/// What an end needs to know of the other one.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
#[serde(deny_unknown_fields)]
pub struct WatchEnd {
    /// What each datagram of this migration carries.
    #[schema(value_type = String)]
    pub token: Uuid,
    /// For each path the UDP port.
    pub ports: Vec<u16>,
}

/// What happened to a path, and its name.
pub(crate) type News = (String, PathNews);

/// One end's sockets, a path each, before the other end's are known.
#[derive(Debug)]
pub(crate) struct WatchSockets {
    token: Uuid,
    sockets: Vec<UdpSocket>,
}

impl WatchSockets {
    /// Binds a socket for each path, to its link and its address there.
    pub(crate) fn bind(agent: &Agent, paths: &[Path], token: Uuid) -> Result<Self, Problem> {
        let sockets: Result<Vec<_>, _> = paths.iter().map(|path| bind_one(agent, path)).collect();
        Ok(Self { token, sockets: sockets? })
    }

    /// What the other end must know.
    pub(crate) fn end(&self) -> Result<WatchEnd, Problem> {
        let ports: io::Result<Vec<u16>> =
            self.sockets.iter().map(|socket| Ok(socket.local_addr()?.port())).collect();
        Ok(WatchEnd { token: self.token, ports: ports.map_err(Problem::failed)? })
    }
}

/// A socket on a path's own link, with a port of the migration range.
pub(crate) fn bind_one(agent: &Agent, path: &Path) -> Result<UdpSocket, Problem> {
    let failed = |error: io::Error| {
        Problem::failed(format!("cannot watch path {path} from {}: {error}", path.address))
    };
    for port in agent.incoming.ports_in_turn(agent) {
        match bind_to_link(&path.link, SocketAddr::new(path.address, port)) {
            Err(error) if error.kind() == io::ErrorKind::AddrInUse => {}
            bound => return bound.map_err(failed),
        }
    }
    Err(Problem::failed(format!(
        "all migration ports (UDP) of {} are taken: widen `migration_ports` in its agent.toml",
        agent.name()
    )))
}

/// To the link, lest a route over another link makes a dead path look good.
fn bind_to_link(link: &str, address: SocketAddr) -> io::Result<UdpSocket> {
    let socket = Socket::new(Domain::for_address(address), Type::DGRAM, Some(Protocol::UDP))?;
    socket.bind_device(Some(link.as_bytes()))?;
    socket.set_nonblocking(true)?;
    socket.bind(&address.into())?;
    UdpSocket::from_std(socket.into())
}

/// A watch under way; ends when dropped.
#[derive(Debug)]
pub(crate) struct PathWatcher {
    task: JoinHandle<()>,
}

impl PathWatcher {
    /// Begins to watch. `paths` as seen from here; `peer` is the other host's migration address.
    /// Turns are told to `news` as long as it has room.
    pub(crate) fn start(
        agent: &Arc<Agent>,
        migration: &str,
        own: WatchSockets,
        other: &WatchEnd,
        peer: IpAddr,
        paths: &[Path],
        news: Option<mpsc::Sender<News>>,
    ) -> Result<Self, Problem> {
        if other.token != own.token || other.ports.len() != own.sockets.len() {
            return Err(Problem::bad_input("the other host watches other paths"));
        }
        let watched = Watched {
            agent: Arc::clone(agent),
            migration: migration.to_owned(),
            token: own.token,
            others: paths
                .iter()
                .zip(&other.ports)
                .map(|(path, port)| (path.peer_address, *port).into())
                .collect(),
            sockets: own.sockets,
            peer,
            paths: paths.to_vec(),
            news,
        };
        Ok(Self { task: tokio::spawn(watched.run()) })
    }

    /// Ends it; the route is not touched by it any more.
    pub(crate) async fn stop(mut self) {
        self.task.abort();
        // Ended by that, or at its end before.
        drop((&mut self.task).await);
    }
}

impl Drop for PathWatcher {
    fn drop(&mut self) {
        self.task.abort();
    }
}

struct Watched {
    agent: Arc<Agent>,
    migration: String,
    token: Uuid,
    sockets: Vec<UdpSocket>,
    others: Vec<SocketAddr>,
    peer: IpAddr,
    paths: Vec<Path>,
    news: Option<mpsc::Sender<News>>,
}

impl Watched {
    async fn run(mut self) {
        let began = Instant::now();
        let now_ms = || began.elapsed().as_secs_f64() * 1000.0;
        let mut watch = PathWatch::new(self.paths.len(), now_ms());
        let mut speeds = SpeedWatch::new(self.paths.iter().map(|path| path.speed_mbps).collect());
        let mut next_reading_ms = 0.0;
        let (mut next_attempt_ms, mut next_look_ms) = (0.0, ROUTE_EVERY_MS);
        let mut routed = Some(watch.in_use());
        let mut ticks = interval(Duration::from_secs_f64(HELLO_EVERY_MS / 1000.0));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            self.listen(&mut watch, now_ms());
            for turn in watch.tick(now_ms()) {
                self.tell(turn.path, turn.fault.map_or(PathNews::Back, PathNews::Out));
            }
            for path in watch.newly_unwatched(now_ms()) {
                self.tell(path, PathNews::Unwatched);
            }
            self.say(&mut watch, now_ms());
            if self.sends() && now_ms() >= next_reading_ms {
                next_reading_ms = now_ms() + READ_EVERY_MS;
                if self.follow_speeds(&mut speeds, &watch.in_use(), now_ms()).await {
                    routed = None;
                }
            }
            let wanted = watch.in_use();
            if routed.as_ref() == Some(&wanted) {
                if now_ms() >= next_look_ms {
                    next_look_ms = now_ms() + ROUTE_EVERY_MS;
                    self.restore_route(&wanted).await;
                }
            } else if now_ms() >= next_attempt_ms {
                if self.route_over(&wanted).await {
                    routed = Some(wanted);
                } else {
                    next_attempt_ms = now_ms() + ROUTE_EVERY_MS;
                }
            }
        }
    }

    /// Only the end that sends memory sees by it what the paths carry. It is the one that is listened to.
    fn sends(&self) -> bool {
        self.news.is_some()
    }

    /// True if a path is to be taken for faster or slower than before.
    async fn follow_speeds(&mut self, speeds: &mut SpeedWatch, in_use: &[bool], now_ms: f64) -> bool {
        let links: Vec<&str> = self.paths.iter().map(|path| path.link.as_str()).collect();
        let Ok(sent_bytes) = self.agent.network.sent_bytes(&links).await else { return false };
        let changed = speeds.record(now_ms, &sent_bytes, in_use);
        for &(path, mbps) in &changed {
            self.paths[path].speed_mbps = Some(mbps);
            self.tell(path, PathNews::Carries(mbps));
        }
        !changed.is_empty()
    }

    fn listen(&self, watch: &mut PathWatch, now_ms: f64) {
        for (path, (socket, other)) in self.sockets.iter().zip(&self.others).enumerate() {
            let mut datagram = [0; DATAGRAM_BYTES + 1];
            for _ in 0..READ_MAX {
                // A path's errors show as its silence.
                let Ok((length, from)) = socket.try_recv_from(&mut datagram) else { break };
                if from == *other
                    && let Some(hello) = decode(&datagram[..length], self.token)
                {
                    watch.heard(path, hello, now_ms);
                }
            }
        }
    }

    fn say(&self, watch: &mut PathWatch, now_ms: f64) {
        for (path, (socket, other)) in self.sockets.iter().zip(&self.others).enumerate() {
            if let Some(hello) = watch.hello(path, now_ms) {
                drop(socket.try_send_to(&encode(hello, self.token), *other));
            }
        }
    }

    fn tell(&self, path: usize, what: PathNews) {
        let Some(path) = self.paths.get(path) else { return };
        info!(migration = self.migration, "path {path} {what}");
        if let Some(news) = &self.news {
            // Told to the log above in any case.
            drop(news.try_send((path.to_string(), what)));
        }
    }

    async fn route_over(&self, in_use: &[bool]) -> bool {
        let paths = self.paths_in(in_use);
        let routed = multichannel::route_over(&self.agent, &self.migration, self.peer, &paths).await;
        if let Err(problem) = &routed {
            warn!(migration = self.migration, %problem, "the route stays as it is for now");
        }
        routed.is_ok()
    }

    async fn restore_route(&self, in_use: &[bool]) {
        let restored = multichannel::restore_route(&self.agent, self.peer, &self.paths_in(in_use)).await;
        if let Err(problem) = restored {
            debug!(migration = self.migration, %problem, "the route cannot be looked after now");
        }
    }

    fn paths_in(&self, in_use: &[bool]) -> Vec<Path> {
        let paths = self.paths.iter().zip(in_use).filter(|(_, in_use)| **in_use);
        paths.map(|(path, _)| path.clone()).collect()
    }
}

fn encode(hello: Hello, token: Uuid) -> [u8; DATAGRAM_BYTES] {
    let mut datagram = [0; DATAGRAM_BYTES];
    datagram[..16].copy_from_slice(token.as_bytes());
    datagram[16..24].copy_from_slice(&hello.sequence.to_be_bytes());
    datagram[24] = u8::from(hello.hears_you);
    datagram[25] = hello.lost;
    datagram
}

fn decode(datagram: &[u8], token: Uuid) -> Option<Hello> {
    let datagram: &[u8; DATAGRAM_BYTES] = datagram.try_into().ok()?;
    let (said, rest) = datagram.split_first_chunk::<16>()?;
    let (sequence, rest) = rest.split_first_chunk::<8>()?;
    let [hears_you @ (0 | 1), lost] = *rest else { return None };
    (said == token.as_bytes()).then(|| Hello {
        sequence: u64::from_be_bytes(*sequence),
        hears_you: hears_you == 1,
        lost,
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_hello_arrives_as_it_was_said(sequence: u64, hears_you: bool, lost: u8) {
            let (hello, token) = (Hello { sequence, hears_you, lost }, Uuid::new_v4());
            let datagram = encode(hello, token);
            prop_assert_eq!(decode(&datagram, token), Some(hello));
            prop_assert_eq!(decode(&datagram, Uuid::new_v4()), None);
            prop_assert_eq!(decode(&datagram[1..], token), None);
        }

        #[test]
        fn any_datagram_is_taken_or_dropped(datagram in prop::collection::vec(any::<u8>(), 0..64)) {
            let _ = decode(&datagram, Uuid::nil());
        }
    }
}
