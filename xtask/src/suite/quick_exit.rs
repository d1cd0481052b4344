//! Quick end of test programs: without the destructors of libtorch's operators.

use std::env;
use std::path::Path;
use std::process::{Command, Stdio};

/// Variable with the path of the library that [`preload`] has a test program load.
const LIBRARY: &str = "XTASK_QUICK_EXIT";

/// Variable of the dynamic linker: libraries to load before all others.
const PRELOAD: &str = "LD_PRELOAD";

/// Compiles the library into a folder and sets the variable by which `xtask measure` finds it. Without glibc or a C
/// compiler, and where the coverage of tests is measured, which is written at exit, tests end as other programs do.
pub(super) fn set(tests: &mut Command, folder: &Path) {
    let is_glibc = cfg!(all(target_os = "linux", target_env = "gnu"));
    if !is_glibc || env::var_os("LLVM_PROFILE_FILE").is_some() {
        return;
    }
    let (source, library) = (folder.join("quick_exit.c"), folder.join("libquick_exit.so"));
    let compiled = std::fs::write(&source, include_str!("quick_exit.c")).and_then(|()| {
        let mut compiler = Command::new(env::var_os("CC").unwrap_or_else(|| "cc".into()));
        compiler.args(["-O1", "-shared", "-fPIC", "-o"]).arg(&library).arg(&source).arg("-ldl");
        compiler.stdin(Stdio::null()).stdout(Stdio::null()).stderr(Stdio::null()).status()
    });
    if compiled.is_ok_and(|it| it.success()) {
        tests.env(LIBRARY, library);
    }
}

/// Has a test program load the library, which takes the variable back so that programs started by the test end as they
/// do for users.
pub(super) fn preload(test: &mut Command) {
    if let (Some(library), None) = (env::var_os(LIBRARY), env::var_os(PRELOAD)) {
        test.env(PRELOAD, library);
    }
    test.env_remove(LIBRARY);
}
