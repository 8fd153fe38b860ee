//! The host's certificate, which the authority renews before it ends. The key is new too, and never leaves this host.

use std::sync::Arc;
use std::time::Duration;

use drainpipe_engine::problem::Problem;
use drainpipe_identity::{Identity, JoinedFiles, KeyRequest};
use jiff::{SignedDuration, Timestamp};
use tokio::task::block_in_place;
use tokio::time::sleep;
use tracing::{info, warn};

use crate::host::Host;
use crate::joining::Joining;
use crate::peers::Peers;
use crate::store::config::Tls;
use crate::store::fleet::Fleet;
use crate::store::fleet_files::files;
use drainpipe_api_types::{RenewalAnswer, RenewalRequest};

/// It is looked at as often, since the clock may be set.
const LOOK_EVERY: Duration = Duration::from_hours(1);

/// A certificate that is not renewed yet is tried again after this part of its life.
const TRIES: u32 = 100;

/// Renews this host's certificate when two thirds of its life are over. Does not end by itself.
pub(crate) async fn keep_renewing(joining: Arc<Joining>, host: Arc<Host>, peers: Arc<Peers>) {
    let files = files(&host.config.state_directory);
    if host.config.tls != Tls::of_joined(&files) {
        return;
    }
    loop {
        let life_s = life_s(&host.fleet);
        let wait = until_due(Timestamp::now(), peers.identity.not_after(), life_s);
        if !wait.is_zero() {
            sleep(wait.min(LOOK_EVERY)).await;
            continue;
        }
        match renew(&joining, &host, &peers, &files).await {
            Ok(()) => info!(until = %peers.identity.not_after(), "this host's certificate was renewed"),
            Err(problem) => {
                warn!(%problem, until = %peers.identity.not_after(), "this host's certificate cannot be renewed yet");
                sleep(again_after(life_s)).await;
            }
        }
    }
}

/// None where this host has left.
fn life_s(fleet: &Fleet) -> u32 {
    fleet.held().map_or(u32::MAX, |held| held.list.certificate_s)
}

fn until_due(now: Timestamp, not_after: Timestamp, life_s: u32) -> Duration {
    let due =
        not_after.checked_sub(SignedDuration::from_secs(i64::from(life_s) / 3)).unwrap_or(Timestamp::MIN);
    Duration::try_from(due.duration_since(now)).unwrap_or_default()
}

fn again_after(life_s: u32) -> Duration {
    Duration::from_secs(u64::from((life_s / TRIES).max(1))).min(LOOK_EVERY)
}

async fn renew(joining: &Joining, host: &Host, peers: &Peers, files: &JoinedFiles) -> Result<(), Problem> {
    let request = KeyRequest::new().map_err(Problem::failed)?;
    let authority = host.fleet.held().map(|held| held.list.authority.clone());
    let authority = authority.ok_or_else(|| Problem::refused("this host has left its fleet"))?;
    let certificate = if authority == host.name() {
        joining.renew(&authority, &request.request_pem)?
    } else {
        let asked = RenewalRequest { certificate_request: request.request_pem.clone() };
        let client = peers
            .get(&authority)
            .ok_or_else(|| Problem::refused(format!("{} is no longer a host of the fleet", host.name())))?;
        client.post::<RenewalAnswer>("/v1/fleet/certificate", &asked).await?.certificate
    };
    block_in_place(|| change_over(&peers.identity, files, &request, &certificate))
}

/// A certificate that does not load replaces none.
fn change_over(
    identity: &Identity,
    files: &JoinedFiles,
    request: &KeyRequest,
    certificate: &str,
) -> Result<(), Problem> {
    let staged = files.staged();
    request.keep(&staged, certificate).map_err(Problem::failed)?;
    let replaced = identity.replace(&staged.host, &staged.host, &files.authority).map_err(Problem::refused);
    let taken = replaced.and_then(|()| files.take_staged().map_err(Problem::failed));
    if taken.is_err() {
        files.forget_staged().map_err(Problem::failed)?;
    }
    taken
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_certificate_is_renewed_when_a_third_of_its_life_is_left() {
        let at = |second| Timestamp::from_second(second).unwrap();
        assert_eq!(until_due(at(0), at(900), 900), Duration::from_mins(10));
        assert_eq!(until_due(at(600), at(900), 900), Duration::ZERO);
        assert_eq!(until_due(at(2000), at(900), 900), Duration::ZERO);
        assert_eq!((again_after(30), again_after(u32::MAX)), (Duration::from_secs(1), LOOK_EVERY));
    }
}
