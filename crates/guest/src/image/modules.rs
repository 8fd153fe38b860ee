//! Finds kernel modules and the order in which they load.
//!
//! A kernel package that was unpacked and not installed has no `modules.dep`; each module names
//! what it needs in its own `.modinfo` section.

use std::collections::HashMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

/// A module ready to load.
pub(super) struct Module {
    pub(super) name: String,
    pub(super) bytes: Vec<u8>,
}

/// Why modules cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ModulesError {
    /// A file or folder cannot be read.
    #[error("cannot read {path}: {source}", path = path.display())]
    Read {
        /// The file or folder.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A module that is neither a file nor built in.
    #[error(
        "the kernel under {folder} has no module {name}; take a kernel with virtio, such as \
         Debian's linux-image-cloud-amd64",
        folder = folder.display()
    )]
    Missing {
        /// The module.
        name: String,
        /// Where it was looked for.
        folder: PathBuf,
    },
    /// A compressed module cannot be unpacked.
    #[error("cannot unpack {path} with {program}: {reason}; is {program} installed?", path = path.display())]
    Unpack {
        /// The module.
        path: PathBuf,
        /// What unpacks it.
        program: &'static str,
        /// Why not.
        reason: String,
    },
}

/// The named modules and all that they need, each after what it needs. What is built into the
/// kernel is left out.
pub(super) fn in_load_order(folder: &Path, names: &[&str]) -> Result<Vec<Module>, ModulesError> {
    let mut search = Search {
        folder,
        files: find_modules(folder)?,
        built_in: built_in(folder),
        visited: Vec::new(),
        ordered: Vec::new(),
    };
    names.iter().try_for_each(|name| search.visit(name))?;
    Ok(search.ordered)
}

struct Search<'a> {
    folder: &'a Path,
    files: HashMap<String, PathBuf>,
    built_in: Vec<String>,
    visited: Vec<String>,
    ordered: Vec<Module>,
}

impl Search<'_> {
    fn visit(&mut self, name: &str) -> Result<(), ModulesError> {
        if self.visited.iter().chain(&self.built_in).any(|known| known == name) {
            return Ok(());
        }
        self.visited.push(name.to_owned());
        let path = self
            .files
            .get(name)
            .ok_or_else(|| ModulesError::Missing { name: name.to_owned(), folder: self.folder.to_owned() })?;
        let bytes = unpack(path)?;
        for needed in needed_modules(&bytes) {
            self.visit(&needed)?;
        }
        self.ordered.push(Module { name: name.to_owned(), bytes });
        Ok(())
    }
}

/// Module files by module name.
fn find_modules(folder: &Path) -> Result<HashMap<String, PathBuf>, ModulesError> {
    let mut found = HashMap::new();
    let mut folders = vec![folder.to_owned()];
    while let Some(folder) = folders.pop() {
        let read = |source| ModulesError::Read { path: folder.clone(), source };
        for entry in fs::read_dir(&folder).map_err(read)? {
            let entry = entry.map_err(read)?;
            // Links, as `build` and `source`, lead out of the modules.
            if entry.file_type().map_err(read)?.is_dir() {
                folders.push(entry.path());
            } else if let Some(name) = module_name(&entry.path()) {
                found.insert(name, entry.path());
            }
        }
    }
    Ok(found)
}

/// The name that the kernel knows a module file by, in which `-` is `_`.
fn module_name(path: &Path) -> Option<String> {
    let (name, extension) = path.file_name()?.to_str()?.split_once('.')?;
    ["ko", "ko.xz", "ko.zst", "ko.gz"].contains(&extension).then(|| name.replace('-', "_"))
}

/// Names in `modules.builtin`, one path a line. Without that file nothing counts as built in.
fn built_in(folder: &Path) -> Vec<String> {
    let list = fs::read_to_string(folder.join("modules.builtin")).unwrap_or_default();
    list.lines().filter_map(|line| module_name(Path::new(line))).collect()
}

fn unpack(path: &Path) -> Result<Vec<u8>, ModulesError> {
    let program = match path.extension().and_then(|extension| extension.to_str()) {
        Some("xz") => "xz",
        Some("zst") => "zstd",
        Some("gz") => "gzip",
        _ => {
            return fs::read(path).map_err(|source| ModulesError::Read { path: path.to_owned(), source });
        }
    };
    let failed = |reason| ModulesError::Unpack { path: path.to_owned(), program, reason };
    let output = Command::new(program)
        .args(["--decompress", "--stdout"])
        .arg(path)
        .output()
        .map_err(|error| failed(error.to_string()))?;
    if output.status.success() {
        Ok(output.stdout)
    } else {
        Err(failed(String::from_utf8_lossy(&output.stderr).trim().to_owned()))
    }
}

/// The value of `depends=` in the module's `.modinfo` section, whose entries end with a zero byte.
fn needed_modules(module: &[u8]) -> Vec<String> {
    module
        .split(|&byte| byte == 0)
        .find_map(|entry| entry.strip_prefix(b"depends="))
        .map(|list| String::from_utf8_lossy(list).replace('-', "_"))
        .map(|list| list.split(',').filter(|name| !name.is_empty()).map(str::to_owned).collect())
        .unwrap_or_default()
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    pub(in super::super) fn write_module(folder: &Path, name: &str, needs: &str) {
        let folder = folder.join("kernel/drivers");
        fs::create_dir_all(&folder).unwrap();
        let content = format!("ELF\0license=GPL\0depends={needs}\0name={name}\0");
        fs::write(folder.join(format!("{name}.ko")), content).unwrap();
    }

    fn names(folder: &Path, wanted: &[&str]) -> Vec<String> {
        let modules = in_load_order(folder, wanted).unwrap();
        modules.into_iter().map(|module| module.name).collect()
    }

    #[test]
    fn what_is_needed_comes_first_and_once() {
        let folder = tempfile::tempdir().unwrap();
        write_module(folder.path(), "virtio-net", "virtio,net-failover");
        write_module(folder.path(), "net_failover", "failover");
        write_module(folder.path(), "failover", "");
        write_module(folder.path(), "virtio", "");
        let order = names(folder.path(), &["virtio", "virtio_net"]);
        assert_eq!(order, ["virtio", "failover", "net_failover", "virtio_net"]);
    }

    #[test]
    fn what_is_built_in_is_left_out_and_circles_end() {
        let folder = tempfile::tempdir().unwrap();
        write_module(folder.path(), "one", "two,virtio");
        write_module(folder.path(), "two", "one");
        fs::write(folder.path().join("modules.builtin"), "kernel/drivers/virtio/virtio.ko\n").unwrap();
        assert_eq!(names(folder.path(), &["one"]), ["two", "one"]);
    }

    #[test]
    fn a_damaged_compressed_module_is_named() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join("virtio.ko.gz"), b"not gzip").unwrap();
        let error = in_load_order(folder.path(), &["virtio"]).err().unwrap().to_string();
        assert!(error.contains("virtio.ko.gz"), "{error}");
    }
}
