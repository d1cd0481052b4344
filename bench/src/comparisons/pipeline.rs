//! Comparison of pipelines with PyTorch's `torch.distributed.pipelining` on two processes of one thread, and of the
//! executor with accumulation in one process.

use anyhow::Result;

use super::training::launched;
use super::{Pairs, in_turns, milliseconds, pairs};
use crate::processes::Side;
use crate::table::Row;

/// Compares a step of 1F1B, and of the zero-bubble schedule, with PyTorch's 1F1B.
pub(crate) fn step(rounds: usize) -> Result<Vec<Row>> {
    let Some(peer) = Side::torchrun("peers/pipeline.py", &[]) else { return Ok(Vec::new()) };
    let own = |schedule: &str| launched(2, &format!("pipeline step {schedule}"));
    let [ours, zero_bubble, theirs] = in_turns(rounds, &[own("1f1b")?, own("zb-h1")?, peer])?;
    let row = |what: &'static str, ours: f64, has_goal: bool| Row {
        what,
        ours: milliseconds(ours),
        other: milliseconds(theirs),
        ratio: format!("{:.2}x", theirs / ours),
        goal: if has_goal { "at least 1.00x" } else { "-" }.to_owned(),
        reached: !has_goal || theirs >= ours,
    };
    Ok(vec![
        row(
            "GPT of 5.8 M in 2 stages of 1 thread, 8 micro-batches, 1F1B: against PyTorch's 1F1B",
            ours,
            true,
        ),
        row("the same with the zero-bubble schedule, against PyTorch's 1F1B", zero_bubble, false),
    ])
}

/// Compares a step of a pipeline with one stage with the accumulation of the same micro-batches.
pub(crate) fn executor(rounds: usize) -> Result<Vec<Row>> {
    let Pairs { ours, other, ratio } = pairs(rounds, "pipeline executor")?;
    Ok(vec![Row {
        what: "GPT of 5.8 M, 8 micro-batches, 1 process: a pipeline of one stage against accumulation",
        ours: milliseconds(ours),
        other: milliseconds(other),
        ratio: format!("{:+.1} %", 100.0 * (ratio - 1.0)),
        goal: "at most +1 %".to_owned(),
        reached: ratio <= 1.01,
    }])
}
