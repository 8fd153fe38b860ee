//! Parsers of a peer's and a QEMU's bytes, as functions of bytes: each asserts what holds whatever the bytes are, and
//! panics where it does not. `make fuzz` looks for such bytes.

use std::collections::BTreeSet;
use std::ffi::OsStr;
use std::path::Path;

use drainpipe_hypervisor::Role;
use drainpipe_hypervisor::spec::{DiskFormat, ResolvedSpec, VmSpec};
use serde_json::{Value, json};

use crate::command_line::command_line;
pub use crate::qmp::fuzzing::{QMP_HOLDS_BYTES, qmp, qmp_seeds};

/// What a specification of a few kilobytes takes, in all the forms that it has.
pub const SPEC_HOLDS_BYTES: usize = 4 << 20;

/// Options of QEMU that a peer's VM may have, besides flags.
const OPTIONS: [&str; 23] = [
    "-accel",
    "-add-fd",
    "-append",
    "-blockdev",
    "-chardev",
    "-cpu",
    "-device",
    "-display",
    "-incoming",
    "-initrd",
    "-kernel",
    "-m",
    "-machine",
    "-mon",
    "-msg",
    "-name",
    "-netdev",
    "-object",
    "-rtc",
    "-sandbox",
    "-serial",
    "-smp",
    "-uuid",
];

/// A VM as a peer describes it, as JSON.
///
/// Holds: what is checked has a form in TOML that reads back the same. What is resolved arrives as it is sent. QEMU
/// gets the options that it is meant to get, and opens the disks that are named.
pub fn spec(data: &[u8]) {
    if let Ok(spec) = serde_json::from_slice::<VmSpec>(data)
        && spec.validate().is_ok()
    {
        assert_eq!(VmSpec::from_toml(&spec.to_toml(), Path::new("vm.toml")), Ok(spec));
    }
    let Ok(resolved) = serde_json::from_slice::<ResolvedSpec>(data) else { return };
    let sent = serde_json::to_vec(&resolved).expect("a specification has a form in JSON");
    assert_eq!(serde_json::from_slice::<ResolvedSpec>(&sent).ok().as_ref(), Some(&resolved));
    for role in [Role::Fresh, Role::Incoming] {
        check_command_line(&resolved, role);
    }
}

fn check_command_line(resolved: &ResolvedSpec, role: Role) {
    let spec = resolved.spec();
    let arguments = command_line(resolved, role, &BTreeSet::new());
    assert!(arguments.iter().all(|argument| !argument.as_encoded_bytes().contains(&0)));
    let (flags, options) = arguments.split_at(3);
    assert_eq!(flags, ["-nodefaults", "-no-user-config", "-S"]);
    let (options, rest) = options.as_chunks::<2>();
    assert!(rest.is_empty());
    for [option, _] in options {
        assert!(OPTIONS.iter().any(|known| option == known), "{}", option.display());
    }
    let values = |wanted: &'static str| options.iter().filter(move |[option, _]| option == wanted);
    let files = values("-blockdev").map(|[_, value]| json_of(value)).filter(|node| node["driver"] == "file");
    let disks: Vec<Value> = files.map(|node| node["filename"].clone()).collect();
    let handed = values("-add-fd").map(|[_, value]| value.to_string_lossy().into_owned());
    let handed: Vec<Value> =
        handed.map(|set| json!(format!("/dev/fdset/{}", set.split_once("set=").expect("one").1))).collect();
    assert_eq!((disks.len(), disks), (spec.disks.len(), handed));
    let raw = values("-blockdev").filter(|[_, value]| json_of(value)["driver"] == "raw").count();
    assert_eq!(raw, spec.disks.iter().filter(|disk| disk.format == DiskFormat::Raw).count());
    assert_eq!(values("-netdev").count(), spec.nics.len());
}

fn json_of(value: &OsStr) -> Value {
    serde_json::from_slice(value.as_encoded_bytes()).expect("it was made as JSON")
}

/// VMs with a bit of everything, one of them with all decided.
pub fn spec_seeds() -> Vec<Vec<u8>> {
    let resolved = json!({
        "name": "web-1", "uuid": "5a8f6c0e-0f0f-4c8c-9d5f-000000000001", "memory_mib": 2048, "memory_padding_kib": 0,
        "huge_page_mib": 2, "vcpus": 2, "machine": "pc-q35-7.2", "cpu_model": "qemu64,+avx", "accelerator": "tcg",
        "kernel": "/boot/vmlinuz", "initramfs": "/boot/initrd", "kernel_command_line": "console=ttyS0",
        "disk": [
            {"path": "/disks/a,b.qcow2", "format": "qcow2", "read_only": false},
            {"path": "/disks/c", "format": "raw", "read_only": true},
        ],
        "nic": [{"bridge": "br0", "mac": "52:54:00:00:00:01"}],
    });
    let open = json!({
        "name": "db", "memory_mib": 512, "memory_padding_kib": 8, "vcpus": 1, "machine": "pc-i440fx-7.2",
        "nic": [{"bridge": "br-guest"}],
        "placement": {"stays": "licence", "apart": ["db"], "together": ["shop"]},
        "guest": {"heartbeat": "192.0.2.7:7400", "control": "[2001:db8::7]:7401"},
    });
    [resolved, open].map(|spec| spec.to_string().into_bytes()).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_fuzzed_holds_for_its_seeds() {
        for seed in qmp_seeds() {
            qmp(&seed);
        }
        for seed in spec_seeds() {
            spec(&seed);
        }
        assert!(serde_json::from_slice::<ResolvedSpec>(&spec_seeds()[0]).is_ok());
        assert!(serde_json::from_slice::<VmSpec>(&spec_seeds()[1]).is_ok_and(|spec| spec.validate().is_ok()));
    }
}
