//! What a fuzzer begins with: made anew by each start, from what the real encoders make.

use std::path::PathBuf;
use std::{env, fs};

/// Where `run` wants them.
const DIRECTORY: &str = "DRAINPIPE_FUZZ_SEEDS";

/// Writes the seeds to the directory that the environment names, if it names one.
pub fn write_seeds(seeds: &[Vec<u8>]) {
    let Some(directory) = env::var_os(DIRECTORY).map(PathBuf::from) else { return };
    for (number, seed) in seeds.iter().enumerate() {
        let path = directory.join(format!("seed-{number}"));
        fs::write(&path, seed).unwrap_or_else(|error| panic!("{}: {error}", path.display()));
    }
}
