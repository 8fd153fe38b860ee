//! Hosts that come to a fleet and leave it.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueHint};
use drainpipe_agent::store::config;
use drainpipe_identity::JoinToken;

use crate::completion;

/// Which agent is set up.
#[derive(Debug, Args)]
pub(crate) struct PlaceArguments {
    /// This host's configuration; written if it is not there
    #[arg(long, default_value = config::DEFAULT_PATH, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) config: PathBuf,
    /// This host's name among the others; as the system calls it if absent
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Where this host's agent listens; the address that leads to the others if absent
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) listen: Option<SocketAddr>,
}

#[derive(Debug, Args)]
#[command(after_help = INIT_HELP)]
pub(crate) struct InitArguments {
    #[command(flatten)]
    pub(crate) place: PlaceArguments,
    /// How long the token is good
    #[arg(long, default_value_t = 30, value_name = "MINUTES", value_parser = clap::value_parser!(u32).range(1..=1440))]
    pub(crate) minutes: u32,
    /// How long hosts' certificates are good, of a new fleet. They are renewed when a third of it is left
    #[arg(long, default_value_t = 120, value_name = "DAYS", value_parser = clap::value_parser!(u32).range(1..=825))]
    pub(crate) certificate_days: u32,
    /// The same in seconds, for tests
    #[arg(long, hide = true, value_name = "SECONDS")]
    pub(crate) certificate_seconds: Option<u32>,
}

impl InitArguments {
    pub(crate) fn certificate_s(&self) -> u32 {
        self.certificate_seconds.unwrap_or(self.certificate_days * 24 * 60 * 60)
    }
}

const INIT_HELP: &str = "\
On the first host, this makes a certificate authority and the host's own certificate, writes agent.toml if there is none,
starts the agent, and prints the line to run on the next host. The line has a token in it, which lets one host join, once.
Run it again for each further host. The authority's key stays on this host, in the agent's state directory: back it up.

Examples:
  drainpipe init
  drainpipe init --name a --listen 192.0.2.11:7420   where the host's name or address is not the right one
  drainpipe init --minutes 5                         a token that is good for five minutes";

#[derive(Debug, Args)]
#[command(
    after_help = "Example, as `drainpipe init` printed it:\n  drainpipe join 192.0.2.11 --token a:4f6b…:9c01…"
)]
pub(crate) struct JoinArguments {
    /// The host that has printed the token: address or name, with its port if that is another than 7420
    pub(crate) host: String,
    /// What `drainpipe init` has printed there; - reads it from standard input, so that no list of processes shows it
    #[arg(long, value_name = "TOKEN")]
    pub(crate) token: TokenArgument,
    #[command(flatten)]
    pub(crate) place: PlaceArguments,
}

/// A token, or where it comes from.
#[derive(Debug, Clone)]
pub(crate) enum TokenArgument {
    Given(JoinToken),
    StandardInput,
}

impl FromStr for TokenArgument {
    type Err = <JoinToken as FromStr>::Err;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        if text == "-" { Ok(Self::StandardInput) } else { text.parse().map(Self::Given) }
    }
}

#[derive(Debug, Args)]
#[command(after_help = LEAVE_HELP)]
pub(crate) struct LeaveArguments {
    /// This host's configuration
    #[arg(long, default_value = config::DEFAULT_PATH, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) config: PathBuf,
    /// Leave although this host has VMs, which run on, or cannot tell the others: revoke it there then
    #[arg(long)]
    pub(crate) force: bool,
}

const LEAVE_HELP: &str = "\
Run it on the host that is to leave, when it has no VMs any more. Its certificate is revoked, its key removed, and its agent
stopped. The host that has the authority's key leaves last.

Example:
  drainpipe drain c && drainpipe leave";

#[derive(Debug, Args)]
#[command(after_help = REVOKE_HELP)]
pub(crate) struct RevokeArguments {
    /// The host, or the operator
    #[arg(add = completion::hosts())]
    pub(crate) name: String,
    /// The name is an operator's
    #[arg(long)]
    pub(crate) operator: bool,
    /// Do not ask
    #[arg(long)]
    pub(crate) yes: bool,
}

const REVOKE_HELP: &str = "\
For a host that was stolen or is lost; run it on the host that has the authority's key. Certificates of that name which were
made until now are refused, by each host as soon as it hears of it; nothing changes for the others. The host may join again,
by a new token.

Examples:
  drainpipe revoke c
  drainpipe revoke ann --operator --yes";
