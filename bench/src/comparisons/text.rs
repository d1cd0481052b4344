//! Comparison of texts: tokenization with fastai's, training steps of language models and transformers with fastai's
//! and PyTorch's.

use anyhow::{Result, ensure};
use brigade_testkit::Reviews;

use super::{in_turns, training};
use crate::processes::{Side, median};
use crate::table::Row;

/// Compares fastai's rules and spaCy's tokenizer on generated reviews, with 2 workers and with 2 threads.
pub(crate) fn tokens(rounds: usize) -> Result<Vec<Row>> {
    let folder = tempfile::tempdir()?;
    Reviews::new(6000).sentences(20).write(folder.path())?;
    let path = folder.path().to_string_lossy();
    ensure!(!path.contains(' '), "words are divided at spaces");
    let Some(peer) = Side::peer("peers/tokenize_texts.py", &[&path, "2"]) else {
        return Ok(Vec::new());
    };
    let own = Side::own(&format!("text tokenize {path} 2"));
    let [ours, theirs] = in_turns(rounds, &[own, peer])?;
    Ok(vec![Row {
        what: "tokens of 22,000 generated reviews, 2 threads against fastai's 2 workers",
        ours: format!("{ours:.2} s"),
        other: format!("{theirs:.2} s"),
        ratio: format!("{:.0}x", theirs / ours),
        goal: "at least 20x".to_owned(),
        reached: theirs / ours >= 20.0,
    }])
}

/// Compares steps of fastai's language model with its defaults: 64 rows of 72 tokens, 60,008 words.
pub(crate) fn awd_lstm(rounds: usize) -> Result<Vec<Row>> {
    let Some(peer) = Side::peer("peers/awd_lstm.py", &[]) else {
        return Ok(Vec::new());
    };
    let [ours, theirs] = in_turns(rounds, &[Side::own("text awd-lstm"), peer])?;
    let mut rows = vec![training::times(
        "AWD-LSTM, 64 x 72 tokens of 60,008 words, fp32, against fastai, both with defaults",
        ours,
        theirs,
        1.5,
    )];
    rows.extend(memory(
        rounds,
        "highest memory (memory after the steps) of a process that trains AWD-LSTM, both with defaults",
        "text awd-lstm memory",
        "peers/awd_lstm.py",
        &["--memory"],
    )?);
    Ok(rows)
}

/// Goal against a peer that `torch.compile` has compiled.
const COMPILED: f64 = 1.0;

/// Compares GPT-2 small at 4 x 256 tokens.
pub(crate) fn gpt2(rounds: usize) -> Result<Vec<Row>> {
    transformer(
        rounds,
        "gpt2",
        [
            "GPT-2 small, 4 x 256 tokens, fp32, both with defaults",
            "GPT-2 small, 4 x 256 tokens, bf16, both with defaults",
            "GPT-2 small, same settings: fp32, fused AdamW",
            "GPT-2 small, same settings: bf16, fused AdamW",
            "GPT-2 small against torch.compile, same settings: fp32, fused AdamW",
            "GPT-2 small against torch.compile, same settings: bf16, fused AdamW",
            "highest memory (memory after the steps) of a process that trains GPT-2 small, fp32",
        ],
    )
}

/// Compares BERT base at 8 x 128 tokens, some of them padding.
pub(crate) fn bert(rounds: usize) -> Result<Vec<Row>> {
    transformer(
        rounds,
        "bert",
        [
            "BERT base, 8 x 128 tokens, fp32, both with defaults",
            "BERT base, 8 x 128 tokens, bf16, both with defaults",
            "BERT base, same settings: fp32, fused AdamW",
            "BERT base, same settings: bf16, fused AdamW",
            "BERT base against torch.compile, same settings: fp32, fused AdamW",
            "BERT base against torch.compile, same settings: bf16, fused AdamW",
            "highest memory (memory after the steps) of a process that trains BERT base, fp32",
        ],
    )
}

/// Compares steps with the libraries' defaults, and with the same settings on both sides: theirs with the fused
/// optimizer, which is the default of ours, eager and compiled.
fn transformer(rounds: usize, model: &str, names: [&'static str; 7]) -> Result<Vec<Row>> {
    let theirs = |settings: &[&str]| {
        Side::peer("peers/language.py", &[&["--model", model], settings].concat())
    };
    let (
        Some(default),
        Some(half),
        Some(fused),
        Some(fused_half),
        Some(compiled),
        Some(compiled_half),
    ) = (
        theirs(&[]),
        theirs(&["--precision", "bf16"]),
        theirs(&["--fused"]),
        theirs(&["--fused", "--precision", "bf16"]),
        theirs(&["--fused", "--compile"]),
        theirs(&["--fused", "--compile", "--precision", "bf16"]),
    )
    else {
        return Ok(Vec::new());
    };
    let own = Side::own(&format!("text {model}"));
    let own_half = Side::own(&format!("text {model} bf16"));
    let sides = [own, default, fused, compiled, own_half, half, fused_half, compiled_half];
    let [ours, default, fused, compiled, ours_half, half, fused_half, compiled_half] =
        in_turns(rounds, &sides)?;
    let mut rows = vec![
        training::times(names[0], ours, default, 1.15),
        training::times(names[1], ours_half, half, 1.15),
        training::times(names[2], ours, fused, training::SAME),
        training::times(names[3], ours_half, fused_half, training::SAME),
        training::times(names[4], ours, compiled, COMPILED),
        training::times(names[5], ours_half, compiled_half, COMPILED),
    ];
    let arguments = ["--model", model, "--memory"];
    let own = format!("text {model} memory");
    rows.extend(memory(rounds, names[6], &own, "peers/language.py", &arguments)?);
    Ok(rows)
}

/// Compares the peak resident memory of a process that trains and, in brackets, its memory after the last step.
fn memory(
    rounds: usize,
    what: &'static str,
    own: &str,
    peer: &str,
    arguments: &[&str],
) -> Result<Vec<Row>> {
    let Some(peer) = Side::peer(peer, arguments) else { return Ok(Vec::new()) };
    let own = Side::own(own);
    // For each side: after the last step, and the peak.
    let mut found = [(); 4].map(|()| Vec::new());
    for _ in 0..rounds {
        for (side, lists) in [(&own, 0), (&peer, 2)] {
            for (list, bytes) in found[lists..].iter_mut().zip(side.lists::<2>()?) {
                list.extend(bytes);
            }
        }
    }
    let [ours_after, ours, theirs_after, theirs] = found.each_mut().map(|list| median(list));
    let shown = |highest, after| {
        format!("{} ({})", training::megabytes(highest), training::megabytes(after))
    };
    Ok(vec![Row {
        what,
        ours: shown(ours, ours_after),
        other: shown(theirs, theirs_after),
        ratio: format!("{:.2}", ours / theirs),
        goal: "at most 0.50".to_owned(),
        reached: ours / theirs <= 0.5,
    }])
}
