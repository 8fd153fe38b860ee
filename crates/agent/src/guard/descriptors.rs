//! File descriptors that pass from one process to another over a Unix socket (`SCM_RIGHTS`, see unix(7)).

use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::io::Errno;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags, recvmsg, sendmsg,
};

/// Sends a byte, and a duplicate of this descriptor with it.
pub(crate) fn send(socket: impl AsFd, byte: u8, descriptor: BorrowedFd<'_>) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = SendAncillaryBuffer::new(&mut space);
    let descriptors = [descriptor];
    if !control.push(SendAncillaryMessage::ScmRights(&descriptors)) {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    sendmsg(socket, &[IoSlice::new(&[byte])], &mut control, SendFlags::NOSIGNAL)?;
    Ok(())
}

/// Reads what was sent; a descriptor that comes with it joins `held`.
pub(crate) fn receive(socket: impl AsFd, bytes: &mut [u8], held: &mut Vec<OwnedFd>) -> io::Result<usize> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(1))];
    let mut control = RecvAncillaryBuffer::new(&mut space);
    let received = loop {
        match recvmsg(&socket, &mut [IoSliceMut::new(bytes)], &mut control, RecvFlags::CMSG_CLOEXEC) {
            Err(Errno::INTR) => {}
            received => break received?,
        }
    };
    for message in control.drain() {
        if let RecvAncillaryMessage::ScmRights(descriptors) = message {
            held.extend(descriptors);
        }
    }
    Ok(received.bytes)
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::unix::net::UnixStream;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_connection_that_was_handed_on_stays_open_without_its_first_owner() {
        let (mut program, end) = UnixStream::pair().unwrap();
        let (ours, theirs) = UnixStream::pair().unwrap();
        send(&ours, b'h', end.as_fd()).unwrap();
        drop(end);
        let (mut bytes, mut held) = ([0; 8], vec![]);
        assert_eq!(receive(&theirs, &mut bytes, &mut held).unwrap(), 1);
        assert_eq!((bytes[0], held.len()), (b'h', 1));
        program.write_all(b"goes nowhere").unwrap();
        program.set_read_timeout(Some(Duration::from_millis(20))).unwrap();
        assert_eq!(program.read(&mut bytes).unwrap_err().kind(), io::ErrorKind::WouldBlock);
        drop(held);
        assert!(program.write_all(b"now it is told").is_err());
    }
}
