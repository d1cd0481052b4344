//! The programs as a user starts them: alone, again, on two processes, wrongly, and after they were killed.

#![allow(clippy::unwrap_used)]

#[path = "../../launcher.rs"]
mod launcher;

use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::thread::sleep;
use std::time::Duration;

const IMAGEWOOF: &str = env!("CARGO_BIN_EXE_learn_imagewoof");
const PETS: &str = env!("CARGO_BIN_EXE_learn_pets");
const TABULAR: &str = env!("CARGO_BIN_EXE_learn_tabular");
const SEGMENTATION: &str = env!("CARGO_BIN_EXE_learn_segmentation");

fn command(program: impl AsRef<std::ffi::OsStr>, arguments: &str, folder: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(arguments.split_whitespace()).current_dir(folder);
    command.env("OMP_NUM_THREADS", "1").env("RUST_BACKTRACE", "0").stdin(Stdio::null());
    command
}

fn succeed(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{said}", output.status);
    text
}

fn run(program: impl AsRef<std::ffi::OsStr>, arguments: &str, folder: &Path) -> String {
    succeed(&command(program, arguments, folder).output().unwrap())
}

/// The losses of each fit.
fn losses(text: &str) -> Vec<Vec<f64>> {
    let lists = text.lines().filter_map(|line| line.split_once("losses [")?.1.strip_suffix(']'));
    lists.map(|list| list.split(", ").map(|loss| loss.parse().unwrap()).collect()).collect()
}

/// A program alone, again with other threads, and on two processes with half the batch: the same losses, on two
/// processes to rounding in the first `steps` of each fit, as later steps make rounding larger. Gives what it
/// printed alone.
fn check(program: &str, options: &str, batch: usize, fits: &[usize], steps: usize) -> String {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let options = format!("{options} --log-losses");
    let alone = format!("{options} --batch-size {batch}");
    let first = run(program, &format!("{alone} --threads 1 --plots plots"), folder);
    let one = losses(&first);
    assert_eq!(one.iter().map(Vec::len).collect::<Vec<_>>(), fits, "{first}");
    let again = run(program, &format!("{alone} --threads 3"), folder);
    assert_eq!(losses(&again), one, "{first}{again}");
    for picture in ["loss", "schedule", "metrics"] {
        let bytes = std::fs::read(folder.join(format!("plots/{picture}.png"))).unwrap();
        assert_eq!(bytes[..8], *b"\x89PNG\r\n\x1a\n", "{picture}");
    }

    let half = format!("{options} --batch-size {} --sync-batch-norm", batch / 2);
    let launched = format!("launch --nproc 2 {program} {half}");
    let text = run(launcher::brigade_beside(program), &launched, folder);
    let two = losses(&text);
    assert_eq!(two.iter().map(Vec::len).collect::<Vec<_>>(), fits, "{text}");
    for (one, two) in one.iter().zip(&two) {
        for (one, two) in one.iter().zip(two).take(steps) {
            assert!((one - two).abs() <= 2e-3 * one.abs().max(1.0), "{one} {two}\n{first}{text}");
        }
    }
    assert_eq!(text.matches("[0] epoch     train_loss").count(), fits.len(), "{text}");
    assert_eq!(text.matches("[1]").count(), 0, "rank 0 alone prints: {text}");
    first
}

#[test]
fn dist_imagewoof_alone_again_and_on_two_processes() {
    let small = "--generate 3 6 --size 32 --epochs 1 --mixup 0";
    let text = check(IMAGEWOOF, small, 4, &[4], 2);
    assert!(text.contains("accuracy  top_k_accuracy"), "{text}");
}

#[test]
fn dist_pets_alone_again_and_on_two_processes() {
    // The head has dropout, which each rank draws by itself: losses on two processes are others.
    let small = "--generate 2 10 --size 32 --epochs 1 --finder-steps 6 --lr 1e-4";
    let text = check(PETS, small, 8, &[2, 2], 0);
    for found in ["lr_find, valley: ", "precision    recall", "named-photos-2x10/disc_0.jpg: "] {
        assert!(text.contains(found), "{found}: {text}");
    }
}

#[test]
fn dist_tabular_alone_again_and_on_two_processes() {
    let text = check(TABULAR, "--generate 1000 --epochs 3", 50, &[48], 48);
    // Learnt, and the best epoch is the model of the end.
    let best = text.lines().find_map(|line| line.strip_prefix("the best model: loss ")).unwrap();
    let auc: f64 = best.rsplit(' ').next().unwrap().parse().unwrap();
    assert!(auc > 0.8, "{text}");
}

#[test]
fn dist_segmentation_alone_again_and_on_two_processes() {
    let text = check(SEGMENTATION, "--generate 10 --size 32 --epochs 1", 4, &[2], 2);
    assert!(text.contains("dice_multi  foreground_acc"), "{text}");
}

#[test]
fn mixed_precision_and_mixup_train() {
    let folder = tempfile::tempdir().unwrap();
    let small = "--generate 2 4 --size 32 --epochs 1 --batch-size 4 --precision bf16 --log-losses";
    let [first, again] = [(); 2].map(|()| run(IMAGEWOOF, small, folder.path()));
    assert!(losses(&first)[0].iter().all(|loss| loss.is_finite()), "{first}");
    assert_eq!(losses(&first), losses(&again));
}

#[test]
fn a_killed_run_goes_on_to_the_same_losses() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let options = "--generate 4000 --epochs 6 --batch-size 16 --patience 6 --log-losses";
    let whole = run(TABULAR, options, folder);

    let options = format!("{options} --checkpoint run --checkpoint-every 40 --best killed.pth");
    let mut child = command(TABULAR, &options, folder).stdout(Stdio::null()).spawn().unwrap();
    while !folder.join("run").is_dir() {
        assert_eq!(child.try_wait().unwrap(), None, "it ended before its first checkpoint");
        sleep(Duration::from_millis(2));
    }
    child.kill().unwrap();
    assert_eq!(child.wait().unwrap().code(), None, "it ended before it was killed");
    let resumed = run(TABULAR, &options, folder);
    assert!(resumed.contains("Continuing from run at epoch "), "{resumed}");
    assert_eq!(losses(&resumed), losses(&whole));
    let end = |text: &str| {
        text.lines().filter(|line| line.contains("the best model")).map(str::to_owned).collect()
    };
    let ends: [Vec<String>; 2] = [end(&whole), end(&resumed)];
    assert_eq!(ends[0], ends[1]);

    // A fit that is done is not begun again.
    let done = run(TABULAR, &options, folder);
    assert_eq!(losses(&done), losses(&whole), "{done}");
    let other = options.replace("--epochs 6", "--epochs 7");
    let refused = command(TABULAR, &other, folder).output().unwrap();
    let said = String::from_utf8_lossy(&refused.stderr).into_owned();
    assert!(said.contains("is of a fit of 6 epochs, and this one has 7"), "{said}");
}

#[test]
fn wrong_use_is_answered_with_a_line() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for program in [IMAGEWOOF, PETS, TABULAR, SEGMENTATION] {
        let missing = command(program, "--data absent", folder).output().unwrap();
        let said = String::from_utf8_lossy(&missing.stderr).into_owned();
        assert_eq!(missing.status.code(), Some(1), "{said}");
        assert!(said.contains("absent") && !said.contains("panicked"), "{said}");
        let wrong = command(program, "--epochs 0", folder).output().unwrap();
        assert_eq!(wrong.status.code(), Some(2), "{program}");
    }
    std::fs::write(folder.join("people.csv"), "age,work\n30,Private\n").unwrap();
    let other = command(TABULAR, "--data people.csv", folder).output().unwrap();
    let said = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(said.contains("people.csv has") && !said.contains("panicked"), "{said}");
    let weights = "--generate 2 5 --size 32 --batch-size 4 --weights absent.pth";
    let other = command(PETS, weights, folder).output().unwrap();
    let said = String::from_utf8_lossy(&other.stderr).into_owned();
    assert!(said.contains("absent.pth") && !said.contains("panicked"), "{said}");
}
