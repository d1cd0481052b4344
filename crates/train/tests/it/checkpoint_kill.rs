//! Killed at any instant, a run leaves whole checkpoints only, and goes on as if nothing had been.

use std::collections::BTreeMap;
use std::ffi::OsStr;
use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use brigade_checkpoint::layout::{Checkpoint, numbered, numbered_path};
use brigade_nn::{Linear, Model};
use brigade_rank_env::env::BRIGADE_SHARDING;
use brigade_testkit::KillableRanks;
use brigade_train::{Accelerator, ProjectConfiguration};
use rand::RngExt;
use rustix::process::{Signal, set_parent_process_death_signal};

use crate::resume::{BATCH, Run, SAMPLES};

const FOLDER: &str = "BRIGADE_TEST_KILL_FOLDER";
/// Set: the run has a model whose file goes past the system's cache.
const LARGE: &str = "BRIGADE_TEST_KILL_LARGE";

/// The run that is killed: trains, saves after every batch, and notes every loss.
#[test]
#[ignore = "is what the tests below start"]
fn child() {
    let folder = std::env::var_os(FOLDER).map(PathBuf::from).unwrap();
    // It trains without end: it must end even if the test is killed.
    set_parent_process_death_signal(Some(Signal::KILL)).unwrap();
    let project = ProjectConfiguration::new(&folder).total_limit(2);
    let accelerator =
        Accelerator::builder().gradient_accumulation_steps(2).project(project).build().unwrap();
    let mut run = Run::new(&accelerator, 1);
    run.epochs = u64::MAX;
    let large = std::env::var_os(LARGE).map(|_| {
        // 25 MB in files of 16 MB, which bypass the cache.
        let model = Model::new(|path| Linear::new(path / "large", 2500, 2500)).unwrap();
        accelerator.prepare(model).unwrap()
    });
    let weights = large.as_ref().map(|large| large.inner().parameters()[0].tensor.shallow_clone());
    if accelerator.checkpoints().latest().unwrap().is_some() {
        let loaded = accelerator.checkpoints().load_latest().unwrap();
        // Full rounds of a batch on each rank, and a rest in each epoch.
        let (samples, round) =
            (loaded.samples as usize, BATCH * accelerator.processes().num_processes());
        run.batches =
            samples / SAMPLES * SAMPLES.div_ceil(round) + (samples % SAMPLES).div_ceil(round);
    }
    if let Some(weights) = weights.as_ref().filter(|_| run.batches > 0) {
        let (least, most) = (weights.min().double_value(&[]), weights.max().double_value(&[]));
        assert_eq!((least, most), (run.batches as f64, run.batches as f64), "of one save");
    }
    println!("ready");
    let log = folder.join(format!("losses_{}", accelerator.processes().process_index()));
    let mut log = OpenOptions::new().append(true).create(true).open(log).unwrap();
    run.go(&accelerator, |run, batches| {
        log.write_all(format!("{batches} {:016x}\n", run.loss).as_bytes()).unwrap();
        if let Some(weights) = &weights {
            // A save with bytes of different moments would be detected.
            tch::no_grad(|| drop(weights.shallow_clone().fill_(batches as f64)));
        }
        accelerator.checkpoints().save_numbered().unwrap();
        true
    });
}

/// Every checkpoint that has its name is whole, with the states of all ranks.
fn check(folder: &Path, world: usize) -> usize {
    let checkpoints = folder.join("checkpoints");
    let numbers = numbered(&checkpoints).unwrap();
    for &number in &numbers {
        let checkpoint = Checkpoint::open(numbered_path(&checkpoints, number)).unwrap();
        let faults = checkpoint.verify();
        assert!(faults.is_empty(), "{faults:?}");
        assert_eq!(checkpoint.manifest().of_kind("rank").count(), world);
    }
    numbers.len()
}

/// The folders that have no checkpoint's name yet.
fn hidden(folder: &Path) -> impl Iterator<Item = PathBuf> + use<> {
    let entries = fs::read_dir(folder.join("checkpoints")).into_iter().flatten().flatten();
    entries
        .filter(|entry| entry.file_name().to_string_lossy().starts_with('.'))
        .map(|entry| entry.path())
}

/// Whether a large file lies in a folder that has no checkpoint's name yet.
fn is_being_written(folder: &Path) -> bool {
    hidden(folder).any(|folder| {
        let files = fs::read_dir(folder).into_iter().flatten().flatten();
        let mut sizes = files.filter_map(|file| file.metadata().ok()).map(|file| file.len());
        sizes.any(|bytes| bytes > 16 << 20)
    })
}

/// The newest checkpoint's number.
fn newest(folder: &Path) -> Option<u64> {
    numbered(&folder.join("checkpoints")).unwrap_or_default().into_iter().max()
}

fn wait_until(what: &str, condition: impl Fn() -> bool) {
    let begun = Instant::now();
    while !condition() {
        assert!(begun.elapsed() < Duration::from_secs(120), "{what} never came");
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// A rank's losses by batch; a batch that was trained again after a kill must have had the same.
fn losses(folder: &Path, rank: usize) -> BTreeMap<usize, String> {
    let text = fs::read_to_string(folder.join(format!("losses_{rank}"))).unwrap_or_default();
    let mut losses = BTreeMap::new();
    for line in text.split_inclusive('\n').filter(|line| line.len() > 17 && line.ends_with('\n')) {
        // The kill may have truncated a line; the next run's line follows.
        let Some((batch, loss)) = line.trim_end().split_once(' ') else { continue };
        let (Ok(batch), true) = (batch.parse::<usize>(), loss.len() == 16) else { continue };
        let known = losses.entry(batch).or_insert_with(|| loss.to_owned());
        assert_eq!(known, loss, "batch {batch} of rank {rank} has another loss after a kill");
    }
    losses
}

/// Kills one rank at a random instant, and the others a little later, as their agent does; goes on; and
/// so often as asked for.
///
/// `large`: with a file that goes past the system's cache, and until at least one kill has come while that
/// was being written. `sharding`: the strategy, as the launcher hands it to the ranks.
fn killed_at_random_instants(world: usize, large: bool, sharding: &str) {
    let kills = std::env::var("BRIGADE_KILLS").ok().and_then(|number| number.parse().ok());
    let kills: u64 = kills.unwrap_or(if large { 3 } else { 5 });
    let seed = brigade_test_needs::random().u64(..);
    // In memory, if possible: on a disk that others use, a save may take seconds.
    let memory = || tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir());
    let folder = if large { tempfile::tempdir() } else { memory() }.unwrap();
    let mut variables =
        vec![(FOLDER, folder.path().as_os_str()), (BRIGADE_SHARDING, OsStr::new(sharding))];
    if large {
        variables.push((LARGE, OsStr::new("1")));
    }
    let (mut resumed, mut halves) = (0, 0);
    for kill in 0.. {
        if kill >= kills && resumed >= 3 && (halves > 0 || !large) {
            break;
        }
        assert!(kill < 20 * kills, "{kill} runs left {resumed} checkpoints, {halves} halves");
        let mut ranks = KillableRanks::start("checkpoint_kill::child", world, &variables).unwrap();
        let mut outputs = Vec::new();
        for rank in ranks.ranks() {
            let mut out = BufReader::new(rank.stdout.take().unwrap()).lines().map_while(Result::ok);
            assert!(out.any(|line| line.contains("ready")), "kill {kill}");
            // Kept open until the end: a rank that writes more must not fail because of it.
            outputs.push(out);
        }
        let mut random = brigade_sampling::stream(seed, &[kill]);
        // At any time from the first batch on; or after a checkpoint, or within one, however long the disk takes.
        match kill % 3 {
            0 => std::thread::sleep(Duration::from_micros(random.random_range(0..400_000))),
            1 => {
                let before = newest(folder.path());
                wait_until("a checkpoint", || newest(folder.path()) > before);
                std::thread::sleep(Duration::from_micros(random.random_range(0..100_000)));
            }
            _ if large => wait_until("a large file", || is_being_written(folder.path())),
            _ => wait_until("a save", || hidden(folder.path()).next().is_some()),
        }
        let first = &mut ranks.ranks()[random.random_range(0..world)];
        first.kill().unwrap();
        first.wait().unwrap();
        std::thread::sleep(Duration::from_micros(random.random_range(0..50_000)));
        drop(ranks);
        halves += u64::from(large && is_being_written(folder.path()));
        resumed += u64::from(check(folder.path(), world) > 0);
        (0..world).for_each(|rank| drop(losses(folder.path(), rank)));
    }
    let whole = check(folder.path(), world);
    let seen = losses(folder.path(), 0);
    eprintln!("{kills} kills: {whole} checkpoints, {} batches", seen.len());
    // Up to two and one that was to replace the older; nothing else is left but of the last run.
    assert!(whole <= 3, "{whole}");
    assert!(hidden(folder.path()).count() <= 2, "folders of killed runs stay");
}

#[test]
fn one_rank_resumes_bit_for_bit() {
    killed_at_random_instants(1, false, "none");
}

#[test]
fn two_ranks_resume_bit_for_bit() {
    killed_at_random_instants(2, false, "none");
}

/// Each rank's rows are in files of its own.
#[test]
fn sharded_ranks_resume_bit_for_bit() {
    killed_at_random_instants(2, false, "zero3");
}

#[test]
fn a_large_file_is_whole_or_has_no_name() {
    killed_at_random_instants(2, true, "none");
}
