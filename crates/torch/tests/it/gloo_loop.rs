//! Gloo's threads give way to the thread that they wait for (`cpp/gloo_loop.cpp`).

use std::env;
use std::process::Command;

/// libtorch calls a function of this program, as the dynamic linker looks for it here first.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
#[test]
fn the_program_exports_the_function_that_gloo_calls() {
    let program = env::current_exe().unwrap();
    let symbols = Command::new("nm").args(["-D", "--defined-only"]).arg(program).output().unwrap();
    assert!(symbols.status.success(), "{}", String::from_utf8_lossy(&symbols.stderr));
    let symbols = String::from_utf8_lossy(&symbols.stdout);
    let names: Vec<_> = symbols.lines().filter_map(|line| line.rsplit(' ').next()).collect();
    assert!(names.contains(&"pthread_mutex_trylock"), "{names:?}");
}
