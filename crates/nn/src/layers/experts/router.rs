//! The router of a mixture of experts, and its losses.

use brigade_torch::{Autocast, Error, Result, linear};
use tch::{Kind, Tensor};

use super::{ExpertsOptions, router_kind};
use crate::{Init, ParamPath};

/// Result of a router: the experts that each token is sent to, and their weights.
#[derive(Debug)]
pub struct Routing {
    /// Output of the router, `[tokens, experts]`, in float32, or in float64 for a model in float64.
    pub logits: Tensor,
    /// Weights `[tokens, experts per token]` of the chosen experts' outputs, largest first.
    pub weights: Tensor,
    /// Indices of the chosen experts, `[tokens, experts per token]`, of int64.
    pub experts: Tensor,
}

/// Linear layer from tokens to scores of experts.
#[derive(Debug)]
pub(super) struct Router {
    weight: Tensor,
    chosen: i64,
    normalize: bool,
}

impl Router {
    pub(super) fn new(path: &ParamPath<'_>, hidden: i64, options: &ExpertsOptions) -> Self {
        let init = options.first_values.unwrap_or(Init::KaimingUniform);
        Self {
            weight: (path / "gate").parameter("weight", &[options.experts, hidden], init),
            chosen: options.experts_per_token,
            normalize: options.normalize,
        }
    }

    pub(super) fn weight(&self) -> &Tensor {
        &self.weight
    }

    pub(super) fn forward(&self, tokens: &Tensor) -> Result<Routing> {
        let kind = router_kind(tokens.f_kind()?);
        // In 16 bits, tokens near a tie would go to other experts from step to step.
        let _exact = Autocast::enter(tokens.device(), Kind::Float, true)?;
        let logits = linear(&tokens.f_to_kind(kind)?, &self.weight.f_to_kind(kind)?, None)?;
        let shares = logits.f_softmax(-1, kind)?;
        let (mut weights, experts) = shares.f_topk(self.chosen, -1, true, true)?;
        if self.normalize {
            weights = weights.f_div(&weights.f_sum_dim_intlist(-1, true, kind)?)?;
        }
        Ok(Routing { logits, weights, experts })
    }
}

/// Computes the load-balancing loss, which makes routers use experts evenly (Fedus et al., 2021, equations 4 to 6),
/// from the logits `[tokens, experts]` of the routers of all layers: `experts · Σᵢ fᵢ Pᵢ`, where `fᵢ` is the number of
/// times that expert i was chosen, per token, and `Pᵢ` its mean probability, both over all layers, as in transformers.
/// Its value is `experts_per_token` if the experts are used evenly. `mask`, with one element per token, is 0 for
/// ignored tokens, such as padding.
///
/// If ranks have different tokens, the mean of their losses is close to the loss of all tokens, but not equal to it.
///
/// ```
/// use brigade_nn::load_balancing_loss;
/// use tch::{Device, Kind, Tensor};
///
/// let logits = Tensor::eye(4, (Kind::Float, Device::Cpu));
/// let loss = load_balancing_loss(&[&logits], 1, None)?;
/// assert!((loss.double_value(&[]) - 1.0).abs() < 1e-6);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// [`brigade_torch::ErrorKind::InvalidArgument`] if there are no layers; [`brigade_torch::ErrorKind::Tensor`] for
/// shapes that do not match.
pub fn load_balancing_loss(
    logits: &[&Tensor],
    experts_per_token: i64,
    mask: Option<&Tensor>,
) -> Result<Tensor> {
    load_balancing_loss_of(&load_balancing_sums(logits, experts_per_token, mask)?)
}

/// Computes the sums over tokens and layers of which [`load_balancing_loss_of`] computes the load-balancing loss, a
/// vector `[2 · experts + 1]`: for each expert the number of times that it was chosen, then for each expert the sum of
/// its probabilities, then the number of tokens, one for each layer. The sums of some layers, or of a part of the
/// tokens, can be added to those of others. Arguments are those of [`load_balancing_loss`].
///
/// ```
/// use brigade_nn::{load_balancing_loss, load_balancing_loss_of, load_balancing_sums};
/// use tch::{Kind, Tensor};
///
/// let [first, second] = [0, 1].map(|_| Tensor::randn([5, 4], (Kind::Double, tch::Device::Cpu)));
/// let sums = load_balancing_sums(&[&first], 2, None)? + load_balancing_sums(&[&second], 2, None)?;
/// let all = load_balancing_loss(&[&first, &second], 2, None)?;
/// assert!((load_balancing_loss_of(&sums)? - all).abs().double_value(&[]) < 1e-12);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// Returns the errors of [`load_balancing_loss`].
pub fn load_balancing_sums(
    logits: &[&Tensor],
    experts_per_token: i64,
    mask: Option<&Tensor>,
) -> Result<Tensor> {
    let (mut used, mut shares, mut tokens) = (None, None, None);
    let add = |sum: Option<Tensor>, summand: Tensor| match sum {
        Some(sum) => sum.f_add(&summand),
        None => Ok(summand),
    };
    for logits in logits {
        let experts = logits.size2()?.1;
        let counting = counting(logits, mask)?;
        let probabilities = logits.f_softmax(-1, counting.f_kind()?)?;
        let (_, chosen) = probabilities.f_topk(experts_per_token, -1, true, true)?;
        let choices = counting.f_expand_as(&chosen)?.f_reshape([-1])?;
        let none = Tensor::f_zeros([experts], (counting.f_kind()?, logits.device()))?;
        used = Some(add(used, none.f_scatter_add(0, &chosen.f_reshape([-1])?, &choices)?)?);
        let sum = probabilities.f_mul(&counting)?.f_sum_dim_intlist(0, false, None)?;
        shares = Some(add(shares, sum)?);
        tokens = Some(add(tokens, counting.f_sum(None)?)?);
    }
    let (Some(used), Some(shares), Some(tokens)) = (used, shares, tokens) else {
        return Err(no_layers("load_balancing_loss"));
    };
    Ok(Tensor::f_cat(&[used, shares, tokens.f_reshape([1])?], 0)?)
}

/// Computes the load-balancing loss of [`load_balancing_sums`].
///
/// # Errors
/// [`brigade_torch::ErrorKind::InvalidArgument`] for a tensor of another shape.
pub fn load_balancing_loss_of(sums: &Tensor) -> Result<Tensor> {
    let experts = match sums.size().as_slice() {
        &[numbers] if numbers >= 3 && numbers % 2 == 1 => (numbers - 1) / 2,
        shape => {
            return Err(Error::invalid_argument(format!(
                "load_balancing_loss_of: expected sums [2 · experts + 1], found {shape:?}"
            )));
        }
    };
    let tokens = sums.f_narrow(0, 2 * experts, 1)?;
    let mean = |first: i64| sums.f_narrow(0, first, experts)?.f_div(&tokens);
    Ok(mean(0)?.f_mul(&mean(experts)?)?.f_sum(None)?.f_mul_scalar(experts)?)
}

/// Computes the router z-loss, which keeps the logits `[tokens, experts]` of routers small (Zoph et al., 2022, equation
/// 5): the mean of `(log Σᵢ exp logitᵢ)²` over the tokens of all layers. `mask` has the same meaning as in
/// [`load_balancing_loss`].
///
/// ```
/// use brigade_nn::router_z_loss;
/// use tch::{Device, Kind, Tensor};
///
/// let logits = Tensor::zeros([5, 8], (Kind::Float, Device::Cpu));
/// let loss = router_z_loss(&[&logits], None)?;
/// assert!((loss.double_value(&[]) - 8f64.ln().powi(2)).abs() < 1e-5);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// # Errors
/// Returns the errors of [`load_balancing_loss`].
pub fn router_z_loss(logits: &[&Tensor], mask: Option<&Tensor>) -> Result<Tensor> {
    let mut sums = Vec::with_capacity(logits.len());
    let mut tokens = Vec::with_capacity(logits.len());
    for logits in logits {
        let counting = counting(logits, mask)?;
        let squares = logits.f_logsumexp(-1, true)?.f_square()?;
        sums.push(squares.f_mul(&counting)?.f_sum(None)?);
        tokens.push(counting.f_sum(None)?);
    }
    if sums.is_empty() {
        return Err(no_layers("router_z_loss"));
    }
    let total = |sums: &[Tensor]| Tensor::f_stack(sums, 0)?.f_sum(None);
    Ok(total(&sums)?.f_div(&total(&tokens)?)?)
}

/// Returns `[tokens, 1]`: 1 for each token that counts, 0 for the others.
fn counting(logits: &Tensor, mask: Option<&Tensor>) -> Result<Tensor> {
    let kind = router_kind(logits.f_kind()?);
    let tokens = logits.size2()?.0;
    Ok(match mask {
        Some(mask) => {
            mask.f_ne(0)?.f_to_device(logits.device())?.f_to_kind(kind)?.f_reshape([tokens, 1])?
        }
        None => Tensor::f_ones([tokens, 1], (kind, logits.device()))?,
    })
}

fn no_layers(operation: &str) -> Error {
    Error::invalid_argument(format!("{operation}: expected the logits of at least one router"))
}
