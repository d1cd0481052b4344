//! A run of three ranks goes on with two and then with one, at the right sample.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use brigade_sampling::{Sampler, Shuffle};
use brigade_testkit::KillableRanks;
use brigade_train::{Accelerator, ProjectConfiguration};

use crate::resume::{BATCH, Run, SAMPLES};

const FOLDER: &str = "BRIGADE_TEST_WORLDS_FOLDER";
const ROUNDS: &str = "BRIGADE_TEST_WORLDS_ROUNDS";

/// A part of the run: so many rounds, and a checkpoint.
#[test]
#[ignore = "is what the test below starts"]
fn child() {
    let folder = std::env::var_os(FOLDER).map(PathBuf::from).unwrap();
    let rounds: usize = std::env::var(ROUNDS).unwrap().parse().unwrap();
    let accelerator = Accelerator::builder()
        .gradient_accumulation_steps(2)
        .project(ProjectConfiguration::new(&folder))
        .build()
        .unwrap();
    let mut run = Run::new(&accelerator, 1);
    if accelerator.checkpoints().latest().unwrap().is_some() {
        accelerator.checkpoints().load_latest().unwrap();
    }
    run.go(&accelerator, |run, batches| {
        if batches == rounds {
            accelerator.checkpoints().save_numbered().unwrap();
            accelerator.checkpoints().wait().unwrap();
        }
        assert!(f64::from_bits(run.loss).is_finite());
        batches < rounds
    });
    let (world, rank) =
        (accelerator.processes().num_processes(), accelerator.processes().process_index());
    let seen = serde_json::to_vec(&(run.seen, run.optimizer.steps().unwrap())).unwrap();
    fs::write(folder.join(format!("seen_{world}_{rank}")), seen).unwrap();
}

/// What each rank has seen, one after the other, and the optimizer's steps.
fn part(folder: &Path, world: usize, rounds: usize) -> (Vec<i64>, u64) {
    let rounds = rounds.to_string();
    let variables = [(FOLDER, folder.as_os_str()), (ROUNDS, rounds.as_ref())];
    let mut ranks = KillableRanks::start("checkpoint_worlds::child", world, &variables).unwrap();
    for (rank, child) in ranks.ranks().iter_mut().enumerate() {
        assert!(child.wait().unwrap().success(), "rank {rank} of {world}");
    }
    let (mut all, mut steps) = (Vec::new(), 0);
    for rank in 0..world {
        let text = fs::read(folder.join(format!("seen_{world}_{rank}"))).unwrap();
        let (seen, taken): (Vec<i64>, u64) = serde_json::from_slice(&text).unwrap();
        all.extend(seen);
        steps = taken;
    }
    (all, steps)
}

fn sorted(mut samples: Vec<i64>) -> Vec<i64> {
    samples.sort_unstable();
    samples
}

#[test]
fn three_ranks_then_two_then_one() {
    let folder = tempfile::tempdir().unwrap();
    let order = |epoch: u64| -> Vec<i64> {
        let order: Vec<usize> = Shuffle::new(SAMPLES, 77).order(epoch);
        order.into_iter().map(|sample| sample as i64).collect()
    };
    let first = order(0);
    let (two_rounds, then) = (2 * 3 * BATCH, 2 * 3 * BATCH + 2 * BATCH);
    let (seen, steps) = part(folder.path(), 3, 2);
    assert_eq!(sorted(seen), sorted(first[..two_rounds].to_vec()));
    assert_eq!(steps, 1);
    // One round: saved within an accumulation window.
    let (seen, steps) = part(folder.path(), 2, 1);
    assert_eq!(sorted(seen), sorted(first[two_rounds..then].to_vec()));
    assert_eq!(steps, 1);
    // To the end of the run; alone, the order itself is to be seen.
    let (seen, steps) = part(folder.path(), 1, usize::MAX);
    assert_eq!(seen, [&first[then..], &order(1)].concat());
    // The open window's other half; what is left of the epoch; ten batches of the next in five windows.
    assert_eq!(steps, 1 + 1 + 1 + 5);
}

/// A sum over two threads is another sum than one over one.
#[test]
fn another_number_of_threads_is_reported() {
    let folder = tempfile::tempdir().unwrap();
    let lines = |threads: &str| {
        let mut run = Command::new(std::env::current_exe().unwrap());
        run.args(["checkpoint_worlds::child", "--exact", "--include-ignored", "--nocapture"]);
        run.env(FOLDER, folder.path()).env(ROUNDS, "2").env("OMP_NUM_THREADS", threads);
        let output = run.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        text.lines().filter(|line| line.contains("last digits")).map(str::to_owned).collect()
    };
    let first: Vec<String> = lines("1");
    assert_eq!(first, [""; 0]);
    let same: Vec<String> = lines("1");
    assert_eq!(same, [""; 0]);
    let other: Vec<String> = lines("2");
    assert_eq!(
        other,
        ["brigade: the last digits will differ from those of the run that was saved, which added \
             in another order (threads: 1 then, 2 now)"]
    );
}
