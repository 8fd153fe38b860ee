//! Requests to the guest's control service, each with a deadline.

use std::io::{self, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::str::FromStr;
use std::time::{Duration, Instant};

use super::namespace::{NamespaceError, run_in};
use crate::protocol::{
    AnswerError, Dirtying, DiskStatus, DiskVerification, Generations, LINE_BYTES_MAX, Request, Status,
    Verification,
};

/// Why the guest's control service did not do what was asked.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// The namespace cannot be entered.
    #[error("guest control: {0}")]
    Namespace(#[from] NamespaceError),
    /// The guest does not accept connections.
    #[error("guest control: cannot connect to {address}: {source}")]
    Connect {
        /// The guest's address.
        address: SocketAddr,
        /// Why not.
        source: io::Error,
    },
    /// The guest did not answer in time. The connection cannot be used any more.
    #[error("guest control: no answer to `{request}` within {} ms", deadline.as_millis())]
    Deadline {
        /// What was asked.
        request: Request,
        /// How long was waited.
        deadline: Duration,
    },
    /// The connection broke. It cannot be used any more.
    #[error("guest control: the connection broke at `{request}`: {source}; connect again")]
    Broken {
        /// What was asked.
        request: Request,
        /// Why.
        source: io::Error,
    },
    /// The answer is not one line of text. The connection cannot be used any more.
    #[error("guest control: the answer to `{request}` is not one line of text; is it a guest?")]
    Garbled {
        /// What was asked.
        request: Request,
    },
    /// The guest refused, or its answer does not say what it must.
    #[error("guest control: `{request}`: {source}")]
    Answer {
        /// What was asked.
        request: Request,
        /// What is wrong.
        source: AnswerError,
    },
}

/// A connection to the guest's control service. It survives a migration of the guest.
pub struct Control {
    stream: TcpStream,
}

impl Control {
    /// Connects to `address` from `network_namespace`, such as `/run/netns/NAME`, within
    /// `deadline`.
    pub fn connect(
        address: SocketAddr,
        network_namespace: Option<&Path>,
        deadline: Duration,
    ) -> Result<Self, ControlError> {
        let connect = || {
            let stream = TcpStream::connect_timeout(&address, deadline)?;
            stream.set_nodelay(true)?;
            Ok(stream)
        };
        let stream = run_in(network_namespace, || {
            connect().map_err(|source| ControlError::Connect { address, source })
        })?;
        Ok(Self { stream })
    }

    /// Asks how the guest is.
    pub fn status(&mut self, deadline: Duration) -> Result<Status, ControlError> {
        self.ask(Request::Status, deadline)
    }

    /// Has every page checked. Allow one second per GiB under TCG, and more on a busy host.
    pub fn verify(&mut self, deadline: Duration) -> Result<Verification, ControlError> {
        self.ask(Request::Verify, deadline)
    }

    /// Changes rate and locality of the dirtying.
    pub fn set_dirty(&mut self, dirtying: Dirtying, deadline: Duration) -> Result<Status, ControlError> {
        let request = Request::Dirty {
            mib_per_s: dirtying.mib_per_s,
            locality_percent: Some(dirtying.locality_percent),
        };
        self.ask(request, deadline)
    }

    /// Flips a bit of a page, so that a test can see [`Control::verify`] find it.
    pub fn corrupt(&mut self, page: usize, deadline: Duration) -> Result<Status, ControlError> {
        self.ask(Request::Corrupt { page }, deadline)
    }

    /// Asks what was written to the disks.
    pub fn disks(&mut self, deadline: Duration) -> Result<DiskStatus, ControlError> {
        self.ask(Request::Disks, deadline)
    }

    /// Has the disks written from now on, or no longer.
    pub fn write(&mut self, writes_per_s: u32, deadline: Duration) -> Result<DiskStatus, ControlError> {
        self.ask(Request::Write { writes_per_s }, deadline)
    }

    /// Has every block of the disks checked; nothing is written from then on.
    pub fn verify_disks(&mut self, deadline: Duration) -> Result<DiskVerification, ControlError> {
        self.ask(Request::VerifyDisks, deadline)
    }

    /// Asks how often blocks were written, from this one on.
    pub fn generations(
        &mut self,
        disk: usize,
        block: usize,
        deadline: Duration,
    ) -> Result<Generations, ControlError> {
        self.ask(Request::Generations { disk, block }, deadline)
    }

    /// Has the guest power off, a moment after its answer.
    pub fn power_off(&mut self, deadline: Duration) -> Result<Status, ControlError> {
        self.ask(Request::PowerOff, deadline)
    }

    fn ask<T>(&mut self, request: Request, deadline: Duration) -> Result<T, ControlError>
    where
        T: FromStr<Err = AnswerError>,
    {
        let answer = self.exchange(&request.to_string(), Instant::now() + deadline);
        if !matches!(answer, Ok(Some(_))) {
            // A late answer would be taken for the next request's; if this fails, it is closed.
            let _ = self.stream.shutdown(std::net::Shutdown::Both);
        }
        match answer {
            Ok(Some(line)) => line.parse().map_err(|source| ControlError::Answer { request, source }),
            Ok(None) => Err(ControlError::Garbled { request }),
            Err(error) if is_timeout(&error) => Err(ControlError::Deadline { request, deadline }),
            Err(source) => Err(ControlError::Broken { request, source }),
        }
    }

    fn exchange(&mut self, request: &str, deadline: Instant) -> io::Result<Option<String>> {
        self.stream.set_write_timeout(Some(remaining(deadline)?))?;
        self.stream.write_all(format!("{request}\n").as_bytes())?;
        let mut line = Vec::new();
        let mut part = [0; LINE_BYTES_MAX];
        while !line.contains(&b'\n') && line.len() <= LINE_BYTES_MAX {
            self.stream.set_read_timeout(Some(remaining(deadline)?))?;
            match self.stream.read(&mut part)? {
                0 => return Err(io::ErrorKind::UnexpectedEof.into()),
                length => line.extend_from_slice(&part[..length]),
            }
        }
        Ok(one_line(line))
    }
}

/// The text of exactly one line, without its end.
fn one_line(bytes: Vec<u8>) -> Option<String> {
    let text = String::from_utf8(bytes).ok()?;
    let line = text.strip_suffix('\n')?;
    (line.len() < LINE_BYTES_MAX && !line.contains('\n')).then(|| line.to_owned())
}

/// The time left; a socket takes no timeout of zero.
fn remaining(deadline: Instant) -> io::Result<Duration> {
    match deadline.saturating_duration_since(Instant::now()) {
        Duration::ZERO => Err(io::ErrorKind::TimedOut.into()),
        remaining => Ok(remaining),
    }
}

fn is_timeout(error: &io::Error) -> bool {
    // Linux gives EAGAIN for a socket's timeout.
    matches!(error.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WouldBlock)
}
