//! Initial values that architectures draw again, after those of their layers.

use brigade_nn::ParamPath;
use tch::{Device, Kind, TchError, Tensor};

/// Rule by which a weight is drawn again.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Redraw {
    /// `kaiming_normal_(mode="fan_out", nonlinearity="relu")`: mean 0, deviation √2 / √(out · kernel…).
    KaimingFanOut,
    /// `kaiming_normal_()`: mean 0, deviation √2 / √(in · kernel…).
    KaimingFanIn,
    /// timm's `trunc_normal_(std=…)`: normal with mean 0 and this standard deviation, at most 0.2, cut at ±2.
    TruncatedNormal(f64),
    /// Normal distribution with mean 0 and this standard deviation: `normal_(std=…)`.
    Normal(f64),
    /// Uniform distribution between minus and plus this bound: `uniform_(-bound, bound)`.
    Uniform(f64),
    /// ICNR: `KaimingFanIn` for a quarter of the outputs, each repeated four times.
    Icnr,
    /// Constant: the same value for all elements.
    Constant(f64),
}

/// Draws the values of `weight` again. An error is recorded at the path, and building the model fails with it.
pub(crate) fn redraw(path: &ParamPath<'_>, weight: &Tensor, how: Redraw) {
    path.redraw(weight, move |values| how.fill(values));
}

/// Sets the bias of a normalisation to fastai's initial value.
pub(crate) fn redraw_norm(path: &ParamPath<'_>, bias: Option<&Tensor>) {
    if let Some(bias) = bias {
        redraw(path, bias, Redraw::Constant(1e-3));
    }
}

impl Redraw {
    /// Sets all values of a tensor.
    pub(crate) fn fill(self, values: &mut Tensor) -> Result<(), TchError> {
        let shape = values.size();
        let fan = |outer: usize| {
            let kernel: i64 = shape.iter().skip(2).product();
            2f64.sqrt() / ((shape.get(outer).copied().unwrap_or(1) * kernel) as f64).sqrt()
        };
        let filled = match self {
            Self::KaimingFanOut => values.f_normal_(0.0, fan(0)),
            Self::KaimingFanIn => values.f_normal_(0.0, fan(1)),
            Self::Icnr => {
                let mut quarter = shape.clone();
                if let Some(outputs) = quarter.first_mut() {
                    *outputs /= 4;
                }
                let mut drawn = Tensor::f_empty(&quarter, (Kind::Float, Device::Cpu))?;
                let drawn = drawn.f_normal_(0.0, fan(1))?;
                return values.f_copy_(&drawn.f_repeat_interleave_self_int(4, 0, None)?);
            }
            Self::Normal(std) => values.f_normal_(0.0, std),
            Self::Uniform(bound) => values.f_uniform_(-bound, bound),
            Self::Constant(value) => values.f_fill_(value),
            Self::TruncatedNormal(std) => {
                // timm's algorithm: the inverse distribution function of a uniform number. For its 0.02 the bounds are
                // 100 standard deviations away, where the distribution function is 0 and 1 in float64.
                let _ = values.f_uniform_(-1.0, 1.0)?;
                let _ = values.f_erfinv_()?;
                let _ = values.f_mul_scalar_(std * 2f64.sqrt())?;
                values.f_clamp_(-2.0, 2.0)
            }
        };
        filled.map(drop)
    }
}
