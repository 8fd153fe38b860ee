//! The command line.

pub(crate) mod completion;
mod disk;
mod fleet;
mod lab;
mod move_disk;

use std::ffi::OsString;
use std::net::SocketAddr;
use std::path::PathBuf;
use std::time::Duration;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Args, Parser, Subcommand};
use clap_complete::Shell;
use drainpipe_agent::store::config;
use drainpipe_api_types::TRANSFERS_MAX;
use drainpipe_engine::bandwidth::BandwidthSetting;
use drainpipe_engine::option::RequestedOption;
use drainpipe_engine::storage::{DiskName, NoDiskName};
use drainpipe_engine::transfer::throttle::THROTTLE_PERCENT_MAX;
use drainpipe_guest::mix::Mix;
use drainpipe_guest::page::PAGE_WORDS;
use drainpipe_guest::protocol::MIB_PER_S_MAX;
use drainpipe_hypervisor::spec::VmName;

pub(crate) use self::disk::DiskCommand;
pub(crate) use self::fleet::{
    InitArguments, JoinArguments, LeaveArguments, PlaceArguments, RevokeArguments, TokenArgument,
};
pub(crate) use self::lab::{LabCommand, LabUpArguments, LinkArguments};
pub(crate) use self::move_disk::MoveDiskArguments;
use crate::connection::ConnectionArguments;
use crate::exit::Exit;

/// Moves running virtual machines off a host, fast and safely, over every network card.
#[derive(Debug, Parser)]
#[command(name = "drainpipe", version, max_term_width = 100, after_help = examples_and_exit_codes())]
pub(crate) struct Arguments {
    #[command(flatten)]
    pub(crate) connection: ConnectionArguments,

    /// Print JSON, for scripts
    #[arg(long, global = true)]
    pub(crate) json: bool,

    #[command(subcommand)]
    pub(crate) command: Command,
}

const EXAMPLES: &str = "\
Examples:
  drainpipe demo                               see it work on this machine, nothing else needed
  drainpipe init                               make this host the first of a fleet; prints the command for the next
  drainpipe vms                                all VMs, and which host each is on
  drainpipe check a b                          what is wrong between hosts a and b
  drainpipe migrate web1 b                     move web1 to host b, in the best way available
  drainpipe migrate web1 b --dry-run           show how it would move, and why; change nothing
  drainpipe drain a                            show where host a's VMs would go, ask, and move them
  drainpipe resume a --failback                accept VMs on host a again, and bring back those that left
  drainpipe bench web1 b --report report.html  measure all options, there and back
  drainpipe disk copy a.img b.img              copy a disk; the storage itself does it if it can";

fn examples_and_exit_codes() -> String {
    let codes = Exit::ALL.map(|exit| format!("\n  {}  {}", exit.code(), exit.meaning()));
    format!("{EXAMPLES}\n\nExit codes:{}", codes.concat())
}

#[derive(Debug, Subcommand)]
pub(crate) enum Command {
    /// Boot a Linux guest in a lab of two hosts, move it with each option, and compare
    Demo(DemoArguments),
    /// Run this host's agent
    Agent(AgentArguments),
    /// Make this host the first of a fleet, or print a token for the next one
    Init(InitArguments),
    /// Join this host to a fleet, with a token
    Join(JoinArguments),
    /// Remove this host from its fleet
    Leave(LeaveArguments),
    /// Make all hosts refuse a host's or operator's certificates, for example after a theft
    Revoke(RevokeArguments),
    /// List the hosts
    Hosts,
    /// List the VMs of all hosts
    Vms,
    /// Create, start, stop and remove VMs
    Vm {
        #[command(subcommand)]
        command: VmCommand,
    },
    /// Create and copy large disks on this host; the storage itself does the work if it can
    Disk {
        #[command(subcommand)]
        command: DiskCommand,
    },
    /// Find out what is wrong between two hosts, before a migration does
    Check(CheckArguments),
    /// Move a running VM to another host
    Migrate(MigrateArguments),
    /// Cancel a migration, unless it is too late: the VM keeps running where it is
    Cancel {
        /// The migration's ID, as `drainpipe history` shows it; the beginning is enough
        #[arg(add = completion::running_migrations())]
        id: String,
    },
    /// Empty a host: move its running VMs to other hosts
    Drain(DrainArguments),
    /// Accept VMs on a drained host again
    Resume(ResumeArguments),
    /// Show the migrations of all hosts, running and past
    History(HistoryArguments),
    /// Limit the bandwidth of a host's migrations, or show the limit
    Limit(LimitArguments),
    /// Move a VM there and back with each option, and compare
    Bench(BenchArguments),
    /// Look at a host's journal, and continue after it was lost
    Journal {
        #[command(subcommand)]
        command: JournalCommand,
    },
    /// Test hosts on one machine: network namespaces with shaped links
    Lab {
        #[command(subcommand)]
        command: LabCommand,
    },
    /// Make the certificates of hosts and operators
    Pki {
        #[command(subcommand)]
        command: PkiCommand,
    },
    /// Print a completion script for a shell
    #[command(after_help = "Example:\n  drainpipe completions bash > /etc/bash_completion.d/drainpipe")]
    Completions {
        /// The shell
        shell: Shell,
    },
    /// Write the man pages
    #[command(after_help = "Example:\n  drainpipe man /usr/local/share/man/man1")]
    Man {
        /// The directory to write them to
        directory: PathBuf,
    },
    /// Guard one migration in case the agent dies; the agent starts this
    #[command(hide = true)]
    Guard(GuardArguments),
    /// Become QEMU, without the agent's rights; the agent starts this
    #[command(hide = true)]
    Launch(LaunchArguments),
    /// Start QEMU for the agent, which is connected to the standard input; systemd starts this
    #[command(hide = true)]
    Keeper(AgentArguments),
}

#[derive(Debug, Args)]
pub(crate) struct DemoArguments {
    /// Where to write the report and the results
    #[arg(long, default_value = "target/demo", value_name = "DIRECTORY")]
    pub(crate) output: PathBuf,
    /// The guest's kernel
    #[arg(long, default_value = "target/guest/vmlinux", value_name = "FILE")]
    pub(crate) kernel: PathBuf,
    /// The guest's initramfs
    #[arg(long, default_value = "target/guest/initramfs.img", value_name = "FILE")]
    pub(crate) initramfs: PathBuf,
    /// The QEMU to run
    #[arg(long, default_value = "qemu-system-x86_64", value_name = "FILE")]
    pub(crate) qemu: PathBuf,
    /// Memory of the guest; it fills three quarters of it
    #[arg(long, default_value_t = 768, value_name = "MIB", value_parser = clap::value_parser!(u64).range(512..=65536))]
    pub(crate) memory_mib: u64,
    /// Use huge pages of this size for the guest's memory, 2 or 1024; this machine must have set them aside
    #[arg(long, value_name = "MIB")]
    pub(crate) huge_page_mib: Option<u64>,
    #[command(flatten)]
    pub(crate) links: LinkArguments,
    /// What the guest's memory holds, in percent: zero, text, random, shared
    #[arg(long, default_value = "random:60,text:30,zero:10", value_name = "KIND:PERCENT,…")]
    pub(crate) mix: Mix,
    #[command(flatten)]
    pub(crate) dirtying: DirtyingArguments,
    /// Memory on each host for copies of the pages that a compressed migration sends; by default, what agents take
    #[arg(long, value_name = "MIB")]
    pub(crate) page_cache_mib: Option<u32>,
    /// The options to compare
    #[arg(long, value_delimiter = ',', default_value = "tcp,compression,multichannel,direct", value_parser = requested_option())]
    pub(crate) options: Vec<RequestedOption>,
    #[command(flatten)]
    pub(crate) watching: WatchingArguments,
    /// How often to measure each option, there and back
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    pub(crate) repeat: u32,
}

/// How the demo's guest rewrites its memory, by the names of its kernel parameters.
#[derive(Debug, Args)]
pub(crate) struct DirtyingArguments {
    /// Let the guest rewrite its memory at this rate, also while it moves
    #[arg(
        long, value_name = "MIB", default_value_t = 0,
        value_parser = clap::value_parser!(u32).range(..=i64::from(MIB_PER_S_MAX))
    )]
    pub(crate) dirty_mib_per_s: u32,
    /// How much of the filled memory it rewrites
    #[arg(
        long, value_name = "PERCENT", default_value_t = 100, requires = "dirty_mib_per_s",
        value_parser = clap::value_parser!(u8).range(1..=100)
    )]
    pub(crate) locality: u8,
    /// How many words of 8 bytes it changes in a page each time
    #[arg(
        long, value_name = "WORDS", default_value_t = PAGE_WORDS, requires = "dirty_mib_per_s",
        value_parser = page_words
    )]
    pub(crate) rewrite_words: usize,
}

/// Every option, as it is written.
const OPTIONS: [&str; 7] =
    ["auto", "tcp", "compression", "multichannel", "direct", "qemu-zstd-1", "qemu-zstd-3"];

/// Reads an option; shells complete it.
fn requested_option() -> impl TypedValueParser<Value = RequestedOption> {
    PossibleValuesParser::new(OPTIONS).try_map(|name| name.parse::<RequestedOption>())
}

fn page_words(text: &str) -> Result<usize, String> {
    let words = text.parse().ok().filter(|words| (1..=PAGE_WORDS).contains(words));
    words.ok_or_else(|| format!("a number of 1 to {PAGE_WORDS}"))
}

#[derive(Debug, Args)]
#[command(after_help = AGENT_EXAMPLE)]
pub(crate) struct AgentArguments {
    /// The agent's configuration
    #[arg(long, default_value = config::DEFAULT_PATH, value_name = "FILE")]
    pub(crate) config: PathBuf,
}

const AGENT_EXAMPLE: &str = r#"A minimal configuration; docs/reference/config.md has all keys:
  name = "a"                              # as in this host's certificate
  listen = "192.0.2.1:7420"               # for other agents and operators

  [[peer]]                                # the other hosts
  name = "b"
  address = "192.0.2.2:7420""#;

#[derive(Debug, Args)]
pub(crate) struct LaunchArguments {
    pub(crate) order: String,
    #[arg(last = true)]
    pub(crate) arguments: Vec<OsString>,
}

#[derive(Debug, Args)]
pub(crate) struct GuardArguments {
    #[arg(long)]
    pub(crate) migration: String,
    #[arg(long)]
    pub(crate) vm: String,
    #[arg(long)]
    pub(crate) peer: Option<SocketAddr>,
    #[arg(long = "disk")]
    pub(crate) disks: Vec<SocketAddr>,
    #[arg(long)]
    pub(crate) target: String,
    #[arg(long)]
    pub(crate) target_address: SocketAddr,
    #[arg(long)]
    pub(crate) certificate: PathBuf,
    #[arg(long)]
    pub(crate) key: PathBuf,
    #[arg(long)]
    pub(crate) authority: PathBuf,
    #[arg(long)]
    pub(crate) state_directory: PathBuf,
    #[arg(long)]
    pub(crate) runtime_directory: PathBuf,
    #[arg(long)]
    pub(crate) daemon: Option<PathBuf>,
}

#[derive(Debug, Subcommand)]
pub(crate) enum VmCommand {
    /// Create a VM from its specification
    #[command(after_help = VM_EXAMPLE)]
    Create {
        /// The specification, a TOML file
        file: PathBuf,
        /// The host that it belongs to; by default, the one whose agent is asked
        #[arg(long, add = completion::hosts())]
        host: Option<String>,
    },
    /// Show one VM: state, disks, placement, specification and last migrations
    #[command(after_help = "Example:\n  drainpipe vm show web1")]
    Show {
        /// The VM's name
        #[arg(add = completion::vms())]
        name: String,
    },
    /// Boot a VM
    #[command(after_help = START_HELP)]
    Start {
        /// The VM's name
        #[arg(add = completion::vms())]
        name: String,
        /// Start it although this host may have it and cannot be asked: you are sure that it does not run there
        #[arg(long, value_name = "HOST", value_delimiter = ',', add = completion::hosts())]
        although_unreachable: Vec<String>,
    },
    /// Power a VM off
    Stop {
        /// The VM's name
        #[arg(add = completion::vms())]
        name: String,
        /// Pull the plug
        #[arg(long)]
        force: bool,
    },
    /// Move a disk of a running VM to another place on its host
    MoveDisk(MoveDiskArguments),
    /// Give a VM back to its source after its target was lost right after the hand-over
    #[command(after_help = RECLAIM_HELP)]
    Reclaim {
        /// The VM's name
        #[arg(add = completion::vms())]
        name: String,
        /// The host that it was handed over to
        #[arg(long, value_name = "HOST", add = completion::hosts())]
        lost: String,
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
    /// Remove a VM that does not run; its disks stay
    Rm {
        /// The VM's name
        #[arg(add = completion::vms())]
        name: String,
    },
}

const START_HELP: &str = "\
The agent asks the other hosts whether they have the VM. It refuses if one has it, or if one cannot be asked and may have
it: because the journal says so, or because the journal may lack something.

Example, if b is powered off:
  drainpipe vm start web1 --although-unreachable b";

const RECLAIM_HELP: &str = "\
For a migration that ended with code 4: the hand-over is recorded, the VM is paused on the source, and
its target does not answer. If the target comes back, the agents settle the matter by themselves. Use this
only for a target that does not come back. If the VM still ran there, it would run twice on the same disks,
so power that host off first. The VM is then powered off on the source, because its disks may be newer than
its memory there.

Example, if b is powered off:
  drainpipe vm reclaim web1 --lost b && drainpipe vm start web1";

const VM_EXAMPLE: &str = r#"A specification:
  name = "web1"
  memory_mib = 4096
  vcpus = 2
  machine = "pc-q35-7.2"                  # with its version: the target must build the same machine
  cpu_model = "qemu64"
  accelerator = "auto"                    # auto, kvm or tcg

  [[disk]]
  path = "/srv/shared/web1.qcow2"         # where both hosts see it
  format = "qcow2"

  [[nic]]
  bridge = "br0""#;

#[derive(Debug, Subcommand)]
pub(crate) enum JournalCommand {
    /// Show whether the host's agent believes its journal, and what it found on the host
    Show,
    /// Continue with what runs on the host, if its journal is not believed
    #[command(after_help = ADOPT_HELP)]
    Adopt {
        /// Do not ask
        #[arg(long)]
        yes: bool,
    },
}

const ADOPT_HELP: &str = "\
For a host that answers nothing else because its journal was lost, is damaged, or is older than what other hosts last heard.
If you have the right journal, put it back. If not, this command makes the agent continue. The agent records the VMs that
run on the host again, from the files beside their QEMUs in the runtime directory. It starts, stops and ends no VM. If the
journal cannot be read, the definitions of VMs that do not run, the history and the cordon are lost with it.

Example, on the host:
  drainpipe journal show && drainpipe journal adopt";

#[derive(Debug, Args)]
#[command(after_help = CHECK_EXAMPLES)]
pub(crate) struct CheckArguments {
    /// The host that VMs would leave
    #[arg(add = completion::hosts())]
    pub(crate) source: String,
    /// The host to which they would go
    #[arg(add = completion::hosts())]
    pub(crate) target: String,
    /// Check only this running VM, instead of all that run on the source
    #[arg(long, value_name = "VM", add = completion::vms())]
    pub(crate) vm: Option<VmName>,
    /// Fix what can be fixed safely on both hosts, after asking, and check again
    #[arg(long)]
    pub(crate) fix: bool,
    /// With --fix: do not ask
    #[arg(long, requires = "fix")]
    pub(crate) yes: bool,
    /// Put back what --fix changed on both hosts, and check nothing
    #[arg(long, conflicts_with_all = ["fix", "vm"])]
    pub(crate) undo: bool,
}

const CHECK_EXAMPLES: &str = "\
Tests each path between the two hosts in both directions: TCP, and full-size packets that must not
be fragmented. Asks whether the target can run the source's VMs: memory, CPU, machine type, disks.
Takes a few seconds and, without --fix, changes nothing. Each finding says where something is wrong,
what that does to a migration, and what fixes it.

Examples:
  drainpipe check a b                                       before the first migration from a to b
  drainpipe check a b --vm web1                             could web1 run on b?
  drainpipe check a b && drainpipe migrate web1 b           move only if all is well
  drainpipe check a b --fix                                 fix what can be fixed safely
  drainpipe check a b --undo                                put that back
  drainpipe check a b --json | jq -r '.findings[].code'     for scripts: codes stay the same

Exit codes: 0 nothing wrong, apart from remarks · 6 warnings: a migration would work, but slower or
with less to spare · 3 an error: a migration would fail or hang · others as everywhere";

#[derive(Debug, Args)]
#[command(after_help = MIGRATE_EXAMPLES)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag that people type")]
pub(crate) struct MigrateArguments {
    /// The VM
    #[arg(add = completion::vms())]
    pub(crate) vm: String,
    /// The target
    #[arg(add = completion::hosts())]
    pub(crate) host: String,
    /// How to move it; `auto` chooses the option that promises most
    #[arg(long, default_value = "auto", value_parser = requested_option())]
    pub(crate) option: RequestedOption,
    /// Encrypt it even if the hosts do not require that
    #[arg(long)]
    pub(crate) encrypt: bool,
    /// If memory gets dirty as fast as it is sent, let the VM run on the target before all of it is there. Uses one path.
    /// Until the rest has followed, the VM loses what it was doing if either host is lost
    #[arg(long)]
    pub(crate) post_copy: bool,
    /// Copy the disks that the target does not see, while the VM runs. The source keeps its own under another name
    #[arg(long)]
    pub(crate) copy_storage: bool,
    /// Copy a disk to this path on the target; a VM's first disk is vda. May be repeated
    #[arg(long = "disk", value_name = "NAME=PATH", value_parser = disk_place)]
    pub(crate) disks: Vec<DiskPlace>,
    /// Show how the VM would move, and why; change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// After this time, give up and let the VM run where it is
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) deadline: Option<u32>,
    /// Throttle the CPUs of a VM whose memory gets dirty too fast, at most this far; 0 for never. By default, as the
    /// agent's configuration says, which has 80 unless you changed it
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=i64::from(THROTTLE_PERCENT_MAX)))]
    pub(crate) throttle: Option<u8>,
}

/// Where a disk is to be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct DiskPlace {
    /// Which disk.
    pub(crate) disk: DiskName,
    /// Its path there.
    pub(crate) path: String,
}

fn disk_place(text: &str) -> Result<DiskPlace, String> {
    let (disk, path) = text.split_once('=').ok_or("a disk and its path there, such as vda=/srv/web.raw")?;
    if !path.starts_with('/') {
        return Err(format!("`{path}` is not an absolute path"));
    }
    Ok(DiskPlace { disk: disk.parse().map_err(|error: NoDiskName| error.to_string())?, path: path.into() })
}

const MIGRATE_EXAMPLES: &str = "\
Ctrl-C cancels: the VM keeps running where it is.

Examples:
  drainpipe migrate web1 b
  drainpipe migrate web1 b --option multichannel
  drainpipe migrate web1 b --throttle 99          a busy VM: throttle its CPUs as far as necessary
  drainpipe migrate web1 b --throttle 0           do not slow it down
  drainpipe migrate web1 b --post-copy            a VM too busy for anything else, at a risk
  drainpipe migrate web1 b --copy-storage         with the disks that b does not see
  drainpipe migrate web1 b --disk vdb=/big/web1   with this disk, to another path
  drainpipe migrate web1 b --deadline 300 --json";

#[derive(Debug, Args)]
#[command(args_conflicts_with_subcommands = true, subcommand_negates_reqs = true, after_help = DRAIN_EXAMPLES)]
#[expect(clippy::struct_excessive_bools, reason = "each is a flag that people type")]
pub(crate) struct DrainArguments {
    #[command(subcommand)]
    pub(crate) command: Option<DrainCommand>,
    /// The host to empty
    // Not required where there is a subcommand.
    #[arg(required = true, add = completion::hosts())]
    pub(crate) host: Option<String>,
    /// The hosts that may take its VMs; by default, all that it knows
    #[arg(long, value_delimiter = ',', value_name = "HOST,…", add = completion::hosts())]
    pub(crate) to: Vec<String>,
    /// Drain to this host alone, and accept its VMs meanwhile; if that host is drained in the same way, the two exchange
    /// their VMs
    #[arg(long, value_name = "HOST", conflicts_with = "to")]
    pub(crate) swap: Option<String>,
    /// After this time, start no further VM, and cancel those that are not sending memory yet
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u32).range(1..))]
    pub(crate) deadline: Option<u32>,
    /// How to move each VM; `auto` chooses the option that promises most
    #[arg(long, default_value = "auto", value_parser = requested_option())]
    pub(crate) option: RequestedOption,
    /// How many VMs may send memory at a time; by default, measurement decides
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u8).range(1..=i64::from(TRANSFERS_MAX)))]
    pub(crate) transfers: Option<u8>,
    /// Throttle the CPUs of a VM whose memory gets dirty too fast, at most this far; 0 for never. By default, as the
    /// agent's configuration says, which has 80 unless you changed it
    #[arg(long, value_name = "PERCENT", value_parser = clap::value_parser!(u8).range(0..=i64::from(THROTTLE_PERCENT_MAX)))]
    pub(crate) throttle: Option<u8>,
    /// Encrypt each VM even if the hosts do not require that
    #[arg(long)]
    pub(crate) encrypt: bool,
    /// Let VMs whose memory gets dirty faster than the links carry it run on their targets before all of it is there.
    /// Until the rest has followed, such a VM loses what it was doing if either host is lost
    #[arg(long)]
    pub(crate) post_copy: bool,
    /// Copy the disks that a VM's target does not see, to the same path there, while the VM runs
    #[arg(long)]
    pub(crate) copy_storage: bool,
    /// With --copy-storage: begin with the VMs whose disks are copied, instead of the others
    #[arg(long, requires = "copy_storage")]
    pub(crate) disks_first: bool,
    /// Show which VM would go where, in which order, and how long it would take; change nothing
    #[arg(long)]
    pub(crate) dry_run: bool,
    /// Do not ask
    #[arg(long, conflicts_with = "dry_run")]
    pub(crate) yes: bool,
}

#[derive(Debug, Subcommand)]
pub(crate) enum DrainCommand {
    /// Show how far a drain has got, or how it ended
    #[command(after_help = "Example:\n  drainpipe drain status a")]
    Status {
        /// The host; by default, the one whose agent is asked
        #[arg(add = completion::hosts())]
        host: Option<String>,
    },
    /// Cancel a drain: VMs that have moved stay where they are, others stay here or finish
    #[command(after_help = "Example:\n  drainpipe drain cancel a")]
    Cancel {
        /// The host; by default, the one whose agent is asked
        #[arg(add = completion::hosts())]
        host: Option<String>,
    },
}

const DRAIN_EXAMPLES: &str = "\
Shows which VM would go where, and asks; without a terminal, it needs --yes. Then cordons the host:
until `drainpipe resume`, no VM can move to it or start on it.

The host's agent does the work. Ctrl-C cancels the drain and waits for its end; a second Ctrl-C only
stops watching. If this program is killed, or its terminal closes, the drain continues:
`drainpipe drain status HOST` shows it. After a failure or a restart of the agent, the same command
continues with the VMs that are still there; `drain status` shows it with its options.

Examples:
  drainpipe drain a --dry-run                        which VM would go where, and how long it would take
  drainpipe drain a                                  show that, ask, do it
  drainpipe drain a --to b,c --deadline 1800 --yes   in a maintenance window
  drainpipe drain a --swap b                         with `drain b --swap a`: a and b exchange their VMs
  drainpipe drain a --throttle 0                     slow no VM down, even if it then stays
  drainpipe drain a --post-copy                      also VMs too busy for anything else, at a risk
  drainpipe drain a --copy-storage                   also VMs whose disks no other host sees
  drainpipe drain status a                           how far has it got?
  drainpipe drain cancel a                           stop it; VMs that have moved stay there
  drainpipe resume a --failback                      after the maintenance: bring all back
  drainpipe drain -- status                          a host that is called like a command

Exit codes: 0 drained · 1 some VMs stayed · 2 bad usage or input · 3 refused, nothing was moved ·
4 a VM is in doubt · 5 cancelled · 7 a VM has ended";

#[derive(Debug, Args)]
#[command(after_help = RESUME_EXAMPLES)]
pub(crate) struct ResumeArguments {
    /// The host
    #[arg(add = completion::hosts())]
    pub(crate) host: String,
    /// Bring back the VMs that the last drain moved, if they are still where they went
    #[arg(long)]
    pub(crate) failback: bool,
    /// With --failback: throttle the CPUs of a VM whose memory gets dirty too fast, at most this far; 0 for never. By
    /// default, as the drain did, or else as the configuration of the host that the VM comes from says
    #[arg(
        long, value_name = "PERCENT", requires = "failback",
        value_parser = clap::value_parser!(u8).range(0..=i64::from(THROTTLE_PERCENT_MAX))
    )]
    pub(crate) throttle: Option<u8>,
    /// With --failback: encrypt each VM even if the hosts do not require that. If the drain had this option, the way back
    /// has it too
    #[arg(long, requires = "failback")]
    pub(crate) encrypt: bool,
}

const RESUME_EXAMPLES: &str = "\
Ctrl-C cancels a failback: VMs that are on their way stay where they were. You can run it again.

Examples:
  drainpipe resume a                             accept VMs on a again
  drainpipe resume a --failback                  and bring back those that left it
  drainpipe resume a --failback --throttle 99    busy VMs: throttle their CPUs as far as necessary";

#[derive(Debug, Args)]
pub(crate) struct HistoryArguments {
    /// Show one migration in full, by its ID or the beginning of it
    #[arg(add = completion::migrations())]
    pub(crate) id: Option<String>,
    /// How many past migrations to show, up to 1000
    #[arg(long, default_value_t = 20, value_parser = clap::value_parser!(u32).range(..=1000))]
    pub(crate) limit: u32,
    /// Show only migrations from or to this host
    #[arg(long, add = completion::hosts())]
    pub(crate) host: Option<String>,
}

#[derive(Debug, Args)]
#[command(after_help = LIMIT_EXAMPLES)]
pub(crate) struct LimitArguments {
    /// The host
    #[arg(add = completion::hosts())]
    pub(crate) host: String,
    /// Mb/s, `off`, or `configured` for what its agent.toml says; without it, the present limit is shown
    #[arg(value_parser = bandwidth_setting)]
    pub(crate) limit: Option<BandwidthSetting>,
    /// Limit only copies of disks, and leave the overall limit as it is
    #[arg(long, requires = "limit")]
    pub(crate) storage: bool,
}

const LIMIT_EXAMPLES: &str = "\
Examples:
  drainpipe limit a              show the present limit
  drainpipe limit a 2000         at most 2 Gb/s from a, and at most 2 Gb/s to a
  drainpipe limit a off          no limit
  drainpipe limit a configured   as [bandwidth] in a's agent.toml says for the time of day
  drainpipe limit a 500 --storage
                                 at most 500 Mb/s of that for copies of disks

Running migrations follow within a second, and share the limit. It applies until you set another.";

fn bandwidth_setting(word: &str) -> Result<BandwidthSetting, String> {
    match word {
        "off" => Ok(BandwidthSetting::Unlimited),
        "configured" => Ok(BandwidthSetting::Configured),
        number => match number.parse() {
            Ok(mbps) if mbps > 0 => Ok(BandwidthSetting::Mbps(mbps)),
            _ => Err("a number of Mb/s above 0, `off` or `configured`".into()),
        },
    }
}

#[derive(Debug, Args)]
#[command(
    after_help = "Example:\n  drainpipe bench web1 b --options tcp,multichannel --repeat 5 --report report.html"
)]
pub(crate) struct BenchArguments {
    /// The VM
    #[arg(add = completion::vms())]
    pub(crate) vm: String,
    /// The host to which it moves, and from which it comes back
    #[arg(add = completion::hosts())]
    pub(crate) host: String,
    /// The options to compare
    #[arg(long, value_delimiter = ',', default_value = "tcp,compression,multichannel,direct", value_parser = requested_option())]
    pub(crate) options: Vec<RequestedOption>,
    /// How often to measure each option, there and back
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u32).range(1..=1000))]
    pub(crate) repeat: u32,
    /// Encrypt even if the hosts do not require that
    #[arg(long)]
    pub(crate) encrypt: bool,
    /// Write an HTML report
    #[arg(long, value_name = "FILE")]
    pub(crate) report: Option<PathBuf>,
    /// What the guest's memory holds, for the report
    #[arg(long, value_name = "WORDS")]
    pub(crate) content: Option<String>,
    #[command(flatten)]
    pub(crate) watching: WatchingArguments,
    /// Watch the guest from this network namespace, such as /run/netns/NAME
    #[arg(long, env = "DRAINPIPE_CLIENT_NAMESPACE", value_name = "FILE")]
    pub(crate) client_namespace: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct WatchingArguments {
    /// How often to ask the guest for a sign of life; silences are known to within that time
    ///
    /// Without KVM, asking every millisecond may take more than half a core of the guest, which then is never idle.
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..=1000), value_name = "MS")]
    heartbeat_ms: u64,
}

impl WatchingArguments {
    pub(crate) fn heartbeat(&self) -> Duration {
        Duration::from_millis(self.heartbeat_ms)
    }
}

#[derive(Debug, Subcommand)]
pub(crate) enum PkiCommand {
    /// Make the authority that signs hosts and operators
    #[command(after_help = PKI_EXAMPLES)]
    Init {
        #[command(flatten)]
        place: PkiPlace,
    },
    /// Make a host's certificate
    Host {
        /// The host's name, as in its agent.toml
        name: String,
        #[command(flatten)]
        place: PkiPlace,
        /// How long the certificate is valid
        #[arg(long, default_value = "825")]
        days: std::num::NonZeroU32,
    },
    /// Make an operator's certificate
    Operator {
        /// The operator's name, for the log
        name: String,
        #[command(flatten)]
        place: PkiPlace,
        /// How long the certificate is valid
        #[arg(long, default_value = "365")]
        days: std::num::NonZeroU32,
    },
}

#[derive(Debug, Args)]
pub(crate) struct PkiPlace {
    /// The authority's directory; keep it off the hosts
    #[arg(long, default_value = "drainpipe-pki", value_name = "DIRECTORY")]
    pub(crate) directory: PathBuf,
    /// Replace what is there
    #[arg(long)]
    pub(crate) force: bool,
}

const PKI_EXAMPLES: &str = "\
Example:
  drainpipe pki init
  drainpipe pki host a          then copy drainpipe-pki/hosts/a/* to /etc/drainpipe/ on host a
  drainpipe pki operator ann    then copy drainpipe-pki/operators/ann/ to ann";

#[cfg(test)]
mod tests {
    use clap::error::ErrorKind;

    use super::*;

    fn refused(arguments: &[&str]) -> ErrorKind {
        let all = ["drainpipe", "demo"].iter().chain(arguments);
        Arguments::try_parse_from(all).expect_err("refused").kind()
    }

    #[test]
    fn every_option_can_be_asked_for() {
        assert_eq!(OPTIONS.map(String::from), RequestedOption::ALL.map(|option| option.to_string()));
    }

    #[test]
    fn how_the_demos_guest_rewrites_is_checked_before_it_boots() {
        let rate = ["--dirty-mib-per-s", "60"];
        assert!(Arguments::try_parse_from(["drainpipe", "demo"].iter().chain(&rate)).is_ok());
        for (option, values) in [("--locality", ["0", "101"]), ("--rewrite-words", ["0", "513"])] {
            for value in values {
                assert_eq!(refused(&[&rate[..], &[option, value]].concat()), ErrorKind::ValueValidation);
            }
            assert_eq!(
                refused(&[option, "8"]),
                ErrorKind::MissingRequiredArgument,
                "{option} without a rate"
            );
        }
        assert_eq!(refused(&["--dirty-mib-per-s", "1048577"]), ErrorKind::ValueValidation);
    }

    #[test]
    fn how_vms_come_back_is_said_of_a_way_back_only() {
        let read = |more: &[&str]| {
            Arguments::try_parse_from(["drainpipe", "resume", "a"].iter().chain(more))
                .map_err(|error| error.kind())
        };
        for option in [&["--throttle", "0"][..], &["--encrypt"]] {
            assert!(read(&[&["--failback"][..], option].concat()).is_ok());
            assert_eq!(read(option).unwrap_err(), ErrorKind::MissingRequiredArgument);
        }
        assert_eq!(read(&["--failback", "--throttle", "100"]).unwrap_err(), ErrorKind::ValueValidation);
    }
}
