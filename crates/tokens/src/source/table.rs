//! Texts in CSV files.

use std::fs::File;
use std::io::BufReader;
use std::path::{Path, PathBuf};

use brigade_rank_env::text::counted;
use csv::{ByteRecord, ReaderBuilder};

use super::{Found, Reader, TextSource, Unread, open_at, to_bool, to_utf8};
use crate::{Error, Result};

/// Options of a CSV file: the columns to read, and its format.
///
/// ```
/// use brigade_tokens::CsvOptions;
///
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("pairs.tsv");
/// std::fs::write(&path, "id\tfirst\tsecond\tsame\n7\tIt rains.\tRain falls.\t1\n")?;
/// let options = CsvOptions::new().delimiter(b'\t').text_columns(["first", "second"]).label_column("same");
/// let pairs = options.open(&path)?;
/// assert_eq!(pairs.fields_of(0)?, ["It rains.", "Rain falls."]);
/// assert_eq!(pairs.text(0)?, "xxfld 1 It rains. xxfld 2 Rain falls.");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct CsvOptions {
    delimiter: u8,
    header: bool,
    quoting: bool,
    text: Vec<String>,
    label: Option<String>,
    valid: Option<String>,
}

impl Default for CsvOptions {
    fn default() -> Self {
        Self::new()
    }
}

/// Names of the columns that are read by default, if a file has them.
const LABEL: &str = "label";
const IS_VALID: &str = "is_valid";

impl CsvOptions {
    /// Creates options that read the column `text`, and the columns `label` and `is_valid` if the file has them,
    /// separated by commas after a header line, like fastai's `TextDataLoaders.from_csv`.
    #[must_use]
    pub fn new() -> Self {
        Self {
            delimiter: b',',
            header: true,
            quoting: true,
            text: vec!["text".into()],
            label: None,
            valid: None,
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

    /// Sets whether quotation marks enclose values. With `false`, they are part of the values, as in some files of
    /// GLUE. Defaults to `true`.
    #[must_use]
    pub fn quoting(mut self, quoting: bool) -> Self {
        self.quoting = quoting;
        self
    }

    /// Sets the columns with the fields of a text: by name, or by number from 0.
    #[must_use]
    pub fn text_columns<C: Into<String>>(mut self, columns: impl IntoIterator<Item = C>) -> Self {
        self.text = columns.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the column with the label.
    #[must_use]
    pub fn label_column(mut self, column: impl Into<String>) -> Self {
        self.label = Some(column.into());
        self
    }

    /// Sets the column that marks validation texts, with `true` or `1`, or `false` or `0`.
    #[must_use]
    pub fn valid_column(mut self, column: impl Into<String>) -> Self {
        self.valid = Some(column.into());
        self
    }

    /// Opens a file, and reads all of it once to find the labels and the positions of rows.
    ///
    /// # Errors
    /// Fails if the file cannot be read, has no rows, a column is missing, lines differ in their number of columns, or
    /// a value in one of the columns is not UTF-8.
    pub fn open(&self, path: impl AsRef<Path>) -> Result<TextSource> {
        let path = path.as_ref();
        if self.text.is_empty() {
            return Err(Error::InvalidArgument("a text has one column at least".into()));
        }
        let mut reader = self.reader(path, 0)?;
        let header: Vec<String> = if self.header {
            let header = reader.byte_headers().map_err(|error| refuse(path, &error))?;
            header.iter().map(|name| String::from_utf8_lossy(name).trim().to_owned()).collect()
        } else {
            Vec::new()
        };
        let column = |wanted: &String| {
            let named = header.iter().position(|name| name == wanted);
            named.or_else(|| wanted.parse().ok()).ok_or_else(|| Error::MissingColumn {
                path: path.into(),
                column: wanted.clone(),
                columns: header.clone(),
            })
        };
        let optional = |wanted: &Option<String>, default: &str| match wanted {
            Some(wanted) => column(wanted).map(Some),
            None => Ok(header.iter().position(|name| name == default)),
        };
        let columns = Columns {
            text: self.text.iter().map(column).collect::<Result<_>>()?,
            names: self.text.clone(),
        };
        let label = optional(&self.label, LABEL)?;
        let valid = optional(&self.valid, IS_VALID)?;

        let (mut labels, mut is_valid, mut rows) = (Vec::new(), Vec::new(), Vec::new());
        let mut record = ByteRecord::new();
        while reader.read_byte_record(&mut record).map_err(|error| refuse(path, &error))? {
            let row = Row::of(&record);
            columns.fields(path, &record, row)?;
            if let Some(label) = label {
                labels.push(field(
                    path,
                    &record,
                    row,
                    label,
                    self.label.as_deref().unwrap_or(LABEL),
                )?);
            }
            if let Some(valid) = valid {
                let name = self.valid.as_deref().unwrap_or(IS_VALID);
                let text = field(path, &record, row, valid, name)?;
                is_valid.push(to_bool(&text).ok_or_else(|| Error::Row {
                    path: path.into(),
                    line: row.line,
                    detail: format!("column {name:?} has {text:?}, expected true or false"),
                })?);
            }
            rows.push(row);
        }
        if rows.is_empty() {
            let detail = "it has no rows".to_owned();
            return Err(Error::NoTexts { name: path.display().to_string(), detail });
        }
        let found = Found {
            len: rows.len(),
            fields: columns.text.len(),
            labels: label.map(|_| labels),
            is_valid: valid.map(|_| is_valid),
        };
        let table = Table { path: path.into(), options: self.clone(), columns, rows };
        Ok(TextSource::new(table, found))
    }

    /// Opens a reader from an offset on.
    fn reader(&self, path: &Path, offset: u64) -> Result<csv::Reader<BufReader<File>>> {
        Ok(ReaderBuilder::new()
            .delimiter(self.delimiter)
            .quoting(self.quoting)
            .has_headers(self.header && offset == 0)
            .from_reader(open_at(path, offset)?))
    }
}

/// Position of a row.
#[derive(Clone, Copy, Debug)]
struct Row {
    offset: u64,
    line: u64,
}

impl Row {
    fn of(record: &ByteRecord) -> Self {
        record.position().map_or(Self { offset: 0, line: 0 }, |position| Self {
            offset: position.byte(),
            line: position.line(),
        })
    }
}

/// Indices of the columns of a text.
#[derive(Debug)]
struct Columns {
    text: Vec<usize>,
    names: Vec<String>,
}

impl Columns {
    fn fields(&self, path: &Path, record: &ByteRecord, row: Row) -> Result<Vec<String>> {
        let columns = self.text.iter().zip(&self.names);
        columns.map(|(column, name)| field(path, record, row, *column, name)).collect()
    }
}

/// Returns one column of a row as a text.
fn field(path: &Path, record: &ByteRecord, row: Row, column: usize, name: &str) -> Result<String> {
    let bytes = record.get(column).ok_or_else(|| Error::Row {
        path: path.into(),
        line: row.line,
        detail: format!(
            "it has {}, and column {name:?} is number {column} from 0",
            counted(record.len(), "column")
        ),
    })?;
    to_utf8(bytes.to_vec(), || format!("{}, line {}, column {name:?}", path.display(), row.line))
}

/// Converts an error of the CSV reader.
fn refuse(path: &Path, error: &csv::Error) -> Error {
    match error.kind() {
        csv::ErrorKind::UnequalLengths { pos, expected_len, len } => Error::Row {
            path: path.into(),
            line: pos.as_ref().map_or(0, csv::Position::line),
            detail: format!(
                "it has {}, and the lines before have {expected_len}",
                counted(len, "column")
            ),
        },
        _ => Error::Format { path: path.into(), detail: error.to_string() },
    }
}

/// Reader of an open table.
#[derive(Debug)]
struct Table {
    path: PathBuf,
    options: CsvOptions,
    columns: Columns,
    rows: Vec<Row>,
}

impl Reader for Table {
    fn read_all(&self) -> Result<Box<dyn Iterator<Item = Result<Unread>> + Send + '_>> {
        let reader = self.options.reader(&self.path, 0)?;
        Ok(Box::new(reader.into_byte_records().map(|record| {
            let record = record.map_err(|error| refuse(&self.path, &error))?;
            self.columns.fields(&self.path, &record, Row::of(&record)).map(Unread::Fields)
        })))
    }

    fn read(&self, index: usize) -> Result<Unread> {
        let row = self.rows.get(index).copied().unwrap_or(Row { offset: 0, line: 0 });
        let mut reader = self.options.reader(&self.path, row.offset)?;
        let mut record = ByteRecord::new();
        reader.read_byte_record(&mut record).map_err(|error| refuse(&self.path, &error))?;
        self.columns.fields(&self.path, &record, row).map(Unread::Fields)
    }

    fn name(&self, index: usize) -> String {
        let line = self.rows.get(index).map_or(0, |row| row.line);
        format!("{}, line {line}", self.path.display())
    }
}
