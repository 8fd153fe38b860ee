//! A migration that QEMU encrypts itself, with a key that only its two ends know (TLS with a pre-shared key).

use std::fs;
use std::io;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use drainpipe_hypervisor::TlsKey;
use serde::de::IgnoredAny;
use serde_json::json;

use super::MigrationError;
use super::transport::Side;
use crate::paths::RuntimePaths;
use crate::qmp::QmpError;
use crate::vmm::Vmm;

/// QEMU's object; there is one at a time.
const CREDENTIALS: &str = "migration-tls";

/// QEMU's file names.
const KEY_FILE: &str = "keys.psk";
const DH_PARAMETERS_FILE: &str = "dh-params.pem";

/// What QEMU calls itself as a client by default, which both ends must agree on. The key alone is secret.
const USER_NAME: &str = "qemu";

/// TLS 1.3, with its ciphers. The `NORMAL` of `GnuTLS` has older versions too.
const PRIORITY: &str = "NORMAL:-VERS-ALL:+VERS-TLS1.3";

/// The group ffdhe2048 of RFC 7919. TLS 1.3 has no use for it, but without the file a QEMU that is to be the server
/// computes a group of its own: 0.4 s (10.0.2), 2 s (7.2.22).
const DH_PARAMETERS: &str = "-----BEGIN DH PARAMETERS-----
MIIBCAKCAQEA//////////+t+FRYortKmq/cViAnPTzx2LnFg84tNpWp4TZBFGQz
+8yTnc4kmz75fS/jY2MMddj2gbICrsRhetPfHtXV/WVhJDP1H18GbtCFY2VVPe0a
87VXE15/V8k1mE8McODmi3fipona8+/och3xWKE2rec1MKzKT0g6eXq8CrGCsyT7
YdEIqUuyyOP7uWrat2DX9GgdT0Kj3jlN9K5W7edjcrsZCwenyO4KbXCeAvzhzffi
7MA0BM0oNC9hkXL+nOmFg/+OTxIy7vKBg8P+OxtMb61zO7X8vC7CIAXFjvGDfRaD
ssbzSibBsu/6iGtCOGEoXJf//////////wIBAg==
-----END DH PARAMETERS-----
";

/// Gives QEMU the key, or takes that of an earlier migration from it. Returns QEMU's name for it, which is empty where
/// there is none.
pub(super) async fn set_up(
    vmm: &Vmm,
    key: Option<TlsKey>,
    side: Side,
    deadline: Duration,
) -> Result<&'static str, MigrationError> {
    forget(vmm, deadline).await?;
    let Some(key) = key else { return Ok("") };
    let directory = vmm.paths().tls_directory();
    lay_out(&directory.path, key)?;
    let arguments = json!({
        "qom-type": "tls-creds-psk",
        "id": CREDENTIALS,
        "dir": directory.of_hypervisor,
        "endpoint": match side { Side::Source(_) => "client", Side::Target => "server" },
        "priority": PRIORITY,
    });
    super::execute(vmm, "object-add", arguments, deadline).await.map_err(|error| match error {
        QmpError::Command { desc, .. } => MigrationError::NoTls(desc),
        error => error.into(),
    })?;
    if matches!(side, Side::Source(_)) {
        // A client has read it, and connects again with what it has read.
        forget_key(vmm.paths())?;
    }
    Ok(CREDENTIALS)
}

/// Removes the key of a migration whose QEMU here needs no other connection: all of it has come. Until then a QEMU that
/// listens reads it for each connection again.
pub fn forget_key(paths: &RuntimePaths) -> Result<(), MigrationError> {
    let directory = paths.tls_directory().path;
    match fs::remove_dir_all(&directory) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        removed => removed.map_err(cannot_write(&directory)),
    }
}

/// Deletes the key of the previous migration, which is over.
async fn forget(vmm: &Vmm, deadline: Duration) -> Result<(), MigrationError> {
    match vmm.qmp().execute::<IgnoredAny>("object-del", json!({ "id": CREDENTIALS }), deadline).await {
        // It has none.
        Ok(_) | Err(QmpError::Command { .. }) => forget_key(vmm.paths()),
        Err(error) => Err(error.into()),
    }
}

/// The directory is in one that is root's alone; QEMU's user reaches it from its working directory.
fn lay_out(directory: &Path, key: TlsKey) -> Result<(), MigrationError> {
    fs::create_dir_all(directory).map_err(cannot_write(directory))?;
    set_mode(directory, 0o755)?;
    let keys = format!("{USER_NAME}:{}\n", String::from(key));
    for (name, content) in [(KEY_FILE, &*keys), (DH_PARAMETERS_FILE, DH_PARAMETERS)] {
        let path = directory.join(name);
        fs::write(&path, content).map_err(cannot_write(&path))?;
        set_mode(&path, 0o644)?;
    }
    Ok(())
}

/// Whatever the agent's umask is.
fn set_mode(path: &Path, mode: u32) -> Result<(), MigrationError> {
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).map_err(cannot_write(path))
}

fn cannot_write(path: &Path) -> impl Fn(io::Error) -> MigrationError {
    let path = path.to_owned();
    move |source| MigrationError::CannotWriteKey { path: path.clone(), source }
}
