//! fastai's Imagewoof: an xresnet50 on random crops of 160 pixels, with MixUp and a flat cosine.

#![allow(clippy::print_stdout)] // the program's answer

use brigade::models::XResNet;
use brigade::prelude::*;
use brigade::vision::augment::{Augment, Mix};
use brigade::vision::source::ImageFolder;
use brigade::vision::transforms::Phase;
use brigade::vision::transforms::{
    Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop, ToTensor,
};
use brigade::vision::{ImageDataset, check_ranks_agree};
use clap::Parser;
use images::Common;
use tch::Reduction;

/// Trains an xresnet50 on Imagewoof (`--data imagewoof2-320`), or on generated photographs.
#[derive(Debug, Parser)]
struct Options {
    #[command(flatten)]
    common: Common,
    /// The learning rate of the flat part.
    #[arg(long, default_value_t = 1e-3)]
    lr: f64,
    /// The parameter of MixUp's Beta distribution; 0 mixes nothing.
    #[arg(long, default_value_t = 0.1)]
    mixup: f64,
}

fn main() -> MainResult {
    let Options { common, lr, mixup } = Options::parse();
    let accelerator = Accelerator::new()?;
    accelerator.set_seed(common.seed.into());

    let folder = common.folder(&accelerator)?;
    let (train, valid) = ImageFolder::open_train_valid(folder)?;
    check_ranks_agree(&train.fingerprint()?, accelerator.processes().group().as_ref())?;
    check_ranks_agree(&valid.fingerprint()?, accelerator.processes().group().as_ref())?;
    let classes = train.categories().len() as i64;
    let crop = RandomResizedCrop::fastai(common.size);
    let to_tensor = ToTensor::f32().normalize(Normalize::IMAGENET);
    let mut train = ImageDataset::from(train)
        .transforms(Compose::new().then(crop).then(RandomHorizontalFlip::new(0.5)))
        .to_tensor(to_tensor);
    if let Some(cache) = common.cache() {
        train = train.cache(cache);
    }
    let valid = ImageDataset::from(valid)
        .transforms(Compose::new().then(crop))
        .phase(Phase::Valid)
        .to_tensor(to_tensor);
    let augment = Augment::new().mix(Mix::MixUp { alpha: mixup });
    let train = common.loader(augment.dataset(train)).shuffle(true).drop_last(true);
    let (train, valid) = accelerator.prepare((train, common.loader(valid)))?;

    let steps = train.len() as u64 * common.epochs;
    let model = Model::new(|path| XResNet::xresnet50(path, classes))?;
    // fastai's Adam.
    let optimizer = AdamW::default()
        .lr(lr)
        .betas(0.9, 0.99)
        .eps(1e-5)
        .weight_decay(0.01)
        .no_decay_on_norms_and_biases(true)
        .build(&model)?;
    let schedule = Schedule::flat_cosine(lr, lr / 1e5, steps, 0.75)?;
    let scheduler = Scheduler::new(&optimizer, schedule);
    let (mut model, mut optimizer, mut scheduler) =
        accelerator.prepare((model, optimizer, scheduler))?;

    for epoch in 1..=common.epochs {
        model.train();
        for batch in accelerator.progress(&train) {
            let (images, labels, drawn) = batch?.into_data();
            let logits = model.forward(&augment.apply(&images, &drawn)?)?;
            let loss = augment.targets(&labels, &drawn)?.loss(|labels| {
                logits.f_cross_entropy_loss(labels, None::<Tensor>, Reduction::None, -100, 0.0)
            })?;
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
        let mut top_5 = MetricState::new(TopK(5.min(classes)));
        for batch in &valid {
            let batch = batch?;
            let (images, labels) = &*batch;
            let logits = no_grad(|| model.forward(images))?;
            accelerator.update_metric(&mut accuracy, &batch, &logits, labels)?;
            accelerator.update_metric(&mut top_5, &batch, &logits, labels)?;
        }
        let first = 100.0 * accelerator.compute_metric(&accuracy)?;
        let fifth = 100.0 * accelerator.compute_metric(&top_5)?;
        accelerator.println(format!(
            "epoch {epoch}/{}, accuracy = {first:.2}, top-5 accuracy = {fifth:.2}",
            common.epochs
        ));
    }
    Ok(())
}
