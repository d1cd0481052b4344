//! Sources of texts.

mod folder;
mod lines;
mod memory;
#[cfg(feature = "parquet")]
mod parquet;
mod table;

use std::fmt;
use std::path::{Path, PathBuf};
use std::{fs, io};

pub use self::folder::FolderOptions;
pub use self::lines::LinesOptions;
#[cfg(feature = "parquet")]
pub use self::parquet::ParquetOptions;
pub use self::table::CsvOptions;
use brigade_rank_env::text::counted;

use crate::files::io_error;
use crate::{Error, Result};

/// An ordered list of texts, with labels and a division into training and validation texts if the source has them.
///
/// Texts are read on demand. Labels, names and positions of texts are kept in memory.
///
/// ```
/// use brigade_tokens::TextSource;
///
/// # let folder = tempfile::tempdir()?;
/// let path = folder.path().join("reviews.csv");
/// std::fs::write(&path, "label,text,is_valid\npos,A fine film,False\nneg,A bad one,True\n")?;
/// let reviews = TextSource::csv(&path)?;
/// assert_eq!(reviews.texts()?.collect::<Result<Vec<_>, _>>()?, ["A fine film", "A bad one"]);
/// assert_eq!(reviews.labels().unwrap(), ["pos", "neg"]);
/// assert_eq!(reviews.is_valid().unwrap(), [false, true]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug)]
pub struct TextSource {
    reader: Box<dyn Reader>,
    len: usize,
    fields: usize,
    mark_fields: bool,
    labels: Option<Vec<String>>,
    is_valid: Option<Vec<bool>>,
}

/// Reader of the texts of a source.
trait Reader: fmt::Debug + Send + Sync {
    /// Returns an iterator over all texts, in order.
    fn read_all(&self) -> Result<Box<dyn Iterator<Item = Result<Unread>> + Send + '_>>;

    /// Reads one text, by an index below the source's length.
    fn read(&self, index: usize) -> Result<Unread>;

    /// Returns the name of a text in messages: its file, or its file and row.
    fn name(&self, index: usize) -> String;
}

/// Text in memory, or a file with the text, which any thread may read.
pub(crate) enum Unread {
    Fields(Vec<String>),
    File(PathBuf),
}

impl Unread {
    /// Reads the text's fields.
    pub(crate) fn fields(self) -> Result<Vec<String>> {
        match self {
            Self::Fields(fields) => Ok(fields),
            Self::File(path) => read_utf8(&path).map(|text| vec![text]),
        }
    }
}

/// Properties of a source as a whole.
struct Found {
    len: usize,
    fields: usize,
    labels: Option<Vec<String>>,
    is_valid: Option<Vec<bool>>,
}

impl TextSource {
    fn new(reader: impl Reader + 'static, found: Found) -> Self {
        let Found { len, fields, labels, is_valid } = found;
        Self { reader: Box::new(reader), len, fields, mark_fields: fields > 1, labels, is_valid }
    }

    /// Creates a source of texts in memory.
    ///
    /// # Errors
    /// Fails if the list is empty.
    pub fn memory<T: Into<String>>(texts: impl IntoIterator<Item = T>) -> Result<Self> {
        Self::rows(texts.into_iter().map(|text| [text]))
    }

    /// Creates a source of texts in memory with several fields each, such as pairs of sentences.
    ///
    /// # Errors
    /// Fails if the list is empty.
    pub fn rows<T: Into<String>, const FIELDS: usize>(
        rows: impl IntoIterator<Item = [T; FIELDS]>,
    ) -> Result<Self> {
        memory::open(rows.into_iter().map(|row| row.map(Into::into)))
    }

    /// Finds the text files below a folder, labelled with the name of the folder that each is in, by the rules of
    /// [`FolderOptions::new`].
    ///
    /// # Errors
    /// Returns the same errors as [`FolderOptions::open`].
    pub fn folder(root: impl AsRef<Path>) -> Result<Self> {
        FolderOptions::new().open(root)
    }

    /// Creates a source of files with one text each, in this order.
    ///
    /// # Errors
    /// Fails if the list is empty.
    pub fn files<P: Into<PathBuf>>(paths: impl IntoIterator<Item = P>) -> Result<Self> {
        folder::of_files(paths.into_iter().map(Into::into).collect())
    }

    /// Opens a CSV file with a column `text` and optional columns `label` and `is_valid`, by the rules of
    /// [`CsvOptions::new`].
    ///
    /// # Errors
    /// Returns the same errors as [`CsvOptions::open`].
    pub fn csv(path: impl AsRef<Path>) -> Result<Self> {
        CsvOptions::new().open(path)
    }

    /// Opens a file with one text per line, by the rules of [`LinesOptions::new`].
    ///
    /// # Errors
    /// Returns the same errors as [`LinesOptions::open`].
    pub fn lines(path: impl AsRef<Path>) -> Result<Self> {
        LinesOptions::new().open(path)
    }

    /// Sets labels, one for each text.
    ///
    /// # Errors
    /// Fails if the numbers of labels and texts differ.
    pub fn with_labels<L: Into<String>>(
        mut self,
        labels: impl IntoIterator<Item = L>,
    ) -> Result<Self> {
        let labels: Vec<String> = labels.into_iter().map(Into::into).collect();
        self.fits("labels", labels.len())?;
        self.labels = Some(labels);
        Ok(self)
    }

    /// Sets for each text whether it is a validation text.
    ///
    /// # Errors
    /// Fails if the numbers of values and texts differ.
    pub fn with_is_valid(mut self, is_valid: impl IntoIterator<Item = bool>) -> Result<Self> {
        let is_valid: Vec<bool> = is_valid.into_iter().collect();
        self.fits("values of is_valid", is_valid.len())?;
        self.is_valid = Some(is_valid);
        Ok(self)
    }

    fn fits(&self, what: &str, given: usize) -> Result<()> {
        if given == self.len {
            return Ok(());
        }
        Err(Error::InvalidArgument(format!(
            "there are {given} {what} for {}",
            counted(self.len, "text")
        )))
    }

    /// Sets whether the fields of a text are marked when they are joined: `xxfld 1 first xxfld 2 second` instead of
    /// `first second`. Defaults to `true` if there are several fields, as in fastai.
    #[must_use]
    pub fn mark_fields(mut self, mark: bool) -> Self {
        self.mark_fields = mark;
        self
    }

    /// Returns the number of texts, which is never 0.
    #[must_use]
    pub fn len(&self) -> usize {
        self.len
    }

    /// Returns `false`: a source has at least one text.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the number of fields of each text.
    #[must_use]
    pub fn field_count(&self) -> usize {
        self.fields
    }

    /// Returns the labels of all texts, if the source has labels.
    #[must_use]
    pub fn labels(&self) -> Option<&[String]> {
        self.labels.as_deref()
    }

    /// Returns one flag per text, `true` for validation texts, if the source has them.
    #[must_use]
    pub fn is_valid(&self) -> Option<&[bool]> {
        self.is_valid.as_deref()
    }

    /// Returns a text's name for messages: its file, its row or its number.
    #[must_use]
    pub fn name(&self, index: usize) -> String {
        self.reader.name(index)
    }

    /// Returns an iterator over all texts in order, each of which is read on demand.
    ///
    /// # Errors
    /// Fails if a file cannot be opened. An item is an error if its file cannot be read, or it is not UTF-8.
    pub fn texts(&self) -> Result<impl Iterator<Item = Result<String>> + Send + '_> {
        Ok(self.unread()?.map(|text| Ok(self.join(text?.fields()?))))
    }

    /// Returns an iterator over the fields of all texts in order, each of which is read on demand.
    ///
    /// # Errors
    /// Returns the same errors as [`texts`](Self::texts).
    pub fn fields(&self) -> Result<impl Iterator<Item = Result<Vec<String>>> + Send + '_> {
        Ok(self.unread()?.map(|text| text?.fields()))
    }

    /// Returns the text at an index.
    ///
    /// # Errors
    /// Fails if there is no text at this index, it cannot be read, or it is not UTF-8.
    pub fn text(&self, index: usize) -> Result<String> {
        Ok(self.join(self.read(index)?.fields()?))
    }

    /// Returns the fields of one text.
    ///
    /// # Errors
    /// Returns the same errors as [`text`](Self::text).
    pub fn fields_of(&self, index: usize) -> Result<Vec<String>> {
        self.read(index)?.fields()
    }

    fn read(&self, index: usize) -> Result<Unread> {
        if index >= self.len {
            return Err(Error::InvalidArgument(format!(
                "text {index} is out of range: there are {}, numbered from 0",
                self.len
            )));
        }
        self.reader.read(index)
    }

    /// Returns all texts in order, without reading files.
    pub(crate) fn unread(&self) -> Result<Box<dyn Iterator<Item = Result<Unread>> + Send + '_>> {
        self.reader.read_all()
    }

    /// Joins the fields of a text, as fastai's `_join_texts` does.
    pub(crate) fn join(&self, mut fields: Vec<String>) -> String {
        if fields.len() == 1 && !self.mark_fields {
            return fields.swap_remove(0);
        }
        let mut joined = String::new();
        for (field, number) in fields.iter().zip(1..) {
            if number > 1 {
                joined.push(' ');
            }
            if self.mark_fields {
                joined.push_str(&format!("xxfld {number} "));
            }
            joined.push_str(field);
        }
        joined
    }
}

/// Reads a file as UTF-8.
fn read_utf8(path: &Path) -> Result<String> {
    let bytes = fs::read(path).map_err(io_error(path))?;
    to_utf8(bytes, || path.display().to_string())
}

/// Converts bytes to a text. `name` is called only if they are not UTF-8.
fn to_utf8(bytes: Vec<u8>, name: impl FnOnce() -> String) -> Result<String> {
    String::from_utf8(bytes).map_err(|error| Error::NotUtf8 {
        name: name(),
        offset: error.utf8_error().valid_up_to() as u64,
    })
}

/// Parses `true` or `1`, or `false` or `0`, in lowercase or uppercase.
fn to_bool(text: &str) -> Option<bool> {
    match text.trim().to_ascii_lowercase().as_str() {
        "true" | "1" => Some(true),
        "false" | "0" => Some(false),
        _ => None,
    }
}

/// Opens a file for reading in large pieces from an offset on.
fn open_at(path: &Path, offset: u64) -> Result<io::BufReader<fs::File>> {
    use io::Seek;
    let failed = io_error(path);
    let mut file = fs::File::open(path).map_err(&failed)?;
    file.seek(io::SeekFrom::Start(offset)).map_err(&failed)?;
    Ok(io::BufReader::with_capacity(READ_BYTES, file))
}

const READ_BYTES: usize = 256 << 10;
