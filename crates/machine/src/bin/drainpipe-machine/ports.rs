//! The machine's ports: finds them, and serves each.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use drainpipe_machine::frames::{Decoder, FRAME_BYTES_MAX};
use drainpipe_machine::layout::{PORTS, port_name};
use drainpipe_machine::protocol::{Message, Session};

use crate::session::Run;

const CLASS: &str = "/sys/class/virtio-ports";

/// Ports appear while their module is loaded; this is for a slow machine.
const PORT_PATIENCE: Duration = Duration::from_secs(30);
const PORT_POLL: Duration = Duration::from_millis(20);

/// How long whoever connects may wait for us to look: a read of a port to which nobody is connected returns at once.
const IDLE_POLL: Duration = Duration::from_millis(25);

/// Why there is no server.
#[derive(Debug, thiserror::Error)]
pub(crate) enum PortsError {
    #[error("there is no port {name} after {} s", PORT_PATIENCE.as_secs())]
    Missing { name: String },
    #[error("cannot open the port {}: {source}", path.display())]
    Open { path: PathBuf, source: io::Error },
    #[error("a port cannot be read any more")]
    Lost,
}

/// Serves all ports; back when one is lost.
pub(crate) fn serve() -> PortsError {
    let ports: Result<Vec<File>, PortsError> = (0..PORTS).map(|port| open(&port_name(port))).collect();
    let ports = match ports {
        Ok(ports) => ports,
        Err(error) => return error,
    };
    let (ends, ended) = mpsc::channel();
    for port in ports {
        let ends = Ends(ends.clone());
        thread::spawn(move || {
            let _ends = ends;
            serve_port(port);
        });
    }
    // None ends by itself.
    let _ = ended.recv();
    PortsError::Lost
}

/// Says so when a port is served no more, also where its thread has panicked.
struct Ends(mpsc::Sender<()>);

impl Drop for Ends {
    fn drop(&mut self) {
        // Whoever waited has heard of another one.
        let _ = self.0.send(());
    }
}

fn open(name: &str) -> Result<File, PortsError> {
    let end = Instant::now() + PORT_PATIENCE;
    loop {
        if let Some(path) = find(name) {
            return OpenOptions::new()
                .read(true)
                .write(true)
                .open(&path)
                .map_err(|source| PortsError::Open { path, source });
        }
        if Instant::now() >= end {
            return Err(PortsError::Missing { name: name.to_owned() });
        }
        thread::sleep(PORT_POLL);
    }
}

/// The device of the port of this name.
fn find(name: &str) -> Option<PathBuf> {
    let entries = fs::read_dir(CLASS).ok()?.filter_map(Result::ok);
    let is_it = |path: &PathBuf| fs::read_to_string(path.join("name")).is_ok_and(|read| read.trim() == name);
    let found = entries.map(|entry| entry.path()).find(is_it)?;
    Some(PathBuf::from("/dev").join(found.file_name()?))
}

/// One user after the other.
fn serve_port(mut port: File) {
    let Ok(answers) = port.try_clone() else { return };
    let answers = Arc::new(Mutex::new(answers));
    let mut decoder = Decoder::default();
    let mut run: Option<(Session, Run)> = None;
    let mut bytes = vec![0; FRAME_BYTES_MAX];
    loop {
        let read = match port.read(&mut bytes) {
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
            Err(_) => return,
        };
        if read == 0 {
            drop(run.take());
            decoder = Decoder::default();
            thread::sleep(IDLE_POLL);
        }
        for frame in decoder.push(&bytes[..read]) {
            match (Message::decode(&frame), &mut run) {
                // Whoever was there before has gone, and we have not seen it.
                (Some((session, Message::Open(request))), _) => {
                    drop(run.take());
                    run = Run::start(&answers, session, &request).map(|run| (session, run));
                }
                (Some((session, message)), Some((of, run))) if session == *of => run.hear(message),
                _ => {}
            }
        }
    }
}
