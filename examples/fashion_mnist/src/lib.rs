//! What both programs of this example share: their options and their data.

use std::path::PathBuf;
use std::str::FromStr;

use brigade::Result;
use brigade::datasets::{Digits, FashionMnist, IdxFolder, LabelledImages, Mnist};
use clap::Parser;

/// Where downloads go, and where `mnist` and `fashion-mnist` are looked for.
const DATA_FOLDER: &str = "data";

/// The height and width that the model wants.
const SIDE: usize = 28;

/// Trains a small CNN on images of digits or clothes.
#[derive(Debug, Parser)]
pub struct Options {
    /// The data: digits (embedded), mnist, fashion-mnist (looked for in ./data, else downloaded), or a
    /// folder with IDX files of MNIST's names.
    #[arg(long, default_value = "digits", value_name = "digits|mnist|fashion-mnist|FOLDER")]
    pub data: Source,
    /// Passes over the training data.
    #[arg(long, default_value_t = 4, value_parser = clap::value_parser!(u32).range(1..))]
    pub epochs: u32,
    /// Samples in a batch of one process.
    #[arg(long, default_value_t = 64, value_parser = positive)]
    pub batch_size: usize,
    /// Adam's learning rate.
    #[arg(long, default_value_t = 0.005)]
    pub lr: f64,
    /// Threads that prepare batches ahead; 0 prepares each batch when it is asked for.
    #[arg(long, default_value_t = 1)]
    pub threads: usize,
    /// Seed of the weights and of the order of the samples.
    #[arg(long, default_value_t = 42)]
    pub seed: u32,
    /// Write the trained weights to this safetensors file.
    #[arg(long, value_name = "FILE")]
    pub save: Option<PathBuf>,
    /// Keep the memory format NCHW, as the plain program does, where channels last would be faster.
    #[arg(long)]
    pub nchw: bool,
    /// Every process prints its own loss after each epoch, not only the main one's accuracy.
    #[arg(long)]
    pub log_losses: bool,
}

/// A data set, by name or folder.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Source {
    /// The embedded digits: 1,438 to train, 359 to test.
    Digits,
    /// MNIST, from the data folder.
    Mnist,
    /// FashionMNIST, from the data folder.
    FashionMnist,
    /// IDX files in a folder.
    Folder(PathBuf),
}

impl FromStr for Source {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        match text {
            "digits" => Ok(Self::Digits),
            "mnist" => Ok(Self::Mnist),
            "fashion-mnist" => Ok(Self::FashionMnist),
            folder if PathBuf::from(folder).is_dir() => Ok(Self::Folder(folder.into())),
            other => Err(format!(
                "expected digits, mnist, fashion-mnist or a folder; there is no folder {other:?}"
            )),
        }
    }
}

impl Source {
    /// Fetches what has to be fetched. One process of a host does this before the others read.
    ///
    /// # Errors
    /// When a download fails.
    pub fn fetch(&self) -> Result<()> {
        match self {
            Self::Mnist => Mnist::download(DATA_FOLDER),
            Self::FashionMnist => FashionMnist::download(DATA_FOLDER),
            Self::Digits | Self::Folder(_) => Ok(()),
        }
    }

    /// The train and the test part, as 28x28 images.
    ///
    /// # Errors
    /// When a file is missing or damaged.
    pub fn load(&self) -> Result<(LabelledImages, LabelledImages)> {
        let (train, test) = match self {
            Self::Digits => (Digits::train()?, Digits::test()?),
            Self::Mnist => (Mnist::train(DATA_FOLDER)?, Mnist::test(DATA_FOLDER)?),
            Self::FashionMnist => {
                (FashionMnist::train(DATA_FOLDER)?, FashionMnist::test(DATA_FOLDER)?)
            }
            Self::Folder(folder) => {
                let folder = IdxFolder::new(folder);
                (folder.train()?, folder.test()?)
            }
        };
        Ok((train.resize(SIDE, SIDE)?, test.resize(SIDE, SIDE)?))
    }
}

fn positive(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(0) | Err(_) => Err("expected a whole number, at least 1".into()),
        Ok(number) => Ok(number),
    }
}
