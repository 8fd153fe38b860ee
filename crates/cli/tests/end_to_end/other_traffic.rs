//! What others send over a migration's links does not count as the migration's.

use std::io::{Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::net::sockopt::set_tcp_congestion;

use crate::Test;
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[("is_not_counted", is_not_counted)];

/// Together, they take half of a link beside a migration, which has eight connections on each of two links.
const CONNECTIONS: usize = 8;

/// How often it checks whether to end.
const LOOK_EVERY: Duration = Duration::from_millis(200);

/// As much TCP traffic as possible from host `a` to host `b` over one link.
struct Traffic {
    ended: Arc<AtomicBool>,
    sent_bytes: Arc<AtomicU64>,
    threads: Vec<JoinHandle<()>>,
}

impl Traffic {
    fn begin(lab: &TestLab, to: SocketAddr) -> Self {
        let hosts = lab.lab();
        let listener = hosts.run_in("b", || TcpListener::bind(to).unwrap()).unwrap();
        let (ended, sent_bytes) = (Arc::default(), Arc::default());
        let mut threads = vec![];
        for _ in 0..CONNECTIONS {
            let sender = hosts.run_in("a", || TcpStream::connect(to).unwrap()).unwrap();
            // It fills the link's queue, so that what is sent over the other link overtakes what is sent here.
            set_tcp_congestion(&sender, "cubic").unwrap();
            let (receiver, _) = listener.accept().unwrap();
            threads.push(thread::spawn(move || drop_all(receiver)));
            let (ended, sent_bytes) = (Arc::clone(&ended), Arc::clone(&sent_bytes));
            threads.push(thread::spawn(move || send_all(sender, &ended, &sent_bytes)));
        }
        Self { ended, sent_bytes, threads }
    }

    /// Ends the traffic, and returns how many bytes were sent.
    fn end(self) -> u64 {
        self.ended.store(true, Ordering::Relaxed);
        for thread in self.threads {
            thread.join().unwrap();
        }
        self.sent_bytes.load(Ordering::Relaxed)
    }
}

fn send_all(mut sender: TcpStream, ended: &AtomicBool, sent_bytes: &AtomicU64) {
    sender.set_write_timeout(Some(LOOK_EVERY)).unwrap();
    while !ended.load(Ordering::Relaxed) {
        let written = sender.write(&[0; 16_384]).unwrap_or(0);
        sent_bytes.fetch_add(written as u64, Ordering::Relaxed);
    }
}

fn drop_all(mut receiver: TcpStream) {
    let mut buffer = [0; 16_384];
    while receiver.read(&mut buffer).is_ok_and(|count| count > 0) {}
}

/// How many bytes a link of host `a` has sent for anybody.
fn sent_by_link(lab: &TestLab, link: &str) -> u64 {
    let printed = lab.exec("a", &["ip", "-j", "-s", "link", "show", link]).done();
    let status: serde_json::Value = serde_json::from_str(&printed).unwrap();
    status[0]["stats64"]["tx"]["bytes"].as_u64().unwrap()
}

fn is_not_counted() {
    let lab = TestLab::up(&["--link", "200", "--link", "200"]);
    let guest = lab.start_guest("web", 160, "");
    let before = sent_by_link(&lab, "e1");
    let traffic = Traffic::begin(&lab, SocketAddr::from(([10, 77, 2, 12], 9_000)));
    eventually("the link is full", || sent_by_link(&lab, "e1") > before + (5 << 20));
    let result = lab.migrate("web", "b", &["--option", "multichannel"]);
    let others = traffic.end() as f64;
    let on_link = (sent_by_link(&lab, "e1") - before) as f64;
    guest.assert_intact();
    let [e0, e1] = &result.traffic.paths[..] else { panic!("{result:#?}") };
    assert!(!e0.includes_other_traffic && !e1.includes_other_traffic, "{result:#?}");
    assert!(e1.share > 0.1 && result.traffic.elsewhere.is_empty(), "{result:#?}");
    let total = result.memory.wire_bytes as f64;
    assert!(others > total * 0.2, "{others} of others beside {total} of the migration are no test");
    // What the link counted, less what the others know that they have sent.
    let rest = on_link - others;
    assert!((rest - e1.bytes as f64).abs() < total * 0.05, "{rest} of {on_link} were left: {result:#?}");
    let alone = lab.migrate("web", "a", &["--option", "multichannel"]);
    let difference = (alone.memory.wire_bytes as f64 - total).abs();
    assert!(difference < total * 0.05, "{total} beside others, {} alone", alone.memory.wire_bytes);
}
