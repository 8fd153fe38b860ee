//! This host's end of the watch of all paths to one peer, and its route there.

use std::cmp::Reverse;
use std::io;
use std::net::{IpAddr, SocketAddr};
use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::check::facts::ForeignRoute;
use drainpipe_engine::check::route_taken;
use drainpipe_engine::finding::Finding;
use drainpipe_engine::paths::path::Path;
use drainpipe_engine::paths::speed::{READ_EVERY_MS, SpeedWatch};
use drainpipe_engine::paths::watch::{
    CLOSE_HELLO_EVERY_MS, HELLO_EVERY_MS, PathChange, PathNews, PathWatch, Unwatched,
};
use drainpipe_engine::problem::Problem;
use rustix::io::Errno;
use tokio::net::UdpSocket;
use tokio::sync::{Mutex, mpsc};
use tokio::task::JoinSet;
use tokio::time::{Instant, MissedTickBehavior, interval};
use tracing::{debug, info, warn};
use uuid::Uuid;

use super::placing::Placing;
use super::{Beginning, Joining, News, PathWatches, hello};
use crate::host::Host;
use crate::host::network::ETHERNET_MTU;
use crate::paths::link_socket::{is_on, on_link};
use crate::paths::multichannel::{self, WeightedPaths};
use drainpipe_api_types::{PathEnd, WatchEnd, WatchRequest};

/// How soon a route that could not be set is tried again, and one that is gone is noticed.
const ROUTE_EVERY_MS: f64 = 1_000.0;

/// How soon a link that was made again is watched again.
const LINKS_EVERY_MS: f64 = 1_000.0;

/// Between two questions to an agent that is not heard of, or that could not watch a path.
const ASK_EVERY_MS: f64 = 2_000.0;

/// How long its answer may take.
const ANSWER_DEADLINE: Duration = Duration::from_secs(5);

/// For no longer than that a migration's connections, which are made within some 10 ms, go over one path only.
const CONNECTING_MS: f64 = 2_000.0;

/// Weights tried one after the other. Hellos wait meanwhile, some 3 ms for each.
const PLACINGS_AT_ONCE: u8 = 4;

/// What each link takes that carries IPv6, in bytes (RFC 8200).
const LEAST_MTU: u16 = 1280;

/// Most paths over one link: an address may have been changed meanwhile. Others would only hold ports.
const PATHS_OF_LINK_MAX: usize = 2;

/// All paths to one peer that migrations use.
#[derive(Debug)]
pub(super) struct PeerWatch {
    // Those of this host, including this one.
    watches: Arc<PathWatches>,
    host: Arc<Host>,
    peer: String,
    own_address: IpAddr,
    address: IpAddr,
    token: Uuid,
    other_token: Option<Uuid>,
    users: Vec<User>,
    // In the order of `watch` and `speeds`.
    ends: Vec<End>,
    watch: PathWatch,
    speeds: SpeedWatch,
    // Empty while the route is not known to be as it should.
    routed: WeightedPaths,
    is_route_taken: bool,
    placing: Placing,
    began: Instant,
    next: NextLooks,
    questions: JoinSet<()>,
}

/// When it looks again at what it does not look at each time.
#[derive(Debug, Default)]
#[expect(clippy::struct_field_names, reason = "units come last")]
struct NextLooks {
    reading_ms: f64,
    links_ms: f64,
    route_ms: f64,
    question_ms: f64,
}

/// A migration that uses some of the paths.
#[derive(Debug)]
struct User {
    migration: String,
    paths: Vec<Path>,
    // Only at the end that sends memory.
    news: Option<mpsc::Sender<News>>,
    // Where that end's connections go, once there are any.
    port: Option<u16>,
    connecting: Option<Connecting>,
}

/// Connections that are being made, the first of which is to arrive first.
#[derive(Debug)]
struct Connecting {
    connections: usize,
    until_ms: f64,
}

/// This host's end of one path.
#[derive(Debug)]
struct End {
    path: Path,
    socket: UdpSocket,
    // None until it is known.
    other: Option<SocketAddr>,
    // Largest packet that the links of both ends take, in bytes.
    mtu: u16,
}

impl End {
    /// To the link that has been made again. Its number is also part of the other end's address, if that is
    /// link-local.
    fn bind_again(&mut self) -> io::Result<()> {
        // First: should the link be made again in between, the next look sees it by the socket.
        self.socket = hello::bind_again(&self.socket, &self.path)?;
        if let Some(other) = &mut self.other {
            *other = on_link(&self.path.link, self.path.peer_address, other.port())?;
        }
        Ok(())
    }
}

/// Watches until no migration uses the paths any more.
pub(super) async fn run(watch: Arc<Mutex<PeerWatch>>) {
    let [mut ticks, mut close_ticks] = [HELLO_EVERY_MS, CLOSE_HELLO_EVERY_MS].map(|every_ms| {
        let mut ticks = interval(Duration::from_secs_f64(every_ms / 1000.0));
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks
    });
    let mut looks_closely = false;
    loop {
        tokio::select! {
            biased;
            _ = ticks.tick() => {
                let mut watch = watch.lock().await;
                if !watch.is_used() {
                    return;
                }
                watch.step().await;
                looks_closely = watch.looks_closely();
            }
            _ = close_ticks.tick(), if looks_closely => watch.lock().await.say_closely(),
        }
    }
}

impl PeerWatch {
    /// A watch without any path yet. `address` is the peer's migration address.
    pub(super) fn new(watches: &Arc<PathWatches>, peer: &str, address: IpAddr) -> Self {
        Self {
            watches: Arc::clone(watches),
            host: Arc::clone(&watches.host),
            peer: peer.into(),
            own_address: watches.host.intended_address(),
            address,
            token: Uuid::new_v4(),
            other_token: None,
            users: vec![],
            ends: vec![],
            watch: PathWatch::new(0.0),
            speeds: SpeedWatch::default(),
            routed: WeightedPaths::default(),
            is_route_taken: false,
            placing: Placing::default(),
            began: Instant::now(),
            next: NextLooks::default(),
            questions: JoinSet::new(),
        }
    }

    /// Whether some migration uses its paths, so that it goes on.
    pub(super) fn is_used(&self) -> bool {
        !self.users.is_empty()
    }

    /// The peer's migration address.
    pub(super) fn address(&self) -> IpAddr {
        self.address
    }

    /// A migration begins to use these paths, or does so still.
    pub(super) async fn join(&mut self, joining: Joining<'_>) -> Result<WatchEnd, Problem> {
        self.add(joining.paths.iter().filter(|path| !joining.absent.contains(path))).await?;
        let is_watched = |path: &&Path| self.index_of(path).is_some();
        let paths: Vec<Path> = joining.paths.iter().filter(is_watched).cloned().collect();
        if paths.is_empty() {
            return Err(Problem::conflict(format!(
                "no link of the paths to {} has an address at the moment",
                self.peer
            )));
        }
        let before = self.users.iter().position(|user| user.migration == joining.migration);
        // Prepared already; now its links may be down, so that it could not be done again.
        if before.is_some_and(|index| self.users[index].paths == paths) {
            return Ok(self.end(joining.paths));
        }
        let before = before.map(|index| self.users.remove(index));
        self.users.push(User {
            migration: joining.migration.into(),
            paths: paths.clone(),
            news: joining.news,
            port: None,
            connecting: None,
        });
        self.forget_unused();
        let routed = self.weighted_over_what_is_up().await;
        let prepared =
            multichannel::prepare(&self.host, joining.migration, self.address, &paths, &routed).await;
        if let Err(problem) = prepared {
            self.users.pop();
            self.users.extend(before);
            self.forget_unused();
            return Err(problem);
        }
        self.routed = routed;
        self.next.question_ms = self.now_ms() + ASK_EVERY_MS;
        self.tell_newcomer();
        Ok(self.end(joining.paths))
    }

    async fn add(&mut self, paths: impl Iterator<Item = &Path>) -> Result<(), Problem> {
        let mut new: Vec<End> = vec![];
        for path in paths {
            let known = || self.ends.iter().chain(&new).map(|end| &end.path);
            if known().any(|known| is_same(known, path)) {
                continue;
            }
            if known().filter(|known| known.link == path.link).count() >= PATHS_OF_LINK_MAX {
                return Err(Problem::refused(format!(
                    "link {} leads to other addresses of {} in migrations under way: try again when they are over",
                    path.link, self.peer
                )));
            }
            let socket = hello::bind(&self.host, path).await?;
            let mtu = self.host.network.mtu(&path.link).await?;
            // An older source does not say which, and its agent takes no large hellos.
            let both_take =
                path.mtu_bytes.map_or(ETHERNET_MTU, |bytes| u16::try_from(bytes).unwrap_or(u16::MAX));
            let mtu = mtu.min(both_take);
            new.push(End { path: path.clone(), socket, other: None, mtu });
        }
        let now_ms = self.now_ms();
        for end in new {
            self.watch.add(now_ms);
            self.speeds.add(end.path.speed_mbps);
            self.ends.push(end);
        }
        Ok(())
    }

    fn end(&self, paths: &[Path]) -> WatchEnd {
        let end_of = |path: &Path| {
            let index = self.index_of(path)?;
            let port = self.ends[index].socket.local_addr().ok()?.port();
            Some(PathEnd { port, was_heard: self.watch.was_heard_there(index) })
        };
        WatchEnd { token: self.token, paths: paths.iter().map(end_of).collect() }
    }

    fn index_of(&self, path: &Path) -> Option<usize> {
        self.ends.iter().position(|end| is_same(&end.path, path))
    }

    /// What the other agent has said of its end of these paths.
    pub(super) fn meet(&mut self, paths: &[Path], other: &WatchEnd) -> Result<(), Problem> {
        if other.paths.len() != paths.len() || other.paths.iter().flatten().any(|end| end.port == 0) {
            return Err(Problem::bad_input("the watch of the other host does not name a port for each path"));
        }
        let now_ms = self.now_ms();
        if self.other_token.replace(other.token).is_some_and(|known| known != other.token) {
            self.ends.iter_mut().for_each(|end| end.other = None);
            let changes = self.watch.restart(now_ms);
            self.tell(changes);
        }
        for (path, there) in paths.iter().zip(&other.paths) {
            let (Some(index), Some(there)) = (self.index_of(path), there) else { continue };
            // A link that is gone carries no hellos either way.
            let Ok(address) = on_link(&path.link, path.peer_address, there.port) else { continue };
            if self.ends[index].other.replace(address) != Some(address) {
                self.watch.begin(index, there.was_heard, now_ms);
            }
        }
        Ok(())
    }

    /// A migration uses the paths no more. Whether another one does.
    pub(super) async fn leave(&mut self, migration: &str) -> bool {
        self.users.retain(|user| user.migration != migration);
        self.forget_unused();
        if !self.sends() {
            self.speeds.forget();
        }
        if self.users.is_empty() {
            return false;
        }
        // Before what its links needed is put back.
        self.follow_route().await;
        true
    }

    fn forget_unused(&mut self) {
        for index in (0..self.ends.len()).rev() {
            let path = &self.ends[index].path;
            if !self.users.iter().any(|user| user.paths.iter().any(|other| is_same(other, path))) {
                self.ends.remove(index);
                self.watch.remove(index);
                self.speeds.remove(index);
            }
        }
    }

    /// The other agent does not answer the question whether it still watches.
    pub(super) fn lose_sight(&mut self) {
        if self.watch.is_deaf(self.now_ms()) {
            let changes = self.watch.unwatched(Unwatched::AgentAway);
            self.tell(changes);
        }
    }

    fn now_ms(&self) -> f64 {
        self.began.elapsed().as_secs_f64() * 1000.0
    }

    async fn step(&mut self) {
        self.listen();
        let changes = self.watch.tick(self.now_ms());
        self.tell(changes);
        self.say();
        self.follow_speeds().await;
        self.follow_links().await;
        self.follow_route().await;
        self.place_connections().await;
        self.ask_again();
    }

    fn listen(&mut self) {
        let now_ms = self.now_ms();
        for (index, end) in self.ends.iter().enumerate() {
            let Some(other) = end.other else { continue };
            for hello in hello::read(&end.socket, other, self.token) {
                self.watch.heard(index, hello, now_ms);
            }
        }
    }

    fn say(&mut self) {
        let Some(token) = self.other_token else { return };
        let now_ms = self.now_ms();
        for (index, end) in self.ends.iter_mut().enumerate() {
            let Some(other) = end.other else { continue };
            if let Some(hello) = self.watch.hello(index, now_ms) {
                hello::say(&end.socket, other, token, hello);
            }
            if let Some(hello) = self.watch.large_hello(index, now_ms) {
                let said = hello::say_large(&end.socket, other, token, hello, end.mtu);
                // The link's MTU was lowered since, or a router takes less; and TCP's packets are smaller too.
                if said.is_err_and(|error| error.raw_os_error() == Some(Errno::MSGSIZE.raw_os_error())) {
                    end.mtu = if end.mtu > ETHERNET_MTU { ETHERNET_MTU } else { LEAST_MTU };
                }
            }
        }
    }

    /// Whether hellos are to be said at the close pace too.
    fn looks_closely(&self) -> bool {
        self.watch.looks_closely(self.now_ms())
    }

    fn say_closely(&mut self) {
        let Some(token) = self.other_token else { return };
        let now_ms = self.now_ms();
        for (index, end) in self.ends.iter().enumerate() {
            if let Some(other) = end.other
                && let Some(hello) = self.watch.close_hello(index, now_ms)
            {
                hello::say(&end.socket, other, token, hello);
            }
        }
    }

    /// TCP has had to send much again on these paths.
    pub(super) fn suspect(&mut self, paths: &[Path]) {
        let now_ms = self.now_ms();
        for path in paths {
            if let Some(index) = self.index_of(path) {
                self.watch.suspect(index, now_ms);
            }
        }
    }

    /// Whether memory is sent from here. Only the end that sends sees by its counters what paths carry; if
    /// both do, each sees its own direction, for which its own route is.
    fn sends(&self) -> bool {
        self.users.iter().any(|user| user.news.is_some())
    }

    async fn follow_speeds(&mut self) {
        let now_ms = self.now_ms();
        if !self.sends() || now_ms < self.next.reading_ms {
            return;
        }
        self.next.reading_ms = now_ms + READ_EVERY_MS;
        let links: Vec<&str> = self.ends.iter().map(|end| end.path.link.as_str()).collect();
        let Ok(sent_bytes) = self.host.network.sent_bytes(&links).await else { return };
        let changed = self.speeds.record(now_ms, &sent_bytes, &self.watch.in_use());
        let change = |(path, mbps)| PathChange { path, news: PathNews::Carries(mbps) };
        self.tell(changed.into_iter().map(change).collect());
    }

    /// A link that is deleted and made again, as when its driver is loaded again, is another one to the kernel, with the
    /// name of the old one: no socket is bound to it, and its settings are not those that the route needs.
    async fn follow_links(&mut self) {
        let now_ms = self.now_ms();
        if now_ms < self.next.links_ms {
            return;
        }
        self.next.links_ms = now_ms + LINKS_EVERY_MS;
        for end in self.ends.iter_mut().filter(|end| !is_on(&end.socket, &end.path.link)) {
            let set = multichannel::set_link(&self.host, &end.path.link).await;
            match set.and_then(|()| end.bind_again().map_err(Problem::failed)) {
                Ok(()) => info!(peer = self.peer, "path {}: its link has been created again", end.path),
                Err(problem) => {
                    debug!(peer = self.peer, %problem, "path {} cannot be watched at the moment", end.path);
                }
            }
        }
    }

    /// The paths for the route, with the speeds by which they are weighted there.
    fn paths_to_use(&self) -> Vec<Path> {
        self.in_order(self.paths_that_carry())
    }

    /// What one path takes in order, it gives in order.
    fn in_order(&self, mut paths: Vec<Path>) -> Vec<Path> {
        if self.users.iter().any(|user| user.connecting.is_some()) {
            paths.sort_by_key(|path| Reverse(path.speed_mbps));
            paths.truncate(1);
        }
        paths
    }

    fn paths_that_carry(&self) -> Vec<Path> {
        let in_use = self.watch.in_use();
        let each = self.ends.iter().enumerate().filter(|(index, _)| in_use[*index]);
        let paths: Vec<Path> = each
            .map(|(index, end)| Path { speed_mbps: self.speeds.mbps(index), ..end.path.clone() })
            .collect();
        let carrying: Vec<Path> = paths.iter().filter(|path| !self.is_standby(path)).cloned().collect();
        if carrying.is_empty() { paths } else { carrying }
    }

    /// To all migrations that know it.
    fn is_standby(&self, path: &Path) -> bool {
        let mut known = self.users.iter().flat_map(|user| &user.paths).filter(|known| is_same(known, path));
        known.all(|known| known.is_standby)
    }

    /// The one place that says what the route is to be.
    fn wanted_weights(&self) -> WeightedPaths {
        self.weighted_over(self.paths_to_use())
    }

    fn weighted_over(&self, paths: Vec<Path>) -> WeightedPaths {
        WeightedPaths { weights: self.placing.weights(&paths), paths }
    }

    async fn follow_route(&mut self) {
        let now_ms = self.now_ms();
        let is_new = self.paths_to_use() != self.routed.paths;
        if now_ms < self.next.route_ms && !(is_new && self.is_routed()) {
            return;
        }
        self.next.route_ms = now_ms + ROUTE_EVERY_MS;
        if is_new {
            self.set_route(self.wanted_weights()).await;
            self.placing.begin();
            return;
        }
        if let Err(problem) = multichannel::restore(&self.host, self.address, &self.routed).await {
            debug!(peer = self.peer, %problem, "the address and the route cannot be checked at the moment");
            self.is_route_anothers().await;
        }
    }

    /// The kernel takes no route over a link that is switched off or gone. The watch finds it silent soon.
    async fn weighted_over_what_is_up(&self) -> WeightedPaths {
        let mut up = vec![];
        for path in self.paths_that_carry() {
            if self.host.network.is_up(&path.link).await {
                up.push(path);
            }
        }
        if up.is_empty() { self.wanted_weights() } else { self.weighted_over(self.in_order(up)) }
    }

    async fn set_route(&mut self, routed: WeightedPaths) {
        match multichannel::set_route(&self.host, self.address, &routed).await {
            Ok(()) => self.routed = routed,
            Err(problem) => {
                self.routed = WeightedPaths::default();
                if self.is_route_anothers().await {
                    return;
                }
                warn!(peer = self.peer, %problem, "the route does not use all paths; tried again every second");
                // None of it is there for one link that is not. The others carry all the same.
                let up = self.weighted_over_what_is_up().await;
                if up.paths != routed.paths
                    && let Err(problem) = multichannel::set_route(&self.host, self.address, &up).await
                {
                    warn!(peer = self.peer, %problem, "nor does it use those whose links are up");
                }
            }
        }
    }

    /// Whether the route is as it was wanted last.
    fn is_routed(&self) -> bool {
        !self.routed.paths.is_empty()
    }

    /// A migration is about to connect to this port of the peer.
    pub(super) async fn begin_transfer(&mut self, beginning: Beginning<'_>) {
        let Beginning { migration, port, in_order } = beginning;
        let until_ms = self.now_ms() + CONNECTING_MS;
        for user in self.users.iter_mut().filter(|user| user.migration == migration) {
            user.port = Some(port);
            user.connecting = in_order.map(|connections| Connecting { connections, until_ms });
        }
        self.placing.look_soon();
        let routed = self.weighted_over_what_is_up().await;
        if routed.paths != self.routed.paths {
            self.set_route(routed).await;
        }
    }

    /// Those that are all made may go over all paths. Whether there are any such.
    fn end_connecting(&mut self, now_ms: f64) -> bool {
        let mut have_ended = false;
        for user in &mut self.users {
            let made = user.port.map_or(0, |port| self.placing.connections_to(port));
            let is_over =
                |connecting: &mut Connecting| made >= connecting.connections || now_ms >= connecting.until_ms;
            have_ended |= user.connecting.take_if(is_over).is_some();
        }
        have_ended
    }

    /// Weights the route so that each path gets its share of the connections.
    async fn place_connections(&mut self) {
        let ports: Vec<u16> = self.users.iter().filter_map(|user| user.port).collect();
        if ports.is_empty() {
            return;
        }
        let now_ms = self.now_ms();
        self.placing.look(&self.host.network, self.address, &ports, now_ms).await;
        if self.end_connecting(now_ms) {
            self.follow_route().await;
        }
        if self.routed.paths.len() < 2 {
            return;
        }
        for _ in 0..PLACINGS_AT_ONCE {
            if !(self.placing.is_open() && self.is_routed()) {
                return;
            }
            let WeightedPaths { paths, weights } = self.wanted_weights();
            let weights = other_than(&self.routed.weights, weights);
            self.set_route(WeightedPaths { paths, weights }).await;
            let agree =
                self.placing.learn(&self.host.network, &self.routed.paths, &self.routed.weights).await;
            if !agree {
                self.set_route(self.wanted_weights()).await;
            }
        }
    }

    fn has_path_without_other_end(&self) -> bool {
        self.other_token.is_some() && self.ends.iter().any(|end| end.other.is_none())
    }

    fn tell(&self, changes: Vec<PathChange>) {
        for PathChange { path, news } in changes {
            let Some(end) = self.ends.get(path) else { continue };
            info!(peer = self.peer, "path {} {news}", end.path);
            for listener in self.users.iter().filter_map(|user| user.news.as_ref()) {
                // Told to the log above in any case.
                let _no_room = listener.try_send(News::Path(end.path.to_string(), news));
            }
        }
    }

    /// Whether the route is another program's. This is reported once each time that it becomes so.
    async fn is_route_anothers(&mut self) -> bool {
        let routes = self.host.network.foreign_host_routes().await.unwrap_or_else(|problem| {
            debug!(peer = self.peer, %problem, "it cannot be determined at the moment whose route it is");
            vec![]
        });
        let taken = routes.into_iter().find(|(address, _)| *address == self.address);
        let was_taken = std::mem::replace(&mut self.is_route_taken, taken.is_some());
        if let Some((address, protocol)) = taken.filter(|_| !was_taken) {
            let taken = route_taken(self.host.name(), &self.peer, ForeignRoute { address, protocol });
            // It came after the check that would have refused the migration for it.
            let finding = Finding { refuses_migration: false, ..taken };
            warn!(peer = self.peer, "{}", finding.what);
            for listener in self.users.iter().filter_map(|user| user.news.as_ref()) {
                let _no_room = listener.try_send(News::Found(Box::new(finding.clone())));
            }
        }
        self.is_route_taken
    }

    /// What the others already know.
    fn tell_newcomer(&self) {
        let Some(listener) = self.users.last().and_then(|user| user.news.as_ref()) else { return };
        for (index, end) in self.ends.iter().enumerate() {
            let slow = self.speeds.mbps(index).filter(|_| self.speeds.is_slow(index)).map(PathNews::Carries);
            for news in self.watch.fault_of(index).map(PathNews::Out).into_iter().chain(slow) {
                let _no_room = listener.try_send(News::Path(end.path.to_string(), news));
            }
        }
    }

    /// Should nothing be heard any more: the other agent may have been restarted, and know nothing of the
    /// watch. Or it may be able by now to watch a path that it could not. The sources of migrations ask, as
    /// each of them knows which one the other agent must know.
    fn ask_again(&mut self) {
        while self.questions.try_join_next().is_some() {}
        let now_ms = self.now_ms();
        let has_reason = self.watch.is_deaf(now_ms) || self.has_path_without_other_end();
        if !has_reason || now_ms < self.next.question_ms || !self.questions.is_empty() {
            return;
        }
        self.next.question_ms = now_ms + ASK_EVERY_MS;
        for user in self.users.iter().filter(|user| user.news.is_some()) {
            let request = WatchRequest {
                paths: user.paths.iter().map(Path::reversed).collect(),
                migration_address: self.own_address,
                watch: self.end(&user.paths),
            };
            let (watches, peer) = (Arc::clone(&self.watches), self.peer.clone());
            self.questions.spawn(ask(watches, peer, user.migration.clone(), user.paths.clone(), request));
        }
    }
}

async fn ask(
    watches: Arc<PathWatches>,
    peer: String,
    migration: String,
    paths: Vec<Path>,
    request: WatchRequest,
) {
    let Some(client) = watches.others.get(&peer) else { return };
    let path = format!("/v1/incoming/{migration}/watch");
    let met = match client.post_within::<WatchEnd>(&path, &request, ANSWER_DEADLINE).await {
        Ok(other) => watches.meet(&peer, &paths, &other).await,
        Err(problem) => Err(problem),
    };
    if let Err(problem) = met {
        warn!(migration, %problem, "{peer} does not watch the paths");
        watches.lose_sight(&peer).await;
    }
}

/// The same weights but for a trifle, if these are the ones that the route has: only a change of the route
/// makes the kernel look up the way of connections that were made since.
fn other_than(old: &[u16], mut weights: Vec<u16>) -> Vec<u16> {
    if weights == old {
        weights.iter_mut().filter(|weight| **weight > 1).for_each(|weight| *weight -= 1);
    }
    weights
}

/// Whatever speed is said of it.
fn is_same(one: &Path, other: &Path) -> bool {
    (&one.link, one.address, one.peer_address) == (&other.link, other.address, other.peer_address)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn weights_that_the_route_has_are_changed_a_little_and_no_others() {
        assert_eq!(other_than(&[256, 256], vec![256, 256]), [255, 255]);
        assert_eq!(other_than(&[256, 1], vec![256, 1]), [255, 1]);
        assert_eq!(other_than(&[255, 255], vec![256, 256]), [256, 256]);
    }
}
