//! The arguments of libvirt's migration phases, and what they hand to each other; pure.

use std::fmt;
use std::net::SocketAddr;

use drainpipe_engine::storage::DISKS_MAX;
use drainpipe_hypervisor::{Address, Parcel, Transport, VmError};
use drainpipe_libvirt::{Parameter, migrate_flags as flags, migrate_parameters as names};
use serde::{Deserialize, Serialize};

use crate::snapshots::KnownSnapshot;

/// What a source says of a domain beside what libvirt says, and what belongs to libvirt alone.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Handed {
    /// libvirt's cookie, which ends in NUL and is text otherwise.
    pub(crate) cookie: String,
    /// Whether its definition outlives it.
    #[serde(default)]
    pub(crate) is_persistent: bool,
    /// Whether it is started when its host has booted.
    #[serde(default)]
    pub(crate) autostart: bool,
    /// Whether its owner has suspended it: it stays so.
    #[serde(default)]
    pub(crate) is_suspended: bool,
    /// The disks that libvirt copies, as the guest calls them.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) disks: Vec<String>,
    /// What QEMU calls them, on both hosts. The target's libvirt may not say it before all is there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) drives: Vec<String>,
    /// What libvirt is to know of its snapshots. An earlier release takes no domain that has any.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) snapshots: Vec<KnownSnapshot>,
}

impl Handed {
    /// A cookie alone.
    pub(crate) fn cookie(cookie: Vec<u8>) -> Result<Self, VmError> {
        let cookie = String::from_utf8(cookie)
            .map_err(|_| VmError::failed("libvirt's cookie is not text, as it is in all known releases"))?;
        Ok(Self {
            cookie,
            is_persistent: false,
            autostart: false,
            is_suspended: false,
            disks: vec![],
            drives: vec![],
            snapshots: vec![],
        })
    }

    /// As the agents carry it.
    pub(crate) fn parcel(&self, description: Option<String>) -> Parcel {
        let cookie = serde_json::to_string(self).expect("texts and truths can be written");
        Parcel { description, cookie }
    }

    /// From what the agents carried.
    pub(crate) fn of(parcel: &Parcel) -> Result<Self, VmError> {
        let no_sense = |why: &dyn fmt::Display| {
            VmError::failed(format!("what the other host's libvirt handed over does not make sense: {why}"))
        };
        let handed: Self = serde_json::from_str(&parcel.cookie).map_err(|error| no_sense(&error))?;
        if handed.disks.len() > DISKS_MAX {
            return Err(no_sense(&"more disks to copy than allowed for one VM"));
        }
        if handed.drives.len() != handed.disks.len() {
            return Err(no_sense(&"the number of QEMU's names does not match that of the disks to copy"));
        }
        Ok(handed)
    }
}

/// The arguments of all phases of a migration.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Terms {
    pub(crate) flags: u32,
    pub(crate) parameters: Vec<Parameter>,
}

/// The terms for a domain whose definition outlives it or not, by this transport. Fails for what libvirt cannot do, or
/// Drainpipe cannot do with it: plans do not ask for it.
pub(crate) fn terms(transport: Transport, is_persistent: bool) -> Result<Terms, VmError> {
    let mut terms = Terms { flags: flags::LIVE | flags::CHANGE_PROTECTION, parameters: vec![] };
    if is_persistent {
        terms.flags |= flags::PERSIST_DEST | flags::UNDEFINE_SOURCE;
    }
    match transport {
        Transport::Single => {}
        Transport::Parallel(parallel) if parallel.compression.is_none() => {
            terms.flags |= flags::PARALLEL;
            terms.parameters.push(Parameter::int(names::PARALLEL_CONNECTIONS, parallel.channels.into()));
        }
        Transport::Parallel(_) | Transport::PostCopy { .. } | Transport::Rdma => {
            return Err(VmError::failed("domains cannot move by post-copy or RDMA, nor compressed by QEMU"));
        }
    }
    Ok(terms)
}

impl Terms {
    /// With copies of these disks.
    pub(crate) fn copying(mut self, disks: &[String]) -> Self {
        if !disks.is_empty() {
            self.flags |= flags::NON_SHARED_DISK;
        }
        self.parameters.extend(disks.iter().map(|disk| Parameter::text(names::DISKS, disk)));
        self
    }

    /// With where these go, which is not the same on both hosts: the agents are in between.
    pub(crate) fn disks_to(mut self, address: &Address) -> Self {
        self.parameters.push(Parameter::text(names::DISKS_URI, disks_uri(address)));
        self
    }

    /// With where the target listens.
    pub(crate) fn to(mut self, address: &Address) -> Self {
        self.parameters.push(Parameter::text(names::URI, uri(address)));
        if let Address::Tcp(at) = address {
            self.parameters.push(Parameter::text(names::LISTEN_ADDRESS, host(at, "%")));
        }
        self
    }
}

fn uri(address: &Address) -> String {
    match address {
        Address::Tcp(at) if at.is_ipv4() => format!("tcp:{at}"),
        Address::Tcp(at) => format!("tcp:[{}]:{}", host(at, "%25"), at.port()),
        Address::Unix(path) => format!("unix://{}", path.display()),
    }
}

/// With the link of an address that is a link's own, after this mark: a percent sign, which libvirt's parser of URIs wants to
/// be escaped.
fn host(at: &SocketAddr, mark: &str) -> String {
    match at {
        SocketAddr::V6(at) if at.scope_id() != 0 => format!("{}{mark}{}", at.ip(), at.scope_id()),
        at => at.ip().to_string(),
    }
}

fn disks_uri(address: &Address) -> String {
    match address {
        Address::Tcp(at) => format!("tcp://{at}"),
        Address::Unix(path) => format!("unix://{}", path.display()),
    }
}

#[cfg(test)]
mod tests {
    use drainpipe_hypervisor::Parallel;

    use super::*;

    #[test]
    fn what_is_handed_over_comes_back() {
        let handed =
            Handed { is_persistent: true, ..Handed::cookie(b"<qemu-migration/>\0".to_vec()).unwrap() };
        let parcel = handed.parcel(Some("<domain/>".into()));
        let json = serde_json::to_string(&parcel).unwrap();
        assert_eq!(Handed::of(&serde_json::from_str(&json).unwrap()), Ok(handed));
        assert!(Handed::cookie(vec![0xff]).is_err());
        assert!(Handed::of(&Parcel { cookie: "{}".into(), description: None }).is_err());
    }

    #[test]
    fn a_domain_is_persistent_there_if_it_was_here() {
        assert_eq!(terms(Transport::Single, true).unwrap().flags, 0x119);
        assert_eq!(terms(Transport::Single, false).unwrap().flags, 0x101);
        let parallel = Transport::Parallel(Parallel { channels: 8, compression: None });
        let parallel = terms(parallel, true).unwrap();
        assert_eq!(parallel.flags, 0x20119);
        assert_eq!(parallel.parameters, [Parameter::int("parallel.connections", 8)]);
        assert!(terms(Transport::CLEAR_POST_COPY, true).is_err());
    }

    #[test]
    fn disks_that_are_copied_are_named_to_each_phase() {
        let none = terms(Transport::Single, true).unwrap().copying(&[]);
        assert_eq!(none, terms(Transport::Single, true).unwrap());
        let disks = ["vda".to_owned(), "sdb".to_owned()];
        let local: SocketAddr = "127.0.0.1:4711".parse().unwrap();
        let copying = terms(Transport::Single, true).unwrap().copying(&disks).disks_to(&local.into());
        assert_eq!(copying.flags, 0x159);
        let expected =
            [("migrate_disks", "vda"), ("migrate_disks", "sdb"), ("disks_uri", "tcp://127.0.0.1:4711")];
        assert_eq!(copying.parameters, expected.map(|(name, text)| Parameter::text(name, text)));
        let many = vec!["vda".to_owned(); DISKS_MAX + 1];
        let parcel = Handed { disks: many, ..Handed::cookie(vec![]).unwrap() }.parcel(None);
        assert!(Handed::of(&parcel).is_err());
        let nameless = Handed { disks: disks.to_vec(), ..Handed::cookie(vec![]).unwrap() };
        assert!(Handed::of(&nameless.parcel(None)).is_err());
    }

    #[test]
    fn addresses_are_uris() {
        for (address, expected, listens) in [
            ("10.0.0.2:49152", "tcp:10.0.0.2:49152", "10.0.0.2"),
            ("[fd00::2]:49152", "tcp:[fd00::2]:49152", "fd00::2"),
            ("[fe80::2%7]:49152", "tcp:[fe80::2%257]:49152", "fe80::2%7"),
        ] {
            let address: SocketAddr = address.parse().unwrap();
            let terms = terms(Transport::Single, true).unwrap().to(&address.into());
            let parameters = [("migrate_uri", expected), ("listen_address", listens)];
            assert_eq!(terms.parameters, parameters.map(|(name, text)| Parameter::text(name, text)));
        }
        assert_eq!(uri(&Address::Unix("/run/x/relay-out".into())), "unix:///run/x/relay-out");
    }
}
