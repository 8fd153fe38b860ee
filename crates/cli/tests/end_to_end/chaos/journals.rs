//! Journals whose disks run full, or that are lost or replaced by older ones, and what an operator then does.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};
use std::{fs, io, thread};

use drainpipe_api_types::JournalView;
use rustix::fs::{FallocateFlags, fallocate, fstatvfs};
use rustix::io::Errno;
use rustix::process::{Pid, Signal};

use super::clocks::Clocks;
use super::ledger::{Ledger, Victim};
use super::plan::Spoil;
use crate::drain::ask;
use crate::program::Running;
use crate::support::{TestLab, eventually};

/// The size of the disk under each journal.
const JOURNAL_DISK_MIB: usize = 24;

/// The journal's files. `SQLite` makes again what its processes share.
const FILES: [&str; 2] = ["journal.sqlite", "journal.sqlite-wal"];
const SHARED_FILE: &str = "journal.sqlite-shm";

/// How often an operator checks whether a journal is believed.
const LOOK_EVERY: Duration = Duration::from_secs(1);

/// All journals of a lab.
pub(super) struct Journals<'lab> {
    lab: &'lab TestLab,
    disks: BTreeMap<String, JournalDisk>,
    /// Hosts whose journals have ever been spoiled: at any time, an agent may hear from others that its journal is
    /// older.
    ever_spoiled: BTreeSet<String>,
    spoiled: Option<String>,
    adoptions: BTreeMap<String, Running>,
    looked_at: Instant,
}

impl<'lab> Journals<'lab> {
    /// Gives each host's journal a disk of its own.
    pub(super) fn prepare(lab: &'lab TestLab, hosts: &[String], clocks: &Clocks) -> Self {
        let disk = |host: &String| (host.clone(), JournalDisk::under_journal(lab, host, clocks));
        let disks = hosts.iter().map(disk).collect();
        Self {
            lab,
            disks,
            ever_spoiled: BTreeSet::new(),
            spoiled: None,
            adoptions: BTreeMap::new(),
            looked_at: Instant::now(),
        }
    }

    pub(super) fn way_in(&self, host: &str) -> String {
        self.disks[host].way_in()
    }

    /// Where a host's journal can be read from outside its agent's mounts.
    pub(super) fn directory(&self, host: &str) -> PathBuf {
        self.disks[host].directory.clone()
    }

    /// Fills the disk to the last byte.
    pub(super) fn fill_disk(&self, host: &str) {
        self.disks[host].fill();
    }

    pub(super) fn free_disk(&self, host: &str) {
        self.disks[host].free();
    }

    fn copy_directory(&self, host: &str) -> PathBuf {
        self.lab.files().join(format!("journal-of-{host}"))
    }

    /// Copies each journal as it is now. If a host writes meanwhile, its copy may be damaged, and the agent then says
    /// so.
    pub(super) fn copy(&self) {
        for host in self.disks.keys() {
            let directory = self.copy_directory(host);
            fs::create_dir_all(&directory).unwrap();
            for file in FILES {
                copy_if_there(&self.directory(host).join(file), &directory.join(file));
            }
        }
    }

    /// Spoils the journal of a host whose agent is down.
    pub(super) fn spoil(&mut self, host: &str, way: Spoil) {
        let directory = self.directory(host);
        for file in FILES.into_iter().chain([SHARED_FILE]) {
            remove_if_there(&directory.join(file));
        }
        match way {
            Spoil::Delete => {}
            Spoil::Empty => fs::write(directory.join(FILES[0]), "").unwrap(),
            Spoil::PutBackOlder => {
                for file in FILES {
                    copy_if_there(&self.copy_directory(host).join(file), &directory.join(file));
                }
            }
        }
        self.ever_spoiled.insert(host.to_owned());
        self.spoiled = Some(host.to_owned());
    }

    /// The host whose journal was spoiled in this round.
    pub(super) fn spoiled(&self) -> Option<&str> {
        self.spoiled.as_deref()
    }

    /// Lets agents that do not believe their journals continue with what there is.
    pub(super) fn adopt(&mut self, ledger: &mut Ledger) {
        if self.looked_at.elapsed() < LOOK_EVERY {
            return;
        }
        self.looked_at = Instant::now();
        for host in self.ever_spoiled.clone() {
            let is_adopting = self.adoptions.get_mut(&host).map(|running| !running.has_ended());
            match is_adopting {
                Some(true) => {}
                Some(false) => self.take_adoption(&host, ledger),
                // An agent that is down or frozen says nothing.
                None if ledger.is_suffering(&Victim::Agent(host.clone())) => {}
                None => self.look(&host, ledger),
            }
        }
    }

    fn take_adoption(&mut self, host: &str, ledger: &mut Ledger) {
        let Some(output) = self.adoptions.remove(host).map(Running::wait) else { return };
        ledger.note(&format!("journal of {host}, adopt: {} {}", output.code, output.stderr.trim()));
        ledger.count(if output.code == 0 { "journal adopted" } else { "journal not adopted at once" });
    }

    fn look(&mut self, host: &str, ledger: &mut Ledger) {
        let victim = Victim::Journal(host.to_owned());
        let Ok(view) = ask::<JournalView>(self.lab, host, "/v1/journal", None) else { return };
        if view.doubts.is_empty() {
            if ledger.is_suffering(&victim) {
                ledger.note(&format!("the journal of {host} is believed"));
                ledger.fault_ended(&victim);
            }
            return;
        }
        ledger.note(&format!("the journal of {host} is not believed: {}", view.doubts.join("; ")));
        if !ledger.is_suffering(&victim) {
            ledger.fault_began(victim);
        }
        let adopt = ["journal", "adopt", "--yes", "--agent", &self.lab.agent_socket(host)];
        self.adoptions.insert(host.to_owned(), self.lab.start(&adopt));
    }

    /// Call this when everything has settled. As operators are told to, it undoes changes to the network by a migration
    /// that only the lost journal knew.
    pub(super) fn round_is_over(&mut self) {
        let Some(host) = self.spoiled.take() else { return };
        self.lab.exec(&host, &["bash", "-c", TIDY_NETWORK]).done();
        // The old files would fill the disk.
        for entry in fs::read_dir(self.directory(&host)).unwrap().filter_map(Result::ok) {
            if entry.file_name().to_string_lossy().contains("set-aside") {
                remove_if_there(&entry.path());
            }
        }
    }
}

const TIDY_NETWORK: &str = "for family in -4 -6; do \
    ip $family route show table all proto 215 | while read -r route; do ip $family route del $route || true; done; done; \
    ip -6 -oneline address show dev lo scope global | while read -r _ _ _ address _; do \
    ip -6 address del $address dev lo; done";

fn copy_if_there(from: &Path, to: &Path) {
    remove_if_there(to);
    match fs::copy(from, to) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => panic!("{}: {error}", from.display()),
        _ => {}
    }
}

fn remove_if_there(file: &Path) {
    match fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => panic!("{}: {error}", file.display()),
        _ => {}
    }
}

/// A small disk under a host's journal, in a mount namespace in which the host's agents are started.
struct JournalDisk {
    /// The process that keeps the mounts until the lab goes down.
    keeper: Pid,
    directory: PathBuf,
}

impl JournalDisk {
    /// The disk has what the journal held before. The host's agent restarts on it.
    fn under_journal(lab: &TestLab, host: &str, clocks: &Clocks) -> Self {
        lab.stop_agent(host, Signal::TERM);
        let state = lab.directory(host).join("state").display().to_string();
        let script = format!(
            "cp -a {state} {state}.kept && mount -t tmpfs -o size={JOURNAL_DISK_MIB}m,mode=700 none {state} && \
             cp -a {state}.kept/. {state}/ && touch {state}/.mounted && exec sleep infinity"
        );
        let words = ["unshare", "--mount", "bash", "-c", &script];
        let mut child = lab.lab().spawn(host, &words, &lab.directory(host).join("disk.log")).unwrap();
        let keeper = Pid::from_child(&child);
        // The process ends with the lab.
        thread::spawn(move || child.wait());
        let directory = PathBuf::from(format!("/proc/{keeper}/root{state}"));
        eventually("the disk is mounted", || directory.join(".mounted").exists());
        let disk = Self { keeper, directory };
        let [env, library, clock, program] = &clocks.program(host);
        lab.start_agent_by(host, &["nsenter", &disk.way_in(), env, library, clock, program]);
        disk
    }

    /// The option of nsenter(1) that enters these mounts.
    fn way_in(&self) -> String {
        format!("--mount=/proc/{}/ns/mnt", self.keeper)
    }

    fn filler(&self) -> PathBuf {
        self.directory.join("filler")
    }

    fn fill(&self) {
        let file = File::create(self.filler()).unwrap();
        let mut filled = 0;
        loop {
            let disk = fstatvfs(&file).unwrap();
            let free = disk.f_bavail * disk.f_frsize;
            if free == 0 {
                return;
            }
            // Nothing is written, or filling the disk would take too long. The agent may have used some of the space
            // meanwhile.
            match fallocate(&file, FallocateFlags::empty(), filled, free) {
                Ok(()) => filled += free,
                Err(error) => assert_eq!(error, Errno::NOSPC),
            }
        }
    }

    fn free(&self) {
        remove_if_there(&self.filler());
    }
}
