//! Somebody on the links' network who connects to every port there, before the source does.

use std::collections::VecDeque;
use std::fs::File;
use std::io::Write;
use std::net::{IpAddr, SocketAddr, TcpStream};
use std::os::fd::AsFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::Duration;

use rustix::thread::{LinkNameSpaceType, move_into_link_name_space};

use crate::Test;
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] =
    &[("who_connects_before_the_source_is_not_let_in", who_connects_before_the_source_is_not_let_in)];

/// The migration addresses of a and b in a lab, which everybody on the links' network can reach.
const MIGRATION_ADDRESSES: [(&str, &str); 2] =
    [("10.77.255.11", "10.77.1.11"), ("10.77.255.12", "10.77.1.12")];

const PORTS: std::ops::RangeInclusive<u16> = 49152..=49215;

fn who_connects_before_the_source_is_not_let_in() {
    let lab = TestLab::up(&["--hosts", "a,b,c", "--link", "500", "--link", "500"]);
    let guest = lab.start_guest("web", 160, "");
    let before = lab.network();
    let mut addresses: Vec<IpAddr> = ["a", "b"]
        .into_iter()
        .flat_map(|host| ["e0", "e1"].map(|link| lab.lab().spec().link_address(host, link).unwrap().into()))
        .collect();
    addresses.extend(MIGRATION_ADDRESSES.map(|(address, by)| {
        lab.exec("c", &["ip", "route", "add", address, "via", by]).done();
        address.parse::<IpAddr>().unwrap()
    }));
    let (going, rounds) = (Arc::new(AtomicBool::new(true)), Arc::new(AtomicUsize::new(0)));
    let peers: Vec<_> = addresses
        .into_iter()
        .map(|address| {
            let namespace = File::open(lab.namespace("c")).unwrap();
            let (going, rounds) = (Arc::clone(&going), Arc::clone(&rounds));
            thread::spawn(move || {
                move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
                let mut held = VecDeque::new();
                while going.load(Ordering::Relaxed) {
                    connect_to_all(address, &mut held);
                    rounds.fetch_add(1, Ordering::Relaxed);
                }
            })
        })
        .collect();
    eventually("the unauthenticated peers are there", || rounds.load(Ordering::Relaxed) > 4);
    for (target, option) in [("b", "tcp"), ("a", "multichannel"), ("b", "multichannel")] {
        let result = lab.migrate("web", target, &["--option", option]);
        assert!(
            !result.connection_use.encryption.is_some_and(|used| used.is_encrypted),
            "it was to go in the clear"
        );
    }
    going.store(false, Ordering::Relaxed);
    for peer in peers {
        peer.join().unwrap();
    }
    guest.assert_intact();
    eventually("the network is put back", || lab.network() == before);
}

/// Connects to each port, and says something that no migration would.
fn connect_to_all(address: IpAddr, held: &mut VecDeque<TcpStream>) {
    for port in PORTS {
        let to = SocketAddr::new(address, port);
        if let Ok(mut stream) = TcpStream::connect_timeout(&to, Duration::from_millis(20)) {
            // The connection may be closed by now.
            let _ = stream.write_all(&[0x5a; 64]);
            held.push_back(stream);
            held.truncate(64);
        }
    }
    thread::sleep(Duration::from_millis(5));
}
