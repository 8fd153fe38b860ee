//! From the owner's specification to QEMU's.

use std::collections::BTreeMap;
use std::path::PathBuf;

use serde::{Deserialize, Serialize};
use uuid::Uuid;

use super::{Accelerator, MacAddress, MachineType, Placement, SpecProblem, VmSpec};
use crate::facts::{HypervisorFacts, Version};
use crate::hardware::Hardware;

/// From this version on, QEMU resets TCG's TLB whenever it reads the dirty bitmap.
///
/// Before, its fast way to read the bitmap (`cpu_physical_memory_sync_dirty_bitmap`) clears the bits and
/// leaves the TLB as it is. What the guest then writes through entries that are in the TLB goes unseen,
/// and the migrated guest has old pages: with 7.2.22, four of five benches of an idle guest of 2 GiB
/// ended, within eight migrations, in a guest that panicked or hung on the target. KVM tracks writes
/// itself and is not affected.
const TCG_SEES_ALL_WRITES: Version = Version { major: 9, minor: 0, micro: 0 };

/// Whether this QEMU misses writes of such a guest while it migrates, unless its memory has padding
/// (docs/decisions/0019).
pub fn loses_writes(accelerator: Accelerator, qemu: Version) -> bool {
    accelerator == Accelerator::Tcg && qemu < TCG_SEES_ALL_WRITES
}

/// With less, the test guest's kernel unpacks its file system and ends there.
const TEST_GUEST_MIB_MIN: u64 = 112;

/// Makes the size of memory no multiple of 256 KiB (64 pages), so that those QEMUs read the bitmap the
/// slow way, page by page, which resets the TLB. It costs a few µs for each page of memory when a
/// migration begins.
const PADDING_AGAINST_LOST_WRITES_KIB: u64 = 8;

/// A specification in which nothing is left for a host to decide.
///
/// It travels as JSON of a [`VmSpec`] with every value given, and is checked again on arrival. It says
/// nothing of the VM's placement, which is no part of the machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "VmSpec", into = "VmSpec")]
pub struct ResolvedSpec {
    spec: VmSpec,
    uuid: Uuid,
    hardware: Hardware,
    macs: Vec<MacAddress>,
}

/// Why this host cannot run this VM.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ResolveError {
    /// The specification itself is wrong.
    #[error(transparent)]
    Invalid(#[from] SpecProblem),
    /// The other side sent a specification that still leaves something open.
    #[error("the specification is not resolved: `{key}` is still open; an agent of another version sent it")]
    Unresolved {
        /// The key without a definite value.
        key: String,
    },
    /// This host's QEMU does not know the machine.
    #[error(
        "QEMU {version} has no machine type `{machine}`; its newest of this kind is {newest}; install a newer \
         QEMU, or change `machine` in the specification"
    )]
    UnknownMachine {
        /// The type that the specification names.
        machine: MachineType,
        /// This host's QEMU.
        version: String,
        /// The newest type of the same family.
        newest: String,
    },
    /// This host's QEMU would not see all that the guest writes while it migrates.
    #[error(
        "QEMU {version} loses writes of a TCG guest while it migrates, unless the guest was booted with \
         memory_padding_kib = {PADDING_AGAINST_LOST_WRITES_KIB}: install QEMU {TCG_SEES_ALL_WRITES} or later, use \
         KVM, or set that and boot the VM again"
    )]
    LosesWrites {
        /// This host's QEMU.
        version: Version,
    },
    /// QEMU does not know the CPU.
    #[error(
        "QEMU {version} has no CPU model `{model}`: `cpu_model` takes a name from `qemu-system-x86_64 -cpu help`, such as \
         `qemu64`"
    )]
    UnknownCpuModel {
        /// The model that the specification names.
        model: String,
        /// The host's QEMU.
        version: Version,
    },
    /// The test guest would boot, and never answer.
    #[error(
        "memory_mib = {memory_mib} is too little for the test guest, which `kernel_command_line` is for: it needs \
         {TEST_GUEST_MIB_MIN}"
    )]
    TestGuestTooSmall {
        /// What the specification gives it.
        memory_mib: u64,
    },
    /// KVM is asked for and missing.
    #[error("KVM cannot be used: {reason}; use a host that can, or set `accelerator = \"tcg\"`")]
    NoKvm {
        /// What is missing.
        reason: String,
    },
}

impl VmSpec {
    /// Decides what is left open, as suits the host that `facts` describe, and checks that this
    /// host can run the result.
    pub fn resolve(&self, facts: &HypervisorFacts) -> Result<ResolvedSpec, ResolveError> {
        if self.is_test_guest() && self.memory_mib < TEST_GUEST_MIB_MIN {
            return Err(ResolveError::TestGuestTooSmall { memory_mib: self.memory_mib });
        }
        let mut spec = self.clone();
        spec.uuid.get_or_insert_with(|| self.name.derived_uuid());
        if spec.accelerator == Accelerator::Auto {
            let kvm = facts.kvm_missing.is_none();
            spec.accelerator = if kvm { Accelerator::Kvm } else { Accelerator::Tcg };
        }
        let loses_writes = loses_writes(spec.accelerator, facts.version);
        spec.memory_padding_kib.get_or_insert(if loses_writes { PADDING_AGAINST_LOST_WRITES_KIB } else { 0 });
        for (index, nic) in spec.nics.iter_mut().enumerate() {
            nic.mac.get_or_insert_with(|| self.name.derived_mac(index));
        }
        let resolved = ResolvedSpec::try_from(spec)?;
        resolved.check_host(facts)?;
        Ok(resolved)
    }

    fn is_test_guest(&self) -> bool {
        self.kernel_command_line.as_ref().is_some_and(|line| line.contains("drainpipe.address="))
    }
}

impl ResolvedSpec {
    /// Whether the host that `facts` describe can run this VM as it is. If another manager owns it, that manager says
    /// so when it is asked to make ready for it.
    pub fn check_host(&self, facts: &HypervisorFacts) -> Result<(), ResolveError> {
        if self.spec.is_built_elsewhere() {
            return Ok(());
        }
        let machine = &self.spec.machine;
        if !facts.machines.iter().any(|known| known == machine.as_str()) {
            return Err(ResolveError::UnknownMachine {
                machine: machine.clone(),
                version: facts.version.to_string(),
                newest: facts.newest_like(machine.as_str()).unwrap_or("none").to_owned(),
            });
        }
        let models = &facts.cpu_models;
        if models.hardware == self.hardware && !models.knows(&self.spec.cpu_model) {
            return Err(ResolveError::UnknownCpuModel {
                model: self.spec.cpu_model.clone(),
                version: facts.version,
            });
        }
        match (self.hardware, &facts.kvm_missing) {
            (Hardware::Kvm, Some(reason)) => Err(ResolveError::NoKvm { reason: reason.clone() }),
            _ if loses_writes(self.spec.accelerator, facts.version) && !self.takes_slow_way() => {
                Err(ResolveError::LosesWrites { version: facts.version })
            }
            _ => Ok(()),
        }
    }

    fn takes_slow_way(&self) -> bool {
        !self.memory_kib().is_multiple_of(256)
    }

    /// The same VM with these disks in other places, by their numbers from 0.
    #[must_use]
    pub fn with_disks_at(&self, places: &BTreeMap<usize, PathBuf>) -> Self {
        let mut moved = self.clone();
        moved.spec.move_disks(places);
        moved
    }

    /// The key of a value that `definition` gives, or that follows from it, and that is another one here. What it
    /// leaves to the host on which the VM boots may be anything.
    pub fn difference(&self, definition: &VmSpec) -> Option<&'static str> {
        // Each field by name, so that none that is added is left out.
        let VmSpec {
            name,
            uuid,
            memory_mib,
            memory_padding_kib,
            huge_page_mib,
            vcpus,
            machine,
            cpu_model,
            accelerator,
            kernel,
            initramfs,
            kernel_command_line,
            disks,
            nics,
            placement: _,
            guest,
            manager,
        } = definition;
        let here = &self.spec;
        let macs =
            nics.iter().enumerate().map(|(index, nic)| nic.mac.unwrap_or_else(|| name.derived_mac(index)));
        let bridges = |nics: &[super::Nic]| nics.iter().map(|nic| nic.bridge.clone()).collect::<Vec<_>>();
        let is_same = [
            ("name", *name == here.name),
            ("uuid", uuid.unwrap_or_else(|| name.derived_uuid()) == self.uuid),
            ("memory_mib", *memory_mib == here.memory_mib),
            (
                "memory_padding_kib",
                memory_padding_kib.is_none() || *memory_padding_kib == here.memory_padding_kib,
            ),
            ("huge_page_mib", *huge_page_mib == here.huge_page_mib),
            ("vcpus", *vcpus == here.vcpus),
            ("machine", *machine == here.machine),
            ("cpu_model", *cpu_model == here.cpu_model),
            ("accelerator", *accelerator == Accelerator::Auto || *accelerator == here.accelerator),
            ("kernel", *kernel == here.kernel),
            ("initramfs", *initramfs == here.initramfs),
            ("kernel_command_line", *kernel_command_line == here.kernel_command_line),
            ("disk", *disks == here.disks),
            ("nic.bridge", bridges(nics) == bridges(&here.nics)),
            ("nic.mac", macs.eq(self.macs.iter().copied())),
            ("guest", *guest == here.guest),
            ("manager", *manager == here.manager),
        ];
        is_same.into_iter().find(|(_, is_same)| !is_same).map(|(key, _)| key)
    }

    /// All memory of the machine, in KiB; QEMU rounds it up to 8 KiB.
    pub fn memory_kib(&self) -> u64 {
        self.spec.memory_mib * 1024 + self.spec.memory_padding_kib.unwrap_or(0)
    }

    /// The specification with every value given.
    pub fn spec(&self) -> &VmSpec {
        &self.spec
    }

    /// The VM's UUID.
    pub fn uuid(&self) -> Uuid {
        self.uuid
    }

    /// What runs guest instructions.
    pub fn hardware(&self) -> Hardware {
        self.hardware
    }

    /// MAC address of each NIC, in the order of the specification.
    pub fn macs(&self) -> &[MacAddress] {
        &self.macs
    }
}

impl TryFrom<VmSpec> for ResolvedSpec {
    type Error = ResolveError;

    fn try_from(spec: VmSpec) -> Result<Self, ResolveError> {
        spec.validate()?;
        let spec = VmSpec { placement: Placement::default(), ..spec };
        let open = |key: String| ResolveError::Unresolved { key };
        let uuid = spec.uuid.ok_or_else(|| open("uuid".into()))?;
        if spec.memory_padding_kib.is_none() {
            return Err(open("memory_padding_kib".into()));
        }
        let hardware = match spec.accelerator {
            Accelerator::Auto => return Err(open("accelerator".into())),
            Accelerator::Kvm => Hardware::Kvm,
            Accelerator::Tcg => Hardware::Tcg,
        };
        let mac =
            |(index, nic): (usize, &super::Nic)| nic.mac.ok_or_else(|| open(format!("nic.{index}.mac")));
        let macs = spec.nics.iter().enumerate().map(mac).collect::<Result<_, _>>()?;
        Ok(Self { spec, uuid, hardware, macs })
    }
}

impl From<ResolvedSpec> for VmSpec {
    fn from(resolved: ResolvedSpec) -> Self {
        resolved.spec
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use drainpipe_engine::host::capabilities::Capabilities;

    use crate::cpu_models::CpuModels;
    use crate::facts::Version;

    fn facts() -> HypervisorFacts {
        HypervisorFacts {
            name: "QEMU".into(),
            capabilities: Capabilities::ALL,
            binary: "qemu-system-x86_64".into(),
            version: Version { major: 7, minor: 2, micro: 0 },
            machines: vec!["pc-q35-7.1".into(), "pc-q35-7.2".into(), "pc-i440fx-7.2".into()],
            rdma: false,
            kvm_missing: Some("the CPU has neither vmx nor svm".into()),
            cpu_models: CpuModels::none(Hardware::Tcg),
            stamp: None,
        }
    }

    fn spec(lines: &str) -> VmSpec {
        let text = format!("name = \"web\"\nmemory_mib = 64\nvcpus = 1\n{lines}");
        VmSpec::from_toml(&text, Path::new("web.toml")).expect("valid")
    }

    #[test]
    fn decides_everything_and_survives_the_journey() {
        let spec = spec("machine = \"pc-q35-7.2\"\n[[nic]]\nbridge = \"br0\"\n");
        let resolved = spec.resolve(&facts()).expect("this host can");
        assert_eq!(resolved.hardware(), Hardware::Tcg);
        assert_eq!(resolved.uuid(), spec.name.derived_uuid());
        assert_eq!(resolved.macs(), [spec.name.derived_mac(0)]);
        let json = serde_json::to_string(&resolved).expect("JSON");
        assert_eq!(serde_json::from_str::<ResolvedSpec>(&json).expect("our own JSON"), resolved);
    }

    #[test]
    fn a_definition_is_that_of_what_was_made_of_it_and_of_nothing_else() {
        let machine = "machine = \"pc-q35-7.2\"\n";
        let nic = "[[nic]]\nbridge = \"br0\"\n";
        let definition = spec(&format!("{machine}{nic}[placement]\nstays = \"licence\"\n"));
        let resolved = definition.resolve(&facts()).unwrap();
        assert_eq!(resolved.difference(&definition), None);
        assert_eq!(resolved.difference(resolved.spec()), None);
        let new = HypervisorFacts { version: TCG_SEES_ALL_WRITES, ..facts() };
        assert_eq!(definition.resolve(&new).unwrap().difference(&definition), None, "another padding");
        for (other, key) in [
            (format!("{machine}{nic}[[disk]]\npath = \"/etc/shadow\"\nformat = \"raw\"\n"), "disk"),
            (format!("{machine}kernel = \"/etc/shadow\"\n{nic}"), "kernel"),
            (format!("{machine}cpu_model = \"host\"\n{nic}"), "cpu_model"),
            (format!("{machine}accelerator = \"kvm\"\n{nic}"), "accelerator"),
            (format!("{machine}memory_padding_kib = 16\n{nic}"), "memory_padding_kib"),
            (format!("{machine}uuid = \"5a8f6c0e-0f0f-4c8c-9d5f-000000000001\"\n{nic}"), "uuid"),
            (format!("{machine}{}", nic.replace("br0", "br1")), "nic.bridge"),
            (format!("{machine}{nic}mac = \"52:54:00:00:00:01\"\n"), "nic.mac"),
            (format!("{machine}{nic}{nic}"), "nic.bridge"),
            (format!("{}{nic}", machine.replace("7.2", "7.1")), "machine"),
        ] {
            assert_eq!(resolved.difference(&spec(&other)), Some(key), "{other}");
        }
    }

    #[test]
    fn refuses_what_a_peer_left_open_or_wrong() {
        let open = serde_json::to_value(spec("machine = \"pc-q35-7.2\"")).expect("JSON");
        let error = serde_json::from_value::<ResolvedSpec>(open).expect_err("open");
        assert!(error.to_string().contains("`uuid`"), "{error}");

        let resolved = spec("machine = \"pc-q35-7.2\"").resolve(&facts()).expect("this host can");
        let mut wrong = serde_json::to_value(resolved).expect("JSON");
        wrong["memory_mib"] = 1.into();
        let error = serde_json::from_value::<ResolvedSpec>(wrong).expect_err("too small");
        assert!(error.to_string().contains("memory_mib"), "{error}");
    }

    #[test]
    fn a_tcg_guest_never_migrates_from_a_qemu_that_would_lose_its_writes() {
        let (old, mut new) = (facts(), facts());
        new.version = TCG_SEES_ALL_WRITES;
        let spec = spec("machine = \"pc-q35-7.2\"");
        let (booted_on_old, booted_on_new) = (spec.resolve(&old).unwrap(), spec.resolve(&new).unwrap());
        assert_eq!((booted_on_old.memory_kib(), booted_on_new.memory_kib()), (65_544, 65_536));
        assert_eq!(booted_on_old.check_host(&new), Ok(()));
        assert!(matches!(booted_on_new.check_host(&old), Err(ResolveError::LosesWrites { .. })));
    }

    #[test]
    fn huge_pages_and_a_guest_that_needs_padding_do_not_go_together() {
        let huge = spec("machine = \"pc-q35-7.2\"\nhuge_page_mib = 2\n");
        let error = huge.resolve(&facts()).expect_err("QEMU 7.2 without KVM");
        assert!(error.to_string().contains("`huge_page_mib`: needs memory_padding_kib = 0"), "{error}");
        let new = HypervisorFacts { version: TCG_SEES_ALL_WRITES, ..facts() };
        assert_eq!(huge.resolve(&new).unwrap().memory_kib(), 65_536);
    }

    #[test]
    fn where_a_vm_may_be_is_no_part_of_its_machine() {
        let machine = "machine = \"pc-q35-7.2\"\n";
        let bound = spec(&format!("{machine}[placement]\nstays = \"licence\"\napart = [\"db\"]\n"));
        assert_ne!(bound, spec(machine));
        assert_eq!(bound.resolve(&facts()), spec(machine).resolve(&facts()));
    }

    #[test]
    fn refuses_what_the_host_lacks() {
        let error = spec("machine = \"pc-q35-10.0\"").resolve(&facts()).expect_err("unknown");
        assert!(error.to_string().contains("its newest of this kind is pc-q35-7.2"), "{error}");
        let error = spec("machine = \"pc-q35-7.2\"\naccelerator = \"kvm\"").resolve(&facts());
        assert!(matches!(error, Err(ResolveError::NoKvm { .. })), "{error:?}");
    }
}
