//! Detection of changed files.

use std::time::SystemTime;

use super::{Held, OpenFile, TensorReader};
use crate::error::Error;

/// Sizes and modification times of the files that contain a tensor, see [`TensorReader::stamp`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileStamp(Vec<(u64, Option<SystemTime>)>);

impl TensorReader<'_> {
    /// Returns the sizes and modification times of the tensor's files. If they equal those of an earlier read, the
    /// tensor has the values of that read. A file that was replaced under its name stays open and has
    /// the old values; the files of a folder of offloaded weights are opened for each read, which then fails.
    ///
    /// ```
    /// use brigade_checkpoint::WeightsReader;
    ///
    /// let weights = WeightsReader::open("tests/fixtures/weights/kinds_protocol_4.pth")?;
    /// let matrix = weights.get("base").expect("the file has it");
    /// assert_eq!(matrix.stamp()?, matrix.stamp()?);
    /// # Ok::<(), brigade_checkpoint::Error>(())
    /// ```
    ///
    /// # Errors
    /// Fails with [`Error::Io`] if a file's metadata cannot be read.
    pub fn stamp(&self) -> Result<FileStamp, Error> {
        let mut files: Vec<usize> = self.held.files().collect();
        files.sort_unstable();
        files.dedup();
        let stamps = files.into_iter().map(|index| {
            let OpenFile { path, file, .. } = &self.files[index];
            let metadata =
                file.open().and_then(|it| it.metadata()).map_err(Error::io("look at", path))?;
            Ok((metadata.len(), metadata.modified().ok()))
        });
        Ok(FileStamp(stamps.collect::<Result<_, Error>>()?))
    }
}

impl Held {
    /// Iterates over the indices of the files that contain the tensor.
    fn files(&self) -> Box<dyn Iterator<Item = usize> + '_> {
        if self.pieces.is_empty() {
            return Box::new(std::iter::once(self.file));
        }
        Box::new(self.pieces.iter().flat_map(|piece| piece.held.files()))
    }
}
