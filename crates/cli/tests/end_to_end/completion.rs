//! Completion, as a real bash does it.

use std::process::Command;

use crate::Test;
use crate::check_vms::start_vm;
use crate::program::DRAINPIPE;
use crate::support::TestLab;

pub(crate) const TESTS: &[Test] = &[("names_and_no_files", names_and_no_files)];

/// What bash offers for the last of these words, with the agent of host a.
#[track_caller]
fn offered(lab: &TestLab, words: &[&str]) -> Vec<String> {
    const ASK: &str = r#"
        set -euo pipefail
        PATH=$(dirname "$0"):$PATH
        source <(drainpipe completions bash)
        COMP_WORDS=("drainpipe" "$@") COMP_CWORD=$# COMP_TYPE=9
        set +e
        _clap_complete_drainpipe drainpipe "${COMP_WORDS[-1]}" "${COMP_WORDS[-2]}"
        [ ${#COMPREPLY[@]} = 0 ] || printf '%s\n' "${COMPREPLY[@]}""#;
    let mut bash = Command::new("bash");
    bash.args(["-c", ASK, DRAINPIPE]).args(words).current_dir(lab.files());
    let output = bash.env("DRAINPIPE_AGENT", lab.agent_socket("a")).output().unwrap();
    assert!(output.status.success() && output.stderr.is_empty(), "{output:#?}");
    String::from_utf8(output.stdout).unwrap().lines().map(str::to_owned).collect()
}

fn names_and_no_files() {
    let lab = TestLab::fast();
    start_vm(&lab, "web1", "pc-q35-7.2", "");
    start_vm(&lab, "web2", "pc-q35-7.2", "");
    let id = lab.migrate("web2", "b", &[]).id;
    lab.write("web-is-a-file.toml", "");

    assert_eq!(offered(&lab, &["migrate", "we"]), ["web1", "web2"]);
    assert_eq!(offered(&lab, &["migrate", "web1", ""])[..2], ["a", "b"]);
    assert_eq!(offered(&lab, &["drain", "a", "--to", "b"]), ["b"]);
    assert_eq!(offered(&lab, &["migrate", "web1", "b", "--option", "m"]), ["multichannel"]);
    assert_eq!(offered(&lab, &["history", &id[..8]]), [&*id]);
    assert_eq!(offered(&lab, &["cancel", &id[..1]]), [] as [&str; 0], "none is under way");
    assert_eq!(offered(&lab, &["vm", "create", "web-"]), ["web-is-a-file.toml"]);
    assert_eq!(offered(&lab, &["migrate", "web-is"]), [] as [&str; 0]);

    let of_b = lab.agent_socket("b");
    assert_eq!(offered(&lab, &["--agent", "/nonexistent", "vm", "stop", "we"]), [] as [&str; 0]);
    assert_eq!(offered(&lab, &["--agent", &of_b, "vm", "show", "web2"]), ["web2"]);
}
