//! `drainpipe init`, `join`, `leave` and `revoke`: hosts that know each other, without a file copied by hand.

use std::fmt::Write;
use std::fs;
use std::io::{BufRead, Read, Write as _};
use std::net::{IpAddr, SocketAddr, UdpSocket};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use drainpipe_agent::joining::setup::{self, Standing};
use drainpipe_agent::peers::client::ApiClient;
use drainpipe_agent::store::config::{Config, DEFAULT_PATH, DEFAULT_PORT};
use drainpipe_api_types::{
    DepartureRequest, FleetView, HostView, RevocationRequest, TokenRequest, TokenView,
};
use drainpipe_engine::problem::{Problem, ProblemKind};
use drainpipe_identity::{JoinToken, check_name};
use tokio::net::lookup_host;
use tokio::time::sleep;

use crate::arguments::{
    InitArguments, JoinArguments, LeaveArguments, PlaceArguments, RevokeArguments, TokenArgument,
};
use crate::ask;
use crate::connection::ConnectionArguments;
use crate::exit::Exit;
use crate::output;

/// As the package brings it, with nothing that is true of this host.
const EXAMPLE: &str = "/usr/share/drainpipe/agent.toml";

/// How long an agent may take that was just started.
const START_DEADLINE: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// Longest line that is read for a token, which is shorter.
const TOKEN_BYTES_MAX: u64 = 1024;

/// An address of nobody: packets to it would take the way to everybody (RFC 5737).
const ANYBODY: SocketAddr = SocketAddr::new(IpAddr::V4(std::net::Ipv4Addr::new(192, 0, 2, 1)), 9);

pub(crate) async fn init(arguments: &InitArguments, json: bool) -> Result<Exit, Problem> {
    let place = &arguments.place;
    let Configured { config, text } = configuration(place, ANYBODY)?;
    match setup::standing(&config) {
        Standing::Authority if setup::is_whole(&config) => {}
        Standing::Authority => {
            setup::found(&config, arguments.certificate_s())?;
            output::remark(&format!(
                "{} has a new certificate, signed with the authority's key in {}; if hosts are missing in \
                `drainpipe hosts`, let nobody join until they are back, some 20 s after its agent has started",
                config.name,
                config.state_directory.join("authority").display()
            ));
        }
        Standing::New => {
            setup::found(&config, arguments.certificate_s())?;
            output::remark(&format!(
                "{} is the first host of a fleet; the authority's key is in {}",
                config.name,
                config.state_directory.join("authority").display()
            ));
        }
        Standing::Member => {
            return Err(Problem::refused(format!(
                "{} has joined a fleet: run `drainpipe init` on the host that has the authority's key",
                config.name
            )));
        }
        Standing::ByHand => return Err(made_by_hand(&config)),
    }
    keep(&place.config, text.as_deref())?;
    let client = running_agent(&config, place).await?.ok_or_else(|| {
        Problem::refused(format!("{}, and run the same again for a token", not_running(place)))
    })?;
    let request = TokenRequest { life_s: arguments.minutes.saturating_mul(60) };
    tell_token(&client.post("/v1/fleet/tokens", &request).await?, json)?;
    Ok(Exit::Done)
}

fn tell_token(token: &TokenView, json: bool) -> Result<(), Problem> {
    if json {
        return output::json(token);
    }
    output::remark(&format!("on the next host, before {}:", output::time(&token.ends_at)));
    let address = token.address.strip_suffix(&format!(":{DEFAULT_PORT}")).unwrap_or(&token.address);
    output::print(&format!("drainpipe join {address} --token {}\n", token.token))
}

pub(crate) async fn join(arguments: &JoinArguments) -> Result<Exit, Problem> {
    let place = &arguments.place;
    let at = resolve(&arguments.host).await?;
    let Configured { config, text } = configuration(place, at)?;
    match setup::standing(&config) {
        Standing::New => {}
        Standing::ByHand => return Err(made_by_hand(&config)),
        Standing::Authority | Standing::Member => {
            return Err(Problem::refused(format!(
                "{0} is in a fleet already: run `drainpipe leave` on it first",
                config.name
            )));
        }
    }
    let token = token_of(&arguments.token)?;
    setup::join(&config, at, &token).await?;
    keep(&place.config, text.as_deref())?;
    output::remark(&format!("{} has joined the fleet of {}", config.name, token.host));
    if running_agent(&config, place).await?.is_none() {
        output::remark(&not_running(place));
    }
    output::remark(&format!("next: drainpipe check {} {}", token.host, config.name));
    Ok(Exit::Done)
}

fn token_of(argument: &TokenArgument) -> Result<JoinToken, Problem> {
    if let TokenArgument::Given(token) = argument {
        return Ok(token.clone());
    }
    let mut line = String::new();
    let read = std::io::stdin().lock().take(TOKEN_BYTES_MAX).read_line(&mut line);
    read.map_err(|error| Problem::bad_input(format!("no token from standard input: {error}")))?;
    line.trim().parse().map_err(|error| Problem::bad_input(format!("standard input has no token: {error}")))
}

pub(crate) async fn leave(arguments: &LeaveArguments) -> Result<Exit, Problem> {
    let config = Config::load(&arguments.config).map_err(Problem::bad_input)?;
    // The agent of this configuration, whatever --agent says: what is here is forgotten.
    let client = ApiClient::over_socket(&config.socket)?;
    let request = DepartureRequest { force: arguments.force };
    match client.post::<()>("/v1/fleet/departure", &request).await {
        Err(problem) if arguments.force && problem.kind == ProblemKind::Unreachable => {
            setup::check_may_forget(&config)?;
        }
        answered => answered?,
    }
    setup::forget(&config)?;
    if arguments.force {
        output::remark(&format!(
            "if `drainpipe hosts` on another host still has it: `drainpipe revoke {}` on the host with the authority's key",
            config.name
        ));
    }
    if has_service(&arguments.config) {
        systemctl(&["disable", "--now", "drainpipe"])?;
    } else {
        output::remark("stop the agent: it has no certificate any more");
    }
    output::remark(&format!("{} has left the fleet; its VMs run on", config.name));
    Ok(Exit::Done)
}

pub(crate) async fn revoke(
    connection: &ConnectionArguments,
    arguments: &RevokeArguments,
    json: bool,
) -> Result<Exit, Problem> {
    let RevokeArguments { name, operator, yes } = arguments;
    let whom = if *operator { "operator" } else { "host" };
    if !yes {
        ask::is_possible("drainpipe revoke")?;
        let question = format!("No host will accept {whom} {name} until it joins again. Revoke?");
        if !ask::confirmed(&question)? {
            return Ok(Exit::Done);
        }
    }
    let fleet = connection.fleet()?.entry();
    let request = RevocationRequest { name: name.clone(), is_operator: *operator };
    let view: FleetView = fleet.client().post("/v1/fleet/revocations", &request).await?;
    if json {
        output::json(&view)?;
    } else {
        output::remark(&format!(
            "the certificates of {whom} {name} are revoked; hosts that are up learn of it within seconds"
        ));
    }
    Ok(Exit::Done)
}

fn made_by_hand(config: &Config) -> Problem {
    Problem::refused(format!(
        "{} has a certificate made by hand, {}: move it and its key away first; hosts with [[peer]] keep theirs",
        config.name,
        config.tls.certificate.display()
    ))
}

/// A host's configuration, and its text if that is not written yet.
struct Configured {
    config: Config,
    text: Option<String>,
}

/// What agent.toml says; where it is not there, or is the package's example, it is to say this host's name, and the
/// address by which it reaches `towards`.
fn configuration(place: &PlaceArguments, towards: SocketAddr) -> Result<Configured, Problem> {
    let path = &place.config;
    if is_to_be_written(path) {
        let text = text_of(&own_name(place)?, own_address(place, towards)?);
        let config = Config::parse(&text, path).map_err(Problem::bad_input)?;
        return Ok(Configured { config, text: Some(text) });
    }
    if place.name.is_some() || place.listen.is_some() {
        return Err(Problem::bad_input(format!(
            "{} exists, and has this host's name and address: change them there, and leave --name and --listen out",
            path.display()
        )));
    }
    Ok(Configured { config: Config::load(path).map_err(Problem::bad_input)?, text: None })
}

/// Once the host is one of a fleet: what was tried in vain leaves nothing behind.
fn keep(path: &Path, text: Option<&str>) -> Result<(), Problem> {
    let Some(text) = text else { return Ok(()) };
    write(path, text)?;
    output::remark(&format!("wrote {}", path.display()));
    Ok(())
}

fn is_to_be_written(path: &Path) -> bool {
    match (fs::read(path), fs::read(EXAMPLE)) {
        (Err(error), _) => error.kind() == std::io::ErrorKind::NotFound,
        (Ok(text), Ok(example)) => text == example,
        (Ok(_), Err(_)) => false,
    }
}

fn write(path: &Path, text: &str) -> Result<(), Problem> {
    let failed = |error| Problem::failed(format!("cannot write {}: {error}", path.display()));
    if let Some(directory) = path.parent() {
        fs::create_dir_all(directory).map_err(failed)?;
    }
    let new = path.with_extension("toml.new");
    let written = fs::File::create(&new).and_then(|mut file| {
        file.write_all(text.as_bytes())?;
        file.sync_all()
    });
    written.and_then(|()| fs::rename(&new, path)).map_err(failed)
}

fn text_of(name: &str, listen: SocketAddr) -> String {
    let mut text = String::from(
        "# All else is found, or has a default; docs/reference/config.md describes every key.\n",
    );
    write!(text, "name = \"{name}\"\nlisten = \"{listen}\"\n").expect("a String takes all");
    text
}

/// As the system calls it, without its domain.
fn own_name(place: &PlaceArguments) -> Result<String, Problem> {
    let system = rustix::system::uname().nodename().to_string_lossy().to_lowercase();
    let found = system.split('.').next().unwrap_or_default().to_owned();
    let name = place.name.clone().unwrap_or(found);
    check_name(&name).map_err(|error| Problem::bad_input(format!("{error}; give it by --name")))?;
    Ok(name)
}

fn own_address(place: &PlaceArguments, towards: SocketAddr) -> Result<SocketAddr, Problem> {
    if let Some(listen) = place.listen {
        return Ok(listen);
    }
    source_towards(towards).map(|address| SocketAddr::new(address, DEFAULT_PORT)).ok_or_else(|| {
        let example = format!("--listen 192.0.2.11:{DEFAULT_PORT}");
        Problem::bad_input(format!("cannot find this host's own address: give it, as in {example}"))
    })
}

/// The address that packets there would come from. None is sent.
fn source_towards(towards: SocketAddr) -> Option<IpAddr> {
    let own: IpAddr = if towards.is_ipv4() { [0; 4].into() } else { [0; 16].into() };
    let socket = UdpSocket::bind((own, 0)).ok()?;
    socket.connect(towards).ok()?;
    let address = socket.local_addr().ok()?.ip();
    (!address.is_unspecified() && !address.is_loopback()).then_some(address)
}

/// An address or a name, with a port or without.
async fn resolve(host: &str) -> Result<SocketAddr, Problem> {
    if let Ok(address) = host.parse() {
        return Ok(SocketAddr::new(address, DEFAULT_PORT));
    }
    let with_port = if host.contains(':') { host.to_owned() } else { format!("{host}:{DEFAULT_PORT}") };
    let found = lookup_host(&with_port).await.map(|mut addresses| addresses.next());
    found.ok().flatten().ok_or_else(|| {
        Problem::bad_input(format!(
            "{host} is not an address, nor a name that this host can resolve: write an address such as 192.0.2.11"
        ))
    })
}

fn not_running(place: &PlaceArguments) -> String {
    let config = place.config.display();
    format!(
        "everything is prepared, but the agent does not run: start it (`drainpipe agent --config {config}`)"
    )
}

/// The agent of this host, which is started if the system has a service for it.
async fn running_agent(config: &Config, place: &PlaceArguments) -> Result<Option<ApiClient>, Problem> {
    let client = ApiClient::over_socket(&config.socket)?;
    if client.get::<HostView>("/v1/host").await.is_ok() {
        return Ok(Some(client));
    }
    if !has_service(&place.config) {
        return Ok(None);
    }
    systemctl(&["enable", "drainpipe"])?;
    systemctl(&["restart", "drainpipe"])?;
    let end = Instant::now() + START_DEADLINE;
    loop {
        match client.get::<HostView>("/v1/host").await {
            Ok(_) => return Ok(Some(client)),
            Err(problem) if Instant::now() >= end => {
                return Err(
                    problem.context("the agent does not start; `journalctl --unit drainpipe` says why")
                );
            }
            Err(_) => sleep(LOOK_EVERY).await,
        }
    }
}

/// Whether systemd runs the agent of this configuration.
fn has_service(config: &Path) -> bool {
    config == Path::new(DEFAULT_PATH) && Path::new("/run/systemd/system").exists()
}

fn systemctl(arguments: &[&str]) -> Result<(), Problem> {
    let what = format!("systemctl {}", arguments.join(" "));
    let ran = Command::new("systemctl").args(arguments).output();
    let ran = ran.map_err(|error| Problem::failed(format!("cannot run `{what}`: {error}")))?;
    if ran.status.success() {
        return Ok(());
    }
    let said = String::from_utf8_lossy(&ran.stderr);
    Err(Problem::failed(format!(
        "`{what}` fails: {}; `journalctl --unit drainpipe` may say more",
        said.trim()
    )))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_a_configuration() {
        for listen in ["192.0.2.11:7420", "[2001:db8::1]:7420"] {
            let text = text_of("a", listen.parse().unwrap());
            let config = Config::parse(&text, Path::new("agent.toml")).unwrap();
            assert_eq!((config.name.as_str(), config.listen.to_string().as_str()), ("a", listen));
        }
    }

    #[tokio::test]
    async fn a_host_may_be_given_with_its_port_or_without() {
        for (host, address) in [
            ("192.0.2.11", "192.0.2.11:7420"),
            ("192.0.2.11:7421", "192.0.2.11:7421"),
            ("2001:db8::1", "[2001:db8::1]:7420"),
            ("[2001:db8::1]:7421", "[2001:db8::1]:7421"),
            ("localhost:7", "127.0.0.1:7"),
        ] {
            let found = resolve(host).await.unwrap();
            assert!(found.to_string() == address || host.starts_with("localhost"), "{host}: {found}");
        }
        resolve("no such host").await.unwrap_err();
    }

    #[test]
    fn the_address_towards_a_host_is_the_one_that_packets_come_from() {
        assert_eq!(source_towards("127.0.0.1:9".parse().unwrap()), None);
    }
}
