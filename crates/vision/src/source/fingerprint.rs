//! Whether processes see the same images.

use std::fmt;

use brigade_torch::ProcessGroup;
use sha2::{Digest, Sha256};

use crate::{Result, VisionError};

/// A hash of what a source holds: SHA-256 over the names of its images in their order and, where
/// the source knows them, their sizes.
///
/// Each rank reads for itself, so ranks that see different images (a host whose copy is not
/// complete, a file that was added between two starts) would train on samples twice or never.
/// [`agree`](Self::agree) tells before the first step.
///
/// ```
/// use brigade_torch::{Backend, ProcessGroup, Store};
/// use brigade_vision::source::{ImageFiles, ImageSource};
///
/// # let gloo = Backend::Gloo(Default::default());
/// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// # std::fs::write(folder.join("a.jpg"), [1, 2, 3])?;
/// let files = ImageFiles::find(folder)?;
/// files.fingerprint()?.agree(Some(group))?; // an Accelerator's `group()`
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// Returns the bytes of the hash.
    #[must_use]
    pub fn as_bytes(&self) -> &[u8; 32] {
        &self.0
    }

    /// Compares the fingerprints of all ranks of a group; with `None` there is one process and
    /// nothing to compare. All ranks take part, and all get the same answer.
    ///
    /// # Errors
    /// [`VisionError::RanksDiffer`] when not all are equal; when the ranks do not reach each other.
    pub fn agree(&self, group: Option<&ProcessGroup>) -> Result<()> {
        let Some(group) = group else { return Ok(()) };
        let all = group.all_gather_object(&self.to_string())?;
        let Some(expected) = all.first() else { return Ok(()) };
        let ranks: Vec<usize> =
            (0..all.len()).filter(|&rank| all.get(rank) != Some(expected)).collect();
        if ranks.is_empty() { Ok(()) } else { Err(VisionError::RanksDiffer { ranks }) }
    }
}

/// 64 hexadecimal digits.
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

/// Makes a fingerprint of fields, each of which counts with its length.
pub(crate) struct Hasher(Sha256);

impl Hasher {
    /// Begins a fingerprint of a kind, so that those of different kinds are never equal.
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
    use std::thread;

    use brigade_torch::{Backend, Store};

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
    }

    /// What each rank is told.
    fn told(fingerprints: &[Fingerprint]) -> Vec<Result<(), String>> {
        let store = Store::hash().unwrap();
        thread::scope(|scope| {
            let ranks: Vec<_> = fingerprints
                .iter()
                .enumerate()
                .map(|(rank, fingerprint)| {
                    let (store, size) = (store.clone(), fingerprints.len());
                    scope.spawn(move || {
                        let gloo = Backend::Gloo(Default::default());
                        let group = ProcessGroup::new(&store, rank, size, gloo, Default::default());
                        let agreed = fingerprint.agree(Some(&group.unwrap()));
                        agreed.map_err(|error| error.to_string())
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_that_see_other_images_are_named_on_all_ranks() {
        let (one, other) = (fingerprint(&["a.jpg"]), fingerprint(&["a.jpg", "b.jpg"]));
        assert_eq!(told(&[one, one]), [Ok(()), Ok(())]);
        for answer in told(&[one, other, one, other]) {
            let error = answer.unwrap_err();
            assert!(error.contains("ranks 1 and 3 see other images than rank 0"), "{error}");
        }
        assert!(one.agree(None).is_ok());
    }
}
