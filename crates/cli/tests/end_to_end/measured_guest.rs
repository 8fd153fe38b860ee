//! Guests for measuring: large, and in huge pages if the kernel has them. If the machine is itself virtual, it keeps
//! those. Other pages it may give back to its own host when a QEMU ends, and get again at the next touch, which takes
//! up to 2 s for a GiB, at the target's expense.

use crate::guest::{Guest, MIX, UNFILLED_MIB};
use crate::huge_pages::SetAside;
use crate::options;
use crate::support::TestLab;

const HUGE_PAGE_MIB: u64 = 2;

/// A guest to be measured.
#[derive(Clone, Copy)]
pub(crate) struct MeasuredGuest<'a> {
    pub(crate) name: &'a str,
    pub(crate) memory_mib: u64,
    pub(crate) filled_mib: u64,
    /// What its memory is filled with.
    pub(crate) mix: &'a str,
    pub(crate) kernel_parameters: &'a str,
    pub(crate) is_in_huge_pages: bool,
}

/// Memory like an operating system's, of which compression leaves two thirds.
pub(crate) const OS_LIKE: MeasuredGuest<'_> = MeasuredGuest {
    name: "web",
    memory_mib: 1280,
    filled_mib: 960,
    mix: "zero:40,text:30,random:30",
    kernel_parameters: "",
    is_in_huge_pages: true,
};

impl MeasuredGuest<'_> {
    /// Starts the guest on the lab's first host, with the newer machine type if a QEMU has that. The guest is not ready
    /// yet.
    pub(crate) fn start(&self, lab: &TestLab) -> Guest {
        let guest = Guest::new(self.name, lab.guest_address(), lab.namespace("client"));
        let specification =
            guest.specification(self.memory_mib, self.kernel_parameters).replace(MIX, self.mix).replace(
                &format!("drainpipe.memory_mib={}", self.memory_mib - UNFILLED_MIB),
                &format!("drainpipe.memory_mib={}", self.filled_mib),
            );
        let huge =
            if self.is_in_huge_pages { format!("huge_page_mib = {HUGE_PAGE_MIB}\n") } else { String::new() };
        let specification = huge + &specification;
        let newer = newer_qemu().map(|_| Guest::on_newer_machine(&specification));
        lab.create(&newer.unwrap_or(specification), &guest.name);
        lab.drainpipe(&["vm", "start", &guest.name]).done();
        guest
    }
}

/// Huge pages for this much memory, each touched.
pub(crate) fn set_aside(mib: u64) -> Option<SetAside> {
    // For that, guests without KVM need it.
    newer_qemu()?;
    let set_aside = SetAside::pages(mib / HUGE_PAGE_MIB);
    if set_aside.is_none() {
        eprintln!("without huge pages, of which the kernel has too few");
    }
    set_aside.map(|pages| pages.touched(mib << 20))
}

/// The QEMU to measure, unless it is the distribution's own.
fn newer_qemu() -> Option<String> {
    options::other_qemu().filter(|qemu| qemu != "qemu-system-x86_64")
}
