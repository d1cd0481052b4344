//! Memory of a training run on each rank, computed from the model's sizes.
//!
//! Weights, gradients and optimizer states are exact. Activations are an estimate: what a forward pass keeps for the
//! backward pass depends on the model's code, of which only the sizes are known here.

use brigade_checkpoint::Dtype;
use brigade_sharding::{Mesh, Parameter, TransformerStep};

/// Sizes of a model.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct ModelSize {
    /// Total number of parameters.
    pub(super) parameters: u64,
    /// Number of parameters of the model's largest tensor.
    pub(super) largest: u64,
    /// Shape that decides the activations, or `None` if it is unknown.
    pub(super) shape: Option<Shape>,
}

impl ModelSize {
    /// Returns the parameters of a model with these sizes, in units: a transformer's blocks, or one for all.
    pub(super) fn parameters_by_unit(&self) -> Vec<Parameter> {
        let (layers, hidden, keys, mixture) = match self.shape {
            Some(Shape::Transformer { layers, hidden, keys, mixture, .. }) => {
                (layers.max(1), hidden.max(1), keys, mixture)
            }
            _ => (0, 1, 0, None),
        };
        let most = self.parameters.checked_div(layers).unwrap_or(0);
        let experts = mixture.map_or(0, |mixture| mixture.parameters(hidden)).min(most);
        let width = u128::from(hidden);
        let block = match mixture {
            // Four matrices of attention and two of four times the width, with biases and two norms.
            None => 12 * width.pow(2) + 13 * width,
            // Four matrices of attention, the router, and two norms.
            Some(mixture) => {
                width * (2 * (width + u128::from(keys)) + u128::from(mixture.experts) + 2)
            }
        };
        let block = u64::try_from(block).unwrap_or(u64::MAX).min(most - experts);
        let rest = self.parameters - layers * (block + experts);
        // A separate language head, if the parameters leave room for one beside the embedding.
        let head = match self.shape {
            Some(Shape::Transformer { vocabulary, .. }) => vocabulary.saturating_mul(hidden),
            _ => 0,
        };
        let head = if rest / 2 >= head { head } else { 0 };
        let mut parameters: Vec<_> = of_unit("", rest - head, hidden).collect();
        for layer in 0..layers {
            let (unit, of_experts) = (format!("h.{layer}"), format!("h.{layer}.experts"));
            parameters.extend(of_unit(&unit, block, hidden));
            parameters.extend(of_unit(&of_experts, experts, hidden).map(Parameter::of_experts));
        }
        parameters.extend(of_unit("head", head, hidden).map(|it| Parameter { unit: None, ..it }));
        parameters
    }
}

/// Returns rows of this width, and the remainder.
fn of_unit(unit: &str, elements: u64, width: u64) -> impl Iterator<Item = Parameter> {
    let shapes = [("rows", vec![elements / width, width]), ("rest", vec![elements % width])];
    let shapes = shapes.into_iter().filter(|(_, shape)| !shape.contains(&0));
    shapes.map(move |(name, shape)| {
        let name = if unit.is_empty() { name.to_owned() } else { format!("{unit}.{name}") };
        Parameter::new(name, &shape, Dtype::F32).in_block_of_name()
    })
}

/// Sizes that decide the memory of activations.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Shape {
    /// A stack of equal blocks of attention and a feed-forward layer.
    Transformer {
        /// Number of transformer blocks.
        layers: u64,
        /// Hidden size: the width of each token's embedding.
        hidden: u64,
        /// Number of attention heads.
        heads: u64,
        /// Width of the keys of all heads: less than the hidden size with grouped queries.
        keys: u64,
        /// Vocabulary size of the logits, or 0 if there are none.
        vocabulary: u64,
        /// Experts of each block, if its feed-forward layer is a mixture.
        mixture: Option<Mixture>,
        /// Width of the feed-forward layers, or of an expert.
        intermediate: u64,
        /// `true` if feed-forward layers are gated pairs.
        gated: bool,
    },
    /// Convolutions with a known number of output values per sample.
    Convolutional {
        /// Number of output values of all convolutions for one sample.
        outputs: u64,
    },
}

/// Sizes of a mixture of experts.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Mixture {
    /// Number of experts of a block.
    pub(super) experts: u64,
    /// Number of experts for each token.
    pub(super) chosen: u64,
    /// Intermediate size of an expert.
    pub(super) intermediate: u64,
}

impl Mixture {
    /// Returns the number of parameters of a block's experts: three matrices for each.
    fn parameters(self, hidden: u64) -> u64 {
        [self.experts, self.intermediate, hidden]
            .iter()
            .fold(3, |all, size| all.saturating_mul(*size))
    }
}

/// Data types in which a model is trained or used.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Precision {
    /// Everything in 32 bits.
    Fp32,
    /// Mixed precision: weights, gradients and states in 32 bits, the forward pass in 16, with a cached copy of the
    /// weights in 16.
    Mixed16,
    /// Everything in 16 bits.
    Pure16,
    /// Weights in 8 bits, for inference.
    Int8,
    /// Weights in 4 bits, for inference.
    Int4,
}

/// State of an optimizer per parameter.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum OptimizerState {
    /// No state: plain SGD.
    None,
    /// One value for each parameter: SGD with momentum, RMSprop, Adagrad, Muon.
    One,
    /// Two values for each parameter: Adam, AdamW, LAMB.
    Two,
}

/// Samples that one rank processes at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct MicroBatch {
    /// Number of samples per micro-batch.
    pub(super) samples: u64,
    /// Tokens per sample, for transformers.
    pub(super) tokens: u64,
    /// `true` if attention keeps its matrix of scores: without a fused kernel, which recomputes them.
    pub(super) keeps_scores: bool,
    /// `true` if mixed precision keeps what Brigade's kernels of a GPU keep.
    pub(super) kernels: bool,
}

/// Memory of one rank in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Memory {
    /// Weights, with their 16-bit copy if there is one.
    pub(super) weights: u64,
    /// Gradients, which are views into the buckets of the reducer. `None` for inference, like the next two.
    pub(super) gradients: Option<u64>,
    /// States of the optimizer.
    pub(super) optimizer: Option<u64>,
    /// Activations that the forward pass keeps for the backward pass. Also `None` if the model's shape is unknown.
    pub(super) activations: Option<u64>,
}

impl Memory {
    /// Computes the memory of one rank for training or inference. Returns `None` if the bytes exceed 64 bits.
    ///
    /// With data parallelism every rank holds all of it, whatever the world size.
    pub(super) fn new(
        model: &ModelSize,
        precision: Precision,
        optimizer: OptimizerState,
        batch: MicroBatch,
    ) -> Option<Self> {
        let n = model.parameters;
        // In half bytes, because of 4-bit weights.
        let bytes = |halves: u64| {
            let total = u128::from(n) * u128::from(halves);
            u64::try_from(total.div_ceil(2)).ok()
        };
        let weights = bytes(match precision {
            Precision::Fp32 => 8,
            Precision::Mixed16 => 8 + 4,
            Precision::Pure16 => 4,
            Precision::Int8 => 2,
            Precision::Int4 => 1,
        })?;
        let value = match precision {
            Precision::Fp32 | Precision::Mixed16 => 8,
            Precision::Pure16 => 4,
            Precision::Int8 | Precision::Int4 => {
                return Some(Self { weights, gradients: None, optimizer: None, activations: None });
            }
        };
        let states = match optimizer {
            OptimizerState::None => 0,
            OptimizerState::One => 1,
            OptimizerState::Two => 2,
        };
        let activations = match &model.shape {
            None => None,
            Some(shape) => Some(shape.kept(precision, batch)?.total()?),
        };
        let memory = Self {
            weights,
            gradients: Some(bytes(value)?),
            optimizer: Some(bytes(states * value)?),
            activations,
        };
        // Checked once here, so that `total` cannot overflow.
        memory.checked_total()?;
        Some(memory)
    }

    /// Returns the sum of the known parts.
    pub(super) fn total(&self) -> u64 {
        self.checked_total().unwrap_or(u64::MAX)
    }

    fn checked_total(&self) -> Option<u64> {
        [self.gradients, self.optimizer, self.activations]
            .into_iter()
            .flatten()
            .try_fold(self.weights, u64::checked_add)
    }
}

/// Memory that a forward pass keeps for the backward pass, in bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(super) struct Kept {
    /// Activations of the layers.
    pub(super) activations: u64,
    /// Logits of a language model.
    pub(super) logits: u64,
}

impl Kept {
    fn total(self) -> Option<u64> {
        self.activations.checked_add(self.logits)
    }
}

impl Shape {
    /// Computes the memory that a forward pass keeps for the backward pass. Returns `None` if the bytes exceed 64 bits.
    ///
    /// Transformer, per layer and token: 17 values of the width `hidden` (Korthikanti et al. 2022, "Reducing Activation
    /// Recomputation in Large Transformer Models", table 2: 34 bytes in 16 bits, of which 19 in the feed-forward layer,
    /// through which a token of a mixture goes once for each of its experts), and 2.5 matrices of scores per head if
    /// attention keeps them. Logits are kept twice in 32 bits: for the loss and as its gradient.
    ///
    /// With Brigade's kernels those of [`TransformerStep::activations`].
    ///
    /// Convolutions: each output is kept, normalised and kept again, and rectified in place.
    pub(super) fn kept(&self, precision: Precision, batch: MicroBatch) -> Option<Kept> {
        if let Some(step) = self.step(precision, batch).filter(|step| step.kernels) {
            let alone = Mesh::builder().build(1).ok()?;
            let (activations, logits) = (step.activations(&alone, 0), step.logits(&alone, 0));
            return Some(Kept { activations, logits });
        }
        let width: u128 = if precision == Precision::Fp32 { 4 } else { 2 };
        let samples = u128::from(batch.samples);
        let (activations, logits) = match *self {
            Self::Transformer { layers, hidden, heads, vocabulary, mixture, .. } => {
                let tokens = u128::from(batch.tokens);
                let chosen = u128::from(mixture.map_or(1, |mixture| mixture.chosen));
                let values = 15u128.checked_add(chosen.checked_mul(19)?)?;
                let blocks = product(&[values, hidden.into(), layers.into(), tokens, samples])? / 2;
                let scores = if batch.keeps_scores {
                    product(&[5, heads.into(), layers.into(), tokens, tokens, samples])? / 2
                } else {
                    0
                };
                let logits = product(&[8, vocabulary.into(), tokens, samples])?;
                (blocks.checked_add(scores).and_then(|values| values.checked_mul(width))?, logits)
            }
            Self::Convolutional { outputs } => (product(&[2, outputs.into(), samples, width])?, 0),
        };
        let [activations, logits] = [activations, logits].map(u64::try_from);
        Some(Kept { activations: activations.ok()?, logits: logits.ok()? })
    }
}

impl Shape {
    /// Returns the sizes of a transformer's micro-batch on a rank of its own. `None` for other models.
    pub(super) fn step(&self, precision: Precision, batch: MicroBatch) -> Option<TransformerStep> {
        let Self::Transformer {
            layers,
            hidden,
            heads,
            keys,
            vocabulary,
            mixture,
            intermediate,
            gated,
        } = *self
        else {
            return None;
        };
        Some(TransformerStep {
            layers,
            hidden,
            key_width: keys,
            heads,
            vocabulary,
            samples: batch.samples,
            tokens: batch.tokens,
            element_bytes: if precision == Precision::Fp32 { 4 } else { 2 },
            keeps_scores: batch.keeps_scores,
            kernels: batch.kernels && precision == Precision::Mixed16,
            intermediate,
            gated,
            experts: mixture.map_or(0, |mixture| mixture.experts),
            experts_per_token: mixture.map_or(1, |mixture| mixture.chosen),
            ..TransformerStep::default()
        })
    }
}

fn product(factors: &[u128]) -> Option<u128> {
    factors.iter().try_fold(1_u128, |product, factor| product.checked_mul(*factor))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ONE: MicroBatch =
        MicroBatch { samples: 1, tokens: 1024, keeps_scores: true, kernels: false };

    fn gpt2() -> ModelSize {
        let shape = Shape::Transformer {
            layers: 12,
            hidden: 768,
            heads: 12,
            keys: 768,
            vocabulary: 50_257,
            mixture: None,
            intermediate: 3072,
            gated: false,
        };
        ModelSize { parameters: 124_439_808, largest: 38_597_376, shape: Some(shape) }
    }

    #[test]
    fn bytes_per_parameter() {
        let model = ModelSize { parameters: 1001, largest: 1, shape: None };
        // precision, state, weights, gradients, optimizer
        let table = [
            (Precision::Fp32, OptimizerState::Two, 4004, Some(4004), Some(8008)),
            (Precision::Fp32, OptimizerState::None, 4004, Some(4004), Some(0)),
            (Precision::Mixed16, OptimizerState::One, 6006, Some(4004), Some(4004)),
            (Precision::Pure16, OptimizerState::Two, 2002, Some(2002), Some(4004)),
            (Precision::Int8, OptimizerState::Two, 1001, None, None),
            (Precision::Int4, OptimizerState::Two, 501, None, None),
        ];
        for (precision, state, weights, gradients, optimizer) in table {
            let memory = Memory::new(&model, precision, state, ONE).unwrap();
            let expected = Memory { weights, gradients, optimizer, activations: None };
            assert_eq!(memory, expected, "{precision:?} {state:?}");
        }
    }

    #[test]
    fn the_parameters_of_a_size_are_as_many() {
        for parameters in [1, 1001, 124_439_808, 7_000_000_000] {
            let shape = Shape::Transformer {
                layers: 12,
                hidden: 768,
                heads: 12,
                keys: 768,
                vocabulary: 0,
                mixture: None,
                intermediate: 3072,
                gated: false,
            };
            for shape in [None, Some(shape)] {
                let size = ModelSize { parameters, largest: 1, shape };
                let by_unit = size.parameters_by_unit();
                let sizes = by_unit.iter().map(|it| it.shape.iter().product::<u64>());
                assert_eq!(sizes.sum::<u64>(), parameters);
            }
        }
        let gpt2 = gpt2().parameters_by_unit();
        let block: u64 =
            gpt2.iter().filter(|it| it.unit.as_deref() == Some("h.3")).map(|it| it.shape[0]).sum();
        assert_eq!(block, 12 * 768 + 13);
    }

    #[test]
    fn training_with_adam_takes_16_bytes_per_parameter() {
        let resnet18 = ModelSize { parameters: 11_689_512, largest: 2_359_296, shape: None };
        let memory = Memory::new(&resnet18, Precision::Fp32, OptimizerState::Two, ONE).unwrap();
        assert_eq!(memory.weights, 4 * 11_689_512);
        assert_eq!(memory.total(), 16 * 11_689_512); // weights, gradients, two states
    }

    #[test]
    fn a_transformers_activations_are_those_of_the_paper() {
        // s b h (34 + 5 a s / h) bytes per layer in 16 bits.
        let (s, h, a, layers) = (1024_u64, 768_u64, 12_u64, 12_u64);
        let paper = s * layers * (34 * h + 5 * a * s);
        let logits = 8 * 50_257 * s;
        let memory = Memory::new(&gpt2(), Precision::Mixed16, OptimizerState::Two, ONE).unwrap();
        assert_eq!(memory.activations, Some(paper + logits));

        let fused = MicroBatch { keeps_scores: false, ..ONE };
        let memory = Memory::new(&gpt2(), Precision::Mixed16, OptimizerState::Two, fused).unwrap();
        assert_eq!(memory.activations, Some(s * layers * 34 * h + logits));
    }

    #[test]
    fn kernels_keep_less_in_mixed_precision_alone() {
        let with = |kernels| MicroBatch { kernels, keeps_scores: false, ..ONE };
        let of = |precision, kernels| {
            let memory = Memory::new(&gpt2(), precision, OptimizerState::Two, with(kernels));
            memory.unwrap().activations.unwrap()
        };
        // In 28 bytes for each number of the hidden size, 16 of statistics and 4 for each head.
        let layers = 1024 * 12 * (28 * 768 + 16 + 4 * 12);
        assert_eq!(of(Precision::Mixed16, true), layers + 2 * 50_304 * 1024);
        assert!(of(Precision::Mixed16, true) < of(Precision::Mixed16, false));
        for precision in [Precision::Fp32, Precision::Pure16] {
            assert_eq!(of(precision, true), of(precision, false));
        }
    }

    #[test]
    fn samples_multiply_activations_only() {
        let many = MicroBatch { samples: 8, ..ONE };
        let one = Memory::new(&gpt2(), Precision::Fp32, OptimizerState::Two, ONE).unwrap();
        let eight = Memory::new(&gpt2(), Precision::Fp32, OptimizerState::Two, many).unwrap();
        assert_eq!(eight.activations, one.activations.map(|bytes| 8 * bytes));
        assert_eq!(eight.total() - one.total(), 7 * one.activations.unwrap());
    }

    #[test]
    fn sizes_that_overflow_are_refused() {
        let model = ModelSize { parameters: u64::MAX, largest: 1, shape: None };
        let refused = Memory::new(&model, Precision::Fp32, OptimizerState::Two, ONE);
        assert_eq!(refused, None);
        let batch = MicroBatch { samples: u64::MAX, tokens: u64::MAX, ..ONE };
        let refused = Memory::new(&gpt2(), Precision::Fp32, OptimizerState::Two, batch);
        assert_eq!(refused, None);
    }
}
