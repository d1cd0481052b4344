//! Data sets of images behind a loader.

use std::fmt;
use std::sync::Arc;

use brigade_data::{BatchContext, BatchedDataset, DataLoader};
use brigade_sampling::ShardOptions;
use brigade_torch::is_channels_last;
use brigade_vision::transforms::{
    ColorJitter, Compose, Normalize, Phase, RandAugment, RandomHorizontalFlip, RandomResizedCrop,
    RandomVerticalFlip, Resize, ToTensor, TrivialAugmentWide,
};
use brigade_vision::{ImageDataset, OnBroken};
use parking_lot::Mutex;
use tch::{Kind, Tensor};
use tracing::field::{Field, Visit};
use tracing::{Event, Subscriber};
use tracing_subscriber::Layer;
use tracing_subscriber::layer::{Context, SubscriberExt};

use crate::pictures::Pictures;

fn busy() -> Compose {
    Compose::new()
        .then(RandomResizedCrop::new(24))
        .then(RandomHorizontalFlip::default())
        .then(RandomVerticalFlip::default())
        .then(ColorJitter::new().brightness(0.3).contrast(0.3).saturation(0.3).hue(0.1))
        .then(RandAugment::default())
        .then(TrivialAugmentWide::default())
}

fn dataset(pictures: Pictures) -> ImageDataset<Pictures> {
    let labels = pictures.labels();
    ImageDataset::new(pictures, labels)
        .unwrap()
        .transforms(busy())
        .to_tensor(ToTensor::f32().normalize(Normalize::IMAGENET))
}

type Batches = Vec<(Tensor, Tensor)>;

fn epoch(loader: &DataLoader<ImageDataset<Pictures>>) -> Batches {
    loader.iter().map(|batch| batch.unwrap().into_data()).collect()
}

fn loader(threads: usize) -> DataLoader<ImageDataset<Pictures>> {
    DataLoader::new(dataset(Pictures::new(37)))
        .batch_size(8)
        .shuffle(true)
        .seed(11)
        .threads(threads)
}

fn labels(batches: &Batches) -> Vec<i64> {
    batches.iter().flat_map(|(_, labels)| Vec::<i64>::try_from(labels).unwrap()).collect()
}

#[test]
fn batches_are_the_same_with_any_number_of_threads_and_differ_between_epochs() {
    let (one, four) = (loader(1), loader(4));
    let (first, same) = (epoch(&one), epoch(&four));
    assert_eq!(first, same);
    assert_eq!(first.len(), 5);
    assert_eq!(first[0].0.size(), [8, 3, 24, 24]);
    let (second, same) = (epoch(&one), epoch(&loader(0)));
    assert_eq!(first, same);
    assert_ne!(labels(&first), labels(&second));
    assert_eq!(epoch(&four), second);
}

#[test]
fn a_run_goes_on_in_the_middle_of_an_epoch() {
    let whole = loader(2);
    let (_, second) = (epoch(&whole), epoch(&whole));
    let resumed = loader(3).skip_batches(2);
    resumed.set_epoch(1);
    assert_eq!(epoch(&resumed), second[2..]);
}

#[test]
fn a_sample_is_the_same_on_every_rank() {
    let alone = epoch(&loader(0));
    for rank in 0..2 {
        let loader = loader(1).shard(rank, 2, ShardOptions::default()).unwrap();
        for (images, found) in epoch(&loader) {
            for (row, label) in (0..).zip(Vec::<i64>::try_from(&found).unwrap()) {
                let place = labels(&alone).iter().position(|other| *other == label).unwrap();
                let expected = alone[place / 8].0.get(place as i64 % 8);
                assert_eq!(images.get(row), expected, "sample {label} on rank {rank}");
            }
        }
    }
}

#[test]
fn validation_draws_nothing() {
    let valid = |seed| {
        let dataset = dataset(Pictures::new(9)).phase(Phase::Valid);
        epoch(&DataLoader::new(dataset).batch_size(4).seed(seed))
    };
    let batches = valid(1);
    assert_eq!(batches, valid(2));
    assert_eq!(labels(&batches), (0..9).collect::<Vec<i64>>());
}

#[test]
fn kinds_and_layouts_hold_the_same_numbers() {
    let images = |to_tensor: ToTensor| {
        let dataset = dataset(Pictures::new(6)).to_tensor(to_tensor);
        dataset.batch(&[5, 0, 3], &BatchContext { seed: 3, ..Default::default() }).unwrap().0
    };
    let bytes = images(ToTensor::u8());
    assert_eq!((bytes.kind(), bytes.size()), (Kind::Uint8, vec![3, 3, 24, 24]));
    let values = images(ToTensor::f32());
    assert_eq!(values, bytes.to_kind(Kind::Float) / 255.0);
    let normalised = ToTensor::f32().normalize(Normalize::IMAGENET);
    let plain = images(normalised);
    let half = images(ToTensor::bf16().normalize(Normalize::IMAGENET));
    assert_eq!(half, plain.to_kind(Kind::BFloat16));
    for (to_tensor, expected) in [
        (ToTensor::u8(), &bytes),
        (normalised, &plain),
        (ToTensor::bf16().normalize(Normalize::IMAGENET), &half),
    ] {
        let last = images(to_tensor.channels_last(true));
        assert!(is_channels_last(&last).unwrap());
        assert!(!is_channels_last(expected).unwrap());
        assert_eq!(&last, expected);
    }
}

#[test]
fn broken_images_fail_the_batch_by_name() {
    let dataset = dataset(Pictures::new(10).with_broken(&[4]));
    assert!(dataset.batch(&[3, 5], &BatchContext::default()).is_ok());
    let error = dataset.batch(&[3, 4, 5], &BatchContext::default()).unwrap_err().to_string();
    assert!(error.contains("picture-4.png"), "{error}");
}

#[test]
fn broken_images_are_replaced_by_the_next_and_counted() {
    let pictures = || Pictures::new(10).with_broken(&[0, 4, 5, 9]);
    let dataset = |pictures| dataset(pictures).on_broken(OnBroken::Skip);
    let skipping = DataLoader::new(dataset(pictures())).batch_size(5).seed(2).threads(2);
    let first = epoch(&skipping);
    assert_eq!(labels(&first), [1, 1, 2, 3, 6, 6, 6, 7, 8, 1]);
    assert_eq!(skipping.dataset().broken(), [0, 4, 5, 9]);
    assert_eq!(skipping.dataset().skipped(0), 4);
    epoch(&skipping);
    assert_eq!((skipping.dataset().skipped(1), skipping.dataset().skipped(2)), (4, 0));
    // Each position has its own seed, so the two pictures 1 have different crops.
    assert_ne!(first[0].0.get(0), first[0].0.get(1));

    // A rank without the others' images makes the same rows.
    let again = DataLoader::new(dataset(pictures())).batch_size(5).seed(2).skip_batches(1);
    assert_eq!(epoch(&again), first[1..]);

    let none = dataset(Pictures::new(3).with_broken(&[0, 1, 2]));
    let error = none.batch(&[1], &BatchContext::default()).unwrap_err().to_string();
    assert!(error.contains("picture-1.png"), "{error}");
    let error = none.batch(&[1], &BatchContext::default()).unwrap_err().to_string();
    assert!(error.starts_with("none of the 3 images can be read"), "{error}");
}

/// Keeps what is logged, a line for each event.
#[derive(Clone, Default)]
struct Lines(Arc<Mutex<Vec<String>>>);

impl Lines {
    fn take(&self) -> Vec<String> {
        std::mem::take(&mut *self.0.lock())
    }
}

struct Fields(String);

impl Visit for Fields {
    fn record_debug(&mut self, field: &Field, value: &dyn fmt::Debug) {
        self.0.push_str(&format!("{field}={value:?} "));
    }
}

impl<S: Subscriber> Layer<S> for Lines {
    fn on_event(&self, event: &Event<'_>, _: Context<'_, S>) {
        let mut fields = Fields(String::new());
        event.record(&mut fields);
        self.0.lock().push(fields.0);
    }
}

#[test]
fn the_count_of_an_epoch_is_logged_when_it_is_over() {
    let lines = Lines::default();
    let subscriber = tracing_subscriber::registry().with(lines.clone());
    tracing::subscriber::with_default(subscriber, || {
        let pictures = Pictures::new(10).with_broken(&[3, 4]);
        let loader = DataLoader::new(dataset(pictures).on_broken(OnBroken::Skip)).batch_size(5);
        epoch(&loader);
        let logged = lines.take();
        assert_eq!(logged.len(), 2, "{logged:?}");
        assert!(logged[0].contains("image=3 name=\"picture-3.png\""), "{logged:?}");
        epoch(&loader);
        let logged = lines.take();
        assert_eq!(logged.len(), 1, "{logged:?}");
        assert!(logged[0].contains("epoch=0 samples=2 images=2"), "{logged:?}");
        drop(loader);
        let logged = lines.take();
        assert!(logged.len() == 1 && logged[0].contains("epoch=1 samples=2"), "{logged:?}");
    });
}

#[test]
fn images_that_stay_of_different_sizes_are_named() {
    let dataset = dataset(Pictures::new(4)).transforms(Compose::new().then(Resize::shorter(20)));
    let error = dataset.batch(&[0, 1, 2, 3], &BatchContext::default()).unwrap_err().to_string();
    assert!(error.contains("after the transforms"), "{error}");
    assert!(dataset.batch(&[0, 4], &BatchContext::default()).is_err());
    assert!(ImageDataset::new(Pictures::new(4), vec![0; 5]).is_err());
    assert_eq!(dataset.batch(&[], &BatchContext::default()).unwrap().0.size(), [0, 3, 0, 0]);
}
