//! A host is emptied of VMs with disks of their own.

use std::fs;
use std::time::Instant;

use super::stock::PATIENCE;
use super::{LINKS, content, disk_mib};
use crate::measure_faults::spread;
use crate::support::{lab_for_measuring, measured_links_mbps};

const VMS: usize = 6;

/// Against the time in which both links carry all that is stored.
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

/// What is stored on all disks, and how long it took.
fn drain() -> (u64, f64) {
    let lab = lab_for_measuring();
    let directory = lab.files().join("disks");
    fs::create_dir_all(&directory).unwrap();
    let own = |host: &str| lab.files().join(format!("on-{host}"));
    for host in ["a", "b"] {
        fs::create_dir_all(own(host)).unwrap();
        let mount = format!("mount --bind {} {}", own(host).display(), directory.display());
        crate::check_vms::restart_agent_with_mounts(&lab, host, &mount);
    }
    let mut bytes = 0;
    for number in 0..VMS {
        let name = format!("w{number}");
        let disk = format!("{name}.raw");
        bytes += content::write_random(&own("a").join(&disk), disk_mib() / VMS as u64 * (1 << 20));
        let specification = format!(
            "name = \"{name}\"\nmemory_mib = 64\nvcpus = 1\nmachine = \"pc-q35-9.2\"\naccelerator = \"tcg\"\n\
             [[disk]]\npath = \"{}\"\nformat = \"raw\"\n",
            directory.join(&disk).display()
        );
        lab.create(&specification, &name);
        lab.drainpipe(&["vm", "start", &name]).done();
    }
    let began = Instant::now();
    lab.start(&["drain", "a", "--copy-storage", "--yes"]).wait_for(PATIENCE).done();
    let took_s = began.elapsed().as_secs_f64();
    for number in 0..VMS {
        let name = format!("w{number}");
        lab.drainpipe(&["vm", "stop", &name, "--force", "--agent", &lab.agent_socket("b")]).done();
    }
    (bytes, took_s)
}
