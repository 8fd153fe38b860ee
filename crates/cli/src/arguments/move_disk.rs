//! A disk that moves on its host.

use clap::{Args, ValueHint};
use drainpipe_engine::storage::DiskName;

use super::completion;

#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct MoveDiskArguments {
    /// The VM
    #[arg(add = completion::vms())]
    pub(crate) name: String,
    /// The disk; a VM's first disk is vda
    #[arg(required_unless_present = "cancel", value_parser = disk_name, add = completion::disks())]
    pub(crate) disk: Option<DiskName>,
    /// A new file on its host, in a directory that VMs may use
    #[arg(required_unless_present = "cancel", value_hint = ValueHint::FilePath)]
    pub(crate) path: Option<String>,
    /// Cancel the running move: the VM keeps the disk that it has
    #[arg(long, conflicts_with_all = ["disk", "path"])]
    pub(crate) cancel: bool,
}

fn disk_name(text: &str) -> Result<DiskName, String> {
    text.parse().map_err(|error: drainpipe_engine::storage::NoDiskName| error.to_string())
}

const EXAMPLES: &str = "\
The disk is copied while the VM runs, and the VM then uses the copy. The old file is kept under another name: `disk left`
lists it. Ctrl-C cancels. The VM must run in QEMU 8.2 or newer.

Examples:
  drainpipe vm move-disk web1 vda /srv/fast/web1.raw
  drainpipe vm move-disk web1 vdb /srv/big/web1-data.qcow2 --json
  drainpipe vm move-disk web1 --cancel                               also from another terminal";
