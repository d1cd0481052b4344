//! Image files below a folder.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{self, Read};
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use walkdir::WalkDir;

use super::names::Names;
use super::{Fingerprint, Hasher, ImageSource, file_version, no_image, reserve};
use crate::{ImageError, Result};

/// Extensions of files that are recognized as images, in lower case: those of torchvision's `IMG_EXTENSIONS`, and
/// `gif`, `pbm` and `mpo`, which it leaves out. The case of a file's extension does not matter.
pub const IMAGE_EXTENSIONS: [&str; 12] =
    ["jpg", "jpeg", "png", "ppm", "bmp", "pgm", "tif", "tiff", "webp", "gif", "pbm", "mpo"];

/// Image files: all below a folder, or those of a list.
///
/// ```
/// use brigade_images::source::{ImageFiles, ImageSource};
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// # std::fs::create_dir(folder.join("cats"))?;
/// # std::fs::write(folder.join("cats/7.JPG"), [1, 2, 3])?;
/// # std::fs::write(folder.join("cats/notes.txt"), [1, 2, 3])?;
/// let files = ImageFiles::find(folder)?;
/// assert_eq!((files.len(), files.path(0)), (1, Some(folder.join("cats/7.JPG"))));
/// let mut bytes = Vec::new();
/// files.read(0, &mut bytes)?;
/// assert_eq!(bytes, [1, 2, 3]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct ImageFiles {
    root: PathBuf,
    names: Names,
}

impl ImageFiles {
    /// Finds the images below a folder by the rules of [`FindFiles::new`].
    ///
    /// # Errors
    /// Returns the same errors as [`FindFiles::find`].
    pub fn find(root: impl AsRef<Path>) -> Result<Self> {
        FindFiles::new().find(root)
    }

    /// Creates a source from a list of paths, which are relative to `root` unless they begin with `/`, in its order.
    /// The files are not accessed: a missing file is an error of the read.
    #[must_use]
    pub fn new<P: AsRef<Path>>(
        root: impl Into<PathBuf>,
        paths: impl IntoIterator<Item = P>,
    ) -> Self {
        let mut names = Names::default();
        paths.into_iter().for_each(|path| names.push(path.as_ref().as_os_str().as_bytes()));
        Self { root: root.into(), names }
    }

    /// Returns the folder to which paths are relative.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// Returns the path of a file relative to the root, or `None` if there is no such file.
    #[must_use]
    pub fn relative_path(&self, index: usize) -> Option<&Path> {
        self.names.get(index).map(to_path)
    }

    /// Returns the path of a file, or `None` if there is no such file.
    #[must_use]
    pub fn path(&self, index: usize) -> Option<PathBuf> {
        self.relative_path(index).map(|path| self.root.join(path))
    }

    /// Returns the paths of all files relative to the root, in their order.
    pub fn relative_paths(&self) -> impl Iterator<Item = &Path> {
        self.names.iter().map(to_path)
    }
}

impl ImageSource for ImageFiles {
    fn len(&self) -> usize {
        self.names.len()
    }

    fn read(&self, index: usize, buffer: &mut Vec<u8>) -> Result<()> {
        let path = self.path(index).ok_or_else(|| no_image(index, self.len()))?;
        let failed = |cause| ImageError::Read { path: path.clone(), cause };
        let mut file = File::open(&path).map_err(failed)?;
        let bytes = file.metadata().map_err(failed)?.len();
        reserve(buffer, bytes, &path.to_string_lossy())?;
        file.read_exact(buffer).map_err(failed)
    }

    fn name(&self, index: usize) -> Cow<'_, str> {
        let path = self.path(index).unwrap_or_default();
        Cow::Owned(
            path.into_os_string()
                .into_string()
                .unwrap_or_else(|path| path.to_string_lossy().into_owned()),
        )
    }

    /// Reads the metadata of the file.
    fn version(&self, index: usize) -> u64 {
        self.path(index).map_or(0, |path| file_version(&path))
    }

    /// Hashes the paths relative to the root, so that copies of a folder in different places are equal, and the sizes,
    /// for which it reads the metadata of each file. A missing file has a size of its own.
    fn fingerprint(&self) -> Result<Fingerprint> {
        let mut hasher = Hasher::new("files");
        for path in self.relative_paths() {
            hasher.bytes(path.as_os_str().as_bytes());
            let size = fs::metadata(self.root.join(path)).map(|metadata| metadata.len());
            hasher.number(size.unwrap_or(u64::MAX));
        }
        Ok(hasher.finish())
    }
}

/// Options to find the images below a folder.
///
/// ```
/// use brigade_images::source::{FindFiles, ImageSource};
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// # std::fs::write(folder.join("a.png"), [])?;
/// # std::fs::write(folder.join("b.jpg"), [])?;
/// let files = FindFiles::new().extensions(["png"]).find(folder)?;
/// assert_eq!(files.len(), 1);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct FindFiles {
    extensions: Vec<String>,
    hidden: bool,
}

impl Default for FindFiles {
    fn default() -> Self {
        Self::new()
    }
}

impl FindFiles {
    /// Creates options to find files with [`IMAGE_EXTENSIONS`], without names that begin with a dot.
    #[must_use]
    pub fn new() -> Self {
        Self { extensions: IMAGE_EXTENSIONS.map(str::to_owned).to_vec(), hidden: false }
    }

    /// Sets the extensions, with or without a dot before them. Case does not matter. Defaults to [`IMAGE_EXTENSIONS`].
    #[must_use]
    pub fn extensions<E: AsRef<str>>(mut self, extensions: impl IntoIterator<Item = E>) -> Self {
        self.extensions = extensions
            .into_iter()
            .map(|extension| extension.as_ref().trim_start_matches('.').to_ascii_lowercase())
            .collect();
        self
    }

    /// Sets whether files and folders are included whose names begin with a dot. torchvision includes them, fastai does
    /// not. Such names are usually those of editors and file managers, such as `.ipynb_checkpoints` and the
    /// `._name.jpg` of macOS. Defaults to `false`.
    #[must_use]
    pub fn hidden(mut self, hidden: bool) -> Self {
        self.hidden = hidden;
        self
    }

    /// Finds the images below a folder.
    ///
    /// The order is torchvision's, and the same on all hosts: by the first folder below the root, then by the whole
    /// folder, then by the file's name, each by bytes. Symbolic links are followed as torchvision does, except those to
    /// a folder that contains them. A broken link is included as a file, which cannot be read.
    ///
    /// # Errors
    /// Fails if a folder cannot be read, which torchvision and fastai skip, or if there are no images.
    pub fn find(&self, root: impl AsRef<Path>) -> Result<ImageFiles> {
        let root = root.as_ref();
        let found = self.walk(root)?;
        if found.files.is_empty() {
            return Err(ImageError::InvalidArgument(format!(
                "there are no images below {}: looked for files that end in {}",
                root.display(),
                self.endings()
            )));
        }
        Ok(ImageFiles { root: root.into(), names: found.files.into_iter().collect() })
    }

    /// Finds the images below the root and the folders directly below it.
    pub(crate) fn walk(&self, root: &Path) -> Result<FoundFiles> {
        let unreadable = |path: &Path, cause| ImageError::Read { path: path.into(), cause };
        if !fs::metadata(root).map_err(|source| unreadable(root, source))?.is_dir() {
            return Err(unreadable(root, io::ErrorKind::NotADirectory.into()));
        }
        let mut found = FoundFiles::default();
        let entries = WalkDir::new(root).min_depth(1).follow_links(true).into_iter();
        for entry in entries.filter_entry(|entry| self.hidden || !is_hidden(entry.file_name())) {
            let (path, is_file) = match entry {
                Ok(entry) if entry.file_type().is_dir() => {
                    if entry.depth() == 1 {
                        found.folders.push(entry.file_name().as_bytes().to_vec());
                    }
                    continue;
                }
                Ok(entry) => {
                    let is_file = entry.file_type().is_file();
                    (entry.into_path(), is_file)
                }
                Err(error) if error.loop_ancestor().is_some() => {
                    tracing::debug!(%error, "not following a link to a folder that it is in");
                    continue;
                }
                Err(error) => {
                    let path = error.path().unwrap_or(root).to_owned();
                    // A link to a folder that cannot be read is not a broken link.
                    if !path.is_symlink() || fs::metadata(&path).is_ok() {
                        let source = error.into_io_error();
                        let source = source.unwrap_or_else(|| io::ErrorKind::Other.into());
                        return Err(unreadable(&path, source));
                    }
                    let is_file = self.hidden || !path.file_name().is_some_and(is_hidden);
                    (path, is_file)
                }
            };
            if !is_file || !self.matches(&path) {
                continue;
            }
            if let Ok(relative) = path.strip_prefix(root) {
                found.files.push(relative.as_os_str().as_bytes().to_vec());
            }
        }
        found.files.sort_unstable_by(|a, b| torchvision_key(a).cmp(&torchvision_key(b)));
        found.folders.sort_unstable();
        Ok(found)
    }

    fn matches(&self, path: &Path) -> bool {
        path.extension().is_some_and(|extension| {
            self.extensions.iter().any(|known| extension.eq_ignore_ascii_case(known))
        })
    }

    /// Returns a list of the extensions for a message.
    pub(crate) fn endings(&self) -> String {
        let endings: Vec<String> =
            self.extensions.iter().map(|extension| format!(".{extension}")).collect();
        endings.join(", ")
    }
}

/// Files and folders below a folder, sorted.
#[derive(Debug, Default)]
pub(crate) struct FoundFiles {
    /// Paths relative to the root.
    pub(crate) files: Vec<Vec<u8>>,
    /// Names of the folders directly below the root.
    pub(crate) folders: Vec<Vec<u8>>,
}

/// Returns the key by which torchvision sorts the files of a class folder: the class, the folder, the name.
fn torchvision_key(path: &[u8]) -> (&[u8], &[u8], &[u8]) {
    let (folder, name) = match path.iter().rposition(|byte| *byte == b'/') {
        Some(slash) => (&path[..slash], &path[slash + 1..]),
        None => (&path[..0], path),
    };
    (first_folder(path).unwrap_or_default(), folder, name)
}

/// Returns the folder directly below the root that contains a file.
pub(crate) fn first_folder(path: &[u8]) -> Option<&[u8]> {
    path.iter().position(|byte| *byte == b'/').map(|slash| &path[..slash])
}

fn is_hidden(name: &OsStr) -> bool {
    name.as_bytes().starts_with(b".")
}

pub(crate) fn to_path(name: &[u8]) -> &Path {
    Path::new(OsStr::from_bytes(name))
}

#[cfg(test)]
pub(super) mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Creates a folder with these files. A name that ends in `/` is a folder.
    pub(crate) fn folder(names: &[&str]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        for name in names {
            let path = folder.path().join(name);
            if name.ends_with('/') {
                fs::create_dir_all(path).unwrap();
                continue;
            }
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, name).unwrap();
        }
        folder
    }

    fn found(find: &FindFiles, root: &Path) -> Vec<String> {
        let files = find.find(root).unwrap();
        files.relative_paths().map(|path| path.to_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn files_are_found_by_extension_in_the_order_of_torchvision() {
        let names = [
            "b/2.png",
            "b/10.JPG",
            "a/x/1.webp",
            "a/z.gif",
            "a-b/1.jpeg",
            "top.bmp",
            "a/x.txt",
            "a/jpg",
            "a/.hidden.jpg",
            ".git/a.jpg",
            "b/folder.jpg/inner.tiff",
            "ü/é.pgm",
        ];
        let root = folder(&names);
        // In `a`, the folder's own files come first; by the whole path `a-b` would precede `a/x`.
        let expected = [
            "top.bmp",
            "a/z.gif",
            "a/x/1.webp",
            "a-b/1.jpeg",
            "b/10.JPG",
            "b/2.png",
            "b/folder.jpg/inner.tiff",
            "ü/é.pgm",
        ];
        assert_eq!(found(&FindFiles::new(), root.path()), expected);
        let hidden = found(&FindFiles::new().hidden(true).extensions([".jpg"]), root.path());
        assert_eq!(hidden, [".git/a.jpg", "a/.hidden.jpg", "b/10.JPG"]);
    }

    #[test]
    fn links_are_followed_once() {
        let root = folder(&["a/1.jpg", "other.txt"]);
        let elsewhere = folder(&["2.jpg", "deep/3.jpg"]);
        symlink(elsewhere.path(), root.path().join("b")).unwrap();
        symlink(root.path(), root.path().join("a/loop")).unwrap();
        symlink(root.path().join("a/1.jpg"), root.path().join("a/link.jpg")).unwrap();
        symlink("nowhere", root.path().join("a/broken.jpg")).unwrap();
        symlink("nowhere", root.path().join("a/broken.txt")).unwrap();
        let expected = ["a/1.jpg", "a/broken.jpg", "a/link.jpg", "b/2.jpg", "b/deep/3.jpg"];
        assert_eq!(found(&FindFiles::new(), root.path()), expected);

        let files = ImageFiles::find(root.path()).unwrap();
        let error = files.read(1, &mut Vec::new()).unwrap_err();
        assert!(matches!(&error, ImageError::Read { path, .. } if path.ends_with("broken.jpg")));
    }

    #[test]
    fn folders_that_cannot_be_read_are_named() {
        let missing = ImageFiles::find("/nowhere/at/all").unwrap_err().to_string();
        assert!(missing.starts_with("cannot read /nowhere/at/all: "), "{missing}");

        let root = folder(&["a/1.jpg", "empty/"]);
        let file = ImageFiles::find(root.path().join("a/1.jpg")).unwrap_err();
        assert!(matches!(file, ImageError::Read { .. }), "{file}");
        let empty = ImageFiles::find(root.path().join("empty")).unwrap_err().to_string();
        assert!(empty.contains("looked for files that end in .jpg, .jpeg, .png"), "{empty}");
    }

    #[test]
    fn bytes_take_the_place_of_those_before() {
        let root = folder(&["long name.jpg", "s.jpg"]);
        let files = ImageFiles::find(root.path()).unwrap();
        let mut buffer = b"before".to_vec();
        files.read(0, &mut buffer).unwrap();
        assert_eq!(buffer, b"long name.jpg");
        files.read(1, &mut buffer).unwrap();
        assert_eq!(buffer, b"s.jpg");
        let error = files.read(2, &mut buffer).unwrap_err().to_string();
        assert_eq!(error, "image 2 is out of range: the source has 2 images");

        let huge = File::create(root.path().join("s.jpg")).unwrap();
        huge.set_len(1 << 40).unwrap();
        let error = files.read(1, &mut buffer).unwrap_err().to_string();
        assert!(error.contains("s.jpg has 1099511627776 bytes, more than"), "{error}");
    }

    #[test]
    fn fingerprints_know_names_and_sizes_but_not_places() {
        let [one, other] = [folder(&["a/1.jpg", "b/2.jpg"]), folder(&["a/1.jpg", "b/2.jpg"])];
        let of = |root: &tempfile::TempDir| {
            ImageFiles::find(root.path()).unwrap().fingerprint().unwrap()
        };
        assert_eq!(of(&one), of(&other));
        fs::write(other.path().join("b/2.jpg"), "a byte more").unwrap();
        assert_ne!(of(&one), of(&other));
        let renamed = folder(&["a/1.jpg", "b/3.jpg"]);
        assert_ne!(of(&one), of(&renamed));
    }
}
