//! Comparison of training on a GPU with PyTorch: its eager loop and `torch.compile`.

use anyhow::{Result, ensure};
use brigade::torch::DEVICE_KINDS;

use super::training::megabytes;
use crate::measurements::gpu_training::{SMALL, small};
use crate::processes::{Block, Outcome, Side, blocks_in_turns, median};
use crate::table::Row;

/// Returns `true` if a comparison needs a GPU, by its name. The runner of `cargo xtask gpu` uses the same rule.
pub(crate) fn needs_gpu(name: &str) -> bool {
    name.starts_with("gpu-")
}

/// Returns the reason why a comparison cannot run here: there is no GPU, and small sizes were not requested.
pub(crate) fn cannot_run(name: &str) -> Option<String> {
    if !needs_gpu(name) || small() {
        return None;
    }
    let mut reasons = Vec::new();
    for kind in DEVICE_KINDS {
        match kind.devices() {
            Ok(_) => return None,
            Err(reason) => reasons.push(format!("{}: {reason}", kind.name())),
        }
    }
    let reasons = reasons.join(", ");
    Some(format!(
        "it needs a GPU ({reasons}): `cargo xtask gpu --only bench` builds for one; {SMALL}=1 runs a \
         small form of it on the CPU"
    ))
}

/// Compares the FashionMNIST CNN, recorded as a graph and not, with the eager loop and `torch.compile`.
pub(crate) fn cnn(rounds: usize) -> Result<Vec<Row>> {
    let script = "peers/gpu_cnn.py";
    let [captured, plain, loaded, eager, compiled] = blocks_in_turns(
        rounds,
        &[
            Some(Side::own("gpu cnn captured")),
            Some(Side::own("gpu cnn")),
            Some(Side::own("gpu cnn captured loaded")),
            Side::peer(script, &[]),
            Side::peer(script, &["--compile"]).map(Side::compiles),
        ],
    );
    let mut rows = vec![
        steps("GPU: CNN, batch 64, captured, against eager PyTorch", captured, eager, Some(3.0)),
        steps(
            "GPU: the same, captured, against torch.compile(mode=\"reduce-overhead\")",
            captured,
            compiled,
            Some(1.5),
        ),
        steps("GPU: the same, not captured, against eager PyTorch", plain, eager, None),
        steps(
            "GPU: the same, captured, from a loader of a shuffled data set on the GPU, against eager PyTorch without \
             one",
            loaded,
            eager,
            None,
        ),
    ];
    rows.extend(memory(
        "GPU: memory of the CNN's training, captured, against eager",
        captured,
        eager,
    ));
    finish(rows, [captured, plain, loaded])
}

/// Compares ResNet-50 in bf16, with its data, with the eager loop.
pub(crate) fn resnet50(rounds: usize) -> Result<Vec<Row>> {
    let peer = Side::peer(RESNET50, &[]);
    let [ours, eager] = blocks_in_turns(rounds, &[Some(Side::own("gpu resnet50")), peer]);
    let what =
        "GPU: ResNet-50, bf16, channels_last, batch 256 from the host, against eager PyTorch";
    let mut rows = vec![steps(what, ours, eager, Some(1.1))];
    rows.extend(memory("GPU: memory of ResNet-50's training, against eager", ours, eager));
    finish(rows, [ours])
}

/// Compares ResNet-50 with `torch.compile`. This is separate, since compiling takes longer than everything else, and
/// rows are written when their comparison has ended.
pub(crate) fn resnet50_compiled(rounds: usize) -> Result<Vec<Row>> {
    let peer = Side::peer(RESNET50, &["--compile"]);
    let [ours, compiled] = blocks_in_turns(rounds, &[Some(Side::own("gpu resnet50")), peer]);
    let what = "GPU: the same against the fastest mode of torch.compile";
    let mut rows = vec![steps(what, ours, compiled, Some(1.08))];
    rows.extend(memory("GPU: memory of ResNet-50's training, against compiled", ours, compiled));
    finish(rows, [ours])
}

const RESNET50: &str = "peers/gpu_resnet50.py";
const TRANSFORMERS: &str = "peers/gpu_transformers.py";

/// Compares GPT-2 with 124 M parameters in bf16 with the eager loop and with `torch.compile`, with and without dropout.
pub(crate) fn gpt2(rounds: usize) -> Result<Vec<Row>> {
    let [plain, captured, eager, compiled] = blocks_in_turns(
        rounds,
        &[
            Some(Side::own("gpu gpt2")),
            Some(Side::own("gpu gpt2 captured")),
            Side::peer(TRANSFORMERS, &["gpt2"]),
            Side::peer(TRANSFORMERS, &["gpt2", "--compile"]),
        ],
    );
    let what = "GPU: GPT-2 124 M, bf16, 8 x 1024 tokens, dropout 0.1, against eager PyTorch";
    let mut rows = vec![
        steps(what, plain, eager, Some(1.1)),
        steps("GPU: the same, captured, against eager PyTorch", captured, eager, None),
        steps("GPU: the same, against the fastest mode of torch.compile", plain, compiled, None),
        steps(
            "GPU: the same, captured, against the fastest mode of torch.compile",
            captured,
            compiled,
            Some(1.1),
        ),
    ];
    rows.extend(memory("GPU: memory of GPT-2's training, against eager", plain, eager));
    rows.extend(memory_within(
        "GPU: memory of GPT-2's training, against compiled",
        plain,
        compiled,
        Some(0.8),
    ));
    let [without, compiled] = blocks_in_turns(
        rounds,
        &[
            Some(Side::own("gpu gpt2 captured dropout=0")),
            Side::peer(TRANSFORMERS, &["gpt2", "--compile", "--dropout", "0"]),
        ],
    );
    rows.push(steps(
        "GPU: GPT-2 124 M, bf16, 8 x 1024 tokens, no dropout, captured, against the fastest mode of torch.compile",
        without,
        compiled,
        Some(1.1),
    ));
    finish(rows, [plain, captured, without])
}

/// Compares GPT-2 without dropout on 32 rows with `torch.compile`.
pub(crate) fn gpt2_long(rounds: usize) -> Result<Vec<Row>> {
    let peer = ["gpt2", "--compile", "--rows", "32", "--dropout", "0"];
    let [captured, compiled] = blocks_in_turns(
        rounds,
        &[Some(Side::own("gpu gpt2 captured rows=32 dropout=0")), Side::peer(TRANSFORMERS, &peer)],
    );
    let what = "GPU: GPT-2 124 M, bf16, 32 x 1024 tokens, no dropout, captured, against the fastest mode of \
                torch.compile";
    let mut rows = vec![steps(what, captured, compiled, Some(1.1))];
    rows.extend(memory_within("GPU: memory of it", captured, compiled, Some(0.8)));
    finish(rows, [captured])
}

/// Compares a Llama of 1.2 billion parameters with `torch.compile`. Both sides together need more memory than GPUs of
/// 80 GB have, so one runs after the other.
pub(crate) fn llama(rounds: usize) -> Result<Vec<Row>> {
    let [ours] = blocks_in_turns(rounds, &[Some(Side::own("gpu llama"))]);
    let [compiled] = blocks_in_turns(rounds, &[Side::peer(TRANSFORMERS, &["llama", "--compile"])]);
    let what = "GPU: Llama 1.2 B, bf16, 4 x 2048 tokens, against the fastest mode of torch.compile";
    let mut rows = vec![steps(what, ours, compiled, Some(1.05))];
    rows.extend(memory("GPU: memory of Llama's training, against compiled", ours, compiled));
    finish(rows, [ours])
}

/// Compares a classifier on BERT base with `torch.compile`.
pub(crate) fn bert(rounds: usize) -> Result<Vec<Row>> {
    let [plain, captured, compiled] = blocks_in_turns(
        rounds,
        &[
            Some(Side::own("gpu bert")),
            Some(Side::own("gpu bert captured")),
            Side::peer(TRANSFORMERS, &["bert", "--compile"]),
        ],
    );
    let what = "GPU: BERT base, bf16, 64 x 128 tokens, captured, against the fastest mode of torch.compile";
    let mut rows = vec![
        steps(what, captured, compiled, Some(1.1)),
        steps("GPU: the same, not captured", plain, compiled, None),
    ];
    rows.extend(memory("GPU: memory of BERT's training, against compiled", plain, compiled));
    finish(rows, [plain, captured])
}

/// Compares ViT-B/16 with its data with `torch.compile`.
pub(crate) fn vit(rounds: usize) -> Result<Vec<Row>> {
    let [ours, compiled] = blocks_in_turns(
        rounds,
        &[Some(Side::own("gpu vit")), Side::peer(TRANSFORMERS, &["vit", "--compile"])],
    );
    let what =
        "GPU: ViT-B/16, bf16, batch 256 from the host, against the fastest mode of torch.compile";
    let mut rows = vec![steps(what, ours, compiled, Some(1.05))];
    rows.extend(memory("GPU: memory of ViT's training, against compiled", ours, compiled));
    finish(rows, [ours])
}

/// Compares the time from the start of a process to the end of its first training step.
pub(crate) fn first_step(rounds: usize) -> Result<Vec<Row>> {
    let ours = Side::own("gpu first-step");
    let peer = Side::peer("peers/gpu_first_step.py", &[]);
    let (mut mine, mut theirs) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        mine.push(ours.seconds_until_line()?);
        if let Some(peer) = &peer {
            theirs.push(peer.seconds_until_line()?);
        }
    }
    let block = |seconds: &mut [f64]| Block { seconds: median(seconds), peak: 0.0 };
    let theirs = if theirs.is_empty() {
        Outcome::NotInstalled
    } else {
        Outcome::Measured(block(&mut theirs))
    };
    let what = "GPU: start of a process to the end of its first step of the CNN, against PyTorch";
    Ok(vec![compared(what, Outcome::Measured(block(&mut mine)), theirs, Some(5.0), |seconds| {
        format!("{seconds:.2} s")
    })])
}

/// Compares five epochs on ten classes of generated photographs in GPU memory. Every round is a complete training.
pub(crate) fn imagenette(rounds: usize) -> Result<Vec<Row>> {
    let run =
        |captured| Side::own(&format!("gpu imagenette {captured} runs={rounds}")).lists::<4>();
    let (captured, lists) = match run("captured") {
        Ok(lists) => (true, lists),
        Err(error) => {
            eprintln!("  failed: {error:#}");
            (false, run("")?)
        }
    };
    let [mut seconds, mut shares, images, peak] = lists;
    ensure!(!seconds.is_empty(), "there are no rounds");
    let (images, peak) = (images.first().copied().unwrap_or(0.0), peak.first().copied());
    let row = |what, ours| Row {
        what,
        ours,
        other: "-".to_owned(),
        ratio: "-".to_owned(),
        goal: "-".to_owned(),
        reached: true,
    };
    let mut rows = vec![
        row(
            if captured {
                "GPU: 5 epochs of xresnet50 on generated photographs of 10 classes at 128 px, \
                     bf16, images held on the GPU, captured"
            } else {
                "GPU: 5 epochs of xresnet50 on generated photographs of 10 classes at 128 px, \
                     bf16, images held on the GPU, not captured"
            },
            marked(format!("{:.1} s for {images:.0} images", median(&mut seconds))),
        ),
        row(
            "GPU: accuracy on validation images then",
            marked(format!("{:.1} %", 100.0 * median(&mut shares))),
        ),
    ];
    if let Some(peak) = peak.filter(|&bytes| bytes > 0.0) {
        rows.push(row("GPU: memory of that training, the images included", megabytes(peak)));
    }
    Ok(rows)
}

/// Returns a row with the speedup of a step over the peer.
fn steps(what: &'static str, ours: Outcome, theirs: Outcome, goal: Option<f64>) -> Row {
    compared(what, ours, theirs, goal, |seconds| format!("{:.3} ms", 1e3 * seconds))
}

fn compared(
    what: &'static str,
    ours: Outcome,
    theirs: Outcome,
    goal: Option<f64>,
    shown: impl Fn(f64) -> String,
) -> Row {
    let text = |outcome| match outcome {
        Outcome::Measured(block) => shown(block.seconds),
        Outcome::Failed => "failed".to_owned(),
        Outcome::NotInstalled => "not installed".to_owned(),
    };
    let ratio = match (ours, theirs) {
        (Outcome::Measured(ours), Outcome::Measured(theirs)) => Some(theirs.seconds / ours.seconds),
        _ => None,
    };
    Row {
        what,
        ours: marked(text(ours)),
        other: text(theirs),
        ratio: ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}x")),
        goal: goal.map_or_else(|| "-".to_owned(), |goal| format!("at least {goal:.2}x")),
        reached: match goal {
            Some(goal) => ratio.is_some_and(|ratio| ratio >= goal),
            None => matches!(ours, Outcome::Measured(_)),
        },
    }
}

/// Returns a row with the peak GPU memory of tensors; `None` on a CPU, where it is not counted, or if a side is
/// missing.
fn memory(what: &'static str, ours: Outcome, theirs: Outcome) -> Option<Row> {
    memory_within(what, ours, theirs, None)
}

/// Returns the row of [`memory`] with the largest share of the peer's memory as its goal.
fn memory_within(
    what: &'static str,
    ours: Outcome,
    theirs: Outcome,
    goal: Option<f64>,
) -> Option<Row> {
    let (Outcome::Measured(ours), Outcome::Measured(theirs)) = (ours, theirs) else { return None };
    let share = ours.peak / theirs.peak;
    (ours.peak > 0.0 && theirs.peak > 0.0).then(|| Row {
        what,
        ours: marked(megabytes(ours.peak)),
        other: megabytes(theirs.peak),
        ratio: format!("{share:.2}"),
        goal: goal.map_or_else(|| "-".to_owned(), |goal| format!("at most {goal:.2}")),
        reached: goal.is_none_or(|goal| share <= goal),
    })
}

/// Marks figures of small runs, so that they are not taken for full ones.
pub(super) fn marked(figure: String) -> String {
    if small() { format!("{figure} (small)") } else { figure }
}

/// Returns the rows, unless none of our sides has a figure.
fn finish<const N: usize>(rows: Vec<Row>, ours: [Outcome; N]) -> Result<Vec<Row>> {
    let measured = ours.iter().any(|outcome| matches!(outcome, Outcome::Measured(_)));
    ensure!(measured, "no side of ours was measured");
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn measured(seconds: f64, peak: f64) -> Outcome {
        Outcome::Measured(Block { seconds, peak })
    }

    #[test]
    fn a_side_without_a_figure_has_no_ratio_and_reaches_no_goal() {
        let row = steps("a", measured(0.001, 0.0), measured(0.004, 0.0), Some(3.0));
        assert_eq!(
            (row.ratio.as_str(), row.other.as_str(), row.reached),
            ("4.00x", "4.000 ms", true)
        );
        let row = steps("a", measured(0.001, 0.0), measured(0.002, 0.0), Some(3.0));
        assert!(!row.reached);
        for (missing, word) in
            [(Outcome::Failed, "failed"), (Outcome::NotInstalled, "not installed")]
        {
            let row = steps("a", measured(0.001, 0.0), missing, Some(3.0));
            assert_eq!((row.ratio.as_str(), row.other.as_str(), row.reached), ("-", word, false));
        }
    }

    #[test]
    fn memory_is_compared_where_both_sides_count_it() {
        let row = memory("a", measured(1.0, 5e8), measured(1.0, 1e9));
        assert_eq!(row.map(|row| row.ratio), Some("0.50".to_owned()));
        let row = |goal| memory_within("a", measured(1.0, 9e8), measured(1.0, 1e9), Some(goal));
        assert_eq!(
            [0.8, 0.9].map(|goal| row(goal).map(|row| row.reached)),
            [Some(false), Some(true)]
        );
        assert!(memory("a", measured(1.0, 0.0), measured(1.0, 0.0)).is_none());
        assert!(memory("a", Outcome::Failed, measured(1.0, 1e9)).is_none());
    }

    #[test]
    fn comparisons_are_of_gpus_by_their_names() {
        let names = [
            "cnn",
            "gpt2",
            "imagenette",
            "first-step",
            "resnet50",
            "resnet50-compiled",
            "account",
            "account-resnet50",
            "gpt2-long",
            "bert",
            "vit",
            "llama",
        ];
        let names = names.map(|name| format!("gpu-{name}"));
        let all: Vec<_> =
            super::super::all().into_iter().map(|it| it.name).filter(|it| needs_gpu(it)).collect();
        assert_eq!(all, names);
        assert!(cannot_run("brigade-help").is_none());
    }
}
