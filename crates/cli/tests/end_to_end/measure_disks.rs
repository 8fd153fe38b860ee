//! Not a test: measures what it takes to move a disk with its VM, beside QEMU's own mirror over one link, for `bench/`.
//!
//! `DRAINPIPE_MEASURE_DISKS=3 cargo test --release -p drainpipe-cli --test end_to_end` prints a table; with `-- WORD`, of
//! the rows with that word. `DRAINPIPE_MEASURE_DISK_MIB=8192` says how large the disk is. It lies in `TMPDIR`.

mod content;
mod drain;
mod stock;

use std::fs;
use std::path::PathBuf;

use drainpipe_engine::result::{MigrationResult, Outcome};
use drainpipe_guest::block::new_disk;

use crate::guest::Guest;
use crate::measure_faults::spread;
use crate::program::Running;
use crate::scene::result_of;
use crate::support::{TestLab, eventually, lab_for_measuring, measured_links_mbps};

/// Of the VM that moves with the disk.
const MEMORY_MIB: u64 = 512;

/// Of the disk that a guest writes to.
const WRITTEN_MIB: usize = 1024;

/// Of each of both links in those rows: half of them is what a guest without KVM can write.
const WRITTEN_OVER_MBPS: &str = "100";

/// 4 KiB each: half of what both links carry.
const WRITES_PER_S: u32 = 3000;

/// Of the disk, when a copy is interrupted.
const INTERRUPTED_AT_PERCENT: u64 = 80;

const LINKS: f64 = 2.0;

/// What is measured, so many times.
type Row = (&'static str, fn(usize));

const ROWS: [Row; 6] = [
    ("mixed", mixed),
    ("random", random),
    ("interrupted", interrupted),
    ("writer", writer),
    ("latency", latency),
    ("drain", drain::measure),
];

/// A lab whose hosts see different directories, with a VM on `a`.
struct Moved {
    lab: TestLab,
    size_bytes: u64,
}

impl Moved {
    fn begin(write: impl FnOnce(&std::path::Path)) -> Self {
        let lab = lab_for_measuring();
        for host in ["a", "b"] {
            fs::create_dir_all(lab.files().join(host)).unwrap();
        }
        let disk = lab.files().join("a/web.raw");
        write(&disk);
        let size_bytes = disk.metadata().unwrap().len();
        Self { lab, size_bytes }
    }

    fn path(&self, host: &str) -> PathBuf {
        self.lab.files().join(host).join("web.raw")
    }

    fn disk(&self) -> String {
        format!("[[disk]]\npath = \"{}\"\nformat = \"raw\"\n", self.path("a").display())
    }

    /// Of firmware alone, which writes nothing.
    fn start(&self) {
        let specification = format!(
            "name = \"web\"\nmemory_mib = {MEMORY_MIB}\nvcpus = 1\nmachine = \"pc-q35-9.2\"\naccelerator = \"tcg\"\n{}",
            self.disk()
        );
        self.lab.create(&specification, "web");
        self.lab.drainpipe(&["vm", "start", "web"]).done();
    }

    /// Of a guest that writes it.
    fn boot(&self) -> Guest {
        let guest = Guest::new("web", self.lab.guest_address(), self.lab.namespace("client"));
        let specification =
            Guest::on_newer_machine(&guest.specification(MEMORY_MIB, "drainpipe.disks=1")) + &self.disk();
        self.lab.create(&specification, "web");
        self.lab.drainpipe(&["vm", "start", "web"]).done();
        guest.wait_until_ready();
        guest
    }

    fn copy(&self) -> Running {
        let place = format!("vda={}", self.path("b").display());
        self.lab.start(&["migrate", "web", "b", "--json", "--disk", &place])
    }

    /// Moves it, ends it, and compares the two disks.
    fn moved(&self) -> MigrationResult {
        let result = result_of(&self.copy().wait());
        assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
        self.lab.drainpipe(&["vm", "stop", "web", "--force", "--agent", &self.lab.agent_socket("b")]).done();
        let kept = fs::read_dir(self.lab.files().join("a")).unwrap().next().unwrap().unwrap().path();
        content::assert_same(&kept, &self.path("b"));
        result
    }
}

pub(crate) fn run(repeats: usize, word: &str) {
    for (_, measure) in ROWS.iter().filter(|(name, _)| name.contains(word)) {
        measure(repeats);
    }
}

fn disk_mib() -> u64 {
    std::env::var("DRAINPIPE_MEASURE_DISK_MIB").map_or(8192, |mib| mib.parse().expect("a number"))
}

/// What one of the two ways took to copy a disk, in seconds.
#[derive(Clone, Copy)]
struct Copied {
    until_ready: f64,
    cpu_of_agents: f64,
    cpu_of_qemus: f64,
}

impl From<&MigrationResult> for Copied {
    fn from(result: &MigrationResult) -> Self {
        let cpu = &result.cpu_seconds;
        Self {
            until_ready: result.disks[0].ready_ms.expect("it was copied") / 1000.0,
            cpu_of_agents: cpu.source_agent + cpu.target_agent,
            cpu_of_qemus: cpu.source_vmm + cpu.target_vmm,
        }
    }
}

fn mixed(repeats: usize) {
    compare("a third random, a third text, a third never written", repeats, content::write_mixed);
}

fn random(repeats: usize) {
    compare("random", repeats, content::write_random);
}

/// By turns.
fn compare(content: &str, repeats: usize, write: fn(&std::path::Path, u64) -> u64) {
    println!(
        "| disk | way | until it is there, s | stored bytes, of the links | agents' CPU, s/GiB | QEMUs' CPU, s/GiB |"
    );
    println!("|---|---|---|---|---|---|");
    let (mut by_stock, mut by_us, mut stored_bytes) = (vec![], vec![], 0);
    for _ in 0..repeats {
        let moved = Moved::begin(|disk| stored_bytes = write(disk, disk_mib() << 20));
        moved.start();
        by_stock.push(stock::mirror(&moved));
        by_us.push(Copied::from(&moved.moved()));
    }
    for (way, copies) in [("QEMU's mirror, one link", &by_stock), ("Drainpipe, both links", &by_us)] {
        let of = |quantity: &dyn Fn(&Copied) -> f64, digits| spread(copies.iter().map(quantity), digits);
        let links_bytes_per_s = LINKS * f64::from(measured_links_mbps()) * 1e6 / 8.0;
        let gib = stored_bytes as f64 / f64::from(1 << 30);
        println!(
            "| {content} | {way} | {} | {} | {} | {} |",
            of(&|copied| copied.until_ready, 2),
            of(&|copied| stored_bytes as f64 / copied.until_ready / links_bytes_per_s, 3),
            of(&|copied| copied.cpu_of_agents / gib, 2),
            of(&|copied| copied.cpu_of_qemus / gib, 2),
        );
    }
}

/// Cancelled late, and begun again.
fn interrupted(repeats: usize) {
    println!("| disk | interrupted at | sent again, of the stored bytes |");
    println!("|---|---|---|");
    let (mut reached, mut again) = (vec![], vec![]);
    for _ in 0..repeats {
        let mut stored_bytes = 0;
        let moved = Moved::begin(|disk| stored_bytes = content::write_random(disk, disk_mib() << 18));
        moved.start();
        let migrating = moved.copy();
        let wanted_bytes = moved.size_bytes / 100 * INTERRUPTED_AT_PERCENT;
        let copied_bytes = || {
            let view = moved.lab.migrations("a").into_iter().next()?;
            Some(view.progress?.disks.first()?.copied_bytes)
        };
        eventually("most is copied", || copied_bytes().is_some_and(|bytes| bytes >= wanted_bytes));
        moved.lab.drainpipe(&["cancel", &moved.lab.migrations("a").remove(0).id]).done();
        migrating.wait();
        let first = moved.lab.migrations("a").remove(0).result.expect("it has ended");
        reached.push(first.disks[0].copied_bytes as f64 / stored_bytes as f64);
        let second = moved.moved();
        again.push(second.disks[0].wire_bytes.expect("it is counted") as f64 / stored_bytes as f64);
    }
    println!("| random | {} | {} |", spread(reached.into_iter(), 2), spread(again.into_iter(), 3));
}

/// A guest that writes half of what the links carry moves with its disk; and without, for its pause.
fn writer(repeats: usize) {
    println!("| writer at half the links' rate | pause, ms | disk, s | whole, s |");
    println!("|---|---|---|---|");
    let mut ways = [("without its disk", vec![]), ("with its disk", vec![])];
    for _ in 0..repeats {
        let moved = written();
        let guest = moved.boot();
        guest.control().expect("it is ready").write(WRITES_PER_S, stock::PATIENCE).unwrap();
        ways[0].1.push(moved.lab.migrate("web", "b", &[]));
        moved.lab.migrate("web", "a", &[]);
        ways[1].1.push(result_of(&moved.copy().wait()));
        assert_intact(&guest);
    }
    for (way, results) in &ways {
        let of = |quantity: &dyn Fn(&MigrationResult) -> Option<f64>, digits| {
            spread(results.iter().filter_map(quantity), digits)
        };
        println!(
            "| {way} | {} | {} | {} |",
            of(&|result| result.downtime_ms, 0),
            of(&|result| Some(result.disks.first()?.ready_ms? / 1000.0), 1),
            of(&|result| Some(result.total_ms / 1000.0), 1)
        );
    }
}

fn written() -> Moved {
    let moved = Moved::begin(|disk| fs::write(disk, new_disk(0, WRITTEN_MIB)).unwrap());
    for link in ["e0", "e1"] {
        moved.lab.fault(&format!("rate {link} {WRITTEN_OVER_MBPS}"));
    }
    moved
}

#[track_caller]
fn assert_intact(guest: &Guest) {
    eventually("the guest is reached", || guest.control().is_some());
    let found = guest.control().expect("it was reached").verify_disks(stock::PATIENCE).unwrap();
    assert_eq!((found.wrong, found.failed_writes), (0, 0), "{found}");
}

/// How long a guest's writes take while nothing is copied, and while each of the two ways copies; with a flush each.
fn latency(repeats: usize) {
    println!("| while | median write, ms | 99 of 100, ms |");
    println!("|---|---|---|");
    let mut ways =
        [("nothing is copied", vec![]), ("QEMU's mirror copies", vec![]), ("Drainpipe copies", vec![])];
    for _ in 0..repeats {
        let moved = written();
        let guest = moved.boot();
        let written = || guest.control().expect("it is reached").disks(stock::PATIENCE).unwrap();
        let begin =
            || guest.control().expect("it is reached").write(stock::LATENCY_WRITES_PER_S, stock::PATIENCE);
        begin().unwrap();
        std::thread::sleep(stock::LATENCY_FOR);
        ways[0].1.push(written());
        ways[1].1.push(stock::while_it_copies(&moved, || {
            begin().unwrap();
            std::thread::sleep(stock::LATENCY_FOR);
            written()
        }));
        let migrating = moved.copy();
        eventually("it is copied", || {
            let views = moved.lab.migrations("a");
            let progress = views.first().and_then(|view| view.progress.as_ref());
            progress.is_some_and(|progress| progress.disks.iter().any(|disk| disk.copied_bytes > 0))
        });
        begin().unwrap();
        std::thread::sleep(stock::LATENCY_FOR);
        ways[2].1.push(written());
        assert_eq!(result_of(&migrating.wait()).outcome, Outcome::Completed);
        assert_intact(&guest);
    }
    for (way, status) in &ways {
        let of = |quantity: fn(&drainpipe_guest::protocol::DiskStatus) -> u32| {
            spread(status.iter().map(|status| f64::from(quantity(status)) / 1000.0), 2)
        };
        println!(
            "| {way} | {} | {} |",
            of(|status| status.median_write_us),
            of(|status| status.p99_write_us)
        );
    }
}
