//! Trains a resnet18 on a folder of photographs with a folder for each class.
//!
//! `cargo run --release -- --data FOLDER`; without a folder, on a small set that is generated.

use std::path::{Path, PathBuf};

use brigade::models::{Pretrained, ResNet};
use brigade::prelude::*;
use brigade::train::LogOptions;
use brigade::vision::source::ImageFolder;
use brigade::vision::transforms::{
    CenterCrop, Compose, Normalize, Phase, RandomHorizontalFlip, RandomResizedCrop, Resize,
    ToTensor,
};
use brigade::vision::{CacheOptions, ImageDataset, OnBroken, check_ranks_agree};
use clap::Parser;

/// Trains a resnet18 on a folder of photographs with a folder for each class.
#[derive(Debug, Clone, Parser)]
struct Options {
    /// Folder with `train` and `valid` (or `val`), each with a folder for each class. Without it, a
    /// set is generated in `photos`.
    #[arg(long, value_name = "FOLDER")]
    data: Option<PathBuf>,
    /// Weights to begin with: a file of torchvision or timm. Its head may have other classes.
    #[arg(long, value_name = "FILE")]
    weights: Option<PathBuf>,
    /// Keep decoded images in this folder from the first epoch for the later ones.
    #[arg(long, value_name = "FOLDER")]
    cache: Option<PathBuf>,
    /// Passes over the training data.
    #[arg(long, default_value_t = 6)]
    epochs: u64,
    /// Images in a batch of one process.
    #[arg(long, default_value_t = 32)]
    batch_size: usize,
    /// Height and width of the images that the model sees.
    #[arg(long, default_value_t = 96, value_parser = clap::value_parser!(u32).range(32..=1024))]
    size: u32,
    /// The highest learning rate of the one-cycle schedule.
    #[arg(long, default_value_t = 2e-3)]
    max_lr: f64,
}

fn main() -> MainResult {
    let options = Options::parse();
    // What `brigade launch` has set up; started alone, one process.
    let accelerator = Accelerator::new()?;
    // Names files that cannot be read, among other things.
    accelerator.logging().init(&LogOptions::default())?;
    let folder = match &options.data {
        Some(folder) => folder.clone(),
        None => generate(&accelerator, Path::new("photos"), 4, 96)?,
    };
    let (model, _accuracy) = train(&accelerator, &options, &folder)?;
    accelerator.save_model(&model, "model.safetensors")?;
    Ok(())
}

/// Trains as the options say; the model, and its accuracy in percent on the images of `valid`.
fn train(
    accelerator: &Accelerator,
    options: &Options,
    folder: &Path,
) -> anyhow::Result<(PreparedModel<ResNet>, f64)> {
    accelerator.set_seed(42);
    let (train, valid) = ImageFolder::open_train_valid(folder)?;
    // Each process has listed the files for itself: a host with other ones is an error here.
    check_ranks_agree(&train.fingerprint()?, accelerator.processes().group().as_ref())?;
    check_ranks_agree(&valid.fingerprint()?, accelerator.processes().group().as_ref())?;
    let classes = train.categories().names().to_vec();

    // Other files take the place of those that cannot be read.
    let to_tensor = ToTensor::f32().normalize(Normalize::IMAGENET);
    let crop = RandomResizedCrop::new(options.size).scale(0.35, 1.0);
    let mut train = ImageDataset::from(train)
        .transforms(Compose::new().then(crop).then(RandomHorizontalFlip::new(0.5)))
        .to_tensor(to_tensor)
        .on_broken(OnBroken::Skip);
    if let Some(folder) = &options.cache {
        train = train.cache(CacheOptions::new(folder));
    }
    let resize = Resize::shorter(options.size * 8 / 7);
    let valid = ImageDataset::from(valid)
        .transforms(Compose::new().then(resize).then(CenterCrop::new(options.size)))
        .phase(Phase::Valid)
        .to_tensor(to_tensor)
        .on_broken(OnBroken::Skip);
    // Threads of the loader read, decode and transform, and begin the next epoch during validation.
    let loader = |dataset| {
        DataLoader::new(dataset).batch_size(options.batch_size).threads(2).overlap_epochs(true)
    };
    let train = loader(train).shuffle(true).seed(42).drop_last(true);
    let (train, valid) = accelerator.prepare((train, loader(valid)))?;

    let mut model = Model::new(|path| ResNet::resnet18(path, classes.len() as i64))?;
    if let Some(file) = &options.weights {
        Pretrained::new().load(&mut model, file)?;
    }
    let steps = train.len() as u64 * options.epochs;
    let optimizer = AdamW::default().no_decay_on_norms_and_biases(true).build(&model)?;
    let schedule = Schedule::one_cycle(OneCycle::new(options.max_lr, steps))?;
    let scheduler = Scheduler::new(&optimizer, schedule);
    let (mut model, mut optimizer, mut scheduler) =
        accelerator.prepare((model, optimizer, scheduler))?;

    let mut percent = 0.0;
    for epoch in 1..=options.epochs {
        model.train();
        for batch in accelerator.progress(&train) {
            let (images, labels) = batch?.into_data();
            let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
            optimizer.zero_grad()?;
            accelerator.backward(&loss)?;
            optimizer.step()?;
            scheduler.step()?;
        }

        model.eval();
        let mut accuracy = MetricState::new(Accuracy);
        for batch in &valid {
            let batch = batch?;
            let (images, labels) = &*batch;
            let scores = no_grad(|| model.forward(images))?;
            accelerator.update_metric(&mut accuracy, &batch, &scores, labels)?;
        }
        percent = 100.0 * accelerator.compute_metric(&accuracy)?;
        let epochs = options.epochs;
        accelerator.println(format!("epoch {epoch}/{epochs}, accuracy = {percent:.2} %"));
    }
    Ok((model, percent))
}

/// Generates pictures of shapes where the folder is missing; one process of each host does.
fn generate(
    accelerator: &Accelerator,
    folder: &Path,
    classes: usize,
    images: usize,
) -> anyhow::Result<PathBuf> {
    let unfinished = folder.with_extension("unfinished");
    accelerator.processes().local_main_process_first(|| {
        if folder.is_dir() {
            return Ok(());
        }
        let written = brigade_testkit::Photos::new(classes, images).write(&unfinished);
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
        let name = made.as_ref().map(|it| it.path().join("photos"));
        let folder =
            accelerator.processes().broadcast_object(name, 0)?.expect("rank 0 has made it");
        generate(&accelerator, &folder, 2, 8)?;

        let arguments = ["vision", "--epochs", "3", "--batch-size", "2", "--size", "32"];
        let (model, _) = train(&accelerator, &Options::parse_from(arguments), &folder)?;
        // Row r is the sum of rank r's weights.
        let parameters = model.inner().parameters();
        let weights: Tensor = parameters.iter().map(|it| it.tensor.sum(Kind::Double)).sum();
        let of_all = accelerator.processes().gather(&weights.reshape([1]))?;
        assert_eq!(of_all.double_value(&[0]), of_all.double_value(&[1]));
        Ok(())
    });
}
