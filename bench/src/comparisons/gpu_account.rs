//! Accounts of steps on a GPU: the kernels of ours and of the compiled peer by kind, side by side.

use anyhow::{Context, Result};
use serde_json::Value;

use super::gpu::marked;
use crate::kernel_kinds::KernelKind;
use crate::processes::Side;
use crate::table::Row;

/// Seconds and calls of kernels.
type Sum = (f64, f64);

/// Returns the account of GPT-2's step.
pub(crate) fn gpt2(_rounds: usize) -> Result<Vec<Row>> {
    let peer = Side::peer("peers/gpu_transformers.py", &["gpt2", "--compile", "--account"]);
    let what = [
        "GPU: account of GPT-2's step, 8 x 1024 tokens: products",
        "GPU: account of GPT-2's step: attention",
        "GPU: account of GPT-2's step: convolutions",
        "GPU: account of GPT-2's step: normalisation",
        "GPU: account of GPT-2's step: loss",
        "GPU: account of GPT-2's step: optimizer",
        "GPU: account of GPT-2's step: copies and casts",
        "GPU: account of GPT-2's step: other kernels",
        "GPU: account of GPT-2's step: all kernels",
    ];
    account(&Side::own("gpu account-gpt2"), peer.as_ref(), what)
}

/// Returns the account of ResNet-50's step.
pub(crate) fn resnet50(_rounds: usize) -> Result<Vec<Row>> {
    let peer = Side::peer("peers/gpu_resnet50.py", &["--compile", "--account"]);
    let what = [
        "GPU: account of ResNet-50's step, batch 256: products",
        "GPU: account of ResNet-50's step: attention",
        "GPU: account of ResNet-50's step: convolutions",
        "GPU: account of ResNet-50's step: normalisation",
        "GPU: account of ResNet-50's step: loss",
        "GPU: account of ResNet-50's step: optimizer",
        "GPU: account of ResNet-50's step: copies and casts",
        "GPU: account of ResNet-50's step: other kernels",
        "GPU: account of ResNet-50's step: all kernels",
    ];
    account(&Side::own("gpu account-resnet50"), peer.as_ref(), what)
}

/// Returns a row for each kind of kernels, and one for all of them. The largest kernels are listed on stderr.
fn account(ours: &Side, peer: Option<&Side>, what: [&'static str; 9]) -> Result<Vec<Row>> {
    let ours = ours.json()?;
    let theirs = peer.map(Side::json).transpose().unwrap_or_else(|error| {
        eprintln!("  failed: {error:#}");
        None
    });
    for (name, kernels) in [("ours", Some(&ours["kernels"])), ("peer", theirs.as_ref())] {
        if let Some(kernels) = kernels {
            eprintln!("  {name}:\n{}", largest(kernels)?);
        }
    }
    rows(&ours, theirs.as_ref(), what)
}

/// Returns a line for each kernel that takes at least a hundredth of the time, longest first.
fn largest(kernels: &Value) -> Result<String> {
    let mut all = kernels_of(kernels)?;
    all.sort_by(|one, other| other.1.total_cmp(&one.1));
    let seconds: f64 = all.iter().map(|it| it.1).sum();
    let lines = all.iter().take_while(|it| it.1 >= seconds / 100.0).map(|(name, time, calls)| {
        // Names of templates have hundreds of characters.
        let short: String = name.chars().take(100).collect();
        format!("    {:9.3} ms {calls:5} {:?}: {short}", 1e3 * time, KernelKind::of(name))
    });
    Ok(lines.collect::<Vec<_>>().join("\n"))
}

fn rows(ours: &Value, theirs: Option<&Value>, what: [&'static str; 9]) -> Result<Vec<Row>> {
    let kernels = sums(&ours["kernels"])?;
    let of_peer = theirs.map(sums).transpose()?;
    let roofs = roofs(ours)?;
    let has = |at: usize| kernels[at].1 > 0.0 || of_peer.is_some_and(|it| it[at].1 > 0.0);
    let mut rows: Vec<Row> = (0..KernelKind::ALL.len())
        .filter(|&at| has(at))
        .map(|at| row(what[at], kernels[at], of_peer.map(|it| it[at]), roofs[at].as_ref()))
        .collect();
    let all = |sums: [Sum; 8]| sums.iter().fold((0.0, 0.0), |all, it| (all.0 + it.0, all.1 + it.1));
    rows.push(row(what[8], all(kernels), of_peer.map(all), None));
    Ok(rows)
}

/// Work that a kind of kernels needs at least, and the seconds of it at the rate that the device has reached.
struct Roof {
    work: String,
    seconds: f64,
}

fn row(what: &'static str, ours: Sum, theirs: Option<Sum>, roof: Option<&Roof>) -> Row {
    let cell = |(seconds, calls): Sum| {
        let mut text = format!("{:.3} ms in {calls} calls", 1e3 * seconds);
        if let Some(roof) = roof.filter(|_| seconds > 0.0) {
            let share = 100.0 * roof.seconds / seconds;
            text.push_str(&format!(", {}, {share:.0} % of the roof", roof.work));
        }
        text
    };
    let ratio = theirs.filter(|_| ours.0 > 0.0).map(|theirs| theirs.0 / ours.0);
    Row {
        what,
        ours: marked(cell(ours)),
        other: theirs.map_or_else(|| "-".to_owned(), cell),
        ratio: ratio.map_or_else(|| "-".to_owned(), |ratio| format!("{ratio:.2}x")),
        goal: "-".to_owned(),
        reached: true,
    }
}

/// Reads `[[name, seconds, calls], ...]`.
fn kernels_of(kernels: &Value) -> Result<Vec<(String, f64, f64)>> {
    serde_json::from_value(kernels.clone()).context("cannot read the list of kernels")
}

/// Adds up kernels by kind.
fn sums(kernels: &Value) -> Result<[Sum; 8]> {
    let mut sums = [(0.0, 0.0); 8];
    for (name, seconds, calls) in kernels_of(kernels)? {
        let kind = KernelKind::of(&name);
        for (sum, _) in sums.iter_mut().zip(KernelKind::ALL).filter(|it| it.1 == kind) {
            sum.0 += seconds;
            sum.1 += calls;
        }
    }
    Ok(sums)
}

fn number(value: &Value) -> Result<f64> {
    value.as_f64().with_context(|| format!("{value} is no number"))
}

/// Returns the roof of each kind: bytes at the rate of a copy, products at the time that each takes alone, and the
/// operations of attention at the mean rate of the products. `None` for kinds whose work is not known.
fn roofs(ours: &Value) -> Result<[Option<Roof>; 8]> {
    let copied = number(&ours["copied"])?;
    let mut roofs = [const { None }; 8];
    for (at, kind) in KernelKind::ALL.into_iter().enumerate() {
        let needs = &ours["needs"][at];
        let (bytes, flop) = (number(&needs[0])?, number(&needs[1])?);
        roofs[at] = if flop > 0.0 {
            let seconds = match kind {
                KernelKind::Products => number(&ours["products"])?,
                _ => flop / number(&ours["rate"])?,
            };
            Some(Roof { work: operations(flop), seconds })
        } else if bytes > 0.0 {
            Some(Roof { work: format!("{:.2} GB", bytes / 1e9), seconds: bytes / copied })
        } else {
            None
        };
    }
    Ok(roofs)
}

fn operations(flop: f64) -> String {
    format!("{:.2} TFLOP", flop / 1e12)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kernels_are_summed_by_kind_with_their_share_of_the_roof() {
        let none = [0.0, 0.0];
        let ours = serde_json::json!({
            "kernels": [["nvjet_a", 0.003, 2], ["s16816gemm", 0.001, 1], ["cross_entropy", 0.002, 1]],
            "needs": [[0.0, 2e12], none, none, none, [1e9, 0.0], none, none, none],
            "copied": 1e12,
            "products": 0.002,
            "rate": 1e15,
        });
        let theirs = serde_json::json!([["triton_red_fused_nll_loss", 0.004, 3]]);
        let rows = rows(&ours, Some(&theirs), ["a"; 9]).unwrap();
        let cells: Vec<_> =
            rows.iter().map(|row| (row.ours.as_str(), row.other.as_str())).collect();
        assert_eq!(
            cells[0],
            ("4.000 ms in 3 calls, 2.00 TFLOP, 50 % of the roof", "0.000 ms in 0 calls")
        );
        assert_eq!(
            (cells[1], rows[1].ratio.as_str()),
            (
                (
                    "2.000 ms in 1 calls, 1.00 GB, 50 % of the roof",
                    "4.000 ms in 3 calls, 1.00 GB, 25 % of the roof"
                ),
                "2.00x"
            )
        );
        assert_eq!((rows.len(), rows[2].ours.as_str()), (3, "6.000 ms in 4 calls"));
        assert!(
            largest(&ours["kernels"])
                .unwrap()
                .starts_with("        3.000 ms     2 Products: nvjet_a\n")
        );
    }
}
