//! Tests that need private items: batches of prepared loaders, on one rank and on two.

use std::collections::BTreeSet;
use std::path::Path;

use brigade_testkit::{Photos, World, dist_test};
use brigade_torch::{Error, Result};
use brigade_train::Accelerator;
use brigade_vision::CacheOptions;
use brigade_vision::augment::Augment;
use tch::Tensor;

use super::batch_transforms::BatchPipeline;
use super::*;
use crate::loaders::{BatchSource, Loaders};

fn accelerator() -> Accelerator {
    Accelerator::builder().cpu(true).quiet(true).build().unwrap()
}

/// Makes a folder with files `all/CLASS/0000.jpg` and so on: 2 classes with `per_class` files each.
fn flat(per_class: usize) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let photos = Photos::new(2, per_class).size(40, 30);
    for (class, name) in photos.classes().iter().enumerate() {
        std::fs::create_dir(folder.path().join(name)).unwrap();
        for index in 0..per_class {
            let file = folder.path().join(name).join(format!("{index:04}.jpg"));
            std::fs::write(file, photos.jpeg(class, index)).unwrap();
        }
    }
    folder
}

/// Returns a number that distinguishes the files of [`flat`].
fn number(path: &Path) -> f64 {
    let index: f64 = path.file_stem().unwrap().to_str().unwrap().parse().unwrap();
    if path.to_string_lossy().contains("square") { 1000.0 + index } else { index }
}

fn numbered(accelerator: &Accelerator, folder: &Path) -> Loaders {
    DataBlock::new(images(), numbers())
        .label(number)
        .split(random_split(0.25))
        .item_transforms(Resize::new(16))
        .loaders(accelerator, folder, 3)
        .unwrap()
}

/// Returns the targets of a pass on this rank, without duplicates.
fn targets(source: &dyn BatchSource, accelerator: &Accelerator, training: bool) -> Vec<i64> {
    let prepared = source.prepare(accelerator, training).unwrap();
    let mut seen = Vec::new();
    for batch in prepared.begin() {
        let batch = batch.unwrap();
        let rows = Vec::<f64>::try_from(batch.target.as_ref().unwrap()).unwrap();
        seen.extend(rows.into_iter().take(batch.valid()).map(|number| number as i64));
    }
    seen
}

#[test]
fn epochs_shuffle_training_and_leave_validation_in_order() {
    let (accelerator, folder) = (accelerator(), flat(8));
    let data = numbered(&accelerator, folder.path());
    let pass = |training| {
        let source = if training { &data.train } else { data.valid.as_ref().unwrap() };
        targets(source.as_ref(), &accelerator, training)
    };
    let (first, second) = (pass(true), pass(true));
    // 12 items in batches of 3; 4 to validate with.
    assert_eq!((first.len(), second.len()), (12, 12));
    assert_ne!(first, second);
    let valid = pass(false);
    assert_eq!(valid.len(), 4);
    assert!(valid.is_sorted() && pass(false) == valid);
    let all: BTreeSet<i64> = first.iter().chain(&valid).copied().collect();
    assert_eq!(all.len(), 16);
}

#[test]
fn augmented_validation_draws_anew_in_each_pass() {
    let (accelerator, folder) = (accelerator(), flat(8));
    let data = DataBlock::new(images(), numbers())
        .label(number)
        .item_transforms(RandomResizedCrop::new(16))
        .batch_transforms((aug_transforms(), Normalize::imagenet()))
        .loaders(&accelerator, folder.path(), 8)
        .unwrap();
    let pass = |source: &dyn BatchSource| {
        let prepared = source.prepare(&accelerator, false).unwrap();
        let batch = prepared.begin().next().unwrap().unwrap().into_data();
        (batch.inputs[0].copy(), batch.target.unwrap())
    };
    let (valid, augmented) =
        (data.valid.as_deref().unwrap(), data.augmented_valid.as_deref().unwrap());
    let [plain, again] = [(); 2].map(|()| pass(valid));
    let [one, other] = [(); 2].map(|()| pass(augmented));
    assert_eq!(plain.0, again.0);
    assert_ne!(one.0, other.0);
    assert_ne!(one.0, plain.0);
    assert!(one.1 == plain.1 && other.1 == plain.1, "other items, or another order");
}

#[test]
fn weights_choose_training_items() {
    let (accelerator, folder) = (accelerator(), flat(10));
    let block = DataBlock::new(images(), categories())
        .label(parent_name)
        .seed(5)
        .item_transforms(Resize::new(16));
    let squares = |block: DataBlock| {
        let data = block.loaders(&accelerator, folder.path(), 4).unwrap();
        let seen = targets(data.train.as_ref(), &accelerator, true);
        (seen.iter().sum::<i64>(), seen.len())
    };
    let only = block.clone().weighted(|path| if number(path) >= 1000.0 { 1.0 } else { 0.0 });
    assert_eq!(squares(only), (16, 16));
    // Sampling draws two squares as often as ten discs.
    let few = block.split(function_split(|path| number(path) >= 1002.0)).drop_last(false);
    let balanced = few.clone().balanced();
    assert_eq!(squares(few), (2, 12));
    assert!(squares(balanced).0 > 3);
}

#[test]
fn masks_follow_their_images_and_have_no_class_outside() {
    let folder = tempfile::tempdir().unwrap();
    for part in ["images", "masks"] {
        std::fs::create_dir(folder.path().join(part)).unwrap();
    }
    // The left half is class 1, the last column has none.
    let class = |x: usize| {
        if x < 8 {
            1
        } else if x == 15 {
            255
        } else {
            0
        }
    };
    for index in 0..5 {
        let file = |part: &str| folder.path().join(part).join(format!("{index}.bmp"));
        std::fs::write(file("images"), bmp(16, 16, |x, _| [10 * class(x).min(2); 3])).unwrap();
        std::fs::write(file("masks"), bmp(16, 16, |x, _| [class(x); 3])).unwrap();
    }
    let mask = |image: &Path| Path::new("masks").join(image.file_name().unwrap());
    let accelerator = accelerator();
    let loaders = SegmentationLoaders::from_folder(folder.path(), mask, ["road", "car"])
        .item_transforms(Flip::new(1.0))
        .batch_transforms(
            aug_transforms().flip(false).max_warp(0.0).max_rotate(0.0).max_zoom(1.0).size(8),
        );
    let data = loaders.loaders(&accelerator, 2).unwrap();
    assert_eq!(data.class_names().unwrap(), ["road", "car"]);
    assert_eq!(data.loss.as_ref().unwrap().name(), "cross_entropy");
    let (inputs, target) = data.one_valid_batch(1).unwrap();
    let target = target.unwrap();
    assert_eq!((inputs[0].size(), target.size()), (vec![1, 3, 8, 8], vec![1, 8, 8]));
    let row = |target: &Tensor| Vec::<i64>::try_from(target.get(0).get(3)).unwrap();
    assert_eq!(row(&target), [1, 1, 1, 1, 0, 0, 0, -100]);
    // Training mirrors both.
    let (_, target) = data.one_batch(1).unwrap();
    assert_eq!(row(&target.unwrap()), [-100, 0, 0, 0, 1, 1, 1, 1]);
    let shown = data.show_batch(2).unwrap();
    assert_eq!((shown.len(), shown[0].1.as_str(), shown[0].0.width), (2, "", 8));

    let missing =
        SegmentationLoaders::from_folder(folder.path(), |_| "masks/none.bmp".into(), ["a", "b"]);
    let error = missing.loaders(&accelerator, 2).unwrap_err().to_string();
    assert!(
        error.contains("has no mask: ") && error.contains("masks/none.bmp is not there"),
        "{error}"
    );
}

#[test]
fn batch_transforms_are_fastais_and_the_last_of_a_kind_counts() {
    let augment = |transforms: Vec<BatchTransform>| {
        BatchPipeline::new(&transforms).map(|(pipeline, _)| format!("{:?}", pipeline.augment))
    };
    let fastai = format!("{:?}", Augment::fastai());
    assert_eq!(augment(aug_transforms().parts()).unwrap(), fastai);
    assert_eq!(augment(Augment::fastai().parts()).unwrap(), fastai);
    let imagenet = augment(Normalize::imagenet().parts()).unwrap();
    let other = Normalize::new([0.1; 3], [0.2; 3]);
    assert_eq!(augment((other, Normalize::imagenet()).parts()).unwrap(), imagenet);
    assert_ne!(augment((Normalize::imagenet(), other).parts()).unwrap(), imagenet);
    let none = aug_transforms().mult(0.0).flip(false).max_zoom(1.0);
    assert_eq!(augment(none.parts()).unwrap(), format!("{:?}", Augment::new()));
    let error = augment(aug_transforms().min_scale(0.5).parts()).unwrap_err().to_string();
    assert!(error.contains("needs .size(…)"), "{error}");
    let mixed = Augment::new().mix(brigade_vision::augment::Mix::MixUp { alpha: 0.4 });
    let error = augment(mixed.parts()).unwrap_err().to_string();
    assert!(error.contains("use the Learner's MixUp"), "{error}");
}

#[test]
fn presizing_crops_in_training_alone() {
    let (accelerator, folder) = (accelerator(), flat(8));
    let data = DataBlock::new(images(), categories())
        .label(parent_name)
        .item_transforms(Resize::squish(30))
        .batch_transforms(
            aug_transforms().flip(false).mult(0.0).max_zoom(1.0).size(15).min_scale(0.3),
        )
        .loaders(&accelerator, folder.path(), 4)
        .unwrap();
    let (inputs, _) = data.one_batch(4).unwrap();
    assert_eq!(inputs[0].size(), [4, 3, 15, 15]);
    let valid = data.valid.as_deref().unwrap().sample(2).unwrap().inputs;
    let augmented = data.augmented_valid.as_deref().unwrap().sample(2).unwrap().inputs;
    assert_eq!(valid[0].size(), [2, 3, 15, 15]);
    assert_ne!(valid[0], augmented[0]);
}

#[test]
fn points_follow_both_kinds_of_transforms() {
    let folder = tempfile::tempdir().unwrap();
    // A white pixel block in columns 6 and 7, rows 2 and 3 of a black image; the point is its middle.
    let white = |x: usize, y: usize| [if x / 2 == 3 && y / 2 == 1 { 255 } else { 0 }; 3];
    for name in ["1.bmp", "2.bmp", "3.bmp"] {
        std::fs::write(folder.path().join(name), bmp(16, 16, white)).unwrap();
    }
    let accelerator = accelerator();
    let block = DataBlock::new(images(), points())
        .label(|_: &Path| [7.0, 3.0, 0.0, 16.0])
        .split(index_split([2]))
        .item_transforms(Flip::new(1.0))
        .batch_transforms(Augment::new().then(brigade_vision::augment::Geometric::Flip { p: 1.0 }));
    let data = block.loaders(&accelerator, folder.path(), 2).unwrap();
    assert_eq!((data.class_names(), data.loss.as_ref().unwrap().name()), (None, "mse"));
    let numbers =
        |target: Option<Tensor>| Vec::<f64>::try_from(target.unwrap().view([-1])).unwrap();
    let (_, target) = data.one_valid_batch(1).unwrap();
    assert_eq!(target.as_ref().unwrap().size(), [1, 2, 2]);
    assert_eq!(numbers(target), [-0.125, -0.625, -1.0, 1.0]);
    // Mirrored twice in training.
    let found = numbers(data.one_batch(1).unwrap().1);
    for (found, expected) in found.iter().zip([-0.125, -0.625, -1.0, 1.0]) {
        assert!((found - expected).abs() < 1e-6, "{found} {expected}");
    }
    let (picture, text) = data.show_batch(1).unwrap().remove(0);
    assert_eq!((&picture.rgb[3 * (3 * 16 + 7)..][..3], text.as_str()), (&[255, 0, 0][..], ""));
    let odd = block.clone().label(|_: &Path| [7.0, 3.0, 0.0].to_vec());
    let error = odd.loaders(&accelerator, folder.path(), 2).unwrap_err().to_string();
    assert!(
        error.contains("has 3 numbers as its points, expected x and y of each, 4 in all"),
        "{error}"
    );
    let cached = block.cache(CacheOptions::new(folder.path().join("cache")));
    let error = cached.loaders(&accelerator, folder.path(), 2).unwrap_err().to_string();
    assert!(error.contains("leave out .cache"), "{error}");
}

/// Returns the bytes of a bitmap file with 24 bits per pixel.
fn bmp(width: usize, height: usize, colour: impl Fn(usize, usize) -> [u8; 3]) -> Vec<u8> {
    let row = (3 * width).next_multiple_of(4);
    let mut bytes = b"BM".to_vec();
    for number in [54 + row * height, 0, 54, 40, width, height] {
        bytes.extend((number as u32).to_le_bytes());
    }
    bytes.extend([1, 0, 24, 0]);
    bytes.extend([0; 24]);
    for y in (0..height).rev() {
        let start = bytes.len();
        for x in 0..width {
            let [red, green, blue] = colour(x, y);
            bytes.extend([blue, green, red]);
        }
        bytes.resize(start + row, 0);
    }
    bytes
}

/// Returns the folder that the ranks share, which rank 0 makes.
fn shared(accelerator: &Accelerator) -> (std::path::PathBuf, Option<tempfile::TempDir>) {
    let own = accelerator.is_main_process().then(|| flat(8));
    let path = own.as_ref().map(|folder| folder.path().to_path_buf()).unwrap_or_default();
    (accelerator.processes().broadcast_object(path, 0).unwrap(), own)
}

dist_test!(
    world = 2,
    dist_ranks_have_the_same_split_and_disjoint_shards,
    |_: World| -> Result<()> {
        let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
        let (folder, _own) = shared(&accelerator);
        // Without a seed, each rank would draw its own.
        let data = numbered(&accelerator, &folder);
        let train = targets(data.train.as_ref(), &accelerator, true);
        let valid = targets(data.valid.as_ref().unwrap().as_ref(), &accelerator, false);
        let all: Vec<(Vec<i64>, Vec<i64>)> =
            accelerator.processes().gather_object((train, valid))?;
        let train: Vec<i64> = all.iter().flat_map(|(train, _)| train.clone()).collect();
        let valid: Vec<i64> = all.iter().flat_map(|(_, valid)| valid.clone()).collect();
        let set: BTreeSet<i64> = train.iter().chain(&valid).copied().collect();
        assert_eq!((train.len(), valid.len(), set.len()), (12, 4, 16));
        assert!(all.iter().all(|(train, valid)| train.len() == 6 && !valid.is_empty()));

        let classes = DataBlock::new(images(), categories())
            .label(parent_name)
            .item_transforms(Resize::new(16))
            .batch_transforms(Normalize::from_batch())
            .loaders(&accelerator, &folder, 2)?;
        let codec = classes.item_codec().unwrap().describe()?.1;
        let seen = accelerator
            .processes()
            .gather_object((classes.class_names().unwrap().to_vec(), codec))?;
        assert_eq!(seen[0], seen[1]);
        assert_eq!(seen[0].0, ["disc", "square"]);
        accelerator.processes().wait_for_everyone()?;
        Ok(())
    }
);

dist_test!(world = 2, dist_ranks_with_other_data_have_an_error_on_all, |_: World| -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    let rank = accelerator.processes().process_index();
    let error = |block: &DataBlock, folder: &Path| {
        block.loaders(&accelerator, folder, 2).unwrap_err().to_string()
    };
    let block =
        DataBlock::new(images(), categories()).label(parent_name).item_transforms(Resize::new(16));
    // The second rank's copy lacks a file.
    let own = flat(8);
    if rank == 1 {
        std::fs::remove_file(own.path().join("disc/0003.jpg")).unwrap();
    }
    let message = error(&block, own.path());
    assert!(message.contains("rank 1 sees other images than rank 0"), "{message}");
    // Other labels for the same files.
    let labels = block.clone().label(move |path: &Path| {
        let index = number(path) as usize % 1000;
        if rank == 1 { index.is_multiple_of(2) } else { index < 4 }
    });
    std::fs::write(own.path().join("disc/0003.jpg"), Photos::new(2, 8).size(40, 30).jpeg(0, 3))
        .unwrap();
    let message = error(&labels, own.path());
    assert!(message.contains("rank 1 sees other"), "{message}");
    // Only the second rank fails.
    let fails = block.items(move |root: &Path| match rank {
        1 => Err(Error::invalid_argument("the disk is gone")),
        _ => image_files(root),
    });
    let message = error(&fails, own.path());
    let expected = if rank == 1 {
        "the disk is gone"
    } else {
        "rank 1 could not prepare its data: the disk is gone"
    };
    assert_eq!(message, expected);
    Ok(())
});
