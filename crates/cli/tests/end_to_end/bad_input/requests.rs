//! Migrations that are impossible.

use drainpipe_api_types::{MigrationView, VmList};
use drainpipe_engine::option::RequestedOption;

use crate::drain::restart_agent_with_memory;
use crate::guest::Guest;
use crate::program::{BAD_INPUT, CANCELLED, REFUSED};
use crate::support::{TestLab, eventually};

pub(super) fn that_cannot_be() {
    let lab = TestLab::slow();
    let guest = lab.start_guest("web", 160, "");
    one_migration_of_a_vm_at_a_time(&lab, &guest);
    lab.fault("rate e0 unlimited");
    lab.fault("rate e1 unlimited");
    for target in ["b", "a"] {
        lab.migrate("web", target, &[]);
    }
    that_make_no_sense(&lab, &guest);
    guest.assert_intact();
}

fn that_make_no_sense(lab: &TestLab, guest: &Guest) {
    let before = lab.network();
    let migrate = |vm: &str, host: &str| lab.drainpipe(&["migrate", vm, host]);

    migrate("wbe", "b").refused(BAD_INPUT, &["no VM wbe on any host", "`drainpipe vms`"]);
    migrate("web", "c").refused(BAD_INPUT, &["a knows no host c", "it knows: b"]);
    migrate("web", "a").refused(REFUSED, &["on a already"]);
    lab.drainpipe(&["migrate", "web", "b", "--option", "fast"])
        .refused(BAD_INPUT, &["fast", "auto", "multichannel"]);
    lab.drainpipe(&["migrate", "web"]).refused(BAD_INPUT, &["<HOST>", "Usage:"]);
    let unknown = "00000000-0000-4000-8000-000000000000";
    lab.drainpipe(&["cancel", unknown]).refused(BAD_INPUT, &["no migration", unknown, "drainpipe history"]);
    lab.drainpipe(&["history", unknown]).refused(BAD_INPUT, &["no migration", unknown]);
    lab.drainpipe(&["cancel", "web"]).refused(BAD_INPUT, &["`web` is neither a migration's identifier"]);
    lab.drainpipe(&["cancel", "123"]).refused(BAD_INPUT, &["no migration 123 on any host"]);

    lab.create(&guest.specification(160, "").replace("\"web\"", "\"idle\""), "idle");
    migrate("idle", "b").refused(REFUSED, &["VM idle does not run", "`drainpipe vm start idle`"]);
    lab.drainpipe(&["vm", "create", &lab.write("again.toml", &guest.specification(160, ""))])
        .refused(REFUSED, &["a has a VM web already", "vm rm web"]);
    lab.drainpipe(&["vm", "rm", "web"]).refused(REFUSED, &["VM web runs", "vm stop web"]);

    let other = lab.write("other.toml", &guest.specification(160, ""));
    lab.drainpipe(&["vm", "create", &other, "--agent", &lab.agent_socket("b")]).done();
    migrate("web", "b").refused(REFUSED, &["b has a VM web already"]);

    lab.assert_network_as(&before);
    let vms: VmList = lab.json(&["vms"]);
    assert_eq!(vms.vms.len(), 3, "none was lost, none was made: {vms:#?}");
}

fn one_migration_of_a_vm_at_a_time(lab: &TestLab, guest: &Guest) {
    let first = lab.start(&["migrate", "web", "b", "--json"]);
    let moving = || lab.vms().vms.iter().find_map(|vm| vm.migration.clone());
    eventually("the migration begins", || moving().is_some());
    let id = moving().unwrap();

    let cancel = format!("drainpipe cancel {id}");
    lab.drainpipe(&["migrate", "web", "b"]).refused(REFUSED, &["web is already being moved", &id, &cancel]);
    lab.drainpipe(&["vm", "stop", "--force", "web"]).refused(REFUSED, &["being moved", &id]);
    let [row] = &lab.json::<Vec<MigrationView>>(&["history", "--host", "b"])[..] else { panic!("one comes") };
    assert_eq!((&row.id, row.requested_option), (&id, Some(RequestedOption::default())));
    assert!(row.started_at.is_some(), "{row:#?}");
    lab.drainpipe(&["cancel", &id[..8], "--agent", &lab.agent_socket("b")]).done();
    let ended = first.wait();
    assert_eq!(ended.code, CANCELLED, "{ended:#?}");
    assert!(ended.stdout.contains("\"outcome\": \"cancelled\""), "{ended:#?}");

    lab.assert_runs_on("web", "a");
    guest.assert_intact();
    let past: Vec<MigrationView> = lab.json(&["history"]);
    assert_eq!(past.len(), 1, "what was refused is no migration: {past:#?}");
    let shown = lab.drainpipe(&["vm", "show", "web"]).done();
    for part in ["web on a: running", "memory_mib = 160", &id, "cancelled"] {
        assert!(shown.contains(part), "`{part}` is missing: {shown}");
    }
}

pub(super) fn a_target_short_of_memory() {
    let lab = TestLab::fast();
    restart_agent_with_memory(&lab, "b", 600);
    for name in ["big", "second"] {
        let specification = format!(
            "name = \"{name}\"\nmemory_mib = 256\nvcpus = 1\nmachine = \"pc-q35-7.2\"\naccelerator = \"tcg\"\n"
        );
        lab.create(&specification, name);
        lab.drainpipe(&["vm", "start", name]).done();
    }
    lab.drainpipe(&["migrate", "big", "b"]).done();
    // Firmware without a disk touches little memory, so what is promised to the first VM is still free.
    lab.drainpipe(&["migrate", "second", "b"])
        .refused(REFUSED, &["b is short of memory for VM second", "385 MiB needed", "MiB available"]);
    lab.assert_runs_on("big", "b");
    lab.assert_runs_on("second", "a");
}
