//! Comparison of models with device maps with Accelerate's, on two threads of the CPU.

use anyhow::{Context, Result};

use super::training::megabytes;
use super::training::times;
use super::{in_turns, milliseconds};
use crate::processes::{Side, median};
use crate::table::Row;

/// Writes a Llama of 2 GB to a folder, and returns its size in bytes.
fn written() -> Result<(tempfile::TempDir, String, f64)> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().to_str().context("the temporary folder is not UTF-8")?.to_owned();
    let [bytes] = Side::own(&format!("dispatch write {path}")).lists::<1>()?;
    Ok((folder, path, bytes[0]))
}

/// Compares loading weights of 2 GB as bfloat16.
pub(crate) fn load(rounds: usize) -> Result<Vec<Row>> {
    let (_folder, path, bytes) = written()?;
    let mut rows = Vec::new();
    for (place, what, memory, goal) in [
        ("cpu", "weights of 2 GB to bfloat16 in memory", "the same: highest memory", 0.5),
        ("disk", "the same with all blocks but one on the disk", "the same: highest memory", 0.2),
    ] {
        let Some(peer) = Side::peer("peers/dispatch.py", &["load", &path, place]) else {
            return Ok(Vec::new());
        };
        let sides = [Side::own(&format!("dispatch load {path} {place}")), peer];
        let mut found = [const { [Vec::new(), Vec::new()] }; 2];
        for round in 0..rounds {
            for turn in 0..2 {
                let side = (round + turn) % 2;
                for (all, of_round) in found[side].iter_mut().zip(sides[side].lists::<2>()?) {
                    all.extend(of_round);
                }
            }
        }
        let [[ours, peak], [theirs, their_peak]] =
            found.map(|lists| lists.map(|mut all| median(&mut all)));
        rows.push(Row {
            what,
            ours: milliseconds(ours),
            other: milliseconds(theirs),
            ratio: format!("{:.2}", ours / theirs),
            goal: format!("at most {goal:.2}"),
            reached: ours <= goal * theirs,
        });
        // Memory limit: the weights and 64 MB if they are in memory; otherwise two blocks in transfer, one resident
        // block, and 64 MB.
        let most = if place == "cpu" { bytes / 2.0 } else { bytes / 2.0 / 30.0 * 3.0 } + 64e6;
        rows.push(Row {
            what: memory,
            ours: megabytes(peak),
            other: megabytes(their_peak),
            ratio: format!("{:.2}", peak / their_peak),
            goal: format!("at most {}", megabytes(most)),
            reached: peak <= most,
        });
    }
    Ok(rows)
}

/// Compares forward passes of a Llama of 2 GB whose blocks are on disk, with a warm page cache.
pub(crate) fn forward(rounds: usize) -> Result<Vec<Row>> {
    let (_folder, path, _) = written()?;
    let mut rows = Vec::new();
    for (tokens, against_peer, against_memory) in [
        (
            "1",
            "Llama of 2 GB with its blocks on the disk, 1 token: against Accelerate",
            "1 token: against all in memory",
        ),
        ("128", "128 tokens: against Accelerate", "128 tokens: against all in memory"),
    ] {
        let peer = |how| Side::peer("peers/dispatch.py", &["forward", &path, how, tokens]);
        let (Some(their_disk), Some(their_memory)) = (peer("disk"), peer("memory")) else {
            return Ok(Vec::new());
        };
        let ours = |how| Side::own(&format!("dispatch forward {path} {how} {tokens}"));
        let [disk, memory, their_disk, their_memory] =
            in_turns(rounds, &[ours("disk"), ours("memory"), their_disk, their_memory])?;
        rows.push(times(against_peer, disk, their_disk, if tokens == "1" { 1.5 } else { 1.0 }));
        rows.push(Row {
            what: against_memory,
            ours: milliseconds(disk),
            other: format!("{} (theirs {})", milliseconds(memory), milliseconds(their_memory)),
            ratio: format!("{:.2}", disk / memory),
            goal: if tokens == "1" { "-".to_owned() } else { "at most 1.10".to_owned() },
            reached: tokens == "1" || disk <= 1.10 * memory,
        });
    }
    Ok(rows)
}

/// Compares forward passes of the same model with a cold page cache with the longer one of reading its file and
/// computing with all weights in memory.
pub(crate) fn cold(rounds: usize) -> Result<Vec<Row>> {
    let (_folder, path, _) = written()?;
    let mut rows = Vec::new();
    for (tokens, what) in [
        ("1", "Llama of 2 GB on the disk, cold page cache, 1 token: against reading or computing"),
        ("128", "the same with 128 tokens"),
        ("512", "the same with 512 tokens"),
    ] {
        let [ours, read, compute] = in_turns(
            rounds,
            &[
                Side::own(&format!("dispatch cold {path} {tokens}")),
                Side::own(&format!("dispatch read {path}")),
                Side::own(&format!("dispatch forward {path} memory {tokens}")),
            ],
        )?;
        let longer = read.max(compute);
        rows.push(Row {
            what,
            ours: milliseconds(ours),
            other: format!("{} read, {} computed", milliseconds(read), milliseconds(compute)),
            ratio: format!("{:.2}", ours / longer),
            goal: "at most 1.15".to_owned(),
            reached: ours <= 1.15 * longer,
        });
    }
    Ok(rows)
}

/// Compares greedy generation with half of the blocks on disk, and with all in memory.
pub(crate) fn generate(rounds: usize) -> Result<Vec<Row>> {
    let (_folder, path, _) = written()?;
    let mut rows = Vec::new();
    for (how, what, goal) in [
        (
            "half",
            "a token of a Llama of 2 GB, half of its blocks on the disk: against Accelerate",
            1.2,
        ),
        ("memory", "the same with all in memory", 1.0),
    ] {
        let Some(peer) = Side::peer("peers/dispatch.py", &["generate", &path, how, "16"]) else {
            return Ok(Vec::new());
        };
        let sides = [Side::own(&format!("dispatch generate {path} {how} 16")), peer];
        let [ours, theirs] = in_turns(rounds, &sides)?;
        rows.push(times(what, ours, theirs, goal));
    }
    Ok(rows)
}
