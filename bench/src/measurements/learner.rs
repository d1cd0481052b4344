//! Measurements of the Learner and the visible loop, and our side of `peers/imagewoof.py`.

use std::cell::RefCell;
use std::fmt;
use std::path::Path;
use std::rc::Rc;
use std::time::Instant;

use anyhow::{Result, bail};
use brigade::data::TensorDataset;
use brigade::learn::callback::{Callback, Step};
use brigade::learn::callbacks::MixUp;
use brigade::learn::data::{
    DataBlock, Flip, Normalize, RandomResizedCrop, categories, grandparent, image_files, images,
    parent_name,
};
use brigade::learn::{Learner, LearnerState, Loaders};
use brigade::metrics::{Accuracy, ErrorRate, TopK};
use brigade::models::xresnet50;
use brigade::prelude::{Accelerator, AdamW, Cnn, DataLoader, Model, PreparedLoader, Tensor};

const BATCH: i64 = 64;
const STEPS: i64 = 40;
const EPOCHS: usize = 12;

/// Runs `learner loop` or `learner loop metrics`: seconds of a step in each epoch, of the Learner and of the visible
/// loop. Or `learner imagewoof FOLDER EPOCHS`: seconds of each epoch.
pub(crate) fn run(words: &[&str]) -> Result<Vec<Vec<f64>>> {
    match *words {
        ["loop"] => against_loop(false),
        ["loop", "metrics"] => against_loop(true),
        ["imagewoof", folder, epochs] => imagewoof(Path::new(folder), epochs.parse()?),
        _ => bail!("there is no measurement of the Learner {words:?}"),
    }
}

type Data = TensorDataset<(Tensor, Tensor)>;

fn loader() -> Result<DataLoader<Data>> {
    tch::manual_seed(1);
    let images = Tensor::rand([BATCH * STEPS, 1, 28, 28], tch::kind::FLOAT_CPU);
    let labels = Tensor::randint(10, [BATCH * STEPS], tch::kind::INT64_CPU);
    let data = TensorDataset::new((images, labels))?;
    Ok(DataLoader::new(data).batch_size(BATCH as usize).shuffle(true).seed(1))
}

/// Returns an epoch of the loop of a program without a Learner.
fn visible(accelerator: &Accelerator) -> Result<Box<dyn FnMut() -> Result<()>>> {
    let model = Model::new(Cnn::new)?;
    let optimizer = AdamW::fastai().build(&model)?;
    let loader: PreparedLoader<DataLoader<Data>> = accelerator.prepare(loader()?)?;
    let (mut model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    model.train();
    let accelerator = accelerator.clone();
    Ok(Box::new(move || {
        for batch in &loader {
            let (images, labels) = batch?.into_data();
            let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
            accelerator.backward(&loss)?;
            optimizer.step()?;
            optimizer.zero_grad()?;
        }
        Ok(())
    }))
}

/// Callback that times the Learner's epochs, and runs an epoch of the visible loop after each.
struct Turns {
    visible: Box<dyn FnMut() -> Result<()>>,
    began: Instant,
    seconds: Rc<RefCell<[Vec<f64>; 2]>>,
}

impl fmt::Debug for Turns {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Turns").finish_non_exhaustive()
    }
}

impl Callback for Turns {
    fn order(&self) -> i32 {
        // Called first at the beginning of the training; the other callback sees the end last.
        -1000
    }

    fn before_train(&mut self, _learner: &mut LearnerState) -> Step {
        self.began = Instant::now();
        Ok(())
    }

    fn after_epoch(&mut self, _learner: &mut LearnerState) -> Step {
        let per_step = |began: Instant| began.elapsed().as_secs_f64() / STEPS as f64;
        let ours = per_step(self.began);
        let began = Instant::now();
        (self.visible)().map_err(|error| brigade::Error::custom(format!("{error:#}")))?;
        let mut seconds = self.seconds.borrow_mut();
        seconds[0].push(ours);
        seconds[1].push(per_step(began));
        Ok(())
    }
}

fn against_loop(metrics: bool) -> Result<Vec<Vec<f64>>> {
    let accelerator = Accelerator::builder().cpu(true).channels_last(false).quiet(true).build()?;
    let seconds: Rc<RefCell<[Vec<f64>; 2]>> = Rc::default();
    let turns = Turns {
        visible: visible(&accelerator)?,
        began: Instant::now(),
        seconds: Rc::clone(&seconds),
    };
    let data = Loaders::train_only(loader()?)?;
    let mut learner = Learner::new(&accelerator, data, Model::new(Cnn::new)?)?.quiet(true);
    if metrics {
        learner = learner.metrics((Accuracy, ErrorRate, TopK(5))).train_metrics(true);
    }
    learner.fit(EPOCHS, 1e-3, turns)?;
    let [mut ours, mut theirs] = seconds.take();
    // The first epoch allocates memory and starts threads.
    ours.remove(0);
    theirs.remove(0);
    Ok(vec![ours, theirs])
}

/// Measures the seconds of each epoch of the example `imagewoof`, with its defaults in fp32.
fn imagewoof(folder: &Path, epochs: usize) -> Result<Vec<Vec<f64>>> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    accelerator.set_seed(1);
    let data = DataBlock::new(images(), categories())
        .items(image_files)
        .label(parent_name)
        .split(grandparent("train", "val"))
        .item_transforms((RandomResizedCrop::new(160), Flip::new(0.5)))
        .batch_transforms(Normalize::imagenet())
        .loaders(&accelerator, folder, 64)?;
    let classes = data.class_names().map_or(0, <[String]>::len) as i64;
    let mut learner = Learner::new(&accelerator, data, xresnet50(classes))?
        .metrics((Accuracy, TopK(5)))
        .quiet(true);
    learner.fit_flat_cos(epochs, 1e-3, MixUp::new(0.1))?;
    let rows = learner.recorder().rows();
    Ok(vec![rows.iter().map(|row| row.time.as_secs_f64()).collect()])
}
