//! Comparison of the Learner with the visible loop, and with fastai's.

use anyhow::{Result, ensure};
use brigade_testkit::Photos;

use super::{Pairs, milliseconds, pairs};
use crate::processes::{Side, median};
use crate::table::Row;

/// Measures the overhead of the Learner over a step of the visible loop, alone and with three metrics of the training
/// batches.
pub(crate) fn overhead(rounds: usize) -> Result<Vec<Row>> {
    let row = |what, measurement, most: f64| -> Result<Row> {
        let Pairs { ours, other, ratio } = pairs(rounds, measurement)?;
        Ok(Row {
            what,
            ours: milliseconds(ours),
            other: milliseconds(other),
            ratio: format!("{:+.1} %", 100.0 * (ratio - 1.0)),
            goal: format!("at most +{most:.0} %"),
            reached: ratio <= 1.0 + most / 100.0,
        })
    };
    Ok(vec![
        row(
            "CNN step, batch 64, fp32: Learner with its recorder against the visible loop",
            "learner loop",
            1.0,
        )?,
        row("the same with three metrics of every training batch", "learner loop metrics", 3.0)?,
    ])
}

/// Compares the example `imagewoof` on generated photographs with fastai's program, both with their defaults.
pub(crate) fn imagewoof(rounds: usize) -> Result<Vec<Row>> {
    const EPOCHS: usize = 2;
    let folder = tempfile::tempdir()?;
    Photos::new(10, 32).size(400, 320).write(folder.path())?;
    let path = folder.path().to_string_lossy();
    ensure!(!path.contains(' '), "words are divided at spaces");
    let epochs = EPOCHS.to_string();
    let Some(theirs) = Side::peer("peers/imagewoof.py", &[&path, &epochs]) else {
        return Ok(Vec::new());
    };
    let ours = Side::own(&format!("learner imagewoof {path} {epochs}"));
    let (mut own, mut other) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        for (side, seconds) in [(&ours, &mut own), (&theirs, &mut other)] {
            let [epochs] = side.lists::<1>()?;
            ensure!(epochs.len() == EPOCHS, "{EPOCHS} epochs, not {}", epochs.len());
            seconds.extend(epochs);
        }
    }
    let (own, other) = (median(&mut own), median(&mut other));
    Ok(vec![Row {
        what: "an epoch of Imagewoof's program on generated photographs, against fastai, both with defaults",
        ours: format!("{own:.1} s"),
        other: format!("{other:.1} s"),
        ratio: format!("{:.2}x", other / own),
        goal: "at least 2.00x".to_owned(),
        reached: other / own >= 2.0,
    }])
}
