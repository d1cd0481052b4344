//! fastai's Imagewoof by the Learner: an xresnet50 on random crops, with MixUp and a flat cosine.

#![allow(clippy::print_stdout)] // the program's answer

use std::path::PathBuf;

use brigade::MainResult;
use brigade::learn::prelude::*;
use brigade::train::Precision;
use clap::Parser;
use learner::{Common, photographs};

/// Trains an xresnet50 on Imagewoof, on another folder with `train` and `val`, or on generated photographs.
#[derive(Debug, Parser)]
struct Options {
    #[command(flatten)]
    common: Common,
    /// A folder with `train` and `val`, and in both one for each class.
    #[arg(long, value_name = "FOLDER", conflicts_with = "download")]
    data: Option<PathBuf>,
    /// Download Imagewoof (328 MB) into fastai's folder, unless it is there, and train on it.
    #[arg(long)]
    download: bool,
    /// Of the generated set, which is taken otherwise: classes, and images of a class to train with.
    #[arg(long, num_args = 2, value_names = ["CLASSES", "IMAGES"], default_values_t = [10, 64])]
    generate: Vec<usize>,
    /// Height and width of the images that the model sees.
    #[arg(long, default_value_t = 160, value_parser = clap::value_parser!(u32).range(32..=1024))]
    size: u32,
    /// The learning rate of the flat part.
    #[arg(long, default_value_t = 1e-3)]
    lr: f64,
    /// The parameter of MixUp's Beta distribution; 0 mixes nothing.
    #[arg(long, default_value_t = 0.1)]
    mixup: f64,
    /// The precision of the forward pass: no, bf16 or fp16. Unless given, bf16 on a GPU and no on a CPU, of which
    /// few compute in it.
    #[arg(long)]
    precision: Option<Precision>,
}

fn main() -> MainResult {
    let options = Options::parse();
    let common = &options.common;
    let accelerator = common.accelerator()?;
    let path = match &options.data {
        Some(folder) => folder.clone(),
        None if options.download => {
            accelerator.processes().main_process_first(|| untar_data(Urls::IMAGEWOOF_320))?
        }
        None => photographs(&accelerator, options.generate[0], options.generate[1])?,
    };

    let data = DataBlock::new(images(), categories())
        .items(image_files)
        .label(parent_name)
        .split(grandparent("train", "val"))
        .item_transforms((RandomResizedCrop::new(options.size), Flip::new(0.5)))
        .batch_transforms(Normalize::imagenet())
        .seed(common.seed.into())
        .threads(common.threads)
        .loaders(&accelerator, path, common.batch_size())?;
    let classes = data.class_names().map_or(0, <[String]>::len) as i64;
    let precision = match (options.precision, accelerator.device()) {
        (Some(precision), _) => precision,
        (None, Device::Cpu) => Precision::No,
        (None, _) => Bf16,
    };
    let learner = Learner::new(&accelerator, data, xresnet50(classes))?
        .metrics((Accuracy, TopK(5.min(classes))))
        .mixed_precision(precision)?;
    let mut learner = common.with_callbacks(learner);
    learner.fit_flat_cos(common.epochs(), options.lr, MixUp::new(options.mixup))?;

    if common.plots.is_some() {
        let found = ClassInterpretation::from_learner(&mut learner)?;
        if let Some(folder) = common.plot_training(&learner)? {
            learner.show_batch(9)?.save(folder.join("batch.png"))?;
            found.plot_confusion_matrix(false)?.save(folder.join("confusion.png"))?;
            found.plot_top_losses(&learner, 9)?.save(folder.join("top_losses.png"))?;
        }
    }
    Ok(accelerator.trackers().finish()?)
}
