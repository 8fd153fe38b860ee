//! The program under test, run as a user runs it.

use std::io::Read;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc::{Receiver, channel};
use std::thread;
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};

/// The program.
pub(crate) const DRAINPIPE: &str = env!("CARGO_BIN_EXE_drainpipe");

/// Exit codes, as `drainpipe --help` lists them.
pub(crate) const FAILED: i32 = 1;
pub(crate) const BAD_INPUT: i32 = 2;
pub(crate) const REFUSED: i32 = 3;
pub(crate) const CANCELLED: i32 = 5;
pub(crate) const WARNED: i32 = 6;
/// The code if a VM ended during its migration.
pub(crate) const LOST: i32 = 7;

/// The longest that any command of these tests needs, on a machine that runs other tests too.
const DEADLINE: Duration = Duration::from_mins(2);

/// How long a program's output may still take to arrive after the program has ended.
const OUTPUT_DEADLINE: Duration = Duration::from_secs(5);

/// The exit code and output of a program.
#[derive(Debug)]
pub(crate) struct Output {
    /// Its exit code; -1 if a signal ended it.
    pub(crate) code: i32,
    pub(crate) stdout: String,
    pub(crate) stderr: String,
}

impl Output {
    /// Its output; fails the test unless it succeeded.
    #[track_caller]
    pub(crate) fn done(self) -> String {
        assert_eq!(self.code, 0, "{self:#?}");
        self.stdout
    }

    /// Fails the test unless it ended with this code, and its complaint contains all these words.
    #[track_caller]
    pub(crate) fn refused(self, code: i32, words: &[&str]) {
        assert_eq!(self.code, code, "{self:#?}");
        for word in words {
            assert!(self.stderr.contains(word), "`{word}` is missing: {self:#?}");
        }
        assert!(!self.stderr.contains("panicked"), "{self:#?}");
    }
}

/// The program with these arguments; it knows no agent of the machine.
pub(crate) fn command(arguments: &[&str]) -> Command {
    command_of(DRAINPIPE, arguments)
}

/// The same, for this program.
pub(crate) fn command_of(program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).env_remove("DRAINPIPE_AGENT").env_remove("DRAINPIPE_IDENTITY");
    command.env_remove("DRAINPIPE_CLIENT_NAMESPACE").env_remove("DRAINPIPE_LOG");
    command
}

/// Runs the program to its end.
#[track_caller]
pub(crate) fn drainpipe(arguments: &[&str]) -> Output {
    Running::start(command(arguments)).wait()
}

/// A program that runs. It is killed when this is dropped.
pub(crate) struct Running {
    child: Child,
    stdout: Receiver<String>,
    stderr: Receiver<String>,
    what: String,
}

impl Running {
    #[track_caller]
    pub(crate) fn start(mut command: Command) -> Self {
        let what = format!("{command:?}");
        let started = command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = started.unwrap_or_else(|error| panic!("{what}: {error}"));
        let stdout = collect(child.stdout.take().unwrap());
        let stderr = collect(child.stderr.take().unwrap());
        Self { child, stdout, stderr, what }
    }

    pub(crate) fn pid(&self) -> u32 {
        self.child.id()
    }

    pub(crate) fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).expect("the program still runs");
    }

    /// Whether [`Self::wait`] would return at once.
    pub(crate) fn has_ended(&mut self) -> bool {
        self.child.try_wait().unwrap().is_some()
    }

    #[track_caller]
    pub(crate) fn wait(self) -> Output {
        self.wait_for(DEADLINE)
    }

    #[track_caller]
    pub(crate) fn wait_for(mut self, at_most: Duration) -> Output {
        let end = Instant::now() + at_most;
        let status = loop {
            match self.child.try_wait().unwrap() {
                Some(status) => break status,
                None if Instant::now() < end => thread::sleep(Duration::from_millis(5)),
                None => panic!("{} did not end within {at_most:?}", self.what),
            }
        };
        let text = |from: &Receiver<String>| {
            from.recv_timeout(OUTPUT_DEADLINE).expect("nothing that it started holds its output open")
        };
        Output { code: status.code().unwrap_or(-1), stdout: text(&self.stdout), stderr: text(&self.stderr) }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        // It has ended already, unless the test failed.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn collect(mut pipe: impl Read + Send + 'static) -> Receiver<String> {
    let (sender, receiver) = channel();
    thread::spawn(move || {
        let mut bytes = Vec::new();
        let read = pipe.read_to_end(&mut bytes);
        let text = String::from_utf8_lossy(&bytes).into_owned();
        // A test that has failed no longer waits.
        let _ = sender.send(read.map_or_else(|error| format!("{text}\n{error}"), |_| text.clone()));
    });
    receiver
}
