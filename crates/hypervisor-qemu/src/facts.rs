//! What this host's QEMU can do, asked from QEMU itself.

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use drainpipe_engine::host::capabilities::{Capabilities, PostCopy};
use drainpipe_hypervisor::{BinaryStamp, Hardware, HypervisorFacts, Version, VmDirectory};
use serde::Deserialize;
use serde_json::{Value, json};

use crate::cpu_models;
use crate::launch::{LaunchError, io_error, launch};
use crate::launcher::Launcher;
use crate::paths::RuntimePaths;
use crate::privileges::Privileges;
use crate::qmp::{QmpClient, QmpError};

/// Debian 12's QEMU, the oldest that is tested.
const OLDEST: (u32, u32) = (7, 2);

/// From this one on, QEMU knows a migration's connections by what each says first (`migration_channel_read_peek`).
const TELLS_CONNECTIONS_APART: u32 = 8;

/// From this one on, QEMU may look for zero pages in multifd's threads, and take them there (`zero-page-detection`).
const ZERO_PAGES_IN_PARALLEL: u32 = 9;

/// A machine without CPUs that can be asked everything, under the accelerator that is given behind it.
/// `-incoming defer` is for [`rdma`].
const PROBE_ARGUMENTS: &str = "-nodefaults -no-user-config -S -display none -machine none -incoming defer \
    -chardev socket,id=start,fd=0 -mon chardev=start,mode=control";

/// Why nothing is known about this host's QEMU.
#[derive(Debug, thiserror::Error)]
pub enum ProbeError {
    /// QEMU does not start.
    #[error(transparent)]
    Launch(#[from] LaunchError),
    /// QEMU does not answer as it should.
    #[error("{binary} does not answer as QEMU does: {source}")]
    Qmp {
        /// The program that was asked.
        binary: PathBuf,
        /// What went wrong.
        source: QmpError,
    },
    /// QEMU lacks what a migration needs.
    #[error(
        "{binary} is QEMU {version}, which is too old: {}.{} or newer is needed (Debian 12 has it)",
        OLDEST.0, OLDEST.1
    )]
    TooOld {
        /// The program that was asked.
        binary: PathBuf,
        /// Its version.
        version: Version,
    },
}

/// Asks QEMU, by running it once without a machine. `scratch_directory` must exist and be writable; it is left as it was.
pub async fn probe(
    privileges: &Privileges,
    launcher: &Launcher,
    scratch_directory: &Path,
    deadline: Duration,
) -> Result<HypervisorFacts, ProbeError> {
    let scratch = tempfile::tempdir_in(scratch_directory)
        .map_err(|source| io_error("create a directory in", scratch_directory, source))?;
    let paths = RuntimePaths::of(VmDirectory::at(scratch.path().to_owned()).map_err(LaunchError::from)?);
    let lacks_kvm = host_lacks_kvm();
    // A QEMU that is built without KVM takes the second.
    let accelerators = if lacks_kvm.is_none() { "-accel kvm -accel tcg" } else { "-accel tcg" };
    let arguments = [PROBE_ARGUMENTS, accelerators].into_iter().flat_map(str::split_ascii_whitespace);
    let arguments: Vec<_> = arguments.map(Into::into).collect();
    // Its drop kills this QEMU, which has no guest to lose.
    let binary = &launcher.binary;
    let stamp = BinaryStamp::of(binary);
    let qemu = launch(privileges, launcher, &arguments, BTreeMap::new(), &paths, deadline).await?;
    let facts = ask(binary, &qemu.qmp, lacks_kvm, deadline).await?;
    Ok(HypervisorFacts { stamp, ..facts })
}

async fn ask(
    binary: &Path,
    qmp: &QmpClient,
    lacks_kvm: Option<String>,
    deadline: Duration,
) -> Result<HypervisorFacts, ProbeError> {
    let version = qmp.version();
    if (version.major, version.minor) < OLDEST {
        return Err(ProbeError::TooOld { binary: binary.to_owned(), version });
    }
    let failed = |source| ProbeError::Qmp { binary: binary.to_owned(), source };
    let kvm = kvm(qmp, deadline).await.map_err(failed)?;
    let hardware = if kvm.enabled { Hardware::Kvm } else { Hardware::Tcg };
    Ok(HypervisorFacts {
        name: "QEMU".into(),
        capabilities: capabilities(version),
        binary: binary.to_owned(),
        version,
        machines: machines(qmp, deadline).await.map_err(failed)?,
        rdma: rdma(qmp, deadline).await.map_err(failed)?,
        kvm_missing: match (kvm.present, lacks_kvm) {
            (false, _) => Some("this QEMU is built without it".into()),
            (true, None) if !kvm.enabled => Some("QEMU's user may not use /dev/kvm".into()),
            (true, lacks_kvm) => lacks_kvm,
        },
        cpu_models: cpu_models::ask(qmp, hardware, deadline).await.map_err(failed)?,
        stamp: None,
    })
}

/// What a QEMU of this version can do in a migration.
pub fn capabilities(version: Version) -> Capabilities {
    Capabilities {
        tells_connections_apart: version.major >= TELLS_CONNECTIONS_APART,
        zero_pages_in_parallel: version.major >= ZERO_PAGES_IN_PARALLEL,
        // QEMU 10.0 refuses it together with multifd; 7.2 does not say what comes of it.
        post_copy: Some(PostCopy { in_parallel: false, encrypts: true }),
        ..Capabilities::ALL
    }
}

async fn machines(qmp: &QmpClient, deadline: Duration) -> Result<Vec<String>, QmpError> {
    #[derive(Deserialize)]
    struct Machine {
        name: String,
    }
    let machines: Vec<Machine> = qmp.execute("query-machines", Value::Null, deadline).await?;
    let mut names: Vec<String> = machines.into_iter().map(|machine| machine.name).collect();
    names.sort();
    Ok(names)
}

/// No query tells, but without RDMA QEMU does not know the protocol, and with it the attempt fails
/// for another reason where there is no device. Seen with 7.2 and 10.0.
async fn rdma(qmp: &QmpClient, deadline: Duration) -> Result<bool, QmpError> {
    let arguments = json!({ "uri": "rdma:127.0.0.1:1" });
    match qmp.execute::<Value>("migrate-incoming", arguments, deadline).await {
        Ok(_) => Ok(true),
        Err(QmpError::Command { desc, .. }) => Ok(!desc.contains("unknown migration protocol")),
        Err(error) => Err(error),
    }
}

#[derive(Deserialize)]
struct Kvm {
    enabled: bool,
    present: bool,
}

async fn kvm(qmp: &QmpClient, deadline: Duration) -> Result<Kvm, QmpError> {
    qmp.execute("query-kvm", Value::Null, deadline).await
}

/// `/dev/kvm` alone does not tell: nested in some hypervisors it is there, but ordinary kernels do
/// not boot under it. Where the CPU shows its virtualisation, they do.
pub fn host_lacks_kvm() -> Option<String> {
    let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    if !has_virtualisation(&cpuinfo) {
        return Some("the CPU shows neither vmx nor svm in /proc/cpuinfo".into());
    }
    let opened = OpenOptions::new().read(true).write(true).open("/dev/kvm");
    opened.err().map(|error: io::Error| format!("/dev/kvm cannot be opened: {error}"))
}

fn has_virtualisation(cpuinfo: &str) -> bool {
    let mut flags = cpuinfo.lines().filter(|line| line.starts_with("flags"));
    flags.any(|line| line.split_ascii_whitespace().any(|flag| flag == "vmx" || flag == "svm"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_older_qemu_tells_no_connections_apart_and_has_zero_pages_in_the_main_one() {
        for (major, tells, zero) in [(7, false, false), (8, true, false), (9, true, true), (10, true, true)] {
            let can = capabilities(Version { major, minor: 2, micro: 0 });
            assert_eq!((can.tells_connections_apart, can.zero_pages_in_parallel), (tells, zero), "{major}");
        }
    }

    #[test]
    fn virtualisation_is_a_whole_flag() {
        assert!(has_virtualisation("model name : x\nflags\t\t: fpu vmx sse\n"));
        assert!(has_virtualisation("flags : svm\n"));
        assert!(!has_virtualisation("vmx flags\t: vmx flags svm_lock\n"));
        assert!(!has_virtualisation(""));
    }
}
