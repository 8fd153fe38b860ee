//! All findings, and how bad they are.

use super::Severity;

/// How bad findings of one code are.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Gravity {
    /// An error for which a migration is not even begun.
    Refusal,
    /// An error.
    Error,
    /// An error, or only a warning where something else makes up for it.
    ErrorOrWarning,
    /// A warning.
    Warning,
    /// A warning, or only a remark where nothing can be done, or need be.
    WarningOrRemark,
    /// A remark.
    Remark,
}

impl Gravity {
    /// The worst that a finding can be.
    pub(super) fn worst(self) -> Severity {
        match self {
            Self::Refusal | Self::Error | Self::ErrorOrWarning => Severity::Error,
            Self::Warning | Self::WarningOrRemark => Severity::Warning,
            Self::Remark => Severity::Remark,
        }
    }

    /// What a finding is where less is at stake.
    pub(super) fn milder(self) -> Option<Severity> {
        match self {
            Self::ErrorOrWarning => Some(Severity::Warning),
            Self::WarningOrRemark => Some(Severity::Remark),
            Self::Refusal | Self::Error | Self::Warning | Self::Remark => None,
        }
    }

    /// As docs/reference/findings.md has it.
    pub fn mark(self) -> &'static str {
        match self {
            Self::Refusal => "E!",
            Self::Error => "E",
            Self::ErrorOrWarning => "E/W",
            Self::Warning => "W",
            Self::WarningOrRemark => "W/R",
            Self::Remark => "R",
        }
    }
}

macro_rules! finding_codes {
    ($($code:ident $name:literal $gravity:ident,)*) => {
        /// What a finding is about.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        #[expect(missing_docs, reason = "docs/reference/findings.md says what each means, and what to do")]
        pub enum FindingCode {
            $($code,)*
        }

        impl FindingCode {
            /// Every one.
            pub const ALL: &[Self] = &[$(Self::$code,)*];

            /// What scripts and other releases know it by: the same words in every version.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$code => $name,)*
                }
            }

            /// How bad it is.
            pub fn gravity(self) -> Gravity {
                match self {
                    $(Self::$code => Gravity::$gravity,)*
                }
            }
        }
    };
}

finding_codes! {
    // Paths
    NoPath "no-path" Error,
    SubnetMismatch "subnet-mismatch" Warning,
    PathSilent "path-silent" ErrorOrWarning,
    PathOneWay "path-one-way" ErrorOrWarning,
    TcpBlocked "tcp-blocked" ErrorOrWarning,
    UdpBlocked "udp-blocked" Warning,
    PathLosesPackets "path-loses-packets" Warning,
    MtuDiffers "mtu-differs" ErrorOrWarning,
    MtuDoesNotPass "mtu-does-not-pass" ErrorOrWarning,
    SpeedDiffers "speed-differs" Warning,
    SpeedLow "speed-low" Warning,
    SpeedBelowConfigured "speed-below-configured" Warning,
    SpeedBelowCard "speed-below-card" Remark,
    PathsUnequal "paths-unequal" Remark,
    TcpBuffersSmall "tcp-buffers-small" Warning,

    // Links
    LinkMissing "link-missing" Warning,
    LinkDown "link-down" Warning,
    LinkNoCarrier "link-no-carrier" Warning,
    LinkErrors "link-errors" Warning,
    LinkDrops "link-drops" Remark,
    HalfDuplex "half-duplex" Warning,
    BondMode "bond-mode" WarningOrRemark,
    ManagementLink "management-link" WarningOrRemark,
    ReversePathFilter "reverse-path-filter" Warning,
    OneReceiveQueue "one-receive-queue" Warning,
    OneReceiveQueueUsed "one-receive-queue-used" Warning,
    InterruptsOnOneCore "interrupts-on-one-core" Warning,

    // VMs
    VmNameTaken "vm-name-taken" Refusal,
    VmMachineUnknown "vm-machine-unknown" Refusal,
    VmMachineOld "vm-machine-old" WarningOrRemark,
    VmKvmMissing "vm-kvm-missing" Refusal,
    VmWritesLost "vm-writes-lost" Refusal,
    VmMemoryPadded "vm-memory-padded" Warning,
    VmCpuUnknown "vm-cpu-unknown" Refusal,
    VmCpuFeatures "vm-cpu-features" Refusal,
    VmMemoryShort "vm-memory-short" Refusal,
    VmsMemoryShort "vms-memory-short" Warning,
    VmHugePagesShort "vm-huge-pages-short" Refusal,
    VmsHugePagesShort "vms-huge-pages-short" Warning,
    VmSmallPages "vm-small-pages" Remark,
    VmQemuNewer "vm-qemu-newer" Warning,
    VmFileMissing "vm-file-missing" Refusal,
    VmDiskDiffers "vm-disk-differs" Refusal,
    VmStorageSilent "vm-storage-silent" Refusal,
    VmBridgeMissing "vm-bridge-missing" Refusal,
    VmFileNotAllowed "vm-file-not-allowed" Refusal,
    VmBridgeNotAllowed "vm-bridge-not-allowed" Refusal,
    VmCannotMigrate "vm-cannot-migrate" Refusal,
    VmMayNotMigrate "vm-may-not-migrate" Warning,
    VmNeedMissing "vm-need-missing" Refusal,
    VmOutpacesPaths "vm-outpaces-paths" Warning,

    // Hosts
    AgentUnreachable "agent-unreachable" ErrorOrWarning,
    NotAPeer "not-a-peer" Refusal,
    AgentsDiffer "agents-differ" Remark,
    AgentsTooFarApart "agents-too-far-apart" Refusal,
    QemuOld "qemu-old" Error,
    QemuReplaced "qemu-replaced" Warning,
    TargetQemuOlder "target-qemu-older" Warning,
    KernelOld "kernel-old" Warning,
    LibvirtOld "libvirt-old" Remark,
    LibvirtCopiesNoQcow2 "libvirt-copies-no-qcow2" Remark,
    LibvirtHt "libvirt-ht" Warning,
    ClocksDiffer "clocks-differ" Warning,
    CertificateEnds "certificate-ends" ErrorOrWarning,
    AuthorityEnds "authority-ends" ErrorOrWarning,
    GovernorPowersave "governor-powersave" Warning,
    EnergyPreference "energy-preference" Warning,
    PowerProfile "power-profile" Warning,
    RdmaOnOneSide "rdma-on-one-side" Remark,
    RdmaUnused "rdma-unused" Remark,
    NoMigrationAddress "no-migration-address" Warning,
    MigrationAddressesEqual "migration-addresses-equal" Error,
    MigrationAddressesUnroutable "migration-addresses-unroutable" Warning,
    RouteTaken "route-taken" Refusal,
    TargetMemoryLow "target-memory-low" Remark,

    // Plans of a drain
    DrainOtherHost "drain-other-host" Refusal,
    DrainNoNumber "drain-no-number" Refusal,
    DrainUnknownVm "drain-unknown-vm" Refusal,
    DrainVmLost "drain-vm-lost" Refusal,
    DrainVmDoubled "drain-vm-doubled" Refusal,
    DrainOtherMemory "drain-other-memory" Refusal,
    DrainOtherDisks "drain-other-disks" Refusal,
    DrainNoReason "drain-no-reason" Refusal,
    DrainMustStay "drain-must-stay" Refusal,
    DrainUnknownTarget "drain-unknown-target" Refusal,
    DrainRefused "drain-refused" Refusal,
    DrainOvercommit "drain-overcommit" Refusal,
    DrainTornGroup "drain-torn-group" Refusal,
    DrainJoinedGroup "drain-joined-group" Refusal,
    DrainRiskUnmentioned "drain-risk-unmentioned" Refusal,
}
