//! Translates failures of libvirt into every hypervisor's.

use drainpipe_hypervisor::{VmError, VmErrorKind};
use drainpipe_libvirt::Error;

/// As QEMU says it, which libvirt passes on.
const PORT_TAKEN: &str = "Address already in use";

/// The error of a call about a domain.
pub(crate) fn failed(error: Error) -> VmError {
    let kind = match &error {
        Error::TimedOut { .. } => VmErrorKind::Mute,
        Error::CannotConnect { .. } | Error::CannotAuthenticate { .. } | Error::Closed(_) => {
            VmErrorKind::Gone
        }
        Error::Libvirt(said) if said.message.contains(PORT_TAKEN) => VmErrorKind::PortTaken,
        Error::Libvirt(_) if error.is_no_domain() => VmErrorKind::NotRunning,
        Error::Libvirt(_) => VmErrorKind::Refused,
        Error::Protocol(_) => VmErrorKind::Failed,
    };
    VmError::new(kind, error)
}

/// What libvirt's own tools do, and Drainpipe does not.
pub(crate) fn is_libvirts(what: &str) -> VmError {
    VmError::new(VmErrorKind::Refused, format!("it is a domain of libvirt: {what}"))
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn what_may_still_take_effect_is_told_from_what_libvirt_refused() {
        let late = Error::TimedOut { what: "resume", after: Duration::from_secs(1) };
        assert_eq!(failed(late).kind, VmErrorKind::Mute);
        assert_eq!(failed(Error::Closed("it ended".into())).kind, VmErrorKind::Gone);
    }
}
