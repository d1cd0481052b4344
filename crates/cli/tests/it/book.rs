//! Tests of the sessions in the README and the book: the commands are run, and must print what the page shows.
//!
//! `? 2` is the exit code, `...` stands for omitted lines. A host's name, a process ID and the order of lines of
//! different ranks differ from run to run, and are not compared.
//!
//! Sessions that begin with `cd` belong to a project, and are compared by a test of `examples/templates`.
//!
//! Commands that are shown without output: launches are run with `--explain`, which decides everything that a start
//! decides and starts nothing, and those of `brigade emit` as they are.

mod pages;
mod session;

use std::fs::{self, Permissions};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use tempfile::TempDir;

/// Runs a command in the shell. Returns its exit code if that is not 0, then its output, errors first.
fn run(command: &str, folder: &Path) -> String {
    let program = Path::new(env!("CARGO_BIN_EXE_brigade")).parent().unwrap();
    let mut shell = Command::new("sh");
    shell.args(["-c", &format!("{command} 2>&1")]).current_dir(folder).stdin(Stdio::null());
    // Without the caller's environment, and with a home folder of its own.
    shell.env_clear().env("HOME", folder).env("COLUMNS", "100");
    let path = std::env::var("PATH").unwrap_or_default();
    shell.env("PATH", format!("{}:{path}", program.display()));
    let output = shell.output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    match output.status.code() {
        Some(0) => text,
        code => format!("? {}\n{text}", code.unwrap_or(-1)),
    }
}

/// Returns the lines without the parts that differ from run to run.
fn comparable(text: &str, host: &str) -> Vec<String> {
    let mut lines: Vec<String> = text
        .replace(&format!(" on {host} (pid "), " on node1 (pid ")
        .lines()
        .map(|line| match line.split_once("(pid ") {
            Some((before, after)) => {
                let after = after.trim_start_matches(|it: char| it.is_ascii_digit());
                format!("{before}(pid 4711{after}")
            }
            None => line.trim_end().to_owned(),
        })
        .collect();
    // Lines of ranks, in the order of the ranks.
    let is_of_a_rank = |line: &String| line.starts_with('[');
    for group in lines.chunk_by_mut(|a, b| is_of_a_rank(a) && is_of_a_rank(b)) {
        group.sort();
    }
    lines
}

/// Returns a folder with the files that the pages' commands name.
fn folder() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let programs = [
        "train",
        "target/debug/digits",
        "target/release/digits",
        "target/release/complete",
        "target/release/fashion_mnist",
        "target/release/learn_imagewoof",
        "target/release/learn_pets",
        "target/release/learn_segmentation",
        "target/release/learn_tabular",
        "target/release/text_glue",
        "target/release/text_gpt",
        "target/release/text_imdb",
        "target/release/text_ulmfit",
    ];
    for program in programs {
        let path = folder.path().join(program);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(&path, "#!/bin/sh\n").unwrap();
        fs::set_permissions(&path, Permissions::from_mode(0o755)).unwrap();
    }
    fs::write(folder.path().join("train.py"), "").unwrap();
    let hosts = "# three machines\nnode1 slots=4\nnode2 slots=4\nnode3 slots=2\n";
    fs::write(folder.path().join("hosts"), hosts).unwrap();
    fs::write(folder.path().join("fsdp.yaml"), FSDP).unwrap();
    folder
}

const FSDP: &str = "\
distributed_type: FSDP
mixed_precision: bf16
num_processes: 8
fsdp_config:
  fsdp_version: 2
  fsdp_reshard_after_forward: false
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: true
  fsdp_offload_params: true
  fsdp_state_dict_type: FULL_STATE_DICT
";

#[test]
fn launches_of_the_book_can_be_explained() {
    let (mut wrong, mut count) = (String::new(), 0);
    let folder = folder();
    for page in pages::pages() {
        for block in page.blocks("sh") {
            let block = block.replace("\\\n", " ");
            for line in block.lines().filter(|line| !line.starts_with("cargo ")) {
                let Some(at) = line.find("brigade launch ").or_else(|| line.find("brigade emit "))
                else {
                    continue;
                };
                // Building a project is not covered by `--explain`.
                let has_no_program = line.split(" -- ").next().unwrap().split(" #").next().unwrap();
                let has_no_program = has_no_program.trim() == "brigade launch --nproc 2";
                if has_no_program || line.contains(" --release") || line.contains(" --bin ") {
                    continue;
                }
                let mut command = line[at..].to_owned();
                if !command.contains(" --explain") {
                    command = command.replacen("brigade launch ", "brigade launch --explain ", 1);
                }
                let command = command.split(" #").next().unwrap();
                let found = run(command, folder.path());
                if found.starts_with("? ") {
                    wrong.push_str(&format!("{}: {command}\n{found}\n", page.name));
                }
                count += 1;
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong}");
    assert!(count > 20, "{count} commands");
}

#[test]
fn sessions_of_the_book_are_as_it_shows() {
    let host = nix::unistd::gethostname().unwrap().into_string().unwrap();
    let mut wrong = String::new();
    let mut run_of_them = 0;
    for page in pages::pages() {
        for block in page.blocks("console").filter(|block| !block.starts_with("$ cd ")) {
            let folder = folder();
            for step in session::steps(block) {
                let found = run(step.command, folder.path());
                let wanted = comparable(&step.answer.join("\n"), &host);
                if !session::fits(&wanted, &comparable(&found, &host), |a, b| a == b) {
                    wrong.push_str(&format!("{}: $ {}\n{found}\n", page.name, step.command));
                }
                run_of_them += 1;
            }
        }
    }
    assert!(wrong.is_empty(), "the pages show something else than:\n\n{wrong}");
    assert!(run_of_them > 5, "{run_of_them} commands");
}
