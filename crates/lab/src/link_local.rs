//! Waits for what the kernel does by itself: link-local addresses, which it gives to links that are up
//! and calls tentative for a second or two, until nobody has claimed them.

use std::thread;
use std::time::{Duration, Instant};

use serde::Deserialize;

use crate::error::Error;
use crate::spec::LabSpec;
use crate::tools::query;

/// Looking for duplicates takes up to two seconds; noticing that a link is up, one.
const LIMIT: Duration = Duration::from_secs(20);
const POLL: Duration = Duration::from_millis(50);

#[derive(Deserialize)]
struct Interface {
    #[serde(default)]
    ifname: String,
    #[serde(default)]
    addr_info: Vec<Address>,
}

#[derive(Deserialize)]
struct Address {
    #[serde(default)]
    tentative: bool,
}

/// Waits until every link of every host has a link-local address that can be used.
pub(crate) fn wait(spec: &LabSpec) -> Result<(), Error> {
    let end = Instant::now() + LIMIT;
    while let Some(missing) = missing(spec)? {
        if Instant::now() >= end {
            return Err(Error::Incomplete {
                name: spec.name.clone(),
                what: format!("{missing} has no link-local address; is IPv6 off in this kernel?"),
            });
        }
        thread::sleep(POLL);
    }
    Ok(())
}

fn missing(spec: &LabSpec) -> Result<Option<String>, Error> {
    for host in &spec.hosts {
        let interfaces: Vec<Interface> =
            query(&spec.namespace(host), "ip", &["-6", "address", "show", "scope", "link"])?;
        let is_ready = |name: &String| {
            interfaces.iter().any(|interface| {
                interface.ifname == *name && interface.addr_info.iter().any(|address| !address.tentative)
            })
        };
        if let Some(name) = spec.link_names().iter().find(|name| !is_ready(name)) {
            return Ok(Some(format!("{name} of {host}")));
        }
    }
    Ok(None)
}
