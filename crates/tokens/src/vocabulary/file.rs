//! Vocabularies in files.

use std::fs;
use std::path::Path;

use brigade_checkpoint::pth::strings;
use brigade_rank_env::text::counted;
use serde::{Deserialize, Serialize};

use super::{FILLER, Vocabulary};
use crate::files::{io_error, write_whole};
use crate::{Error, Result};

/// A vocabulary as it is written.
#[derive(Serialize, Deserialize)]
struct Written {
    format: String,
    version: u32,
    /// The number of the unknown token.
    unknown: Option<u32>,
    /// `true` if `xxfake` is a filler, so that it is not a token of a text.
    filled: bool,
    tokens: Vec<Box<str>>,
}

/// The two layouts that are read: our own, and a plain list of tokens.
#[derive(Deserialize)]
#[serde(untagged)]
enum Read {
    Written(Written),
    Plain(Vec<Box<str>>),
}

const FORMAT: &str = "brigade-vocabulary";
const VERSION: u32 = 1;

impl Vocabulary {
    /// Writes the vocabulary as JSON. An existing file is replaced when the new one is complete.
    ///
    /// # Errors
    /// Fails if the file cannot be written.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let json = self.to_json();
        write_whole(path.as_ref(), |file| file.write_all(json.as_bytes()))
    }

    /// Returns the vocabulary as JSON, like [`save`](Self::save) writes it.
    #[must_use]
    pub fn to_json(&self) -> String {
        let unknown = serde_json::json!(self.unknown);
        let tokens = serde_json::json!(self.tokens);
        let filled = self.filler.is_some();
        format!(
            "{{\"format\":\"{FORMAT}\",\"version\":{VERSION},\"unknown\":{unknown},\"filled\":{filled},\
             \"tokens\":{tokens}}}\n"
        )
    }

    /// Reads a vocabulary that [`save`](Self::save) wrote, or a list of tokens: as JSON, or, if the file's name ends in
    /// `.pkl`, as a Python pickle of protocol 2 to 5 (fastai's vocabularies). Nothing in a pickle is executed.
    ///
    /// # Errors
    /// Fails if the file cannot be read, is not such a file, or is of a newer version.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let bytes = fs::read(path).map_err(io_error(path))?;
        if path.extension().is_some_and(|extension| extension == "pkl") {
            return Self::new(strings(path, &bytes)?);
        }
        Self::from_json(&bytes)
            .map_err(|error| Error::Format { path: path.into(), detail: error.to_string() })
    }

    /// Reads a vocabulary from the JSON that [`save`](Self::save) writes, or from a JSON list of tokens.
    ///
    /// # Errors
    /// Fails if the bytes are neither, or of a newer version.
    pub fn from_json(bytes: &[u8]) -> Result<Self> {
        let refuse = |detail: String| Err(Error::InvalidArgument(detail));
        let written = match serde_json::from_slice(bytes) {
            Ok(Read::Written(written)) => written,
            Ok(Read::Plain(tokens)) => return Self::new(tokens),
            Err(_) if bytes.is_empty() => return refuse("the vocabulary is empty".into()),
            Err(error) if error.is_data() => {
                return refuse("it is neither a vocabulary nor a list of tokens".into());
            }
            Err(error) => return refuse(format!("the vocabulary is not JSON: {error}")),
        };
        if written.format != FORMAT {
            return refuse(format!("its format is {:?}, expected {FORMAT:?}", written.format));
        }
        if written.version != VERSION {
            return refuse(format!(
                "it is a vocabulary of version {}, this program reads version {VERSION}; update Brigade",
                written.version
            ));
        }
        let mut vocabulary = Self::new(written.tokens)?;
        if written.filled {
            vocabulary = Self::number(vocabulary.tokens, Some(FILLER));
        }
        vocabulary.unknown = written.unknown;
        match written.unknown {
            Some(id) if id as usize >= vocabulary.len() => refuse(format!(
                "its unknown token has number {id}, and it has {}",
                counted(vocabulary.len(), "token")
            )),
            _ => Ok(vocabulary),
        }
    }
}
