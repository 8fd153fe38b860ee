//! What `scripts/layers` refuses, in a small repository of its own.

use std::fs;
use std::path::Path;
use std::process::Command;

use tempfile::TempDir;

/// An agent and an engine with layers, and other crates.
const FILES: [(&str, &str); 14] = [
    ("agent/layers", "top\nbottom\n"),
    ("agent/src/top.rs", "use crate::bottom;\n"),
    ("agent/src/bottom/mod.rs", "mod one;\nmod other;\n"),
    ("agent/src/bottom/one.rs", "use super::other::Other;\n"),
    ("agent/src/bottom/other.rs", "pub struct Other;\n"),
    ("engine/layers", "plan\n"),
    ("engine/src/plan.rs", "\n"),
    ("cli/src/list.rs", "\n"),
    ("lab/src/lib.rs", "mod one;\nmod other;\n\npub use other::{\n    Other,\n};\n"),
    ("lab/src/one.rs", "use crate::Other;\n"),
    ("lab/src/other.rs", "pub struct Other;\n"),
    ("guest/src/bin/init/boot.rs", "use crate::disks::Disks;\n"),
    ("guest/src/bin/init/disks.rs", "pub struct Disks;\n"),
    ("hypervisor-libvirt/src/libvirt.rs", "fn f() { g(name == \"libvirt\") }\n"),
];

/// What the script says about the small repository if `file` has this text; nothing if all is well.
fn said_of(file: &str, text: &str) -> String {
    let root = TempDir::new().expect("a small repository");
    for (path, content) in FILES.into_iter().chain([(file, text)]) {
        let path = root.path().join("crates").join(path);
        fs::create_dir_all(path.parent().expect("a small repository")).expect("a small repository");
        fs::write(path, content).expect("a small repository");
    }
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scripts/layers");
    let output = Command::new(script).arg(root.path()).output().expect("a small repository");
    let said = String::from_utf8(output.stdout).expect("a small repository");
    assert_eq!(String::from_utf8_lossy(&output.stderr), "");
    assert_eq!(output.status.success(), said.is_empty(), "{text}: {said}");
    said
}

#[track_caller]
fn refused(file: &str, text: &str, why: &str) {
    let said = said_of(file, text);
    assert!(said.contains(why), "{text} in {file}: {said}");
}

#[test]
fn an_import_that_goes_up_is_refused() {
    refused("agent/src/bottom/other.rs", "use crate::top::Top;", "bottom imports top, which stands above it");
}

#[test]
fn files_of_one_folder_that_use_each_other_are_refused() {
    for text in [
        "use super::one::One;",
        "use super::{\n    other,\n    one::{self, One},\n};",
        "use crate::bottom::one;",
        "use crate::bottom::{one::One};",
        "fn f() { super::one::f() }",
    ] {
        refused("agent/src/bottom/other.rs", text, "bottom::one");
    }
    assert_eq!(
        said_of("agent/src/bottom/other.rs", "#[cfg(test)]\nmod tests {\n    use super::super::one;\n}"),
        ""
    );
}

#[test]
fn a_circle_is_refused_in_every_crate_and_program() {
    for text in ["use crate::one::One;", "use super::one::One;"] {
        // The module uses it by the root's name for it.
        refused("lab/src/other.rs", text, "crates/lab/src: modules of one folder use each other in a circle");
    }
    refused("guest/src/bin/init/disks.rs", "use crate::boot::Boot;", "crates/guest/src/bin/init: modules");
}

#[test]
fn what_drives_a_hypervisor_is_named_where_the_agents_parts_are_made() {
    refused("agent/src/top.rs", "use drainpipe_hypervisor_qemu::Qemu;", "only app/mod.rs");
    assert_eq!(said_of("agent/src/top.rs", "use drainpipe_hypervisor::Vm;"), "");
}

#[test]
fn a_question_for_a_hypervisors_name_is_refused_in_every_crate_but_its_own() {
    for text in [
        r#"if facts.hypervisor.name == "QEMU" {"#,
        r#"if "libvirt" != name {"#,
        r#"match name { "QEMU" => 1, _ => 2 }"#,
        r#"    "QEMU" | "KVM" => 1,"#,
        r#"    Some("libvirt") => 1,"#,
        r#"if name.starts_with("QEMU") {"#,
        r#"matches!(name.as_str(), "libvirt")"#,
        r#"if let Some("qemu") = name {"#,
    ] {
        for file in ["cli/src/list.rs", "engine/src/plan.rs"] {
            refused(file, text, "never for its name");
        }
    }
    for text in [r#"let name = "QEMU".into();"#, r#"&["host", "QEMU", "kernel"]"#, r#"// name == "QEMU""#] {
        assert_eq!(said_of("cli/src/list.rs", text), "");
    }
}

#[test]
fn one_file_reads_the_name_that_0_1_0_says() {
    assert_eq!(
        said_of("engine/src/host/facts_0_1_0.rs", r#"match name { "QEMU" => 1 }"#).matches("name").count(),
        0
    );
}

#[test]
fn a_question_for_a_vms_owner_is_refused_but_where_it_is_answered() {
    for text in [
        "match definition.manager {",
        "match vm.spec().manager() {",
        "if let Some(manager) = vm.manager {",
        "let Some(manager) = &vm.manager else { return };",
        "if vm.manager.is_some() {",
        "let is_own = vm.manager.as_ref().is_none_or(|manager| own(manager));",
        "vm.manager.map_or(1, |_| 2)",
        "let manager = vm.manager?;",
        "let manager = (*manager)?;",
        "if vm.manager == other {",
        "if Some(owner) != vm.manager {",
        "Manager::Libvirt => 1,",
        "matches!(vm.manager, None)",
        "if let VmSpec { manager: None, .. } = vm {",
    ] {
        for file in ["cli/src/list.rs", "agent/src/top.rs"] {
            refused(file, text, "may ask who owns a VM");
        }
        assert_eq!(said_of("hypervisor/src/spec/owner.rs", text), "");
    }
    for text in ["facts_for(vm.manager, facts)", "manager: vm.manager,", "use drainpipe_hypervisor::Manager;"]
    {
        assert_eq!(said_of("cli/src/list.rs", text), "");
    }
}
