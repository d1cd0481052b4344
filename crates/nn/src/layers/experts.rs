//! Mixture of experts: feed-forward networks, of which each token passes through a few.
//!
//! `Experts` makes one row for each token and each of its experts, sorts the rows by expert, first choices before
//! second ones, computes one product for each expert that has rows, and adds the results of a token in the order of its
//! choices. No row is used twice, so that gradients are not summed in an order that depends on threads. The host reads
//! the numbers of rows, which is the only wait for a GPU. The experts of a layer are stored in two tensors, whose
//! gradients `unbind` returns in one piece.
//!
//! `ParamPath::expert_parameter` returns a rank's range of experts as a `TensorPart`, so that loads, deferred values
//! and whole states work as for divided layers. The registry records the names of these parameters, because their
//! gradients are averaged over another group. `experts/exchange.rs` sends the numbers of rows, and the rows by
//! `regions::all_to_all_rows`. It scales gradients in both directions, so that the gradient of an expert is that of the
//! mean loss of its group, and a plain average over the ranks with the same experts gives the gradient
//! (`Reduction::experts`: a reducer of its own; with sharding, a parameter that stays whole). If a rank has no rows at
//! all, an expert computes an empty product, so that all ranks send the same messages in backward. Ranks of a tensor
//! group have the same tokens, of which each sends a part (`routed_in_parts`); all of them compute the router. Blocks
//! return the logits of routers beside their output (`Block::forward_routed`), so that a unit's hooks get both.
//!
//! In files each expert has tensors of its own. `WeightsReader::stack` presents several of them as one tensor, whose
//! regions are read from the individual ones, so that all ways of reading work as for other tensors.
//! `Transformer::saved_tensors` separates them for writing.

mod exchange;
mod router;

use std::borrow::Borrow;

use brigade_torch::regions::{gather_from_region, scatter_to_region};
use brigade_torch::{
    Activation, GatedPair, ProcessGroup, QuantizedWeight, Result, gated_activation, gated_linear,
    linear,
};
use parking_lot::Mutex;
use tch::{Kind, Tensor};

use self::exchange::Exchange;
use self::router::Router;
pub use self::router::{
    Routing, load_balancing_loss, load_balancing_loss_of, load_balancing_sums, router_z_loss,
};
use crate::layer_context::LayerContext;
use crate::{
    Init, Module, ParamPath, QuantizedSlot, SwiGlu, SwiGluOptions, TensorRegion, Training,
};

/// Mixture of experts (Shazeer et al., 2017): gated feed-forward networks (experts), of which a router chooses a few
/// for each token, from `[…, hidden]` to `[…, hidden]`.
///
/// `p = softmax(x Wᵀ)` over all experts, in float32 (float64 of a model in float64); of the `experts_per_token`
/// largest, `y = Σ pᵢ · downᵢ(activation(gateᵢ(x)) · upᵢ(x))`, with `p` divided by their sum if
/// [`ExpertsOptions::normalize`] is set. Tokens are sorted by expert, and each expert that has tokens computes one
/// product for all of them; without a capacity no token is dropped or padded. The sum is in the order of the router's
/// choices, so that it does not depend on threads.
///
/// Parameters, with the names of transformers: `gate.weight` `[experts, hidden]`, `experts.gate_up_proj` `[experts, 2 ·
/// intermediate, hidden]`, `experts.down_proj` `[experts, hidden, intermediate]`; with
/// [`ExpertsOptions::shared_intermediate_size`] also `shared_experts.{gate_proj, up_proj, down_proj}.weight`.
///
/// ```
/// use brigade_nn::{Experts, ExpertsOptions, Model, load_balancing_loss};
/// use tch::{Kind, Tensor};
///
/// let options = ExpertsOptions { experts: 4, experts_per_token: 2, ..Default::default() };
/// let model = Model::new(|path| Experts::new(path, 8, 16, options))?;
/// let tokens = Tensor::randn([2, 5, 8], (Kind::Float, model.device()));
/// let (output, routing) = model.module().forward_routed(&tokens)?;
/// let balance = load_balancing_loss(&[&routing.logits], 2, None)?;
/// (output.square().mean(Kind::Float) + balance * 0.01).backward();
///
/// let load = model.module().load().expect("a forward has run");
/// assert_eq!(load.tokens.iter().sum::<i64>(), 2 * 10);
/// assert_eq!(load.dropped, 0);
/// # Ok::<(), brigade_torch::Error>(())
/// ```
///
/// With [`ModelBuilder::expert_parallel`](crate::ModelBuilder::expert_parallel) each rank of a group has a range of the
/// experts; tokens are sent to the ranks that have their experts, and the results are sent back. With
/// [`ModelBuilder::tensor_parallel`](crate::ModelBuilder::tensor_parallel) as well, each expert is whole on its rank, and
/// each rank of a tensor group sends a part of their tokens, so that no token is computed twice.
#[derive(Debug)]
pub struct Experts {
    router: Router,
    /// Gate and up projections `[own experts, 2 · intermediate, hidden]`.
    gate_up: Tensor,
    /// Down projections `[own experts, hidden, intermediate]`.
    down: Tensor,
    quantized_gate_up: QuantizedSlot,
    quantized_down: QuantizedSlot,
    shared: Option<SwiGlu>,
    exchange: Option<Exchange>,
    options: ExpertsOptions,
    hidden: i64,
    training: Training,
    context: LayerContext,
    region: TensorRegion,
    /// Load of the last forward.
    load: Mutex<Option<ExpertLoad>>,
}

/// Options of [`Experts`].
#[derive(Debug, Clone, Copy)]
pub struct ExpertsOptions {
    /// Number of experts. Defaults to 8.
    pub experts: i64,
    /// Number of experts for each token (top-k). Defaults to 2.
    pub experts_per_token: i64,
    /// `true` to divide the weights of a token's experts by their sum. Defaults to `true`.
    pub normalize: bool,
    /// Capacity factor: the maximum number of tokens of an expert, relative to an even distribution. First choices take
    /// precedence over second ones; within these, tokens are taken in their order. An expert adds nothing to tokens
    /// beyond its capacity (they are dropped). With expert parallelism the capacity applies to the tokens that each rank
    /// sends separately. Defaults to none: no token is dropped.
    pub capacity_factor: Option<f64>,
    /// Intermediate size of a shared expert, through which all tokens pass in addition to their experts. Defaults to
    /// none.
    pub shared_intermediate_size: Option<i64>,
    /// Jitter noise: in training inputs are multiplied by random numbers that are uniform in `[1 − jitter, 1 +
    /// jitter]`. Defaults to 0.
    pub jitter: f64,
    /// Activation of the gates. Defaults to [`Activation::Silu`].
    pub activation: Activation,
    /// Initial values of the router and the experts. Defaults to those of [`Linear`](crate::Linear).
    pub first_values: Option<Init>,
}

impl Default for ExpertsOptions {
    fn default() -> Self {
        Self {
            experts: 8,
            experts_per_token: 2,
            normalize: true,
            capacity_factor: None,
            shared_intermediate_size: None,
            jitter: 0.0,
            activation: Activation::Silu,
            first_values: None,
        }
    }
}

/// Load of the experts in one forward, for the tokens that this rank sends to them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ExpertLoad {
    /// Number of tokens that each expert computed, for all experts.
    pub tokens: Vec<i64>,
    /// Number of token-expert choices that were dropped because the expert's capacity was full.
    pub dropped: i64,
}

impl Experts {
    /// Registers the router and the experts at the path.
    pub fn new<'a>(
        path: impl Borrow<ParamPath<'a>>,
        hidden: i64,
        intermediate: i64,
        options: ExpertsOptions,
    ) -> Self {
        let path = path.borrow();
        options.check(path);
        let ExpertsOptions { experts, first_values, .. } = options;
        let router = Router::new(path, hidden, &options);
        let own = path / "experts";
        let stacked = |name: &str, outputs: i64, inputs: i64| {
            let init = first_values.unwrap_or_else(|| Init::fan_in_bias(inputs));
            own.expert_parameter(name, &[experts, outputs, inputs], init)
        };
        let gate_up = stacked("gate_up_proj", 2 * intermediate, hidden);
        let down = stacked("down_proj", hidden, intermediate);
        let shared = options.shared_intermediate_size.map(|inner| {
            let shared = SwiGluOptions { activation: options.activation, bias: false };
            SwiGlu::with_options(path / "shared_experts", hidden, inner, shared)
        });
        let region = path.tensor_region();
        let tensor_ranks = region.group().map_or(1, ProcessGroup::size);
        let exchange = path.expert_group().map(|group| Exchange::new(group, experts, tensor_ranks));
        Self {
            router,
            gate_up,
            down,
            quantized_gate_up: own.quantizable_stack("gate_up_proj"),
            quantized_down: own.quantizable_stack("down_proj"),
            shared,
            exchange,
            options,
            hidden,
            training: path.training(),
            context: path.layer(),
            region,
            load: Mutex::default(),
        }
    }

    /// Returns the load of the experts in the last forward, without a further wait for a GPU. `None` before the first
    /// forward.
    #[must_use]
    pub fn load(&self) -> Option<ExpertLoad> {
        self.load.lock().clone()
    }

    /// Returns the router's weight `[experts, hidden]`.
    pub fn router_weight(&self) -> &Tensor {
        self.router.weight()
    }

    /// Returns the gates and the first layers of this rank's experts, `[experts, 2 · intermediate, hidden]`.
    pub fn gate_up(&self) -> &Tensor {
        &self.gate_up
    }

    /// Returns the second layers of this rank's experts, `[experts, hidden, intermediate]`.
    pub fn down(&self) -> &Tensor {
        &self.down
    }

    /// Computes the layer, and also returns the result of the router, for the losses of routers. In a sequence region,
    /// the latter covers the whole sequence.
    ///
    /// # Errors
    /// [`crate::ModelError::Input`] for an input whose last dimension is not the hidden size; with expert parallelism,
    /// also the errors of [`brigade_torch::regions::all_to_all_rows`].
    pub fn forward_routed(&self, input: &Tensor) -> Result<(Tensor, Routing)> {
        if input.size().last() != Some(&self.hidden) {
            return Err(self.context.refuse(input, "[…, hidden]"));
        }
        self.context.weights.run(input, |input| {
            // In a sequence region of a tensor group, every rank computes the whole sequence in the same way.
            let whole = self.region.whole_sequence(input)?;
            let (output, routing) =
                self.region.outside_sequence_region(|| self.whole_routed(&whole))?;
            Ok((self.context.output(self.region.part_of_sequence(&output)?), routing))
        })
    }

    fn whole_routed(&self, input: &Tensor) -> Result<(Tensor, Routing)> {
        let mut tokens = input.f_reshape([-1, self.hidden])?;
        if self.options.jitter > 0.0 && self.training.is_on() {
            let jitter = self.options.jitter;
            let factors = tokens.f_empty_like()?.f_uniform_(1.0 - jitter, 1.0 + jitter)?;
            tokens = tokens.f_mul(&factors)?;
        }
        let routing = self.router.forward(&tokens)?;
        let parts = self.region.group().filter(|_| self.exchange.is_some());
        let mut output = match parts {
            Some(group) => self.routed_in_parts(group, &tokens, &routing)?,
            None => self.routed(&tokens, &routing.weights, &routing.experts)?,
        };
        if let Some(shared) = &self.shared {
            output = output.f_add(&shared.forward(&tokens)?)?;
        }
        Ok((output.f_reshape(input.size())?, routing))
    }

    /// Computes tokens that are equal on all ranks of a tensor group, of which each rank sends a part to the experts.
    fn routed_in_parts(
        &self,
        group: &ProcessGroup,
        tokens: &Tensor,
        routing: &Routing,
    ) -> Result<Tensor> {
        let (count, ranks) = (tokens.size()[0], group.size() as i64);
        let most = (count + ranks - 1) / ranks;
        let start = (most * group.rank() as i64).min(count);
        let own = most.min(count - start);
        let part = |values: &Tensor| -> Result<Tensor> {
            let padded = values.f_constant_pad_nd([0, 0, 0, most * ranks - count])?;
            Ok(scatter_to_region(group, &padded, 0)?.f_narrow(0, 0, own)?)
        };
        let experts = routing.experts.f_narrow(0, start, own)?;
        let output = self.routed(&part(tokens)?, &part(&routing.weights)?, &experts)?;
        let padded = output.f_constant_pad_nd([0, 0, 0, most - own])?;
        Ok(gather_from_region(group, &padded, 0)?.f_narrow(0, 0, count)?)
    }

    /// Computes tokens with the experts that are chosen for them, and their weights.
    fn routed(&self, tokens: &Tensor, weights: &Tensor, experts: &Tensor) -> Result<Tensor> {
        let (count, chosen) = (tokens.size()[0], self.options.experts_per_token);
        let all_experts = self.options.experts;
        // First choices before second ones; sorted by expert, with the order kept within an expert.
        let by_choice = experts.f_transpose(0, 1)?.f_reshape([-1])?;
        let mut order = by_choice.f_argsort_stable(true, 0, false)?;
        // The only wait for a GPU; `bincount` would be a second one.
        let wanted = Tensor::f_zeros([all_experts], (Kind::Int64, tokens.device()))?;
        let wanted = wanted.f_scatter_add(0, &by_choice, &by_choice.f_ones_like()?)?;
        let wanted = Vec::<i64>::try_from(wanted)?;
        let mut taken = wanted.clone();
        if let Some(factor) = self.options.capacity_factor {
            let even = factor * (count * chosen) as f64 / all_experts as f64;
            // Not more than the number of choices, so that it fits into an i64.
            let capacity = even.ceil().min((count * chosen) as f64) as i64;
            taken.iter_mut().for_each(|tokens| *tokens = (*tokens).min(capacity));
            let mut start = 0;
            let kept = wanted.iter().zip(&taken).map(|(wanted, taken)| {
                let kept = order.f_narrow(0, start, *taken);
                start += wanted;
                kept
            });
            order = Tensor::f_cat(&kept.collect::<Result<Vec<_>, _>>()?, 0)?;
        }
        let dropped = wanted.iter().sum::<i64>() - taken.iter().sum::<i64>();
        *self.load.lock() = Some(ExpertLoad { tokens: taken.clone(), dropped });

        // A row for each choice, so that no row is used twice: gradients of repeated rows would be summed in an order
        // that depends on threads on a GPU.
        let rows = tokens
            .f_unsqueeze(0)?
            .f_expand([chosen, -1, -1], false)?
            .f_reshape([-1, self.hidden])?
            .f_index_select(0, &order)?;
        let computed = match &self.exchange {
            Some(exchange) => {
                exchange.run(&rows, &taken, |rows, counts| self.compute(rows, counts))?
            }
            None => self.compute(&rows, &taken)?,
        };
        let options = (computed.f_kind()?, computed.device());
        let all = Tensor::f_zeros([count * chosen, self.hidden], options)?;
        let all = all.f_index_copy(0, &order, &computed)?.f_view([chosen, count, self.hidden])?;
        let all = all.f_to_kind(weights.f_kind()?)?;
        let weights = weights.f_transpose(0, 1)?.f_unsqueeze(2)?;
        let mut sum = all.f_get(0)?.f_mul(&weights.f_get(0)?)?;
        for choice in 1..chosen {
            sum = sum.f_add(&all.f_get(choice)?.f_mul(&weights.f_get(choice)?)?)?;
        }
        Ok(sum.f_to_kind(options.0)?)
    }

    /// Computes this rank's experts: the first `counts[0]` rows with the first one, and so on.
    fn compute(&self, rows: &Tensor, counts: &[i64]) -> Result<Tensor> {
        let gate_up = ExpertWeights::of(&self.gate_up, &self.quantized_gate_up)?;
        let down = ExpertWeights::of(&self.down, &self.quantized_down)?;
        let pieces = rows.f_split_with_sizes(counts, 0)?;
        let mut all = pieces.iter().enumerate().filter(|(_, rows)| rows.size()[0] > 0);
        // Without rows, an expert computes an empty product, so that all ranks have the same graph: their backwards
        // exchange messages.
        let first = all.next().or_else(|| pieces.iter().enumerate().next());
        let outputs = first.into_iter().chain(all).map(|(expert, rows)| {
            down.gated(expert, &gate_up.linear(expert, rows)?, self.options.activation)
        });
        let outputs = outputs.collect::<Result<Vec<_>>>()?;
        match outputs.as_slice() {
            [output] => Ok(output.shallow_clone()),
            outputs => Ok(Tensor::f_cat(outputs, 0)?),
        }
    }
}

/// Weights of one projection of all experts, whole or quantised.
enum ExpertWeights {
    Whole(Vec<Tensor>),
    Quantized(QuantizedWeight),
}

impl ExpertWeights {
    fn of(weights: &Tensor, quantized: &QuantizedSlot) -> Result<Self> {
        Ok(match quantized.get() {
            Some(stack) => Self::Quantized(stack),
            // In one piece: the gradient of the stack is written once.
            None => Self::Whole(weights.f_unbind(0)?),
        })
    }

    fn linear(&self, expert: usize, rows: &Tensor) -> Result<Tensor> {
        match self {
            Self::Whole(weights) => linear(rows, &weights[expert], None),
            Self::Quantized(stack) => stack.matrix(expert as i64)?.linear(rows, None),
        }
    }

    /// Applies the projection to the gated pairs in the halves of each row.
    fn gated(&self, expert: usize, rows: &Tensor, activation: Activation) -> Result<Tensor> {
        let pair = GatedPair::Packed(rows.into());
        match self {
            Self::Whole(weights) => gated_linear(pair, activation, &weights[expert], None),
            Self::Quantized(_) => self.linear(expert, &gated_activation(pair, activation)?),
        }
    }
}

impl Module<&Tensor> for Experts {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Ok(self.forward_routed(input)?.0)
    }
}

impl ExpertsOptions {
    /// Records errors for sizes that cannot be built.
    fn check(&self, path: &ParamPath<'_>) {
        let Self { experts, experts_per_token: chosen, jitter, .. } = *self;
        if experts < 1 {
            path.reject(format_args!("expected at least 1 expert, found {experts}"));
        }
        if !(1..=experts.max(1)).contains(&chosen) {
            path.reject(format_args!(
                "expected from 1 to {experts} experts per token, found {chosen}"
            ));
        }
        if let Some(factor) =
            self.capacity_factor.filter(|factor| factor.is_nan() || *factor <= 0.0)
        {
            path.reject(format_args!("expected a capacity factor above 0, found {factor}"));
        }
        if !(0.0..1.0).contains(&jitter) {
            path.reject(format_args!(
                "expected a jitter of at least 0 and below 1, found {jitter}"
            ));
        }
    }
}

/// Returns the type in which routers compute.
fn router_kind(kind: Kind) -> Kind {
    if kind == Kind::Double { kind } else { Kind::Float }
}
