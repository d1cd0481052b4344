//! The example as a user starts it: alone, on two processes, and wrongly.

use std::process::Command;

use crate::programs::{EXAMPLE, SINGLE, accuracies, brigade, run, succeed};

/// One epoch is enough to see that the loop works.
const SHORT: [&str; 4] = ["--epochs", "1", "--threads", "1"];

#[test]
fn alone_the_two_programs_do_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let mut weights = Vec::new();
    let mut printed = Vec::new();
    for (name, program) in [("single", SINGLE), ("accelerated", EXAMPLE)] {
        let file = folder.path().join(name).with_extension("safetensors");
        let text = succeed(
            Command::new(program)
                .args(SHORT)
                .arg("--nchw")
                .env("OMP_NUM_THREADS", "1")
                .arg("--save")
                .arg(&file),
        );
        assert!(text.contains("epoch 1/1, accuracy = "), "{text}");
        assert!(text.contains("samples per second"), "{text}");
        printed.push(accuracies(&text));
        weights.push(std::fs::read(file).unwrap());
    }
    assert_eq!(printed[0], printed[1]);
    assert!(weights[0] == weights[1], "the same seed gives the same weights, bit for bit");
}

#[test]
fn dist_two_processes_learn_the_digits() {
    let text = succeed(Command::new(brigade()).args([
        "launch",
        "--nproc",
        "2",
        EXAMPLE,
        "--epochs",
        "3",
        "--log-losses",
    ]));
    let reached = accuracies(&text);
    assert_eq!(reached.len(), 3, "only the main process prints accuracies:\n{text}");
    assert!(*reached.last().unwrap() > 90.0, "{text}");
    for rank in ["[0]", "[1]"] {
        let losses = text.lines().filter(|line| line.starts_with(rank) && line.contains("loss ="));
        assert_eq!(losses.count(), 3, "every rank logs its own loss:\n{text}");
    }
}

#[test]
fn wrong_use_is_answered_with_a_line() {
    let empty = tempfile::tempdir().unwrap();
    let absent = empty.path().join("absent");
    for (arguments, expected) in [
        (&["--data", &*absent.to_string_lossy()][..], "there is no folder"),
        (&["--epochs", "0"][..], "0 is not in 1.."),
        (&["--batch-size", "0"][..], "at least 1"),
        (&["--bach-size", "8"][..], "--batch-size"),
    ] {
        let output = run(Command::new(EXAMPLE).args(arguments));
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{text}");
        assert!(text.contains(expected), "{text}");
    }
    let output = run(Command::new(EXAMPLE).arg("--data").arg(empty.path()));
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains(&*empty.path().to_string_lossy()), "{text}");

    let output = run(Command::new(EXAMPLE).env("RANK", "3").env("WORLD_SIZE", "2"));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("RANK"), "{text}");
}
