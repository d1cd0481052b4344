//! A table: categories by embeddings beside normalised numbers, as fastai's `TabularModel` has them.

use std::path::{Path, PathBuf};

use brigade::MainResult;
use brigade::data::{DataLoader, TensorDataset};
use brigade::learn::Item;
use brigade::learn::prelude::*;
use brigade::nn::ParamPath;
use clap::Parser;
use learner::{Common, Table, TabularModel, write_people};

/// Predicts who earns more than 50,000 a year: fastai's `adult_sample`, or people that are generated.
#[derive(Debug, Parser)]
struct Options {
    #[command(flatten)]
    common: Common,
    /// A CSV file with the columns of fastai's `adult_sample`.
    #[arg(long, value_name = "FILE", conflicts_with = "download")]
    data: Option<PathBuf>,
    /// Download `adult_sample` (968 kB) into fastai's folder, unless it is there, and train on it.
    #[arg(long)]
    download: bool,
    /// People of the generated table, which is taken otherwise.
    #[arg(long, value_name = "PEOPLE", default_value_t = 5000)]
    generate: usize,
    /// The highest learning rate.
    #[arg(long, default_value_t = 1e-2)]
    lr: f64,
    /// Epochs without a better area under the ROC curve after which the training ends.
    #[arg(long, default_value_t = 3)]
    patience: usize,
    /// Where the best model is written.
    #[arg(long, value_name = "FILE", default_value = "tabular.pth")]
    best: PathBuf,
}

fn main() -> MainResult {
    let options = Options::parse();
    let common = &options.common;
    let accelerator = common.accelerator()?;
    let file = match &options.data {
        Some(file) => file.clone(),
        None if options.download => accelerator
            .processes()
            .main_process_first(|| untar_data(Urls::ADULT_SAMPLE))?
            .join("adult.csv"),
        None => {
            let file = PathBuf::from(format!("data/people-{}.csv", options.generate));
            let write = |file: &Path| write_people(file, options.generate);
            accelerator
                .processes()
                .local_main_process_first(|| write(&file).map_err(Error::custom))?;
            file
        }
    };

    let table = Table::read(&file, common.seed.into())?;
    let model = |path: &ParamPath<'_>| TabularModel::new(path, &table, &[200, 100]);
    let model = brigade::nn::Model::new(model)?;
    let Table { train, valid, classes, .. } = table;
    let first = Item::Tensors(vec![valid.0.0.f_get(0)?, valid.0.1.f_get(0)?]);
    let loader = |rows| -> anyhow::Result<_> {
        let loader = DataLoader::new(TensorDataset::new(rows)?);
        Ok(loader.batch_size(common.batch_size()).seed(common.seed.into()).threads(common.threads))
    };
    let train = loader(train)?.shuffle(true).drop_last(true);
    let data = Loaders::<(Tensor, Tensor)>::new(train, loader(valid)?)?.classes(classes);

    let learner = Learner::new(&accelerator, data, model)?.metrics((Accuracy, RocAucBinary));
    let mut learner = common.with_callbacks(learner);
    let column = RocAucBinary.name();
    let best = SaveModel::new(&options.best).monitor(&column);
    let stop = EarlyStopping::new(options.patience).monitor(&column);
    learner.fit_one_cycle(common.epochs(), options.lr, (best, stop))?;

    let validation = learner.validate()?;
    let auc = validation.metric(&column).unwrap_or(f64::NAN);
    accelerator.println(format!("the best model: loss {:.6}, {column} {auc:.6}", validation.loss));
    let prediction = learner.predict(first)?;
    let class = prediction.class.unwrap_or_default();
    accelerator.println(format!("the first row to validate with: {class}"));
    common.plot_training(&learner)?;
    Ok(accelerator.trackers().finish()?)
}
