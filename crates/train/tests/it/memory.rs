//! What ranks have in memory when they divide layers or have stages, on GPUs made of host memory, against the formulas
//! of plans and estimates.

use brigade_models::{Gpt2, Gpt2Options};
use brigade_nn::TensorParallelPlan;
use brigade_optim::AdamW;
use brigade_rank_env::{StoreEndpoint, World, WorldSize};
use brigade_sharding::pipeline::{PipelineTable, Schedule};
use brigade_sharding::{Memory, Mesh, MixedPrecision, TransformerStep, Workload};
use brigade_test_device::fake;
use brigade_torch::{Backend, Store};
use brigade_train::{Accelerator, PipelineOptions};
use tch::{Device, Kind, Tensor};

/// Enough that the ends of a stage, a normalisation and two messages in flight, are few beside its layers.
const LAYERS: usize = 12;
const HIDDEN: i64 = 128;
const VOCABULARY: i64 = 96;
/// Texts of a micro-batch, and their tokens.
const TEXTS: usize = 2;
const TOKENS: i64 = 64;

fn options() -> Gpt2Options {
    Gpt2Options {
        vocab_size: VOCABULARY,
        n_positions: TOKENS,
        n_embd: HIDDEN,
        n_layer: LAYERS,
        n_head: 4,
        ..Default::default()
    }
}

/// What a rank has in memory, in bytes, and what its plan says.
struct Measured {
    weights: u64,
    gradients: u64,
    states: u64,
    /// Most that forward passes keep for their backward passes at a time.
    held: u64,
    planned: Memory,
}

fn measure(accelerator: &Accelerator, gpu: usize, micro_batches: usize) -> Measured {
    let allocated = || fake::memory(gpu).unwrap().allocated;
    let before = allocated();
    let builder = accelerator.parallel().model_builder(Gpt2::tensor_plan()).deferred();
    let model = builder.build(|path| Gpt2::new(path, &options())).unwrap();
    let parameters = model.sharding_parameters().unwrap();
    let workload = Workload { states: 2, ..Workload::default() };
    let planned = Memory::replicated(&parameters, MixedPrecision::default(), workload);
    let optimizer = AdamW::default().build(&model).unwrap();
    let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    let weights = allocated() - before;

    let rows = (TEXTS * micro_batches) as i64;
    let ids = Tensor::arange(rows * TOKENS, (Kind::Int64, Device::Cpu)).remainder(VOCABULARY);
    let ids = ids.view([rows, TOKENS]).to_device(accelerator.device());
    let step = || {
        let (start, mut held) = (allocated(), 0);
        let loss = accelerator.forward_backward(&model, &ids, |model, micro| {
            let hidden = model.forward(micro);
            held = held.max(allocated().saturating_sub(start));
            Ok(hidden?.square().mean(Kind::Float))
        });
        assert!(loss.unwrap().value() > 0.0);
        (held, allocated() - start)
    };
    let (_, gradients) = step();
    // With gradients in place, so that only what forward passes keep is added.
    let (held, _) = step();
    let before = allocated();
    optimizer.step().unwrap();
    Measured { weights, gradients, states: allocated() - before, held, planned }
}

/// Runs each rank of a mesh on a GPU of its own.
fn on_gpus(mesh: &Mesh, regions: bool, pipeline: Option<&PipelineOptions>) -> Vec<Measured> {
    let (ranks, store) = (mesh.world_size(), Store::hash().unwrap());
    let run = |rank: usize, store: Store| {
        fake::set_current_device(rank).unwrap();
        let size = WorldSize::new(ranks).unwrap();
        let world = World::on_one_host(rank, size, StoreEndpoint::alone()).unwrap();
        let builder = Accelerator::builder().world(world).store(store).quiet(true);
        let builder = builder.device(Device::Cuda(rank)).backend(Backend::Gloo(Default::default()));
        let builder = builder.sharding(None).mesh(mesh.clone()).sequence_regions(regions);
        let builder = match pipeline {
            Some(options) => builder.pipeline_options(options.clone()),
            None => builder,
        };
        let micro_batches = pipeline.map_or(1, |options| options.micro_batches);
        measure(&builder.build().unwrap(), rank, micro_batches)
    };
    let mut found = Vec::new();
    // Attention keeps no scores within an account, as on a real GPU.
    fake::account(|| {
        std::thread::scope(|scope| {
            let run = &run;
            let started: Vec<_> = (0..ranks)
                .map(|rank| {
                    let store = store.clone();
                    scope.spawn(move || run(rank, store))
                })
                .collect();
            found.extend(started.into_iter().map(|rank| rank.join().unwrap()));
        });
    });
    found
}

#[track_caller]
fn assert_within(found: u64, expected: u64, about: &str) {
    let off = found as f64 / expected as f64 - 1.0;
    assert!(off.abs() <= 0.05, "{about}: {found} bytes, and {expected} by the formula: {off:+.3}");
}

/// Checks what ranks have of weights, gradients and states against their plans, and returns the weights.
fn check_plans(ranks: &[Measured], about: &str) -> Vec<u64> {
    for (rank, it) in ranks.iter().enumerate() {
        let about = |what: &str| format!("{what} of rank {rank}, {about}");
        assert_within(it.weights, it.planned.parameters, &about("weights"));
        assert_within(it.gradients, it.planned.gradients, &about("gradients"));
        assert_within(it.states, it.planned.optimizer, &about("states"));
    }
    ranks.iter().map(|it| it.weights).collect()
}

fn transformer(regions: bool) -> TransformerStep {
    TransformerStep {
        layers: LAYERS as u64,
        hidden: HIDDEN as u64,
        key_width: HIDDEN as u64,
        heads: 4,
        samples: TEXTS as u64,
        tokens: TOKENS as u64,
        sequence_regions: regions,
        ..TransformerStep::default()
    }
}

#[test]
fn ranks_have_in_memory_what_the_formulas_say() {
    fake::install(2).unwrap();
    let alone = Mesh::builder().build(1).unwrap();
    let whole = on_gpus(&alone, false, None);
    let whole_weights = check_plans(&whole, "one rank")[0];
    assert_within(whole[0].held, transformer(false).activations(&alone, 0), "one rank");

    let tensor = Mesh::builder().tensor(2).build(2).unwrap();
    for regions in [false, true] {
        let about = format!("tensor ranks, sequence regions {regions}");
        let ranks = on_gpus(&tensor, regions, None);
        for weights in check_plans(&ranks, &about) {
            assert_within(weights, whole_weights / 2, &about);
        }
        for rank in &ranks {
            assert_within(rank.held, transformer(regions).activations(&tensor, 0), &about);
        }
    }

    let stages = Mesh::builder().pipeline(2).build(2).unwrap();
    for (micro_batches, schedule) in [
        (4, Schedule::OneForwardOneBackward),
        (8, Schedule::OneForwardOneBackward),
        (4, Schedule::GPipe),
    ] {
        let about = format!("{schedule} of {micro_batches} micro-batches");
        let options = PipelineOptions::new(micro_batches).schedule(schedule);
        let ranks = on_gpus(&stages, false, Some(&options));
        assert_within(check_plans(&ranks, &about).iter().sum(), whole_weights, &about);
        let table = PipelineTable::new(schedule, 2, micro_batches, 1).unwrap();
        for (rank, found) in ranks.iter().enumerate() {
            let one = transformer(false).activations(&stages, rank);
            let about = format!("held by rank {rank}, {about}");
            assert_within(found.held, table.held(rank) as u64 * one, &about);
        }
    }
}
