//! What can go wrong with a link or with a host's libvirt, on purpose.

use std::fmt;
use std::str::FromStr;

use serde::Serialize;
use thiserror::Error;

use crate::libvirt::DaemonChange;
use crate::spec::{LabSpec, SpecError, check_mtu, check_rate};
use crate::tbf;
use crate::tools::{Batch, Program};
use crate::topology::{End, ends, far_end, near_end};

/// A change to a link of a running lab, or to a host's libvirt. Doing it twice is the same as doing it once.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(tag = "fault", rename_all = "kebab-case")]
pub enum Fault {
    /// The host's interface goes down, and the other end loses its carrier.
    LinkDown {
        /// On this host.
        host: String,
        /// The link's name.
        link: String,
    },
    /// The opposite of [`Fault::LinkDown`].
    LinkUp {
        /// On this host.
        host: String,
        /// The link's name.
        link: String,
    },
    /// Nothing gets through, and nobody notices: both ends stay up, and sending succeeds.
    Blackhole {
        /// For this host.
        host: String,
        /// The link's name.
        link: String,
        /// The direction, as seen from the host.
        direction: Direction,
    },
    /// Frames with more than so many bytes do not get through, and nobody is told, as where a switch on the way has
    /// a smaller MTU. A GSO packet is one frame, as large as all its segments.
    BlackholeAbove {
        /// For this host.
        host: String,
        /// The link's name.
        link: String,
        /// The largest that passes, in bytes, without the link's own header.
        bytes: u32,
        /// The direction, as seen from the host.
        direction: Direction,
    },
    /// Ends the link's faults on this host: brings it up, lets everything through, and gives it
    /// the MTU of the specification. The rate, which is the whole link's, stays.
    Heal {
        /// On this host.
        host: String,
        /// The link's name.
        link: String,
    },
    /// Every end of the link sends at this rate.
    Rate {
        /// The link's name.
        link: String,
        /// As in [`LinkSpec`](crate::LinkSpec); `None` is unlimited.
        rate_mbps: Option<u64>,
    },
    /// Packets are lost at random, in both directions. A GSO packet is one packet.
    Loss {
        /// At this host.
        host: String,
        /// The link's name.
        link: String,
        /// The percentage that is lost; 1 to 99.
        percent: u8,
    },
    /// The host's interface gets another MTU; the other end keeps its own. Single packets that
    /// are too large for the other end vanish there, as in a switch. TCP agrees on the smaller
    /// one, and its segments travel between veth ends uncut.
    Mtu {
        /// On this host.
        host: String,
        /// The link's name.
        link: String,
        /// In bytes, as in [`LinkSpec`](crate::LinkSpec).
        mtu_bytes: u32,
    },
    /// The daemon of the host's libvirt is ended or started. Its QEMUs go on.
    Libvirt {
        /// On this host.
        host: String,
        /// What is done to it.
        change: DaemonChange,
    },
}

/// The direction in which a black hole swallows packets, as seen from the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum Direction {
    /// What the host sends and what it should receive.
    Both,
    /// What the host should receive.
    Receive,
    /// What the host sends.
    Send,
}

const USAGE: &str = "a fault is one of: link-down HOST LINK, link-up HOST LINK, \
     blackhole HOST LINK [both|receive|send], blackhole-above HOST LINK BYTES [both|receive|send], \
     heal HOST LINK, rate LINK MBPS|unlimited, loss HOST LINK PERCENT, mtu HOST LINK BYTES, \
     libvirt-stop HOST, libvirt-kill HOST, libvirt-start HOST";

/// Why words do not make a [`Fault`].
#[derive(Debug, Error, PartialEq, Eq)]
pub enum FaultParseError {
    /// There is no such fault.
    #[error("unknown fault {0:?}: {USAGE}")]
    Unknown(String),
    /// Too few or too many words follow.
    #[error("{0:?} is not complete, or has a word too many: {USAGE}")]
    Words(String),
    /// The direction is none.
    #[error("a blackhole's direction is both, receive or send, not {0:?}")]
    Direction(String),
    /// The rate or the MTU is not a number.
    #[error("{what} is a whole number, such as {example}, not {word:?}")]
    Number {
        /// What the number means.
        what: &'static str,
        /// A valid one.
        example: &'static str,
        /// What was given.
        word: String,
    },
}

impl Fault {
    /// Reads a fault from the words of a command line, such as `blackhole a e0 receive`.
    pub fn from_words<W: AsRef<str>>(words: &[W]) -> Result<Self, FaultParseError> {
        let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
        let owned = |word: &str| word.to_owned();
        match words[..] {
            ["link-down", host, link] => Ok(Self::LinkDown { host: owned(host), link: owned(link) }),
            ["link-up", host, link] => Ok(Self::LinkUp { host: owned(host), link: owned(link) }),
            ["blackhole", host, link] => Ok(Self::blackhole(host, link, Direction::Both)),
            ["blackhole", host, link, direction] => Ok(Self::blackhole(host, link, direction.parse()?)),
            ["blackhole-above", host, link, bytes] => {
                Self::blackhole_above(host, link, bytes, Direction::Both)
            }
            ["blackhole-above", host, link, bytes, direction] => {
                Self::blackhole_above(host, link, bytes, direction.parse()?)
            }
            ["heal", host, link] => Ok(Self::Heal { host: owned(host), link: owned(link) }),
            ["loss", host, link, percent] => {
                Ok(Self::Loss { host: owned(host), link: owned(link), percent: parse_percent(percent)? })
            }
            ["rate", link, rate] => Ok(Self::Rate { link: owned(link), rate_mbps: parse_rate(rate)? }),
            ["mtu", host, link, mtu] => Ok(Self::Mtu {
                host: owned(host),
                link: owned(link),
                mtu_bytes: parse_number("an MTU in bytes", "9000", mtu)?,
            }),
            ["libvirt-stop", host] => Ok(Self::libvirt(host, DaemonChange::Stop)),
            ["libvirt-kill", host] => Ok(Self::libvirt(host, DaemonChange::Kill)),
            ["libvirt-start", host] => Ok(Self::libvirt(host, DaemonChange::Start)),
            [
                "link-down" | "link-up" | "blackhole" | "blackhole-above" | "heal" | "loss" | "rate" | "mtu"
                | "libvirt-stop" | "libvirt-kill" | "libvirt-start",
                ..,
            ] => Err(FaultParseError::Words(words.join(" "))),
            [] => Err(FaultParseError::Unknown(String::new())),
            [word, ..] => Err(FaultParseError::Unknown(owned(word))),
        }
    }

    fn libvirt(host: &str, change: DaemonChange) -> Self {
        Self::Libvirt { host: host.to_owned(), change }
    }

    fn blackhole(host: &str, link: &str, direction: Direction) -> Self {
        Self::Blackhole { host: host.to_owned(), link: link.to_owned(), direction }
    }

    fn blackhole_above(
        host: &str,
        link: &str,
        bytes: &str,
        direction: Direction,
    ) -> Result<Self, FaultParseError> {
        let bytes = parse_number("the largest frame that passes in bytes", "1400", bytes)?;
        Ok(Self::BlackholeAbove { host: host.to_owned(), link: link.to_owned(), bytes, direction })
    }

    /// The batches that make this fault in the lab of `spec`; none for what is no matter of the network.
    pub(crate) fn changes(&self, spec: &LabSpec) -> Result<Vec<Batch>, SpecError> {
        match self {
            Self::Libvirt { .. } => Ok(vec![]),
            Self::LinkDown { host, link } => interface_change(spec, host, link, "down"),
            Self::LinkUp { host, link } => interface_change(spec, host, link, "up"),
            Self::Mtu { host, .. } if spec.is_machine(host) => {
                let instead =
                    "set its MTU in it, as with `drainpipe lab exec LAB HOST -- ip link set e0 mtu 9000`";
                Err(SpecError::IsMachine { lab: spec.name.clone(), host: host.clone(), instead })
            }
            Self::Mtu { host, link, mtu_bytes } => {
                check_mtu(link, *mtu_bytes)?;
                interface_change(spec, host, link, &format!("mtu {mtu_bytes}"))
            }
            Self::Rate { link, rate_mbps } => rate_change(spec, link, *rate_mbps),
            Self::Blackhole { host, link, direction } => {
                drop_change(spec, host, link, *direction, Dropped::All)
            }
            Self::BlackholeAbove { host, link, bytes, direction } => {
                drop_change(spec, host, link, *direction, Dropped::Above(*bytes))
            }
            Self::Loss { host, link, percent } => {
                drop_change(spec, host, link, Direction::Both, Dropped::Percent(*percent))
            }
            Self::Heal { host, link } => {
                let mut batches: Vec<Batch> = drops(spec, host, link)?.iter().map(Drop::remove).collect();
                let mtu_bytes = spec.links[spec.link_index(link)?].mtu_bytes;
                batches.extend(interface_change(spec, host, link, &format!("mtu {mtu_bytes} up"))?);
                Ok(batches)
            }
        }
    }
}

/// The words that [`Fault::from_words`] reads.
impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LinkDown { host, link } => write!(f, "link-down {host} {link}"),
            Self::LinkUp { host, link } => write!(f, "link-up {host} {link}"),
            Self::Blackhole { host, link, direction } => {
                write!(f, "blackhole {host} {link} {direction}")
            }
            Self::BlackholeAbove { host, link, bytes, direction } => {
                write!(f, "blackhole-above {host} {link} {bytes} {direction}")
            }
            Self::Heal { host, link } => write!(f, "heal {host} {link}"),
            Self::Loss { host, link, percent } => write!(f, "loss {host} {link} {percent}"),
            Self::Rate { link, rate_mbps: Some(rate) } => write!(f, "rate {link} {rate}"),
            Self::Rate { link, rate_mbps: None } => write!(f, "rate {link} unlimited"),
            Self::Mtu { host, link, mtu_bytes } => write!(f, "mtu {host} {link} {mtu_bytes}"),
            Self::Libvirt { host, change } => write!(f, "libvirt-{change} {host}"),
        }
    }
}

impl Direction {
    fn includes(self, way: Self) -> bool {
        self == Self::Both || self == way
    }
}

impl fmt::Display for Direction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Both => "both",
            Self::Receive => "receive",
            Self::Send => "send",
        })
    }
}

impl FromStr for Direction {
    type Err = FaultParseError;

    fn from_str(word: &str) -> Result<Self, Self::Err> {
        match word {
            "both" => Ok(Self::Both),
            "receive" => Ok(Self::Receive),
            "send" => Ok(Self::Send),
            other => Err(FaultParseError::Direction(other.to_owned())),
        }
    }
}

fn parse_rate(word: &str) -> Result<Option<u64>, FaultParseError> {
    match word {
        "unlimited" => Ok(None),
        number => parse_number("a rate in Mb/s", "1000 (or the word unlimited)", number).map(Some),
    }
}

fn parse_percent(word: &str) -> Result<u8, FaultParseError> {
    let (what, example) = ("a loss in percent (1 to 99)", "5");
    let percent = parse_number(what, example, word)?;
    if (1..100).contains(&percent) {
        return Ok(percent);
    }
    Err(FaultParseError::Number { what, example, word: word.to_owned() })
}

fn parse_number<N: FromStr>(
    what: &'static str,
    example: &'static str,
    word: &str,
) -> Result<N, FaultParseError> {
    word.parse().map_err(|_| FaultParseError::Number { what, example, word: word.to_owned() })
}

fn interface_change(spec: &LabSpec, host: &str, link: &str, change: &str) -> Result<Vec<Batch>, SpecError> {
    let End { namespace, interface } = near_end(spec, spec.host_index(host)?, spec.link_index(link)?);
    let command = format!("link set {interface} {change}");
    Ok(vec![Batch::new(Program::Ip, &namespace, vec![command])])
}

fn drop_change(
    spec: &LabSpec,
    host: &str,
    link: &str,
    direction: Direction,
    dropped: Dropped,
) -> Result<Vec<Batch>, SpecError> {
    let drops = drops(spec, host, link)?;
    let of_direction = drops.iter().filter(|drop| direction.includes(drop.way));
    Ok(of_direction.map(|drop| drop.make(dropped)).collect())
}

fn rate_change(spec: &LabSpec, link: &str, rate_mbps: Option<u64>) -> Result<Vec<Batch>, SpecError> {
    check_rate(link, rate_mbps)?;
    let ends = ends(spec, spec.link_index(link)?);
    Ok(ends
        .iter()
        .map(|end| {
            let lines = match rate_mbps {
                Some(rate_mbps) => vec![tbf::set_rate(&end.interface, rate_mbps)],
                None => tbf::remove_rate(&end.interface).to_vec(),
            };
            Batch::new(Program::Tc, &end.namespace, lines)
        })
        .collect())
}

/// One direction of a blackhole: an nftables table that drops whatever arrives at an interface.
///
/// Also what the host sends is dropped where it arrives, at the far end. Dropped at the host
/// itself (netdev egress, Linux >= 5.16), the sender would be told: TCP takes it for local
/// congestion, and datagrams may fail with ENOBUFS. The far end's receive counter still grows.
#[derive(Debug)]
pub(crate) struct Drop {
    /// [`Direction::Receive`] or [`Direction::Send`].
    pub(crate) way: Direction,
    /// Where it drops.
    pub(crate) end: End,
    /// The nftables table's name, which tells whose fault it is.
    pub(crate) table: String,
}

/// What is dropped where packets arrive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dropped {
    /// Every one.
    All,
    /// A percentage of them, at random.
    Percent(u8),
    /// Those with more bytes.
    Above(u32),
}

const ALL: &str = "drops_all";
const PERCENT: &str = "drops_percent_";
const ABOVE: &str = "drops_above_";

impl Dropped {
    /// What a chain of this name drops.
    pub(crate) fn by_chain(chain: &str) -> Option<Self> {
        let percent = || Some(Self::Percent(chain.strip_prefix(PERCENT)?.parse().ok()?));
        let above = || Some(Self::Above(chain.strip_prefix(ABOVE)?.parse().ok()?));
        (chain == ALL).then_some(Self::All).or_else(percent).or_else(above)
    }

    /// The name of its chain, where [`Self::by_chain`] finds it again.
    fn chain(self) -> String {
        match self {
            Self::All => ALL.to_owned(),
            Self::Percent(percent) => format!("{PERCENT}{percent}"),
            Self::Above(bytes) => format!("{ABOVE}{bytes}"),
        }
    }

    /// The rule of nftables.
    fn rule(self) -> String {
        match self {
            Self::All => "drop".to_owned(),
            Self::Percent(percent) => format!("numgen random mod 100 < {percent} drop"),
            Self::Above(bytes) => format!("meta length > {bytes} drop"),
        }
    }
}

/// Both directions of a blackhole of `host` on `link`, whether they are active or not.
pub(crate) fn drops(spec: &LabSpec, host: &str, link: &str) -> Result<[Drop; 2], SpecError> {
    let (host_index, link_index) = (spec.host_index(host)?, spec.link_index(link)?);
    let table = |way: Direction| format!("drainpipe_{host}_{link}_{way}");
    Ok([
        Drop {
            way: Direction::Receive,
            end: near_end(spec, host_index, link_index),
            table: table(Direction::Receive),
        },
        Drop {
            way: Direction::Send,
            end: far_end(spec, host_index, link_index),
            table: table(Direction::Send),
        },
    ])
}

impl Drop {
    /// Asks the kernel whether it could drop, without doing it.
    pub(crate) fn check(&self) -> Batch {
        Batch { program: Program::NftCheck, ..self.make(Dropped::All) }
    }

    fn make(&self, dropped: Dropped) -> Batch {
        let Self { end, table, .. } = self;
        let chain = format!("netdev {table} {}", dropped.chain());
        let mut lines = self.remove().lines;
        lines.push(format!("add table netdev {table}"));
        lines.push(format!(
            "add chain {chain} {{ type filter hook ingress device {} priority 0; policy accept; }}",
            end.interface
        ));
        lines.push(format!("add rule {chain} {}", dropped.rule()));
        Batch::new(Program::Nft, &end.namespace, lines)
    }

    /// Deleting what does not exist is an error, adding what exists is not.
    fn remove(&self) -> Batch {
        let table = &self.table;
        let lines = vec![format!("add table netdev {table}"), format!("delete table netdev {table}")];
        Batch::new(Program::Nft, &self.end.namespace, lines)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::spec::LinkSpec;

    fn parse(line: &str) -> Result<Fault, FaultParseError> {
        Fault::from_words(&line.split_whitespace().collect::<Vec<_>>())
    }

    fn fault() -> impl Strategy<Value = Fault> {
        let name = || "[a-z][a-z0-9]{0,5}";
        let direction =
            || prop_oneof![Just(Direction::Both), Just(Direction::Receive), Just(Direction::Send)];
        prop_oneof![
            (name(), name()).prop_map(|(host, link)| Fault::LinkDown { host, link }),
            (name(), name()).prop_map(|(host, link)| Fault::LinkUp { host, link }),
            (name(), name()).prop_map(|(host, link)| Fault::Heal { host, link }),
            (name(), name(), direction()).prop_map(|(host, link, direction)| Fault::Blackhole {
                host,
                link,
                direction
            }),
            (name(), name(), any::<u32>(), direction()).prop_map(|(host, link, bytes, direction)| {
                Fault::BlackholeAbove { host, link, bytes, direction }
            }),
            (name(), name(), 1..100_u8).prop_map(|(host, link, percent)| Fault::Loss { host, link, percent }),
            (name(), any::<Option<u64>>()).prop_map(|(link, rate_mbps)| Fault::Rate { link, rate_mbps }),
            (name(), name(), any::<u32>()).prop_map(|(host, link, mtu_bytes)| Fault::Mtu {
                host,
                link,
                mtu_bytes
            }),
            (
                name(),
                prop_oneof![Just(DaemonChange::Stop), Just(DaemonChange::Kill), Just(DaemonChange::Start)]
            )
                .prop_map(|(host, change)| Fault::Libvirt { host, change }),
        ]
    }

    proptest! {
        #[test]
        fn a_fault_reads_back_from_its_words(fault in fault()) {
            prop_assert_eq!(parse(&fault.to_string()), Ok(fault));
        }

        #[test]
        fn no_words_make_the_parser_panic(words in proptest::collection::vec("\\PC{0,8}", 0..6)) {
            let _ = Fault::from_words(&words);
        }
    }

    #[test]
    fn errors_teach() {
        let message = |line| parse(line).unwrap_err().to_string();
        assert!(message("unplug a e0").contains("\"unplug\": a fault is one of: link-down HOST"));
        assert!(message("link-down a").contains("link-down HOST LINK"));
        assert!(message("libvirt-stop").contains("libvirt-stop HOST"));
        assert!(message("rate e0 fast").contains("such as 1000"));
        assert!(message("mtu a e0 -1").contains("such as 9000"));
        assert!(message("blackhole a e0 left").contains("both, receive or send"));
        assert!(message("loss a e0 100").contains("1 to 99"));
        assert!(message("blackhole-above a e0 jumbo").contains("such as 1400"));
        assert!(message("").contains("a fault is one of"));
    }

    #[test]
    fn a_fault_of_something_that_does_not_exist_names_what_does() {
        let spec = LabSpec::of_two_hosts("x", vec![LinkSpec::default(); 2]);
        let message = |line| parse(line).unwrap().changes(&spec).unwrap_err().to_string();
        assert!(message("link-down c e0").contains("its hosts are a, b"));
        assert!(message("heal a e7").contains("its links are e0, e1"));
        assert!(message("rate e0 0").contains("1 to 100000 Mb/s"));
        assert!(message("mtu a e0 500").contains("1280 to 65535 bytes"));
    }

    #[test]
    fn what_a_host_sends_is_dropped_at_the_other_end() {
        let mut spec = LabSpec::of_two_hosts("x", vec![LinkSpec::default()]);
        let [_, send] = drops(&spec, "a", "e0").unwrap();
        assert_eq!(send.end.namespace, "drainpipe-x-b");
        spec.hosts.push("c".to_owned());
        let [_, send] = drops(&spec, "a", "e0").unwrap();
        assert_eq!(send.end.namespace, "drainpipe-x-switch");
        assert_eq!(send.end.interface, "e0-a");
    }
}
