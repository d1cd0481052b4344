//! Building of a corpus.

use std::fmt;
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use sha2::{Digest, Sha256};

use super::{Numbers, Parts, Store, Width};
use crate::files::io_error;
use crate::parallel::each_text;
use crate::{Error, ParallelOptions, Result, TextSource, TokenList, Tokenizer};

/// What tells a corpus from others: a hash of its texts and of what splits them.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Key(pub(crate) [u8; 32]);

impl Key {
    /// The version of this crate counts, because rules may change with it.
    pub(crate) fn new(tokenizer: &dyn Tokenizer, content: &Content) -> Self {
        let mut hasher = Sha256::new();
        let describes = tokenizer.describe().to_string();
        for field in [env!("CARGO_PKG_VERSION").as_bytes(), describes.as_bytes(), &content.0] {
            hasher.update((field.len() as u64).to_le_bytes());
            hasher.update(field);
        }
        Self(hasher.finalize().into())
    }
}

/// 64 hexadecimal digits.
impl fmt::Display for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// A hash of all texts: of the hashes of each, so that threads share the work.
#[derive(PartialEq, Eq)]
pub(crate) struct Content([u8; 32]);

/// Hashes all texts.
pub(crate) fn content_of(texts: &TextSource, options: ParallelOptions<'_>) -> Result<Content> {
    let mut all = Sha256::new();
    each_text(
        texts,
        options,
        |text| Ok(Sha256::digest(text)),
        |_, digest| {
            all.update(digest);
            Ok(())
        },
    )?;
    Ok(Content(all.finalize().into()))
}

/// What numbers go to while a corpus is made.
pub(crate) trait Sink: Write + Sized {
    /// Says where they go, for messages.
    fn place(&self) -> PathBuf;

    /// Gives back all numbers that were written, as they are now, to be written anew with twice as many bytes each.
    fn widen(self) -> io::Result<Self>;
}

impl Sink for Vec<u8> {
    fn place(&self) -> PathBuf {
        "memory".into()
    }

    fn widen(self) -> io::Result<Self> {
        let mut wide = Self::with_capacity(self.len() * 4);
        widened(&self, &mut wide)?;
        Ok(wide)
    }
}

/// Writes numbers of two bytes as numbers of four.
pub(crate) fn widened(narrow: &[u8], mut wide: impl Write) -> io::Result<()> {
    let (numbers, _) = narrow.as_chunks();
    numbers.iter().try_for_each(|number| {
        wide.write_all(&u32::from(u16::from_le_bytes(*number)).to_le_bytes())
    })
}

/// Numbers tokens in the order in which they come.
pub(crate) struct Builder<S> {
    sink: Option<S>,
    width: Width,
    numbers: Numbers,
    tokens: TokenList,
    times: Vec<u64>,
    ends: Vec<u64>,
    /// The numbers of one text, encoded.
    encoded: Vec<u8>,
}

impl<S: Sink> Builder<S> {
    pub(crate) fn new(sink: S) -> Self {
        Self {
            sink: Some(sink),
            width: Width::Two,
            numbers: Numbers::default(),
            tokens: TokenList::new(),
            times: Vec::new(),
            ends: Vec::new(),
            encoded: Vec::new(),
        }
    }

    /// Splits all texts and adds their tokens; returns the hash of what was read.
    pub(crate) fn add_all(
        &mut self,
        tokenizer: &dyn Tokenizer,
        texts: &TextSource,
        options: ParallelOptions<'_>,
    ) -> Result<Content> {
        let mut all = Sha256::new();
        each_text(
            texts,
            options,
            |text| {
                let mut tokens = TokenList::new();
                tokenizer.tokenize(text, &mut tokens)?;
                Ok((tokens, Sha256::digest(text)))
            },
            |_, (tokens, digest)| {
                all.update(digest);
                self.add(&tokens)
            },
        )?;
        Ok(Content(all.finalize().into()))
    }

    fn add(&mut self, tokens: &TokenList) -> Result<()> {
        self.encoded.clear();
        for token in tokens.iter() {
            let number = match self.numbers.get(token) {
                Some(number) => *number,
                None => self.number(token)?,
            };
            if let Some(times) = self.times.get_mut(number as usize) {
                *times += 1;
            }
            match self.width {
                Width::Two => self.encoded.extend_from_slice(&(number as u16).to_le_bytes()),
                Width::Four => self.encoded.extend_from_slice(&number.to_le_bytes()),
            }
        }
        let end = self.ends.last().copied().unwrap_or(0) + tokens.len() as u64;
        self.ends.push(end);
        match &mut self.sink {
            Some(sink) => {
                sink.write_all(&self.encoded).map_err(|error| io_error(&sink.place())(error))
            }
            None => Ok(()),
        }
    }

    /// Gives the next number to a token.
    fn number(&mut self, token: &str) -> Result<u32> {
        let next = self.tokens.len();
        if next == self.width.numbers() {
            self.widen()?;
        }
        let number = u32::try_from(next).ok().filter(|number| *number < u32::MAX);
        let number = number.ok_or_else(|| {
            Error::InvalidArgument("the texts have more than 2^32 - 1 different tokens".into())
        })?;
        self.numbers.insert(token.into(), number);
        self.tokens.push(token);
        self.times.push(0);
        Ok(number)
    }

    /// Goes on with numbers of four bytes.
    fn widen(&mut self) -> Result<()> {
        if self.width == Width::Four {
            return Ok(());
        }
        if let Some(sink) = self.sink.take() {
            let place = sink.place();
            self.sink = Some(sink.widen().map_err(io_error(&place))?);
        }
        let mut wide = Vec::with_capacity(self.encoded.len() * 2);
        widened(&self.encoded, &mut wide).map_err(io_error(Path::new("memory")))?;
        self.encoded = wide;
        self.width = Width::Four;
        Ok(())
    }

    /// Makes the corpus, of whose numbers `store` knows where they are now.
    pub(crate) fn finish(self, key: Key, store: impl FnOnce(S, Width) -> Store) -> Result<Parts> {
        let Self { sink, width, tokens, times, ends, .. } = self;
        let lost = || Error::InvalidArgument("the numbers of the corpus could not be kept".into());
        let store = store(sink.ok_or_else(lost)?, width);
        Ok(Parts { key, tokens, times, ends, store })
    }
}
