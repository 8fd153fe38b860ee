//! `drainpipe disk` as a person and a script run it.

#![expect(clippy::unwrap_used, reason = "clippy.toml allows it in test functions; these are their helpers")]

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

const BAD_INPUT: i32 = 2;
const REFUSED: i32 = 3;

fn disk(directory: &Path, arguments: &[&str]) -> Output {
    let mut program = Command::new(env!("CARGO_BIN_EXE_drainpipe"));
    program.arg("disk").args(arguments).current_dir(directory).output().unwrap()
}

#[track_caller]
fn done(output: Output) -> String {
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).unwrap()
}

#[track_caller]
fn refused(output: &Output, code: i32, word: &str) {
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.code() == Some(code) && said.contains(word), "{output:?}");
    assert!(output.stdout.is_empty(), "{output:?}");
}

#[test]
fn the_end_tells_what_was_done_and_by_whom() {
    let directory = tempfile::tempdir().unwrap();
    let made = done(disk(directory.path(), &["create", "a.img", "--size", "1M"]));
    assert!(made.starts_with("a.img is made in ") && made.contains("there were no bytes to move"), "{made}");
    fs::write(directory.path().join("a.img"), vec![7; 1 << 20]).unwrap();
    let by_hand = ["copy", "a.img", "b.img", "--method", "threads"];
    let copied = done(disk(directory.path(), &by_hand));
    assert!(
        copied.contains("the bytes went through this host: 1.00 MiB read and 1.00 MiB written"),
        "{copied}"
    );

    let json = done(disk(directory.path(), &["copy", "a.img", "c.img", "--method", "threads", "--json"]));
    let result: serde_json::Value = serde_json::from_str(&json).unwrap();
    assert_eq!(result["moved_by"], "host");
    assert_eq!(result["host_read_bytes"], 1 << 20);
    assert_eq!(result["measured_by"], "own_count");
    assert_eq!((&result["method"], &result["disk_bytes"]), (&"threads".into(), &(1 << 20).into()));
}

#[test]
fn what_cannot_be_has_the_code_that_scripts_know() {
    let directory = tempfile::tempdir().unwrap();
    done(disk(directory.path(), &["create", "a.img", "--size", "1M"]));
    let refuses = |arguments: &[&str], code, word| refused(&disk(directory.path(), arguments), code, word);
    refuses(&["create", "a.img", "--size", "1M"], REFUSED, "--force");
    refuses(&["create", "b.img"], BAD_INPUT, "--size 100G");
    refuses(&["create", "b.img", "--size", "1.5G"], BAD_INPUT, "as 500M");
    refuses(&["copy", "none.img", "b.img"], BAD_INPUT, "look whether the path is right");
    refuses(&["copy", "a.img", "a.img", "--force"], BAD_INPUT, "the same disk");
    refuses(&["copy", "a.img", "b.img", "--method", "extended_copy"], REFUSED, "leave --method out");
    refuses(&["copy", "a.img", "b.img", "--method", "dd"], BAD_INPUT, "reflink");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 1);
}
