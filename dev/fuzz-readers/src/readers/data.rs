//! Parsers of data sets and images.

#[cfg(feature = "libtorch")]
use std::fs;
#[cfg(feature = "libtorch")]
use std::os::unix::fs::MetadataExt;
#[cfg(feature = "libtorch")]
use std::path::Path;

use super::{FREE, TREE, file, path_of};
use crate::Target;

pub(super) const TARGETS: &[Target] = &[
    #[cfg(feature = "libtorch")]
    Target {
        name: "idx",
        reads: "an IDX file, plain or gzip",
        words: &["\0\0\x08\x03", "\0\0\x08\x01", "\u{1f}", "\0\0\0\x01"],
        // Content of a gzip file, and a buffer that grows to at most twice its size.
        bytes_per_byte: 2 * 200,
        free_bytes: FREE + (8 << 20),
        read: idx,
    },
    #[cfg(feature = "libtorch")]
    Target {
        name: "archive",
        reads: "a tar, tar.gz or zip archive of `untar_data`, unpacked",
        words: &[
            "ustar\0",
            "ustar  \0",
            "././@LongLink",
            "30 path=",
            "../",
            "/etc/passwd",
            "PK\x03\x04",
            "PK\x01\x02",
            "PK\x05\x06",
            "\u{1f}",
        ],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: archive_file,
    },
    Target {
        name: "webdataset",
        reads: "a tar archive of images, by its headers",
        words: &["ustar\0", "ustar  \0", "a.jpg", ".cls", "././@LongLink", "30 path=", "size="],
        // A member of a compressed archive is in memory while it is copied.
        bytes_per_byte: TREE + 2 * GZIP,
        // A class number creates names of all classes up to it, at most 100,000.
        free_bytes: FREE + (16 << 20),
        read: webdataset,
    },
    Target {
        name: "parquet",
        reads: "a Parquet file with encoded images",
        words: &["PAR1", "image", "bytes", "label", "huggingface", "\"names\":[", "ClassLabel"],
        bytes_per_byte: ZSTD,
        free_bytes: FREE + PARQUET_FREE,
        read: parquet,
    },
    Target {
        name: "pack",
        reads: "a file of images without encoding, also under its right digest",
        words: &["BRIGPACK\x01\0\0\0", "{\"classes\":[", "\"names\":["],
        bytes_per_byte: TREE,
        free_bytes: FREE,
        read: pack,
    },
    Target {
        name: "transforms",
        reads: "a size, a seed and a list of transforms of images",
        words: &["\u{7}", "\u{b}\u{40}\u{30}"],
        bytes_per_byte: 0,
        // Images of a million pixels: one before a step and one after it.
        free_bytes: FREE + 4 * TRANSFORMED_BYTES,
        read: transforms,
    },
    Target {
        name: "image",
        reads: "an encoded image (JPEG, PNG, WebP, BMP, GIF), whole and in part",
        words: &[
            "Exif\0\0",
            "Adobe",
            "JFIF",
            "PNG\r\n\u{1a}\n",
            "IHDR",
            "PLTE",
            "tRNS",
            "IDAT",
            "IEND",
            "RIFF",
            "WEBPVP8 ",
            "WEBPVP8L",
            "WEBPVP8X",
            "GIF89a",
            "BM",
            "II*\0",
            "MM\0*",
            "II+\0\x08\0",
            "P4\n",
            "P6\n",
        ],
        bytes_per_byte: 4096,
        free_bytes: FREE + (64 << 20),
        read: image,
    },
];

/// Schemas and page buffers of the Parquet reader; ten bytes of Brotli may hold 16 MiB.
const PARQUET_FREE: usize = 80 << 20;

/// Maximum expansion of a byte by gzip.
const GZIP: usize = 1_040;

/// Maximum expansion of a byte by zstd, and the same in an image's copy.
const ZSTD: usize = 2 * 43_691;

#[cfg(feature = "libtorch")]
fn idx(input: &[u8]) {
    for dimensions in [1, 3] {
        let Ok(file) = brigade_datasets::IdxFile::read(input, Path::new("a"), dimensions) else {
            continue;
        };
        assert_eq!(file.data.len(), file.shape.iter().product::<usize>());
        assert_eq!(file.shape.len(), dimensions);
    }
}

/// Unpacks an archive as it is, and with corrected checksums in its headers: everything stays in its folder, and
/// nothing is left of one that is refused.
#[cfg(feature = "libtorch")]
fn archive_file(input: &[u8]) {
    // In memory, so that nothing waits for a disk.
    let home = tempfile::tempdir_in("/dev/shm").or_else(|_| tempfile::tempdir()).expect("a folder");
    let folder = home.path().join("set");
    let limited = brigade_datasets::Extraction::new().max_bytes(UNPACKED_BYTES).max_files(200);
    for bytes in [input.to_vec(), with_checksums(input.to_vec())] {
        let file = file(&bytes);
        if let Err(error) = limited.extract(path_of(&file), &folder) {
            let _ = error.to_string();
            let left = fs::read_dir(home.path()).expect("it is there");
            assert_eq!(left.count(), 0, "{error}");
            continue;
        }
        let mut folders = vec![folder.clone()];
        let mut sizes = std::collections::BTreeMap::new();
        while let Some(next) = folders.pop() {
            for entry in fs::read_dir(&next).expect("it was just made") {
                let path = entry.expect("it was just made").path();
                let found = fs::symlink_metadata(&path).expect("it was just made");
                if found.is_dir() {
                    folders.push(path);
                } else if found.is_file() {
                    assert_eq!(found.mode() & 0o7000, 0, "{}", path.display());
                    sizes.insert(found.ino(), found.len());
                } else {
                    assert!(found.is_symlink(), "{}", path.display());
                    let Ok(target) = fs::canonicalize(&path) else { continue };
                    let inside = fs::canonicalize(&folder).expect("it was just made");
                    assert!(target.starts_with(inside), "{} leads out", path.display());
                }
            }
        }
        let bytes: u64 = sizes.values().sum();
        assert!(bytes <= UNPACKED_BYTES, "{bytes}");
        fs::remove_dir_all(&folder).expect("it can be removed");
    }
}

/// Maximum size of all files in an archive, in bytes.
#[cfg(feature = "libtorch")]
const UNPACKED_BYTES: u64 = 1 << 20;

/// Returns a tar archive with corrected checksums of its headers.
#[cfg(feature = "libtorch")]
fn with_checksums(mut tar: Vec<u8>) -> Vec<u8> {
    for header in tar.chunks_exact_mut(512) {
        if header[257..].starts_with(b"ustar") {
            header[148..156].fill(b' ');
            let sum: u32 = header.iter().map(|byte| u32::from(*byte)).sum();
            header[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        }
    }
    tar
}

fn webdataset(input: &[u8]) {
    use brigade_images::source::{ImageSource, WebDatasetOptions};

    let file = file(input);
    let (mut buffer, mut bytes) = (Vec::new(), 0);
    for options in [
        WebDatasetOptions::new(),
        WebDatasetOptions::new().text_label("txt"),
        WebDatasetOptions::new().json_label("json", "label"),
    ] {
        let Ok(images) = options.open_shards([path_of(&file)]) else { return };
        bytes = 0;
        for index in 0..images.len() {
            images.read(index, &mut buffer).expect("the index knows the size of the file");
            bytes += buffer.len();
        }
        if let Ok(images) = images.labelled() {
            assert!(images.labels().iter().all(|label| images.categories().name(*label).is_some()));
        }
    }
    let times = if input.starts_with(&[0x1f, 0x8b]) { GZIP } else { 1 };
    assert!(bytes <= times * input.len(), "{bytes}");
}

fn parquet(input: &[u8]) {
    use brigade_images::source::{ImageSource, ParquetOptions};

    let file = file(input);
    let path = path_of(&file);
    let path = path.to_str().expect("it is of digits");
    let spool = tempfile::tempdir().expect("a folder");
    let Ok(images) = ParquetOptions::new().open(path, spool.path()) else { return };
    let mut buffer = Vec::new();
    for index in 0..images.len() {
        images.source().read(index, &mut buffer).expect("the copy has all rows");
    }
}

fn image(input: &[u8]) {
    use brigade_images::decode::{DecodeOptions, Decoder};
    use brigade_images::{Image, Region, Size};

    // A million pixels, so that the memory of an image is small compared with the limit.
    let mut decoder = Decoder::new(DecodeOptions::new().max_pixels(1 << 20));
    let Ok(image) = decoder.decode_new("fuzz", input) else { return };
    let (width, height) = (image.width(), image.height());
    let region = Region {
        left: width / 3,
        top: height / 4,
        width: (width / 2).max(1),
        height: (height / 2).max(1),
    };
    let Ok(mut part) = Image::new(1, 1, vec![0; 3]) else { return };
    for wanted in [None, Some(Size::new(1, 1))] {
        let _ = decoder.decode_region("fuzz", input, region, wanted, &mut part);
    }
}

fn pack(input: &[u8]) {
    use brigade_images::PackedImages;
    use brigade_images::source::ImageSource;

    for input in [input.to_vec(), with_digest(input)] {
        let file = file(&input);
        let Ok(images) = PackedImages::open(path_of(&file)) else { continue };
        if let Ok(images) = PackedImages::labelled(path_of(&file)) {
            assert!(images.labels().iter().all(|label| images.categories().name(*label).is_some()));
        }
        let mut buffer = Vec::new();
        for index in 0..images.len() {
            if images.read(index, &mut buffer).is_ok() {
                assert!(images.size(index).is_some());
                assert!(buffer.len() <= input.len() + 64, "{} bytes", buffer.len());
            }
        }
    }
}

/// Corrects the digest of a pack's table and the checksum of its header, so that the bytes behind them are parsed.
fn with_digest(input: &[u8]) -> Vec<u8> {
    use sha2::{Digest, Sha256};

    let mut pack = input.to_vec();
    let number = |start: usize| {
        let bytes = input.get(start..start + 8)?.try_into().ok()?;
        usize::try_from(u64::from_le_bytes(bytes)).ok()
    };
    let (Some(table), Some(end)) = (number(24), number(40)) else { return pack };
    let Some(digested) = input.get(table..end) else { return pack };
    let digest = Sha256::digest(digested);
    if pack.len() >= 128 {
        pack[48..80].copy_from_slice(&digest);
        let checksum = crc32fast::hash(&pack[..80]);
        pack[80..84].copy_from_slice(&checksum.to_le_bytes());
    }
    pack
}

/// Size of the largest image that `transforms` creates, in bytes.
const TRANSFORMED_BYTES: usize = 3 << 20;

/// Smallest number of a transform of the table in `transforms`. Smaller numbers stand for options that have no name in
/// text.
const NAMED_FROM: u32 = 150;

/// Draws transforms for an image and applies them: the output has the size of the plan, and failures are errors.
fn transforms(input: &[u8]) {
    use brigade_images::transforms::{
        AugMix, AutoAugment, AutoAugmentPolicy, CenterCrop, ColorJitter, Compose, Interpolation,
        NamedTransform, PadMode, Phase, RandAugment, RandomCrop, RandomHorizontalFlip,
        RandomResizedCrop, RandomVerticalFlip, Resize, TrivialAugmentWide,
    };
    use brigade_images::{Filter, Image, Size};

    let mut bytes = input.iter().copied();
    let mut next = || bytes.next().unwrap_or_default();
    let mut side = |long: bool| 1 + u32::from(next()) * if long { 37 } else { 1 };
    let (width, height) = (side(false), side(false));
    let seed = u64::from(side(false)) << 32 | u64::from(side(true));
    let mut compose = Compose::new();
    for _ in 0..(side(false) % 6) {
        let (kind, size) = (side(false), Size::new(side(false), side(false)));
        let filters =
            [Filter::Nearest, Filter::Box, Filter::Bilinear, Filter::Bicubic, Filter::Lanczos];
        let filter = filters[size.width as usize % filters.len()];
        let part = f64::from(size.height) / 256.0;
        if let Some(place) = kind.checked_sub(NAMED_FROM) {
            let all = NamedTransform::all();
            let named = &all[place as usize % all.len()];
            let area = format!("{}x{}", size.width, size.height);
            let (side, part) = (size.width.to_string(), part.to_string());
            let values = [Some(&*area), Some(&*side), Some(&*part), None];
            let added = values.iter().find_map(|value| named.add_to(compose.clone(), *value).ok());
            compose = added.expect("one of the values is of its kind");
            continue;
        }
        compose = match kind % 15 {
            0 => compose.then(Resize::shorter(size.width).filter(filter)),
            1 => compose.then(Resize::squish(size).filter(filter)),
            2 => compose.then(Resize::crop(size).filter(filter)),
            3 => compose.then(Resize::pad(size, PadMode::Reflect).filter(filter)),
            4 => compose.then(CenterCrop::new(size)),
            5 => compose.then(RandomCrop::new(size).padding(size.width / 8, PadMode::Symmetric)),
            6 => compose.then(RandomResizedCrop::new(size).scale(part, 1.0)),
            7 => compose.then(RandomResizedCrop::fastai(size)),
            8 => compose.then(RandomHorizontalFlip::new(part)).then(RandomVerticalFlip::new(part)),
            9 => compose.then(ColorJitter::new().brightness(part).contrast(part).hue(part / 2.0)),
            10 => compose.then(RandAugment::default()),
            11 => compose.then(TrivialAugmentWide::default()),
            12 => compose.then(AutoAugment::new(AutoAugmentPolicy::Svhn)),
            13 => compose.then(AugMix::default().alpha(part).severity(10)),
            _ => compose.then(RandAugment::default().interpolation(Interpolation::Bicubic)),
        };
    }
    let mut pixels: Vec<u8> = bytes.collect();
    pixels.resize(3 * width as usize * height as usize, 99);
    let image = Image::new(width, height, pixels).expect("as many bytes as the size says");
    for phase in [Phase::Train, Phase::Valid] {
        let Ok(plan) = compose.plan(image.size(), phase, seed) else { continue };
        let largest = plan.operations().iter().try_fold(image.size(), |size, next| {
            next.size_after(size).ok().filter(|size| 3 * size.pixels() <= TRANSFORMED_BYTES as u64)
        });
        if largest.is_none() {
            continue;
        }
        let made = plan.apply(&image).expect("the plan is one for this image");
        assert_eq!(made.size(), plan.output_size());
        let mask = plan.for_masks(255).apply(&image).expect("masks follow");
        assert_eq!(mask.size(), plan.output_size());
    }
}
