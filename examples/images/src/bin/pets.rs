//! Oxford's pets: a resnet50d with timm's weights, its encoder frozen, its head trained in one cycle.

#![allow(clippy::print_stdout)] // the program's answer

use std::path::PathBuf;

use brigade::models::{Hub, ImageClassifier, Pretrained, cached_hub_file};
use brigade::prelude::*;
use brigade::vision::augment::Augment;
use brigade::vision::labels::{Labelled, Labeller, Split};
use brigade::vision::source::ImageFiles;
use brigade::vision::transforms::{Compose, Normalize, RandomResizedCrop, Resize, ToTensor};
use brigade::vision::{ImageDataset, check_ranks_agree};
use clap::Parser;
use images::Common;

/// Trains the head of a resnet50d on photographs whose names begin with their class
/// (`--data images`, of the Oxford-IIIT Pet data set), or on generated ones.
#[derive(Debug, Parser)]
struct Options {
    #[command(flatten)]
    common: Common,
    /// A weights file of timm's resnet50d. Without it, `timm/resnet50d.ra2_in1k` in the cache of the Hugging
    /// Face hub, then weights as they are drawn.
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// Download them from there into the cache (103 MB), where they are not in it.
    #[arg(long, conflicts_with = "weights")]
    download: bool,
    /// The highest learning rate.
    #[arg(long, default_value_t = 3e-2)]
    lr: f64,
}

/// The weights on the Hugging Face hub.
const WEIGHTS: &str = "timm/resnet50d.ra2_in1k";

fn main() -> MainResult {
    let Options { common, weights, download, lr } = Options::parse();
    let accelerator = Accelerator::new()?;
    accelerator.set_seed(common.seed.into());

    let files = ImageFiles::find(common.flat_folder(&accelerator)?)?;
    let pets = Labelled::of(files, &Labeller::regex(r"^(.+)_\d+\.")?)?;
    check_ranks_agree(&pets.fingerprint()?, accelerator.processes().group().as_ref())?;
    let split = Split::random(pets.len(), 0.2, common.seed.into())?;
    let classes = pets.categories().len() as i64;
    let (train, valid) = pets.split(split)?;
    // Bytes go to the device, and are normalised there.
    let augment = Augment::new().normalize(Normalize::IMAGENET);
    let mut train = ImageDataset::from(train)
        .transforms(Compose::new().then(RandomResizedCrop::new(common.size).scale(0.5, 1.0)))
        .to_tensor(ToTensor::u8());
    if let Some(cache) = common.cache() {
        train = train.cache(cache);
    }
    let valid = ImageDataset::from(valid)
        .transforms(Compose::new().then(Resize::squish(common.size)))
        .to_tensor(ToTensor::u8());
    let train = common.loader(augment.dataset(train)).shuffle(true).drop_last(true);
    let valid = common.loader(augment.validation().dataset(valid));
    let (train, valid) = accelerator.prepare((train, valid))?;

    let mut model = Model::new(|path| ResNet::resnet50d(path, classes))?;
    if download {
        accelerator
            .processes()
            .local_main_process_first(|| Hub::from_env().and_then(|hub| hub.weights(WEIGHTS)))?;
    }
    match weights.or_else(|| cached_hub_file(WEIGHTS)) {
        Some(file) => {
            Pretrained::new().load(&mut model, file)?;
        }
        None => accelerator.println(
            "No weights file: the encoder stays as it was drawn. Pass --download or --weights FILE.",
        ),
    }
    let head = model.module().classifier();
    model.requires_grad_where(|name| !name.starts_with(&head), false)?;
    model.hold_in_eval("", true)?;

    let steps = train.len() as u64 * common.epochs;
    let optimizer = Adam::default().lr(lr / 25.0).build(&model)?;
    let scheduler = Scheduler::new(&optimizer, Schedule::one_cycle(OneCycle::new(lr, steps))?);
    let (mut model, mut optimizer, mut scheduler) =
        accelerator.prepare((model, optimizer, scheduler))?;

    for epoch in 1..=common.epochs {
        model.train();
        for batch in accelerator.progress(&train) {
            let (images, labels, drawn) = batch?.into_data();
            let logits = model.forward(&augment.apply(&images, &drawn)?)?;
            let loss = logits.cross_entropy_for_logits(&labels);
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
            let (images, labels, drawn) = &*batch;
            let images = augment.validation().apply(images, drawn)?;
            let scores = no_grad(|| model.forward(&images))?;
            accelerator.update_metric(&mut accuracy, &batch, &scores, labels)?;
        }
        let percent = 100.0 * accelerator.compute_metric(&accuracy)?;
        accelerator.println(format!("epoch {epoch}/{}, accuracy = {percent:.2}", common.epochs));
    }
    Ok(())
}
