//! The files that `drainpipe pki` writes, and that an agent accepts.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::fs;
use std::num::NonZeroU32;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;

use drainpipe_identity::authority::{
    self, AuthorityError, InitOptions, IssueOptions, Issued, init, issue_host, issue_operator,
};
use drainpipe_identity::{FileError, Identity, LoadError, Peer, Validity};
use jiff::{SignedDuration, Timestamp};
use tempfile::TempDir;

fn days(days: u32) -> IssueOptions {
    IssueOptions::valid_days(NonZeroU32::new(days).unwrap())
}

fn fleet() -> TempDir {
    let directory = tempfile::tempdir().unwrap();
    init(directory.path(), &InitOptions::default()).unwrap();
    directory
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).unwrap().permissions().mode() & 0o777
}

fn load(issued: &Issued) -> Result<Identity, LoadError> {
    Identity::load(&issued.certificate, &issued.key, &issued.authority)
}

fn between(from_hours: i64, to_hours: i64) -> IssueOptions {
    let now = Timestamp::now();
    IssueOptions {
        validity: Validity {
            not_before: now + SignedDuration::from_hours(from_hours),
            not_after: now + SignedDuration::from_hours(to_hours),
        },
        out: None,
        overwrite: false,
    }
}

#[test]
fn keys_are_private_and_files_are_where_they_are_documented() {
    let parent = tempfile::tempdir().unwrap();
    let pki = parent.path().join("pki");
    init(&pki, &InitOptions::default()).unwrap();
    issue_host(&pki, "a", &days(30)).unwrap();
    issue_operator(&pki, "alice", &days(30)).unwrap();
    for directory in ["", "hosts/a", "operators/alice"] {
        assert_eq!(mode(&pki.join(directory)), 0o700, "{directory}");
    }
    for key in ["ca.key", "hosts/a/host.key", "operators/alice/operator.key"] {
        assert_eq!(mode(&pki.join(key)), 0o600, "{key}");
    }
    for public in ["hosts/a/host.pem", "operators/alice/operator.pem"] {
        assert_eq!(mode(&pki.join(public)), 0o644, "{public}");
    }
    let authority = fs::read(pki.join("ca.pem")).unwrap();
    for copy in ["hosts/a/ca.pem", "operators/alice/ca.pem"] {
        assert_eq!(fs::read(pki.join(copy)).unwrap(), authority, "{copy}");
    }
}

#[test]
fn what_is_issued_loads() {
    let fleet = fleet();
    let issued = issue_host(fleet.path(), "a", &days(30)).unwrap();
    let identity = load(&issued).unwrap();
    assert_eq!(*identity.holder(), Peer::Host("a".into()));
    assert_eq!(identity.not_after(), issued.not_after);
    let lifetime = identity.not_after().duration_since(Timestamp::now());
    assert_eq!(lifetime.as_hours(), 30 * 24 - 1, "30 days, less the moment since");
    let lifetime = identity.authority_not_after().duration_since(Timestamp::now());
    assert!(lifetime.as_hours() > 9 * 365 * 24, "ten years, unless one says otherwise: {lifetime}");
    assert_eq!(format!("{identity:?}"), "Identity(host a)");
}

#[test]
fn one_directory_may_hold_a_host_and_an_operator() {
    let fleet = fleet();
    let out = tempfile::tempdir().unwrap();
    let options = IssueOptions { out: Some(out.path().to_owned()), ..days(30) };
    let host = issue_host(fleet.path(), "a", &options).unwrap();
    let operator = issue_operator(fleet.path(), "alice", &options).unwrap();
    assert_eq!(host.certificate, out.path().join("host.pem"));
    assert_eq!(host.authority, operator.authority);
    assert!(load(&host).is_ok() && load(&operator).is_ok());
}

#[test]
fn nothing_is_overwritten_unless_told() {
    let fleet = fleet();
    let issued = issue_host(fleet.path(), "a", &days(30)).unwrap();
    let key = fs::read(&issued.key).unwrap();

    let again = issue_host(fleet.path(), "a", &days(30)).unwrap_err();
    assert!(matches!(again, AuthorityError::File(FileError::Exists(_))), "{again}");
    assert!(again.to_string().contains("--force"), "{again}");
    let again = init(fleet.path(), &InitOptions::default()).unwrap_err();
    assert!(matches!(again, AuthorityError::File(FileError::Exists(_))), "{again}");
    assert_eq!(fs::read(&issued.key).unwrap(), key);

    let forced = IssueOptions { overwrite: true, ..days(30) };
    issue_host(fleet.path(), "a", &forced).unwrap();
    assert_ne!(fs::read(&issued.key).unwrap(), key);
    assert!(load(&issued).is_ok());
}

#[test]
fn another_authority_in_the_directory_is_not_overwritten() {
    let (ours, theirs) = (fleet(), fleet());
    let out = tempfile::tempdir().unwrap();
    let options = IssueOptions { out: Some(out.path().to_owned()), ..days(30) };
    issue_operator(theirs.path(), "alice", &options).unwrap();
    let error = issue_host(ours.path(), "a", &options).unwrap_err();
    assert!(matches!(error, AuthorityError::File(FileError::Exists(_))), "{error}");
    let mut left: Vec<_> =
        fs::read_dir(out.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    left.sort();
    assert_eq!(left, ["ca.pem", "operator.key", "operator.pem"]);
}

#[test]
fn a_bad_name_leaves_nothing_behind() {
    let fleet = fleet();
    for name in ["", "..", "a/b", "A"] {
        let error = issue_host(fleet.path(), name, &days(30)).unwrap_err();
        assert!(matches!(error, AuthorityError::Name(_)), "{name}: {error}");
    }
    assert!(!fleet.path().join("hosts").exists());
}

#[test]
fn the_longest_name_can_be_issued() {
    let fleet = fleet();
    let name = format!("{0}.{0}.{0}.{1}", "a".repeat(63), "b".repeat(61));
    let issued = issue_host(fleet.path(), &name, &days(30)).unwrap();
    assert_eq!(load(&issued).unwrap().holder().name(), name);
}

#[test]
fn a_certificate_does_not_outlive_its_authority() {
    let fleet = fleet();
    let error = issue_host(fleet.path(), "a", &days(4000)).unwrap_err();
    assert!(matches!(error, AuthorityError::OutlivesAuthority { .. }), "{error}");
    let error = issue_host(fleet.path(), "a", &days(u32::MAX)).unwrap_err();
    assert!(matches!(error, AuthorityError::OutlivesAuthority { .. }), "{error}");
    let error = issue_host(fleet.path(), "a", &between(2, 1)).unwrap_err();
    assert!(matches!(error, AuthorityError::EmptyValidity(..)), "{error}");
}

#[test]
fn without_an_authority_nothing_is_issued() {
    let empty = tempfile::tempdir().unwrap();
    let error = issue_host(empty.path(), "a", &days(30)).unwrap_err();
    assert!(error.to_string().contains("drainpipe pki init"), "{error}");
}

#[test]
fn an_authority_with_the_key_of_another_is_refused() {
    let (ours, theirs) = (fleet(), fleet());
    fs::copy(theirs.path().join("ca.key"), ours.path().join("ca.key")).unwrap();
    let error = issue_host(ours.path(), "a", &days(30)).unwrap_err();
    assert!(matches!(error, AuthorityError::KeyMismatch { .. }), "{error}");
}

#[test]
fn an_open_directory_is_refused() {
    let directory = tempfile::tempdir().unwrap();
    fs::set_permissions(directory.path(), fs::Permissions::from_mode(0o777)).unwrap();
    let error = init(directory.path(), &InitOptions::default()).unwrap_err();
    assert!(error.to_string().contains("chmod go-w"), "{error}");
    assert_eq!(fs::read_dir(directory.path()).unwrap().count(), 0);
}

#[test]
fn a_missing_file_is_named() {
    let fleet = fleet();
    for missing in ["host.pem", "host.key", "ca.pem"] {
        let name = missing.replace('.', "-");
        let issued = issue_host(fleet.path(), &name, &days(30)).unwrap();
        let path = issued.certificate.with_file_name(missing);
        fs::remove_file(&path).unwrap();
        let error = load(&issued).unwrap_err();
        assert!(matches!(error, LoadError::File(FileError::Missing { .. })), "{error}");
        assert!(error.to_string().contains(path.to_str().unwrap()), "{error}");
    }
}

#[test]
fn a_key_that_others_can_read_is_refused_with_the_remedy() {
    let fleet = fleet();
    let issued = issue_host(fleet.path(), "a", &days(30)).unwrap();
    for mode in [0o640, 0o604, 0o620] {
        fs::set_permissions(&issued.key, fs::Permissions::from_mode(mode)).unwrap();
        let error = load(&issued).unwrap_err().to_string();
        assert!(error.contains(&format!("chmod 600 {}", issued.key.display())), "{error}");
    }
}

#[test]
fn a_file_with_something_else_is_named() {
    let fleet = fleet();
    for (file, contents) in [
        ("host.pem", "nonsense".to_owned()),
        ("host.key", "nonsense".to_owned()),
        ("ca.pem", String::new()),
        ("host.pem", "\u{fe}".repeat(2 << 20)),
        ("host.pem", pem_of(b"not DER")),
        ("ca.pem", pem_of(b"not DER")),
    ] {
        let mut options = days(30);
        options.overwrite = true;
        let issued = issue_host(fleet.path(), "a", &options).unwrap();
        let path = issued.certificate.with_file_name(file);
        fs::write(&path, contents).unwrap();
        let error = load(&issued).unwrap_err().to_string();
        assert!(error.contains(path.to_str().unwrap()), "{error}");
        fs::remove_file(path).unwrap();
    }
}

fn pem_of(der: &[u8]) -> String {
    // "not DER" in base 64, so that only the content is wrong.
    assert_eq!(der, b"not DER");
    "-----BEGIN CERTIFICATE-----\nbm90IERFUg==\n-----END CERTIFICATE-----\n".to_owned()
}

#[test]
fn a_directory_in_place_of_a_file_is_refused() {
    let fleet = fleet();
    let mut issued = issue_host(fleet.path(), "a", &days(30)).unwrap();
    issued.certificate = fleet.path().to_owned();
    let error = load(&issued).unwrap_err();
    assert!(error.to_string().contains("not a regular file"), "{error}");
}

#[test]
fn files_that_do_not_belong_together_are_refused() {
    let (ours, theirs) = (fleet(), fleet());
    let a = issue_host(ours.path(), "a", &days(30)).unwrap();
    let b = issue_host(ours.path(), "b", &days(30)).unwrap();
    let error = Identity::load(&a.certificate, &b.key, &a.authority).unwrap_err();
    assert!(matches!(error, LoadError::KeyMismatch { .. }), "{error}");
    let other = theirs.path().join("ca.pem");
    let error = Identity::load(&a.certificate, &a.key, &other).unwrap_err();
    assert!(matches!(error, LoadError::OtherAuthority { .. }), "{error}");
}

#[test]
fn a_certificate_out_of_its_time_is_refused_with_the_date() {
    let fleet = fleet();
    let late = issue_host(fleet.path(), "late", &between(-2, -1)).unwrap();
    let error = load(&late).unwrap_err();
    assert!(matches!(error, LoadError::Expired { .. }), "{error}");
    assert!(error.to_string().contains(&format!("expired at {}", late.not_after)), "{error}");

    let early = issue_host(fleet.path(), "early", &between(1, 2)).unwrap();
    let error = load(&early).unwrap_err();
    assert!(matches!(error, LoadError::NotYetValid { .. }), "{error}");
}

#[test]
fn an_expired_authority_is_refused() {
    let fleet = tempfile::tempdir().unwrap();
    let expired = between(-3, -1).validity;
    let options = InitOptions { validity: expired, overwrite: false };
    init(fleet.path(), &options).unwrap();
    let issued = authority::issue_host(fleet.path(), "a", &between(-2, -1)).unwrap();
    let error = load(&issued).unwrap_err();
    assert!(matches!(&error, LoadError::Expired { path, .. } if *path == issued.authority), "{error}");
}

#[test]
fn the_authority_itself_is_nobody() {
    let fleet = fleet();
    let path = |name| fleet.path().join(name);
    let error = Identity::load(&path("ca.pem"), &path("ca.key"), &path("ca.pem")).unwrap_err();
    assert!(matches!(error, LoadError::Unusable { .. } | LoadError::Holder { .. }), "{error}");
}
