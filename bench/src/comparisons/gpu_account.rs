//! Account of GPT-2's step on a GPU: the kernels of ours and of the compiled peer by kind, side by side.

use anyhow::{Context, Result};
use serde_json::Value;

use super::gpu::marked;
use crate::kernel_kinds::KernelKind;
use crate::processes::Side;
use crate::table::Row;

/// Seconds and calls of kernels.
type Sum = (f64, f64);

/// Returns a row for each kind of kernels, and one for all of them.
pub(crate) fn gpt2(_rounds: usize) -> Result<Vec<Row>> {
    let ours = Side::own("gpu account").json()?;
    let peer = Side::peer("peers/gpu_transformers.py", &["gpt2", "--compile", "--account"]);
    let theirs = peer.map(|side| side.json()).transpose().unwrap_or_else(|error| {
        eprintln!("  failed: {error:#}");
        None
    });
    rows(&ours, theirs.as_ref())
}

fn rows(ours: &Value, theirs: Option<&Value>) -> Result<Vec<Row>> {
    let kernels = sums(&ours["kernels"])?;
    let of_peer = theirs.map(sums).transpose()?;
    let roofs = roofs(ours)?;
    let what = [
        "GPU: account of GPT-2's step, 8 x 1024 tokens: products",
        "GPU: the same: attention",
        "GPU: the same: convolutions",
        "GPU: the same: normalisation",
        "GPU: the same: loss",
        "GPU: the same: optimizer",
        "GPU: the same: copies and casts",
        "GPU: the same: other elementwise operations and reductions",
    ];
    let mut rows: Vec<Row> = (0..KernelKind::ALL.len())
        .filter(|&at| KernelKind::ALL[at] != KernelKind::Convolutions)
        .map(|at| row(what[at], kernels[at], of_peer.map(|it| it[at]), roofs[at].as_ref()))
        .collect();
    let all = |sums: [Sum; 8]| sums.iter().fold((0.0, 0.0), |all, it| (all.0 + it.0, all.1 + it.1));
    rows.push(row("GPU: the same: all kernels", all(kernels), of_peer.map(all), None));
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

/// Adds up `[[name, seconds, calls], ...]` by kind.
fn sums(kernels: &Value) -> Result<[Sum; 8]> {
    let mut sums = [(0.0, 0.0); 8];
    for kernel in kernels.as_array().context("kernels are no list")? {
        let name = kernel[0].as_str().context("a kernel has no name")?;
        let kind = KernelKind::of(name);
        let sum = sums.iter_mut().zip(KernelKind::ALL).find(|it| it.1 == kind);
        let (sum, _) = sum.context("a kind is not in the list of kinds")?;
        sum.0 += number(&kernel[1])?;
        sum.1 += number(&kernel[2])?;
    }
    Ok(sums)
}

fn number(value: &Value) -> Result<f64> {
    value.as_f64().with_context(|| format!("{value} is no number"))
}

/// Returns the roof of each kind: bytes at the rate of a copy, products at the time that each takes alone, and the
/// operations of attention at the mean rate of the products.
fn roofs(ours: &Value) -> Result<[Option<Roof>; 8]> {
    let (copied, rate) = (number(&ours["copied"])?, number(&ours["rate"])?);
    let products = number(&ours["products"])?;
    let mut roofs = [const { None }; 8];
    for (at, kind) in KernelKind::ALL.into_iter().enumerate() {
        let needs = &ours["needs"][at];
        let (bytes, flop) = (number(&needs[0])?, number(&needs[1])?);
        roofs[at] = match kind {
            KernelKind::Products => Some(Roof { work: operations(flop), seconds: products }),
            _ if flop > 0.0 => Some(Roof { work: operations(flop), seconds: flop / rate }),
            _ if bytes > 0.0 => {
                Some(Roof { work: format!("{:.2} GB", bytes / 1e9), seconds: bytes / copied })
            }
            _ => None,
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
        let rows = rows(&ours, Some(&theirs)).unwrap();
        let cells: Vec<_> =
            rows.iter().map(|row| (row.ours.as_str(), row.other.as_str())).collect();
        assert_eq!(
            cells[0],
            ("4.000 ms in 3 calls, 2.00 TFLOP, 50 % of the roof", "0.000 ms in 0 calls")
        );
        assert_eq!(
            (cells[3], rows[3].ratio.as_str()),
            (
                (
                    "2.000 ms in 1 calls, 1.00 GB, 50 % of the roof",
                    "4.000 ms in 3 calls, 1.00 GB, 25 % of the roof"
                ),
                "2.00x"
            )
        );
        assert_eq!(rows.last().unwrap().ours, "6.000 ms in 4 calls");
    }
}
