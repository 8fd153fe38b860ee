//! QEMUs that end. Each leaves a line in the agent's log: how it ended, and its last output.

use std::sync::{Arc, Weak};

use drainpipe_hypervisor::{End, Exit, Happening, Machine};
use tokio::sync::broadcast::error::RecvError;
use tracing::{info, warn};

/// As much as somebody reads in a line.
const SAID_CHARACTERS_MAX: usize = 500;

/// Watches a QEMU until it ends, also one that this agent has not started.
pub(crate) fn watch(vm: &str, vmm: &Arc<dyn Machine>) {
    let (end, vm) = (vmm.end(), vm.to_owned());
    let mut events = vmm.events();
    let vmm = Arc::downgrade(vmm);
    tokio::spawn(async move {
        let mut end = std::pin::pin!(end);
        let end = loop {
            tokio::select! {
                end = &mut end => break end,
                event = events.recv() => match event {
                    // Its guest has powered off, or QEMU was asked to end.
                    Ok(event) if event.what == Happening::Ending => expect_end(&vmm),
                    Ok(_) | Err(RecvError::Lagged(_)) => {}
                    Err(RecvError::Closed) => break end.await,
                },
            }
        };
        tell(&vm, &vmm, &end);
    });
}

fn expect_end(vmm: &Weak<dyn Machine>) {
    if let Some(vmm) = vmm.upgrade() {
        vmm.expect_end();
    }
}

fn tell(vm: &str, vmm: &Weak<dyn Machine>, End { exit, log_tail }: &End) {
    let said = last_said(log_tail);
    // If nobody holds it any more, this host has let it go.
    if vmm.upgrade().is_none_or(|vmm| vmm.is_ending()) || *exit == Exit::Code(0) {
        info!(vm, %exit, said, "its QEMU has ended");
    } else {
        warn!(vm, %exit, said, "its QEMU has died");
    }
}

/// Why a VM has no QEMU any more that nobody has ended, and that has not ended in good order.
pub(crate) fn cause_of_death(vmm: &dyn Machine) -> Option<String> {
    let exit = vmm.exit().filter(|exit| *exit != Exit::Code(0) && !vmm.is_ending())?;
    let said = vmm.log_tail();
    let said = last_said(&said);
    let said = if said.is_empty() { String::new() } else { format!("; it said: {said}") };
    Some(format!("its QEMU has ended by {exit}{said}"))
}

fn last_said(log_tail: &str) -> &str {
    let skipped = log_tail.chars().count().saturating_sub(SAID_CHARACTERS_MAX);
    let start = log_tail.char_indices().nth(skipped).map_or(log_tail.len(), |(start, _)| start);
    &log_tail[start..]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_what_it_said_is_told() {
        assert_eq!(last_said(""), "");
        assert_eq!(last_said("Assertion failed"), "Assertion failed");
        let long = format!("{}Assertion `ä` failed", "ö".repeat(SAID_CHARACTERS_MAX));
        let said = last_said(&long);
        assert!(
            said.ends_with("Assertion `ä` failed") && said.chars().count() == SAID_CHARACTERS_MAX,
            "{said}"
        );
    }
}
