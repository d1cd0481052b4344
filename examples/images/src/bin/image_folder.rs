//! A resnet18 on a folder with `train` and `val`, each with a folder per class: SGD with a cosine.

#![allow(clippy::print_stdout)] // the program's answer

use brigade::prelude::*;
use brigade::vision::source::ImageFolder;
use brigade::vision::transforms::{
    CenterCrop, Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop, Resize, ToTensor,
};
use brigade::vision::{ImageDataset, Size, check_ranks_agree};
use clap::Parser;
use images::Common;

/// Trains a resnet18 on a folder of photographs with a folder per class.
#[derive(Debug, Parser)]
struct Options {
    #[command(flatten)]
    common: Common,
    /// The highest learning rate.
    #[arg(long, default_value_t = 0.1)]
    lr: f64,
}

fn main() -> MainResult {
    let Options { common, lr } = Options::parse();
    let accelerator = Accelerator::new()?;
    accelerator.set_seed(common.seed.into());

    let folder = common.folder(&accelerator)?;
    let (train, valid) = ImageFolder::open_train_valid(folder)?;
    check_ranks_agree(&train.fingerprint()?, accelerator.processes().group().as_ref())?;
    check_ranks_agree(&valid.fingerprint()?, accelerator.processes().group().as_ref())?;
    let classes = train.categories().len() as i64;
    let to_tensor = ToTensor::f32().normalize(Normalize::IMAGENET);
    let mut train = ImageDataset::from(train)
        .transforms(
            Compose::new()
                .then(RandomResizedCrop::new(common.size))
                .then(RandomHorizontalFlip::new(0.5)),
        )
        .to_tensor(to_tensor);
    if let Some(cache) = common.cache() {
        train = train.cache(cache);
    }
    let valid = ImageDataset::from(valid)
        .transforms(
            Compose::new()
                .then(Resize::shorter(common.size * 8 / 7))
                .then(CenterCrop::new(Size::new(common.size, common.size))),
        )
        .to_tensor(to_tensor);
    let (train, valid) = accelerator
        .prepare((common.loader(train).shuffle(true).drop_last(true), common.loader(valid)))?;

    let steps = train.len() as u64 * common.epochs;
    let model = Model::new(|path| ResNet::resnet18(path, classes))?;
    let optimizer = Sgd::new(lr).momentum(0.9).build(&model)?;
    let scheduler = Scheduler::new(&optimizer, Schedule::cosine(lr, 0.0, steps)?);
    let (mut model, mut optimizer, mut scheduler) =
        accelerator.prepare((model, optimizer, scheduler))?;

    for epoch in 1..=common.epochs {
        model.train();
        for batch in accelerator.progress(&train) {
            let (images, labels) = batch?.into_data();
            let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
            optimizer.zero_grad()?;
            accelerator.backward(&loss)?;
            optimizer.step()?;
            scheduler.step()?;
            if common.log_losses {
                println!("loss {:?}", f64::try_from(&loss.detach())?);
            }
        }
        model.eval();
        let mut accuracy = MetricState::new(Accuracy);
        for batch in &valid {
            let batch = batch?;
            let (images, labels) = &*batch;
            let scores = no_grad(|| model.forward(images))?;
            accelerator.update_metric(&mut accuracy, &batch, &scores, labels)?;
        }
        let percent = 100.0 * accelerator.compute_metric(&accuracy)?;
        accelerator.println(format!("epoch {epoch}/{}, accuracy = {percent:.2}", common.epochs));
    }
    Ok(())
}
