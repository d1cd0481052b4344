//! A copy of the images of Parquet tables, which can be read in any order.

use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::Path;

use tar::{Builder, Header};

use super::table::Table;
use crate::image_source::{Hasher, ImageSource};
use crate::source::webdataset::{WebDataset, WebDatasetOptions};
use crate::{ImageError, Result};

/// The copy of a column of some tables: a tar archive with a member for each row.
pub(super) struct Spool<'a> {
    pub(super) tables: &'a [Table],
    pub(super) column: &'a str,
    pub(super) folder: &'a Path,
}

impl Spool<'_> {
    /// Opens the copy, and creates it if it does not exist.
    pub(super) fn open(&self) -> Result<WebDataset> {
        let mut hasher = Hasher::new("parquet");
        hasher.bytes(self.column.as_bytes());
        for table in self.tables {
            table.hash(&mut hasher)?;
        }
        let path = self.folder.join(format!("{}.tar", hasher.finish()));
        if !path.exists() {
            let written = |source| unwritten(self.folder, &source);
            fs::create_dir_all(self.folder).map_err(written)?;
            // One process of the host writes, the others wait. The system releases the lock of a process that dies.
            let lock = File::create(path.with_extension("lock")).map_err(written)?;
            lock.lock().map_err(written)?;
            if !path.exists() {
                // Under the lock, so that a file left by a killed process is overwritten.
                let partial = path.with_extension("partial");
                self.write(&partial).inspect_err(|_| _ = fs::remove_file(&partial))?;
                fs::rename(&partial, &path).map_err(written)?;
            }
        }
        let images = WebDatasetOptions::new().images([MEMBER]).open_shards([&path])?;
        let rows: usize = self.tables.iter().map(Table::rows).sum();
        if images.len() != rows {
            return Err(ImageError::Format {
                path,
                detail: format!("it is not a copy of a table with {rows} rows; delete it"),
            });
        }
        images.hold_open()?;
        Ok(images)
    }

    fn write(&self, path: &Path) -> Result<()> {
        let written = |source| unwritten(path, &source);
        let file = File::create(path).map_err(written)?;
        tracing::info!(
            tables = self.tables.len(),
            path = %path.display(),
            "copying the images of Parquet files to where they can be read in any order"
        );
        let mut tar = Builder::new(BufWriter::with_capacity(1 << 20, file));
        let mut row = 0_usize;
        for table in self.tables {
            table.images(self.column, |bytes| {
                let mut header = Header::new_gnu();
                header.set_size(bytes.len() as u64);
                header.set_mode(0o644);
                let name = format!("{row:010}.{MEMBER}");
                row += 1;
                tar.append_data(&mut header, name, bytes).map_err(written)
            })?;
        }
        let mut file = tar.into_inner().map_err(written)?;
        file.flush().map_err(written)
    }
}

fn unwritten(path: &Path, source: &std::io::Error) -> ImageError {
    ImageError::InvalidArgument(format!(
        "cannot write a copy of the images to {}: {source}; it takes as much room as they do",
        path.display()
    ))
}

/// Extension of the members of the copy.
const MEMBER: &str = "image";
