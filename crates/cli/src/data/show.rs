//! `brigade data show`: a grid of samples as PNG.

use std::fmt::Write as _;
use std::io::Write as _;
use std::path::PathBuf;

use brigade_images::source::ImageSource;
use brigade_images::transforms::{Compose, NamedTransform, Phase};
use brigade_images::{Image, ImageSamples, OnBroken, Size};
use brigade_rank_env::text::{counted, escaped};
use brigade_sampling::{Sampler, Shuffle};
use clap::{Args, ValueEnum};

use super::SourceArgs;
use super::grid::{Grid, MAX_PIXELS};
use crate::config::Usage;

/// Write a grid of samples with their labels as a PNG file
///
/// Samples are drawn with --seed, and shown after the transforms of a training program's loader, before the conversion
/// to tensors. With --repeat, each sample is drawn several times, side by side.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct ShowArgs {
    #[command(flatten)]
    source: SourceArgs,

    /// Transforms: `random-resized-crop=160,flip`
    #[arg(long, value_name = "LIST", default_value = "resize=160",
          long_help = list())]
    transforms: Compose,

    /// File to write
    #[arg(long, short, value_name = "FILE", default_value = "samples.png")]
    output: PathBuf,

    /// Rows of the grid
    #[arg(long, value_name = "N", default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..=100))]
    rows: u32,

    /// Columns of the grid
    #[arg(long, value_name = "N", default_value_t = 6, value_parser = clap::value_parser!(u32).range(1..=100))]
    columns: u32,

    /// Number of times that each sample is drawn
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=100))]
    repeat: u32,

    /// Show samples in order, with transforms as in validation
    #[arg(long)]
    valid: bool,

    /// Random seed
    #[arg(long, value_name = "N", default_value_t = 0)]
    seed: u64,

    /// Part to show: train or valid
    #[arg(long, value_enum, value_name = "PART", default_value_t, hide_possible_values = true)]
    part: PartName,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, ValueEnum)]
enum PartName {
    /// Training images
    #[default]
    Train,
    /// Validation images
    Valid,
}

impl ShowArgs {
    pub(super) fn run(&self) -> anyhow::Result<String> {
        let mut parts = self.source.open()?;
        let place = if self.part == PartName::Valid { 1 } else { 0 };
        if place >= parts.len() {
            let images = &self.source.images;
            return Err(Usage(format!("--part valid: {images} has one part only")).into());
        }
        let images = parts.swap_remove(place).images;
        let categories = images.categories().clone();
        let phase = if self.valid { Phase::Valid } else { Phase::Train };
        let len = images.len();
        let samples = ImageSamples::from(images)
            .transforms(self.transforms.clone())
            .phase(phase)
            .on_broken(OnBroken::Skip);
        samples.begin_epoch(0)?;
        let order = self.order(len);
        let wanted = (self.rows * self.columns) as usize;
        let shown = wanted.div_ceil(self.repeat as usize).min(order.len());
        let mut reader = samples.reader();
        let mut cells: Vec<(Image, String)> = Vec::new();
        let mut pixels = 0;
        for index in order.into_iter().take(shown) {
            for time in 0..u64::from(self.repeat) {
                let seed = self.seed.wrapping_add(time << 32).wrapping_add(index as u64);
                let read = samples.read(&mut reader, index, 0, seed)?;
                let label = samples.labels().get(read).copied().unwrap_or(-1);
                let label = categories.name(label).unwrap_or("?").to_owned();
                let image = reader.take_image()?;
                pixels += image.size().pixels();
                if pixels > MAX_PIXELS {
                    return Err(too_large(&format!("more than {MAX_PIXELS} pixels")));
                }
                cells.push((image, label));
            }
        }
        cells.truncate(wanted);
        let cell = cells.iter().fold(Size::new(1, 1), |size, (image, _)| {
            Size::new(size.width.max(image.width()), size.height.max(image.height()))
        });
        let rows = (cells.len() as u32).div_ceil(self.columns).max(1);
        let columns = self.columns.min(cells.len() as u32).max(1);
        let mut grid =
            Grid::new(rows, columns, cell).map_err(|size| too_large(&format!("{size} pixels")))?;
        for (place, (image, label)) in (0..).zip(&cells) {
            grid.put(place / columns, place % columns, image, label);
        }
        let failed = |error: std::io::Error| {
            anyhow::Error::msg(format!("cannot write {}: {error}", self.output.display()))
        };
        let png = grid.png().map_err(std::io::Error::other).map_err(failed)?;
        let mut file = std::fs::File::create(&self.output).map_err(failed)?;
        file.write_all(&png).map_err(failed)?;
        let mut text =
            format!("{}: {} of {len}\n", escaped(self.output.display()), counted(shown, "sample"));
        for index in samples.broken() {
            let name = samples.source().name(index);
            text.push_str(&format!(
                "cannot be read, another is shown in its place: {}\n",
                escaped(name)
            ));
        }
        Ok(text)
    }

    /// Returns the indices of samples in the order in which they are shown.
    fn order(&self, len: usize) -> Vec<usize> {
        if self.valid {
            return (0..len).collect();
        }
        Shuffle::new(len, self.seed).order(0)
    }
}

fn too_large(size: &str) -> anyhow::Error {
    let text = format!(
        "a grid of {size} is too large: show fewer samples, or smaller ones by --transforms"
    );
    Usage(text).into()
}

/// Returns the help of `--transforms`, with one line for each transform.
fn list() -> String {
    let mut text = "\
Transforms: `random-resized-crop=160,flip`

Names separated by commas, each with its value; N and WxH are pixels:"
        .to_owned();
    for named in NamedTransform::all() {
        let _ = write!(text, "\n  {:<38} {}", named.syntax(), named.about());
    }
    text
}

const EXAMPLES: &str = "\
Examples:
  brigade data show imagewoof2-320 --transforms random-resized-crop=160,flip,rand-augment
  brigade data show images --label '^(.+)_[0-9]+[.]jpg$' --valid -o first.png
  brigade data show photos --repeat 6 --transforms fastai-crop=160";
