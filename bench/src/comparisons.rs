//! Comparisons, with the goal of each.

mod checkpoint;
mod dispatch;
mod generation;
pub(crate) mod gpu;
mod gpu_account;
mod images;
mod learner;
mod pipeline;
mod products;
mod sharding;
mod tensor_parallel;
mod text;
pub(crate) mod tpu;
mod training;

use anyhow::{Context, Result};

use crate::processes::{self, Side, median};
use crate::table::Row;

/// Comparison with one or more lines of the table, which are measured together.
pub(crate) struct Comparison {
    pub(crate) name: &'static str,
    /// Function of the number of rounds. It returns no rows if the peer is not installed.
    pub(crate) run: fn(usize) -> Result<Vec<Row>>,
}

pub(crate) fn all() -> Vec<Comparison> {
    vec![
        Comparison { name: "accelerator-overhead", run: accelerator_overhead },
        Comparison { name: "cnn-against-pytorch", run: cnn_against_pytorch },
        Comparison { name: "reducer-overhead", run: reducer_overhead },
        Comparison { name: "launch-to-first-step", run: launch_to_first_step },
        Comparison { name: "brigade-help", run: brigade_help },
        Comparison { name: "loader-against-memcpy", run: loader_against_memcpy },
        Comparison { name: "training-cnn", run: training::cnn },
        Comparison { name: "training-resnet18", run: training::resnet18 },
        Comparison { name: "training-resnet50", run: training::resnet50 },
        Comparison { name: "training-xresnet50", run: training::xresnet50 },
        Comparison { name: "images-loader", run: images::loader },
        Comparison { name: "images-example", run: images::example },
        Comparison { name: "learner-overhead", run: learner::overhead },
        Comparison { name: "learner-imagewoof", run: learner::imagewoof },
        Comparison { name: "text-tokens", run: text::tokens },
        Comparison { name: "text-awd-lstm", run: text::awd_lstm },
        Comparison { name: "text-gpt2", run: text::gpt2 },
        Comparison { name: "text-bert", run: text::bert },
        Comparison { name: "linear-against-pytorch", run: training::linear },
        Comparison { name: "transformer-block-against-pytorch", run: training::transformer_block },
        Comparison { name: "matmul-share", run: products::matmul_share },
        Comparison { name: "reproducible-products", run: products::reproducible },
        Comparison { name: "adamw", run: training::adamw },
        Comparison { name: "memory", run: training::memory },
        Comparison { name: "two-processes-against-pytorch", run: training::two_processes_both },
        Comparison { name: "all-reduce", run: training::all_reduce },
        Comparison { name: "shards", run: training::shards },
        Comparison { name: "dispatch-load", run: dispatch::load },
        Comparison { name: "dispatch-forward", run: dispatch::forward },
        Comparison { name: "dispatch-cold", run: dispatch::cold },
        Comparison { name: "dispatch-generate", run: dispatch::generate },
        Comparison { name: "generate-quantised", run: generation::quantised },
        Comparison { name: "generate-gpt2", run: generation::gpt2 },
        Comparison { name: "generate-llama", run: generation::llama },
        Comparison { name: "sharded-step", run: sharding::small },
        Comparison { name: "sharded-step-gpt2", run: sharding::gpt2 },
        Comparison { name: "sharded-checkpoint", run: sharding::checkpoint },
        Comparison { name: "sharded-load", run: sharding::load },
        Comparison { name: "sharded-one-rank", run: sharding::one_rank },
        Comparison { name: "sharded-memory", run: sharding::memory },
        Comparison { name: "sharded-reshard", run: sharding::reshard },
        Comparison { name: "divided-layer", run: tensor_parallel::layer },
        Comparison { name: "divided-loss", run: tensor_parallel::loss },
        Comparison { name: "divided-context", run: tensor_parallel::context },
        Comparison { name: "pipeline-step", run: pipeline::step },
        Comparison { name: "pipeline-executor", run: pipeline::executor },
        Comparison { name: "two-processes", run: training::two_processes },
        Comparison { name: "checkpoint-files", run: checkpoint::files },
        Comparison { name: "checkpoint-background", run: checkpoint::background },
        Comparison { name: "gpu-cnn", run: gpu::cnn },
        Comparison { name: "gpu-gpt2", run: gpu::gpt2 },
        Comparison { name: "gpu-imagenette", run: gpu::imagenette },
        Comparison { name: "gpu-first-step", run: gpu::first_step },
        Comparison { name: "gpu-resnet50", run: gpu::resnet50 },
        Comparison { name: "gpu-resnet50-compiled", run: gpu::resnet50_compiled },
        Comparison { name: "gpu-account", run: gpu_account::gpt2 },
        Comparison { name: "gpu-account-resnet50", run: gpu_account::resnet50 },
        Comparison { name: "gpu-gpt2-long", run: gpu::gpt2_long },
        Comparison { name: "gpu-bert", run: gpu::bert },
        Comparison { name: "gpu-vit", run: gpu::vit },
        Comparison { name: "gpu-llama", run: gpu::llama },
        Comparison { name: "tpu-resnet18", run: tpu::resnet18 },
    ]
}

/// Compares a step of the CNN through the Accelerator with the same step written on tch by hand.
fn accelerator_overhead(rounds: usize) -> Result<Vec<Row>> {
    let Pairs { ours, other: hand, ratio } = pairs(rounds, "steps-accelerated-and-by-hand")?;
    Ok(vec![Row {
        what: "CNN step, batch 64, fp32, 2 cores: Accelerator against tch by hand",
        ours: milliseconds(ours),
        other: milliseconds(hand),
        ratio: format!("{:+.1} %", 100.0 * (ratio - 1.0)),
        goal: "at most +2 %".to_owned(),
        reached: ratio <= 1.02,
    }])
}

/// Compares the same step with PyTorch's own loop, both with their defaults.
fn cnn_against_pytorch(rounds: usize) -> Result<Vec<Row>> {
    let Some(peer) = Side::peer("peers/cnn.py", &[]) else {
        return Ok(Vec::new());
    };
    let [ours, theirs] = in_turns(rounds, &[Side::own("step-accelerated"), peer])?;
    Ok(vec![Row {
        what: "CNN step, batch 64, fp32, 2 cores: Accelerator against PyTorch's loop",
        ours: milliseconds(ours),
        other: milliseconds(theirs),
        ratio: format!("{:.2}x", theirs / ours),
        goal: "at least 1.00x".to_owned(),
        reached: theirs >= ours,
    }])
}

/// Compares a step with the reducer of two ranks whose collectives return at once with a step without it: the cost of
/// the reducer and of our code around it, besides kernels and messages.
fn reducer_overhead(rounds: usize) -> Result<Vec<Row>> {
    let Pairs { ours: with, other: without, ratio } = pairs(rounds, "steps-reduced-and-plain")?;
    let share = 100.0 * (1.0 - 1.0 / ratio);
    Ok(vec![Row {
        what: "CNN step of a rank of 2: share outside kernels and collectives",
        ours: milliseconds(with),
        other: milliseconds(without),
        ratio: format!("{share:.1} %"),
        goal: "under 3 %".to_owned(),
        reached: share < 3.0,
    }])
}

/// Measures the time from the start of the launcher to the end of the first training step on both ranks.
fn launch_to_first_step(rounds: usize) -> Result<Vec<Row>> {
    let brigade = processes::brigade()?;
    let own = std::env::current_exe().context("cannot find this program")?;
    let ours = Side::command(
        brigade,
        ["launch", "--nproc", "2", "--"].map(str::to_owned).into_iter().chain([
            own.to_string_lossy().into_owned(),
            "--measure".to_owned(),
            "first-step".to_owned(),
        ]),
    );
    let peer = Side::torchrun("peers/first_step.py", &[]);
    let mut wall = Vec::new();
    let mut theirs = Vec::new();
    for _ in 0..rounds {
        wall.push(ours.seconds_until_end()?);
        if let Some(peer) = &peer {
            theirs.push(peer.seconds_until_end()?);
        }
    }
    let ours = median(&mut wall);
    let (other, ratio) = if theirs.is_empty() {
        ("not installed".to_owned(), "-".to_owned())
    } else {
        let theirs = median(&mut theirs);
        (format!("{theirs:.2} s"), format!("{:.1}x", theirs / ours))
    };
    Ok(vec![Row {
        what: "start of the launcher to the end of a first step, 2 processes: against torchrun",
        ours: format!("{ours:.2} s"),
        other,
        ratio,
        goal: "under 1.5 s".to_owned(),
        reached: ours < 1.5,
    }])
}

/// Measures the response time of the command line.
fn brigade_help(rounds: usize) -> Result<Vec<Row>> {
    let help = Side::command(processes::brigade()?, ["--help".to_owned()]);
    let mut seconds = Vec::new();
    for _ in 0..rounds * 4 {
        seconds.push(help.seconds_until_end()?);
    }
    let seconds = median(&mut seconds);
    Ok(vec![Row {
        what: "brigade --help",
        ours: milliseconds(seconds),
        other: "-".to_owned(),
        ratio: "-".to_owned(),
        goal: "under 20 ms".to_owned(),
        reached: seconds < 0.020,
    }])
}

/// Compares the bytes per second of shuffled batches of 28x28 images, made from memory on one thread, with a copy of as
/// many bytes.
fn loader_against_memcpy(rounds: usize) -> Result<Vec<Row>> {
    let [batches, copies] = in_turns(
        rounds,
        &[Side::own("loader-bytes-per-second"), Side::own("memcpy-bytes-per-second")],
    )?;
    Ok(vec![Row {
        what: "loader: shuffled 28x28 batches from memory, one thread, against memcpy",
        ours: format!("{:.1} GB/s", batches / 1e9),
        other: format!("{:.1} GB/s", copies / 1e9),
        ratio: format!("{:.2}", batches / copies),
        goal: "at least 0.33".to_owned(),
        reached: batches / copies >= 1.0 / 3.0,
    }])
}

/// Medians of two sides that take turns step by step in one process, and the median of the ratios of neighbouring
/// steps, which removes slow drifts of the machine.
struct Pairs {
    ours: f64,
    other: f64,
    ratio: f64,
}

fn pairs(rounds: usize, name: &str) -> Result<Pairs> {
    let (mut ours, mut other, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let [a, b] = Side::own(name).lists::<2>()?;
        ratios.extend(a.iter().zip(&b).map(|(a, b)| a / b));
        ours.extend(a);
        other.extend(b);
    }
    Ok(Pairs { ours: median(&mut ours), other: median(&mut other), ratio: median(&mut ratios) })
}

/// Runs every side once per round, in turns, and returns the median of each side's medians.
fn in_turns<const N: usize>(rounds: usize, sides: &[Side; N]) -> Result<[f64; N]> {
    let mut medians = [const { Vec::new() }; N];
    for round in 0..rounds {
        // The first side of a round may run on a warmer or cooler machine, so the sides alternate.
        for turn in 0..N {
            let side = (round + turn) % N;
            let [mut numbers] = sides[side].lists::<1>()?;
            medians[side].push(median(&mut numbers));
        }
    }
    Ok(medians.map(|mut values| median(&mut values)))
}

pub(crate) fn milliseconds(seconds: f64) -> String {
    format!("{:.2} ms", 1e3 * seconds)
}
