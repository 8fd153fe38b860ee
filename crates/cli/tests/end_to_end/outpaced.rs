//! A VM that changes its memory faster than the links carry it: that is told, and no time is promised.

use std::cell::Cell;

use drainpipe_agent::api::types::PlanView;
use drainpipe_engine::convergence::Outpaced;
use drainpipe_guest::dirtier::Dirtying;

use crate::Test;
use crate::program::CANCELLED;
use crate::scene::Scene;
use crate::support::{TestLab, eventually};

pub(crate) const TESTS: &[Test] = &[("it_is_told_before_and_meanwhile", it_is_told_before_and_meanwhile)];

const FORESEEN: &str = "vm-outpaces-paths";

fn it_is_told_before_and_meanwhile() {
    let scene = Scene::in_lab(TestLab::up(&["--link", "100", "--link", "100"]));
    assert!(!foreseen(&scene, &[]), "it rests");
    scene.guest.set_dirty(Dirtying { mib_per_s: 80, locality_percent: 100 });
    eventually("what would not converge is foreseen", || foreseen(&scene, &[]));
    assert!(!foreseen(&scene, &["--post-copy"]), "that arrives");

    let migrating = scene.lab.start(&["migrate", "web", "b", "--option", "multichannel", "--throttle", "0"]);
    let outpaced = || scene.migrations().first()?.progress.as_ref()?.outpaced;
    // The program looks less often than this test.
    let seen = Cell::new(0);
    eventually("it is told for a while that it does not converge", || {
        let Some(Outpaced { dirty_gbps, sent_gbps, throttle_max_percent }) = outpaced() else { return false };
        assert!(dirty_gbps >= sent_gbps && throttle_max_percent == 0, "{dirty_gbps} {sent_gbps}");
        seen.set(seen.get() + 1);
        seen.get() > 20
    });
    scene.lab.drainpipe(&["cancel", &scene.id()]).done();
    let cancelled = migrating.wait();
    assert_eq!(cancelled.code, CANCELLED, "{cancelled:#?}");
    for part in ["it does not converge", "nothing holds its CPUs back", "`--throttle 99` or `--post-copy`"] {
        assert!(cancelled.stderr.contains(part), "{part}: {cancelled:#?}");
    }
}

/// Whether a plan says so.
#[track_caller]
fn foreseen(scene: &Scene, arguments: &[&str]) -> bool {
    let words = ["migrate", "web", "b", "--option", "tcp", "--dry-run"];
    let view: PlanView = scene.lab.json(&[&words[..], arguments].concat());
    view.findings.iter().any(|finding| finding.code == FORESEEN)
}
