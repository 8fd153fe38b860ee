//! The VMs of a host on a fake hypervisor: what exists after each request, what a refused request leaves behind, and
//! how the agent's next run sees it.

use std::fs;
use std::panic::{AssertUnwindSafe, catch_unwind};

use drainpipe_engine::problem::ProblemKind;
use drainpipe_hypervisor::fake::{Act, FakeVm, Fault};
use drainpipe_hypervisor::spec::{Disk, DiskFormat};
use drainpipe_hypervisor::{Address, Managed, ManagedVm, Parcel, Transport, Vm};
use jiff::Timestamp;

use super::*;
use crate::disk_moves;
use crate::store::journal::{DiskFile, DiskMoveRecord};
use crate::test_host::{Life, TestHost, definition, domain, migrate};
use drainpipe_api_types::MoveDiskRequest;

const ID: &str = "11111111-1111-4111-8111-111111111111";

/// The VMs in the list, and the state of each.
fn shown(life: &Life) -> Vec<(String, VmState)> {
    let vms = life.block_on(life.parts.vms.list());
    vms.into_iter().map(|vm| (vm.name, vm.state)).collect()
}

fn web(state: VmState) -> Vec<(String, VmState)> {
    vec![("web".into(), state)]
}

fn try_start(life: &Life, name: &str) -> Result<(), Problem> {
    life.block_on(life.parts.vms.start(name, async |_| Ok(())))
}

/// Defines and starts `web`.
fn runs(host: &TestHost, life: &Life) -> Arc<FakeVm> {
    life.parts.vms.create(definition("web")).unwrap();
    try_start(life, "web").unwrap();
    host.vm("web")
}

/// The agent's next run.
fn again(host: &TestHost, life: Life) -> Life {
    drop(life);
    host.start()
}

/// Asserts that the request is refused with this kind of problem and these words.
fn refused<T: std::fmt::Debug>(done: Result<T, Problem>, kind: ProblemKind, says: &str) {
    let problem = done.unwrap_err();
    assert_eq!(problem.kind, kind, "{problem}");
    assert!(problem.message.contains(says), "{problem}");
}

#[test]
fn a_definition_that_is_refused_leaves_nothing() {
    let host = TestHost::new();
    let life = host.start();
    let vms = &life.parts.vms;
    let unknown = VmSpec { machine: "pc-q35-99.0".to_owned().try_into().unwrap(), ..definition("web") };
    refused(vms.create(unknown), ProblemKind::BadInput, "pc-q35-10.0");
    refused(vms.create(domain("web")), ProblemKind::Refused, "`virsh define web`");
    assert_eq!(shown(&life), []);
    let life = again(&host, life);
    assert_eq!(shown(&life), []);
    life.parts.vms.create(definition("web")).unwrap();
}

#[test]
fn a_name_that_is_taken_keeps_its_first_vm() {
    let host = TestHost::new();
    let life = host.start();
    life.parts.vms.create(definition("web")).unwrap();
    let other = VmSpec { memory_mib: 128, ..definition("web") };
    refused(life.parts.vms.create(other), ProblemKind::Conflict, "`drainpipe vm rm web`");
    assert_eq!(life.parts.vms.definition("web"), Ok(definition("web")));
    let life = again(&host, life);
    assert_eq!(life.parts.vms.definition("web"), Ok(definition("web")));
}

#[test]
fn no_vm_takes_the_name_of_a_process_that_lives_and_that_nobody_knows() {
    let host = TestHost::new();
    let forgotten = host.runs_by_others(&definition("web"));
    let life = host.start();
    let process = format!("process {}", forgotten.pid());
    refused(life.parts.vms.create(definition("web")), ProblemKind::Conflict, &process);
    assert_eq!(shown(&life), []);
    assert!(forgotten.alive());
}

#[test]
fn a_vm_that_does_not_start_is_stopped_and_can_be_started_again() {
    let host = TestHost::new();
    let life = host.start();
    life.parts.vms.create(definition("web")).unwrap();
    host.hypervisor.fails_once(Act::Start, Fault::Fails);
    refused(try_start(&life, "web"), ProblemKind::Failed, "VM web does not start");
    assert_eq!(shown(&life), web(VmState::Stopped));
    assert_eq!(host.hypervisor.with_files().unwrap(), []);
    try_start(&life, "web").unwrap();
    assert_eq!(shown(&life), web(VmState::Running));
    refused(try_start(&life, "web"), ProblemKind::Conflict, "already running");
}

#[test]
fn a_vm_that_may_not_start_is_not_started() {
    let host = TestHost::new();
    let life = host.start();
    let vms = &life.parts.vms;
    vms.create(definition("web")).unwrap();
    let no_room = async |_| Err(Problem::refused("no room"));
    refused(life.block_on(vms.start("web", no_room)), ProblemKind::Refused, "no room");
    assert!(host.hypervisor.vm("web").is_none());
    assert_eq!(vms.promises(None), [], "it takes no memory from others");
    try_start(&life, "web").unwrap();
}

#[test]
fn what_runs_is_not_removed_and_goes_on_in_the_next_life() {
    let host = TestHost::new();
    let life = host.start();
    let vm = runs(&host, &life);
    refused(
        life.block_on(life.parts.vms.remove("web")),
        ProblemKind::Conflict,
        "`drainpipe vm stop web` first",
    );
    let life = again(&host, life);
    assert_eq!(shown(&life), web(VmState::Running));
    assert!(vm.alive());
    refused(try_start(&life, "web"), ProblemKind::Conflict, "already running");
}

#[test]
fn what_is_removed_is_forgotten_for_good_and_its_disks_stay() {
    let host = TestHost::new();
    let life = host.start();
    let path = host.disk_path("web.raw");
    fs::write(&path, "what the guest wrote").unwrap();
    let disks = vec![Disk { path: path.clone(), format: DiskFormat::Raw, read_only: false }];
    life.parts.vms.create(VmSpec { disks, ..definition("web") }).unwrap();
    try_start(&life, "web").unwrap();
    life.block_on(life.parts.vms.stop("web", false)).unwrap();
    assert_eq!(host.vm("web").acts(), [Act::StopGuest]);
    assert_eq!(shown(&life), web(VmState::Stopped));
    life.block_on(life.parts.vms.remove("web")).unwrap();
    assert_eq!(shown(&again(&host, life)), []);
    assert_eq!(fs::read_to_string(path).unwrap(), "what the guest wrote");
}

#[test]
fn a_vm_that_does_not_stop_runs_on_and_can_be_stopped_otherwise() {
    let host = TestHost::new();
    let life = host.start();
    let (running, vms) = (runs(&host, &life), &life.parts.vms);
    running.fails_once(Act::StopGuest, Fault::Ignored);
    refused(life.block_on(vms.stop("web", false)), ProblemKind::Failed, "`drainpipe vm stop --force web`");
    assert_eq!(shown(&life), web(VmState::Running));
    life.block_on(vms.stop("web", true)).unwrap();
    assert!(!running.alive());
    assert_eq!(shown(&life), web(VmState::Stopped));
    refused(life.block_on(vms.stop("web", true)), ProblemKind::Conflict, "does not run");
}

#[test]
fn a_vm_whose_guest_the_last_life_had_not_let_run_is_stopped() {
    let host = TestHost::new();
    let life = host.start();
    let vm = runs(&host, &life);
    vm.guest_is(RunState::Prelaunch);
    let life = again(&host, life);
    assert!(!vm.alive());
    assert_eq!(shown(&life), web(VmState::Stopped));
    try_start(&life, "web").unwrap();
}

#[test]
fn a_vm_that_does_not_answer_a_new_life_is_only_killed_when_somebody_insists() {
    let host = TestHost::new();
    let life = host.start();
    let running = runs(&host, &life);
    host.hypervisor.fails(Act::Attach, Fault::Mute);
    let life = again(&host, life);
    let vms = &life.parts.vms;
    assert_eq!(shown(&life), web(VmState::Unknown));
    let ends_it = "`drainpipe vm stop web --force`";
    refused(try_start(&life, "web"), ProblemKind::Conflict, ends_it);
    refused(life.block_on(vms.stop("web", false)), ProblemKind::Conflict, ends_it);
    refused(life.block_on(vms.remove("web")), ProblemKind::Conflict, ends_it);
    assert!(running.alive() && running.acts().is_empty());
    life.block_on(vms.stop("web", true)).unwrap();
    assert!(!running.alive());
    assert_eq!(shown(&life), web(VmState::Stopped));
    try_start(&life, "web").unwrap();
}

/// A VM that does not answer is not even killed on request, once this has begun.
fn is_not_killed(begin: impl FnOnce(&Journal), why: &str) {
    let host = TestHost::new();
    let life = host.start();
    let running = runs(&host, &life);
    begin(&life.parts.journal);
    host.hypervisor.fails(Act::Attach, Fault::Mute);
    let life = again(&host, life);
    refused(life.block_on(life.parts.vms.stop("web", true)), ProblemKind::Conflict, why);
    assert!(running.alive() && running.acts().is_empty());
    assert_eq!(shown(&life), web(VmState::Unknown));
}

#[test]
fn nobody_kills_a_vm_that_does_not_answer_while_another_host_may_need_it() {
    let begin = |journal: &Journal| {
        journal.begin_migration(ID, &migrate("web"), Timestamp::UNIX_EPOCH).unwrap();
    };
    is_not_killed(begin, "here or on target");
}

#[test]
fn nobody_kills_a_vm_that_does_not_answer_while_it_may_have_either_of_two_disks() {
    let begin = |journal: &Journal| {
        let file = |path: &str| DiskFile { path: path.into(), file: None };
        let (disk, old, new) = (DiskName::at(0).unwrap(), file("/old"), file("/new"));
        let record = DiskMoveRecord { id: ID.into(), vm: "web".into(), disk, old, new, is_recorded: false };
        journal.begin_disk_move(&record).unwrap();
    };
    is_not_killed(begin, "which of two disks it has");
}

/// A host with a manager of VMs that has these VMs.
fn beside_a_manager(found: &[VmSpec]) -> TestHost {
    let host = TestHost::new();
    manages(&host, found);
    host
}

fn manages(host: &TestHost, found: &[VmSpec]) {
    let found = found.iter().map(|definition| {
        let is_active = host.hypervisor.vm(definition.name.as_str()).is_some_and(|vm| vm.alive());
        ManagedVm { definition: definition.clone(), is_active, obstacles: vec![] }
    });
    host.hypervisor.manages(Managed { found: found.collect(), unmanaged: vec![] });
}

#[test]
fn a_domain_is_told_of_and_all_that_is_libvirts_to_do_is_left_to_it() {
    let host = TestHost::new();
    let running = host.runs_by_others(&domain("web"));
    manages(&host, &[domain("web")]);
    let life = host.start();
    let vms = &life.parts.vms;
    assert_eq!(shown(&life), web(VmState::Running));
    refused(try_start(&life, "web"), ProblemKind::Refused, "`virsh start web`");
    refused(life.block_on(vms.stop("web", false)), ProblemKind::Refused, "`virsh shutdown web`");
    refused(life.block_on(vms.stop("web", true)), ProblemKind::Refused, "`virsh destroy web`");
    refused(life.block_on(vms.remove("web")), ProblemKind::Refused, "`virsh undefine web`");
    let request = MoveDiskRequest { disk: DiskName::at(0).unwrap(), to: "/new".into() };
    let moved = life.block_on(disk_moves::begin(&life.parts.disk_moves, "web", &request));
    refused(moved, ProblemKind::Refused, "`virsh blockcopy web DISK PATH --pivot`");
    assert!(running.alive() && running.acts().is_empty());
    assert_eq!(shown(&life), web(VmState::Running));
    assert!(life.parts.journal.vms().unwrap().is_empty(), "until it migrates");
}

#[test]
fn a_domain_that_libvirt_has_no_more_is_forgotten_once_it_has_ended() {
    let host = TestHost::new();
    let running = host.runs_by_others(&domain("web"));
    manages(&host, &[domain("web")]);
    let life = host.start();
    life.parts.vms.note_managed(&domain("web")).unwrap();
    manages(&host, &[]);
    life.block_on(life.parts.vms.look_at_managed()).unwrap();
    assert_eq!(shown(&life), web(VmState::Running), "its QEMU lives");
    running.ends(Exit::Code(0));
    life.block_on(life.parts.vms.look_at_managed()).unwrap();
    assert_eq!(shown(&life), []);
    assert_eq!(shown(&again(&host, life)), []);
}

#[test]
fn of_two_vms_of_one_name_commands_mean_drainpipes_own() {
    let host = beside_a_manager(&[]);
    let life = host.start();
    runs(&host, &life);
    manages(&host, &[domain("web")]);
    life.block_on(life.parts.vms.look_at_managed()).unwrap();
    let [own, other] = &life.block_on(life.parts.vms.list())[..] else { panic!("there are two") };
    assert_eq!((own.name.as_str(), own.manager), ("web", None));
    assert_eq!((other.name.as_str(), other.manager), ("web (libvirt)", domain("web").manager));
    let why = other.unmovable.as_deref().unwrap();
    assert!(why.contains("`virsh domrename web NEW`"), "{why}");
    life.block_on(life.parts.vms.stop("web", false)).unwrap();
    life.block_on(life.parts.vms.remove("web")).unwrap();
}

#[test]
fn a_migration_that_crashes_keeps_its_claim_for_who_takes_it_up() {
    let host = TestHost::new();
    let life = host.start();
    let vms = &life.parts.vms;
    vms.create(definition("web")).unwrap();
    let crash = |claim: Claim| {
        let claimed = vms.claim("web", claim).unwrap();
        let crash = AssertUnwindSafe(|| {
            let _claimed = claimed;
            panic!("an error in Drainpipe, of this test");
        });
        catch_unwind(crash).unwrap_err();
    };
    crash(Claim::Changing);
    crash(Claim::Migrating("one".into()));
    assert!(vms.claim("web", Claim::Changing).is_err());
    assert!(vms.claim("web", Claim::Migrating("two".into())).is_err());
    assert!(vms.claim_of_crashed("web", "two").is_none());
    let taken_up = vms.claim_of_crashed("web", "one").expect("it is claimed still");
    assert!(vms.claim("web", Claim::Changing).is_err());
    drop(taken_up);
    assert!(vms.claim("web", Claim::Changing).is_ok());
}

#[test]
fn huge_pages_are_promised_until_a_process_has_them() {
    let host = TestHost::new();
    let definition = VmSpec { huge_page_mib: Some(2), ..domain("web") };
    let vm = host.block_on(async {
        let facts = host.hypervisor.probe(QMP_DEADLINE).await.unwrap();
        let spec = definition.resolve(&facts).unwrap();
        host.hypervisor.start(spec, b"{}", Role::Incoming, QMP_DEADLINE).await.unwrap()
    });
    let promised = || promise(needs(&definition), Some(vm.pid()));
    assert_eq!(promised().resident_bytes, None, "its manager has not started it yet");
    let address = Address::Tcp(crate::test_host::NOBODY);
    host.block_on(vm.listen(Transport::Single, address, &Parcel::default(), QMP_DEADLINE)).unwrap();
    assert_eq!(promised().resident_bytes, Some(0));
}
