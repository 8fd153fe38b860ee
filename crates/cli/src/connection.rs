//! Which agent is asked, and how it is reached.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use drainpipe_agent::peers::client::ApiClient;
use drainpipe_agent::store::config::{DEFAULT_PORT, DEFAULT_SOCKET};
use drainpipe_api_types::{HostStatus, VmList, VmState, VmView};
use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_hypervisor::spec::VmName;
use drainpipe_identity::Identity;

/// An agent that asks the others gives up on one that is silent after 2 s, and then answers.
const ALL_HOSTS_DEADLINE: Duration = Duration::from_secs(10);

/// A VM does not count as unreachable because its host was busy once.
const FIND_ATTEMPTS: usize = 2;

/// Options of every command that asks an agent.
#[derive(Debug, Clone, Args)]
pub(crate) struct ConnectionArguments {
    /// The agent to ask: a Unix socket on this host, or NAME@ADDRESS:PORT
    #[arg(long, global = true, env = "DRAINPIPE_AGENT", default_value = DEFAULT_SOCKET, value_name = "AGENT")]
    agent: String,

    /// Directory with operator.pem, operator.key and ca.pem, for NAME@ADDRESS:PORT
    #[arg(
        long,
        global = true,
        env = "DRAINPIPE_IDENTITY",
        default_value = "/etc/drainpipe/operator",
        value_name = "DIRECTORY"
    )]
    identity: PathBuf,
}

/// The hosts, by way of one agent.
pub(crate) struct Fleet {
    entry: ApiClient,
    // An operator goes to each host itself; root on a host has its agent pass requests on.
    identity: Option<Identity>,
}

/// One host, and the way to it.
pub(crate) struct Host {
    client: ApiClient,
    suffix: String,
}

impl ConnectionArguments {
    /// Root on this host, by its agent's socket.
    pub(crate) fn of_socket(socket: &Path) -> Self {
        Self { agent: socket.display().to_string(), identity: PathBuf::new() }
    }

    /// The way in.
    pub(crate) fn fleet(&self) -> Result<Fleet, Problem> {
        let Some((name, address)) = self.agent.split_once('@') else {
            return Ok(Fleet { entry: self.over_socket()?, identity: None });
        };
        let address: SocketAddr = address.parse().map_err(|_| {
            Problem::bad_input(format!(
                "--agent {}: write it as NAME@ADDRESS:PORT, as in a@10.0.0.1:7420",
                self.agent
            ))
        })?;
        let file = |name: &str| self.identity.join(name);
        let identity = Identity::load(&file("operator.pem"), &file("operator.key"), &file("ca.pem"))
            .map_err(Problem::refused)?;
        Ok(Fleet { entry: ApiClient::over_tls(name, address, &identity)?, identity: Some(identity) })
    }

    fn over_socket(&self) -> Result<ApiClient, Problem> {
        let socket = Path::new(&self.agent);
        let address = self.agent.parse::<SocketAddr>();
        let address = address.or_else(|_| self.agent.parse().map(|ip| SocketAddr::new(ip, DEFAULT_PORT)));
        if let Ok(address) = address {
            return Err(Problem::bad_input(format!(
                "--agent {}: the name of its host is missing, which its certificate must have: write it as \
                 NAME@{address}, as in a@{address}",
                self.agent
            )));
        }
        if !socket.exists() {
            return Err(Problem::new(
                ProblemKind::Unreachable,
                format!(
                    "no agent at {}: start it (`systemctl start drainpipe`, or `drainpipe agent --config FILE`), \
                     or name another with --agent",
                    socket.display()
                ),
            ));
        }
        ApiClient::over_socket(socket)
    }
}

impl Fleet {
    /// All hosts that the agent knows, its own first.
    pub(crate) async fn hosts(&self) -> Result<Vec<HostStatus>, Problem> {
        self.entry.get_within("/v1/hosts", ALL_HOSTS_DEADLINE).await
    }

    /// The VMs of all hosts.
    pub(crate) async fn vms(&self) -> Result<VmList, Problem> {
        self.entry.get_within("/v1/vms?scope=all", ALL_HOSTS_DEADLINE).await
    }

    /// The agent that was named.
    pub(crate) fn entry(&self) -> Host {
        Host { client: self.entry.clone(), suffix: String::new() }
    }

    /// A VM, wherever it is. One that is on its way counts where it still runs.
    pub(crate) async fn find_vm(&self, name: &str) -> Result<VmView, Problem> {
        self.find_entry(name, the_one_it_leaves).await
    }

    /// If several hosts list the VM, the one that has a process: what is to be moved or stopped.
    pub(crate) async fn find_running_vm(&self, name: &str) -> Result<VmView, Problem> {
        self.find_entry(name, the_living_one).await
    }

    /// If several hosts list the VM, the one that has no process: what is to be started or removed.
    pub(crate) async fn find_stopped_vm(&self, name: &str) -> Result<VmView, Problem> {
        self.find_entry(name, the_stopped_one).await
    }

    async fn find_entry(
        &self,
        name: &str,
        choose: fn(Vec<VmView>) -> Option<VmView>,
    ) -> Result<VmView, Problem> {
        let mut unseen = String::new();
        for _ in 0..FIND_ATTEMPTS {
            let list = self.vms().await?;
            let of_name = list.vms.into_iter().filter(|vm| vm.name == name).collect();
            if let Some(vm) = choose(of_name) {
                return nameable(vm);
            }
            if list.errors.is_empty() {
                return Err(Problem::not_found(format!(
                    "no VM {name} on any host; `drainpipe vms` lists all"
                )));
            }
            unseen = list.errors.join("; ");
        }
        let message = format!("no VM {name} on the hosts that answer; not all do: {unseen}");
        Err(Problem::new(ProblemKind::Unreachable, message))
    }

    /// The way to one host.
    pub(crate) async fn host(&self, name: &str) -> Result<Host, Problem> {
        let Some(identity) = &self.identity else {
            return Ok(Host { client: self.entry.clone(), suffix: format!("host={name}") });
        };
        let hosts = self.hosts().await?;
        let host = hosts
            .iter()
            .find(|host| host.name == name)
            .ok_or_else(|| Problem::not_found(format!("no host {name}; `drainpipe hosts` lists them")))?;
        let address = host.address.parse().map_err(|_| {
            Problem::failed(format!("the agent gives {} as the address of {name}", host.address))
        })?;
        Ok(Host { client: ApiClient::over_tls(name, address, identity)?, suffix: String::new() })
    }
}

impl Host {
    /// The client to ask.
    pub(crate) fn client(&self) -> &ApiClient {
        &self.client
    }

    /// A path of the API on this host.
    pub(crate) fn path(&self, path: &str) -> String {
        if self.suffix.is_empty() {
            return path.into();
        }
        let separator = if path.contains('?') { '&' } else { '?' };
        format!("{path}{separator}{}", self.suffix)
    }
}

/// Where it is to come is asked last, and where it may leave before that.
fn the_one_it_leaves(of_name: Vec<VmView>) -> Option<VmView> {
    of_name.into_iter().min_by_key(|vm| (vm.state == VmState::Incoming, vm.migration.is_some()))
}

/// An older journal may list a VM that has gone since, as stopped.
/// One whose name no request can say is shown alone.
fn nameable(vm: VmView) -> Result<VmView, Problem> {
    match &vm.unmovable {
        Some(why) if vm.name.parse::<VmName>().is_err() => {
            Err(Problem::refused(format!("VM {} cannot move: {why}", vm.name)))
        }
        _ => Ok(vm),
    }
}

fn the_living_one(of_name: Vec<VmView>) -> Option<VmView> {
    let rank =
        |vm: &VmView| (vm.state == VmState::Incoming, vm.state == VmState::Stopped, vm.migration.is_some());
    of_name.into_iter().min_by_key(rank)
}

fn the_stopped_one(of_name: Vec<VmView>) -> Option<VmView> {
    let rank = |vm: &VmView| (vm.state != VmState::Stopped, vm.state == VmState::Incoming);
    of_name.into_iter().min_by_key(rank)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn listed(host: &str, state: &str) -> VmView {
        let view =
            serde_json::json!({ "name": "web", "host": host, "state": state, "memory_mib": 64, "vcpus": 1 });
        serde_json::from_value(view).unwrap()
    }

    #[test]
    fn of_a_vm_that_an_older_journal_lists_too_the_living_one_is_moved_and_the_other_removed() {
        for [first, second] in [["a", "c"], ["c", "a"]] {
            let list = || vec![listed(first, "running"), listed(second, "stopped")];
            assert_eq!(the_living_one(list()).unwrap().host, first);
            assert_eq!(the_stopped_one(list()).unwrap().host, second);
        }
        let list = || vec![listed("a", "incoming"), listed("b", "stopped")];
        assert_eq!(the_living_one(list()).unwrap().host, "b");
        assert!(the_living_one(vec![]).is_none() && the_stopped_one(vec![]).is_none());
    }

    fn refused(agent: &str) -> Problem {
        let arguments = ConnectionArguments { agent: agent.into(), identity: PathBuf::from("/nonexistent") };
        arguments.fleet().err().expect("it is no way to an agent")
    }

    #[test]
    fn an_address_without_a_name_is_no_socket_that_nobody_listens_at() {
        for (agent, address) in [
            ("192.0.2.11:7420", "192.0.2.11:7420"),
            ("192.0.2.11", "192.0.2.11:7420"),
            ("[2001:db8::1]:7421", "[2001:db8::1]:7421"),
        ] {
            let Problem { kind, message, .. } = refused(agent);
            assert_eq!(kind, ProblemKind::BadInput);
            let how = format!(
                "the name of its host is missing, which its certificate must have: write it as NAME@{address}"
            );
            assert!(message.contains(&how), "{message}");
            assert!(!message.contains("start"), "{message}");
        }
        let Problem { kind, message, .. } = refused("/nonexistent/agent.sock");
        assert_eq!(kind, ProblemKind::Unreachable);
        assert!(message.contains("no agent at /nonexistent/agent.sock: start it"), "{message}");
        assert!(refused("a@192.0.2.11").message.contains("a@10.0.0.1:7420"), "an example has the port");
    }
}
