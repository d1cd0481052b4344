//! Oxford's pets by the Learner: a resnet34 with a new head, fine-tuned, looked at, and exported.

#![allow(clippy::print_stdout)] // the program's answer

use std::path::PathBuf;

use anyhow::Context;
use brigade::MainResult;
use brigade::learn::prelude::*;
use brigade::models::TransferModel;
use brigade::nn::ParamPath;
use clap::Parser;
use learner::{Common, named_photographs};

/// Fine-tunes a resnet34 on photographs whose names begin with their class (`--data images`, of the Oxford-IIIT Pet
/// data set), or on generated ones.
#[derive(Debug, Parser)]
struct Options {
    #[command(flatten)]
    common: Common,
    /// A folder of files such as `Bengal_12.jpg`.
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
    /// Of the generated set, which is taken otherwise: classes, and images of a class.
    #[arg(long, num_args = 2, value_names = ["CLASSES", "IMAGES"], default_values_t = [5, 40])]
    generate: Vec<usize>,
    /// A weights file of resnet34: torchvision's, timm's or fastai's. Without it the weights are as they were drawn.
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// Height and width of the images that the model sees.
    #[arg(long, default_value_t = 128, value_parser = clap::value_parser!(u32).range(32..=1024))]
    size: u32,
    /// The learning rate of the head in the first epoch; what the finder suggests unless given.
    #[arg(long)]
    lr: Option<f64>,
    /// Batches of the learning-rate finder.
    #[arg(long, default_value_t = 100)]
    finder_steps: usize,
    /// Where the trained model is written.
    #[arg(long, value_name = "FILE", default_value = "pets.pth")]
    export: PathBuf,
}

fn main() -> MainResult {
    let options = Options::parse();
    let common = &options.common;
    let accelerator = common.accelerator()?;
    let path = match &options.data {
        Some(folder) => folder.clone(),
        None => named_photographs(&accelerator, options.generate[0], options.generate[1])?,
    };

    // Resized larger than needed, so that turned and warped images have no empty corners.
    let augment = aug_transforms().size(options.size).min_scale(0.75);
    let data = ImageLoaders::from_name_regex(&path, r"^(.+)_\d+\.jpg$")
        .item_transforms(Resize::new(options.size * 3 / 2))
        .batch_transforms((augment, Normalize::imagenet()))
        .seed(common.seed.into())
        .threads(common.threads)
        .loaders(&accelerator, common.batch_size())?;
    let classes = data.class_names().map_or(0, <[String]>::len) as i64;
    if options.weights.is_none() {
        accelerator
            .println("No weights file: the body stays as it was drawn. Pass --weights FILE.");
    }
    let resnet34 = Architecture::resnet34();
    let weights = VisionOptions { weights: options.weights.clone(), ..VisionOptions::default() };
    let learner = vision_learner(&accelerator, data, &resnet34, weights)?
        .metrics((ErrorRate, F1::new().average(Average::Macro)));
    let mut learner = common.with_callbacks(learner);

    let found = learner
        .lr_find_with(LrFindOptions { steps: options.finder_steps, ..LrFindOptions::default() })?;
    let lr = match (options.lr, found.valley()) {
        (Some(lr), _) => lr,
        (None, Ok(lr)) => lr,
        (None, Err(_)) => 2e-3, // fastai's
    };
    for rule in Suggestion::ALL {
        let suggested =
            found.suggest(rule).map_or_else(|_| "none".to_owned(), |lr| format!("{lr:.2e}"));
        accelerator.println(format!("lr_find, {}: {suggested}", rule.name()));
    }
    learner.fine_tune_with(FineTuneOptions::new(common.epochs()).base_lr(lr), ())?;

    let interpretation = ClassInterpretation::from_learner(&mut learner)?;
    accelerator.println(interpretation.classification_report());
    for pair in interpretation.most_confused(2).into_iter().take(5) {
        let (actual, predicted) = (pair.actual, pair.predicted);
        accelerator.println(format!("{} of {actual} were taken for {predicted}", pair.count));
    }
    // On every rank: the model may be spread over them.
    let results = common.plots.as_ref().map(|_| learner.show_results(9)).transpose()?;
    if let Some((folder, results)) = common.plot_training(&learner)?.zip(results) {
        found.plot(&Suggestion::ALL).save(folder.join("lr_find.png"))?;
        learner.show_batch(9)?.save(folder.join("batch.png"))?;
        results.save(folder.join("results.png"))?;
        interpretation.plot_confusion_matrix(true)?.save(folder.join("confusion.png"))?;
        interpretation.plot_top_losses(&learner, 9)?.save(folder.join("top_losses.png"))?;
    }

    learner.export(&options.export)?;
    if accelerator.is_main_process() {
        // As another program would, without the data.
        let model =
            |path: &ParamPath<'_>| TransferModel::new(path, &resnet34, &HeadOptions::new(classes));
        let mut predictor = Predictor::load::<Tensor, _>(&accelerator, &options.export, model)?;
        let items = image_files(&path)?;
        let file = items.path(0);
        let prediction = predictor.predict(file.as_path())?;
        let class = prediction.class.context("the export names no classes")?;
        let probability = prediction.probabilities.f_max()?.f_double_value(&[])?;
        println!("{}: {class}, probability {probability:.3}", file.display());
    }
    Ok(accelerator.trackers().finish()?)
}
