//! Columns of Parquet files as plain values, one row at a time.
//!
//! A damaged file is an [`Error`]: the sizes that it declares are compared with the file before memory is allocated, and
//! panics of the crate `parquet` are caught.
//!
//! ```
//! use brigade_parquet::Table;
//!
//! let missing = Table::open("reviews.parquet").unwrap_err();
//! assert!(missing.to_string().contains("reviews.parquet"), "{missing}");
//! ```
//!
//! A table with rows:
//!
//! ```no_run
//! use brigade_parquet::{Error, Table};
//!
//! let table = Table::open("reviews.parquet")?;
//! let text = table.column(&["text"]).expect("a column of texts");
//! table.values(text, |value| {
//!     println!("{value:?}");
//!     Ok::<(), Error>(())
//! })?;
//! # Ok::<(), Error>(())
//! ```

mod pages;

use std::fmt::Display;
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::panic::{self, AssertUnwindSafe};
use std::path::{Path, PathBuf};

use brigade_rank_env::text::escaped;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, DataType};
use parquet::file::reader::{FileReader, SerializedFileReader};

/// Error of reading a Parquet file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The system could not read the file.
    #[error("cannot read {}: {cause}", escaped(path.display()))]
    Read {
        /// Path of the file.
        path: PathBuf,
        /// Error of the operating system.
        cause: io::Error,
    },
    /// The file is not a Parquet file, or is damaged.
    #[error("{} is damaged or in another format: {detail}", escaped(path.display()), detail = escaped(detail))]
    Damaged {
        /// Path of the file.
        path: PathBuf,
        /// Location and kind of the damage.
        detail: String,
    },
}

/// A value of one row and column.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Value<'a> {
    /// A boolean value.
    Bool(bool),
    /// An integer of 32 or 64 bits.
    Int(i64),
    /// A float of 32 or 64 bits.
    Float(f64),
    /// Bytes. Strings are bytes, too.
    Bytes(&'a [u8]),
}

/// An open Parquet file.
pub struct Table {
    path: PathBuf,
    reader: SerializedFileReader<File>,
    rows: usize,
    bytes: u64,
}

impl std::fmt::Debug for Table {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Table")
            .field("path", &self.path)
            .field("rows", &self.rows)
            .finish_non_exhaustive()
    }
}

impl Table {
    /// Opens a file and reads its metadata.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is not a Parquet file, or is damaged.
    pub fn open(path: impl Into<PathBuf>) -> Result<Self, Error> {
        let path = path.into();
        let failed = |cause| Error::Read { path: path.clone(), cause };
        let file = File::open(&path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        let damaged = |detail: &dyn Display| Error::Damaged {
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

    /// Returns the file's path.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the number of rows.
    #[must_use]
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Returns the size of the file in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.bytes
    }

    /// Reads the last bytes of the file, at most 64 KiB, which hold the positions and sizes of all pages. Together with
    /// the file's name and size they identify the table.
    ///
    /// # Errors
    /// Fails if the file cannot be read.
    pub fn end(&self) -> Result<Vec<u8>, Error> {
        let failed = |cause| Error::Read { path: self.path.clone(), cause };
        let mut file = File::open(&self.path).map_err(failed)?;
        let start = self.bytes.saturating_sub(END);
        file.seek(SeekFrom::Start(start)).map_err(failed)?;
        let mut end = Vec::new();
        file.take(END).read_to_end(&mut end).map_err(failed)?;
        Ok(end)
    }

    /// Returns the value of a key in the file's key-value metadata. `None` if the key is missing or has no value.
    #[must_use]
    pub fn metadata(&self, key: &str) -> Option<&str> {
        let entries = self.reader.metadata().file_metadata().key_value_metadata()?;
        entries.iter().find(|entry| entry.key == key)?.value.as_deref()
    }

    /// Returns the index of a column, given its path in the schema: one name, or more for a field of a structure.
    #[must_use]
    pub fn column(&self, path: &[&str]) -> Option<usize> {
        let schema = self.reader.metadata().file_metadata().schema_descr();
        schema.columns().iter().position(|column| column.path().parts() == path)
    }

    /// Returns the names of all columns. The parts of a column's path are joined by dots.
    #[must_use]
    pub fn column_names(&self) -> Vec<String> {
        let schema = self.reader.metadata().file_metadata().schema_descr();
        schema.columns().iter().map(|column| column.path().string()).collect()
    }

    /// Calls `visit` with each row's value of a column. `None` is a null.
    ///
    /// # Errors
    /// Fails if the file cannot be read or is damaged, or if the column holds lists or has a type without a [`Value`].
    /// Returns the errors of `visit`.
    pub fn values<E: From<Error>>(
        &self,
        column: usize,
        visit: impl FnMut(Option<Value<'_>>) -> Result<(), E>,
    ) -> Result<(), E> {
        self.group_values(0..self.reader.metadata().num_row_groups(), column, visit)
    }

    /// Returns the number of row groups.
    #[must_use]
    pub fn groups(&self) -> usize {
        self.reader.metadata().num_row_groups()
    }

    /// Calls `visit` with each value of a column in some row groups, as [`values`](Self::values) does for the whole
    /// file.
    ///
    /// # Errors
    /// Returns the same errors as [`values`](Self::values).
    pub fn group_values<E: From<Error>>(
        &self,
        groups: std::ops::Range<usize>,
        column: usize,
        mut visit: impl FnMut(Option<Value<'_>>) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut rows = 0;
        let mut expected = 0;
        let mut visit = |value: Option<Value<'_>>| {
            rows += 1;
            visit(value)
        };
        // The reader panics on some damaged files. Its state is dropped afterwards, so it need not be unwind-safe.
        let read = panic::catch_unwind(AssertUnwindSafe(|| {
            for group in groups {
                expected += self.group_rows(group);
                self.group(group, column, &mut visit)?;
            }
            Ok::<(), E>(())
        }));
        read.unwrap_or_else(|_| Err(self.damaged("its pages are damaged".into()).into()))?;
        if rows == expected {
            return Ok(());
        }
        let name = self.column_names().get(column).cloned().unwrap_or_default();
        Err(self.damaged(format!("its column {name} has {rows} values for {expected} rows")).into())
    }

    /// Returns the number of rows of a row group. 0 if the group does not exist.
    #[must_use]
    pub fn group_rows(&self, group: usize) -> usize {
        let groups = self.reader.metadata().row_groups();
        groups.get(group).map_or(0, |group| usize::try_from(group.num_rows()).unwrap_or(0))
    }

    fn group<E: From<Error>>(
        &self,
        group: usize,
        column: usize,
        visit: &mut impl FnMut(Option<Value<'_>>) -> Result<(), E>,
    ) -> Result<(), E> {
        let inside = |offset: i64| u64::try_from(offset).is_ok_and(|it| it <= self.bytes);
        let chunk = self.reader.metadata().row_groups().get(group);
        let chunk = chunk.and_then(|group| group.columns().get(column)).filter(|chunk| {
            inside(chunk.data_page_offset())
                && inside(chunk.compressed_size())
                && chunk.dictionary_page_offset().is_none_or(inside)
        });
        let chunk = chunk.ok_or_else(|| {
            self.damaged(format!(
                "column {column} of its row group {group} does not lie in the file"
            ))
        })?;
        pages::check(&self.path, chunk).map_err(|detail| self.damaged(detail))?;
        let reader = self
            .reader
            .get_row_group(group)
            .and_then(|group| group.get_column_reader(column))
            .map_err(|error| self.damaged(error.to_string()))?;
        match reader {
            ColumnReader::BoolColumnReader(reader) => {
                self.each(column, reader, |value| visit(value.map(|it| Value::Bool(*it))))
            }
            ColumnReader::Int32ColumnReader(reader) => {
                self.each(column, reader, |value| visit(value.map(|it| Value::Int((*it).into()))))
            }
            ColumnReader::Int64ColumnReader(reader) => {
                self.each(column, reader, |value| visit(value.map(|it| Value::Int(*it))))
            }
            ColumnReader::FloatColumnReader(reader) => {
                self.each(column, reader, |value| visit(value.map(|it| Value::Float((*it).into()))))
            }
            ColumnReader::DoubleColumnReader(reader) => {
                self.each(column, reader, |value| visit(value.map(|it| Value::Float(*it))))
            }
            ColumnReader::ByteArrayColumnReader(reader) => self.each(column, reader, |value| {
                visit(value.map(|it: &ByteArray| Value::Bytes(it.data())))
            }),
            _ => {
                let name = self.column_names().get(column).cloned().unwrap_or_default();
                Err(self.damaged(format!("its column {name} is of a type that is not read")).into())
            }
        }
    }

    fn each<T: DataType, E: From<Error>>(
        &self,
        number: usize,
        mut reader: ColumnReaderImpl<T>,
        mut visit: impl FnMut(Option<&T::T>) -> Result<(), E>,
    ) -> Result<(), E> {
        let column = self.reader.metadata().file_metadata().schema_descr().column(number);
        if column.max_rep_level() > 0 {
            let name = column.path().string();
            let detail = format!("its column {name} has lists, expected one a row");
            return Err(self.damaged(detail).into());
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

    fn damaged(&self, detail: String) -> Error {
        Error::Damaged { path: self.path.clone(), detail }
    }
}

/// Rows per read. Kept small because a row may be an image, and the rows of one read are in memory together.
const ROWS_AT_ONCE: usize = 16;
/// Bytes that [`Table::end`] reads: more than the metadata of a typical file from the hub.
const END: u64 = 64 << 10;
