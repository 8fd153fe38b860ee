//! The lab.

use std::path::PathBuf;

use clap::{Args, Subcommand, ValueEnum};
use drainpipe_lab::LinkAddresses;

#[derive(Debug, Subcommand)]
pub(crate) enum LabCommand {
    /// Create hosts, links and a client, and start the agents
    #[command(after_help = LAB_EXAMPLES)]
    Up(LabUpArguments),
    /// Stop everything in a lab, and remove the lab
    Down {
        /// The lab
        #[arg(default_value = "lab")]
        name: String,
    },
    /// Show a lab, or list all
    Status {
        /// The lab
        name: Option<String>,
    },
    /// Run a program on one of a lab's hosts, or on its client
    #[command(after_help = "Examples:\n  drainpipe lab exec lab a -- ip address\n  \
        drainpipe lab exec real a -- modprobe rdma_rxe     in an emulated lab")]
    Exec {
        /// The lab
        name: String,
        /// The host, or `client`
        node: String,
        /// The program and its arguments
        #[arg(required = true, trailing_var_arg = true)]
        program: Vec<String>,
    },
    /// Break something, or repair it
    #[command(after_help = FAULT_EXAMPLES)]
    Fault {
        /// The lab
        name: String,
        /// The fault, in words
        #[arg(required = true)]
        words: Vec<String>,
    },
    /// Print shell commands after which `drainpipe` asks a lab's first host
    #[command(after_help = "Example:\n  eval \"$(drainpipe lab env lab)\"")]
    Env {
        /// The lab
        #[arg(default_value = "lab")]
        name: String,
    },
}

/// `--link-addresses`.
#[derive(Debug, Clone, Copy, ValueEnum)]
pub(crate) enum LinkAddressesArgument {
    /// IPv4 only
    Ipv4,
    /// The kernel's own IPv6 addresses only
    LinkLocal,
    /// IPv4, and the kernel's own IPv6 addresses
    Both,
}

impl From<LinkAddressesArgument> for LinkAddresses {
    fn from(argument: LinkAddressesArgument) -> Self {
        match argument {
            LinkAddressesArgument::Ipv4 => Self::Ipv4,
            LinkAddressesArgument::LinkLocal => Self::LinkLocal,
            LinkAddressesArgument::Both => Self::Both,
        }
    }
}

const LAB_EXAMPLES: &str = "\
Examples:
  drainpipe lab up                                  hosts a and b, two links of 1 Gb/s
  drainpipe lab up big --hosts a,b,c --link 5000 --link 1000:9000
  drainpipe lab up virt --libvirt --no-agents       hosts with a libvirt each, for virsh
  drainpipe lab up real --emulated --no-agents      hosts with a kernel each: RDMA, bonding, netem
  eval \"$(drainpipe lab env lab)\"                   then `drainpipe hosts` shows the lab's hosts";

const FAULT_EXAMPLES: &str = "\
Faults:
  link-down HOST LINK         pull the cable at that end      link-up HOST LINK puts it back
  blackhole HOST LINK [receive|send|both]                     link up, nothing passes
  blackhole-above HOST LINK BYTES [receive|send|both]         link up, only frames of up to BYTES pass
  loss HOST LINK PERCENT      this percentage of packets is lost, in both directions
  rate LINK MBPS|unlimited    change the rate
  mtu HOST LINK BYTES         change the MTU at that end
  libvirt-stop HOST           ask libvirt's daemon to end; libvirt-kill kills it, libvirt-start starts it
  heal HOST LINK              undo all faults of the link at that end

Example:
  drainpipe lab fault lab blackhole a e0 receive";

/// How the hosts of a lab are connected.
#[derive(Debug, Args)]
pub(crate) struct LinkArguments {
    /// A link between all hosts: MBPS or `unlimited`, optionally with :MTU; repeat it for each link
    #[arg(long = "link", value_name = "MBPS[:MTU]", default_values = ["1000", "1000"])]
    pub(crate) links: Vec<String>,
    /// Which addresses the hosts have on these links; with `link-local`, agents choose their migration addresses
    #[arg(long, value_enum, default_value = "both")]
    pub(crate) link_addresses: LinkAddressesArgument,
    /// Give the programs of each host a CPU of their own
    #[arg(long)]
    pub(crate) own_cpus: bool,
    /// Do not let hosts trust these links, so that migrations are encrypted
    #[arg(long)]
    pub(crate) untrusted: bool,
}

#[derive(Debug, Args)]
pub(crate) struct LabUpArguments {
    /// The lab's name
    #[arg(default_value = "lab")]
    pub(crate) name: String,
    /// The names of its hosts
    #[arg(long, value_delimiter = ',', default_value = "a,b")]
    pub(crate) hosts: Vec<String>,
    #[command(flatten)]
    pub(crate) links: LinkArguments,
    /// Do not start agents
    #[arg(long)]
    pub(crate) no_agents: bool,
    /// Give each host a libvirt of its own: `libvirtd`, or this daemon, which is `virtqemud` or the path of either; `lab status`
    /// shows its address
    #[arg(long, value_name = "DAEMON", num_args = 0..=1, require_equals = true, default_missing_value = "libvirtd")]
    pub(crate) libvirt: Option<PathBuf>,
    #[command(flatten)]
    pub(crate) machines: MachineArguments,
    /// The QEMU to run, also by the hosts' libvirts, for emulated machines and inside them
    #[arg(long, default_value = "qemu-system-x86_64", value_name = "FILE")]
    pub(crate) qemu: PathBuf,
}

/// The machines of an emulated lab.
#[derive(Debug, Args)]
pub(crate) struct MachineArguments {
    /// Make each host an emulated QEMU machine with its own kernel, from the files that `scripts/emulated` put into this
    /// directory [default: target/emulated]
    #[arg(long, value_name = "DIRECTORY", num_args = 0..=1, require_equals = true,
        default_missing_value = "target/emulated", conflicts_with = "libvirt")]
    pub(crate) emulated: Option<PathBuf>,
    /// The memory of each machine; its disk writes stay there too
    #[arg(long, value_name = "MIB", default_value_t = 1024, requires = "emulated")]
    pub(crate) machine_memory_mib: u32,
    /// The number of CPUs of each machine
    #[arg(long, value_name = "COUNT", default_value_t = 2, requires = "emulated")]
    pub(crate) machine_cpus: u8,
}
