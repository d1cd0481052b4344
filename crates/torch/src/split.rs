//! Splitting of values over ranks.

use std::collections::BTreeMap;
use std::ops::Range;

use tch::Tensor;

use crate::{Error, TensorTree};

/// A value whose elements can be divided among ranks: slices and vectors by element, tensors by row, tuples
/// of trees of tensors and structs with `#[derive(Batch)]` by the rows of all their tensors, and maps of
/// those.
///
/// ```
/// use brigade_torch::Split;
///
/// let names = ["a", "b", "c"];
/// assert_eq!(names[..].part(2..3, 1)?, ["c", "c"]);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
pub trait Split {
    /// Type of a rank's part.
    type Part;

    /// Returns the number of elements to divide.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] for a scalar, or a map whose values differ in length.
    fn length(&self) -> Result<usize, Error>;

    /// Returns the elements of a range, with the last element of the whole repeated `repeats` times.
    ///
    /// # Errors
    /// [`crate::TorchError::Tensor`] if libtorch fails.
    fn part(&self, range: Range<usize>, repeats: usize) -> Result<Self::Part, Error>;
}

impl<T: Clone> Split for [T] {
    type Part = Vec<T>;

    fn length(&self) -> Result<usize, Error> {
        Ok(self.len())
    }

    fn part(&self, range: Range<usize>, repeats: usize) -> Result<Vec<T>, Error> {
        let mut part = self[range].to_vec();
        part.extend(self.last().into_iter().cycle().take(repeats).cloned());
        Ok(part)
    }
}

impl<T: Clone> Split for Vec<T> {
    type Part = Self;

    fn length(&self) -> Result<usize, Error> {
        Ok(self.len())
    }

    fn part(&self, range: Range<usize>, repeats: usize) -> Result<Self, Error> {
        self.as_slice().part(range, repeats)
    }
}

impl Split for Tensor {
    type Part = Self;

    fn length(&self) -> Result<usize, Error> {
        match self.size().first() {
            Some(&rows) => Ok(rows.unsigned_abs() as usize),
            None => Err(Error::invalid_argument("a scalar cannot be split between processes")),
        }
    }

    fn part(&self, range: Range<usize>, repeats: usize) -> Result<Self, Error> {
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

/// Implements [`Split`] for tuples, by the rows of all tensors.
macro_rules! tuples {
    ($($name:ident),+) => {
        impl<$($name: TensorTree),+> Split for ($($name,)+) {
            type Part = <Self as TensorTree>::Owned;

            fn length(&self) -> Result<usize, Error> {
                self.rows()
            }

            fn part(&self, range: Range<usize>, repeats: usize) -> Result<Self::Part, Error> {
                self.try_map(&mut |tensor| tensor.part(range.clone(), repeats))
            }
        }
    };
}

tuples!(A);
tuples!(A, B);
tuples!(A, B, C);
tuples!(A, B, C, D);
tuples!(A, B, C, D, F);
tuples!(A, B, C, D, F, G);
tuples!(A, B, C, D, F, G, H);
tuples!(A, B, C, D, F, G, H, I);

impl<S: Split> Split for BTreeMap<String, S> {
    type Part = BTreeMap<String, S::Part>;

    fn length(&self) -> Result<usize, Error> {
        let mut first: Option<(&String, usize)> = None;
        for (key, value) in self {
            let found = value.length()?;
            match first {
                None => first = Some((key, found)),
                Some((_, expected)) if found == expected => {}
                Some((known, expected)) => {
                    return Err(Error::invalid_argument(format!(
                        "a map is split by position: {known:?} has {expected} elements, {key:?} \
                         has {found}"
                    )));
                }
            }
        }
        Ok(first.map_or(0, |(_, length)| length))
    }

    fn part(&self, range: Range<usize>, repeats: usize) -> Result<Self::Part, Error> {
        self.iter()
            .map(|(key, value)| Ok((key.clone(), value.part(range.clone(), repeats)?)))
            .collect()
    }
}
