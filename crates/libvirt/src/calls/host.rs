use std::fmt;
use std::time::Duration;

use crate::connection::Connection;
use crate::error::Error;
use crate::procedure::{Procedure, remote};
use crate::xdr::{Decode, Decoder, Encoder, Malformed};

const HYPERVISOR_VERSION: Procedure = remote(4, "version of the hypervisor");
const CAPABILITIES: Procedure = remote(7, "capabilities");
const HOSTNAME: Procedure = remote(59, "hostname");
const LIBRARY_VERSION: Procedure = remote(157, "version of libvirt");
const DOMAIN_CAPABILITIES: Procedure = remote(342, "capabilities of domains");

/// A version of libvirt or of a hypervisor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
#[expect(missing_docs, reason = "they are what they are called")]
pub struct Version {
    pub major: u32,
    pub minor: u32,
    pub micro: u32,
}

impl fmt::Display for Version {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}.{}", self.major, self.minor, self.micro)
    }
}

/// Which domains' capabilities are asked for; what is none is the daemon's to choose.
#[derive(Debug, Clone, Copy, Default)]
pub struct CapabilitiesOf<'a> {
    /// Path of the hypervisor's program.
    pub emulator: Option<&'a str>,
    /// Such as `x86_64`.
    pub architecture: Option<&'a str>,
    /// Such as `pc-q35-7.2`.
    pub machine: Option<&'a str>,
    /// Such as `kvm` or `qemu`.
    pub kind: Option<&'a str>,
}

impl Connection {
    /// The daemon's own version.
    pub async fn library_version(&self, deadline: Duration) -> Result<Version, Error> {
        self.call(LIBRARY_VERSION, |_| {}, deadline).await
    }

    /// The version of its hypervisor, such as QEMU.
    pub async fn hypervisor_version(&self, deadline: Duration) -> Result<Version, Error> {
        self.call(HYPERVISOR_VERSION, |_| {}, deadline).await
    }

    /// The name of its host.
    pub async fn hostname(&self, deadline: Duration) -> Result<String, Error> {
        self.call(HOSTNAME, |_| {}, deadline).await
    }

    /// The capabilities of its host, as XML.
    pub async fn capabilities_xml(&self, deadline: Duration) -> Result<String, Error> {
        self.call(CAPABILITIES, |_| {}, deadline).await
    }

    /// The capabilities of its domains, as XML.
    pub async fn domain_capabilities_xml(
        &self,
        of: CapabilitiesOf<'_>,
        deadline: Duration,
    ) -> Result<String, Error> {
        let write = |to: &mut Encoder| {
            for text in [of.emulator, of.architecture, of.machine, of.kind] {
                to.optional_text(text);
            }
            to.u32(0);
        };
        self.call(DOMAIN_CAPABILITIES, write, deadline).await
    }
}

impl Decode for Version {
    fn decode(from: &mut Decoder<'_>) -> Result<Self, Malformed> {
        let number = from.u64()?;
        let part = |number: u64| u32::try_from(number).unwrap_or(u32::MAX);
        let (major, minor, micro) = (number / 1_000_000, number / 1_000 % 1_000, number % 1_000);
        Ok(Self { major: part(major), minor: part(minor), micro: part(micro) })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_version_is_one_number() {
        let version: Version = Decoder::whole(&9_000_012_u64.to_be_bytes()).unwrap();
        assert_eq!(version.to_string(), "9.0.12");
    }
}
