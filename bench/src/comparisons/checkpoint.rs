//! Comparison of 1 GB checkpoints with `torch.save` and `torch.load`, and the cost of a save in the background.

use std::path::PathBuf;
use std::{env, fs, process};

use anyhow::{Context, Result};

use super::{in_turns, milliseconds};
use crate::processes::{Side, median};
use crate::table::Row;

/// Folder beside this program, on the disk of the build, which is removed after the comparison.
struct Scratch(PathBuf);

impl Scratch {
    fn new() -> Result<Self> {
        let program = env::current_exe().context("cannot find this program")?;
        let folder = program.with_file_name(format!("checkpoints-{}", process::id()));
        fs::create_dir_all(&folder)
            .with_context(|| format!("cannot make folder {}", folder.display()))?;
        Ok(Self(folder))
    }

    fn path(&self) -> Result<&str> {
        self.0.to_str().with_context(|| format!("{} is not UTF-8", self.0.display()))
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// Compares saves, flushed on both sides and on neither, and loads.
pub(crate) fn files(rounds: usize) -> Result<Vec<Row>> {
    let scratch = Scratch::new()?;
    let folder = scratch.path()?;
    let own = |words: &str| Side::own(&format!("checkpoint {words}"));
    let peer = |arguments: &[&str]| Side::peer("peers/checkpoint.py", arguments);
    let (Some(save), Some(flushed), Some(new), Some(load)) = (
        peer(&["save", folder]),
        peer(&["save", folder, "--flush"]),
        peer(&["save", folder, "--flush", "--new"]),
        peer(&["load", folder]),
    ) else {
        return Ok(Vec::new());
    };
    // First, while the peer's file does not exist: afterwards its older file would be overwritten.
    let [ours_new, theirs_new] = in_turns(rounds, &[own(&format!("save {folder} flushed")), new])?;
    let [ours_flushed, theirs_flushed] =
        in_turns(rounds, &[own(&format!("save {folder} flushed")), flushed])?;
    let [ours, theirs] = in_turns(rounds, &[own(&format!("save {folder} unflushed")), save])?;
    let (mut verified, mut unverified) = (Vec::new(), Vec::new());
    let (mut peaks, mut their_loads) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        for (checked, loads) in [("verified", &mut verified), ("unverified", &mut unverified)] {
            let [mut seconds, peak] = own(&format!("load {folder} {checked}")).lists::<2>()?;
            loads.push(median(&mut seconds));
            peaks.extend(peak);
        }
        let [mut seconds] = load.lists::<1>()?;
        their_loads.push(median(&mut seconds));
    }
    let their_load = median(&mut their_loads);
    let (verified, unverified) = (median(&mut verified), median(&mut unverified));
    let peak = median(&mut peaks);
    let line = |what, ours: f64, theirs: f64, goal: f64| Row {
        what,
        ours: milliseconds(ours),
        other: milliseconds(theirs),
        ratio: format!("{:.2}x", theirs / ours),
        goal: format!("at least {goal:.1}x"),
        reached: theirs / ours >= goal,
    };
    Ok(vec![
        line(
            "checkpoint of 1 GB: save, both flushed, torch.save to a new file as ours",
            ours_new,
            theirs_new,
            1.5,
        ),
        line(
            "checkpoint of 1 GB: save, both flushed, torch.save over its old file",
            ours_flushed,
            theirs_flushed,
            1.5,
        ),
        line("checkpoint of 1 GB: save, neither flushed", ours, theirs, 1.5),
        line("checkpoint of 1 GB: load, ours with checksums", verified, their_load, 3.0),
        line("checkpoint of 1 GB: load, neither with checksums", unverified, their_load, 3.0),
        Row {
            what: "checkpoint of 1 GB: highest memory while loading, in sizes of the weights",
            ours: format!("{peak:.2}"),
            other: "-".to_owned(),
            ratio: "-".to_owned(),
            goal: "at most 1.10".to_owned(),
            reached: peak <= 1.1,
        },
    ])
}

/// Compares a step while a checkpoint of 1 GB is written with one without other work, and measures how long
/// `save_state` delays the training, in the first save and in later ones.
pub(crate) fn background(rounds: usize) -> Result<Vec<Row>> {
    let scratch = Scratch::new()?;
    let side = Side::own(&format!("checkpoint background {}", scratch.path()?));
    let mut all: [Vec<f64>; 6] = Default::default();
    for _ in 0..rounds {
        for (list, more) in all.iter_mut().zip(side.lists::<6>()?) {
            list.extend(more);
        }
    }
    let [before, during, first, later, new_copy, copy] = all.map(|mut list| median(&mut list));
    let slower = 100.0 * (during / before - 1.0);
    let wait = |what, stall: f64, copy: f64| Row {
        what,
        ours: milliseconds(stall),
        other: milliseconds(copy),
        ratio: format!("{:.2}", stall / copy),
        goal: "the copy".to_owned(),
        // A little more than the copy is allowed, for opening the folder and asking the other ranks.
        reached: stall <= 1.25 * copy,
    };
    Ok(vec![
        Row {
            what: "a step of ResNet-18 while a checkpoint of 1 GB is written, against a step alone",
            ours: milliseconds(during),
            other: milliseconds(before),
            ratio: format!("{slower:+.1} %"),
            goal: "under +5 %".to_owned(),
            reached: slower < 5.0,
        },
        wait(
            "what training waits for in the first save of 1 GB, against a copy to new memory",
            first,
            new_copy,
        ),
        wait(
            "what training waits for in later saves of 1 GB, against a copy to memory in use",
            later,
            copy,
        ),
    ])
}
