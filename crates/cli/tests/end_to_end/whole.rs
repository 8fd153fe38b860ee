//! The short form of these tests, which `make test` runs, and the whole, which `make test-whole` does: what a test has in
//! the short form alone shows each mechanism once, the whole has the same faults at other ends, by other means and options.

use crate::{Test, with_libvirt};

/// Has all of them run.
const WHOLE: &str = "DRAINPIPE_TEST_WHOLE";

/// Whether the whole is run; `make test-libvirt` is always whole.
pub(crate) fn is_wanted() -> bool {
    std::env::var_os(WHOLE).is_some() || with_libvirt::is_wanted()
}

/// What a test goes through one by one; in the short form, the first `short` of them.
pub(crate) fn first_or_all<T>(short: usize, all: &[T]) -> &[T] {
    if is_wanted() { all } else { &all[..short] }
}

/// Tests that the short form leaves out.
pub(crate) fn or_none(tests: &'static [Test]) -> &'static [Test] {
    if is_wanted() { tests } else { &[] }
}
