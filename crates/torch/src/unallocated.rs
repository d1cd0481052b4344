//! Tensors without memory.

use tch::{Device, Kind, Tensor};

use crate::bridge::{borrow, ffi, own};
use crate::error::Error;

/// Returns a tensor that has a shape, a type and a device, but no memory: operations on it return an error with the
/// text `why`. `set_data` gives it memory, as for a parameter of a model that is built before its values exist.
///
/// `strides` are those of the later memory, in elements. By default the tensor is contiguous.
///
/// ```
/// use brigade_torch::{has_memory, unallocated};
/// use tch::{Device, Kind, Tensor};
///
/// let mut weight = unallocated(&[1 << 20, 1 << 20], None, (Kind::Float, Device::Cpu), "no values yet")?;
/// assert_eq!(weight.size(), [1 << 20, 1 << 20]);
/// assert!(!has_memory(&weight));
/// assert!(weight.f_norm().unwrap_err().to_string().contains("no values yet"));
/// weight.set_data(&Tensor::ones([2, 2], (Kind::Float, Device::Cpu)));
/// assert_eq!(weight.double_value(&[1, 1]), 1.0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`crate::ErrorKind::InvalidArgument`] for a negative size or stride, or if the numbers of strides and dimensions
/// differ; [`crate::TorchError::Tensor`] for a device that does not exist.
pub fn unallocated(
    shape: &[i64],
    strides: Option<&[i64]>,
    options: (Kind, Device),
    why: &str,
) -> Result<Tensor, Error> {
    let strides = strides.map_or_else(|| contiguous(shape), <[i64]>::to_vec);
    if strides.len() != shape.len() || shape.iter().chain(&strides).any(|&number| number < 0) {
        return Err(Error::invalid_argument(format!(
            "a tensor cannot have the shape {shape:?} and the strides {strides:?}"
        )));
    }
    let like = Tensor::f_empty([0], options)?;
    let made = ffi::unallocated(borrow(&like), shape, &strides, why)
        .map_err(|error| Error::libtorch("unallocated", &error))?;
    Ok(own(made))
}

/// Returns `true` if a tensor's elements are in memory: `false` for a tensor of [`unallocated`], and for a parameter of
/// a sharded model outside of its unit.
#[must_use]
pub fn has_memory(tensor: &Tensor) -> bool {
    ffi::has_memory(borrow(tensor))
}

/// Replaces the memory, the type and the shape of a tensor by those of another one, also on another device. The tensor
/// keeps its identity, so that all its handles see the change. In contrast to tch's method of this name it also takes
/// values on a TPU for a tensor on the CPU, and the reverse.
///
/// ```
/// use brigade_torch::set_data;
/// use tch::Tensor;
/// let (weight, values) = (Tensor::from(1f32), Tensor::from_slice(&[2i64, 3]));
/// set_data(&weight, &values)?;
/// assert_eq!(weight, values);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`crate::TorchError::Libtorch`] for values in another layout, or of a type without gradients if the tensor requires
/// them.
pub fn set_data(tensor: &Tensor, values: &Tensor) -> Result<(), Error> {
    ffi::set_data(borrow(tensor), borrow(values))
        .map_err(|error| Error::libtorch("set_data", &error))
}

fn contiguous(shape: &[i64]) -> Vec<i64> {
    let mut strides = vec![1i64; shape.len()];
    for place in (1..shape.len()).rev() {
        strides[place - 1] = strides[place].wrapping_mul(shape[place].max(1));
    }
    strides
}

#[cfg(test)]
mod tests {
    use super::*;

    const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

    #[test]
    fn shape_type_and_flags_are_those_of_a_tensor() {
        let tensor = unallocated(&[3, 4], None, (Kind::Half, Device::Cpu), "nothing").unwrap();
        assert_eq!((tensor.size(), tensor.stride()), (vec![3, 4], vec![4, 1]));
        assert_eq!((tensor.kind(), tensor.device()), (Kind::Half, Device::Cpu));
        let tensor = tensor.set_requires_grad(true);
        assert!(tensor.requires_grad() && tensor.is_leaf());
        assert!(!has_memory(&tensor.detach()));
        let other = unallocated(&[2, 3, 4, 5], Some(&[60, 1, 15, 3]), CPU, "nothing").unwrap();
        assert_eq!(other.stride(), [60, 1, 15, 3]);
    }

    #[test]
    fn reads_and_writes_are_errors_and_never_crashes() {
        let tensor = unallocated(&[3, 4], None, CPU, "weight has no values yet").unwrap();
        let ones = Tensor::ones([3, 4], CPU);
        let failures = [
            tensor.f_add(&ones).map(drop),
            tensor.f_sum(Kind::Float).map(drop),
            ones.shallow_clone().f_copy_(&tensor).map(drop),
            tensor.detach().f_copy_(&ones).map(drop),
            tensor.f_to_kind(Kind::Half).map(drop),
            tensor.f_matmul(&ones.tr()).map(drop),
            tensor.to_string(80).map(drop),
        ];
        for (place, failure) in failures.into_iter().enumerate() {
            assert!(failure.is_err(), "{place}");
        }
        // A view can be created, and its use is the same error as a use of the tensor itself.
        let rows = [tensor.narrow(0, 1, 2), tensor.tr(), tensor.view([12])];
        for rows in rows {
            let failure = rows.f_sum(Kind::Float).unwrap_err().to_string();
            assert!(failure.contains("weight has no values yet"), "{failure}");
        }
        let read = crate::bytes(&tensor).map(|bytes| bytes.to_vec());
        assert!(read.unwrap_err().to_string().contains("weight has no values yet"));
    }

    #[test]
    fn impossible_shapes_are_errors() {
        assert!(unallocated(&[-1], None, CPU, "").is_err());
        assert!(unallocated(&[1], Some(&[1, 1]), CPU, "").is_err());
        assert!(unallocated(&[1], Some(&[-1]), CPU, "").is_err());
        let empty = unallocated(&[0, 3], None, CPU, "").unwrap();
        assert!(has_memory(&empty), "there is nothing to read");
        assert_eq!(unallocated(&[], None, CPU, "").unwrap().numel(), 1);
    }
}
