//! Taps and bridges, in a network namespace of the test's own.

use std::process::Command;

use drainpipe_hypervisor::spec::Nic;
use drainpipe_hypervisor::{Role, VmSpec};
use drainpipe_hypervisor_qemu::{Privileges, StartError, TapError, Vmm};

use crate::host::{DEADLINE, Host, launcher, qemus, small_vm};

#[test]
fn nics_join_their_bridges() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("SKIPPED: network namespaces and taps need root");
        return;
    }
    if !std::path::Path::new("/dev/net/tun").exists() {
        eprintln!("SKIPPED: this kernel has no /dev/net/tun");
        return;
    }
    let program = std::env::current_exe().expect("this test");
    let inner = "network::inside_a_network_namespace";
    let output = Command::new("unshare")
        .arg("--net")
        .arg(program)
        .args(["--exact", inner, "--ignored", "--nocapture"])
        .output()
        .expect("unshare(1) of util-linux");
    let text =
        format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[tokio::test]
#[ignore = "`nics_join_their_bridges` runs it in a network namespace"]
async fn inside_a_network_namespace() {
    ip("link add br-test address 02:00:00:00:00:01 type bridge");
    // Given at the bridge's creation, the kernel forgets it with the last port.
    ip("link set br-test mtu 9000");
    let address_before = ip("-br link show br-test");
    for facts in qemus().await {
        let host = Host::new(&facts);
        let vmm = host.start(&with_nics("joined", "br-test"), Role::Fresh).await;
        let ports = ip("-o link show master br-test");
        assert_eq!(ports.lines().count(), 2, "{ports}");
        for port in ports.lines() {
            assert!(port.contains("LOWER_UP") && port.contains("mtu 9000"), "{port}");
            assert!(port.contains("link/ether fe:"), "{port}");
        }
        vmm.destroy(DEADLINE).await.expect("ends");
        assert_eq!(ip("-o link show master br-test"), "", "taps stayed");
        assert_eq!(ip("-br link show br-test"), address_before, "the bridge is as it was");

        let error = start(&host, &with_nics("lost", "br-none")).await.expect_err("no such bridge");
        assert!(matches!(error, StartError::Tap(TapError::Missing { .. })), "{error}");
        assert!(error.to_string().contains("br-none"), "{error}");
        let error = start(&host, &with_nics("lost", "lo")).await.expect_err("not a bridge");
        assert!(matches!(error, StartError::Tap(TapError::Join { .. })), "{error}");
    }
}

fn with_nics(name: &str, bridge: &str) -> VmSpec {
    let nic = Nic { bridge: bridge.to_owned(), mac: None };
    VmSpec { nics: vec![nic.clone(), nic], ..small_vm(name) }
}

async fn start(host: &Host, spec: &VmSpec) -> Result<Vmm, StartError> {
    let resolved = spec.resolve(&host.facts).expect("this host can");
    Vmm::start(
        &Privileges::own(),
        &launcher(&host.facts.binary),
        resolved,
        host.paths(spec),
        b"{}",
        Role::Fresh,
        DEADLINE,
    )
    .await
}

fn ip(arguments: &str) -> String {
    let output = Command::new("ip").args(arguments.split(' ')).output().expect("ip(8) of iproute2");
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}
