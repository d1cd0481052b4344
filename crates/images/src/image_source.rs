//! Encoded images by index, and a source of image files.

mod files;
mod fingerprint;
mod names;

use std::borrow::Cow;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::sync::Arc;

use brigade_rank_env::text::counted;

#[cfg(test)]
pub(crate) use self::files::tests::folder;
pub use self::files::{FindFiles, IMAGE_EXTENSIONS, ImageFiles};
pub(crate) use self::files::{first_folder, to_path};
pub use self::fingerprint::Fingerprint;
pub(crate) use self::fingerprint::Hasher;
pub(crate) use self::names::Names;
use crate::Result;

/// A list of encoded images: the files of a folder, the members of archives, the rows of tables.
///
/// A source returns encoded bytes and does not decode them, so that it takes little memory and can be shared between
/// threads.
pub trait ImageSource: Send + Sync {
    /// Returns the number of images.
    fn len(&self) -> usize;

    /// Returns `true` if there are no images.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reads the encoded bytes of the image `index` into `buffer`, whose content is replaced.
    ///
    /// # Errors
    /// Fails if `index` is not below the number of images, or the image cannot be read.
    fn read(&self, index: usize, buffer: &mut Vec<u8>) -> Result<()>;

    /// Returns the name of the image `index` in error messages: a path, or an archive and the name of a member.
    fn name(&self, index: usize) -> Cow<'_, str>;

    /// Returns a number that changes if the image is replaced, even by one with the same number of bytes. A cache on
    /// this host compares it before it returns an image that was decoded in an earlier run. The default implementation
    /// returns 0; sources of files return the [version](file_version) of each.
    fn version(&self, index: usize) -> u64 {
        let _ = index;
        0
    }

    /// Returns a hash with which processes can check that they have the same images in the same order. The default
    /// implementation hashes the names; sources in which the sizes of images are known include them.
    ///
    /// # Errors
    /// Fails if the source has to read from the file system again and cannot.
    fn fingerprint(&self) -> Result<Fingerprint> {
        let mut hasher = Hasher::new("names");
        for index in 0..self.len() {
            hasher.bytes(self.name(index).as_bytes());
        }
        Ok(hasher.finish())
    }
}

macro_rules! delegate {
    ($($pointer:ty),+) => {
        $(impl<S: ImageSource + ?Sized> ImageSource for $pointer {
            fn len(&self) -> usize {
                (**self).len()
            }

            fn read(&self, index: usize, buffer: &mut Vec<u8>) -> Result<()> {
                (**self).read(index, buffer)
            }

            fn name(&self, index: usize) -> Cow<'_, str> {
                (**self).name(index)
            }

            fn version(&self, index: usize) -> u64 {
                (**self).version(index)
            }

            fn fingerprint(&self) -> Result<Fingerprint> {
                (**self).fingerprint()
            }
        })+
    };
}

delegate!(&S, Box<S>, Arc<S>);

/// Maximum size of an encoded image in bytes: 1 GiB. An image is in memory as a whole, and no decoder would accept a
/// longer one.
pub const MAX_ENCODED_BYTES: u64 = 1 << 30;

/// Returns a number that changes if a file is written to or replaced. It is a hash of its inode, its size and the
/// times, in nanoseconds, of the last change of its content (mtime) and of the inode (ctime). The ctime cannot be set
/// back, so that a copy that keeps times (`cp -p`, `rsync -t`) is detected too; a change of owner, mode or number of
/// links also changes the number. The device's number is left out, because it may change at a reboot. Costs one system
/// call. Returns 0 if the file does not exist.
#[must_use]
pub fn file_version(path: &Path) -> u64 {
    fs::metadata(path).map_or(0, |metadata| version_of(&metadata))
}

pub(crate) fn version_of(metadata: &Metadata) -> u64 {
    let mut hasher = Hasher::new("version");
    hasher.number(metadata.ino());
    hasher.number(metadata.size());
    for time in [metadata.mtime(), metadata.mtime_nsec(), metadata.ctime(), metadata.ctime_nsec()] {
        hasher.number(time as u64);
    }
    hasher.finish().number()
}

/// Sets the length of `buffer` to `bytes`, with undefined content.
pub(crate) fn reserve(buffer: &mut Vec<u8>, bytes: u64, name: &str) -> Result<()> {
    let refuse = |why: &str| {
        Err(crate::ImageError::InvalidArgument(format!("{name} has {bytes} bytes, {why}")))
    };
    let Some(length) = usize::try_from(bytes).ok().filter(|_| bytes <= MAX_ENCODED_BYTES) else {
        return refuse("more than an encoded image may have; leave it out");
    };
    if buffer.try_reserve(length.saturating_sub(buffer.len())).is_err() {
        return refuse("for which there is no memory");
    }
    buffer.resize(length, 0);
    Ok(())
}

/// Returns the error of an index that is not below the number of images.
pub(crate) fn no_image(index: usize, len: usize) -> crate::ImageError {
    crate::ImageError::InvalidArgument(format!(
        "image {index} is out of range: the source has {}",
        counted(len, "image")
    ))
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::*;
    use crate::labels::{Labelled, Labeller};
    use crate::{CacheOptions, ImageSamples};

    /// Replaces a file by other bytes, with the same size and times.
    fn replace(path: &Path, bytes: &[u8]) {
        let modified = fs::metadata(path).unwrap().modified().unwrap();
        let other = path.with_extension("new");
        fs::write(&other, bytes).unwrap();
        File::options().write(true).open(&other).unwrap().set_modified(modified).unwrap();
        fs::rename(&other, path).unwrap();
    }

    #[test]
    fn a_cache_notices_that_a_file_was_replaced_by_one_as_long_and_as_old() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("images");
        fs::create_dir_all(root.join("a")).unwrap();
        let pixel = |value: u8| format!("P2 1 1 255 {value:3}\n").into_bytes();
        for (name, value) in [("a/1.pgm", 10), ("a/2.pgm", 20)] {
            fs::write(root.join(name), pixel(value)).unwrap();
        }
        let read = |epoch: u64| {
            let files = ImageFiles::find(&root).unwrap();
            let images = Labelled::of(files, &Labeller::parent()).unwrap();
            let cache = CacheOptions::new(folder.path().join("cache"));
            let samples = ImageSamples::from(images).cache(cache);
            samples.begin_epoch(epoch).unwrap();
            let mut reader = samples.reader();
            [0, 1].map(|index| {
                samples.read(&mut reader, index, epoch, 1).unwrap();
                reader.image().0.pixel(0, 0).unwrap()[0]
            })
        };
        assert_eq!((read(0), read(0)), ([10, 20], [10, 20]));
        let before = file_version(&root.join("a/2.pgm"));
        replace(&root.join("a/2.pgm"), &pixel(99));
        assert_ne!(file_version(&root.join("a/2.pgm")), before);
        assert_eq!((read(0), read(0)), ([10, 99], [10, 99]));
        // In an archive, which is one file: the other image is still in it.
        assert_eq!(fs::read_dir(folder.path().join("cache")).unwrap().count(), 1);
        assert_eq!(file_version(&root.join("a/3.pgm")), 0);
    }
}
