//! The receiving program's answers: a few bytes, over the first connection only (QEMU's return path).
//!
//! Nothing fails here. QEMU sees that the connection has ended, and the direction towards the target reports why.

use std::io::{self, Read};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;

use crate::sockets::spawn;
use crate::wire::{Inward, Outward};

/// What is read of them at a time.
const ANSWER_BYTES: usize = 4 << 10;

/// Gives them to the sending program, until the other end says that no more come.
pub(crate) fn give(mut wire: Inward, program: &UnixStream) -> io::Result<()> {
    let program = program.try_clone()?;
    spawn("relay-answers".into(), move || {
        if wire.pass_to(&program).is_ok() {
            // The program may have closed it already.
            drop(program.shutdown(Shutdown::Write));
        }
    })
}

/// Takes them from the receiving program, until it closes its connection.
pub(crate) fn take(wire: Outward, program: &UnixStream) -> io::Result<()> {
    let program = program.try_clone()?;
    spawn("relay-answers".into(), move || {
        let _reported_by_the_way_forward = pass(wire, &program);
    })
}

fn pass(mut wire: Outward, mut program: &UnixStream) -> Result<(), crate::RelayError> {
    let mut answer = [0; ANSWER_BYTES];
    loop {
        match program.read(&mut answer) {
            Ok(0) => return wire.finish(),
            Ok(count) => drop(wire.send(&answer[..count], &[])?),
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(crate::RelayError::local(error)),
        }
    }
}
