//! The guest's side of heartbeat and control, over memory and dirtier.

use std::io::{self, BufRead, BufReader, Read, Write};
use std::net::{TcpListener, TcpStream, UdpSocket};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::setpriority_process;

use crate::dirtier::Dirtier;
use crate::memory::{Memory, MemoryError};
use crate::mix::Kind;
use crate::protocol::{BEAT_BYTES, Beat, Dirtying, LINE_BYTES_MAX, Request, Status};
use crate::writers::{DiskError, Writers};

/// How many control connections are served at once; further ones are closed.
const CONNECTIONS_MAX: usize = 16;

/// A control connection without a request for this long is closed.
const IDLE_MAX: Duration = Duration::from_mins(10);

/// After an error of a socket, so that one which lasts does not keep the CPU busy.
const ERROR_PAUSE: Duration = Duration::from_millis(10);

/// `nice` of the heartbeat: on one vCPU it goes before fill, check and dirtier.
const HEARTBEAT_NICE: i32 = -20;

/// `nice` of everything that works through memory.
pub const WORK_NICE: i32 = 10;

/// The guest, as its services see it.
pub struct Guest {
    /// The memory that is checked.
    pub memory: Memory,
    /// What rewrites it.
    pub dirtier: Dirtier,
    writers: Option<Arc<Writers>>,
    started: Instant,
    power_off: Mutex<bool>,
    power_off_asked: Condvar,
}

impl Guest {
    /// A guest whose uptime starts now.
    pub fn new(memory: Memory, dirtying: Dirtying) -> Self {
        Self {
            memory,
            dirtier: Dirtier::new(dirtying),
            writers: None,
            started: Instant::now(),
            power_off: Mutex::new(false),
            power_off_asked: Condvar::new(),
        }
    }

    /// With disks that these write.
    #[must_use]
    pub fn writing(self, writers: Arc<Writers>) -> Self {
        Self { writers: Some(writers), ..self }
    }

    /// Sleeps until someone asks for the guest to power off.
    pub fn wait_for_power_off(&self) {
        let asked = self.power_off.lock().unwrap_or_else(PoisonError::into_inner);
        drop(self.power_off_asked.wait_while(asked, |asked| !*asked));
    }

    /// How the guest is.
    pub fn status(&self) -> Status {
        let [zero_pages, text_pages, random_pages, shared_pages] = self.memory.count_by_kind();
        const { assert!(matches!(Kind::ALL, [Kind::Zero, Kind::Text, Kind::Random, Kind::Shared])) };
        let asked = self.dirtier.asked();
        Status {
            pages: self.memory.pages() as u64,
            filled_pages: self.memory.filled() as u64,
            zero_pages,
            text_pages,
            random_pages,
            shared_pages,
            rewritten_pages: self.dirtier.rewritten_pages(),
            dirty_asked_mib_per_s: asked.mib_per_s,
            dirty_achieved_mib_per_s: self.dirtier.achieved_mib_per_s(),
            locality_percent: asked.locality_percent,
            uptime_ms: u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX),
        }
    }

    /// Carries out a line of the control service and gives the line to answer.
    pub fn answer(&self, line: &str) -> String {
        match line.parse() {
            Ok(request) => self.carry_out(request).unwrap_or_else(|error| format!("error {error}")),
            Err(error) => format!("error {error}"),
        }
    }

    fn carry_out(&self, request: Request) -> Result<String, RefusalError> {
        match request {
            Request::Status => {}
            Request::Verify => return Ok(self.memory.verify()?.to_string()),
            Request::Dirty { mib_per_s, locality_percent } => self.dirtier.set(Dirtying {
                mib_per_s,
                locality_percent: locality_percent.unwrap_or_else(|| self.dirtier.asked().locality_percent),
            }),
            Request::Corrupt { page } => self.memory.corrupt(page)?,
            Request::Disks => return Ok(self.writers()?.status()?.to_string()),
            Request::Write { writes_per_s } => return Ok(self.writers()?.set(writes_per_s)?.to_string()),
            Request::VerifyDisks => return Ok(self.writers()?.verify()?.to_string()),
            Request::Generations { disk, block } => {
                return Ok(self.writers()?.generations(disk, block)?.to_string());
            }
            Request::PowerOff => {
                *self.power_off.lock().unwrap_or_else(PoisonError::into_inner) = true;
                self.power_off_asked.notify_all();
            }
        }
        Ok(self.status().to_string())
    }

    fn writers(&self) -> Result<&Writers, DiskError> {
        self.writers.as_deref().ok_or(DiskError::None)
    }
}

/// Why a request is not carried out.
#[derive(Debug, thiserror::Error)]
enum RefusalError {
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Disk(#[from] DiskError),
}

/// Sends every heartbeat back to where it came from, for ever.
pub fn serve_heartbeat(socket: &UdpSocket) -> ! {
    // Only a user without privileges is refused, and then answers are late under load, no more.
    let _ = setpriority_process(None, HEARTBEAT_NICE);
    // One byte more than a heartbeat, so that a longer packet is not taken for one.
    let mut packet = [0; BEAT_BYTES + 1];
    loop {
        match socket.recv_from(&mut packet) {
            Ok((length, sender)) if Beat::decode(&packet[..length]).is_some() => {
                // Lost like any packet: the sender counts it as unanswered.
                let _ = socket.send_to(&packet[..length], sender);
            }
            Ok(_) => {}
            Err(_) => std::thread::sleep(ERROR_PAUSE),
        }
    }
}

/// Serves control connections, for ever.
pub fn serve_control(listener: &TcpListener, guest: &Arc<Guest>) -> ! {
    let connections = Arc::new(());
    loop {
        match listener.accept() {
            Ok((stream, _)) if Arc::strong_count(&connections) <= CONNECTIONS_MAX => {
                serve_in_thread(stream, Arc::clone(guest), Arc::clone(&connections));
            }
            Ok(_) => {}
            Err(_) => std::thread::sleep(ERROR_PAUSE),
        }
    }
}

fn serve_in_thread(stream: TcpStream, guest: Arc<Guest>, connection: Arc<()>) {
    // A thread that cannot be started drops the stream, which closes the connection.
    let _ = std::thread::Builder::new().name("control".into()).spawn(move || {
        let _ = setpriority_process(None, WORK_NICE);
        // Whatever ends the connection, the client sees it closed.
        let _ = converse(&stream, &guest);
        drop(connection);
    });
}

fn converse(stream: &TcpStream, guest: &Guest) -> io::Result<()> {
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(IDLE_MAX))?;
    stream.set_write_timeout(Some(IDLE_MAX))?;
    let mut reader = BufReader::new(stream);
    while let Some(line) = read_line(&mut reader)? {
        let mut answer = guest.answer(&line);
        answer.push('\n');
        (&*stream).write_all(answer.as_bytes())?;
    }
    Ok(())
}

/// A line without its end; `None` at the end of the stream.
fn read_line(reader: &mut impl BufRead) -> io::Result<Option<String>> {
    let mut line = Vec::new();
    let length = reader.take(LINE_BYTES_MAX as u64).read_until(b'\n', &mut line)?;
    if length == 0 {
        return Ok(None);
    }
    if line.pop() != Some(b'\n') {
        return Err(io::ErrorKind::InvalidData.into());
    }
    String::from_utf8(line).map(Some).map_err(|_| io::ErrorKind::InvalidData.into())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mix::Mix;

    fn guest() -> Guest {
        Guest::new(Memory::reserve(160, Mix::only(Kind::Text), 1), Dirtying::IDLE)
    }

    #[test]
    fn a_guest_that_still_fills_says_so() {
        let guest = guest();
        assert!(guest.answer("verify").starts_with("error memory is still being filled (0 of 160"));
        assert!(!guest.status().is_ready());
        guest.memory.fill();
        assert!(guest.status().is_ready());
        assert_eq!(guest.answer("verify"), "pages=160 bad=0");
    }

    #[test]
    fn dirty_without_locality_keeps_the_locality() {
        let guest = guest();
        guest.answer("dirty 10 25");
        guest.answer("dirty 20");
        assert_eq!(guest.status().dirtying(), Dirtying { mib_per_s: 20, locality_percent: 25 });
    }

    #[test]
    fn lines_that_do_not_end_are_refused() {
        let read = |bytes: &[u8]| read_line(&mut BufReader::new(bytes));
        assert_eq!(read(b"status\nverify\n").unwrap(), Some("status".into()));
        assert_eq!(read(b"").unwrap(), None);
        assert!(read(b"stat").is_err());
        assert!(read(&[b'x'; 2 * LINE_BYTES_MAX]).is_err());
        assert!(read(b"\xff\n").is_err());
    }
}
