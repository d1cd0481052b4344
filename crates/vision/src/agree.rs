//! Check that all ranks have the same images.

use brigade_images::source::Fingerprint;
use brigade_torch::{ProcessGroup, Result};

use crate::VisionError;

/// Checks that all ranks of a group have the same images, by their fingerprints. With `None` there is a single process,
/// and the check succeeds. All ranks take part, and all get the same result.
///
/// Each rank lists its images by itself, so that ranks with different images (a host whose copy is not complete, a file
/// that was added between two starts) would train on some samples twice or never.
///
/// ```
/// use brigade_torch::{Backend, ProcessGroup, Store};
/// use brigade_vision::check_ranks_agree;
/// use brigade_vision::source::{ImageFiles, ImageSource};
///
/// # let gloo = Backend::Gloo(Default::default());
/// # let group = &ProcessGroup::new(&Store::hash()?, 0, 1, gloo, Default::default())?;
/// # let folder = tempfile::tempdir()?;
/// # let folder = folder.path();
/// # std::fs::write(folder.join("a.jpg"), [1, 2, 3])?;
/// let files = ImageFiles::find(folder)?;
/// check_ranks_agree(&files.fingerprint()?, Some(group))?; // an Accelerator's `group().as_ref()`
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// # Errors
/// [`VisionError::RanksDiffer`] if the fingerprints differ. Also fails if the ranks cannot communicate.
pub fn check_ranks_agree(fingerprint: &Fingerprint, group: Option<&ProcessGroup>) -> Result<()> {
    let Some(group) = group else { return Ok(()) };
    let all = group.all_gather_object(&fingerprint.to_string())?;
    let Some(expected) = all.first() else { return Ok(()) };
    let ranks: Vec<usize> =
        (0..all.len()).filter(|&rank| all.get(rank) != Some(expected)).collect();
    if ranks.is_empty() { Ok(()) } else { Err(VisionError::RanksDiffer { ranks }.into()) }
}

#[cfg(test)]
mod tests {
    use std::borrow::Cow;
    use std::thread;

    use brigade_images::ImageError;
    use brigade_images::source::ImageSource;
    use brigade_torch::{Backend, Store};

    use super::*;

    /// Source of images that have only names.
    struct Names(&'static [&'static str]);

    impl ImageSource for Names {
        fn len(&self) -> usize {
            self.0.len()
        }

        fn read(&self, _: usize, _: &mut Vec<u8>) -> Result<(), ImageError> {
            Ok(())
        }

        fn name(&self, index: usize) -> Cow<'_, str> {
            self.0[index].into()
        }
    }

    /// Result that each rank gets.
    fn answers(fingerprints: &[Fingerprint]) -> Vec<Result<(), String>> {
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
                        let agreed = check_ranks_agree(fingerprint, Some(&group.unwrap()));
                        agreed.map_err(|error| error.to_string())
                    })
                })
                .collect();
            ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
        })
    }

    #[test]
    fn ranks_that_see_other_images_are_named_on_all_ranks() {
        let one = Names(&["a.jpg"]).fingerprint().unwrap();
        let other = Names(&["a.jpg", "b.jpg"]).fingerprint().unwrap();
        assert_eq!(answers(&[one, one]), [Ok(()), Ok(())]);
        for answer in answers(&[one, other, one, other]) {
            let error = answer.unwrap_err();
            assert!(error.contains("ranks 1 and 3 see other images than rank 0"), "{error}");
        }
        assert!(check_ranks_agree(&one, None).is_ok());
    }
}
