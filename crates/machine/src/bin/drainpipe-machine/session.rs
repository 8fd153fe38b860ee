//! One program's run.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::AsFd;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use drainpipe_machine::protocol::{CHUNK_BYTES, Message, Request, Session};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, Signal, kill_process_group};

use crate::boot::environment;

/// How soon the end of a program is seen whose output others hold open. What it has printed by then is there at once.
const OUTPUT_POLL: Timespec = Timespec { tv_sec: 0, tv_nsec: 100_000_000 };

/// What a pipe holds (pipe(7)), and so the most that nobody has read of what a program has printed by its end: what comes
/// after it is of others, which may never end.
const PIPE_BYTES: usize = 64 << 10;

/// What a program whose user has gone has to end by itself.
const TERM_LIMIT: Duration = Duration::from_secs(5);
const TERM_POLL: Duration = Duration::from_millis(10);

/// A program that runs. When this is dropped, it is ended.
pub(crate) struct Run {
    /// `None` once it has no more input.
    input: Option<SyncSender<Vec<u8>>>,
    line: Arc<Line>,
    group: Pid,
    has_ended: Arc<AtomicBool>,
}

/// What the run's threads say goes here.
struct Line {
    port: Arc<Mutex<File>>,
    session: Session,
}

impl Line {
    fn say(&self, message: &Message) {
        let mut port = self.port.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
        // Whoever has gone need not hear it.
        let _ = port.write_all(&message.encode(self.session));
    }
}

impl Run {
    /// Starts the program; none if that fails, which the user learns.
    ///
    /// All runs of a port share it: a frame of one that has lost its user is never within another's.
    pub(crate) fn start(port: &Arc<Mutex<File>>, session: Session, request: &Request) -> Option<Self> {
        let line = Arc::new(Line { port: Arc::clone(port), session });
        match spawn(request) {
            Ok(child) => Some(Self::of(child, line)),
            Err(error) => {
                let program = request.words.first().map_or("nothing", String::as_str);
                line.say(&Message::Refused(format!("cannot run {program}: {error}")));
                None
            }
        }
    }

    fn of(mut child: Child, line: Arc<Line>) -> Self {
        line.say(&Message::Started);
        let group = Pid::from_child(&child);
        let has_ended = Arc::new(AtomicBool::new(false));
        let (input, chunks) = sync_channel(1);
        if let Some(stdin) = child.stdin.take() {
            let line = Arc::clone(&line);
            thread::spawn(move || feed(stdin, &chunks, &line));
        }
        let pumps = [
            child.stdout.take().map(|from| pump(from, Message::Output, &line, &has_ended)),
            child.stderr.take().map(|from| pump(from, Message::Errors, &line, &has_ended)),
        ];
        let ended = (Arc::clone(&line), Arc::clone(&has_ended));
        thread::spawn(move || {
            let code = child.wait().map_or(-1, code);
            ended.1.store(true, Ordering::Release);
            pumps.into_iter().flatten().for_each(|pump| drop(pump.join()));
            ended.0.say(&Message::Ended(code));
        });
        Self { input: Some(input), line, group, has_ended }
    }

    /// Never waits: a user sends no more than one chunk that is not taken.
    pub(crate) fn hear(&mut self, message: Message) {
        match message {
            Message::Input(bytes) => {
                let sent = self.input.as_ref().map(|input| input.try_send(bytes));
                if !matches!(sent, Some(Ok(()))) {
                    // The program reads no more; that is no fault of its user's.
                    self.line.say(&Message::InputTaken);
                }
            }
            Message::InputEnd => self.input = None,
            _ => {}
        }
    }
}

impl Drop for Run {
    fn drop(&mut self) {
        let (group, has_ended) = (self.group, Arc::clone(&self.has_ended));
        if !has_ended.load(Ordering::Acquire) {
            thread::spawn(move || end(group, &has_ended));
        }
    }
}

fn spawn(request: &Request) -> io::Result<Child> {
    let (program, arguments) = request.words.split_first().ok_or(io::ErrorKind::InvalidInput)?;
    let directory = Some(request.directory.as_path()).filter(|path| path.is_dir()).unwrap_or(Path::new("/"));
    Command::new(program)
        .args(arguments)
        .current_dir(directory)
        .env_clear()
        .envs(environment())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .process_group(0)
        .spawn()
}

fn feed(mut stdin: ChildStdin, chunks: &Receiver<Vec<u8>>, line: &Line) {
    for chunk in chunks {
        if stdin.write_all(&chunk).is_err() {
            // What comes now is taken, and lost, as by a pipe that nobody reads.
            line.say(&Message::InputTaken);
            return;
        }
        line.say(&Message::InputTaken);
    }
}

fn pump<F: Read + AsFd + Send + 'static>(
    mut from: F,
    say: fn(Vec<u8>) -> Message,
    line: &Arc<Line>,
    has_ended: &Arc<AtomicBool>,
) -> JoinHandle<()> {
    let (line, has_ended) = (Arc::clone(line), Arc::clone(has_ended));
    thread::spawn(move || {
        let mut bytes = vec![0; CHUNK_BYTES];
        let mut left_bytes = PIPE_BYTES;
        while left_bytes > 0 {
            let is_last_look = has_ended.load(Ordering::Acquire);
            let wait = if is_last_look { Timespec::default() } else { OUTPUT_POLL };
            let ready = poll(&mut [PollFd::new(&from, PollFlags::IN)], Some(&wait));
            match ready {
                Ok(0) if is_last_look => return,
                Ok(0) | Err(rustix::io::Errno::INTR) => continue,
                Ok(_) => {}
                Err(_) => return,
            }
            match from.read(&mut bytes) {
                Ok(0) | Err(_) => return,
                Ok(read) => {
                    line.say(&say(bytes[..read].to_vec()));
                    if is_last_look {
                        left_bytes = left_bytes.saturating_sub(read);
                    }
                }
            }
        }
    })
}

/// As a shell says it.
fn code(status: ExitStatus) -> i32 {
    status.code().unwrap_or_else(|| 128 + status.signal().unwrap_or(0))
}

fn end(group: Pid, has_ended: &AtomicBool) {
    // It may have ended meanwhile.
    let _ = kill_process_group(group, Signal::TERM);
    let end = Instant::now() + TERM_LIMIT;
    while !has_ended.load(Ordering::Acquire) {
        if Instant::now() >= end {
            let _ = kill_process_group(group, Signal::KILL);
            return;
        }
        thread::sleep(TERM_POLL);
    }
}
