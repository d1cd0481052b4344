//! Encoded images in Parquet tables.

mod spool;
mod table;

use std::borrow::Cow;
use std::path::{Path, PathBuf};

use self::spool::Spool;
use self::table::{LabelColumn, Table};
use super::paths;
use super::webdataset::WebDataset;
use crate::image_source::{Fingerprint, ImageSource, no_image};
use crate::labels::{Categories, Labelled};
use crate::{ImageError, Result};

/// The images of Parquet files in the layout of the Hugging Face hub's datasets: a column of structs `{bytes, path}`
/// with the encoded image, and one of class numbers, whose names are in the files' metadata.
///
/// Rows of such a table cannot be read one by one: the hub's files have groups of 100 or more images, compressed page
/// by page, so that a shuffled epoch would decompress each image a hundred times. The images are therefore copied once,
/// still encoded, into one file of a folder that the caller sets (the spool folder), and read from it. The copy takes
/// as much disk space as the images, plus 1 KB for each, and one reading of the tables; while it is made, some pages of
/// a table are in memory (a few megabytes). It is identified by the names, sizes and ends of the tables. The ranks of a
/// host share it: one of them makes it while the others wait. Later runs use it again. A copy that is no longer needed
/// has to be deleted by hand; processes that have it open can still read it then.
///
/// ```no_run
/// use brigade_images::source::ParquetImages;
///
/// let pattern = "food101/data/train-{00000..00007}-of-00008.parquet";
/// let food = ParquetImages::open(pattern, "/scratch/images")?;
/// println!("{} images of {:?}", food.len(), food.categories());
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Debug)]
pub struct ParquetImages {
    images: WebDataset,
    files: Vec<PathBuf>,
    /// Index of the first row of each file.
    first_rows: Vec<usize>,
}

impl ParquetImages {
    /// Opens tables with the columns `image` and `label`, by the rules of [`ParquetOptions`].
    ///
    /// `pattern` is the path of a file, of several files with braces as in
    /// [`WebDataset::open`](super::WebDataset::open), or of a folder, for all files in it whose names end in
    /// `.parquet`. `spool` is the folder for the copy of the images.
    ///
    /// # Errors
    /// Returns the same errors as [`ParquetOptions::open`].
    pub fn open(pattern: impl AsRef<str>, spool: impl AsRef<Path>) -> Result<Labelled<Self>> {
        ParquetOptions::new().open(pattern, spool)
    }

    /// Returns the file of an image and its row in that file.
    #[must_use]
    pub fn row(&self, index: usize) -> Option<(&Path, usize)> {
        let file = self.first_rows.partition_point(|first| *first <= index).checked_sub(1)?;
        Some((self.files.get(file)?, index.checked_sub(*self.first_rows.get(file)?)?))
    }
}

impl ImageSource for ParquetImages {
    fn len(&self) -> usize {
        self.images.len()
    }

    fn read(&self, index: usize, buffer: &mut Vec<u8>) -> Result<()> {
        if index >= self.len() {
            return Err(no_image(index, self.len()));
        }
        self.images.read(index, buffer)
    }

    fn name(&self, index: usize) -> Cow<'_, str> {
        match self.row(index) {
            Some((file, row)) => format!("row {row} of {}", file.display()).into(),
            None => "".into(),
        }
    }

    fn version(&self, index: usize) -> u64 {
        self.images.version(index)
    }

    fn fingerprint(&self) -> Result<Fingerprint> {
        self.images.fingerprint()
    }
}

/// Options to read Parquet files: the columns of images and labels.
///
/// ```no_run
/// use brigade_images::source::ParquetOptions;
///
/// let options = ParquetOptions::new().image("img").label("fine_label");
/// let images = options.open("cifar100/train", "/scratch/images")?;
/// # Ok::<(), brigade_images::ImageError>(())
/// ```
#[derive(Clone, Debug)]
pub struct ParquetOptions {
    image: String,
    label: String,
}

impl Default for ParquetOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl ParquetOptions {
    /// Creates options that read the columns `image` and `label`.
    #[must_use]
    pub fn new() -> Self {
        Self { image: "image".to_owned(), label: "label".to_owned() }
    }

    /// Sets the column of the images: structs with a field `bytes`, or the bytes themselves. Defaults to `image`.
    #[must_use]
    pub fn image(mut self, column: impl Into<String>) -> Self {
        self.image = column.into();
        self
    }

    /// Sets the column of the labels: class numbers, or names. Defaults to `label`.
    #[must_use]
    pub fn label(mut self, column: impl Into<String>) -> Self {
        self.label = column.into();
        self
    }

    /// Opens tables with their labels; see [`ParquetImages::open`]. The classes are those of the files' metadata; if
    /// these contain no names, the distinct labels: names sorted, or numbers.
    ///
    /// # Errors
    /// Returns the same errors as [`images`](Self::images), and fails if a row has no label, or a label is not a class.
    pub fn open(
        &self,
        pattern: impl AsRef<str>,
        spool: impl AsRef<Path>,
    ) -> Result<Labelled<ParquetImages>> {
        let tables = self.tables(pattern.as_ref())?;
        let (categories, labels) = self.labels(&tables)?;
        Labelled::new(self.spool(&tables, spool.as_ref())?, labels, categories)
    }

    /// Opens tables without labels; see [`ParquetImages::open`].
    ///
    /// # Errors
    /// Fails if a file cannot be read or is damaged, the column does not exist, a row has no bytes, or the copy cannot
    /// be written.
    pub fn images(
        &self,
        pattern: impl AsRef<str>,
        spool: impl AsRef<Path>,
    ) -> Result<ParquetImages> {
        self.spool(&self.tables(pattern.as_ref())?, spool.as_ref())
    }

    fn tables(&self, pattern: &str) -> Result<Vec<Table>> {
        let tables: Vec<Table> = paths::of_pattern(pattern, &[".parquet"])?
            .into_iter()
            .map(Table::open)
            .collect::<Result<_>>()?;
        if tables.is_empty() {
            return Err(ImageError::InvalidArgument(format!("{pattern} has no files .parquet")));
        }
        Ok(tables)
    }

    fn spool(&self, tables: &[Table], folder: &Path) -> Result<ParquetImages> {
        let images = Spool { tables, column: &self.image, folder }.open()?;
        let (mut files, mut first_rows, mut rows) = (Vec::new(), Vec::new(), 0);
        for table in tables {
            files.push(table.path().to_owned());
            first_rows.push(rows);
            rows += table.rows();
        }
        Ok(ParquetImages { images, files, first_rows })
    }

    fn labels(&self, tables: &[Table]) -> Result<(Categories, Vec<i64>)> {
        let mut classes: Option<Vec<String>> = None;
        let mut all = LabelColumn::default();
        for table in tables {
            let found = table.class_names(&self.label)?;
            let found = found.as_ref();
            match (&classes, found) {
                (Some(classes), Some(found)) if classes != found => {
                    return Err(ImageError::Format {
                        path: table.path().into(),
                        detail: format!(
                            "its column {} has other classes than {}",
                            self.label,
                            tables.first().map_or_else(|| Path::new(""), Table::path).display()
                        ),
                    });
                }
                (None, Some(found)) => classes = Some(found.clone()),
                _ => {}
            }
            table.labels(&self.label, &mut all)?;
        }
        match (classes, all) {
            (Some(classes), LabelColumn::Numbers(numbers)) => {
                Ok((Categories::ordered(classes)?, numbers))
            }
            (None, LabelColumn::Numbers(numbers)) => {
                let largest = numbers.iter().max().copied().unwrap_or_default();
                let count = usize::try_from(largest).unwrap_or_default().saturating_add(1);
                Ok((Categories::numbered(count)?, numbers))
            }
            (classes, LabelColumn::Names(names)) => {
                let categories = match classes {
                    Some(classes) => Categories::ordered(classes)?,
                    None => Categories::sorted(&names),
                };
                let labels = names.iter().map(|name| categories.label(name));
                let labels = labels.collect::<Result<_>>()?;
                Ok((categories, labels))
            }
        }
    }
}

#[cfg(test)]
mod tests;
