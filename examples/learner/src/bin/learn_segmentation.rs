//! Masks: a U-Net that finds discs and squares.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::Context;
use brigade::MainResult;
use brigade::learn::prelude::*;
use brigade::models::ResNetOptions;
use clap::Parser;
use learner::{Common, write_shapes};

/// Trains a U-Net on images with a mask each, or on generated ones.
#[derive(Debug, Parser)]
#[command(mut_arg("batch_size", |argument| argument.default_value("8")))]
struct Options {
    #[command(flatten)]
    common: Common,
    /// A folder with `images`, `masks` with a PNG file of the same name for each, and `codes.txt`: the names of the
    /// classes, one a line, whose places are the pixels' values.
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
    /// Images of the generated set, which is taken otherwise.
    #[arg(long, value_name = "IMAGES", default_value_t = 100)]
    generate: usize,
    /// Blocks in each of the four stages of the encoder: 3 4 6 3 is a resnet34.
    #[arg(long, num_args = 4, value_names = ["FIRST", "SECOND", "THIRD", "FOURTH"], default_values_t = [1, 1, 1, 1])]
    encoder: Vec<usize>,
    /// Height and width of the images that the model sees.
    #[arg(long, default_value_t = 96, value_parser = clap::value_parser!(u32).range(32..=1024))]
    size: u32,
    /// The highest learning rate.
    #[arg(long, default_value_t = 3e-3)]
    lr: f64,
}

fn main() -> MainResult {
    let options = Options::parse();
    let common = &options.common;
    let accelerator = common.accelerator()?;
    let path = match &options.data {
        Some(folder) => folder.clone(),
        None => {
            let folder = PathBuf::from(format!("data/shapes-{}", options.generate));
            let write = || write_shapes(&folder, options.generate).map_err(Error::custom);
            accelerator.processes().local_main_process_first(write)?;
            folder
        }
    };

    let codes = path.join("codes.txt");
    let codes = fs::read_to_string(&codes)
        .with_context(|| format!("cannot read the names of the classes in {}", codes.display()))?;
    let mask = |image: &Path| {
        Path::new("masks").join(image.file_name().unwrap_or_default()).with_extension("png")
    };
    let data = SegmentationLoaders::from_folder(&path, mask, codes.lines())
        .item_transforms((Resize::squish(options.size), Flip::new(0.5)))
        .batch_transforms(Normalize::imagenet())
        .seed(common.seed.into())
        .threads(common.threads)
        .loaders(&accelerator, common.batch_size())?;
    let blocks: [usize; 4] = std::array::from_fn(|stage| options.encoder[stage]);
    let encoder = ResNetOptions::basic(blocks);
    let learner = unet_learner(&accelerator, data, &encoder, None, None)?
        .metrics((DiceMulti, ForegroundAccuracy::new()));
    let mut learner = common.with_callbacks(learner);
    learner.fit_one_cycle(common.epochs(), options.lr, ())?;

    if common.plots.is_some() {
        let found = Interpretation::from_learner(&mut learner)?;
        // On every rank: the model may be spread over them.
        let results = learner.show_results(6)?;
        if let Some(folder) = common.plot_training(&learner)? {
            learner.show_batch(9)?.save(folder.join("batch.png"))?;
            results.save(folder.join("results.png"))?;
            found.plot_top_losses(&learner, 9)?.save(folder.join("top_losses.png"))?;
        }
    }
    Ok(accelerator.trackers().finish()?)
}
