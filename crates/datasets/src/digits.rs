//! The dataset of handwritten digits that is embedded in the program.

use std::path::Path;

use brigade_torch::Result;

use crate::{IdxFile, LabelledImages};

/// A dataset of 1,797 handwritten digits of 8x8 pixels, embedded in the program: 1,438 to train and 359 to test.
///
/// E. Alpaydin and C. Kaynak, "Optical Recognition of Handwritten Digits", UCI Machine Learning
/// Repository (1998), doi 10.24432/C50P49, under CC BY 4.0.
///
/// ```
/// use brigade_datasets::Digits;
///
/// let train = Digits::train()?.resize(28, 28)?;
/// assert_eq!((train.len(), train.height(), train.classes()), (1438, 28, 10));
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Clone, Copy, Debug)]
pub struct Digits;

impl Digits {
    /// Returns the 1,438 images of the train part, 8x8 pixels each.
    ///
    /// # Errors
    /// Fails only if the program itself is damaged.
    pub fn train() -> Result<LabelledImages> {
        open(
            include_bytes!("../assets/digits/train-images-idx3-ubyte.gz"),
            include_bytes!("../assets/digits/train-labels-idx1-ubyte.gz"),
        )
    }

    /// Returns the 359 images of the test part, 8x8 pixels each.
    ///
    /// # Errors
    /// Fails only if the program itself is damaged.
    pub fn test() -> Result<LabelledImages> {
        open(
            include_bytes!("../assets/digits/t10k-images-idx3-ubyte.gz"),
            include_bytes!("../assets/digits/t10k-labels-idx1-ubyte.gz"),
        )
    }
}

fn open(images: &[u8], labels: &[u8]) -> Result<LabelledImages> {
    let (images_name, labels_name) = (Path::new("embedded images"), Path::new("embedded labels"));
    let images = IdxFile::read(images, images_name, 3)?;
    let labels = IdxFile::read(labels, labels_name, 1)?;
    LabelledImages::from_idx(images, images_name, labels, labels_name)?
        .with_classes(10, labels_name)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_parts_are_whole() {
        let (train, test) = (Digits::train().unwrap(), Digits::test().unwrap());
        assert_eq!((train.len(), test.len()), (1438, 359));
        assert_eq!((train.height(), train.width(), train.classes()), (8, 8, 10));
        // The first sample of the original set: a zero, with empty corners and values up to 255.
        let (pixels, label) = test.sample(0).unwrap();
        assert!(label < 10 && pixels.iter().any(|pixel| *pixel > 200));
        assert_eq!(train.sample(0).unwrap().0[..8], [0, 0, 0x50, 0xcf, 0x8f, 0x10, 0, 0]);
    }
}
