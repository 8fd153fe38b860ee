//! What `check --fix` has changed on this host: each change is in the journal before it is made, and stays until it is
//! undone, whatever becomes of the agent meanwhile.

use std::sync::Arc;

use drainpipe_engine::finding::fix::{Fix, TCP_BUFFER_BYTES_MAX};
use drainpipe_engine::problem::Problem;
use drainpipe_net::{Before, Change};
use tokio::sync::Mutex;

use crate::host::Host;
use drainpipe_api_types::StandingFix;

/// The owner of these changes in the journal. Migrations have UUIDs.
pub(crate) const OWNER: &str = "check --fix";

/// Fixes in one request: more than a host has links.
const FIXES_MAX: usize = 64;

const LOOSE: &str = "2";

/// Fixes are made and undone one request at a time: what is read must still hold when it is written.
#[derive(Debug)]
pub(crate) struct Fixes {
    host: Arc<Host>,
    changing: Mutex<()>,
}

impl Fixes {
    /// Fixes on this host.
    pub(crate) fn new(host: &Arc<Host>) -> Self {
        Self { host: Arc::clone(host), changing: Mutex::default() }
    }

    /// Makes the changes that are not made yet. Nothing is changed unless all of them make sense.
    pub(crate) async fn make(&self, fixes: &[Fix]) -> Result<Vec<StandingFix>, Problem> {
        if fixes.len() > FIXES_MAX {
            return Err(Problem::bad_input(format!("at most {FIXES_MAX} fixes in one request")));
        }
        let _changing = self.changing.lock().await;
        let mut changes = Vec::new();
        for fix in fixes {
            changes.extend(self.change(fix).await?);
        }
        self.host.network.change_for(OWNER, &changes).await?;
        self.standing().await
    }

    /// The change that a fix comes to; none where there is nothing to mend.
    async fn change(&self, fix: &Fix) -> Result<Option<Change>, Problem> {
        match fix {
            Fix::LooseReversePathFilter { link } => self.loose_filter(link).await,
            Fix::TcpReceiveBuffer { bytes_max } => self.larger_buffer("net.ipv4.tcp_rmem", *bytes_max).await,
            Fix::TcpSendBuffer { bytes_max } => self.larger_buffer("net.ipv4.tcp_wmem", *bytes_max).await,
        }
    }

    async fn loose_filter(&self, link: &str) -> Result<Option<Change>, Problem> {
        let links = self.host.migration_links().await?;
        if !links.all().iter().any(|known| known.name == link) {
            return Err(Problem::bad_input(format!(
                "{} is not a migration link of {}",
                link.escape_default(),
                self.host.name()
            )));
        }
        let key = format!("net.ipv4.conf.{}.rp_filter", link.replace('.', "/"));
        let now = self.read(&key).await?;
        Ok((now != LOOSE).then(|| Change::Sysctl { key, value: LOOSE.into() }))
    }

    async fn larger_buffer(&self, key: &str, bytes_max: u64) -> Result<Option<Change>, Problem> {
        if bytes_max > TCP_BUFFER_BYTES_MAX {
            return Err(Problem::bad_input(format!("{key}: at most {TCP_BUFFER_BYTES_MAX} bytes")));
        }
        let now = self.read(key).await?;
        let [least, first, most] = now.split_whitespace().collect::<Vec<_>>()[..] else {
            return Err(Problem::failed(format!("{key} is {now:?} instead of three numbers")));
        };
        let smaller = most.parse::<u64>().is_ok_and(|most| most < bytes_max);
        // With tabs, as the kernel prints it: so it is known again when it is put back.
        Ok(smaller
            .then(|| Change::Sysctl { key: key.into(), value: format!("{least}\t{first}\t{bytes_max}") }))
    }

    async fn read(&self, key: &str) -> Result<String, Problem> {
        let change = Change::Sysctl { key: key.into(), value: String::new() };
        match self.host.network.observe(&change).await? {
            Before::Sysctl { value } => Ok(value),
            _ => Err(Problem::failed(format!("{key} is not a setting"))),
        }
    }

    /// What is changed and not undone.
    pub(crate) async fn standing(&self) -> Result<Vec<StandingFix>, Problem> {
        let mut standing: Vec<StandingFix> = Vec::new();
        // The newest first; what was there before the first of them counts.
        for made in self.host.network.changes_for(OWNER)? {
            let (Change::Sysctl { key, value }, Before::Sysctl { value: before }) =
                (made.change, made.before)
            else {
                continue;
            };
            if standing.iter().all(|fix| fix.setting != key) {
                let now = self.read(&key).await.ok();
                standing.push(StandingFix { setting: key, before, value, now });
            }
        }
        standing.sort_by(|one, other| one.setting.cmp(&other.setting));
        Ok(standing)
    }

    /// Puts everything back that was changed; what somebody else has changed since is left alone. Says what
    /// it was, and what it is now.
    pub(crate) async fn undo(&self) -> Result<Vec<StandingFix>, Problem> {
        let _changing = self.changing.lock().await;
        let mut undone = self.standing().await?;
        self.host.network.put_back(OWNER).await?;
        for fix in &mut undone {
            fix.now = self.read(&fix.setting).await.ok();
        }
        Ok(undone)
    }
}
