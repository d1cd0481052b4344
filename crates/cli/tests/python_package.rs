//! The package for notebooks in Python (`python/`): its own tests, with this launcher.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in tests, but knows only functions marked so

use std::path::Path;
use std::process::Command;

use brigade_suite::{Need, python};

brigade_suite::suite! {
    needs Python: programs_are_launched_and_cells_are_built;
    needs Jupyter: cells_run_in_ipython;
}

fn programs_are_launched_and_cells_are_built() {
    // Those that need IPython are in the other test.
    unittest(Path::new("python3"), &["discover", "--top-level-directory", ".", "-s", "tests"]);
}

fn cells_run_in_ipython() {
    let said = unittest(&python(Need::Jupyter).unwrap(), &["tests.test_magic"]);
    assert!(!said.contains("skipped"), "{said}");
}

/// Runs tests of Python's; what they say.
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
