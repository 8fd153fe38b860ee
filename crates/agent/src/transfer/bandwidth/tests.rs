//! What a host's agent grants to incoming traffic, in both classes.

use super::*;
use crate::test_host::TestHost;

fn memory(migration: &str) -> Sent {
    Sent { migration: migration.into(), class: TrafficClass::Memory }
}

fn disks(migration: &str) -> Sent {
    Sent { class: TrafficClass::Storage, ..memory(migration) }
}

#[test]
fn a_limit_of_disks_leaves_memory_alone_and_outlives_the_agent() {
    let host = TestHost::new();
    let life = host.start();
    let view = life.parts.transfer.bandwidth.set(Limited::Storage, BandwidthSetting::Mbps(40)).unwrap();
    assert_eq!((view.limit_mbps, view.storage.limit_mbps), (None, Some(40)));
    drop(life);
    let life = host.start();
    let bandwidth = &life.parts.transfer.bandwidth;
    assert_eq!(bandwidth.view(), view);
    let share = |sent: &Sent| bandwidth.share_of_coming(sent, Some(1000), false).mbps;
    assert_eq!([share(&disks("one")), share(&memory("two"))], [Some(40), None]);
    let (one, three) = (disks("one"), disks("three"));
    assert_eq!([&one, &three, &one, &three].map(share), [40, 1, 20, 20].map(Some));
    bandwidth.set(Limited::All, BandwidthSetting::Mbps(0)).unwrap_err();
}

#[test]
fn disks_and_memory_share_the_limit_for_all_and_memory_goes_first() {
    let host = TestHost::new();
    let life = host.start();
    let bandwidth = &life.parts.transfer.bandwidth;
    bandwidth.set(Limited::All, BandwidthSetting::Mbps(80)).unwrap();
    let share = |sent: &Sent| bandwidth.share_of_coming(sent, Some(1000), false).mbps;
    assert_eq!(share(&disks("one")), Some(80));
    assert_eq!([share(&memory("two")), share(&disks("one")), share(&memory("two"))], [1, 10, 70].map(Some));
    // A VM's memory beside its writes to its disks, once these are mirrored.
    let writes = |mbps| bandwidth.share_of_coming(&disks("one"), Some(mbps), true).mbps;
    assert_eq!([writes(30), share(&memory("two")), writes(30)], [10, 50, 30].map(Some));
}
