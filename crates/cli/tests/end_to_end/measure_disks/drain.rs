//! A host that is emptied of VMs with their own disks.

use std::time::Instant;

use super::stock::PATIENCE;
use super::{LINKS, content, disk_mib};
use crate::drained_disks::Site;
use crate::measure_faults::spread;
use crate::support::{lab_for_measuring, measured_links_mbps};

const VMS: usize = 6;

/// Compares with the time in which both links carry everything that is stored.
pub(super) fn measure(repeats: usize) {
    println!("| drain of {VMS} VMs, each with a disk of random bytes | took, s | of the links' own time |");
    println!("|---|---|---|");
    let took: Vec<(u64, f64)> = (0..repeats).map(|_| drain()).collect();
    let links_bytes_per_s = LINKS * f64::from(measured_links_mbps()) * 1e6 / 8.0;
    let of_links = |(bytes, seconds): &(u64, f64)| seconds / (*bytes as f64 / links_bytes_per_s);
    println!(
        "| {} MiB each | {} | {} |",
        disk_mib() / VMS as u64,
        spread(took.iter().map(|(_, seconds)| *seconds), 1),
        spread(took.iter().map(of_links), 3)
    );
}

/// How much is stored on all disks, and how long the drain took.
fn drain() -> (u64, f64) {
    let site = Site::of(lab_for_measuring());
    let names = || (0..VMS).map(|number| format!("w{number}"));
    let mut bytes = 0;
    for name in names() {
        let disk = site.own("a").join(format!("{name}.raw"));
        bytes += content::write_random(&disk, disk_mib() / VMS as u64 * (1 << 20));
        site.start_with_own(&name);
    }
    let lab = &site.lab;
    let began = Instant::now();
    lab.start(&["drain", "a", "--copy-storage", "--yes"]).wait_for(PATIENCE).done();
    let took_s = began.elapsed().as_secs_f64();
    for name in names() {
        lab.drainpipe(&["vm", "stop", &name, "--force", "--agent", &lab.agent_socket("b")]).done();
    }
    (bytes, took_s)
}
