//! The present state of a lab, by the kernel.

use std::collections::HashMap;
use std::fs;
use std::net::Ipv4Addr;
use std::path::{Path, PathBuf};

use rustix::process::Pid;
use serde::{Deserialize, Serialize};

use crate::emulated;
use crate::error::Error;
use crate::fault::{Direction, Dropped, Fault, drops};
use crate::interfaces::{self, LinkState};
use crate::libvirt;
use crate::names::CLIENT;
use crate::processes::{self, NamespaceId};
use crate::spec::LabSpec;
use crate::state::namespace_file;
use crate::tools::{query, query_nft};

/// Bytes of a process's command line that are shown.
const MAX_COMMAND_BYTES: usize = 4096;

/// A lab as it is now.
#[derive(Debug, Clone, Serialize)]
pub struct LabStatus {
    /// The lab's name.
    pub name: String,
    /// Its hosts, in the order of the specification.
    pub hosts: Vec<HostStatus>,
    /// The node from which guests are observed.
    pub client: NodeStatus,
}

/// A host as it is now.
#[derive(Debug, Clone, Serialize)]
pub struct HostStatus {
    /// Name, namespace and processes.
    #[serde(flatten)]
    pub node: NodeStatus,
    /// Where its agent is reached.
    pub management_address: Ipv4Addr,
    /// Its ends of the links.
    pub links: Vec<LinkStatus>,
    /// Its libvirt; absent where labs have none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub libvirt: Option<LibvirtStatus>,
    /// Where its machine's console is written, in an emulated lab.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub console: Option<PathBuf>,
}

/// The libvirt of a host as it is now.
#[derive(Debug, Clone, Serialize)]
pub struct LibvirtStatus {
    /// Where it is reached: `virsh -c 'qemu:///system?socket=FILE'`.
    pub socket: PathBuf,
    /// Its daemon's process id, as seen from outside the host; `None` if it does not run.
    pub pid: Option<i32>,
}

/// A namespace of the lab as it is now.
#[derive(Debug, Clone, Serialize)]
pub struct NodeStatus {
    /// The host's name, or `client`.
    pub name: String,
    /// Its network namespace, for `ip netns exec`.
    pub namespace: String,
    /// What runs in it.
    pub processes: Vec<ProcessStatus>,
}

/// A process in a lab.
#[derive(Debug, Clone, Serialize)]
pub struct ProcessStatus {
    /// Its process id.
    pub pid: i32,
    /// Its command line.
    pub command: String,
}

/// One host's end of a link as it is now.
#[derive(Debug, Clone, Serialize)]
pub struct LinkStatus {
    /// The interface's name.
    pub name: String,
    /// The host's IPv4 address on it; `None` where links have none.
    pub address: Option<Ipv4Addr>,
    /// Whether it can carry packets.
    pub state: LinkState,
    /// What this end may send, in megabits per second; `None` is unlimited.
    pub rate_mbps: Option<u64>,
    /// The interface's MTU in bytes.
    pub mtu_bytes: u32,
    /// Bytes received since the lab came up; what a blackhole swallowed counts.
    pub received_bytes: u64,
    /// Bytes sent since the lab came up.
    pub sent_bytes: u64,
    /// In what it differs from the specification now.
    pub faults: Vec<Fault>,
}

/// What `tc -json qdisc show` says of one queue.
#[derive(Debug, Deserialize)]
struct Qdisc {
    kind: String,
    dev: String,
    options: QdiscOptions,
}

#[derive(Debug, Deserialize)]
struct QdiscOptions {
    /// In bytes per second; only tbf has it.
    rate: Option<u64>,
}

#[derive(Debug, Deserialize)]
struct NftListing {
    nftables: Vec<NftObject>,
}

/// One object of a listing: a chain, or something about the program itself.
#[derive(Debug, Deserialize)]
struct NftObject {
    chain: Option<NftChain>,
}

#[derive(Debug, Deserialize)]
struct NftChain {
    table: String,
    name: String,
}

/// Reads the status of a complete lab.
pub(crate) fn read(spec: &LabSpec) -> Result<LabStatus, Error> {
    let dropping = dropping_tables(spec)?;
    let hosts = spec.hosts.iter().map(|host| read_host(spec, host, &dropping));
    Ok(LabStatus {
        name: spec.name.clone(),
        hosts: hosts.collect::<Result<_, _>>()?,
        client: read_node(spec, CLIENT)?,
    })
}

fn read_node(spec: &LabSpec, node: &str) -> Result<NodeStatus, Error> {
    let namespace = spec.namespace(node);
    let processes = processes_on(&namespace)?;
    Ok(NodeStatus { name: node.to_owned(), namespace, processes })
}

/// The processes in a namespace, by pid.
pub(crate) fn processes_on(namespace: &str) -> Result<Vec<ProcessStatus>, Error> {
    let id = NamespaceId::of_file(&namespace_file(namespace));
    let mut pids: Vec<Pid> = processes::within(&id.into_iter().collect())?.into_iter().collect();
    pids.sort_by_key(|pid| pid.as_raw_pid());
    let status = |pid: Pid| ProcessStatus { pid: pid.as_raw_pid(), command: command_line(pid) };
    Ok(pids.into_iter().map(status).collect())
}

fn address_of(spec: &LabSpec, host: &str, link: &str) -> Result<Option<Ipv4Addr>, Error> {
    let address = spec.link_addresses.has_ipv4().then(|| spec.link_address(host, link));
    Ok(address.transpose()?)
}

fn read_host(spec: &LabSpec, host: &str, dropping: &HashMap<String, Dropped>) -> Result<HostStatus, Error> {
    let node = read_node(spec, host)?;
    let namespace = &node.namespace;
    let interfaces = interfaces::of(namespace)?;
    let qdiscs: Vec<Qdisc> = query(namespace, "tc", &["qdisc", "show"])?;
    let mut links = Vec::new();
    for name in spec.link_names() {
        let interface = interfaces.iter().find(|interface| interface.ifname == name);
        let interface = interface.ok_or_else(|| Error::Incomplete {
            name: spec.name.clone(),
            what: format!("host {host} has lost its interface {name}"),
        })?;
        let tbf = qdiscs.iter().find(|qdisc| qdisc.dev == name && qdisc.kind == "tbf");
        let mut link = LinkStatus {
            address: address_of(spec, host, &name)?,
            state: interface.state(),
            rate_mbps: tbf.and_then(|qdisc| qdisc.options.rate).map(|rate| rate / 125_000),
            mtu_bytes: interface.mtu,
            received_bytes: interface.stats64.rx.bytes,
            sent_bytes: interface.stats64.tx.bytes,
            faults: Vec::new(),
            name,
        };
        link.faults = faults(spec, host, &link, dropping)?;
        links.push(link);
    }
    let libvirt = spec.libvirt.then(|| read_libvirt(spec, host)).transpose()?;
    let console = spec.machines.as_ref().map(|_| emulated::console(&spec.name, host));
    Ok(HostStatus { management_address: spec.management_address(host)?, node, links, libvirt, console })
}

fn read_libvirt(spec: &LabSpec, host: &str) -> Result<LibvirtStatus, Error> {
    let pid = libvirt::daemon(spec, host)?.map(Pid::as_raw_pid);
    Ok(LibvirtStatus { socket: libvirt::socket(spec, host)?, pid })
}

/// The faults that explain how `link` differs from the specification.
fn faults(
    spec: &LabSpec,
    host: &str,
    link: &LinkStatus,
    dropping: &HashMap<String, Dropped>,
) -> Result<Vec<Fault>, Error> {
    let planned = spec.links[spec.link_index(&link.name)?];
    let names = || (host.to_owned(), link.name.clone());
    let mut faults = Vec::new();
    if link.state == LinkState::Down {
        let (host, link) = names();
        faults.push(Fault::LinkDown { host, link });
    }
    faults.extend(losses(spec, host, &link.name, dropping)?);
    if link.rate_mbps != planned.rate_mbps {
        faults.push(Fault::Rate { link: link.name.clone(), rate_mbps: link.rate_mbps });
    }
    if link.mtu_bytes != planned.mtu_bytes {
        let mtu_bytes = link.mtu_bytes;
        let (host, link) = names();
        faults.push(Fault::Mtu { host, link, mtu_bytes });
    }
    Ok(faults)
}

/// What drops packets, in an order in which it could have been made: a blackhole after the loss that it
/// took the place of in its direction.
fn losses(
    spec: &LabSpec,
    host: &str,
    link: &str,
    dropping: &HashMap<String, Dropped>,
) -> Result<Vec<Fault>, Error> {
    let dropped = drops(spec, host, link)?.map(|drop| dropping.get(&drop.table).copied());
    let mut faults = Vec::new();
    for (what, direction) in by_direction(dropped) {
        let (host, link) = (host.to_owned(), link.to_owned());
        faults.push(match what {
            Dropped::All => Fault::Blackhole { host, link, direction },
            Dropped::Above(bytes) => Fault::BlackholeAbove { host, link, bytes, direction },
            Dropped::Percent(percent) => Fault::Loss { host, link, percent },
        });
    }
    faults.sort_by_key(|fault| !matches!(fault, Fault::Loss { .. }));
    Ok(faults)
}

/// What a host drops of what it receives and of what it sends: the same in both directions is one entry.
fn by_direction([receive, send]: [Option<Dropped>; 2]) -> Vec<(Dropped, Direction)> {
    if receive == send {
        return receive.map(|what| (what, Direction::Both)).into_iter().collect();
    }
    let [receive, send] = [(receive, Direction::Receive), (send, Direction::Send)];
    [receive, send].into_iter().filter_map(|(what, direction)| Some((what?, direction))).collect()
}

/// The tables that drop, wherever in the lab they are, with what they drop; each name exists once.
fn dropping_tables(spec: &LabSpec) -> Result<HashMap<String, Dropped>, Error> {
    let mut tables = HashMap::new();
    for node in spec.nodes().filter(|node| *node != CLIENT) {
        let listing: NftListing = query_nft(&spec.namespace(node), &["list", "chains", "netdev"])?;
        let chains = listing.nftables.into_iter().filter_map(|object| object.chain);
        tables.extend(chains.filter_map(|chain| Some((chain.table, Dropped::by_chain(&chain.name)?))));
    }
    Ok(tables)
}

/// The process's arguments; empty if it has just ended.
fn command_line(pid: Pid) -> String {
    let mut text = fs::read(Path::new(&format!("/proc/{pid}/cmdline"))).unwrap_or_default();
    text.truncate(MAX_COMMAND_BYTES);
    String::from_utf8_lossy(&text).trim_end_matches('\0').replace('\0', " ")
}
