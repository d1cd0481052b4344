//! Library that test programs load first, for less processor time: `preload.c` says what it does.

use std::env;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// Variable with the path of the library that [`preload`] has a test program load.
const LIBRARY: &str = "XTASK_PRELOAD";

/// Variable of the dynamic linker: libraries to load before all others.
pub(super) const PRELOAD: &str = "LD_PRELOAD";

/// Variable with the name of the only program that the library is for among those that inherit [`PRELOAD`].
const PROGRAM: &str = "XTASK_PRELOAD_OF";

/// The library that is loaded before the others.
pub(super) struct Preload(Option<PathBuf>);

impl Preload {
    /// Compiles the library into a folder. Without glibc or a C compiler, and where the coverage of tests is measured,
    /// which is written at exit, there is none, and tests end as other programs do.
    pub(super) fn compile(folder: &Path) -> Self {
        let is_glibc = cfg!(all(target_os = "linux", target_env = "gnu"));
        let is_free = env::var_os("LLVM_PROFILE_FILE").is_none() && env::var_os(PRELOAD).is_none();
        if !(is_glibc && is_free) {
            return Self(None);
        }
        let (source, library) = (folder.join("preload.c"), folder.join("libpreload.so"));
        let compiled = fs::write(&source, include_str!("preload.c")).and_then(|()| {
            let mut compiler = Command::new(env::var_os("CC").unwrap_or_else(|| "cc".into()));
            compiler.args(["-O1", "-shared", "-fPIC", "-o"]).arg(&library).arg(&source).arg("-ldl");
            compiler.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status()
        });
        Self(compiled.is_ok_and(|it| it.success()).then_some(library))
    }

    /// Sets the variable by which `xtask measure` finds the library. Returns `false` if there is none.
    pub(super) fn of_tests(&self, runner: &mut Command) -> bool {
        if let Self(Some(library)) = self {
            runner.env(LIBRARY, library);
        }
        self.0.is_some()
    }

    /// Has a program load the library.
    #[cfg(test)]
    pub(super) fn of_a_program(&self, program: &mut Command) {
        if let Self(Some(library)) = self {
            program.env(PRELOAD, library);
        }
    }

    /// Has the doc tests that cargo runs load the library. rustdoc starts each of them itself.
    pub(super) fn of_documents(&self, cargo: &mut Command) {
        if let Self(Some(library)) = self {
            cargo.env(PRELOAD, library).env(PROGRAM, "rust_out");
        }
    }
}

/// Has a test program load the library, which takes the variable back so that programs started by the test end as they
/// do for users.
pub(super) fn preload(test: &mut Command) {
    if let Some(library) = env::var_os(LIBRARY) {
        test.env(PRELOAD, library);
    }
    test.env_remove(LIBRARY);
}
