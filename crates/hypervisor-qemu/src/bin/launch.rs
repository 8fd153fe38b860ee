//! Does what `drainpipe launch` does, for tests of this crate.

use std::process::ExitCode;

use drainpipe_hypervisor_qemu::launcher;

fn main() -> ExitCode {
    let mut arguments = std::env::args_os().skip(1);
    let order = arguments.next().unwrap_or_default();
    // Behind `--`.
    let arguments: Vec<_> = arguments.skip(1).collect();
    launcher::become_qemu(&order.to_string_lossy(), &arguments).into()
}
