//! libvirt's domains, moved through the agents: encrypted, compressed, or both.

use drainpipe_engine::result::MigrationResult;

use crate::Test;
use crate::captured::{Capture, KnownPages, assert_unseen};
use crate::encrypted::assert_encrypted;
use crate::libvirt_moves::{assert_moved, migrate};
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[("a_domain_is_moved_encrypted", a_domain_is_moved_encrypted)];

const MEMORY_MIB: u64 = 160;

fn a_domain_is_moved_encrypted() {
    let lab = TestLab::up(&["--libvirt", "--untrusted", "--link", "1000", "--link", "1000"]);
    let guest = lab.start_domain("a", "web", MEMORY_MIB, "");
    lab.virsh("a", &["autostart", "web"]).done();
    eventually("the agent has seen it", || !lab.vms().vms.is_empty());
    let known = KnownPages::of(MEMORY_MIB);
    for (source, target, option) in
        [("a", "b", "tcp"), ("b", "a", "multichannel"), ("a", "b", "compression"), ("b", "a", "auto")]
    {
        let capture = Capture::begin(&lab, &["a", "b"]);
        let result: MigrationResult = migrate(&lab, target, option);
        assert_unseen(&result, &capture.end(&known));
        assert_eq!(result.compression.is_some(), option == "compression", "{option}: {result:#?}");
        assert_encrypted(result);
        assert_moved(&lab, source, target);
        guest.assert_intact();
    }
}
