//! Text files below a folder.

use std::ffi::OsStr;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use walkdir::{DirEntry, WalkDir};

use super::{Found, Reader, TextSource, Unread};
use crate::{Error, Result};

/// Options of a folder of text files: the files that are texts, as in fastai's `get_text_files`.
///
/// ```
/// use brigade_tokens::FolderOptions;
///
/// # let folder = tempfile::tempdir()?;
/// # let root = folder.path();
/// # for file in ["train/pos/0.txt", "train/neg/1.txt", "test/pos/2.txt", "unsup/3.txt"] {
/// #     std::fs::create_dir_all(root.join(file).parent().unwrap())?;
/// #     std::fs::write(root.join(file), "fine")?;
/// # }
/// let imdb = FolderOptions::new().folders(["train", "test"]).split_by_folder("train", "test").open(root)?;
/// assert_eq!(imdb.labels().unwrap(), ["pos", "neg", "pos"]);
/// assert_eq!(imdb.is_valid().unwrap(), [true, false, false]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct FolderOptions {
    extensions: Vec<String>,
    folders: Vec<String>,
    recurse: bool,
    split: Option<(String, String)>,
}

impl Default for FolderOptions {
    fn default() -> Self {
        Self::new()
    }
}

impl FolderOptions {
    /// Creates options to find all files whose names end in `.txt`, including those in sub-folders.
    #[must_use]
    pub fn new() -> Self {
        Self { extensions: vec!["txt".into()], folders: Vec::new(), recurse: true, split: None }
    }

    /// Sets the file extensions, in upper or lower case. With an empty list, all files are texts. Defaults to `txt`.
    #[must_use]
    pub fn extensions<E: Into<String>>(mut self, extensions: impl IntoIterator<Item = E>) -> Self {
        let extensions = extensions.into_iter().map(Into::into);
        self.extensions = extensions
            .map(|extension| extension.trim_start_matches('.').to_ascii_lowercase())
            .collect();
        self
    }

    /// Restricts the search to these folders directly below the root. `.` stands for the root itself.
    #[must_use]
    pub fn folders<F: Into<String>>(mut self, folders: impl IntoIterator<Item = F>) -> Self {
        self.folders = folders.into_iter().map(Into::into).collect();
        self
    }

    /// Sets whether sub-folders are searched. Defaults to `true`.
    #[must_use]
    pub fn recurse(mut self, recurse: bool) -> Self {
        self.recurse = recurse;
        self
    }

    /// Divides the texts into training and validation texts by the name of the parent of their folder, like fastai's
    /// `GrandparentSplitter`. Texts of other folders are left out.
    #[must_use]
    pub fn split_by_folder(mut self, train: impl Into<String>, valid: impl Into<String>) -> Self {
        self.split = Some((train.into(), valid.into()));
        self
    }

    /// Finds the files, sorted by the bytes of their paths, so that all ranks have the same order. The label of each is
    /// the name of its folder. Symbolic links are followed; files and folders whose names begin with a dot are omitted.
    ///
    /// # Errors
    /// Fails if a folder cannot be read, or there are no such files.
    pub fn open(&self, root: impl AsRef<Path>) -> Result<TextSource> {
        let root = root.as_ref();
        let depth = if self.recurse { usize::MAX } else { 1 };
        let walk = WalkDir::new(root).follow_links(true).max_depth(depth);
        let mut paths = Vec::new();
        for entry in walk.into_iter().filter_entry(|entry| self.enters(entry)) {
            let entry = entry.map_err(|error| {
                let path = error.path().unwrap_or(root).to_owned();
                Error::Io { path, source: error.into() }
            })?;
            if entry.file_type().is_file() && self.takes(entry.file_name()) {
                paths.push(entry.into_path());
            }
        }
        paths.sort_unstable_by(|a, b| a.as_os_str().as_bytes().cmp(b.as_os_str().as_bytes()));
        let is_valid = self.split.as_ref().map(|(train, valid)| {
            paths.retain(|path| [train, valid].iter().any(|name| around(path) == name.as_str()));
            paths.iter().map(|path| around(path) == valid.as_str()).collect()
        });
        if paths.is_empty() {
            let detail =
                format!("no file of the extensions {:?} in it{}", self.extensions, self.within());
            return Err(Error::NoTexts { name: root.display().to_string(), detail });
        }
        let parent = |path: &PathBuf| {
            let parent = path.parent().and_then(Path::file_name);
            parent.unwrap_or_default().to_string_lossy().into_owned()
        };
        let labels = Some(paths.iter().map(parent).collect());
        let found = Found { len: paths.len(), fields: 1, labels, is_valid };
        Ok(TextSource::new(Files(paths), found))
    }

    /// Returns `true` if a folder is looked into, or a file looked at.
    fn enters(&self, entry: &DirEntry) -> bool {
        let name = entry.file_name();
        let listed = self.folders.is_empty() || self.folders.iter().any(|it| name == it.as_str());
        match entry.depth() {
            0 => true,
            1 if entry.file_type().is_dir() && !self.folders.is_empty() => listed,
            1 if !self.folders.is_empty() => self.folders.iter().any(|folder| folder == "."),
            _ => !name.as_bytes().starts_with(b"."),
        }
    }

    /// Returns `true` if a file's name is that of a text.
    fn takes(&self, name: &OsStr) -> bool {
        let name = name.as_bytes();
        let ending = name.rsplit(|byte| *byte == b'.').next().unwrap_or_default();
        let of = |extension: &String| ending.eq_ignore_ascii_case(extension.as_bytes());
        !name.starts_with(b".") && (self.extensions.is_empty() || self.extensions.iter().any(of))
    }

    /// Describes the searched folders, for a message.
    fn within(&self) -> String {
        let mut within = String::new();
        if !self.folders.is_empty() {
            within.push_str(&format!(", looked for in {:?}", self.folders));
        }
        if let Some((train, valid)) = &self.split {
            within.push_str(&format!(
                ", as FOLDER/LABEL/FILE where FOLDER is {train:?} or {valid:?}"
            ));
        }
        within
    }
}

/// Returns the name of the parent of a file's folder.
fn around(path: &Path) -> &OsStr {
    path.parent().and_then(Path::parent).and_then(Path::file_name).unwrap_or_default()
}

/// Creates a source of files without labels.
pub(super) fn of_files(paths: Vec<PathBuf>) -> Result<TextSource> {
    if paths.is_empty() {
        let (name, detail) = ("the list of files".into(), "it is empty".into());
        return Err(Error::NoTexts { name, detail });
    }
    let found = Found { len: paths.len(), fields: 1, labels: None, is_valid: None };
    Ok(TextSource::new(Files(paths), found))
}

/// Reader of files with one text each.
#[derive(Debug)]
struct Files(Vec<PathBuf>);

impl Reader for Files {
    fn read_all(&self) -> Result<Box<dyn Iterator<Item = Result<Unread>> + Send + '_>> {
        Ok(Box::new(self.0.iter().map(|path| Ok(Unread::File(path.clone())))))
    }

    fn read(&self, index: usize) -> Result<Unread> {
        Ok(Unread::File(self.0.get(index).cloned().unwrap_or_default()))
    }

    fn name(&self, index: usize) -> String {
        self.0.get(index).map(|path| path.display().to_string()).unwrap_or_default()
    }
}
