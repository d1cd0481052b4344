//! The binary `brigade`, for the tests of all examples, which include this file by its path.

use std::env;
use std::path::{Path, PathBuf};
use std::process::Command;

/// Builds `brigade` into the folder of `program` and returns its path: it belongs to another package, so cargo
/// does not build it for these tests. `cargo xtask test` has built it, and says so by a variable.
pub(crate) fn brigade_beside(program: &str) -> PathBuf {
    let brigade = Path::new(program).with_file_name("brigade");
    if env::var_os("BRIGADE_TEST_PROGRAMS_ARE_BUILT").is_some() && brigade.exists() {
        return brigade;
    }
    let mut build = Command::new(env!("CARGO"));
    build.args(["build", "--quiet", "-p", "brigade-cli"]);
    let built = build.current_dir(env!("CARGO_MANIFEST_DIR")).status().expect("cargo starts");
    assert!(built.success() && brigade.exists(), "cargo build -p brigade-cli makes {brigade:?}");
    brigade
}
