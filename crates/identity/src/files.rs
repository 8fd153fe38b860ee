//! Certificates and keys as files: read with care, written whole or not at all.

use std::fs::{self, File, Metadata};
use std::io::{self, Read, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt};
use std::path::{Path, PathBuf};

use rustls::pki_types::pem::PemObject;
use rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tempfile::NamedTempFile;
use zeroize::Zeroizing;

/// Longest file that is read: a certificate with its key is about 1 KiB.
const FILE_BYTES_MAX: u64 = 1 << 20;
/// Permission bits of everybody but the owner.
const GROUP_AND_OTHERS: u32 = 0o077;
/// Permission bits by which somebody but the owner may replace what is in a directory.
const WRITABLE_BY_OTHERS: u32 = 0o022;

/// What is wrong with a file of a certificate or a key.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// Not there.
    #[error("{what} {path} does not exist: make it with `drainpipe pki`, or correct the path")]
    Missing {
        /// What the file should hold.
        what: &'static str,
        /// The file.
        path: PathBuf,
    },
    /// There, but cannot be read.
    #[error("{what} {path} cannot be read: {source}")]
    Unreadable {
        /// What the file should hold.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// A private key that is not private.
    #[error(
        "private key {path} can be read or changed by others than its owner (mode {mode:04o}): \
         run `chmod 600 {path}`, and issue a new key if it may have been read"
    )]
    NotPrivate {
        /// The key.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Something that is believed, and that others may write to.
    #[error(
        "{what} {path} can be changed by others than root and its owner (mode {mode:04o}): run `chmod go-w \
        {path}`, and check that its content is still right"
    )]
    Changeable {
        /// What it is.
        what: &'static str,
        /// The file or directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// A directory in which others may put a key of theirs.
    #[error(
        "directory {path} can be changed by others than its owner (mode {mode:04o}): run `chmod go-w {path}`"
    )]
    DirectoryNotPrivate {
        /// The directory.
        path: PathBuf,
        /// Its permission bits.
        mode: u32,
    },
    /// Not what it should be.
    #[error("{path} is not a {what} in PEM format: {reason}")]
    NotPem {
        /// What the file should hold.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the parser says.
        reason: String,
    },
    /// Would be overwritten.
    #[error("{0} exists already and was left as it is: pass --force to replace it")]
    Exists(PathBuf),
    /// Cannot be written.
    #[error("{path} cannot be written: {source}")]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

/// Refuses a file or directory which everybody may write to, or a group that is neither root's nor this process's.
/// Nobody may write to one that does not exist.
pub fn check_unchangeable(path: &Path, what: &'static str) -> Result<(), FileError> {
    match fs::metadata(path) {
        Ok(metadata) => check_metadata(path, what, &metadata),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(FileError::Unreadable { what, path: path.to_owned(), source }),
    }
}

fn check_metadata(path: &Path, what: &'static str, metadata: &Metadata) -> Result<(), FileError> {
    let mode = metadata.permissions().mode() & 0o7777;
    let by_everybody = mode & 0o002 != 0;
    let by_a_group = mode & 0o020 != 0 && metadata.gid() != 0 && Some(metadata.gid()) != own_group();
    if by_everybody || by_a_group {
        return Err(FileError::Changeable { what, path: path.to_owned(), mode });
    }
    Ok(())
}

fn own_group() -> Option<u32> {
    fs::metadata("/proc/self").ok().map(|metadata| metadata.gid())
}

/// The text of a file that is no secret.
pub(crate) fn read_text(path: &Path, what: &'static str) -> Result<String, FileError> {
    let pem = read_checked(path, what)?;
    let text = str::from_utf8(&pem).map_err(|error| not_pem(path, what, &error))?;
    Ok(text.to_owned())
}

fn read_checked(path: &Path, what: &'static str) -> Result<Zeroizing<Vec<u8>>, FileError> {
    let (file, _) = open(path, what)?;
    check_unchangeable(path, what)?;
    read_limited(file, path, what)
}

/// The certificates in a PEM file, at least one. A key may stand beside them.
pub(crate) fn read_certificates(
    path: &Path,
    what: &'static str,
) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let pem = read_checked(path, what)?;
    let text = str::from_utf8(&pem).map_err(|error| not_pem(path, what, &error))?;
    parse_certificates(path, what, text)
}

/// The certificates in the text of the PEM file at `path`, at least one.
pub(crate) fn parse_certificates(
    path: &Path,
    what: &'static str,
    pem: &str,
) -> Result<Vec<CertificateDer<'static>>, FileError> {
    let certificates: Vec<_> = CertificateDer::pem_slice_iter(pem.as_bytes())
        .collect::<Result<_, _>>()
        .map_err(|error| not_pem(path, what, &error))?;
    if certificates.is_empty() {
        return Err(not_pem(path, what, &"it holds no certificate"));
    }
    Ok(certificates)
}

/// The private key in a PEM file that only its owner can read.
pub(crate) fn read_private_key(path: &Path) -> Result<PrivateKeyDer<'static>, FileError> {
    let what = "private key";
    let (file, mode) = open(path, what)?;
    if mode & GROUP_AND_OTHERS != 0 {
        return Err(FileError::NotPrivate { path: path.to_owned(), mode });
    }
    let pem = read_limited(file, path, what)?;
    PrivateKeyDer::from_pem_slice(&pem).map_err(|error| not_pem(path, what, &error))
}

/// The mode is that of the opened file, so that nobody can exchange it in between.
fn open(path: &Path, what: &'static str) -> Result<(File, u32), FileError> {
    let failed = |source: io::Error| match source.kind() {
        io::ErrorKind::NotFound => FileError::Missing { what, path: path.to_owned() },
        _ => FileError::Unreadable { what, path: path.to_owned(), source },
    };
    let file = File::open(path).map_err(failed)?;
    let metadata = file.metadata().map_err(failed)?;
    if !metadata.is_file() {
        return Err(failed(io::Error::other("it is not a regular file")));
    }
    Ok((file, metadata.permissions().mode() & 0o7777))
}

fn read_limited(file: File, path: &Path, what: &'static str) -> Result<Zeroizing<Vec<u8>>, FileError> {
    let mut contents = Zeroizing::new(Vec::new());
    let read = file
        .take(FILE_BYTES_MAX + 1)
        .read_to_end(&mut contents)
        .map_err(|source| FileError::Unreadable { what, path: path.to_owned(), source })?;
    if read as u64 > FILE_BYTES_MAX {
        return Err(not_pem(path, what, &"it is larger than 1 MiB"));
    }
    Ok(contents)
}

pub(crate) fn not_pem(path: &Path, what: &'static str, reason: &dyn std::fmt::Display) -> FileError {
    FileError::NotPem { what, path: path.to_owned(), reason: reason.to_string() }
}

/// A file to be written.
pub(crate) struct NewFile<'a> {
    pub(crate) path: PathBuf,
    pub(crate) contents: &'a str,
    pub(crate) mode: u32,
}

/// Makes a directory, with those above it, that only its owner may enter. One that is there
/// already keeps its permissions, and must not be open to changes by others.
pub(crate) fn ensure_private_directory(path: &Path) -> Result<(), FileError> {
    let unwritable = |source| FileError::Unwritable { path: path.to_owned(), source };
    fs::DirBuilder::new().recursive(true).mode(0o700).create(path).map_err(unwritable)?;
    let mode = fs::metadata(path).map_err(unwritable)?.permissions().mode() & 0o7777;
    if mode & WRITABLE_BY_OTHERS != 0 {
        return Err(FileError::DirectoryNotPrivate { path: path.to_owned(), mode });
    }
    Ok(())
}

/// Fails if one of `files` is there and must not be overwritten.
pub(crate) fn check_absent(files: &[PathBuf], overwrite: bool) -> Result<(), FileError> {
    let present = |path: &&PathBuf| !overwrite && path.symlink_metadata().is_ok();
    files.iter().find(present).map_or(Ok(()), |path| Err(FileError::Exists(path.clone())))
}

/// Writes all files or none, each one whole under its name from the first moment.
pub(crate) fn write_all(files: &[NewFile<'_>], overwrite: bool) -> Result<(), FileError> {
    // What can fail for lack of space or rights is done here, before any name is taken.
    let staged = files.iter().map(stage).collect::<Result<Vec<_>, _>>()?;
    for (index, (temporary, file)) in staged.into_iter().zip(files).enumerate() {
        if let Err(error) = publish(temporary, &file.path, overwrite) {
            if !overwrite {
                for written in &files[..index] {
                    // The first error is the one to report; what is left behind can be overwritten.
                    let _ = fs::remove_file(&written.path);
                }
            }
            return Err(error);
        }
    }
    files.iter().try_for_each(|file| sync_directory(&file.path))
}

/// A name that a file has got is kept through a loss of power only with its directory.
pub(crate) fn sync_directory(of: &Path) -> Result<(), FileError> {
    let directory = of.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let synced = File::open(directory).and_then(|directory| directory.sync_all());
    synced.map_err(|source| FileError::Unwritable { path: of.to_owned(), source })
}

fn stage(file: &NewFile<'_>) -> Result<NamedTempFile, FileError> {
    let write = || -> io::Result<NamedTempFile> {
        let directory = file.path.parent().unwrap_or(Path::new("."));
        let mut temporary =
            tempfile::Builder::new().permissions(fs::Permissions::from_mode(0o600)).tempfile_in(directory)?;
        temporary.write_all(file.contents.as_bytes())?;
        let permissions = fs::Permissions::from_mode(file.mode);
        temporary.as_file().set_permissions(permissions)?;
        temporary.as_file().sync_all()?;
        Ok(temporary)
    };
    write().map_err(|source| FileError::Unwritable { path: file.path.clone(), source })
}

fn publish(temporary: NamedTempFile, path: &Path, overwrite: bool) -> Result<(), FileError> {
    let persisted = if overwrite { temporary.persist(path) } else { temporary.persist_noclobber(path) };
    persisted.map(drop).map_err(|error| match error.error.kind() {
        io::ErrorKind::AlreadyExists => FileError::Exists(path.to_owned()),
        _ => FileError::Unwritable { path: path.to_owned(), source: error.error },
    })
}
