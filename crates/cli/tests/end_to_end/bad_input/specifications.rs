//! Specifications from which no VM can be made.

use drainpipe_api_types::VmList;

use crate::guest::{Guest, image};
use crate::program::{BAD_INPUT, REFUSED};
use crate::support::TestLab;

pub(super) fn invalid() {
    let lab = TestLab::fast();
    let guest = Guest::new("web", lab.guest_address(), lab.namespace("client"));
    let good = guest.specification(160, "");
    let changed = |from: &str, to: &str| {
        assert!(good.contains(from), "{good}");
        lab.drainpipe(&["vm", "create", &lab.write("web.toml", &good.replace(from, to))])
    };

    changed("memory_mib = 160", "memory_mib =").refused(BAD_INPUT, &["web.toml:2:"]);
    changed("vcpus = 1", "vcpus = 0").refused(BAD_INPUT, &["web.toml:3:", "`vcpus`", "1 to 255"]);
    changed("vcpus", "vcpu").refused(BAD_INPUT, &["web.toml:3:", "vcpu", "vcpus"]);
    changed("pc-q35-7.2", "q35").refused(BAD_INPUT, &["web.toml:4:", "`q35`", "version"]);
    changed("pc-q35-7.2", "pc-q35-99.0").refused(BAD_INPUT, &["no machine type `pc-q35-99.0`", "newest"]);
    changed("vcpus = 1", "vcpus = 1\ncpu_model = \"quemu64\"")
        .refused(BAD_INPUT, &["no CPU model `quemu64`", "-cpu help"]);
    changed("memory_mib = 160", "memory_mib = 111").refused(BAD_INPUT, &["memory_mib = 111", "112"]);
    changed("\"/", "\"").refused(BAD_INPUT, &["web.toml:6:", "absolute"]);
    lab.drainpipe(&["vm", "create", "/nonexistent/web.toml"])
        .refused(BAD_INPUT, &["/nonexistent/web.toml", "No such file", "vm create --help"]);
    lab.drainpipe(&["vm", "create", &lab.write("web.toml", &good), "--host", "c"])
        .refused(BAD_INPUT, &["a knows no host c"]);
    assert!(lab.json::<VmList>(&["vms"]).vms.is_empty(), "nothing was made");

    // A file may be added later: its lack is reported when the VM is to start.
    let [kernel, _] = image();
    changed(kernel.to_str().unwrap(), "/nonexistent/vmlinuz").done();
    lab.drainpipe(&["vm", "start", "web"])
        .refused(REFUSED, &["VM web cannot run on a", "/nonexistent/vmlinuz"]);
    let removed = lab.drainpipe(&["vm", "rm", "web"]);
    assert_eq!((removed.code, removed.stderr.trim()), (0, "web is removed"), "it has no disks");
    assert!(lab.json::<VmList>(&["vms"]).vms.is_empty());
}
