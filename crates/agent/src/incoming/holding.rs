//! Before a VM is started, the other hosts are asked whether they have it.

use std::collections::{BTreeMap, BTreeSet};

use drainpipe_engine::journal::start::{Answer, Asked, may_start};
use drainpipe_engine::problem::{Problem, ProblemKind};
use futures_util::future::join_all;
use tracing::warn;

use super::Incoming;
use crate::peers::client::ApiClient;
use crate::peers::proof::{ANSWER_DEADLINE, Proof};
use drainpipe_api_types::{Holding, VmHolding, VmList, VmState};

/// Whether this host has a VM, for another one that is to start it.
pub(crate) fn holding(incoming: &Incoming, vm: &str, asks: &str) -> Result<VmHolding, Problem> {
    let leaves_to = incoming.journal.open_migrations()?.into_iter().find(|open| open.vm == vm);
    let holding = if incoming.vms.running(vm).is_some_and(|vmm| vmm.alive())
        || incoming.vms.why_unresponsive(vm).is_some()
    {
        Some(Holding::Lives)
    } else if incoming.entries.has(vm) {
        Some(Holding::Comes)
    } else if leaves_to.is_some_and(|open| open.target != asks) {
        Some(Holding::Leaves)
    } else if incoming.journal.came_from(vm)?.as_deref() == Some(asks) {
        Some(Holding::HandedOver)
    } else {
        None
    };
    Ok(VmHolding { holding })
}

/// Refuses to start a VM that another host has, or may have. Of hosts in `although_unreachable` the operator says that
/// they do not.
pub(crate) async fn check_nowhere_else(
    incoming: &Incoming,
    proof: &Proof,
    vm: &str,
    although_unreachable: &BTreeSet<String>,
) -> Result<(), Problem> {
    let asked = join_all(incoming.peers.all().into_iter().map(|(name, peer)| async move {
        // What it knows of this host's journal comes first: an older one proves nothing.
        let (_told, answer) = tokio::join!(proof.tell(&name, &peer), ask(&peer, vm));
        (name, answer)
    }));
    let mut answers: BTreeMap<String, Answer> = asked.await.into_iter().collect();
    let tied_to = incoming.journal.tied_to(vm)?.into_iter().collect();
    add_those_who_are_gone(&mut answers, incoming.host.name(), &tied_to, incoming.host.fleet.revoked_hosts());
    let asked = Asked {
        here: incoming.host.name(),
        vm,
        is_proven: incoming.journal.is_proven(vm)?,
        tied_to: &tied_to,
        answers: &answers,
        although_unreachable,
    };
    let unasked = may_start(&asked)?;
    for host in &unasked {
        warn!(
            vm,
            host, "is started, on an operator's word, although this host cannot be asked whether it has it"
        );
    }
    if unasked.is_empty() && answers.values().all(|answer| *answer == Answer::HasNot) && !asked.is_proven {
        incoming.journal.prove_vm(vm)?;
    }
    Ok(())
}

/// A host that this one knows no more may have the VM all the same.
fn add_those_who_are_gone(
    answers: &mut BTreeMap<String, Answer>,
    here: &str,
    tied_to: &BTreeSet<String>,
    revoked: impl IntoIterator<Item = String>,
) {
    for host in tied_to.iter().cloned().chain(revoked).filter(|host| host != here) {
        let gone = "it has left the fleet, was revoked, or is no longer a [[peer]]";
        answers.entry(host).or_insert_with(|| Answer::Unknown(gone.into()));
    }
}

async fn ask(peer: &ApiClient, vm: &str) -> Answer {
    match peer.get_within::<VmHolding>(&format!("/v1/holdings/{vm}"), ANSWER_DEADLINE).await {
        Ok(VmHolding { holding: None }) => Answer::HasNot,
        Ok(VmHolding { holding: Some(holding) }) => Answer::Has(in_words(holding).into()),
        // A Drainpipe before this one.
        Err(problem) if problem.kind == ProblemKind::NotFound => ask_for_list(peer, vm).await,
        Err(problem) => Answer::Unknown(problem.message),
    }
}

async fn ask_for_list(peer: &ApiClient, vm: &str) -> Answer {
    match peer.get_within::<VmList>("/v1/vms", ANSWER_DEADLINE).await {
        Ok(list) if list.vms.iter().any(|view| view.name == vm && view.state != VmState::Stopped) => {
            Answer::Has(in_words(Holding::Lives).into())
        }
        Ok(_) => Answer::HasNot,
        Err(problem) => Answer::Unknown(problem.message),
    }
}

fn in_words(holding: Holding) -> &'static str {
    match holding {
        Holding::Lives => "its QEMU lives there",
        Holding::Comes => "it is on its way there",
        Holding::Leaves => "it is on its way from there to another host",
        Holding::HandedOver => "it was handed over to that host, and is stopped there",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn start(
        is_proven: bool,
        tied_to: &[&str],
        revoked: &[&str],
        although: &[&str],
    ) -> Result<Vec<String>, Problem> {
        let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<BTreeSet<_>>();
        let mut answers = BTreeMap::from([("c".to_owned(), Answer::HasNot)]);
        add_those_who_are_gone(&mut answers, "a", &names(tied_to), names(revoked));
        may_start(&Asked {
            here: "a",
            vm: "web",
            is_proven,
            tied_to: &names(tied_to),
            answers: &answers,
            although_unreachable: &names(although),
        })
    }

    #[test]
    fn who_has_left_or_was_revoked_may_still_have_the_vm() {
        assert!(start(true, &["b"], &[], &[]).unwrap_err().message.contains("--although-unreachable b"));
        assert_eq!(start(true, &["b"], &["b"], &["b"]), Ok(vec!["b".into()]));
        assert!(start(false, &[], &["b"], &[]).is_err());
        // The host has come again and is asked, or has nothing to do with a VM that is provably here.
        assert_eq!(start(false, &["a", "c"], &["a", "c"], &[]), Ok(vec![]));
        assert_eq!(start(true, &[], &["b"], &[]), Ok(vec![]));
    }
}
