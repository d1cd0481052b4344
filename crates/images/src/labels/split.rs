//! Splits of images into those for training and those for validation.

use std::collections::{BTreeSet, HashMap};
use std::fs;
use std::path::Path;

use brigade_rank_env::text::counted;
use brigade_sampling::{Sampler, Shuffle};

use super::ends;
use crate::image_source::ImageSource;
use crate::{ImageError, Result};

/// The indices of the images for training and of those for validation. The functions here return both in ascending
/// order.
///
/// ```
/// use brigade_images::labels::Split;
/// use brigade_images::source::ImageFiles;
///
/// let split = Split::random(10, 0.2, 42)?;
/// assert_eq!((split.train.len(), split.valid.len()), (8, 2));
/// assert_eq!(split, Split::random(10, 0.2, 42)?);
///
/// let files = ImageFiles::new("data", ["train/a/1.jpg", "train/b/2.jpg", "val/a/3.jpg"]);
/// let split = Split::by_folder(&files, &["train"], &["valid", "val"])?;
/// assert_eq!((split.train, split.valid), (vec![0, 1], vec![2]));
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Split {
    /// Indices of the images for training.
    pub train: Vec<usize>,
    /// Indices of the images for validation.
    pub valid: Vec<usize>,
}

impl Split {
    /// Chooses a share of `len` images at random for validation, like fastai's `RandomSplitter`: the first
    /// `floor(share * len)` of a permutation.
    ///
    /// The permutation is the first one of [`brigade_sampling::Shuffle`] for the seed, which is not that of
    /// `torch.randperm`. It depends on `len` and `seed` alone, so that all ranks make the same split without
    /// communication.
    ///
    /// # Errors
    /// Fails if `share` is not at least 0 and below 1.
    pub fn random(len: usize, share: f64, seed: u64) -> Result<Self> {
        if !(0.0..1.0).contains(&share) {
            return Err(ImageError::InvalidArgument(format!(
                "a share of {share} of the images cannot be split off, expected at least 0 and \
                 below 1"
            )));
        }
        let mut order = Shuffle::new(len, seed).order(0);
        let mut train = order.split_off((share * len as f64) as usize);
        order.sort_unstable();
        train.sort_unstable();
        Ok(Self { train, valid: order })
    }

    /// Takes the images of these indices for validation and the rest for training: fastai's `IndexSplitter`.
    ///
    /// # Errors
    /// Fails if an index is not below `len`.
    pub fn by_indices(len: usize, valid: impl IntoIterator<Item = usize>) -> Result<Self> {
        let mut is_valid = vec![false; len];
        for index in valid {
            let Some(slot) = is_valid.get_mut(index) else {
                return Err(ImageError::InvalidArgument(format!(
                    "image {index} cannot be split off from {}",
                    counted(len, "image")
                )));
            };
            *slot = true;
        }
        Ok(Self::partition(&is_valid))
    }

    /// Takes the images for whose name the function returns `true` for validation, and the rest for training: fastai's
    /// `FuncSplitter`.
    pub fn by_function<S: ImageSource>(
        source: &S,
        mut is_valid: impl FnMut(&Path) -> bool,
    ) -> Self {
        let is_valid: Vec<bool> = (0..source.len())
            .map(|index| is_valid(Path::new(source.name(index).as_ref())))
            .collect();
        Self::partition(&is_valid)
    }

    /// Splits by the name of the parent folder of an image's folder, like fastai's `GrandparentSplitter`:
    /// `valid/cats/1.jpg` is an image for validation. Images below other folders are in neither part.
    ///
    /// # Errors
    /// Fails if one of the parts has no images.
    pub fn by_folder<S: ImageSource>(source: &S, train: &[&str], valid: &[&str]) -> Result<Self> {
        let mut split = Self::default();
        for index in 0..source.len() {
            let name = source.name(index);
            let folder = Path::new(name.as_ref()).parent().and_then(Path::parent);
            let Some(folder) = folder.and_then(Path::file_name) else { continue };
            if train.iter().any(|name| folder == *name) {
                split.train.push(index);
            } else if valid.iter().any(|name| folder == *name) {
                split.valid.push(index);
            }
        }
        for (part, names) in [(&split.train, train), (&split.valid, valid)] {
            if part.is_empty() {
                return Err(ImageError::InvalidArgument(format!(
                    "none of the {} is in a folder of a folder named {}",
                    counted(source.len(), "image"),
                    names.join(" or ")
                )));
            }
        }
        Ok(split)
    }

    /// Takes the images that a text file lists, one per line, for validation, and the rest for training. A line is a
    /// suffix of a path: a file name, as in fastai's `FileSplitter`, or a file name with the folders before it. Empty
    /// lines are ignored.
    ///
    /// # Errors
    /// Fails if the file cannot be read as text, or has a line that matches no image, which fastai ignores.
    pub fn by_list<S: ImageSource>(source: &S, list: impl AsRef<Path>) -> Result<Self> {
        let path = list.as_ref();
        let text = fs::read_to_string(path)
            .map_err(|cause| ImageError::Read { path: path.into(), cause })?;
        let mut listed: HashMap<&str, bool> = HashMap::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            listed.insert(line, false);
        }
        let mut is_valid = Vec::with_capacity(source.len());
        for index in 0..source.len() {
            let mut found = false;
            for end in ends(&source.name(index)) {
                if let Some(met) = listed.get_mut(end) {
                    (*met, found) = (true, true);
                }
            }
            is_valid.push(found);
        }
        let unmet: BTreeSet<&str> =
            listed.iter().filter(|(_, met)| !**met).map(|(line, _)| *line).collect();
        if let Some(first) = unmet.first() {
            return Err(ImageError::InvalidArgument(format!(
                "{} lists {} not among the {}, as {first}; lines are the ends \
                 of paths, with the extension",
                path.display(),
                counted(unmet.len(), "name"),
                counted(source.len(), "image")
            )));
        }
        Ok(Self::partition(&is_valid))
    }

    pub(super) fn partition(is_valid: &[bool]) -> Self {
        let (valid, train) = (0..is_valid.len())
            .partition(|index| is_valid.get(*index).copied().unwrap_or_default());
        Self { train, valid }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image_source::ImageFiles;

    #[test]
    fn random_splits_are_a_permutation_by_seed() {
        let split = Split::random(1000, 0.2, 7).unwrap();
        assert_eq!((split.train.len(), split.valid.len()), (800, 200));
        let mut all = [split.train.clone(), split.valid.clone()].concat();
        all.sort_unstable();
        assert_eq!(all, (0..1000).collect::<Vec<_>>());
        assert!(split.valid.is_sorted() && split.train.is_sorted());
        assert_ne!(split.valid, Split::random(1000, 0.2, 8).unwrap().valid);
        // A smaller share is a subset of a larger one.
        let more = Split::random(1000, 0.5, 7).unwrap();
        assert!(split.valid.iter().all(|index| more.valid.contains(index)));
        assert_eq!(Split::random(4, 0.26, 0).unwrap().valid.len(), 1);
        assert_eq!(Split::random(0, 0.5, 0).unwrap(), Split::default());
        for share in [-0.1, 1.0, f64::NAN] {
            assert!(Split::random(10, share, 0).is_err(), "{share}");
        }
    }

    #[test]
    fn the_split_of_a_seed_does_not_change() {
        assert_eq!(Split::random(12, 0.25, 42).unwrap().valid, [4, 8, 9]);
    }

    #[test]
    fn indices_and_functions_say_what_to_validate_with() {
        let split = Split::by_indices(4, [3, 1, 3]).unwrap();
        assert_eq!((split.train, split.valid), (vec![0, 2], vec![1, 3]));
        let error = Split::by_indices(4, [4]).unwrap_err().to_string();
        assert_eq!(error, "image 4 cannot be split off from 4 images");
        let files = ImageFiles::new("", ["a.jpg", "b.png"]);
        let split = Split::by_function(&files, |path| path.extension().unwrap() == "png");
        assert_eq!((split.train, split.valid), (vec![0], vec![1]));
    }

    #[test]
    fn grandparents_say_what_to_validate_with() {
        let files =
            ImageFiles::new("r", ["train/a/1.jpg", "test/a/2.jpg", "x/3.jpg", "val/b/4.jpg"]);
        let split = Split::by_folder(&files, &["train"], &["val"]).unwrap();
        assert_eq!((split.train, split.valid), (vec![0], vec![3]));
        let error = Split::by_folder(&files, &["train"], &["valid", "dev"]).unwrap_err();
        assert_eq!(
            error.to_string(),
            "none of the 4 images is in a folder of a folder named valid or dev"
        );
    }

    #[test]
    fn lists_say_what_to_validate_with() {
        let files = ImageFiles::new("r", ["a/1.jpg", "a/2.jpg", "b/2.jpg", "b/3.jpg"]);
        let folder = tempfile::tempdir().unwrap();
        let list = folder.path().join("valid.txt");
        let split = |text: &str| {
            fs::write(&list, text).unwrap();
            Split::by_list(&files, &list).map(|split| split.valid)
        };
        assert_eq!(split("2.jpg\r\n\n").unwrap(), [1, 2]);
        assert_eq!(split("b/2.jpg\n1.jpg").unwrap(), [0, 2]);
        let error = split("1.jpg\n9.jpg\n8.jpg").unwrap_err().to_string();
        assert!(error.contains("lists 2 names not among the 4 images, as 8.jpg"), "{error}");
        fs::write(&list, b"\xff").unwrap();
        assert!(matches!(Split::by_list(&files, &list), Err(ImageError::Read { .. })));
    }
}
