//! The list of VMs: those here, those on their way here, and those of the other hosts.

use futures_util::future::join_all;

use super::Incoming;
use crate::peers::LIST_DEADLINE;
use crate::vms::describe;
use drainpipe_api_types::{Scope, VmList, VmState};

impl Incoming {
    /// The VMs here, or of all hosts that this one knows.
    pub(crate) async fn list_vms(&self, scope: Scope) -> VmList {
        let mut list = VmList { vms: self.vms.list().await, ..VmList::default() };
        let coming = self.entries.definitions();
        let coming = coming.iter().filter(|definition| !self.vms.contains(definition.name.as_str()));
        list.vms.extend(coming.map(|definition| {
            let awaits_run = self.entries.awaits_run(definition.name.as_str());
            let state = if awaits_run { VmState::Unknown } else { VmState::Incoming };
            describe(self.host.name(), definition, state)
        }));
        if scope == Scope::All {
            let asked =
                self.peers.all().into_iter().map(async |(name, peer)| {
                    (name, peer.get_within::<VmList>("/v1/vms", LIST_DEADLINE).await)
                });
            for (name, answer) in join_all(asked).await {
                match answer {
                    Ok(more) => list.vms.extend(more.vms),
                    Err(problem) => {
                        list.hosts_not_asked.push(name);
                        list.errors.push(problem.message);
                    }
                }
            }
        }
        list.vms.sort_by(|one, other| (&one.name, &one.host).cmp(&(&other.name, &other.host)));
        list
    }
}
