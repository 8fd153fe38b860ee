//! Interrupted copies that are kept.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;

use drainpipe_engine::storage::{CopyReason, DiskCopy, DiskImage, DiskName, KeptPart};

use super::*;
use crate::incoming::disks;
use crate::store::journal::LeftFile;
use drainpipe_api_types::LeftDisk;

/// The migration after the one that was interrupted.
const NEXT: &str = "22222222-2222-4222-8222-222222222222";

/// The one after that.
const LAST: &str = "33333333-3333-4333-8333-333333333333";

const DISK_BYTES: u64 = 1 << 20;

/// The place of the VM's disk.
fn place(host: &TestHost) -> PathBuf {
    let directory = host.config().vms.directories[0].clone();
    fs::create_dir_all(&directory).unwrap();
    directory.join("web.img")
}

fn kept_at(host: &TestHost, migration: &str) -> PathBuf {
    VmFiles::kept_path(place(host).to_str().unwrap(), migration).into()
}

fn request(host: &TestHost, life: &Life, id: &str) -> IncomingRequest {
    let to = place(host).to_str().unwrap().to_owned();
    let mut definition = serde_json::to_value(definition("web")).unwrap();
    definition["disk"] = serde_json::json!([{ "path": to, "format": "raw" }]);
    let definition: VmSpec = serde_json::from_value(definition).unwrap();
    let copy = DiskCopy {
        disk: DiskName::at(0).unwrap(),
        from: "/srv/web.img".into(),
        to,
        image: DiskImage::Raw,
        size_bytes: DISK_BYTES,
        allocated_bytes: DISK_BYTES,
        why: CopyReason::AskedFor,
        is_flattened: false,
        from_device: None,
    };
    IncomingRequest {
        id: id.into(),
        spec: definition.resolve(life.parts.vms.facts()).unwrap(),
        definition,
        may_wait: false,
        cores_taken: None,
        disks: vec![copy],
        release: None,
    }
}

/// Steps 2 and 3 of a copy; some of the disk arrives, unless nothing of it can.
fn begins(host: &TestHost, life: &Life, id: &str, source: &str, comes: Option<&[u8]>) {
    let (request, incoming) = (request(host, life, id), &life.parts.incoming);
    let copy = request.disks[0].clone();
    life.block_on(async {
        permit(incoming, source, request).await.unwrap();
        disks::make(incoming, id).await.unwrap();
    });
    if let Some(content) = comes {
        life.parts.journal.disk_opens(id, &copy.to, &KeptPart::of(&copy)).unwrap();
        let file = fs::OpenOptions::new().write(true).open(place(host)).unwrap();
        file.write_all_at(content, 0).unwrap();
    }
}

fn is_given_up(life: &Life, id: &str) {
    life.block_on(discard(&life.parts.incoming, id)).unwrap();
}

fn left(life: &Life) -> Vec<String> {
    disks::left(&life.parts.incoming).unwrap().into_iter().map(|disk| disk.path).collect()
}

#[test]
fn the_next_copy_goes_on_from_it() {
    let host = TestHost::new();
    let life = host.start();
    begins(&host, &life, ID, "source", Some(b"some of it"));
    is_given_up(&life, ID);
    let kept = kept_at(&host, ID);
    assert!(!place(&host).exists() && kept.exists());
    assert_eq!(left(&life), [kept.to_str().unwrap()]);
    drop(life);
    let life = host.start();
    begins(&host, &life, NEXT, "source", None);
    assert!(!kept.exists() && fs::read(place(&host)).unwrap().starts_with(b"some of it"));
    assert_eq!(left(&life), [""; 0]);
    // The same if the copy comes no further.
    drop(life);
    let life = host.start();
    is_given_up(&life, NEXT);
    assert_eq!(left(&life), [kept_at(&host, NEXT).to_str().unwrap()]);
    assert!(fs::read(kept_at(&host, NEXT)).unwrap().starts_with(b"some of it"));
}

#[test]
fn a_disk_whose_vm_comes_back_is_gone_on_from() {
    let host = TestHost::new();
    let life = host.start();
    let copy = request(&host, &life, NEXT).disks[0].clone();
    let left_path = VmFiles::left_path(&copy.to, ID);
    let leaves = |size_bytes: u64| {
        fs::write(place(&host), "its disk").unwrap();
        fs::OpenOptions::new().write(true).open(place(&host)).unwrap().set_len(size_bytes).unwrap();
        let files = &life.parts.incoming.files;
        let disk = life.block_on(files.identify(&copy.to)).unwrap();
        assert!(life.block_on(files.rename_left(&disk, &left_path, vec![])).unwrap());
        let left = LeftDisk {
            path: left_path.clone(),
            was: copy.to.clone(),
            vm: "web".into(),
            target: "source".into(),
            left_at: "2026-11-29T11:00:00Z".into(),
            kept_until: None,
            is_device: false,
        };
        let part = KeptPart::of_source(&copy);
        life.parts.journal.disk_left(&LeftFile { disk: left, file: disk.file, part, until_s: None }).unwrap();
    };
    let stayed = Path::new(&left_path);
    // Somebody has changed its size.
    leaves(DISK_BYTES + 512);
    begins(&host, &life, NEXT, "source", None);
    assert!(stayed.exists() && !fs::read(place(&host)).unwrap().starts_with(b"its disk"));
    is_given_up(&life, NEXT);
    fs::remove_file(stayed).unwrap();

    leaves(DISK_BYTES);
    assert!(!place(&host).exists() && stayed.exists());
    begins(&host, &life, LAST, "source", None);
    assert!(!stayed.exists() && fs::read(place(&host)).unwrap().starts_with(b"its disk"));
    assert_eq!(left(&life), [""; 0]);
    is_given_up(&life, LAST);
    assert_eq!(left(&life), [kept_at(&host, LAST).to_str().unwrap()], "as a copy that was interrupted");
}

#[test]
fn what_never_came_is_not_kept() {
    let host = TestHost::new();
    let life = host.start();
    begins(&host, &life, ID, "source", None);
    is_given_up(&life, ID);
    assert!(!place(&host).exists() && !kept_at(&host, ID).exists());
    assert_eq!(left(&life), [""; 0]);
}

#[test]
fn a_copy_from_another_host_or_of_another_size_begins_anew() {
    let host = TestHost::new();
    let life = host.start();
    begins(&host, &life, ID, "source", Some(b"some of it"));
    is_given_up(&life, ID);
    let copy = |size_bytes| DiskCopy { size_bytes, ..request(&host, &life, NEXT).disks[0].clone() };
    let there = |source, copy: &DiskCopy| {
        life.block_on(disks::kept_bytes(&life.parts.incoming, ("web", source), copy)).unwrap()
    };
    assert!(there("source", &copy(DISK_BYTES)) > 0);
    assert_eq!(there("other", &copy(DISK_BYTES)), 0);
    assert_eq!(there("source", &copy(DISK_BYTES + 512)), 0);
}

#[test]
fn it_goes_when_its_time_is_over_and_another_file_in_its_place_stays() {
    for is_another in [false, true] {
        let host = TestHost::new();
        let life = host.start();
        begins(&host, &life, ID, "source", Some(b"some of it"));
        is_given_up(&life, ID);
        let kept = kept_at(&host, ID);
        if is_another {
            fs::rename(&kept, kept.with_extension("elsewhere")).unwrap();
            fs::write(&kept, "somebody's").unwrap();
        }
        let expire = |hours| {
            let then = jiff::Timestamp::now() + jiff::SignedDuration::from_hours(hours);
            life.block_on(disks::expire(&life.parts.incoming, then)).unwrap();
        };
        expire(23);
        assert!(kept.exists() && left(&life).len() == 1);
        expire(25);
        assert_eq!((kept.exists(), left(&life).len()), (is_another, 0));
    }
}
