//! Runs the tests of the Python package for notebooks (`python/`) with this launcher.

use std::path::Path;
use std::process::Command;

use brigade_test_needs::{Need, needs, python};

#[needs(Python)]
fn programs_are_launched_and_cells_are_built() {
    // Those that need IPython are in the other test.
    unittest(Path::new("python3"), &["discover", "--top-level-directory", ".", "-s", "tests"]);
}

#[needs(Jupyter)]
fn cells_run_in_ipython() {
    let said = unittest(&python(Need::Jupyter).unwrap(), &["tests.test_magic"]);
    assert!(!said.contains("skipped"), "{said}");
}

/// Runs Python's unit tests, and returns their output.
fn unittest(python: &Path, arguments: &[&str]) -> String {
    let package = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../python");
    let mut command = Command::new(python);
    command.args(["-m", "unittest"]).args(arguments).current_dir(package);
    command.env("BRIGADE_PROGRAM", env!("CARGO_BIN_EXE_brigade"));
    command.env("PYTHONDONTWRITEBYTECODE", "1");
    let output = command.output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(output.status.success(), "{said}");
    said
}
