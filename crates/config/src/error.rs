//! What may be wrong with settings.

use std::io;
use std::path::{Path, PathBuf};

use brigade_rank_env::text::{escaped, printable_within};

use crate::settings::Setting;
use crate::source::Source;

/// Nothing has been started and no file changed when one of these is returned.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A file that was asked for cannot be read.
    #[error("cannot read {} ({asked_by}): {source}", escaped(path.display()))]
    Unreadable {
        /// The file.
        path: PathBuf,
        /// Why it was looked for.
        asked_by: String,
        /// What the system says.
        source: io::Error,
    },
    /// A file is not what its ending says.
    #[error("{}:{line}: this is not {format}: {message}", escaped(path.display()), message = escaped(message))]
    Syntax {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// What was expected: "TOML".
        format: &'static str,
        /// What the parser says, and the line itself.
        message: String,
    },
    /// A file is of another version.
    #[error("{}:{line}: {message}", escaped(path.display()), message = escaped(message))]
    Version {
        /// The file.
        path: PathBuf,
        /// The line, from 1.
        line: usize,
        /// Which version, and what to do.
        message: String,
    },
    /// A file has a key that means nothing, or stands in the wrong place.
    #[error("{at}: unknown key `{key}`{hint}", at = escaped(at), key = escaped(key))]
    UnknownKey {
        /// Where.
        at: Source,
        /// The key.
        key: String,
        /// What to write instead.
        hint: String,
    },
    /// A key is there twice.
    #[error("{at}: `{key}` is there a second time", at = escaped(at), key = escaped(key))]
    Twice {
        /// Where.
        at: Source,
        /// The key.
        key: String,
    },
    /// A value is not what its setting expects.
    #[error("{}", escaped(format_args!("{source_of}: {name} is {found}, {wrong}")))]
    Value {
        /// Where it was set.
        source_of: Source,
        /// The setting.
        name: String,
        /// What was found.
        found: String,
        /// What was expected.
        wrong: String,
    },
    /// A variable for the ranks that cannot be one.
    #[error("{}", escaped(format_args!("{source_of}: {name} {reason}")))]
    Variable {
        /// Where it was set.
        source_of: Source,
        /// The variable.
        name: String,
        /// Why not.
        reason: &'static str,
    },
    /// A file of Accelerate's asks for what is not here.
    #[error("{} cannot be used: {}", escaped(path.display()), escaped(reasons.join("; ")))]
    NotHonoured {
        /// The file.
        path: PathBuf,
        /// The lines and keys, and why.
        reasons: Vec<String>,
    },
    /// Settings that cannot hold together.
    #[error("{}", escaped(.0))]
    Contradiction(String),
    /// A file exists and must not be overwritten.
    #[error("{} already exists: --force writes over it", escaped(.0.display()))]
    Exists(PathBuf),
    /// A file could not be written.
    #[error("cannot write {}: {reason}", escaped(path.display()))]
    Unwritable {
        /// The file.
        path: PathBuf,
        /// What is in the way and what to do about it.
        reason: String,
    },
}

impl ConfigError {
    /// A user can mend it with another command line, variable or file. Else the system refused
    /// something.
    #[must_use]
    pub fn is_for_user(&self) -> bool {
        !matches!(self, Self::Unwritable { .. })
    }

    /// What a parser says of a line, with that line.
    pub(crate) fn syntax(
        path: &Path,
        text: &str,
        line: usize,
        format: &'static str,
        message: &str,
    ) -> Self {
        let line = line.max(1);
        let shown = text.lines().nth(line - 1).unwrap_or_default().trim();
        let shown = printable_within(shown, SHOWN_CHARACTERS);
        let message =
            if shown.is_empty() { message.to_owned() } else { format!("{message}, in `{shown}`") };
        Self::Syntax { path: path.to_owned(), line, format, message }
    }

    /// A text that is not a value of a setting.
    pub(crate) fn text(source: Source, name: &str, text: &str) -> Self {
        let wrong = Setting::named(name).map_or_else(String::new, |it| fault(it, text));
        Self::Value { source_of: source, name: name.to_owned(), found: format!("`{text}`"), wrong }
    }

    /// Something found that is of another kind.
    pub(crate) fn value(source: Source, name: &str, found: String) -> Self {
        let expected = Setting::named(name).map_or("a setting's name", |it| it.expected);
        Self::wrong(source, name, found, expected)
    }

    pub(crate) fn wrong(source: Source, name: &str, found: String, expected: &str) -> Self {
        let wrong = format!("expected {expected}");
        Self::Value { source_of: source, name: name.to_owned(), found, wrong }
    }
}

/// What is wrong with a text, without the text: that is said before it.
pub(crate) fn fault(setting: &Setting, text: &str) -> String {
    setting.fault(text).trim_end_matches(&format!(", found {text:?}")).to_owned()
}

/// Of a line that cannot be read: an error should stay one line.
const SHOWN_CHARACTERS: usize = 60;
