//! Labels from a table.

use std::fs::File;
use std::path::Path;

use brigade_rank_env::text::counted;
use csv::{ReaderBuilder, StringRecord};

use super::Split;
use crate::{ImageError, Result};

/// Names of images with their labels, from a file or from the program.
///
/// ```
/// use brigade_images::labels::{LabelTable, Labelled, Labeller};
/// use brigade_images::source::{ImageFiles, ImageSource};
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// # for name in ["1.jpg", "2.jpg", "3.jpg"] { std::fs::write(folder.join(name), [])?; }
/// std::fs::write(folder.join("labels.csv"), "name,label\n2.jpg,dog\n1.jpg,cat\n3.jpg,dog\n")?;
/// let table = LabelTable::csv(folder.join("labels.csv"))?;
/// // The images of the table, in its order ...
/// let pets = table.open(folder)?;
/// assert_eq!((pets.source().name(0), pets.labels()), (folder.join("2.jpg").to_string_lossy(), &[1, 0, 1][..]));
/// // ... or those that were found, each looked up in it.
/// let pets = Labelled::of(ImageFiles::find(folder)?, &Labeller::table(&table))?;
/// assert_eq!(pets.labels(), [0, 1, 1]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LabelTable {
    rows: Vec<(String, String)>,
    is_valid: Option<Vec<bool>>,
}

impl LabelTable {
    /// Creates a table of names and labels.
    #[must_use]
    pub fn new<N: Into<String>, L: Into<String>>(rows: impl IntoIterator<Item = (N, L)>) -> Self {
        let rows = rows.into_iter().map(|(name, label)| (name.into(), label.into()));
        Self { rows: rows.collect(), is_valid: None }
    }

    /// Reads a CSV file by the rules of [`CsvOptions::new`].
    ///
    /// # Errors
    /// Returns the same errors as [`CsvOptions::read`].
    pub fn csv(path: impl AsRef<Path>) -> Result<Self> {
        CsvOptions::new().read(path)
    }

    /// Returns an iterator over names and labels.
    pub fn rows(&self) -> impl Iterator<Item = (&str, &str)> {
        self.rows.iter().map(|(name, label)| (name.as_str(), label.as_str()))
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Returns `true` if there are no rows.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the split of the rows that the [`valid_column`](CsvOptions::valid_column) of the file defines, or `None`
    /// if no such column was read: fastai's `ColSplitter`.
    #[must_use]
    pub fn split(&self) -> Option<Split> {
        self.is_valid.as_deref().map(Split::partition)
    }
}

/// Options to read a CSV file of labels: its columns and its format.
///
/// ```
/// use brigade_images::labels::CsvOptions;
///
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("labels.tsv");
/// std::fs::write(&path, "breed\tid\tis_valid\npug\t17\tTrue\ncorgi\t18\tFalse\n")?;
/// let options = CsvOptions::new().delimiter(b'\t').columns("id", "breed").suffix(".jpg");
/// let table = options.valid_column("is_valid").read(&path)?;
/// assert_eq!(table.rows().next(), Some(("17.jpg", "pug")));
/// assert_eq!(table.split().unwrap().valid, [0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct CsvOptions {
    delimiter: u8,
    header: bool,
    /// Columns of names and labels; `None` for the first two.
    columns: Option<(String, String)>,
    valid_column: Option<String>,
    suffix: String,
}

impl Default for CsvOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl CsvOptions {
    /// Creates options that read the first two columns as name and label, separated by commas, after a line with the
    /// names of the columns, like fastai's `from_csv`.
    #[must_use]
    pub fn new() -> Self {
        Self {
            delimiter: b',',
            header: true,
            columns: None,
            valid_column: None,
            suffix: String::new(),
        }
    }

    /// Sets the byte between columns. Defaults to a comma.
    #[must_use]
    pub fn delimiter(mut self, delimiter: u8) -> Self {
        self.delimiter = delimiter;
        self
    }

    /// Sets whether the first line contains the names of the columns. Without names, columns are numbers from 0.
    /// Defaults to `true`.
    #[must_use]
    pub fn header(mut self, header: bool) -> Self {
        self.header = header;
        self
    }

    /// Sets the columns of the images' names and of their labels: by name, or by number from 0. Defaults to the first
    /// two.
    #[must_use]
    pub fn columns(mut self, name: impl Into<String>, label: impl Into<String>) -> Self {
        self.columns = Some((name.into(), label.into()));
        self
    }

    /// Sets the column that marks images for validation: `true` or `1` for validation, `false` or `0` for training, in
    /// upper or lower case. Defaults to none.
    #[must_use]
    pub fn valid_column(mut self, column: impl Into<String>) -> Self {
        self.valid_column = Some(column.into());
        self
    }

    /// Sets a suffix that is appended to each name to make it a file name, such as `.jpg`. Defaults to none.
    #[must_use]
    pub fn suffix(mut self, suffix: impl Into<String>) -> Self {
        self.suffix = suffix.into();
        self
    }

    /// Reads a CSV file.
    ///
    /// # Errors
    /// Fails if the file cannot be read, its lines differ in their number of columns, or a column that was set does not
    /// exist.
    pub fn read(&self, path: impl AsRef<Path>) -> Result<LabelTable> {
        let path = path.as_ref();
        let file =
            File::open(path).map_err(|cause| ImageError::Read { path: path.into(), cause })?;
        let damaged = |detail| ImageError::Format { path: path.into(), detail };
        let refuse = |error: csv::Error| damaged(error.to_string());
        let mut reader = ReaderBuilder::new()
            .delimiter(self.delimiter)
            .has_headers(self.header)
            .from_reader(file);
        let header = if self.header {
            reader.headers().map_err(refuse)?.clone()
        } else {
            StringRecord::new()
        };
        let column = |wanted: &str| {
            let named = header.iter().position(|name| name.trim() == wanted);
            named.or_else(|| wanted.parse().ok()).ok_or_else(|| {
                let names: Vec<&str> = header.iter().collect();
                damaged(format!("it has no column {wanted:?}; its columns are {names:?}"))
            })
        };
        let (name, label) = match &self.columns {
            Some((name, label)) => (column(name)?, column(label)?),
            None => (0, 1),
        };
        let valid = self.valid_column.as_deref().map(column).transpose()?;

        let mut table = LabelTable::default();
        let mut is_valid = Vec::new();
        for record in reader.records() {
            let record = record.map_err(refuse)?;
            let line = record.position().map_or(0, csv::Position::line);
            let field = |column: usize| {
                record.get(column).map(str::trim).ok_or_else(|| {
                    damaged(format!(
                        "line {line} has {}, but column {column} (from 0) is needed",
                        counted(record.len(), "column")
                    ))
                })
            };
            table.rows.push((format!("{}{}", field(name)?, self.suffix), field(label)?.to_owned()));
            if let Some(column) = valid {
                let text = field(column)?;
                is_valid.push(match text.to_ascii_lowercase().as_str() {
                    "true" | "1" => true,
                    "false" | "0" => false,
                    _ => {
                        return Err(damaged(format!(
                            "line {line} has {text:?}, expected true or false"
                        )));
                    }
                });
            }
        }
        table.is_valid = valid.map(|_| is_valid);
        Ok(table)
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::image_source::ImageSource;

    fn read(options: &CsvOptions, text: &str) -> Result<LabelTable, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("labels.csv");
        fs::write(&path, text).unwrap();
        options.read(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn rows_are_names_and_labels() {
        let table = read(&CsvOptions::new(), "fname,label,x\n\"a, b.jpg\",cat,1\nc.jpg, dog ,2\n");
        let table = table.unwrap();
        assert_eq!(table, LabelTable::new([("a, b.jpg", "cat"), ("c.jpg", "dog")]));
        assert_eq!((table.len(), table.is_empty()), (2, false));
    }

    #[test]
    fn files_without_a_header_have_numbered_columns() {
        let options = CsvOptions::new().header(false).columns("2", "0");
        let table = read(&options, "cat,x,1.jpg\ndog,y,2.jpg\n").unwrap();
        assert_eq!(table, LabelTable::new([("1.jpg", "cat"), ("2.jpg", "dog")]));
        assert!(table.split().is_none());
        let pets = table.open("root").unwrap();
        assert_eq!((pets.source().name(1).as_ref(), pets.labels()), ("root/2.jpg", &[0, 1][..]));
    }

    #[test]
    fn files_that_do_not_fit_say_where() {
        let table: [(CsvOptions, &str, &str); 5] = [
            (CsvOptions::new(), "a,b\n1.jpg\n", "line: 2"),
            (CsvOptions::new(), "a\n1.jpg\n", "line 2 has 1 column, but column 1"),
            (CsvOptions::new().columns("a", "c"), "a,b\n", "no column \"c\"; its columns are"),
            (CsvOptions::new().columns("0", "7"), "a,b\n1,2\n", "column 7 (from 0)"),
            (CsvOptions::new().valid_column("b"), "a,b\n1,yes\n", "line 2 has \"yes\""),
        ];
        for (options, text, expected) in table {
            let error = read(&options, text).unwrap_err();
            assert!(error.contains(expected), "{error}");
        }
        let missing = LabelTable::csv("/nowhere.csv").unwrap_err().to_string();
        assert!(missing.starts_with("cannot read /nowhere.csv: "), "{missing}");
        let empty = LabelTable::default().open("x").unwrap_err().to_string();
        assert_eq!(empty, "a table without rows has no images");
    }
}
