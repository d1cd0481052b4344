//! Comparison of training on a TPU, or on what TorchTPU's plug-in has instead, with the CPU.

use anyhow::Result;
use brigade::torch::{DeviceExt, TPU, tpu_compiled};

use super::milliseconds;
use super::training::megabytes;
use crate::processes::{Side, median};
use crate::table::Row;

/// Returns the reason why a comparison on a TPU cannot run here.
pub(crate) fn cannot_run(name: &str) -> Option<String> {
    if !name.starts_with("tpu-") {
        return None;
    }
    if !tpu_compiled() {
        return Some(format!("`cargo xtask bench {name}` builds with the feature tpu"));
    }
    TPU.load().err().map(|reason| reason.to_string())
}

/// Compares steps of ResNet-18, and its memory from step to step.
pub(crate) fn resnet18(rounds: usize) -> Result<Vec<Row>> {
    let (mut tpu, mut cpu, mut ratios, mut first) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for _ in 0..rounds {
        let [ours, other, of_first] = Side::own("tpu resnet18").lists::<3>()?;
        ratios.extend(ours.iter().zip(&other).map(|(ours, other)| ours / other));
        tpu.extend(ours);
        cpu.extend(other);
        first.extend(of_first);
    }
    let [early, last] = Side::own("tpu memory").lists::<2>()?.map(|mut it| median(&mut it));
    let (ours, other) = (median(&mut tpu), median(&mut cpu));
    let (ratio, first) = (median(&mut ratios), median(&mut first));
    Ok(vec![
        Row {
            what: "TPU plug-in: step of ResNet-18, 8 x 128 px, fp32, against the CPU",
            ours: milliseconds(ours),
            other: milliseconds(other),
            ratio: format!("{ratio:.2} of its time"),
            goal: "at most 3.00".to_owned(),
            reached: ratio <= 3.0,
        },
        Row {
            what: "TPU plug-in: first step of ResNet-18, with all compilations",
            ours: format!("{first:.1} s"),
            other: "-".to_owned(),
            ratio: "-".to_owned(),
            goal: "under 60 s".to_owned(),
            reached: first < 60.0,
        },
        Row {
            what: "TPU plug-in: resident memory after 200 steps, against that after 60",
            ours: megabytes(last),
            other: megabytes(early),
            ratio: format!("{:+.1} %", 100.0 * (last / early - 1.0)),
            goal: "at most +3 %".to_owned(),
            reached: last <= 1.03 * early,
        },
    ])
}
