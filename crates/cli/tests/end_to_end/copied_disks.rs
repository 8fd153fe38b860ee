//! VMs that move with their disks, between hosts that share no storage.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use drainpipe_api_types::{LeftDisk, PlanView};
use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use drainpipe_guest::page::{Content, PAGE_BYTES, PAGE_WORDS};

use crate::Test;
use crate::backend::Backend;
use crate::check_vms::{restart_agent_with_mounts, start_agent_with_mounts};
use crate::guest::{Guest, MACHINE, NEWER_MACHINE};
use crate::options::other_qemu;
use crate::program::{REFUSED, Running};
use crate::scene::result_of;
use crate::support::{TestLab, eventually};

/// Tests that need a newer QEMU.
pub(crate) const WITH_NEWER_QEMU: &[Test] = &[
    ("disks_go_with_their_vm", disks_go_with_their_vm),
    ("disks_go_where_the_target_wants_them", disks_go_where_the_target_wants_them),
    ("what_has_no_place_is_refused", what_has_no_place_is_refused),
    ("what_shrinks_goes_packed", what_shrinks_goes_packed),
];

/// The size of each disk.
pub(crate) const DISK_MIB: usize = 24;

/// Slow enough for a test to act in the middle of a copy.
const SLOW_MBPS: &str = "40";

/// Slow enough that even the cores of a busy machine get to pack some of what waits.
const SLOWER_MBPS: &str = "10";

/// Starts a lab with a QEMU that copies disks.
#[track_caller]
pub(crate) fn lab() -> TestLab {
    let qemu = other_qemu().expect("these tests run only where there is one");
    TestLab::up(&["--link", "unlimited", "--link", "unlimited", "--qemu", &qemu])
}

/// Which hosts see a host's directory, and under which path.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Seen {
    /// Each directory has its own path, under which the other host sees it too.
    All,
    /// One path leads each host's agent to another directory.
    Agents,
    /// One path leads each host's agent and libvirt to another directory.
    AgentsAndLibvirts,
}

/// Two hosts, each with a directory of its own, and a VM on `a` with two disks there.
pub(crate) struct Apart {
    pub(crate) lab: TestLab,
    machine: &'static str,
    directories: [PathBuf; 2],
    seen: Seen,
}

/// The disks of the VM. A domain has no image among them, since QEMU 8.0 to 10.2.1 may lose writes then, and such a
/// domain stays.
pub(crate) fn disk_names() -> [&'static str; 2] {
    match Backend::of_test() {
        Backend::Qemu => ["web.raw", "web.qcow2"],
        Backend::Libvirt => ["web.raw", "web.second"],
    }
}

pub(crate) fn is_image(path: &str) -> bool {
    Path::new(path).extension().is_some_and(|extension| extension == "qcow2")
}

impl Apart {
    /// Both directories under one path.
    #[track_caller]
    pub(crate) fn mounted(lab: TestLab) -> Self {
        Self::mounted_with(lab, [&content(7), &content(8)], DISK_MIB * 8)
    }

    /// The same, with a VM whose machine type every QEMU has.
    pub(crate) fn on_any_machine(self) -> Self {
        Self { machine: MACHINE, ..self }
    }

    /// The disks alone, under one path, with this much room on `b`.
    #[track_caller]
    pub(crate) fn mounted_with(lab: TestLab, contents: [&[u8]; 2], mib_on_b: usize) -> Self {
        let directory = lab.files().join("disks");
        fs::create_dir_all(&directory).unwrap();
        for (host, options) in [("a", String::new()), ("b", format!("-o size={mib_on_b}m"))] {
            let mount = format!("mount -t tmpfs {options} none {}", directory.display());
            restart_agent_with_mounts(&lab, host, &mount);
        }
        Self::with_disks(lab, [directory.clone(), directory], Seen::Agents, contents)
    }

    /// The disks alone, under one path, for agents and their libvirts.
    #[track_caller]
    pub(crate) fn bound_with(lab: TestLab, contents: [&[u8]; 2]) -> Self {
        let directory = lab.files().join("disks");
        fs::create_dir_all(&directory).unwrap();
        let directories = [directory.clone(), directory];
        let apart = Self { lab, machine: NEWER_MACHINE, directories, seen: Seen::AgentsAndLibvirts };
        for host in ["a", "b"] {
            fs::create_dir_all(apart.on(host, "")).unwrap();
            let libvirt = apart.lab.lab().libvirt_pid(host).unwrap().expect("it runs");
            let mounted = Command::new("nsenter")
                .args(["--mount", "--target", &libvirt.as_raw_nonzero().to_string()])
                .args(["sh", "-c", &apart.mount(host)])
                .status();
            assert!(mounted.unwrap().success());
            restart_agent_with_mounts(&apart.lab, host, &apart.mount(host));
        }
        apart.fill(contents);
        apart
    }

    fn mount(&self, host: &str) -> String {
        format!("mount --bind {} {}", self.on(host, "").display(), self.path(host, ""))
    }

    /// Starts a host's agent that has ended, with the directories that it sees.
    #[track_caller]
    pub(crate) fn start_agent(&self, host: &str) {
        match self.seen {
            Seen::All | Seen::Agents => self.lab.start_agent(host),
            Seen::AgentsAndLibvirts => start_agent_with_mounts(&self.lab, host, &self.mount(host)),
        }
    }

    /// Each directory under its own path, over slow links.
    #[track_caller]
    pub(crate) fn slow() -> Self {
        Self::over(SLOW_MBPS)
    }

    /// Each directory under its own path, over links of this rate.
    #[track_caller]
    pub(crate) fn over(mbps: &str) -> Self {
        let apart = Self::under_two_paths(lab());
        apart.set_links(mbps);
        apart
    }

    #[track_caller]
    pub(crate) fn set_links(&self, mbps: &str) {
        for link in ["e0", "e1"] {
            self.lab.fault(&format!("rate {link} {mbps}"));
        }
    }

    /// Each directory under its own path.
    #[track_caller]
    pub(crate) fn under_two_paths(lab: TestLab) -> Self {
        Self::under_two_paths_with(lab, [&content(7), &content(8)]).and_its_vm()
    }

    /// The disks alone, each directory under its own path; for a domain, whose disks keep their paths, under one.
    #[track_caller]
    pub(crate) fn under_two_paths_with(lab: TestLab, contents: [&[u8]; 2]) -> Self {
        if Backend::of_test() == Backend::Libvirt {
            return Self::bound_with(lab, contents);
        }
        let directories = ["a", "b"].map(|host| lab.files().join("disks").join(host));
        for directory in &directories {
            fs::create_dir_all(directory).unwrap();
        }
        Self::with_disks(lab, directories, Seen::All, contents)
    }

    #[track_caller]
    fn with_disks(lab: TestLab, directories: [PathBuf; 2], seen: Seen, contents: [&[u8]; 2]) -> Self {
        let apart = Self { lab, machine: NEWER_MACHINE, directories, seen };
        apart.fill(contents);
        apart
    }

    #[track_caller]
    fn fill(&self, contents: [&[u8]; 2]) {
        for (name, content) in disk_names().into_iter().zip(contents) {
            if is_image(name) {
                self.make_qcow2(content);
            } else {
                fs::write(self.on("a", name), content).unwrap();
            }
        }
    }

    #[track_caller]
    pub(crate) fn and_its_vm(self) -> Self {
        let machine = self.machine;
        self.start(&format!(
            "name = \"web\"\nmemory_mib = 64\nvcpus = 1\nmachine = \"{machine}\"\naccelerator = \"tcg\"\n"
        ));
        self
    }

    /// Starts the VM with this specification and both disks.
    #[track_caller]
    pub(crate) fn start(&self, specification: &str) {
        let disk = |name: &str| {
            let format = if is_image(name) { "qcow2" } else { "raw" };
            format!("[[disk]]\npath = \"{}\"\nformat = \"{format}\"\n", self.path("a", name))
        };
        let disks = disk_names().map(disk).concat();
        self.lab.create(&format!("{specification}{disks}"), "web");
        self.lab.drainpipe(&["vm", "start", "web"]).done();
    }

    /// A guest with both disks that is ready.
    #[track_caller]
    pub(crate) fn boot(&self, memory_mib: u64) -> Guest {
        let parameters = "drainpipe.disks=2";
        if Backend::of_test() == Backend::Libvirt {
            let disks: Vec<String> = disk_names().map(|name| self.path("a", name)).into();
            let guest = self.lab.start_domain_with_disks("a", "web", memory_mib, parameters, &disks);
            self.lab.wait_for_domain("web");
            return guest;
        }
        let guest = Guest::new("web", self.lab.guest_address(), self.lab.namespace("client"));
        self.start(&guest.specification(memory_mib, parameters).replace(MACHINE, self.machine));
        guest.wait_until_ready();
        guest
    }

    /// Ends the VM, as if its plug were pulled.
    #[track_caller]
    pub(crate) fn end(&self, host: &str) {
        let lab = &self.lab;
        match Backend::of_test() {
            Backend::Qemu => {
                lab.drainpipe(&["vm", "stop", "web", "--force", "--agent", &lab.agent_socket(host)]).done()
            }
            Backend::Libvirt => lab.virsh(host, &["destroy", "web"]).done(),
        };
    }

    /// A file's path, as the host sees it.
    pub(crate) fn path(&self, host: &str, name: &str) -> String {
        self.directories[usize::from(host == "b")].join(name).display().to_string()
    }

    /// The arguments that copy both disks to `b`.
    pub(crate) fn copies(&self) -> Vec<String> {
        self.copies_to("b")
    }

    /// The arguments that copy both disks to this host.
    pub(crate) fn copies_to(&self, host: &str) -> Vec<String> {
        if self.seen != Seen::All {
            return vec!["--copy-storage".into()];
        }
        let place = |(disk, name)| format!("--disk={disk}={}", self.path(host, name));
        [("vda", "web.raw"), ("vdb", "web.qcow2")].map(place).into()
    }

    /// A file's path, as this process sees it.
    pub(crate) fn on(&self, host: &str, name: &str) -> PathBuf {
        match self.seen {
            Seen::All => self.path(host, name).into(),
            Seen::Agents => {
                let agent = self.lab.agent_pid(host).unwrap().as_raw_nonzero();
                format!("/proc/{agent}/root{}", self.path(host, name)).into()
            }
            Seen::AgentsAndLibvirts => self.lab.files().join(format!("on-{host}")).join(name),
        }
    }

    /// Makes an image with an unusual cluster size.
    pub(crate) fn make_qcow2(&self, content: &[u8]) {
        let raw = self.lab.files().join("content");
        fs::write(&raw, content).unwrap();
        let made = Command::new("qemu-img")
            .args(["convert", "-f", "raw", "-O", "qcow2", "-o", "cluster_size=32k"])
            .args([raw, self.on("a", "web.qcow2")])
            .status();
        assert!(made.unwrap().success());
    }

    /// The names of all disks on a host.
    pub(crate) fn names(&self, host: &str) -> Vec<String> {
        let entries = fs::read_dir(self.on(host, "")).unwrap();
        let mut names: Vec<String> =
            entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    }

    /// Fails the test unless a host has both disks with all of their content. Nobody may have them open.
    #[track_caller]
    pub(crate) fn assert_whole(&self, host: &str, names: [&str; 2]) {
        let image = self.on(host, names[1]);
        let check = Command::new("qemu-img").args(["check", "-f", "qcow2"]).arg(&image).output().unwrap();
        assert!(check.status.success(), "{check:?}");
        self.assert_has(host, names, [&content(7), &content(8)]);
    }

    /// Like [`Self::assert_whole`], for disks with this content. The image may have clusters that nothing refers to: a
    /// killed QEMU leaves those that it had counted but not linked yet (`qemu-img check` ends with 3).
    #[track_caller]
    pub(crate) fn assert_has(&self, host: &str, names: [&str; 2], contents: [&[u8]; 2]) {
        assert!(fs::read(self.on(host, names[0])).unwrap() == contents[0], "the raw disk differs");
        if !is_image(names[1]) {
            assert!(fs::read(self.on(host, names[1])).unwrap() == contents[1], "the second disk differs");
            return;
        }
        let image = self.on(host, names[1]);
        let check = Command::new("qemu-img").args(["check", "-f", "qcow2"]).arg(&image).output().unwrap();
        assert!(matches!(check.status.code(), Some(0 | 3)), "{check:?}");
        let info = Command::new("qemu-img").args(["info", "--output=json"]).arg(&image).output().unwrap();
        let info: serde_json::Value = serde_json::from_slice(&info.stdout).unwrap();
        assert_eq!(info["cluster-size"], 32 << 10);
        assert!(self.read_image(host, names[1]) == contents[1], "the qcow2 disk differs");
    }

    /// What a guest reads from an image.
    #[track_caller]
    pub(crate) fn read_image(&self, host: &str, name: &str) -> Vec<u8> {
        let raw = self.lab.files().join("read");
        let read = Command::new("qemu-img")
            .args(["convert", "-f", "qcow2", "-O", "raw"])
            .args([&self.on(host, name), &raw])
            .status();
        assert!(read.unwrap().success());
        fs::read(raw).unwrap()
    }

    /// Fails the test unless the VM runs on `a` with its disks, and nothing is on `b`.
    #[track_caller]
    fn assert_stayed(&self) {
        self.lab.assert_runs_on("web", "a");
        eventually("nothing is left on b", || self.names("b").is_empty());
        assert_eq!(self.names("a"), ["web.qcow2", "web.raw"]);
    }

    /// Begins to move the VM. Returns when more than this much of the raw disk is copied.
    #[track_caller]
    pub(crate) fn begin(&self, copied_mib: u64) -> Running {
        let copies = self.copies();
        let copies = copies.iter().map(String::as_str);
        let arguments: Vec<&str> = ["migrate", "web", "b", "--json"].into_iter().chain(copies).collect();
        let migrating = self.lab.start(&arguments);
        let is_copying = || {
            let views = self.lab.migrations("a");
            let mut disks = views.iter().filter_map(|view| view.progress.as_ref()?.disks.first());
            disks.any(|disk| disk.copied_bytes > copied_mib << 20)
        };
        eventually("disks are copied", is_copying);
        migrating
    }

    /// Waits until all of the disks has arrived, and memory is being sent.
    #[track_caller]
    pub(crate) fn wait_for_memory(&self) {
        eventually("memory is sent", || {
            let views = self.lab.migrations("a");
            let progress = views.first().and_then(|view| view.progress.as_ref());
            progress.is_some_and(|progress| {
                progress.disks.iter().all(|disk| disk.is_ready) && progress.sent_bytes > 0
            })
        });
    }

    #[track_caller]
    pub(crate) fn last_result(&self) -> MigrationResult {
        eventually("the migration is over", || {
            self.lab.migrations("a").first().is_some_and(|view| view.result.is_some())
        });
        self.lab.migrations("a").remove(0).result.unwrap()
    }
}

/// Content with some zeroes, and no two parts alike.
pub(crate) fn content(seed: u64) -> Vec<u8> {
    let mut state = seed;
    let mut bytes = vec![0; DISK_MIB << 20];
    let half = bytes.len() / 2;
    for chunk in bytes[..half].chunks_exact_mut(8) {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        chunk.copy_from_slice(&state.to_le_bytes());
    }
    bytes
}

fn disks_go_with_their_vm() {
    assert_disks_go(&Apart::mounted(lab()).and_its_vm());
}

/// A VM that writes nothing moves there and back.
#[track_caller]
pub(crate) fn assert_disks_go(apart: &Apart) {
    let lab = &apart.lab;
    lab.drainpipe(&["migrate", "web", "b"]).refused(REFUSED, &["b does not see", "--copy-storage"]);
    let plan: PlanView = lab.json(&["migrate", "web", "b", "--copy-storage", "--dry-run"]);
    let copied: Vec<String> = plan.plan.disks.iter().map(|disk| disk.disk.to_string()).collect();
    assert_eq!(copied, ["vda", "vdb"]);
    assert_eq!(apart.names("b"), [""; 0], "a dry run makes nothing");

    let result = lab.migrate("web", "b", &["--copy-storage"]);
    assert_eq!(result.copied.disks.len(), 2, "{result:#?}");
    assert!(result.copied.disk_bytes >= (2 * (DISK_MIB as u64)) << 19, "{result:#?}");
    assert!(result.copied.disks.iter().all(|disk| disk.ready_ms.is_some()), "{result:#?}");
    lab.assert_runs_on("web", "b");
    let left: Vec<LeftDisk> = lab.json(&["disk", "left", "a"]);
    let names: Vec<String> =
        left.iter().map(|disk| disk.path.rsplit('/').next().unwrap().to_owned()).collect();
    assert_eq!(apart.names("a"), names);
    assert!(names.iter().all(|name| name.contains(".migrated-")), "{names:?}");
    assert!(fs::read(apart.on("a", &names[1])).unwrap() == content(7), "it is kept as it was");

    lab.drainpipe(&["vm", "stop", "web", "--force", "--agent", &lab.agent_socket("b")]).done();
    apart.assert_whole("b", ["web.raw", "web.qcow2"]);
    lab.drainpipe(&["disk", "left", "a", "--remove"]).done();
    assert_eq!(apart.names("a"), [""; 0]);
    assert_eq!(lab.json::<Vec<LeftDisk>>(&["disk", "left", "a"]), []);

    // It moves back to other places, encrypted.
    lab.drainpipe(&["vm", "start", "web", "--agent", &lab.agent_socket("b")]).done();
    let place = |name: &str| apart.path("a", name);
    let places = [format!("vda={}", place("back.raw")), format!("vdb={}", place("back.qcow2"))];
    lab.migrate("web", "a", &["--encrypt", "--disk", &places[0], "--disk", &places[1]]);
    lab.assert_runs_on("web", "a");
    lab.drainpipe(&["vm", "stop", "web", "--force"]).done();
    apart.assert_whole("a", ["back.raw", "back.qcow2"]);
}

fn disks_go_where_the_target_wants_them() {
    let lab = lab();
    let directory = lab.files().join("disks");
    let below = directory.join("of-a");
    for (host, from, to) in [("a", &below, &directory), ("b", &directory, &below)] {
        let places = format!("[disks.places]\n\"{}\" = \"{}\"\n\n[tls]", from.display(), to.display());
        lab.configure(host, "[tls]", &places);
    }
    let apart = Apart::mounted(lab).and_its_vm();
    let lab = &apart.lab;
    lab.drainpipe(&["migrate", "web", "b", "--copy-storage"])
        .refused(REFUSED, &["of-a/web.raw", "directory"]);
    fs::create_dir(apart.on("b", "of-a")).unwrap();
    let plan: PlanView = lab.json(&["migrate", "web", "b", "--copy-storage", "--dry-run"]);
    let to: Vec<&str> = plan.plan.disks.iter().map(|disk| disk.to.as_str()).collect();
    let names = disk_names().map(|name| below.join(name).display().to_string());
    assert_eq!(to, names);
    lab.migrate("web", "b", &["--copy-storage"]);
    lab.assert_runs_on("web", "b");
    assert_eq!(apart.names("b"), ["of-a"]);

    // It moves back to where its disks were.
    let result = lab.migrate("web", "a", &["--copy-storage"]);
    let half = (DISK_MIB as u64) << 19;
    assert!(result.copied.disks.iter().all(|disk| disk.same_bytes >= half), "{result:#?}");
    lab.assert_runs_on("web", "a");
    lab.drainpipe(&["vm", "stop", "web", "--force"]).done();
    apart.assert_whole("a", disk_names());
}

fn what_has_no_place_is_refused() {
    let apart = Apart::slow();
    let lab = &apart.lab;
    let migrate = |arguments: &[&str]| lab.drainpipe(&[&["migrate", "web", "b"], arguments].concat());
    migrate(&["--disk", "vdc=/srv/x"]).refused(REFUSED, &["has no disk vdc"]);
    migrate(&["--copy-storage", "--post-copy"]).refused(REFUSED, &["post-copy"]);
    let taken = apart.path("b", "taken.raw");
    fs::write(&taken, "somebody's").unwrap();
    let place = format!("vda={taken}");
    migrate(&["--disk", &place]).refused(REFUSED, &["it exists already"]);
    assert_eq!(fs::read(&taken).unwrap(), b"somebody's");
    fs::remove_file(&taken).unwrap();
    let (one, other) = (format!("vda={taken}"), format!("vdb={taken}"));
    migrate(&["--disk", &one, "--disk", &other]).refused(REFUSED, &["two disks of VM web"]);
    apart.assert_stayed();
}

fn what_shrinks_goes_packed() {
    let text = text();
    let disk_bytes = text.len() as u64;
    let apart = Apart::under_two_paths_with(lab(), [&text, &content(8)]).and_its_vm();
    apart.set_links(SLOWER_MBPS);
    let result: MigrationResult = result_of(&apart.begin(0).wait());
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    let [wire_bytes, of_noise] = [0, 1].map(|disk| result.copied.disks[disk].wire_bytes.unwrap());
    assert!(wire_bytes < disk_bytes, "{wire_bytes} of {disk_bytes}: {result:#?}");
    assert!(of_noise >= disk_bytes / 2, "half of that disk is noise, which goes as it is: {result:#?}");
    apart.lab.drainpipe(&["vm", "stop", "web", "--force", "--agent", &apart.lab.agent_socket("b")]).done();
    apart.assert_has("b", ["web.raw", "web.qcow2"], [&text, &content(8)]);
}

/// The content of a disk that is all text.
fn text() -> Vec<u8> {
    let page = |key| {
        let mut page = [0; PAGE_WORDS];
        Content::Text { key }.write(&mut page);
        page.map(u64::to_le_bytes)
    };
    let pages = 0..(DISK_MIB << 20) / PAGE_BYTES;
    pages.flat_map(|key| page(key as u64)).flatten().collect()
}
