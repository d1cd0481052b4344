//! `brigade explain` as a user runs it.

#![allow(clippy::unwrap_used)] // clippy.toml allows it in test functions, not in what they call

use std::fs;
use std::io::Read;
use std::path::Path;
use std::process::{Command, Output, Stdio};

use serde_json::Value;

fn shards(args: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_brigade"));
    command.args(["explain", "shards"]).args(args.split_whitespace());
    command
}

fn answer(args: &str) -> String {
    let Output { status, stdout, stderr } = shards(args).output().unwrap();
    assert!(status.success(), "{args}: {}", String::from_utf8_lossy(&stderr));
    String::from_utf8(stdout).unwrap()
}

/// The exit code and what is said about `args`.
fn refusal(args: &str) -> (i32, String) {
    let Output { status, stdout, stderr } = shards(args).output().unwrap();
    assert!(!status.success() && stdout.is_empty(), "{args}");
    (status.code().unwrap(), String::from_utf8(stderr).unwrap())
}

#[test]
fn json_is_the_tables_of_accelerate_torch_and_fastai() {
    // The whole tables are brigade-plan's tests; a process for each case would take minutes.
    for (table, scheme, every) in [
        ("batch_sampler_shard.json", "accelerate", 29),
        ("distributed_dl.json", "fastai", 5),
        ("distributed_sampler.json", "torch", 5),
    ] {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../plan/tests/golden").join(table);
        let table: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
        for case in table["cases"].as_array().unwrap().iter().step_by(every) {
            let (n, world) = (&case["n"], &case["world"]);
            // torch's table is of the sampler alone: one batch that holds all of a rank.
            let batch_size = case.get("batch_size").unwrap_or(n);
            let mut args = format!(
                "--json --scheme {scheme} --samples {n} --batch-size {batch_size} --nproc {world}"
            );
            for (key, value, flag) in [
                ("drop_last", true, " --drop-last"),
                ("split_batches", true, " --split-batches"),
                ("even_batches", false, " --no-even-batches"),
            ] {
                if case.get(key) == Some(&Value::Bool(value)) {
                    args += flag;
                }
            }
            let mut answer: Value = serde_json::from_str(&answer(&args)).unwrap();
            if scheme == "torch" {
                for rank in answer["shards"].as_array_mut().unwrap() {
                    *rank = rank.get(0).cloned().unwrap_or(Value::Array(Vec::new()));
                }
            }
            assert_eq!(answer["shards"], case["shards"], "{args}");
        }
    }
}

#[test]
fn a_table_shows_who_gets_what() {
    assert_eq!(
        answer("--samples 50 --batch-size 12 --nproc 4"),
        "\
round  rank 0       rank 1   rank 2   rank 3
0      0-11         12-23    24-35    36-47
1      48-49 (0-9)  (10-21)  (22-33)  (34-45)

(...) repeats samples to fill the batch; metrics leave them out
50 samples: 50 seen, 46 repeated, 0 dropped; 2 batches on each of 4 ranks
"
    );
    assert_eq!(
        answer("--samples 50 --batch-size 12 --nproc 4 --no-even-batches"),
        "\
round  rank 0  rank 1  rank 2  rank 3
0      0-11    12-23   24-35   36-47
1      48-49   -       -       -

not every rank has the last batch: a collective in its step would wait for those that have none
50 samples: 50 seen, 0 repeated, 0 dropped; 2 batches on rank 0, 1 batch on ranks 1-3
"
    );
    assert_eq!(
        answer("--samples 50 --batch-size 12 --nproc 4 --scheme torch"),
        "\
round  rank 0   rank 1   rank 2   rank 3
0      0,4..44  1,5..45  2,6..46  3,7..47
1      48       49       (0)      (1)

(...) repeats samples to fill the batch; metrics leave them out
50 samples: 50 seen, 2 repeated, 0 dropped; 2 batches on each of 4 ranks
"
    );
    assert_eq!(
        answer("--samples 50 --batch-size 12 --nproc 4 --scheme fastai --drop-last"),
        "\
round  rank 0  rank 1  rank 2  rank 3
0      0-11    13-24   26-37   39-49 (0)

(...) repeats samples to fill the batch; metrics leave them out
50 samples: 47 seen, 1 repeated, 3 dropped; 1 batch on each of 4 ranks
"
    );
    assert_eq!(
        answer("--samples 10 --batch-size 20 --nproc 1 --drop-last"),
        "10 samples: 0 seen, 0 repeated, 10 dropped; 0 batches on the one rank\n"
    );
}

#[test]
fn a_long_table_leaves_the_middle_out_unless_asked() {
    let args = "--samples 100000 --batch-size 64 --nproc 4";
    let short = answer(args);
    assert_eq!(short.lines().count(), 1 + 12 + 1 + 4 + 3);
    assert!(short.contains("\n... 375 more rounds\n387    99072-99135"), "{short}");
    assert!(short.contains("\n390    99840-99903  99904-99967  99968-99999 (0-31)  (32-95)\n"));
    let all = answer(&format!("{args} --all"));
    assert_eq!(all.lines().count(), 1 + 391 + 3);
    assert!(!all.contains("more"), "{all}");
}

#[test]
fn many_ranks_go_down_the_page() {
    let args = "--samples 100000 --batch-size 64 --nproc 64";
    let short = answer(args);
    assert!(short.starts_with("rank  round 0    round 1 "), "{short}");
    assert!(short.contains("  ... 19 more  round 24\n"), "{short}");
    assert!(
        short.contains("\n26    1664-1727  ") && short.contains("  99968-99999 (0-31)\n"),
        "{short}"
    );
    assert!(short.lines().all(|line| line.len() <= 100), "{short}");
    // In full, the rounds that do not fit stand below, each rank in each block.
    let all = answer(&format!("{args} --all"));
    let blocks = all.lines().filter(|line| line.starts_with("rank  round")).count();
    let rounds = all.matches("round ").count();
    assert_eq!((rounds, all.matches("\n63    ").count()), (25, blocks));
    assert!(all.lines().all(|line| line.len() <= 100), "{all}");
    // Past a page the ranks are left out as well, but not the one where the samples end.
    let page = answer("--samples 100000 --batch-size 64 --nproc 1000");
    assert!(page.lines().count() < 75, "{page}");
    assert!(page.contains("\n562   35968-36031  99968-99999 (0-31)\n"), "{page}");
}

#[test]
fn impossible_questions_get_one_clear_line() {
    for (args, code, text) in [
        (
            "--samples 0 --batch-size 8 --nproc 2",
            2,
            "'0' for '--samples <N>': it must be at least 1",
        ),
        ("--samples 5 --batch-size 0 --nproc 2", 2, "'0' for '--batch-size <N>': it must be at"),
        ("--samples 5 --batch-size 8 --nproc 0", 2, "'0' for '--nproc <N>': it must be at least 1"),
        (
            "--samples -5 --batch-size 8 --nproc 1",
            2,
            "'-5' for '--samples <N>': it must be a whole",
        ),
        ("--samples 5 --batch-size 8e9 --nproc 1", 2, "'8e9' for '--batch-size <N>'"),
        ("--samples 5 --batch-size 99999999999 --nproc 1", 2, "it must be at most 16777216"),
        ("--samples 5 --batch-size 8 --nproc 99999999999", 2, "it must be at most 1048576"),
        ("--samples 5 --batch-size 8", 2, "--nproc <N>"),
        ("--samples 5 --batch-size 8 --nproc 2 --scheme horovod", 2, "accelerate, torch, fastai"),
        (
            "--samples 5 --batch-size 8 --nproc 3 --split-batches",
            1,
            "8 does not divide by 3 ranks: use 6 or 9",
        ),
        ("--samples 5 --batch-size 8 --nproc 2 --split-batches --scheme torch", 1, "scheme torch"),
        (
            "--samples 5 --batch-size 8 --nproc 2 --no-even-batches --scheme fastai",
            1,
            "scheme fastai",
        ),
        ("--samples 18446744073709551615 --batch-size 8 --nproc 2", 1, "do not fit"),
    ] {
        let (got, said) = refusal(args);
        assert_eq!(got, code, "{args}: {said}");
        assert!(said.contains(text), "{args}: {said}");
        assert!(code == 2 || said.lines().count() == 1, "{args}: {said}");
    }
}

#[test]
fn a_reader_that_leaves_is_no_error() {
    let mut child = shards("--samples 1000000 --batch-size 10 --nproc 4 --json")
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 16]).unwrap();
    drop(stdout);
    let Output { status, stderr, .. } = child.wait_with_output().unwrap();
    assert!(status.success() && stderr.is_empty(), "{}", String::from_utf8_lossy(&stderr));
}
