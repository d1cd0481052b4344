//! Trains a classifier, an AWD-LSTM, on a folder of texts with a folder for each class.
//!
//! `cargo run --release -- --data FOLDER`; without a folder, on film reviews that are generated.

use std::path::{Path, PathBuf};

use anyhow::Context;
use brigade::MainResult;
use brigade::learn::prelude::*;
use brigade::text::{TextLearnerOptions, TextLoaders, text_classifier_learner};
use clap::Parser;

/// Trains a classifier on a folder of texts with a folder for each class.
#[derive(Debug, Clone, Parser)]
struct Options {
    /// Folder with `train` and `valid` (or `test`), each with a folder of .txt files for each class.
    /// Without it, reviews of films are generated in `reviews`.
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
    /// Passes over the training data.
    #[arg(long, default_value_t = 6)]
    epochs: usize,
    /// Texts in a batch of one process.
    #[arg(long, default_value_t = 16)]
    batch_size: usize,
    /// The highest learning rate of the one-cycle schedule.
    #[arg(long, default_value_t = 1e-2)]
    lr: f64,
    /// A text, whose class is told in the end.
    #[arg(long, default_value = "The cast is wonderful, and the ending isn't dull.")]
    text: String,
}

fn main() -> MainResult {
    let options = Options::parse();
    // What `brigade launch` has set up; started alone, one process.
    let accelerator = Accelerator::new()?;
    let folder = match &options.data {
        Some(folder) => folder.clone(),
        None => generate(&accelerator, Path::new("reviews"), 400)?,
    };
    let mut learner = train(&accelerator, &options, &folder)?;
    learner.save("model.pth", false)?;

    let prediction = learner.predict(Item::Text(options.text.clone()))?;
    let class = prediction.class.context("the data have no classes")?;
    accelerator.println(format!("{:?}: {class}", options.text));
    Ok(())
}

/// Trains as the options say. The table of epochs is printed, and kept by the Learner.
fn train(accelerator: &Accelerator, options: &Options, folder: &Path) -> anyhow::Result<Learner> {
    accelerator.set_seed(42);
    let valid = ["valid", "test"].into_iter().find(|name| folder.join(name).is_dir());
    // Each process sees a part of the batches. The vocabulary is made of all texts.
    let data = TextLoaders::from_folder(folder)
        .folders("train", valid.unwrap_or("valid"))
        .seed(42)
        .loaders(accelerator, options.batch_size)?;
    // Smaller than fastai's (400 and 1152, in 3 layers), which begins with pretrained weights: set
    // `model.pretrained` for those.
    let mut model = TextLearnerOptions::default();
    let encoder = &mut model.model.encoder;
    (encoder.embedding, encoder.hidden, encoder.layers) = (64, 128, 2);
    let mut learner = text_classifier_learner(accelerator, data, model)?.metrics(Accuracy);
    learner.fit_one_cycle(options.epochs, options.lr, ())?;
    Ok(learner)
}

/// Generates reviews where the folder is missing; one process of each host does.
fn generate(accelerator: &Accelerator, folder: &Path, reviews: usize) -> anyhow::Result<PathBuf> {
    let unfinished = folder.with_extension("unfinished");
    accelerator.processes().local_main_process_first(|| {
        if folder.is_dir() {
            return Ok(());
        }
        let written = brigade_testkit::Reviews::new(reviews).sentences(4).write(&unfinished);
        written.and_then(|()| std::fs::rename(&unfinished, folder))
    })?;
    Ok(folder.to_owned())
}

#[cfg(test)]
mod tests {
    use brigade_testkit::dist_test;

    use super::*;

    // Starts this test as two processes, which are the ranks 0 and 1 of one group.
    dist_test!(world = 2, two_ranks_learn_the_same, |_world| -> anyhow::Result<()> {
        let accelerator = Accelerator::new()?;
        // One folder for both ranks: rank 0 makes it and tells its name.
        let made = accelerator.is_main_process().then(tempfile::tempdir).transpose()?;
        let name = made.as_ref().map(|it| it.path().join("reviews"));
        let folder =
            accelerator.processes().broadcast_object(name, 0)?.expect("rank 0 has made it");
        generate(&accelerator, &folder, 12)?;

        let options = Options::parse_from(["text", "--epochs", "1", "--batch-size", "4"]);
        let learner = train(&accelerator, &options, &folder)?;
        assert!(learner.recorder().losses().iter().all(|loss| loss.is_finite()));
        // Row r is the sum of rank r's weights.
        let parameters = learner.parameters();
        let weights: Tensor = parameters.iter().map(|it| it.tensor.sum(Kind::Double)).sum();
        let of_all = accelerator.processes().gather(&weights.reshape([1]))?;
        assert_eq!(of_all.double_value(&[0]), of_all.double_value(&[1]));
        Ok(())
    });
}
