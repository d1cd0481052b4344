//! Conversion of a model's tensors to other devices, kinds and memory formats.

use std::fmt;

use brigade_torch::{DeviceExt, channels_last, has_memory, set_data, unallocated};
use tch::{Device, Kind, TchError, Tensor};

use crate::deferred::no_memory;
use crate::param_path::is_floating_point;

/// Target of a conversion of a model's tensors.
#[derive(Debug, Clone, Copy)]
pub(super) enum Conversion {
    Device(Device),
    /// Type of floating-point tensors.
    Kind(Kind),
    /// Memory format channels last of tensors with four dimensions.
    ChannelsLast,
}

impl Conversion {
    /// Returns what a tensor of this name becomes; without memory, if it has none.
    pub(super) fn of(self, tensor: &Tensor, name: &str) -> Result<Tensor, TchError> {
        if !has_memory(tensor) {
            return self.of_unallocated(tensor, name);
        }
        match self {
            Self::Device(device) => tensor.f_to(device),
            Self::Kind(kind) if is_floating_point(tensor.f_kind()?) => tensor.f_to_kind(kind),
            Self::ChannelsLast if tensor.dim() == 4 => {
                channels_last(tensor).map_err(|error| refused(&error))
            }
            Self::Kind(_) | Self::ChannelsLast => Ok(tensor.shallow_clone()),
        }
    }

    fn of_unallocated(self, tensor: &Tensor, name: &str) -> Result<Tensor, TchError> {
        let (shape, mut strides) = (tensor.size(), tensor.stride());
        let (mut kind, mut device) = (tensor.f_kind()?, tensor.device());
        match self {
            Self::Device(to) => device = to,
            Self::Kind(to) => kind = to,
            Self::ChannelsLast => {
                if let &[_, channels, height, width] = &shape[..] {
                    strides = vec![height * width * channels, 1, width * channels, channels];
                }
            }
        }
        unallocated(&shape, Some(&strides), (kind, device), &no_memory(name))
            .map_err(|error| refused(&error))
    }
}

/// Gives a tensor the memory, the type and the device of another one ([`brigade_torch::set_data`]).
pub(super) fn exchange_memory(tensor: &Tensor, values: &Tensor) -> Result<(), TchError> {
    set_data(tensor, values).map_err(|error| refused(&error))
}

fn refused(error: &brigade_torch::Error) -> TchError {
    TchError::Torch(error.to_string())
}

impl fmt::Display for Conversion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Device(device) => write!(f, "to {}", device.label()),
            Self::Kind(kind) => write!(f, "to {kind:?}"),
            Self::ChannelsLast => f.write_str("to channels last"),
        }
    }
}
