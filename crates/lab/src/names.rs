//! Names of namespaces and interfaces, and the way back from a namespace to its lab.

/// Namespaces of all labs start with this.
const PREFIX: &str = "drainpipe-";

/// The node from which the guests' service is observed: `lab.command(CLIENT)`.
pub const CLIENT: &str = "client";

/// The node that holds the bridges between the others.
pub(crate) const SWITCH: &str = "switch";

/// The unshaped interface by which hosts and client reach each other's agents.
pub const MANAGEMENT_INTERFACE: &str = "mgmt";

/// The bridge on every host to which guests attach their taps; on the client, its interface in
/// the guest network.
pub const GUEST_BRIDGE: &str = "guests";

/// The host's port to the switch's guest bridge.
pub(crate) const GUEST_UPLINK: &str = "uplink";

/// The network namespace of one node of a lab.
pub(crate) fn namespace(lab: &str, node: &str) -> String {
    format!("{PREFIX}{lab}-{node}")
}

/// The lab and the node that a namespace belongs to, if it is a lab's.
///
/// Node names have no hyphen, so the last one separates: lab `x-y` is never taken for lab `x`.
pub(crate) fn lab_and_node(namespace: &str) -> Option<(&str, &str)> {
    let (lab, node) = namespace.strip_prefix(PREFIX)?.rsplit_once('-')?;
    (!lab.is_empty() && !node.is_empty()).then_some((lab, node))
}

/// Link `index` as every host sees it.
pub(crate) fn link(index: usize) -> String {
    format!("e{index}")
}

/// The switch's port to `node` on a bridge. Fits the kernel's 15 characters because
/// [`LabSpec`](crate::LabSpec) limits host names to 10 and links to two digits.
pub(crate) fn switch_port(bridge: &str, node: &str) -> String {
    let short = match bridge {
        MANAGEMENT_INTERFACE => "m",
        GUEST_BRIDGE => "g",
        link => link,
    };
    format!("{short}-{node}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_namespace_names_its_lab_even_when_one_lab_is_a_prefix_of_another() {
        assert_eq!(lab_and_node(&namespace("x-y", "a")), Some(("x-y", "a")));
        assert_eq!(lab_and_node(&namespace("x", "a")), Some(("x", "a")));
        assert_eq!(lab_and_node("drainpipe-x"), None);
        assert_eq!(lab_and_node("drainpipe--a"), None);
        assert_eq!(lab_and_node("other-x-a"), None);
    }
}
