//! Trees of tensors: the types of batches, outputs of models and gathered results.

use std::collections::{BTreeMap, HashMap};
use std::fmt;
use std::hash::BuildHasher;
use std::ops::Range;

use serde::{Deserialize, Serialize};
use tch::{Device, Tensor};

use crate::Error;
use crate::device::DeviceExt;

/// A tensor tree (a pytree in JAX and PyTorch): a tensor, or a container of tensor trees: tuples up to eight, `Vec`,
/// `Option`, arrays, maps from `String`, references to them, and structs with `#[derive(Batch)]`.
///
/// Moving to a device, slicing, concatenating, gathering over ranks and dispatching to them are implemented by the
/// required methods. Tensors are visited in the order of fields or elements; maps are visited by key, so that the order
/// is the same on all ranks.
///
/// ```
/// use brigade_torch::TensorTree;
/// use tch::Tensor;
///
/// let pair = (Tensor::from_slice(&[1.0, 2.0]), vec![Tensor::from_slice(&[3.0, 4.0])]);
/// let (doubled, _) = pair.try_map(&mut |tensor| tensor.f_add(tensor))?;
/// assert_eq!(Vec::<f64>::try_from(doubled)?, [2.0, 4.0]);
///
/// let (first, _) = pair.narrow_rows(0..1)?;
/// assert_eq!(Vec::<f64>::try_from(first)?, [1.0]);
/// let (all, _) = TensorTree::concat_rows(&[&pair, &pair])?;
/// assert_eq!(all.size(), [4]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
///
/// A user-defined type for which the derive macro is not suitable implements the four required methods:
///
/// ```
/// use brigade_torch::{Error, TensorTree, TreeSpec};
/// use tch::Tensor;
///
/// struct Detections {
///     boxes: Tensor,
///     labels: Vec<Tensor>,
/// }
///
/// impl TensorTree for Detections {
///     type Owned = Self;
///
///     fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
///         self.boxes.visit(f);
///         self.labels.visit(f);
///     }
///
///     fn try_map<E>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>) -> Result<Self, E> {
///         Ok(Self { boxes: self.boxes.try_map(f)?, labels: self.labels.try_map(f)? })
///     }
///
///     fn spec(&self) -> TreeSpec {
///         (&self.boxes, &self.labels).spec()
///     }
///
///     fn from_spec(
///         spec: &TreeSpec,
///         tensors: &mut dyn Iterator<Item = Tensor>,
///     ) -> Result<Self, Error> {
///         let (boxes, labels) = <(Tensor, Vec<Tensor>)>::from_spec(spec, tensors)?;
///         Ok(Self { boxes, labels })
///     }
/// }
///
/// let zeros = || Tensor::zeros([2, 4], (tch::Kind::Float, tch::Device::Cpu));
/// let found = Detections { boxes: zeros(), labels: vec![zeros()] };
/// let spec = found.spec();
/// let again = Detections::from_spec(&spec, &mut [zeros(), zeros()].into_iter())?;
/// assert_eq!((again.rows()?, again.labels.len()), (2, 1));
/// # Ok::<(), Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` is not a tree of tensors",
    note = "trees are made of `Tensor`: tuples, `Vec`, `Option`, arrays, maps from `String`, and structs with `#[derive(Batch)]`",
    note = "a number per sample is a tensor in the batch: make the field's type a parameter, or a `Tensor`"
)]
pub trait TensorTree {
    /// The same container with owned tensors.
    type Owned: TensorTree<Owned = Self::Owned>;

    /// Calls `f` with each tensor, in order.
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor));

    /// Builds the same container from the results of `f` for each tensor, in the order of [`visit`](TensorTree::visit).
    ///
    /// # Errors
    /// Returns the first error of `f`.
    fn try_map<E>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>)
    -> Result<Self::Owned, E>;

    /// Returns the structure without the tensors, from which [`from_spec`](TensorTree::from_spec) builds the tree again
    /// with tensors, also on another rank.
    fn spec(&self) -> TreeSpec;

    /// Builds a tree of this structure from tensors in the order of [`visit`](TensorTree::visit).
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] when the structure is that of another type, or when there are too few
    /// tensors.
    fn from_spec(
        spec: &TreeSpec,
        tensors: &mut dyn Iterator<Item = Tensor>,
    ) -> Result<Self::Owned, Error>;

    /// Moves every tensor to a device. A copy to a GPU is asynchronous: kernels that use it are queued after it. A copy
    /// from a GPU is complete when the method returns. A tensor that is already on the device is not copied.
    ///
    /// # Errors
    /// [`crate::TorchError::Tensor`] if libtorch fails, for example because the device's memory is full.
    fn to_device(&self, device: Device) -> Result<Self::Owned, Error> {
        self.try_map(&mut |tensor| {
            // Only one direction is asynchronous, because a later read of the CPU's memory would not wait for the copy.
            let non_blocking = device.has_streams();
            Ok(tensor.f_to_device_(device, tensor.f_kind()?, non_blocking, false)?)
        })
    }

    /// Returns the size of the first dimension, which all tensors have in common.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] for a tree without tensors, for a scalar, and if the tensors differ in
    /// their first dimension.
    fn rows(&self) -> Result<usize, Error> {
        let mut shapes = Vec::new();
        self.visit(&mut |tensor| shapes.push(tensor.size()));
        let rows = shapes.first().and_then(|shape| shape.first()).copied();
        match rows.and_then(|rows| usize::try_from(rows).ok()) {
            Some(count) if shapes.iter().all(|shape| shape.first().copied() == rows) => Ok(count),
            _ => Err(Error::invalid_argument(format!(
                "tensors of shapes {shapes:?} have no common number of rows: expected the same first \
                 dimension in all"
            ))),
        }
    }

    /// Returns a range of rows of every tensor, as views without copies.
    ///
    /// # Errors
    /// [`crate::TorchError::Tensor`] when a tensor has fewer rows.
    fn narrow_rows(&self, rows: Range<usize>) -> Result<Self::Owned, Error> {
        self.try_map(&mut |tensor| Ok(tensor.f_narrow(0, rows.start as i64, rows.len() as i64)?))
    }

    /// Splits the tree into trees of `size` rows each, the last with the remaining rows, like torch's `split`, for
    /// example for micro-batches of a batch. The tensors are views, not copies.
    ///
    /// ```
    /// use brigade_torch::TensorTree;
    /// use tch::{Device, Kind, Tensor};
    ///
    /// let batch = (Tensor::zeros([5, 3], (Kind::Float, Device::Cpu)), Tensor::from_slice(&[1i64, 2, 3, 4, 5]));
    /// let rows: Vec<usize> = batch.split_rows(2)?.iter().map(|micro| micro.rows()).collect::<Result<_, _>>()?;
    /// assert_eq!(rows, [2, 2, 1]);
    /// # Ok::<(), brigade_torch::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] for a size of 0. Also returns the errors of [`rows`](TensorTree::rows).
    fn split_rows(&self, size: usize) -> Result<Vec<Self::Owned>, Error> {
        if size == 0 {
            return Err(Error::invalid_argument(
                "split_rows: expected a size of 1 or more, found 0",
            ));
        }
        let rows = self.rows()?;
        (0..rows)
            .step_by(size)
            .map(|start| self.narrow_rows(start..rows.min(start + size)))
            .collect()
    }

    /// Concatenates trees of one structure along the first dimension of every tensor.
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] if the list is empty or structures differ; [`crate::TorchError::Tensor`]
    /// if shapes differ in another dimension.
    fn concat_rows(trees: &[&Self]) -> Result<Self::Owned, Error> {
        join(trees, "concat_rows", |tensors| Tensor::f_cat(tensors, 0))
    }

    /// Stacks trees of one structure: each tensor gets a new first dimension, one row for each tree.
    ///
    /// # Errors
    /// Returns the same errors as [`concat_rows`](TensorTree::concat_rows).
    fn stack_rows(trees: &[&Self]) -> Result<Self::Owned, Error> {
        join(trees, "stack_rows", |tensors| Tensor::f_stack(tensors, 0))
    }
}

fn join<T: TensorTree + ?Sized>(
    trees: &[&T],
    operation: &str,
    f: impl Fn(&[&Tensor]) -> Result<Tensor, tch::TchError>,
) -> Result<T::Owned, Error> {
    let Some(first) = trees.first() else {
        return Err(Error::invalid_argument(format!(
            "{operation}: expected at least one tree, found none"
        )));
    };
    let spec = first.spec();
    let mut columns: Vec<Vec<&Tensor>> = Vec::new();
    first.visit(&mut |tensor| columns.push(vec![tensor]));
    for (position, tree) in trees.iter().enumerate().skip(1) {
        let found = tree.spec();
        let mut leaves = Vec::new();
        tree.visit(&mut |tensor| leaves.push(tensor));
        if found != spec || leaves.len() != columns.len() {
            return Err(Error::invalid_argument(format!(
                "{operation}: tree {position} differs in structure from the first: expected {spec}, \
                 found {found}"
            )));
        }
        columns.iter_mut().zip(leaves).for_each(|(column, leaf)| column.push(leaf));
    }
    let joined = columns.iter().map(|column| f(column)).collect::<Result<Vec<_>, _>>()?;
    T::from_spec(&spec, &mut joined.into_iter())
}

/// The structure of a [`TensorTree`] without its tensors, small enough to send to other ranks.
///
/// ```
/// use brigade_torch::TensorTree;
/// use tch::Tensor;
///
/// let tree = (Tensor::from(1.0), vec![Tensor::from(2.0)], None::<Tensor>);
/// assert_eq!(tree.spec().to_string(), "(tensor, [tensor], none)");
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum TreeSpec {
    /// A single tensor.
    Tensor,
    /// A tuple, an array, or a struct's fields in order.
    Tuple(Vec<Self>),
    /// A list, whose length may differ from value to value.
    List(Vec<Self>),
    /// An `Option` without a value, or TorchScript's `None`.
    None,
    /// A map, in the order in which its tensors are visited.
    Map(Vec<(String, Self)>),
    /// A Boolean value beside the tensors.
    Bool(bool),
    /// An integer beside the tensors.
    Int(i64),
    /// A floating-point number beside the tensors.
    Float(f64),
    /// A text beside the tensors.
    Text(String),
}

impl TreeSpec {
    /// Returns the parts of a tuple or struct with `count` of them; for an implementation of
    /// [`TensorTree::from_spec`].
    ///
    /// # Errors
    /// [`crate::ErrorKind::InvalidArgument`] if the structure is not such a tuple.
    pub fn tuple(&self, count: usize) -> Result<&[Self], Error> {
        match self {
            Self::Tuple(parts) if parts.len() == count => Ok(parts),
            _ => Err(self.unexpected(&format!("{count} fields"))),
        }
    }

    fn unexpected(&self, expected: &str) -> Error {
        Error::invalid_argument(format!(
            "a tree of tensors has another structure: expected {expected}, found {self}"
        ))
    }
}

impl fmt::Display for TreeSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let list = |f: &mut fmt::Formatter<'_>, parts: &[Self]| {
            parts.iter().enumerate().try_for_each(|(index, part)| {
                f.write_str(if index == 0 { "" } else { ", " })?;
                write!(f, "{part}")
            })
        };
        match self {
            Self::Tensor => f.write_str("tensor"),
            Self::Tuple(parts) => {
                f.write_str("(")?;
                list(f, parts)?;
                f.write_str(")")
            }
            Self::List(parts) => {
                f.write_str("[")?;
                list(f, parts)?;
                f.write_str("]")
            }
            Self::None => f.write_str("none"),
            Self::Map(parts) => {
                f.write_str("{")?;
                for (index, (key, part)) in parts.iter().enumerate() {
                    let separator = if index == 0 { "" } else { ", " };
                    write!(f, "{separator}{key:?}: {part}")?;
                }
                f.write_str("}")
            }
            Self::Bool(value) => write!(f, "{value}"),
            Self::Int(value) => write!(f, "{value}"),
            Self::Float(value) => write!(f, "{value}"),
            Self::Text(value) => write!(f, "{value:?}"),
        }
    }
}

impl TensorTree for Tensor {
    type Owned = Self;

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        f(self);
    }

    fn try_map<E>(
        &self,
        f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>,
    ) -> Result<Self::Owned, E> {
        f(self)
    }

    fn spec(&self) -> TreeSpec {
        TreeSpec::Tensor
    }

    fn from_spec(
        spec: &TreeSpec,
        tensors: &mut dyn Iterator<Item = Tensor>,
    ) -> Result<Self::Owned, Error> {
        match spec {
            TreeSpec::Tensor => tensors.next().ok_or_else(|| {
                Error::invalid_argument(
                    "a tree of tensors lacks one: too few tensors came with its structure",
                )
            }),
            _ => Err(spec.unexpected("a tensor")),
        }
    }
}

impl<T: TensorTree + ?Sized> TensorTree for &T {
    type Owned = T::Owned;

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        (**self).visit(f);
    }

    fn try_map<E>(
        &self,
        f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>,
    ) -> Result<Self::Owned, E> {
        (**self).try_map(f)
    }

    fn spec(&self) -> TreeSpec {
        (**self).spec()
    }

    fn from_spec(
        spec: &TreeSpec,
        tensors: &mut dyn Iterator<Item = Tensor>,
    ) -> Result<Self::Owned, Error> {
        T::from_spec(spec, tensors)
    }
}

impl<T: TensorTree> TensorTree for Vec<T> {
    type Owned = Vec<T::Owned>;

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        for value in self {
            value.visit(f);
        }
    }

    fn try_map<E>(
        &self,
        f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>,
    ) -> Result<Self::Owned, E> {
        self.iter().map(|value| value.try_map(f)).collect()
    }

    fn spec(&self) -> TreeSpec {
        TreeSpec::List(self.iter().map(TensorTree::spec).collect())
    }

    fn from_spec(
        spec: &TreeSpec,
        tensors: &mut dyn Iterator<Item = Tensor>,
    ) -> Result<Self::Owned, Error> {
        match spec {
            TreeSpec::List(parts) => parts.iter().map(|part| T::from_spec(part, tensors)).collect(),
            _ => Err(spec.unexpected("a list")),
        }
    }
}

impl<T: TensorTree, const N: usize> TensorTree for [T; N] {
    type Owned = [T::Owned; N];

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        for value in self {
            value.visit(f);
        }
    }

    fn try_map<E>(
        &self,
        f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>,
    ) -> Result<Self::Owned, E> {
        let mapped: Vec<T::Owned> =
            self.iter().map(|value| value.try_map(f)).collect::<Result<_, E>>()?;
        match mapped.try_into() {
            Ok(array) => Ok(array),
            Err(_) => unreachable!("as many elements as before"),
        }
    }

    fn spec(&self) -> TreeSpec {
        TreeSpec::Tuple(self.iter().map(TensorTree::spec).collect())
    }

    fn from_spec(
        spec: &TreeSpec,
        tensors: &mut dyn Iterator<Item = Tensor>,
    ) -> Result<Self::Owned, Error> {
        let parts = spec.tuple(N)?;
        let elements: Vec<T::Owned> =
            parts.iter().map(|part| T::from_spec(part, tensors)).collect::<Result<_, Error>>()?;
        elements.try_into().map_err(|_| spec.unexpected(&format!("{N} fields")))
    }
}

impl<T: TensorTree> TensorTree for Option<T> {
    type Owned = Option<T::Owned>;

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        if let Some(value) = self {
            value.visit(f);
        }
    }

    fn try_map<E>(
        &self,
        f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>,
    ) -> Result<Self::Owned, E> {
        self.as_ref().map(|value| value.try_map(f)).transpose()
    }

    fn spec(&self) -> TreeSpec {
        self.as_ref().map_or(TreeSpec::None, TensorTree::spec)
    }

    fn from_spec(
        spec: &TreeSpec,
        tensors: &mut dyn Iterator<Item = Tensor>,
    ) -> Result<Self::Owned, Error> {
        match spec {
            TreeSpec::None => Ok(None),
            present => T::from_spec(present, tensors).map(Some),
        }
    }
}

impl<T: TensorTree> TensorTree for BTreeMap<String, T> {
    type Owned = BTreeMap<String, T::Owned>;

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        for value in self.values() {
            value.visit(f);
        }
    }

    fn try_map<E>(
        &self,
        f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>,
    ) -> Result<Self::Owned, E> {
        self.iter().map(|(key, value)| Ok((key.clone(), value.try_map(f)?))).collect()
    }

    fn spec(&self) -> TreeSpec {
        map_spec(self)
    }

    fn from_spec(
        spec: &TreeSpec,
        tensors: &mut dyn Iterator<Item = Tensor>,
    ) -> Result<Self::Owned, Error> {
        map_from_spec::<T, _>(spec, tensors)
    }
}

impl<T: TensorTree, S: BuildHasher + Default> TensorTree for HashMap<String, T, S> {
    type Owned = HashMap<String, T::Owned, S>;

    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
        for (_, value) in by_key(self) {
            value.visit(f);
        }
    }

    fn try_map<E>(
        &self,
        f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>,
    ) -> Result<Self::Owned, E> {
        by_key(self).into_iter().map(|(key, value)| Ok((key.clone(), value.try_map(f)?))).collect()
    }

    fn spec(&self) -> TreeSpec {
        map_spec(by_key(self))
    }

    fn from_spec(
        spec: &TreeSpec,
        tensors: &mut dyn Iterator<Item = Tensor>,
    ) -> Result<Self::Owned, Error> {
        map_from_spec::<T, _>(spec, tensors)
    }
}

fn map_spec<'a, T: TensorTree + 'a>(
    entries: impl IntoIterator<Item = (&'a String, &'a T)>,
) -> TreeSpec {
    let spec = |(key, value): (&String, &T)| (key.clone(), value.spec());
    TreeSpec::Map(entries.into_iter().map(spec).collect())
}

fn map_from_spec<T: TensorTree, M: FromIterator<(String, T::Owned)>>(
    spec: &TreeSpec,
    tensors: &mut dyn Iterator<Item = Tensor>,
) -> Result<M, Error> {
    match spec {
        TreeSpec::Map(parts) => parts
            .iter()
            .map(|(key, part)| Ok((key.clone(), T::from_spec(part, tensors)?)))
            .collect(),
        _ => Err(spec.unexpected("a map")),
    }
}

/// Sorted by key, because the order of a hash map differs between processes.
fn by_key<T, S>(map: &HashMap<String, T, S>) -> Vec<(&String, &T)> {
    let mut entries: Vec<_> = map.iter().collect();
    entries.sort_by_key(|(key, _)| *key);
    entries
}

macro_rules! tuples {
    ($($name:ident $index:tt),+) => {
        impl<$($name: TensorTree),+> TensorTree for ($($name,)+) {
            type Owned = ($($name::Owned,)+);

            fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor)) {
                $(self.$index.visit(f);)+
            }

            fn try_map<E>(
                &self,
                f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>,
            ) -> Result<Self::Owned, E> {
                Ok(($(self.$index.try_map(f)?,)+))
            }

            fn spec(&self) -> TreeSpec {
                TreeSpec::Tuple(vec![$(self.$index.spec()),+])
            }

            fn from_spec(
                spec: &TreeSpec,
                tensors: &mut dyn Iterator<Item = Tensor>,
            ) -> Result<Self::Owned, Error> {
                let parts = spec.tuple([$($index),+].len())?;
                Ok(($($name::from_spec(&parts[$index], tensors)?,)+))
            }
        }
    };
}

tuples!(A 0);
tuples!(A 0, B 1);
tuples!(A 0, B 1, C 2);
tuples!(A 0, B 1, C 2, D 3);
tuples!(A 0, B 1, C 2, D 3, F 4);
tuples!(A 0, B 1, C 2, D 3, F 4, G 5);
tuples!(A 0, B 1, C 2, D 3, F 4, G 5, H 6);
tuples!(A 0, B 1, C 2, D 3, F 4, G 5, H 6, I 7);

#[cfg(test)]
mod tests {
    use super::*;

    fn row(values: &[i64]) -> Tensor {
        Tensor::from_slice(values)
    }

    fn numbers(tensor: &Tensor) -> Vec<i64> {
        Vec::try_from(tensor.reshape(-1)).unwrap()
    }

    /// Takes a tree apart, serializes and deserializes its structure, and builds the tree again.
    fn rebuilt<T: TensorTree<Owned = T>>(tree: &T) -> T {
        let mut tensors = Vec::new();
        tree.visit(&mut |tensor| tensors.push(tensor.shallow_clone()));
        let spec = rmp_serde::to_vec(&tree.spec()).unwrap();
        let spec: TreeSpec = rmp_serde::from_slice(&spec).unwrap();
        assert_eq!(spec, tree.spec());
        let mut tensors = tensors.into_iter();
        let again = T::from_spec(&spec, &mut tensors).unwrap();
        assert_eq!(tensors.count(), 0);
        again
    }

    #[test]
    fn every_container_is_built_again() {
        let map = BTreeMap::from([("b".to_owned(), row(&[1])), ("a".to_owned(), row(&[2]))]);
        let hashed: HashMap<String, Tensor> = ["z", "y", "x"]
            .into_iter()
            .zip(4i64..)
            .map(|(k, n)| (k.to_owned(), row(&[n])))
            .collect();
        let tree = (vec![row(&[3]), row(&[4])], [Some(row(&[5])), None], map, hashed);
        let (list, [some, none], map, hashed) = rebuilt(&tree);
        assert_eq!(list.iter().flat_map(numbers).collect::<Vec<_>>(), [3, 4]);
        assert_eq!((some.map(|tensor| numbers(&tensor)), none.is_none()), (Some(vec![5]), true));
        assert_eq!((numbers(&map["a"]), numbers(&map["b"])), (vec![2], vec![1]));
        assert_eq!(["z", "y", "x"].map(|key| numbers(&hashed[key])[0]), [4, 5, 6]);
    }

    #[test]
    fn another_structure_is_refused() {
        let refused = |error: Error| error.to_string();
        let spec = (row(&[1]), row(&[2])).spec();
        let short = <(Tensor, Tensor)>::from_spec(&spec, &mut [row(&[1])].into_iter());
        assert!(refused(short.unwrap_err()).contains("too few tensors"));
        let three = <(Tensor, Tensor, Tensor)>::from_spec(&spec, &mut [row(&[1])].into_iter());
        assert_eq!(
            refused(three.unwrap_err()),
            "a tree of tensors has another structure: expected 3 fields, found (tensor, tensor)"
        );
        for error in [
            Tensor::from_spec(&spec, &mut std::iter::empty()).unwrap_err(),
            Vec::<Tensor>::from_spec(&spec, &mut std::iter::empty()).map(drop).unwrap_err(),
            BTreeMap::<String, Tensor>::from_spec(&spec, &mut std::iter::empty())
                .map(drop)
                .unwrap_err(),
        ] {
            assert!(refused(error).ends_with("found (tensor, tensor)"));
        }
    }

    #[test]
    fn rows_are_split_and_joined() {
        let tree = (row(&[1, 2, 3, 4, 5]), vec![row(&[6, 7, 8, 9, 10]).reshape([5, 1])]);
        let parts = tree.split_rows(2).unwrap();
        assert_eq!(parts.len(), 3);
        assert_eq!(numbers(&parts[2].0), [5]);
        let parts: Vec<_> = parts.iter().collect();
        let joined = TensorTree::concat_rows(&parts).unwrap();
        assert_eq!(
            (numbers(&joined.0), numbers(&joined.1[0])),
            (numbers(&tree.0), numbers(&tree.1[0]))
        );
        let stacked = TensorTree::stack_rows(&[&tree, &tree]).unwrap();
        assert_eq!((stacked.0.size(), stacked.1[0].size()), (vec![2, 5], vec![2, 5, 1]));
        assert_eq!(tree.to_device(Device::Cpu).unwrap().0.data_ptr(), tree.0.data_ptr());
    }

    #[test]
    fn trees_that_do_not_fit_are_named() {
        let (one, two) = (vec![row(&[1])], vec![row(&[1]), row(&[2])]);
        let error = TensorTree::concat_rows(&[&one, &two]).unwrap_err().to_string();
        assert_eq!(
            error,
            "concat_rows: tree 1 differs in structure from the first: expected [tensor], found \
             [tensor, tensor]"
        );
        assert!(<Vec<Tensor>>::concat_rows(&[]).is_err());
        assert!(one.split_rows(0).is_err());
        let uneven = (row(&[1]), row(&[1, 2])).rows().unwrap_err().to_string();
        assert!(uneven.starts_with("tensors of shapes [[1], [2]] have no common"), "{uneven}");
        assert!(Tensor::from(1.0).rows().is_err());
        assert!(Vec::<Tensor>::new().rows().is_err());
    }
}
