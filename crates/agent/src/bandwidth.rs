//! Limits of what migrations take of the links: of what leaves this host, and of what comes to it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use drainpipe_engine::bandwidth::{BandwidthSetting, fair_shares};
use drainpipe_engine::migration::Event;
use drainpipe_engine::plan::Plan;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::Vmm;
use drainpipe_hypervisor::migration as qemu;
use drainpipe_hypervisor::qmp::QmpError;
use drainpipe_relay::Limiter;
use jiff::Zoned;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use tracing::warn;

use crate::agent::Agent;
use crate::api::types::{BandwidthShare, BandwidthView};
use crate::journal::{Journal, JournalError};
use crate::lock::lock;
use crate::outgoing::Running;
use crate::vms::QMP_DEADLINE;

/// How often a migration's share is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(500);

/// How long the target may take to say what share it grants; the last answer holds meanwhile.
const ANSWER_DEADLINE: Duration = Duration::from_secs(1);

/// Who leaves the links to another one that is about to be paused takes so small a part of them.
const SHARE_OF_WAY_GIVEN: u64 = 8;

/// For so long at most, whatever it is told.
const GIVES_WAY_MAX: Duration = Duration::from_secs(5);

/// A source that has not asked for so long sends nothing any more.
const ASKED_WITHIN: Duration = Duration::from_secs(4);

/// What a migration over links of unknown speed could use, in Mb/s: more than any NIC has.
const SPEED_UNKNOWN_MBPS: u64 = 1_000_000;

/// The limits of this host.
#[derive(Debug)]
pub(crate) struct Bandwidth {
    setting: Mutex<BandwidthSetting>,
    // By migration: what each could use, in Mb/s.
    leaving: Mutex<BTreeMap<String, u64>>,
    // And when its source has last asked.
    coming: Mutex<BTreeMap<String, (u64, Instant)>>,
}

impl Bandwidth {
    /// With what was set in an earlier life of the agent.
    pub(crate) fn open(journal: &Journal) -> Result<Self, JournalError> {
        let setting = Mutex::new(journal.bandwidth_setting()?);
        Ok(Self { setting, leaving: Mutex::default(), coming: Mutex::default() })
    }
}

/// What holds now.
pub(crate) fn view(agent: &Agent) -> BandwidthView {
    let setting = *lock(&agent.bandwidth.setting);
    let later = setting.changes(&agent.config.bandwidth, Zoned::now().datetime());
    BandwidthView { host: agent.name().into(), setting, limit_mbps: limit_by(agent, setting), later }
}

/// Mb/s that hold now, in each direction; absent for no limit.
pub(crate) fn limit_mbps(agent: &Agent) -> Option<u64> {
    limit_by(agent, *lock(&agent.bandwidth.setting))
}

fn limit_by(agent: &Agent, setting: BandwidthSetting) -> Option<u64> {
    setting.limit_mbps(&agent.config.bandwidth, Zoned::now().datetime())
}

/// Sets the limit until it is set anew, also for migrations in flight.
pub(crate) fn set(agent: &Agent, setting: BandwidthSetting) -> Result<BandwidthView, Problem> {
    if setting == BandwidthSetting::Mbps(0) {
        return Err(Problem::bad_input(
            "a limit of 0 Mb/s would keep migrations from ever ending: 1 is the least",
        ));
    }
    let mut held = lock(&agent.bandwidth.setting);
    agent.journal.set_bandwidth_setting(setting)?;
    *held = setting;
    drop(held);
    Ok(view(agent))
}

/// The share of a migration that comes here and could use so much. Its source asks again and again.
pub(crate) fn share_of_coming(agent: &Agent, migration: &str, wanted_mbps: Option<u64>) -> BandwidthShare {
    let wanted_mbps = wanted_mbps.unwrap_or(SPEED_UNKNOWN_MBPS).max(1);
    let mut coming = lock(&agent.bandwidth.coming);
    coming.retain(|_, (_, asked)| asked.elapsed() < ASKED_WITHIN);
    coming.insert(migration.into(), (wanted_mbps, Instant::now()));
    let wanted = coming.iter().map(|(id, (wanted_mbps, _))| (id.as_str(), *wanted_mbps));
    BandwidthShare { mbps: share(agent, migration, wanted) }
}

fn share_of_leaving(agent: &Agent, migration: &str, wanted_mbps: u64) -> Option<u64> {
    let mut leaving = lock(&agent.bandwidth.leaving);
    leaving.insert(migration.into(), wanted_mbps);
    share(agent, migration, leaving.iter().map(|(id, wanted_mbps)| (id.as_str(), *wanted_mbps)))
}

fn share<'a>(agent: &Agent, migration: &str, all: impl Iterator<Item = (&'a str, u64)>) -> Option<u64> {
    let limit_mbps = limit_mbps(agent)?;
    let (ids, wanted_mbps): (Vec<_>, Vec<_>) = all.unzip();
    let own = ids.iter().position(|id| *id == migration)?;
    fair_shares(limit_mbps, &wanted_mbps).get(own).copied()
}

/// Keeps one migration from here within its share while its memory is sent; dropped, no more.
#[derive(Debug)]
pub(crate) struct Throttle {
    agent: Arc<Agent>,
    migration: String,
    following: JoinHandle<()>,
    valve: Valve,
    limit_mbps: watch::Receiver<Option<u64>>,
}

impl Throttle {
    /// For a migration that has begun to send.
    pub(crate) fn start(agent: &Arc<Agent>, running: &Running, plan: &Plan, valve: Valve) -> Self {
        let (tell, limit_mbps) = watch::channel(None);
        let flight = Flight {
            agent: Arc::clone(agent),
            migration: running.id().into(),
            target: running.target().into(),
            way_given: running.way_given(),
            could_use_mbps: plan.carried_mbps().map_or(SPEED_UNKNOWN_MBPS, |mbps| mbps.max(1)),
            valve: valve.clone(),
        };
        let following = tokio::spawn(flight.follow(tell));
        Self { agent: Arc::clone(agent), migration: running.id().into(), following, valve, limit_mbps }
    }

    /// What the migration is to be told if the limit has changed since this was last asked.
    pub(crate) fn news(&mut self) -> Option<Event> {
        let changed = self.limit_mbps.has_changed().unwrap_or(false);
        changed.then(|| Event::BandwidthLimited(*self.limit_mbps.borrow_and_update()))
    }
}

impl Drop for Throttle {
    fn drop(&mut self) {
        self.following.abort();
        if let Valve::Relay(limiter) = &self.valve {
            limiter.set(None);
        }
        lock(&self.agent.bandwidth.leaving).remove(&self.migration);
    }
}

struct Flight {
    agent: Arc<Agent>,
    migration: String,
    target: String,
    way_given: watch::Receiver<bool>,
    could_use_mbps: u64,
    valve: Valve,
}

/// Where a migration's bytes are held back.
#[derive(Debug, Clone)]
pub(crate) enum Valve {
    /// In QEMU, until the VM is paused.
    Qemu(Arc<Vmm>),
    /// In the relay, where it is known what they are once they are packed.
    Relay(Limiter),
}

impl Valve {
    async fn set(&self, limit_mbps: Option<u64>) -> Result<(), QmpError> {
        match self {
            Self::Qemu(vmm) => qemu::set_bandwidth(vmm, limit_mbps, QMP_DEADLINE).await,
            Self::Relay(limiter) => {
                limiter.set(limit_mbps.map(|mbps| qemu::bandwidth_bytes_per_s(Some(mbps))));
                Ok(())
            }
        }
    }
}

impl Flight {
    async fn follow(mut self, tell: watch::Sender<Option<u64>>) {
        let gives_way_until = Instant::now() + GIVES_WAY_MAX;
        let (mut granted_mbps, mut set_mbps) = (None, None);
        // Before the target is asked: by then it would send.
        self.set(self.with_way_given(None, gives_way_until), &mut set_mbps).await;
        loop {
            if let Ok(share) = self.ask_target().await {
                granted_mbps = share.mbps;
            }
            // What the target does not grant, others may have of this host's links.
            let wanted_mbps = granted_mbps.map_or(self.could_use_mbps, |mbps| mbps.min(self.could_use_mbps));
            let own_mbps = share_of_leaving(&self.agent, &self.migration, wanted_mbps);
            let limit_mbps = own_mbps.into_iter().chain(granted_mbps).min();
            let look_again = Instant::now() + LOOK_EVERY;
            loop {
                let is_set = self.set(self.with_way_given(limit_mbps, gives_way_until), &mut set_mbps).await;
                if is_set && limit_mbps != *tell.borrow() {
                    tell.send_replace(limit_mbps);
                }
                match tokio::time::timeout_at(look_again.into(), self.way_given.changed()).await {
                    Ok(Ok(())) => {}
                    // The migration is over.
                    Ok(Err(_)) => return,
                    Err(_) => break,
                }
            }
        }
    }

    fn with_way_given(&self, limit_mbps: Option<u64>, until: Instant) -> Option<u64> {
        let gives_way = *self.way_given.borrow() && Instant::now() < until;
        let small_mbps = gives_way.then(|| (self.could_use_mbps / SHARE_OF_WAY_GIVEN).max(1));
        limit_mbps.into_iter().chain(small_mbps).min()
    }

    /// Whether this limit holds.
    async fn set(&self, limit_mbps: Option<u64>, set_mbps: &mut Option<u64>) -> bool {
        if limit_mbps == *set_mbps {
            return true;
        }
        match self.valve.set(limit_mbps).await {
            Ok(()) => *set_mbps = limit_mbps,
            Err(error) => warn!(migration = self.migration, %error, "the bandwidth limit is not set"),
        }
        limit_mbps == *set_mbps
    }

    async fn ask_target(&self) -> Result<BandwidthShare, Problem> {
        let peer = self.agent.peer(&self.target).ok_or_else(|| Problem::failed("no such peer"))?;
        let path = format!("/v1/incoming/{}/bandwidth?wanted_mbps={}", self.migration, self.could_use_mbps);
        peer.get_within(&path, ANSWER_DEADLINE).await
    }
}
