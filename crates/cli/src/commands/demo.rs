//! `drainpipe demo`: a lab, a guest, each option there and back, a report.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use drainpipe_engine::format;
use drainpipe_engine::problem::Problem;
use drainpipe_guest::client::Control;
use drainpipe_guest::parameters::KERNEL_OPTIONS;
use drainpipe_guest::protocol::{CONTROL_PORT, HEARTBEAT_PORT};
use drainpipe_hypervisor::VmSpec;
use drainpipe_hypervisor_qemu::{Privileges, probe};
use drainpipe_lab::{GUEST_BRIDGE, GUEST_NETWORK, Lab};
use drainpipe_report::{BenchReport, html};
use tokio::time::{Instant, sleep, timeout};

use super::lab::AgentSettings;
use super::{bench as bench_command, lab as lab_command, vm};
use crate::arguments::DemoArguments;
use crate::bench::Bench;
use crate::connection::ConnectionArguments;
use crate::exit::Exit;
use crate::output;

/// A guest of 768 MiB boots and fills its memory in 5 to 10 s under TCG on two cores.
const BOOT_DEADLINE: Duration = Duration::from_mins(3);

/// How long QEMU may take to say what it can do.
const PROBE_DEADLINE: Duration = Duration::from_secs(20);

/// The oldest QEMU that is supported has it, and the newest still does.
const OLDEST_MACHINE: &str = "pc-q35-7.2";

/// The agents count what a VM takes over 5 s each, and use it to decide on compression. By then they have counted
/// it once since the guest was ready: what filling its memory took is not what it wants. While it is moved there and
/// back they do not count.
const COUNTED_AFTER: Duration = Duration::from_secs(10);

const GUEST_NAME: &str = "demo";

pub(crate) async fn run(arguments: &DemoArguments, json: bool) -> Result<Exit, Problem> {
    check_guest_files(arguments)?;
    std::fs::create_dir_all(&arguments.output)
        .map_err(|error| Problem::failed(format!("cannot create {}: {error}", arguments.output.display())))?;
    // With a name of its own, so that it is in nobody's way, and two demos are not in each other's.
    let name = format!("demo-{}", std::process::id());
    let hosts = ["a", "b"].map(str::to_owned);
    let lab = Lab::up(lab_command::spec_of(&name, &hosts, &arguments.links)?).map_err(Problem::failed)?;
    let measured = tokio::select! {
        measured = measure(&lab, arguments) => measured,
        interrupted = tokio::signal::ctrl_c() => Err(match interrupted {
            Ok(()) => Problem::failed("stopped by Ctrl-C; the lab was removed"),
            Err(error) => Problem::failed(format!("cannot watch for Ctrl-C: {error}")),
        }),
    };
    let removed = Lab::down(&name).map_err(Problem::failed);
    let report = measured?;
    removed?;
    save(&report, &arguments.output)?;
    bench_command::show(&report, json)?;
    output::remark(&format!(
        "\nreport   {}\nresults  {}",
        arguments.output.join("report.html").display(),
        arguments.output.join("results.json").display()
    ));
    Ok(bench_command::verdict(&report))
}

fn check_guest_files(arguments: &DemoArguments) -> Result<(), Problem> {
    for file in [&arguments.kernel, &arguments.initramfs] {
        if !file.exists() {
            return Err(Problem::bad_input(format!(
                "{} is not there: `make demo` makes it, or run scripts/guest",
                file.display()
            )));
        }
    }
    Ok(())
}

async fn measure(lab: &Lab, arguments: &DemoArguments) -> Result<BenchReport, Problem> {
    output::remark(&format!("two hosts, {} links between them, and a client", arguments.links.links.len()));
    let settings = AgentSettings {
        qemu: &arguments.qemu,
        trust: arguments.links.trust(),
        page_cache_mib: arguments.page_cache_mib,
    };
    lab_command::start_agents(lab, settings).await?;
    let fleet = ConnectionArguments::of_socket(&lab_command::agent_socket(lab, "a")?).fleet()?;
    let spec = guest_spec(arguments, &newest_machine(&arguments.qemu).await?)?;
    vm::create(&fleet, &spec, None).await?;
    output::remark(&format!("booting a Linux guest of {} on host a", format::mib(arguments.memory_mib)));
    vm::start(&fleet, GUEST_NAME, &[]).await?;
    let client_namespace = lab_command::client_namespace(lab)?;
    wait_until_ready(&spec, client_namespace.clone()).await?;
    if arguments.options.iter().any(|option| option.may_compress()) {
        let seconds = COUNTED_AFTER.as_secs();
        output::remark(&format!("for {seconds} s, the agents count how much CPU the guest uses"));
        sleep(COUNTED_AFTER).await;
    }
    let bench = Bench {
        vm: GUEST_NAME.into(),
        host: "b".into(),
        options: arguments.options.clone(),
        repeat: arguments.repeat,
        encrypt: false,
        content: Some(arguments.mix.to_string()),
        client_namespace: Some(client_namespace),
        heartbeat: arguments.watching.heartbeat(),
        watched: true,
    };
    let before = agents_use(lab)?;
    let mut report = bench.run(&fleet).await?;
    let after = agents_use(lab)?;
    let (guest, dirtying) = (&mut report.conditions.guest, &arguments.dirtying);
    guest.dirty_mib_per_s = Some(dirtying.dirty_mib_per_s.into());
    guest.dirty_percent = Some(dirtying.locality);
    guest.rewrite_bytes = Some(dirtying.rewrite_words as u64 * 8);
    report.conditions.page_cache_mib = arguments.page_cache_mib;
    report.conditions.notes.extend(
        before
            .iter()
            .zip(&after)
            .map(|(before, after)| format!("{}: {} before, {} after", before.agent, before.used, after.used)),
    );
    Ok(report)
}

/// What an agent holds; it must not grow with the number of migrations.
struct AgentUse {
    agent: String,
    used: String,
}

fn agents_use(lab: &Lab) -> Result<Vec<AgentUse>, Problem> {
    let hosts = lab.status().map_err(Problem::failed)?.hosts;
    let agents = hosts.iter().flat_map(|host| {
        host.node.processes.iter().filter(|process| process.command.contains(" agent ")).map(|process| {
            AgentUse { agent: format!("agent of {}", host.node.name), used: process_use(process.pid) }
        })
    });
    Ok(agents.collect())
}

fn process_use(pid: i32) -> String {
    let descriptors = std::fs::read_dir(format!("/proc/{pid}/fd")).map_or(0, Iterator::count);
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap_or_default();
    let value = |key: &str| {
        let line = status.lines().find_map(|line| line.strip_prefix(key));
        line.map_or("unknown", |value| value.trim_start_matches(':').trim()).to_owned()
    };
    let [resident, most, threads] = ["VmRSS", "VmHWM", "Threads"].map(value);
    format!("{descriptors} descriptors, {resident} resident, {most} at most until then, {threads} threads")
}

/// The newest machine type that this QEMU has: with those before 8.1, multifd's channels wait for each
/// other all the time (docs/decisions/0021).
async fn newest_machine(qemu: &Path) -> Result<String, Problem> {
    let (privileges, launcher) = (Privileges::own(), lab_command::launcher(qemu));
    let probed = probe(&privileges, &launcher, &std::env::temp_dir(), PROBE_DEADLINE).await;
    let facts = probed.map_err(Problem::refused)?;
    Ok(facts.newest_like(OLDEST_MACHINE).unwrap_or(OLDEST_MACHINE).to_owned())
}

fn guest_spec(arguments: &DemoArguments, machine: &str) -> Result<VmSpec, Problem> {
    let absolute = |file: &Path| {
        file.canonicalize().map_err(|error| Problem::bad_input(format!("{}: {error}", file.display())))
    };
    let address = GUEST_NETWORK.hosts().nth(9).expect("the guest network has 254 addresses");
    let huge_pages =
        arguments.huge_page_mib.map(|size| format!("huge_page_mib = {size}\n")).unwrap_or_default();
    let text = format!(
        "name = \"{GUEST_NAME}\"\nmemory_mib = {}\n{huge_pages}vcpus = 1\nmachine = \"{machine}\"\n\
         cpu_model = \"qemu64\"\nkernel = \"{}\"\ninitramfs = \"{}\"\n\
         kernel_command_line = \"{KERNEL_OPTIONS} drainpipe.address={address}/{} drainpipe.memory_mib={} \
         drainpipe.mix={} drainpipe.dirty_mib_per_s={} drainpipe.locality={} drainpipe.rewrite_words={}\"\n\n[[nic]]\nbridge = \"{GUEST_BRIDGE}\"\n\n\
         [guest]\nheartbeat = \"{address}:{HEARTBEAT_PORT}\"\ncontrol = \"{address}:{CONTROL_PORT}\"\n",
        arguments.memory_mib,
        absolute(&arguments.kernel)?.display(),
        absolute(&arguments.initramfs)?.display(),
        GUEST_NETWORK.prefix_len(),
        arguments.memory_mib * 3 / 4,
        arguments.mix,
        arguments.dirtying.dirty_mib_per_s,
        arguments.dirtying.locality,
        arguments.dirtying.rewrite_words,
    );
    VmSpec::from_toml(&text, Path::new("the demo's guest")).map_err(Problem::failed)
}

async fn wait_until_ready(spec: &VmSpec, namespace: PathBuf) -> Result<(), Problem> {
    let control =
        spec.guest.as_ref().map(|guest| guest.control).expect("the demo's guest has a control port");
    let waited = timeout(BOOT_DEADLINE, async {
        let began = Instant::now();
        while !tokio::task::spawn_blocking({
            let namespace = namespace.clone();
            move || is_ready(control, &namespace)
        })
        .await
        .unwrap_or(false)
        {
            sleep(Duration::from_millis(200)).await;
        }
        output::remark(&format!("ready after {}", format::duration(began.elapsed().as_secs_f64() * 1000.0)));
    });
    waited.await.map_err(|_| Problem::failed("the guest did not get ready in 3 minutes"))
}

fn is_ready(control: SocketAddr, namespace: &Path) -> bool {
    let second = Duration::from_secs(1);
    Control::connect(control, Some(namespace), second)
        .and_then(|mut control| control.status(second))
        .is_ok_and(|status| status.is_ready())
}

fn save(report: &BenchReport, directory: &Path) -> Result<(), Problem> {
    let json = serde_json::to_string_pretty(report)
        .map_err(|error| Problem::failed(format!("cannot write JSON: {error}")))?;
    bench_command::write(&directory.join("results.json"), &json)?;
    bench_command::write(&directory.join("report.html"), &html::page(report))
}
