//! Comparison of whole training loops with PyTorch and Accelerate: steps, memory, two processes.

use anyhow::{Context, Result};

use super::{in_turns, milliseconds};
use crate::processes::{self, Side, median};
use crate::table::Row;

/// Compares the CNN at batch size 64.
pub(crate) fn cnn(rounds: usize) -> Result<Vec<Row>> {
    steps(
        rounds,
        &Goals {
            net: "cnn",
            defaults: ("CNN, batch 64, fp32, both with defaults", 1.4),
            bf16: ("CNN, batch 64, bf16 on both", 1.4),
            crossed: "CNN, batch 64, our bf16 against their fp32",
            nchw: "CNN, batch 64, same settings: fp32, NCHW, fused Adam",
            channels_last: "CNN, batch 64, same settings: fp32, channels_last, fused Adam",
            channels_last_bf16: "CNN, batch 64, same settings: bf16, channels_last, fused Adam",
        },
    )
}

/// Compares ResNet-18 at 32 images of 128 x 128.
pub(crate) fn resnet18(rounds: usize) -> Result<Vec<Row>> {
    steps(
        rounds,
        &Goals {
            net: "resnet18",
            defaults: ("ResNet-18, 32 x 128 px, fp32, both with defaults", 1.25),
            bf16: ("ResNet-18, 32 x 128 px, bf16 on both", 1.15),
            crossed: "ResNet-18, 32 x 128 px, our bf16 against their fp32",
            nchw: "ResNet-18, 32 x 128 px, same settings: fp32, NCHW, fused AdamW",
            channels_last: "ResNet-18, 32 x 128 px, same settings: fp32, channels_last, fused AdamW",
            channels_last_bf16: "ResNet-18, 32 x 128 px, same settings: bf16, channels_last, fused AdamW",
        },
    )
}

/// Compares ResNet-50 at 16 images of 160 x 160, with 12 steps: each takes more than a second.
pub(crate) fn resnet50(rounds: usize) -> Result<Vec<Row>> {
    let ours = |settings: &str| Side::own(&format!("train resnet50 {settings} steps=12"));
    let theirs = |settings: &[&str]| {
        let arguments = [&["--model", "resnet50", "--steps", "12"], settings].concat();
        Side::peer("peers/train.py", &arguments)
    };
    let (Some(default), Some(nchw), Some(last)) =
        (theirs(&[]), theirs(&["--fused"]), theirs(&["--fused", "--channels-last"]))
    else {
        return Ok(Vec::new());
    };
    let [ours_default, default, ours_nchw, nchw, last] =
        in_turns(rounds, &[ours(""), default, ours("nchw"), nchw, last])?;
    Ok(vec![
        times("ResNet-50, 16 x 160 px, fp32, both with defaults", ours_default, default, 1.25),
        times("ResNet-50, the same settings: NCHW, fused AdamW", ours_nchw, nchw, SAME),
        times("ResNet-50, the same settings: channels_last, fused AdamW", ours_default, last, SAME),
    ])
}

/// Compares fastai's xresnet50 at 16 images of 128 x 128 in fastai's own loop, with 12 steps.
pub(crate) fn xresnet50(rounds: usize) -> Result<Vec<Row>> {
    let ours = |settings: &str| Side::own(&format!("train xresnet50 {settings} steps=12"));
    let (Some(default), Some(last)) =
        (Side::peer("peers/learner.py", &[]), Side::peer("peers/learner.py", &["--channels-last"]))
    else {
        return Ok(Vec::new());
    };
    let [ours_default, default, ours_nchw, last] =
        in_turns(rounds, &[ours(""), default, ours("nchw"), last])?;
    Ok(vec![
        times(
            "xresnet50, 16 x 128 px, fp32, against fastai, both with defaults",
            ours_default,
            default,
            1.25,
        ),
        times("xresnet50, the same settings: NCHW", ours_nchw, default, SAME),
        times("xresnet50, the same settings: channels_last", ours_default, last, SAME),
    ])
}

/// Names of the lines, and the factors to reach.
struct Goals {
    net: &'static str,
    defaults: (&'static str, f64),
    bf16: (&'static str, f64),
    crossed: &'static str,
    nchw: &'static str,
    channels_last: &'static str,
    channels_last_bf16: &'static str,
}

/// Goal for our bf16 against their fp32, and goals for the same settings on both sides.
const CROSSED: f64 = 2.0;
pub(super) const SAME: f64 = 0.98;

/// Runs each setting of each side once per round; the lines share the measurements.
fn steps(rounds: usize, goals: &Goals) -> Result<Vec<Row>> {
    let ours = |settings: &str| Side::own(&format!("train {} {settings}", goals.net));
    let theirs = |settings: &[&str]| {
        let arguments = [&["--model", goals.net], settings].concat();
        Side::peer("peers/train.py", &arguments)
    };
    let same = ["--channels-last", "--fused", "--precision", "bf16"];
    let (Some(default), Some(bf16), Some(nchw), Some(last), Some(last_bf16)) =
        (theirs(&[]), theirs(&same[2..]), theirs(&same[1..2]), theirs(&same[..2]), theirs(&same))
    else {
        return Ok(Vec::new());
    };
    let sides = [ours(""), default, ours("bf16"), bf16, ours("nchw"), nchw, last, last_bf16];
    let [default, their_default, half, their_half, nchw, their_nchw, their_last, their_last_half] =
        in_turns(rounds, &sides)?;
    Ok(vec![
        times(goals.defaults.0, default, their_default, goals.defaults.1),
        times(goals.bf16.0, half, their_half, goals.bf16.1),
        times(goals.crossed, half, their_default, CROSSED),
        times(goals.nchw, nchw, their_nchw, SAME),
        times(goals.channels_last, default, their_last, SAME),
        times(goals.channels_last_bf16, half, their_last_half, SAME),
    ])
}

/// Compares three linear layers with a transformer's widths.
pub(crate) fn linear(rounds: usize) -> Result<Vec<Row>> {
    against_pytorch(
        rounds,
        "mlp",
        [
            "linear layers 768-3072-3072-768, 256 rows, fp32, both with defaults",
            "linear layers 768-3072-3072-768, 256 rows, bf16 on both",
        ],
        &[],
    )
}

/// Compares one transformer layer: hidden size 768, 12 heads, causal attention; with the peer's defaults, and with
/// `torch.compile` and the fused optimizer.
pub(crate) fn transformer_block(rounds: usize) -> Result<Vec<Row>> {
    let mut rows = against_pytorch(
        rounds,
        "block",
        [
            "transformer block, 8 x 128 tokens x 768, fp32, both with defaults",
            "transformer block, 8 x 128 tokens x 768, bf16 on both",
        ],
        &[],
    )?;
    rows.extend(against_pytorch(
        rounds,
        "block",
        [
            "transformer block against torch.compile, fp32, fused AdamW",
            "transformer block against torch.compile, bf16, fused AdamW",
        ],
        &["--fused", "--compile"],
    )?);
    Ok(rows)
}

/// Compares forward, backward and AdamW in fp32 and bf16: with our defaults, and the peer's with more arguments.
fn against_pytorch(
    rounds: usize,
    net: &str,
    what: [&'static str; 2],
    settings: &[&str],
) -> Result<Vec<Row>> {
    let theirs = |precision| {
        let arguments = [&["--model", net, "--precision", precision], settings].concat();
        Side::peer("peers/train.py", &arguments)
    };
    let (Some(full), Some(half)) = (theirs("no"), theirs("bf16")) else {
        return Ok(Vec::new());
    };
    let ours = |settings: &str| Side::own(&format!("train {net} {settings}"));
    let [ours, theirs, our_half, their_half] =
        in_turns(rounds, &[ours(""), full, ours("bf16"), half])?;
    let [full, half] = what;
    Ok(vec![times(full, ours, theirs, 1.0), times(half, our_half, their_half, 1.0)])
}

/// Returns a row with the speedup over the peer.
pub(super) fn times(what: &'static str, ours: f64, theirs: f64, goal: f64) -> Row {
    Row {
        what,
        ours: milliseconds(ours),
        other: milliseconds(theirs),
        ratio: format!("{:.2}x", theirs / ours),
        goal: format!("at least {goal:.2}x"),
        reached: theirs / ours >= goal,
    }
}

/// Compares a step of AdamW on ResNet-18's 11.7 M parameters, both with their defaults on a CPU.
pub(crate) fn adamw(rounds: usize) -> Result<Vec<Row>> {
    let Some(peer) = Side::peer("peers/adamw.py", &[]) else {
        return Ok(Vec::new());
    };
    let [ours, theirs] = in_turns(rounds, &[Side::own("adamw"), peer])?;
    Ok(vec![Row {
        what: "a step of AdamW on ResNet-18's parameters, both with defaults",
        ours: milliseconds(ours),
        other: milliseconds(theirs),
        ratio: format!("{:.1}x", theirs / ours),
        goal: "at least 5x".to_owned(),
        reached: theirs / ours >= 5.0,
    }])
}

/// Compares the resident memory of a rank after some steps.
pub(crate) fn memory(rounds: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (net, what) in [
        ("cnn", "resident memory of a rank that trains the CNN, defaults"),
        ("resnet18", "resident memory of a rank that trains ResNet-18, defaults"),
    ] {
        let arguments = ["--model", net, "--memory", "--steps", "10"];
        let Some(peer) = Side::peer("peers/train.py", &arguments) else {
            return Ok(Vec::new());
        };
        let own = Side::own(&format!("train {net} memory"));
        let (mut ours, mut theirs) = (Vec::new(), Vec::new());
        for _ in 0..rounds {
            let [resident, _peak] = own.lists::<2>()?;
            ours.extend(resident);
            let [resident, _peak] = peer.lists::<2>()?;
            theirs.extend(resident);
        }
        let (ours, theirs) = (median(&mut ours), median(&mut theirs));
        rows.push(Row {
            what,
            ours: megabytes(ours),
            other: megabytes(theirs),
            ratio: format!("{:.2}", ours / theirs),
            goal: "at most 0.50".to_owned(),
            reached: ours / theirs <= 0.5,
        });
    }
    Ok(rows)
}

/// Compares ResNet-18 with a global batch size of 32: one process with two threads, and two with one each.
pub(crate) fn two_processes(rounds: usize) -> Result<Vec<Row>> {
    let sides = [
        launched(1, "train resnet18")?,
        launched(2, "train resnet18")?,
        launched(1, "train resnet18 bf16")?,
        launched(2, "train resnet18 bf16")?,
        launched(2, "train cnn")?,
        launched(2, "train cnn unchecked")?,
    ];
    let [one, two, one_half, two_half, checked, unchecked] = in_turns(rounds, &sides)?;
    let line = |what, one: f64, two: f64| Row {
        what,
        ours: milliseconds(two),
        other: milliseconds(one),
        ratio: format!("{:.2}", one / two),
        goal: "at least 0.90".to_owned(),
        reached: one / two >= 0.9,
    };
    Ok(vec![
        line("ResNet-18, 32 images in all, fp32: 2 processes of 1 thread against 1 of 2", one, two),
        line(
            "ResNet-18, 32 images in all, bf16: 2 processes of 1 thread against 1 of 2",
            one_half,
            two_half,
        ),
        Row {
            what: "CNN, batch 64 in all, 2 processes of 1 thread: losses checked on all ranks, \
                   against not",
            ours: milliseconds(checked),
            other: milliseconds(unchecked),
            ratio: format!("{:+.1} %", 100.0 * (checked / unchecked - 1.0)),
            goal: "under +10 %".to_owned(),
            reached: checked / unchecked < 1.1,
        },
    ])
}

/// Compares two processes of one thread on both sides, with both sides' defaults.
pub(crate) fn two_processes_both(rounds: usize) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    for (net, what) in [
        ("cnn", "CNN, batch 64 in all, 2 processes of 1 thread on both sides, both with defaults"),
        (
            "resnet18",
            "ResNet-18, 32 images in all, 2 processes of 1 thread on both sides, both with defaults",
        ),
    ] {
        let Some(peer) = Side::torchrun("peers/train.py", &["--model", net]) else {
            return Ok(Vec::new());
        };
        let own = launched(2, &format!("train {net}"))?;
        let [ours, theirs] = in_turns(rounds, &[own, peer])?;
        rows.push(times(what, ours, theirs, 1.0));
    }
    Ok(rows)
}

/// Compares all-reduces between two processes of this host.
pub(crate) fn all_reduce(rounds: usize) -> Result<Vec<Row>> {
    let rows = [
        "all-reduce of 47 MB between 2 processes of one host, against torch.distributed",
        "all-reduce of 4 bytes, the same",
    ];
    collectives(rounds, "all-reduce", rows, 1.0)
}

/// Compares the collectives of sharded training between two processes of this host.
pub(crate) fn shards(rounds: usize) -> Result<Vec<Row>> {
    let rows = [
        "all-gather into 16 MB between 2 processes of one host, against torch.distributed",
        "reduce-scatter of 16 MB, the same",
    ];
    collectives(rounds, "shards", rows, 3.0)
}

/// Compares two collectives of `peers/collectives.py`; the peer's time over ours must be at least `goal`.
fn collectives(rounds: usize, name: &str, rows: [&'static str; 2], goal: f64) -> Result<Vec<Row>> {
    let Some(peer) = Side::torchrun("peers/collectives.py", &[name]) else {
        return Ok(Vec::new());
    };
    let sides = [launched(2, name)?, peer];
    let mut medians = [const { [Vec::new(), Vec::new()] }; 2];
    for round in 0..rounds {
        for turn in 0..2 {
            let side = (round + turn) % 2;
            for (size, mut seconds) in sides[side].lists::<2>()?.into_iter().enumerate() {
                medians[size][side].push(median(&mut seconds));
            }
        }
    }
    let row = |(what, [mut ours, mut theirs]): (&'static str, [Vec<f64>; 2])| {
        let (ours, theirs) = (median(&mut ours), median(&mut theirs));
        Row {
            what,
            ours: milliseconds(ours),
            other: milliseconds(theirs),
            ratio: format!("{:.1}x", theirs / ours),
            goal: format!("at least {goal:.1}x"),
            reached: theirs >= goal * ours,
        }
    };
    Ok(rows.into_iter().zip(medians).map(row).collect())
}

/// Returns a measurement under the launcher, with the two threads of the machine for all processes together.
pub(super) fn launched(processes: usize, measurement: &str) -> Result<Side> {
    let own = std::env::current_exe().context("cannot find this program")?;
    Ok(Side::command(
        processes::brigade()?,
        [
            "launch".to_owned(),
            "--nproc".to_owned(),
            processes.to_string(),
            "--threads-per-rank".to_owned(),
            (2 / processes).max(1).to_string(),
            "--prefix".to_owned(),
            String::new(),
            "--".to_owned(),
            own.to_string_lossy().into_owned(),
            "--measure".to_owned(),
            measurement.to_owned(),
        ],
    ))
}

pub(super) fn megabytes(bytes: f64) -> String {
    format!("{:.0} MB", bytes / 1e6)
}
