//! What `drainpipe init`, `join` and `leave` do on a host whose agent does not run. None of it is needed again once
//! the host is in a fleet.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_identity::authority::{self, InitOptions};
use drainpipe_identity::{Fingerprint, Identity, JoinToken, JoinedFiles, KeyRequest, Peer, Validity};
use jiff::{SignedDuration, Timestamp};
use tokio::time::sleep;

use crate::peers::client::ApiClient;
use crate::store::config::Config;
use crate::store::fleet::write;
use crate::store::fleet_files::{authority_directory, files};
use crate::store::journal::make_directory;
use drainpipe_api_types::fleet_list::{FleetList, SignedList};
use drainpipe_api_types::{JoinAnswer, JoinRequest};

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
    if by_hand.iter().any(|path| path.exists()) {
        return Standing::ByHand;
    }
    // The host was installed again, or its certificate taken away: the key is the fleet's still.
    if authority_directory(directory).join("ca.key").exists() { Standing::Authority } else { Standing::New }
}

/// Whether the agent of a host that is in a fleet can start with what is there.
pub fn is_whole(config: &Config) -> bool {
    let files = files(&config.state_directory);
    files.list.exists() && Identity::load(&files.host, &files.host, &files.authority).is_ok()
}

/// Makes an authority, and a fleet of this host alone. Its certificates are good for so long. An authority that is there
/// already stays, with its hosts, and this one gets a new certificate.
pub fn found(config: &Config, certificate_s: u32) -> Result<(), Problem> {
    if config.listen.ip().is_unspecified() {
        let message = "listen: the address of all interfaces cannot be given to other hosts: name the one \
            at which they reach this host";
        return Err(Problem::bad_input(message));
    }
    make_directory(&config.state_directory)?;
    let (directory, files) = (authority_directory(&config.state_directory), files(&config.state_directory));
    let kept = if directory.join("ca.key").exists() {
        kept_list(config, &files, &directory)?
    } else {
        authority::init(&directory, &InitOptions::default()).map_err(Problem::failed)?;
        None
    };
    let (list, signed) = match kept {
        Some(kept) => kept,
        None => first_list(config, &directory, certificate_s)?,
    };
    let pem = authority::certificate_pem(&directory).map_err(Problem::failed)?;
    let request = KeyRequest::new().map_err(Problem::failed)?;
    let length = SignedDuration::from_secs(list.certificate_s.into());
    let validity = Validity::lasting(length, list.earliest(&config.name));
    let own = Peer::Host(config.name.clone());
    let certificate = authority::certify(&directory, &request.request_pem, &own, validity);
    files.keep_authority(&pem).map_err(Problem::failed)?;
    write(&files, &signed)?;
    // The last one: with it, the host is one of the fleet.
    request.keep(&files, &certificate.map_err(Problem::failed)?).map_err(Problem::failed)
}

/// The list of a fleet that is there. Where it is lost, the other hosts hand theirs on.
fn kept_list(
    config: &Config,
    files: &JoinedFiles,
    authority: &Path,
) -> Result<Option<(FleetList, SignedList)>, Problem> {
    if !authority.join("ca.pem").exists() {
        return Err(Problem::refused(format!(
            "{0} has a key without its certificate: put ca.pem back, which is also another host's fleet/ca.pem; if nobody \
             ever joined by this key, remove {0}",
            authority.display()
        )));
    }
    let Some(text) = files.list().map_err(Problem::refused)? else { return Ok(None) };
    let key = authority::public_key(authority).map_err(Problem::failed)?;
    let read = |text: &str| {
        let signed: SignedList = serde_json::from_str(text).ok()?;
        Some((signed.verified(&key).ok()?, signed))
    };
    match read(&text) {
        Some((list, signed)) if list.authority == config.name => Ok(Some((list, signed))),
        Some((list, _)) => Err(Problem::refused(format!(
            "the authority's key is that of host {}, and this one is {}: correct its name",
            list.authority, config.name
        ))),
        None => Err(Problem::refused(format!(
            "{} is not a list signed by the key in {}: put back what was there, or remove it if it is lost",
            files.list.display(),
            authority.display()
        ))),
    }
}

fn first_list(
    config: &Config,
    authority: &Path,
    certificate_s: u32,
) -> Result<(FleetList, SignedList), Problem> {
    let list = FleetList::first(&config.name, config.listen, certificate_s, Timestamp::now());
    let signed = SignedList::new(&list, |text| authority::sign(authority, text)).map_err(Problem::failed)?;
    Ok((list, signed))
}

/// Joins the fleet whose authority is reached there, by a token.
pub async fn join(config: &Config, at: SocketAddr, token: &JoinToken) -> Result<(), Problem> {
    let request = KeyRequest::new().map_err(Problem::failed)?;
    let answer = ask(config, at, token, &request).await?;
    if Fingerprint::of_pem(&answer.authority) != Some(token.authority) {
        return Err(Problem::failed(format!(
            "{} sends another authority than the token names: nothing was kept",
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
        loaded.map_err(|error| Problem::failed(format!("the new certificate is not valid: {error}")))?;
    if *identity.holder() != Peer::Host(config.name.clone()) {
        return Err(Problem::failed(format!(
            "the new certificate is of {}, not of this host",
            identity.holder()
        )));
    }
    let list = answer.list.verified(identity.authority_key());
    list.map_err(|error| Problem::failed(format!("the list of hosts is not valid: {error}")))?;
    write(files, &answer.list)?;
    files.take_staged().map_err(Problem::failed)
}

/// Forgets the fleet that this host has left, and its key; the authority's too, if it has it.
pub fn forget(config: &Config) -> Result<(), Problem> {
    files(&config.state_directory).remove().map_err(Problem::failed)?;
    remove_directory(&authority_directory(&config.state_directory))
}

/// Refuses to forget what others need, where no agent can say so.
pub fn check_may_forget(config: &Config) -> Result<(), Problem> {
    let name = &config.name;
    match standing(config) {
        Standing::Member => Ok(()),
        Standing::New | Standing::ByHand => Err(Problem::refused(format!("{name} has joined no fleet"))),
        Standing::Authority => {
            let (files, authority) =
                (files(&config.state_directory), authority_directory(&config.state_directory));
            let list = kept_list(config, &files, &authority)?;
            if list.is_some_and(|(list, _)| list.members.keys().all(|member| member == name)) {
                return Ok(());
            }
            Err(Problem::refused(format!(
                "{name} has the authority's key, and other hosts may need it: have them leave first; if there is none, \
                 remove {}",
                authority.display()
            )))
        }
    }
}

fn remove_directory(directory: &Path) -> Result<(), Problem> {
    match std::fs::remove_dir_all(directory) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Problem::failed(format!("cannot remove {}: {error}", directory.display())))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::config::Tls;
    use crate::store::fleet::{Fleet, refuse_revoked};
    use drainpipe_api_types::fleet_list::Member;

    fn config(directory: &Path) -> Config {
        let text = format!(
            "name = \"a\"\nlisten = \"192.0.2.11:7420\"\nstate_directory = \"{0}\"\n\
             [tls]\ncertificate = \"{0}/none.pem\"\nkey = \"{0}/none.key\"\nauthority = \"{0}/none-ca.pem\"\n",
            directory.display()
        );
        Config::parse(&text, Path::new("agent.toml")).unwrap()
    }

    #[test]
    fn an_authority_that_is_there_is_never_made_anew() {
        let directory = tempfile::tempdir().unwrap();
        let config = config(directory.path());
        assert_eq!(standing(&config), Standing::New);
        found(&config, 3600).unwrap();
        assert!(is_whole(&config));
        let (files, authority) =
            (files(&config.state_directory), authority_directory(&config.state_directory));
        let key = std::fs::read(authority.join("ca.key")).unwrap();
        let public = authority::public_key(&authority).unwrap();
        let (list, _) = kept_list(&config, &files, &authority).unwrap().unwrap();
        let member = Member {
            address: "192.0.2.12:7420".parse().unwrap(),
            since: Timestamp::UNIX_EPOCH,
            by: String::new(),
        };
        let list = FleetList { version: 7, ..list.with("b", member).unwrap() };
        let signed = SignedList::new(&list, |text| authority::sign(&authority, text)).unwrap();
        write(&files, &signed).unwrap();
        check_may_forget(&config).unwrap_err();

        // First its certificate is lost, then everything except the authority's directory.
        std::fs::remove_file(&files.host).unwrap();
        assert_eq!(standing(&config), Standing::Authority);
        found(&config, 60).unwrap();
        assert!(is_whole(&config));
        assert_eq!(kept_list(&config, &files, &authority).unwrap().unwrap().0, list);
        std::fs::remove_dir_all(config.state_directory.join("fleet")).unwrap();
        assert_eq!(standing(&config), Standing::Authority);
        found(&config, 3600).unwrap();
        assert!(is_whole(&config));
        assert_eq!(std::fs::read(authority.join("ca.key")).unwrap(), key);
        let (list, signed) = kept_list(&config, &files, &authority).unwrap().unwrap();
        assert_eq!((list.version, signed.verified(&public).unwrap()), (1, list.clone()));
        // Only a host that is alone forgets it.
        check_may_forget(&config).unwrap();
    }

    fn founded(directory: &Path) -> (Config, Identity) {
        let text = format!(
            "name = \"a\"\nlisten = \"192.0.2.11:7420\"\nstate_directory = \"{}\"\n",
            directory.display()
        );
        let mut config = Config::parse(&text, Path::new("agent.toml")).unwrap();
        found(&config, 3600).unwrap();
        let files = files(directory);
        config.tls = Tls::of_joined(&files);
        (config, Identity::load(&files.host, &files.host, &files.authority).unwrap())
    }

    #[test]
    fn a_full_disk_keeps_no_revoked_certificate_good() {
        use drainpipe_identity::Peer as Holder;
        use drainpipe_identity::authority::{IssueOptions, issue_host, sign};
        use rustls::pki_types::CertificateDer;
        use rustls::pki_types::pem::PemObject;

        let directory = tempfile::tempdir().unwrap();
        let (config, identity) = founded(directory.path());
        let fleet = Fleet::open(&config, &identity).unwrap();
        let authority = authority_directory(directory.path());
        let options = IssueOptions::valid_days(std::num::NonZeroU32::MIN);
        let list_file = files(directory.path()).list;
        let issued = issue_host(&authority, "b", &options).unwrap();
        let certificate = CertificateDer::from_pem_file(&issued.certificate).unwrap();
        let list = fleet.held().unwrap().list.clone().without(&Holder::Host("b".into()), Timestamp::now());
        let list = FleetList { version: 2, ..list };
        let signed = SignedList::new(&list, |text| sign(&authority, text)).unwrap();
        // Nothing can be written there.
        std::fs::remove_file(&list_file).unwrap();
        std::fs::create_dir(&list_file).unwrap();
        fleet.take(signed.clone()).unwrap_err();
        assert!(identity.revocations().has(&certificate));
        std::fs::remove_dir(&list_file).unwrap();
        assert!(fleet.take(signed).unwrap());
    }

    #[test]
    fn a_host_that_has_joined_starts_with_the_list_only() {
        let directory = tempfile::tempdir().unwrap();
        let (config, identity) = founded(directory.path());
        refuse_revoked(&config, &identity).unwrap();
        std::fs::remove_file(files(directory.path()).list).unwrap();
        let refused = refuse_revoked(&config, &identity).unwrap_err().message;
        assert!(refused.contains("list.json is missing"), "{refused}");
    }
}
