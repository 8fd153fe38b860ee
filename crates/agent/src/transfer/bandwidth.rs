//! Limits on what migrations take of the links, with their memory and with their disks: for what leaves this host, and
//! for what comes to it.

use std::collections::BTreeMap;
use std::pin::pin;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use drainpipe_engine::bandwidth::classes::{Limits, Taker, TrafficClass, grant, guest_writes_mbps};
use drainpipe_engine::bandwidth::pacing::{BYTES_PER_S_OF_MBPS, for_relay};
use drainpipe_engine::bandwidth::{BandwidthSetting, Limited};
use drainpipe_engine::plan::Plan;
use drainpipe_engine::problem::Problem;
use drainpipe_nbd::Pace;
use drainpipe_relay::Limiter;
use jiff::Zoned;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::warn;

use crate::host::Host;
use crate::peers::Peers;
use crate::store::journal::{Journal, JournalError};
use crate::store::lock::lock;
use crate::transfer::pacer::{Pacer, Pacing};
use drainpipe_api_types::{BandwidthShare, BandwidthView, StorageLimitView};

/// How often a migration's share is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How long the target may take to say what share it grants; the last answer holds meanwhile.
const ANSWER_DEADLINE: Duration = Duration::from_secs(1);

/// A migration that leaves the links to another one takes so small a part of them.
const SHARE_OF_WAY_GIVEN: u64 = 8;

/// The longest time for which it gives way at a time, whatever it was asked for.
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
    settings: Mutex<Settings>,
    leaving: Mutex<BTreeMap<Sent, Taker>>,
    // And when its source has last asked.
    coming: Mutex<BTreeMap<Sent, (Taker, Instant)>>,
}

#[derive(Debug, Clone, Copy)]
struct Settings {
    all: BandwidthSetting,
    storage: BandwidthSetting,
}

/// What is sent.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Sent {
    /// The migration's identifier.
    pub(crate) migration: String,
    /// The kind of traffic.
    pub(crate) class: TrafficClass,
}

impl Sent {
    /// Without a limit it holds nothing: what it takes then says nothing of a limit that is set later.
    fn taker(&self, paths_mbps: u64) -> Taker {
        let wanted_mbps = paths_mbps;
        Taker { class: self.class, guest_waits: false, paths_mbps, wanted_mbps, held_mbps: 0 }
    }
}

impl Bandwidth {
    /// With what was set in an earlier run of the agent.
    pub(crate) fn open(
        host: &Arc<Host>,
        peers: &Arc<Peers>,
        journal: &Arc<Journal>,
    ) -> Result<Self, JournalError> {
        let settings = Settings {
            all: journal.bandwidth_setting(Limited::All)?,
            storage: journal.bandwidth_setting(Limited::Storage)?,
        };
        Ok(Self {
            host: Arc::clone(host),
            peers: Arc::clone(peers),
            settings: Mutex::new(settings),
            journal: Arc::clone(journal),
            leaving: Mutex::default(),
            coming: Mutex::default(),
        })
    }

    /// What holds now.
    pub(crate) fn view(&self) -> BandwidthView {
        let Settings { all, storage } = *lock(&self.settings);
        let (configured, now) = (&self.host.config.bandwidth, Zoned::now().datetime());
        let of_storage = configured.of_storage();
        BandwidthView {
            host: self.host.name().into(),
            setting: all,
            limit_mbps: all.limit_mbps(configured, now),
            later: all.changes(configured, now),
            storage: StorageLimitView {
                setting: storage,
                limit_mbps: storage.limit_mbps(&of_storage, now),
                later: storage.changes(&of_storage, now),
            },
        }
    }

    /// Mb/s that hold now for all that is sent, in each direction; absent for no limit.
    pub(crate) fn limit_mbps(&self) -> Option<u64> {
        self.limits().all_mbps
    }

    /// What holds now.
    pub(crate) fn limits(&self) -> Limits {
        let Settings { all, storage } = *lock(&self.settings);
        let (configured, now) = (&self.host.config.bandwidth, Zoned::now().datetime());
        Limits {
            all_mbps: all.limit_mbps(configured, now),
            storage_mbps: storage.limit_mbps(&configured.of_storage(), now),
        }
    }

    /// Sets a limit until it is set again, also for migrations in flight.
    pub(crate) fn set(&self, limited: Limited, setting: BandwidthSetting) -> Result<BandwidthView, Problem> {
        if setting == BandwidthSetting::Mbps(0) {
            return Err(Problem::bad_input(
                "a limit of 0 Mb/s would keep migrations from ever ending: give at least 1",
            ));
        }
        let mut held = lock(&self.settings);
        self.journal.set_bandwidth_setting(limited, setting)?;
        match limited {
            Limited::All => held.all = setting,
            Limited::Storage => held.storage = setting,
        }
        drop(held);
        Ok(self.view())
    }

    /// The share of what comes here and could use so much. Its source asks again and again.
    pub(crate) fn share_of_coming(
        &self,
        sent: &Sent,
        wanted_mbps: Option<u64>,
        guest_waits: bool,
    ) -> BandwidthShare {
        let wanted_mbps = wanted_mbps.unwrap_or(SPEED_UNKNOWN_MBPS).max(1);
        let mut coming = lock(&self.coming);
        coming.retain(|_, (_, asked)| asked.elapsed() < ASKED_WITHIN);
        let new = (sent.taker(wanted_mbps), Instant::now());
        let (taker, asked) = coming.entry(sent.clone()).or_insert(new);
        (taker.paths_mbps, taker.wanted_mbps) = (wanted_mbps, wanted_mbps);
        (taker.guest_waits, *asked) = (guest_waits, Instant::now());
        let takers = coming.iter_mut().map(|(sent, (taker, _))| (sent, taker));
        BandwidthShare { mbps: granted(self.limits(), sent, takers) }
    }

    /// The share of what is on its way and could use so much.
    fn share_of_leaving(&self, sent: &Sent, wanted_mbps: u64, guest_waits: bool) -> Option<u64> {
        let mut leaving = lock(&self.leaving);
        let taker = leaving.get_mut(sent)?;
        (taker.wanted_mbps, taker.guest_waits) = (wanted_mbps, guest_waits);
        granted(self.limits(), sent, leaving.iter_mut())
    }
}

/// What this one gets now, which is noted.
fn granted<'a>(
    limits: Limits,
    sent: &Sent,
    takers: impl Iterator<Item = (&'a Sent, &'a mut Taker)>,
) -> Option<u64> {
    let (all, mut takers): (Vec<_>, Vec<_>) = takers.unzip();
    let own = all.iter().position(|other| *other == sent)?;
    let known: Vec<Taker> = takers.iter().map(|taker| **taker).collect();
    let mbps = grant(limits, &known, own);
    takers[own].held_mbps = mbps.unwrap_or(0);
    mbps
}

/// What leaves, among all that share this host's limits; dropped, no more.
#[derive(Debug)]
struct RegisteredSender {
    bandwidth: Arc<Bandwidth>,
    sent: Sent,
}

impl RegisteredSender {
    fn enter(bandwidth: &Arc<Bandwidth>, sent: &Sent, could_use_mbps: u64) -> Self {
        lock(&bandwidth.leaving).insert(sent.clone(), sent.taker(could_use_mbps));
        Self { bandwidth: Arc::clone(bandwidth), sent: sent.clone() }
    }
}

impl Drop for RegisteredSender {
    fn drop(&mut self) {
        lock(&self.bandwidth.leaving).remove(&self.sent);
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
    leaving: RegisteredSender,
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
        let sent = Sent { migration: sending.migration.into(), class: valve.class() };
        let leaving = RegisteredSender::enter(bandwidth, &sent, could_use_mbps);
        let (tell, limit_mbps) = watch::channel(None);
        let mut flight = Flight {
            bandwidth: Arc::clone(bandwidth),
            sent,
            target: sending.target.into(),
            way_given: sending.way_given,
            gives_way_until: None,
            could_use_mbps,
            valve,
            disks_seen: (0, Instant::now()),
            granted_mbps: None,
            limit_mbps: None,
            set_mbps: None,
            tell,
        };
        let wish = flight.wish();
        let answer = flight.ask_target(wish).await;
        flight.is_granted(wish, &answer);
        flight.keep_to_limit();
        Self { flight, leaving, limit_mbps }
    }

    /// What QEMU is to begin with, in Mb/s of the links; absent for no limit, and where the relay keeps it.
    pub(crate) fn of_hypervisor_mbps(&self) -> Option<u64> {
        match &self.flight.valve {
            Valve::Hypervisor(pacer) => pacer.hypervisor_begins_with_mbps(),
            Valve::Relay(_) | Valve::Splitters(_) | Valve::Nobody => None,
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
            Valve::Hypervisor(pacer) => Some(pacer.begin()),
            Valve::Relay(_) | Valve::Splitters(_) | Valve::Nobody => None,
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

/// Keeps one migration from here within its share while its memory, or its disks, are sent; dropped, no more. What the
/// kernel has by then goes as it was to go.
#[derive(Debug)]
pub(crate) struct Throttle {
    following: JoinHandle<()>,
    leaving: Option<RegisteredSender>,
    pacing: Option<Pacing>,
    valve: Valve,
    limit_mbps: watch::Receiver<Option<u64>>,
}

impl Throttle {
    /// Lets the rest go without a limit.
    pub(crate) fn lift(mut self) {
        self.following.abort();
        self.leaving = None;
        if let Some(pacing) = self.pacing.take() {
            pacing.lift();
        }
    }

    /// In Mb/s; absent for no limit.
    pub(crate) fn limit_mbps(&self) -> Option<u64> {
        *self.limit_mbps.borrow()
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        self.following.abort();
        // First of all: another thread may be in the middle of following, and sets a relay's or a splitter's limit only of
        // one that is found here.
        self.leaving = None;
        match &self.valve {
            Valve::Relay(limiter) => limiter.set(None),
            Valve::Splitters(disks) => disks.pace.set(None),
            Valve::Hypervisor(_) | Valve::Nobody => {}
        }
    }
}

struct Flight {
    bandwidth: Arc<Bandwidth>,
    sent: Sent,
    target: String,
    way_given: watch::Receiver<bool>,
    // Absent while it uses what it may.
    gives_way_until: Option<Instant>,
    could_use_mbps: u64,
    valve: Valve,
    // What its disks had sent when somebody looked last.
    disks_seen: (u64, Instant),
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
    Hypervisor(Pacer),
    /// In the relay, where it is known what they are once they are packed.
    Relay(Limiter),
    /// In the splitters of its disks.
    Splitters(DiskPace),
    /// Nowhere: a limit that is set meanwhile does not hold.
    Nobody,
}

impl Valve {
    /// For connections that are made only later.
    pub(crate) fn awaited(self) -> Self {
        match self {
            Self::Hypervisor(pacer) => Self::Hypervisor(pacer.awaited()),
            other => other,
        }
    }

    fn class(&self) -> TrafficClass {
        match self {
            Self::Hypervisor(_) | Self::Relay(_) | Self::Nobody => TrafficClass::Memory,
            Self::Splitters(_) => TrafficClass::Storage,
        }
    }
}

/// How fast the disks of one migration may go.
#[derive(Debug, Clone, Default)]
pub(crate) struct DiskPace {
    /// The pace of all of its splitters.
    pub(crate) pace: Pace,
    phase: Arc<Mutex<DiskPhase>>,
}

/// Who waits for the disks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) enum DiskPhase {
    /// The copies begin. The guest waits: with each disk more, its QEMU does nothing until all that is under way is there.
    #[default]
    Starting,
    /// Nobody waits.
    Copying,
    /// What the guest writes goes, which waits for it, and at first what is left of the copies, which stands before it.
    Mirrored,
}

impl DiskPace {
    /// From now on.
    pub(crate) fn is(&self, phase: DiskPhase) {
        *lock(&self.phase) = phase;
    }
}

/// What a migration could use now.
#[derive(Debug, Clone, Copy)]
struct Wish {
    mbps: u64,
    guest_waits: bool,
}

impl Flight {
    async fn follow(mut self) {
        loop {
            if self.keep_to_limit_until(tokio::time::sleep(LOOK_EVERY)).await.is_none() {
                return;
            }
            let wish = self.wish();
            // A migration that keeps to its share asks.
            let answer = self.ask_target(wish);
            let Some(answer) = self.keep_to_limit_until(answer).await else { return };
            self.is_granted(wish, &answer);
        }
    }

    fn wish(&mut self) -> Wish {
        let mbps = self.could_use_mbps;
        let Valve::Splitters(disks) = &self.valve else { return Wish { mbps, guest_waits: false } };
        let (sent_bytes, now) = (disks.pace.sent_bytes(), Instant::now());
        let (before_bytes, before) = std::mem::replace(&mut self.disks_seen, (sent_bytes, now));
        let phase = *lock(&disks.phase);
        let mbps = match phase {
            DiskPhase::Starting | DiskPhase::Copying => mbps,
            DiskPhase::Mirrored => guest_writes_mbps(sent_bytes - before_bytes, now - before, mbps),
        };
        Wish { mbps, guest_waits: phase != DiskPhase::Copying }
    }

    fn is_granted(&mut self, wish: Wish, answer: &Result<BandwidthShare, Problem>) {
        if let Ok(share) = answer {
            self.granted_mbps = share.mbps;
        }
        // What the target does not grant, others may have of this host's links.
        let wanted_mbps = self.granted_mbps.map_or(wish.mbps, |mbps| mbps.min(wish.mbps));
        let own_mbps = self.bandwidth.share_of_leaving(&self.sent, wanted_mbps, wish.guest_waits);
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
            Valve::Hypervisor(pacer) => pacer.set(limit_mbps),
            Valve::Relay(limiter) => self.set_agents_own(limit_mbps, |bytes| limiter.set(bytes)),
            Valve::Splitters(disks) => self.set_agents_own(limit_mbps, |bytes| disks.pace.set(bytes)),
            Valve::Nobody if self.limit_mbps.is_none() => {}
            Valve::Nobody => {
                let migration = self.sent.migration.as_str();
                warn!(migration, "nobody can make its hypervisor keep the present bandwidth limit");
            }
        }
        self.set_mbps = limit_mbps;
    }

    /// Sets the limit of what the agent itself sends, unless that is over.
    fn set_agents_own(&self, limit_mbps: Option<u64>, set: impl FnOnce(Option<u64>)) {
        let leaving = lock(&self.bandwidth.leaving);
        if leaving.contains_key(&self.sent) {
            set(limit_mbps.map(|mbps| for_relay(mbps.saturating_mul(BYTES_PER_S_OF_MBPS))));
        }
    }

    fn ask_target(&self, wish: Wish) -> impl Future<Output = Result<BandwidthShare, Problem>> + use<> {
        let Wish { mbps, guest_waits } = wish;
        // 0.1.0 takes no more of memory, and copies no disks.
        let class = match self.sent.class {
            TrafficClass::Memory => String::new(),
            TrafficClass::Storage => format!("&class=storage&guest_waits={guest_waits}"),
        };
        let path = format!("/v1/incoming/{}/bandwidth?wanted_mbps={mbps}{class}", self.sent.migration);
        let (peers, target) = (Arc::clone(&self.bandwidth.peers), self.target.clone());
        async move {
            let peer = peers.get(&target).ok_or_else(|| Problem::failed("no such peer"))?;
            peer.get_within(&path, ANSWER_DEADLINE).await
        }
    }
}

#[cfg(test)]
mod tests;
