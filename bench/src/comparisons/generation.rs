//! Comparison of text generation on two threads of the CPU: quantised weights, and GPT-2 and a Llama against
//! transformers.

use anyhow::{Context, Result};

use super::training::megabytes;
use super::training::times;
use crate::processes::{Side, median};
use crate::table::Row;

/// Seconds of a token, and the highest memory.
#[derive(Clone, Copy)]
struct Measured {
    seconds: f64,
    bytes: f64,
}

/// Number of generated tokens.
const TOKENS: &str = "32";

/// Runs sides in turns, round by round.
fn measured<const N: usize>(rounds: usize, sides: &[Side; N]) -> Result<[Measured; N]> {
    let mut found = [const { (Vec::new(), Vec::new()) }; N];
    for round in 0..rounds {
        for turn in 0..N {
            let side = (round + turn) % N;
            let [mut seconds, bytes] = sides[side].lists::<2>()?;
            found[side].0.push(median(&mut seconds));
            found[side].1.extend(bytes);
        }
    }
    Ok(found.map(|(mut seconds, mut bytes)| Measured {
        seconds: median(&mut seconds),
        bytes: median(&mut bytes),
    }))
}

/// Compares tokens of a Llama with 1.1 billion parameters in int8 and int4 with bfloat16, and with PyTorch's modules on
/// the same kernels.
pub(crate) fn quantised(rounds: usize) -> Result<Vec<Row>> {
    let folder = tempfile::tempdir()?;
    let written = |format: &str| -> Result<String> {
        let path = folder.path().join(format.replace(':', "_"));
        let path = path.to_str().context("the temporary folder is not UTF-8")?.to_owned();
        Side::own(&format!("generation write-llama {path} {format}")).lists::<1>()?;
        Ok(path)
    };
    let own = |path: &str| Side::own(&format!("generation llama {path} 1 {TOKENS}"));
    let bf16 = written("bf16")?;
    let mut rows = Vec::new();
    for (format, peer_format, [speed, memory, peer], [least, most]) in [
        (
            "int8",
            "int8",
            [
                "a token of a Llama of 1.1 B parameters in int8, batch 1: against bfloat16",
                "the same: highest memory",
                "the same: against PyTorch's modules on the same kernels",
            ],
            [1.5, 0.55],
        ),
        (
            "int4:128",
            "int4",
            [
                "a token of it in int4, batch 1: against bfloat16",
                "the same: highest memory",
                "the same: against PyTorch's modules on the same kernels",
            ],
            [2.0, 0.35],
        ),
    ] {
        let path = written(format)?;
        let [ours, floats] = measured(rounds, &[own(&path), own(&bf16)])?;
        rows.push(times(speed, ours.seconds, floats.seconds, least));
        rows.push(Row {
            what: memory,
            ours: megabytes(ours.bytes),
            other: megabytes(floats.bytes),
            ratio: format!("{:.2}", ours.bytes / floats.bytes),
            goal: format!("at most {most:.2}"),
            reached: ours.bytes <= most * floats.bytes,
        });
        let arguments = ["quantised", &bf16, peer_format, TOKENS];
        let Some(theirs) = Side::peer("peers/generation.py", &arguments) else { continue };
        let [ours, theirs] = measured(rounds, &[own(&path), theirs])?;
        rows.push(times(peer, ours.seconds, theirs.seconds, 1.0));
    }
    Ok(rows)
}

/// Compares greedy generation of GPT-2 with 124 M parameters in float32 with transformers.
pub(crate) fn gpt2(rounds: usize) -> Result<Vec<Row>> {
    const LINES: [[&str; 3]; 2] = [
        [
            "greedy generation of GPT-2 124M, fp32, 16 tokens before 32, batch 1: against transformers",
            "batch 1: against transformers with a static cache",
            "batch 1: against transformers with a static cache and torch.compile",
        ],
        [
            "batch 8: against transformers",
            "batch 8: against transformers with a static cache",
            "batch 8: against transformers with a static cache and torch.compile",
        ],
    ];
    floats(rounds, "gpt2", "", LINES)
}

/// Compares greedy generation of a Llama with 1.1 billion parameters in bfloat16 with transformers.
pub(crate) fn llama(rounds: usize) -> Result<Vec<Row>> {
    const LINES: [[&str; 3]; 2] = [
        [
            "greedy generation of a Llama of 1.1 B parameters, bf16, 16 tokens before 32, batch 1: against transformers",
            "batch 1: against transformers with a static cache",
            "batch 1: against transformers with a static cache and torch.compile",
        ],
        [
            "batch 8: against transformers",
            "batch 8: against transformers with a static cache",
            "batch 8: against transformers with a static cache and torch.compile",
        ],
    ];
    floats(rounds, "llama", " bf16", LINES)
}

/// Compares greedy generation of a model in batches of 1 and 8 with transformers: with its dynamic cache, its static
/// cache, and a compiled step.
fn floats(
    rounds: usize,
    model: &str,
    format: &str,
    lines: [[&'static str; 3]; 2],
) -> Result<Vec<Row>> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join(model);
    let path = path.to_str().context("the temporary folder is not UTF-8")?;
    Side::own(&format!("generation write-{model} {path}{format}")).lists::<1>()?;
    let mut rows = Vec::new();
    for (batch, lines) in ["1", "8"].into_iter().zip(lines) {
        let peer =
            |cache| Side::peer("peers/generation.py", &["floats", path, cache, batch, TOKENS]);
        let (Some(dynamic), Some(fixed), Some(compiled)) =
            (peer("dynamic"), peer("static"), peer("compiled"))
        else {
            return Ok(Vec::new());
        };
        let own = Side::own(&format!("generation {model} {path} {batch} {TOKENS}"));
        let [ours, theirs @ ..] = measured(rounds, &[own, dynamic, fixed, compiled])?;
        for (line, theirs) in lines.into_iter().zip(theirs) {
            rows.push(times(line, ours.seconds, theirs.seconds, 1.5));
        }
    }
    Ok(rows)
}
