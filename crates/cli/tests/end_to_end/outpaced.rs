//! A VM that changes its memory faster than the links carry it: the agents say so, and promise no time.

use std::cell::Cell;

use drainpipe_api_types::PlanView;
use drainpipe_engine::estimate::convergence::Outpaced;
use drainpipe_engine::migration::progress::Progress;
use drainpipe_guest::protocol::Dirtying;

use crate::Test;
use crate::program::CANCELLED;
use crate::scene::Scene;
use crate::support::eventually;

pub(crate) const TESTS: &[Test] = &[("it_is_told_before_and_meanwhile", it_is_told_before_and_meanwhile)];

const FORESEEN: &str = "vm-outpaces-paths";

fn it_is_told_before_and_meanwhile() {
    let scene = Scene::set();
    assert!(!foreseen(&scene, &[]), "it rests");
    // Several times what the links carry, even if other tests slow the guest down.
    scene.guest.set_dirty(Dirtying { mib_per_s: 80, locality_percent: 100 });
    eventually("what would not converge is foreseen", || foreseen(&scene, &[]));
    assert!(!foreseen(&scene, &["--post-copy"]), "that arrives");

    let migrating = scene.lab.start(&["migrate", "web", "b", "--option", "multichannel", "--throttle", "0"]);
    let progress = || scene.migrations().first()?.progress.clone();
    eventually("memory goes again", || progress().is_some_and(|progress| progress.rounds >= 2));
    // The program looks less often than this test.
    let first_told_in = Cell::new(None);
    eventually("it is told in one round and the next that it does not converge", || {
        let Some(Progress { rounds, outpaced: Some(outpaced), .. }) = progress() else { return false };
        let Outpaced { dirty_gbps, sent_gbps, throttle_max_percent } = outpaced;
        assert!(dirty_gbps > 0.0 && sent_gbps > 0.0 && throttle_max_percent == 0, "{outpaced:?}");
        let first = first_told_in.get().unwrap_or(rounds);
        first_told_in.set(Some(first));
        rounds > first
    });
    scene.lab.drainpipe(&["cancel", &scene.id()]).done();
    let cancelled = migrating.wait();
    assert_eq!(cancelled.code, CANCELLED, "{cancelled:#?}");
    for part in ["it does not converge", "its CPUs are not throttled", "`--throttle 99` or `--post-copy`"] {
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
