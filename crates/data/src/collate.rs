//! Collation: joining samples into a batch.

use std::collections::{BTreeMap, HashMap};

use brigade_torch::{DeviceExt, Element, Result, TensorTree, TorchError, elements, from_vec};
use tch::{Device, Kind, Tensor};

use crate::DataError;

/// A sample that can be collated, and the type of its batches.
///
/// | sample | batch of `b` |
/// |---|---|
/// | tensor of shape `[…]` | tensor `[b, …]` |
/// | `f32`, `f64`, `u8`, `i8`, `i16`, `i32`, `i64` | tensor `[b]` of that type |
/// | `usize`, `u32` | tensor `[b]` of `i64`, as labels are |
/// | `bool` | tensor `[b]` of booleans |
/// | `[T; N]` or `Vec<T>` of numbers, of one length | tensor `[b, N]` |
/// | `[Tensor; N]` or `Vec<Tensor>`, of one length | the same container of batches, element by element |
/// | tuple up to eight, map from `String`, `Option` that all or none have | the same container of batches |
/// | struct with [`#[derive(Batch)]`](derive@crate::Batch) | the same struct of batches |
#[diagnostic::on_unimplemented(
    message = "samples of type `{Self}` cannot be collated",
    note = "a sample is a tensor, a number, a list of numbers or tensors, a tuple, a map from `String`, an `Option` or a struct with `#[derive(Batch)]`"
)]
pub trait Collate: Sized {
    /// Type of a batch.
    type Batch: TensorTree + Send + 'static;

    /// Joins samples into a batch with one row for each, in their order.
    ///
    /// # Errors
    /// Fails if the samples differ in shape, type or keys, or if `samples` is empty and the shape of the batch
    /// depends on a sample, as it does for tensors and lists.
    fn collate(samples: &[&Self]) -> Result<Self::Batch>;
}

macro_rules! numbers {
    ($($number:ty),+) => { $(
        impl Collate for $number {
            type Batch = Tensor;

            fn collate(samples: &[&Self]) -> Result<Tensor> {
                let numbers: Vec<Self> = samples.iter().map(|sample| **sample).collect();
                from_vec(numbers, &[samples.len() as i64])
            }
        }
    )+ };
}

numbers!(f32, f64, u8, i8, i16, i32, i64);

impl Collate for u32 {
    type Batch = Tensor;

    fn collate(samples: &[&Self]) -> Result<Tensor> {
        let numbers = samples.iter().map(|sample| i64::from(**sample)).collect();
        from_vec(numbers, &[samples.len() as i64])
    }
}

impl Collate for usize {
    type Batch = Tensor;

    fn collate(samples: &[&Self]) -> Result<Tensor> {
        let message = "a number above the range of i64 cannot be collated";
        let too_large = |_| DataError::Unfit { message: message.to_owned() };
        let numbers: Result<Vec<i64>, _> =
            samples.iter().map(|sample| i64::try_from(**sample)).collect();
        from_vec(numbers.map_err(too_large)?, &[samples.len() as i64])
    }
}

impl Collate for bool {
    type Batch = Tensor;

    fn collate(samples: &[&Self]) -> Result<Tensor> {
        let bytes: Vec<u8> = samples.iter().map(|sample| u8::from(**sample)).collect();
        Ok(from_vec(bytes, &[samples.len() as i64])?.f_to_kind(Kind::Bool)?)
    }
}

/// An element of a list that is part of a sample: a number (a list of numbers is a row), or a tensor.
pub trait CollateElement: Sized {
    /// Type of a list in a batch.
    type List: TensorTree + Send + 'static;
    /// Type of an array in a batch.
    type Array<const N: usize>: TensorTree + Send + 'static;

    /// Joins the lists of all samples.
    ///
    /// # Errors
    /// Returns the same errors as [`Collate::collate`], and fails if the lists differ in length.
    fn collate_lists(samples: &[&Vec<Self>]) -> Result<Self::List>;

    /// Joins the arrays of all samples.
    ///
    /// # Errors
    /// Returns the same errors as [`Collate::collate`].
    fn collate_arrays<const N: usize>(samples: &[&[Self; N]]) -> Result<Self::Array<N>>;
}

impl<T: CollateElement> Collate for Vec<T> {
    type Batch = T::List;

    fn collate(samples: &[&Self]) -> Result<Self::Batch> {
        T::collate_lists(samples)
    }
}

impl<T: CollateElement, const N: usize> Collate for [T; N] {
    type Batch = T::Array<N>;

    fn collate(samples: &[&Self]) -> Result<Self::Batch> {
        T::collate_arrays(samples)
    }
}

/// Returns the length that the lists of all samples have in common.
fn common_length<T>(samples: &[&Vec<T>], of: &str) -> Result<usize> {
    let length = samples.first().ok_or(DataError::EmptyBatch)?.len();
    match samples.iter().position(|sample| sample.len() != length) {
        None => Ok(length),
        Some(position) => {
            let (expected, found) = (format!("{length} {of}"), samples[position].len().to_string());
            Err(DataError::Collate { position, expected, found }.into())
        }
    }
}

macro_rules! elements {
    ($($number:ty),+) => { $(
        impl CollateElement for $number {
            type List = Tensor;
            type Array<const N: usize> = Tensor;

            fn collate_lists(samples: &[&Vec<Self>]) -> Result<Tensor> {
                let length = common_length(samples, "numbers")?;
                let mut rows = Vec::with_capacity(samples.len() * length);
                samples.iter().for_each(|sample| rows.extend_from_slice(sample));
                from_vec(rows, &[samples.len() as i64, length as i64])
            }

            fn collate_arrays<const N: usize>(samples: &[&[Self; N]]) -> Result<Tensor> {
                let numbers = samples.iter().flat_map(|sample| **sample).collect();
                from_vec(numbers, &[samples.len() as i64, N as i64])
            }
        }
    )+ };
}

elements!(f32, f64, u8, i8, i16, i32, i64);

impl CollateElement for Tensor {
    type List = Vec<Self>;
    type Array<const N: usize> = [Self; N];

    fn collate_lists(samples: &[&Vec<Self>]) -> Result<Vec<Self>> {
        let column = |index: usize| samples.iter().map(|sample| &sample[index]).collect::<Vec<_>>();
        let length = common_length(samples, "tensors")?;
        (0..length).map(|index| Self::collate(&column(index))).collect()
    }

    fn collate_arrays<const N: usize>(samples: &[&[Self; N]]) -> Result<[Self; N]> {
        let lists: Vec<Self> = (0..N)
            .map(|index| {
                Self::collate(&samples.iter().map(|sample| &sample[index]).collect::<Vec<_>>())
            })
            .collect::<Result<_, _>>()?;
        lists
            .try_into()
            .map_err(|_| TorchError::Internal("an array changed its length".into()).into())
    }
}

impl<T: Collate> Collate for Option<T> {
    type Batch = Option<T::Batch>;

    fn collate(samples: &[&Self]) -> Result<Self::Batch> {
        let first = samples.first().ok_or(DataError::EmptyBatch)?;
        let differs = |sample: &&Self| sample.is_some() != first.is_some();
        if let Some(position) = samples.iter().position(differs) {
            let word = |some| if some { "a value" } else { "none" }.to_owned();
            let (expected, found) = (word(first.is_some()), word(first.is_none()));
            return Err(DataError::Collate { position, expected, found }.into());
        }
        let column: Vec<&T> = samples.iter().filter_map(|sample| sample.as_ref()).collect();
        first.as_ref().map(|_| T::collate(&column)).transpose()
    }
}

impl Collate for Tensor {
    type Batch = Self;

    fn collate(samples: &[&Self]) -> Result<Self> {
        let first = samples.first().ok_or(DataError::EmptyBatch)?;
        for (position, sample) in samples.iter().enumerate() {
            if !alike(first, sample)? {
                let (expected, found) = (describe(first), describe(sample));
                return Err(DataError::Collate { position, expected, found }.into());
            }
        }
        let mut shape = vec![samples.len() as i64];
        shape.extend(first.size());
        // Copied here, not by libtorch's stack: in a loader's thread, that would start a second team of OpenMP threads,
        // which would compete with those of the training thread.
        match first.f_kind()? {
            Kind::Float => joined::<f32>(samples, &shape),
            Kind::Double => joined::<f64>(samples, &shape),
            Kind::Uint8 => joined::<u8>(samples, &shape),
            Kind::Int8 => joined::<i8>(samples, &shape),
            Kind::Int16 => joined::<i16>(samples, &shape),
            Kind::Int => joined::<i32>(samples, &shape),
            Kind::Int64 => joined::<i64>(samples, &shape),
            _ => None,
        }
        .unwrap_or_else(|| Ok(Self::f_stack(samples, 0)?))
    }
}

/// Returns the concatenated values of the tensors; `None` if they are not in contiguous CPU memory or require a
/// gradient: libtorch's own operator handles those.
fn joined<T: Element>(samples: &[&Tensor], shape: &[i64]) -> Option<Result<Tensor>> {
    let mut values = Vec::with_capacity(samples.iter().map(|sample| sample.numel()).sum());
    for sample in samples {
        if sample.requires_grad() {
            return None;
        }
        let found = elements::<T>(sample).ok()?;
        found.append(0..found.len(), &mut values);
    }
    Some(from_vec(values, shape))
}

fn alike(one: &Tensor, other: &Tensor) -> Result<bool> {
    let kinds = one.f_kind()? == other.f_kind()?;
    Ok(kinds && one.device() == other.device() && one.size() == other.size())
}

fn describe(tensor: &Tensor) -> String {
    let device = match tensor.device() {
        Device::Cpu => String::new(),
        device => format!(" on {}", device.label()),
    };
    let kind = tensor.f_kind().map_or_else(|_| "a tensor".into(), |kind| format!("{kind:?}"));
    format!("{kind} {:?}{device}", tensor.size())
}

macro_rules! tuples {
    ($($name:ident $index:tt),+) => {
        impl<$($name: Collate),+> Collate for ($($name,)+) {
            type Batch = ($($name::Batch,)+);

            fn collate(samples: &[&Self]) -> Result<Self::Batch> {
                Ok(($({
                    let column: Vec<&$name> = samples.iter().map(|sample| &sample.$index).collect();
                    $name::collate(&column)?
                },)+))
            }
        }
    };
}

tuples!(A 0);
tuples!(A 0, B 1);
tuples!(A 0, B 1, C 2);
tuples!(A 0, B 1, C 2, D 3);
tuples!(A 0, B 1, C 2, D 3, E 4);
tuples!(A 0, B 1, C 2, D 3, E 4, F 5);
tuples!(A 0, B 1, C 2, D 3, E 4, F 5, G 6);
tuples!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7);

macro_rules! maps {
    ($($map:ident),+) => { $(
        impl<T: Collate> Collate for $map<String, T> {
            type Batch = $map<String, T::Batch>;

            fn collate(samples: &[&Self]) -> Result<Self::Batch> {
                let keys = |map: &Self| {
                    let mut keys: Vec<&str> = map.keys().map(String::as_str).collect();
                    keys.sort_unstable();
                    format!("the keys {}", keys.join(", "))
                };
                let first = samples.first().ok_or(DataError::EmptyBatch)?;
                for (position, sample) in samples.iter().enumerate() {
                    let (expected, found) = (keys(first), keys(sample));
                    if expected != found {
                        return Err(DataError::Collate { position, expected, found }.into());
                    }
                }
                first
                    .keys()
                    .map(|key| {
                        let column: Vec<&T> =
                            samples.iter().filter_map(|sample| sample.get(key)).collect();
                        Ok((key.clone(), T::collate(&column)?))
                    })
                    .collect()
            }
        }
    )+ };
}

maps!(BTreeMap, HashMap);

#[cfg(test)]
mod tests {
    use super::*;

    fn collate<S: Collate>(samples: impl AsRef<[S]>) -> Result<S::Batch> {
        S::collate(&samples.as_ref().iter().collect::<Vec<_>>())
    }

    fn floats(tensor: &Tensor) -> Vec<f32> {
        elements::<f32>(tensor).unwrap().to_vec()
    }

    #[test]
    fn tuples_of_numbers_and_lists_become_tensors() {
        let samples =
            vec![([1.0f32, 2.0], vec![7i64], 3usize, true), ([3.0, 4.0], vec![8], 1, false)];
        let (pairs, lists, labels, flags) = collate(samples).unwrap();
        assert_eq!((pairs.size(), floats(&pairs)), (vec![2, 2], vec![1.0, 2.0, 3.0, 4.0]));
        assert_eq!(
            (lists.size(), elements::<i64>(&lists).unwrap().to_vec()),
            (vec![2, 1], vec![7, 8])
        );
        assert_eq!(
            (labels.size(), elements::<i64>(&labels).unwrap().to_vec()),
            (vec![2], vec![3, 1])
        );
        assert_eq!(
            (flags.kind(), Vec::<bool>::try_from(flags).unwrap()),
            (Kind::Bool, vec![true, false])
        );
    }

    #[test]
    fn tensors_are_stacked_whatever_their_layout() {
        let image = |start: i64| {
            Tensor::arange_start(start, start + 6, (Kind::Float, Device::Cpu)).reshape([2, 3])
        };
        let batch = collate(vec![image(0), image(6)]).unwrap();
        assert_eq!(
            (batch.size(), floats(&batch)),
            (vec![2, 2, 3], (0..12).map(|x| x as f32).collect())
        );
        let turned = collate(vec![image(0).transpose(0, 1)]).unwrap();
        assert_eq!(
            (turned.size(), floats(&turned.contiguous())),
            (vec![1, 3, 2], vec![0., 3., 1., 4., 2., 5.])
        );
        let half = collate(vec![image(0).to_kind(Kind::Half)]).unwrap();
        assert_eq!(half.kind(), Kind::Half);
    }

    #[test]
    fn samples_that_differ_are_named() {
        let tensor = |shape: &[i64], kind| Tensor::zeros(shape, (kind, Device::Cpu));
        let error = collate(vec![tensor(&[2, 3], Kind::Float), tensor(&[2, 4], Kind::Float)]);
        let error = error.unwrap_err().to_string();
        assert!(
            error.starts_with("sample 1 of the batch has Float [2, 4], the first has Float [2, 3]"),
            "{error}"
        );
        let mixed =
            vec![tensor(&[1], Kind::Float), tensor(&[1], Kind::Float), tensor(&[1], Kind::Int)];
        assert!(collate(mixed).unwrap_err().to_string().starts_with("sample 2 "));
        let error = collate::<Vec<f32>>(vec![vec![1.0], vec![]]).unwrap_err().to_string();
        assert!(
            error.starts_with("sample 1 of the batch has 0, the first has 1 numbers"),
            "{error}"
        );
        assert!(matches!(
            collate::<Tensor>(vec![]).unwrap_err().downcast_ref(),
            Some(DataError::EmptyBatch)
        ));
        assert_eq!(collate::<i64>(vec![]).unwrap().size(), [0]);
    }

    #[test]
    fn lists_of_tensors_are_joined_element_by_element() {
        let crop = |value: f32| Tensor::from_slice(&[value, -value]);
        let batch = collate(vec![vec![crop(1.0), crop(2.0)], vec![crop(3.0), crop(4.0)]]).unwrap();
        assert_eq!(
            batch.iter().map(floats).collect::<Vec<_>>(),
            [[1.0, -1.0, 3.0, -3.0], [2.0, -2.0, 4.0, -4.0]]
        );
        let [one, two] = collate(vec![[crop(1.0), crop(2.0)]]).unwrap();
        assert_eq!((one.size(), floats(&two)), (vec![1, 2], vec![2.0, -2.0]));
        let error = collate(vec![vec![crop(1.0)], vec![]]).unwrap_err().to_string();
        assert!(
            error.starts_with("sample 1 of the batch has 0, the first has 1 tensors"),
            "{error}"
        );
    }

    #[test]
    fn an_option_is_in_all_samples_or_in_none() {
        let batch = collate(vec![(1.0f32, None::<f32>), (2.0, None)]).unwrap();
        assert!(batch.1.is_none());
        let batch = collate(vec![Some(1.0f32), Some(2.0)]).unwrap();
        assert_eq!(floats(&batch.unwrap()), [1.0, 2.0]);
        let error = collate(vec![None, Some(2.0f32)]).unwrap_err().to_string();
        assert!(
            error.starts_with("sample 1 of the batch has a value, the first has none"),
            "{error}"
        );
    }

    #[test]
    fn maps_keep_their_keys() {
        let sample =
            |x: f32, key: &str| BTreeMap::from([("x".to_owned(), x), (key.to_owned(), -x)]);
        let batch = collate(vec![sample(1.0, "y"), sample(2.0, "y")]).unwrap();
        assert_eq!((floats(&batch["x"]), floats(&batch["y"])), (vec![1.0, 2.0], vec![-1.0, -2.0]));
        let error = collate(vec![sample(1.0, "y"), sample(2.0, "z")]).unwrap_err().to_string();
        assert!(
            error.starts_with(
                "sample 1 of the batch has the keys x, z, the first has the keys x, y"
            ),
            "{error}"
        );
        let hashed = HashMap::from([("x".to_owned(), 1.0f32)]);
        assert_eq!(floats(&collate(vec![hashed]).unwrap()["x"]), [1.0]);
    }
}
