//! Migrations between two QEMUs on this machine.

use drainpipe_hypervisor::Connections;
use std::fs;
use std::net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use drainpipe_hypervisor::spec::{Disk, DiskFormat};
use drainpipe_hypervisor::{
    HypervisorFacts, MigrationStatus, Parallel, Role, RunState, SourceSettings, TransferStatus, Transport,
    VmSpec, Zstd,
};
use drainpipe_hypervisor_qemu::Vmm;
use drainpipe_hypervisor_qemu::migration::{self, MigrationError};
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use crate::host::{DEADLINE, Host, qemus, small_vm};

pub(crate) const SETTINGS: SourceSettings =
    SourceSettings { downtime_limit_ms: 300, bandwidth_mbps: None, zero_pages: None };
pub(crate) const CONTENT_BYTES: usize = 32 << 20;

pub(crate) const PLAIN: Transport = Transport::Single;
const MULTIFD: Transport = Transport::Parallel(Parallel { channels: 4, compression: None });
const ZSTD: Transport = Transport::Parallel(Parallel { channels: 4, compression: Some(Zstd { level: 1 }) });

/// A guest on its source host and its incoming VM on the target host.
pub(crate) struct Pair {
    pub(crate) source: Vmm,
    pub(crate) target: Vmm,
    pub(crate) target_host: Host,
    _source_host: Host,
    _content: tempfile::TempDir,
}

impl Pair {
    pub(crate) async fn new(source: &HypervisorFacts, target: &HypervisorFacts, name: &str) -> Self {
        let pair = Self::booting(source, target, name, |_| {}).await;
        wait_for_content(&pair.source).await;
        pair
    }

    /// A pair whose guest is as `change` makes it, and does not run its kernel yet.
    pub(crate) async fn booting(
        source: &HypervisorFacts,
        target: &HypervisorFacts,
        name: &str,
        change: impl FnOnce(&VmSpec),
    ) -> Self {
        let (source_host, target_host) = (Host::new(source), Host::new(target));
        let content = tempfile::tempdir().expect("a directory");
        let spec = vm_with_content(name, content.path());
        change(&spec);
        let source = source_host.start(&spec, Role::Fresh).await;
        let target = target_host.start(&spec, Role::Incoming).await;
        Self { source, target, target_host, _source_host: source_host, _content: content }
    }

    pub(crate) async fn transfer(&self, transport: Transport) {
        let address = listen(&self.target, transport, Ipv4Addr::LOCALHOST.into()).await;
        migration::start(&self.source, transport, address, SETTINGS, DEADLINE).await.expect("begun");
    }

    /// Continues from pre-switchover until the target runs.
    pub(crate) async fn commit(&self) -> TransferStatus {
        migration::switch_over(&self.source, DEADLINE).await.expect("goes on");
        let sent = wait_for(&self.source, MigrationStatus::Completed).await;
        wait_for(&self.target, MigrationStatus::Completed).await;
        assert_eq!(state(&self.target).await, RunState::Paused, "the target waits for the commit");
        assert_eq!(state(&self.source).await, RunState::Postmigrate);
        migration::run(&self.target, DEADLINE).await.expect("runs");
        assert_eq!(state(&self.target).await, RunState::Running);
        sent
    }
}

/// A boot sector of Linux' boot protocol whose kernel only halts, and an initramfs that does not
/// compress: the firmware loads both, so guest memory has content that must travel. Source and
/// target share its disk, which QEMU locks while the guest runs.
pub(crate) fn vm_with_content(name: &str, directory: &Path) -> VmSpec {
    let mut kernel = vec![0_u8; 2048];
    kernel[0x1f1] = 1; // setup sectors
    kernel[0x1fe..0x202].copy_from_slice(&[0x55, 0xaa, 0xeb, 0x66]); // magic; jump to 0x268
    kernel[0x202..0x206].copy_from_slice(b"HdrS");
    kernel[0x206..0x208].copy_from_slice(&0x020c_u16.to_le_bytes()); // protocol version
    kernel[0x211] = 1; // loaded high
    kernel[0x22c..0x230].copy_from_slice(&0x7fff_ffff_u32.to_le_bytes()); // highest initramfs
    kernel[0x268..0x26d].copy_from_slice(&[0xfa, 0xf4, 0xeb, 0xfd, 0]); // cli; hlt; jmp hlt
    let mut seed = 1_u64;
    let noise: Vec<u8> = std::iter::repeat_with(|| {
        seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        seed.to_be_bytes()[0]
    })
    .take(CONTENT_BYTES)
    .collect();
    let write = |file: &str, bytes: &[u8]| {
        let path = directory.join(file);
        std::fs::write(&path, bytes).expect("writable");
        Some(path)
    };
    let disk = Disk {
        path: write("disk", &vec![0; 1 << 20]).expect("written"),
        format: DiskFormat::Raw,
        read_only: false,
    };
    VmSpec {
        kernel: write("kernel", &kernel),
        initramfs: write("initramfs", &noise),
        disks: vec![disk],
        // The older of two QEMUs needs this, and so both get it.
        memory_padding_kib: Some(8),
        ..small_vm(name)
    }
}

/// Waits until the kernel runs, which it does when everything is loaded. It says nothing, so QEMU's memory has to tell.
pub(crate) async fn wait_for_content(vmm: &Vmm) {
    let end = Instant::now() + DEADLINE;
    loop {
        let registers: String = vmm
            .qmp()
            .execute(
                "human-monitor-command",
                serde_json::json!({ "command-line": "info registers" }),
                DEADLINE,
            )
            .await
            .expect("registers");
        // Halted with interrupts off, in the segment where the setup code was loaded.
        if registers.contains("HLT=1") && registers.contains("CS =1020") {
            return;
        }
        assert!(Instant::now() < end, "the guest did not boot: {registers}");
        sleep(Duration::from_millis(20)).await;
    }
}

/// Makes a target listen at a port that was free a moment ago.
pub(crate) async fn listen(target: &Vmm, transport: Transport, ip: std::net::IpAddr) -> SocketAddr {
    for _ in 0..10 {
        let address = TcpListener::bind((ip, 0)).and_then(|socket| socket.local_addr()).expect("a free port");
        match migration::listen(target, transport, address, DEADLINE).await {
            Err(MigrationError::PortTaken(_)) => {}
            listening => {
                listening.expect("listens");
                return address;
            }
        }
    }
    panic!("ten free ports were taken")
}

pub(crate) async fn wait_for(vmm: &Vmm, wanted: MigrationStatus) -> TransferStatus {
    let end = Instant::now() + DEADLINE;
    loop {
        let now = migration::status(vmm, DEADLINE).await.expect("a status");
        if now.status == wanted {
            return now;
        }
        assert!(!now.status.is_final() || now.status == MigrationStatus::None, "{now:?}");
        assert!(Instant::now() < end, "{now:?}");
        sleep(Duration::from_millis(2)).await;
    }
}

pub(crate) async fn state(vmm: &Vmm) -> RunState {
    vmm.run_state(DEADLINE).await.expect("a state")
}

pub(crate) fn signal(vmm: &Vmm, signal: Signal) {
    let pid = i32::try_from(vmm.pid()).ok().and_then(Pid::from_raw).expect("a process id");
    kill_process(pid, signal).expect("it lives");
}

#[tokio::test]
async fn every_transport_carries_a_guest_and_counts_its_bytes() {
    let qemus = qemus().await;
    // Also between versions, up and down: the machine type is the same.
    for (source, target) in qemus.iter().flat_map(|a| qemus.iter().map(move |b| (a, b))) {
        let between_versions = source.version != target.version;
        let transports = if between_versions { &[MULTIFD][..] } else { &[PLAIN, MULTIFD, ZSTD] };
        for &transport in transports {
            let pair = Pair::new(source, target, "carried").await;
            pair.transfer(transport).await;
            wait_for(&pair.source, MigrationStatus::PreSwitchover).await;
            assert_eq!(state(&pair.source).await, RunState::FinishMigrate);
            let sent = pair.commit().await;
            let ram = sent.ram.expect("counters");
            eprintln!("{} → {}, {transport:?}: {sent:?}", source.version, target.version);
            assert!(ram.transferred_bytes >= CONTENT_BYTES as u64 / 2, "{ram:?}");
            assert!(ram.transferred_bytes < 2 * CONTENT_BYTES as u64, "{ram:?}");
            assert_eq!(transport != PLAIN, ram.parallel_bytes > CONTENT_BYTES as u64 / 2, "{ram:?}");
            assert!(sent.downtime_ms.is_some());
        }
    }
}

#[tokio::test]
async fn ipv6_carries_a_guest() {
    for facts in qemus().await {
        let pair = Pair::new(&facts, &facts, "ipv6").await;
        let address = listen(&pair.target, MULTIFD, Ipv6Addr::LOCALHOST.into()).await;
        assert_eq!(
            pair.target.process().limit_received(address, 512 << 10).expect("QEMU is ours"),
            1,
            "where it listens"
        );
        migration::start(&pair.source, MULTIFD, address, SETTINGS, DEADLINE).await.expect("begun");
        wait_for(&pair.source, MigrationStatus::PreSwitchover).await;
        let connections = pair.source.process().limit_unsent(address, 512 << 10).expect("QEMU is ours");
        assert_eq!(connections, 5, "four channels and the main connection");
        assert_eq!(receive_buffers_of(address), ["rb1048576"; 5], "the kernel doubles it");
        pair.commit().await;
    }
}

/// The receive buffers of the connections accepted there, as ss(8) shows them.
fn receive_buffers_of(address: SocketAddr) -> Vec<String> {
    let mut ss = Command::new("ss");
    let said = ss.args(["--tcp", "--memory", "--numeric", "--no-header", "state", "established", "src"]);
    let said = said.arg(address.to_string()).output().expect("iproute2 is there").stdout;
    let said = String::from_utf8(said).expect("text");
    said.split(['(', ',']).filter(|word| word.starts_with("rb")).map(str::to_owned).collect()
}

/// A directory that QEMUs of any user can use.
fn open_directory() -> TempDir {
    let directory = tempfile::tempdir().expect("a directory");
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).expect("it is ours");
    directory
}

#[tokio::test]
async fn a_unix_socket_carries_a_guest() {
    for facts in qemus().await {
        let pair = Pair::new(&facts, &facts, "unix").await;
        let directory = open_directory();
        let path = directory.path().join("unix");
        migration::listen(&pair.target, MULTIFD, path.clone(), DEADLINE).await.expect("listens");
        migration::start(&pair.source, MULTIFD, path, SETTINGS, DEADLINE).await.expect("begun");
        wait_for(&pair.source, MigrationStatus::PreSwitchover).await;
        let ram = pair.commit().await.ram.expect("counters");
        assert!(ram.parallel_bytes > CONTENT_BYTES as u64 / 2, "{ram:?}");
    }
}

#[tokio::test]
async fn a_taken_port_is_told_and_another_one_serves() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let target = host.start(&small_vm("port"), Role::Incoming).await;
        let taken = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port");
        let address = taken.local_addr().expect("an address");
        let error = migration::listen(&target, MULTIFD, address, DEADLINE).await;
        assert!(matches!(error, Err(MigrationError::PortTaken(port)) if port == address), "{error:?}");
        let foreign: SocketAddr = "192.0.2.1:49152".parse().expect("an address");
        let error = migration::listen(&target, MULTIFD, foreign, DEADLINE).await;
        assert!(matches!(error, Err(MigrationError::CannotListen { .. })), "{error:?}");
        listen(&target, MULTIFD, Ipv4Addr::LOCALHOST.into()).await;
    }
}

#[tokio::test]
async fn a_guest_does_not_run_before_its_memory_is_there() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let target = host.start(&small_vm("early"), Role::Incoming).await;
        let error = migration::run(&target, DEADLINE).await;
        assert!(matches!(error, Err(MigrationError::MemoryIncomplete(RunState::Inmigrate))), "{error:?}");
    }
}

#[tokio::test]
async fn after_a_cancelled_migration_the_guest_runs_on_and_the_next_one_is_not_affected() {
    for facts in qemus().await {
        let mut pair = Pair::new(&facts, &facts, "cancelled").await;
        pair.transfer(ZSTD).await;
        wait_for(&pair.source, MigrationStatus::PreSwitchover).await;
        let status = migration::cancel(&pair.source, DEADLINE).await.expect("ends");
        assert_eq!(status, MigrationStatus::Cancelled);
        migration::run(&pair.source, DEADLINE).await.expect("runs");
        assert_eq!(state(&pair.source).await, RunState::Running);

        let spec = pair.target.spec().spec().clone();
        pair.target.destroy(DEADLINE).await.expect("ends");
        pair.target = pair.target_host.start(&spec, Role::Incoming).await;
        pair.transfer(PLAIN).await;
        wait_for(&pair.source, MigrationStatus::PreSwitchover).await;
        let sent = pair.commit().await;
        assert_eq!(sent.ram.expect("counters").parallel_bytes, 0, "multifd stayed switched on");
    }
}

#[tokio::test]
async fn a_migration_to_a_silent_target_can_be_cancelled() {
    for facts in qemus().await {
        for transport in [PLAIN, MULTIFD] {
            let pair = Pair::new(&facts, &facts, "silent").await;
            let address = listen(&pair.target, transport, Ipv4Addr::LOCALHOST.into()).await;
            signal(&pair.target, Signal::STOP);
            migration::start(&pair.source, transport, address, SETTINGS, DEADLINE).await.expect("begun");
            wait_for(&pair.source, MigrationStatus::Active).await;
            sleep(Duration::from_millis(200)).await;
            let before = Instant::now();
            let status = migration::cancel(&pair.source, DEADLINE).await.expect("ends");
            eprintln!("{} {transport:?}: cancelled in {:?}", facts.version, before.elapsed());
            assert_eq!(status, MigrationStatus::Cancelled);
            migration::run(&pair.source, DEADLINE).await.expect("runs");
        }
    }
}

#[tokio::test]
async fn a_target_killed_in_flight_leaves_the_guest_running() {
    for facts in qemus().await {
        for transport in [PLAIN, MULTIFD] {
            let pair = Pair::new(&facts, &facts, "in-flight").await;
            let address = listen(&pair.target, transport, Ipv4Addr::LOCALHOST.into()).await;
            signal(&pair.target, Signal::STOP);
            migration::start(&pair.source, transport, address, SETTINGS, DEADLINE).await.expect("begun");
            wait_for(&pair.source, MigrationStatus::Active).await;
            if transport == MULTIFD {
                ignore_resets(&pair.source, address, 5).await;
                signal(&pair.target, Signal::KILL);
                sleep(Duration::from_millis(200)).await;
                let silent = migration::status(&pair.source, DEADLINE).await.expect("a status");
                assert_eq!(silent.error_desc, None, "the reset is not heard");
                let before = Instant::now();
                let status = migration::cancel(&pair.source, DEADLINE).await.expect("ends");
                eprintln!("{} {transport:?}: {status} in {:?}", facts.version, before.elapsed());
            } else {
                signal(&pair.target, Signal::KILL);
                let failed = wait_for(&pair.source, MigrationStatus::Failed).await;
                eprintln!("{} {transport:?}: {:?}", facts.version, failed.error_desc);
            }
            // Nobody listens any more; it only matters that QEMU accepts it.
            migration::start(&pair.source, transport, address, SETTINGS, DEADLINE)
                .await
                .expect("begun anew at once");
            wait_for(&pair.source, MigrationStatus::Failed).await;
            migration::run(&pair.source, DEADLINE).await.expect("runs");
            assert_eq!(state(&pair.source).await, RunState::Running);
        }
    }
}

/// Makes the source ignore resets once there are this many `connections`.
async fn ignore_resets(source: &Vmm, peer: SocketAddr, connections: usize) {
    let end = Instant::now() + DEADLINE;
    while source.process().ignore_resets(peer).expect("sockets") < connections {
        assert!(Instant::now() < end, "not all of {connections} connections");
        sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test]
async fn a_target_killed_before_switchover_leaves_the_guest_running() {
    for facts in qemus().await {
        let pair = Pair::new(&facts, &facts, "pre-switchover").await;
        pair.transfer(MULTIFD).await;
        wait_for(&pair.source, MigrationStatus::PreSwitchover).await;
        signal(&pair.target, Signal::KILL);
        migration::cancel(&pair.source, DEADLINE).await.expect("ends");
        migration::run(&pair.source, DEADLINE).await.expect("runs");
        assert_eq!(state(&pair.source).await, RunState::Running);
    }
}

#[tokio::test]
async fn a_guest_whose_target_is_lost_after_the_switchover_runs_again_at_the_source() {
    for facts in qemus().await {
        let pair = Pair::new(&facts, &facts, "postmigrate").await;
        pair.transfer(PLAIN).await;
        wait_for(&pair.source, MigrationStatus::PreSwitchover).await;
        migration::switch_over(&pair.source, DEADLINE).await.expect("goes on");
        wait_for(&pair.source, MigrationStatus::Completed).await;
        signal(&pair.target, Signal::KILL);
        migration::run(&pair.source, DEADLINE).await.expect("runs");
        assert_eq!(state(&pair.source).await, RunState::Running);
    }
}

#[tokio::test]
async fn a_target_that_cannot_be_reached_fails_with_a_reason() {
    for facts in qemus().await {
        let host = Host::new(&facts);
        let source = host.start(&small_vm("unreached"), Role::Fresh).await;
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).expect("a port").local_addr();
        migration::start(&source, PLAIN, free.expect("an address"), SETTINGS, DEADLINE).await.expect("begun");
        let failed = wait_for(&source, MigrationStatus::Failed).await;
        let reason = failed.error_desc.expect("a reason");
        assert!(reason.contains("refused"), "{reason}");
        assert_eq!(state(&source).await, RunState::Running);
    }
}

/// QEMU's own status does not distinguish an empty QEMU from one that has the only copy of a guest.
#[tokio::test]
async fn a_target_of_a_guest_that_never_ran_is_not_taken_for_one_that_holds_nothing() {
    for facts in qemus().await {
        let (host, target_host) = (Host::new(&facts), Host::new(&facts));
        let spec = small_vm("prelaunch");
        let source = host.start(&spec, Role::Fresh).await;
        for command in ["stop", "system_reset"] {
            let done =
                source.qmp().execute::<serde::de::IgnoredAny>(command, serde_json::Value::Null, DEADLINE);
            done.await.expect("obeyed");
        }
        let end = Instant::now() + DEADLINE;
        while state(&source).await != RunState::Prelaunch {
            assert!(Instant::now() < end, "it is reset");
            sleep(Duration::from_millis(2)).await;
        }
        let target = target_host.start(&spec, Role::Incoming).await;
        assert_eq!(state(&target).await, RunState::Inmigrate);
        let address = listen(&target, PLAIN, Ipv4Addr::LOCALHOST.into()).await;
        migration::start(&source, PLAIN, address, SETTINGS, DEADLINE).await.expect("begun");
        wait_for(&source, MigrationStatus::PreSwitchover).await;
        migration::switch_over(&source, DEADLINE).await.expect("goes on");
        wait_for(&target, MigrationStatus::Completed).await;
        assert_eq!(state(&target).await, RunState::Prelaunch, "as its source was");
        assert_eq!(target.role().expect("it lives"), Role::Incoming);
        assert_eq!(source.role().expect("it lives"), Role::Fresh);
        drop(target);
        let target = target_host.attach(&spec).await.expect("QEMU outlives its agent");
        assert_eq!(target.role().expect("it lives"), Role::Incoming);
    }
}
