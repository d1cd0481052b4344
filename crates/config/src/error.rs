//! Errors of settings.

use std::io;
use std::path::{Path, PathBuf};

use brigade_rank_env::text::{escaped, printable_within};

use crate::settings::Setting;
use crate::source::Source;

/// Error of reading, resolving or writing settings. When one is returned, no process was started and no file was
/// changed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ConfigError {
    /// A file that was asked for cannot be read.
    #[error("cannot read {} ({asked_by}): {source}", escaped(path.display()))]
    Unreadable {
        /// Path of the file.
        path: PathBuf,
        /// Reason why the file was read, such as the flag that named it.
        asked_by: String,
        /// Error of the operating system.
        source: io::Error,
    },
    /// A file is not in the format of its extension.
    #[error("{}:{line}: this is not {format}: {message}", escaped(path.display()), message = escaped(message))]
    Syntax {
        /// Path of the file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// Name of the expected format, such as "TOML".
        format: &'static str,
        /// Message of the parser, with the line itself.
        message: String,
    },
    /// A settings file has an unsupported version.
    #[error("{}:{line}: {message}", escaped(path.display()), message = escaped(message))]
    Version {
        /// Path of the file.
        path: PathBuf,
        /// Line number, from 1.
        line: usize,
        /// Message with the version and what to do.
        message: String,
    },
    /// A file has an unknown key, or a key in the wrong table.
    #[error("{at}: unknown key `{key}`{hint}", at = escaped(at), key = escaped(key))]
    UnknownKey {
        /// Source of the key.
        at: Source,
        /// Name of the key.
        key: String,
        /// Suggestion, to be appended to the message.
        hint: String,
    },
    /// A key occurs twice.
    #[error("{at}: duplicate key `{key}`", at = escaped(at), key = escaped(key))]
    Twice {
        /// Source of the second occurrence.
        at: Source,
        /// Name of the key.
        key: String,
    },
    /// A value is not valid for its setting.
    #[error("{}", escaped(format_args!("{source_of}: {name} is {found}, {wrong}")))]
    Value {
        /// Source of the value.
        source_of: Source,
        /// Name of the setting.
        name: String,
        /// Value that was found.
        found: String,
        /// Description of the expected value.
        wrong: String,
    },
    /// A variable for the ranks is not allowed.
    #[error("{}", escaped(format_args!("{source_of}: {name} {reason}")))]
    Variable {
        /// Source of the variable.
        source_of: Source,
        /// Name of the variable.
        name: String,
        /// Reason why it is not allowed.
        reason: &'static str,
    },
    /// A file of Accelerate's needs features that Brigade does not have.
    #[error("{} cannot be used: {}", escaped(path.display()), escaped(reasons.join("; ")))]
    NotHonoured {
        /// Path of the file.
        path: PathBuf,
        /// Reasons, each with the line and the key.
        reasons: Vec<String>,
    },
    /// Settings exclude each other. Contains the message.
    #[error("{}", escaped(.0))]
    Contradiction(String),
    /// A file already exists and must not be overwritten.
    #[error("{} already exists: pass --force to overwrite it", escaped(.0.display()))]
    Exists(PathBuf),
    /// A file could not be written.
    #[error("cannot write {}: {reason}", escaped(path.display()))]
    Unwritable {
        /// Path of the file.
        path: PathBuf,
        /// Reason, with what to do about it.
        reason: String,
    },
}

impl ConfigError {
    /// Returns `true` if the user can fix the error with another command line, variable or file. Otherwise an operation
    /// of the system failed.
    #[must_use]
    pub fn is_for_user(&self) -> bool {
        !matches!(self, Self::Unwritable { .. })
    }

    /// Creates a syntax error from a parser's message and the line.
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

    /// Creates the error for a text that is not a value of the setting.
    pub(crate) fn text(source: Source, name: &str, text: &str) -> Self {
        let wrong = Setting::named(name).map_or_else(String::new, |it| fault(it, text));
        Self::Value { source_of: source, name: name.to_owned(), found: format!("`{text}`"), wrong }
    }

    /// Creates the error for a value of the wrong type.
    pub(crate) fn value(source: Source, name: &str, found: String) -> Self {
        let expected = Setting::named(name).map_or("a setting's name", |it| it.expected);
        Self::wrong(source, name, found, expected)
    }

    pub(crate) fn wrong(source: Source, name: &str, found: String, expected: &str) -> Self {
        let wrong = format!("expected {expected}");
        Self::Value { source_of: source, name: name.to_owned(), found, wrong }
    }
}

/// Returns what is wrong with a text, without the text, which the message already contains.
pub(crate) fn fault(setting: &Setting, text: &str) -> String {
    setting.fault(text).trim_end_matches(&format!(", found {text:?}")).to_owned()
}

/// Maximum length of a quoted line in an error, so that the error stays on one line.
const SHOWN_CHARACTERS: usize = 60;
