//! TOML in and out, with errors that point at the line.

use std::ops::Range;
use std::path::{Path, PathBuf};

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use super::{SpecProblem, VmSpec};

/// A specification that cannot be used, and where it is wrong.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{file}:{line}:{column}: {problem}")]
pub struct SpecError {
    /// The file, as its reader named it.
    pub file: PathBuf,
    /// Line, from 1. What is missing from the file as a whole is reported in line 1.
    pub line: usize,
    /// Column in characters, from 1.
    pub column: usize,
    /// What is wrong and what is allowed.
    pub problem: String,
}

impl VmSpec {
    /// Reads a specification from TOML. `file` only names it in errors.
    pub fn from_toml(text: &str, file: &Path) -> Result<Self, SpecError> {
        let spec: Self = toml::from_str(text)
            .map_err(|error| located(text, file, error.span(), error.message().to_owned()))?;
        spec.validate().map_err(|problem| locate_problem(text, file, &problem))?;
        Ok(spec)
    }

    /// Writes the specification as TOML that [`Self::from_toml`] reads back as the same.
    pub fn to_toml(&self) -> String {
        toml::to_string(self).expect("strings, numbers and tables of them always have a TOML form")
    }
}

fn locate_problem(text: &str, file: &Path, problem: &SpecProblem) -> SpecError {
    let table = DeTable::parse(text).ok();
    let span = table.and_then(|table| span_of_key(table.get_ref(), &problem.key));
    located(text, file, span, problem.to_string())
}

/// Where the value of a dotted key is, or the nearest part of the key that is there.
fn span_of_key(table: &DeTable<'_>, dotted_key: &str) -> Option<Range<usize>> {
    let mut parts = dotted_key.split('.');
    let mut value = table.get(parts.next()?)?;
    for part in parts {
        let Some(inner) = child(value, part) else { break };
        value = inner;
    }
    Some(value.span())
}

fn child<'a, 'i>(value: &'a Spanned<DeValue<'i>>, key: &str) -> Option<&'a Spanned<DeValue<'i>>> {
    match value.get_ref() {
        DeValue::Table(table) => table.get(key),
        DeValue::Array(array) => array.get(key.parse::<usize>().ok()?),
        _ => None,
    }
}

fn located(text: &str, file: &Path, span: Option<Range<usize>>, problem: String) -> SpecError {
    let before = span.and_then(|span| text.get(..span.start)).unwrap_or_default();
    let line = before.matches('\n').count() + 1;
    let column = before.rsplit('\n').next().unwrap_or_default().chars().count() + 1;
    SpecError { file: file.to_owned(), line, column, problem }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::{Accelerator, Disk, DiskFormat, GuestServices, Nic, Placement};
    use super::*;

    const VALID: &str = r#"name = "web"
memory_mib = 2048
vcpus = 2
machine = "pc-q35-7.2"
kernel = "/boot/vmlinuz"

[[nic]]
bridge = "br-guest"

[placement]
stays = "licence"
apart = ["db"]
together = ["shop"]
"#;

    fn parse(text: &str) -> Result<VmSpec, SpecError> {
        VmSpec::from_toml(text, Path::new("web.toml"))
    }

    /// The error of `VALID` with one text replaced.
    fn error_with(from: &str, to: &str) -> String {
        assert!(VALID.contains(from), "{from}");
        parse(&VALID.replace(from, to)).expect_err("an invalid specification").to_string()
    }

    #[test]
    fn reads_a_minimal_specification() {
        let spec = parse(VALID).expect("valid");
        assert_eq!((spec.memory_mib, spec.vcpus), (2048, 2));
        assert_eq!(spec.accelerator, Accelerator::Auto);
        assert_eq!(spec.nics[0].bridge, "br-guest");
    }

    #[test]
    fn errors_say_where_what_and_what_is_allowed() {
        for (from, to, place, says) in [
            ("memory_mib", "memroy_mib", "web.toml:2:1: ", "memory_mib"),
            ("2048", "\"2 GiB\"", "web.toml:2:14: ", "u64"),
            ("2048", "1", "web.toml:2:14: ", "16 to"),
            ("vcpus = 2", "vcpus = 2\nhuge_page_mib = 4", "web.toml:4:17: ", "use 2 or 1024"),
            ("2048", "2047\nhuge_page_mib = 2", "web.toml:2:14: ", "whole number of huge pages"),
            ("2048", "2048\nmemory_padding_kib = 8\nhuge_page_mib = 2", "web.toml:4:17: ", "QEMU 9.0"),
            ("vcpus = 2", "vcpus = 0", "web.toml:3:9: ", "1 to 255"),
            ("pc-q35-7.2", "q35", "web.toml:4:11: ", "pc-q35-7.2"),
            ("/boot", "boot", "web.toml:5:10: ", "absolute"),
            ("kernel =", "initramfs =", "web.toml:5:13: ", "needs `kernel`"),
            ("br-guest", "br/guest", "web.toml:8:10: ", "name of a bridge"),
            ("\"web\"", "web", "web.toml:1:8: ", ""),
            ("\"web\"", "\"my web\"", "web.toml:1:8: ", "is not a VM name"),
            ("vcpus = 2", "vcpus = 2\naccelerator = \"xen\"", "web.toml:4:15: ", "`auto`, `kvm`, `tcg`"),
            ("name = \"web\"\n", "", "web.toml:1:1: ", "missing field `name`"),
            ("stays = \"licence\"", "stays = \" \"", "web.toml:11:9: ", "why the VM must stay"),
            ("licence", "a\\nb", "web.toml:11:9: ", "on one line"),
            ("\"db\"", "\"my db\"", "web.toml:12:9: ", "name of a group"),
            ("together", "togehter", "web.toml:13:1: ", "together"),
        ] {
            let error = error_with(from, to);
            assert!(error.starts_with(place) && error.contains(says), "{from} → {to}: {error}");
        }
    }

    #[test]
    fn errors_in_later_tables_point_there() {
        let error = parse(&format!("{VALID}\n[[nic]]\nbridge = \"\"\n")).expect_err("invalid").to_string();
        assert!(error.starts_with("web.toml:16:10: "), "{error}");
        let error = parse(&format!("{VALID}\n[[nic]]\nmac = \"x\"\n")).expect_err("invalid").to_string();
        assert!(error.starts_with("web.toml:16:7: "), "{error}");
    }

    #[test]
    fn more_groups_than_a_person_means_are_refused() {
        let groups: Vec<String> = (0..17).map(|number| format!("\"g{number}\"")).collect();
        let error = error_with("\"db\"", &groups.join(", "));
        assert!(error.starts_with("web.toml:12:9: ") && error.contains("at most 16"), "{error}");
    }

    prop_compose! {
        fn any_disk()(path in "/[a-z/,\"]{1,30}", raw in any::<bool>(), read_only in any::<bool>()) -> Disk {
            let format = if raw { DiskFormat::Raw } else { DiskFormat::Qcow2 };
            Disk { path: path.into(), format, read_only }
        }
    }

    prop_compose! {
        fn any_nic()(bridge in "[a-z][a-z0-9-]{0,14}", mac in proptest::option::of("[0-9a-f][26ae](:[0-9a-f]{2}){5}")) -> Nic {
            Nic { bridge, mac: mac.map(|mac| mac.parse().expect("unicast")) }
        }
    }

    prop_compose! {
        fn any_placement()(
            stays in proptest::option::of("[a-zäé\"' ]{0,20}[a-z]"),
            groups in proptest::collection::vec(("[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?", any::<bool>()), 0..9),
        ) -> Placement {
            let named = |apart| {
                let chosen = groups.iter().filter(move |(_, of_apart)| *of_apart == apart);
                chosen.map(|(name, _)| name.parse().expect("a valid name")).collect()
            };
            Placement { stays, apart: named(true), together: named(false) }
        }
    }

    prop_compose! {
        pub(super) fn any_spec()(
            name in "[a-z0-9]([a-z0-9.-]{0,20}[a-z0-9])?",
            uuid in proptest::option::of(any::<u128>()),
            (memory_mib, huge_page_mib) in (16_u64..1 << 26, proptest::option::of(prop_oneof![Just(2_u64), Just(1024)])),
            vcpus in 1_u32..=255,
            machine in prop_oneof!["pc-q35-[0-9]{1,2}\\.[0-9]", "pc-i440fx-[0-9]{1,2}\\.[0-9]"],
            accelerator in prop_oneof![Just(Accelerator::Auto), Just(Accelerator::Kvm), Just(Accelerator::Tcg)],
            kernel in proptest::option::of(("/[a-z]{1,9}", proptest::option::of("/[a-z]{1,9}"), proptest::option::of("[^\0]{0,40}"))),
            disks in proptest::collection::vec(any_disk(), 0..4),
            nics in proptest::collection::vec(any_nic(), 0..4),
            placement in any_placement(),
            guest in proptest::option::of((any::<std::net::SocketAddrV4>(), any::<std::net::SocketAddrV4>())),
        ) -> VmSpec {
            let (kernel, initramfs, kernel_command_line) = match kernel {
                Some((kernel, initramfs, line)) => (Some(kernel.into()), initramfs.map(Into::into), line),
                None => (None, None, None),
            };
            VmSpec {
                name: name.parse().expect("a valid name"),
                uuid: uuid.map(uuid::Uuid::from_u128),
                memory_mib: huge_page_mib.map_or(memory_mib, |size: u64| memory_mib.next_multiple_of(size)),
                memory_padding_kib: None,
                huge_page_mib,
                vcpus,
                machine: machine.parse().expect("a valid machine"),
                cpu_model: "qemu64".into(),
                accelerator, kernel, initramfs, kernel_command_line, disks, nics, placement,
                guest: guest.map(|(heartbeat, control)| GuestServices {
                    heartbeat: heartbeat.into(),
                    control: control.into(),
                }),
                manager: None,
            }
        }
    }

    proptest! {
        #[test]
        fn toml_and_json_read_back_the_same(spec in any_spec()) {
            prop_assert_eq!(parse(&spec.to_toml()), Ok(spec.clone()));
            let json = serde_json::to_string(&spec).expect("JSON");
            prop_assert_eq!(serde_json::from_str::<VmSpec>(&json).expect("our own JSON"), spec);
        }

        #[test]
        fn parsing_any_text_never_panics(text in ".*") {
            let _ = parse(&text);
        }

        #[test]
        fn parsing_a_damaged_specification_never_panics(at in 0..VALID.len(), text in ".{0,5}") {
            let _ = parse(&format!("{}{text}{}", &VALID[..at], &VALID[at..]));
            let _ = parse(&VALID[..at]);
        }
    }
}
