//! Certificates that the other host, or the agent itself, refuses.

use std::num::NonZeroU32;
use std::path::Path;

use drainpipe_identity::Validity;
use drainpipe_identity::authority::{self, InitOptions, IssueOptions};
use jiff::{SignedDuration, Timestamp};
use rustix::process::Signal;

use crate::program::{FAILED, REFUSED};
use crate::support::TestLab;

const DAYS: NonZeroU32 = NonZeroU32::new(1).unwrap();

/// Gives bad certificates to host `b`, to which the VM `web` of host `a` is to move.
pub(super) fn bad_certificates(lab: &TestLab) {
    let ours = lab.directory("client").join("pki");
    let strange = lab.files().join("pki");
    authority::init(&strange, &InitOptions::default()).unwrap();
    let refused = |words: &[&str]| {
        lab.drainpipe(&["migrate", "web", "b"]).refused(FAILED, &[&["the agent of b"], words].concat());
        lab.assert_runs_on("web", "a");
    };

    lab.stop_agent("b", Signal::TERM);
    issue(lab, &strange, "b", Validity::days(DAYS));
    lab.start_agent("b");
    refused(&["another authority", "drainpipe pki init"]);

    // The certificate expires while the agent uses it; a restart would show that at once.
    lab.stop_agent("b", Signal::TERM);
    let now = Timestamp::now();
    let soon = now + SignedDuration::from_secs(3);
    issue(lab, &ours, "b", Validity { not_before: now - SignedDuration::from_hours(1), not_after: soon });
    lab.start_agent("b");
    crate::support::eventually("the certificate expires", || {
        Timestamp::now() > soon + SignedDuration::from_secs(1)
    });
    refused(&["expired", "drainpipe pki"]);
    lab.stop_agent("b", Signal::TERM);
    lab.refused_agent("b").refused(REFUSED, &["host.pem", "expired", "drainpipe pki", "--force"]);

    // A host that calls itself `c` answers at the address of `b`.
    issue(lab, &ours, "c", Validity::days(DAYS));
    lab.configure("b", "name = \"b\"", "name = \"c\"");
    lab.start_agent("b");
    refused(&["host b was expected", "of host c"]);

    lab.stop_agent("b", Signal::TERM);
    lab.configure("b", "name = \"c\"", "name = \"b\"");
    issue(lab, &ours, "b", Validity::days(DAYS));
    lab.start_agent("b");
}

/// Makes a certificate for the holder `name`, and puts it in place of host `b`'s.
fn issue(lab: &TestLab, authority_directory: &Path, name: &str, validity: Validity) {
    let out = Some(lab.directory("b").join("pki"));
    let options = IssueOptions { validity, out, overwrite: true };
    authority::issue_host(authority_directory, name, &options).unwrap();
}
