//! The life of one QEMU.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use drainpipe_hypervisor::spec::{Disk, DiskFormat};
use drainpipe_hypervisor::{Exit, Role, RunState, SharedPath, VmDirectory, VmSpec};
use drainpipe_hypervisor_qemu::qmp::QmpError;
use drainpipe_hypervisor_qemu::{
    AttachError, EndError, LaunchError, Privileges, ProbeError, StartError, Vmm, probe,
};
use rustix::process::{Pid, Signal, getpriority_process, kill_process, setpriority_process};
use tokio::time::timeout;

use crate::host::{DEADLINE, Host, launcher, process_of, qemus, small_vm};

#[tokio::test]
async fn starts_is_found_again_and_ends_without_remains() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let spec = small_vm("life");
        let before = Instant::now();
        let vmm = host.start(&spec, Role::Fresh).await;
        eprintln!("QEMU {}: started in {} ms", facts.version, before.elapsed().as_millis());
        assert_eq!(vmm.run_state(DEADLINE).await.expect("a state"), RunState::Running);
        assert_eq!(vmm.version(), facts.version);
        let pid = vmm.pid();
        drop(vmm);

        let vmm = host.attach(&spec).await.expect("QEMU outlives its agent");
        assert_eq!(vmm.pid(), pid);
        assert_eq!(vmm.spec().spec().name, spec.name);
        assert!(vmm.alive() && vmm.cpu_seconds().expect("alive") > 0.0);
        vmm.destroy(DEADLINE).await.expect("ends");
        vmm.destroy(DEADLINE).await.expect("once more is no error");
        assert!(!vmm.alive());
        assert!(vmm.cpu_seconds().is_err());
        assert_eq!(VmDirectory::list(host.runtime_directory()).expect("readable"), []);
    }
}

#[tokio::test]
async fn the_older_machine_type_starts_too() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let disk = host.runtime_directory().join("disk");
        std::fs::write(&disk, vec![0; 1 << 20]).expect("writable");
        let disk = Disk { path: disk, format: DiskFormat::Raw, read_only: true };
        let machine = "pc-i440fx-7.2".parse().expect("a machine type");
        let spec = VmSpec { machine, disks: vec![disk.clone(), disk], ..small_vm("i440fx") };
        let vmm = host.start(&spec, Role::Fresh).await;
        assert_eq!(vmm.run_state(DEADLINE).await.expect("a state"), RunState::Running);
        assert_eq!(vmm.read_console(DEADLINE).await.expect("readable"), "");
    }
}

#[tokio::test]
async fn a_disk_may_be_a_block_device() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let image = host.runtime_directory().join("image");
        std::fs::write(&image, vec![0; 1 << 20]).expect("writable");
        let losetup = |arguments: &[&OsStr]| {
            let output = Command::new("losetup").args(arguments).output().expect("losetup, of util-linux");
            (output.status.success(), String::from_utf8_lossy(&output.stdout).trim().to_owned())
        };
        let (is_there, device) = losetup(&["--find".as_ref(), "--show".as_ref(), image.as_ref()]);
        if !is_there {
            eprintln!("SKIPPED: no loop device is free, so no VM was started on a block device");
            return;
        }
        let disk = Disk { path: device.clone().into(), format: DiskFormat::Raw, read_only: false };
        let spec = VmSpec { disks: vec![disk], ..small_vm("device") };
        let started = start_as(&host, &spec).await;
        losetup(&["--detach".as_ref(), device.as_ref()]);
        let vmm = started.expect("starts");
        assert_eq!(vmm.run_state(DEADLINE).await.expect("a state"), RunState::Running);
        vmm.destroy(DEADLINE).await.expect("ends");
    }
}

#[tokio::test]
async fn a_killed_qemu_is_noticed_and_its_remains_cleared() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let spec = small_vm("killed");
        let vmm = host.start(&spec, Role::Fresh).await;
        kill_process(pid_of(&vmm), Signal::KILL).expect("it lives");
        assert_eq!(vmm.wait_exit(DEADLINE).await, Some(Exit::Signal(9)));
        assert!(!vmm.alive());
        assert!(vmm.run_state(DEADLINE).await.is_err());

        let attached = host.attach(&spec).await;
        assert!(matches!(attached, Err(AttachError::NotRunning { .. })), "{attached:?}");
        let again = start(&host, "killed").await.expect_err("remains are in the way");
        assert!(matches!(again, StartError::Launch(LaunchError::Exists { .. })), "{again}");
        Vmm::clear(&host.paths(&spec)).expect("cleared");
        host.start(&spec, Role::Fresh).await.destroy(DEADLINE).await.expect("ends");
    }
}

#[tokio::test]
async fn a_qemu_that_may_run_its_guest_is_never_cleared_away() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let spec = small_vm("alive");
        let paths = host.paths(&spec);
        let vmm = host.start(&spec, Role::Fresh).await;
        assert!(matches!(Vmm::clear(&paths), Err(EndError::Lives { .. })));
        drop(vmm);
        // Its control socket serves one client at a time.
        let ended = Vmm::end_given_up(&Privileges::own(), &paths, DEADLINE).await;
        assert!(matches!(ended, Err(EndError::Lives { .. })), "{ended:?}");
        let vmm = Vmm::attach(&Privileges::own(), paths, DEADLINE).await.expect("it is as it was");
        assert_eq!(vmm.run_state(DEADLINE).await.expect("a state"), RunState::Running);
        vmm.destroy(DEADLINE).await.expect("ends");
    }
}

#[tokio::test]
async fn a_qemu_that_was_given_up_is_ended_even_if_it_is_mute() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        for is_mute in [false, true] {
            let spec = small_vm("given-up");
            let vmm = host.start(&spec, Role::Incoming).await;
            if is_mute {
                kill_process(pid_of(&vmm), Signal::STOP).expect("it lives");
            }
            drop(vmm);
            Vmm::end_given_up(&Privileges::own(), &host.paths(&spec), Duration::from_secs(2))
                .await
                .expect("ended");
            assert_eq!(VmDirectory::list(host.runtime_directory()).expect("readable"), []);
        }
    }
}

#[tokio::test]
async fn a_hanging_qemu_is_destroyed() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let vmm = host.start(&small_vm("hangs"), Role::Fresh).await;
        kill_process(pid_of(&vmm), Signal::STOP).expect("it lives");
        vmm.destroy(Duration::from_millis(200)).await.expect("killed");
        assert_eq!(vmm.wait_exit(DEADLINE).await, Some(Exit::Signal(9)));
    }
}

/// Longer than the test may take; asking the QEMU would wait for a quarter of it.
const FAR_AWAY: Duration = Duration::from_hours(1);

#[tokio::test]
async fn a_qemu_that_never_ran_its_guest_is_ended_without_being_asked() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        for is_mute in [false, true] {
            let vmm = host.start(&small_vm("unrun"), Role::Incoming).await;
            if is_mute {
                kill_process(pid_of(&vmm), Signal::STOP).expect("it lives");
            }
            timeout(DEADLINE, vmm.destroy_unrun(FAR_AWAY)).await.expect("at once").expect("killed");
            assert_eq!(vmm.exit(), Some(Exit::Signal(9)));
            assert!(vmm.is_ending());
            assert_eq!(VmDirectory::list(host.runtime_directory()).expect("readable"), []);
        }
    }
}

#[tokio::test]
async fn a_hanging_qemu_is_never_taken_for_gone() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let spec = small_vm("mute");
        drop(host.start(&spec, Role::Fresh).await);
        let qemu = pid_of(&host.attach(&spec).await.expect("it answers"));
        kill_process(qemu, Signal::STOP).expect("it lives");
        // Clients that gave up stay in the queue, until nobody else fits in.
        for _ in 0..4 {
            let attached =
                Vmm::attach(&Privileges::own(), host.paths(&spec), Duration::from_millis(200)).await;
            assert!(matches!(attached, Err(AttachError::Qmp(QmpError::Deadline { .. }))), "{attached:?}");
        }
        kill_process(qemu, Signal::CONT).expect("it lives");
        let vmm = host.attach(&spec).await.expect("it answers");
        vmm.destroy(DEADLINE).await.expect("ends");
    }
}

#[tokio::test]
async fn goes_first_until_whoever_has_hold_of_it_ends_that() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let spec = small_vm("first");
        let vmm = host.start(&spec, Role::Fresh).await;
        let own = getpriority_process(None).expect("known");
        let nices = || {
            let threads = std::fs::read_dir(format!("/proc/{}/task", vmm.pid())).expect("it lives");
            let ids =
                threads.map(|entry| entry.expect("readable").file_name().into_string().expect("a number"));
            let nice = |id: String| getpriority_process(Pid::from_raw(id.parse().expect("a number")));
            ids.filter_map(|id| nice(id).ok()).collect::<BTreeSet<i32>>()
        };
        if let Err(error) = vmm.process().go_first() {
            assert_eq!(error.kind(), std::io::ErrorKind::PermissionDenied, "{error}");
            eprintln!("SKIPPED: nobody goes first without CAP_SYS_NICE");
            continue;
        }
        assert_eq!(nices(), BTreeSet::from([-10]));
        let attached = host.attach(&spec).await.expect("QEMU outlives its agent");
        attached.process().take_turns().expect("allowed");
        assert_eq!(nices(), BTreeSet::from([own]));

        setpriority_process(Some(pid_of(&vmm)), own + 5).expect("allowed");
        vmm.process().go_first().expect("allowed");
        assert_eq!(nices(), BTreeSet::from([-10, own + 5]), "what others have set is left alone");
        vmm.process().take_turns().expect("allowed");
        assert_eq!(nices(), BTreeSet::from([own, own + 5]));
    }
}

#[tokio::test]
async fn a_second_start_leaves_the_first_alone() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let vmm = host.start(&small_vm("twice"), Role::Fresh).await;
        let error = start(&host, "twice").await.expect_err("it runs already");
        assert!(matches!(error, StartError::Launch(LaunchError::Exists { .. })), "{error}");
        assert_eq!(vmm.run_state(DEADLINE).await.expect("a state"), RunState::Running);
    }
}

#[tokio::test]
async fn a_start_that_fails_says_why_and_leaves_nothing() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let mut spec = small_vm("fails");
        spec.kernel = Some("/nonexistent/kernel".into());
        let resolved = spec.resolve(&facts).expect("this host can");
        let error = Vmm::start(
            &Privileges::own(),
            &launcher(&facts.binary),
            resolved,
            host.paths(&spec),
            b"{}",
            Role::Fresh,
            DEADLINE,
        )
        .await
        .expect_err("no kernel");
        assert!(error.to_string().contains("/nonexistent/kernel"), "{error}");
        assert_eq!(VmDirectory::list(host.runtime_directory()).expect("readable"), []);
    }
}

#[tokio::test]
async fn a_start_that_is_given_up_leaves_nothing() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let spec = small_vm("given-up");
        let resolved = spec.resolve(&facts).expect("this host can");
        let brief = Duration::from_millis(5);
        let error = Vmm::start(
            &Privileges::own(),
            &launcher(&facts.binary),
            resolved,
            host.paths(&spec),
            b"{}",
            Role::Fresh,
            brief,
        )
        .await;
        assert!(error.is_err(), "QEMU takes longer than 5 ms to start");
        assert_eq!(VmDirectory::list(host.runtime_directory()).expect("readable"), []);
    }
}

/// Agents did so before QEMU had a user of its own.
#[tokio::test]
async fn a_qemu_that_an_older_agent_started_is_taken_over() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let spec = small_vm("older");
        let paths = host.paths(&spec);
        let resolved = spec.resolve(&facts).expect("this host can");
        fs::create_dir_all(paths.directory()).expect("writable");
        fs::write(paths.spec_file(), serde_json::to_vec(&resolved).expect("JSON")).expect("writable");
        let socket = |path: PathBuf| format!("socket,id=qmp,path={},server=on,wait=off", path.display());
        let mut qemu = Command::new(&facts.binary)
            .args(["-nodefaults", "-S", "-display", "none", "-machine", "none", "-mon", "qmp,mode=control"])
            .args(["-chardev", &socket(paths.qmp_socket()), "-pidfile"])
            .arg(paths.pid_file())
            .spawn()
            .expect("QEMU");
        let end = Instant::now() + DEADLINE;
        while !paths.pid_file().exists() || !paths.qmp_socket().exists() {
            assert!(Instant::now() < end, "QEMU does not start");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
        let vmm = Vmm::attach(&Privileges::own(), paths.clone(), DEADLINE).await.expect("it is there");
        assert_eq!(vmm.pid(), qemu.id());
        // The agent finds no socket from where it started.
        let path = paths.directory().join("relay.sock");
        for relay in [paths.incoming_relay(), paths.outgoing_relay()] {
            assert_eq!(relay, SharedPath { path: path.clone(), of_hypervisor: path.clone() });
        }
        vmm.destroy(DEADLINE).await.expect("ends");
        let _reaped = qemu.wait();
    }
}

#[tokio::test]
async fn a_guest_without_an_operating_system_ignores_its_power_button() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let vmm = host.start(&small_vm("button"), Role::Fresh).await;
        let stopped = vmm.stop_guest(Duration::from_millis(300)).await;
        assert!(matches!(stopped, Err(EndError::GuestIgnores(_))), "{stopped:?}");
        assert_eq!(vmm.run_state(DEADLINE).await.expect("a state"), RunState::Running);
    }
}

#[tokio::test]
async fn probing_says_what_a_host_has() {
    for facts in qemus().await {
        eprintln!("{facts:?}");
        assert!(facts.machines.iter().any(|machine| machine == "pc-q35-7.2"));
        assert!(!facts.machines.iter().any(|machine| machine == "q35"), "an alias");
        let features = |model| facts.cpu_models.features_of(model);
        assert!(features("qemu64").known && !features("Z80").known);
        let max = features("max");
        assert!(max.named.contains("sse2") && !max.lacking.contains("sse2"), "{max:?}");
        assert!(
            max.named.contains("vmx") && max.lacking.contains("vmx-ept"),
            "no guest of TCG gets it: {max:?}"
        );
        // Without it, QEMU gives a guest no nested pages either, and does not say so about the model.
        let without_svm = features("max,-svm");
        assert!(!max.lacking.contains("npt") && without_svm.lacking.contains("npt"), "{without_svm:?}");
        assert!(!without_svm.lacking.contains("svm"), "it is switched off: {without_svm:?}");
        assert_eq!(features("max,-sse3"), features("max,pni=off"));
        for no_feature in ["l3-cache", "legacy-cache", "pmu", "lmce", "migratable", "hotplugged"] {
            assert!(!max.named.contains(no_feature), "{no_feature}");
        }
    }
    let scratch = tempfile::tempdir().expect("a directory");
    let probe = async |binary: &str| {
        probe(&Privileges::own(), &launcher(Path::new(binary)), scratch.path(), DEADLINE).await
    };
    let missing = probe("/nonexistent/qemu").await.expect_err("missing");
    assert!(matches!(missing, ProbeError::Launch(LaunchError::Spawn { .. })), "{missing}");
    let not_a_program = probe("/etc/hostname").await.expect_err("not executable");
    assert!(matches!(not_a_program, ProbeError::Launch(LaunchError::Spawn { .. })), "{not_a_program}");
    let not_qemu = probe("/bin/false").await.expect_err("not QEMU");
    assert!(matches!(not_qemu, ProbeError::Launch(LaunchError::Exited { .. })), "{not_qemu}");
    assert_eq!(std::fs::read_dir(scratch.path()).expect("readable").count(), 0);
}

async fn start(host: &Host, name: &str) -> Result<Vmm, StartError> {
    start_as(host, &small_vm(name)).await
}

async fn start_as(host: &Host, spec: &VmSpec) -> Result<Vmm, StartError> {
    let resolved = spec.resolve(&host.facts).expect("this host can");
    Vmm::start(
        &Privileges::own(),
        &launcher(&host.facts.binary),
        resolved,
        host.paths(spec),
        b"{}",
        Role::Fresh,
        DEADLINE,
    )
    .await
}

fn pid_of(vmm: &Vmm) -> Pid {
    process_of(vmm.pid()).expect("a process id")
}
