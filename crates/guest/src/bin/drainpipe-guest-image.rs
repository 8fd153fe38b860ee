//! Packs `drainpipe-guest` and a kernel's modules into an initramfs, and unpacks the kernel.

use std::path::Path;
use std::process::ExitCode;

use drainpipe_guest::image::{build_image, build_kernel};

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
    let bzimage = Path::new(bzimage);
    let built = build_image(Path::new(modules), Path::new(program), Path::new(initramfs))
        .and_then(|()| build_kernel(bzimage, Path::new(vmlinux)));
    match built {
        Ok(None) => ExitCode::SUCCESS,
        Ok(Some(why)) => {
            eprintln!("drainpipe-guest-image: guests boot more slowly with {}: {why}", bzimage.display());
            ExitCode::SUCCESS
        }
        Err(error) => {
            eprintln!("drainpipe-guest-image: {error}");
            ExitCode::FAILURE
        }
    }
}
