//! Comparison of tensor parallelism with PyTorch's DTensor on two processes of one thread, and of context parallelism
//! on two such processes with one process of two threads, since PyTorch's runs on GPUs alone.

use anyhow::Result;

use super::training::{launched, megabytes};
use super::{in_turns, milliseconds};
use crate::processes::{Side, median};
use crate::table::Row;

/// Compares a layer of Llama with the embedding before it and the normalisation after it.
pub(crate) fn layer(rounds: usize) -> Result<Vec<Row>> {
    let Some(peer) = Side::torchrun("peers/tensor_parallel.py", &["layer"]) else {
        return Ok(Vec::new());
    };
    let [ours, theirs] = in_turns(rounds, &[launched(2, "tensor-parallel layer")?, peer])?;
    Ok(vec![Row {
        what: "layer of Llama (hidden size 512, 4 x 256 tokens) on 2 ranks of 1 thread: against parallelize_module",
        ours: milliseconds(ours),
        other: milliseconds(theirs),
        ratio: format!("{:.2}x", theirs / ours),
        goal: "at least 1.30x".to_owned(),
        reached: theirs >= 1.3 * ours,
    }])
}

/// Compares attention to a sequence of which each rank has half.
pub(crate) fn context(rounds: usize) -> Result<Vec<Row>> {
    let Some(peer) = Side::peer("peers/attention.py", &[]) else { return Ok(Vec::new()) };
    let own = |method: &str| launched(2, &format!("tensor-parallel attention {method}"));
    let sides = [own("gather")?, own("ring")?, own("ulysses")?, peer];
    let [gather, ring, ulysses, theirs] = in_turns(rounds, &sides)?;
    let row = |what: &'static str, ours: f64| Row {
        what,
        ours: milliseconds(ours),
        other: milliseconds(theirs),
        ratio: format!("{:.2}x", theirs / ours),
        goal: "at least 1.00x".to_owned(),
        reached: theirs >= ours,
    };
    Ok(vec![
        row(
            "causal attention, 8 heads, 4,096 tokens, gathered keys on 2 ranks of 1 thread: against 1 process of 2",
            gather,
        ),
        row("the same, ring", ring),
        row("the same, Ulysses", ulysses),
    ])
}

/// Compares a head with its loss, where each rank has half of a vocabulary of 32,000 tokens.
pub(crate) fn loss(rounds: usize) -> Result<Vec<Row>> {
    let Some(peer) = Side::torchrun("peers/tensor_parallel.py", &["loss"]) else {
        return Ok(Vec::new());
    };
    let own = |how: &str| launched(2, &format!("tensor-parallel loss {how}"));
    let sides = [own("divided")?, own("gathered")?, peer];
    let mut found = [const { [Vec::new(), Vec::new()] }; 3];
    for round in 0..rounds {
        for turn in 0..sides.len() {
            let side = (round + turn) % sides.len();
            for (all, of_round) in found[side].iter_mut().zip(sides[side].lists::<2>()?) {
                all.extend(of_round);
            }
        }
    }
    let [[divided, peak], [_, gathered_peak], [theirs, their_peak]] =
        found.map(|lists| lists.map(|mut all| median(&mut all)));
    Ok(vec![
        Row {
            what: "head and loss of 32,000 tokens on 2 ranks of 1 thread: against loss_parallel",
            ours: milliseconds(divided),
            other: milliseconds(theirs),
            ratio: format!("{:.2}x", theirs / divided),
            goal: "at least 1.25x".to_owned(),
            reached: theirs >= 1.25 * divided,
        },
        Row {
            what: "head and loss of 32,000 tokens: highest memory of rank 0, against loss_parallel",
            ours: megabytes(peak),
            other: megabytes(their_peak),
            ratio: format!("{:.2}", peak / their_peak),
            goal: "at most 1.00".to_owned(),
            reached: peak <= their_peak,
        },
        Row {
            what: "head and loss of 32,000 tokens: highest memory of rank 0, against gathered logits",
            ours: megabytes(peak),
            other: megabytes(gathered_peak),
            ratio: format!("{:.2}", peak / gathered_peak),
            goal: "at most 0.60".to_owned(),
            reached: peak <= 0.6 * gathered_peak,
        },
    ])
}
