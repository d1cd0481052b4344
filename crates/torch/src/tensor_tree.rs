//! Values made of tensors: what a batch, a model's output or a gathered result can be.

use std::collections::{BTreeMap, HashMap};
use std::hash::BuildHasher;

use tch::Tensor;

/// A tensor, or a container of such values: tuples up to eight, `Vec`, `Option`, arrays, maps from
/// `String`, and references to them.
///
/// The order of a visit is the order of the fields or elements; maps are visited by key, so that all
/// ranks agree.
///
/// ```no_run
/// use brigade_torch::{Tensor, Tensors};
///
/// let pair = (Tensor::from_slice(&[1.0, 2.0]), vec![Tensor::from(3.0)]);
/// let mut elements = 0;
/// pair.visit(&mut |tensor| elements += tensor.numel());
/// assert_eq!(elements, 3);
/// let (doubled, _) = pair.try_map(&mut |tensor| tensor.f_add(tensor)).unwrap();
/// assert_eq!(Vec::<f64>::try_from(doubled).unwrap(), [2.0, 4.0]);
/// ```
pub trait Tensors {
    /// The same container, owning its tensors.
    type Owned;

    /// Calls `f` with each tensor, in order.
    fn visit<'a>(&'a self, f: &mut dyn FnMut(&'a Tensor));

    /// Builds the same container from what `f` makes of each tensor.
    ///
    /// # Errors
    /// The first error of `f`.
    fn try_map<E>(&self, f: &mut dyn FnMut(&Tensor) -> Result<Tensor, E>)
    -> Result<Self::Owned, E>;
}

impl Tensors for Tensor {
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
}

impl<T: Tensors + ?Sized> Tensors for &T {
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
}

impl<T: Tensors> Tensors for Vec<T> {
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
}

impl<T: Tensors, const N: usize> Tensors for [T; N] {
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
}

impl<T: Tensors> Tensors for Option<T> {
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
}

impl<T: Tensors> Tensors for BTreeMap<String, T> {
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
}

impl<T: Tensors, S: BuildHasher + Default> Tensors for HashMap<String, T, S> {
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
}

/// A hash map's own order differs from process to process.
fn by_key<T, S>(map: &HashMap<String, T, S>) -> Vec<(&String, &T)> {
    let mut entries: Vec<_> = map.iter().collect();
    entries.sort_by_key(|(key, _)| *key);
    entries
}

macro_rules! tuples {
    ($($name:ident $index:tt),+) => {
        impl<$($name: Tensors),+> Tensors for ($($name,)+) {
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
