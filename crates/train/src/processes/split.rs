//! Work that is divided among the ranks.

use std::collections::BTreeMap;
use std::ops::Range;

use brigade_torch::Tensor;

use crate::accelerator::Accelerator;
use crate::error::{Error, Result};

/// Something that [`Accelerator::split_between_processes`] can divide: slices and vectors, tensors along
/// the first dimension, and maps of those.
pub trait Split {
    /// A rank's part.
    type Part;

    /// Elements to divide.
    ///
    /// # Errors
    /// [`Error::Misuse`] for a scalar, or a map whose values differ in length.
    fn length(&self) -> Result<usize>;

    /// The elements of a range, with the last element of the whole repeated `repeats` times.
    ///
    /// # Errors
    /// [`Error::Tensor`].
    fn part(&self, range: Range<usize>, repeats: usize) -> Result<Self::Part>;
}

impl Accelerator {
    /// This rank's part of the input: contiguous, in order, the first ranks one element longer when it
    /// does not divide evenly.
    ///
    /// ```no_run
    /// # use brigade_train::{Accelerator, Result};
    /// # fn f(accelerator: &Accelerator) -> Result<()> {
    /// // Of 2 processes, the first gets "a" and "b", the second "c".
    /// let mine = accelerator.split_between_processes(&["a", "b", "c"][..])?;
    /// # Ok(()) }
    /// ```
    ///
    /// # Errors
    /// Those of [`Split`].
    pub fn split_between_processes<S: Split + ?Sized>(&self, input: &S) -> Result<S::Part> {
        let (range, _) = share(input.length()?, self.process_index(), self.num_processes());
        input.part(range, 0)
    }

    /// As [`Accelerator::split_between_processes`], with the last element of the whole input repeated so
    /// that all parts are equally long and can be gathered.
    ///
    /// # Errors
    /// Those of [`Split`].
    pub fn split_between_processes_padded<S: Split + ?Sized>(&self, input: &S) -> Result<S::Part> {
        let (range, repeats) = share(input.length()?, self.process_index(), self.num_processes());
        input.part(range, repeats)
    }
}

/// A rank's range, and how many elements it lacks to the longest.
fn share(length: usize, rank: usize, ranks: usize) -> (Range<usize>, usize) {
    let (each, more) = (length / ranks, length % ranks);
    let start = rank * each + rank.min(more);
    let own = each + usize::from(rank < more);
    let longest = each + usize::from(more > 0);
    // Nothing to repeat in an empty input.
    (start..start + own, if length == 0 { 0 } else { longest - own })
}

impl<T: Clone> Split for [T] {
    type Part = Vec<T>;

    fn length(&self) -> Result<usize> {
        Ok(self.len())
    }

    fn part(&self, range: Range<usize>, repeats: usize) -> Result<Vec<T>> {
        let mut part = self[range].to_vec();
        part.extend(self.last().into_iter().cycle().take(repeats).cloned());
        Ok(part)
    }
}

impl<T: Clone> Split for Vec<T> {
    type Part = Self;

    fn length(&self) -> Result<usize> {
        Ok(self.len())
    }

    fn part(&self, range: Range<usize>, repeats: usize) -> Result<Self> {
        self.as_slice().part(range, repeats)
    }
}

impl Split for Tensor {
    type Part = Self;

    fn length(&self) -> Result<usize> {
        match self.size().first() {
            Some(&rows) => Ok(rows.unsigned_abs() as usize),
            None => Err(Error::Misuse("a scalar cannot be split between processes".into())),
        }
    }

    fn part(&self, range: Range<usize>, repeats: usize) -> Result<Self> {
        let own = self.f_narrow(0, range.start as i64, range.len() as i64)?;
        if repeats == 0 {
            return Ok(own);
        }
        let last = self.f_narrow(0, self.size()[0] - 1, 1)?;
        let mut shape = last.size();
        shape[0] = repeats as i64;
        Ok(Self::f_cat(&[own, last.f_expand(shape, false)?], 0)?)
    }
}

impl<S: Split> Split for BTreeMap<String, S> {
    type Part = BTreeMap<String, S::Part>;

    fn length(&self) -> Result<usize> {
        let mut first: Option<(&String, usize)> = None;
        for (key, value) in self {
            let found = value.length()?;
            match first {
                None => first = Some((key, found)),
                Some((_, expected)) if found == expected => {}
                Some((known, expected)) => {
                    return Err(Error::Misuse(format!(
                        "a map is split by position: {known:?} has {expected} elements, {key:?} \
                         has {found}"
                    )));
                }
            }
        }
        Ok(first.map_or(0, |(_, length)| length))
    }

    fn part(&self, range: Range<usize>, repeats: usize) -> Result<Self::Part> {
        self.iter()
            .map(|(key, value)| Ok((key.clone(), value.part(range.clone(), repeats)?)))
            .collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_join_to_the_whole_and_differ_by_one() {
        for length in 0..20 {
            for ranks in 1..6 {
                let parts: Vec<_> = (0..ranks).map(|rank| share(length, rank, ranks)).collect();
                let joined: Vec<usize> =
                    parts.iter().flat_map(|(range, _)| range.clone()).collect();
                assert_eq!(joined, (0..length).collect::<Vec<_>>());
                let padded: Vec<usize> =
                    parts.iter().map(|(range, repeats)| range.len() + repeats).collect();
                assert!(padded.windows(2).all(|pair| pair[0] == pair[1]), "{padded:?}");
            }
        }
    }

    #[test]
    fn padding_repeats_the_last_of_the_whole() {
        let items = [1, 2, 3, 4, 5];
        let (range, repeats) = share(5, 3, 4);
        assert_eq!(items[..].part(range, repeats).unwrap(), [5, 5]);
    }
}
