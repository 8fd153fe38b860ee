//! The connections of a VM that leaves: the target's firewall should track them before the VM runs there.
//!
//! Established ones are sent while its memory is; what has changed since goes beside the last of its state. The VM
//! hardly waits longer for that than for its state.

mod there;

use std::net::IpAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use drainpipe_engine::format::bound;
use drainpipe_engine::migration::result::TrackedUse;
use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_engine::tracked::TrackedConnection;
use drainpipe_hypervisor::spec::MacAddress;
use drainpipe_net::{Tracked, forget_tracked};
use tokio::task::JoinHandle;
use tokio::time::{sleep, timeout};
use tracing::{debug, info, warn};

use self::there::{Changes, There};
use super::Outgoing;
use crate::outgoing::result::tenth;
use crate::paths::tracking::{self, TrackingState};
use crate::peers::client::ApiClient;
use crate::store::lock::lock;
use drainpipe_api_types::{TrackedRequest, TrackedTaken};

/// How much longer than for its state a VM is paused for its connections at most.
const PAUSE_LONGER_MAX: Duration = Duration::from_millis(20);

/// How often those that stand are sent while the VM runs here, so that little is left for its pause.
const AHEAD_EVERY: Duration = Duration::from_secs(5);

/// How long all of it may take where the state takes longer.
const WITHIN: Duration = Duration::from_secs(5);

/// How long the kernel may take to forget them.
const FORGET_WITHIN: Duration = Duration::from_secs(5);

/// Connections in one request, which is then well below what an agent reads.
const REQUEST_CONNECTIONS: usize = 2_000;

/// Connections in one while the VM runs here: the pause may have to wait for the last request.
const AHEAD_CONNECTIONS: usize = 200;

/// What is known of a VM's connections on their way.
#[derive(Debug, Default)]
struct KnownConnections {
    // None where nothing is tracked.
    listed: Option<Tracked>,
    there: There,
    // Why none or not all were taken, where somebody says so.
    why: Vec<String>,
    took: Option<Duration>,
}

/// On their way to the target. That ends with this.
#[derive(Debug)]
pub(super) struct OnWay {
    sender: Arc<Sender>,
    task: JoinHandle<()>,
}

/// When they are sent.
#[derive(Debug, Clone, Copy)]
enum Moment {
    /// While the VM runs here: those that stand.
    Ahead,
    /// While it is paused: all that are left.
    Paused,
}

/// The side that sends them.
#[derive(Debug)]
struct Sender {
    outgoing: Arc<Outgoing>,
    macs: Vec<MacAddress>,
    taker: Taker,
    known: Mutex<KnownConnections>,
}

/// What has become of them.
#[derive(Debug)]
pub(super) struct Gone {
    /// What was tracked here; none where nobody could list it.
    pub(super) listed: Option<Vec<TrackedConnection>>,
    /// The message to the target; none if nothing is tracked.
    pub(super) tracked_use: Option<TrackedUse>,
}

/// The side that loads them.
#[derive(Debug)]
pub(super) struct Taker {
    pub(super) client: ApiClient,
    pub(super) path: String,
    pub(super) host: String,
}

impl Drop for OnWay {
    fn drop(&mut self) {
        self.task.abort();
    }
}

impl OnWay {
    /// Begins to send those of a VM with these NICs that runs here.
    pub(super) fn begin(outgoing: &Arc<Outgoing>, macs: Vec<MacAddress>, taker: Taker) -> Self {
        let sender = Sender { outgoing: Arc::clone(outgoing), macs, taker, known: Mutex::default() };
        let sender = Arc::new(sender);
        let task = tokio::spawn(Arc::clone(&sender).send_ahead());
        Self { sender, task }
    }

    /// The VM is paused: sends what is left.
    pub(super) fn send_rest(&mut self) {
        self.task.abort();
        self.task = tokio::spawn(Arc::clone(&self.sender).send_rest());
    }

    /// The state is there: waits for what is still on its way, but not for long.
    pub(super) async fn settle(mut self, vm: &str) -> Gone {
        let began = Instant::now();
        let is_late = timeout(PAUSE_LONGER_MAX, &mut self.task).await.is_err();
        let waited = began.elapsed();
        let known = std::mem::take(&mut *lock(&self.sender.known));
        let used = known.tracked_use(is_late, waited);
        if let Some(used) = used.as_ref().filter(|used| used.along + used.left > 0 || used.why.is_some()) {
            let TrackedUse { along, left, why, waited_ms, .. } = used;
            info!(vm, along, left, why, waited_ms, "its tracked connections");
        }
        Gone { listed: known.listed.map(|listed| listed.connections), tracked_use: used }
    }
}

impl KnownConnections {
    /// What to send now that this is tracked.
    fn begin(&mut self, tracked: Tracked, moment: Moment) -> Vec<Changes> {
        let now = Instant::now();
        let parts = match moment {
            Moment::Ahead => self.there.changes_ahead(&tracked, now).in_parts(AHEAD_CONNECTIONS),
            Moment::Paused => in_order(self.there.changes(&tracked, now)).in_parts(REQUEST_CONNECTIONS),
        };
        self.listed = Some(tracked);
        parts
    }

    fn is_answered(&mut self, changes: &Changes, answer: TrackedTaken) {
        self.there.is_done(changes, &answer.left_out, Instant::now());
        self.why.extend(answer.why);
    }

    fn tracked_use(&self, is_late: bool, waited: Duration) -> Option<TrackedUse> {
        let listed = self.listed.as_ref();
        let all = listed.map_or(0, |listed| listed.connections.len() + listed.translated + listed.others);
        let now = Instant::now();
        let is_there = |connection: &&TrackedConnection| self.there.has(connection, now);
        let there = listed.map_or(0, |listed| listed.connections.iter().filter(is_there).count());
        let along = there as u64;
        let mut why = self.why.clone();
        if let Some(listed) = listed {
            why.extend(of_listed(listed));
        }
        if is_late {
            let limit = bound(PAUSE_LONGER_MAX);
            why.push(format!("there was no time for more: they may lengthen the pause by {limit} at most"));
        }
        (listed.is_some() || !why.is_empty()).then(|| TrackedUse {
            along,
            left: all as u64 - along,
            why: (!why.is_empty()).then(|| why.join("; ")),
            took_ms: self.took.map(|took| tenth(took.as_secs_f64() * 1_000.0)),
            waited_ms: tenth(waited.as_secs_f64() * 1_000.0),
        })
    }
}

/// Why some of what is tracked here cannot be elsewhere.
fn of_listed(listed: &Tracked) -> Vec<String> {
    let Tracked { translated, others, is_whole, .. } = listed;
    let mut why = vec![];
    if *translated > 0 {
        why.push(format!("this host translates an address of {translated}"));
    }
    if *others > 0 {
        why.push(format!("{others} are neither TCP nor UDP"));
    }
    if !is_whole {
        why.push("there are more than could be listed".into());
    }
    why
}

impl Sender {
    /// Those that stand, again and again.
    async fn send_ahead(self: Arc<Self>) {
        loop {
            if let Err(problem) = self.send(Moment::Ahead, Instant::now() + WITHIN).await {
                // The rest is sent in the pause, and reported there.
                debug!(%problem, "established connections cannot be copied ahead");
            }
            sleep(AHEAD_EVERY).await;
        }
    }

    async fn send_rest(self: Arc<Self>) {
        let began = Instant::now();
        let sent = self.send(Moment::Paused, began + WITHIN).await;
        let mut known = lock(&self.known);
        known.why.extend(sent.err().map(|problem| problem.message));
        known.took = Some(began.elapsed());
    }

    async fn send(&self, moment: Moment, until: Instant) -> Result<(), Problem> {
        // These reasons are about the packets that were sent the last time.
        lock(&self.known).why.clear();
        let host = &self.outgoing.host;
        let (addresses, tracked) = match tracking::look(&host.network, &self.macs, until).await? {
            TrackingState::NoTracking => {
                let say = || info!("this kernel does not track connections, so none move with VMs");
                self.outgoing.untracked_said.call_once(say);
                return Ok(());
            }
            TrackingState::NoAddress => {
                return Err(Problem::failed(format!(
                    "{} has not heard of an address of the VM",
                    host.name()
                )));
            }
            TrackingState::Found(addresses, tracked) => (addresses, tracked),
        };
        let parts = lock(&self.known).begin(tracked, moment);
        for changes in parts {
            lock(&self.known).there.is_sent(&changes);
            let Changes { ended, connections } = changes.clone();
            let request = TrackedRequest { addresses: addresses.clone(), ended, connections };
            let answer = self.give(&request, until).await?;
            let is_refused = answer.taken == 0 && !changes.connections.is_empty();
            lock(&self.known).is_answered(&changes, answer);
            if is_refused && matches!(moment, Moment::Ahead) {
                // As by a host that takes none at all: the pause tells it, once.
                break;
            }
        }
        Ok(())
    }

    async fn give(&self, request: &TrackedRequest, until: Instant) -> Result<TrackedTaken, Problem> {
        let left = until.saturating_duration_since(Instant::now());
        let given = self.taker.client.post_within(&self.taker.path, request, left).await;
        given.map_err(|problem: Problem| match problem.kind {
            ProblemKind::NotFound => Problem::failed(format!("{} accepts none: upgrade it", self.taker.host)),
            _ => problem,
        })
    }
}

/// Those first that are worth most: that both ends use.
fn in_order(mut changes: Changes) -> Changes {
    changes.connections.sort_by_key(|connection| (!connection.is_assured, !connection.is_answered));
    changes
}

/// The VM is another host's: has this one's firewall forget its connections, but for those that this host itself has with
/// it.
pub(super) async fn forget(outgoing: &Outgoing, macs: &[MacAddress], listed: Option<Vec<TrackedConnection>>) {
    if let Err(problem) = try_forget(outgoing, macs, listed).await {
        warn!(%problem, "the firewall here keeps tracking connections of a VM that has left until they time out");
    }
}

async fn try_forget(
    outgoing: &Outgoing,
    macs: &[MacAddress],
    listed: Option<Vec<TrackedConnection>>,
) -> Result<(), Problem> {
    let until = Instant::now() + FORGET_WITHIN;
    let network = &outgoing.host.network;
    let listed = match listed {
        Some(listed) => listed,
        // As after a crash.
        None => match tracking::look(network, macs, until).await? {
            TrackingState::Found(_, tracked) => tracked.connections,
            TrackingState::NoTracking | TrackingState::NoAddress => return Ok(()),
        },
    };
    let others = but_those_of(&network.addresses().await?, listed);
    if !others.is_empty() {
        let forgotten = forget_tracked(others, until).await.map_err(Problem::failed)?;
        debug!(forgotten, "connections of a VM that has left");
    }
    Ok(())
}

/// Those that this host has itself.
fn but_those_of(own: &[IpAddr], mut listed: Vec<TrackedConnection>) -> Vec<TrackedConnection> {
    listed.retain(|connection| !own.iter().any(|address| connection.is_of(*address)));
    listed
}

#[cfg(test)]
mod tests {
    use drainpipe_engine::tracked::Transport;

    use super::*;

    fn udp(source: &str, is_assured: bool) -> TrackedConnection {
        TrackedConnection {
            source: format!("{source}:1000").parse().unwrap(),
            destination: "10.0.0.5:53".parse().unwrap(),
            transport: Transport::Udp,
            is_answered: is_assured,
            is_assured,
            timeout_s: 30,
            mark: 0,
            zone: 0,
        }
    }

    /// The target has those of two connections that have these numbers.
    fn known(translated: usize, is_whole: bool, there: &[usize]) -> KnownConnections {
        let connections = vec![udp("10.0.9.9", true), udp("10.0.9.8", true)];
        let answered = there.iter().map(|number| connections[*number]).collect();
        let listed = Tracked { connections, translated, others: 0, is_whole };
        let mut known = KnownConnections { listed: Some(listed), ..KnownConnections::default() };
        known.is_answered(&Changes { ended: vec![], connections: answered }, TrackedTaken::default());
        known
    }

    #[test]
    fn what_went_along_and_what_did_not_is_told() {
        assert_eq!(
            KnownConnections::default().tracked_use(false, Duration::ZERO),
            None,
            "nothing is tracked"
        );
        let all = known(0, true, &[0, 1]).tracked_use(false, Duration::from_millis(3)).unwrap();
        assert_eq!((all.along, all.left, all.why, all.waited_ms), (2, 0, None, 3.0));
        let part = known(1, false, &[1]).tracked_use(true, Duration::from_millis(20)).unwrap();
        let why = part.why.unwrap();
        assert_eq!((part.along, part.left), (1, 2));
        for words in ["translates", "more than could be listed", "no time for more"] {
            assert!(why.contains(words), "{why}");
        }
        let unlisted = KnownConnections { why: vec!["as it is".into()], ..KnownConnections::default() };
        let tracked_use = unlisted.tracked_use(false, Duration::ZERO).unwrap();
        assert_eq!(tracked_use.why.as_deref(), Some("as it is"));
    }

    #[test]
    fn those_in_use_go_first() {
        let connections = vec![udp("10.0.9.9", false), udp("10.0.9.8", true)];
        let ordered = in_order(Changes { ended: vec![], connections });
        assert_eq!(ordered.connections, [udp("10.0.9.8", true), udp("10.0.9.9", false)]);
    }

    #[test]
    fn what_this_host_has_itself_with_the_vm_is_kept() {
        let listed = vec![udp("10.0.0.1", true), udp("10.0.9.8", true)];
        assert_eq!(but_those_of(&["10.0.0.1".parse().unwrap()], listed), [udp("10.0.9.8", true)]);
    }
}
