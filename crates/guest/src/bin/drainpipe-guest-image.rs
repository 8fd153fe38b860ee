//! Packs `drainpipe-guest` and a kernel's modules into an initramfs, and unpacks the kernel.

use std::path::Path;
use std::process::ExitCode;
use std::{fs, io};

use drainpipe_guest::image::build_image;
use drainpipe_guest::image::kernel::unpack;

const USAGE: &str = "usage: drainpipe-guest-image MODULES_FOLDER PROGRAM INITRAMFS BZIMAGE VMLINUX\n\
    MODULES_FOLDER  of an unpacked kernel, as lib/modules/6.1.0-56-cloud-amd64\n\
    PROGRAM         drainpipe-guest, linked statically\n\
    INITRAMFS       where to write it\n\
    BZIMAGE         the kernel, as boot/vmlinuz-6.1.0-56-cloud-amd64\n\
    VMLINUX         where to write it, unpacked";

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [modules, program, initramfs, bzimage, vmlinux] = &arguments[..] else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    if let Err(error) = build_image(Path::new(modules), Path::new(program), Path::new(initramfs)) {
        eprintln!("drainpipe-guest-image: {error}");
        return ExitCode::FAILURE;
    }
    if let Err(error) = write_kernel(Path::new(bzimage), Path::new(vmlinux)) {
        eprintln!(
            "drainpipe-guest-image: cannot make {} of {}: {error}",
            vmlinux.display(),
            bzimage.display()
        );
        return ExitCode::FAILURE;
    }
    ExitCode::SUCCESS
}

/// QEMU takes either form, so a kernel that cannot be unpacked here is left to unpack itself.
fn write_kernel(bzimage: &Path, vmlinux: &Path) -> io::Result<()> {
    let image = fs::read(bzimage)?;
    let kernel = unpack(&image).unwrap_or_else(|error| {
        eprintln!("drainpipe-guest-image: guests boot more slowly with {}: {error}", bzimage.display());
        image
    });
    // In its place at once: a QEMU that runs may have mapped the one before.
    let partial = vmlinux.with_extension("partial");
    fs::write(&partial, kernel)?;
    fs::rename(partial, vmlinux)
}
