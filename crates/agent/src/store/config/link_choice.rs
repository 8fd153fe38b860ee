//! How a configuration names links.

use std::fmt;
use std::net::IpAddr;
use std::str::FromStr;

use drainpipe_net::Link;
use ipnet::IpNet;
use serde::Deserialize;

/// Links, as a configuration names them.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub(crate) enum LinkChoice {
    /// By its name.
    Name(String),
    /// By an address of its.
    Subnet(IpNet),
}

impl TryFrom<String> for LinkChoice {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        if text.is_empty() {
            return Err("the name is empty: give a link's name, or a subnet such as 192.0.2.0/24".into());
        }
        let subnet = IpNet::from_str(&text);
        if subnet.is_err() && text.contains('/') {
            return Err(format!("`{text}` is neither a link's name nor a subnet such as 192.0.2.0/24"));
        }
        Ok(subnet.map_or(Self::Name(text), Self::Subnet))
    }
}

impl fmt::Display for LinkChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Subnet(subnet) => write!(f, "{subnet}"),
        }
    }
}

impl LinkChoice {
    /// Whether a link is among them.
    pub(crate) fn covers(&self, link: &Link) -> bool {
        self.is(&link.name) || link.addresses.iter().any(|net| self.contains(net.addr()))
    }

    /// Whether it is named.
    pub(crate) fn is(&self, link: &str) -> bool {
        matches!(self, Self::Name(name) if name == link)
    }

    /// Whether an address is in a subnet that is named.
    pub(crate) fn contains(&self, address: IpAddr) -> bool {
        matches!(self, Self::Subnet(subnet) if subnet.contains(&address))
    }
}
