//! Work that is divided among the ranks.

use std::ops::Range;

use brigade_torch::{Result, Split};

use crate::processes::Processes;

impl Processes {
    /// Returns this rank's part of the input: contiguous and in order; the first ranks get one element more if it does
    /// not divide evenly.
    ///
    /// ```
    /// # use brigade_train::{ConnectOptions, Processes};
    /// # let processes = Processes::join(ConnectOptions { cpu: true, ..Default::default() })?;
    /// // Of 2 processes, the first gets "a" and "b", the second "c".
    /// let mine = processes.split_between_processes(&["a", "b", "c"][..])?;
    /// # assert_eq!(mine.len(), 3);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// Returns the errors of [`Split`].
    pub fn split_between_processes<S: Split + ?Sized>(&self, input: &S) -> Result<S::Part> {
        let (range, _) = share(input.length()?, self.process_index(), self.num_processes());
        input.part(range, 0)
    }

    /// Returns this rank's part of the input as [`Processes::split_between_processes`] does, with the last element of
    /// the whole input repeated so that all parts are equally long and can be gathered.
    ///
    /// # Errors
    /// Returns the errors of [`Split`].
    pub fn split_between_processes_padded<S: Split + ?Sized>(&self, input: &S) -> Result<S::Part> {
        let (range, repeats) = share(input.length()?, self.process_index(), self.num_processes());
        input.part(range, repeats)
    }
}

/// Returns a rank's range, and the number of elements by which it is shorter than the longest one.
fn share(length: usize, rank: usize, ranks: usize) -> (Range<usize>, usize) {
    let (each, more) = (length / ranks, length % ranks);
    let start = rank * each + rank.min(more);
    let own = each + usize::from(rank < more);
    let longest = each + usize::from(more > 0);
    // An empty input has no element to repeat.
    (start..start + own, if length == 0 { 0 } else { longest - own })
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
