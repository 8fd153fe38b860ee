//! The agent as a service manager sees it.

use std::os::unix::net::UnixDatagram;

use rustix::process::Signal;

use crate::Test;
use crate::program::DRAINPIPE;
use crate::support::{PATIENCE, TestLab};

pub(crate) const TESTS: &[Test] = &[("the_agent_says_when_it_serves", the_agent_says_when_it_serves)];

fn the_agent_says_when_it_serves() {
    let lab = TestLab::fast();
    lab.stop_agent("a", Signal::TERM);
    let directory = lab.directory("a");
    let manager = UnixDatagram::bind(directory.join("notify.sock")).unwrap();
    manager.set_read_timeout(Some(PATIENCE)).unwrap();
    let socket = format!("NOTIFY_SOCKET={}", directory.join("notify.sock").display());
    lab.spawn_agent("a", &["env", &socket, DRAINPIPE]);

    let mut said = [0; 64];
    let length = manager.recv(&mut said).unwrap();
    assert_eq!(&said[..length], b"READY=1\n");
    lab.drainpipe(&["vms"]).done();
}
