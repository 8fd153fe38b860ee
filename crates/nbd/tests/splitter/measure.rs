//! Compares the splitter's cost with that of QEMU's client, with its one connection to the same server in the same run:
//! `cargo test --release -p drainpipe-nbd --test splitter measure -- --ignored --nocapture`.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use drainpipe_nbd::ServerAddress;
use tokio::process::Command;

use crate::noise::noise;
use crate::support::{Bench, Server, Settings, assert_same, has_qemu, said};

const MEBIBYTES: u64 = 1024;
const STREAMS: usize = 8;
const ROUNDS: usize = 5;

/// Random bytes all over.
fn full(path: &Path) {
    let file = File::create(path).unwrap();
    for at in 0..MEBIBYTES {
        file.write_all_at(&noise(1 << 20, at + 1), at << 20).unwrap();
    }
}

/// The CPU time of this process, which has both ends of the splitter, in seconds.
fn own_cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap();
    let fields: Vec<&str> = stat.rsplit(')').next().unwrap().split_whitespace().collect();
    // utime and stime, in hundredths of a second on every Linux.
    [fields[11], fields[12]].iter().map(|ticks| ticks.parse::<f64>().unwrap() / 100.0).sum()
}

fn convert(source: &Path, target: &str) -> tokio::process::Child {
    let mut command = Command::new("qemu-img");
    command.args(["convert", "-n", "-f", "raw", "-O", "raw", "-m", "16", "-W"]).arg(source).arg(target);
    command.kill_on_drop(true).spawn().unwrap()
}

fn median(mut of: Vec<f64>) -> f64 {
    of.sort_by(f64::total_cmp);
    of[of.len() / 2]
}

#[tokio::test(flavor = "multi_thread")]
#[ignore = "it measures, which takes a quiet machine and a release build"]
async fn measure_what_it_costs() {
    if !has_qemu() {
        return;
    }
    let (mut stock, mut split, mut cpu) = (vec![], vec![], vec![]);
    for _ in 0..ROUNDS {
        let settings = Settings {
            mebibytes: MEBIBYTES,
            directory: "/dev/shm".into(),
            server: Server::Tcp,
            ..Settings::default()
        };
        let mut bench = Bench::new(settings).await;
        let source = bench.path("source");
        full(&source);
        let ServerAddress::Tcp(address) = &bench.server_address else { panic!("it was asked for TCP") };
        let begun = Instant::now();
        assert!(said(convert(&source, &format!("nbd://{address}/disk"))).await.0);
        stock.push(begun.elapsed().as_secs_f64());
        for _ in 0..STREAMS {
            bench.connect_by_tcp().await;
        }
        let (begun, cpu_before) = (Instant::now(), own_cpu_seconds());
        assert!(said(convert(&source, bench.address())).await.0);
        split.push(begun.elapsed().as_secs_f64());
        bench.ended().await.unwrap();
        cpu.push(own_cpu_seconds() - cpu_before);
        assert_same(&source, &bench.path("target"));
    }
    let gibibytes = MEBIBYTES as f64 / 1024.0;
    let rate = |seconds: Vec<f64>| MEBIBYTES as f64 / median(seconds);
    println!("one connection to the server   {:7.0} MiB/s", rate(stock));
    println!("splitter, {STREAMS} streams            {:7.0} MiB/s", rate(split));
    println!("CPU of both its ends together  {:7.2} core-s per GiB", median(cpu) / gibibytes);
}
