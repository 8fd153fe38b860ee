//! Drains of VMs that move with their disks, and their way back.

use std::fs;
use std::path::PathBuf;

use drainpipe_api_types::DrainPlanView;
use drainpipe_engine::drain::status::DrainState;
use rustix::process::Signal;
use serde_json::json;

use crate::Test;
use crate::check_vms::{restart_agent_with_mounts, start_agent_with_mounts};
use crate::drain::{ask, assert_nowhere_but, assert_state, drain, ended, resume, status, view, wait_until};
use crate::options::other_qemu;
use crate::support::TestLab;

/// Tests that need a newer QEMU.
pub(crate) const WITH_NEWER_QEMU: &[Test] = &[
    ("disks_leave_with_their_vms_and_come_back", disks_leave_with_their_vms_and_come_back),
    ("room_for_disks_is_promised_once", room_for_disks_is_promised_once),
    ("a_drain_with_disks_is_carried_on_after_a_crash", a_drain_with_disks_is_carried_on_after_a_crash),
];

/// VMs with disks that only their own host sees.
const LOCAL: [&str; 3] = ["w1", "w2", "w3"];

/// The size of each disk.
const DISK_MIB: usize = 6;

/// Hosts that each see a directory of their own under one path, and another directory together.
pub(crate) struct Site {
    pub(crate) lab: TestLab,
    directory: PathBuf,
}

impl Site {
    #[track_caller]
    fn up(hosts: &str) -> Self {
        let qemu = other_qemu().expect("these tests run only where there is one");
        Self::of(TestLab::up(&[
            "--hosts",
            hosts,
            "--link",
            "unlimited",
            "--link",
            "unlimited",
            "--qemu",
            &qemu,
        ]))
    }

    #[track_caller]
    pub(crate) fn of(lab: TestLab) -> Self {
        let site = Self { directory: lab.files().join("disks"), lab };
        fs::create_dir_all(&site.directory).unwrap();
        fs::create_dir_all(site.lab.files().join("shared")).unwrap();
        for host in site.lab.hosts() {
            fs::create_dir_all(site.own(&host)).unwrap();
            restart_agent_with_mounts(&site.lab, &host, &site.mount(&host));
        }
        site
    }

    /// The path at which this process sees a host's own directory.
    pub(crate) fn own(&self, host: &str) -> PathBuf {
        self.lab.files().join(format!("on-{host}"))
    }

    fn mount(&self, host: &str) -> String {
        format!("mount --bind {} {}", self.own(host).display(), self.directory.display())
    }

    /// A VM on `a` with a disk that only `a` sees.
    #[track_caller]
    fn start_local(&self, name: &str, mib: usize) {
        fs::write(self.own("a").join(format!("{name}.raw")), content(name, mib)).unwrap();
        self.start_with_own(name);
    }

    /// A VM on `a` with its disk, which is already there.
    #[track_caller]
    pub(crate) fn start_with_own(&self, name: &str) {
        self.start(name, &self.directory.join(format!("{name}.raw")));
    }

    #[track_caller]
    fn start(&self, name: &str, disk: &std::path::Path) {
        let specification = format!(
            "name = \"{name}\"\nmemory_mib = 64\nvcpus = 1\nmachine = \"pc-q35-8.2\"\naccelerator = \"tcg\"\n\
             [[disk]]\npath = \"{}\"\nformat = \"raw\"\n",
            disk.display()
        );
        self.lab.create(&specification, name);
        self.lab.drainpipe(&["vm", "start", name]).done();
    }

    #[track_caller]
    fn plan(&self, request: serde_json::Value) -> DrainPlanView {
        ask(&self.lab, "a", "/v1/drain/plan", Some(request)).unwrap()
    }

    /// Fails the test unless a host has all of a VM's disk. Firmware alone writes nothing to it.
    #[track_caller]
    fn assert_whole(&self, host: &str, name: &str, mib: usize) {
        let disk = self.own(host).join(format!("{name}.raw"));
        assert!(fs::read(disk).unwrap() == content(name, mib), "the disk of {name} on {host} differs");
    }

    /// How many disks of VMs that have left are on a host.
    fn left(&self, host: &str) -> usize {
        let entries = fs::read_dir(self.own(host)).unwrap();
        let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
        names.filter(|name| name.contains(".migrated-")).count()
    }
}

/// Content without zeroes, different for each VM.
fn content(name: &str, mib: usize) -> Vec<u8> {
    let mut state = name.bytes().fold(7_u64, |state, byte| state.wrapping_mul(31).wrapping_add(byte.into()));
    let mut bytes = vec![0; mib << 20];
    for chunk in bytes.chunks_exact_mut(8) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        chunk.copy_from_slice(&state.to_le_bytes());
    }
    bytes
}

fn disks_leave_with_their_vms_and_come_back() {
    let site = Site::up("a,b");
    let lab = &site.lab;
    for name in LOCAL {
        site.start_local(name, DISK_MIB);
    }
    let shared = lab.files().join("shared").join("shared.raw");
    fs::write(&shared, content("shared", 1)).unwrap();
    site.start("shared", &shared);

    let without = site.plan(json!({})).plan;
    assert_eq!((without.moves.len(), without.stays.len()), (1, 3), "{without:#?}");
    assert!(without.stays.iter().all(|stay| stay.why.to_string().contains("--copy-storage")), "{without:#?}");
    let DrainPlanView { plan, findings } = site.plan(json!({ "copy_storage": true }));
    assert_eq!((plan.moves.len(), findings.len()), (4, 0), "{plan:#?}");
    assert_eq!(plan.moves[0].vm, "shared", "it goes first: {plan:#?}");
    let of_disks = (DISK_MIB as u64) << 20;
    let takes_one = |bytes| (of_disks..2 * of_disks).contains(&bytes);
    assert!(
        plan.moves[1..].iter().all(|one| one.disks.len() == 1 && takes_one(one.disk_bytes())),
        "{plan:#?}"
    );
    let first = site.plan(json!({ "copy_storage": true, "disks_first": true })).plan;
    assert_eq!(first.moves[3].vm, "shared", "{first:#?}");
    let output = lab.drainpipe(&["drain", "a", "--copy-storage", "--dry-run"]).done();
    assert!(output.contains("w1 takes vda") && output.contains("b does not see it"), "{output}");

    drain(lab, "a", json!({ "copy_storage": true }));
    let drained = ended(lab, "a");
    assert_state(&drained, DrainState::Drained, 4);
    let copied = status(&drained).moves.iter().filter_map(|one| one.disks);
    assert_eq!(copied.filter(|disks| disks.copied_bytes >= of_disks).count(), 3, "{drained:#?}");
    assert_nowhere_but(lab, &[&LOCAL[..], &["shared"]].concat(), &["b"]);
    for name in LOCAL {
        site.assert_whole("b", name, DISK_MIB);
    }
    assert_eq!(site.left("a"), 3);

    resume(lab, "a", true);
    assert_state(&ended(lab, "a"), DrainState::Drained, 4);
    assert_nowhere_but(lab, &[&LOCAL[..], &["shared"]].concat(), &["a"]);
    for name in LOCAL {
        site.assert_whole("a", name, DISK_MIB);
    }
    let back = lab.migrations("b");
    let same = back.iter().filter_map(|view| view.result.as_ref()).flat_map(|result| &result.copied.disks);
    assert!(same.clone().count() == 3 && same.clone().all(|disk| disk.same_bytes >= of_disks), "{back:#?}");
    assert_eq!(
        (site.left("a"), site.left("b")),
        (0, 3),
        "what is there is used; nothing else is removed unasked"
    );
    lab.drainpipe(&["disk", "left", "a", "--remove"]).done();
    for name in LOCAL {
        site.assert_whole("a", name, DISK_MIB);
    }
}

fn room_for_disks_is_promised_once() {
    let site = Site::up("a,b,c");
    let lab = &site.lab;
    // Room for one of two disks.
    let small = format!("mount -t tmpfs -o size={}m none {}", DISK_MIB * 5 / 3, site.directory.display());
    restart_agent_with_mounts(lab, "b", &small);
    for name in ["w1", "w2"] {
        site.start_local(name, DISK_MIB);
    }
    let plan = site.plan(json!({ "copy_storage": true, "to": ["b"] })).plan;
    assert_eq!((plan.moves.len(), plan.stays.len()), (1, 1), "{plan:#?}");
    assert!(plan.stays[0].why.to_string().contains("are free there"), "{plan:#?}");
    drain(lab, "a", json!({ "copy_storage": true, "to": ["b"] }));
    let left = ended(lab, "a");
    assert_state(&left, DrainState::Incomplete, 1);
    let (gone, stays) = (plan.moves[0].vm.as_str(), plan.stays[0].vm.as_str());
    assert_nowhere_but(lab, &[gone], &["b"]);
    assert_nowhere_but(lab, &[stays], &["a"]);
    drain(lab, "a", json!({ "copy_storage": true }));
    ended(lab, "a");
    assert_nowhere_but(lab, &[stays], &["c"]);
    site.assert_whole("c", stays, DISK_MIB);
}

fn a_drain_with_disks_is_carried_on_after_a_crash() {
    let site = Site::up("a,b");
    let lab = &site.lab;
    // The copy takes long enough for the test to act in the middle of it.
    let mib = 4 * DISK_MIB;
    for name in ["w1", "w2"] {
        site.start_local(name, mib);
    }
    for link in ["e0", "e1"] {
        lab.fault(&format!("rate {link} 40"));
    }
    drain(lab, "a", json!({ "copy_storage": true }));
    let copying = wait_until(lab, "a", "a disk is being copied", |view| {
        let mut disks = status(view).moves.iter().filter_map(|one| one.disks);
        disks.any(|disks| disks.are_being_copied && disks.copied_bytes > 0)
    });
    let at_once = status(&copying).moves.iter().filter_map(|one| one.disks);
    assert_eq!(at_once.filter(|disks| disks.are_being_copied).count(), 1, "{copying:#?}");
    lab.stop_agent("a", Signal::KILL);
    start_agent_with_mounts(lab, "a", &site.mount("a"));
    assert_eq!(status(&view(lab, "a")).state, DrainState::Interrupted);
    let output = lab.drainpipe(&["drain", "status", "a"]).done();
    assert!(output.contains("`drainpipe drain a --copy-storage` continues"), "{output}");
    for link in ["e0", "e1"] {
        lab.fault(&format!("rate {link} unlimited"));
    }
    let again = drain(lab, "a", json!({ "copy_storage": true }));
    assert_eq!(again.id, copying.id, "it is carried on");
    assert_state(&ended(lab, "a"), DrainState::Drained, 2);
    assert_nowhere_but(lab, &["w1", "w2"], &["b"]);
    for name in ["w1", "w2"] {
        site.assert_whole("b", name, mib);
    }
}
