//! Adaptation of a first convolution's weights to another number of channels.

use brigade_torch::Result;
use tch::{Kind, Tensor};

/// Rule by which the weights of a first convolution are computed for another number of channels than they were trained
/// with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum InputChannels {
    /// timm's rule: one channel gets the sum of the weights; for more than three channels the weights are repeated, and
    /// scaled so that their sum stays the same.
    #[default]
    Repeat,
    /// fastai's rule: one channel gets the sum of the weights, two channels get the first two times 1.5, and channels
    /// after the third get zeros.
    ZeroPad,
}

impl InputChannels {
    /// Computes the weights `[out, channels, kernel…]` for the channels of `shape`.
    pub(crate) fn adapted(self, values: &Tensor, shape: &[i64]) -> Result<Option<Tensor>> {
        let theirs = values.size();
        let (&[out, channels, ref kernel @ ..], &[own_out, wanted, ref own_kernel @ ..]) =
            (theirs.as_slice(), shape)
        else {
            return Ok(None);
        };
        if out != own_out || kernel != own_kernel || channels < 1 || wanted < 1 {
            return Ok(None);
        }
        let values = values.f_to_kind(Kind::Float)?;
        if wanted == 1 {
            return Ok(Some(values.f_sum_dim_intlist([1].as_slice(), true, Kind::Float)?));
        }
        Ok(Some(match self {
            Self::Repeat => {
                let times = (wanted + channels - 1) / channels;
                let mut repeats = vec![1; theirs.len()];
                repeats[1] = times;
                let repeated = values.f_repeat(&repeats)?.f_narrow(1, 0, wanted)?;
                repeated.f_mul_scalar(channels as f64 / wanted as f64)?
            }
            Self::ZeroPad if wanted < channels => {
                let part = values.f_narrow(1, 0, wanted)?;
                part.f_mul_scalar(channels as f64 / wanted as f64)?
            }
            Self::ZeroPad => {
                let padded = Tensor::f_zeros(shape, (Kind::Float, values.device()))?;
                padded.f_narrow(1, 0, channels)?.f_copy_(&values)?;
                padded
            }
        }))
    }
}
