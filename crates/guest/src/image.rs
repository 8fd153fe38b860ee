//! Builds the guest's initramfs, of our program and the modules its network needs, and unpacks its kernel.

use std::fs::Permissions;
use std::io::{self, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::{env, fs};

use self::cpio::Archive;
pub use self::kernel::KernelError;
use self::modules::ModulesError;

mod cpio;
mod kernel;
mod modules;

/// Where the modules are in the initramfs, without the leading slash.
pub const MODULES_FOLDER: &str = "modules";

/// The drivers that the guest needs on the machine types `q35` and `pc`.
pub const GUEST_MODULES: [&str; 3] = ["virtio_pci", "virtio_net", DISK_MODULE];

/// The driver of disks. Guests without any do without it: loading it would take time.
pub const DISK_MODULE: &str = "virtio_blk";

/// Why there is no image.
#[derive(Debug, thiserror::Error)]
pub enum ImageError {
    /// The modules cannot be used.
    #[error(transparent)]
    Modules(#[from] ModulesError),
    /// The program cannot be read.
    #[error("cannot read the guest's program {path}: {source}", path = path.display())]
    Program {
        /// Where it was looked for.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The kernel cannot be read.
    #[error("cannot read the guest's kernel {path}: {source}", path = path.display())]
    Kernel {
        /// Where it was looked for.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// The image cannot be written.
    #[error("cannot write the image {path}: {source}", path = path.display())]
    Write {
        /// Where to.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
}

/// Writes the initramfs for the kernel whose modules are under `modules_folder` (as
/// `/lib/modules/6.1.0-56-cloud-amd64`) to `output`, all or nothing: the program as the first process, and these modules
/// with all that they need. The same input gives the
/// same bytes.
///
/// It is not compressed: it is small, and unpacking costs a guest under TCG more than reading.
pub fn build_image(
    modules_folder: &Path,
    module_names: &[&str],
    program: &Path,
    output: &Path,
) -> Result<(), ImageError> {
    let program_bytes =
        fs::read(program).map_err(|source| ImageError::Program { path: program.to_owned(), source })?;
    let modules = modules::in_load_order(modules_folder, module_names)?;
    let mut archive = Archive::new();
    archive.folder("dev");
    // The kernel opens it for PID 1 before anything is mounted.
    archive.character_device("dev/console", 5, 1);
    archive.file("init", 0o755, &program_bytes);
    archive.folder(MODULES_FOLDER);
    for (number, module) in modules.iter().enumerate() {
        let path = format!("{MODULES_FOLDER}/{number:02}-{}.ko", module.name);
        archive.file(&path, 0o644, &module.bytes);
    }
    archive.folder("proc");
    write(output, &archive.finish())
}

/// Writes the kernel that `bzimage` holds to `output`, unpacked, all or nothing. One that cannot be unpacked here is
/// written as it is, for the reason that is returned: QEMU takes either form.
pub fn build_kernel(bzimage: &Path, output: &Path) -> Result<Option<KernelError>, ImageError> {
    let image =
        fs::read(bzimage).map_err(|source| ImageError::Kernel { path: bzimage.to_owned(), source })?;
    match kernel::unpack(&image) {
        Ok(kernel) => write(output, &kernel).map(|()| None),
        Err(why) => write(output, &image).map(|()| Some(why)),
    }
}

fn write(output: &Path, bytes: &[u8]) -> Result<(), ImageError> {
    replace(output, bytes).map_err(|source| ImageError::Write { path: output.to_owned(), source })
}

/// At once: a QEMU that runs may have mapped what was there before.
fn replace(output: &Path, bytes: &[u8]) -> io::Result<()> {
    let folder = match output.parent() {
        Some(folder) if folder.as_os_str().is_empty() => env::current_dir()?,
        Some(folder) => folder.to_owned(),
        None => return Err(io::ErrorKind::IsADirectory.into()),
    };
    // Readable by the user that a hypervisor runs as.
    let permissions = Permissions::from_mode(0o644);
    let mut file = tempfile::Builder::new().permissions(permissions).tempfile_in(folder)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(output)?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_input_gives_the_same_image_and_no_other_file() {
        let folder = tempfile::tempdir().unwrap();
        let modules = folder.path().join("modules");
        modules::tests::write_module(&modules, "virtio_pci", "virtio");
        modules::tests::write_module(&modules, "virtio_net", "");
        modules::tests::write_module(&modules, "virtio_blk", "virtio");
        modules::tests::write_module(&modules, "virtio", "");
        let program = folder.path().join("program");
        fs::write(&program, b"program").unwrap();
        let images = folder.path().join("images");
        fs::create_dir(&images).unwrap();
        let build = |name: &str| {
            build_image(&modules, &GUEST_MODULES, &program, &images.join(name)).unwrap();
            fs::read(images.join(name)).unwrap()
        };
        assert_eq!(build("one"), build("two"));
        assert_eq!(fs::read_dir(&images).unwrap().count(), 2);
    }

    #[test]
    fn a_kernel_that_cannot_be_unpacked_is_left_as_it_is() {
        let folder = tempfile::tempdir().unwrap();
        let [bzimage, output] = ["vmlinuz", "vmlinux"].map(|name| folder.path().join(name));
        let missing = build_kernel(&bzimage, &output).unwrap_err().to_string();
        assert!(missing.contains("cannot read") && missing.contains("/vmlinuz"), "{missing}");
        fs::write(&bzimage, b"another kernel").unwrap();
        assert!(matches!(build_kernel(&bzimage, &output).unwrap(), Some(KernelError::NoBzImage)));
        assert_eq!(fs::read(&output).unwrap(), b"another kernel");
    }

    #[test]
    fn what_is_missing_is_named_and_nothing_is_written() {
        let folder = tempfile::tempdir().unwrap();
        let output = folder.path().join("image");
        let refused = build_image(folder.path(), &GUEST_MODULES, &folder.path().join("program"), &output);
        assert!(refused.unwrap_err().to_string().contains("program"));
        let program = folder.path().join("program");
        fs::write(&program, b"program").unwrap();
        let refused = build_image(folder.path(), &GUEST_MODULES, &program, &output).unwrap_err();
        assert!(refused.to_string().contains("virtio_pci"), "{refused}");
        assert!(!output.exists());
    }
}
