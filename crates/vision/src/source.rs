//! Where encoded images and their labels come from.

use std::borrow::Cow;

use crate::Result;

/// Encoded images by index: the files of a folder, the members of archives, the rows of tables.
///
/// A source gives bytes and leaves decoding to its reader, so it is cheap to hold and safe to share
/// between threads.
pub trait ImageSource: Send + Sync {
    /// Returns the number of images.
    fn len(&self) -> usize;

    /// Whether there are no images.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads the encoded bytes of the image `index` into `buffer`, in place of what it holds.
    ///
    /// # Errors
    /// When there is no such image or it cannot be read.
    fn read(&self, index: usize, buffer: &mut Vec<u8>) -> Result<()>;

    /// Returns what errors call the image `index`: a path, or an archive and the name of a member.
    fn name(&self, index: usize) -> Cow<'_, str>;
}
