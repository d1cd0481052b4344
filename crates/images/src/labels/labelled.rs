//! A source of images with their labels.

use std::borrow::Cow;
use std::path::Path;
use std::sync::Arc;

use brigade_rank_env::text::counted;

use super::{Categories, LabelTable, Labeller, Split};
use crate::image_source::{Fingerprint, Hasher, ImageFiles, ImageSource};
use crate::{ImageError, Result};

/// Images with a label each, and the classes, whose numbers the labels are.
///
/// ```
/// use brigade_images::labels::{Categories, Labelled};
/// use brigade_images::source::ImageFiles;
///
/// let files = ImageFiles::new("photos", ["1.jpg", "2.jpg", "3.jpg"]);
/// let photos = Labelled::new(files, vec![0, 1, 1], Categories::sorted(["cat", "dog"]))?;
/// assert_eq!(photos.class_counts(), [1, 2]);
/// assert_eq!(photos.subset(vec![2, 0])?.labels(), [1, 0]);
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Labelled<S> {
    source: S,
    labels: Vec<i64>,
    categories: Categories,
}

impl<S: ImageSource> Labelled<S> {
    /// Joins a source and the label of each of its images.
    ///
    /// # Errors
    /// Fails if the numbers of labels and images differ, or a label is not the number of a class.
    pub fn new(source: S, labels: Vec<i64>, categories: Categories) -> Result<Self> {
        if source.len() != labels.len() {
            return Err(ImageError::InvalidArgument(format!(
                "labels and images differ in number: {} for {}",
                counted(labels.len(), "label"),
                counted(source.len(), "image")
            )));
        }
        let wrong = labels.iter().position(|label| categories.name(*label).is_none());
        if let Some((index, label)) = wrong.and_then(|index| Some((index, labels.get(index)?))) {
            return Err(ImageError::InvalidArgument(format!(
                "{} has the label {label}, expected 0 to {}",
                source.name(index),
                categories.len().saturating_sub(1)
            )));
        }
        Ok(Self { source, labels, categories })
    }

    /// Finds the label of each image in its name. The classes are the distinct labels, sorted.
    ///
    /// # Errors
    /// Fails if no label is found in the name of an image.
    pub fn of(source: S, labeller: &Labeller) -> Result<Self> {
        let names = label_names(&source, labeller)?;
        let categories = Categories::sorted(&names);
        Self::with_names(source, &names, categories)
    }

    /// Finds the label of each image in its name, among the given classes.
    ///
    /// # Errors
    /// Fails if no label is found in the name of an image, or the label is not a class.
    pub fn of_classes(source: S, labeller: &Labeller, categories: Categories) -> Result<Self> {
        let names = label_names(&source, labeller)?;
        Self::with_names(source, &names, categories)
    }

    fn with_names(source: S, names: &[String], categories: Categories) -> Result<Self> {
        let labels = names.iter().map(|name| categories.label(name)).collect::<Result<_>>()?;
        Self::new(source, labels, categories)
    }

    /// Selects the images with these indices, in their order. An index may occur twice.
    ///
    /// # Errors
    /// Fails if an index is not below the number of images.
    pub fn subset(self, indices: Vec<usize>) -> Result<LabelledSubset<S>> {
        let Self { source, labels, categories } = self;
        part(&Arc::new(source), &labels, &categories, indices)
    }

    /// Splits the images into those for training and those for validation. Both keep all classes.
    ///
    /// # Errors
    /// Fails if an index of the split is not below the number of images.
    pub fn split(self, split: Split) -> Result<(LabelledSubset<S>, LabelledSubset<S>)> {
        let Self { source, labels, categories } = self;
        let source = Arc::new(source);
        Ok((
            part(&source, &labels, &categories, split.train)?,
            part(&source, &labels, &categories, split.valid)?,
        ))
    }

    /// Returns a hash of the images, their labels and the names of the classes.
    ///
    /// # Errors
    /// Returns the same errors as [`ImageSource::fingerprint`].
    pub fn fingerprint(&self) -> Result<Fingerprint> {
        let mut hasher = Hasher::new("labelled");
        hasher.bytes(self.source.fingerprint()?.as_bytes());
        self.labels.iter().for_each(|label| hasher.number(label.cast_unsigned()));
        self.categories.names().iter().for_each(|name| hasher.bytes(name.as_bytes()));
        Ok(hasher.finish())
    }
}

impl LabelTable {
    /// Returns the images of the table, relative to `root`, in its order. The classes are the distinct labels, sorted.
    ///
    /// # Errors
    /// Fails if the table has no rows.
    pub fn open(&self, root: impl AsRef<Path>) -> Result<Labelled<ImageFiles>> {
        self.open_classes(root, Categories::sorted(self.rows().map(|(_, label)| label)))
    }

    /// Returns the images of the table, relative to `root`, in its order, with the given classes.
    ///
    /// # Errors
    /// Fails if the table has no rows, or a label is not a class.
    pub fn open_classes(
        &self,
        root: impl AsRef<Path>,
        categories: Categories,
    ) -> Result<Labelled<ImageFiles>> {
        if self.is_empty() {
            return Err(ImageError::InvalidArgument("a table without rows has no images".into()));
        }
        let files = ImageFiles::new(root.as_ref(), self.rows().map(|(name, _)| name));
        let labels =
            self.rows().map(|(_, label)| categories.label(label)).collect::<Result<_>>()?;
        Labelled::new(files, labels, categories)
    }
}

impl<S> Labelled<S> {
    /// Returns the number of images.
    #[must_use]
    pub fn len(&self) -> usize {
        self.labels.len()
    }

    /// Returns `true` if there are no images.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.labels.is_empty()
    }

    /// Returns the source.
    #[must_use]
    pub fn source(&self) -> &S {
        &self.source
    }

    /// Returns the label of each image: the number of its class in [`categories`](Self::categories).
    #[must_use]
    pub fn labels(&self) -> &[i64] {
        &self.labels
    }

    /// Returns the classes.
    #[must_use]
    pub fn categories(&self) -> &Categories {
        &self.categories
    }

    /// Returns the number of images of each class.
    #[must_use]
    pub fn class_counts(&self) -> Vec<usize> {
        let mut counts = vec![0; self.categories.len()];
        for label in &self.labels {
            let count = usize::try_from(*label).ok().and_then(|label| counts.get_mut(label));
            if let Some(count) = count {
                *count += 1;
            }
        }
        counts
    }

    /// Returns the source, the labels and the classes.
    #[must_use]
    pub fn into_parts(self) -> (S, Vec<i64>, Categories) {
        (self.source, self.labels, self.categories)
    }
}

fn label_names<S: ImageSource>(source: &S, labeller: &Labeller) -> Result<Vec<String>> {
    (0..source.len()).map(|index| labeller.label(Path::new(source.name(index).as_ref()))).collect()
}

fn part<S: ImageSource>(
    source: &Arc<S>,
    labels: &[i64],
    categories: &Categories,
    indices: Vec<usize>,
) -> Result<LabelledSubset<S>> {
    let source = Subset::new(Arc::clone(source), indices)?;
    let labels = source.indices.iter().filter_map(|index| labels.get(*index).copied()).collect();
    Labelled::new(source, labels, categories.clone())
}

/// Some images of a source, with their labels.
pub type LabelledSubset<S> = Labelled<Subset<S>>;

/// Some images of a source, which can be shared by several subsets.
///
/// ```
/// use std::sync::Arc;
///
/// use brigade_images::labels::Subset;
/// use brigade_images::source::{ImageFiles, ImageSource};
///
/// let files = Arc::new(ImageFiles::new("photos", ["1.jpg", "2.jpg", "3.jpg"]));
/// let last = Subset::new(files, vec![2])?;
/// assert_eq!((last.len(), last.name(0).as_ref()), (1, "photos/3.jpg"));
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Debug)]
pub struct Subset<S> {
    source: Arc<S>,
    indices: Vec<usize>,
}

impl<S: ImageSource> Subset<S> {
    /// Selects the images with these indices, in their order.
    ///
    /// # Errors
    /// Fails if an index is not below the number of images.
    pub fn new(source: Arc<S>, indices: Vec<usize>) -> Result<Self> {
        let len = source.len();
        if let Some(index) = indices.iter().find(|index| **index >= len) {
            return Err(ImageError::InvalidArgument(format!(
                "image {index} is part of a subset of {}, expected 0 to {}",
                counted(len, "image"),
                len.saturating_sub(1)
            )));
        }
        Ok(Self { source, indices })
    }

    /// Returns the indices in the source.
    #[must_use]
    pub fn indices(&self) -> &[usize] {
        &self.indices
    }

    /// Returns the whole source.
    #[must_use]
    pub fn whole(&self) -> &Arc<S> {
        &self.source
    }

    /// Returns the index in the source. For an invalid index, it is one that the source does not have either.
    fn whole_index(&self, index: usize) -> usize {
        self.indices.get(index).copied().unwrap_or(usize::MAX)
    }
}

impl<S: ImageSource> ImageSource for Subset<S> {
    fn len(&self) -> usize {
        self.indices.len()
    }

    fn read(&self, index: usize, buffer: &mut Vec<u8>) -> Result<()> {
        self.source.read(self.whole_index(index), buffer)
    }

    fn name(&self, index: usize) -> Cow<'_, str> {
        self.source.name(self.whole_index(index))
    }

    fn version(&self, index: usize) -> u64 {
        self.source.version(self.whole_index(index))
    }

    fn fingerprint(&self) -> Result<Fingerprint> {
        let mut hasher = Hasher::new("subset");
        hasher.bytes(self.source.fingerprint()?.as_bytes());
        self.indices.iter().for_each(|index| hasher.number(*index as u64));
        Ok(hasher.finish())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image_source::ImageFiles;

    fn files() -> ImageFiles {
        ImageFiles::new("r", ["dog/1.jpg", "cat/2.jpg", "dog/3.jpg"])
    }

    #[test]
    fn labels_are_found_in_names() {
        let pets = Labelled::of(files(), &Labeller::parent()).unwrap();
        assert_eq!((pets.labels(), pets.class_counts()), (&[1, 0, 1][..], vec![1, 2]));
        let own = Categories::ordered(["dog", "cow", "cat"]).unwrap();
        let pets = Labelled::of_classes(files(), &Labeller::parent(), own).unwrap();
        assert_eq!((pets.labels(), pets.class_counts()), (&[0, 2, 0][..], vec![2, 0, 1]));
        let error = Labelled::of_classes(files(), &Labeller::parent(), Categories::sorted(["dog"]));
        assert!(matches!(error, Err(ImageError::UnknownLabel { label, .. }) if label == "cat"));
    }

    #[test]
    fn labels_that_do_not_fit_are_refused() {
        let classes = Categories::sorted(["a", "b"]);
        let error = Labelled::new(files(), vec![0], classes.clone()).unwrap_err().to_string();
        assert_eq!(error, "labels and images differ in number: 1 label for 3 images");
        for label in [2, -1] {
            let error = Labelled::new(files(), vec![0, label, 0], classes.clone()).unwrap_err();
            let expected = format!("r/cat/2.jpg has the label {label}, expected 0 to 1");
            assert_eq!(error.to_string(), expected);
        }
    }

    #[test]
    fn parts_share_the_source_and_keep_their_labels() {
        let pets = Labelled::of(files(), &Labeller::parent()).unwrap();
        let whole = pets.fingerprint().unwrap();
        let split = Split { train: vec![2, 0], valid: vec![1] };
        let (train, valid) = pets.clone().split(split).unwrap();
        assert_eq!((train.labels(), valid.labels()), (&[1, 1][..], &[0][..]));
        assert_eq!(train.source().name(0), "r/dog/3.jpg");
        assert_eq!(valid.categories().len(), 2);
        assert!(Arc::ptr_eq(train.source().whole(), valid.source().whole()));
        assert_ne!(train.fingerprint().unwrap(), whole);
        assert_eq!(pets.fingerprint().unwrap(), whole);

        assert!(train.source().read(2, &mut Vec::new()).is_err());
        let error = pets.subset(vec![0, 3]).unwrap_err().to_string();
        assert_eq!(error, "image 3 is part of a subset of 3 images, expected 0 to 2");
    }
}
