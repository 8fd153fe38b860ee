//! Hosts that join and leave a fleet.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::str::FromStr;

use clap::{Args, ValueHint};
use drainpipe_agent::store::config;
use drainpipe_identity::JoinToken;

use super::completion;

/// Which agent is set up.
#[derive(Debug, Args)]
pub(crate) struct PlaceArguments {
    /// This host's configuration; written if it is not there
    #[arg(long, default_value = config::DEFAULT_PATH, value_name = "FILE", value_hint = ValueHint::FilePath)]
    pub(crate) config: PathBuf,
    /// This host's name in the fleet; by default, the system's host name
    #[arg(long, value_name = "NAME")]
    pub(crate) name: Option<String>,
    /// Where this host's agent listens; by default, on the address through which it reaches the other hosts
    #[arg(long, value_name = "ADDRESS:PORT")]
    pub(crate) listen: Option<SocketAddr>,
}

#[derive(Debug, Args)]
#[command(after_help = INIT_HELP)]
pub(crate) struct InitArguments {
    #[command(flatten)]
    pub(crate) place: PlaceArguments,
    /// How long the token is valid
    #[arg(long, default_value_t = 30, value_name = "MINUTES", value_parser = clap::value_parser!(u32).range(1..=1440))]
    pub(crate) minutes: u32,
    /// How long hosts' certificates are valid, in a new fleet; agents renew them when a third of that time is left
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
starts the agent, and prints the command to run on the next host. It contains a token, which lets one host join, once. Run
`init` again for each further host. The authority's key stays on this host, in the agent's state directory: back it up.

Examples:
  drainpipe init
  drainpipe init --name a --listen 192.0.2.11:7420   if the system's name or address is not the right one
  drainpipe init --minutes 5                         a token that is valid for five minutes";

#[derive(Debug, Args)]
#[command(
    after_help = "Example, as `drainpipe init` printed it:\n  drainpipe join 192.0.2.11 --token a:4f6b…:9c01…"
)]
pub(crate) struct JoinArguments {
    /// The host that printed the token: address or name, with the port unless it is 7420
    pub(crate) host: String,
    /// The token that `drainpipe init` printed there; - reads it from standard input, so that no process list shows it
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
    /// Leave even if this host has VMs, which keep running, or cannot reach the others; then revoke it there
    #[arg(long)]
    pub(crate) force: bool,
}

const LEAVE_HELP: &str = "\
Run this on the host that is to leave, once it has no VMs. It revokes the host's certificate, removes its key, and stops its
agent. The host with the authority's key leaves last.

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
For a host that was stolen or lost; run this on the host with the authority's key. Each host refuses all certificates made
for that name so far, as soon as it hears of the revocation; nothing else changes. The host may join again, with a new token.

Examples:
  drainpipe revoke c
  drainpipe revoke ann --operator --yes";
