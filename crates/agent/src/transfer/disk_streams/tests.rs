//! Which clients get to the disks of a VM that moves, at both ends, and which copies count as complete.

use std::net::Ipv4Addr;
use std::os::unix::net::UnixListener;

use drainpipe_engine::storage::{CopyReason, DiskImage};
use drainpipe_hypervisor::fake::{FakeHypervisor, FakeVm};
use tokio::net::TcpSocket;

use super::*;
use crate::test_host::{NOBODY, certificate_files, definition, make_certificates, started};

const TOKEN: Uuid = Uuid::from_u128(7);
const LOOPBACK: SocketAddr = SocketAddr::new(std::net::IpAddr::V4(Ipv4Addr::LOCALHOST), 0);

/// How much a splitter reads before it answers.
const GREETING_BYTES: usize = 35;

/// Longer than anything that a test waits for takes, unless it never comes.
const DEADLINE: Duration = Duration::from_secs(30);

fn copy(index: usize) -> DiskCopy {
    DiskCopy {
        disk: DiskName::at(index).unwrap(),
        from: "/source.raw".into(),
        to: "/target.raw".into(),
        image: DiskImage::Raw,
        size_bytes: 1 << 20,
        allocated_bytes: 1 << 20,
        why: CopyReason::NotSeen,
        is_flattened: false,
        from_device: None,
    }
}

/// The target's end of one disk, vda, and its address.
struct Target {
    address: SocketAddr,
    _receiver: DiskReceiver,
    _program: UnixListener,
    _directory: tempfile::TempDir,
}

impl Target {
    fn new(tls: Option<ServerConfig>) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let path = directory.path().join("program");
        let program = UnixListener::bind(&path).unwrap();
        let listener = StdTcpListener::bind(LOOPBACK).unwrap();
        let address = listener.local_addr().unwrap();
        let disks = [(copy(0), "disk0".to_owned())];
        let receiver = DiskReceiver::start(listener, &path, &disks, TOKEN, tls).unwrap();
        Self { address, _receiver: receiver, _program: program, _directory: directory }
    }

    /// A connector without encryption.
    fn connector(&self, token: Uuid) -> Connector {
        Connector { address: self.address, token, tls: None }
    }
}

/// Whether a server of this disk answers there, and does not hang up.
async fn is_let_in(connector: &Connector, disk: u8) -> bool {
    let asked = async {
        let mut stream = connector.connect(disk, None).await?;
        stream.write_all(&[0; GREETING_BYTES]).await?;
        stream.flush().await?;
        let mut answer = [0; 8];
        stream.read_exact(&mut answer).await.map(|_| answer)
    };
    let answer: io::Result<[u8; 8]> = timeout(DEADLINE, asked).await.expect("an answer, or an end");
    answer.is_ok_and(|answer| answer == *b"DRPSPLIT")
}

#[tokio::test]
async fn nobody_gets_to_a_targets_disks_without_the_token() {
    let target = Target::new(None);
    assert!(is_let_in(&target.connector(TOKEN), 0).await);
    assert!(!is_let_in(&target.connector(Uuid::from_u128(8)), 0).await);
    assert!(!is_let_in(&target.connector(TOKEN), 1).await, "this disk does not go along");
    assert!(is_let_in(&target.connector(TOKEN), 0).await, "after them");
}

#[tokio::test]
async fn an_encrypted_copy_is_taken_from_its_own_source_alone() {
    let directory = tempfile::tempdir().unwrap();
    make_certificates(directory.path());
    let identity = |name| {
        let [certificate, key, authority] = certificate_files(directory.path(), name);
        Identity::load(&certificate, &key, &authority).unwrap()
    };
    let target = Target::new(Some(identity("target").server_config_for("source")));
    let connector = |from, to| Connector::new(target.address, TOKEN, true, &identity(from), to).unwrap();
    assert!(is_let_in(&connector("source", "target"), 0).await);
    assert!(!is_let_in(&connector("other", "target"), 0).await, "another host of the fleet");
    assert!(!is_let_in(&connector("source", "other"), 0).await, "it is not the target that it should be");
    assert!(!is_let_in(&target.connector(TOKEN), 0).await, "in the clear");
}

/// The source's end of the stream of one disk, with what the target says about it. Nothing gets through.
async fn sender(begun: &[usize], overwritten: &[usize], client: Option<NamingClient>) -> DiskSender {
    let names = |disks: &[usize]| disks.iter().filter_map(|disk| DiskName::at(*disk)).collect();
    let (begun, overwritten) = (names(begun), names(overwritten));
    let endpoint = DiskEndpoint { port: 0, token: TOKEN, begun, overwritten, unpacks: false };
    let connector = Connector { address: NOBODY, token: TOKEN, tls: None };
    let disks = [copy(0), copy(1)];
    DiskSender::start(&disks, &endpoint, &connector, &Pace::default(), None, client).await.unwrap()
}

#[tokio::test]
async fn a_copy_of_which_a_part_was_not_written_counts_only_over_zeroes() {
    sender(&[], &[], None).await.end_comparing().expect("what was not written is zeroes on both sides");
    for (begun, overwritten, remedy) in [
        (&[1_usize][..], &[][..], "`drainpipe disk left --remove`"),
        (&[], &[1], "`drainpipe disk create --force`"),
    ] {
        let problem = sender(begun, overwritten, None).await.end_comparing().unwrap_err();
        assert!(problem.message.contains("vdb") && problem.message.contains(remedy), "{problem}");
    }
}

#[tokio::test]
async fn each_disk_has_a_name_that_nobody_can_guess() {
    let [one, other] = [sender(&[], &[], None).await, sender(&[], &[], None).await];
    let names: Vec<_> = one.disks().iter().chain(other.disks()).map(|disk| disk.name.clone()).collect();
    let different: std::collections::BTreeSet<_> = names.iter().collect();
    assert_eq!((names.len(), different.len()), (4, 4), "{names:?}");
    assert!(names.iter().all(|name| name.len() >= 32), "{names:?}");
}

/// What a client that connects receives: the first bytes, or nothing.
async fn heard(vm: &FakeVm, at: SocketAddr, is_own: bool) -> Vec<u8> {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind(LOOPBACK).unwrap();
    if is_own {
        vm.connects_from(socket.local_addr().unwrap());
    }
    let mut stream = socket.connect(at).await.unwrap();
    let mut first = vec![0; 8];
    let read = timeout(DEADLINE, stream.read(&mut first)).await.expect("an answer, or an end");
    first.truncate(read.unwrap_or(0));
    first
}

#[tokio::test]
async fn where_others_know_the_names_of_disks_only_the_vms_own_process_gets_to_them() {
    let directory = tempfile::tempdir().unwrap();
    let hypervisor = FakeHypervisor::new(directory.path());
    let vm = started(&hypervisor, &definition("web")).await;
    let names = vec!["drive-virtio-disk0".into(), "drive-virtio-disk1".into()];
    let client = NamingClient { names: names.clone(), vmm: Arc::clone(&vm) as _ };
    let sender = sender(&[], &[], Some(client)).await;
    let addresses: Vec<_> = sender.disks().iter().map(|disk| disk.address).collect();
    assert_eq!(addresses[0], addresses[1]);
    assert_eq!(sender.disks().iter().map(|disk| disk.name.clone()).collect::<Vec<_>>(), names);
    assert_eq!(heard(&vm, addresses[0], false).await, b"");
    assert_eq!(heard(&vm, addresses[0], true).await, b"NBDMAGIC");
}
