//! The relay of a migration that is compressed or encrypted: its end on the source, and its end on the target.

use std::collections::VecDeque;
use std::net::{IpAddr, SocketAddr, TcpListener};
use std::sync::Mutex;

use drainpipe_engine::host::facts::NoPacking;
use drainpipe_engine::migration::progress::CompressionProgress;
use drainpipe_engine::migration::result::CompressionUse;
use drainpipe_engine::plan::{Plan, Relay};
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor::Machine;
use drainpipe_identity::{Identity, explain};
use drainpipe_relay::{
    ClientTls, ConcurrentSenders, Figures, Limiter, PACKING_THREADS_MAX, Packers, PackersSettings, Receiver,
    ReceiverSettings, RelayError, Sender, SenderSettings, ServerTls, TOKEN_BYTES, Token, Treatment,
};
use rustls::pki_types::ServerName;
use tracing::warn;
use uuid::Uuid;

use crate::guard::Guard;
use crate::store::config::Compression;
use crate::store::cpu_list::CpuList;
use crate::store::lock::lock;
use crate::transfer::scheduling_group;
use crate::transfer::transport::connections;
use crate::vms::Vms;

/// Progress tells what was done over this time.
const WINDOW_MS: f64 = 1_000.0;

/// What one end must know to find the other one, and no one else.
#[derive(Debug)]
pub(crate) struct OtherEnd<'a> {
    /// This host's own identity.
    pub(crate) identity: &'a Identity,
    /// The other host: the one that the migration was agreed on with.
    pub(crate) host: &'a str,
    /// What only both ends know, and for this migration only.
    pub(crate) token: Uuid,
}

/// What passes a relay.
#[derive(Debug, Clone, Copy)]
pub(crate) struct RelayedStream {
    relay: Relay,
    connections: usize,
}

impl RelayedStream {
    /// By this plan; none where it has no relay.
    pub(crate) fn of(plan: &Plan) -> Option<Self> {
        plan.relay().map(|relay| Self { relay, connections: connections(plan) })
    }

    fn treatment<T>(self, tls: T) -> Treatment<T> {
        match self.relay {
            Relay::Packs => Treatment::Packed,
            Relay::Encrypts => Treatment::Encrypted(tls),
            Relay::PacksAndEncrypts => Treatment::PackedAndEncrypted(tls),
        }
    }
}

/// The end on the source.
#[derive(Debug)]
pub(crate) struct OutgoingRelay {
    sender: Sender,
    target: String,
    is_compressed: bool,
    readings: VecDeque<(f64, Figures)>,
}

impl OutgoingRelay {
    /// Waits for this QEMU's connections, at its `outgoing_relay`. The guard holds them too. Both ends
    /// keep copies of so many MiB of pages.
    pub(crate) fn start(
        packing: &Packing,
        vmm: &dyn Machine,
        stream: RelayedStream,
        destination: SocketAddr,
        other: &OtherEnd<'_>,
        guard: &Guard,
        page_cache_mib: u32,
    ) -> Result<Self, Problem> {
        let target = ServerName::try_from(other.host.to_owned()).map_err(Problem::failed)?;
        let tls = ClientTls::new(other.identity.client_config(), target);
        let hands = guard.hands().map_err(Problem::failed)?;
        let settings = SenderSettings {
            path: vmm.outgoing_relay().path,
            users: vmm.relay_users().map_err(Problem::failed)?,
            destination,
            connections: stream.connections,
            token: token_of(other.token),
            treatment: stream.treatment(tls),
            cores: packing.cores,
            cpus: packing.cpus.cpus().to_vec(),
            gives_way: packing.gives_way,
            concurrent: packing.concurrent.clone(),
            page_cache_bytes: bytes(page_cache_mib),
        };
        let sender = Sender::start(settings, move |socket| hands.hold(socket)).map_err(Problem::failed)?;
        let (target, is_compressed) = (other.host.to_owned(), stream.relay.packs());
        Ok(Self { sender, target, is_compressed, readings: VecDeque::new() })
    }

    /// Why it ended; none as long as it goes on.
    pub(crate) fn problem(&self) -> Option<Problem> {
        let error = self.sender.error()?;
        let why = explain(&error).map_or_else(
            || error.to_string(),
            |why| format!("the memory could not be sent encrypted to {}: {why}", self.target),
        );
        Some(Problem::failed(why))
    }

    /// Whether it ended because its connections did: the target may know why. Of all else this end knows more.
    pub(crate) fn is_cut_off(&self) -> bool {
        matches!(self.sender.error(), Some(RelayError::Wire(_) | RelayError::Truncated))
    }

    /// What keeps it within a bandwidth limit.
    pub(crate) fn limiter(&self) -> Limiter {
        self.sender.limiter()
    }

    /// Sends nothing more, so that QEMU can be told to cancel and waits for no link.
    pub(crate) fn stop_sending(&self) {
        self.sender.stop_sending();
    }

    /// Whether what is left of the stream is little: meanwhile less waits in the relay.
    pub(crate) fn set_short(&self, is_short: bool) {
        self.sender.set_short(is_short);
    }

    /// Takes a reading.
    pub(crate) fn read(&mut self, now_ms: f64) {
        self.readings.push_back((now_ms, self.sender.figures()));
        // One reading older than the window stays, as the start of the interval.
        while self.readings.len() > 2 && self.readings[1].0 < now_ms - WINDOW_MS {
            self.readings.pop_front();
        }
    }

    /// What it has recently done.
    pub(crate) fn progress(&self) -> Option<CompressionProgress> {
        let ((begin_ms, begin), (end_ms, end)) = (self.readings.front()?, self.readings.back()?);
        let wire_bytes = end.wire_bytes - begin.wire_bytes;
        (self.is_compressed && wire_bytes > 0 && end_ms > begin_ms).then(|| CompressionProgress {
            ratio: (end.raw_bytes - begin.raw_bytes) as f64 / wire_bytes as f64,
            cores: (end.packing_cpu_seconds - begin.packing_cpu_seconds) * 1000.0 / (end_ms - begin_ms),
        })
    }

    /// What its connections are encrypted with, if they are.
    pub(crate) fn cipher_suite(&self) -> Option<String> {
        self.sender.cipher_suite()
    }

    /// What it compressed in all, if that is its task.
    pub(crate) fn compression(&self) -> Option<CompressionUse> {
        self.is_compressed.then(|| self.compressed())
    }

    fn compressed(&self) -> CompressionUse {
        let Figures { raw_bytes, wire_bytes, packed, delta_bytes, overtaken_bytes, packing_cpu_seconds } =
            self.sender.figures();
        CompressionUse {
            stream_bytes: raw_bytes,
            compressed_bytes: wire_bytes,
            raw_bytes: raw_bytes.saturating_sub(packed.lz4 + packed.zstd + delta_bytes),
            overtaken_bytes,
            lz4_bytes: packed.lz4,
            zstd_bytes: packed.zstd,
            delta_bytes,
            cpu_seconds: packing_cpu_seconds,
        }
    }
}

/// The end on the target, for a QEMU that listens at its `incoming_relay` already. Takes connections from `sender`
/// only, where it is known which address the other end has.
pub(crate) fn receive(
    vmm: &dyn Machine,
    stream: RelayedStream,
    listener: TcpListener,
    other: &OtherEnd<'_>,
    sender: Option<IpAddr>,
    page_cache_mib: u32,
) -> Result<Receiver, Problem> {
    let tls = ServerTls::new(other.identity.server_config_for(other.host));
    let settings = ReceiverSettings {
        path: vmm.incoming_relay().path,
        connections: stream.connections,
        token: token_of(other.token),
        sender,
        treatment: stream.treatment(tls),
        page_cache_bytes: bytes(page_cache_mib),
    };
    Receiver::start(listener, settings).map_err(Problem::failed)
}

/// What packs on this host.
#[derive(Debug)]
pub(crate) struct Packing {
    /// On how many of its CPUs one migration is packed at most.
    pub(crate) cores: usize,
    /// Why on none.
    pub(crate) obstacle: Option<NoPacking>,
    cpus: CpuList,
    /// Whether it leaves a core at once to a VM that wants it.
    gives_way: bool,
    // Counts the senders of all migrations from here.
    concurrent: ConcurrentSenders,
}

impl Packing {
    /// As it is now, by the configuration and by the VMs that run here.
    pub(crate) fn of(
        compression: &Compression,
        lost_cpus: &LostCpus,
        vms: &Vms,
        concurrent: &ConcurrentSenders,
    ) -> Result<Self, Problem> {
        let own = own_cpus()?;
        lost_cpus.tell(compression, &own);
        Ok(Self::on(compression, own, priority_counts_to(vms), concurrent.clone()))
    }

    /// Threads for one migration's disks; none where no core may pack, or none can be had.
    pub(crate) fn packers(&self) -> Option<Packers> {
        let settings = PackersSettings {
            cores: self.cores,
            cpus: self.cpus.cpus().to_vec(),
            gives_way: self.gives_way,
            concurrent: self.concurrent.clone(),
        };
        let started = (self.cores > 0).then(|| Packers::start(settings)).transpose();
        started.unwrap_or_else(|error| {
            warn!(%error, "disks are not compressed: cannot start threads for that");
            None
        })
    }

    /// Where the agent may run on `own`: one may be unplugged, or taken from it, at any time.
    fn on(compression: &Compression, own: CpuList, gives_way: bool, concurrent: ConcurrentSenders) -> Self {
        let left = match &compression.cpus {
            None => Some(own.clone()),
            Some(configured) => configured.within(&own),
        };
        let cores = left.as_ref().map_or(0, |left| packing_cores(compression, left.cpus().len(), gives_way));
        let obstacle = match left {
            None => Some(NoPacking::CpusLost),
            Some(_) => (cores == 0).then_some(NoPacking::NotGivenBack),
        };
        // Where none packs, it does not matter on which.
        Self { cores, obstacle, cpus: left.unwrap_or(own), gives_way, concurrent }
    }
}

/// The configured CPUs on which the agent may no longer run, as its log last said.
#[derive(Debug, Default)]
pub(crate) struct LostCpus(Mutex<Option<CpuList>>);

impl LostCpus {
    /// Tells what is news.
    fn tell(&self, compression: &Compression, own: &CpuList) {
        if let Some(lost) = self.news(compression, own) {
            warn!(
                "CPU {lost} no longer compresses, although it is in [compression] cpus: the agent may run only on {own}"
            );
        }
    }

    /// Others than were lost when this was asked before.
    fn news(&self, compression: &Compression, own: &CpuList) -> Option<CpuList> {
        let lost = not_of(compression, own);
        let before = std::mem::replace(&mut *lock(&self.0), lost.clone());
        lost.filter(|lost| before.as_ref() != Some(lost))
    }
}

/// On how many of so many CPUs one migration is packed at most. As many as the relay has threads for pack 3 GB/s, which
/// is 26 Gb/s. Where packing does not give way, a part of a core is left idle beside it.
fn packing_cores(compression: &Compression, cpus: usize, gives_way: bool) -> usize {
    let configured = compression.cores.map_or(PACKING_THREADS_MAX, usize::from);
    cpus.saturating_sub(usize::from(!gives_way)).min(configured).min(PACKING_THREADS_MAX)
}

/// The configured CPUs on which the agent may not run; none if it may on all of them.
fn not_of(compression: &Compression, own: &CpuList) -> Option<CpuList> {
    compression.cpus.as_ref()?.without(own)
}

/// Refuses a configuration that names CPUs on which the agent may not run when it starts.
pub(crate) fn check_packing_cpus(compression: &Compression, own: &CpuList) -> Result<(), Problem> {
    match not_of(compression, own) {
        None => Ok(()),
        Some(missing) => Err(Problem::bad_input(format!(
            "[compression] cpus in agent.toml: the agent may not run on CPU {missing} of this host, only on {own}"
        ))),
    }
}

/// Whether the kernel weighs the priorities of the agent's threads against those of all VMs that run here. Not known is
/// no.
fn priority_counts_to(vms: &Vms) -> bool {
    let pids = vms.all_running().into_iter().map(|vmm| vmm.pid());
    vms.unresponsive().is_empty() && scheduling_group::is_one(pids.chain([std::process::id()]))
}

/// The CPUs on which the agent may run. Its relay passes streams on, and unpacks them, on any of these.
pub(crate) fn own_cpus() -> Result<CpuList, Problem> {
    CpuList::of_this_process()
        .map_err(|error| Problem::failed(format!("cannot read on which CPUs the agent may run: {error}")))
}

fn bytes(mib: u32) -> usize {
    usize::try_from(u64::from(mib) << 20).unwrap_or(usize::MAX)
}

fn token_of(token: Uuid) -> Token {
    const { assert!(size_of::<uuid::Bytes>() == TOKEN_BYTES) };
    Token(token.into_bytes())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn packing_keeps_to_its_limits_and_leaves_a_core_where_it_does_not_give_way() {
        let cores = |configured, cpus, gives_way| {
            let compression = Compression { cores: configured, ..Compression::default() };
            packing_cores(&compression, cpus, gives_way)
        };
        assert_eq!([cores(None, 4, true), cores(Some(2), 4, true), cores(None, 99, true)], [4, 2, 16]);
        assert_eq!([cores(None, 4, false), cores(Some(2), 2, false), cores(Some(2), 1, false)], [3, 1, 0]);
    }

    fn cpus(text: &str) -> CpuList {
        CpuList::try_from(text.to_owned()).unwrap()
    }

    #[test]
    fn what_is_left_of_the_configured_cpus_packs() {
        let configured = Compression { cpus: Some(cpus("2-3")), ..Compression::default() };
        let on = |own, gives_way| {
            let packing = Packing::on(&configured, cpus(own), gives_way, ConcurrentSenders::default());
            (packing.cores, packing.cpus.to_string(), packing.obstacle)
        };
        assert_eq!(on("0-3", true), (2, "2-3".into(), None));
        assert_eq!(on("0-2", true), (1, "2".into(), None));
        assert_eq!(on("0-2", false), (0, "2".into(), Some(NoPacking::NotGivenBack)));
        assert_eq!(on("0-1", true), (0, "0-1".into(), Some(NoPacking::CpusLost)));
        let all = Packing::on(&Compression::default(), cpus("0-1"), true, ConcurrentSenders::default());
        assert_eq!((all.cores, all.obstacle), (2, None));
        assert!(check_packing_cpus(&configured, &cpus("0-3")).is_ok());
        let refused = check_packing_cpus(&configured, &cpus("0-2")).unwrap_err();
        assert!(refused.message.contains("may not run on CPU 3 of this host, only on 0-2"), "{refused}");
    }

    #[test]
    fn lost_cpus_are_told_once() {
        let configured = Compression { cpus: Some(cpus("2-3")), ..Compression::default() };
        let lost = LostCpus::default();
        let news = |own| lost.news(&configured, &cpus(own)).map(|cpus| cpus.to_string());
        let announced: Vec<_> =
            ["0-3", "0-2", "0-2", "0-1", "0-3", "0-2"].into_iter().filter_map(news).collect();
        assert_eq!(announced, ["3", "2-3", "3"]);
        assert!(LostCpus::default().news(&Compression::default(), &cpus("0")).is_none());
    }
}
