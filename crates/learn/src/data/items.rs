//! Items: the files that samples are made of, and where they are found.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use brigade_rank_env::text::counted;
use brigade_torch::{Error, Result};
use brigade_vision::VisionError;
use brigade_vision::source::{FindFiles, ImageFiles};

use crate::error::LearnError;

/// The items of a data set: files below a folder, each with the cells of its row where they come from a table.
///
/// ```
/// use brigade_learn::data::Items;
///
/// let items = Items::new("photos", ["cat/1.jpg", "dog/2.jpg"]);
/// assert_eq!((items.len(), items.name(1)), (2, "photos/dog/2.jpg".to_owned()));
/// ```
#[derive(Clone, Debug)]
pub struct Items {
    root: PathBuf,
    paths: Vec<PathBuf>,
    /// Index of each item among all items that were found.
    numbers: Vec<usize>,
    table: Option<Table>,
}

#[derive(Clone, Debug)]
struct Table {
    file: PathBuf,
    /// Names of the columns. Empty if the file has no header.
    header: Arc<[String]>,
    rows: Vec<Arc<[String]>>,
}

impl Items {
    /// Makes the items from paths of files below `root`, in their order. Paths that begin with `/` are absolute.
    #[must_use]
    pub fn new<P: Into<PathBuf>>(
        root: impl Into<PathBuf>,
        paths: impl IntoIterator<Item = P>,
    ) -> Self {
        let paths: Vec<PathBuf> = paths.into_iter().map(Into::into).collect();
        Self { root: root.into(), numbers: (0..paths.len()).collect(), paths, table: None }
    }

    /// Returns the number of items.
    #[must_use]
    pub fn len(&self) -> usize {
        self.paths.len()
    }

    /// Returns `true` if there are no items.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.paths.is_empty()
    }

    /// Returns the folder that paths are relative to.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the path of an item relative to the root. Empty for an index that does not exist.
    #[must_use]
    pub fn relative_path(&self, index: usize) -> &Path {
        self.paths.get(index).map_or_else(|| Path::new(""), PathBuf::as_path)
    }

    /// Returns the path of an item.
    #[must_use]
    pub fn path(&self, index: usize) -> PathBuf {
        self.root.join(self.relative_path(index))
    }

    /// Returns the name of an item for messages: its path.
    #[must_use]
    pub fn name(&self, index: usize) -> String {
        self.path(index).display().to_string()
    }

    /// Returns the index of an item among all items that the getter found.
    #[must_use]
    pub fn number(&self, index: usize) -> usize {
        self.numbers.get(index).copied().unwrap_or(index)
    }

    /// Returns a cell of an item's row, by the column's name or its number from 0.
    ///
    /// # Errors
    /// Fails if the items do not come from a table, or if the table has no such column.
    pub fn cell(&self, index: usize, column: &str) -> Result<&str> {
        let Some(table) = &self.table else {
            return Err(Error::invalid_argument(format!(
                "the column {column:?} is needed, but the items are files without a table; take them \
                 from one with .items(csv(\"labels.csv\"))"
            )));
        };
        let place = table.header.iter().position(|name| name == column);
        let cell = place.or_else(|| column.parse().ok()).and_then(|place| {
            let row = table.rows.get(index)?;
            row.get(place).map(String::as_str)
        });
        cell.ok_or_else(|| {
            Error::invalid_argument(format!(
                "{} has no column {column:?}; its columns are {:?}",
                table.file.display(),
                table.header
            ))
        })
    }

    /// Returns the items with these indices, in their order. An index may occur twice; indices that do not exist are
    /// ignored.
    #[must_use]
    pub fn subset(&self, indices: &[usize]) -> Self {
        let pick = |index: &usize| self.paths.get(*index).cloned();
        let table = self.table.as_ref().map(|table| Table {
            rows: indices.iter().filter_map(|index| table.rows.get(*index).cloned()).collect(),
            ..table.clone()
        });
        Self {
            root: self.root.clone(),
            paths: indices.iter().filter_map(pick).collect(),
            numbers: indices.iter().filter_map(|index| self.numbers.get(*index).copied()).collect(),
            table,
        }
    }

    /// Returns a source of images that reads the files.
    #[must_use]
    pub fn source(&self) -> ImageFiles {
        ImageFiles::new(&self.root, &self.paths)
    }

    /// Returns an error if files of a list do not exist.
    fn all_there(self, list: &str, advice: &str) -> Result<Self> {
        let missing = |index: &usize| !self.path(*index).is_file();
        let missing: Vec<usize> = (0..self.len()).filter(missing).collect();
        match missing.first() {
            None => Ok(self),
            Some(first) => Err(Error::invalid_argument(format!(
                "{list} names files that are not there, {} of {}, as {}; {advice}",
                missing.len(),
                self.len(),
                self.name(*first)
            ))),
        }
    }
}

/// A getter of the items of a data set, given its folder: fastai's `get_items`. A function `Fn(&Path) ->
/// Result<Items>`, such as [`image_files`], is one.
///
/// Each rank lists the items by itself, so their order must depend only on their names.
pub trait GetItems: Send + Sync {
    /// Lists the items below `root`.
    ///
    /// # Errors
    /// Fails when they cannot be read.
    fn items(&self, root: &Path) -> Result<Items>;
}

impl<F: Fn(&Path) -> Result<Items> + Send + Sync> GetItems for F {
    fn items(&self, root: &Path) -> Result<Items> {
        self(root)
    }
}

/// Lists the images below a folder, sorted by name: fastai's `get_image_files`, which lists them in the order of the
/// file system. [`Files::images`] has its options.
///
/// # Errors
/// Fails when a folder cannot be read, or there are no images.
pub fn image_files(root: &Path) -> Result<Items> {
    Files::images().items(root)
}

/// A getter of files below a folder: fastai's `get_files` and `get_image_files`. Files and folders whose names begin
/// with a dot are left out.
///
/// ```
/// use brigade_learn::data::{Files, GetItems};
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// # for name in ["train/1.png", "test/2.png", "3.png"] {
/// #     std::fs::create_dir_all(folder.join(name).parent().unwrap())?;
/// #     std::fs::write(folder.join(name), [])?;
/// # }
/// let files = Files::images().folders(["train", "valid"]);
/// assert_eq!(files.items(folder)?.name(0), folder.join("train/1.png").to_string_lossy());
/// assert_eq!(Files::images().recurse(false).items(folder)?.len(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Files {
    find: FindFiles,
    folders: Vec<String>,
    recurse: bool,
}

impl Files {
    /// Finds images, by their extensions.
    #[must_use]
    pub fn images() -> Self {
        Self { find: FindFiles::new(), folders: Vec::new(), recurse: true }
    }

    /// Finds files with these extensions, with or without a leading dot.
    #[must_use]
    pub fn with_extensions<E: AsRef<str>>(extensions: impl IntoIterator<Item = E>) -> Self {
        Self { find: FindFiles::new().extensions(extensions), ..Self::images() }
    }

    /// Restricts the search to these folders directly below the root.
    #[must_use]
    pub fn folders<F: Into<String>>(mut self, folders: impl IntoIterator<Item = F>) -> Self {
        self.folders = folders.into_iter().map(Into::into).collect();
        self
    }

    /// Sets whether folders below the root are searched. Defaults to `true`.
    #[must_use]
    pub fn recurse(mut self, recurse: bool) -> Self {
        self.recurse = recurse;
        self
    }
}

impl GetItems for Files {
    fn items(&self, root: &Path) -> Result<Items> {
        let found = self.find.find(root).map_err(VisionError::from)?;
        let first = |path: &Path| {
            let mut parts = path.iter();
            let first = parts.next().map(|part| part.to_string_lossy().into_owned());
            first.filter(|_| parts.next().is_some())
        };
        let kept: Vec<PathBuf> = found
            .relative_paths()
            .filter(|path| match first(path) {
                None => self.folders.is_empty(),
                Some(folder) => {
                    self.recurse && (self.folders.is_empty() || self.folders.contains(&folder))
                }
            })
            .map(Path::to_path_buf)
            .collect();
        if kept.is_empty() {
            let folders: BTreeSet<String> = found.relative_paths().filter_map(first).collect();
            let folders: Vec<String> = folders.into_iter().take(10).collect();
            return Err(Error::invalid_argument(format!(
                "none of {} below {} is left by folders({:?}) and recurse({}); the folders with \
                 files are {folders:?}",
                counted(found.relative_paths().count(), "file"),
                root.display(),
                self.folders,
                self.recurse,
            )));
        }
        Ok(Items::new(root, kept))
    }
}

/// Returns a getter for a list of files below the data set's folder, in its order.
///
/// ```
/// use brigade_learn::data::{GetItems, file_list};
///
/// let error = file_list(["1.jpg"]).items("photos".as_ref()).unwrap_err().to_string();
/// assert!(error.starts_with("the list names files that are not there, 1 of 1, as photos/1.jpg"), "{error}");
/// ```
pub fn file_list<P: Into<PathBuf>>(files: impl IntoIterator<Item = P>) -> FileList {
    FileList(files.into_iter().map(Into::into).collect())
}

/// A getter for a list of files. Made by [`file_list`].
#[derive(Clone, Debug)]
pub struct FileList(Vec<PathBuf>);

impl GetItems for FileList {
    fn items(&self, root: &Path) -> Result<Items> {
        let items = Items::new(root, self.0.iter().cloned());
        items.all_there("the list", "paths are from the data set's folder on, or begin with /")
    }
}

/// Returns a getter for the files that a CSV file lists, in its order. The CSV file is in the data set's folder. Its
/// first line names the columns, and its first column has the paths of the files, as for fastai's `from_csv`.
pub fn csv(file: impl Into<PathBuf>) -> Csv {
    Csv {
        file: file.into(),
        delimiter: b',',
        header: true,
        files: "0".to_owned(),
        folder: PathBuf::new(),
        suffix: String::new(),
    }
}

/// A getter for the files that a CSV file lists. Made by [`csv()`].
///
/// ```
/// use brigade_learn::data::{GetItems, csv};
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// # std::fs::create_dir(folder.join("train"))?;
/// # std::fs::write(folder.join("train/17.jpg"), [])?;
/// std::fs::write(folder.join("labels.csv"), "breed,id\npug,17\n")?;
/// let items = csv("labels.csv").file_column("id").folder("train").suffix(".jpg").items(folder)?;
/// assert_eq!(items.path(0), folder.join("train/17.jpg"));
/// assert_eq!(items.cell(0, "breed")?, "pug");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct Csv {
    file: PathBuf,
    delimiter: u8,
    header: bool,
    files: String,
    folder: PathBuf,
    suffix: String,
}

impl Csv {
    /// Sets the separator of columns: fastai's `delimiter`. Defaults to a comma.
    #[must_use]
    pub fn delimiter(mut self, delimiter: u8) -> Self {
        self.delimiter = delimiter;
        self
    }

    /// Sets whether the first line contains the names of the columns. Defaults to `true`. With `false`, columns are
    /// referred to by number, from 0.
    #[must_use]
    pub fn header(mut self, header: bool) -> Self {
        self.header = header;
        self
    }

    /// Sets the column with the files' names, by its name or its number from 0: fastai's `fn_col`. Defaults to 0.
    #[must_use]
    #[expect(clippy::needless_pass_by_value, reason = "a name or a number, as it is written")]
    pub fn file_column(mut self, column: impl ToString) -> Self {
        self.files = column.to_string();
        self
    }

    /// Sets the folder of the files, relative to the data set's folder, which is the default: fastai's `folder`.
    #[must_use]
    pub fn folder(mut self, folder: impl Into<PathBuf>) -> Self {
        self.folder = folder.into();
        self
    }

    /// Sets the suffix that is appended to each name, such as `.jpg`: fastai's `suff`. Defaults to none.
    #[must_use]
    pub fn suffix(mut self, suffix: impl Into<String>) -> Self {
        self.suffix = suffix.into();
        self
    }
}

impl GetItems for Csv {
    fn items(&self, root: &Path) -> Result<Items> {
        let path = root.join(&self.file);
        let refuse = |error: csv::Error| match error.kind() {
            csv::ErrorKind::Io(cause) => Error::invalid_argument(format!(
                "cannot read {}: {cause}; the file is looked for in the data set's folder",
                path.display()
            )),
            _ => LearnError::Format { path: path.clone(), reason: error.to_string() }.into(),
        };
        let mut reader = csv::ReaderBuilder::new()
            .delimiter(self.delimiter)
            .has_headers(self.header)
            .trim(csv::Trim::All)
            .from_path(&path)
            .map_err(refuse)?;
        let header: Vec<String> = if self.header {
            reader.headers().map_err(refuse)?.iter().map(str::to_owned).collect()
        } else {
            Vec::new()
        };
        let mut rows: Vec<Arc<[String]>> = Vec::new();
        for record in reader.records() {
            rows.push(record.map_err(refuse)?.iter().map(str::to_owned).collect());
        }
        if rows.is_empty() {
            return Err(LearnError::Format { path, reason: "it lists no files".to_owned() }.into());
        }
        let table = Table { file: path.clone(), header: header.into(), rows };
        let numbers = (0..table.rows.len()).collect();
        let mut items = Items { root: root.into(), paths: Vec::new(), numbers, table: Some(table) };
        let files = (0..items.numbers.len())
            .map(|row| {
                let name = items.cell(row, &self.files)?;
                Ok(self.folder.join(format!("{name}{}", self.suffix)))
            })
            .collect::<Result<Vec<PathBuf>>>()?;
        items.paths = files;
        items.all_there(
            &path.display().to_string(),
            "set .folder(\"…\"), .suffix(\".jpg\") or .file_column(\"…\") so that they are the paths of files",
        )
    }
}
