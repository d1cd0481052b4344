//! Messages and activation memory of ranks that divide the layers, sequences and stages of a transformer.

use std::fmt;

use crate::pipeline::cut_evenly;
use crate::{Axis, ContextMethod, Mesh, Phase, SequencePart};

/// Sizes of a transformer and of one of its micro-batches, from which messages and activation memory are computed.
///
/// Messages are counted as by `ProcessGroup::traffic` of a fake group: the bytes that one rank sends, with all-gathers,
/// all-reduces and reduce-scatters around rings.
///
/// ```
/// use brigade_sharding::{Axis, Mesh, Phase, TransformerStep};
///
/// let step = TransformerStep { layers: 32, hidden: 4096, key_width: 4096, tokens: 2048, ..Default::default() };
/// let mesh = Mesh::builder().tensor(2).build(2)?;
/// let sums = step.messages(&mesh, 0);
/// // A sum behind the embedding and two in each layer, of the hidden numbers of all tokens in 4 bytes.
/// assert_eq!((sums[0].axis, sums[0].phase, sums[0].messages), (Axis::Tensor, Phase::Forward, 1 + 2 * 32));
/// assert_eq!(sums[0].bytes, 65 * (2048 * 4096 * 4));
/// # Ok::<(), brigade_sharding::ShardingError>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TransformerStep {
    /// Number of transformer blocks. Defaults to 1.
    pub layers: u64,
    /// Hidden size: the width of each token's vector. Defaults to 1.
    pub hidden: u64,
    /// Width of the keys of all heads: the hidden size, or less with grouped-query attention. Defaults to 1.
    pub key_width: u64,
    /// Number of attention heads. Defaults to 1.
    pub heads: u64,
    /// Vocabulary size. 0 without a language head. Defaults to 0.
    pub vocabulary: u64,
    /// Number of sequences of a micro-batch. Defaults to 1.
    pub samples: u64,
    /// Sequence length in tokens. Defaults to 1.
    pub tokens: u64,
    /// Size of one element of an activation, in bytes. Defaults to 4.
    pub element_bytes: u64,
    /// `true` if attention keeps its matrix of scores for the backward pass. Defaults to `false`, as with fused
    /// kernels.
    pub keeps_scores: bool,
    /// `true` if activations are what Brigade's models keep on a GPU with Brigade's kernels under autocast. Then
    /// `keeps_scores` has no meaning. Defaults to `false`.
    pub kernels: bool,
    /// Width of the feed-forward layers between their products. 0 stands for four times the hidden size. Only read with
    /// `kernels`. Defaults to 0.
    pub intermediate: u64,
    /// `true` if feed-forward layers are gated pairs (SwiGLU). Only read with `kernels`. Defaults to `false`.
    pub gated: bool,
    /// Number of pipeline stages per rank (chunks). Defaults to 1.
    pub chunks: usize,
    /// Method of context parallelism. Defaults to [`ContextMethod::Gather`].
    pub method: ContextMethod,
    /// `true` if tensor ranks have parts of the sequence between divided layers (Megatron-LM's sequence parallelism).
    /// Defaults to `false`.
    pub sequence_regions: bool,
    /// Number of vectors of the hidden size in a block whose gradients sequence regions sum: 2 in Llama (weights of
    /// norms), 6 in GPT-2 (weights and biases of norms, biases behind sums). Defaults to 2.
    pub region_vectors: u64,
    /// Number of experts of a block whose feed-forward layer is a mixture. 0 without experts. Defaults to 0.
    pub experts: u64,
    /// Number of experts for each token, through as many of which it goes. Defaults to 1.
    pub experts_per_token: u64,
}

/// Messages that one rank sends for a micro-batch along an axis of the mesh.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AxisMessages {
    /// Axis of the mesh along which the messages are sent.
    pub axis: Axis,
    /// Part of the step: forward or backward pass.
    pub phase: Phase,
    /// Name of the operation, as process groups count it: `all_reduce`, `all_gather`, `reduce_scatter`, `all_to_all` or
    /// `send`.
    pub operation: &'static str,
    /// Number of messages of this operation.
    pub messages: u64,
    /// Total number of bytes that the rank sends in these messages.
    pub bytes: u64,
}

impl Default for TransformerStep {
    fn default() -> Self {
        Self {
            layers: 1,
            hidden: 1,
            key_width: 1,
            heads: 1,
            vocabulary: 0,
            samples: 1,
            tokens: 1,
            element_bytes: 4,
            keeps_scores: false,
            kernels: false,
            intermediate: 0,
            gated: false,
            chunks: 1,
            method: ContextMethod::Gather,
            sequence_regions: false,
            region_vectors: 2,
            experts: 0,
            experts_per_token: 1,
        }
    }
}

/// Sizes of a layer of experts that the ranks of a group divide, and of the tokens that pass through it.
///
/// ```
/// use brigade_sharding::ExpertStep;
///
/// // Even use: of 4 ranks 3 have the experts of other tokens.
/// let step = ExpertStep { experts: 8, hidden: 64, element_bytes: 4, leaving_rows: 2 * 100 * 3 / 4 };
/// let messages = step.messages(4);
/// assert_eq!((messages[0].messages, messages[0].bytes), (3, 2 * 150 * 64 * 4 + 8 * 8 * 3 / 4));
/// assert_eq!((messages[1].messages, messages[1].bytes), (2, 2 * 150 * 64 * 4));
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertStep {
    /// Total number of experts of all ranks.
    pub experts: u64,
    /// Hidden size: the width of each token's vector.
    pub hidden: u64,
    /// Size of one element of a token's vector, in bytes.
    pub element_bytes: u64,
    /// Number of rows that this rank sends to experts of other ranks. With balanced routing it is `tokens x choices x
    /// (ranks - 1) / ranks`.
    pub leaving_rows: u64,
}

impl ExpertStep {
    /// Returns the messages that a rank sends for one layer. Forward, these are the numbers of tokens of each expert,
    /// the tokens, and the outputs for as many tokens of other ranks; backward, two messages of gradients. Empty for
    /// one rank.
    #[must_use]
    pub fn messages(&self, ranks: u64) -> Vec<AxisMessages> {
        if ranks < 2 {
            return Vec::new();
        }
        let rows = product(&[2, self.leaving_rows, self.hidden, self.element_bytes]);
        let counts = others(u128::from(self.experts) * u128::from(NUMBER_BYTES), ranks);
        vec![
            sent(Axis::Expert, Phase::Forward, "all_to_all", 3, rows.saturating_add(counts)),
            sent(Axis::Expert, Phase::Backward, "all_to_all", 2, rows),
        ]
    }
}

/// Returns the formulas of [`TransformerStep::messages`] with the sizes of a mesh, a line for each axis with several
/// ranks: the number of elements that a rank sends for a micro-batch of `b` sequences of `s` tokens, with hidden size
/// `h`, key width `k` and `n` experts for each token.
///
/// ```
/// use brigade_sharding::{Mesh, message_formulas};
///
/// let mesh = Mesh::builder().pipeline(2).tensor(4).build(8)?;
/// let lines = message_formulas(&mesh);
/// assert_eq!(lines[0], "tp  each layer: 2 sums forward and 2 back, each 2 x 3/4 b s h numbers");
/// assert_eq!(lines[1], "pp  each micro-batch: b s h numbers to the next stage, and as many back");
/// # Ok::<(), brigade_sharding::ShardingError>(())
/// ```
#[must_use]
pub fn message_formulas(mesh: &Mesh) -> Vec<String> {
    let of = |axis: Axis| Some(mesh.size(axis)).filter(|ranks| *ranks > 1);
    let (context, sequence) = (of(Axis::Context), of(Axis::Sequence));
    let tokens = match mesh.size(Axis::Context) * mesh.size(Axis::Sequence) {
        1 => "s".to_owned(),
        parts => format!("s/{parts}"),
    };
    let width = |name: &str| match of(Axis::Tensor) {
        Some(ranks) => format!("{name}/{ranks}"),
        None => name.to_owned(),
    };
    let (hidden, keys) = (width("h"), width("k"));
    let lines = [
        of(Axis::Tensor).map(|t| {
            let others = t - 1;
            format!("tp  each layer: 2 sums forward and 2 back, each 2 x {others}/{t} b {tokens} h numbers")
        }),
        context.map(|c| {
            let others = c - 1;
            format!(
                "cp  each layer: keys and values forward, both and their gradients back, each {others} x 2 b {tokens} \
                 {keys} numbers"
            )
        }),
        sequence.map(|c| {
            let others = c - 1;
            format!(
                "sp  each layer: 4 exchanges forward and 4 back, together 2 x {others}/{c} b {tokens} ({hidden} + {keys}) \
                 numbers each way"
            )
        }),
        of(Axis::Expert).map(|e| {
            let (others, tensor) = (e - 1, mesh.size(Axis::Tensor));
            let tokens = if tensor == 1 { tokens.clone() } else { format!("{tokens} / {tensor}") };
            format!(
                "ep  each layer of experts: tokens to their n experts and outputs back, forward and backward, each time \
                 2 x {others}/{e} n b {tokens} h numbers"
            )
        }),
        of(Axis::Pipeline).map(|_| {
            format!("pp  each micro-batch: b {tokens} h numbers to the next stage, and as many back")
        }),
    ];
    lines.into_iter().flatten().collect()
}

/// Position of a rank on the axes of the mesh.
struct Place {
    tensor: u64,
    parts: u64,
    /// Axis along which sequences are divided.
    parts_axis: Axis,
    layers: u64,
    is_first: bool,
    is_last: bool,
    /// `true` if other ranks have stages.
    has_peers: bool,
    /// Number of tokens of a sequence that the rank has.
    tokens: u64,
}

impl TransformerStep {
    /// Returns the messages that a rank of a stage sends for one micro-batch, along the axes `tp`, `cp` or `sp`, and
    /// `pp`. There are none along axes with one rank. Blocks are divided evenly into stages, of which each rank has
    /// [`TransformerStep::chunks`]; the neighbouring stages are assumed to be on other ranks. With a divided vocabulary one message for the loss is counted; long batches send it in chunks with as many
    /// bytes in total.
    #[must_use]
    pub fn messages(&self, mesh: &Mesh, stage: usize) -> Vec<AxisMessages> {
        let place = self.place(mesh, stage);
        let mut all = Vec::new();
        if place.tensor > 1 {
            self.tensor_messages(&place, &mut all);
        }
        if place.parts > 1 {
            self.context_messages(&place, &mut all);
        }
        if self.experts > 0 {
            self.expert_messages(&place, mesh.size(Axis::Expert) as u64, &mut all);
        }
        if place.has_peers {
            let bytes = self.hidden_bytes(&place);
            let mut send = |phase, is_sent: bool| {
                if is_sent {
                    all.push(sent(Axis::Pipeline, phase, "send", 1, bytes));
                }
            };
            send(Phase::Forward, !place.is_last);
            send(Phase::Backward, !place.is_first);
        }
        all
    }

    fn tensor_messages(&self, place: &Place, all: &mut Vec<AxisMessages>) {
        let Place { tensor, layers, is_first, is_last, .. } = *place;
        let hidden = self.hidden_bytes(place);
        let (part, sum) = (others(hidden.into(), tensor), others(2 * u128::from(hidden), tensor));
        let mut add = |phase, operation, messages: u64, bytes: u64| {
            if messages > 0 {
                let bytes = messages.saturating_mul(bytes);
                all.push(sent(Axis::Tensor, phase, operation, messages, bytes));
            }
        };
        let has_head = is_last && self.vocabulary > 0;
        let (first, last, head) = (u64::from(is_first), u64::from(is_last), u64::from(has_head));
        let (forward, backward) = (Phase::Forward, Phase::Backward);
        if self.sequence_regions {
            add(forward, "all_gather", 2 * layers + last, part);
            add(forward, "reduce_scatter", 2 * layers, part);
            add(forward, "all_reduce", first, sum);
            add(backward, "all_gather", 2 * layers + first, part);
            add(backward, "reduce_scatter", 2 * layers, part);
            add(backward, "all_reduce", head, sum);
            let vector = self.hidden.saturating_mul(self.element_bytes);
            let vectors = layers.saturating_mul(self.region_vectors);
            add(backward, "all_reduce", vectors, others(2 * u128::from(vector), tensor));
        } else {
            add(forward, "all_reduce", 2 * layers + first, sum);
            add(backward, "all_reduce", 2 * layers + head, sum);
        }
        // The last token has no label.
        let unlabelled = if place.parts > 1 { 0 } else { self.samples };
        let labels = self.samples.saturating_mul(place.tokens).saturating_sub(unlabelled);
        let numbers = NUMBERS_OF_LABEL * NUMBER_BYTES;
        add(forward, "all_gather", head, labels.saturating_mul(numbers * (tensor - 1)));
    }

    fn context_messages(&self, place: &Place, all: &mut Vec<AxisMessages>) {
        let Place { parts, layers, parts_axis: axis, tensor, .. } = *place;
        let tokens = product(&[self.samples, place.tokens, self.element_bytes]);
        let peers = parts - 1;
        // A rank has at least one head of keys.
        let head = self.hidden / self.heads.max(1);
        let width = (self.key_width / tensor).max(head.min(self.key_width));
        let keys = tokens.saturating_mul(2 * width);
        // Gradients of keys are summed in 32 bits at least.
        let sums = keys / self.element_bytes.max(1) * self.element_bytes.max(4);
        let mut add = |phase, operation, messages: u64, bytes: u64| {
            let (messages, bytes) = (layers.saturating_mul(messages), layers.saturating_mul(bytes));
            all.push(sent(axis, phase, operation, messages, bytes));
        };
        let times = u64::saturating_mul;
        match self.method {
            _ if axis == Axis::Sequence => {
                let queries = tokens.saturating_mul(self.hidden / tensor);
                // With fewer heads of keys than ranks, keys are repeated.
                let repeated = times(head, parts).max(width);
                let bytes = 2 * u128::from(queries) + 2 * u128::from(times(tokens, repeated));
                for phase in [Phase::Forward, Phase::Backward] {
                    add(phase, "all_to_all", 4, others(bytes, parts));
                }
            }
            ContextMethod::Ring => {
                add(Phase::Forward, "all_to_all", peers, times(keys, peers));
                let bytes = times(keys, peers).saturating_add(times(sums, parts));
                add(Phase::Backward, "all_to_all", peers + parts, bytes);
            }
            ContextMethod::Gather | ContextMethod::Ulysses => {
                add(Phase::Forward, "all_gather", 1, times(keys, peers));
                add(Phase::Backward, "all_gather", 1, times(keys, peers));
                add(Phase::Backward, "reduce_scatter", 1, times(sums, peers));
            }
        }
        if place.is_last && self.vocabulary > 0 {
            // The sum of the losses and their number, and the gradient of the former.
            let (loss, number) = (self.element_bytes.max(4), NUMBER_BYTES);
            let [loss, number] = [loss, number].map(|bytes| others(2 * u128::from(bytes), parts));
            all.push(sent(axis, Phase::Forward, "all_reduce", 2, loss + number));
            all.push(sent(axis, Phase::Backward, "all_reduce", 1, loss));
        }
    }

    /// Adds the messages to experts, where the router uses them evenly. Each tensor rank sends a part of the tokens.
    fn expert_messages(&self, place: &Place, ranks: u64, all: &mut Vec<AxisMessages>) {
        let tokens = product(&[self.samples, place.tokens]).div_ceil(place.tensor);
        let rows = u128::from(tokens) * u128::from(self.experts_per_token);
        let step = ExpertStep {
            experts: self.experts,
            hidden: self.hidden,
            element_bytes: self.element_bytes,
            leaving_rows: others(rows, ranks.max(1)),
        };
        all.extend(step.messages(ranks).into_iter().map(|it| AxisMessages {
            messages: it.messages.saturating_mul(place.layers),
            bytes: it.bytes.saturating_mul(place.layers),
            ..it
        }));
    }

    /// Returns the bytes of the activations that a rank of a stage keeps for one micro-batch between its forward and
    /// its backward pass, without recomputation. In 16 bits, each layer takes 5 bytes for each attention score, and 34
    /// bytes for each element of each token's vector: tensor ranks divide 24 of them (Korthikanti et al. 2022, "Reducing
    /// Activation Recomputation in Large Transformer Models", table 2). With sequence regions they divide 30: the inputs
    /// of the two divided products are gathered once and kept whole, 4 bytes, where the paper gathers them again in the
    /// backward pass. With experts the 19 bytes of the feed-forward layer are kept for each expert of a token; tensor ranks
    /// divide those of the experts after the first.
    ///
    /// With `kernels` a layer keeps of each token: the two sums of the residual stream in 32 bits with their statistics,
    /// and normalised in 16 bits; queries, keys, values, the output of attention and the logarithms of its sums; and the
    /// feed-forward layer before its activation, of a gated pair both parts. Dropout keeps no masks, and branches are not
    /// kept. Each expert of a token also keeps its input and its output. Tensor ranks divide attention and the
    /// feed-forward layer, with sequence regions the sums, too.
    #[must_use]
    pub fn activations(&self, mesh: &Mesh, stage: usize) -> u64 {
        let place = self.place(mesh, stage);
        if self.kernels {
            return self.kept_with_kernels(&place);
        }
        let t = place.tensor;
        let tokens = product(&[self.samples, place.tokens, place.layers, self.element_bytes]);
        let hidden = u128::from(tokens) * u128::from(self.hidden);
        let blocks = if self.sequence_regions {
            hidden.saturating_mul(u128::from(2 * t + 15)) / u128::from(t)
        } else {
            hidden.saturating_mul(u128::from(5 * t + 12)) / u128::from(t)
        };
        let further = u128::from(self.experts_per_token.saturating_sub(1));
        let further = hidden.saturating_mul(further).saturating_mul(19) / u128::from(2 * t);
        let blocks = blocks.saturating_add(further);
        let seen = u128::from(place.tokens) * u128::from(place.parts);
        let scores = (u128::from(tokens) * u128::from(self.heads)).saturating_mul(5) / 2;
        let scores = scores.saturating_mul(seen) / u128::from(t);
        let scores = if self.keeps_scores { scores } else { 0 };
        u64::try_from(blocks.saturating_add(scores)).unwrap_or(u64::MAX)
    }

    fn kept_with_kernels(&self, place: &Place) -> u64 {
        let t = u128::from(place.tensor);
        let [hidden, keys, heads, element] =
            [self.hidden, self.key_width, self.heads, self.element_bytes].map(u128::from);
        let between = match self.intermediate {
            0 => hidden.saturating_mul(4),
            width => width.into(),
        };
        let between = if self.gated { between.saturating_mul(2) } else { between };
        let of_expert = if self.experts > 0 { between.saturating_add(2 * hidden) } else { between };
        let of_experts = of_expert.saturating_mul(self.experts_per_token.into());
        // A sum with its mean and the inverse of its deviation, before attention and before the feed-forward layer.
        let sums = 2 * 4 * (hidden + 2);
        let attention = element * 2 * (hidden + keys) + 4 * heads;
        let divided = of_experts.saturating_mul(element).saturating_add(attention);
        let normed = 2 * element * hidden;
        let of_token = if self.sequence_regions {
            normed + divided.saturating_add(sums) / t
        } else {
            normed + sums + divided / t
        };
        let tokens = product(&[self.samples, place.tokens, place.layers]);
        u64::try_from(of_token.saturating_mul(tokens.into())).unwrap_or(u64::MAX)
    }

    /// Returns the bytes of the logits that a rank of a stage has for the loss, and of their gradient, both in 32 bits.
    /// With `kernels` the head computes them in parts of at most 512 MiB, and the gradient is in their place. 0 for stages
    /// without the language head.
    #[must_use]
    pub fn logits(&self, mesh: &Mesh, stage: usize) -> u64 {
        let place = self.place(mesh, stage);
        let part = self.vocabulary.div_ceil(place.tensor);
        if !place.is_last {
            return 0;
        }
        if !self.kernels {
            return product(&[8, part, self.samples, place.tokens]);
        }
        let columns = part.div_ceil(HEAD_COLUMNS).saturating_mul(HEAD_COLUMNS);
        let of_row = product(&[self.element_bytes, columns]);
        let all = product(&[of_row, self.samples, place.tokens]);
        all.min(HEAD_BYTES.max(product(&[of_row, HEAD_ROWS])))
    }

    /// Returns the bytes of the hidden states of this rank's tokens.
    fn hidden_bytes(&self, place: &Place) -> u64 {
        product(&[self.samples, place.tokens, self.hidden, self.element_bytes])
    }

    fn place(&self, mesh: &Mesh, stage: usize) -> Place {
        let stages = mesh.size(Axis::Pipeline).saturating_mul(self.chunks.max(1));
        let layers = usize::try_from(self.layers).unwrap_or(usize::MAX);
        let layers = cut_evenly(layers, stages).ok().and_then(|cut| cut.get(stage).cloned());
        let (context, sequence) = (mesh.size(Axis::Context), mesh.size(Axis::Sequence));
        let parts = context * sequence;
        let part = SequencePart::new(self.tokens, 0, parts, sequence == 1);
        Place {
            tensor: mesh.size(Axis::Tensor) as u64,
            parts: parts as u64,
            parts_axis: if sequence > 1 { Axis::Sequence } else { Axis::Context },
            layers: layers.map_or(0, |range| range.len() as u64),
            is_first: stage == 0,
            is_last: stage + 1 == stages,
            has_peers: mesh.size(Axis::Pipeline) > 1,
            tokens: part.own_length(),
        }
    }
}

impl fmt::Display for AxisMessages {
    /// Writes `tp forward: 64 all_reduce, 2147483648 bytes`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let phase = if self.phase == Phase::Forward { "forward" } else { "backward" };
        let Self { axis, operation, messages, bytes, .. } = self;
        write!(f, "{} {phase}: {messages} {operation}, {bytes} bytes", axis.name())
    }
}

fn sent(
    axis: Axis,
    phase: Phase,
    operation: &'static str,
    messages: u64,
    bytes: u64,
) -> AxisMessages {
    AxisMessages { axis, phase, operation, messages, bytes }
}

/// Returns the bytes of a whole that go to the other ranks of a ring.
fn others(bytes: u128, ranks: u64) -> u64 {
    let sent = bytes.saturating_mul(u128::from(ranks - 1)) / u128::from(ranks);
    u64::try_from(sent).unwrap_or(u64::MAX)
}

fn product(factors: &[u64]) -> u64 {
    factors.iter().fold(1, |product, factor| product.saturating_mul(*factor))
}

/// Numbers that ranks exchange for each label: the largest logit, the sum of powers, and the label's logit.
const NUMBERS_OF_LABEL: u64 = 3;
const NUMBER_BYTES: u64 = 8;
/// Logits that the language head has at a time on a GPU, at most, but for as many rows, and the number of columns of
/// which theirs are a multiple: the constants of `crates/torch/cpp/cross_entropy.cpp`.
const HEAD_BYTES: u64 = 512 << 20;
const HEAD_ROWS: u64 = 128;
const HEAD_COLUMNS: u64 = 64;

#[cfg(test)]
mod tests {
    use super::*;

    fn step() -> TransformerStep {
        let step = TransformerStep { layers: 10, hidden: 64, key_width: 64, ..Default::default() };
        TransformerStep { heads: 4, vocabulary: 100, samples: 2, tokens: 32, ..step }
    }

    #[test]
    fn one_rank_sends_nothing_and_keeps_what_the_paper_says() {
        let mesh = Mesh::builder().build(1).unwrap();
        assert!(step().messages(&mesh, 0).is_empty());
        let half = TransformerStep { element_bytes: 2, keeps_scores: true, ..step() };
        // s b h (34 + 5 a s / h) for each layer.
        assert_eq!(half.activations(&mesh, 0), 10 * (32 * 2) * (34 * 64 + 5 * 4 * 32));
        assert_eq!(half.logits(&mesh, 0), 8 * 100 * 64);
    }

    #[test]
    fn kernels_keep_what_they_read_again() {
        let mesh = Mesh::builder().build(1).unwrap();
        let own = TransformerStep { element_bytes: 2, kernels: true, ..step() };
        let tokens = 10 * 64;
        // The sums, their statistics, what is normalised, attention, its sums, and the feed-forward layer.
        let before = |attention: u64| 8 * 64 + 16 + 4 * 64 + attention + 4 * 4;
        assert_eq!(own.activations(&mesh, 0), tokens * (before(8 * 64) + 8 * 64));
        let llama = TransformerStep { gated: true, intermediate: 100, key_width: 16, ..own };
        assert_eq!(llama.activations(&mesh, 0), tokens * (before(4 * (64 + 16)) + 4 * 100));
        let two = Mesh::builder().tensor(2).build(2).unwrap();
        let divided = 8 * 64 + 4 * 4 + 8 * 64;
        assert_eq!(own.activations(&two, 0), tokens * (before(0) - 4 * 4 + divided / 2));
        let regions = TransformerStep { sequence_regions: true, ..own };
        assert_eq!(regions.activations(&two, 0), tokens * (4 * 64 + (8 * 64 + 16 + divided) / 2));
        // 100 classes are two blocks of 64, and many of them parts.
        assert_eq!(own.logits(&mesh, 0), 2 * 128 * 64);
        let many = TransformerStep { vocabulary: 50_257, samples: 64, tokens: 1024, ..own };
        assert_eq!(many.logits(&mesh, 0), 512 << 20);
        let huge = TransformerStep { vocabulary: u64::MAX, ..own };
        assert_eq!(huge.logits(&mesh, 0), u64::MAX);
    }

    #[test]
    fn each_axis_divides_its_part_of_the_activations() {
        let half = TransformerStep { element_bytes: 2, keeps_scores: true, ..step() };
        let on = |mesh: crate::MeshBuilder, ranks, step: TransformerStep| {
            step.activations(&mesh.build(ranks).unwrap(), 0)
        };
        // s b h (10 + 24 / t + 5 a s / (h t)), and s b h (4 + 30 / t + 5 a s / (h t)) with sequence regions.
        let tokens = 10 * 64;
        let expected = tokens * ((10 + 24 / 2) * 64 + 5 * 4 * 32 / 2);
        assert_eq!(on(Mesh::builder().tensor(2), 2, half), expected);
        let regions = TransformerStep { sequence_regions: true, ..half };
        let expected = tokens * ((4 + 30 / 2) * 64 + 5 * 4 * 32 / 2);
        assert_eq!(on(Mesh::builder().tensor(2), 2, regions), expected);
        let expected = tokens * (34 * 64 + 5 * 4 * 32) / 2;
        assert_eq!(on(Mesh::builder().context(2), 2, half), expected);
        assert_eq!(on(Mesh::builder().pipeline(2), 2, half), expected);
    }

    #[test]
    fn stages_send_activations_forward_and_gradients_back() {
        let mesh = Mesh::builder().pipeline(3).build(3).unwrap();
        let of = |stage| {
            let sent = step().messages(&mesh, stage);
            sent.iter().map(|it| (it.phase, it.messages, it.bytes)).collect::<Vec<_>>()
        };
        let bytes = 2 * 32 * 64 * 4;
        let (forward, back) = ((Phase::Forward, 1, bytes), (Phase::Backward, 1, bytes));
        assert_eq!([of(0), of(1), of(2)], [vec![forward], vec![forward, back], vec![back]]);

        // Two stages on each rank: half the layers for each.
        let two = Mesh::builder().pipeline(2).build(2).unwrap();
        let whole = Mesh::builder().build(1).unwrap();
        let chunked = TransformerStep { layers: 4, chunks: 2, ..step() };
        let all = TransformerStep { layers: 4, ..step() }.activations(&whole, 0);
        let kept: u64 = (0..4).map(|stage| chunked.activations(&two, stage)).sum();
        assert_eq!((kept, chunked.messages(&two, 1).len()), (all, 2));
        assert!(chunked.logits(&two, 1) == 0 && chunked.logits(&two, 3) > 0);
    }

    #[test]
    fn experts_send_tokens_and_keep_more() {
        let mixture = TransformerStep { experts: 8, experts_per_token: 2, ..step() };
        let one = Mesh::builder().build(1).unwrap();
        assert!(mixture.messages(&one, 0).is_empty());
        let tokens = 2 * 32;
        let more = mixture.activations(&one, 0) - step().activations(&one, 0);
        assert_eq!(more, 10 * tokens * 64 * 19 / 2 * 4);
        // Of 4 ranks 3 have the experts of other rows.
        let mesh = Mesh::builder().shard(4).expert(4).build(4).unwrap();
        let sent = mixture.messages(&mesh, 0);
        let rows = 2 * tokens * 3 / 4;
        assert_eq!((sent[0].messages, sent[1].messages), (10 * 3, 10 * 2));
        assert_eq!(sent[1].bytes, 10 * 2 * rows * 64 * 4);
        assert_eq!(sent[0].bytes, sent[1].bytes + 10 * 8 * 8 * 3 / 4);
        // A tensor group sends its tokens once.
        let mesh = Mesh::builder().shard(2).tensor(2).expert(4).build(4).unwrap();
        let sent = mixture.messages(&mesh, 0);
        let expert: Vec<_> = sent.iter().filter(|it| it.axis == Axis::Expert).collect();
        assert_eq!(expert[1].bytes, 10 * 2 * (rows / 2) * 64 * 4);
    }

    #[test]
    fn sizes_that_overflow_are_the_largest_number() {
        let mesh = Mesh::builder().tensor(2).context(2).build(4).unwrap();
        let most = u64::MAX;
        let huge = TransformerStep { hidden: most, key_width: most, tokens: most / 4, ..step() };
        assert_eq!(huge.activations(&mesh, 0), most);
        assert!(huge.messages(&mesh, 0).iter().all(|it| it.bytes > 0));
    }
}
