//! The agent's configuration: one TOML file, read once, checked whole.

mod contradiction;
#[cfg(test)]
mod documents;
mod link_choice;

use std::ffi::OsString;
use std::net::{IpAddr, SocketAddr};
use std::ops::RangeInclusive;
use std::path::{Path, PathBuf};

use drainpipe_engine::bandwidth::BandwidthSchedule;
use drainpipe_engine::host::encryption_policy::EncryptionPolicy;
use drainpipe_engine::host::vm_resources::VmResources;
use drainpipe_engine::migration;
use drainpipe_engine::storage::DiskPlaces;
use drainpipe_identity::{FileError, JoinedFiles, check_unchangeable};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use thiserror::Error;

pub(crate) use self::link_choice::LinkChoice;
use crate::store::cpu_list::CpuList;
use crate::store::fleet_files as fleet;
use drainpipe_api_types::TRANSFERS_MAX;

/// Where an agent looks for its configuration.
pub const DEFAULT_PATH: &str = "/etc/drainpipe/agent.toml";

/// The user of QEMU where none is named.
const DEFAULT_QEMU_USER: &str = "drainpipe-qemu";
/// Where root on the host reaches the agent.
pub const DEFAULT_SOCKET: &str = "/run/drainpipe/agent.sock";
/// The agent's TCP port, in examples and as a default of peers' addresses.
pub const DEFAULT_PORT: u16 = 7420;

/// What a host's agent must know.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Config {
    /// Name of this host: the one that its certificate carries.
    pub name: String,
    /// Address and port for other agents and operators, by mutual TLS.
    #[serde(deserialize_with = "with_port")]
    pub listen: SocketAddr,
    /// Unix socket for root on this host.
    #[serde(default = "default_socket")]
    pub socket: PathBuf,
    /// Journal and history; must survive a reboot.
    #[serde(default = "default_state_directory")]
    pub state_directory: PathBuf,
    /// Sockets and logs of running VMs; need not survive a reboot.
    #[serde(default = "default_runtime_directory")]
    pub runtime_directory: PathBuf,
    /// This host's own address for routed multichannel, on no NIC. Taken and given back as needed.
    pub migration_address: Option<IpAddr>,
    /// Ports on which QEMU receives migrations.
    #[serde(default)]
    pub migration_ports: PortRange,
    /// Certificates.
    #[serde(default)]
    pub tls: Tls,
    /// The hypervisor.
    #[serde(default)]
    pub qemu: Qemu,
    /// The libvirt of this host.
    #[serde(default)]
    pub libvirt: Libvirt,
    /// What VMs may use of this host.
    #[serde(default)]
    pub(crate) vms: VmResources,
    /// Copies of disks that come here.
    #[serde(default)]
    pub(crate) disks: Disks,
    /// Programs that run around migrations from and to this host.
    #[serde(default)]
    pub(crate) hooks: Hooks,
    /// Bounds of migrations from this host.
    #[serde(default)]
    pub limits: Limits,
    /// Bounds of drains of this host.
    #[serde(default)]
    pub(crate) drain: DrainBounds,
    /// How much of the links migrations may take, and when.
    #[serde(default)]
    pub(crate) bandwidth: BandwidthSchedule,
    /// What compressed migrations may take of this host's cores and memory.
    #[serde(default)]
    pub(crate) compression: Compression,
    /// Seconds between two trials of the paths to each peer while no migration is under way; 0 for none.
    #[serde(default = "default_probe_every_s")]
    pub probe_every_s: u32,
    /// Links that migrations must not use, by name or by subnet, where no [[link]] is given.
    #[serde(default)]
    pub(crate) exclude_links: Vec<LinkChoice>,
    /// Whether migrations from and to this host are encrypted.
    #[serde(default)]
    pub(crate) encryption: EncryptionPolicy,
    /// Links that migrations may use in the clear where encryption is required, by name or by subnet, if the
    /// other host says so too.
    #[serde(default)]
    pub(crate) trusted_networks: Vec<LinkChoice>,
    /// NICs that carry migrations, in order of preference; without any, all that look fit.
    #[serde(default, rename = "link")]
    pub links: Vec<Link>,
    /// The other hosts.
    #[serde(default, rename = "peer")]
    pub peers: Vec<Peer>,
}

/// Files of this host's identity, as `drainpipe pki host` writes them.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Tls {
    /// The host's certificate.
    pub certificate: PathBuf,
    /// Its key, readable by root only.
    pub key: PathBuf,
    /// The authority that signed all hosts and operators.
    pub authority: PathBuf,
}

impl Tls {
    /// The files of a host that has joined: its certificate and key are one file.
    pub(crate) fn of_joined(files: &JoinedFiles) -> Self {
        let JoinedFiles { host, authority, .. } = files;
        Self { certificate: host.clone(), key: host.clone(), authority: authority.clone() }
    }
}

impl Default for Tls {
    fn default() -> Self {
        let directory = Path::new("/etc/drainpipe");
        Self {
            certificate: directory.join("host.pem"),
            key: directory.join("host.key"),
            authority: directory.join("ca.pem"),
        }
    }
}

/// Which QEMU to run.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Qemu {
    /// Name in PATH, or a path.
    pub binary: PathBuf,
    /// The user that it runs as: name or number.
    pub(crate) user: String,
    /// The program that becomes it, with its first arguments: this one, but in tests.
    #[serde(skip)]
    pub(crate) launcher: Vec<OsString>,
}

impl Default for Qemu {
    fn default() -> Self {
        Self {
            binary: "qemu-system-x86_64".into(),
            user: DEFAULT_QEMU_USER.into(),
            // Not the path of this program: an upgrade may have removed it, or put another version there.
            launcher: ["/proc/self/exe", "launch"].map(Into::into).to_vec(),
        }
    }
}

/// With which libvirt the agent deals.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Libvirt {
    /// Whether the agent deals with libvirt's domains.
    pub enabled: bool,
    /// Where it answers; absent for `virtqemud`'s socket if somebody listens there, and `libvirtd`'s otherwise.
    pub(crate) socket: Option<PathBuf>,
}

impl Default for Libvirt {
    fn default() -> Self {
        Self { enabled: true, socket: None }
    }
}

/// What becomes here of copies of disks.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Disks {
    /// Hours for which what there is of an interrupted copy is kept, for the next one to go on from it; 0 for not at all.
    pub(crate) keep_interrupted_h: u32,
    /// Where disks go that come from these directories of other hosts.
    pub(crate) places: DiskPlaces,
}

impl Default for Disks {
    fn default() -> Self {
        Self { keep_interrupted_h: 24, places: DiskPlaces::default() }
    }
}

/// Programs that run around migrations.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Hooks {
    /// Told on the source before a VM is paused; absent for none.
    pub(crate) before_pause: Option<PathBuf>,
    /// Seconds that it may take. The VM is sent on meanwhile, and not paused.
    pub(crate) before_pause_s: u32,
    /// Told on the target once a VM runs there, and on the source if it has stayed after all; absent for none.
    pub(crate) after: Option<PathBuf>,
    /// Seconds that it may take.
    pub(crate) after_s: u32,
}

impl Hooks {
    /// The most seconds that one may take before the pause: a migration in which nothing new is sent is soon undone.
    pub(crate) const BEFORE_PAUSE_S_MAX: u32 = 60;

    /// The most seconds that one may take after it.
    pub(crate) const AFTER_S_MAX: u32 = 3600;
}

impl Default for Hooks {
    fn default() -> Self {
        Self { before_pause: None, before_pause_s: 10, after: None, after_s: 60 }
    }
}

/// How long parts of a migration from this host may take, and what they may cost its VM. The defaults suit
/// nearly everyone.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Seconds from the request to the hand-over, unless the request says otherwise; then it is undone.
    pub deadline_s: u32,
    /// Seconds for which a transfer may stand still; then it is undone.
    pub stall_s: u32,
    /// Seconds for which a target is asked after the hand-over before the outcome is called in doubt.
    /// It is asked on until it answers.
    pub decision_s: u32,
    /// Share of their time, in percent, for which the CPUs of a VM are held back at most whose memory gets
    /// dirty too fast, unless the request says otherwise; 0 for never.
    pub throttle_max_percent: u8,
}

impl Default for Limits {
    fn default() -> Self {
        Self { deadline_s: 3600, stall_s: 60, decision_s: 60, throttle_max_percent: 80 }
    }
}

impl Limits {
    /// The limits of one migration: what was asked for, otherwise these.
    pub(crate) fn of_migration(
        self,
        deadline_s: Option<u32>,
        throttle_max_percent: Option<u8>,
    ) -> migration::Limits {
        let ms = |seconds: u32| f64::from(seconds) * 1000.0;
        migration::Limits {
            total_ms: ms(deadline_s.unwrap_or(self.deadline_s)),
            disks_take_longer: deadline_s.is_none(),
            stall_ms: ms(self.stall_s),
            decision_ms: ms(self.decision_s),
            throttle_percent: throttle_max_percent.unwrap_or(self.throttle_max_percent),
            ..migration::Limits::default()
        }
    }
}

/// How many VMs a drain of this host moves at a time, and how often each is tried.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct DrainBounds {
    /// VMs at most that leave this host at a time, those being prepared included.
    pub(crate) outbound: u8,
    /// How many of these VMs may go to one target.
    pub(crate) inbound: u8,
    /// How often one VM is tried.
    pub(crate) attempts: u8,
}

impl Default for DrainBounds {
    fn default() -> Self {
        Self { outbound: TRANSFERS_MAX, inbound: 4, attempts: 2 }
    }
}

/// What compressed migrations may take of the host: cores that pack what is sent, as far as they are idle, and
/// memory.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct Compression {
    /// How many at most for one migration; absent for all of `cpus`. More than 16 are as 16.
    pub(crate) cores: Option<u16>,
    /// Which; absent for all on which the agent may run.
    pub(crate) cpus: Option<CpuList>,
    /// Copies of pages that the agent keeps of one migration, in MiB, so that of a page that comes again only
    /// the changes are sent. Both ends keep as many as the smaller of the two.
    pub(crate) page_cache_mib: u32,
}

impl Default for Compression {
    fn default() -> Self {
        Self { cores: None, cpus: None, page_cache_mib: 64 }
    }
}

/// A NIC that carries migrations.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Link {
    /// Name of the interface.
    pub name: String,
    /// Its speed, where the driver does not know the true one (shaped, virtual).
    pub speed_mbps: Option<u64>,
}

/// Another host.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Peer {
    /// Its name: the one that its certificate must carry.
    pub name: String,
    /// Where its agent listens.
    #[serde(deserialize_with = "with_port")]
    pub address: SocketAddr,
}

/// Ports from first to last, both included.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct PortRange {
    first: u16,
    last: u16,
}

impl PortRange {
    /// Each port of the range.
    pub fn ports(self) -> RangeInclusive<u16> {
        self.first..=self.last
    }
}

impl Default for PortRange {
    /// libvirt's own range, so that a firewall that lets libvirt migrate lets Drainpipe.
    fn default() -> Self {
        Self { first: 49152, last: 49215 }
    }
}

impl TryFrom<String> for PortRange {
    type Error = String;

    fn try_from(text: String) -> Result<Self, Self::Error> {
        let wrong = || format!("`{text}` is not a range of ports: write it like \"49152-49215\"");
        let (first, last) = text.split_once('-').ok_or_else(wrong)?;
        let first: u16 = first.trim().parse().map_err(|_| wrong())?;
        let last: u16 = last.trim().parse().map_err(|_| wrong())?;
        if first < 1024 || first > last {
            return Err(wrong());
        }
        Ok(Self { first, last })
    }
}

fn with_port<'de, D: Deserializer<'de>>(deserializer: D) -> Result<SocketAddr, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse().map_err(|_| {
        let example = match text.parse() {
            Ok(address) => SocketAddr::new(address, DEFAULT_PORT).to_string(),
            Err(_) => format!("192.0.2.11:{DEFAULT_PORT}"),
        };
        D::Error::custom(format!("`{text}` is not an address with a port: write it like \"{example}\""))
    })
}

/// Says so where a text stands without quotes: TOML only says that it is no number or date.
fn missing_quotes(text: &str, error: &toml::de::Error) -> Option<String> {
    let at = error.span()?.start.min(text.len());
    let (before, behind) = (text.get(..at)?, text.get(at..)?);
    let start = before.rfind('\n').map_or(0, |newline| newline + 1);
    let end = behind.find('\n').map_or(text.len(), |newline| at + newline);
    let (key, value) = text.get(start..end)?.split_once('=')?;
    let (key, value) = (key.trim(), value.split('#').next()?.trim());
    let is_quoted = value.starts_with(['"', '\'', '[', '{']);
    (!value.is_empty() && !is_quoted && value.parse::<toml::Value>().is_err())
        .then(|| format!("; put text in quotes: {key} = \"{value}\""))
}

/// Often enough to hear of a dead link before the next drain, and next to nothing of traffic.
fn default_probe_every_s() -> u32 {
    300
}

fn default_socket() -> PathBuf {
    DEFAULT_SOCKET.into()
}

fn default_state_directory() -> PathBuf {
    "/var/lib/drainpipe".into()
}

fn default_runtime_directory() -> PathBuf {
    "/run/drainpipe".into()
}

/// Why a configuration cannot be used.
#[derive(Debug, Error)]
pub enum ConfigError {
    /// Others may have written it.
    #[error(transparent)]
    Changeable(#[from] FileError),
    /// The file cannot be read.
    #[error("cannot read the configuration {path}: {source}; see `drainpipe agent --help` for an example", path = path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// It is not TOML, or not of the right form; the message names line and column.
    #[error("{path}: {message}; see `drainpipe agent --help` for an example", path = path.display(), message = message.trim_end())]
    Syntax {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the line.
        message: String,
    },
    /// It contradicts itself.
    #[error("{path}: {message}", path = path.display())]
    Meaning {
        /// The file.
        path: PathBuf,
        /// What is wrong, with the line.
        message: String,
    },
}

impl Config {
    /// Reads and checks the file.
    pub fn load(path: &Path) -> Result<Self, ConfigError> {
        check_unchangeable(path, "configuration")?;
        let text = std::fs::read_to_string(path)
            .map_err(|source| ConfigError::Read { path: path.into(), source })?;
        Ok(Self::parse(&text, path)?.with_joined_identity())
    }

    /// A host that has joined has its certificate where the agent may renew it, unless the file names another.
    fn with_joined_identity(mut self) -> Self {
        let files = fleet::files(&self.state_directory);
        if self.tls == Tls::default() && files.host.exists() {
            self.tls = Tls::of_joined(&files);
        }
        self
    }

    /// Reads and checks a text; `path` is for messages.
    pub fn parse(text: &str, path: &Path) -> Result<Self, ConfigError> {
        let config: Self = toml::from_str(text).map_err(|error| {
            let quotes = missing_quotes(text, &error).unwrap_or_default();
            ConfigError::Syntax {
                path: path.into(),
                message: format!("{}{quotes}", error.to_string().trim_end()),
            }
        })?;
        match config.contradiction() {
            Some(contradiction) => {
                Err(ConfigError::Meaning { path: path.into(), message: contradiction.in_words(text) })
            }
            None => Ok(config),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<Config, String> {
        Config::parse(text, Path::new("agent.toml")).map_err(|error| error.to_string())
    }

    #[test]
    fn the_least_configuration_has_sane_defaults() {
        let config = parse("name = \"a\"\nlisten = \"10.0.0.1:7420\"").unwrap();
        assert_eq!(config.migration_ports.ports(), 49152..=49215);
        assert_eq!(config.tls.key, Path::new("/etc/drainpipe/host.key"));
        assert_eq!(config.probe_every_s, 300);
        assert_eq!(config.encryption, EncryptionPolicy::Required);
        assert!(config.trusted_networks.is_empty());
    }

    #[test]
    fn errors_name_the_line_and_the_cure() {
        let error = parse("name = \"a\"\nlisten = \"10.0.0.1\"").unwrap_err();
        assert!(error.contains("line 2"), "{error}");
        assert!(error.contains("write it like \"10.0.0.1:7420\""), "{error}");
        let error = parse("name = \"a\"\nlisten = 10.0.0.1:7420 # here").unwrap_err();
        assert!(error.contains("put text in quotes: listen = \"10.0.0.1:7420\""), "{error}");
        let error = parse("name = \"a\"\nlisten = \"10.0.0.1:7420\"\nlinks = []").unwrap_err();
        assert!(error.contains("unknown field `links`"), "{error}");
        let error = parse("name = \"a\"\nlisten = \"10.0.0.1:7420\"\nmigration_ports = \"9-1\"").unwrap_err();
        assert!(error.contains("49152-49215"), "{error}");
    }
}
