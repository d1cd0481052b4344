//! Images without encoding in one file.

use std::fs;
use std::os::unix::fs::FileExt;
use std::path::Path;

use brigade_data::{BatchContext, BatchedDataset, DataLoader};
use brigade_vision::labels::{Categories, Labelled};
use brigade_vision::source::ImageSource;
use brigade_vision::transforms::{Compose, RandomCrop, RandomHorizontalFlip, Resize};
use brigade_vision::{ImageDataset, OnBroken, PackedImages, Packer, Size};

use crate::pictures::{Pictures, picture};

fn classes() -> Vec<String> {
    (0..40).map(|number| format!("ünïcode \"{number}\"")).collect()
}

fn labelled(pictures: Pictures) -> Labelled<Pictures> {
    let labels = pictures.labels();
    Labelled::new(pictures, labels, Categories::ordered(classes()).unwrap()).unwrap()
}

fn packed(folder: &Path, packer: &Packer, images: &Labelled<Pictures>) -> Labelled<PackedImages> {
    let path = folder.join("pictures.pack");
    packer.write(images, &path).unwrap();
    PackedImages::labelled(path).unwrap()
}

#[test]
fn packed_images_train_as_the_files_do() {
    let folder = tempfile::tempdir().unwrap();
    let pictures = labelled(Pictures::new(21));
    let packer = Packer::new().transforms(Compose::new().then(Resize::shorter(28))).threads(3);
    let packed = packed(folder.path(), &packer, &pictures);
    assert_eq!(packed.len(), 21);
    assert_eq!(packed.categories().names(), classes());
    assert_eq!(packed.labels(), pictures.labels());
    let packed_images = packed.source();
    assert_eq!(packed_images.name(7), "picture-7.png");
    let shorter = |size: Size| size.width.min(size.height);
    assert_ne!(shorter(picture(3).size()), 28);
    assert_eq!(packed_images.size(3).map(shorter), Some(28));
    assert_eq!(packed_images.size(21), None);

    // For the packed images the resize changes nothing, but it is a place among the transforms.
    let transforms = Compose::new()
        .then(Resize::shorter(28))
        .then(RandomCrop::new(24))
        .then(RandomHorizontalFlip::default());
    let fast = ImageDataset::from(packed).transforms(transforms.clone());
    let slow = ImageDataset::from(pictures).transforms(transforms);
    let (fast, slow) = (DataLoader::new(fast).seed(5), DataLoader::new(slow).seed(5));
    let (fast, slow) = (fast.batch_size(6).threads(2), slow.batch_size(6));
    for (fast, slow) in (&fast).into_iter().zip(&slow) {
        assert_eq!(fast.unwrap().into_data(), slow.unwrap().into_data());
    }
}

#[test]
fn a_pack_is_the_same_with_any_number_of_threads() {
    let folder = tempfile::tempdir().unwrap();
    let pictures = labelled(Pictures::new(30).with_broken(&[4, 29]));
    let write = |threads, name: &str| {
        let path = folder.path().join(name);
        let packer = Packer::new().threads(threads).on_broken(OnBroken::Skip);
        let report = packer.write(&pictures, &path).unwrap();
        (report, fs::read(path).unwrap())
    };
    let (report, bytes) = write(1, "one.pack");
    assert_eq!((report.images, report.bytes), (28, bytes.len() as u64));
    let broken: Vec<usize> = report.broken.iter().map(|(index, _)| *index).collect();
    assert_eq!(broken, [4, 29]);
    assert_eq!(write(4, "four.pack"), (report, bytes));
    let packed = PackedImages::labelled(folder.path().join("four.pack")).unwrap();
    assert_eq!(packed.labels()[3..6], [3, 5, 6]);

    let path = folder.path().join("none.pack");
    let error = Packer::new().write(&pictures, &path).unwrap_err();
    assert!(error.to_string().contains("picture-4.png"), "{error}");
    let files: Vec<_> = fs::read_dir(folder.path()).unwrap().collect();
    assert_eq!(files.len(), 2, "{files:?}");
}

#[test]
fn damage_is_found() {
    let folder = tempfile::tempdir().unwrap();
    let pictures = labelled(Pictures::new(5));
    let whole = packed(folder.path(), &Packer::new(), &pictures);
    let path = folder.path().join("pictures.pack");
    let bytes = fs::read(&path).unwrap();
    let sizes: Vec<Size> = (0..5).filter_map(|index| whole.source().size(index)).collect();
    let pixels: u64 = sizes.iter().map(|size| 3 * size.pixels()).sum();

    // Each byte of the header, and some of table and names.
    let tail = (128 + pixels as usize..bytes.len()).step_by(7);
    for place in (0..84).chain(tail) {
        let mut damaged = bytes.clone();
        damaged[place] ^= 0x40;
        fs::write(&path, damaged).unwrap();
        assert!(PackedImages::open(&path).is_err(), "byte {place}");
    }
    for length in [0, 7, 127, 128, bytes.len() / 2, bytes.len() - 1] {
        fs::write(&path, &bytes[..length]).unwrap();
        let error = PackedImages::open(&path).unwrap_err().to_string();
        assert!(error.contains("pictures.pack"), "{error}");
    }
    fs::write(&path, &bytes).unwrap();
    let file = fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.write_all_at(&[bytes[128] ^ 1], 128).unwrap();
    let packed = PackedImages::open(&path).unwrap();
    let mut buffer = Vec::new();
    let error = packed.read(0, &mut buffer).unwrap_err().to_string();
    assert!(error.contains("picture-0.png") && error.contains("damaged"), "{error}");
    packed.read(1, &mut buffer).unwrap();
    assert!(packed.read(5, &mut buffer).is_err());

    // Truncated output of `read` is an error of the data set.
    struct Short(PackedImages);
    impl ImageSource for Short {
        fn len(&self) -> usize {
            self.0.len()
        }
        fn read(
            &self,
            index: usize,
            buffer: &mut Vec<u8>,
        ) -> Result<(), brigade_vision::ImageError> {
            self.0.read(index, buffer)?;
            buffer.pop();
            Ok(())
        }
        fn name(&self, index: usize) -> std::borrow::Cow<'_, str> {
            self.0.name(index)
        }
    }
    let short = ImageDataset::new(Short(packed), vec![0; 5]).unwrap();
    let error = short.batch(&[2], &BatchContext::default()).unwrap_err().to_string();
    assert!(error.contains("picture-2.png: an image of a pack"), "{error}");
}
