//! fastai's `text_classifier_learner(dls, AWD_LSTM, metrics=accuracy)` on film reviews, fine-tuned.

#![allow(clippy::print_stdout)] // the program's answer

use anyhow::Context;
use brigade::MainResult;
use brigade::learn::prelude::*;
use brigade::text::{TextLoaders, text_classifier_learner};
use clap::Parser;
use text::{AwdLstmArgs, positive};

/// Learns whether a review of a film is positive, from IMDb's reviews or from generated ones.
#[derive(Debug, Parser)]
struct Options {
    #[command(flatten)]
    model: AwdLstmArgs,
    /// Train on fastai's sample of 1,000 of IMDb's reviews (0.6 MB), which is downloaded unless it is there.
    #[arg(long, conflicts_with_all = ["data", "download"])]
    sample: bool,
    /// Epochs with all of the model, after one with the new head alone.
    #[arg(long, default_value_t = 6, value_parser = positive())]
    epochs: u64,
    /// The learning rate of the head in the first epoch.
    #[arg(long, default_value_t = 2e-2)]
    lr: f64,
    /// A review, whose opinion is told in the end.
    #[arg(long, default_value = "The cast is wonderful, and the ending isn't dull.")]
    review: String,
}

fn main() -> MainResult {
    let options = Options::parse();
    let args = &options.model;
    let accelerator = args.accelerator()?;
    let texts = if options.sample {
        let folder =
            accelerator.processes().main_process_first(|| untar_data(Urls::IMDB_SAMPLE))?;
        TextLoaders::from_csv(folder.join("texts.csv"))
    } else {
        TextLoaders::from_folder(args.folder(&accelerator)?).folders("train", "test")
    };
    let data = args.loaders(texts).loaders(&accelerator, args.batch_size())?;
    let pretrained = args.pretrained(&accelerator)?;

    let mut tune = FineTuneOptions::new(options.epochs as usize).base_lr(options.lr);
    if pretrained.is_none() {
        accelerator.println("No pretrained weights: the encoder begins as it was drawn.");
        // And its first layers have as much to learn as the last ones.
        tune = tune.lr_mult(1.0);
    }
    let learner =
        text_classifier_learner(&accelerator, data, args.classifier(pretrained))?.metrics(Accuracy);
    let mut learner = args.common.with_callbacks(learner, "classifier")?;
    learner.fine_tune_with(tune, ())?;

    let prediction = learner.predict(Item::Text(options.review.clone()))?;
    let class = prediction.class.context("the data have no classes")?;
    let probability = prediction.probabilities.f_max()?.f_double_value(&[])?;
    accelerator.println(format!("{:?}: {class}, probability {probability:.3}", options.review));
    Ok(accelerator.trackers().finish()?)
}
