//! Images with masks behind a loader.

use std::fs;
use std::path::Path;

use brigade_data::{BatchContext, BatchedDataset, DataLoader};
use brigade_vision::source::ImageFiles;
use brigade_vision::transforms::{
    ColorJitter, Compose, PadMode, Phase, RandomCrop, RandomHorizontalFlip, RandomResizedCrop,
    RandomVerticalFlip, Resize, ToTensor, TrivialAugmentWide,
};
use brigade_vision::{CacheOptions, OnBroken, SegmentationDataset};
use tch::{Kind, Tensor};

type Dataset = SegmentationDataset<ImageFiles, ImageFiles>;

/// How a mask is stored.
#[derive(Clone, Copy)]
enum Mask {
    Grey,
    /// 4 bits a pixel, with colours that are none of the numbers.
    Palette,
    Colours,
}

/// A picture whose red channel is 10 times the class of each pixel, in three bands.
fn write(folder: &Path, number: u32, mask: Mask) {
    let (width, height) = (40 + number % 3 * 8, 32 + number % 2 * 10);
    let class = |x: u32, y: u32| (((x + y + number) / 14) % 3) as u8;
    let classes: Vec<u8> = (0..height).flat_map(|y| (0..width).map(move |x| class(x, y))).collect();
    let rgb: Vec<u8> = classes.iter().flat_map(|class| [class * 100, 50, 90]).collect();
    let encode = |path: &str, colour, depth, palette: Option<Vec<u8>>, bytes: &[u8]| {
        let path = folder.join(path);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        let mut encoder = png::Encoder::new(fs::File::create(path).unwrap(), width, height);
        encoder.set_color(colour);
        encoder.set_depth(depth);
        if let Some(palette) = palette {
            encoder.set_palette(palette);
        }
        encoder.write_header().unwrap().write_image_data(bytes).unwrap();
    };
    let eight = png::BitDepth::Eight;
    encode(&format!("images/{number}.png"), png::ColorType::Rgb, eight, None, &rgb);
    let path = format!("masks/{number}_P.png");
    match mask {
        Mask::Grey => encode(&path, png::ColorType::Grayscale, eight, None, &classes),
        Mask::Colours => encode(&path, png::ColorType::Rgb, eight, None, &rgb),
        Mask::Palette => {
            let packed: Vec<u8> =
                classes.as_chunks::<2>().0.iter().map(|[high, low]| high << 4 | low).collect();
            let palette = vec![9, 9, 9, 200, 0, 0, 0, 200, 0];
            encode(&path, png::ColorType::Indexed, png::BitDepth::Four, Some(palette), &packed);
        }
    }
}

fn folder(masks: &[Mask]) -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for (number, mask) in (0..).zip(masks) {
        write(folder.path(), number, *mask);
    }
    folder
}

fn open(folder: &Path) -> Dataset {
    let images = ImageFiles::find(folder.join("images")).unwrap();
    let mask = |image: &Path| format!("{}_P.png", image.file_stem().unwrap().display()).into();
    SegmentationDataset::open(images, folder.join("masks"), mask).unwrap()
}

/// The share of pixels whose class is the one that the image shows.
fn agreement(images: &Tensor, masks: &Tensor) -> f64 {
    let red = images.select(1, 0).to_kind(Kind::Float);
    let shown = (red / 100.0).round().to_kind(Kind::Int64);
    shown.eq_tensor(masks).to_kind(Kind::Double).mean(Kind::Double).double_value(&[])
}

#[test]
fn masks_follow_their_images_through_everything_that_moves_pixels() {
    let folder = folder(&[Mask::Grey, Mask::Palette, Mask::Grey, Mask::Palette]);
    let transforms = Compose::new()
        .then(RandomResizedCrop::new(32).scale(0.6, 1.0))
        .then(RandomHorizontalFlip::new(0.5))
        .then(RandomVerticalFlip::new(0.5));
    let dataset = open(folder.path()).transforms(transforms).to_tensor(ToTensor::u8()).classes(3);
    let loader = DataLoader::new(dataset).batch_size(4).shuffle(true).seed(2).threads(2);
    for _ in 0..8 {
        for batch in &loader {
            let (images, masks) = batch.unwrap().into_data();
            assert_eq!((images.size(), masks.size()), (vec![4, 3, 32, 32], vec![4, 32, 32]));
            assert_eq!(masks.kind(), Kind::Int64);
            // All but the pixels between two bands.
            let share = agreement(&images, &masks);
            assert!(share > 0.85, "{share}");
        }
    }
}

#[test]
fn colours_leave_masks_alone_and_the_outside_is_ignored() {
    let folder = folder(&[Mask::Palette, Mask::Grey]);
    let batch = |transforms: Compose| {
        let dataset = open(folder.path()).transforms(transforms).classes(3).ignore_index(77);
        let context = BatchContext { seed: 9, ..Default::default() };
        dataset.batch(&[0], &context).unwrap().1
    };
    let plain = batch(Compose::new());
    let jitter = ColorJitter::new().brightness(0.9).hue(0.5).contrast(0.9);
    assert_eq!(batch(Compose::new().then(jitter)), plain);

    let padded = RandomCrop::new(96).pad_if_needed(PadMode::ZEROS);
    let outside = batch(Compose::new().then(padded)).eq(77).sum(Kind::Int64).int64_value(&[]);
    assert_eq!(outside, 96 * 96 - 40 * 32);
    let turned = Compose::new().then(TrivialAugmentWide::default());
    let seeds = (0..30).map(|seed| {
        let dataset = open(folder.path()).transforms(turned.clone()).classes(3);
        let context = BatchContext { seed, ..Default::default() };
        dataset.batch(&[0], &context).unwrap().1
    });
    assert!(seeds.into_iter().any(|mask| mask.max().int64_value(&[]) == 255));
}

#[test]
fn a_cache_changes_nothing() {
    let folder = folder(&[Mask::Palette; 6]);
    let epochs = |cache: bool| {
        let transforms = Compose::new().then(Resize::shorter(28)).then(RandomCrop::new(24));
        let mut dataset = open(folder.path()).transforms(transforms);
        if cache {
            dataset = dataset.cache(CacheOptions::new(folder.path().join("cache")));
        }
        let loader = DataLoader::new(dataset).batch_size(3).shuffle(true).seed(1).threads(2);
        let epoch = || loader.iter().map(|batch| batch.unwrap().into_data()).collect::<Vec<_>>();
        [epoch(), epoch()]
    };
    assert_eq!(epochs(true), epochs(false));
}

#[test]
fn what_does_not_belong_together_is_named() {
    let folder = folder(&[Mask::Grey, Mask::Colours, Mask::Grey, Mask::Grey]);
    let error = |dataset: Dataset, index| {
        let batch = dataset.batch(&[index], &BatchContext::default());
        batch.unwrap_err().to_string()
    };
    let coloured = error(open(folder.path()), 1);
    assert!(coloured.contains("1_P.png") && coloured.contains("not a mask"), "{coloured}");
    let classes = error(open(folder.path()).classes(2), 0);
    assert!(classes.contains("0_P.png has the class 2 in column"), "{classes}");
    fs::copy(folder.path().join("masks/0_P.png"), folder.path().join("masks/3_P.png")).unwrap();
    let size = error(open(folder.path()), 3);
    assert!(size.contains("3_P.png has 40 x 32 pixels, its image"), "{size}");

    // Those are skipped, as images that cannot be read.
    let skipping = open(folder.path()).on_broken(OnBroken::Skip).phase(Phase::Valid);
    let (_, masks) = skipping.batch(&[1], &BatchContext::default()).unwrap();
    assert_eq!(masks.size(), [1, 32, 56]);
    assert_eq!((skipping.broken(), skipping.skipped(0)), (vec![1], 1));

    fs::remove_file(folder.path().join("masks/2_P.png")).unwrap();
    let images = ImageFiles::find(folder.path().join("images")).unwrap();
    let missing = SegmentationDataset::open(images, folder.path().join("masks"), |image| {
        format!("{}_P.png", image.file_stem().unwrap().display()).into()
    });
    let missing = missing.unwrap_err().to_string();
    assert!(
        missing.contains("images/2.png has no mask: ") && missing.contains("2_P.png is not there"),
        "{missing}"
    );
}
