//! libvirt's domains on the hosts of a lab, managed with `virsh`, as users do.

use std::net::Ipv4Addr;
use std::path::PathBuf;
use std::process::Command;

use drainpipe_api_types::VmState;

use crate::copied_disks::is_image;
use crate::guest::{Guest, MACHINE, image};
use crate::options;
use crate::program::{Output, Running};
use crate::support::{TestLab, eventually};

/// What this machine lacks to run libvirt in labs.
pub(crate) fn missing() -> Option<String> {
    let absent = ["libvirtd", "virsh"].into_iter().find(|tool| !crate::is_installed(tool));
    absent.map(|tool| format!("{tool} is not installed: run scripts/setup")).or_else(no_qemu)
}

/// The distribution's QEMU.
pub(crate) const DISTRIBUTIONS_QEMU: &str = "qemu-system-x86_64";

fn no_qemu() -> Option<String> {
    let qemu = options::other_qemu().unwrap_or_else(|| DISTRIBUTIONS_QEMU.into());
    loses_writes(&qemu).then(|| format!("{qemu} is no QEMU 9.0 or later: scripts/qemu gets one"))
}

/// Whether domains without KVM are refused if they run in this QEMU.
pub(crate) fn loses_writes(qemu: &str) -> bool {
    let said = Command::new(qemu).arg("--version").output().ok();
    let said = said.map(|said| String::from_utf8_lossy(&said.stdout).into_owned()).unwrap_or_default();
    let number = said.strip_prefix("QEMU emulator version ").and_then(|rest| rest.split('.').next());
    number.and_then(|number| number.parse::<u32>().ok()).is_none_or(|major| major < 9)
}

impl TestLab {
    /// Two hosts with a libvirt each, no agents, and two links that are as fast as the machine.
    #[track_caller]
    pub(crate) fn with_libvirt() -> Self {
        Self::up(&["--libvirt", "--no-agents", "--link", "unlimited", "--link", "unlimited"])
    }

    /// The URI of a host's libvirt.
    #[track_caller]
    pub(crate) fn libvirt_uri(&self, host: &str) -> String {
        format!("qemu:///system?socket={}", self.lab().libvirt_socket(host).unwrap().display())
    }

    /// Runs `virsh` with a host's libvirt.
    #[track_caller]
    pub(crate) fn virsh(&self, host: &str, arguments: &[&str]) -> Output {
        self.start_virsh(host, arguments).wait()
    }

    /// Like [`Self::virsh`], without waiting for its end.
    #[track_caller]
    pub(crate) fn start_virsh(&self, host: &str, arguments: &[&str]) -> Running {
        let mut command = Command::new("virsh");
        command.args(["--quiet", "--connect", &self.libvirt_uri(host)]).args(arguments);
        Running::start(command)
    }

    /// Defines and boots a domain on a host, and returns when its guest is ready. 160 MiB suffice for most tests.
    #[track_caller]
    pub(crate) fn start_domain(
        &self,
        host: &str,
        name: &str,
        memory_mib: u64,
        kernel_parameters: &str,
    ) -> Guest {
        let guest = self.new_guest(name);
        self.boot_domain(host, &guest, &domain_xml(&guest, memory_mib, kernel_parameters));
        guest
    }

    /// The same, with these disks.
    #[track_caller]
    pub(crate) fn start_domain_with_disks(
        &self,
        host: &str,
        name: &str,
        memory_mib: u64,
        kernel_parameters: &str,
        disks: &[String],
    ) -> Guest {
        let guest = self.new_guest(name);
        let format = |path: &str| if is_image(path) { "qcow2" } else { "raw" };
        let disks =
            disks.iter().zip(["vda", "vdb"]).map(|(path, target)| disk_xml(path, target, format(path)));
        let xml = domain_xml(&guest, memory_mib, kernel_parameters);
        self.boot_domain(host, &guest, &with_devices(&xml, &disks.collect::<String>()));
        guest
    }

    /// The same, with changed XML.
    #[track_caller]
    pub(crate) fn start_domain_as(
        &self,
        host: &str,
        name: &str,
        memory_mib: u64,
        edit: impl Fn(String) -> String,
    ) -> Guest {
        let guest = self.new_guest(name);
        self.boot_domain(host, &guest, &edit(domain_xml(&guest, memory_mib, "")));
        guest
    }

    /// Defines a domain on host `a` that runs only firmware, and starts it. `placement` says on which hosts it may run,
    /// as in a specification.
    #[track_caller]
    pub(crate) fn start_small_domain(&self, name: &str, memory_mib: u64, placement: &str) {
        let xml = domain_xml(&self.new_guest(name), memory_mib, "");
        let of_guest = |line: &&str| ["kernel>", "initrd>", "cmdline>"].iter().any(|end| line.ends_with(end));
        let xml: Vec<&str> = xml.lines().filter(|line| !of_guest(line)).collect();
        let xml = xml.join("\n").replacen("<vcpu>", &format!("{}<vcpu>", metadata(placement)), 1);
        self.define_and_start("a", name, &xml);
        self.wait_for_domain(name);
    }

    /// Waits until the agents know that the domain runs.
    #[track_caller]
    pub(crate) fn wait_for_domain(&self, name: &str) {
        eventually("its agent has seen that it runs", || {
            self.vms().vms.iter().any(|vm| vm.name == name && vm.state == VmState::Running)
        });
    }

    fn new_guest(&self, name: &str) -> Guest {
        Guest::new(name, self.guest_address(), self.namespace("client"))
    }

    #[track_caller]
    fn boot_domain(&self, host: &str, guest: &Guest, xml: &str) {
        self.define_and_start(host, &guest.name, xml);
        guest.wait_until_ready();
    }

    #[track_caller]
    pub(crate) fn define_and_start(&self, host: &str, name: &str, xml: &str) {
        let file = self.write(&format!("{name}.xml"), xml);
        self.virsh(host, &["define", &file]).done();
        self.virsh(host, &["start", name]).done();
    }

    /// The state that a host's libvirt reports for a domain, such as `running`; `None` if it does not know the domain.
    #[track_caller]
    pub(crate) fn domain_state(&self, host: &str, name: &str) -> Option<String> {
        let domains = self.virsh(host, &["list", "--all", "--name"]).done();
        let known = domains.lines().any(|line| line.trim() == name);
        known.then(|| self.virsh(host, &["domstate", name]).done().trim().to_owned())
    }

    /// The state that a domain's QEMU reports for its guest, such as `running`; `None` without a QEMU.
    pub(crate) fn qemu_says(&self, host: &str, name: &str) -> Option<String> {
        let asked = self.virsh(host, &["qemu-monitor-command", name, r#"{"execute":"query-status"}"#]);
        let answer: serde_json::Value = serde_json::from_str(&asked.stdout).ok()?;
        Some(answer["return"]["status"].as_str()?.to_owned())
    }

    /// Moves a domain over a link with `virsh` alone.
    #[track_caller]
    pub(crate) fn migrate_domain(&self, name: &str, source: &str, target: &str, link: &str) {
        self.migrate_domain_with(name, source, target, link, &[]);
    }

    /// The same, with further options of `virsh`.
    #[track_caller]
    pub(crate) fn migrate_domain_with(
        &self,
        name: &str,
        source: &str,
        target: &str,
        link: &str,
        more: &[&str],
    ) {
        self.start_migrating_domain(name, source, target, link, more).wait().done();
    }

    /// The same, without waiting for its end.
    #[track_caller]
    pub(crate) fn start_migrating_domain(
        &self,
        name: &str,
        source: &str,
        target: &str,
        link: &str,
        more: &[&str],
    ) -> Running {
        let address = self.lab().spec().link_address(target, link).unwrap();
        let (target, way) = (self.libvirt_uri(target), format!("tcp://{address}"));
        let keeping = ["migrate", "--live", "--persistent", "--undefinesource", name];
        self.start_virsh(source, &[&keeping[..], &[&target, "--migrateuri", &way], more].concat())
    }
}

/// A domain's metadata with this placement, as in a specification.
fn metadata(placement: &str) -> String {
    let document: toml::Table = toml::from_str(placement).unwrap();
    let Some(placement) = document.get("placement").and_then(toml::Value::as_table) else {
        return String::new();
    };
    let words = |value: &toml::Value| match value {
        toml::Value::Array(groups) => groups.iter().map(|group| group.as_str().unwrap().to_owned()).collect(),
        one => vec![one.as_str().unwrap().to_owned()],
    };
    let one = |key: &str, word: String| format!("<{key}>{word}</{key}>");
    let all =
        placement.iter().flat_map(|(key, value)| words(value).into_iter().map(move |word| one(key, word)));
    let all: String = all.collect();
    format!("<metadata><p:placement xmlns:p='urn:drainpipe:placement:1'>{all}</p:placement></metadata>")
}

/// The XML of a virtio disk.
pub(crate) fn disk_xml(path: &str, target: &str, format: &str) -> String {
    format!(
        "<disk type='file' device='disk'><driver name='qemu' type='{format}'/><source file='{path}'/>\
         <target dev='{target}' bus='virtio'/></disk>"
    )
}

/// The XML of a domain with these further devices.
pub(crate) fn with_devices(xml: &str, devices: &str) -> String {
    xml.replacen("</devices>", &format!("{devices}</devices>"), 1)
}

/// The XML of a domain like the VM that [`Guest::specification`] describes.
fn domain_xml(guest: &Guest, memory_mib: u64, kernel_parameters: &str) -> String {
    let line = guest.kernel_command_line(memory_mib, kernel_parameters);
    domain_that_boots(&guest.name, guest.address(), memory_mib, &image(), &line)
}

/// The XML of a domain with a kernel and its initramfs.
pub(crate) fn domain_that_boots(
    name: &str,
    address: Ipv4Addr,
    memory_mib: u64,
    [kernel, initramfs]: &[PathBuf; 2],
    line: &str,
) -> String {
    let [.., last] = address.octets();
    format!(
        "<domain type='qemu'>
  <name>{name}</name>
  <memory unit='MiB'>{memory_mib}</memory>
  <vcpu>1</vcpu>
  <os>
    <type arch='x86_64' machine='{MACHINE}'>hvm</type>
    <kernel>{kernel}</kernel>
    <initrd>{initramfs}</initrd>
    <cmdline>{line}</cmdline>
  </os>
  <features><acpi/></features>
  <cpu mode='custom' match='exact' check='none'><model>qemu64</model></cpu>
  <on_reboot>destroy</on_reboot>
  <on_crash>destroy</on_crash>
  <devices>
    <emulator>/usr/bin/qemu-system-x86_64</emulator>
    <controller type='usb' model='none'/>
    <interface type='bridge'>
      <source bridge='{bridge}'/>
      <mac address='52:54:00:d0:00:{last:02x}'/>
      <target dev='domain{last}'/>
      <model type='virtio'/>
      <rom enabled='no'/>
    </interface>
    <serial type='file'><source path='/var/log/libvirt/qemu/{name}.console'/></serial>
    <memballoon model='none'/>
  </devices>
</domain>
",
        kernel = kernel.display(),
        initramfs = initramfs.display(),
        bridge = drainpipe_lab::GUEST_BRIDGE,
    )
}
