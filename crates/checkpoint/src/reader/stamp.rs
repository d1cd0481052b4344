//! What shows that a file has changed.

use std::time::SystemTime;

use super::{Held, OpenFile, TensorReader};
use crate::error::Error;

/// The sizes of the files that a tensor lies in, and the times of their last changes, see [`TensorReader::stamp`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct FileStamp(Vec<(u64, Option<SystemTime>)>);

impl TensorReader<'_> {
    /// Returns the sizes of the tensor's files and the times of their last changes. Where they are those of an earlier read,
    /// the tensor has the values of that read. A file that was put in the place of an open one is not read, and changes
    /// nothing.
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
    /// [`Error::Io`].
    pub fn stamp(&self) -> Result<FileStamp, Error> {
        let mut files: Vec<usize> = self.held.files().collect();
        files.sort_unstable();
        files.dedup();
        let stamps = files.into_iter().map(|index| {
            let OpenFile { path, file, .. } = &self.files[index];
            let metadata = file.metadata().map_err(Error::io("look at", path))?;
            Ok((metadata.len(), metadata.modified().ok()))
        });
        Ok(FileStamp(stamps.collect::<Result<_, Error>>()?))
    }
}

impl Held {
    /// Indices of the files that the tensor lies in.
    fn files(&self) -> Box<dyn Iterator<Item = usize> + '_> {
        if self.pieces.is_empty() {
            return Box::new(std::iter::once(self.file));
        }
        Box::new(self.pieces.iter().flat_map(|piece| piece.held.files()))
    }
}
