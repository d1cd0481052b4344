//! ULMFiT (Howard and Ruder, 2018): a language model of all texts, whose encoder a classifier begins with.

use std::path::PathBuf;

use brigade::MainResult;
use brigade::learn::prelude::*;
use brigade::text::tokens::FolderOptions;
use brigade::text::{
    Generate, TextLearner, TextLoaders, language_model_learner, text_classifier_learner,
};
use clap::Parser;
use text::{AwdLstmArgs, positive};

/// Trains a language model on all reviews of films, and a classifier that begins with its encoder on those with an
/// opinion.
#[derive(Debug, Parser)]
struct Options {
    #[command(flatten)]
    model: AwdLstmArgs,
    /// Epochs of the language model, after one with its words alone where it begins with pretrained weights.
    #[arg(long, default_value_t = 4, value_parser = positive())]
    language_epochs: u64,
    /// Epochs of the classifier's last fit, with all of the model.
    #[arg(long, default_value_t = 6, value_parser = positive())]
    epochs: u64,
    /// The highest learning rate of the language model's first fit; a tenth of it after pretrained weights.
    #[arg(long, default_value_t = 2e-2)]
    language_lr: f64,
    /// The highest learning rate of the classifier's head, in its first fit.
    #[arg(long, default_value_t = 2e-2)]
    lr: f64,
    /// The highest learning rate of the last fit; fastai's course has 1e-3 for IMDb's reviews.
    #[arg(long, default_value_t = 1e-2)]
    unfrozen_lr: f64,
    /// What the rates of neighbouring groups of layers differ by. Unless given, the paper's 2.6, and 1 for generated
    /// reviews: of their opinions a language model learns little, so that the first layers have much to learn.
    #[arg(long)]
    ratio: Option<f64>,
    /// The language model goes on with this text.
    #[arg(long, value_name = "TEXT", default_value = "I saw it on a plane, and the plot")]
    prompt: String,
    /// Words that it adds.
    #[arg(long, default_value_t = 30)]
    words: usize,
    /// Where the language model, its encoder and its vocabulary are written.
    #[arg(long, value_name = "FOLDER", default_value = "ulmfit")]
    save: PathBuf,
}

fn main() -> MainResult {
    let options = Options::parse();
    let Options { model: args, lr, save, .. } = &options;
    let accelerator = args.accelerator()?;
    let folder = args.folder(&accelerator)?;
    accelerator.processes().on_main_process(|| std::fs::create_dir_all(save))?;

    // All texts, with an opinion or without: a tenth of them to validate with.
    let all = {
        let folder = folder.clone();
        let texts = FolderOptions::new().folders(["train", "test", "unsup"]);
        TextLoaders::from_source(move || texts.open(folder)).language_model().valid_share(0.1)
    };
    let data = args.loaders(all).loaders(&accelerator, args.batch_size())?;
    let vocabulary = data.vocabulary.clone();
    let pretrained = args.pretrained(&accelerator)?;
    let is_pretrained = pretrained.is_some();
    let learner = language_model_learner(&accelerator, data, args.language_model(pretrained))?
        .metrics((ClassesLast(Accuracy), ClassesLast(Perplexity)));
    let mut learner = args.common.with_callbacks(learner, "language_model")?;
    let mut rate = options.language_lr;
    if is_pretrained {
        // It begins with all but the words frozen.
        learner.fit_one_cycle(1, rate, ())?;
        learner.unfreeze()?;
        rate /= 10.0;
    }
    learner.fit_one_cycle(options.language_epochs as usize, rate, ())?;

    let encoder = save.join("encoder.pth");
    learner.save(save.join("language_model.pth"), false)?;
    learner.save_encoder(&encoder)?;
    accelerator
        .processes()
        .on_main_process(|| vocabulary.save(save.join("vocabulary.json")).map_err(Error::custom))?;
    // Also where the fit was passed over, as a checkpoint of a later one has been found.
    accelerator.set_seed(args.common.seed.into());
    let text = learner.generate(&options.prompt, options.words, &Generate::default())?;
    // Paragraphs of a text are tokens of line ends.
    let text = text.split_whitespace().collect::<Vec<_>>().join(" ");
    accelerator.println(format!("the language model goes on: {text}"));

    let labelled = TextLoaders::from_folder(folder).folders("train", "test").vocabulary(vocabulary);
    let data = args.loaders(labelled).loaders(&accelerator, args.batch_size())?;
    let learner =
        text_classifier_learner(&accelerator, data, args.classifier(None))?.metrics(Accuracy);
    let mut learner = args.common.with_callbacks(learner, "classifier")?;
    learner.load_encoder(&encoder)?;
    // More and more groups of layers from the last one on, the first ones at smaller rates.
    let ratio = options.ratio.unwrap_or_else(|| if args.is_generated() { 1.0 } else { 2.6 });
    let rates = |last: f64| last / ratio.powi(4)..last;
    learner.fit_one_cycle(1, *lr, ())?;
    learner.freeze_to(-2)?;
    learner.fit_one_cycle(1, rates(lr / 2.0), ())?;
    learner.freeze_to(-3)?;
    learner.fit_one_cycle(1, rates(lr / 4.0), ())?;
    learner.unfreeze()?;
    learner.fit_one_cycle(options.epochs as usize, rates(options.unfrozen_lr), ())?;
    Ok(accelerator.trackers().finish()?)
}
