//! What ends a splitter, or one of its streams.

use std::io;
use std::sync::Arc;

use drainpipe_relay::RelayError;

use crate::limits::{CLIENT_COMES, DISK_ANSWERS, FENCE, SILENCE, UNANSWERED, WITHOUT_STREAM};

/// The other end said what no other end says.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct Malformed(pub &'static str);

/// Why a splitter or a stream ended before its disk was done with.
#[derive(Debug, Clone, thiserror::Error)]
pub enum SplitterError {
    /// Somebody wanted it no more.
    #[error("cancelled")]
    Cancelled,
    /// No port on loopback.
    #[error("cannot serve the disk on loopback: {0}")]
    Listen(Arc<io::Error>),
    /// The local QEMU never connected.
    #[error("QEMU did not connect to the disk within {} s; was blockdev-add sent to it?", CLIENT_COMES.as_secs())]
    NoClient,
    /// Another program than the one for which the disk is served.
    #[error("a local NBD client is not the VM's QEMU")]
    OtherClient,
    /// The local QEMU is gone without a word.
    #[error("the connection to the local QEMU broke: {0}; does it still run?")]
    Client(Arc<io::Error>),
    /// The local client does not speak NBD as it should.
    #[error("the local NBD client sent something that is not understood: {0}")]
    ClientMalformed(Malformed),
    /// The connection between the hosts broke.
    #[error("a stream to the other host broke: {0}")]
    Stream(Arc<io::Error>),
    /// Nothing was heard from the other host.
    #[error("nothing came over a stream from the other host for {} s", SILENCE.as_secs())]
    Silent,
    /// The other host's splitter sends what none sends.
    #[error("the other host sent what is no frame of a splitter: {0}")]
    Malformed(#[from] Malformed),
    /// Compressed data from the other host are malformed.
    #[error("the other host sent compressed data of a disk that cannot be decompressed: {0}")]
    Unpack(RelayError),
    /// The other end does not take the stream.
    #[error("the other host refused a stream: {0}")]
    Refused(Refusal),
    /// Each stream has a number of its own, and they are used up.
    #[error("the disk's streams were lost too often; look at the links between the hosts, and copy it again")]
    TooManyStreams,
    /// All streams are lost, and nobody has brought another.
    #[error("no stream to the other host for {} s; look at the links between the hosts", WITHOUT_STREAM.as_secs())]
    NoStream,
    /// There are streams, and nothing is answered.
    #[error("the other host's disk has answered nothing for {} s; look at its storage", UNANSWERED.as_secs())]
    Unanswered,
    /// A lost stream's end could not be confirmed, so what it carried must not be sent again.
    #[error("the other host did not confirm the end of a lost stream within {} s", FENCE.as_secs())]
    NoFence,
    /// The disk's NBD server cannot be reached, or does not have it.
    #[error("cannot open the disk at its NBD server: {0}")]
    Open(String),
    /// The disk's NBD server is gone, or sends nonsense, while requests may be under way.
    #[error("the disk's NBD server failed: {0}")]
    Disk(String),
    /// The disk does not answer.
    #[error("the disk did not answer within {} s; look at the storage of the target host", DISK_ANSWERS.as_secs())]
    DiskSilent,
    /// The same, seen from the source.
    #[error("the other host's disk failed; its agent's log says why")]
    DiskElsewhere,
    /// The splitter at the target has ended.
    #[error("the splitter has ended")]
    Ended,
}

impl SplitterError {
    /// What the kernel says of a stream between the hosts.
    pub(crate) fn stream(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::TimedOut { Self::Silent } else { Self::Stream(Arc::new(error)) }
    }

    /// What the kernel says of the local QEMU.
    pub(crate) fn client(error: io::Error) -> Self {
        Self::Client(Arc::new(error))
    }

    /// What the kernel says of the disk's NBD server.
    pub(crate) fn disk(error: &io::Error) -> Self {
        Self::Disk(error.to_string())
    }

    /// Whether another stream could do no better.
    pub(crate) fn ends_all(&self) -> bool {
        !matches!(self, Self::Stream(_) | Self::Silent | Self::Refused(Refusal::Number | Refusal::TooMany))
    }
}

/// Why a target does not take a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Something else connected.
    #[error("it does not begin like one")]
    NoSplitter,
    /// Another Drainpipe.
    #[error("its version is another; run the same Drainpipe on both hosts")]
    Version,
    /// It belongs to another attempt, or to a peer that was not told of this one.
    #[error("it is of another session")]
    Session,
    /// The disks differ.
    #[error("the two disks are not of the same size")]
    Size,
    /// The number was used before, or its stream was given up already.
    #[error("its number was used already")]
    Number,
    /// There are enough.
    #[error("it has as many streams as one disk may have")]
    TooMany,
    /// The disk cannot be opened there.
    #[error("the disk cannot be opened there; its agent's log says why")]
    Disk,
}

impl Refusal {
    pub(crate) const ALL: [Self; 7] =
        [Self::NoSplitter, Self::Version, Self::Session, Self::Size, Self::Number, Self::TooMany, Self::Disk];

    pub(crate) fn number(self) -> u8 {
        match self {
            Self::NoSplitter => 1,
            Self::Version => 2,
            Self::Session => 3,
            Self::Size => 4,
            Self::Number => 5,
            Self::TooMany => 6,
            Self::Disk => 7,
        }
    }

    pub(crate) fn of_number(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|refusal| refusal.number() == number)
    }
}
