//! libvirt's domains on the hosts of a lab, by `virsh`, as its users have them.

use std::process::Command;

use crate::guest::{Guest, MACHINE, image};
use crate::program::{Output, Running};
use crate::support::TestLab;

/// What this machine lacks to run libvirt in labs.
pub(crate) fn missing() -> Option<String> {
    let absent = ["libvirtd", "virsh"].into_iter().find(|tool| !crate::is_installed(tool));
    absent.map(|tool| format!("{tool} is not installed: run scripts/setup"))
}

impl TestLab {
    /// Two hosts with a libvirt each, no agents, and two links that are as fast as the machine.
    #[track_caller]
    pub(crate) fn with_libvirt() -> Self {
        Self::up(&["--libvirt", "--no-agents", "--link", "unlimited", "--link", "unlimited"])
    }

    /// Where a host's libvirt is reached.
    #[track_caller]
    pub(crate) fn libvirt_uri(&self, host: &str) -> String {
        format!("qemu:///system?socket={}", self.lab().libvirt_socket(host).unwrap().display())
    }

    /// Runs `virsh` with a host's libvirt.
    #[track_caller]
    pub(crate) fn virsh(&self, host: &str, arguments: &[&str]) -> Output {
        self.start_virsh(host, arguments).wait()
    }

    /// As [`Self::virsh`], without waiting for its end.
    #[track_caller]
    pub(crate) fn start_virsh(&self, host: &str, arguments: &[&str]) -> Running {
        let mut command = Command::new("virsh");
        command.args(["--quiet", "--connect", &self.libvirt_uri(host)]).args(arguments);
        Running::start(command)
    }

    /// Defines and boots a domain on a host; back when its guest is ready. 160 MiB will do for most tests.
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

    /// The same, with other XML.
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

    fn new_guest(&self, name: &str) -> Guest {
        Guest::new(name, self.guest_address(), self.namespace("client"))
    }

    #[track_caller]
    fn boot_domain(&self, host: &str, guest: &Guest, xml: &str) {
        let name = guest.name.as_str();
        let file = self.write(&format!("{name}.xml"), xml);
        self.virsh(host, &["define", &file]).done();
        self.virsh(host, &["start", name]).done();
        guest.wait_until_ready();
    }

    /// What a host's libvirt says of a domain, as `running`; none if it does not know it.
    #[track_caller]
    pub(crate) fn domain_state(&self, host: &str, name: &str) -> Option<String> {
        let domains = self.virsh(host, &["list", "--all", "--name"]).done();
        let known = domains.lines().any(|line| line.trim() == name);
        known.then(|| self.virsh(host, &["domstate", name]).done().trim().to_owned())
    }

    /// Moves a domain over a link, as `virsh` does by itself.
    #[track_caller]
    pub(crate) fn migrate_domain(&self, name: &str, source: &str, target: &str, link: &str) {
        self.migrate_domain_with(name, source, target, link, &[]);
    }

    /// The same, with more of `virsh`'s options.
    #[track_caller]
    pub(crate) fn migrate_domain_with(
        &self,
        name: &str,
        source: &str,
        target: &str,
        link: &str,
        more: &[&str],
    ) {
        let address = self.lab().spec().link_address(target, link).unwrap();
        let (target, way) = (self.libvirt_uri(target), format!("tcp://{address}"));
        let keeping = ["migrate", "--live", "--persistent", "--undefinesource", name];
        self.virsh(source, &[&keeping[..], &[&target, "--migrateuri", &way], more].concat()).done();
    }
}

/// A domain like the VM that [`Guest::specification`] describes.
fn domain_xml(guest: &Guest, memory_mib: u64, kernel_parameters: &str) -> String {
    let [kernel, initramfs] = image();
    let [.., last] = guest.address().octets();
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
        name = guest.name,
        kernel = kernel.display(),
        initramfs = initramfs.display(),
        line = guest.kernel_command_line(memory_mib, kernel_parameters),
        bridge = drainpipe_lab::GUEST_BRIDGE,
    )
}
