//! Comparison of folders of photographs with torchvision's `ImageFolder` with PIL and a DataLoader of two workers.

use anyhow::{Result, ensure};
use brigade_testkit::Photos;

use super::training::megabytes;
use crate::processes::{Side, median};
use crate::table::Row;

/// Number of cores of the machine; both sides use as many threads or workers.
const CORES: f64 = 2.0;

/// Photographs of 500 x 375 in ten classes, as JPEG files that are all in the page cache.
struct Folder(tempfile::TempDir);

impl Folder {
    fn of(per_class: usize) -> Result<Self> {
        let folder = tempfile::tempdir()?;
        Photos::new(10, per_class).size(500, 375).write(folder.path())?;
        ensure!(!folder.path().to_string_lossy().contains(' '), "words are divided at spaces");
        Ok(Self(folder))
    }

    fn ours(&self, what: &str, epochs: usize, cache: Option<&str>) -> Result<Side> {
        let path = self.0.path().display();
        let mut words = format!("images {what} {path} {epochs}");
        if let Some(options) = cache {
            // Each process begins with an empty cache.
            let folder = tempfile::tempdir_in(self.0.path())?.keep();
            words.push_str(&format!(" cache={} {options}", folder.display()));
        }
        Ok(Side::own(&words))
    }

    fn theirs(&self, what: &str, epochs: usize) -> Option<Side> {
        let path = self.0.path().to_string_lossy();
        Side::peer("peers/images.py", &[what, &path, &epochs.to_string()])
    }
}

/// Compares batches of 64 training images of 160 px, decoded in each epoch and from a cache.
pub(crate) fn loader(rounds: usize) -> Result<Vec<Row>> {
    let folder = Folder::of(256)?;
    let Some(theirs) = folder.theirs("loader", 3) else { return Ok(Vec::new()) };
    let ours = folder.ours("loader", 3, None)?;
    let decoder = folder.ours("decoder", 1, None)?;
    let mut figures = [const { Vec::new() }; 9];
    for _ in 0..rounds {
        // Rates after the first epoch, which starts processes and reads from disk.
        let mut note = |place: usize, [mut rates, memory]: [Vec<f64>; 2]| {
            rates.remove(0);
            figures[place].push(median(&mut rates));
            figures[place + 1].extend(memory);
        };
        note(0, theirs.lists::<2>()?);
        note(2, ours.lists::<2>()?);
        note(4, folder.ours("loader", 3, Some("presize=240"))?.lists::<2>()?);
        note(6, folder.ours("loader", 3, Some(""))?.lists::<2>()?);
        let [mut rates] = decoder.lists::<1>()?;
        figures[8].push(median(&mut rates));
    }
    let [their_rate, their_memory, rate, memory, small, small_memory, full, _, bare] =
        figures.map(|mut values| median(&mut values));
    let faster = |what, ours: f64, goal: f64| Row {
        what,
        ours: format!("{ours:.0} images/s"),
        other: format!("{their_rate:.0} images/s"),
        ratio: format!("{:.2}x", ours / their_rate),
        goal: format!("at least {goal:.0}x"),
        reached: ours / their_rate >= goal,
    };
    let smaller = |what, ours: f64| Row {
        what,
        ours: megabytes(ours),
        other: megabytes(their_memory),
        ratio: format!("{:.2}", ours / their_memory),
        goal: "at most 0.25".to_owned(),
        reached: ours / their_memory <= 0.25,
    };
    Ok(vec![
        faster("photographs of 500 x 375 to batches of 160 px, decoded in every epoch", rate, 3.0),
        Row {
            what: "the same, against one thread that decodes them wholly, times the cores",
            ours: format!("{rate:.0} images/s"),
            other: format!("{:.0} images/s", CORES * bare),
            ratio: format!("{:.2}", rate / (CORES * bare)),
            goal: "at least 0.85".to_owned(),
            reached: rate / (CORES * bare) >= 0.85,
        },
        faster("the same from the second epoch, with a cache of 240 px", small, 20.0),
        faster("the same from the second epoch, with a cache at full size", full, 20.0),
        smaller("memory of all processes while they are decoded", memory),
        smaller("the same with a cache of 240 px", small_memory),
    ])
}

/// Compares the example `image_folder`: ResNet-18 at 160 px, with decoding, transforms and training.
pub(crate) fn example(rounds: usize) -> Result<Vec<Row>> {
    let folder = Folder::of(64)?;
    let Some(theirs) = folder.theirs("example", 2) else { return Ok(Vec::new()) };
    let mut figures = [const { Vec::new() }; 4];
    for _ in 0..rounds {
        let sides = [&folder.ours("example", 2, Some(""))?, &theirs];
        for (place, side) in sides.into_iter().enumerate() {
            let [rates] = side.lists::<1>()?;
            ensure!(rates.len() == 2, "two epochs, not {}", rates.len());
            figures[2 * place].push(rates[0]);
            figures[2 * place + 1].push(rates[1]);
        }
    }
    let [first, second, their_first, their_second] = figures.map(|mut values| median(&mut values));
    let row = |what, ours: f64, theirs: f64, goal: f64| Row {
        what,
        ours: format!("{ours:.1} images/s"),
        other: format!("{theirs:.1} images/s"),
        ratio: format!("{:.2}x", ours / theirs),
        goal: format!("at least {goal:.1}x"),
        reached: ours / theirs >= goal,
    };
    Ok(vec![
        row(
            "ResNet-18 trained on photographs at 160 px, first epoch, against torchvision with \
             Accelerate",
            first,
            their_first,
            1.5,
        ),
        row("the same from the second epoch, with a cache", second, their_second, 2.0),
    ])
}
