//! `brigade data pack`: writes decoded and resized images to one file.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use brigade_images::transforms::Compose;
use brigade_images::{ImageError, OnBroken, Packer};
use brigade_rank_env::text::{counted, escaped};
use clap::Args;

use super::{Progress, SourceArgs, broken_lines, with_part};
use crate::config::Usage;

/// Decode and transform images once, and write them into one file
///
/// `PackedImages` reads the file with labels and classes, at the cost of one copy per image. An image takes three bytes
/// per pixel, so resize to the size that the random transforms of training need.
#[derive(Debug, Args)]
#[command(after_help = EXAMPLES)]
pub(crate) struct PackArgs {
    #[command(flatten)]
    source: SourceArgs,

    /// File to write [default: the folder's name with .pack]
    ///
    /// A folder with `train` and `valid` gives two files, with -train and -valid in their names, and the classes of
    /// `train`.
    #[arg(long, short, value_name = "FILE")]
    output: Option<PathBuf>,

    /// Transforms to apply before writing, as in validation: `resize=256`
    #[arg(long, value_name = "LIST", default_value = "", hide_default_value = true)]
    transforms: Compose,

    /// Leave out and list images that cannot be read
    #[arg(long)]
    skip_broken: bool,
}

impl PackArgs {
    pub(super) fn run(&self) -> anyhow::Result<String> {
        let policy = if self.skip_broken { OnBroken::Skip } else { OnBroken::Fail };
        let packer = Packer::new().transforms(self.transforms.clone()).on_broken(policy);
        let mut text = String::new();
        for part in self.source.open()? {
            let path = with_part(&self.output()?, part.name);
            let progress = Progress::new(part.images.len());
            let report = packer.write_with(&part.images, &path, |done| progress.set(done));
            drop(progress);
            let report = report.map_err(|error| match error {
                ImageError::Decode { .. } | ImageError::TooLarge { .. } => anyhow::Error::msg(
                    format!("{error}; nothing is written. `--skip-broken` leaves such files out"),
                ),
                error => error.into(),
            })?;
            let _ = writeln!(
                text,
                "{}: {} in {}, {}",
                escaped(path.display()),
                counted(report.images, "image"),
                counted(part.images.categories().len(), "class"),
                megabytes(report.bytes)
            );
            if !report.broken.is_empty() {
                let _ = writeln!(text, "left out: {}", report.broken.len());
                text.push_str(&broken_lines(part.images.source(), &report.broken));
            }
        }
        Ok(text)
    }

    fn output(&self) -> anyhow::Result<PathBuf> {
        if let Some(path) = &self.output {
            return Ok(path.clone());
        }
        let name = Path::new(&self.source.images).file_stem();
        let name = name.ok_or_else(|| {
            let images = &self.source.images;
            Usage(format!("{images} has no name to call the pack by: give one with --output"))
        })?;
        let mut name = name.to_owned();
        name.push(".pack");
        if Path::new(&name) == Path::new(&self.source.images) {
            return Err(Usage("the pack would replace the file that it is made from: give another name with --output".into()).into());
        }
        Ok(name.into())
    }
}

fn megabytes(bytes: u64) -> String {
    format!("{:.1} MB", bytes as f64 / 1e6)
}

const EXAMPLES: &str = "\
Examples:
  brigade data pack imagewoof2-320 --transforms resize=240
  brigade data pack photos -o photos.pack --skip-broken";
