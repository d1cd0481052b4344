//! Data sets of images that keep what they decoded.

use std::path::Path;

use brigade_data::DataLoader;
use brigade_vision::transforms::{
    CenterCrop, Compose, Phase, RandomCrop, RandomHorizontalFlip, RandomResizedCrop, Resize,
};
use brigade_vision::{CacheOptions, ImageDataset, OnBroken};
use tch::Tensor;

use crate::pictures::Pictures;

type Loader = DataLoader<ImageDataset<Pictures>>;

fn loader(transforms: Compose, cache: Option<CacheOptions>, phase: Phase) -> Loader {
    let pictures = Pictures::new(23).with_broken(&[6]);
    let labels = pictures.labels();
    let mut dataset = ImageDataset::new(pictures, labels)
        .unwrap()
        .transforms(transforms)
        .phase(phase)
        .on_broken(OnBroken::Skip);
    if let Some(cache) = cache {
        dataset = dataset.cache(cache);
    }
    DataLoader::new(dataset).batch_size(5).shuffle(true).seed(4).threads(2)
}

fn epoch(loader: &Loader) -> (Vec<(Tensor, Tensor)>, usize) {
    let batches = loader.iter().map(|batch| batch.unwrap().into_data()).collect();
    (batches, loader.dataset().source().reads())
}

fn resized() -> Compose {
    Compose::new()
        .then(Resize::shorter(28))
        .then(RandomCrop::new(24))
        .then(RandomHorizontalFlip::default())
}

fn resized_crop() -> Compose {
    Compose::new().then(RandomResizedCrop::new(16)).then(RandomHorizontalFlip::default())
}

fn cache(folder: &Path) -> Option<CacheOptions> {
    Some(CacheOptions::new(folder))
}

#[test]
fn images_are_decoded_once_and_batches_stay_the_same() {
    let valid = || Compose::new().then(Resize::shorter(28)).then(CenterCrop::new(24));
    for (transforms, phase) in [
        (resized(), Phase::Train),
        (resized_crop(), Phase::Train),
        (resized_crop(), Phase::Valid),
        (valid(), Phase::Valid),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let plain = loader(transforms.clone(), None, phase);
        let caching = loader(transforms.clone(), cache(folder.path()), phase);
        let again = loader(transforms, cache(folder.path()), phase);
        for number in 0..3 {
            let (expected, _) = epoch(&plain);
            let (found, reads) = epoch(&caching);
            assert_eq!(found, expected, "epoch {number} of {phase:?}");
            // Both threads may request the broken image and its substitute at the same time.
            assert!(if number == 0 { reads >= 23 } else { reads == 0 }, "{reads} in {number}");
            // Another process that comes later decodes only the broken images.
            let (found, reads) = epoch(&again);
            assert_eq!(found, expected);
            assert!(reads <= 2, "{reads}");
        }
    }
}

#[test]
fn what_has_no_room_is_decoded_each_time() {
    let folder = tempfile::tempdir().unwrap();
    let small = CacheOptions::new(folder.path()).max_bytes(30_000);
    let (plain, caching) =
        (loader(resized(), None, Phase::Train), loader(resized(), Some(small), Phase::Train));
    for number in 0..3 {
        let (expected, all) = epoch(&plain);
        let (found, reads) = epoch(&caching);
        assert_eq!(found, expected);
        assert!(number == 0 || reads > 5 && reads < all, "{reads} of {all} in epoch {number}");
    }
}

#[test]
fn presized_images_are_the_same_in_the_first_epoch_and_with_a_full_cache() {
    let folder = tempfile::tempdir().unwrap();
    let presized = || CacheOptions::new(folder.path()).presize(20);
    let first = loader(resized_crop(), Some(presized()), Phase::Train);
    let (cold, _) = epoch(&first);
    let second = loader(resized_crop(), Some(presized()), Phase::Train);
    let (warm, reads) = epoch(&second);
    assert_eq!(cold, warm);
    assert!(reads <= 2, "{reads}");
    let elsewhere = tempfile::tempdir().unwrap();
    let full = CacheOptions::new(elsewhere.path()).presize(20).max_bytes(0);
    assert_eq!(epoch(&loader(resized_crop(), Some(full), Phase::Train)).0, cold);
    // A presize is not part of a pipeline that has a fixed stage.
    let (own, _) = epoch(&loader(resized(), Some(presized()), Phase::Train));
    assert_eq!(own, epoch(&loader(resized(), None, Phase::Train)).0);
}

#[test]
fn a_folder_that_cannot_be_made_is_named() {
    let file = tempfile::NamedTempFile::new().unwrap();
    let unfit = loader(resized(), cache(&file.path().join("folder")), Phase::Train);
    let error = unfit.iter().next().unwrap().unwrap_err().to_string();
    assert!(error.contains("cannot keep images in the cache"), "{error}");
}
