//! The rules for who may do what. One table, pure. Everybody with a certificate of the fleet may look, so looking is
//! not in it.

use std::fmt;

use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_identity::Peer;

/// The sender of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Caller {
    /// Came over the Unix socket, whose permissions let only root in.
    Root,
    /// Came with a certificate.
    Peer(Peer),
}

impl fmt::Display for Caller {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Root => f.write_str("root on this host"),
            Self::Peer(Peer::Host(name)) => write!(f, "the agent of host {name}"),
            Self::Peer(Peer::Operator(name)) => write!(f, "operator {name}"),
        }
    }
}

impl Caller {
    /// The host that calls; nobody but hosts speaks on the paths between agents.
    pub(crate) fn host(&self) -> Result<&str, Problem> {
        match self {
            Self::Peer(Peer::Host(name)) => Ok(name),
            _ => Err(forbidden(self, "speak as a host's agent")),
        }
    }
}

/// What a request wants to do.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Operation<'a> {
    /// Make, start, stop or remove a VM.
    ManageVms,
    /// Mend settings of the host, or put them back.
    ChangeHost,
    /// Empty the host, or let VMs come to it again.
    Drain,
    /// Let hosts into the fleet, have them leave it, or revoke certificates.
    ChangeFleet,
    /// Move a VM from here to that host, or cancel such a migration.
    MigrateTo(&'a str),
    /// Send a VM here, or carry on with one that `source` has begun to send.
    SendVm {
        /// The host that sends it.
        source: &'a str,
    },
    /// Carry on with a check that `source` has begun.
    CarryOnCheck {
        /// The host that leads it.
        source: &'a str,
    },
    /// Learn whether a VM was handed over to `target`.
    AskHandOver {
        /// The host that it went to.
        target: &'a str,
    },
}

/// Whether this caller may do this.
///
/// A host's certificate is not an operator's: a host may fetch a VM to itself (failback), send one
/// of its own, and look; what it cannot do is move VMs between others or manage them.
pub(crate) fn authorise(caller: &Caller, operation: Operation<'_>) -> Result<(), Problem> {
    let allowed = match (caller, operation) {
        (
            Caller::Root | Caller::Peer(Peer::Operator(_)),
            Operation::ManageVms
            | Operation::ChangeHost
            | Operation::Drain
            | Operation::ChangeFleet
            | Operation::MigrateTo(_),
        ) => true,
        (
            Caller::Peer(Peer::Host(host)),
            Operation::MigrateTo(named)
            | Operation::SendVm { source: named }
            | Operation::CarryOnCheck { source: named }
            | Operation::AskHandOver { target: named },
        ) => host == named,
        _ => false,
    };
    if allowed { Ok(()) } else { Err(refusal(caller, operation)) }
}

fn refusal(caller: &Caller, operation: Operation<'_>) -> Problem {
    let what = match operation {
        Operation::ManageVms => "manage the VMs of this host".to_owned(),
        Operation::ChangeHost => "change settings of this host".to_owned(),
        Operation::Drain => "drain this host, or end that".to_owned(),
        Operation::ChangeFleet => "let hosts into the fleet, or have them leave it, on this host".to_owned(),
        Operation::MigrateTo(target) => format!("move a VM from here to {target}"),
        Operation::SendVm { source } => format!("send a VM here in the name of {source}"),
        Operation::CarryOnCheck { source } => format!("continue a check in the name of {source}"),
        Operation::AskHandOver { target } => format!("ask about a VM that goes to {target}"),
    };
    let cure = match operation {
        Operation::ManageVms
        | Operation::ChangeHost
        | Operation::Drain
        | Operation::ChangeFleet
        | Operation::MigrateTo(_) => {
            "; use root on this host, or an operator's certificate (`drainpipe pki operator`)"
        }
        Operation::SendVm { .. } | Operation::CarryOnCheck { .. } | Operation::AskHandOver { .. } => "",
    };
    forbidden(caller, &format!("{what}{cure}"))
}

fn forbidden(caller: &Caller, what: &str) -> Problem {
    Problem::new(ProblemKind::Forbidden, format!("{caller} may not {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(name: &str) -> Caller {
        Caller::Peer(Peer::Host(name.into()))
    }

    #[test]
    fn a_host_fetches_for_itself_only() {
        assert!(authorise(&host("a"), Operation::MigrateTo("a")).is_ok());
        let error = authorise(&host("a"), Operation::MigrateTo("c")).unwrap_err();
        assert_eq!(error.kind, ProblemKind::Forbidden);
        assert!(error.message.contains("the agent of host a may not move a VM from here to c"));
    }

    #[test]
    fn nobody_sends_in_the_name_of_another() {
        assert!(authorise(&host("a"), Operation::SendVm { source: "a" }).is_ok());
        for caller in [host("b"), Caller::Root, Caller::Peer(Peer::Operator("a".into()))] {
            assert!(authorise(&caller, Operation::SendVm { source: "a" }).is_err(), "{caller}");
        }
    }

    #[test]
    fn a_host_manages_no_vms_of_another() {
        for operation in
            [Operation::ManageVms, Operation::ChangeHost, Operation::Drain, Operation::ChangeFleet]
        {
            assert!(authorise(&host("a"), operation).is_err());
        }
        assert!(authorise(&Caller::Root, Operation::ManageVms).is_ok());
        assert!(authorise(&Caller::Peer(Peer::Operator("ann".into())), Operation::ManageVms).is_ok());
    }
}
