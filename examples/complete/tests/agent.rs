//! The launcher itself is killed while its ranks save; the next run goes on as if nothing had been.

#![allow(clippy::unwrap_used)] // also in what the tests share

#[path = "../../launcher.rs"]
mod launcher;
mod run;

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use run::{EXAMPLE, finish};

fn launch(brigade: &Path, folder: &Path) -> Command {
    let mut command = Command::new(brigade);
    command.args(["launch", "--nproc", "2", "--cpu", "--"]).arg(EXAMPLE);
    command.args(["--epochs", "2", "--checkpoint-every", "1", "--resume", "--folder"]).arg(folder);
    command.env("OMP_NUM_THREADS", "1").stdin(Stdio::null());
    command
}

/// The folders of checkpoints: those with their names, or those that are being written.
fn folders(folder: &Path, being_written: bool) -> Vec<PathBuf> {
    let entries = fs::read_dir(folder.join("checkpoints")).into_iter().flatten().flatten();
    let hidden = |path: &Path| path.file_name().unwrap().to_string_lossy().starts_with('.');
    entries.map(|entry| entry.path()).filter(|path| hidden(path) == being_written).collect()
}

/// Processes whose command line names the folder.
fn ranks(folder: &Path) -> Vec<String> {
    let name = folder.to_str().unwrap();
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let lines = processes.filter_map(|process| fs::read(process.path().join("cmdline")).ok());
    let lines = lines.map(|line| String::from_utf8_lossy(&line).replace('\0', " "));
    lines.filter(|line| line.contains(name)).collect()
}

/// Kills the launcher in its first save, or in one after it, as soon as the folder is there that is being
/// written.
fn kill_within_a_save(mut launcher: Child, folder: &Path, first: bool) {
    let mut wait_until = |reached: &dyn Fn() -> bool| {
        while !reached() {
            assert_eq!(launcher.try_wait().unwrap(), None, "it ended before it was killed");
            sleep(Duration::from_micros(100));
        }
    };
    if !first {
        let before = folders(folder, false);
        wait_until(&|| folders(folder, false).iter().any(|path| !before.contains(path)));
    }
    let before = folders(folder, true);
    wait_until(&|| folders(folder, true).iter().any(|path| !before.contains(path)));
    launcher.kill().unwrap();
    launcher.wait().unwrap();
    let begin = Instant::now();
    while !ranks(folder).is_empty() {
        assert!(begin.elapsed() < Duration::from_secs(30), "{:?} stay", ranks(folder));
        sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_killed_launcher_leaves_no_rank_and_no_half_checkpoint() {
    let brigade = launcher::brigade_beside(EXAMPLE);
    let folder = tempfile::tempdir().unwrap();
    let (whole, killed) = (folder.path().join("whole"), folder.path().join("killed"));
    finish(launch(&brigade, &whole));

    // Until a save was cut in two, and another run has gone on after one.
    let (mut cut, mut resumed) = (0, 0);
    for round in 0.. {
        if cut > 0 && resumed > 0 && round >= 3 {
            break;
        }
        assert!(round < 10, "of {round} kills {cut} cut a save and {resumed} left a checkpoint");
        let quiet = |mut command: Command| {
            command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
        };
        kill_within_a_save(quiet(launch(&brigade, &killed)), &killed, round % 2 == 0);
        cut += folders(&killed, true).len();
        for checkpoint in folders(&killed, false) {
            let mut verify = Command::new(&brigade);
            verify.args(["checkpoint", "verify"]).arg(&checkpoint);
            finish(verify);
            resumed += 1;
        }
    }
    let text = finish(launch(&brigade, &killed));
    assert!(text.contains("goes on after step "), "{text}");
    assert!(folders(&killed, true).is_empty(), "what was cut is swept");
    let weights = |folder: &Path| fs::read(folder.join("model.safetensors")).unwrap();
    assert!(weights(&whole) == weights(&killed), "bit for bit");
}
