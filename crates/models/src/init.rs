//! First values that architectures draw a second time, after those of their layers.

use brigade_nn::ParamPath;
use tch::{Device, Kind, TchError, Tensor};

/// How a weight is drawn again.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Redraw {
    /// `kaiming_normal_(mode="fan_out", nonlinearity="relu")`: mean 0, deviation √2 / √(out · kernel…).
    KaimingFanOut,
    /// `kaiming_normal_()`: mean 0, deviation √2 / √(in · kernel…).
    KaimingFanIn,
    /// timm's `trunc_normal_(std=…)`: normal with mean 0 and this deviation, cut at ±2; of at most 0.2.
    TruncatedNormal(f64),
    /// `normal_(std=…)`.
    Normal(f64),
    /// `uniform_(-bound, bound)`.
    Uniform(f64),
    /// `KaimingFanIn` of a quarter of the outputs, each four times (ICNR).
    Icnr,
    /// All the same value.
    Constant(f64),
}

/// Draws the values of `weight` again. What fails is noted at the path, and the model fails to build.
pub(crate) fn redraw(path: &ParamPath<'_>, weight: &Tensor, how: Redraw) {
    if !weight.defined() || !path.draws_first_values() {
        // The path has refused the parameter, and the model will say so; or weights are read next.
        return;
    }
    if let Err(error) = tch::no_grad(|| weight.shallow_clone().f_copy_(&drawn(weight, how)?)) {
        path.reject(format_args!("the first values of a weight: {error}"));
    }
}

/// Sets the bias of a normalisation to what fastai's start with.
pub(crate) fn redraw_norm(path: &ParamPath<'_>, bias: Option<&Tensor>) {
    if let Some(bias) = bias {
        redraw(path, bias, Redraw::Constant(1e-3));
    }
}

/// In 32 bits on the CPU, as [`brigade_nn::Init`] draws, so that a seed gives one model in every kind.
fn drawn(weight: &Tensor, how: Redraw) -> Result<Tensor, TchError> {
    let shape = weight.size();
    let empty = Tensor::f_empty(&shape, (Kind::Float, Device::Cpu))?;
    let fan = |outer: usize| {
        let kernel: i64 = shape.iter().skip(2).product();
        2f64.sqrt() / ((shape.get(outer).copied().unwrap_or(1) * kernel) as f64).sqrt()
    };
    let mut values = empty;
    match how {
        Redraw::KaimingFanOut => values.f_normal_(0.0, fan(0)),
        Redraw::KaimingFanIn => values.f_normal_(0.0, fan(1)),
        Redraw::Icnr => {
            let mut quarter = shape.clone();
            if let Some(outputs) = quarter.first_mut() {
                *outputs /= 4;
            }
            let mut drawn = Tensor::f_empty(&quarter, (Kind::Float, Device::Cpu))?;
            drawn.f_normal_(0.0, fan(1))?.f_repeat_interleave_self_int(4, 0, None)
        }
        Redraw::Normal(std) => values.f_normal_(0.0, std),
        Redraw::Uniform(bound) => values.f_uniform_(-bound, bound),
        Redraw::Constant(value) => values.f_fill_(value),
        Redraw::TruncatedNormal(std) => {
            // timm's steps: the inverse distribution function of a uniform number. The bounds are 100
            // deviations away for its 0.02, where the distribution function is 0 and 1 in 64 bits.
            let _ = values.f_uniform_(-1.0, 1.0)?;
            let _ = values.f_erfinv_()?;
            let _ = values.f_mul_scalar_(std * 2f64.sqrt())?;
            values.f_clamp_(-2.0, 2.0)
        }
    }
}
