//! Options of the programs that train an AWD-LSTM: its texts, its sizes, and what it begins with.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use brigade::learn::prelude::*;
use brigade::models::AwdLstmOptions;
use brigade::text::{LanguageLearnerOptions, PretrainedText, TextLearnerOptions, TextLoaders};
use clap::Args;

use crate::{Common, positive, reviews};

/// Options of `imdb` and `ulmfit`.
#[derive(Debug, Args)]
pub struct AwdLstmArgs {
    /// Those of all programs.
    #[command(flatten)]
    pub common: Common,
    /// IMDb's folder: `train` and `test`, both with `pos` and `neg`, and `unsup` beside them.
    #[arg(long, value_name = "FOLDER", conflicts_with = "download")]
    pub data: Option<PathBuf>,
    /// Download IMDb's reviews (144 MB) into fastai's folder, unless they are there, and train on them.
    #[arg(long)]
    pub download: bool,
    /// Of the generated reviews, which are taken otherwise: how many of each opinion to train with.
    #[arg(long, value_name = "REVIEWS", default_value_t = 400, value_parser = positive())]
    pub generate: u64,
    /// Texts, or rows of the language model, in a batch of one process.
    #[arg(long, default_value_t = 16, value_parser = positive())]
    pub batch_size: u64,
    /// Tokens that are read at a time.
    #[arg(long, default_value_t = 72, value_parser = positive())]
    pub seq_len: u64,
    /// Sizes of the model. Unless given, 64, 128 and 2 for generated reviews, and fastai's for others.
    #[arg(long, num_args = 3, value_names = ["EMBEDDING", "HIDDEN", "LAYERS"], value_parser = positive())]
    pub sizes: Vec<u64>,
    /// fastai's sizes of the model (400, 1152 and 3), for generated reviews as well.
    #[arg(long, conflicts_with = "sizes")]
    pub full: bool,
    /// Weights of a language model to begin with: fastai's, or what `text_ulmfit` has saved.
    #[arg(long, value_name = "FILE", requires = "vocabulary")]
    pub weights: Option<PathBuf>,
    /// The words of those weights: fastai's .pkl, or JSON.
    #[arg(long, value_name = "FILE", requires = "weights")]
    pub vocabulary: Option<PathBuf>,
    /// Download fastai's language model of WikiText-103, unless it is there, and begin with it.
    #[arg(long, conflicts_with_all = ["weights", "sizes"])]
    pub pretrained: bool,
    /// What fastai's probabilities of dropout are multiplied by; 0 is no dropout at all. Unless given, 0.3 for a
    /// language model and 0.5 for a classifier.
    #[arg(long)]
    pub drop_mult: Option<f64>,
    /// Keep the tokens in this folder, from which the next run reads them.
    #[arg(long, value_name = "FOLDER")]
    pub cache: Option<PathBuf>,
    /// Normalise batches by the statistics of all processes: BatchNorm then sees what one process with the
    /// whole batch would.
    #[arg(long)]
    pub sync_batch_norm: bool,
}

impl AwdLstmArgs {
    /// Makes the Accelerator, with the seed set.
    ///
    /// # Errors
    /// When the launcher's variables contradict each other, or a rank is gone.
    pub fn accelerator(&self) -> anyhow::Result<Accelerator> {
        self.common.accelerator(Accelerator::builder().sync_batch_norm(self.sync_batch_norm))
    }

    /// Returns the folder of reviews, which is downloaded or generated where none was named.
    ///
    /// # Errors
    /// When it cannot be, or is laid out in another way.
    pub fn folder(&self, accelerator: &Accelerator) -> anyhow::Result<PathBuf> {
        let folder = match &self.data {
            Some(folder) => folder.clone(),
            None if self.download => {
                accelerator.processes().main_process_first(|| untar_data(Urls::IMDB))?
            }
            None => return reviews(accelerator, self.generate as usize),
        };
        if let Some(name) = ["train", "test"].into_iter().find(|it| !folder.join(it).is_dir()) {
            bail!(
                "{} is not laid out as IMDb's reviews: it has no folder {name:?}",
                folder.display()
            );
        }
        // Stanford's archive has it there, and a folder in `train` is a class.
        if folder.join("train/unsup").is_dir() {
            let shown = folder.display();
            bail!("{shown}/train/unsup has reviews without an opinion: move it to {shown}/unsup");
        }
        Ok(folder)
    }

    /// Returns whether the reviews are generated, as no others were named.
    #[must_use]
    pub fn is_generated(&self) -> bool {
        self.data.is_none() && !self.download
    }

    /// Sets what these options say about loaders.
    #[must_use]
    pub fn loaders(&self, loaders: TextLoaders) -> TextLoaders {
        let loaders = loaders
            .seq_len(self.seq_len as usize)
            .seed(self.common.seed.into())
            .threads(self.common.threads);
        match &self.cache {
            Some(folder) => loaders.cache(folder),
            None => loaders,
        }
    }

    /// Returns the texts or rows in a batch of one process.
    #[must_use]
    pub fn batch_size(&self) -> usize {
        self.batch_size as usize
    }

    /// Returns the pretrained language model, which is downloaded where that was asked for.
    ///
    /// # Errors
    /// When it cannot be.
    pub fn pretrained(&self, accelerator: &Accelerator) -> anyhow::Result<Option<PretrainedText>> {
        if self.pretrained {
            let folder =
                accelerator.processes().main_process_first(|| untar_data(Urls::WT103_FWD))?;
            let file = |extension| of_extension(&folder, extension);
            return Ok(Some(PretrainedText::new(file("pth")?, file("pkl")?)));
        }
        let files = self.weights.as_ref().zip(self.vocabulary.as_ref());
        Ok(files.map(|(weights, vocabulary)| PretrainedText::new(weights, vocabulary)))
    }

    /// Returns the options of a language model's Learner.
    #[must_use]
    pub fn language_model(&self, pretrained: Option<PretrainedText>) -> LanguageLearnerOptions {
        let drop_mult = self.drop_mult.unwrap_or(0.3);
        let mut options =
            LanguageLearnerOptions { drop_mult, pretrained, ..LanguageLearnerOptions::default() };
        self.resize(&mut options.model.encoder);
        options
    }

    /// Returns the options of a classifier's Learner.
    #[must_use]
    pub fn classifier(&self, pretrained: Option<PretrainedText>) -> TextLearnerOptions {
        let drop_mult = self.drop_mult.unwrap_or(0.5);
        let mut options =
            TextLearnerOptions { drop_mult, pretrained, ..TextLearnerOptions::default() };
        self.resize(&mut options.model.encoder);
        options.model.seq_len = self.seq_len as i64;
        if drop_mult == 0.0 {
            // The factor leaves the head's as it is.
            options.model.dropout = Some(vec![0.0; options.model.hidden.len()]);
        }
        options
    }

    fn resize(&self, encoder: &mut AwdLstmOptions) {
        let [embedding, hidden, layers] = match self.sizes[..] {
            [embedding, hidden, layers] => [embedding, hidden, layers],
            _ if self.is_generated() && !self.full && !self.pretrained => [64, 128, 2],
            _ => return,
        };
        (encoder.embedding, encoder.hidden) = (embedding as i64, hidden as i64);
        encoder.layers = layers as usize;
    }
}

/// The first file in a folder whose name ends so.
fn of_extension(folder: &Path, extension: &str) -> anyhow::Result<PathBuf> {
    let cannot = || format!("cannot read the folder {}", folder.display());
    let mut files = Vec::new();
    for entry in std::fs::read_dir(folder).with_context(cannot)? {
        files.push(entry.with_context(cannot)?.path());
    }
    files.sort();
    let mut files = files.into_iter();
    files
        .find(|file| file.extension().is_some_and(|found| found == extension))
        .with_context(|| format!("{} has no file .{extension}", folder.display()))
}
