//! Parallel tokenization.

use std::collections::BTreeMap;
use std::num::NonZeroUsize;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::mpsc::{self, Receiver, Sender};
use std::thread;

use brigade_rank_env::text::counted;
use parking_lot::Mutex;

use crate::source::Unread;
use crate::{Error, Result, TextSource, TokenList, Tokenizer};

/// Options of parallel tokenization: the number of threads, and a callback for progress.
///
/// ```
/// use brigade_tokens::{ParallelOptions, Result, TextSource, TokenList, Tokenizer, tokenize_all};
///
/// #[derive(Debug)]
/// struct Words;
///
/// impl Tokenizer for Words {
///     fn tokenize(&self, text: &str, tokens: &mut TokenList) -> Result<()> {
///         tokens.extend(text.split_whitespace());
///         Ok(())
///     }
///
///     fn describe(&self) -> serde_json::Value {
///         "words".into()
///     }
/// }
///
/// let texts = TextSource::memory(["a fine film", "a bad one"])?;
/// let mut lengths = Vec::new();
/// tokenize_all(&Words, &texts, ParallelOptions::new().threads(2), |_, tokens| {
///     lengths.push(tokens.len());
///     Ok(())
/// })?;
/// assert_eq!(lengths, [3, 3]);
/// # Ok::<(), brigade_tokens::Error>(())
/// ```
pub struct ParallelOptions<'a> {
    threads: Option<usize>,
    progress: Option<Box<dyn FnMut(TokenProgress) + 'a>>,
}

impl std::fmt::Debug for ParallelOptions<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ParallelOptions").field("threads", &self.threads).finish_non_exhaustive()
    }
}

impl Default for ParallelOptions<'_> {
    fn default() -> Self {
        Self::new()
    }
}

/// Progress of the tokenization of a corpus.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TokenProgress {
    /// Number of texts that are tokenized.
    pub texts: usize,
    /// Total number of texts.
    pub of: usize,
    /// Size in bytes of the texts that are tokenized.
    pub bytes: u64,
}

impl<'a> ParallelOptions<'a> {
    /// Creates options with one thread per core that is available to the process.
    #[must_use]
    pub fn new() -> Self {
        Self { threads: None, progress: None }
    }

    /// Sets the number of threads, at least 1. If several ranks of one host tokenize, divide the cores among them.
    #[must_use]
    pub fn threads(mut self, threads: usize) -> Self {
        self.threads = Some(threads.max(1));
        self
    }

    /// Returns options with the same number of threads, and without a progress callback.
    pub(crate) fn same_threads(&self) -> ParallelOptions<'static> {
        ParallelOptions { threads: self.threads, progress: None }
    }

    /// Sets a callback that is called with the progress after each chunk of the corpus, on the calling thread.
    #[must_use]
    pub fn progress(mut self, progress: impl FnMut(TokenProgress) + 'a) -> Self {
        self.progress = Some(Box::new(progress));
        self
    }
}

/// Tokenizes all texts of a source on several threads. Calls `consume` with each text's index and tokens, in the order
/// of the texts, on the calling thread.
///
/// The threads read the files, in chunks of 256 KiB or 1,024 texts. At most 4 chunks per thread are in flight, so that
/// memory does not grow with the corpus if `consume` is slow. The fields of a text are joined, as in
/// [`TextSource::texts`].
///
/// # Errors
/// Fails if a text cannot be read, or the tokenizer rejects it or panics. The error is that of the first such text, and
/// names it; `consume` was called for all texts before it. Also returns the first error of `consume`.
pub fn tokenize_all(
    tokenizer: &dyn Tokenizer,
    texts: &TextSource,
    options: ParallelOptions<'_>,
    mut consume: impl FnMut(usize, &TokenList) -> Result<()>,
) -> Result<()> {
    each_text(
        texts,
        options,
        |text| {
            let mut tokens = TokenList::new();
            tokenizer.tokenize(text, &mut tokens)?;
            Ok(tokens)
        },
        |index, tokens| consume(index, &tokens),
    )
}

/// Applies `work` to all texts on several threads, and passes the results to `consume` in order.
pub(crate) fn each_text<T: Send>(
    texts: &TextSource,
    options: ParallelOptions<'_>,
    work: impl Fn(&str) -> Result<T> + Sync,
    consume: impl FnMut(usize, T) -> Result<()>,
) -> Result<()> {
    each_row(texts, options, |fields| work(&texts.join(fields)), consume)
}

/// Does the same as [`each_text`], with the fields of each text.
pub(crate) fn each_row<T: Send>(
    texts: &TextSource,
    mut options: ParallelOptions<'_>,
    work: impl Fn(Vec<String>) -> Result<T> + Sync,
    mut consume: impl FnMut(usize, T) -> Result<()>,
) -> Result<()> {
    let available = || thread::available_parallelism().map_or(1, NonZeroUsize::get);
    let threads = options.threads.unwrap_or_else(available);
    let (ticket, tickets) = mpsc::channel();
    for _ in 0..threads * PIECES_PER_THREAD {
        // Cannot fail: the receiver is in the same scope.
        let _ = ticket.send(());
    }
    let feed = Mutex::new(Feed {
        texts: texts.unread()?,
        tickets,
        next_piece: 0,
        next_text: 0,
        ended: false,
    });
    let worker = Worker { source: texts, feed: &feed, work: &work };
    thread::scope(|scope| {
        // Dropped at the end of this closure, so that threads that wait for a ticket end, too.
        let ticket = ticket;
        let (sender, done) = mpsc::channel();
        for number in 0..threads {
            let sender = sender.clone();
            thread::Builder::new()
                .name(format!("tokens-{number}"))
                .spawn_scoped(scope, move || worker.run(&sender))
                .map_err(|error| {
                    Error::InvalidArgument(format!(
                        "cannot start thread {number} of {threads}: {error}"
                    ))
                })?;
        }
        drop(sender);
        let mut done_so_far = TokenProgress { texts: 0, of: texts.len(), bytes: 0 };
        for piece in InOrder::of(done) {
            done_so_far.bytes += piece.bytes;
            for item in piece.made {
                consume(done_so_far.texts, item)?;
                done_so_far.texts += 1;
            }
            if let Some(error) = piece.failed {
                return Err(error);
            }
            if let Some(progress) = &mut options.progress {
                progress(done_so_far);
            }
            // Fails only if all threads have ended.
            let _ = ticket.send(());
        }
        if done_so_far.texts == done_so_far.of {
            return Ok(());
        }
        Err(Error::InvalidArgument(format!(
            "the source gave {} and had {} before; it was changed meanwhile",
            counted(done_so_far.texts, "text"),
            done_so_far.of
        )))
    })
}

/// Queue of the texts that no thread has taken yet.
struct Feed<'a> {
    texts: Box<dyn Iterator<Item = Result<Unread>> + Send + 'a>,
    /// Tickets: one for each further piece that may be in progress.
    tickets: Receiver<()>,
    next_piece: u64,
    next_text: usize,
    ended: bool,
}

/// Texts of one piece, for one thread.
struct Texts {
    number: u64,
    first: usize,
    texts: Vec<Result<Unread>>,
}

/// Results of one piece.
struct Piece<T> {
    number: u64,
    made: Vec<T>,
    bytes: u64,
    failed: Option<Error>,
}

impl Feed<'_> {
    /// Takes a piece. Waits until one may be taken.
    fn next(&mut self) -> Option<Texts> {
        if self.ended || self.tickets.recv().is_err() {
            return None;
        }
        let (number, first) = (self.next_piece, self.next_text);
        let (mut texts, mut bytes) = (Vec::new(), 0);
        while bytes < PIECE_BYTES && texts.len() < PIECE_TEXTS {
            let Some(text) = self.texts.next() else {
                self.ended = true;
                break;
            };
            bytes += match &text {
                Ok(Unread::Fields(fields)) => fields.iter().map(String::len).sum(),
                Ok(Unread::File(_)) => FILE_BYTES,
                Err(_) => {
                    // Texts after an error are not needed.
                    self.ended = true;
                    PIECE_BYTES
                }
            };
            texts.push(text);
        }
        self.next_piece += 1;
        self.next_text += texts.len();
        (!texts.is_empty()).then_some(Texts { number, first, texts })
    }
}

/// State of one thread.
struct Worker<'a, 'f, W> {
    source: &'a TextSource,
    feed: &'a Mutex<Feed<'f>>,
    work: &'a W,
}

impl<W> Clone for Worker<'_, '_, W> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<W> Copy for Worker<'_, '_, W> {}

impl<W> Worker<'_, '_, W> {
    fn run<T>(self, done: &Sender<Piece<T>>)
    where
        W: Fn(Vec<String>) -> Result<T>,
    {
        loop {
            let taken = self.feed.lock().next();
            let Some(texts) = taken else { return };
            if done.send(self.piece(texts)).is_err() {
                return;
            }
        }
    }

    fn piece<T>(&self, texts: Texts) -> Piece<T>
    where
        W: Fn(Vec<String>) -> Result<T>,
    {
        let mut made = Vec::with_capacity(texts.texts.len());
        let (mut bytes, mut failed) = (0, None);
        for (text, index) in texts.texts.into_iter().zip(texts.first..) {
            match text.and_then(|text| self.one(text, index)) {
                Ok((item, length)) => {
                    made.push(item);
                    bytes += length as u64;
                }
                Err(error) => {
                    failed = Some(error);
                    break;
                }
            }
        }
        Piece { number: texts.number, made, bytes, failed }
    }

    fn one<T>(&self, text: Unread, index: usize) -> Result<(T, usize)>
    where
        W: Fn(Vec<String>) -> Result<T>,
    {
        let fields = text.fields()?;
        let bytes = fields.iter().map(String::len).sum();
        let outcome = catch_panic(|| (self.work)(fields));
        outcome.map(|item| (item, bytes)).map_err(|source| Error::Text {
            name: self.source.name(index),
            source: Box::new(source),
        })
    }
}

/// Converts a panic to an error.
pub(crate) fn catch_panic<T>(work: impl FnOnce() -> Result<T>) -> Result<T> {
    let outcome = catch_unwind(AssertUnwindSafe(work));
    outcome.unwrap_or_else(|panic| Err(Error::Panicked(message(&*panic))))
}

/// Returns the message of a panic.
fn message(panic: &(dyn std::any::Any + Send)) -> String {
    let text = panic.downcast_ref::<&str>().copied();
    text.or_else(|| panic.downcast_ref::<String>().map(String::as_str))
        .unwrap_or("it gave no reason")
        .to_owned()
}

/// Iterator over pieces in the order of their numbers.
struct InOrder<T> {
    done: Receiver<Piece<T>>,
    waiting: BTreeMap<u64, Piece<T>>,
    next: u64,
}

impl<T> InOrder<T> {
    fn of(done: Receiver<Piece<T>>) -> Self {
        Self { done, waiting: BTreeMap::new(), next: 0 }
    }
}

impl<T> Iterator for InOrder<T> {
    type Item = Piece<T>;

    fn next(&mut self) -> Option<Piece<T>> {
        loop {
            if let Some(piece) = self.waiting.remove(&self.next) {
                self.next += 1;
                return Some(piece);
            }
            let piece = self.done.recv().ok()?;
            self.waiting.insert(piece.number, piece);
        }
    }
}

const PIECES_PER_THREAD: usize = 4;
const PIECE_BYTES: usize = 256 << 10;
const PIECE_TEXTS: usize = 1024;
/// Assumed size of a text file that has not been read.
const FILE_BYTES: usize = 2 << 10;
