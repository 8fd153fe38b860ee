//! Connections that a host's kernel tracks for its firewall, as values that can be sent to another host.

use std::net::{IpAddr, SocketAddr};

use serde::{Deserialize, Serialize};

/// The states of TCP that the kernel knows, from the first to the last (`enum tcp_conntrack`).
const TCP_STATES: std::ops::RangeInclusive<u8> = 1..=9;

/// State of an open connection (`TCP_CONNTRACK_ESTABLISHED`).
const TCP_ESTABLISHED: u8 = 3;

/// The most that TCP scales a window by, RFC 7323.
const WINDOW_SCALE_MAX: u8 = 14;

/// What the kernel keeps of an end that another kernel can use (`IP_CT_TCP_FLAG_*`): it scales its window, knows selective
/// acknowledgements, has closed first, and is judged liberally.
const TCP_FLAGS: u8 = 0b1111;

/// The longest time for which the kernel keeps an idle TCP connection by default: five days.
const TIMEOUT_MAX_S: u32 = 432_000;

/// A connection that a kernel tracks, with the addresses that it has on either side of the host: none is translated.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrackedConnection {
    /// The side that began it.
    pub source: SocketAddr,
    /// The other end's address.
    pub destination: SocketAddr,
    /// What is tracked of its protocol.
    pub transport: Transport,
    /// Whether both ends have sent something.
    pub is_answered: bool,
    /// Whether the kernel keeps it also when it has too many.
    pub is_assured: bool,
    /// After how many seconds without a packet it is forgotten.
    pub timeout_s: u32,
    /// The mark that the firewall's rules have set on it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub mark: u32,
    /// The zone within which its addresses are unique.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub zone: u16,
}

/// A protocol with ports.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case", deny_unknown_fields)]
pub enum Transport {
    /// UDP has no state.
    Udp,
    /// TCP.
    Tcp(TcpState),
}

/// How far a TCP connection is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TcpState {
    /// The kernel's number of it; 3 of one that stands.
    pub state: u8,
    /// The end that began it.
    pub source: TcpEnd,
    /// The other end.
    pub destination: TcpEnd,
}

/// What is known of one end of a TCP connection. Which bytes it may send next the kernel does not tell, and learns again.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TcpEnd {
    /// The binary logarithm of what its window is scaled by.
    pub window_scale: u8,
    /// The kernel's flags of it.
    pub flags: u8,
}

/// What tells connections apart that a kernel tracks: the ends, whether it is TCP, and the zone.
pub type ConnectionKey = (SocketAddr, SocketAddr, bool, u16);

impl TrackedConnection {
    /// What no other one has.
    pub fn key(&self) -> ConnectionKey {
        (self.source, self.destination, matches!(self.transport, Transport::Tcp(_)), self.zone)
    }

    /// Whether it is likely to be the same for a while: both ends use it, and none has begun to end it.
    pub fn stands(&self) -> bool {
        let is_open = match self.transport {
            Transport::Udp => true,
            Transport::Tcp(state) => state.state == TCP_ESTABLISHED,
        };
        self.is_assured && is_open
    }

    /// Whether one of its ends has this address.
    pub fn is_of(&self, address: IpAddr) -> bool {
        self.source.ip() == address || self.destination.ip() == address
    }

    /// What another host has said of it, with nothing in it that only the kernel may say; none if it cannot be.
    pub fn believable(self) -> Option<Self> {
        let is_end = |end: SocketAddr| is_machine(end.ip()) && end.port() != 0;
        let same_family = self.source.is_ipv4() == self.destination.is_ipv4();
        let transport = match self.transport {
            Transport::Udp => Transport::Udp,
            Transport::Tcp(state) => Transport::Tcp(state.believable()?),
        };
        let timeout_s = self.timeout_s.clamp(1, TIMEOUT_MAX_S);
        (same_family && is_end(self.source) && is_end(self.destination) && self.source != self.destination)
            .then_some(Self { transport, timeout_s, ..self })
    }
}

impl TcpState {
    fn believable(self) -> Option<Self> {
        let is_end = |end: TcpEnd| end.window_scale <= WINDOW_SCALE_MAX;
        let end = |end: TcpEnd| TcpEnd { flags: end.flags & TCP_FLAGS, ..end };
        (TCP_STATES.contains(&self.state) && is_end(self.source) && is_end(self.destination)).then(|| Self {
            source: end(self.source),
            destination: end(self.destination),
            ..self
        })
    }
}

/// Whether an address can be that of one machine, and means the same on each link of a host.
fn is_machine(address: IpAddr) -> bool {
    let is_link_local = match address {
        IpAddr::V4(address) => address.is_link_local() || address.is_broadcast(),
        IpAddr::V6(address) => address.is_unicast_link_local() || address.to_ipv4_mapped().is_some(),
    };
    !(is_link_local || address.is_loopback() || address.is_multicast() || address.is_unspecified())
}

fn is_zero<T: Default + PartialEq>(number: &T) -> bool {
    *number == T::default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A connection as it may be reported to a host that believes nothing.
    fn any_connection() -> impl Strategy<Value = TrackedConnection> {
        let end = || (0..18_u8, any::<u8>()).prop_map(|(window_scale, flags)| TcpEnd { window_scale, flags });
        let tcp = (0..12_u8, end(), end())
            .prop_map(|(state, source, destination)| Transport::Tcp(TcpState { state, source, destination }));
        let address = || {
            any::<([u8; 16], bool)>().prop_map(|(bytes, is_ipv4)| {
                let [one, two, three, four, ..] = bytes;
                if is_ipv4 { IpAddr::from([one, two, three, four]) } else { IpAddr::from(bytes) }
            })
        };
        let socket = || (address(), any::<u16>()).prop_map(SocketAddr::from);
        let ends = (socket(), socket(), prop_oneof![Just(Transport::Udp), tcp]);
        let rest = any::<(bool, bool, u32, u32, u16)>();
        (ends, rest).prop_map(|((source, destination, transport), rest)| {
            let (is_answered, is_assured, timeout_s, mark, zone) = rest;
            TrackedConnection {
                source,
                destination,
                transport,
                is_answered,
                is_assured,
                timeout_s,
                mark,
                zone,
            }
        })
    }

    fn tcp(source: &str, destination: &str, state: u8) -> TrackedConnection {
        let [source, destination] = [source, destination].map(|end| end.parse().unwrap());
        let end = TcpEnd { window_scale: 7, flags: 0xff };
        TrackedConnection {
            source,
            destination,
            transport: Transport::Tcp(TcpState { state, source: end, destination: end }),
            is_answered: true,
            is_assured: true,
            timeout_s: u32::MAX,
            mark: 0,
            zone: 0,
        }
    }

    #[test]
    fn what_cannot_be_is_not_believed() {
        let good = ("10.0.0.1:40000", "10.0.0.2:443", 3);
        assert!(tcp(good.0, good.1, good.2).believable().is_some());
        for (source, destination, state) in [
            ("10.0.0.1:40000", "10.0.0.2:443", 0),
            ("10.0.0.1:40000", "10.0.0.2:443", 10),
            ("10.0.0.1:0", "10.0.0.2:443", 3),
            ("10.0.0.1:40000", "10.0.0.2:0", 3),
            ("10.0.0.1:443", "10.0.0.1:443", 3),
            ("10.0.0.1:40000", "[2001:db8::1]:443", 3),
            ("127.0.0.1:40000", "10.0.0.2:443", 3),
            ("10.0.0.1:40000", "224.0.0.1:443", 3),
            ("10.0.0.1:40000", "255.255.255.255:443", 3),
            ("10.0.0.1:40000", "0.0.0.0:443", 3),
            ("[fe80::1]:40000", "[2001:db8::1]:443", 3),
            ("[::ffff:10.0.0.1]:40000", "[2001:db8::1]:443", 3),
        ] {
            let connection = tcp(source, destination, state);
            assert_eq!(connection.believable(), None, "{connection:?}");
        }
    }

    #[test]
    fn what_only_the_kernel_may_say_is_taken_out() {
        let believed = tcp("10.0.0.1:40000", "10.0.0.2:443", 3).believable().unwrap();
        let Transport::Tcp(state) = believed.transport else { panic!("{believed:?}") };
        assert_eq!((believed.timeout_s, state.source.flags), (TIMEOUT_MAX_S, TCP_FLAGS));
        let mut scaled = believed;
        let scale = TcpEnd { window_scale: 15, flags: 0 };
        scaled.transport = Transport::Tcp(TcpState { source: scale, ..state });
        assert_eq!(scaled.believable(), None);
    }

    proptest! {
        #[test]
        fn connections_read_back(connection in any_connection()) {
            let text = serde_json::to_string(&connection).unwrap();
            prop_assert_eq!(serde_json::from_str::<TrackedConnection>(&text).unwrap(), connection);
        }

        #[test]
        fn what_is_believed_is_believed_again(connection in any_connection()) {
            if let Some(believed) = connection.believable() {
                prop_assert_eq!(believed.believable(), Some(believed));
            }
        }
    }
}
