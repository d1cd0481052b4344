//! Matrix products: the share of their rate that a step reaches, and the cost of reproducible ones.

use anyhow::Result;

use super::{Pairs, milliseconds, pairs};
use crate::processes::{Side, median, step_in_turns};
use crate::table::Row;

/// Compares the operations per second of a step with those of matrix products alone.
pub(crate) fn matmul_share(rounds: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (what, words, goal) in [
        (
            "ResNet-18, 32 x 128 px, fp32: rate of a step against the processor's own in products",
            "resnet18",
            0.93,
        ),
        ("ResNet-18, 32 x 128 px, bf16: the same", "resnet18 bf16", 0.85),
        ("CNN, batch 64, fp32: the same", "cnn", 0.80),
        ("CNN, batch 64, bf16: the same", "cnn bf16", 0.75),
    ] {
        let Pairs { ours, other, ratio } = pairs(rounds, &format!("matmul-share {words}"))?;
        rows.push(Row {
            what,
            ours: rate(ours),
            other: rate(other),
            ratio: format!("{ratio:.2}"),
            goal: format!("at least {goal:.2}"),
            reached: ratio >= goal,
        });
    }
    Ok(rows)
}

/// Number of pairs of processes per round: memory addresses differ from process to process, and a step's time with
/// them.
const PROCESSES: usize = 2;

/// Compares steps with MKL's reproducible products, the default, with steps without. The mode belongs to a process, so
/// there are two, which take turns step by step.
pub(crate) fn reproducible(rounds: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (what, net, steps) in [
        ("CNN step, fp32: MKL's products reproducible, against not", "cnn", 120),
        ("ResNet-18 step, fp32: the same", "resnet18", 12),
        ("transformer block step, fp32: the same", "block", 30),
    ] {
        let side = |mode| Side::own(&format!("train-on-demand {net} {mode}"));
        // An empty value leaves MKL's default, and Brigade does not change it. A word that MKL does not have would set
        // a mode.
        let sides = [
            side("reproducible").without_variable("MKL_CBWR"),
            side("turned-off").variable("MKL_CBWR", ""),
        ];
        let (mut ours, mut other) = (Vec::new(), Vec::new());
        let (mut all, mut each) = (Vec::new(), Vec::new());
        for _ in 0..rounds * PROCESSES {
            let [with, without] = step_in_turns(&sides, steps)?;
            let mut ratios: Vec<f64> = with.iter().zip(&without).map(|(a, b)| a / b).collect();
            all.extend(&ratios);
            each.push(100.0 * (median(&mut ratios) - 1.0));
            ours.extend(with);
            other.extend(without);
        }
        let more = 100.0 * (median(&mut all) - 1.0);
        let least = each.iter().copied().fold(f64::INFINITY, f64::min);
        let most = each.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        rows.push(Row {
            what,
            ours: milliseconds(median(&mut ours)),
            other: milliseconds(median(&mut other)),
            ratio: format!("{more:+.1} % ({least:+.1} to {most:+.1})"),
            goal: "under +1 %".to_owned(),
            reached: more < 1.0,
        });
    }
    Ok(rows)
}

fn rate(flops: f64) -> String {
    format!("{:.0} GFLOP/s", flops / 1e9)
}
