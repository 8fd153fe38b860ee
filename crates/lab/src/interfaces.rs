//! The interfaces of a node, as `ip` tells of them.

use std::collections::HashMap;

use serde::{Deserialize, Serialize};

use crate::error::Error;
use crate::spec::LabSpec;
use crate::tools::query;

/// Whether an interface can carry packets.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum LinkState {
    /// It can.
    Up,
    /// It is up, the other end is not.
    NoCarrier,
    /// It is down.
    Down,
}

/// What `ip -json -statistics link show` says of one interface.
#[derive(Debug, Deserialize)]
pub(crate) struct Interface {
    pub(crate) ifname: String,
    flags: Vec<String>,
    pub(crate) mtu: u32,
    pub(crate) stats64: Statistics,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Statistics {
    pub(crate) rx: Counter,
    pub(crate) tx: Counter,
}

#[derive(Debug, Deserialize)]
pub(crate) struct Counter {
    pub(crate) bytes: u64,
}

/// All of a namespace.
pub(crate) fn of(namespace: &str) -> Result<Vec<Interface>, Error> {
    query(namespace, "ip", &["-statistics", "link", "show"])
}

/// Of the links of a host, by name.
pub(crate) fn states(spec: &LabSpec, host: &str) -> Result<HashMap<String, LinkState>, Error> {
    let interfaces = of(&spec.namespace(host))?;
    Ok(interfaces.into_iter().map(|interface| (interface.ifname.clone(), interface.state())).collect())
}

impl Interface {
    pub(crate) fn state(&self) -> LinkState {
        let has = |flag: &str| self.flags.iter().any(|set| set == flag);
        match (has("UP"), has("LOWER_UP")) {
            (false, _) => LinkState::Down,
            (true, false) => LinkState::NoCarrier,
            (true, true) => LinkState::Up,
        }
    }
}
