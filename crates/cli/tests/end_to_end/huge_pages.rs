//! A VM whose memory is in huge pages that the host has set aside.

use std::fs;

use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};

use crate::check::check;
use crate::guest::Guest;
use crate::options;
use crate::program::REFUSED;
use crate::support::TestLab;

/// A setting of the kernel, and so of all hosts of a lab together.
const SETTING: &str = "/proc/sys/vm/nr_hugepages";

const MEMORY_MIB: u64 = 160;
const PAGE_MIB: u64 = 2;
const PAGES: u64 = MEMORY_MIB / PAGE_MIB;

/// The memory of a VM that runs only firmware.
const SMALL_MIB: u64 = 16;

/// Huge pages in addition to those that were there. They are given back when this is dropped.
pub(crate) struct SetAside {
    before: u64,
}

impl SetAside {
    /// `None` if the kernel has none to give.
    pub(crate) fn pages(count: u64) -> Option<Self> {
        let before = fs::read_to_string(SETTING).ok()?.trim().parse().ok()?;
        let set_aside = Self { before };
        set_aside.resize(count).then_some(set_aside)
    }

    /// Makes the kernel clear this many bytes of them once.
    pub(crate) fn touched(self, bytes: u64) -> Self {
        let all = memfd_create("drainpipe-huge-pages", MemfdFlags::HUGETLB | MemfdFlags::HUGE_2MB).unwrap();
        fallocate(all, FallocateFlags::empty(), 0, bytes).expect("the pages are free");
        self
    }

    /// Whether the kernel has this many.
    fn resize(&self, count: u64) -> bool {
        let wanted = self.before + count;
        let is_written = fs::write(SETTING, wanted.to_string()).is_ok();
        is_written && fs::read_to_string(SETTING).is_ok_and(|now| now.trim() == wanted.to_string())
    }
}

impl Drop for SetAside {
    fn drop(&mut self) {
        fs::write(SETTING, self.before.to_string()).expect("what was written can be written again");
    }
}

/// Needs QEMU 9.0: before, a guest without KVM needs an amount of memory that is no whole number of huge pages.
pub(crate) fn a_vm_in_huge_pages_is_checked_refused_and_moved() {
    let qemu = options::other_qemu().expect("the test runs only where there is one");
    let Some(set_aside) = SetAside::pages(PAGES) else {
        eprintln!("SKIPPED: the kernel has no {PAGES} huge pages of {PAGE_MIB} MiB to set aside");
        return;
    };
    let lab = TestLab::up(&["--link", "unlimited", "--link", "unlimited", "--qemu", &qemu]);
    let guest = Guest::new("web", lab.guest_address(), lab.namespace("client"));
    let huge = format!("huge_page_mib = {PAGE_MIB}\n");
    lab.create(&(huge.clone() + &guest.specification(MEMORY_MIB, "")), "web");
    lab.drainpipe(&["vm", "start", "web"]).done();
    guest.wait_until_ready();

    // The pages that are already there suffice for it.
    let other = Guest::new("db", lab.guest_address(), lab.namespace("client"));
    lab.create(&(huge.clone() + &other.specification(MEMORY_MIB, "")), "db");
    let short = ["short of huge pages for VM", "80 of 2 MiB needed, 0 free"];
    lab.drainpipe(&["vm", "start", "db"]).refused(REFUSED, &short);
    lab.drainpipe(&["migrate", "web", "b"]).refused(REFUSED, &short);
    let (code, findings) = check(&lab, "a", "b");
    let found = findings.iter().find(|finding| finding.code == "vm-huge-pages-short");
    assert!(code == REFUSED && found.is_some_and(|finding| finding.remedy.contains("+ 80")), "{findings:#?}");

    assert!(set_aside.resize(2 * PAGES), "as many again, for the target");
    let (_, findings) = check(&lab, "a", "b");
    assert!(!findings.iter().any(|finding| finding.code.contains("huge")), "{findings:#?}");
    // One more VM on a leaves enough for each of the two on b, but not for both.
    let small =
        format!("name = \"small\"\nmemory_mib = {SMALL_MIB}\nvcpus = 1\nmachine = \"pc-q35-8.2\"\n{huge}");
    lab.create(&small, "small");
    lab.drainpipe(&["vm", "start", "small"]).done();
    assert!(set_aside.resize(2 * PAGES + SMALL_MIB / PAGE_MIB), "for the target the larger one alone");
    let (_, findings) = check(&lab, "a", "b");
    let found = findings.iter().find(|finding| finding.code == "vms-huge-pages-short");
    assert!(
        found.is_some_and(|finding| finding.what.contains("88 huge pages of 2 MiB together")),
        "{findings:#?}"
    );
    lab.drainpipe(&["vm", "stop", "small", "--force"]).done();
    assert!(set_aside.resize(2 * PAGES), "the small one's are given back");
    for target in ["b", "a"] {
        let result = lab.migrate("web", target, &["--option", "multichannel"]);
        assert_eq!(result.choice.fallback_reason, None);
        guest.assert_intact();
    }
    lab.drainpipe(&["vm", "stop", "web", "--force"]).done();
}
