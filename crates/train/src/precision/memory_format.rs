//! Choice of models that have their channels last in memory.

use brigade_nn::Model;
use brigade_torch::{DeviceExt, has_onednn};
use tch::{Device, Kind};

use crate::precision::{Numerics, Precision};

/// Facts on which the choice of the memory format depends.
struct Facts {
    /// `true` if a parameter has four dimensions, as the weight of a convolution.
    convolutions: bool,
    device: Device,
    /// Type in which convolutions compute.
    kind: Kind,
    onednn: bool,
}

impl Facts {
    /// Returns `true` if channels last is faster: oneDNN's and cuDNN's 16-bit kernels require channels last, and
    /// reorder other inputs. Neither library has such kernels for float64, and in float32 cuDNN's are not faster.
    fn pays(&self) -> bool {
        let short = matches!(self.kind, Kind::Half | Kind::BFloat16);
        self.convolutions
            && match self.device {
                Device::Cpu => self.onednn && (short || self.kind == Kind::Float),
                device if device.has_streams() => short,
                _ => false,
            }
    }
}

/// Returns `true` if this model is converted to channels last.
pub(crate) fn channels_last<M>(model: &Model<M>, numerics: &Numerics) -> bool {
    let convolutions = model.parameters().iter().any(|parameter| parameter.tensor.dim() == 4);
    if let Some(on) = numerics.channels_last {
        return on && convolutions;
    }
    let kind = match (numerics.autocast.precision, model.kind()) {
        (Precision::Bf16, Kind::Float) => Kind::BFloat16,
        (Precision::Fp16, Kind::Float) => Kind::Half,
        (_, kind) => kind,
    };
    Facts { convolutions, device: model.device(), kind, onednn: has_onednn() }.pays()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn channels_last_where_a_kernel_wants_it() {
        let facts = |device, kind| Facts { convolutions: true, device, kind, onednn: true };
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            assert!(facts(Device::Cpu, kind).pays());
            assert_eq!(facts(Device::Cuda(0), kind).pays(), kind != Kind::Float);
            assert!(!Facts { convolutions: false, ..facts(Device::Cpu, kind) }.pays());
            assert!(!Facts { onednn: false, ..facts(Device::Cpu, kind) }.pays());
        }
        assert!(!facts(Device::Cpu, Kind::Double).pays());
    }
}
