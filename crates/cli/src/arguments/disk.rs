//! Large disks.

use std::path::PathBuf;

use clap::builder::{PossibleValuesParser, TypedValueParser};
use clap::{Subcommand, ValueHint};
use drainpipe_storage::method::Method;

use super::completion;

#[derive(Debug, Subcommand)]
pub(crate) enum DiskCommand {
    /// Create a disk of zeroes: a raw image, or all or part of a block device
    #[command(after_help = DISK_CREATE_EXAMPLES)]
    Create {
        /// The image's file, or the block device
        #[arg(value_hint = ValueHint::FilePath)]
        path: PathBuf,
        /// Size of the disk, such as 500M, 100G or 1T; by default, all of a block device
        #[arg(long, value_name = "SIZE", value_parser = drainpipe_storage::size::parse)]
        size: Option<u64>,
        /// Reserve all blocks now, so that writes cannot run out of space later
        #[arg(long)]
        preallocate: bool,
        /// Replace the file, or overwrite the block device, that is there
        #[arg(long)]
        force: bool,
    },
    /// List or remove the disks that stayed behind on a host, and the interrupted copies to it
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
        /// The copy: a new file, or a block device
        #[arg(value_hint = ValueHint::FilePath)]
        target: PathBuf,
        /// Replace the file, or overwrite the block device, that is there
        #[arg(long)]
        force: bool,
        /// Copy by this method or fail, instead of choosing the best one
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
  drainpipe disk left a               what `migrate --copy-storage` and `vm move-disk` left on a, and interrupted copies to a
  drainpipe disk left a --remove      remove them, once you no longer need them";

const DISK_CREATE_EXAMPLES: &str = "\
Without --preallocate, a file takes space only as it is written to. Nothing is overwritten without --force.

Examples:
  drainpipe disk create /srv/vms/web1.img --size 1T
  drainpipe disk create /srv/vms/db1.img --size 100G --preallocate
  drainpipe disk create /dev/vg0/web1 --force                        then all of the device reads as zeroes";

const DISK_COPY_EXAMPLES: &str = "\
If it can, the storage does the work: files share blocks (XFS, Btrfs), or the NFS server or SCSI target copies. Otherwise
this program reads and writes, and keeps holes. At the end it says which it was, and how much went through this host.

Examples:
  drainpipe disk copy /srv/vms/template.img /srv/vms/web2.img
  drainpipe disk copy /dev/vg0/web1 /srv/vms/web1.img
  drainpipe disk copy /srv/vms/web1.img /dev/vg0/web2 --force        what the device holds is lost
  drainpipe disk copy a.img b.img --method reflink                   at once and without using space, or not at all";
