//! An agent that may neither start QEMU nor reach into it, as under systemd, and the keeper that does so for it.

use std::fs;

use drainpipe_engine::option::MigrationOption;
use rustix::process::{Pid, Signal, kill_process};

use crate::Test;
use crate::program::DRAINPIPE;
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] =
    &[("an_agent_without_rights_has_a_keeper", an_agent_without_rights_has_a_keeper)];

/// The capabilities that the agent's unit leaves it.
const CAPABILITIES: &str = "--bounding-set=-all,+net_admin,+dac_override,+dac_read_search";

/// The program that does what systemd does with a socket unit.
const ACTIVATE: &str = "systemd-socket-activate";

fn an_agent_without_rights_has_a_keeper() {
    let lab = TestLab::brisk();
    if !["a", "b"].iter().all(|host| give_keeper(&lab, host)) {
        return;
    }
    let guest = lab.start_guest("web", 160, "");
    assert_eq!(status(lab.agent_pid("a").unwrap(), "CapBnd"), "0000000000001006");
    assert_eq!(status(lab.qemu_pid("a", "web").unwrap(), "CapBnd"), "0000000000000000");
    // The keeper looks at the VM's pages, and holds its connections back.
    for (to, option) in [("b", MigrationOption::Multichannel), ("a", MigrationOption::Compression)] {
        let result = lab.migrate("web", to, &["--option", &option.to_string()]);
        assert_eq!((result.choice.option, result.choice.fallback_reason), (option, None));
    }
    lab.migrate("web", "b", &[]);
    guest.assert_intact();
    lives_on_without_agent_and_keeper(&lab);
    ends_are_reported(&lab);
}

/// Restarts the host's agent with the rights that its unit leaves it. Returns whether this machine has what that needs,
/// and prints what is missing.
#[track_caller]
pub(crate) fn give_keeper(lab: &TestLab, host: &str) -> bool {
    if lab.exec(host, &[ACTIVATE, "--version"]).code != 0 {
        eprintln!("SKIPPED: {ACTIVATE} is missing");
        return false;
    }
    lab.stop_agent(host, Signal::TERM);
    let directory = lab.directory(host);
    let path = |file: &str| directory.join(file).to_str().unwrap().to_owned();
    let (socket, config) = (path("keeper.sock"), path("agent.toml"));
    let keeper = [DRAINPIPE, "keeper", "--config", &config];
    let activate =
        [&[ACTIVATE, "--seqpacket", "--accept", "--inetd", "--listen", &socket], &keeper[..]].concat();
    let mut child = lab.lab().spawn(host, &activate, &directory.join("keeper.log")).unwrap();
    // It ends with the lab.
    std::thread::spawn(move || child.wait());
    eventually("the keeper's socket is there", || fs::exists(&socket).unwrap());
    let variable = format!("DRAINPIPE_KEEPER={socket}");
    lab.start_agent_by(host, &["setpriv", CAPABILITIES, "env", &variable, DRAINPIPE]);
    true
}

fn keepers(lab: &TestLab, host: &str) -> Vec<Pid> {
    let config = lab.directory(host).join("agent.toml");
    let keeps = [DRAINPIPE, "keeper", "--config", config.to_str().unwrap()];
    let all = lab.pids(host, &keeps);
    all.into_iter().filter(|pid| !status(*pid, "Name").starts_with("systemd")).collect()
}

fn lives_on_without_agent_and_keeper(lab: &TestLab) {
    let before = lab.qemu_pid("b", "web");
    for keeper in keepers(lab, "b") {
        kill_process(keeper, Signal::KILL).unwrap();
    }
    eventually("the keeper has ended", || keepers(lab, "b").is_empty());
    assert_eq!(lab.qemu_pid("b", "web"), before);
    // The next request starts another keeper.
    lab.migrate("web", "a", &["--option", "multichannel"]);
    assert_eq!(keepers(lab, "b").len(), 1);
    let before = lab.qemu_pid("a", "web");
    lab.stop_agent("a", Signal::KILL);
    eventually("the keeper ends with its connection", || keepers(lab, "a").is_empty());
    assert_eq!(lab.qemu_pid("a", "web"), before);
    let socket = format!("DRAINPIPE_KEEPER={}", lab.directory("a").join("keeper.sock").display());
    lab.start_agent_by("a", &["setpriv", CAPABILITIES, "env", &socket, DRAINPIPE]);
    lab.assert_runs_on("web", "a");
}

/// The agent reports how a QEMU ended, even if that is not its child.
fn ends_are_reported(lab: &TestLab) {
    lab.migrate("web", "b", &["--option", "tcp"]);
    kill_process(lab.qemu_pid("b", "web").unwrap(), Signal::KILL).unwrap();
    eventually("the agent tells how it ended", || lab.agent_log("b").contains("signal 9"));
}

fn status(pid: Pid, field: &str) -> String {
    let text = fs::read_to_string(format!("/proc/{}/status", pid.as_raw_nonzero())).unwrap_or_default();
    let found = text.lines().find_map(|line| line.strip_prefix(field)?.strip_prefix(":\t"));
    found.unwrap_or_default().to_owned()
}
