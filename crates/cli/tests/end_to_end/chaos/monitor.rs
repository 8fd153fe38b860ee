//! Observes each QEMU of a lab without its agent, over its own control connection, which a wrapper around QEMU
//! provides. QEMU connects to the monitor, since a starting QEMU may stay mute to whoever connects too early.

use std::io::{self, BufRead, BufReader, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant, SystemTime};
use std::{fs, thread};

use rustix::net::sockopt::socket_peercred;
use serde_json::Value;

use super::copies::{Copies, CopyId, Identity};
use super::plan::Moment;
use crate::support::give_to_user_of;

/// The time between two questions for the state of a QEMU.
pub(super) const ASK_EVERY: Duration = Duration::from_millis(250);

/// Watches all QEMUs that its wrapper starts.
pub(super) struct Monitor {
    copies: Arc<Mutex<Copies>>,
    seen: Receiver<Seen>,
}

/// What a QEMU has just reported.
#[derive(Debug, Clone)]
pub(super) struct Seen {
    pub(super) vm: String,
    pub(super) host: String,
    pub(super) moment: Moment,
    pub(super) at: Instant,
}

impl Monitor {
    /// Starts a monitor with a socket in `directory`.
    pub(super) fn start(directory: &Path) -> io::Result<Self> {
        let listener = UnixListener::bind(socket(directory))?;
        fs::set_permissions(socket(directory), fs::Permissions::from_mode(0o666))?;
        let copies = Arc::new(Mutex::new(Copies::default()));
        let (tell, seen) = channel();
        let shared = Arc::clone(&copies);
        // Both kinds of thread end with the test's process, or with QEMU.
        thread::spawn(move || {
            for stream in listener.incoming().map_while(Result::ok) {
                let (copies, tell) = (Arc::clone(&shared), tell.clone());
                thread::spawn(move || attend(&stream, &copies, &tell));
            }
        });
        Ok(Self { copies, seen })
    }

    /// A program that runs QEMU, and connects it to a monitor in this directory.
    pub(super) fn wrapper(directory: &Path, qemu: &str) -> io::Result<PathBuf> {
        let program = directory.join("qemu");
        let socket = socket(directory).display().to_string();
        // A QEMU that is only asked for its capabilities has no name. QEMU's user can reach both QEMU and the monitor.
        // The wrapper removes what gives the agent a clock of its own.
        let text = format!(
            "#!/bin/sh\nunset LD_PRELOAD\ncase \" $* \" in *' -name '*)\n  exec {qemu} \"$@\" -chardev socket,id=chaos,path={socket} \
             -mon chardev=chaos,mode=control;;\nesac\nexec {qemu} \"$@\"\n"
        );
        fs::write(&program, text)?;
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755))?;
        give_to_user_of(qemu, directory)?;
        Ok(program)
    }

    /// All that has been seen so far. Nothing more is seen while this is held, so release it before anything slow.
    pub(super) fn copies(&self) -> MutexGuard<'_, Copies> {
        lock(&self.copies)
    }

    /// The next thing that is seen, if it comes in time.
    pub(super) fn next(&self, patience: Duration) -> Option<Seen> {
        match self.seen.recv_timeout(patience) {
            Ok(seen) => Some(seen),
            Err(RecvTimeoutError::Timeout) => None,
            Err(RecvTimeoutError::Disconnected) => unreachable!("its own thread holds a sender"),
        }
    }
}

fn socket(directory: &Path) -> PathBuf {
    directory.join("monitor.sock")
}

fn lock(copies: &Mutex<Copies>) -> MutexGuard<'_, Copies> {
    copies.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Follows one QEMU to its end.
fn attend(stream: &UnixStream, copies: &Mutex<Copies>, tell: &Sender<Seen>) {
    let Some(identity) = identify(stream) else { return };
    let id = lock(copies).began(identity.clone());
    let seen = |moment| {
        let (vm, host) = (identity.vm.clone(), identity.host.clone());
        // The test may be over.
        let _ = tell.send(Seen { vm, host, moment, at: Instant::now() });
    };
    if identity.is_incoming {
        seen(Moment::IncomingVm);
    }
    // Whatever breaks the connection, nobody is left to be asked.
    let _ended = converse(stream, |message| take(message, id, copies, &seen));
    lock(copies).ended(id);
    seen(Moment::Left);
}

/// Identifies the client by its command line and its working directory.
fn identify(stream: &UnixStream) -> Option<Identity> {
    let pid = socket_peercred(stream).ok()?.pid.as_raw_nonzero().get();
    let line = fs::read(format!("/proc/{pid}/cmdline")).ok()?;
    let words: Vec<String> =
        line.split(|byte| *byte == 0).map(|word| String::from_utf8_lossy(word).into_owned()).collect();
    let directory = fs::read_link(format!("/proc/{pid}/cwd")).ok()?;
    // …/HOST/run/vms/VM/qemu
    let name = |level| Some(directory.ancestors().nth(level)?.file_name()?.to_str()?.to_owned());
    let is_incoming = words.iter().any(|word| word == "-incoming");
    Some(Identity { vm: name(1)?, host: name(4)?, pid, is_incoming })
}

/// Asks QEMU for its state again and again, and hands on everything that it says, to the end: a QEMU that has ended
/// takes no questions any more, but what it said before can still be read.
fn converse(stream: &UnixStream, mut take: impl FnMut(&Value)) -> io::Result<()> {
    stream.set_read_timeout(Some(ASK_EVERY))?;
    let mut reading = BufReader::new(stream);
    // Only reading shows that QEMU has ended.
    let ask = |question: &str| drop((&*stream).write_all(question.as_bytes()));
    ask("{\"execute\":\"qmp_capabilities\"}\n");
    let mut line = Vec::new();
    let mut asked_at = Instant::now();
    let mut is_asked = false;
    loop {
        match reading.read_until(b'\n', &mut line) {
            Ok(0) => return Ok(()),
            Ok(_) if line.ends_with(b"\n") => {
                let message: Value = serde_json::from_slice(&line).unwrap_or_default();
                line.clear();
                is_asked &= message.get("id").is_none();
                take(&message);
            }
            Ok(_) => return Ok(()),
            Err(error) if matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::TimedOut) => {}
            Err(error) => return Err(error),
        }
        if !is_asked && asked_at.elapsed() >= ASK_EVERY {
            // The time comes back with the answer: what QEMU says has been true since then.
            ask(&format!("{{\"execute\":\"query-status\",\"id\":{}}}\n", now_us()));
            (is_asked, asked_at) = (true, Instant::now());
        }
    }
}

fn take(message: &Value, id: CopyId, copies: &Mutex<Copies>, seen: &impl Fn(Moment)) {
    if let (Some(asked_us), Some(status)) = (message["id"].as_u64(), message["return"]["status"].as_str()) {
        lock(copies).answered(id, asked_us, status);
        return;
    }
    let Some(event) = message["event"].as_str() else { return };
    let stamp = &message["timestamp"];
    let at_us = stamp["seconds"].as_u64().unwrap_or_default() * 1_000_000
        + stamp["microseconds"].as_u64().unwrap_or_default();
    match event {
        "RESUME" if lock(copies).resumed(id, at_us) => seen(Moment::Resumed),
        "STOP" => {
            lock(copies).stopped(id, at_us);
            seen(Moment::Paused);
        }
        "SHUTDOWN" => {
            lock(copies).shut_down(id, message["data"]["reason"].as_str().unwrap_or("unknown"));
        }
        "MIGRATION" if message["data"]["status"] == "active" && lock(copies).is_running(id) => {
            seen(Moment::Active);
        }
        _ => {}
    }
}

/// The time by the clock with which QEMU stamps its events.
pub(super) fn now_us() -> u64 {
    let since = SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_micros()).unwrap_or(u64::MAX)
}
