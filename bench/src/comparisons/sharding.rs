//! Comparison of sharded training with PyTorch's FSDP2, on two processes of one thread.

use anyhow::{Context, Result};

use super::training::{launched, megabytes};
use super::{in_turns, milliseconds};
use crate::processes::{Side, median};
use crate::table::Row;

/// Names of the rows of one model, and the share of FSDP2's step to reach.
struct Goals {
    model: &'static str,
    rows: [&'static str; 4],
    of_fsdp2: f64,
}

pub(crate) fn small(rounds: usize) -> Result<Vec<Row>> {
    steps(
        rounds,
        &Goals {
            model: "small",
            rows: [
                "GPT of 5.8 M, 2 processes of 1 thread: zero3 against our DDP",
                "GPT of 5.8 M: zero1 against our DDP",
                "GPT of 5.8 M: zero3 against FSDP2",
                "GPT of 5.8 M: DDP against PyTorch's",
            ],
            of_fsdp2: 0.75,
        },
    )
}

pub(crate) fn gpt2(rounds: usize) -> Result<Vec<Row>> {
    steps(
        rounds,
        &Goals {
            model: "gpt2",
            rows: [
                "GPT-2 124M, 2 processes of 1 thread: zero3 against our DDP",
                "GPT-2 124M: zero1 against our DDP",
                "GPT-2 124M: zero3 against FSDP2",
                "GPT-2 124M: DDP against PyTorch's",
            ],
            of_fsdp2: 0.6,
        },
    )
}

fn steps(rounds: usize, goals: &Goals) -> Result<Vec<Row>> {
    let theirs = |how| Side::torchrun("peers/sharding.py", &["step", goals.model, how]);
    let (Some(fsdp2), Some(their_ddp)) = (theirs("fsdp2"), theirs("ddp")) else {
        return Ok(Vec::new());
    };
    let ours = |strategy: &str| launched(2, &format!("sharding step {} {strategy}", goals.model));
    let sides = [ours("none")?, ours("zero1")?, ours("zero3")?, fsdp2, their_ddp];
    let [ddp, zero1, zero3, fsdp2, their_ddp] = in_turns(rounds, &sides)?;
    let [over_ddp, zero1_over_ddp, over_fsdp2, ddp_over_ddp] = goals.rows;
    Ok(vec![
        share(over_ddp, zero3, ddp, 1.05),
        share(zero1_over_ddp, zero1, ddp, 1.0),
        share(over_fsdp2, zero3, fsdp2, goals.of_fsdp2),
        share(ddp_over_ddp, ddp, their_ddp, 1.0),
    ])
}

/// Returns a row with our time as a share of another.
fn share(what: &'static str, ours: f64, other: f64, goal: f64) -> Row {
    Row {
        what,
        ours: milliseconds(ours),
        other: milliseconds(other),
        ratio: format!("{:.2}", ours / other),
        goal: format!("at most {goal:.2}"),
        reached: ours <= goal * other,
    }
}

/// Compares saving and loading 1 GB of weights and Adam's states on two ranks.
pub(crate) fn checkpoint(rounds: usize) -> Result<Vec<Row>> {
    let (mut own, mut peer) = ([const { Vec::new() }; 4], [const { Vec::new() }; 2]);
    for _ in 0..rounds {
        // Two folders, since each side fills one with 4 GB.
        let folder = tempfile::tempdir()?;
        let path = folder.path().to_str().context("the temporary folder is not UTF-8")?;
        let side = launched(2, &format!("sharding checkpoint {path}"))?;
        for (all, of_round) in own.iter_mut().zip(side.lists::<4>()?) {
            all.extend(of_round);
        }
        drop(folder);
        let folder = tempfile::tempdir()?;
        let path = folder.path().to_str().context("the temporary folder is not UTF-8")?;
        let Some(side) = Side::torchrun("peers/sharding.py", &["checkpoint", path]) else {
            return Ok(Vec::new());
        };
        for (all, of_round) in peer.iter_mut().zip(side.lists::<2>()?) {
            all.extend(of_round);
        }
    }
    let [blocked, saved, loaded, unverified] = own.map(|mut all| median(&mut all));
    let [their_save, their_load] = peer.map(|mut all| median(&mut all));
    Ok(vec![
        share(
            "sharded checkpoint of 1 GB by 2 ranks: on the disk, against DCP",
            saved,
            their_save,
            0.5,
        ),
        share(
            "sharded checkpoint of 1 GB: the training is held up, against DCP",
            blocked,
            their_save,
            0.5,
        ),
        share("sharded checkpoint of 1 GB: load, against DCP", loaded, their_load, 0.5),
        share(
            "sharded checkpoint of 1 GB: load without checksums, as DCP's",
            unverified,
            their_load,
            0.5,
        ),
    ])
}

/// Compares loading weights of 1 GB from one file into the shards of two ranks.
pub(crate) fn load(rounds: usize) -> Result<Vec<Row>> {
    let folder = tempfile::tempdir()?;
    let file = folder.path().join("layers.safetensors");
    let path = file.to_str().context("the temporary folder is not UTF-8")?;
    let [bytes] = Side::own(&format!("sharding write {path}")).lists::<1>()?;
    let Some(peer) = Side::torchrun("peers/sharding.py", &["load", path]) else {
        return Ok(Vec::new());
    };
    let sides = [launched(2, &format!("sharding load {path}"))?, peer];
    let mut found = [const { [Vec::new(), Vec::new()] }; 2];
    for round in 0..rounds {
        for turn in 0..2 {
            let side = (round + turn) % 2;
            for (all, of_round) in found[side].iter_mut().zip(sides[side].lists::<2>()?) {
                all.extend(of_round);
            }
        }
    }
    let [[seconds, peak], [their_seconds, their_peak]] =
        found.map(|lists| lists.map(|mut all| median(&mut all)));
    // Memory of a rank's shard and one layer.
    let goal = bytes[0] / 2.0 + 2048.0 * 2048.0 * 4.0;
    Ok(vec![
        share(
            "weights of 1 GB into shards of 2 ranks, against fully_shard",
            seconds,
            their_seconds,
            0.5,
        ),
        Row {
            what: "weights of 1 GB into shards of 2 ranks: highest memory of rank 0",
            ours: megabytes(peak),
            other: megabytes(their_peak),
            ratio: format!("{:.2}", peak / their_peak),
            goal: format!("at most {}", megabytes(goal)),
            reached: peak <= goal,
        },
    ])
}

/// Measures the cost of sharding on a single rank.
pub(crate) fn one_rank(rounds: usize) -> Result<Vec<Row>> {
    let ours = |strategy: &str| Side::own(&format!("sharding step small {strategy}"));
    let [plain, zero1, zero3] = in_turns(rounds, &[ours("none"), ours("zero1"), ours("zero3")])?;
    Ok(vec![
        share("GPT of 5.8 M, 1 process: zero3 against no sharding", zero3, plain, 1.01),
        share("GPT of 5.8 M, 1 process: zero1 against no sharding", zero1, plain, 1.01),
    ])
}

/// Compares the peak memory of a rank that trains 352 MB of weights on 2 ranks with the plan.
pub(crate) fn memory(rounds: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (strategy, what) in [
        (
            "zero1",
            "352 MB of weights with AdamW, zero1 on 2 ranks: highest memory against the plan",
        ),
        ("zero2", "the same, zero2"),
        ("zero3", "the same, zero3"),
    ] {
        let side = launched(2, &format!("sharding memory {strategy}"))?;
        let (mut peaks, mut planned) = (Vec::new(), 0.0);
        for _ in 0..rounds {
            let [peak, plan] = side.lists::<2>()?;
            peaks.extend(peak);
            planned = plan[0];
        }
        let peak = median(&mut peaks);
        rows.push(Row {
            what,
            ours: megabytes(peak),
            other: megabytes(planned),
            ratio: format!("{:.2}", peak / planned),
            goal: "at most 1.05".to_owned(),
            reached: peak <= 1.05 * planned,
        });
    }
    Ok(rows)
}

/// Compares loading a checkpoint of 1 GB that four ranks have saved on two ranks.
pub(crate) fn reshard(rounds: usize) -> Result<Vec<Row>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().to_str().context("the temporary folder is not UTF-8")?;
    let [bytes] = launched(4, &format!("sharding reshard-save {path}"))?.lists::<1>()?;
    let side = launched(2, &format!("sharding reshard-load {path}"))?;
    let mut seconds = Vec::new();
    for _ in 0..rounds {
        let [of_round] = side.lists::<1>()?;
        seconds.extend(of_round);
    }
    let rate = bytes[0] / median(&mut seconds);
    Ok(vec![Row {
        what: "sharded checkpoint of 1 GB of 4 ranks, loaded by 2: bytes in a second",
        ours: megabytes(rate),
        other: "-".to_owned(),
        ratio: "-".to_owned(),
        goal: "at least 300 MB".to_owned(),
        reached: rate >= 300e6,
    }])
}
