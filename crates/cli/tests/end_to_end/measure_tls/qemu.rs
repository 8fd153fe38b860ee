//! A QEMU whose own TLS can be switched on.

use std::fs::{self, Permissions};
use std::io::{Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::time::Duration;

use rustix::process::Pid;
use tempfile::TempDir;

use crate::support::give_to_user_of;
use crate::tls_certificates::{TARGET_NAME, write_certificates};

const MONITOR_DEADLINE: Duration = Duration::from_secs(10);
const PROMPT: &[u8] = b"(qemu) ";

/// A script that runs QEMU, and what it needs.
pub(super) struct TlsQemu {
    directory: TempDir,
    program: String,
}

impl TlsQemu {
    pub(super) fn new(qemu: &str) -> Self {
        let directory = TempDir::new().unwrap();
        // QEMU's user puts a socket there.
        give_to_user_of(qemu, directory.path()).unwrap();
        write_certificates(directory.path());
        let program = directory.path().join("qemu");
        fs::write(&program, script(qemu, directory.path())).unwrap();
        fs::set_permissions(&program, Permissions::from_mode(0o755)).unwrap();
        let program = program.to_str().expect("temporary directories have plain names").to_owned();
        Self { directory, program }
    }

    pub(super) fn program(&self) -> &str {
        &self.program
    }

    /// Sets whether the guest's next migration uses QEMU's TLS.
    pub(super) fn set_tls(&self, source: Pid, is_on: bool) {
        let switch = self.directory.path().join("tls");
        if is_on {
            fs::write(switch, "").unwrap();
        } else if switch.exists() {
            fs::remove_file(switch).unwrap();
        }
        let credentials = if is_on { "client" } else { "\"\"" };
        self.command(source, &format!("migrate_set_parameter tls-creds {credentials}"));
        self.command(source, &format!("migrate_set_parameter tls-hostname {TARGET_NAME}"));
    }

    /// Makes a QEMU execute a line in its monitor.
    fn command(&self, pid: Pid, line: &str) {
        let mut monitor =
            UnixStream::connect(self.directory.path().join(pid.as_raw_nonzero().to_string())).unwrap();
        monitor.set_read_timeout(Some(MONITOR_DEADLINE)).unwrap();
        read_until_prompt(&mut monitor);
        writeln!(monitor, "{line}").unwrap();
        let answer = read_until_prompt(&mut monitor);
        assert!(!answer.contains("Error"), "{line}: {answer}");
    }
}

fn read_until_prompt(monitor: &mut UnixStream) -> String {
    let mut answer = Vec::new();
    let mut part = [0; 1024];
    while !answer.ends_with(PROMPT) {
        let length = monitor.read(&mut part).expect("QEMU's monitor answers");
        assert!(length > 0, "QEMU's monitor closed");
        answer.extend_from_slice(&part[..length]);
    }
    String::from_utf8_lossy(&answer).into_owned()
}

/// QEMU as usual, and for a VM also with what TLS needs.
fn script(qemu: &str, directory: &Path) -> String {
    format!(
        "#!/bin/sh\nqemu={qemu} directory={directory}\n\
         case \"$*\" in *guest=*)\n\
         set -- \"$@\" -monitor unix:$directory/$$,server=on,wait=off \\\n\
         -object tls-creds-x509,id=client,endpoint=client,dir=$directory \\\n\
         -object tls-creds-x509,id=server,endpoint=server,dir=$directory\n\
         esac\n\
         case \"$*\" in *'-incoming defer'*)\n\
         [ ! -e $directory/tls ] || set -- \"$@\" -global migration.tls-creds=server\n\
         esac\n\
         exec $qemu \"$@\"\n",
        directory = directory.display()
    )
}
