//! Columns of one Parquet file.

use std::fmt::Display;
use std::fs::File;
use std::io::{Read, Seek, SeekFrom};
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};

use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, DataType};
use parquet::file::reader::{FileReader, SerializedFileReader};
use serde_json::Value;

use super::pages;
use crate::source::Hasher;
use crate::{ImageError, Result};

/// An open Parquet file.
pub(super) struct Table {
    path: PathBuf,
    reader: SerializedFileReader<File>,
    rows: usize,
    bytes: u64,
}

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

impl Table {
    pub(super) fn open(path: PathBuf) -> Result<Self> {
        let failed = |cause| ImageError::Read { path: path.clone(), cause };
        let file = File::open(&path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        let damaged = |detail: &dyn Display| ImageError::Format {
            path: path.clone(),
            detail: detail.to_string(),
        };
        let reader = panic::catch_unwind(|| SerializedFileReader::new(file))
            .map_err(|_| damaged(&"its metadata are damaged"))?
            .map_err(|error| damaged(&error))?;
        let rows = reader.metadata().file_metadata().num_rows();
        let mut groups = reader.metadata().row_groups().iter().map(|group| group.num_rows());
        let sum =
            groups.try_fold(0_i64, |sum, rows| if rows < 0 { None } else { sum.checked_add(rows) });
        let rows = usize::try_from(rows).ok().filter(|_| sum == Some(rows)).ok_or_else(|| {
            damaged(&format_args!("its {rows} rows are not those of its row groups"))
        })?;
        Ok(Self { path, reader, rows, bytes })
    }

    pub(super) fn path(&self) -> &Path {
        &self.path
    }

    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Hashes what tells this file from others: its name, its size and its end, where the places and
    /// sizes of all pages are.
    pub(super) fn hash(&self, hasher: &mut Hasher) -> Result<()> {
        let failed = |cause| ImageError::Read { path: self.path.clone(), cause };
        let mut file = File::open(&self.path).map_err(failed)?;
        let start = self.bytes.saturating_sub(HASHED_END);
        file.seek(SeekFrom::Start(start)).map_err(failed)?;
        let mut end = Vec::new();
        file.take(HASHED_END).read_to_end(&mut end).map_err(failed)?;
        hasher.bytes(self.path.file_name().unwrap_or_default().as_encoded_bytes());
        hasher.number(self.bytes);
        hasher.bytes(&end);
        Ok(())
    }

    /// Gives the bytes of each row of a column to `visit`.
    pub(super) fn images(
        &self,
        column: &str,
        mut visit: impl FnMut(&[u8]) -> Result<()>,
    ) -> Result<()> {
        let number = self
            .column(&[column, "bytes"])
            .or_else(|| self.column(&[column]))
            .ok_or_else(|| self.no_column(&format!("{column}.bytes")))?;
        let mut row = 0;
        self.each_group(number, |reader| {
            let ColumnReader::ByteArrayColumnReader(reader) = reader else {
                return Err(self.damaged(format!("its column {column} does not hold bytes")));
            };
            self.each_value(number, reader, |value| {
                let Some(value) = value else {
                    return Err(self.damaged(format!(
                        "row {row} has no bytes in its column {column}; images that lie beside the \
                         table as files cannot be read from it"
                    )));
                };
                row += 1;
                visit(ByteArray::data(value))
            })
        })?;
        self.complete(column, row)
    }

    /// Appends the labels of all rows.
    pub(super) fn labels(&self, column: &str, all: &mut LabelColumn) -> Result<()> {
        let number = self.column(&[column]).ok_or_else(|| self.no_column(column))?;
        let no_label = |row: usize, detail: String| ImageError::NoLabel {
            name: format!("row {row} of {}", self.path.display()),
            detail,
        };
        let mut row = 0;
        let mut add_number = |value: Option<i64>, all: &mut LabelColumn| {
            let Some(value) = value.filter(|value| *value >= 0) else {
                let found = value.map_or_else(|| "nothing".to_owned(), |value| value.to_string());
                return Err(no_label(row, format!("its column {column} holds {found}")));
            };
            let LabelColumn::Numbers(numbers) = all else {
                return Err(self.damaged(format!("{column} holds numbers, and names before")));
            };
            numbers.push(value);
            row += 1;
            Ok(())
        };
        let mut names = 0;
        self.each_group(number, |reader| match reader {
            ColumnReader::Int64ColumnReader(reader) => {
                self.each_value(number, reader, |value| add_number(value.copied(), all))
            }
            ColumnReader::Int32ColumnReader(reader) => self
                .each_value(number, reader, |value| add_number(value.map(|v| i64::from(*v)), all)),
            ColumnReader::ByteArrayColumnReader(reader) => {
                self.each_value(number, reader, |value: Option<&ByteArray>| {
                    let text = value.and_then(|value| std::str::from_utf8(value.data()).ok());
                    let Some(text) = text else {
                        return Err(no_label(names, format!("its column {column} holds no text")));
                    };
                    names += 1;
                    if let LabelColumn::Numbers(numbers) = all
                        && numbers.is_empty()
                    {
                        *all = LabelColumn::Names(Vec::new());
                    }
                    let LabelColumn::Names(names) = all else {
                        return Err(
                            self.damaged(format!("{column} holds names, and numbers before"))
                        );
                    };
                    names.push(text.to_owned());
                    Ok(())
                })
            }
            _ => Err(self.damaged(format!("its column {column} holds neither numbers nor names"))),
        })?;
        self.complete(column, row + names)
    }

    /// Returns the names of the classes of a column, if the metadata has them: those of the type
    /// `ClassLabel` in the entry `huggingface`.
    pub(super) fn class_names(&self, column: &str) -> Result<Option<Vec<String>>> {
        let entries = self.reader.metadata().file_metadata().key_value_metadata();
        let entry = entries.and_then(|all| all.iter().find(|entry| entry.key == "huggingface"));
        let Some(text) = entry.and_then(|entry| entry.value.as_deref()) else { return Ok(None) };
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

    /// Returns the number of a column by the names on the way to it.
    fn column(&self, path: &[&str]) -> Option<usize> {
        let schema = self.reader.metadata().file_metadata().schema_descr();
        schema.columns().iter().position(|column| column.path().parts() == path)
    }

    /// Opens a column of each group of rows.
    fn each_group(
        &self,
        number: usize,
        mut read: impl FnMut(ColumnReader) -> Result<()>,
    ) -> Result<()> {
        let groups = || {
            for (index, group) in self.reader.metadata().row_groups().iter().enumerate() {
                let inside = |offset: i64| u64::try_from(offset).is_ok_and(|it| it <= self.bytes);
                let chunk = group.columns().get(number).filter(|chunk| {
                    inside(chunk.data_page_offset())
                        && inside(chunk.compressed_size())
                        && chunk.dictionary_page_offset().is_none_or(inside)
                });
                if chunk.is_none() {
                    return Err(self.damaged(format!(
                        "column {number} of its row group {index} does not lie in the file"
                    )));
                }
                if let Some(chunk) = chunk {
                    pages::check(&self.path, chunk).map_err(|detail| self.damaged(detail))?;
                }
                let column = self
                    .reader
                    .get_row_group(index)
                    .and_then(|group| group.get_column_reader(number))
                    .map_err(|error| self.damaged(error.to_string()))?;
                read(column)?;
            }
            Ok(())
        };
        // The reader asserts what a damaged file need not hold; what was read so far is thrown away.
        panic::catch_unwind(AssertUnwindSafe(groups))
            .unwrap_or_else(|_| Err(self.damaged("its pages are damaged".to_owned())))
    }

    /// Gives each row's value to `visit`; `None` is a row without one.
    fn each_value<T: DataType>(
        &self,
        number: usize,
        mut reader: ColumnReaderImpl<T>,
        mut visit: impl FnMut(Option<&T::T>) -> Result<()>,
    ) -> Result<()> {
        let column = self.reader.metadata().file_metadata().schema_descr().column(number);
        if column.max_rep_level() > 0 {
            let name = column.path().string();
            return Err(self.damaged(format!("its column {name} has lists, expected one a row")));
        }
        let present = column.max_def_level();
        let (mut values, mut levels) = (Vec::new(), Vec::new());
        loop {
            values.clear();
            levels.clear();
            let (rows, ..) = reader
                .read_records(ROWS_AT_ONCE, Some(&mut levels), None, &mut values)
                .map_err(|error| self.damaged(error.to_string()))?;
            if rows == 0 {
                return Ok(());
            }
            let mut next = values.iter();
            if present == 0 {
                next.try_for_each(|value| visit(Some(value)))?;
                continue;
            }
            for level in &levels {
                visit(if *level == present { next.next() } else { None })?;
            }
        }
    }

    fn complete(&self, column: &str, found: usize) -> Result<()> {
        if found == self.rows {
            return Ok(());
        }
        let rows = self.rows;
        Err(self.damaged(format!("its column {column} has {found} values for {rows} rows")))
    }

    fn no_column(&self, wanted: &str) -> ImageError {
        let schema = self.reader.metadata().file_metadata().schema_descr();
        let names: Vec<String> =
            schema.columns().iter().map(|column| column.path().string()).collect();
        ImageError::InvalidArgument(format!(
            "{} has no column {wanted}; its columns are {}",
            self.path.display(),
            names.join(", ")
        ))
    }

    fn damaged(&self, detail: String) -> ImageError {
        ImageError::Format { path: self.path.clone(), detail }
    }
}

/// Images of one reading lie in memory together.
const ROWS_AT_ONCE: usize = 16;
/// More than the metadata of the hub's files.
const HASHED_END: u64 = 64 << 10;
