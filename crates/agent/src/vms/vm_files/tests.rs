//! Files that may be used, and files that are never opened.

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};

use drainpipe_engine::host::vm_resources::NotAllowed;
use drainpipe_hypervisor::qcow2::fuzzing::header;

use super::*;

/// Extensions of a qcow2 header, by QEMU's documentation.
const BACKING_FORMAT: u32 = 0xe279_2aca;
const DATA_FILE: u32 = 0x4441_5441;

/// The migration for which disks are made.
const ID: &str = "0123456789ab";

/// An allowed directory, and files outside it.
struct Host {
    root: tempfile::TempDir,
    files: VmFiles,
}

impl Host {
    fn new(more: &str) -> Self {
        let root = tempfile::tempdir().unwrap();
        for directory in ["vms/sub", "state", "run", "outside"] {
            fs::create_dir_all(root.path().join(directory)).unwrap();
        }
        fs::write(root.path().join("outside/secret"), "secret").unwrap();
        let at = root.path().display();
        let config = format!(
            "name = \"a\"\nlisten = \"127.0.0.1:1\"\nstate_directory = \"{at}/state\"\nruntime_directory = \"{at}/run\"\n\
             [vms]\ndirectories = [\"{at}/vms\", \"{at}/state\"]\n{more}"
        );
        let config = Config::parse(&config, Path::new("agent.toml")).unwrap();
        Self { files: VmFiles::new(&config), root }
    }

    fn path(&self, path: &str) -> PathBuf {
        self.root.path().join(path)
    }

    async fn make(&self, path: &str) -> Result<FileId, NotMade> {
        let mut made = None;
        let record = |file| {
            made = Some(file);
            Ok(())
        };
        self.files.make(path, ID, (DiskImage::Raw, 1 << 20), record).await?;
        Ok(made.unwrap())
    }

    fn write(&self, path: &str, content: impl AsRef<[u8]>) {
        fs::write(self.path(path), content).unwrap();
    }

    async fn look(&self, path: &str) -> FileAtPath {
        self.files.look(&self.path(path), None).await
    }

    async fn image(&self, path: &str) -> FileAtPath {
        self.files.look(&self.path(path), Some(DiskFormat::Qcow2)).await
    }
}

fn identity(look: &FileAtPath) -> &FileIdentity {
    let FileAtPath::Present(identity) = look else { panic!("{look:?}") };
    identity
}

#[tokio::test]
async fn a_file_is_told_from_its_copy() {
    let host = Host::new("");
    host.write("vms/one", "disk");
    fs::hard_link(host.path("vms/one"), host.path("vms/sub/link")).unwrap();
    fs::copy(host.path("vms/one"), host.path("vms/copy")).unwrap();
    let look = host.look("vms/one").await;
    assert_eq!(look, host.look("vms/sub/link").await);
    assert_eq!((identity(&look).size_bytes, identity(&look).locked), (4, Some(false)));
    assert_ne!(identity(&look).inode, identity(&host.look("vms/copy").await).inode);
}

#[tokio::test]
async fn links_lead_nowhere_else() {
    let host = Host::new("");
    host.write("vms/disk", "disk");
    let link = |to: &str, name: &str| symlink(to, host.path(name)).unwrap();
    link("../disk", "vms/sub/within");
    assert!(matches!(host.look("vms/sub/within").await, FileAtPath::Present(_)));
    link("../outside/secret", "vms/out");
    link("../outside/nothing", "vms/out-to-nothing");
    link("../outside", "vms/directory");
    link("/etc/shadow", "vms/absolute");
    link(&host.path("vms/disk").display().to_string(), "vms/round-about");
    for out in ["vms/out", "vms/out-to-nothing", "vms/directory/secret", "vms/absolute", "vms/round-about"] {
        assert_eq!(host.look(out).await, FileAtPath::NotAllowed(NotAllowed::LeadsOut), "{out}");
    }
}

#[tokio::test]
async fn nothing_else_than_a_disk_is_touched() {
    let host = Host::new("");
    host.write("state/journal.sqlite", "");
    rustix::fs::mknodat(
        rustix::fs::CWD,
        host.path("vms/pipe"),
        rustix::fs::FileType::Fifo,
        rustix::fs::Mode::RUSR,
        0,
    )
    .unwrap();
    for (path, why) in [
        ("state/journal.sqlite", NotAllowed::OfAgent),
        ("vms/pipe", NotAllowed::NoFile),
        ("vms/sub", NotAllowed::NoFile),
        ("outside/secret", NotAllowed::Outside),
        ("outside/nothing", NotAllowed::Outside),
        ("vms/../outside/secret", NotAllowed::Outside),
        ("vms", NotAllowed::Outside),
    ] {
        assert_eq!(host.look(path).await, FileAtPath::NotAllowed(why), "{path}");
    }
    assert_eq!(host.look("vms/nothing").await, FileAtPath::Missing);
    for path in ["/dev/null", "/", "/etc/shadow", "/dev/sda"] {
        let look = host.files.look(Path::new(path), None).await;
        assert_eq!(look, FileAtPath::NotAllowed(NotAllowed::Outside), "{path}");
    }
}

#[tokio::test]
async fn what_is_listed_as_a_device_is_one() {
    let host = Host::new("devices = [\"/dev/null\", \"/dev/fd\", \"/proc/self\"]\n");
    let device = async |path: &str| host.files.look(Path::new(path), None).await;
    assert_eq!(device("/dev/null").await, FileAtPath::NotAllowed(NotAllowed::NoFile), "no block device");
    assert_eq!(device("/dev/zero").await, FileAtPath::NotAllowed(NotAllowed::Outside));
    assert_eq!(device("/proc/self/exe").await, FileAtPath::NotAllowed(NotAllowed::LeadsOut));
}

#[tokio::test]
async fn an_image_reaches_no_further_than_its_directory() {
    let host = Host::new("");
    host.write("vms/base", header(3, None, &[]));
    let secret = host.path("outside/secret").display().to_string();
    let (qcow2, raw) = ((BACKING_FORMAT, "qcow2"), (BACKING_FORMAT, "raw"));
    let allowed = host.path("vms/base").display().to_string();
    for (name, image) in [
        ("relative", header(3, Some("base"), &[qcow2])),
        ("absolute", header(3, Some(&allowed), &[qcow2])),
        ("on-each-other", header(2, Some("relative"), &[qcow2])),
        ("raw-below", header(3, Some("base"), &[raw])),
        ("apart", header(3, None, &[(DATA_FILE, "base")])),
    ] {
        host.write(&format!("vms/{name}"), image);
        let look = host.image(&format!("vms/{name}")).await;
        assert!(matches!(look, FileAtPath::Present(_)), "{name}: {look:?}");
    }
    host.write("vms/bad", header(3, Some(&secret), &[raw]));
    symlink("../outside/secret", host.path("vms/link")).unwrap();
    let protocol = format!("file:{secret}");
    for (image, names) in [
        (header(3, Some(&secret), &[raw]), secret.as_str()),
        (header(3, Some("../outside/secret"), &[raw]), "../outside/secret"),
        (header(3, Some("link"), &[raw]), "link"),
        (header(3, Some(&protocol), &[raw]), protocol.as_str()),
        (header(3, Some("nbd://h/x"), &[raw]), "nbd://h/x"),
        (header(3, None, &[(DATA_FILE, &secret)]), secret.as_str()),
        (header(3, Some("bad"), &[qcow2]), secret.as_str()),
    ] {
        host.write("vms/image", image);
        assert_eq!(host.image("vms/image").await, FileAtPath::NotAllowed(NotAllowed::names(names)));
    }
    for image in [
        header(3, Some("base"), &[]),
        header(3, Some("base"), &[(BACKING_FORMAT, "vmdk")]),
        header(3, Some("image"), &[qcow2]),
        header(3, Some("nothing"), &[qcow2]),
        vec![0; 512],
        vec![],
    ] {
        host.write("vms/image", image);
        let look = host.image("vms/image").await;
        assert!(matches!(look, FileAtPath::NotAllowed(NotAllowed::Unclear { .. })), "{look:?}");
    }
}

/// A guest may write anything to its disk.
#[tokio::test]
async fn a_raw_disk_is_raw_whatever_is_on_it() {
    let host = Host::new("");
    host.write("vms/disk", header(3, Some("/etc/shadow"), &[(BACKING_FORMAT, "raw")]));
    let look = host.files.look(&host.path("vms/disk"), Some(DiskFormat::Raw)).await;
    assert!(matches!(look, FileAtPath::Present(_)), "{look:?}");
    assert_eq!(host.image("vms/disk").await, FileAtPath::NotAllowed(NotAllowed::names("/etc/shadow")));
}

#[tokio::test]
async fn many_disks_are_looked_at_at_once() {
    let host = Host::new("");
    host.write("vms/disk", "disk");
    let looks = join_all((0..4 * LOOKS_MAX).map(|_| host.look("vms/disk"))).await;
    assert!(looks.iter().all(|look| matches!(look, FileAtPath::Present(_))), "{looks:?}");
    assert!(lock(&host.files.since).is_empty());
    let long_ago = Instant::now().checked_sub(LOOK_DEADLINE * 2).unwrap();
    lock(&host.files.since).insert(host.path("vms/disk"), long_ago);
    assert_eq!(host.look("vms/disk").await, FileAtPath::Silent, "a look has not returned");
}

fn runs<T>(what: impl Future<Output = T>) -> T {
    tokio::runtime::Runtime::new().unwrap().block_on(what)
}

#[test]
fn a_disk_is_made_where_nothing_is_and_removed_only_while_it_is_that_one() {
    let host = Host::new("");
    let path = host.path("vms/sub/disk");
    let text = path.to_str().unwrap();
    let file = runs(host.make(text)).unwrap();
    assert_eq!(fs::metadata(&path).unwrap().len(), 1 << 20);
    let taken = runs(host.make(text)).unwrap_err().problem;
    assert!(taken.to_string().contains("it exists already"), "{taken}");
    let disk = DiskFile { path: text.into(), file: Some(file) };
    fs::rename(&path, host.path("vms/kept")).unwrap();
    fs::write(&path, "another one").unwrap();
    runs(host.files.remove(&disk, ID, vec![])).unwrap();
    assert!(path.exists(), "it is not the one that was made");
    fs::rename(host.path("vms/kept"), &path).unwrap();
    runs(host.files.remove(&disk, ID, vec![])).unwrap();
    assert!(!path.exists());
    runs(host.files.remove(&disk, ID, vec![])).unwrap();
}

#[test]
fn a_disk_has_its_name_when_it_is_recorded_which_file_it_is() {
    let host = Host::new("");
    let path = host.path("vms/disk");
    let text = path.to_str().unwrap();
    let unplaced = host.path("vms/disk.new-01234567");
    let is_unplaced = || !path.exists() && unplaced.exists();
    let record = |_| {
        assert!(is_unplaced());
        Err(Problem::failed("its disk is full"))
    };
    assert!(runs(host.files.make(text, ID, (DiskImage::Raw, 1 << 20), record)).unwrap_err().may_come);
    assert!(is_unplaced());
    runs(host.files.remove(&DiskFile { path: text.into(), file: None }, "another", vec![])).unwrap();
    assert!(is_unplaced());
    runs(host.files.remove(&DiskFile { path: text.into(), file: None }, ID, vec![])).unwrap();
    assert!(!unplaced.exists());

    // Somebody else has taken the name meanwhile.
    let record = |_| {
        fs::write(&path, "another one").unwrap();
        Ok(())
    };
    let taken = runs(host.files.make(text, ID, (DiskImage::Raw, 1 << 20), record)).unwrap_err();
    assert!(taken.problem.to_string().contains("it exists already"), "{}", taken.problem);
    assert_eq!(fs::read(&path).unwrap(), b"another one");
    assert!(!unplaced.exists());
}

#[test]
fn nothing_is_made_renamed_or_removed_outside_of_what_vms_may_use() {
    let host = Host::new("");
    symlink(host.path("outside"), host.path("vms/link")).unwrap();
    for path in ["outside/disk", "vms/link/disk", "state/disk/../../outside/disk"] {
        let path = host.path(path);
        let text = path.to_str().unwrap();
        assert!(runs(host.make(text)).is_err(), "{text}");
    }
    let secret = host.path("vms/link/secret");
    let text = secret.to_str().unwrap();
    let outside = fs::metadata(host.path("outside/secret")).unwrap();
    let file = FileId { device: outside.dev(), inode: outside.ino(), born_ns: 0 };
    let disk = DiskFile { path: text.into(), file: Some(file) };
    assert!(runs(host.files.identify(text)).is_err());
    assert!(runs(host.files.remove_left(text, file, vec![])).is_err());
    assert!(runs(host.files.rename_left(&disk, "secret.migrated", vec![])).is_err());
    assert!(host.path("outside/secret").exists());
}

#[test]
fn a_disk_that_stays_behind_has_another_name() {
    let host = Host::new("");
    let path = host.path("vms/disk");
    let text = path.to_str().unwrap();
    fs::write(&path, "content").unwrap();
    let disk = runs(host.files.identify(text)).unwrap();
    let file = disk.file.unwrap();
    let left = VmFiles::left_path(text, "0123456789ab");
    assert_eq!(left, format!("{text}.migrated-01234567"));
    let used = runs(host.files.rename_left(&disk, &left, vec![path.clone()])).unwrap_err();
    assert!(used.to_string().contains("a VM here uses it"), "{used}");
    assert!(runs(host.files.rename_left(&disk, &left, vec![])).unwrap());
    fs::write(&path, "another one").unwrap();
    assert!(runs(host.files.rename_left(&disk, &left, vec![])).unwrap(), "it is done already");
    assert_eq!(fs::read(&left).unwrap(), b"content");
    let at = PathBuf::from(&left);
    assert!(runs(host.files.remove_left(&left, file, vec![at.clone()])).is_err() && at.exists());
    assert!(runs(host.files.remove_left(&left, file, vec![])).unwrap() && !at.exists());
    assert!(!runs(host.files.rename_left(&disk, &left, vec![])).unwrap(), "another one has its place");
    assert_eq!(fs::read(&path).unwrap(), b"another one");
}

#[test]
fn a_disk_is_not_removed_as_an_earlier_one_with_its_number_nor_where_a_vm_names_it() {
    let host = Host::new("");
    let path = host.path("vms/disk");
    let text = path.to_str().unwrap();
    let file = runs(host.make(text)).unwrap();
    let disk = |file| DiskFile { path: text.into(), file: Some(file) };
    runs(host.files.remove(&disk(FileId { born_ns: file.born_ns - 1, ..file }), ID, vec![])).unwrap();
    symlink("disk", host.path("vms/link")).unwrap();
    runs(host.files.remove(&disk(file), ID, vec![host.path("vms/link")])).unwrap();
    assert!(path.exists());
    runs(host.files.remove(&disk(file), ID, vec![host.path("vms/other")])).unwrap();
    assert!(!path.exists());
}
