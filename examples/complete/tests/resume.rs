//! The example, killed and started again, against the same run that was left alone.

#![allow(clippy::unwrap_used)] // also in what the tests share

mod run;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use run::{EXAMPLE, finish};

fn example(folder: &Path) -> Command {
    let mut command = Command::new(EXAMPLE);
    command.args(["--epochs", "2", "--checkpoint-every", "3", "--folder"]).arg(folder);
    command.env("OMP_NUM_THREADS", "1").stdin(Stdio::null());
    command
}

/// Waits until a checkpoint is whole, and kills the program.
fn kill_after_a_checkpoint(mut child: Child, folder: &Path) {
    let checkpoints = folder.join("checkpoints");
    let whole = || {
        fs::read_dir(&checkpoints).is_ok_and(|entries| {
            entries
                .flatten()
                .any(|entry| entry.file_name().to_string_lossy().starts_with("checkpoint_"))
        })
    };
    while !whole() {
        assert_eq!(child.try_wait().unwrap(), None, "it ended before its first checkpoint");
        sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
}

#[test]
fn a_killed_run_goes_on_to_the_same_weights() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    let text = finish(example(&whole));
    assert!(text.contains("epoch 2/2, accuracy = "), "{text}");

    let child = example(&killed).stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    kill_after_a_checkpoint(child, &killed);
    let mut again = example(&killed);
    again.arg("--resume");
    let text = finish(again);
    assert!(text.contains("goes on after step "), "{text}");

    let weights = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
    assert!(weights(&whole) == weights(&killed), "bit for bit");
}
