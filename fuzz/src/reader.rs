//! libFuzzer on one of the readers of brigade-fuzz-readers, which an environment variable names.
//!
//! With `--unpack=FOLDER` it writes the inputs to begin with into a folder and exits, with `--pack=FOLDER` it makes the
//! archive of the corpus from a folder.

#![no_main]

use std::env;
use std::path::Path;
use std::process::exit;
use std::sync::LazyLock;

use brigade_fuzz_readers::{ALLOCATOR, Allocator, Target, check, pack, target, targets, unpack};
use libfuzzer_sys::fuzz_target;

#[global_allocator]
static COUNTED: &Allocator = ALLOCATOR;

static TARGET: LazyLock<&Target> = LazyLock::new(|| {
    let name = env::var(VARIABLE).unwrap_or_default();
    target(&name).unwrap_or_else(|| {
        eprintln!(
            "{VARIABLE} is `{name}`: set it to one of these; some need `--features libtorch`"
        );
        targets().iter().for_each(|it| eprintln!("  {:16} {}", it.name, it.reads));
        exit(2)
    })
});

fn begin() {
    let target = *TARGET;
    for argument in env::args().skip(1) {
        let done = if let Some(folder) = argument.strip_prefix("--unpack=") {
            unpack(target, Path::new(folder))
        } else if let Some(folder) = argument.strip_prefix("--pack=") {
            pack(target, Path::new(folder))
        } else {
            continue;
        };
        if let Err(error) = done {
            eprintln!("{error:#}");
            exit(1);
        }
        exit(0);
    }
}

fuzz_target!(init: begin(), |input: &[u8]| {
    check(&TARGET, input);
});

const VARIABLE: &str = "BRIGADE_FUZZ_TARGET";
