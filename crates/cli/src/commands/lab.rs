//! `drainpipe lab …`: the lab's hosts, each with its agent.

use std::fmt::Write;
use std::os::unix::process::ExitStatusExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use drainpipe_agent::peers::client::ApiClient;
use drainpipe_agent::store::config::{DEFAULT_PORT, DEFAULT_SOCKET};
use drainpipe_api_types::HostView;
use drainpipe_engine::format;
use drainpipe_engine::problem::Problem;
use drainpipe_hypervisor_qemu::{Launcher, QemuUser};
use drainpipe_identity::authority::{self, InitOptions, IssueOptions};
use drainpipe_lab::{
    CLIENT, DEFAULT_MTU_BYTES, Error, Fault, Lab, LabSpec, LabStatus, LinkSpec, MANAGEMENT_INTERFACE, Removal,
};
use tokio::time::{Instant, sleep};

use crate::arguments::{LabCommand, LabUpArguments, LinkArguments};
use crate::exit::Exit;
use crate::output;

mod emulated;

/// How long an agent may take to answer for the first time; it runs QEMU once to ask what it can do.
const AGENT_DEADLINE: Duration = Duration::from_secs(30);

/// Lab certificates outlive the lab, which a reboot ends; a check complains in their last 30 days.
const CERTIFICATE_DAYS: std::num::NonZeroU32 = std::num::NonZeroU32::new(365).expect("365 is not 0");

/// Which links a lab's hosts trust. What goes over trusted ones is not encrypted.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Trust {
    AllLinks,
    None,
}

/// What a lab's agents are configured with, besides the lab itself.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AgentSettings<'a> {
    pub(crate) qemu: &'a Path,
    pub(crate) trust: Trust,
    /// As by default if absent.
    pub(crate) page_cache_mib: Option<u32>,
}

impl LinkArguments {
    pub(crate) fn trust(&self) -> Trust {
        if self.untrusted { Trust::None } else { Trust::AllLinks }
    }
}

pub(crate) async fn run(command: LabCommand, json: bool) -> Result<Exit, Problem> {
    match command {
        LabCommand::Up(arguments) => up(&arguments).await,
        LabCommand::Down { name } => down(&name),
        LabCommand::Status { name: Some(name) } => status(&name, json),
        LabCommand::Status { name: None } => list(json),
        LabCommand::Exec { name, node, program } => exec(&name, &node, &program),
        LabCommand::Fault { name, words } => fault(&name, &words),
        LabCommand::Env { name } => env(&name),
    }
}

fn problem(error: Error) -> Problem {
    match error {
        Error::Spec(_) | Error::NoSuchLab { .. } | Error::BootFiles { .. } | Error::NotRun { .. } => {
            Problem::bad_input(error)
        }
        Error::AlreadyUp { .. } | Error::NotRoot => Problem::refused(error),
        error => Problem::failed(error),
    }
}

/// What a lab of this name is to be.
pub(crate) fn spec_of(name: &str, hosts: &[String], links: &LinkArguments) -> Result<LabSpec, Problem> {
    Ok(LabSpec {
        name: name.into(),
        hosts: hosts.to_vec(),
        links: links.links.iter().map(|words| parse_link(words)).collect::<Result<_, _>>()?,
        link_addresses: links.link_addresses.into(),
        own_cpus: links.own_cpus,
        libvirt: false,
        libvirt_qemu: None,
        libvirt_daemon: None,
        machines: None,
    })
}

async fn up(arguments: &LabUpArguments) -> Result<Exit, Problem> {
    let spec = spec_of(&arguments.name, &arguments.hosts, &arguments.links)?;
    let libvirt_qemu = if arguments.libvirt.is_some() { unpacked("--qemu", &arguments.qemu)? } else { None };
    let libvirt_daemon = arguments.libvirt.as_deref().map(libvirt_daemon).transpose()?.flatten();
    let machines = emulated::machines(arguments)?;
    let spec =
        LabSpec { libvirt: arguments.libvirt.is_some(), libvirt_qemu, libvirt_daemon, machines, ..spec };
    let lab = Lab::up(spec).map_err(problem)?;
    let settings =
        AgentSettings { qemu: &arguments.qemu, trust: arguments.links.trust(), page_cache_mib: None };
    if !arguments.no_agents
        && let Err(problem) = start_agents(&lab, settings).await
    {
        Lab::down(&arguments.name).map_err(Problem::failed)?;
        return Err(problem);
    }
    let LabUpArguments { name, hosts, links, .. } = arguments;
    let next = if lab.spec().machines.is_some() {
        format!("drainpipe lab exec {name} {} -- bash   to run a program in its first host", hosts[0])
    } else {
        format!("eval \"$(drainpipe lab env {name})\"   to ask its first host")
    };
    let (hosts, links) = (hosts.join(" and "), links.links.len());
    output::print(&format!("lab {name} is up: hosts {hosts}, {links} links\n  {next}\n"))?;
    Ok(Exit::Done)
}

/// The daemon of the hosts' libvirts, if it is to be another than the distribution's `libvirtd`.
fn libvirt_daemon(daemon: &Path) -> Result<Option<PathBuf>, Problem> {
    let in_path = (daemon != Path::new("libvirtd")).then(|| daemon.to_owned());
    Ok(unpacked("--libvirt", daemon)?.or(in_path))
}

/// The program that an option names, if it is not one in PATH.
fn unpacked(option: &str, program: &Path) -> Result<Option<PathBuf>, Problem> {
    if program.components().count() == 1 {
        return Ok(None);
    }
    let wrong = |error| Problem::bad_input(format!("{option} {}: {error}", program.display()));
    program.canonicalize().map(Some).map_err(wrong)
}

fn parse_link(words: &str) -> Result<LinkSpec, Problem> {
    let wrong =
        || Problem::bad_input(format!("--link {words}: write it as MBPS, MBPS:MTU, or unlimited[:MTU]"));
    let (rate, mtu) = words.split_once(':').map_or((words, None), |(rate, mtu)| (rate, Some(mtu)));
    let rate_mbps = match rate {
        "unlimited" => None,
        rate => Some(rate.parse().map_err(|_| wrong())?),
    };
    let mtu_bytes = mtu.map_or(Ok(DEFAULT_MTU_BYTES), |mtu| mtu.parse().map_err(|_| wrong()))?;
    Ok(LinkSpec { rate_mbps, mtu_bytes })
}

/// Gives each host a certificate and a configuration, and starts its agent.
pub(crate) async fn start_agents(lab: &Lab, settings: AgentSettings<'_>) -> Result<(), Problem> {
    let authority_directory = lab.node_dir(CLIENT).map_err(problem)?.join("pki");
    authority::init(&authority_directory, &InitOptions { overwrite: true, ..InitOptions::default() })
        .map_err(Problem::failed)?;
    for host in &lab.spec().hosts {
        start_agent(lab, host, &authority_directory, settings)?;
    }
    for host in &lab.spec().hosts {
        wait_for_agent(lab, host).await?;
    }
    Ok(())
}

fn start_agent(
    lab: &Lab,
    host: &str,
    authority_directory: &Path,
    settings: AgentSettings<'_>,
) -> Result<(), Problem> {
    let directory = lab.node_dir(host).map_err(problem)?;
    let places = Places::of(lab.spec(), host, &directory);
    let options = IssueOptions {
        out: Some(directory.join("pki")),
        overwrite: true,
        ..IssueOptions::valid_days(CERTIFICATE_DAYS)
    };
    authority::issue_host(authority_directory, host, &options).map_err(Problem::failed)?;
    let config = directory.join("agent.toml");
    super::bench::write(&config, &agent_config(lab.spec(), host, &directory, &places, settings)?)?;
    run_agent(lab, host, &config)
}

fn run_agent(lab: &Lab, host: &str, config: &Path) -> Result<(), Problem> {
    let arguments = [&own_program()?, Path::new("agent"), Path::new("--config"), config];
    let log = config.with_file_name("agent.log");
    if lab.spec().is_machine(host) {
        return emulated::spawn(lab, host, &arguments, &log);
    }
    lab.spawn(host, &arguments, &log).map_err(problem)?;
    Ok(())
}

fn own_program() -> Result<PathBuf, Problem> {
    std::env::current_exe()
        .map_err(|error| Problem::failed(format!("cannot find this program's own file: {error}")))
}

/// Where an agent of a lab has what it makes.
struct Places {
    socket: PathBuf,
    state: PathBuf,
    runtime: PathBuf,
}

impl Places {
    fn of(spec: &LabSpec, host: &str, directory: &Path) -> Self {
        if spec.is_machine(host) {
            // In the machine itself: its directory of the lab is another machine's file system, where neither sockets nor
            // databases work. And where its programs look.
            return Self {
                socket: DEFAULT_SOCKET.into(),
                state: "/var/lib/drainpipe".into(),
                runtime: "/run/drainpipe".into(),
            };
        }
        Self {
            socket: directory.join("agent.sock"),
            state: directory.join("state"),
            runtime: directory.join("run"),
        }
    }
}

/// As the agents of a lab start QEMU.
pub(crate) fn launcher(qemu: &Path) -> Launcher {
    let user = QemuUser::of_lab(qemu);
    Launcher {
        program: "/proc/self/exe".into(),
        arguments: vec!["launch".into()],
        user,
        binary: qemu.to_owned(),
    }
}

/// Nothing but what is measured, or tried, uses the links of a lab. Its VMs may use any file: all hosts are this one,
/// and whoever makes a lab is its root.
fn agent_config(
    spec: &LabSpec,
    host: &str,
    directory: &Path,
    places: &Places,
    settings: AgentSettings<'_>,
) -> Result<String, Problem> {
    let address = |name: &str| spec.management_address(name).map_err(Problem::failed);
    let own = address(host)?;
    let [.., last] = own.octets();
    let migration_address = if spec.link_addresses.has_ipv4() {
        format!("migration_address = \"10.77.255.{last}\"\n")
    } else {
        String::new()
    };
    let trusted = match settings.trust {
        Trust::AllLinks => {
            let links = spec.link_names().into_iter().chain([MANAGEMENT_INTERFACE.to_owned()]);
            let quoted: Vec<String> = links.map(|name| format!("\"{name}\"")).collect();
            format!("trusted_networks = [{}]\n", quoted.join(", "))
        }
        Trust::None => String::new(),
    };
    // A machine has its own, if any; other hosts never have that of the lab's machine.
    let libvirt = if spec.is_machine(host) {
        String::new()
    } else if spec.libvirt {
        let socket = Lab::open(&spec.name).and_then(|lab| lab.libvirt_socket(host)).map_err(problem)?;
        format!("socket = \"{}\"\n", socket.display())
    } else {
        "enabled = false\n".into()
    };
    let directory = directory.display();
    let [socket, state, runtime] =
        [&places.socket, &places.state, &places.runtime].map(|path| path.display());
    let mut text = format!(
        "name = \"{host}\"\n{trusted}listen = \"{own}:{DEFAULT_PORT}\"\nsocket = \"{socket}\"\n\
         state_directory = \"{state}\"\nruntime_directory = \"{runtime}\"\n\
         {migration_address}probe_every_s = 0\n\n\
         [tls]\ncertificate = \"{directory}/pki/host.pem\"\nkey = \"{directory}/pki/host.key\"\n\
         authority = \"{directory}/pki/ca.pem\"\n\n[qemu]\nbinary = \"{}\"\nuser = \"{}\"\n\n\
         [vms]\ndirectories = [\"/\"]\ndevices = [\"/dev\"]\n\n[libvirt]\n{libvirt}",
        settings.qemu.display(),
        QemuUser::of_lab(settings.qemu).uid
    );
    if let Some(page_cache_mib) = settings.page_cache_mib {
        write!(text, "\n[compression]\npage_cache_mib = {page_cache_mib}\n").expect("a String takes all");
    }
    for (name, link) in spec.link_names().iter().zip(&spec.links) {
        let speed = link.rate_mbps.map_or(String::new(), |rate| format!("speed_mbps = {rate}\n"));
        write!(text, "\n[[link]]\nname = \"{name}\"\n{speed}").expect("a String takes all");
    }
    for peer in spec.hosts.iter().filter(|peer| *peer != host) {
        write!(text, "\n[[peer]]\nname = \"{peer}\"\naddress = \"{}:{DEFAULT_PORT}\"\n", address(peer)?)
            .expect("a String takes all");
    }
    Ok(text)
}

/// The socket of a lab host's agent.
pub(crate) fn agent_socket(lab: &Lab, host: &str) -> Result<PathBuf, Problem> {
    Ok(lab.node_dir(host).map_err(problem)?.join("agent.sock"))
}

async fn wait_for_agent(lab: &Lab, host: &str) -> Result<(), Problem> {
    if lab.spec().is_machine(host) {
        return emulated::wait_for_agent(lab, host, &own_program()?).await;
    }
    let socket = agent_socket(lab, host)?;
    let client = ApiClient::over_socket(&socket)?;
    let end = Instant::now() + AGENT_DEADLINE;
    loop {
        let Err(refusal) = client.get::<HostView>("/v1/host").await else { return Ok(()) };
        let log = std::fs::read_to_string(socket.with_file_name("agent.log")).unwrap_or_default();
        if let Some(error) = log.lines().find_map(|line| line.strip_prefix("error: ")) {
            return Err(Problem::failed(format!("the agent of {host} did not start: {error}")));
        }
        if Instant::now() >= end {
            return Err(refusal.context(format!("the agent of {host} did not start; its log:\n{log}")));
        }
        sleep(Duration::from_millis(20)).await;
    }
}

fn down(name: &str) -> Result<Exit, Problem> {
    let removed = Lab::down(name).map_err(problem)?;
    let Removal { namespaces, processes } = removed;
    output::print(&if namespaces == 0 {
        format!("there is no lab {name}; `drainpipe lab status` lists the labs\n")
    } else {
        format!("lab {name} is removed: {processes} processes ended, {namespaces} namespaces removed\n")
    })?;
    Ok(Exit::Done)
}

fn list(json: bool) -> Result<Exit, Problem> {
    let labs = Lab::list().map_err(problem)?;
    if json {
        output::json(&labs)?;
    } else {
        let rows = labs.iter().map(|lab| {
            let state = if lab.complete { "up" } else { "left half-made; `drainpipe lab down` removes it" };
            vec![lab.name.clone(), lab.hosts.join(", "), state.into()]
        });
        output::table(&["lab", "hosts", "state"], rows.collect())?;
    }
    Ok(Exit::Done)
}

fn status(name: &str, json: bool) -> Result<Exit, Problem> {
    let status = Lab::open(name).and_then(|lab| lab.status()).map_err(problem)?;
    if json {
        output::json(&status)?;
    } else {
        tell_status(&status)?;
    }
    Ok(Exit::Done)
}

fn tell_status(status: &LabStatus) -> Result<(), Problem> {
    let rows = status.hosts.iter().flat_map(|host| {
        host.links.iter().map(|link| {
            let rate = link.rate_mbps.map_or("unlimited".into(), format::mbps);
            let faults: Vec<String> = link.faults.iter().map(ToString::to_string).collect();
            vec![
                host.node.name.clone(),
                link.name.clone(),
                link.address.map_or_else(|| "link-local".into(), |address| address.to_string()),
                rate,
                link.mtu_bytes.to_string(),
                format::bytes(link.sent_bytes as f64),
                faults.join(", "),
            ]
        })
    });
    output::table(&["host", "link", "address", "rate", "mtu", "sent", "faults"], rows.collect())?;
    let libvirts = status.hosts.iter().filter_map(|host| {
        let libvirt = host.libvirt.as_ref()?;
        let pid = libvirt.pid.map_or("does not run".into(), |pid| pid.to_string());
        Some(vec![host.node.name.clone(), pid, libvirt.socket.display().to_string()])
    });
    let libvirts: Vec<_> = libvirts.collect();
    if !libvirts.is_empty() {
        output::table(&["host", "libvirt", "socket"], libvirts)?;
    }
    let consoles = status
        .hosts
        .iter()
        .filter_map(|host| Some(vec![host.node.name.clone(), host.console.as_ref()?.display().to_string()]));
    let consoles: Vec<_> = consoles.collect();
    if consoles.is_empty() { Ok(()) } else { output::table(&["host", "machine's console"], consoles) }
}

fn exec(name: &str, node: &str, program: &[String]) -> Result<Exit, Problem> {
    let lab = Lab::open(name).map_err(problem)?;
    if lab.spec().is_machine(node) {
        return emulated::exec(&lab, node, program);
    }
    let (first, rest) = program.split_first().expect("clap requires a program");
    let status = lab
        .command(node, first)
        .map_err(problem)?
        .args(rest)
        .status()
        .map_err(|error| Problem::bad_input(format!("cannot run {first}: {error}")))?;
    // The program's own code, as a shell would give it.
    let code = status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0));
    std::process::exit(code);
}

fn fault(name: &str, words: &[String]) -> Result<Exit, Problem> {
    let fault = Fault::from_words(words).map_err(Problem::bad_input)?;
    Lab::open(name).and_then(|lab| lab.fault(&fault)).map_err(problem)?;
    Ok(Exit::Done)
}

fn env(name: &str) -> Result<Exit, Problem> {
    let lab = Lab::open(name).map_err(problem)?;
    let first = lab.spec().hosts.first().expect("a lab needs at least two hosts");
    if lab.spec().is_machine(first) {
        return Err(Problem::refused(format!(
            "the agents of lab {name} can be reached only from its machines: drainpipe lab exec {name} \
            {first} -- drainpipe hosts"
        )));
    }
    let client = client_namespace(&lab)?;
    output::print(&format!(
        "export DRAINPIPE_AGENT={}\nexport DRAINPIPE_CLIENT_NAMESPACE={}\n",
        agent_socket(&lab, first)?.display(),
        client.display()
    ))?;
    Ok(Exit::Done)
}

/// The network namespace of the lab's client, from which guests are watched.
pub(crate) fn client_namespace(lab: &Lab) -> Result<PathBuf, Problem> {
    let status = lab.status().map_err(problem)?;
    Ok(Path::new("/run/netns").join(status.client.namespace))
}
