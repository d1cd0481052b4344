//! Initial values of parameters: PyTorch's defaults, with the same numbers for a seed.

use tch::{TchError, Tensor};

/// Initial values of a parameter.
///
/// Values are drawn from libtorch's CPU generator as 32-bit floats and converted afterwards, so that a seed
/// (`tch::manual_seed`) gives the same model on every device and in every kind. If layers are built in the same order,
/// it is the model that PyTorch initialises with that seed.
///
/// ```
/// use brigade_nn::{Init, Model, ParamPath};
///
/// // 64 weights in [-1/4, 1/4]: the fan-in is 16.
/// let model = Model::new(|p: &ParamPath| p.parameter("weight", &[4, 16], Init::KaimingUniform))?;
/// assert_eq!(model.num_parameters(), 64);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Init {
    /// All zeros: the bias of a normalisation.
    Zeros,
    /// All ones: the weight of a normalisation.
    Ones,
    /// The same value for all elements.
    Constant(f64),
    /// Uniform in `[low, high)`.
    Uniform {
        /// Lower bound, inclusive.
        low: f64,
        /// Upper bound of the values.
        high: f64,
    },
    /// Normal distribution with this mean and standard deviation. Embeddings have mean 0 and standard deviation 1.
    Normal {
        /// Mean of the distribution.
        mean: f64,
        /// Standard deviation of the distribution.
        std: f64,
    },
    /// `kaiming_uniform_(a = √5)`, PyTorch's default for the weights of linear and convolution layers: uniform in `[-b,
    /// b)` with `b = √3 · √(2 / (1 + a²)) / √fan_in = 1/√fan_in`. For a weight of shape `[out, in, k…]` the fan-in is
    /// `in · k…`; for a tensor of one dimension it is the size of that dimension.
    KaimingUniform,
}

impl Init {
    /// Returns the initial values of a bias for a weight of this fan-in: uniform in `[-1/√fan_in, 1/√fan_in)`, or 0 for
    /// fan-in 0.
    ///
    /// ```
    /// use brigade_nn::Init;
    /// assert_eq!(Init::fan_in_bias(16), Init::Uniform { low: -0.25, high: 0.25 });
    /// ```
    #[must_use]
    pub fn fan_in_bias(fan_in: i64) -> Self {
        if fan_in <= 0 {
            return Self::Zeros;
        }
        let bound = 1.0 / (fan_in as f64).sqrt();
        Self::Uniform { low: -bound, high: bound }
    }

    /// Sets all values of a tensor.
    pub(crate) fn fill(self, values: &mut Tensor) -> Result<(), TchError> {
        let filled = match self {
            Self::Zeros => values.f_zero_(),
            Self::Ones => values.f_fill_(1.0),
            Self::Constant(value) => values.f_fill_(value),
            Self::Uniform { low, high } => values.f_uniform_(low, high),
            Self::Normal { mean, std } => values.f_normal_(mean, std),
            Self::KaimingUniform => match fan_in(&values.size()) {
                0 => values.f_zero_(),
                fan_in => {
                    // The steps of torch.nn.init, in its order, so that the results are bitwise equal.
                    let gain = (2.0 / (1.0 + 5f64.sqrt().powi(2))).sqrt();
                    let bound = 3f64.sqrt() * (gain / (fan_in as f64).sqrt());
                    values.f_uniform_(-bound, bound)
                }
            },
        };
        filled.map(drop)
    }
}

/// Returns the fan-in of a weight of this shape: the number of inputs of one output.
pub(crate) fn fan_in(shape: &[i64]) -> i64 {
    match shape {
        [] => 1,
        [only] => *only,
        [_, inputs @ ..] => inputs.iter().product(),
    }
}

#[cfg(test)]
mod tests {
    use tch::{Device, Kind};

    use super::*;

    fn drawn(init: Init, shape: &[i64]) -> Tensor {
        let mut values = Tensor::empty(shape, (Kind::Float, Device::Cpu));
        init.fill(&mut values).unwrap();
        values
    }

    #[test]
    fn fan_in_is_what_meets_in_one_output() {
        assert_eq!(fan_in(&[64, 32, 5, 5]), 800);
        assert_eq!(fan_in(&[10, 64]), 64);
        assert_eq!(fan_in(&[7]), 7);
        assert_eq!(fan_in(&[]), 1);
    }

    #[test]
    fn kaiming_fills_its_range_and_no_more() {
        let weight = drawn(Init::KaimingUniform, &[256, 16]);
        let largest = weight.abs().max().double_value(&[]);
        assert!(largest <= 0.25, "{largest} lies outside 1/sqrt(16)");
        assert!(largest > 0.24, "{largest}: the range is not filled");
        assert!(weight.mean(Kind::Float).double_value(&[]).abs() < 0.01);
    }

    #[test]
    fn a_weight_without_inputs_is_accepted() {
        assert_eq!(drawn(Init::KaimingUniform, &[3, 0]).size(), [3, 0]);
        assert_eq!(Init::fan_in_bias(0), Init::Zeros);
    }
}
