//! The Accelerator's loop where ranks have stages of models.

use std::sync::{Mutex, PoisonError};

use brigade_data::{DataLoader, TensorDataset};
use brigade_models::{Gpt2LmHead, Labelled};
use brigade_nn::{LayerNorm, Linear, Model, ParamPath, StateDict, weights};
use brigade_optim::AdamW;
use brigade_sharding::pipeline::Schedule;
use brigade_sharding::{Axis, Mesh, Offload, Reshard, Sharding, TensorPlan};
use brigade_testkit::assert_close;
use brigade_torch::ErrorKind;
use brigade_train::{
    Accelerator, AcceleratorBuilder, ClipNorm, GradScalerOptions, PipelineOptions, Precision,
    TrainError,
};
use tch::{Device, Kind, Tensor};

use super::{DRAWS, gpt2, values};
use crate::sharding::on_ranks;

const STEPS: usize = 5;

/// Texts of six tokens.
fn text(first: i64, count: i64) -> Tensor {
    let places = Tensor::arange_start(first * 6, (first + count) * 6, (Kind::Int64, Device::Cpu));
    (&places * 7 + places.floor_divide_scalar(6) * 3).remainder(19).view([-1, 6])
}

/// Batches of four texts.
fn loader(batches: usize) -> DataLoader<TensorDataset<Tensor>> {
    let ids = text(0, 4 * batches as i64);
    DataLoader::new(TensorDataset::new(ids).unwrap()).batch_size(4)
}

/// What a run leaves: losses, norms before clipping, and the weights that this rank has.
#[derive(Debug, Default)]
struct Run {
    numbers: Vec<f64>,
    logits: Vec<f64>,
    weights: Vec<(String, Vec<f64>)>,
}

#[derive(Debug, Clone, Copy)]
struct Recipe {
    /// Ranks with other samples.
    data: usize,
    /// Batches of a window.
    window: usize,
    /// Losses are sums with weights.
    is_sum: bool,
    norm_type: f64,
}

/// Labels of which some count: another number in each text.
fn labels(ids: &Tensor) -> Tensor {
    let counts = ids.ge_tensor(&ids.narrow(1, 0, 1));
    ids.where_self(&counts, &Tensor::from(brigade_models::IGNORED_LABEL))
}

/// Trains, on one process with the samples of all data ranks.
fn train(
    accelerator: &Accelerator,
    state: Option<&StateDict>,
    recipe: Recipe,
    batches: usize,
) -> Run {
    let mut model = {
        let _one_by_one = DRAWS.lock().unwrap_or_else(PoisonError::into_inner);
        tch::manual_seed(7);
        let builder = accelerator
            .parallel()
            .model_builder(<Gpt2LmHead as brigade_nn::TensorParallelPlan>::tensor_plan());
        builder.kind(Kind::Double).build(|path| Gpt2LmHead::new(path, &gpt2(4))).unwrap()
    };
    if let Some(state) = state {
        model.load_state_dict(state).unwrap();
    }
    let optimizer = AdamW::default().lr(0.01).eps(1e-3).build(&model).unwrap();
    let (mut model, mut optimizer, train) =
        accelerator.prepare((model, optimizer, loader(batches))).unwrap();
    let clip = ClipNorm { max_norm: 0.5, norm_type: recipe.norm_type, ..ClipNorm::default() };
    let (mut run, mut losses) = (Run::default(), Vec::new());
    for batch in &train {
        let batch = batch.unwrap();
        let ids = batch.data().shallow_clone();
        let outcome = accelerator.accumulate(&model, &batch, || {
            let loss = if recipe.is_sum {
                accelerator.forward_backward(&model, &ids, |model, micro| {
                    let loss = model.forward(Labelled::new(micro, &labels(micro)))?;
                    Ok((loss.sum, loss.count))
                })?
            } else {
                accelerator.forward_backward(&model, &ids, |model, micro| {
                    model.forward(Labelled::new(micro, micro))?.mean()
                })?
            };
            let (weighted, weight) = (loss.value() * loss.weight(), loss.weight());
            let sums = Tensor::from_slice(&[weighted, weight]);
            // Ranks with the same samples return the same loss, those with other tokens their part.
            let sums = accelerator.processes().reduce(&sums, brigade_torch::ReduceOp::Sum)?;
            losses.push((sums.double_value(&[0]), sums.double_value(&[1])));
            if let Some(norm) = accelerator.clip_grad_norm(&model, clip)? {
                run.numbers.push(norm.double_value(&[]));
                let (sum, weight) =
                    losses.drain(..).fold((0.0, 0.0), |(a, b), (c, d)| (a + c, b + d));
                run.numbers.push(sum / weight);
            }
            optimizer.step()?;
            optimizer.zero_grad()
        });
        outcome.unwrap();
    }
    assert_eq!(run.numbers.len(), 2 * STEPS);
    model.eval();
    let ids = text(0, 4);
    if accelerator.parallel().mesh().unwrap().size(Axis::Context) == 1 {
        let logits = accelerator
            .parallel()
            .forward_stages(&model, &ids, |model, micro| model.forward(micro));
        run.logits = values(&Tensor::cat(&logits.unwrap(), 0));
    }
    let state = model.gathered(|model| model.whole_state_dict()?.deep_clone()).unwrap();
    run.weights = state.into_iter().map(|(name, tensor)| (name, values(&tensor))).collect();
    run
}

fn alone(recipe: Recipe) -> (StateDict, Run) {
    let accelerator = Accelerator::builder()
        .cpu(true)
        .quiet(true)
        .sharding(None)
        .gradient_accumulation_steps(recipe.data * recipe.window)
        .build()
        .unwrap();
    let state = {
        let _one_by_one = DRAWS.lock().unwrap_or_else(PoisonError::into_inner);
        tch::manual_seed(7);
        let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2(4));
        Model::builder().kind(Kind::Double).build(new).unwrap().state_dict().deep_clone().unwrap()
    };
    let run = train(&accelerator, Some(&state), recipe, STEPS * recipe.data * recipe.window);
    (state, run)
}

fn options(micro_batches: usize, schedule: Schedule) -> PipelineOptions {
    PipelineOptions::new(micro_batches).schedule(schedule)
}

/// A run on the ranks of a mesh, against one process.
fn check(mesh: &Mesh, options: &PipelineOptions, recipe: Recipe) {
    check_sharded(mesh, None, options, recipe);
}

/// The same with sharding.
fn check_sharded(
    mesh: &Mesh,
    sharding: Option<&Sharding>,
    options: &PipelineOptions,
    recipe: Recipe,
) {
    let ranks = mesh.world_size();
    let (state, expected) = alone(recipe);
    let state = Mutex::new(state);
    on_ranks(ranks, |builder, _| {
        tch::set_num_threads(1);
        let accelerator = builder
            .sharding(sharding.cloned())
            .mesh(mesh.clone())
            .pipeline_options(options.clone())
            .gradient_accumulation_steps(recipe.window)
            .build()
            .unwrap();
        assert_eq!(accelerator.parallel().mesh().unwrap(), *mesh);
        let own = state.lock().unwrap().deep_clone().unwrap();
        let batches = STEPS * recipe.data * recipe.window;
        let found = train(&accelerator, Some(&own), recipe, batches);
        let allowed = if sharding.is_some() { 1e-11 } else { 1e-12 };
        assert_close(&found.numbers, &expected.numbers, allowed, 1e-13);
        if mesh.size(Axis::Context) == 1 {
            assert_close(&found.logits, &expected.logits, 1e-12, 1e-13);
        }
        for (name, weights) in &found.weights {
            let (_, expected) = expected.weights.iter().find(|(known, _)| known == name).unwrap();
            assert_close(weights, expected, 1e-12, 1e-13);
        }
    });
}

const MEANS: Recipe = Recipe { data: 1, window: 1, is_sum: false, norm_type: 2.0 };

#[test]
fn pipelines_of_the_accelerator() {
    let mesh = Mesh::builder().pipeline(2).build(2).unwrap();
    for schedule in [Schedule::OneForwardOneBackward, Schedule::Interleaved, Schedule::ZeroBubbleV]
    {
        check(&mesh, &options(4, schedule), MEANS);
    }
    let windows = Recipe { window: 2, norm_type: f64::INFINITY, ..MEANS };
    check(&mesh, &options(4, Schedule::GPipe), windows);
    check(&mesh, &options(3, Schedule::OneForwardOneBackward), Recipe { norm_type: 0.0, ..MEANS });
    let sums = Recipe { is_sum: true, norm_type: 1.0, ..MEANS };
    check(&mesh, &options(4, Schedule::ZeroBubble), sums);
    check(&mesh, &options(4, Schedule::GPipe), Recipe { window: 3, ..sums });
}

#[test]
fn pipelines_with_replicas() {
    let mesh = Mesh::builder().pipeline(2).replicate(2).build(4).unwrap();
    let means = Recipe { data: 2, ..MEANS };
    check(&mesh, &options(4, Schedule::OneForwardOneBackward), means);
    check(&mesh, &options(2, Schedule::ZeroBubble), Recipe { window: 2, ..means });
    check(&mesh, &options(4, Schedule::OneForwardOneBackward), Recipe { is_sum: true, ..means });
    let windows = Recipe { is_sum: true, window: 2, ..means };
    check(&mesh, &options(2, Schedule::OneForwardOneBackward), windows);
}

#[test]
fn pipelines_of_divided_layers() {
    let mesh = Mesh::builder().pipeline(2).tensor(2).build(4).unwrap();
    check(&mesh, &options(4, Schedule::OneForwardOneBackward), MEANS);
    check(&mesh, &options(4, Schedule::ZeroBubbleV), MEANS);
}

#[test]
fn sharded_pipelines() {
    let mesh = |replicas| {
        let mesh = Mesh::builder().pipeline(2).replicate(replicas).shard(2);
        mesh.build(4 * replicas).unwrap()
    };
    let one = options(4, Schedule::OneForwardOneBackward);
    let means = Recipe { data: 2, ..MEANS };
    let sums = Recipe { is_sum: true, ..means };
    check_sharded(&mesh(1), Some(&Sharding::zero1()), &one, means);
    check_sharded(&mesh(1), Some(&Sharding::zero1()), &one, Recipe { window: 2, ..means });
    check_sharded(&mesh(1), Some(&Sharding::zero2()), &one, sums);
    check_sharded(&mesh(1), Some(&Sharding::zero3()), &one, Recipe { window: 2, ..sums });
    check_sharded(&mesh(1), Some(&Sharding::zero1()), &one, Recipe { window: 3, ..sums });
    check_sharded(&mesh(1), Some(&Sharding::zero3()), &one, means);
    check_sharded(&mesh(1), Some(&Sharding::zero3()), &options(4, Schedule::ZeroBubbleV), sums);
    check_sharded(&mesh(1), Some(&Sharding::zero3()), &options(4, Schedule::Interleaved), means);
    let without = Sharding::zero3().reshard_after_forward(Reshard::No);
    check_sharded(&mesh(1), Some(&without), &one, Recipe { norm_type: f64::INFINITY, ..means });
    let offloaded = Sharding::zero3().offload(Offload::Cpu { pin: false });
    check_sharded(&mesh(1), Some(&offloaded), &one, means);
    let four = Recipe { data: 4, ..MEANS };
    check_sharded(&mesh(2), Some(&Sharding::hybrid(2)), &one, Recipe { window: 2, ..four });
}

/// Shards of four ranks that stay gathered over two of them after a forward.
#[test]
fn sharded_pipelines_that_reshard_to_fewer_ranks() {
    let to = Sharding::zero3().reshard_after_forward(Reshard::To(2));
    let mesh = Mesh::builder().pipeline(2).shard(4).build(8).unwrap();
    let sums = Recipe { data: 4, is_sum: true, ..MEANS };
    let one = options(4, Schedule::OneForwardOneBackward);
    check_sharded(&mesh, Some(&to), &one, Recipe { window: 2, ..sums });
    check_sharded(&mesh, Some(&to), &options(4, Schedule::ZeroBubbleV), sums);
    let of_context = Mesh::builder().pipeline(2).shard(2).context(2).build(8).unwrap();
    check_sharded(&of_context, Some(&to), &one, Recipe { data: 2, ..sums });
}

/// Sums over tokens, of which each context rank has its part.
#[test]
fn pipelines_of_divided_sequences() {
    let one = options(4, Schedule::OneForwardOneBackward);
    let sums = Recipe { is_sum: true, ..MEANS };
    let mesh = Mesh::builder().pipeline(2).context(2).build(4).unwrap();
    check(&mesh, &one, sums);
    check(&mesh, &options(4, Schedule::ZeroBubble), sums);
    check_sharded(&mesh, Some(&Sharding::zero3()), &one, sums);
    let mesh = Mesh::builder().pipeline(2).context(2).tensor(2).build(8).unwrap();
    check(&mesh, &one, sums);
    let mesh = Mesh::builder().pipeline(2).shard(2).context(2).build(8).unwrap();
    check_sharded(&mesh, Some(&Sharding::zero3()), &one, Recipe { data: 2, ..sums });
}

/// Parameters of 16 bits, whose gradients add up in 32 bits over the micro-batches.
#[test]
fn sharded_pipelines_in_sixteen_bits() {
    let run = |mesh: &Mesh| {
        let found = on_ranks(mesh.world_size(), |builder, rank| {
            let builder = builder.sharding(Sharding::zero3()).mesh(mesh.clone());
            let builder = builder.mixed_precision(Precision::Bf16);
            let accelerator = builder.build().unwrap();
            let model = {
                let _one_by_one = DRAWS.lock().unwrap_or_else(PoisonError::into_inner);
                tch::manual_seed(7);
                let builder = accelerator.parallel().model_builder(TensorPlan::new());
                builder.build(|path| Gpt2LmHead::new(path, &gpt2(4))).unwrap()
            };
            let optimizer = AdamW::default().lr(0.01).eps(1e-3).build(&model).unwrap();
            let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
            let mut losses = Vec::new();
            for step in 0..4 {
                // Eight texts for each rank with other samples.
                let place = accelerator.data_processes().process_index() as i64;
                let ids = text(16 * step + 8 * place, 8);
                let loss = accelerator.forward_backward(&model, &ids, |model, micro| {
                    let loss = model.forward(Labelled::new(micro, micro))?;
                    Ok((loss.sum, loss.count))
                });
                losses.push(loss.unwrap().value());
                optimizer.step().unwrap();
                optimizer.zero_grad().unwrap();
            }
            let state = model.full_state_dict().unwrap();
            let state = state.map(|it| it.iter().flat_map(|(_, it)| values(it)).collect());
            assert_eq!(state.is_some(), rank == 0);
            (losses, state.unwrap_or_default())
        });
        found.into_iter().next().unwrap()
    };
    let expected: (Vec<f64>, Vec<f64>) = run(&Mesh::builder().shard(2).build(2).unwrap());
    let found = run(&Mesh::builder().pipeline(2).shard(2).build(4).unwrap());
    assert_close(&found.0, &expected.0, 5e-3, 5e-3);
    // AdamW moves a weight by 0.01 in a step at most.
    assert_close(&found.1, &expected.1, 0.0, 8e-3);
}

/// The embedding is on the first and the last rank, and its shards on two ranks of each; layers are divided as well.
#[test]
fn sharded_pipelines_of_divided_layers() {
    let mesh = Mesh::builder().pipeline(2).shard(2).tensor(2).build(8).unwrap();
    let means = Recipe { data: 2, ..MEANS };
    for sharding in [Sharding::zero3(), Sharding::zero1()] {
        let one = options(4, Schedule::OneForwardOneBackward);
        check_sharded(&mesh, Some(&sharding), &one, means);
    }
}

/// Within a step nothing is gathered again, and each unit is reduced once.
#[test]
fn units_are_gathered_and_reduced_once_in_a_step() {
    on_ranks(4, |builder, _| {
        let mesh = Mesh::builder().pipeline(2).shard(2).build(4).unwrap();
        let options = options(4, Schedule::OneForwardOneBackward);
        let builder = builder.sharding(Sharding::zero3()).mesh(mesh).pipeline_options(options);
        let accelerator = builder.build().unwrap();
        let model = {
            let _one_by_one = DRAWS.lock().unwrap_or_else(PoisonError::into_inner);
            let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2(4));
            accelerator
                .parallel()
                .model_builder(TensorPlan::new())
                .kind(Kind::Double)
                .build(new)
                .unwrap()
        };
        let optimizer = AdamW::default().build(&model).unwrap();
        let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
        let units = model.sharder().unwrap().plan().units().len() as u64;
        let before = model.sharder().unwrap().meter().unwrap();
        for _ in 0..3 {
            let loss = accelerator.forward_backward(&model, &text(0, 4), |model, micro| {
                model.forward(Labelled::new(micro, micro))?.mean()
            });
            assert!(loss.unwrap().value() > 0.0);
            optimizer.step().unwrap();
            optimizer.zero_grad().unwrap();
        }
        let after = model.sharder().unwrap().meter().unwrap();
        assert_eq!(after.gathers - before.gathers, 3 * units);
        assert_eq!(after.reductions - before.reductions, 3 * units);
        assert_eq!(after.gathered_bytes, 0);
    });
}

/// A gradient that overflows on one stage leaves the step out on all ranks, and the scale falls on all of them.
#[test]
fn losses_are_scaled_in_sixteen_bits() {
    let run = |builder: AcceleratorBuilder, mesh: Option<Mesh>| {
        let builder = builder.sharding(None).mixed_precision(Precision::Fp16);
        let scaler = GradScalerOptions { init_scale: 1024.0, ..GradScalerOptions::default() };
        let builder = builder.grad_scaler(scaler);
        let builder = match mesh {
            Some(mesh) => {
                let options = options(4, Schedule::OneForwardOneBackward);
                builder.mesh(mesh).pipeline_options(options)
            }
            None => builder,
        };
        let accelerator = builder.build().unwrap();
        let model = {
            let _one_by_one = DRAWS.lock().unwrap_or_else(PoisonError::into_inner);
            tch::manual_seed(7);
            let builder = accelerator.parallel().model_builder(TensorPlan::new());
            builder.build(|path| Gpt2LmHead::new(path, &gpt2(4))).unwrap()
        };
        let optimizer = AdamW::default().lr(0.01).eps(1e-3).build(&model).unwrap();
        let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
        let mut steps = Vec::new();
        for (number, factor) in [1.0, 1.0, 1e30, 1.0, 1.0].into_iter().enumerate() {
            let ids = text(4 * number as i64, 4);
            let loss = accelerator.forward_backward(&model, &ids, |model, micro| {
                Ok(model.forward(Labelled::new(micro, micro))?.mean()? * factor)
            });
            accelerator.clip_grad_norm(&model, 1.0).unwrap();
            optimizer.step().unwrap();
            optimizer.zero_grad().unwrap();
            let scale = accelerator.grad_scaler().unwrap().scale();
            let skipped = accelerator.optimizer_step_was_skipped();
            steps.push((loss.unwrap().value() / factor, skipped, scale));
        }
        (steps, optimizer.steps().unwrap())
    };
    let (expected, _) = run(Accelerator::builder().cpu(true).quiet(true), None);
    for mesh in
        [Mesh::builder().pipeline(2).build(2), Mesh::builder().pipeline(2).tensor(2).build(4)]
    {
        let mesh = mesh.unwrap();
        for (found, made) in
            on_ranks(mesh.world_size(), |builder, _| run(builder, Some(mesh.clone())))
        {
            assert_eq!(made, 4);
            for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
                assert_eq!(
                    (found.1, found.2),
                    (number == 2, if number < 2 { 1024.0 } else { 512.0 })
                );
                assert_close(&[found.0], &[expected.0], 5e-3, 1e-3);
            }
        }
    }
}

/// An Accelerator of a pipeline of two ranks.
fn of_two(builder: AcceleratorBuilder) -> Accelerator {
    let mesh = Mesh::builder().pipeline(2).build(2).unwrap();
    let options = options(2, Schedule::OneForwardOneBackward);
    builder.sharding(None).mesh(mesh).pipeline_options(options).build().unwrap()
}

#[test]
fn weights_of_all_stages_are_one_file() {
    let folder = tempfile::tempdir().unwrap();
    let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2(3));
    let whole = super::built(None, &new).state_dict().deep_clone().unwrap();
    let whole = Mutex::new(whole);
    on_ranks(2, |builder, rank| {
        let accelerator = of_two(builder);
        let model = super::built(None, &new);
        let refused = accelerator.prepare(model).err().unwrap().to_string();
        assert!(refused.contains("was not built for rank"), "{refused}");
        let build = || {
            let _one_by_one = DRAWS.lock().unwrap_or_else(PoisonError::into_inner);
            tch::manual_seed(7);
            accelerator
                .parallel()
                .model_builder(TensorPlan::new())
                .kind(Kind::Double)
                .build(new)
                .unwrap()
        };
        let mut model = accelerator.prepare(build()).unwrap();
        let file = folder.path().join("whole.safetensors");
        accelerator.save_model(&model, &file).unwrap();
        accelerator
            .checkpoints()
            .save_model_in_parts(&model, folder.path().join("parts"), 2000)
            .unwrap();
        {
            let whole = whole.lock().unwrap();
            let saved = weights::load(&file).unwrap();
            assert_eq!(saved.len(), whole.len());
            assert!(saved.iter().all(|(name, value)| value == whole.get(name).unwrap()));
            let parts = weights::load(folder.path().join("parts")).unwrap();
            assert_eq!(parts.len() + 1, whole.len(), "a tied parameter is written once");
        }
        for from in ["whole.safetensors", "parts"] {
            tch::no_grad(|| {
                for it in &mut model.inner().parameters() {
                    let _ = it.tensor.zero_();
                }
            });
            accelerator.load_model(&mut model, folder.path().join(from)).unwrap();
            let whole = whole.lock().unwrap();
            for (name, value) in model.inner().state_dict() {
                assert_eq!(&value, whole.get(&name).unwrap(), "{name} on rank {rank}");
            }
        }
        let missing = accelerator.load_model(&mut model, folder.path().join("none"));
        assert!(missing.is_err());
    });
}

#[test]
fn what_does_not_work_is_named() {
    on_ranks(2, |builder, rank| {
        let accelerator = of_two(builder);
        let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2(2));
        let build = || {
            let _one_by_one = DRAWS.lock().unwrap_or_else(PoisonError::into_inner);
            accelerator
                .parallel()
                .model_builder(TensorPlan::new())
                .kind(Kind::Double)
                .build(new)
                .unwrap()
        };
        let model = accelerator.prepare(build()).unwrap();
        let backward = accelerator.backward(&Tensor::from(1.0)).unwrap_err().to_string();
        assert!(backward.contains("use `Accelerator::forward_backward`"), "{backward}");
        let outside = model.forward(&text(0, 2)).unwrap_err().to_string();
        assert!(outside.contains(&format!("this rank has stage {rank} of a pipeline of 2")));
        // All ranks detect a loss that is not finite, and the step continues.
        let infinite = accelerator.forward_backward(&model, &text(0, 2), |model, micro| {
            let loss = model.forward(Labelled::new(micro, micro))?.mean()?;
            Ok(loss / 0.0)
        });
        let infinite = infinite.unwrap_err();
        assert_eq!(infinite.kind(), ErrorKind::NotFinite);
        assert!(matches!(infinite.downcast_ref(), Some(TrainError::LossNotFinite { .. })));
        let loss = accelerator.forward_backward(&model, &text(0, 2), |model, micro| {
            model.forward(Labelled::new(micro, micro))?.mean()
        });
        assert!(loss.unwrap().value() > 0.0);
        let other = accelerator.parallel().model_builder(TensorPlan::new());
        let row = other.build(|path: &ParamPath<'_>| {
            (Linear::new(path / 0, 2, 2), LayerNorm::new(path / 1, &[2]))
        });
        assert!(row.unwrap_err().to_string().contains("has none, or several"));
    });
    let refused = |mesh: Mesh, sharding: Option<Sharding>| {
        let ranks = mesh.world_size();
        let errors = on_ranks(ranks, |builder, _| {
            let builder = builder.sharding(sharding.clone()).mesh(mesh.clone());
            builder.build().unwrap_err().to_string()
        });
        errors.into_iter().next().unwrap()
    };
    // Ranks of which each has the settings of its own host.
    let orders = on_ranks(2, |builder, rank| {
        let mesh = Mesh::builder().pipeline(2).build(2).unwrap();
        let options = options(2 + 2 * rank, Schedule::OneForwardOneBackward);
        let builder = builder.sharding(None).mesh(mesh).pipeline_options(options);
        let accelerator = builder.build().unwrap();
        let model = {
            let _one_by_one = DRAWS.lock().unwrap_or_else(PoisonError::into_inner);
            accelerator.parallel().model(|path| Gpt2LmHead::new(path, &gpt2(2))).unwrap()
        };
        accelerator.prepare(model).unwrap_err().to_string()
    });
    let expected = "rank 0 of the pipeline runs 1f1b with 2 micro-batches, and rank 1 1f1b with 4 micro-batches";
    assert!(orders[0].starts_with(expected), "{orders:?}");
    assert!(orders[1].starts_with("rank 1 of the pipeline runs"), "{orders:?}");
    let builder = || Mesh::builder().pipeline(2);
    let shards = refused(builder().shard(2).build(4).unwrap(), None);
    assert!(shards.contains("no sharding was chosen"), "{shards}");
    let alone = Accelerator::builder().cpu(true).pipeline_parallel(2).build().unwrap_err();
    assert!(alone.to_string().contains("pp 2"), "{alone}");
}
