//! A cache of tokenized corpora in a folder.

mod format;
mod write;

use std::fs::{self, File, TryLockError};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use self::write::FileSink;
use crate::corpus::{Builder, Key, content_of};
use crate::files::io_error;
use crate::{Error, ParallelOptions, Result, TextSource, TokenCorpus, Tokenizer};

/// Cache of tokenized corpora in a folder, so that later runs and the other ranks of a host need not tokenize the texts
/// again.
///
/// The name of a file is a hash of all texts, of the tokenizer's [description](Tokenizer::describe) and of this crate's
/// version. It does not depend on a vocabulary, because a [`TokenCorpus`] can be converted to the ids of any
/// vocabulary. To compute the hash, all texts are read, on all threads.
///
/// A file is renamed to its name when it is complete and on disk. One process of a host creates it while the others
/// wait. When a file is opened, all of it is read once and compared with its checksums; a damaged or truncated file is
/// created again. Temporary files of a killed process are removed by the next process. Files that are no longer needed
/// have to be deleted by hand.
///
/// ```
/// use brigade_tokens::{ParallelOptions, TextSource, TokenCache};
/// # use brigade_tokens::{Result, TokenList, Tokenizer};
/// # #[derive(Debug)]
/// # struct Words;
/// # impl Tokenizer for Words {
/// #     fn tokenize(&self, text: &str, tokens: &mut TokenList) -> Result<()> {
/// #         tokens.extend(text.split_whitespace());
/// #         Ok(())
/// #     }
/// #     fn describe(&self) -> serde_json::Value { "words".into() }
/// # }
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// let texts = TextSource::memory(["to be or not", "to be"])?;
/// let cache = TokenCache::new(folder);
/// let made = cache.corpus(&Words, &texts, ParallelOptions::new())?;
/// let found = cache.corpus(&Words, &texts, ParallelOptions::new())?;
/// assert_eq!(found.tokens(1)?, made.tokens(1)?);
/// assert_eq!(std::fs::read_dir(folder)?.filter_map(|file| file.ok()?.path().extension().map(|e| e == "tokens")).count(), 2);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug)]
pub struct TokenCache {
    folder: PathBuf,
}

impl TokenCache {
    /// Creates a cache in a folder, which is created if it does not exist.
    #[must_use]
    pub fn new(folder: impl Into<PathBuf>) -> Self {
        Self { folder: folder.into() }
    }

    /// Returns the corpus of these texts, tokenized by this tokenizer: reads it from its file, or creates the file.
    ///
    /// # Errors
    /// Returns the same errors as [`tokenize_all`](crate::tokenize_all), and fails if the folder cannot be written to,
    /// or the texts change meanwhile.
    pub fn corpus(
        &self,
        tokenizer: &dyn Tokenizer,
        texts: &TextSource,
        options: ParallelOptions<'_>,
    ) -> Result<TokenCorpus> {
        let content = content_of(texts, options.same_threads())?;
        let key = Key::new(tokenizer, &content);
        let path = self.folder.join(format!("{key}.tokens"));
        if let Some(corpus) = self.find(&path, key) {
            return Ok(corpus);
        }
        fs::create_dir_all(&self.folder).map_err(io_error(&self.folder))?;
        let lock = Lock::of(&path.with_extension("lock"))?;
        if let Some(corpus) = self.find(&path, key) {
            return Ok(corpus);
        }
        if lock.is_held {
            write::remove_leftovers(&path);
        }
        tracing::info!(texts = texts.len(), path = %path.display(), "splitting texts into tokens");
        let sink = FileSink::create(&path).map_err(io_error(&path))?;
        let mut builder = Builder::new(sink);
        let read = builder.add_all(tokenizer, texts, options)?;
        if read != content {
            return Err(Error::InvalidArgument(
                "the texts changed while they were split into tokens; start again".into(),
            ));
        }
        write::finish(builder, key, &path)
    }

    /// Opens the file, if it exists and is intact.
    fn find(&self, path: &Path, key: Key) -> Option<TokenCorpus> {
        match format::open(path) {
            Ok(corpus) if corpus.fingerprint() == key.to_string() => return Some(corpus),
            Ok(_) => tracing::warn!(path = %path.display(), "it is the corpus of other texts"),
            Err(Error::Io { source, .. }) if source.kind() == ErrorKind::NotFound => return None,
            Err(error) => tracing::warn!(%error, "the tokens are computed again"),
        }
        None
    }
}

impl TokenCorpus {
    /// Writes the corpus to a file. An existing file is replaced when the new one is complete and on disk.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        write::save(self, path.as_ref())
    }

    /// Opens a file that [`save`](Self::save) or a [`TokenCache`] wrote, and compares all of it with its checksums.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is damaged or truncated, or is of another kind or version.
    pub fn open(path: impl AsRef<Path>) -> Result<Self> {
        format::open(path.as_ref())
    }
}

/// Lock between processes of a host, released when it is dropped or the process ends.
struct Lock {
    /// `true` if the file system has locks. Where it has none, several processes make the file, and the last one's
    /// stays.
    is_held: bool,
    _file: File,
}

impl Lock {
    fn of(path: &Path) -> Result<Self> {
        let file = File::options().write(true).create(true).truncate(false).open(path);
        let file = file.map_err(io_error(path))?;
        let taken = match file.try_lock() {
            Ok(()) => Ok(()),
            Err(TryLockError::Error(error)) => Err(error),
            Err(TryLockError::WouldBlock) => {
                tracing::info!(path = %path.display(), "another process splits the texts; waiting for it");
                lock_uninterrupted(&file)
            }
        };
        if let Err(error) = &taken {
            tracing::warn!(path = %path.display(), %error, "the cache of tokens cannot be locked");
        }
        Ok(Self { is_held: taken.is_ok(), _file: file })
    }
}

fn lock_uninterrupted(file: &File) -> io::Result<()> {
    loop {
        match file.lock() {
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            outcome => return outcome,
        }
    }
}
