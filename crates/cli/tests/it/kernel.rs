//! Tests of `brigade kernel`, with a simulated libtorch and a simulated evcxr.

use std::fs;
use std::io::{BufRead, BufReader};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

/// Prints its build folder, then waits for the end of its standard input.
const EVCXR: &str =
    "#!/bin/sh\necho \"$EVCXR_TMPDIR|$LIBTORCH|$LD_LIBRARY_PATH|$BRIGADE_PROGRAM|$*\"\nread line\n";

/// Creates a folder with a project that has a libtorch, and evcxr.
fn fixture() -> TempDir {
    let folder = TempDir::new().unwrap();
    let root = folder.path();
    fs::create_dir_all(root.join("project/src")).unwrap();
    fs::write(
        root.join("project/Cargo.toml"),
        "[package]\nname = \"a\"\nversion = \"0.1.0\"\nedition = \"2024\"\n",
    )
    .unwrap();
    fs::write(root.join("project/src/main.rs"), "fn main() {}\n").unwrap();
    let evcxr = root.join("evcxr_jupyter");
    fs::write(&evcxr, EVCXR).unwrap();
    fs::set_permissions(&evcxr, fs::Permissions::from_mode(0o755)).unwrap();
    folder
}

fn command(root: &Path, program: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new(program);
    command.args(arguments).current_dir(root.join("project"));
    command.env("XDG_CACHE_HOME", root.join("cache")).env("XDG_DATA_HOME", root.join("data"));
    command.env("CARGO_HOME", root.join("cargo")).env("LD_LIBRARY_PATH", "/one:/two");
    for name in ["LIBTORCH", "LIBTORCH_USE_PYTORCH", "JUPYTER_DATA_DIR"] {
        command.env_remove(name);
    }
    command
}

fn brigade(root: &Path, arguments: &[&str]) -> Command {
    command(root, env!("CARGO_BIN_EXE_brigade"), arguments)
}

fn said(output: &Output) -> String {
    format!(
        "{}{}",
        String::from_utf8_lossy(&output.stdout),
        String::from_utf8_lossy(&output.stderr)
    )
}

/// Starts a kernel as Jupyter does, and returns it with the lines that evcxr prints.
fn kernel(root: &Path, spec: &Value) -> (Child, Vec<String>) {
    let argv: Vec<&str> =
        spec["argv"].as_array().unwrap().iter().map(|it| it.as_str().unwrap()).collect();
    let argv: Vec<&str> =
        argv.into_iter().map(|it| if it == "{connection_file}" { "c.json" } else { it }).collect();
    let mut child = command(root, argv[0], &argv[1..])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    (child, line.trim_end().split('|').map(str::to_owned).collect())
}

#[test]
fn an_installed_kernel_has_libtorch_and_a_folder_of_its_own() {
    let folder = fixture();
    let root = folder.path();
    let evcxr = root.join("evcxr_jupyter");
    let install = ["kernel", "install", "--evcxr", evcxr.to_str().unwrap()];
    let output = brigade(root, &install).env("LIBTORCH", "/libtorch").output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(said(&output).contains("registered the kernel \"Rust (Brigade)\" in "));
    let spec = fs::read(root.join("data/jupyter/kernels/brigade/kernel.json")).unwrap();
    let spec: Value = serde_json::from_slice(&spec).unwrap();
    assert_eq!((&spec["language"], &spec["interrupt_mode"]), (&"rust".into(), &"message".into()));

    let (mut first, told) = kernel(root, &spec);
    let folder_of = |number: u32| {
        root.join("cache/brigade/notebooks").join(number.to_string()).to_str().unwrap().to_owned()
    };
    let rust = Command::new("rustc").arg("--print=target-libdir").output().unwrap();
    let rust = String::from_utf8(rust.stdout).unwrap();
    let libraries = format!("/libtorch/lib:{}:/one:/two", rust.trim_end());
    let rest = ["/libtorch", &libraries, env!("CARGO_BIN_EXE_brigade"), "--control_file c.json"];
    assert_eq!(told[0], folder_of(0));
    assert_eq!(told[1..], rest);
    // A second kernel at the same time compiles elsewhere; when the first has ended, its folder is free.
    let (mut second, told) = kernel(root, &spec);
    assert_eq!(told[0], folder_of(1));
    drop(first.stdin.take());
    first.wait().unwrap();
    let (mut third, told) = kernel(root, &spec);
    assert_eq!(told[0], folder_of(0));
    for child in [&mut second, &mut third] {
        drop(child.stdin.take());
        child.wait().unwrap();
    }

    let prefix = root.join("environment");
    let install = [&install[..], &["--prefix", prefix.to_str().unwrap()]].concat();
    let output = brigade(root, &install).env("LIBTORCH", "/libtorch").output().unwrap();
    assert!(output.status.success(), "{}", said(&output));
    assert!(prefix.join("share/jupyter/kernels/brigade/kernel.json").is_file());
}

#[test]
fn what_is_missing_is_named() {
    let folder = fixture();
    let root = folder.path();
    let fails = |command: &mut Command| {
        let output = command.output().unwrap();
        assert_eq!(output.status.code(), Some(1), "{}", said(&output));
        said(&output)
    };
    let text = fails(&mut brigade(root, &["kernel", "install"]));
    assert!(text.contains("project has no libtorch yet: run `brigade setup` there"), "{text}");
    // cargo itself is still needed: only its folder is in the PATH.
    let cargo = Path::new(env!("CARGO"));
    let mut install = brigade(root, &["kernel", "install"]);
    let text = fails(install.env("LIBTORCH", "/libtorch").env("PATH", cargo.parent().unwrap()));
    assert!(text.contains("evcxr_jupyter is missing: install it with `cargo install"), "{text}");
    let mut install = brigade(root, &["kernel", "install", "--evcxr", "nothing"]);
    let text = fails(install.env("LIBTORCH", "/libtorch"));
    assert!(text.contains("cannot find evcxr at nothing"), "{text}");
    let run = ["kernel", "run", "--evcxr", "/no/evcxr", "--libtorch", "/libtorch", "c.json"];
    let text = fails(&mut brigade(root, &run));
    assert!(text.contains("cannot start /no/evcxr: "), "{text}");
}
