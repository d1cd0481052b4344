//! Draws ratios of benchmarks as bars: `ratios RESULTS.jsonl PICTURE.svg`.
//!
//! Each line of the file is a row as `cargo xtask bench -- --json FILE` writes it, of which `ratio` is read, with a
//! `label` for the picture. A row whose goal was missed has the second colour.

use std::error::Error;
use std::{env, fs};

use brigade_plot::{Bars, Plot};
use serde_json::Value;

/// Makes the picture of these rows.
pub(crate) fn picture(rows: &str) -> Result<Bars, Box<dyn Error>> {
    let mut bars = Bars::new(
        "Speed against PyTorch with Accelerate, torchvision, torch.distributed or fastai",
    )
    .x("times as fast (1: equally fast); orange: below the goal that the project had set")
    .reference(1.0);
    for line in rows.lines().filter(|line| !line.trim().is_empty()) {
        let row: Value = serde_json::from_str(line)?;
        let text =
            |name: &str| row[name].as_str().ok_or_else(|| format!("{line}: no text `{name}`"));
        let (label, ratio) = (text("label")?, text("ratio")?);
        let value: f64 = ratio.trim_end_matches('x').parse()?;
        bars = if row["reached"].as_bool() == Some(true) {
            bars.bar(label, value, ratio)
        } else {
            bars.muted_bar(label, value, ratio)
        };
    }
    Ok(bars)
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let [results, out] = arguments.as_slice() else {
        return Err("usage: ratios RESULTS.jsonl PICTURE.svg".into());
    };
    picture(&fs::read_to_string(results)?)?.save(out)?;
    Ok(())
}
