//! List of the programs that run on a GPU.

use anyhow::Result;

use crate::checkout::Checkout;
use crate::workspace::Workspace;

/// Test program that runs on a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TestProgram {
    /// Name of the package in cargo.
    pub(super) package: String,
    /// Folder of the package, relative to the root.
    pub(super) folder: String,
    pub(super) name: String,
    /// `true` if it also runs without a GPU, in seconds on one processor.
    pub(super) is_short: bool,
}

/// Returns the test programs that packages name in `[package.metadata.brigade]`: first those for GPUs alone, whose
/// results no CPU run has shown.
pub(super) fn test_programs(checkout: &Checkout) -> Result<Vec<TestProgram>> {
    let mut programs = Vec::new();
    for package in Workspace::of(checkout)?.packages {
        for name in package.settings.on_gpus {
            anyhow::ensure!(
                package.tests.contains(&name),
                "{}/Cargo.toml: `on-gpus` names {name}, which is not a test program of the package",
                package.folder.display()
            );
            programs.push(TestProgram {
                package: package.name.clone(),
                folder: package.folder.display().to_string(),
                is_short: package.settings.short.contains(&name),
                name,
            });
        }
    }
    programs.sort_by_key(|it| it.name == "numeric");
    Ok(programs)
}

/// Programs besides tests: cargo's name of the package, the folder and the program.
pub(super) const PROGRAMS: &[(&str, &str, &str)] = &[
    ("brigade", "crates/brigade", "brigade-selftest"),
    ("brigade-bench", "bench", "brigade-bench"),
    ("brigade-cli", "crates/cli", "brigade"),
];

/// Runner, which is the same for all builds.
pub(super) const RUNNER: (&str, &str) = ("brigade-gpu", "brigade-gpu");

/// Files that tests and benchmarks read, relative to the root of the checkout. Programs run in the root of the folder.
pub(super) const FILES: &[&str] = &[
    "bench/peers",
    "crates/checkpoint/tests/fixtures",
    "crates/models/tests/fixtures",
    "crates/models/tests/golden",
    "crates/nn/tests/fixtures",
    "crates/optim/tests/golden",
    "crates/torch/tests/golden",
    "crates/train/tests/fixtures",
    "crates/train/tests/golden",
];
