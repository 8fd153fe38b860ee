//! What a host keeps that has joined: its certificate and key in one file, so that both are replaced at once, and the
//! authority's certificate beside it.

use std::io;
use std::path::{Path, PathBuf};

use rcgen::{CertificateParams, DistinguishedName, KeyPair};
use zeroize::Zeroizing;

use crate::authority::AuthorityError;
use crate::files::{FileError, NewFile, ensure_private_directory, read_text, sync_directory, write_all};

/// A new key, and the request for a certificate of it. The key leaves this host for nobody.
pub struct KeyRequest {
    key_pem: Zeroizing<String>,
    /// The request, in PEM. It names nobody: whose the certificate is to be, the authority decides.
    pub request_pem: String,
}

impl KeyRequest {
    /// Makes both.
    pub fn new() -> Result<Self, AuthorityError> {
        let key = KeyPair::generate()?;
        let mut params = CertificateParams::default();
        params.distinguished_name = DistinguishedName::new();
        let request_pem = params.serialize_request(&key)?.pem()?;
        Ok(Self { key_pem: Zeroizing::new(key.serialize_pem()), request_pem })
    }

    /// Writes the certificate that was made for it, with the key: whole or not at all.
    pub fn keep(&self, files: &JoinedFiles, certificate_pem: &str) -> Result<(), FileError> {
        ensure_private_directory(files.directory())?;
        let both = Zeroizing::new(format!("{certificate_pem}{}", *self.key_pem));
        write_all(&[NewFile { path: files.host.clone(), contents: &both, mode: 0o600 }], true)
    }
}

/// Where it is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JoinedFiles {
    /// Certificate and key.
    pub host: PathBuf,
    /// The authority's certificate.
    pub authority: PathBuf,
    /// The hosts of the fleet.
    pub list: PathBuf,
}

impl JoinedFiles {
    /// In this directory.
    pub fn within(directory: &Path) -> Self {
        let file = |name: &str| directory.join(name);
        Self { host: file("host.pem"), authority: file("ca.pem"), list: file("list.json") }
    }

    fn directory(&self) -> &Path {
        self.host.parent().expect("it is within a directory")
    }

    /// Writes the authority's certificate.
    pub fn keep_authority(&self, authority_pem: &str) -> Result<(), FileError> {
        self.write(&self.authority, authority_pem)
    }

    /// Writes the list of the fleet's hosts.
    pub fn keep_list(&self, list: &str) -> Result<(), FileError> {
        self.write(&self.list, list)
    }

    /// The list of the fleet's hosts; none where there is no file.
    pub fn list(&self) -> Result<Option<String>, FileError> {
        match read_text(&self.list, "list of hosts") {
            Err(FileError::Missing { .. }) => Ok(None),
            read => read.map(Some),
        }
    }

    /// Forgets all of them, the key first: whoever is stopped half-way has no certificate any more.
    pub fn remove(&self) -> Result<(), FileError> {
        let staged = self.staged();
        [&self.host, &staged.host, &self.authority, &self.list].into_iter().try_for_each(|path| remove(path))
    }

    /// Removes a new certificate that was found not to be good, and its key.
    pub fn forget_staged(&self) -> Result<(), FileError> {
        remove(&self.staged().host)
    }

    /// Where a new certificate lies until it is known to be good.
    #[must_use]
    pub fn staged(&self) -> Self {
        Self { host: self.host.with_extension("new"), ..self.clone() }
    }

    /// Puts it in the place of the old one, at once.
    pub fn take_staged(&self) -> Result<(), FileError> {
        let taken = std::fs::rename(self.staged().host, &self.host);
        taken.map_err(|source| FileError::Unwritable { path: self.host.clone(), source })?;
        sync_directory(&self.host)
    }

    fn write(&self, path: &Path, contents: &str) -> Result<(), FileError> {
        ensure_private_directory(self.directory())?;
        write_all(&[NewFile { path: path.to_owned(), contents, mode: 0o644 }], true)
    }
}

fn remove(path: &Path) -> Result<(), FileError> {
    match std::fs::remove_file(path) {
        Err(source) if source.kind() != io::ErrorKind::NotFound => {
            Err(FileError::Unwritable { path: path.to_owned(), source })
        }
        _ => Ok(()),
    }
}
