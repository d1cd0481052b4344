//! Products of the axes of a mesh train as one process does: a table of them, each with its losses, whole gradients and
//! weights over five steps of AdamW in float64, and the moving average of the weights.

use std::collections::{BTreeSet, HashMap};
use std::sync::{Mutex, PoisonError};

use brigade_models::{
    Gpt2LmHead, IGNORED_LABEL, Labelled, LlamaForCausalLm, LlamaOptions, MixtralForCausalLm,
    MixtralOptions, TokenLoss,
};
use brigade_nn::{Model, Module, ParamPath, StateDict, TensorParallelPlan};
use brigade_optim::AdamW;
use brigade_sharding::pipeline::Schedule;
use brigade_sharding::{Axis, ContextMethod, Mesh, Sharding, Strategy};
use brigade_torch::{ReduceOp, gradient};
use brigade_train::{Accelerator, PipelineOptions, PreparedModel, WeightAverage};
use tch::{Device, Kind, Tensor};

use crate::sharding::on_ranks;
use crate::tensor_parallel::gpt2;

const STEPS: usize = 5;
/// Texts of a data rank in a step, and their tokens.
const TEXTS: i64 = 4;
const TOKENS: i64 = 6;

#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Architecture {
    Gpt2,
    Llama,
    Mixtral,
}

/// Sizes of the axes, and what else a product of them consists of.
#[derive(Debug, Clone, Copy)]
struct Product {
    architecture: Architecture,
    pipeline: usize,
    replicate: usize,
    shard: usize,
    context: usize,
    /// Ranks that exchange sequences for heads (Ulysses).
    sequence: usize,
    tensor: usize,
    expert: usize,
    sharding: Option<Strategy>,
    ring: bool,
    /// Tensor ranks have parts of the sequence between divided layers.
    regions: bool,
    schedule: Schedule,
}

const GPT2: Product = Product {
    architecture: Architecture::Gpt2,
    pipeline: 1,
    replicate: 1,
    shard: 1,
    context: 1,
    sequence: 1,
    tensor: 1,
    expert: 1,
    sharding: None,
    ring: false,
    regions: false,
    schedule: Schedule::OneForwardOneBackward,
};
const LLAMA: Product = Product { architecture: Architecture::Llama, ..GPT2 };
const MIXTRAL: Product = Product { architecture: Architecture::Mixtral, ..GPT2 };
const ZERO1: Option<Strategy> = Some(Strategy::Zero1);
const ZERO2: Option<Strategy> = Some(Strategy::Zero2);
const ZERO3: Option<Strategy> = Some(Strategy::Zero3);
const ZBV: Schedule = Schedule::ZeroBubbleV;

/// Largest difference of a tensor's values, in parts of its largest value. A sum of a few hundred products in another
/// order differs by a few hundred parts in 2^53, 3e-14, at most; losses, gradients and weights all stay below the bound.
const ALLOWED: f64 = 1e-13;

#[rustfmt::skip]
const PRODUCTS: &[Product] = &[
    Product { replicate: 2, ..GPT2 },
    Product { shard: 2, sharding: ZERO1, ..GPT2 },
    Product { shard: 2, sharding: ZERO2, ..LLAMA },
    Product { shard: 2, sharding: ZERO3, ..GPT2 },
    Product { tensor: 2, ..LLAMA },
    Product { tensor: 2, regions: true, ..GPT2 },
    Product { context: 2, ..LLAMA },
    Product { context: 2, ring: true, ..GPT2 },
    Product { sequence: 2, ..GPT2 },
    Product { shard: 2, expert: 2, ..MIXTRAL },
    Product { tensor: 2, expert: 2, ..MIXTRAL },
    Product { pipeline: 2, ..LLAMA },

    Product { tensor: 3, regions: true, ..GPT2 },
    Product { shard: 3, sharding: ZERO3, ..LLAMA },
    Product { context: 3, ring: true, ..GPT2 },
    Product { sequence: 3, ..GPT2 },
    Product { pipeline: 3, ..GPT2 },

    Product { replicate: 2, tensor: 2, ..GPT2 },
    Product { replicate: 2, shard: 2, sharding: Some(Strategy::Hybrid(2)), ..LLAMA },
    Product { shard: 2, tensor: 2, sharding: ZERO3, regions: true, ..GPT2 },
    Product { shard: 2, tensor: 2, sharding: ZERO1, ..LLAMA },
    Product { shard: 2, context: 2, sharding: ZERO3, ..GPT2 },
    Product { shard: 2, sequence: 2, sharding: ZERO2, ..GPT2 },
    Product { context: 2, tensor: 2, regions: true, ..GPT2 },
    Product { sequence: 2, tensor: 2, ..GPT2 },
    Product { pipeline: 2, replicate: 2, schedule: Schedule::ZeroBubble, ..GPT2 },
    Product { pipeline: 2, shard: 2, sharding: ZERO3, schedule: ZBV, ..LLAMA },
    Product { pipeline: 2, context: 2, ..GPT2 },
    Product { pipeline: 2, tensor: 2, schedule: Schedule::Interleaved, ..LLAMA },
    Product { pipeline: 2, tensor: 2, regions: true, ..GPT2 },
    Product { shard: 4, expert: 2, sharding: ZERO3, ..MIXTRAL },
    Product { context: 2, shard: 2, expert: 4, ..MIXTRAL },
    Product { pipeline: 2, shard: 2, expert: 2, ..MIXTRAL },
    Product { replicate: 2, tensor: 2, expert: 2, ..MIXTRAL },
    Product { shard: 2, tensor: 2, expert: 4, ..MIXTRAL },
    Product { shard: 2, tensor: 2, expert: 2, sharding: ZERO3, ..MIXTRAL },
    Product { shard: 2, tensor: 2, expert: 4, sharding: ZERO1, regions: true, ..MIXTRAL },

    Product { replicate: 2, shard: 2, tensor: 2, sharding: Some(Strategy::Hybrid(2)), ..GPT2 },
    Product { shard: 2, context: 2, tensor: 2, sharding: ZERO3, regions: true, ..LLAMA },
    Product { pipeline: 2, shard: 2, tensor: 2, sharding: ZERO3, ..GPT2 },
    Product { pipeline: 2, context: 2, tensor: 2, regions: true, ..GPT2 },
    Product { pipeline: 2, shard: 2, context: 2, sharding: ZERO1, ..LLAMA },
    Product { pipeline: 2, replicate: 2, tensor: 2, schedule: ZBV, ..LLAMA },
    Product { pipeline: 2, shard: 4, expert: 2, sharding: ZERO3, ..MIXTRAL },
    Product { pipeline: 2, tensor: 4, expert: 4, ..MIXTRAL },
    Product { pipeline: 2, shard: 2, tensor: 2, expert: 4, sharding: ZERO3, ..MIXTRAL },
    Product { replicate: 2, shard: 2, tensor: 2, expert: 4, sharding: Some(Strategy::Hybrid(2)), regions: true, ..MIXTRAL },
    Product { context: 2, shard: 2, tensor: 2, expert: 4, ..MIXTRAL },
    // Fewer experts on a rank than ranks with the same: each has rows of every expert, evenly or not.
    Product { shard: 8, expert: 4, sharding: ZERO3, ..MIXTRAL },
    Product { shard: 6, expert: 2, sharding: ZERO3, ..MIXTRAL },
    Product { shard: 8, expert: 2, sharding: ZERO2, ..MIXTRAL },
    Product { replicate: 2, shard: 4, expert: 2, sharding: Some(Strategy::Hybrid(4)), ..MIXTRAL },
];

impl Product {
    fn ranks(self) -> usize {
        let inner = self.shard * self.context * self.sequence * self.tensor;
        self.pipeline * self.replicate * inner
    }

    fn mesh(self) -> Mesh {
        let builder = Mesh::builder().pipeline(self.pipeline).replicate(self.replicate);
        let builder = builder.shard(self.shard).context(self.context).sequence(self.sequence);
        builder.tensor(self.tensor).expert(self.expert).build(self.ranks()).unwrap()
    }

    fn name(self) -> String {
        let Self { architecture, sharding, ring, regions, schedule, .. } = self;
        let mut name = format!("{architecture:?} on {}", self.mesh());
        if let Some(strategy) = sharding {
            name += &format!(", {strategy}");
        }
        for (is_so, word) in [(ring, "ring"), (regions, "sequence regions")] {
            name += &if is_so { format!(", {word}") } else { String::new() };
        }
        if self.pipeline > 1 {
            name += &format!(", {schedule}");
        }
        name
    }

    fn check(self, known: &mut Known) {
        match self.architecture {
            Architecture::Gpt2 => {
                let mut options = gpt2();
                options.n_layer = 4;
                self.check_as(known, |path| Gpt2LmHead::new(path, &options));
            }
            Architecture::Llama => {
                let options = LlamaOptions {
                    vocab_size: 23,
                    hidden_size: 16,
                    intermediate_size: 24,
                    num_hidden_layers: 4,
                    num_attention_heads: 4,
                    num_key_value_heads: Some(2),
                    ..Default::default()
                };
                self.check_as(known, |path| LlamaForCausalLm::new(path, &options));
            }
            Architecture::Mixtral => {
                let options = MixtralOptions {
                    vocab_size: 23,
                    hidden_size: 8,
                    intermediate_size: 12,
                    num_hidden_layers: 2,
                    num_attention_heads: 4,
                    num_key_value_heads: Some(4),
                    num_local_experts: 4,
                    ..Default::default()
                };
                self.check_as(known, |path| MixtralForCausalLm::new(path, &options));
            }
        }
    }

    /// Trains on the mesh, and compares with one process that has the texts of all data ranks.
    fn check_as<M>(self, known: &mut Known, new: impl Fn(&ParamPath<'_>) -> M + Sync)
    where
        M: for<'a> Module<Labelled<'a>, Output = TokenLoss> + TensorParallelPlan,
    {
        let mesh = self.mesh();
        let data = mesh.size(Axis::Data) as i64;
        let (first, expected) = known.entry((self.architecture, data)).or_insert_with(|| {
            tch::manual_seed(7);
            let first = Model::builder().kind(Kind::Double).build(&new).unwrap().state_dict();
            let first = first.deep_clone().unwrap();
            let accelerator = Accelerator::builder().cpu(true).quiet(true).sharding(None);
            let run = train(&accelerator.build().unwrap(), Some(&first), &new, 0..data);
            (first, run)
        });
        let (first, expected) = (Mutex::new(first.deep_clone().unwrap()), &*expected);
        let name = self.name();
        on_ranks(self.ranks(), |builder, rank| {
            let sharding = self.sharding.map(|strategy| Sharding { strategy, ..Sharding::zero3() });
            let builder = builder.sharding(sharding).mesh(mesh.clone());
            let builder = builder.sequence_regions(self.regions);
            let options = PipelineOptions::new(TEXTS as usize).schedule(self.schedule);
            let builder =
                if self.pipeline > 1 { builder.pipeline_options(options) } else { builder };
            let ring = self.ring.then_some(ContextMethod::Ring);
            let builder = match ring {
                Some(ring) => builder.context_method(ring),
                None => builder,
            };
            let accelerator = builder.build().unwrap();
            let first = (rank == 0).then(|| {
                first.lock().unwrap_or_else(PoisonError::into_inner).deep_clone().unwrap()
            });
            let place = accelerator.data_processes().process_index() as i64;
            let found = train(&accelerator, first.as_ref(), &new, place..place + 1);
            found.assert_near(expected, &name);
        });
    }
}

/// First values, and the run of one process, by architecture and number of data ranks.
type Known = HashMap<(Architecture, i64), (StateDict, Run)>;

type Values = Vec<(String, Vec<f64>)>;

/// What a run leaves. Gradients and weights are whole, on the first rank alone.
#[derive(Debug)]
struct Run {
    losses: Vec<f64>,
    gradients: Vec<Values>,
    weights: Values,
    /// The exponential moving average of the weights.
    averages: Values,
}

impl Run {
    fn assert_near(&self, expected: &Self, about: &str) {
        let losses = |run: &Self| vec![("losses".to_owned(), run.losses.clone())];
        near(&losses(self), &losses(expected), about);
        if self.weights.is_empty() {
            return;
        }
        near(&self.weights, &expected.weights, &format!("{about}, weights"));
        near(&self.averages, &expected.averages, &format!("{about}, averages"));
        assert_eq!(self.gradients.len(), STEPS);
        for (step, (found, expected)) in self.gradients.iter().zip(&expected.gradients).enumerate()
        {
            near(found, expected, &format!("{about}, gradients of step {step}"));
        }
    }
}

fn near(found: &Values, expected: &Values, about: &str) {
    assert_eq!(found.len(), expected.len(), "{about}");
    for ((name, found), (expected_name, expected)) in found.iter().zip(expected) {
        assert_eq!((name, found.len()), (expected_name, expected.len()), "{about}");
        let largest = |values: &mut dyn Iterator<Item = f64>| values.fold(0.0, f64::max);
        let off = largest(&mut found.iter().zip(expected).map(|(one, other)| (one - other).abs()));
        let scale = largest(&mut expected.iter().map(|value| value.abs()));
        assert!(found.iter().all(|value| value.is_finite()), "{about}: {name}");
        assert!(off <= ALLOWED * scale, "{about}: {name} is off by {off} of {scale}");
    }
}

/// Texts of data ranks in a step.
fn texts(step: usize, ranks: &std::ops::Range<i64>) -> Tensor {
    let all = 8;
    let first = (step as i64 * all + ranks.start) * TEXTS * TOKENS;
    let end = (step as i64 * all + ranks.end) * TEXTS * TOKENS;
    let places = Tensor::arange_start(first, end, (Kind::Int64, Device::Cpu));
    (&places * 7 + places.floor_divide_scalar(TOKENS) * 3).remainder(23).view([-1, TOKENS])
}

/// Labels of which some count: another number in each text.
fn labels(ids: &Tensor) -> Tensor {
    let counts = ids.ge_tensor(&ids.narrow(1, 0, 1));
    ids.where_self(&counts, &Tensor::from(IGNORED_LABEL))
}

/// Trains on the texts of data ranks. The mean loss is over all labels that count, of all ranks and micro-batches.
fn train<M>(
    accelerator: &Accelerator,
    first: Option<&StateDict>,
    new: &impl Fn(&ParamPath<'_>) -> M,
    ranks: std::ops::Range<i64>,
) -> Run
where
    M: for<'a> Module<Labelled<'a>, Output = TokenLoss> + TensorParallelPlan,
{
    tch::set_num_threads(1);
    let builder = accelerator.parallel().model_builder(M::tensor_plan()).kind(Kind::Double);
    let model = builder.without_first_values().build(new).unwrap();
    // Adam divides by the roots of squares: without epsilon, differences of small gradients would grow.
    let optimizer = AdamW::default().lr(0.01).eps(1e-3).build(&model).unwrap();
    let (mut model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    model.load_full_state_dict(first).unwrap();
    let average = WeightAverage::new(&model).unwrap();
    let mut run = Run {
        losses: Vec::new(),
        gradients: Vec::new(),
        weights: Vec::new(),
        averages: Vec::new(),
    };
    for step in 0..STEPS {
        let batch = texts(step, &ranks);
        let loss = accelerator.forward_backward(&model, &batch, |model, micro| {
            let loss = model.forward(Labelled::new(micro, &labels(micro)))?;
            Ok((loss.sum, loss.count))
        });
        let loss = loss.unwrap();
        // Ranks with the same samples return the same loss, those with other tokens their part.
        let parts = Tensor::from_slice(&[loss.value() * loss.weight(), loss.weight()]);
        let sums = accelerator.processes().reduce(&parts, ReduceOp::Sum).unwrap();
        run.losses.push(sums.double_value(&[0]) / sums.double_value(&[1]));
        run.gradients.push(whole_gradients(&model));
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
        average.update(0.75).unwrap();
    }
    run.weights = whole_weights(&model);
    average.swap().unwrap();
    run.averages = whole_weights(&model);
    assert!(run.averages.is_empty() || run.averages != run.weights);
    run
}

fn whole_weights<M>(model: &PreparedModel<M>) -> Values {
    let values = |tensor: &Tensor| Vec::try_from(tensor.detach().reshape([-1])).unwrap();
    let state = model.full_state_dict().unwrap().unwrap_or_default();
    state.iter().map(|(name, tensor)| (name.to_owned(), values(tensor))).collect()
}

/// Gathers the gradients as weights are gathered: they take the place of this rank's weights for so long.
fn whole_gradients<M>(model: &PreparedModel<M>) -> Values {
    let own = model.local_parameters();
    let put = |values: &[Tensor]| {
        tch::no_grad(|| {
            for (own, values) in own.iter().zip(values) {
                own.tensor.detach().copy_(values);
            }
        });
        if let Some(sharder) = model.sharder() {
            sharder.shards_changed().unwrap();
        }
    };
    let weights: Vec<Tensor> = own.iter().map(|it| it.tensor.detach().copy()).collect();
    let found = own.iter().map(|it| match gradient(&it.tensor).unwrap() {
        Some(found) => found,
        None => it.tensor.detach().zeros_like(),
    });
    put(&found.collect::<Vec<_>>());
    let gradients = whole_weights(model);
    put(&weights);
    gradients
}

/// Checks the products of these numbers of ranks.
fn check(ranks: &[usize]) {
    let mut known = Known::new();
    let chosen = PRODUCTS.iter().filter(|product| ranks.contains(&product.ranks()));
    for product in chosen {
        product.check(&mut known);
    }
}

#[test]
fn products_of_two_and_three_ranks_are_one_process() {
    let names: BTreeSet<String> = PRODUCTS.iter().map(|product| product.name()).collect();
    assert_eq!(names.len(), PRODUCTS.len());
    let ranks: BTreeSet<usize> = PRODUCTS.iter().map(|product| product.ranks()).collect();
    assert_eq!(ranks, [2, 3, 4, 6, 8].into());
    check(&[2, 3]);
}

#[test]
fn products_of_four_ranks_are_one_process() {
    check(&[4]);
}

#[test]
fn products_of_six_and_eight_ranks_are_one_process() {
    check(&[6, 8]);
}
