//! What guest and host say to each other.
//!
//! The heartbeat is a UDP packet of 24 bytes that the guest sends back as it came. The control
//! service takes one request per line over TCP and answers each with one line: `key=value` pairs,
//! or `error <message>`. Keys that a reader does not know are skipped, so either side may be newer.

use std::fmt;
use std::str::FromStr;

mod disks;

pub use self::disks::{BadBlock, DiskStatus, DiskVerification, GENERATIONS_MAX, Generations};

/// UDP port of the heartbeat.
pub const HEARTBEAT_PORT: u16 = 7411;

/// TCP port of the control service.
pub const CONTROL_PORT: u16 = 7412;

/// The longest line either side sends or takes, in bytes.
pub const LINE_BYTES_MAX: usize = 1024;

/// Size of a heartbeat packet in bytes.
pub const BEAT_BYTES: usize = 24;

/// The highest dirty rate that is accepted, in MiB/s: more than any guest's memory takes.
pub const MIB_PER_S_MAX: u32 = 1 << 20;

/// The highest rate of writes to disks that is accepted.
pub const WRITES_PER_S_MAX: u32 = 100_000;

const BEAT_MAGIC: [u8; 8] = *b"DPBEAT01";

/// One heartbeat.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Beat {
    /// Random number of the heartbeat's sender: answers to another are not counted.
    pub session: u64,
    /// Number of the packet, from 0.
    pub sequence: u64,
}

impl Beat {
    /// The packet.
    pub fn encode(self) -> [u8; BEAT_BYTES] {
        let mut packet = [0; BEAT_BYTES];
        packet[..8].copy_from_slice(&BEAT_MAGIC);
        packet[8..16].copy_from_slice(&self.session.to_be_bytes());
        packet[16..].copy_from_slice(&self.sequence.to_be_bytes());
        packet
    }

    /// Reads a packet; `None` if it is not a heartbeat.
    pub fn decode(packet: &[u8]) -> Option<Self> {
        let packet: &[u8; BEAT_BYTES] = packet.try_into().ok()?;
        let (words, _) = packet.as_chunks::<8>();
        (words[0] == BEAT_MAGIC)
            .then(|| Self { session: u64::from_be_bytes(words[1]), sequence: u64::from_be_bytes(words[2]) })
    }
}

/// How fast and where pages are rewritten.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dirtying {
    /// Rate in MiB/s; 0 is idle.
    pub mib_per_s: u32,
    /// Share of the filled memory, from its start, that receives the writes, in percent, 1 to 100.
    pub locality_percent: u8,
}

impl Dirtying {
    /// No writes; those asked for later go everywhere.
    pub const IDLE: Self = Self { mib_per_s: 0, locality_percent: 100 };
}

/// A line to the control service.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request {
    /// `status`: answered with [`Status`].
    Status,
    /// `verify`: checks every page; answered with [`Verification`].
    Verify,
    /// `dirty <MiB/s> [<locality percent>]`: answered with [`Status`]. Without locality, the
    /// locality stays.
    Dirty {
        /// Rate in MiB/s.
        mib_per_s: u32,
        /// Share of the memory that is rewritten, in percent.
        locality_percent: Option<u8>,
    },
    /// `corrupt <page>`: flips a bit, so that a test can see `verify` find it; answered with
    /// [`Status`].
    Corrupt {
        /// Number of the page.
        page: usize,
    },
    /// `disks`: answered with [`DiskStatus`].
    Disks,
    /// `write <writes/s>`: writes the disks from now on; 0 stops. Answered with [`DiskStatus`].
    Write {
        /// The most that all writers together may write.
        writes_per_s: u32,
    },
    /// `verify-disks`: stops writing and checks every block; answered with [`DiskVerification`].
    VerifyDisks,
    /// `generations <disk> <block>`: answered with [`Generations`], from this block on.
    Generations {
        /// Number of the disk.
        disk: usize,
        /// Number of the first block.
        block: usize,
    },
    /// `poweroff`: answered with [`Status`], then the guest powers off.
    PowerOff,
}

/// Why a line is not a request.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RequestError {
    /// No such request.
    #[error(
        "unknown request; there are status, verify, dirty <MiB/s> [<locality percent>], \
         corrupt <page>, disks, write <writes/s>, verify-disks, generations <disk> <block> and poweroff"
    )]
    Unknown,
    /// Not a rate and a locality.
    #[error(
        "dirty takes a rate of 0 to {MIB_PER_S_MAX} MiB/s and, if wanted, a locality of 1 to 100 \
         percent"
    )]
    Dirty,
    /// Not a page number.
    #[error("corrupt takes the number of a page")]
    Corrupt,
    /// Not a rate.
    #[error("write takes a rate of 0 to {WRITES_PER_S_MAX} writes/s")]
    Write,
    /// Not a disk and a block.
    #[error("generations takes the numbers of a disk and of a block")]
    Generations,
}

impl FromStr for Request {
    type Err = RequestError;

    fn from_str(line: &str) -> Result<Self, RequestError> {
        let words: Vec<&str> = line.split_ascii_whitespace().take(4).collect();
        match words[..] {
            ["status"] => Ok(Self::Status),
            ["verify"] => Ok(Self::Verify),
            ["dirty", rate] => dirty(rate, None),
            ["dirty", rate, locality] => dirty(rate, Some(locality)),
            ["dirty", ..] => Err(RequestError::Dirty),
            ["corrupt", page] => {
                page.parse().map(|page| Self::Corrupt { page }).map_err(|_| RequestError::Corrupt)
            }
            ["disks"] => Ok(Self::Disks),
            ["write", rate] => write(rate),
            ["verify-disks"] => Ok(Self::VerifyDisks),
            ["generations", disk, block] => generations(disk, block),
            ["poweroff"] => Ok(Self::PowerOff),
            _ => Err(RequestError::Unknown),
        }
    }
}

fn dirty(rate: &str, locality: Option<&str>) -> Result<Request, RequestError> {
    let mib_per_s = rate.parse().map_err(|_| RequestError::Dirty)?;
    let locality_percent = locality.map(str::parse).transpose().map_err(|_| RequestError::Dirty)?;
    if mib_per_s > MIB_PER_S_MAX || locality_percent.is_some_and(|share| !(1..=100).contains(&share)) {
        return Err(RequestError::Dirty);
    }
    Ok(Request::Dirty { mib_per_s, locality_percent })
}

fn write(rate: &str) -> Result<Request, RequestError> {
    let rate = rate.parse().ok().filter(|rate| *rate <= WRITES_PER_S_MAX);
    rate.map(|writes_per_s| Request::Write { writes_per_s }).ok_or(RequestError::Write)
}

fn generations(disk: &str, block: &str) -> Result<Request, RequestError> {
    match (disk.parse(), block.parse()) {
        (Ok(disk), Ok(block)) => Ok(Request::Generations { disk, block }),
        _ => Err(RequestError::Generations),
    }
}

impl fmt::Display for Request {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Status => formatter.write_str("status"),
            Self::Verify => formatter.write_str("verify"),
            Self::Dirty { mib_per_s, locality_percent: None } => {
                write!(formatter, "dirty {mib_per_s}")
            }
            Self::Dirty { mib_per_s, locality_percent: Some(share) } => {
                write!(formatter, "dirty {mib_per_s} {share}")
            }
            Self::Corrupt { page } => write!(formatter, "corrupt {page}"),
            Self::Disks => formatter.write_str("disks"),
            Self::Write { writes_per_s } => write!(formatter, "write {writes_per_s}"),
            Self::VerifyDisks => formatter.write_str("verify-disks"),
            Self::Generations { disk, block } => write!(formatter, "generations {disk} {block}"),
            Self::PowerOff => formatter.write_str("poweroff"),
        }
    }
}

/// How the guest is.
#[derive(Clone, Copy, Debug, PartialEq, serde::Serialize)]
pub struct Status {
    /// Pages to fill.
    pub pages: u64,
    /// Pages filled so far; the guest is ready when it is all of them.
    pub filled_pages: u64,
    /// Pages that started as zero pages.
    pub zero_pages: u64,
    /// Pages that started as text.
    pub text_pages: u64,
    /// Pages that started as random.
    pub random_pages: u64,
    /// Pages that started as shared with other guests.
    pub shared_pages: u64,
    /// Pages rewritten since the start.
    pub rewritten_pages: u64,
    /// Dirty rate asked for, in MiB/s.
    pub dirty_asked_mib_per_s: u32,
    /// Dirty rate reached since it was last set, in MiB/s.
    pub dirty_achieved_mib_per_s: f64,
    /// Share of the memory that is rewritten, in percent.
    pub locality_percent: u8,
    /// Time since the guest's program started, in ms of the guest's clock.
    pub uptime_ms: u64,
}

impl Status {
    /// Whether the memory is filled.
    pub fn is_ready(&self) -> bool {
        self.filled_pages == self.pages
    }

    /// The dirtying asked for.
    pub fn dirtying(&self) -> Dirtying {
        Dirtying { mib_per_s: self.dirty_asked_mib_per_s, locality_percent: self.locality_percent }
    }
}

impl fmt::Display for Status {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            formatter,
            "pages={} filled_pages={} zero_pages={} text_pages={} random_pages={} \
             shared_pages={} rewritten_pages={} dirty_asked_mib_per_s={} \
             dirty_achieved_mib_per_s={:.2} locality_percent={} uptime_ms={}",
            self.pages,
            self.filled_pages,
            self.zero_pages,
            self.text_pages,
            self.random_pages,
            self.shared_pages,
            self.rewritten_pages,
            self.dirty_asked_mib_per_s,
            self.dirty_achieved_mib_per_s,
            self.locality_percent,
            self.uptime_ms,
        )
    }
}

/// What a check of all pages found.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct Verification {
    /// Pages checked: all of the filled memory.
    pub pages: u64,
    /// Pages that did not hold what they must.
    pub bad: u64,
    /// What the first of them held.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_bad: Option<BadPage>,
}

/// What a bad page held. A lost write shows as an earlier generation.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize)]
pub struct BadPage {
    /// Number of the page.
    pub page: u64,
    /// How often the page was rewritten.
    pub generation: u32,
    /// The first word of 8 bytes that is wrong.
    pub wrong_word: u64,
    /// The earlier generation that this word is of, if it is of one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub found_generation: Option<u32>,
}

impl fmt::Display for Verification {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "pages={} bad={}", self.pages, self.bad)?;
        let Some(BadPage { page, generation, wrong_word, found_generation }) = self.first_bad else {
            return Ok(());
        };
        write!(formatter, " bad_page={page} generation={generation} wrong_word={wrong_word}")?;
        found_generation.map_or(Ok(()), |found| write!(formatter, " found_generation={found}"))
    }
}

/// Why an answer of the guest cannot be used.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum AnswerError {
    /// The guest refused.
    #[error("the guest refused: {0}")]
    Refused(String),
    /// A value is missing or not what it must be.
    #[error("the guest's answer has no valid `{0}`; guest image and client may not match")]
    Field(&'static str),
}

impl FromStr for Status {
    type Err = AnswerError;

    fn from_str(line: &str) -> Result<Self, AnswerError> {
        let answer = Answer::parse(line)?;
        let status = Self {
            pages: answer.value("pages")?,
            filled_pages: answer.value("filled_pages")?,
            zero_pages: answer.value("zero_pages")?,
            text_pages: answer.value("text_pages")?,
            random_pages: answer.value("random_pages")?,
            shared_pages: answer.value("shared_pages")?,
            rewritten_pages: answer.value("rewritten_pages")?,
            dirty_asked_mib_per_s: answer.value("dirty_asked_mib_per_s")?,
            dirty_achieved_mib_per_s: answer.value("dirty_achieved_mib_per_s")?,
            locality_percent: answer.value("locality_percent")?,
            uptime_ms: answer.value("uptime_ms")?,
        };
        if status.filled_pages > status.pages {
            return Err(AnswerError::Field("filled_pages"));
        }
        if !status.dirty_achieved_mib_per_s.is_finite() || status.dirty_achieved_mib_per_s < 0.0 {
            return Err(AnswerError::Field("dirty_achieved_mib_per_s"));
        }
        Ok(status)
    }
}

impl FromStr for Verification {
    type Err = AnswerError;

    fn from_str(line: &str) -> Result<Self, AnswerError> {
        let answer = Answer::parse(line)?;
        let verification =
            Self { pages: answer.value("pages")?, bad: answer.value("bad")?, first_bad: answer.bad_page()? };
        if verification.bad > verification.pages {
            return Err(AnswerError::Field("bad"));
        }
        Ok(verification)
    }
}

struct Answer<'a>(&'a str);

impl<'a> Answer<'a> {
    fn parse(line: &'a str) -> Result<Self, AnswerError> {
        match line.strip_prefix("error ") {
            // The text ends up on an operator's terminal.
            Some(message) => Err(AnswerError::Refused(message.escape_debug().to_string())),
            None => Ok(Self(line)),
        }
    }

    fn value<T: FromStr>(&self, key: &'static str) -> Result<T, AnswerError> {
        self.optional(key)?.ok_or(AnswerError::Field(key))
    }

    fn optional<T: FromStr>(&self, key: &'static str) -> Result<Option<T>, AnswerError> {
        self.0
            .split_ascii_whitespace()
            .filter_map(|pair| pair.split_once('='))
            .find(|(name, _)| *name == key)
            .map(|(_, value)| value.parse().map_err(|_| AnswerError::Field(key)))
            .transpose()
    }

    fn bad_page(&self) -> Result<Option<BadPage>, AnswerError> {
        let Some(page) = self.optional("bad_page")? else { return Ok(None) };
        Ok(Some(BadPage {
            page,
            generation: self.value("generation")?,
            wrong_word: self.value("wrong_word")?,
            found_generation: self.optional("found_generation")?,
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn status() -> Status {
        Status {
            pages: 100,
            filled_pages: 50,
            zero_pages: 1,
            text_pages: 2,
            random_pages: 3,
            shared_pages: 4,
            rewritten_pages: 5,
            dirty_asked_mib_per_s: 6,
            dirty_achieved_mib_per_s: 5.75,
            locality_percent: 7,
            uptime_ms: 8,
        }
    }

    #[test]
    fn answers_are_read_back() {
        assert_eq!(status().to_string().parse(), Ok(status()));
        let verification = Verification { pages: 10, bad: 1, first_bad: None };
        assert_eq!(verification.to_string(), "pages=10 bad=1");
        assert_eq!("pages=10 bad=1 new=x".parse(), Ok(verification));
        for found_generation in [None, Some(5)] {
            let page = BadPage { page: 3, generation: 6, wrong_word: 8, found_generation };
            let verification = Verification { first_bad: Some(page), ..verification };
            assert_eq!(verification.to_string().parse(), Ok(verification));
        }
    }

    #[test]
    fn answers_that_contradict_themselves_are_refused() {
        let refused = |line: &str| line.parse::<Verification>().unwrap_err();
        assert_eq!(refused("pages=1 bad=2"), AnswerError::Field("bad"));
        assert_eq!(refused("pages=-1 bad=0"), AnswerError::Field("pages"));
        assert_eq!(refused("pages=1 bad=1 bad_page=0 generation=x"), AnswerError::Field("generation"));
        assert_eq!(refused("error \x1b[31m"), AnswerError::Refused("\\u{1b}[31m".into()));
        let infinite = Status { dirty_achieved_mib_per_s: f64::INFINITY, ..status() };
        let refused = infinite.to_string().parse::<Status>();
        assert_eq!(refused, Err(AnswerError::Field("dirty_achieved_mib_per_s")));
    }

    #[test]
    fn wrong_requests_are_explained() {
        let refused = |line: &str| line.parse::<Request>().unwrap_err();
        assert_eq!(refused(""), RequestError::Unknown);
        assert_eq!(refused("status now"), RequestError::Unknown);
        assert_eq!(refused("dirty"), RequestError::Dirty);
        assert_eq!(refused("dirty 10 0"), RequestError::Dirty);
        assert_eq!(refused("dirty 99999999"), RequestError::Dirty);
        assert_eq!(refused("corrupt -1"), RequestError::Corrupt);
        assert_eq!(refused("write -1"), RequestError::Write);
        assert_eq!(refused("generations 0 x"), RequestError::Generations);
    }

    fn requests() -> impl Strategy<Value = Request> {
        prop_oneof![
            Just(Request::Status),
            Just(Request::Verify),
            Just(Request::PowerOff),
            Just(Request::Disks),
            Just(Request::VerifyDisks),
            (0..=WRITES_PER_S_MAX).prop_map(|writes_per_s| Request::Write { writes_per_s }),
            any::<(usize, usize)>().prop_map(|(disk, block)| Request::Generations { disk, block }),
            any::<usize>().prop_map(|page| Request::Corrupt { page }),
            (0..=MIB_PER_S_MAX, proptest::option::of(1..=100_u8))
                .prop_map(|(mib_per_s, locality_percent)| Request::Dirty { mib_per_s, locality_percent }),
        ]
    }

    proptest! {
        #[test]
        fn requests_are_read_back(request in requests()) {
            prop_assert_eq!(request.to_string().parse(), Ok(request));
        }

        #[test]
        fn any_line_is_read_or_refused(line in ".{0,200}") {
            let _ = line.parse::<Request>();
            let _ = line.parse::<Status>();
            let _ = line.parse::<Verification>();
            let _ = line.parse::<DiskVerification>();
            let _ = line.parse::<Generations>();
        }

        #[test]
        fn beats_are_read_back(session: u64, sequence: u64) {
            let beat = Beat { session, sequence };
            prop_assert_eq!(Beat::decode(&beat.encode()), Some(beat));
        }

        #[test]
        fn other_packets_are_no_beats(packet in proptest::collection::vec(any::<u8>(), 0..64)) {
            prop_assert_eq!(Beat::decode(&packet), None);
        }
    }
}
