//! What `check --fix` has changed on this host: each change in the journal before it is made, standing
//! until it is undone, whatever becomes of the agent meanwhile.

use drainpipe_engine::check::fix::{Fix, TCP_BUFFER_BYTES_MAX};
use drainpipe_engine::problem::Problem;
use drainpipe_net::{Before, Change};
use serde::{Deserialize, Serialize};
use tokio::sync::Mutex;
use utoipa::ToSchema;

use crate::agent::Agent;

/// Who the journal says these changes are for. Those of migrations have UUIDs.
pub(crate) const OWNER: &str = "check --fix";

/// Fixes in one request: more than a host has links.
const FIXES_MAX: usize = 64;

const LOOSE: &str = "2";

/// A setting that `check --fix` has changed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, ToSchema)]
pub struct StandingFix {
    /// As `sysctl` names it; dots within a link's name are slashes.
    pub setting: String,
    /// What it was.
    pub before: String,
    /// What it was set to.
    pub value: String,
    /// What it is; absent when it is gone, as with its link.
    pub now: Option<String>,
}

/// Fixes are made and undone one request at a time: what is read must still hold when it is written.
#[derive(Debug, Default)]
pub(crate) struct Fixes {
    changing: Mutex<()>,
}

/// Makes the changes that are not made yet. Nothing is changed unless all of them make sense.
pub(crate) async fn make(agent: &Agent, fixes: &[Fix]) -> Result<Vec<StandingFix>, Problem> {
    if fixes.len() > FIXES_MAX {
        return Err(Problem::bad_input(format!("at most {FIXES_MAX} fixes in one request")));
    }
    let _changing = agent.fixes.changing.lock().await;
    let mut changes = Vec::new();
    for fix in fixes {
        changes.extend(change(agent, fix).await?);
    }
    agent.network.change_for(OWNER, &changes).await?;
    standing(agent).await
}

/// The change that a fix comes to; none where there is nothing to mend.
async fn change(agent: &Agent, fix: &Fix) -> Result<Option<Change>, Problem> {
    match fix {
        Fix::LooseReversePathFilter { link } => loose_filter(agent, link).await,
        Fix::TcpReceiveBuffer { bytes_max } => larger_buffer(agent, "net.ipv4.tcp_rmem", *bytes_max).await,
        Fix::TcpSendBuffer { bytes_max } => larger_buffer(agent, "net.ipv4.tcp_wmem", *bytes_max).await,
    }
}

async fn loose_filter(agent: &Agent, link: &str) -> Result<Option<Change>, Problem> {
    let links = agent.network.migration_links(&agent.config).await?;
    if !links.all().iter().any(|known| known.name == link) {
        return Err(Problem::bad_input(format!(
            "{} is no migration link of {}",
            link.escape_default(),
            agent.name()
        )));
    }
    let key = format!("net.ipv4.conf.{}.rp_filter", link.replace('.', "/"));
    let now = read(agent, &key).await?;
    Ok((now != LOOSE).then(|| Change::Sysctl { key, value: LOOSE.into() }))
}

async fn larger_buffer(agent: &Agent, key: &str, bytes_max: u64) -> Result<Option<Change>, Problem> {
    if bytes_max > TCP_BUFFER_BYTES_MAX {
        return Err(Problem::bad_input(format!("{key}: at most {TCP_BUFFER_BYTES_MAX} bytes")));
    }
    let now = read(agent, key).await?;
    let [least, first, most] = now.split_whitespace().collect::<Vec<_>>()[..] else {
        return Err(Problem::failed(format!("{key} is {now:?}, and not three numbers")));
    };
    let smaller = most.parse::<u64>().is_ok_and(|most| most < bytes_max);
    // With tabs, as the kernel prints it: so it is known again when it is put back.
    Ok(smaller.then(|| Change::Sysctl { key: key.into(), value: format!("{least}\t{first}\t{bytes_max}") }))
}

async fn read(agent: &Agent, key: &str) -> Result<String, Problem> {
    let change = Change::Sysctl { key: key.into(), value: String::new() };
    match agent.network.observe(&change).await? {
        Before::Sysctl { value } => Ok(value),
        _ => Err(Problem::failed(format!("{key} is no setting"))),
    }
}

/// What is changed and not undone.
pub(crate) async fn standing(agent: &Agent) -> Result<Vec<StandingFix>, Problem> {
    let mut standing: Vec<StandingFix> = Vec::new();
    // The newest first; what was there before the first of them counts.
    for made in agent.network.changes_for(OWNER)? {
        let (Change::Sysctl { key, value }, Before::Sysctl { value: before }) = (made.change, made.before)
        else {
            continue;
        };
        if standing.iter().all(|fix| fix.setting != key) {
            let now = read(agent, &key).await.ok();
            standing.push(StandingFix { setting: key, before, value, now });
        }
    }
    standing.sort_by(|one, other| one.setting.cmp(&other.setting));
    Ok(standing)
}

/// Puts everything back that was changed; what somebody else has changed since is left alone. Says what
/// it was, and what it is now.
pub(crate) async fn undo(agent: &Agent) -> Result<Vec<StandingFix>, Problem> {
    let _changing = agent.fixes.changing.lock().await;
    let mut undone = standing(agent).await?;
    agent.network.put_back(OWNER).await?;
    for fix in &mut undone {
        fix.now = read(agent, &fix.setting).await.ok();
    }
    Ok(undone)
}
