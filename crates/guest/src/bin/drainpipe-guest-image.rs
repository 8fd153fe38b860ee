//! Packs `drainpipe-guest` and a kernel's modules into an initramfs.

use std::path::Path;
use std::process::ExitCode;

use drainpipe_guest::image::build_image;

const USAGE: &str = "usage: drainpipe-guest-image MODULES_FOLDER PROGRAM OUTPUT\n\
    MODULES_FOLDER  of an unpacked kernel, as lib/modules/6.1.0-56-cloud-amd64\n\
    PROGRAM         drainpipe-guest, linked statically\n\
    OUTPUT          the initramfs";

fn main() -> ExitCode {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    let [modules, program, output] = &arguments[..] else {
        eprintln!("{USAGE}");
        return ExitCode::from(2);
    };
    match build_image(Path::new(modules), Path::new(program), Path::new(output)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("drainpipe-guest-image: {error}");
            ExitCode::FAILURE
        }
    }
}
