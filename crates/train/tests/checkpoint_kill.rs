//! Killed at any instant, a run leaves whole checkpoints only, and goes on as if nothing had been.

#![allow(clippy::unwrap_used)] // also in what the tests share

mod resume;

use std::collections::BTreeMap;
use std::fs::{self, OpenOptions};
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::time::Duration;

use brigade_checkpoint::layout::{Checkpoint, numbered, numbered_path};
use brigade_train::{Accelerator, ProjectConfiguration};

use resume::Run;

const FOLDER: &str = "BRIGADE_TEST_KILL_FOLDER";

/// The run that is killed: trains, saves after every batch, and notes every loss. Does nothing unless it
/// was started for that.
#[test]
fn child() {
    let Some(folder) = std::env::var_os(FOLDER).map(PathBuf::from) else { return };
    let project = ProjectConfiguration::new(&folder).total_limit(2);
    let accelerator =
        Accelerator::builder().gradient_accumulation_steps(2).project(project).build().unwrap();
    let mut run = Run::new(&accelerator, 1);
    run.epochs = u64::MAX;
    if accelerator.latest_checkpoint().unwrap().is_some() {
        let loaded = accelerator.load_latest_state().unwrap();
        // In a world of one every sample is in one batch; nine full ones and a rest in each epoch.
        let (epochs, rest) = (loaded.samples / 29, loaded.samples % 29);
        run.batches = (epochs * 10 + rest.div_ceil(3)) as usize;
    }
    println!("ready");
    let mut log = OpenOptions::new().append(true).create(true).open(folder.join("losses")).unwrap();
    run.go(&accelerator, |run, batches| {
        log.write_all(format!("{batches} {:016x}\n", run.loss).as_bytes()).unwrap();
        accelerator.save_state_numbered().unwrap();
        true
    });
}

/// Every checkpoint that has its name is whole.
fn check(folder: &Path) -> usize {
    let checkpoints = folder.join("checkpoints");
    let numbers = numbered(&checkpoints).unwrap();
    for &number in &numbers {
        let checkpoint = Checkpoint::open(numbered_path(&checkpoints, number)).unwrap();
        let faults = checkpoint.verify();
        assert!(faults.is_empty(), "{faults:?}");
    }
    numbers.len()
}

/// Losses by batch; a batch that was trained again after a kill must have had the same.
fn losses(folder: &Path) -> BTreeMap<usize, String> {
    let text = fs::read_to_string(folder.join("losses")).unwrap_or_default();
    let mut losses = BTreeMap::new();
    for line in text.split_inclusive('\n').filter(|line| line.len() > 17 && line.ends_with('\n')) {
        // The kill may have cut a line, and the next run's is behind it.
        let Some((batch, loss)) = line.trim_end().split_once(' ') else { continue };
        let (Ok(batch), true) = (batch.parse::<usize>(), loss.len() == 16) else { continue };
        let known = losses.entry(batch).or_insert_with(|| loss.to_owned());
        assert_eq!(known, loss, "batch {batch} has another loss after a kill");
    }
    losses
}

#[test]
fn killed_at_random_instants_it_goes_on_bit_for_bit() {
    let kills: u64 =
        std::env::var("BRIGADE_KILLS").ok().and_then(|kills| kills.parse().ok()).unwrap_or(5);
    let seed: u64 = std::env::var("BRIGADE_KILL_SEED")
        .ok()
        .and_then(|seed| seed.parse().ok())
        .unwrap_or_else(rand::random);
    println!("BRIGADE_KILL_SEED={seed}");
    // In memory, where there is such a place: a disk that others use makes a save last seconds.
    let folder = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).unwrap();
    let mut resumed = 0;
    for kill in 0.. {
        if kill >= kills && resumed >= 3 {
            break;
        }
        assert!(kill < 20 * kills, "of {kill} runs only {resumed} left a checkpoint");
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args(["child", "--exact", "--nocapture"])
            .env(FOLDER, folder.path())
            .env("OMP_NUM_THREADS", "1")
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let out = BufReader::new(child.stdout.take().unwrap());
        let ready = out.lines().map_while(Result::ok).any(|line| line.contains("ready"));
        assert!(ready, "kill {kill} of seed {seed}: {:?}", child.wait());
        // From within the first batch to a dozen batches later.
        let delay = brigade_plan::stream(seed, &[kill]);
        let delay = rand_delay(delay);
        std::thread::sleep(Duration::from_micros(delay));
        child.kill().unwrap();
        child.wait().unwrap();
        resumed += u64::from(check(folder.path()) > 0);
        losses(folder.path());
    }
    let whole = check(folder.path());
    let seen = losses(folder.path());
    println!("{kills} kills: {whole} checkpoints, {} batches", seen.len());
    // Up to two and one that was to replace the older; nothing else is left but of the last run.
    assert!(whole <= 3, "{whole}");
    let hidden = fs::read_dir(folder.path().join("checkpoints")).unwrap();
    let hidden = hidden
        .filter(|entry| entry.as_ref().unwrap().file_name().to_string_lossy().starts_with('.'));
    assert!(hidden.count() <= 2, "folders of killed runs stay");
}

fn rand_delay(mut random: impl rand::Rng) -> u64 {
    random.next_u64() % 400_000
}
