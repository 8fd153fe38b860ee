//! Not a test: measures how long it takes to move a disk with its VM, compared to QEMU's own mirror over one link, for
//! `bench/`.
//!
//! `DRAINPIPE_MEASURE_DISKS=3 cargo test --release -p drainpipe-cli --test end_to_end` prints a table; `-- WORD`
//! selects rows with that word. `DRAINPIPE_MEASURE_DISK_MIB=8192` sets the size of the disk, which is in `TMPDIR`.

mod content;
mod drain;
mod stock;

use std::fs;
use std::path::PathBuf;

use drainpipe_engine::migration::result::{MigrationResult, Outcome};

use crate::measure_faults::spread;
use crate::program::Running;
use crate::scene::result_of;
use crate::support::{TestLab, eventually, lab_for_measuring, measured_links_mbps};

/// The memory of the VM that moves with the disk.
const MEMORY_MIB: u64 = 512;

/// How much of the disk is copied when a copy is interrupted.
const INTERRUPTED_AT_PERCENT: u64 = 80;

const LINKS: f64 = 2.0;

/// A measurement, and the function that repeats it this often.
type Row = (&'static str, fn(usize));

const ROWS: [Row; 4] =
    [("mixed", mixed), ("random", random), ("interrupted", interrupted), ("drain", drain::measure)];

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

    /// Starts a VM with only firmware, which writes nothing.
    fn start(&self) {
        let specification = format!(
            "name = \"web\"\nmemory_mib = {MEMORY_MIB}\nvcpus = 1\nmachine = \"pc-q35-9.2\"\naccelerator = \"tcg\"\n{}",
            self.disk()
        );
        self.lab.create(&specification, "web");
        self.lab.drainpipe(&["vm", "start", "web"]).done();
    }

    fn copy(&self) -> Running {
        let place = format!("vda={}", self.path("b").display());
        self.lab.start(&["migrate", "web", "b", "--json", "--disk", &place])
    }

    /// Moves the VM, ends it, and compares the two disks.
    fn moved(&self) -> MigrationResult {
        let result = result_of(&self.copy().wait_for(stock::PATIENCE));
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

/// How many seconds each of the two ways took to copy a disk.
#[derive(Clone, Copy)]
struct Copied {
    until_ready: f64,
    cpu_of_agents: f64,
    cpu_of_qemus: f64,
}

impl From<&MigrationResult> for Copied {
    fn from(result: &MigrationResult) -> Self {
        let cpu = &result.host_use.cpu_seconds;
        Self {
            until_ready: result.copied.disks[0].ready_ms.expect("it was copied") / 1000.0,
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

/// Compares both ways, in turn.
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

/// A copy that is cancelled late, and begun again.
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
        reached.push(first.copied.disks[0].copied_bytes as f64 / stored_bytes as f64);
        let second = moved.moved();
        again.push(second.copied.disks[0].wire_bytes.expect("it is counted") as f64 / stored_bytes as f64);
    }
    println!("| random | {} | {} |", spread(reached.into_iter(), 2), spread(again.into_iter(), 3));
}
