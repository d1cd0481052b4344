//! Images and labels in the columns of one Parquet file.

use std::path::{Path, PathBuf};

use brigade_parquet::Value as Cell;
use serde_json::Value;

use crate::image_source::Hasher;
use crate::{ImageError, Result};

/// An open Parquet file.
pub(super) struct Table(brigade_parquet::Table);

/// The labels of all rows so far.
pub(super) enum LabelColumn {
    Numbers(Vec<i64>),
    Names(Vec<String>),
}

impl Default for LabelColumn {
    fn default() -> Self {
        Self::Numbers(Vec::new())
    }
}

impl From<brigade_parquet::Error> for ImageError {
    fn from(error: brigade_parquet::Error) -> Self {
        match error {
            brigade_parquet::Error::Read { path, cause } => Self::Read { path, cause },
            brigade_parquet::Error::Damaged { path, detail } => Self::Format { path, detail },
            other => Self::InvalidArgument(other.to_string()),
        }
    }
}

impl Table {
    pub(super) fn open(path: PathBuf) -> Result<Self> {
        Ok(Self(brigade_parquet::Table::open(path)?))
    }

    pub(super) fn path(&self) -> &Path {
        self.0.path()
    }

    pub(super) fn rows(&self) -> usize {
        self.0.rows()
    }

    /// Hashes the identity of this file: its name, its size and its end.
    pub(super) fn hash(&self, hasher: &mut Hasher) -> Result<()> {
        hasher.bytes(self.path().file_name().unwrap_or_default().as_encoded_bytes());
        hasher.number(self.0.bytes());
        hasher.bytes(&self.0.end()?);
        Ok(())
    }

    /// Calls `visit` with the bytes of each row of a column.
    pub(super) fn images(
        &self,
        column: &str,
        mut visit: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let number = self
            .0
            .column(&[column, "bytes"])
            .or_else(|| self.0.column(&[column]))
            .ok_or_else(|| self.no_column(&format!("{column}.bytes")))?;
        let mut row = 0;
        self.0.values(number, |value| match value {
            Some(Cell::Bytes(bytes)) => {
                row += 1;
                visit(bytes)
            }
            Some(_) => Err(self.damaged(format!("its column {column} does not hold bytes"))),
            None => Err(self.damaged(format!(
                "row {row} has no bytes in its column {column}; images that lie beside the \
                 table as files cannot be read from it"
            ))),
        })
    }

    /// Appends the labels of all rows.
    pub(super) fn labels(&self, column: &str, all: &mut LabelColumn) -> Result<()> {
        let number = self.0.column(&[column]).ok_or_else(|| self.no_column(column))?;
        let mut row = 0;
        self.0.values(number, |value| {
            let no_label = |found: &str| ImageError::NoLabel {
                name: format!("row {row} of {}", self.path().display()),
                detail: format!("its column {column} holds {found}"),
            };
            match (value, &mut *all) {
                (None, _) => return Err(no_label("nothing")),
                (Some(Cell::Int(number)), LabelColumn::Numbers(numbers)) if number >= 0 => {
                    numbers.push(number);
                }
                (Some(Cell::Int(number)), LabelColumn::Numbers(_)) => {
                    return Err(no_label(&number.to_string()));
                }
                (Some(Cell::Int(_)), LabelColumn::Names(_)) => {
                    return Err(self.damaged(format!("{column} holds numbers, and names before")));
                }
                (Some(Cell::Bytes(bytes)), all) => {
                    let Ok(text) = std::str::from_utf8(bytes) else {
                        return Err(no_label("no text"));
                    };
                    if let LabelColumn::Numbers(numbers) = all
                        && numbers.is_empty()
                    {
                        *all = LabelColumn::Names(Vec::new());
                    }
                    let LabelColumn::Names(names) = all else {
                        let detail = format!("{column} holds names, and numbers before");
                        return Err(self.damaged(detail));
                    };
                    names.push(text.to_owned());
                }
                _ => {
                    let detail = format!("its column {column} holds neither numbers nor names");
                    return Err(self.damaged(detail));
                }
            }
            row += 1;
            Ok(())
        })
    }

    /// Returns the names of the classes of a column, if the metadata have them: those of the type `ClassLabel` in the
    /// entry `huggingface`.
    pub(super) fn class_names(&self, column: &str) -> Result<Option<Vec<String>>> {
        let Some(text) = self.0.metadata("huggingface") else { return Ok(None) };
        let json: Value = serde_json::from_str(text).map_err(|error| {
            self.damaged(format!("its metadata `huggingface` is not JSON: {error}"))
        })?;
        let feature = json.get("info").and_then(|info| info.get("features")?.get(column));
        let Some(names) = feature.and_then(|feature| feature.get("names")?.as_array()) else {
            return Ok(None);
        };
        let names = names.iter().map(|name| name.as_str().map(str::to_owned));
        names.collect::<Option<_>>().map(Some).ok_or_else(|| {
            self.damaged(format!("the classes of its column {column} are not all names"))
        })
    }

    fn no_column(&self, wanted: &str) -> ImageError {
        ImageError::InvalidArgument(format!(
            "{} has no column {wanted}; its columns are {}",
            self.path().display(),
            self.0.column_names().join(", ")
        ))
    }

    fn damaged(&self, detail: String) -> ImageError {
        ImageError::Format { path: self.path().into(), detail }
    }
}
