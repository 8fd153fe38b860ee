//! Faults act, show, and can be healed.

use std::time::Duration;

use drainpipe_lab::{Fault, LabSpec, LinkSpec, LinkState};

use crate::support::{PATIENCE, TestLab, link, skipped, unique_name};

/// Long enough for several datagrams to pass if they could.
const SILENCE: Duration = Duration::from_millis(400);

fn fault(words: &str) -> Fault {
    Fault::from_words(&words.split(' ').collect::<Vec<_>>()).unwrap()
}

impl TestLab {
    fn make(&self, words: &str) {
        // Twice, because the second time must change nothing.
        self.fault(&fault(words)).unwrap();
        self.fault(&fault(words)).unwrap();
    }

    fn passes(&self, from: &str, to: &str, limit: Duration) -> bool {
        self.echoes(from, to, self.address(to, "e0"), 100, limit)
    }

    fn state(&self, host: usize, link: usize) -> LinkState {
        self.status().unwrap().hosts[host].links[link].state
    }

    /// The active faults of one host, as the words that cause them.
    fn faults(&self, host: usize) -> Vec<String> {
        let links = &self.status().unwrap().hosts[host].links;
        links.iter().flat_map(|link| &link.faults).map(ToString::to_string).collect()
    }
}

#[test]
fn a_link_that_is_down_takes_the_carrier_from_the_other_end_and_comes_back() {
    if skipped() {
        return;
    }
    let lab = TestLab::of_two_hosts(vec![link(None); 2]);
    assert!(lab.passes("a", "b", PATIENCE));
    lab.make("link-down a e0");
    assert_eq!((lab.state(0, 0), lab.state(1, 0)), (LinkState::Down, LinkState::NoCarrier));
    assert_eq!((lab.state(0, 1), lab.state(1, 1)), (LinkState::Up, LinkState::Up));
    assert_eq!((lab.faults(0), lab.faults(1)), (vec!["link-down a e0".to_owned()], vec![]));
    assert!(!lab.passes("b", "a", SILENCE));
    lab.make("link-up a e0");
    assert!(lab.passes("a", "b", PATIENCE));
    assert_eq!(lab.faults(0), Vec::<String>::new());
}

#[test]
fn a_blackhole_swallows_silently_in_its_direction_until_it_is_healed() {
    if skipped() {
        return;
    }
    for hosts in [vec!["a", "b"], vec!["a", "b", "c"]] {
        let hosts = hosts.into_iter().map(str::to_owned).collect();
        let lab = TestLab::of(LabSpec { hosts, ..LabSpec::of_two_hosts(unique_name(), vec![link(None)]) });
        assert!(lab.passes("a", "b", PATIENCE));
        for direction in ["receive", "send", "both"] {
            lab.make(&format!("blackhole a e0 {direction}"));
            assert_eq!((lab.state(0, 0), lab.state(1, 0)), (LinkState::Up, LinkState::Up));
            assert_eq!(lab.faults(0), [format!("blackhole a e0 {direction}")]);
            assert!(!lab.passes("a", "b", SILENCE), "{direction}");
            let before = lab.status().unwrap().hosts[0].links[0].clone();
            let one_way = lab.one_way("a", "b");
            assert_eq!(one_way, direction == "receive", "{direction}");
            let after = lab.status().unwrap().hosts[0].links[0].clone();
            assert!(after.sent_bytes > before.sent_bytes, "sending succeeds");
            lab.make("heal a e0");
            assert_eq!(lab.faults(0), Vec::<String>::new());
            assert!(lab.passes("a", "b", PATIENCE), "{direction}");
        }
        if lab.spec().hosts.len() > 2 {
            lab.make("blackhole a e0");
            assert!(lab.passes("b", "c", PATIENCE), "only a is cut off");
        }
    }
}

#[test]
fn a_blackhole_in_one_direction_leaves_the_loss_in_the_other() {
    if skipped() {
        return;
    }
    let lab = TestLab::of_two_hosts(vec![link(None)]);
    lab.make("loss a e0 20");
    assert_eq!(lab.faults(0), ["loss a e0 20"]);
    for direction in ["receive", "send"] {
        lab.make("loss a e0 20");
        lab.make(&format!("blackhole a e0 {direction}"));
        assert_eq!(lab.faults(0), ["loss a e0 20".to_owned(), format!("blackhole a e0 {direction}")]);
    }
    lab.make("blackhole a e0");
    assert_eq!(lab.faults(0), ["blackhole a e0 both"]);
    lab.make("heal a e0");
    assert_eq!(lab.faults(0), Vec::<String>::new());
}

#[test]
fn a_rate_changes_on_every_end_and_can_be_lifted() {
    if skipped() {
        return;
    }
    let lab = TestLab::of_two_hosts(vec![link(Some(1000))]);
    lab.make("rate e0 50");
    for host in [0, 1] {
        assert_eq!(lab.faults(host), ["rate e0 50"]);
    }
    let mbps = lab.stream_mbps("a", "b", lab.address("b", "e0"), Duration::from_secs(1));
    assert!(mbps < 55.0, "{mbps:.1} of 50 Mb/s");
    lab.make("rate e0 unlimited");
    assert_eq!(lab.status().unwrap().hosts[0].links[0].rate_mbps, None);
    lab.make("rate e0 1000");
    assert_eq!(lab.faults(0), Vec::<String>::new());
}

#[test]
fn packets_too_large_for_the_other_end_vanish_and_small_ones_pass() {
    if skipped() {
        return;
    }
    let jumbo = LinkSpec { rate_mbps: None, mtu_bytes: 9000 };
    let lab = TestLab::of_two_hosts(vec![jumbo]);
    let address = lab.address("b", "e0");
    assert!(lab.echoes("a", "b", address, 8900, PATIENCE));
    lab.make("mtu b e0 1500");
    assert_eq!(lab.faults(1), ["mtu b e0 1500"]);
    assert!(lab.echoes("a", "b", address, 1400, PATIENCE));
    assert!(!lab.echoes("a", "b", address, 8900, SILENCE));
    lab.make("heal b e0");
    assert!(lab.echoes("a", "b", address, 8900, PATIENCE));
}

#[test]
fn a_blackhole_for_large_frames_swallows_them_in_its_direction_and_no_small_ones() {
    if skipped() {
        return;
    }
    let lab = TestLab::of_two_hosts(vec![link(None)]);
    let address = lab.address("b", "e0");
    assert!(lab.echoes("a", "b", address, 1_472, PATIENCE));
    for direction in ["receive", "send", "both"] {
        lab.make(&format!("blackhole-above a e0 1400 {direction}"));
        assert_eq!(lab.faults(0), [format!("blackhole-above a e0 1400 {direction}")]);
        assert!(lab.echoes("a", "b", address, 1_372, PATIENCE), "{direction}");
        assert!(!lab.echoes("a", "b", address, 1_373, SILENCE), "{direction}");
        lab.make("heal a e0");
    }
    lab.make("blackhole-above a e0 1400");
    lab.make("blackhole a e0 receive");
    assert_eq!(lab.faults(0), ["blackhole a e0 receive", "blackhole-above a e0 1400 send"]);
    lab.make("heal a e0");
    assert_eq!(lab.faults(0), Vec::<String>::new());
    assert!(lab.echoes("a", "b", address, 1_472, PATIENCE));
}

#[test]
fn a_fault_of_what_does_not_exist_changes_nothing() {
    if skipped() {
        return;
    }
    let lab = TestLab::of_two_hosts(vec![link(None)]);
    let error = lab.fault(&fault("link-down a e1")).unwrap_err().to_string();
    assert!(error.contains("its links are e0"), "{error}");
    assert_eq!(lab.faults(0), Vec::<String>::new());
}
