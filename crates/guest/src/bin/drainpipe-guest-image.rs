//! Packs a static program and a kernel's modules into an initramfs, and unpacks the kernel.

use std::path::Path;
use std::process::ExitCode;

use drainpipe_guest::image::{GUEST_MODULES, build_image, build_kernel};

const USAGE: &str = "usage: drainpipe-guest-image MODULES_FOLDER PROGRAM INITRAMFS BZIMAGE VMLINUX [MODULE...]\n\
    MODULES_FOLDER  of an unpacked kernel, as lib/modules/6.1.0-56-cloud-amd64\n\
    PROGRAM         the first process, such as drainpipe-guest, linked statically\n\
    INITRAMFS       where to write it\n\
    BZIMAGE         the kernel, as boot/vmlinuz-6.1.0-56-cloud-amd64\n\
    VMLINUX         where to write it, unpacked\n\
    MODULE...       what the program loads with all that it needs; by default what drainpipe-guest does";

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    let [modules, program, initramfs, bzimage, vmlinux, names @ ..] = &arguments[..] else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    let mut names: Vec<&str> = names.iter().map(String::as_str).collect();
    if names.is_empty() {
        names.extend(GUEST_MODULES);
    }
    let bzimage = Path::new(bzimage);
    let built = build_image(Path::new(modules), &names, Path::new(program), Path::new(initramfs))
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
