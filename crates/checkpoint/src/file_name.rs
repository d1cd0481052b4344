//! File names stored in a file, such as a manifest or an index of shards.

use std::borrow::Borrow;
use std::fmt;
use std::ops::Deref;
use std::path::{Component, Path};

use serde::{Deserialize, Serialize};

/// Name of a file in a known folder: a single path component, so that joining it never leaves the folder.
///
/// Manifests and indexes come from elsewhere. Names in them are checked once, when they are read, and have this type
/// from then on.
///
/// ```
/// use brigade_checkpoint::FileName;
///
/// let name = FileName::new("model-00001-of-00002.safetensors")?;
/// assert_eq!(std::path::Path::new("run").join(&name).file_name(), Some(name.as_ref()));
/// assert!(FileName::new("../model.safetensors").is_err());
/// # Ok::<(), brigade_checkpoint::InvalidFileName>(())
/// ```
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct FileName(String);

/// Error of a string that is not a valid file name.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{0:?} is not a file name: it must be one part of a path, without `/`, and not `.` or `..`"
)]
pub struct InvalidFileName(String);

impl FileName {
    /// Checks that a name is a single path component.
    ///
    /// # Errors
    /// Fails with [`InvalidFileName`] for an empty name, for `.` and `..`, and for a name with `/` or a null character.
    pub fn new(name: impl Into<String>) -> Result<Self, InvalidFileName> {
        let name = name.into();
        let mut parts = Path::new(&name).components();
        // `a/` and `a/.` also have a single component, but differ from it.
        let single = matches!(
            (parts.next(), parts.next()),
            (Some(Component::Normal(part)), None) if part == name.as_str()
        );
        if single && !name.contains('\0') { Ok(Self(name)) } else { Err(InvalidFileName(name)) }
    }

    /// Returns the name followed by `ending`, which must not contain `/`.
    pub(crate) fn with_ending(&self, ending: fmt::Arguments<'_>) -> Self {
        Self(format!("{}{ending}", self.0))
    }

    /// Returns the name of an object's state file, such as `optimizer.json`.
    ///
    /// ```
    /// use brigade_checkpoint::FileName;
    ///
    /// assert_eq!(FileName::new("optimizer")?.json().as_str(), "optimizer.json");
    /// # Ok::<(), brigade_checkpoint::InvalidFileName>(())
    /// ```
    #[must_use]
    pub fn json(&self) -> Self {
        self.with_ending(format_args!(".json"))
    }

    /// Returns the name as a string.
    #[must_use]
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl Deref for FileName {
    type Target = str;

    fn deref(&self) -> &str {
        &self.0
    }
}

impl Borrow<str> for FileName {
    fn borrow(&self) -> &str {
        &self.0
    }
}

impl<T: ?Sized> AsRef<T> for FileName
where
    str: AsRef<T>,
{
    fn as_ref(&self) -> &T {
        self.0.as_str().as_ref()
    }
}

impl fmt::Display for FileName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(&self.0)
    }
}

impl PartialEq<str> for FileName {
    fn eq(&self, other: &str) -> bool {
        self.0 == other
    }
}

impl TryFrom<String> for FileName {
    type Error = InvalidFileName;

    fn try_from(name: String) -> Result<Self, InvalidFileName> {
        Self::new(name)
    }
}

impl From<FileName> for String {
    fn from(name: FileName) -> Self {
        name.0
    }
}
