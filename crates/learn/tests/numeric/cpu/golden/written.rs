//! What callbacks print and write.

use std::process::Command;

use serde_json::Value;

use super::recipe::number;
use super::runs::{all, make, make_with, run};

/// Set for the process whose output is looked at.
const SPEAKS: &str = "BRIGADE_GOLDEN_SPEAKS";

/// A line's words, with numbers read: Python and Rust write small ones in different ways.
fn words(line: &str) -> Vec<Result<f64, String>> {
    line.split(' ')
        .map(|word| word.trim_end_matches('.').parse().map_err(|_| word.to_owned()))
        .collect()
}

fn same(ours: &str, theirs: &str) -> bool {
    let (ours, theirs) = (words(ours), words(theirs));
    ours.len() == theirs.len()
        && ours.iter().zip(&theirs).all(|words| match words {
            (Ok(ours), Ok(theirs)) => (ours - theirs).abs() <= 2e-6 * theirs.abs(),
            (ours, theirs) => ours == theirs,
        })
}

#[test]
fn lines_are_fastais() {
    let runs = || all().iter().filter(|run| run["printed"].is_array());
    if std::env::var_os(SPEAKS).is_some() {
        for run in runs() {
            println!("\nrun {}", run["name"].as_str().unwrap());
            make_with(run, false).result.unwrap();
        }
        return;
    }
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "cpu::golden::written::lines_are_fastais", "--nocapture"])
        .env(SPEAKS, "1")
        .output()
        .unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}\n{}", String::from_utf8_lossy(&output.stderr));
    assert!(runs().count() >= 10);
    for run in runs() {
        let name = run["name"].as_str().unwrap();
        let begin = format!("\nrun {name}\n");
        let (_, lines) =
            text.split_once(&begin).unwrap_or_else(|| panic!("{name} is not in\n{text}"));
        let lines = lines.split("\nrun ").next().unwrap();
        let beginnings = ["No improvement ", "Better model ", "Epoch "];
        let ours: Vec<&str> =
            lines.lines().filter(|line| beginnings.iter().any(|it| line.starts_with(it))).collect();
        let theirs: Vec<String> = serde_json::from_value(run["printed"].clone()).unwrap();
        // The best epoch of an earlier fit has no number in this one, and no epoch has the number -1.
        let theirs: Vec<String> =
            theirs.iter().map(|line| line.replace("since epoch -1", "in this fit")).collect();
        assert_eq!(ours.len(), theirs.len(), "{name}: {ours:?} instead of {theirs:?}");
        for (ours, theirs) in ours.iter().zip(&theirs) {
            assert!(same(ours, theirs), "{name}: `{ours}` instead of `{theirs}`");
        }
    }
}

/// The cells of a table without its last column, the time.
fn cells(line: &str) -> Vec<&str> {
    let mut cells: Vec<&str> = line.split(',').collect();
    cells.pop();
    cells
}

#[test]
fn tables_are_fastais() {
    for name in ["csv_logger", "csv_logger_append"] {
        let run = run(name);
        let ours = make(run);
        ours.result.as_ref().unwrap();
        for (file, lines) in run["csv"].as_object().unwrap() {
            let text = std::fs::read_to_string(ours.folder.path().join(file)).unwrap();
            let lines: Vec<&str> =
                lines.as_array().unwrap().iter().filter_map(Value::as_str).collect();
            // fastai's text ends with an empty line.
            let lines: Vec<&str> = lines.into_iter().filter(|line| !line.is_empty()).collect();
            assert_eq!(text.lines().count(), lines.len(), "{name}: {text}");
            for (ours, theirs) in text.lines().zip(lines) {
                let (ours, theirs) = (cells(ours), theirs.split(',').collect::<Vec<_>>());
                assert_eq!(ours.len(), theirs.len(), "{name}: {ours:?} instead of {theirs:?}");
                for (ours, theirs) in ours.iter().zip(theirs) {
                    match theirs.parse::<f64>() {
                        Ok(theirs) => {
                            let ours = number(&serde_json::from_str(ours).unwrap());
                            let apart = (ours - theirs).abs();
                            assert!(apart <= 3e-6 * theirs, "{name}: {ours} instead of {theirs}");
                        }
                        Err(_) => assert_eq!(*ours, theirs, "{name}"),
                    }
                }
            }
        }
    }
}

#[test]
fn validation_and_predictions_leave_the_recorder() {
    // fastai's begin like a fit, and clear the recorder.
    let run = run("validate_and_predict");
    let ours = make(run);
    ours.result.as_ref().unwrap();
    assert_eq!(ours.validations.len() + ours.predictions.len(), 3);
    assert_eq!(*ours.learner.recorder(), ours.fits[0].recorder);
    assert_eq!(ours.learner.recorder().losses().len(), 9);
}
