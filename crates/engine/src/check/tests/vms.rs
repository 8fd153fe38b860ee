//! Obstacles to running a VM on the other host.

use super::*;
use crate::check::vm::{DiskPlace, DiskRoom, FileNotAllowed, Notice};
use crate::host::vm_resources::NotAllowed;

pub(super) const OF_VMS: &[Case] = &[
    (|s| s.vms[0].fit.name_taken = true, Error, "vm-name-taken", &["b VM web1"], "b has a VM web1 already"),
    (
        |s| {
            let newest = Some("pc-q35-7.2".into());
            s.vms[0].fit.obstacle = Some(Obstacle::MachineUnknown { newest });
        },
        Error,
        "vm-machine-unknown",
        &["b VM web1"],
        "its newest of this kind is pc-q35-7.2",
    ),
    (
        |s| s.vms[0].fit.missing_bridges = vec!["br0".into()],
        Error,
        "vm-bridge-missing",
        &["b VM web1"],
        "on b: ip link add br0 type bridge",
    ),
    (|s| s.vms[0].fit.obstacle = Some(Obstacle::NoKvm), Error, "vm-kvm-missing", &["b VM web1"], "KVM"),
    (
        |s| s.vms[0].fit.obstacle = Some(Obstacle::LosesWrites),
        Error,
        "vm-writes-lost",
        &["b VM web1"],
        "memory_padding_kib = 8",
    ),
    (
        |s| s.vms[0].fit.cpu = Some(CpuFeatures::default()),
        Error,
        "vm-cpu-unknown",
        &["b VM web1"],
        "no CPU model EPYC",
    ),
    (
        |s| {
            let [source, target] = cpus(s);
            source.named.extend(["avx512f", "sha-ni", "x2apic"].map(String::from));
            source.lacking.insert("x2apic".into());
            target.lacking.extend(["x2apic", "avx512f"].map(String::from));
        },
        Error,
        "vm-cpu-features",
        &["b VM web1"],
        "(EPYC): avx512f",
    ),
    (
        |s| s.b.host.memory_available_bytes = 4 << 30,
        Error,
        "vm-memory-short",
        &["b VM web1"],
        "4224 MiB needed, 4096 MiB available",
    ),
    (
        |s| {
            s.vms = vec![vm(), vm()];
            s.b.host.memory_available_bytes = 6 << 30;
        },
        Warning,
        "vms-memory-short",
        &["b"],
        "8448 MiB together",
    ),
    (
        |s| {
            s.vms[0].vm.huge_page_mib = Some(2);
            s.b.host.huge_pages_available = vec![HugePages { size_mib: 2, count: 2_000 }];
            // None of it is in ordinary memory.
            s.b.host.memory_available_bytes = 2 << 30;
        },
        Error,
        "vm-huge-pages-short",
        &["b VM web1"],
        "2048 of 2 MiB needed, 2000 free",
    ),
    (
        |s| {
            let huge = || VmCheck { vm: VmFacts { huge_page_mib: Some(1024), ..vm().vm }, ..vm() };
            s.vms = vec![huge(), huge()];
            s.b.host.huge_pages_available = vec![HugePages { size_mib: 1024, count: 6 }];
        },
        Warning,
        "vms-huge-pages-short",
        &["b"],
        "8 huge pages of 1024 MiB together",
    ),
    (
        |s| s.vms[0].vm.machine = "pc-q35-7.2".into(),
        Remark,
        "vm-machine-old",
        &["b VM web1"],
        "install QEMU 8.1",
    ),
    (
        |s| {
            for facts in [&mut s.a, &mut s.b] {
                facts.host.hypervisor.version = "10.0.2".into();
            }
            s.vms[0].vm.machine = "pc-i440fx-7.2".into();
        },
        Warning,
        "vm-machine-old",
        &["b VM web1"],
        "one path that becomes slow slows all",
    ),
    (
        |s| s.vms[0].vm.obstacles = vec![notice("it has a snapshot", "virsh snapshot-delete")],
        Error,
        "vm-cannot-migrate",
        &["a VM web1"],
        "VM web1: it has a snapshot",
    ),
    (
        |s| s.vms[0].vm.doubts = vec![notice("it may have mounted a directory", "unmount it")],
        Warning,
        "vm-may-not-migrate",
        &["a VM web1"],
        "mounted a directory",
    ),
    (
        |s| {
            s.vms[0].vm.needs = ["network one", "network two"].map(|what| notice(what, "net-start")).to_vec();
            s.vms[0].fit.lacking = vec![1];
        },
        Error,
        "vm-need-missing",
        &["b VM web1"],
        "needs: network two",
    ),
    (|s| s.vms[0].vm.qemu_version = "8.0.4".into(), Warning, "vm-qemu-newer", &["b VM web1"], "QEMU 8.0.4"),
    (
        |s| {
            s.vms[0].vm.memory_bytes = 64 << 30;
            s.b.host.memory_available_bytes = 1 << 40;
            s.b.huge_pages = Some("never".into());
        },
        Remark,
        "vm-small-pages",
        &["b VM web1"],
        "has 64.0 GiB",
    ),
    (
        |s| s.vms[0].vm.padding_bytes = 8 << 10,
        Warning,
        "vm-memory-padded",
        &["a VM web1"],
        "may stall for some seconds when copying begins",
    ),
    (
        |s| s.vms[0].fit.files[0] = FileState::Missing,
        Error,
        "vm-file-missing",
        &["b VM web1"],
        "b does not see /boot/linux",
    ),
    (
        |s| {
            s.vms[0].fit.files[1] = FileState::Missing;
            s.vms[0].fit.files_not_allowed = vec![FileNotAllowed { index: 1, why: NotAllowed::Outside }];
        },
        Error,
        "vm-file-not-allowed",
        &["b VM web1"],
        "/srv/web1.qcow2 of VM web1 is not in a directory",
    ),
    (
        |s| s.vms[0].fit.bridges_not_allowed = vec!["br-office".into()],
        Error,
        "vm-bridge-not-allowed",
        &["b VM web1"],
        "VMs may not join br-office on b",
    ),
    (
        |s| s.vms[0].fit.files[1] = FileState::Silent,
        Error,
        "vm-storage-silent",
        &["b VM web1"],
        "/srv/web1.qcow2",
    ),
    (
        |s| on_target(s, |disk| (disk.inode, disk.locked) = (78, Some(false))),
        Error,
        "vm-disk-differs",
        &["b VM web1"],
        "inode 77 and inode 78",
    ),
    (
        |s| {
            on_both(s, |disk| disk.local_filesystem = true);
            on_target(s, |disk| disk.locked = Some(false));
        },
        Error,
        "vm-disk-differs",
        &["b VM web1"],
        "its own file there",
    ),
    (
        |s| {
            on_both(s, |disk| disk.block_device = true);
            on_target(s, |disk| disk.size_bytes = 5);
        },
        Error,
        "vm-disk-differs",
        &["b VM web1"],
        "1073741824 bytes and 5 bytes",
    ),
    (
        |s| {
            on_both(s, |disk| (disk.block_device, disk.device) = (true, Some(scsi("naa.1"))));
            on_target(s, |disk| disk.device = Some(scsi("naa.2")));
        },
        Error,
        "vm-disk-differs",
        &["b VM web1"],
        "different identifiers",
    ),
];

fn scsi(value: &str) -> DeviceIdentifier {
    DeviceIdentifier { kind: DeviceIdentifierKind::Scsi, value: value.into() }
}

fn cpus(scene: &mut Scene) -> [&mut CpuFeatures; 2] {
    let VmCheck { vm, fit } = &mut scene.vms[0];
    [&mut vm.cpu, &mut fit.cpu].map(|cpu| cpu.as_mut().unwrap())
}

fn on_both(scene: &mut Scene, change: impl Fn(&mut FileIdentity)) {
    let vm = &mut scene.vms[0];
    for state in [&mut vm.vm.files[1].state, &mut vm.fit.files[1]] {
        let FileState::Present(identity) = state else { panic!("{state:?}") };
        change(identity);
    }
}

fn on_target(scene: &mut Scene, change: impl Fn(&mut FileIdentity)) {
    let FileState::Present(identity) = &mut scene.vms[0].fit.files[1] else { panic!("no disk") };
    change(identity);
}

#[test]
fn a_disk_that_is_the_same_is_taken_for_it() {
    let changes: [fn(&mut Scene); 7] = [
        // While the guest writes, the file grows between two looks.
        |s| on_target(s, |disk| disk.size_bytes += 65_536),
        |s| on_target(s, |disk| disk.inode = 78),
        |s| on_target(s, |disk| disk.locked = None),
        |s| on_both(s, |disk| disk.local_filesystem = true),
        |s| on_both(s, |disk| (disk.block_device, disk.device) = (true, Some(scsi("naa.6001")))),
        // One LUN, with several paths on the source and one on the target.
        |s| {
            let kind = DeviceIdentifierKind::DeviceMapper;
            let several_paths = DeviceIdentifier { kind, value: "mpath-36001".into() };
            on_both(s, |disk| (disk.block_device, disk.device) = (true, Some(several_paths.clone())));
            on_target(s, |disk| disk.device = Some(scsi("naa.6001")));
        },
        |s| {
            s.vms[0].vm.files[1].purpose = FilePurpose::ReadOnlyDisk;
            on_target(s, |disk| (disk.inode, disk.locked) = (78, Some(false)));
        },
    ];
    for change in changes {
        let mut scene = Scene::healthy();
        change(&mut scene);
        assert_eq!(scene.findings(), [], "{:#?}", scene.vms);
    }
}

#[test]
fn a_cpu_feature_that_one_qemu_has_no_name_for_refuses_nothing() {
    let mut scene = Scene::healthy();
    let [source, target] = cpus(&mut scene);
    source.named.extend(["avx2", "old-name"].map(String::from));
    target.named.extend(["avx2", "new-name"].map(String::from));
    target.lacking.insert("new-name".into());
    assert_eq!(scene.findings(), [], "{:#?}", scene.vms);
}

#[test]
fn a_peers_answer_about_a_vm_is_bounded() {
    let good = vm().fit;
    assert_eq!(good.plausible("b", 2, 0), Ok(()));
    assert!(good.plausible("b", 1, 0).is_err());
    let newest = Some("\u{1b}[2J".into());
    let hostile = VmFit { obstacle: Some(Obstacle::MachineUnknown { newest }), ..good.clone() };
    assert!(hostile.plausible("b", 2, 0).is_err());
    for lacking in [vec![1], vec![0, 0]] {
        assert!(VmFit { lacking, ..good.clone() }.plausible("b", 2, 1).is_err());
    }
    for (index, why) in [(2, NotAllowed::Outside), (0, NotAllowed::Names { file: "\u{1b}[2J".into() })] {
        let files_not_allowed = vec![FileNotAllowed { index, why }];
        assert!(VmFit { files_not_allowed, ..good.clone() }.plausible("b", 2, 0).is_err());
    }
    let disk_rooms = vec![DiskRoom { index: 2, device: 7, free_bytes: 1 }];
    assert!(VmFit { disk_rooms, ..good.clone() }.plausible("b", 2, 0).is_err());
    let with_place = |index, path: &str| {
        let disk_places = vec![DiskPlace { index, path: path.into() }];
        VmFit { disk_places, ..good.clone() }.plausible("b", 2, 0)
    };
    assert_eq!(with_place(1, "/srv/web.img"), Ok(()));
    for (index, path) in [(2, "/srv/web.img"), (1, "web.img"), (1, "/srv/\u{1b}[2J")] {
        assert!(with_place(index, path).is_err(), "{path:?}");
    }
    for features in [vec!["a; reboot".to_owned()], (0..2_000).map(|number| format!("f{number}")).collect()] {
        let cpu = CpuFeatures { lacking: features.into_iter().collect(), ..CpuFeatures::default() };
        assert!(VmFit { cpu: Some(cpu), ..good.clone() }.plausible("b", 2, 0).is_err());
    }
}

fn notice(what: &str, remedy: &str) -> Notice {
    Notice { what: what.into(), remedy: remedy.into() }
}
