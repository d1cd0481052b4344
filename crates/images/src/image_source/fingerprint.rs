//! Fingerprints of sources, to check that processes have the same images.

use std::fmt;

use sha2::{Digest, Sha256};

/// A hash of the content of a source: SHA-256 over the names of its images in their order and, if they are known, their
/// sizes.
///
/// Each rank reads by itself, so that ranks with different images (a host whose copy is not complete, a file that was
/// added between two starts) would train on some samples twice or never. `brigade_vision::check_ranks_agree` detects
/// this before the first step.
///
/// ```
/// use brigade_images::source::{ImageFiles, ImageSource};
///
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// # std::fs::write(folder.join("a.jpg"), [1, 2, 3])?;
/// let before = ImageFiles::find(folder)?.fingerprint()?;
/// std::fs::write(folder.join("b.jpg"), [4, 5])?;
/// assert_ne!(ImageFiles::find(folder)?.fingerprint()?, before);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// Returns the fingerprint of a list of fields, for data that belong to the images, such as their labels.
    /// Fingerprints of different kinds are never equal.
    #[must_use]
    pub fn of<F: AsRef<[u8]>>(kind: &str, fields: impl IntoIterator<Item = F>) -> Self {
        let mut hasher = Hasher::new(kind);
        fields.into_iter().for_each(|field| hasher.bytes(field.as_ref()));
        hasher.finish()
    }

    /// Returns the first eight bytes of the hash as a number.
    pub(crate) fn number(&self) -> u64 {
        self.0.iter().take(8).fold(0, |sum, byte| sum << 8 | u64::from(*byte))
    }

    /// Returns the bytes of the hash.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

/// Writes the hash as 64 hexadecimal digits.
impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Fingerprint({self})")
    }
}

/// Computes a fingerprint of fields, each of which is hashed with its length.
pub(crate) struct Hasher(Sha256);

impl Hasher {
    /// Begins a fingerprint of a kind, so that fingerprints of different kinds are never equal.
    pub(crate) fn new(kind: &str) -> Self {
        let mut hasher = Self(Sha256::new());
        hasher.bytes(kind.as_bytes());
        hasher
    }

    pub(crate) fn bytes(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.0.update(bytes);
    }

    pub(crate) fn number(&mut self, number: u64) {
        self.0.update(number.to_le_bytes());
    }

    pub(crate) fn finish(self) -> Fingerprint {
        Fingerprint(self.0.finalize().into())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fingerprint(words: &[&str]) -> Fingerprint {
        let mut hasher = Hasher::new("test");
        words.iter().for_each(|word| hasher.bytes(word.as_bytes()));
        hasher.finish()
    }

    #[test]
    fn fields_do_not_flow_into_each_other() {
        assert_eq!(fingerprint(&["ab", "c"]), fingerprint(&["ab", "c"]));
        assert_ne!(fingerprint(&["ab", "c"]), fingerprint(&["a", "bc"]));
        assert_eq!(fingerprint(&[]).to_string().len(), 64);
        assert_eq!(Fingerprint::of("test", ["ab", "c"]), fingerprint(&["ab", "c"]));
        assert_ne!(Fingerprint::of("other", ["ab", "c"]), fingerprint(&["ab", "c"]));
    }
}
