//! File systems in a test's own mount namespace: nothing is left of them, however the test ends.

use std::path::{Path, PathBuf};
use std::process::Command;

/// Set in the process that is in the namespace.
const INSIDE: &str = "DRAINPIPE_TEST_INSIDE";

/// Set where a test that cannot run is a failure.
const ALL: &str = "DRAINPIPE_TEST_STORAGE";

/// Whether this process is to run the test. Any other process starts that one, and passes its exit code on.
pub(crate) fn is_inside(test: &str, needed: &[&str]) -> bool {
    if std::env::var_os(INSIDE).is_some() {
        return true;
    }
    if let Some(missing) = missing(needed) {
        assert!(std::env::var_os(ALL).is_none(), "{missing}");
        eprintln!("SKIPPED: {missing}");
        return false;
    }
    let output = Command::new("unshare")
        .args(["--mount", "--propagation", "private"])
        .arg(std::env::current_exe().unwrap())
        .args(["--exact", test, "--nocapture"])
        .env(INSIDE, "1")
        .output()
        .expect("unshare(1) of util-linux");
    let said = String::from_utf8_lossy(&output.stdout);
    let is_passed = output.status.success() && said.contains("1 passed");
    assert!(is_passed, "{said}{}", String::from_utf8_lossy(&output.stderr));
    false
}

fn missing(needed: &[&str]) -> Option<String> {
    if !rustix::process::geteuid().is_root() {
        return Some("not root".into());
    }
    let is_there = |program: &&&str| {
        Command::new(program).arg("-V").output().is_ok()
            || Command::new(program).arg("--version").output().is_ok()
    };
    needed.iter().find(|program| !is_there(program)).map(|program| format!("no {program}"))
}

#[track_caller]
pub(crate) fn run(program: &str, arguments: &[&str]) -> String {
    let output = Command::new(program).args(arguments).output().unwrap();
    assert!(output.status.success(), "{program} {arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().into()
}

/// A file system in memory with this many bytes.
pub(crate) fn tmpfs(on: &Path, size: &str) -> PathBuf {
    run("mount", &["-t", "tmpfs", "-o", &format!("size={size}"), "tmpfs", on.to_str().unwrap()]);
    on.into()
}

/// A file system in a file next to its mount point.
pub(crate) fn in_a_file(directory: &Path, make: &[&str], size_bytes: u64) -> PathBuf {
    let (image, on) = (directory.join("image"), directory.join("on"));
    std::fs::File::create(&image).unwrap().set_len(size_bytes).unwrap();
    std::fs::create_dir(&on).unwrap();
    run(make[0], &[&make[1..], &[image.to_str().unwrap()]].concat());
    run("mount", &["-o", "loop", image.to_str().unwrap(), on.to_str().unwrap()]);
    on
}
