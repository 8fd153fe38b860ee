//! What the lab that starts a machine and the machine's first process agree on.

/// The 9p export that becomes the machine's root.
pub const ROOT_TAG: &str = "root";

/// The 9p export that lies over the root: kernel modules, and what the lab's machine may lack.
pub const ADDITIONS_TAG: &str = "additions";

/// The 9p export of the machine's own directory, writable from both sides.
pub const SHARED_TAG: &str = "shared";

/// The kernel parameter with the machine's name.
pub const HOSTNAME_PARAMETER: &str = "drainpipe.hostname=";

/// The kernel parameter with the path at which [`SHARED_TAG`] is mounted, the same as outside.
pub const SHARED_PARAMETER: &str = "drainpipe.shared=";

/// How many programs can be run at once; as many ports.
pub const PORTS: usize = 8;

/// The name of a port, inside; with `.sock`, its socket in the machine's directory outside.
pub fn port_name(port: usize) -> String {
    format!("exec{port}")
}

/// What a parameter of the kernel's command line says, if it is there.
pub fn parameter<'a>(command_line: &'a str, name: &str) -> Option<&'a str> {
    command_line.split_ascii_whitespace().find_map(|word| word.strip_prefix(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_found_by_name() {
        let line = "console=ttyS0 drainpipe.hostname=a drainpipe.shared=/run/x\n";
        assert_eq!(parameter(line, HOSTNAME_PARAMETER), Some("a"));
        assert_eq!(parameter(line, SHARED_PARAMETER), Some("/run/x"));
        assert_eq!(parameter("quiet", HOSTNAME_PARAMETER), None);
    }
}
