//! VMs that move with disks on block devices, to block devices. The hosts of a lab share these devices, which are loop
//! devices here.

use std::fs::{self, File};
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::Path;
use std::process::Command;

use drainpipe_api_types::LeftDisk;
use drainpipe_engine::migration::result::{MigrationResult, Outcome};

use rustix::fs::OFlags;

use crate::Test;
use crate::copied_disks::{DISK_MIB, content, lab};
use crate::program::REFUSED;
use crate::support::{TestLab, eventually};

/// Tests that need a newer QEMU.
pub(crate) const WITH_NEWER_QEMU: &[Test] = &[
    ("disks_go_to_block_devices_and_back_to_files", disks_go_to_block_devices_and_back_to_files),
    ("a_block_device_that_is_not_free_is_refused", a_block_device_that_is_not_free_is_refused),
    ("a_cancelled_copy_to_a_block_device_goes_on", a_cancelled_copy_to_a_block_device_goes_on),
];

const MIB: usize = 1 << 20;

/// The size of a device with a qcow2 image, which needs more room than its disk.
const IMAGE_MIB: usize = DISK_MIB + 8;

/// Slow enough for a test to act in the middle of a copy.
const SLOW_MBPS: &str = "10";

/// Slow enough that the copy does not advance meanwhile.
const SLOWEST_MBPS: &str = "1";

/// How much of the raw disk is copied when the copy is cancelled. Half of a disk is zeroes, which may arrive first.
const COPIED_MIB: u64 = 16;

/// A loop device over a file. It ends when it is dropped.
pub(crate) struct Loop(String);

impl Loop {
    #[track_caller]
    fn with(lab: &TestLab, name: &str, content: &[u8]) -> Self {
        let file = lab.files().join(name);
        fs::write(&file, content).unwrap();
        Self::over(&file)
    }

    #[track_caller]
    pub(crate) fn over(file: &Path) -> Self {
        Self(run("losetup", &["--find", "--show", file.to_str().unwrap()]).trim().to_owned())
    }

    pub(crate) fn path(&self) -> &str {
        &self.0
    }

    /// Writes other content to the device, as if somebody else had used it.
    #[track_caller]
    fn used(lab: &TestLab, name: &str, mebibytes: usize) -> Self {
        Self::with(lab, name, &vec![0xff; mebibytes * MIB])
    }

    /// Reads past the page cache, just as QEMU writes.
    #[track_caller]
    fn content(&self) -> Vec<u8> {
        run("blockdev", &["--flushbufs", &self.0]);
        fs::read(&self.0).unwrap()
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let detached = Command::new("losetup").args(["--detach", &self.0]).status();
        if !detached.is_ok_and(|status| status.success()) {
            eprintln!("{} is left", self.0);
        }
    }
}

#[track_caller]
fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {output:?}");
    String::from_utf8(output.stdout).unwrap()
}

/// A VM on `a` with a raw disk and an image, each on its own device.
struct OnDevices {
    // Dropped before the devices, which are free only when the lab is down.
    lab: TestLab,
    raw: Loop,
    image: Loop,
}

impl OnDevices {
    #[track_caller]
    fn up() -> Self {
        let lab = lab();
        let raw = Loop::with(&lab, "raw", &content(7));
        let image = Loop::used(&lab, "image", IMAGE_MIB);
        let plain = lab.files().join("plain");
        fs::write(&plain, content(8)).unwrap();
        let options = ["convert", "-n", "-f", "raw", "-O", "qcow2"];
        run("qemu-img", &["create", "-q", "-f", "qcow2", &image.0, &format!("{DISK_MIB}M")]);
        run("qemu-img", &[&options[..], &[plain.to_str().unwrap(), &image.0]].concat());
        let disk =
            |on: &Loop, format: &str| format!("[[disk]]\npath = \"{}\"\nformat = \"{format}\"\n", on.0);
        let specification = format!(
            "name = \"web\"\nmemory_mib = 64\nvcpus = 1\nmachine = \"pc-q35-8.2\"\naccelerator = \"tcg\"\n{}{}",
            disk(&raw, "raw"),
            disk(&image, "qcow2")
        );
        lab.create(&specification, "web");
        lab.drainpipe(&["vm", "start", "web"]).done();
        Self { lab, raw, image }
    }

    #[track_caller]
    fn refused(&self, place: &str, said: &[&str]) {
        self.lab
            .drainpipe(&["migrate", "web", "b", "--disk", &format!("vda={place}")])
            .refused(REFUSED, said);
        self.lab.assert_runs_on("web", "a");
    }

    #[track_caller]
    fn stop(&self, host: &str) {
        self.lab.drainpipe(&["vm", "stop", "web", "--force", "--agent", &self.lab.agent_socket(host)]).done();
    }

    #[track_caller]
    fn left(&self, host: &str) -> Vec<LeftDisk> {
        self.lab.json(&["disk", "left", host])
    }

    /// What a guest reads from an image.
    #[track_caller]
    fn read_image(&self, path: &str) -> Vec<u8> {
        let read = self.lab.files().join("read");
        run("qemu-img", &["check", "-q", "-f", "qcow2", path]);
        run("qemu-img", &["convert", "-f", "qcow2", "-O", "raw", path, read.to_str().unwrap()]);
        fs::read(read).unwrap()
    }
}

fn places(raw: &str, image: &str) -> [String; 2] {
    [format!("--disk=vda={raw}"), format!("--disk=vdb={image}")]
}

fn disks_go_to_block_devices_and_back_to_files() {
    let on = OnDevices::up();
    let lab = &on.lab;
    let raw = Loop::used(lab, "raw-there", DISK_MIB);
    let image = Loop::used(lab, "image-there", IMAGE_MIB);
    let [vda, vdb] = places(&raw.0, &image.0);
    let plan = lab.drainpipe(&["migrate", "web", "b", &vda, &vdb, "--dry-run"]).done();
    assert!(plan.contains(&format!("{} to {}", on.raw.0, raw.0)), "{plan}");
    assert!(plan.contains("everything on that device is overwritten"), "{plan}");
    assert!(raw.content() == vec![0xff; DISK_MIB * MIB], "a dry run writes nothing");

    lab.migrate("web", "b", &[&vda, &vdb]);
    on.stop("b");
    assert!(
        raw.content() == content(7),
        "the raw disk differs: what was there before shows, or some of it is lost"
    );
    assert!(on.read_image(&image.0) == content(8), "the image differs");
    assert!(on.raw.content() == content(7), "the source's stays as it was");
    let left = on.left("a");
    let devices: Vec<(&str, bool)> = left.iter().map(|disk| (disk.path.as_str(), disk.is_device)).collect();
    let mut expected = [(on.raw.0.as_str(), true), (on.image.0.as_str(), true)];
    expected.sort_unstable();
    assert_eq!(devices, expected);
    lab.drainpipe(&["disk", "left", "a", "--remove"]).done();
    assert_eq!(on.left("a"), []);
    assert!(on.raw.content() == content(7), "a device is forgotten only");

    // One disk moves back to the device that it had, the other one to a file.
    lab.drainpipe(&["vm", "start", "web", "--agent", &lab.agent_socket("b")]).done();
    let file = lab.files().join("back.qcow2").display().to_string();
    let [vda, vdb] = places(&on.raw.0, &file);
    lab.migrate("web", "a", &[&vda, &vdb]);
    on.stop("a");
    assert!(on.raw.content() == content(7));
    assert!(on.read_image(&file) == content(8));
}

fn a_block_device_that_is_not_free_is_refused() {
    let on = OnDevices::up();
    let lab = &on.lab;
    on.refused(&on.raw.0, &["may already be on this very disk"]);
    on.refused("/dev/no-such-device", &["there is no such device"]);
    let larger = Loop::used(lab, "larger", DISK_MIB + 1);
    on.refused(&larger.0, &["a guest must see the same size", &((DISK_MIB + 1) * MIB).to_string()]);
    assert!(larger.content() == vec![0xff; (DISK_MIB + 1) * MIB]);

    let used = Loop::used(lab, "used", DISK_MIB);
    let specification = format!(
        "name = \"other\"\nmemory_mib = 64\nvcpus = 1\nmachine = \"pc-q35-8.2\"\naccelerator = \"tcg\"\n\
         [[disk]]\npath = \"{}\"\nformat = \"raw\"\n",
        used.0
    );
    let file = lab.write("other.toml", &specification);
    let agent = lab.agent_socket("b");
    lab.drainpipe(&["vm", "create", &file, "--agent", &agent]).done();
    on.refused(&used.0, &["a VM here uses it as its disk"]);
    lab.drainpipe(&["vm", "rm", "other", "--agent", &agent]).done();
    let alone = OFlags::EXCL.bits().cast_signed();
    let held = File::options().read(true).custom_flags(alone).open(&used.0).unwrap();
    on.refused(&used.0, &["device or resource busy", "unmount it"]);
    drop(held);
    assert!(used.content() == vec![0xff; DISK_MIB * MIB], "nothing was written to it");
    lab.migrate("web", "b", &[&places(&used.0, "")[0]]);
}

fn a_cancelled_copy_to_a_block_device_goes_on() {
    let on = OnDevices::up();
    let lab = &on.lab;
    let raw = Loop::used(lab, "raw-there", DISK_MIB);
    let image = Loop::used(lab, "image-there", IMAGE_MIB);
    let [vda, vdb] = places(&raw.0, &image.0);
    let cancelled = || {
        set_links(lab, SLOW_MBPS);
        let migrating = lab.start(&["migrate", "web", "b", &vda, &vdb]);
        eventually("disks are copied", || {
            let views = lab.migrations("a");
            let mut disks = views.iter().filter_map(|view| view.progress.as_ref()?.disks.first());
            disks.any(|disk| disk.copied_bytes > COPIED_MIB << 20)
        });
        set_links(lab, SLOWEST_MBPS);
        let id = lab.migrations("a").remove(0).id;
        lab.drainpipe(&["cancel", &id]).done();
        migrating.wait();
        let result = lab.migrations("a").remove(0).result.unwrap();
        assert_eq!(result.outcome, Outcome::Cancelled);
        lab.assert_runs_on("web", "a");
        eventually("parts are kept on b", || on.left("b").len() == 2);
        assert!(on.left("b").iter().all(|disk| disk.is_device && disk.kept_until.is_some()));
        set_links(lab, "unlimited");
    };
    cancelled();
    // The device is free for others. Before the next attempt, something else is written to a part of it.
    let device = File::options().write(true).open(&raw.0).unwrap();
    device.write_all_at(&vec![0xee; MIB], 20 << 20).unwrap();
    device.sync_all().unwrap();
    let result = lab.migrate("web", "b", &[&vda, &vdb]);
    assert!(same_bytes(&result) > 0, "{result:#?}");
    on.stop("b");
    assert!(raw.content() == content(7), "the raw disk differs");
    assert!(on.read_image(&image.0) == content(8), "the image differs");
    assert_eq!(on.left("b"), []);
}

fn same_bytes(result: &MigrationResult) -> u64 {
    result.copied.disks.iter().map(|disk| disk.same_bytes).sum()
}

#[track_caller]
fn set_links(lab: &TestLab, rate: &str) {
    for link in ["e0", "e1"] {
        lab.fault(&format!("rate {link} {rate}"));
    }
}
