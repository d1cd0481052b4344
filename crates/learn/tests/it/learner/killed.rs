//! Processes that are killed in a fit, and started again.

use std::ffi::OsStr;
use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::{Path, PathBuf};

use brigade_learn::Event;
use brigade_learn::callbacks::{Checkpoint, Ema};
use brigade_testkit::KillableRanks;

use crate::setup::*;

const FOLDER: &str = "BRIGADE_TEST_LEARNER_FOLDER";
const STOP: &str = "BRIGADE_TEST_LEARNER_STOP";

/// What is killed: a fit that says when it has come to a batch, and waits there.
#[test]
#[ignore = "is what the tests below start"]
#[allow(clippy::print_stdout, reason = "its parent reads it")]
fn child() {
    let folder = std::env::var_os(FOLDER).map(PathBuf::from).unwrap();
    let stop: usize = std::env::var(STOP).unwrap().parse().unwrap();
    let accelerator = joined();
    let rank = accelerator.processes().process_index();
    let mut learner = learner(&accelerator).quiet(false);
    learner.add((Checkpoint::new(folder.join("last")).every(2), Ema::new(0.8)));
    let mut batches = 0;
    let parks = At::new([Event::AfterBatch], move |_, learner| {
        batches += usize::from(learner.is_training());
        if batches == stop && learner.is_training() {
            println!("parked");
            loop {
                std::thread::park();
            }
        }
        Ok(())
    });
    // After the checkpoint, whose files a thread may still be writing.
    learner.fit_one_cycle(3, 0.1, parks.order(200)).unwrap();
    fs::write(folder.join(format!("weights-{rank}")), format!("{:?}", weights(&learner))).unwrap();
}

/// Starts the ranks, which end by themselves, or are killed at a batch. Returns what each has printed.
fn run(folder: &Path, world: usize, stop: usize) -> Vec<String> {
    let stop = stop.to_string();
    let variables = [(FOLDER, folder.as_os_str()), (STOP, OsStr::new(&stop))];
    let mut ranks = KillableRanks::start("learner::killed::child", world, &variables).unwrap();
    let mut printed = vec![String::new(); world];
    let mut outputs: Vec<_> =
        ranks.ranks().iter_mut().map(|rank| BufReader::new(rank.stdout.take().unwrap())).collect();
    if stop != "0" {
        for (output, printed) in outputs.iter_mut().zip(&mut printed) {
            while !printed.contains("parked") {
                assert!(
                    output.read_line(printed).unwrap() > 0,
                    "it ended before the batch: {printed}"
                );
            }
        }
        // All of them are killed with SIGKILL.
        drop(ranks);
        return printed;
    }
    for ((rank, output), printed) in ranks.ranks().iter_mut().zip(&mut outputs).zip(&mut printed) {
        output.read_to_string(printed).unwrap();
        assert!(rank.wait().unwrap().success(), "{printed}");
    }
    printed
}

fn ends_as_without_kills(world: usize) {
    let (whole, broken) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let printed = run(whole.path(), world, 0);
    // The table of epochs is printed once, by rank 0.
    for (rank, text) in printed.iter().enumerate() {
        let count = |part: &str| text.lines().filter(|line| line.contains(part)).count();
        assert_eq!(count("valid_loss"), usize::from(rank == 0), "{text}");
        let rows = (0..3).map(|epoch| count(&format!("{epoch}         "))).collect::<Vec<_>>();
        assert_eq!(rows, vec![usize::from(rank == 0); 3], "{text}");
    }
    // In the first epoch, in the second after the rest of it, and in the last.
    for stop in [3, 5, 7] {
        run(broken.path(), world, stop);
    }
    let printed = run(broken.path(), world, 0);
    assert!(printed[0].contains("Continuing from"), "{}", printed[0]);
    for rank in 0..world {
        let read =
            |folder: &Path| fs::read_to_string(folder.join(format!("weights-{rank}"))).unwrap();
        assert_eq!(read(broken.path()), read(whole.path()), "rank {rank}");
    }
}

#[test]
fn dist_a_killed_process_goes_on() {
    ends_as_without_kills(1);
}

#[test]
fn dist_two_killed_processes_go_on() {
    ends_as_without_kills(2);
}
