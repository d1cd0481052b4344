//! `text_imdb` and `text_ulmfit` as a user starts them: alone, again, on two processes, wrongly, and after they were
//! killed. After an intended change of the losses, `UPDATE_GOLDEN=1 cargo nextest run -p text numeric::` writes their
//! files in `tests/golden` anew.

#![allow(clippy::unwrap_used)]

#[path = "../../launcher.rs"]
mod launcher;

use std::fs;
use std::path::Path;
use std::process::{Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

const IMDB: &str = env!("CARGO_BIN_EXE_text_imdb");
const ULMFIT: &str = env!("CARGO_BIN_EXE_text_ulmfit");

/// A model that takes seconds, without dropout, which each process draws for itself.
const SMALL: &str = "--generate 16 --sizes 12 16 1 --seq-len 24 --epochs 1 --drop-mult 0";

fn command(program: impl AsRef<std::ffi::OsStr>, arguments: &str, folder: &Path) -> Command {
    let mut command = Command::new(program);
    command.args(arguments.split_whitespace()).current_dir(folder);
    command.env("OMP_NUM_THREADS", "1").env("RUST_BACKTRACE", "0").stdin(Stdio::null());
    command
}

fn run(program: impl AsRef<std::ffi::OsStr>, arguments: &str, folder: &Path) -> String {
    let output = command(program, arguments, folder).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let said = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{}\n{text}\n{said}", output.status);
    text
}

/// What the program says of an error, in one line, and its exit code.
fn refused(program: &str, arguments: &str, folder: &Path) -> (Option<i32>, String) {
    let output = command(program, arguments, folder).output().unwrap();
    let said = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!said.contains("panicked"), "{arguments}: {said}");
    (output.status.code(), said)
}

/// The losses of each fit.
fn losses(text: &str) -> Vec<Vec<f64>> {
    let lists = text.lines().filter_map(|line| line.split_once("losses [")?.1.strip_suffix(']'));
    lists.map(|list| list.split(", ").map(|loss| loss.parse().unwrap()).collect()).collect()
}

/// The first `steps` of each fit, to a relative tolerance.
#[track_caller]
fn close(found: &[Vec<f64>], expected: &[Vec<f64>], steps: usize, tolerance: f64, text: &str) {
    let lengths = |fits: &[Vec<f64>]| fits.iter().map(Vec::len).collect::<Vec<_>>();
    assert_eq!(lengths(found), lengths(expected), "{text}");
    for (fit, (found, expected)) in found.iter().zip(expected).enumerate() {
        for (step, (a, b)) in found.iter().zip(expected).enumerate().take(steps) {
            let off = (a - b).abs() / b.abs();
            assert!(off <= tolerance, "fit {fit}, step {step}: {a}, expected {b}: {off:e}\n{text}");
        }
    }
}

/// Losses compared with those of the golden files.
mod numeric {
    use super::*;

    /// A program alone, with the golden file's losses; again with other threads, to the same bits; and on two processes
    /// with half the batch. Gives what it printed alone.
    fn check(program: &str, name: &str, options: &str, fits: &[usize]) -> String {
        let folder = tempfile::tempdir().unwrap();
        let folder = folder.path();
        let options = format!("{SMALL} {options} --log-losses");
        let alone = format!("{options} --batch-size 8");
        let first = run(program, &format!("{alone} --threads 1"), folder);
        let one = losses(&first);
        assert_eq!(one.iter().map(Vec::len).collect::<Vec<_>>(), fits, "{first}");
        let golden =
            Path::new(env!("CARGO_MANIFEST_DIR")).join(format!("tests/golden/{name}.json"));
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            fs::write(&golden, serde_json::to_string_pretty(&one).unwrap() + "\n").unwrap();
        }
        let golden: Vec<Vec<f64>> = serde_json::from_slice(&fs::read(golden).unwrap()).unwrap();
        close(&one, &golden, GOLDEN_STEPS, GOLDEN_TOLERANCE, &first);
        // The tokens come from the texts first and from the cache then.
        for _ in 0..2 {
            let again = run(program, &format!("{alone} --threads 3 --cache tokens"), folder);
            assert_eq!(losses(&again), one, "{first}{again}");
        }

        let half = format!("{options} --batch-size 4 --sync-batch-norm");
        let launched = format!("launch --nproc 2 {program} {half}");
        let text = run(launcher::brigade_beside(program), &launched, folder);
        // AR and TAR are means over padded outputs, and ranks pad to their own longest text.
        close(&losses(&text), &one, 3, 2e-3, &text);
        assert_eq!(text.matches("[0] epoch     train_loss").count(), fits.len(), "{text}");
        assert_eq!(text.matches("[1]").count(), 0, "rank 0 alone prints: {text}");
        first
    }

    /// Other processors add up in another order: without vector instructions these losses are within 3e-6 of the file's.
    /// Steps of Adam make the distance larger, as it divides by the root of gradients that are nearly 0.
    const GOLDEN_STEPS: usize = 4;
    const GOLDEN_TOLERANCE: f64 = 1e-4;

    #[test]
    fn dist_imdb_alone_again_and_on_two_processes() {
        let text = check(IMDB, "imdb", "--lr 2e-4", &[4, 4]);
        assert!(text.contains("train_loss  valid_loss  accuracy"), "{text}");
        assert!(text.contains("the ending isn't dull.\": "), "{text}");
    }

    #[test]
    fn dist_ulmfit_alone_again_and_on_two_processes() {
        let text = check(
            ULMFIT,
            "ulmfit",
            "--lr 2e-4 --unfrozen-lr 2e-4 --language-epochs 2 --words 5",
            &[38, 4, 4, 4, 4],
        );
        assert!(text.contains("accuracy  perplexity"), "{text}");
        assert!(text.contains("the language model goes on: i saw it on a plane"), "{text}");
    }
}

#[test]
fn imdb_learns_and_goes_on_from_what_ulmfit_has_saved() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let text = run(IMDB, "", folder);
    let table: Vec<Vec<&str>> =
        text.lines().map(|line| line.split_whitespace().collect()).collect();
    let accuracy: f64 =
        table.iter().rfind(|row| row.first() == Some(&"5")).unwrap()[3].parse().unwrap();
    assert!(accuracy > 0.8, "{text}");

    run(ULMFIT, &format!("{SMALL} --language-epochs 1 --words 0"), folder);
    let saved = "--weights ulmfit/language_model.pth --vocabulary ulmfit/vocabulary.json";
    let text = run(IMDB, &format!("{SMALL} {saved}"), folder);
    assert!(!text.contains("No pretrained weights"), "{text}");
}

#[test]
fn a_killed_run_goes_on_to_the_same_losses() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let options = "--generate 40 --sizes 12 16 1 --epochs 3 --batch-size 4 --words 5 --log-losses";
    let whole = run(ULMFIT, options, folder);
    let goes_on = |text: &str| text.lines().find(|it| it.contains("goes on: ")).unwrap().to_owned();

    let options = format!("{options} --checkpoint run --checkpoint-every 5");
    for part in ["language_model", "classifier"] {
        let mut child = command(ULMFIT, &options, folder).stdout(Stdio::null()).spawn().unwrap();
        while !folder.join("run").join(part).is_dir() {
            assert_eq!(child.try_wait().unwrap(), None, "it ended before its first checkpoint");
            sleep(Duration::from_millis(2));
        }
        child.kill().unwrap();
        assert_eq!(child.wait().unwrap().code(), None, "it ended before it was killed");
    }
    let resumed = run(ULMFIT, &options, folder);
    assert!(resumed.contains("Continuing from run/classifier at epoch "), "{resumed}");
    assert_eq!(goes_on(&resumed), goes_on(&whole));
    assert_eq!(losses(&resumed), losses(&whole));
}

#[test]
fn wrong_use_is_answered_with_a_line() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    for program in [IMDB, ULMFIT] {
        let (code, said) = refused(program, "--data absent", folder);
        assert!(code == Some(1) && said.contains("absent is not laid out"), "{said}");
        for wrong in ["--epochs 0", "--sizes 8 12", "--weights w.pth", "--precision fp8"] {
            let (code, said) = refused(program, wrong, folder);
            assert_eq!(code, Some(2), "{wrong}: {said}");
        }
    }
    for set in ["train", "test"] {
        for class in ["pos", "neg"] {
            let class = folder.join(format!("films/{set}/{class}"));
            fs::create_dir_all(&class).unwrap();
            fs::write(class.join("0.txt"), "What a film!").unwrap();
        }
    }
    // Latin-1.
    let latin = folder.join("films/train/neg/1.txt");
    fs::write(&latin, b"Na\xEFve.").unwrap();
    for program in [IMDB, ULMFIT] {
        let (code, said) = refused(program, "--data films", folder);
        assert!(code == Some(1) && said.contains("train/neg/1.txt"), "{said}");
        assert!(said.contains("UTF-8"), "{said}");
    }
    fs::remove_file(latin).unwrap();
    let unsup = folder.join("films/train/unsup");
    fs::create_dir(&unsup).unwrap();
    let (code, said) = refused(IMDB, "--data films", folder);
    assert!(code == Some(1) && said.contains("move it to films/unsup"), "{said}");
    fs::remove_dir(unsup).unwrap();

    fs::write(folder.join("broken.json"), "{\"format\": ").unwrap();
    let broken = "--generate 12 --weights absent.pth --vocabulary broken.json";
    for program in [IMDB, ULMFIT] {
        let (code, said) = refused(program, broken, folder);
        assert!(code == Some(1) && said.contains("broken.json"), "{said}");
        assert!(said.contains("not JSON"), "{said}");
    }
    fs::write(folder.join("words.json"), "[\"xxunk\", \"xxpad\", \"film\"]").unwrap();
    let (code, said) = refused(IMDB, &broken.replace("broken", "words"), folder);
    assert!(code == Some(1) && said.contains("absent.pth"), "{said}");
}
