//! Images in a folder for each class.

use std::path::Path;

use crate::image_source::{FindFiles, ImageFiles, first_folder, to_path};
use crate::labels::{Categories, Labelled};
use crate::{ImageError, Result};

/// The images of a folder with a sub-folder for each class, like torchvision's `ImageFolder`: the folders directly
/// below the root are the classes, numbered by their names in the order of bytes, and the images of a class are those
/// below its folder, at any depth. Images directly in the root are left out.
///
/// [`Labelled::open`] opens one folder, [`Labelled::open_train_valid`] a pair for training and validation, and
/// [`ImageFolderOptions`] has more options.
///
/// ```
/// use brigade_images::source::ImageFolder;
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// # for name in ["dogs/1.jpg", "cats/2.jpg", "cats/deep/3.jpg"] {
/// #     std::fs::create_dir_all(folder.join(name).parent().unwrap())?;
/// #     std::fs::write(folder.join(name), [])?;
/// # }
/// let pets = ImageFolder::open(folder)?; // cats/2.jpg, cats/deep/3.jpg, dogs/1.jpg
/// assert_eq!(pets.categories().names(), ["cats", "dogs"]);
/// assert_eq!(pets.labels(), [0, 0, 1]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub type ImageFolder = Labelled<ImageFiles>;

impl Labelled<ImageFiles> {
    /// Opens a folder with a sub-folder for each class.
    ///
    /// # Errors
    /// Returns the same errors as [`ImageFolderOptions::open`].
    pub fn open(root: impl AsRef<Path>) -> Result<Self> {
        ImageFolderOptions::new().open(root)
    }

    /// Opens the folder `train` below `root`, and a folder for validation: the first that exists of `valid`, `val`,
    /// `validation` and `test`. Both have the classes of `train`.
    ///
    /// # Errors
    /// Returns the same errors as [`ImageFolderOptions::open_train_valid`].
    pub fn open_train_valid(root: impl AsRef<Path>) -> Result<(Self, Self)> {
        ImageFolderOptions::new().open_train_valid(root)
    }
}

/// Options of reading a folder of classes.
///
/// ```
/// use brigade_images::labels::Categories;
/// use brigade_images::source::ImageFolderOptions;
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// # for name in ["dogs/1.jpg", "cats/2.jpg"] {
/// #     std::fs::create_dir_all(folder.join(name).parent().unwrap())?;
/// #     std::fs::write(folder.join(name), [])?;
/// # }
/// let classes = Categories::ordered(["dogs", "cats"])?;
/// let pets = ImageFolderOptions::new().classes(classes).open(folder)?;
/// assert_eq!(pets.labels(), [1, 0]); // of cats/2.jpg and dogs/1.jpg
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default)]
pub struct ImageFolderOptions {
    find: FindFiles,
    classes: Option<Categories>,
    allow_empty: bool,
}

impl ImageFolderOptions {
    /// Creates options that find files like [`FindFiles::new`], and whose classes are the sub-folders.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Sets the rules by which files are recognized as images.
    #[must_use]
    pub fn files(mut self, find: FindFiles) -> Self {
        self.find = find;
        self
    }

    /// Sets the classes and their order, for weights that were trained with another order. A sub-folder that is not
    /// among them is an error. Defaults to the sorted names of the sub-folders.
    #[must_use]
    pub fn classes(mut self, classes: Categories) -> Self {
        self.classes = Some(classes);
        self
    }

    /// Sets whether sub-folders without images are classes: torchvision's `allow_empty`. If not, they are an error.
    /// Defaults to `false`.
    #[must_use]
    pub fn allow_empty(mut self, allow: bool) -> Self {
        self.allow_empty = allow;
        self
    }

    /// Opens a folder with a sub-folder for each class.
    ///
    /// # Errors
    /// Fails if a folder cannot be read, there are no class folders, one has no images, or one is not among the
    /// [`classes`](Self::classes) that were set.
    pub fn open(&self, root: impl AsRef<Path>) -> Result<ImageFolder> {
        let root = root.as_ref();
        let found = self.find.walk(root)?;
        let folders: Vec<_> =
            found.folders.iter().map(|name| String::from_utf8_lossy(name)).collect();
        if folders.is_empty() {
            return Err(ImageError::InvalidArgument(format!(
                "{} has no folders, expected one for each class with its images",
                root.display()
            )));
        }
        let categories = match &self.classes {
            Some(classes) => classes.clone(),
            None => Categories::sorted(&folders),
        };
        let mut counts = vec![0_usize; folders.len()];
        let (mut labels, mut paths) = (Vec::new(), Vec::new());
        for path in &found.files {
            let folder = first_folder(path).unwrap_or_default();
            // Images directly in the root have no class.
            let Ok(place) = found.folders.binary_search_by(|known| known.as_slice().cmp(folder))
            else {
                continue;
            };
            let (Some(count), Some(name)) = (counts.get_mut(place), folders.get(place)) else {
                continue;
            };
            *count += 1;
            labels.push(categories.label(name)?);
            paths.push(path);
        }
        let empty: Vec<&str> = folders
            .iter()
            .zip(&counts)
            .filter_map(|(name, count)| (*count == 0).then_some(name.as_ref()))
            .collect();
        if !self.allow_empty
            && let [first, rest @ ..] = empty.as_slice()
        {
            let more = match rest.len() {
                0 => String::new(),
                more => format!(" and {more} more"),
            };
            return Err(ImageError::InvalidArgument(format!(
                "the class folder {}{more} has no images: looked for files that end in {}; remove \
                 it, or allow empty classes",
                root.join(first).display(),
                self.find.endings()
            )));
        }
        let files = ImageFiles::new(root, paths.into_iter().map(|path| to_path(path)));
        Labelled::new(files, labels, categories)
    }

    /// Opens the folder `train` below `root`, and a folder for validation: the first that exists of `valid`, `val`,
    /// `validation` and `test`. Both have the classes of `train`; torchvision would number the classes of each folder
    /// separately, and wrongly if one lacks a class.
    ///
    /// # Errors
    /// Returns the same errors as [`open`](Self::open), and fails if there is no folder for validation, or it has a
    /// class that `train` does not have.
    pub fn open_train_valid(&self, root: impl AsRef<Path>) -> Result<(ImageFolder, ImageFolder)> {
        let root = root.as_ref();
        let train = self.open(root.join("train"))?;
        let Some(valid) =
            VALID_FOLDERS.iter().map(|name| root.join(name)).find(|folder| folder.is_dir())
        else {
            return Err(ImageError::InvalidArgument(format!(
                "{} has a folder train and none of {} to validate with; open train alone and split \
                 it at random",
                root.display(),
                VALID_FOLDERS.join(", ")
            )));
        };
        let valid = self.clone().classes(train.categories().clone()).open(valid)?;
        Ok((train, valid))
    }
}

/// Names of the folder for validation: fastai's, that of its datasets, Hugging Face's, and the one of datasets that are
/// split into two parts only.
const VALID_FOLDERS: [&str; 4] = ["valid", "val", "validation", "test"];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::image_source::ImageSource;
    use crate::image_source::folder;

    #[test]
    fn classes_are_the_folders_below_the_root() {
        let root = folder(&["dog/2.jpg", "dog/1.jpg", "cat/x/y/3.png", "beside.jpg", "cat/n.txt"]);
        let pets = ImageFolder::open(root.path()).unwrap();
        let names: Vec<_> = pets.source().relative_paths().collect();
        assert_eq!(names, ["cat/x/y/3.png", "dog/1.jpg", "dog/2.jpg"].map(Path::new));
        assert_eq!((pets.labels(), pets.categories().names().len()), (&[0, 1, 1][..], 2));
        assert_eq!(pets.class_counts(), [1, 2]);
        assert_eq!(pets.source().len(), 3);
    }

    #[test]
    fn classes_without_images_are_named() {
        let root = folder(&["dog/2.jpg", "cat/n.txt", "cow/"]);
        let error = ImageFolder::open(root.path()).unwrap_err().to_string();
        assert!(error.contains("/cat and 1 more has no images"), "{error}");
        let options = ImageFolderOptions::new().allow_empty(true);
        assert_eq!(options.open(root.path()).unwrap().class_counts(), [0, 0, 1]);

        let none = folder(&["1.jpg"]);
        let error = ImageFolder::open(none.path()).unwrap_err().to_string();
        assert!(error.contains("has no folders"), "{error}");
    }

    #[test]
    fn validation_has_the_classes_of_training() {
        let root = folder(&["train/a/1.jpg", "train/b/2.jpg", "val/b/3.jpg", "test/b/4.jpg"]);
        let (train, valid) = ImageFolder::open_train_valid(root.path()).unwrap();
        assert_eq!((train.labels(), valid.labels()), (&[0, 1][..], &[1][..]));
        assert!(valid.source().path(0).unwrap().ends_with("val/b/3.jpg"));

        let unknown = folder(&["train/a/1.jpg", "valid/z/3.jpg"]);
        let error = ImageFolder::open_train_valid(unknown.path()).unwrap_err().to_string();
        assert_eq!(error, "the label \"z\" is not among the 1 class: a");
        let alone = folder(&["train/a/1.jpg"]);
        let error = ImageFolder::open_train_valid(alone.path()).unwrap_err().to_string();
        assert!(error.contains("none of valid, val, validation, test"), "{error}");
    }
}
