//! Texts in Parquet tables.

use std::collections::VecDeque;
use std::path::{Path, PathBuf};

use brigade_parquet::{Table, Value};
use serde_json::Value as Json;

use super::{Found, Reader, TextSource, Unread, to_bool, to_utf8};
use crate::files::io_error;
use crate::{Error, Result};

/// Options of Parquet files: the columns to read.
///
/// ```no_run
/// use brigade_tokens::ParquetOptions;
///
/// let imdb = ParquetOptions::new().open(["imdb/train-00000-of-00001.parquet"])?;
/// println!("{} reviews, {:?}", imdb.len(), imdb.labels().map(|labels| &labels[0]));
/// # Ok::<(), brigade_tokens::Error>(())
/// ```
#[derive(Clone, Debug)]
pub struct ParquetOptions {
    text: Vec<String>,
    label: Option<String>,
    valid: Option<String>,
}

impl Default for ParquetOptions {
    fn default() -> Self {
        Self::new()
    }
}

const LABEL: &str = "label";
const IS_VALID: &str = "is_valid";

impl ParquetOptions {
    /// Creates options that read the column `text`, and the columns `label` and `is_valid` if the file has them.
    #[must_use]
    pub fn new() -> Self {
        Self { text: vec!["text".into()], label: None, valid: None }
    }

    /// Sets the columns with the fields of a text.
    #[must_use]
    pub fn text_columns<C: Into<String>>(mut self, columns: impl IntoIterator<Item = C>) -> Self {
        self.text = columns.into_iter().map(Into::into).collect();
        self
    }

    /// Sets the column with the label: strings, numbers or Booleans. Numbers are replaced by their names if the
    /// metadata contain a Hugging Face `ClassLabel`.
    #[must_use]
    pub fn label_column(mut self, column: impl Into<String>) -> Self {
        self.label = Some(column.into());
        self
    }

    /// Sets the column that marks validation texts.
    #[must_use]
    pub fn valid_column(mut self, column: impl Into<String>) -> Self {
        self.valid = Some(column.into());
        self
    }

    /// Opens tables, whose rows are concatenated, and reads their labels. Texts are read in order, one row group at a
    /// time; reading a single text takes the time of its whole row group.
    ///
    /// # Errors
    /// Fails if a file cannot be read or is damaged, a column is missing or of another type, or there are no rows.
    pub fn open<P: Into<PathBuf>>(&self, paths: impl IntoIterator<Item = P>) -> Result<TextSource> {
        if self.text.is_empty() {
            return Err(Error::InvalidArgument("a text has one column at least".into()));
        }
        let (mut tables, mut labels, mut is_valid) = (Vec::new(), Vec::new(), Vec::new());
        let mut len = 0;
        for path in paths {
            let table = Table::open(path)?;
            let columns = self.text.iter().map(|name| column(&table, name));
            let columns = columns.collect::<Result<Vec<_>>>()?;
            if let Some(number) = optional(&table, self.label.as_deref(), LABEL)? {
                let name = self.label.as_deref().unwrap_or(LABEL);
                let classes = classes(&table, name);
                each_cell(&table, number, name, |text| {
                    let class = text.parse().ok().and_then(|class: usize| classes.get(class));
                    labels.push(class.cloned().unwrap_or(text));
                    Ok(())
                })?;
            }
            if let Some(number) = optional(&table, self.valid.as_deref(), IS_VALID)? {
                let name = self.valid.as_deref().unwrap_or(IS_VALID);
                each_cell(&table, number, name, |text| {
                    is_valid.push(to_bool(&text).ok_or_else(|| Error::Format {
                        path: table.path().into(),
                        detail: format!("column {name:?} has {text:?}, expected true or false"),
                    })?);
                    Ok(())
                })?;
            }
            let first = len;
            len += table.rows();
            tables.push(Part { table, columns, first });
        }
        let Some(first) = tables.first().filter(|_| len > 0) else {
            let (name, detail) = ("the list of tables".into(), "they have no rows".into());
            return Err(Error::NoTexts { name, detail });
        };
        // Some tables have the column and some do not: they do not belong together.
        for (name, found) in [(LABEL, labels.len()), (IS_VALID, is_valid.len())] {
            if found != 0 && found != len {
                return Err(Error::InvalidArgument(format!(
                    "{} and the tables beside it do not all have the column of {name}",
                    first.table.path().display()
                )));
            }
        }
        let found = Found {
            len,
            fields: self.text.len(),
            labels: (!labels.is_empty()).then_some(labels),
            is_valid: (!is_valid.is_empty()).then_some(is_valid),
        };
        Ok(TextSource::new(Tables { parts: tables, names: self.text.clone() }, found))
    }
}

impl From<brigade_parquet::Error> for Error {
    fn from(error: brigade_parquet::Error) -> Self {
        match error {
            brigade_parquet::Error::Read { path, cause } => io_error(&path)(cause),
            brigade_parquet::Error::Damaged { path, detail } => Self::Format { path, detail },
            other => Self::InvalidArgument(other.to_string()),
        }
    }
}

fn column(table: &Table, name: &str) -> Result<usize> {
    table.column(&[name]).ok_or_else(|| Error::MissingColumn {
        path: table.path().into(),
        column: name.into(),
        columns: table.column_names(),
    })
}

fn optional(table: &Table, wanted: Option<&str>, default: &str) -> Result<Option<usize>> {
    match wanted {
        Some(name) => column(table, name).map(Some),
        None => Ok(table.column(&[default])),
    }
}

/// Returns the names of a `ClassLabel`.
fn classes(table: &Table, column: &str) -> Vec<String> {
    let json = table.metadata("huggingface").and_then(|text| serde_json::from_str(text).ok());
    let names = json.as_ref().and_then(|json: &Json| {
        json.get("info")?.get("features")?.get(column)?.get("names")?.as_array()
    });
    let names = names.into_iter().flatten();
    names.map(|name| name.as_str().unwrap_or_default().to_owned()).collect()
}

/// Passes the cells of a column as texts to a function.
fn each_cell(
    table: &Table,
    number: usize,
    name: &str,
    mut visit: impl FnMut(String) -> Result<()>,
) -> Result<()> {
    let mut row = 0;
    table.values(number, |value| {
        let text = cell(table.path(), row, name, value)?;
        row += 1;
        visit(text)
    })
}

fn cell(path: &Path, row: usize, column: &str, value: Option<Value<'_>>) -> Result<String> {
    match value {
        Some(Value::Bytes(bytes)) => {
            to_utf8(bytes.to_vec(), || format!("{}, row {row}, column {column:?}", path.display()))
        }
        Some(Value::Bool(value)) => Ok(value.to_string()),
        Some(Value::Int(value)) => Ok(value.to_string()),
        Some(Value::Float(value)) => Ok(value.to_string()),
        None => Err(Error::Format {
            path: path.into(),
            detail: format!("row {row} has nothing in its column {column:?}"),
        }),
    }
}

/// Open table.
#[derive(Debug)]
struct Part {
    table: Table,
    columns: Vec<usize>,
    /// Index of the table's first row among all rows.
    first: usize,
}

/// Reader of several open tables.
#[derive(Debug)]
struct Tables {
    parts: Vec<Part>,
    names: Vec<String>,
}

impl Tables {
    /// Returns the texts of a row group. `first` is the index of its first row in the table.
    fn group(&self, part: &Part, group: usize, first: usize) -> Result<VecDeque<Vec<String>>> {
        let mut rows = VecDeque::new();
        for (field, (column, name)) in part.columns.iter().zip(&self.names).enumerate() {
            let mut row = 0;
            part.table.group_values(group..group + 1, *column, |value| {
                let text = match value {
                    Some(Value::Bytes(_)) | None => {
                        cell(part.table.path(), first + row, name, value)?
                    }
                    Some(_) => {
                        let path = part.table.path().into();
                        let detail = format!("its column {name:?} does not hold texts");
                        return Err(Error::Format { path, detail });
                    }
                };
                if field == 0 {
                    rows.push_back(vec![text]);
                } else if let Some(fields) = rows.get_mut(row) {
                    fields.push(text);
                }
                row += 1;
                Ok(())
            })?;
        }
        Ok(rows)
    }

    /// Returns the table of a row.
    fn part(&self, index: usize) -> Option<&Part> {
        let after = self.parts.partition_point(|part| part.first <= index);
        self.parts.get(after.checked_sub(1)?)
    }
}

impl Reader for Tables {
    fn read_all(&self) -> Result<Box<dyn Iterator<Item = Result<Unread>> + Send + '_>> {
        let groups = self.parts.iter().flat_map(move |part| {
            let mut first = 0;
            (0..part.table.groups()).map(move |group| {
                let rows = self.group(part, group, first);
                first += rows.as_ref().map_or(0, VecDeque::len);
                rows
            })
        });
        Ok(Box::new(groups.flat_map(|rows| {
            let (rows, error) = match rows {
                Ok(rows) => (rows, None),
                Err(error) => (VecDeque::new(), Some(Err(error))),
            };
            rows.into_iter().map(|fields| Ok(Unread::Fields(fields))).chain(error)
        })))
    }

    fn read(&self, index: usize) -> Result<Unread> {
        if let Some(part) = self.part(index) {
            let mut first = 0;
            for group in 0..part.table.groups() {
                let rows = part.table.group_rows(group);
                if index - part.first < first + rows {
                    let mut texts = self.group(part, group, first)?;
                    let fields = texts.swap_remove_back(index - part.first - first);
                    return fields.map(Unread::Fields).ok_or_else(|| gone(part));
                }
                first += rows;
            }
            return Err(gone(part));
        }
        Err(Error::InvalidArgument(format!("there is no row {index}")))
    }

    fn name(&self, index: usize) -> String {
        self.part(index).map_or_else(String::new, |part| {
            format!("{}, row {}", part.table.path().display(), index - part.first)
        })
    }
}

fn gone(part: &Part) -> Error {
    let detail = "it has fewer rows than its metadata say".into();
    Error::Format { path: part.table.path().into(), detail }
}
