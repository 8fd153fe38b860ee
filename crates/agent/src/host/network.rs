//! Changes to the host's network: each is in the journal before it is made. Those for migrations are undone when the
//! last migration that needs them is over, or when the agent next starts.

use std::collections::HashMap;
use std::net::IpAddr;
use std::sync::Arc;

use drainpipe_engine::problem::Problem;
use drainpipe_net::{Before, Change, Flow, FlowCounters, LinkKind, Neighbour, Network, RouteState, Undo};
use ipnet::IpNet;
use tokio::sync::Mutex;
use tracing::{debug, info, warn};

use crate::host::migration_links::{self, MigrationLinks};
use crate::store::config::{Config, Peer};
use crate::store::journal::{HostChange, Journal};

/// What each link takes that knows no jumbo frames, in bytes (RFC 894).
pub(crate) const ETHERNET_MTU: u16 = 1500;

/// The network of this host.
#[derive(Debug)]
pub(crate) struct HostNetwork {
    network: Network,
    journal: Arc<Journal>,
    // Journal and kernel change together.
    changing: Mutex<()>,
}

impl HostNetwork {
    /// Opens the kernel's interfaces.
    pub(crate) fn open(journal: Arc<Journal>) -> Result<Self, Problem> {
        let network = Network::open().map_err(Problem::failed)?;
        Ok(Self { network, journal, changing: Mutex::new(()) })
    }

    /// The links that carry migrations, as they are now.
    pub(crate) async fn migration_links(
        &self,
        config: &Config,
        peers: &[Peer],
    ) -> Result<MigrationLinks, Problem> {
        let links = self.network.links().await.map_err(Problem::failed)?;
        let mut links = if config.links.is_empty() {
            let management = self.management_addresses(config, peers).await;
            migration_links::found(&links, &config.exclude_links, &management)
        } else {
            MigrationLinks { first: migration_links::configured(&links, &config.links), management: vec![] }
        };
        for link in links.first.iter_mut().chain(&mut links.management) {
            link.is_trusted = migration_links::is_trusted(link, &config.trusted_networks);
        }
        Ok(links)
    }

    /// The addresses by which this host and its peers reach each other.
    pub(crate) async fn management_addresses(&self, config: &Config, peers: &[Peer]) -> Vec<IpAddr> {
        let mut addresses = vec![config.listen.ip()];
        for peer in peers {
            // A peer that is not routed says nothing of the others.
            match self.network.route_to(peer.address.ip()).await {
                Ok(route) => addresses.extend(route.and_then(|route| route.source)),
                Err(error) => debug!(peer = peer.name, %error, "no route to it"),
            }
        }
        addresses
    }

    /// The subnet of a link, or the destination of a route, that an address belongs to on this host.
    pub(crate) async fn subnet_of(&self, address: IpAddr) -> Result<Option<IpNet>, Problem> {
        self.network.subnet_of(address).await.map_err(Problem::failed)
    }

    /// The addresses of this host, on whichever link.
    pub(crate) async fn addresses(&self) -> Result<Vec<IpAddr>, Problem> {
        let links = self.network.links().await.map_err(Problem::failed)?;
        Ok(links.iter().flat_map(|link| &link.addresses).map(IpNet::addr).collect())
    }

    /// The machines on its links.
    pub(crate) async fn neighbours(&self) -> Result<Vec<Neighbour>, Problem> {
        self.network.neighbours().await.map_err(Problem::failed)
    }

    /// The subnets of all links, as they are now; not the addresses of migrations under way.
    pub(crate) async fn subnets(&self) -> Result<Vec<IpNet>, Problem> {
        let links = self.network.links().await.map_err(Problem::failed)?;
        let others = links.into_iter().filter(|link| link.kind != LinkKind::Loopback);
        Ok(others.flat_map(|link| link.addresses).collect())
    }

    /// Bytes that each link has sent so far, in the order asked for; zero for a link that is gone.
    pub(crate) async fn sent_bytes(&self, links: &[&str]) -> Result<Vec<u64>, Problem> {
        let counters = self.network.counters(links).await.map_err(Problem::failed)?;
        let by_name: HashMap<&str, u64> =
            counters.iter().map(|counters| (counters.name.as_str(), counters.tx_bytes)).collect();
        Ok(links.iter().map(|link| by_name.get(link).copied().unwrap_or(0)).collect())
    }

    /// The largest packet that a link takes, in bytes; as most do, if it is gone.
    pub(crate) async fn mtu(&self, link: &str) -> Result<u16, Problem> {
        let links = self.network.links().await.map_err(Problem::failed)?;
        let mtu = links.iter().find(|found| found.name == link).map_or(ETHERNET_MTU.into(), |link| link.mtu);
        // A loopback's is more than a packet of IP may be.
        Ok(u16::try_from(mtu).unwrap_or(u16::MAX))
    }

    /// Whether a link is there and switched on.
    pub(crate) async fn is_up(&self, link: &str) -> bool {
        self.network.is_up(link).await.unwrap_or(false)
    }

    /// The connections of this host to `peer`.
    pub(crate) async fn flows_to(&self, peer: IpAddr) -> Result<Vec<Flow>, Problem> {
        self.network.flows_to(peer).await.map_err(Problem::failed)
    }

    /// For each connection the link that the route leads it over.
    pub(crate) async fn links_of_flows(&self, flows: &[Flow]) -> Result<Vec<Option<String>>, Problem> {
        self.network.links_of_flows(flows).await.map_err(Problem::failed)
    }

    /// How packets to `destination` are led now, to be compared.
    pub(crate) async fn route_state(&self, destination: IpAddr) -> Result<RouteState, Problem> {
        self.network.route_state(destination).await.map_err(Problem::failed)
    }

    /// Addresses to which another program has made a route, and the numbers of these routes' protocols.
    pub(crate) async fn foreign_host_routes(&self) -> Result<Vec<(IpAddr, u8)>, Problem> {
        self.network.foreign_host_routes().await.map_err(Problem::failed)
    }

    /// What is counted of a connection; none if it is gone.
    pub(crate) async fn flow_counters(&self, flow: Flow) -> Result<Option<FlowCounters>, Problem> {
        self.network.flow_counters(flow).await.map_err(Problem::failed)
    }

    /// Makes the changes for an owner: a migration, or who mends what a check found. Journaled first.
    /// What fails half-way is put back by [`Self::put_back`], which the caller owes in any case.
    pub(crate) async fn change_for(&self, owner: &str, changes: &[Change]) -> Result<(), Problem> {
        let _changing = self.changing.lock().await;
        let made = self.journal.changes()?;
        for change in changes {
            let before = match made.iter().find(|other| same_object(&other.change, change)) {
                Some(other) => other.before.clone(),
                None => self.network.observe(change).await.map_err(Problem::refused)?,
            };
            if !made.iter().any(|other| other.owner == owner && is_record_of(&other.change, change)) {
                self.journal.record_change(owner, change, &before)?;
            }
            self.network.apply(change).await.map_err(Problem::failed)?;
        }
        Ok(())
    }

    /// Makes a change of what is recorded already for some migration, and so is put back with it.
    pub(crate) async fn change_recorded(&self, change: &Change) -> Result<(), Problem> {
        let _changing = self.changing.lock().await;
        if !self.journal.changes()?.iter().any(|recorded| same_object(&recorded.change, change)) {
            return Err(Problem::failed(format!("no recorded migration needs the {change}")));
        }
        self.network.apply(change).await.map_err(Problem::failed)
    }

    /// What is there now of that which a change would change.
    pub(crate) async fn observe(&self, change: &Change) -> Result<Before, Problem> {
        self.network.observe(change).await.map_err(Problem::refused)
    }

    /// The changes for one owner that have not been undone, the newest first.
    pub(crate) fn changes_for(&self, owner: &str) -> Result<Vec<HostChange>, Problem> {
        let changes = self.journal.changes()?;
        Ok(changes.into_iter().filter(|change| change.owner == owner).collect())
    }

    /// Makes a recorded change again if it is not there any more as it was made: the kernel drops a route when
    /// its last link is switched off, and programs that manage the network remove what they do not know.
    /// Whether it had to be made.
    pub(crate) async fn restore(&self, change: &Change) -> Result<bool, Problem> {
        let _changing = self.changing.lock().await;
        if self.network.is_applied(change).await.map_err(Problem::failed)? {
            return Ok(false);
        }
        self.network.apply(change).await.map_err(Problem::failed)?;
        Ok(true)
    }

    /// Undoes what was changed for an owner and is not needed by another.
    pub(crate) async fn put_back(&self, owner: &str) -> Result<(), Problem> {
        self.put_back_where(|change| change.owner == owner).await
    }

    /// Undoes one change that was made for an owner, who has no use for it any more.
    pub(crate) async fn put_back_one(&self, owner: &str, change: &Change) -> Result<(), Problem> {
        self.put_back_where(|made| made.owner == owner && same_object(&made.change, change)).await
    }

    /// Undoes everything that an earlier run of the agent left, but for the owners named.
    pub(crate) async fn put_back_all_but(&self, owners: &[String]) -> Result<(), Problem> {
        self.put_back_where(|change| !owners.contains(&change.owner)).await
    }

    async fn put_back_where(&self, selected: impl Fn(&HostChange) -> bool) -> Result<(), Problem> {
        let _changing = self.changing.lock().await;
        let (mine, mut others): (Vec<_>, Vec<_>) = self.journal.changes()?.into_iter().partition(selected);
        let mut first_problem = None;
        for change in mine {
            let undone = self.undo(&change, &others).await;
            match undone.and_then(|()| Ok(self.journal.forget_change(change.sequence)?)) {
                Ok(()) => {}
                Err(problem) => {
                    first_problem.get_or_insert(problem);
                    others.push(change);
                }
            }
        }
        first_problem.map_or(Ok(()), Err)
    }

    async fn undo(&self, change: &HostChange, others: &[HostChange]) -> Result<(), Problem> {
        // For a route, the watch of its paths knows how it leads now; the record does not.
        if others.iter().any(|other| same_object(&other.change, &change.change)) {
            return Ok(());
        }
        match self.network.undo(&change.change, &change.before).await.map_err(Problem::failed)? {
            Undo::Undone => info!(change = ?change.change, "put back"),
            Undo::NothingToDo => {}
            Undo::LeftAlone(why) => warn!(change = ?change.change, why, "left as it is"),
        }
        Ok(())
    }
}

/// Whether a record is all that putting the change back needs.
fn is_record_of(recorded: &Change, change: &Change) -> bool {
    match change {
        // A route is put back whatever it has become; a setting only if it has the value that was recorded.
        Change::Route { .. } => same_object(recorded, change),
        Change::Address { .. }
        | Change::Unreachable { .. }
        | Change::OnlyFrom { .. }
        | Change::Sysctl { .. } => recorded == change,
    }
}

fn same_object(one: &Change, other: &Change) -> bool {
    match (one, other) {
        (Change::Address { link, address }, Change::Address { link: link2, address: address2 }) => {
            (link, address) == (link2, address2)
        }
        (Change::Route { destination, .. }, Change::Route { destination: other, .. })
        | (Change::Unreachable { destination }, Change::Unreachable { destination: other }) => {
            destination == other
        }
        (
            Change::OnlyFrom { address, port, .. },
            Change::OnlyFrom { address: other, port: other_port, .. },
        ) => (address, port) == (other, other_port),
        (Change::Sysctl { key, .. }, Change::Sysctl { key: other, .. }) => key == other,
        _ => false,
    }
}

#[cfg(test)]
mod tests {
    use std::process::Command;

    use super::*;

    const OWNER: &str = "check --fix";
    const BUFFERS: &str = "net.ipv4.tcp_rmem";

    #[test]
    fn a_setting_that_is_changed_twice_is_put_back() {
        if !rustix::process::geteuid().is_root() {
            eprintln!("SKIPPED: making network namespaces needs root");
            return;
        }
        let output = Command::new("unshare")
            .arg("--net")
            .arg(std::env::current_exe().unwrap())
            .args(["--exact", "host::network::tests::inside_a_network_namespace", "--ignored", "--nocapture"])
            .output()
            .expect("unshare(1) of util-linux");
        let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success() && text.contains("1 passed"), "{text}");
    }

    #[tokio::test(flavor = "multi_thread")]
    #[ignore = "`a_setting_that_is_changed_twice_is_put_back` runs it in a network namespace"]
    async fn inside_a_network_namespace() {
        let (_directory, journal) = Journal::temporary();
        let journal = Arc::new(journal);
        let network = HostNetwork::open(Arc::clone(&journal)).unwrap();
        let buffers =
            |most: u32| Change::Sysctl { key: BUFFERS.into(), value: format!("4096\t8192\t{most}") };
        let now = async || network.observe(&buffers(0)).await.unwrap();
        let before = now().await;
        // The second time for a larger VM; the third time nothing new is wanted.
        for most in [16_384, 32_768, 32_768] {
            network.change_for(OWNER, &[buffers(most)]).await.unwrap();
        }
        let recorded = network.changes_for(OWNER).unwrap();
        assert_eq!(
            recorded.iter().map(|made| &made.change).collect::<Vec<_>>(),
            [&buffers(32_768), &buffers(16_384)]
        );
        assert!(recorded.iter().all(|made| made.before == before), "{recorded:?}");
        network.put_back(OWNER).await.unwrap();
        assert_eq!(now().await, before);
        assert_eq!(journal.changes().unwrap().len(), 0);
    }
}
