//! Large disks.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Subcommand, ValueHint};
use drainpipe_storage::method::Method;

use crate::completion;

#[derive(Debug, Subcommand)]
pub(crate) enum DiskCommand {
    /// Make a disk of zeroes: a raw image, or all or part of a block device
    #[command(after_help = DISK_CREATE_EXAMPLES)]
    Create {
        /// The image's file, or the block device
        #[arg(value_hint = ValueHint::FilePath)]
        path: PathBuf,
        /// Size of the disk, as 500M, 100G or 1T; all of a block device if absent
        #[arg(long, value_name = "SIZE", value_parser = drainpipe_storage::size::parse)]
        size: Option<u64>,
        /// Set all of its blocks aside now, so that writes cannot lack space later
        #[arg(long)]
        preallocate: bool,
        /// Replace the file, or overwrite the block device, that is there
        #[arg(long)]
        force: bool,
    },
    /// List the disks that stayed on a host when their VMs left or went on with copies of them, and interrupted copies; or remove
    /// them
    #[command(after_help = DISK_LEFT_EXAMPLES)]
    Left {
        /// The host
        #[arg(add = completion::hosts())]
        host: String,
        /// Remove them
        #[arg(long)]
        remove: bool,
    },
    /// Copy a disk that no VM writes to: an image or a block device
    #[command(after_help = DISK_COPY_EXAMPLES)]
    Copy {
        /// The disk
        #[arg(value_hint = ValueHint::FilePath)]
        source: PathBuf,
        /// The copy: a file that is made, or a block device
        #[arg(value_hint = ValueHint::FilePath)]
        target: PathBuf,
        /// Replace the file, or overwrite the block device, that is there
        #[arg(long)]
        force: bool,
        /// Copy by this method or not at all, in place of the best that there is
        #[arg(long, value_parser = disk_method())]
        method: Option<Method>,
    },
}

/// Reads a method; shells complete it.
fn disk_method() -> impl TypedValueParser<Value = Method> {
    PossibleValuesParser::new(Method::COPYING.map(Method::name)).try_map(|name| name.parse::<Method>())
}

const DISK_LEFT_EXAMPLES: &str = "\
Examples:
  drainpipe disk left a               what `migrate --copy-storage` and `vm move-disk` have left on a, and parts of copies to a
  drainpipe disk left a --remove      the VMs run elsewhere: these are not needed any more";

const DISK_CREATE_EXAMPLES: &str = "\
Without --preallocate, a file takes space only as it is written to. Nothing is overwritten without --force.

Examples:
  drainpipe disk create /srv/vms/web1.img --size 1T
  drainpipe disk create /srv/vms/db1.img --size 100G --preallocate
  drainpipe disk create /dev/vg0/web1 --force                        all of the device reads as zeroes then";

const DISK_COPY_EXAMPLES: &str = "\
The storage copies where it can: blocks are shared (XFS, Btrfs), the NFS server or the SCSI target does it. Elsewhere this
program reads and writes, and keeps holes. The end tells which it was, and what went through this host.

Examples:
  drainpipe disk copy /srv/vms/template.img /srv/vms/web2.img
  drainpipe disk copy /dev/vg0/web1 /srv/vms/web1.img
  drainpipe disk copy /srv/vms/web1.img /dev/vg0/web2 --force        what the device holds is lost
  drainpipe disk copy a.img b.img --method reflink                   at once and without space, or not at all";
