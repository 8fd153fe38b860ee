//! What `drainpipe init`, `join` and `leave` do on a host whose agent does not run: nothing of it is needed again once the
//! host is one of a fleet.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_identity::authority::{self, InitOptions};
use drainpipe_identity::{Fingerprint, Identity, JoinToken, JoinedFiles, KeyRequest, Peer, Validity};
use jiff::{SignedDuration, Timestamp};
use tokio::time::sleep;

use crate::api_types::{JoinAnswer, JoinRequest};
use crate::client::ApiClient;
use crate::config::Config;
use crate::fleet::write;
use crate::fleet_files::{authority_directory, files};
use crate::fleet_list::{FleetList, SignedList};
use crate::journal::make_directory;

/// How often a host asks whose answer was lost on the way. It is the same join each time.
const ATTEMPTS: usize = 3;
const AGAIN_AFTER: Duration = Duration::from_secs(1);

/// What a host is to a fleet.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Standing {
    /// It has no certificate.
    New,
    /// It has one of `drainpipe pki`.
    ByHand,
    /// It has the authority's key.
    Authority,
    /// It has joined.
    Member,
}

/// What the host of this configuration is.
pub fn standing(config: &Config) -> Standing {
    let directory = &config.state_directory;
    if files(directory).host.exists() {
        let is_authority = authority_directory(directory).join("ca.key").exists();
        return if is_authority { Standing::Authority } else { Standing::Member };
    }
    let by_hand = [&config.tls.certificate, &config.tls.key];
    if by_hand.iter().any(|path| path.exists()) { Standing::ByHand } else { Standing::New }
}

/// Makes an authority, and a fleet of this host alone. Its certificates are good for so long.
pub fn found(config: &Config, certificate_s: u32) -> Result<(), Problem> {
    if config.listen.ip().is_unspecified() {
        let message = "listen: all addresses are none that others could be told: name the one by which they reach this host";
        return Err(Problem::bad_input(message));
    }
    make_directory(&config.state_directory)?;
    let (directory, files) = (authority_directory(&config.state_directory), files(&config.state_directory));
    // One that was left half-made has signed nothing but this host.
    let options = InitOptions { overwrite: true, ..InitOptions::default() };
    authority::init(&directory, &options).map_err(Problem::failed)?;
    let list = FleetList::first(&config.name, config.listen, certificate_s, Timestamp::now());
    let signed = SignedList::new(&list, |text| authority::sign(&directory, text)).map_err(Problem::failed)?;
    let pem = authority::certificate_pem(&directory).map_err(Problem::failed)?;
    let request = KeyRequest::new().map_err(Problem::failed)?;
    let validity = Validity::lasting(SignedDuration::from_secs(certificate_s.into()), Timestamp::MIN);
    let own = Peer::Host(config.name.clone());
    let certificate = authority::certify(&directory, &request.request_pem, &own, validity);
    files.keep_authority(&pem).map_err(Problem::failed)?;
    write(&files, &signed)?;
    // The last one: with it, the host is one of the fleet.
    request.keep(&files, &certificate.map_err(Problem::failed)?).map_err(Problem::failed)
}

/// Joins the fleet whose authority is reached there, by a token.
pub async fn join(config: &Config, at: SocketAddr, token: &JoinToken) -> Result<(), Problem> {
    let request = KeyRequest::new().map_err(Problem::failed)?;
    let answer = ask(config, at, token, &request).await?;
    if Fingerprint::of_pem(&answer.authority) != Some(token.authority) {
        return Err(Problem::failed(format!(
            "{} sends another authority than the token has: nothing was kept",
            token.host
        )));
    }
    make_directory(&config.state_directory)?;
    let files = files(&config.state_directory);
    let kept = keep(config, &files, &request, &answer);
    if kept.is_err() {
        files.remove().map_err(Problem::failed)?;
    }
    kept
}

async fn ask(
    config: &Config,
    at: SocketAddr,
    token: &JoinToken,
    request: &KeyRequest,
) -> Result<JoinAnswer, Problem> {
    let client = ApiClient::to_join(token, at)?;
    let asked = JoinRequest {
        secret: token.secret.to_string(),
        name: config.name.clone(),
        address: config.listen,
        certificate_request: request.request_pem.clone(),
    };
    let mut attempts = 1;
    loop {
        match client.post("/v1/join", &asked).await {
            Err(problem)
                if problem.kind == ProblemKind::Unreachable
                    && !problem.is_for_certificates
                    && attempts < ATTEMPTS =>
            {
                attempts += 1;
                sleep(AGAIN_AFTER).await;
            }
            answer => return answer,
        }
    }
}

fn keep(
    config: &Config,
    files: &JoinedFiles,
    request: &KeyRequest,
    answer: &JoinAnswer,
) -> Result<(), Problem> {
    files.keep_authority(&answer.authority).map_err(Problem::failed)?;
    let staged = files.staged();
    request.keep(&staged, &answer.certificate).map_err(Problem::failed)?;
    let loaded = Identity::load(&staged.host, &staged.host, &files.authority);
    let identity =
        loaded.map_err(|error| Problem::failed(format!("the new certificate is not good: {error}")))?;
    if *identity.holder() != Peer::Host(config.name.clone()) {
        return Err(Problem::failed(format!(
            "the new certificate is of {}, not of this host",
            identity.holder()
        )));
    }
    let list = answer.list.verified(identity.authority_key());
    list.map_err(|error| Problem::failed(format!("the list of hosts is not good: {error}")))?;
    write(files, &answer.list)?;
    files.take_staged().map_err(Problem::failed)
}

/// Forgets the fleet that this host has left, and its key; the authority's too, if it has it.
pub fn forget(config: &Config) -> Result<(), Problem> {
    files(&config.state_directory).remove().map_err(Problem::failed)?;
    remove_directory(&authority_directory(&config.state_directory))
}

fn remove_directory(directory: &Path) -> Result<(), Problem> {
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Problem::failed(format!("cannot remove {}: {error}", directory.display())))
        }
        _ => Ok(()),
    }
}
