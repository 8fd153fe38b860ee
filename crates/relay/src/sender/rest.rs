//! What a program still gives when nothing is sent any more.

use std::os::unix::net::UnixStream;
use std::sync::{Condvar, Mutex, PoisonError};

use rustix::event::PollFlags;
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::block::BLOCK_BYTES_MAX;
use crate::sockets::{lock, wait_for};

/// Left with the program until somebody wants it gone: who has failed must not let the program go on as if all arrived.
#[derive(Debug, Default)]
pub(super) struct Rest {
    is_unwanted: Mutex<bool>,
    wake: Condvar,
}

impl Rest {
    /// From now on the program is to come to its end.
    pub(super) fn throw_away(&self) {
        *lock(&self.is_unwanted) = true;
        self.wake.notify_all();
    }

    /// Takes it from one connection once it is unwanted, until the program ends that, or it is broken.
    pub(super) fn take(&self, program: &UnixStream) {
        let waited = self.wake.wait_while(lock(&self.is_unwanted), |is_unwanted| !*is_unwanted);
        drop(waited.unwrap_or_else(PoisonError::into_inner));
        let mut rest = vec![0; BLOCK_BYTES_MAX];
        while wait_for(program, PollFlags::IN, None).is_ok() {
            match recv(program, rest.as_mut_slice(), RecvFlags::empty()) {
                Ok((1.., _)) | Err(Errno::INTR | Errno::AGAIN) => {}
                Ok((0, _)) | Err(_) => return,
            }
        }
    }
}
