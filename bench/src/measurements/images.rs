//! Our side of `peers/images.py`: loading folders of images as batches, and training a ResNet-18 on them.

use std::fs;
use std::path::Path;
use std::time::Instant;

use anyhow::{Context, Result, bail, ensure};
use brigade::models::ResNet;
use brigade::prelude::*;
use brigade::vision::decode::{DecodeOptions, Decoder};
use brigade::vision::source::{ImageFiles, ImageFolder, ImageSource};
use brigade::vision::transforms::{
    Compose, Normalize, RandomHorizontalFlip, RandomResizedCrop, ToTensor,
};
use brigade::vision::{CacheOptions, Image, ImageDataset};

const BATCH: usize = 64;

/// Runs `images WHAT FOLDER EPOCHS`, with `cache=DIR` and `presize=N`.
pub(crate) fn run(words: &[&str]) -> Result<Vec<Vec<f64>>> {
    let [what, folder, epochs, rest @ ..] = words else {
        bail!("what of which folder for how many epochs?");
    };
    let (folder, epochs) = (Path::new(folder), epochs.parse()?);
    let value = |name: &str| rest.iter().find_map(|word| word.strip_prefix(name));
    let presize = value("presize=").map(str::parse).transpose()?;
    let cache = value("cache=").map(|folder| match presize {
        Some(side) => CacheOptions::new(folder).presize(side),
        None => CacheOptions::new(folder),
    });
    match *what {
        "loader" => load(folder, epochs, cache),
        "decoder" => decode(folder),
        "example" => example(folder, epochs, cache),
        other => bail!("there is no measurement of images {other:?}"),
    }
}

fn loader(
    folder: &Path,
    cache: Option<CacheOptions>,
) -> Result<(DataLoader<ImageDataset<ImageFiles>>, i64)> {
    let images = ImageFolder::open(folder.join("train"))?;
    let classes = images.categories().len() as i64;
    let transforms =
        Compose::new().then(RandomResizedCrop::new(160)).then(RandomHorizontalFlip::new(0.5));
    let mut dataset = ImageDataset::from(images)
        .transforms(transforms)
        .to_tensor(ToTensor::f32().normalize(Normalize::IMAGENET));
    if let Some(cache) = cache {
        dataset = dataset.cache(cache);
    }
    let loader = DataLoader::new(dataset).batch_size(BATCH).shuffle(true).seed(1).drop_last(true);
    Ok((loader.threads(2), classes))
}

/// Returns the images per second of each epoch, and the memory in bytes.
fn load(folder: &Path, epochs: usize, cache: Option<CacheOptions>) -> Result<Vec<Vec<f64>>> {
    let (loader, _) = loader(folder, cache)?;
    let (mut rates, mut memory) = (Vec::new(), 0.0);
    for _ in 0..epochs {
        let (mut start, mut images) = (Instant::now(), 0);
        for batch in &loader {
            images += batch?.into_data().0.size()[0] as usize;
            if images == 8 * BATCH {
                let measured = Instant::now();
                memory = proportional_memory()?;
                start += measured.elapsed();
            }
        }
        rates.push(images as f64 / start.elapsed().as_secs_f64());
    }
    Ok(vec![rates, vec![memory]])
}

/// Returns the images per second of one thread that only decodes whole images.
fn decode(folder: &Path) -> Result<Vec<Vec<f64>>> {
    let files = ImageFiles::find(folder.join("train"))?;
    let mut decoder = Decoder::new(DecodeOptions::default());
    let mut image = Image::new(1, 1, vec![0; 3])?;
    let mut bytes = Vec::new();
    let mut rates = Vec::new();
    for _ in 0..2 {
        let start = Instant::now();
        for index in 0..files.len() {
            files.read(index, &mut bytes)?;
            decoder.decode(&files.name(index), &bytes, &mut image)?;
        }
        rates.push(files.len() as f64 / start.elapsed().as_secs_f64());
    }
    Ok(vec![rates])
}

/// Returns the images per second of each epoch of a training with the example's settings.
fn example(folder: &Path, epochs: usize, cache: Option<CacheOptions>) -> Result<Vec<Vec<f64>>> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    accelerator.set_seed(1);
    let (loader, classes) = loader(folder, cache)?;
    let loader = accelerator.prepare(loader)?;
    let steps = (epochs * loader.len()) as u64;
    let model = Model::new(|path| ResNet::resnet18(path, classes))?;
    let optimizer = Sgd::new(0.1).momentum(0.9).build(&model)?;
    let scheduler = Scheduler::new(&optimizer, Schedule::cosine(0.1, 0.0, steps)?);
    let (mut model, mut optimizer, mut scheduler) =
        accelerator.prepare((model, optimizer, scheduler))?;
    model.train();
    let mut rates = Vec::new();
    for _ in 0..epochs {
        let (start, mut images) = (Instant::now(), 0);
        for batch in &loader {
            let (inputs, labels) = batch?.into_data();
            let loss = model.forward(&inputs)?.cross_entropy_for_logits(&labels);
            optimizer.zero_grad()?;
            accelerator.backward(&loss)?;
            optimizer.step()?;
            scheduler.step()?;
            images += inputs.size()[0];
        }
        ensure!(images > 0, "an epoch without images");
        rates.push(images as f64 / start.elapsed().as_secs_f64());
    }
    Ok(vec![rates])
}

/// Returns the proportional set size of this process: resident memory, with shared pages divided among their processes.
fn proportional_memory() -> Result<f64> {
    let path = "/proc/self/smaps_rollup";
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {path}"))?;
    let line = text.lines().find_map(|line| line.strip_prefix("Pss:"));
    let kilobytes = line.and_then(|line| line.trim().strip_suffix("kB"));
    let kilobytes = kilobytes.with_context(|| format!("{path} has no Pss"))?;
    Ok(kilobytes.trim().parse::<f64>()? * 1024.0)
}
