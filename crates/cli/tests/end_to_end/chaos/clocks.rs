//! Wall clocks of hosts that are set forward and back. Hosts of a lab share the machine's clock, which must not be
//! changed, and no namespace has its own. So agents, and the guards that they start, load a small library before the C
//! library, which adds an offset from a file to each wall-clock time. Clocks since boot stay right, as on a host whose
//! clock is set.
//!
//! QEMU runs without the library, with the machine's clock: the monitor's wrapper sees to that.

use std::fs::{self, File};
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use drainpipe_engine::migration::result::{MigrationResult, Outcome};
use jiff::Timestamp;
use rustix::process::{Pid, Signal};
use tempfile::TempDir;

use super::monitor::Monitor;
use crate::program::DRAINPIPE;
use crate::support::{TestLab, eventually};

const SOURCE: &str = include_str!("clock.c");

/// All clocks of a lab.
pub(super) struct Clocks {
    directory: PathBuf,
}

impl Clocks {
    /// The clocks are right until they are set.
    pub(super) fn prepare(lab: &TestLab) -> Self {
        let clocks = Self { directory: lab.files().to_owned() };
        lab.hosts().iter().for_each(|host| fs::write(clocks.file(host), 0_i64.to_ne_bytes()).unwrap());
        let source = lab.write("clock.c", SOURCE);
        let mut compiler = Command::new("cc");
        compiler.args(["-O2", "-shared", "-fPIC", "-o"]).arg(clocks.library()).args([&source, "-ldl"]);
        let output = compiler.output().expect("there is a C compiler: scripts/setup installs one");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        clocks
    }

    /// The command line that runs the program on a host with that host's clock.
    pub(super) fn program(&self, host: &str) -> [String; 4] {
        let library = format!("LD_PRELOAD={}", self.library().display());
        let file = format!("DRAINPIPE_LAB_CLOCK={}", self.file(host).display());
        ["env".into(), library, file, DRAINPIPE.into()]
    }

    /// Sets a host's clock this far ahead of the machine's, or behind it if the number is negative.
    pub(super) fn set_ahead(&self, host: &str, seconds: i64) {
        // Written in place, since agents have mapped the file.
        let file = File::options().write(true).open(self.file(host)).unwrap();
        file.write_all_at(&seconds.to_ne_bytes(), 0).unwrap();
    }

    fn library(&self) -> PathBuf {
        self.directory.join("clock.so")
    }

    fn file(&self, host: &str) -> PathBuf {
        self.directory.join(format!("clock-of-{host}"))
    }

    fn is_in(&self, process: Pid) -> bool {
        let maps = fs::read_to_string(format!("/proc/{process}/maps")).unwrap_or_default();
        maps.contains(&self.library().display().to_string())
    }
}

const HOUR: Duration = Duration::from_hours(1);

/// A clock is set forward before a migration, and is right again before its end.
pub(super) fn agents_and_guards_have_the_clock_of_their_host() {
    let directory = TempDir::new().unwrap();
    let _monitor = Monitor::start(directory.path()).unwrap();
    let lab = super::lab(directory.path(), "60");
    let clocks = Clocks::prepare(&lab);
    lab.stop_agent("a", Signal::TERM);
    lab.start_agent_by("a", &clocks.program("a").each_ref().map(String::as_str));
    let _guest = lab.start_guest("web", 144, "");
    clocks.set_ahead("a", i64::try_from(HOUR.as_secs()).unwrap());
    let before = Timestamp::now();
    let migrating = lab.start(&["migrate", "web", "b", "--json"]);
    let guard = || lab.pids("a", &[" guard --migration "]).first().copied();
    eventually("the migration has a guard", || guard().is_some_and(|guard| clocks.is_in(guard)));
    let qemu = lab.qemu_pid("a", "web").unwrap();
    assert!(!clocks.is_in(qemu), "QEMU has the clock of the machine");
    clocks.set_ahead("a", 0);
    let result: MigrationResult = serde_json::from_str(&migrating.wait().done()).unwrap();
    assert_eq!(result.outcome, Outcome::Completed, "{result:#?}");
    let began: Timestamp = result.started_at.parse().unwrap();
    assert!(began >= before + HOUR && began < before + 2 * HOUR, "{before}: {result:#?}");
    let longest_ms = HOUR.as_secs_f64() * 1000.0 / 2.0;
    assert!(
        result.times.total_ms < longest_ms && result.silence.downtime_ms < Some(longest_ms),
        "{result:#?}"
    );
}
