//! The names in a specification, each with its own rule.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};
use utoipa::ToSchema;
use uuid::Uuid;

/// Namespace of everything derived from a VM's name. Changing it would change the UUIDs and MAC
/// addresses of VMs that exist.
const NAMESPACE: Uuid = Uuid::from_u128(0x6472_6169_6e70_4970_a565_766d_6e61_6d65);

const VM_NAME_LENGTH_MAX: usize = 50;

/// The longest that distributions have is some 16.
const DISTRIBUTIONS_VERSION_LENGTH_MAX: usize = 32;

/// Why a text is not the name that it should be.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum NameError {
    /// Not a VM name.
    #[error(
        "`{0}` is not a VM name: use 1 to {VM_NAME_LENGTH_MAX} letters (a to z, A to Z), digits, `-`, `_` and `.`, \
         beginning and ending with a letter or digit"
    )]
    VmName(String),
    /// Not the name of a group of VMs.
    #[error(
        "`{0}` is not the name of a group: use 1 to {VM_NAME_LENGTH_MAX} lower-case letters, digits, `-` and `.`, \
         beginning and ending with a letter or digit"
    )]
    GroupName(String),
    /// Not a MAC address, or not one for a single NIC.
    #[error(
        "`{0}` is not the MAC address of a NIC: write six hexadecimal bytes such as `52:54:00:12:34:56`, \
         the first one even (odd means multicast)"
    )]
    MacAddress(String),
    /// A machine type whose meaning changes with QEMU's version.
    #[error(
        "`{alias}` means another machine in every version of QEMU, so the target could build one that \
        cannot take over this VM; name a version that both hosts have, such as `{example}`"
    )]
    UnversionedMachine {
        /// What was written.
        alias: String,
        /// What could be written instead.
        example: &'static str,
    },
    /// Not a machine type that Drainpipe can build.
    #[error(
        "`{0}` is not a machine type that can migrate here: use `pc-q35-VERSION` or `pc-i440fx-VERSION`, \
         such as `pc-q35-7.2`, or a distribution's own such as `pc-q35-rhel9.2.0`; `qemu-system-x86_64 -machine help` lists what a host has"
    )]
    MachineType(String),
}

/// Implements the conversions that make serde check the text.
macro_rules! text_conversions {
    ($name:ident) => {
        impl TryFrom<String> for $name {
            type Error = NameError;

            fn try_from(text: String) -> Result<Self, NameError> {
                text.parse()
            }
        }

        impl From<$name> for String {
            fn from(value: $name) -> Self {
                value.to_string()
            }
        }
    };
}

/// Name of a VM: unique among the hosts that it may migrate between.
///
/// Safe as a file name, as part of a QEMU option and as a URL's path segment. Two names that differ in the case of a
/// letter are two names, as they are to libvirt.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(pattern = "^[A-Za-z0-9]([A-Za-z0-9._-]*[A-Za-z0-9])?$", max_length = 50, example = "web")]
pub struct VmName(String);

text_conversions!(VmName);

impl VmName {
    /// The name as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The UUID of a VM whose specification gives none: the same on every host and at every start.
    pub fn derived_uuid(&self) -> Uuid {
        Uuid::new_v5(&NAMESPACE, self.0.as_bytes())
    }

    /// The MAC address of a NIC whose specification gives none: the same on every host.
    pub(crate) fn derived_mac(&self, nic_index: usize) -> MacAddress {
        let hash = Uuid::new_v5(&self.derived_uuid(), nic_index.to_string().as_bytes());
        let bytes = hash.as_bytes();
        // 52:54 is locally administered and what QEMU guests usually have.
        MacAddress([0x52, 0x54, bytes[0], bytes[1], bytes[2], bytes[3]])
    }
}

impl FromStr for VmName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let is_name = is_name(text, u8::is_ascii_alphanumeric, b"-_.");
        if is_name { Ok(Self(text.to_owned())) } else { Err(NameError::VmName(text.to_owned())) }
    }
}

/// Whether it begins and ends with a letter or digit, and has the other signs between them only.
fn is_name(text: &str, is_alphanumeric: fn(&u8) -> bool, others: &[u8]) -> bool {
    let bytes = text.as_bytes();
    bytes.len() <= VM_NAME_LENGTH_MAX
        && bytes.first().is_some_and(is_alphanumeric)
        && bytes.last().is_some_and(is_alphanumeric)
        && bytes.iter().all(|byte| is_alphanumeric(byte) || others.contains(byte))
}

impl fmt::Display for VmName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Name of a group of VMs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(pattern = "^[a-z0-9]([a-z0-9.-]*[a-z0-9])?$", max_length = 50, example = "db")]
pub struct GroupName(String);

text_conversions!(GroupName);

impl FromStr for GroupName {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let is_alphanumeric = |byte: &u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
        if is_name(text, is_alphanumeric, b"-.") {
            Ok(Self(text.to_owned()))
        } else {
            Err(NameError::GroupName(text.to_owned()))
        }
    }
}

impl fmt::Display for GroupName {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

/// Unicast MAC address of a guest's NIC.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(value_type = String, pattern = "^[0-9a-fA-F]{2}(:[0-9a-fA-F]{2}){5}$", example = "52:54:00:12:34:56")]
pub struct MacAddress([u8; 6]);

text_conversions!(MacAddress);

impl MacAddress {
    /// The six bytes.
    pub fn octets(self) -> [u8; 6] {
        self.0
    }
}

impl FromStr for MacAddress {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let invalid = || NameError::MacAddress(text.to_owned());
        let mut octets = [0; 6];
        let mut parts = text.split(':');
        for octet in &mut octets {
            let part = parts.next().ok_or_else(invalid)?;
            // `from_str_radix` alone would take `+1`.
            if part.len() != 2 || !part.bytes().all(|byte| byte.is_ascii_hexdigit()) {
                return Err(invalid());
            }
            *octet = u8::from_str_radix(part, 16).map_err(|_| invalid())?;
        }
        let multicast = octets[0] & 1 == 1;
        if parts.next().is_some() || multicast || octets == [0; 6] {
            return Err(invalid());
        }
        Ok(Self(octets))
    }
}

impl fmt::Display for MacAddress {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (index, octet) in self.0.iter().enumerate() {
            let separator = if index == 0 { "" } else { ":" };
            write!(formatter, "{separator}{octet:02x}")?;
        }
        Ok(())
    }
}

/// A machine type with its version, which every QEMU that knows it builds alike.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, ToSchema)]
#[serde(try_from = "String", into = "String")]
#[schema(example = "pc-q35-7.2")]
pub struct MachineType(String);

text_conversions!(MachineType);

impl MachineType {
    /// The name as QEMU has it.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Name of the bus that holds this machine's PCI devices.
    pub fn pci_bus(&self) -> &'static str {
        if self.0.starts_with("pc-q35-") { "pcie.0" } else { "pci.0" }
    }
}

impl FromStr for MachineType {
    type Err = NameError;

    fn from_str(text: &str) -> Result<Self, NameError> {
        let alias = |example| NameError::UnversionedMachine { alias: text.to_owned(), example };
        match text {
            "q35" | "pc-q35" => return Err(alias("pc-q35-7.2")),
            "pc" | "pc-i440fx" => return Err(alias("pc-i440fx-7.2")),
            _ => {}
        }
        let version = text.strip_prefix("pc-q35-").or_else(|| text.strip_prefix("pc-i440fx-"));
        if version.is_some_and(|version| is_qemus(version) || is_distributions(version)) {
            Ok(Self(text.to_owned()))
        } else {
            Err(NameError::MachineType(text.to_owned()))
        }
    }
}

/// A version of QEMU's own, such as `7.2`.
fn is_qemus(version: &str) -> bool {
    let number = |part: &str| !part.is_empty() && part.bytes().all(|byte| byte.is_ascii_digit());
    version.contains('.') && version.split('.').all(number)
}

/// A distribution's name for the machine of one of its releases, such as `rhel9.2.0`, `jammy` or `noble-v2`.
fn is_distributions(version: &str) -> bool {
    let is_sign = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit();
    let is_part = |part: &str| !part.is_empty() && part.bytes().all(is_sign);
    version.len() <= DISTRIBUTIONS_VERSION_LENGTH_MAX
        && version.starts_with(|first: char| first.is_ascii_lowercase())
        && version.split(['.', '-']).all(is_part)
}

impl fmt::Display for MachineType {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn vm_names_are_safe_as_file_names_and_options() {
        for good in ["a", "web-1", "db.example", "0", "Web_01", "DB.prod", "a__b", &"A".repeat(50)] {
            assert_eq!(good.parse::<VmName>().map(|name| name.to_string()), Ok(good.to_owned()));
        }
        for bad in [
            "",
            ".",
            "..",
            ".a",
            "-a",
            "a-",
            "_a",
            "a_",
            "a/b",
            "a,b",
            "a b",
            "a=b",
            "a%b",
            "a\nb",
            "ü",
            &"a".repeat(51),
        ] {
            assert_eq!(bad.parse::<VmName>(), Err(NameError::VmName(bad.to_owned())));
            assert_eq!(bad.parse::<GroupName>(), Err(NameError::GroupName(bad.to_owned())));
        }
        for bad in ["A", "a_b"] {
            assert_eq!(bad.parse::<GroupName>(), Err(NameError::GroupName(bad.to_owned())));
        }
    }

    #[test]
    fn names_that_differ_in_case_are_two_vms() {
        let [upper, lower] = ["Web", "web"].map(|name| name.parse::<VmName>().expect("a valid name"));
        assert_ne!(upper.derived_uuid(), lower.derived_uuid());
        assert_ne!(upper.derived_mac(0), lower.derived_mac(0));
    }

    #[test]
    fn derived_identity_is_stable() {
        let name: VmName = "web".parse().expect("a valid name");
        assert_eq!(name.derived_uuid().to_string(), "73a61b48-2b56-58d6-84b2-0f2adc75ef02");
        assert_eq!(name.derived_mac(0).to_string(), "52:54:26:0c:f9:6e");
        assert_ne!(name.derived_mac(0), name.derived_mac(1));
    }

    #[test]
    fn unversioned_machines_are_refused_with_the_name_to_use() {
        let message = "q35".parse::<MachineType>().expect_err("an alias").to_string();
        assert!(message.contains("pc-q35-7.2"), "{message}");
        let message = "pc".parse::<MachineType>().expect_err("an alias").to_string();
        assert!(message.contains("pc-i440fx-7.2"), "{message}");
    }

    #[test]
    fn machine_types() {
        for good in [
            "pc-q35-7.2",
            "pc-q35-10.0",
            "pc-i440fx-4.0.1",
            "pc-q35-rhel9.2.0",
            "pc-i440fx-rhel7.6.0",
            "pc-i440fx-jammy",
            "pc-q35-noble-v2",
            "pc-i440fx-bionic-hpb",
        ] {
            assert!(good.parse::<MachineType>().is_ok(), "{good}");
        }
        for bad in [
            "",
            "microvm",
            "pc-q35-",
            "pc-q35-7",
            "pc-q35-7.",
            "pc-q35-7.2,accel=kvm",
            "pc-q35-.x",
            "pc-q35-x-",
            "pc-q35-x,y",
            "pc-q35-Rhel9",
            "pc-q35-x y",
            &format!("pc-q35-{}", "x".repeat(33)),
        ] {
            assert!(bad.parse::<MachineType>().is_err(), "{bad}");
        }
    }

    #[test]
    fn mac_addresses() {
        for bad in [
            "",
            "52:54:00:12:34",
            "52:54:00:12:34:56:78",
            "52:54:00:12:34:5",
            "53:54:00:12:34:56",
            "00:00:00:00:00:00",
            "+2:54:00:12:34:56",
        ] {
            assert!(bad.parse::<MacAddress>().is_err(), "{bad}");
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics(text in ".*") {
            let _ = text.parse::<VmName>();
            let _ = text.parse::<GroupName>();
            let _ = text.parse::<MacAddress>();
            let _ = text.parse::<MachineType>();
        }

        #[test]
        fn mac_addresses_read_back(mut octets in any::<[u8; 6]>()) {
            octets[0] = octets[0] & 0xfe | 2;
            let mac = MacAddress(octets);
            prop_assert_eq!(mac.to_string().parse(), Ok(mac));
        }
    }
}
