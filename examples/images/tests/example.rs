//! The three programs as a user starts them: alone, on two processes, and wrongly.

#![allow(clippy::unwrap_used)]

#[path = "../../launcher.rs"]
mod launcher;

use std::path::Path;
use std::process::{Command, Output};

const PROGRAMS: [&str; 3] = [
    env!("CARGO_BIN_EXE_image_folder"),
    env!("CARGO_BIN_EXE_imagewoof"),
    env!("CARGO_BIN_EXE_pets"),
];

/// A set that takes seconds, also without optimisation.
const SMALL: [&str; 10] =
    ["--generate", "3", "10", "--batch-size", "4", "--size", "32", "--epochs", "2", "--log-losses"];

fn run(program: impl AsRef<std::ffi::OsStr>, arguments: &[&str], folder: &Path) -> Output {
    Command::new(program)
        .args(arguments)
        .env("OMP_NUM_THREADS", "1")
        .env_remove("HF_HUB_CACHE")
        .env("HF_HOME", folder)
        .current_dir(folder)
        .output()
        .unwrap()
}

fn succeed(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{said}", output.status);
    text
}

/// What the program says of its losses and accuracies.
fn figures(text: &str) -> Vec<&str> {
    text.lines().filter(|line| line.contains("loss") || line.contains("accuracy")).collect()
}

#[test]
fn losses_are_the_same_with_any_number_of_threads_and_in_every_run() {
    let folder = tempfile::tempdir().unwrap();
    for program in PROGRAMS {
        let [one, four] = ["1", "4"].map(|threads| {
            let threads = [&SMALL[..], &["--threads", threads]].concat();
            succeed(&run(program, &threads, folder.path()))
        });
        let steps = if program.ends_with("pets") { 6 } else { 7 };
        assert_eq!(figures(&one).len(), 2 * (steps + 1), "{one}");
        assert_eq!(figures(&one), figures(&four), "{program}");
        // In another run, whose images come from the cache from the second epoch on.
        let cached = [&SMALL[..], &["--threads", "2", "--cache", "cache"]].concat();
        let cached = succeed(&run(program, &cached, folder.path()));
        assert_eq!(figures(&one), figures(&cached), "{program}");
    }
}

#[test]
fn dist_two_processes_train() {
    let folder = tempfile::tempdir().unwrap();
    for program in PROGRAMS {
        let arguments = [&["launch", "--nproc", "2", program][..], &SMALL].concat();
        let brigade = launcher::brigade_beside(PROGRAMS[0]);
        let text = succeed(&run(brigade, &arguments, folder.path()));
        for rank in ["[0] loss", "[1] loss"] {
            assert_eq!(text.lines().filter(|line| line.starts_with(rank)).count(), 6, "{text}");
        }
        assert_eq!(text.matches("epoch 2/2, accuracy = ").count(), 1, "{text}");
    }
}

#[test]
fn wrong_use_is_answered_with_a_line() {
    let folder = tempfile::tempdir().unwrap();
    for program in PROGRAMS {
        let missing = run(program, &["--data", "absent"], folder.path());
        let said = String::from_utf8_lossy(&missing.stderr).into_owned();
        assert_eq!(missing.status.code(), Some(1), "{said}");
        assert!(said.contains("absent") && !said.contains("panicked"), "{said}");
    }
    let small = run(PROGRAMS[0], &["--size", "8"], folder.path());
    assert_eq!(small.status.code(), Some(2));
}
