//! Limits of what migrations take of the links: of what leaves this host, and of what comes to it.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use drainpipe_engine::bandwidth::{BandwidthSetting, grant};
use drainpipe_engine::pacing::{BYTES_PER_S_OF_MBPS, for_relay};
use drainpipe_engine::plan::Plan;
use drainpipe_engine::problem::Problem;
use drainpipe_relay::Limiter;
use jiff::Zoned;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::warn;

use crate::api_types::{BandwidthShare, BandwidthView};
use crate::host::Host;
use crate::journal::{Journal, JournalError};
use crate::lock::lock;
use crate::pacer::{Pacer, Pacing};
use crate::peers::Peers;

/// How often a migration's share is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How long the target may take to say what share it grants; the last answer holds meanwhile.
const ANSWER_DEADLINE: Duration = Duration::from_secs(1);

/// Who leaves the links to another one takes so small a part of them.
const SHARE_OF_WAY_GIVEN: u64 = 8;

/// For so long at a time at most, whatever it is told.
const GIVES_WAY_MAX: Duration = Duration::from_secs(5);

/// A source that has not asked for so long sends nothing any more.
const ASKED_WITHIN: Duration = Duration::from_secs(4);

/// What a migration over links of unknown speed could use, in Mb/s: more than any NIC has.
const SPEED_UNKNOWN_MBPS: u64 = 1_000_000;

/// The limits of this host.
#[derive(Debug)]
pub(crate) struct Bandwidth {
    host: Arc<Host>,
    peers: Arc<Peers>,
    journal: Arc<Journal>,
    setting: Mutex<BandwidthSetting>,
    // By migration that sends.
    leaving: Mutex<BTreeMap<String, Share>>,
    // And when its source has last asked.
    coming: Mutex<BTreeMap<String, (Share, Instant)>>,
}

/// One migration's part of a limit.
#[derive(Debug, Clone, Copy)]
struct Share {
    could_use_mbps: u64,
    // Without a limit nothing: what it takes then says nothing of a limit that is set later.
    granted_mbps: u64,
}

impl Bandwidth {
    /// With what was set in an earlier life of the agent.
    pub(crate) fn open(
        host: &Arc<Host>,
        peers: &Arc<Peers>,
        journal: &Arc<Journal>,
    ) -> Result<Self, JournalError> {
        Ok(Self {
            host: Arc::clone(host),
            peers: Arc::clone(peers),
            setting: Mutex::new(journal.bandwidth_setting()?),
            journal: Arc::clone(journal),
            leaving: Mutex::default(),
            coming: Mutex::default(),
        })
    }

    /// What holds now.
    pub(crate) fn view(&self) -> BandwidthView {
        let setting = *lock(&self.setting);
        let later = setting.changes(&self.host.config.bandwidth, Zoned::now().datetime());
        BandwidthView { host: self.host.name().into(), setting, limit_mbps: self.limit_by(setting), later }
    }

    /// Mb/s that hold now, in each direction; absent for no limit.
    pub(crate) fn limit_mbps(&self) -> Option<u64> {
        self.limit_by(*lock(&self.setting))
    }

    fn limit_by(&self, setting: BandwidthSetting) -> Option<u64> {
        setting.limit_mbps(&self.host.config.bandwidth, Zoned::now().datetime())
    }

    /// Sets the limit until it is set anew, also for migrations in flight.
    pub(crate) fn set(&self, setting: BandwidthSetting) -> Result<BandwidthView, Problem> {
        if setting == BandwidthSetting::Mbps(0) {
            return Err(Problem::bad_input(
                "a limit of 0 Mb/s would keep migrations from ever ending: 1 is the least",
            ));
        }
        let mut held = lock(&self.setting);
        self.journal.set_bandwidth_setting(setting)?;
        *held = setting;
        drop(held);
        Ok(self.view())
    }

    /// The share of a migration that comes here and could use so much. Its source asks again and again.
    pub(crate) fn share_of_coming(&self, migration: &str, wanted_mbps: Option<u64>) -> BandwidthShare {
        let wanted_mbps = wanted_mbps.unwrap_or(SPEED_UNKNOWN_MBPS).max(1);
        let mut coming = lock(&self.coming);
        coming.retain(|_, (_, asked)| asked.elapsed() < ASKED_WITHIN);
        let new = Share { could_use_mbps: wanted_mbps, granted_mbps: 0 };
        let (share, asked) = coming.entry(migration.into()).or_insert((new, Instant::now()));
        (share.could_use_mbps, *asked) = (wanted_mbps, Instant::now());
        let shares = coming.iter_mut().map(|(id, (share, _))| (id.as_str(), share));
        BandwidthShare { mbps: granted(self.limit_mbps(), migration, shares) }
    }

    /// The share of one that is on its way and could use so much.
    fn share_of_leaving(&self, migration: &str, wanted_mbps: u64) -> Option<u64> {
        let mut leaving = lock(&self.leaving);
        leaving.get_mut(migration)?.could_use_mbps = wanted_mbps;
        granted(self.limit_mbps(), migration, leaving.iter_mut().map(|(id, share)| (id.as_str(), share)))
    }
}

/// What this one gets now, which is noted.
fn granted<'a>(
    limit_mbps: Option<u64>,
    migration: &str,
    shares: impl Iterator<Item = (&'a str, &'a mut Share)>,
) -> Option<u64> {
    let (ids, mut shares): (Vec<_>, Vec<_>) = shares.unzip();
    let own = ids.iter().position(|id| *id == migration)?;
    let wanted_mbps: Vec<u64> = shares.iter().map(|share| share.could_use_mbps).collect();
    let held_mbps: Vec<u64> = shares.iter().map(|share| share.granted_mbps).collect();
    let mbps = limit_mbps.and_then(|limit_mbps| grant(limit_mbps, &wanted_mbps, &held_mbps, own));
    shares[own].granted_mbps = mbps.unwrap_or(0);
    mbps
}

/// One migration from here, among those that share this host's limit; dropped, no more.
#[derive(Debug)]
struct Leaving {
    bandwidth: Arc<Bandwidth>,
    migration: String,
}

impl Leaving {
    fn enter(bandwidth: &Arc<Bandwidth>, migration: &str, could_use_mbps: u64) -> Self {
        let share = Share { could_use_mbps, granted_mbps: 0 };
        lock(&bandwidth.leaving).insert(migration.into(), share);
        Self { bandwidth: Arc::clone(bandwidth), migration: migration.into() }
    }
}

impl Drop for Leaving {
    fn drop(&mut self) {
        lock(&self.bandwidth.leaving).remove(&self.migration);
    }
}

/// A migration from here, to those who hold its bytes back.
#[derive(Debug)]
pub(crate) struct Sending<'a> {
    /// Its identifier.
    pub(crate) migration: &'a str,
    /// The host that it goes to.
    pub(crate) target: &'a str,
    /// Whether it leaves the links to another one, now and from now on.
    pub(crate) way_given: watch::Receiver<bool>,
}

/// A migration's share from its first byte on.
pub(crate) struct FirstShare {
    flight: Flight,
    leaving: Leaving,
    limit_mbps: watch::Receiver<Option<u64>>,
}

impl FirstShare {
    /// For a migration that is about to send; asks the target, too.
    pub(crate) async fn of(
        bandwidth: &Arc<Bandwidth>,
        sending: Sending<'_>,
        plan: &Plan,
        valve: Valve,
    ) -> Self {
        let could_use_mbps = plan.carried_mbps().map_or(SPEED_UNKNOWN_MBPS, |mbps| mbps.max(1));
        let leaving = Leaving::enter(bandwidth, sending.migration, could_use_mbps);
        let (tell, limit_mbps) = watch::channel(None);
        let mut flight = Flight {
            bandwidth: Arc::clone(bandwidth),
            migration: sending.migration.into(),
            target: sending.target.into(),
            way_given: sending.way_given,
            gives_way_until: None,
            could_use_mbps,
            valve,
            granted_mbps: None,
            limit_mbps: None,
            set_mbps: None,
            tell,
        };
        let answer = flight.ask_target().await;
        flight.is_granted(&answer);
        flight.keep_to_limit();
        Self { flight, leaving, limit_mbps }
    }

    /// What QEMU is to begin with, in Mb/s of the links; absent for no limit, and where the relay keeps it.
    pub(crate) fn of_qemu_mbps(&self) -> Option<u64> {
        match &self.flight.valve {
            Valve::Qemu(pacer) => pacer.qemu_begins_with_mbps(),
            Valve::Relay(_) | Valve::Nobody => None,
        }
    }

    /// In Mb/s of the links; absent for no limit.
    pub(crate) fn limit_mbps(&self) -> Option<u64> {
        *self.limit_mbps.borrow()
    }

    /// Keeps the migration within its share while its memory is sent.
    pub(crate) fn follow(self) -> Throttle {
        let Self { flight, leaving, limit_mbps } = self;
        let valve = flight.valve.clone();
        let pacing = match &valve {
            Valve::Qemu(pacer) => Some(pacer.begin()),
            Valve::Relay(_) | Valve::Nobody => None,
        };
        Throttle {
            following: tokio::spawn(flight.follow()),
            leaving: Some(leaving),
            pacing,
            valve,
            limit_mbps,
        }
    }
}

/// Keeps one migration from here within its share while its memory is sent; dropped, no more. What QEMU has given to the
/// kernel by then goes as it was to go.
#[derive(Debug)]
pub(crate) struct Throttle {
    following: JoinHandle<()>,
    leaving: Option<Leaving>,
    pacing: Option<Pacing>,
    valve: Valve,
    limit_mbps: watch::Receiver<Option<u64>>,
}

impl Throttle {
    /// Lets the rest go as fast as the links are.
    pub(crate) fn lift(mut self) {
        self.following.abort();
        self.leaving = None;
        if let Some(pacing) = self.pacing.take() {
            pacing.lift();
        }
    }

    /// Whether the limit has changed since this was last asked.
    pub(crate) fn has_news(&mut self) -> bool {
        let has_changed = self.limit_mbps.has_changed().unwrap_or(false);
        if has_changed {
            self.limit_mbps.mark_unchanged();
        }
        has_changed
    }

    /// In Mb/s; absent for no limit.
    pub(crate) fn limit_mbps(&self) -> Option<u64> {
        *self.limit_mbps.borrow()
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        self.following.abort();
        // First of all: another thread may be in the midst of following, and sets a relay's limit only of one that is
        // found here.
        self.leaving = None;
        if let Valve::Relay(limiter) = &self.valve {
            limiter.set(None);
        }
    }
}

struct Flight {
    bandwidth: Arc<Bandwidth>,
    migration: String,
    target: String,
    way_given: watch::Receiver<bool>,
    // Absent while it uses what it may.
    gives_way_until: Option<Instant>,
    could_use_mbps: u64,
    valve: Valve,
    // By the target, which holds until it says something else.
    granted_mbps: Option<u64>,
    // Its share, and what was set, which is less while it gives way.
    limit_mbps: Option<u64>,
    set_mbps: Option<u64>,
    tell: watch::Sender<Option<u64>>,
}

/// Where a migration's bytes are held back.
#[derive(Debug, Clone)]
pub(crate) enum Valve {
    /// In the kernel, on QEMU's connections.
    Qemu(Pacer),
    /// In the relay, where it is known what they are once they are packed.
    Relay(Limiter),
    /// Nowhere: a limit that is set meanwhile does not hold.
    Nobody,
}

impl Flight {
    async fn follow(mut self) {
        loop {
            if self.keep_to_limit_until(tokio::time::sleep(LOOK_EVERY)).await.is_none() {
                return;
            }
            // It is asked by a migration that keeps to what it was told.
            let answer = self.ask_target();
            let Some(answer) = self.keep_to_limit_until(answer).await else { return };
            self.is_granted(&answer);
        }
    }

    fn is_granted(&mut self, answer: &Result<BandwidthShare, Problem>) {
        if let Ok(share) = answer {
            self.granted_mbps = share.mbps;
        }
        // What the target does not grant, others may have of this host's links.
        let wanted_mbps = self.granted_mbps.map_or(self.could_use_mbps, |mbps| mbps.min(self.could_use_mbps));
        let own_mbps = self.bandwidth.share_of_leaving(&self.migration, wanted_mbps);
        self.limit_mbps = own_mbps.into_iter().chain(self.granted_mbps).min();
    }

    /// None once the migration is over.
    async fn keep_to_limit_until<T>(&mut self, what: impl Future<Output = T>) -> Option<T> {
        let mut what = pin!(what);
        loop {
            self.keep_to_limit();
            tokio::select! {
                what = &mut what => return Some(what),
                changed = self.way_given.changed() => changed.ok()?,
            }
        }
    }

    fn keep_to_limit(&mut self) {
        let limit_mbps = self.limit_with_way_given();
        self.set(limit_mbps);
        if self.limit_mbps != *self.tell.borrow() {
            self.tell.send_replace(self.limit_mbps);
        }
    }

    fn limit_with_way_given(&mut self) -> Option<u64> {
        let now = Instant::now();
        let until = self.gives_way_until.unwrap_or(now + GIVES_WAY_MAX);
        self.gives_way_until = self.way_given.borrow_and_update().then_some(until);
        let gives_way = self.gives_way_until.is_some_and(|until| now < until);
        let small_mbps = gives_way.then(|| (self.could_use_mbps / SHARE_OF_WAY_GIVEN).max(1));
        self.limit_mbps.into_iter().chain(small_mbps).min()
    }

    fn set(&mut self, limit_mbps: Option<u64>) {
        if limit_mbps == self.set_mbps {
            return;
        }
        match &self.valve {
            Valve::Qemu(pacer) => pacer.set(limit_mbps),
            Valve::Relay(limiter) => {
                let leaving = lock(&self.bandwidth.leaving);
                if leaving.contains_key(&self.migration) {
                    let bytes_per_s = |mbps: u64| mbps.saturating_mul(BYTES_PER_S_OF_MBPS);
                    limiter.set(limit_mbps.map(|mbps| for_relay(bytes_per_s(mbps))));
                }
            }
            Valve::Nobody if self.limit_mbps.is_none() => {}
            Valve::Nobody => {
                let migration = self.migration.as_str();
                warn!(migration, "nobody can keep its hypervisor to the bandwidth limit that holds now");
            }
        }
        self.set_mbps = limit_mbps;
    }

    fn ask_target(&self) -> impl Future<Output = Result<BandwidthShare, Problem>> + use<> {
        let path = format!("/v1/incoming/{}/bandwidth?wanted_mbps={}", self.migration, self.could_use_mbps);
        let (peers, target) = (Arc::clone(&self.bandwidth.peers), self.target.clone());
        async move {
            let peer = peers.get(&target).ok_or_else(|| Problem::failed("no such peer"))?;
            peer.get_within(&path, ANSWER_DEADLINE).await
        }
    }
}
