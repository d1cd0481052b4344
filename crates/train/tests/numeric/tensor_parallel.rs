//! Models whose layers ranks divide train as whole ones do, with replicas, with shards, and with both.

mod checkpoints;
mod context;
mod experts;
mod limits;

use std::sync::Mutex;

use brigade_data::{DataLoader, TensorDataset};
use brigade_models::{
    Gpt2LmHead, Gpt2Options, Labelled, LlamaForCausalLm, LlamaOptions, TokenLoss,
};
use brigade_nn::{Model, Module, ParamPath, StateDict, TensorParallelPlan};
use brigade_optim::{AdamW, Optimizer, Sgd};
use brigade_sharding::{Axis, ContextMethod, Mesh, Sharding};
use brigade_testkit::assert_close;
use brigade_torch::Trainable;
use brigade_train::{Accelerator, ClipNorm, PreparedLoader, PreparedModel, PreparedOptimizer};
use tch::{Device, Kind, Tensor};

use crate::sharding::on_ranks;

const STEPS: usize = 5;

pub(crate) fn gpt2() -> Gpt2Options {
    Gpt2Options {
        vocab_size: 23,
        n_positions: 8,
        n_embd: 12,
        n_layer: 2,
        n_head: 12,
        n_inner: Some(24),
        resid_pdrop: 0.0,
        embd_pdrop: 0.0,
        attn_pdrop: 0.0,
        ..Default::default()
    }
}

pub(crate) fn llama() -> LlamaOptions {
    LlamaOptions {
        vocab_size: 23,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        ..Default::default()
    }
}

/// So many batches of two texts.
pub(crate) fn loader(batches: usize) -> DataLoader<TensorDataset<Tensor>> {
    let places = Tensor::arange(batches as i64 * 12, (Kind::Int64, Device::Cpu));
    let ids = (&places * 7 + places.floor_divide_scalar(12) * 3).remainder(23).view([-1, 6]);
    DataLoader::new(TensorDataset::new(ids).unwrap()).batch_size(2)
}

#[derive(Debug, Clone, Copy)]
struct Recipe {
    momentum: bool,
    micro_batches: usize,
    norm_type: f64,
    method: Option<ContextMethod>,
    /// Each rank of a tensor group has a part of the sequence between divided layers.
    regions: bool,
}

impl Recipe {
    fn optimizer(self, model: &impl Trainable) -> Optimizer {
        if self.momentum {
            Sgd::new(0.05).momentum(0.9).build(model).unwrap()
        } else {
            AdamW::default().lr(0.01).eps(1e-3).build(model).unwrap()
        }
    }

    fn clip(self) -> ClipNorm {
        ClipNorm { max_norm: 0.5, norm_type: self.norm_type, ..ClipNorm::default() }
    }
}

/// What a run leaves: losses, norms before clipping, and whole weights.
struct Run {
    numbers: Vec<f64>,
    weights: Vec<(String, Vec<f64>)>,
}

fn numbers(state: &StateDict) -> Vec<(String, Vec<f64>)> {
    let values = |tensor: &Tensor| {
        Vec::try_from(tensor.detach().to_kind(Kind::Double).reshape([-1])).unwrap()
    };
    state.iter().map(|(name, tensor)| (name.to_owned(), values(tensor))).collect()
}

/// Returns the norm before clipping and the mean loss of each step.
fn train_on<M>(
    accelerator: &Accelerator,
    model: &PreparedModel<M>,
    mut optimizer: PreparedOptimizer,
    train: &PreparedLoader<DataLoader<TensorDataset<Tensor>>>,
    recipe: Recipe,
) -> Vec<f64>
where
    M: for<'a> Module<Labelled<'a>, Output = TokenLoss>,
{
    let (mut found, mut losses) = (Vec::new(), Vec::new());
    for batch in train {
        let batch = batch.unwrap();
        accelerator
            .accumulate(model, &batch, || {
                let ids = batch.data();
                let loss = model.forward(Labelled::new(&ids, &ids))?.mean()?;
                accelerator.backward(&loss)?;
                let all =
                    accelerator.gather_for_metrics(&batch, &loss.detach().expand([2], true))?;
                losses.extend(Vec::<f64>::try_from(all).unwrap());
                if let Some(norm) = accelerator.clip_grad_norm(model, recipe.clip())? {
                    found.push(norm.double_value(&[]));
                    found.push(losses.iter().sum::<f64>() / losses.len() as f64);
                    losses.clear();
                }
                optimizer.step()?;
                optimizer.zero_grad()
            })
            .unwrap();
    }
    assert_eq!(found.len(), 2 * STEPS);
    found
}

/// One process with the samples of all data ranks.
fn alone<M>(
    state: &StateDict,
    new: &impl Fn(&ParamPath<'_>) -> M,
    data: usize,
    recipe: Recipe,
) -> Run
where
    M: for<'a> Module<Labelled<'a>, Output = TokenLoss>,
{
    let accelerator = Accelerator::builder()
        .cpu(true)
        .quiet(true)
        .sharding(None)
        .gradient_accumulation_steps(recipe.micro_batches * data)
        .build()
        .unwrap();
    let mut model = Model::builder().kind(Kind::Double).build(new).unwrap();
    model.load_state_dict(state).unwrap();
    let optimizer = recipe.optimizer(&model);
    let train = loader(STEPS * recipe.micro_batches * data);
    let (model, optimizer, train) = accelerator.prepare((model, optimizer, train)).unwrap();
    let found = train_on(&accelerator, &model, optimizer, &train, recipe);
    Run { numbers: found, weights: numbers(&model.inner().state_dict()) }
}

fn divided<M>(
    state: &Mutex<StateDict>,
    new: &(impl Fn(&ParamPath<'_>) -> M + Sync),
    (mesh, sharding): (&Mesh, Option<&Sharding>),
    deferred: bool,
    recipe: Recipe,
) -> Vec<Run>
where
    M: for<'a> Module<Labelled<'a>, Output = TokenLoss> + TensorParallelPlan,
{
    on_ranks(mesh.world_size(), |builder, rank| {
        let builder = builder
            .sharding(sharding.cloned())
            .mesh(mesh.clone())
            .sequence_regions(recipe.regions)
            .gradient_accumulation_steps(recipe.micro_batches);
        let builder = match recipe.method {
            Some(method) => builder.context_method(method),
            None => builder,
        };
        let accelerator = builder.build().unwrap();
        for axis in [Axis::Tensor, Axis::Context, Axis::Sequence, Axis::Expert] {
            assert_eq!(accelerator.parallel().mesh().unwrap().size(axis), mesh.size(axis));
        }
        let options = accelerator.parallel().model_builder(M::tensor_plan()).kind(Kind::Double);
        let options = if deferred { options.deferred() } else { options };
        let model = options.build(new).unwrap();
        let optimizer = recipe.optimizer(&model);
        let train = loader(STEPS * recipe.micro_batches * mesh.size(Axis::Data));
        let (mut model, optimizer, train) = accelerator.prepare((model, optimizer, train)).unwrap();
        let whole = (rank == 0).then(|| state.lock().unwrap().deep_clone().unwrap());
        model.load_full_state_dict(whole.as_ref()).unwrap();
        let found = train_on(&accelerator, &model, optimizer, &train, recipe);
        let state = model.full_state_dict().unwrap();
        assert_eq!(state.is_some(), rank == 0);
        let weights = state.map(|state| numbers(&state)).unwrap_or_default();
        Run { numbers: found, weights }
    })
}

fn check<M>(
    new: impl Fn(&ParamPath<'_>) -> M + Sync,
    mesh: &Mesh,
    sharding: Option<&Sharding>,
    recipe: Recipe,
) where
    M: for<'a> Module<Labelled<'a>, Output = TokenLoss> + TensorParallelPlan,
{
    let state = Model::builder().kind(Kind::Double).build(&new).unwrap().state_dict();
    let expected = alone(&state, &new, mesh.size(Axis::Data), recipe);
    let state = Mutex::new(state);
    for deferred in [false, true] {
        let runs = divided(&state, &new, (mesh, sharding), deferred, recipe);
        for (rank, run) in runs.iter().enumerate() {
            assert_close(&run.numbers, &expected.numbers, 1e-12, 1e-13);
            if rank == 0 {
                for ((name, found), (expected_name, expected)) in
                    run.weights.iter().zip(&expected.weights)
                {
                    assert_eq!(name, expected_name);
                    assert_close(found, expected, 1e-11, 1e-13);
                }
            }
            // The same bits on every rank.
            assert_eq!(run.numbers, runs[0].numbers);
        }
    }
}

const ADAM: Recipe =
    Recipe { momentum: false, micro_batches: 1, norm_type: 2.0, method: None, regions: false };

fn mesh(replicate: usize, shard: usize, tensor: usize) -> Mesh {
    let builder = Mesh::builder().replicate(replicate).shard(shard).tensor(tensor);
    builder.build(replicate * shard * tensor).unwrap()
}

#[test]
fn tensor_ranks_alone() {
    for tensor in [2, 3, 4] {
        check(|path| Gpt2LmHead::new(path, &gpt2()), &mesh(1, 1, tensor), None, ADAM);
    }
    check(|path| LlamaForCausalLm::new(path, &llama()), &mesh(1, 1, 4), None, ADAM);
}

/// The ranks that read other samples count as those of one host.
#[test]
fn ranks_of_other_samples_have_an_order() {
    let found = on_ranks(4, |builder, rank| {
        let accelerator = builder.tensor_parallel(2).build().unwrap();
        let data = accelerator.data_processes();
        let own = data.on_local_main_process(|| Ok::<_, brigade_torch::Error>(rank)).unwrap();
        let first = data.local_main_process_first(|| Ok::<_, brigade_torch::Error>(rank)).unwrap();
        assert_eq!(first, rank);
        let share = data.split_between_processes(&[10, 11, 12][..]).unwrap();
        (data.process_index(), own, data.gather_object(rank).unwrap(), share)
    });
    assert_eq!(found[0], (0, Some(0), vec![0, 2], vec![10, 11]));
    assert_eq!(found[1], (0, Some(1), vec![1, 3], vec![10, 11]));
    assert_eq!(found[2], (1, None, vec![0, 2], vec![12]));
    assert_eq!(found[3], (1, None, vec![1, 3], vec![12]));
}

#[test]
fn with_replicas() {
    for norm_type in [1.0, 2.0, f64::INFINITY, 0.0] {
        let recipe =
            Recipe { momentum: true, micro_batches: 2, norm_type, method: None, regions: false };
        check(|path| Gpt2LmHead::new(path, &gpt2()), &mesh(2, 1, 2), None, recipe);
    }
}

#[test]
fn with_shards() {
    for sharding in [Sharding::zero1(), Sharding::zero2(), Sharding::zero3()] {
        for norm_type in [2.0, 0.0] {
            let recipe = Recipe {
                momentum: false,
                micro_batches: 2,
                norm_type,
                method: None,
                regions: false,
            };
            let new = |path: &ParamPath<'_>| LlamaForCausalLm::new(path, &llama());
            check(new, &mesh(1, 2, 2), Some(&sharding), recipe);
        }
    }
    check(|path| Gpt2LmHead::new(path, &gpt2()), &mesh(1, 3, 2), Some(&Sharding::zero3()), ADAM);
}

#[test]
fn with_replicas_of_shards() {
    check(|path| Gpt2LmHead::new(path, &gpt2()), &mesh(2, 2, 2), Some(&Sharding::zero3()), ADAM);
}
