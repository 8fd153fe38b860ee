//! The permissions of callers, over TLS.

use std::fs;
use std::path::Path;

use crate::guest::Guest;
use crate::program::{DRAINPIPE, Output, REFUSED};
use crate::support::TestLab;

pub(super) fn who_may_do_what_over_tls() {
    let lab = TestLab::fast();
    let guest = lab.start_guest("web", 160, "");
    a_host_manages_no_vms_of_another(&lab, &guest);
    an_operator_works_over_tls(&lab);
    guest.assert_intact();
}

fn an_operator_works_over_tls(lab: &TestLab) {
    let authority = lab.directory("client").join("pki");
    let authority = authority.to_str().unwrap();
    let nobody = lab.files().join("nobody");
    over_tls(lab, &nobody, &["vms"]).refused(REFUSED, &["nobody/ca.pem does not exist", "drainpipe pki"]);

    lab.drainpipe(&["pki", "operator", "ann", "--directory", authority]).done();
    lab.drainpipe(&["pki", "operator", "ann", "--directory", authority])
        .refused(REFUSED, &["operator.pem", "--force"]);
    let ann = Path::new(authority).join("operators/ann");
    let hosts = over_tls(lab, &ann, &["hosts"]).done();
    assert!(hosts.contains("10.77.0.12:7420"), "{hosts}");
    for target in ["b", "a"] {
        let output = over_tls(lab, &ann, &["migrate", "web", target]).done();
        assert!(output.contains(&format!("web runs on {target}")), "{output}");
        lab.assert_runs_on("web", target);
    }

    let other_authority = lab.files().join("pki");
    let other_authority = other_authority.to_str().unwrap();
    lab.drainpipe(&["pki", "init", "--directory", other_authority]).done();
    lab.drainpipe(&["pki", "operator", "eve", "--directory", other_authority]).done();
    let eve = over_tls(lab, &Path::new(other_authority).join("operators/eve"), &["vms"]);
    eve.refused(1, &["cannot be reached", "another authority"]);
}

fn a_host_manages_no_vms_of_another(lab: &TestLab, guest: &Guest) {
    // The files of host `b`, used by somebody who stole them.
    let stolen = lab.files().join("stolen");
    fs::create_dir(&stolen).unwrap();
    for (from, to) in [("host.pem", "operator.pem"), ("host.key", "operator.key"), ("ca.pem", "ca.pem")] {
        fs::copy(lab.directory("b").join("pki").join(from), stolen.join(to)).unwrap();
    }
    let cure = "drainpipe pki operator";
    over_tls(lab, &stolen, &["vm", "stop", "--force", "web"])
        .refused(REFUSED, &["the agent of host b may not manage the VMs of this host", cure]);
    let file = lab.write("more.toml", &guest.specification(160, "").replace("\"web\"", "\"more\""));
    over_tls(lab, &stolen, &["vm", "create", &file]).refused(REFUSED, &["host b may not manage", cure]);
    lab.assert_runs_on("web", "a");
    guest.assert_answers();
    // The guide says that it can do this.
    over_tls(lab, &stolen, &["migrate", "web", "a"])
        .refused(REFUSED, &["the agent of host b may not move a VM from here to a", cure]);
    over_tls(lab, &stolen, &["migrate", "web", "b"]).done();
    lab.assert_runs_on("web", "b");
    lab.migrate("web", "a", &[]);
}

/// Asks the agent of host `a` from the client, with the files of this directory.
#[track_caller]
pub(crate) fn over_tls(lab: &TestLab, identity: &Path, arguments: &[&str]) -> Output {
    let agent = format!("a@{}", lab.agent_address("a"));
    let who = ["--agent", &agent, "--identity", identity.to_str().unwrap()];
    lab.exec("client", &[&[DRAINPIPE], arguments, &who].concat())
}
