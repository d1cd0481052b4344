//! Ranks that have unequal numbers of batches, or train for themselves; decisions that all must follow.

use std::time::Duration;

use brigade_data::{DataLoader, TensorDataset};
use brigade_nn::{BatchNorm1d, Linear, Model, Module, ParamPath};
use brigade_optim::{Optimizer, Sgd};
use brigade_test_device::{numeric_device, on_device, tolerance};
use brigade_testkit::{World, assert_close, dist_test};
use brigade_torch::{ReducerOptions, Result};
use brigade_train::{Accelerator, CommHook, JoinInputs, PreparedModel, PreparedOptimizer};
use tch::{Kind, Tensor};

use crate::device::builder;

/// Three parameters that are not in one bucket, one of them used on odd steps only where asked for.
struct Net {
    first: Linear,
    second: Linear,
    norm: Option<BatchNorm1d>,
}

impl Net {
    fn plain(path: &ParamPath<'_>) -> Self {
        Self {
            first: Linear::new(path / "first", 3, 5),
            second: Linear::new(path / "second", 5, 2),
            norm: None,
        }
    }

    fn normal(path: &ParamPath<'_>) -> Self {
        Self { norm: Some(BatchNorm1d::new(path / "norm", 5)), ..Self::plain(path) }
    }
}

impl Module<&Tensor> for Net {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let hidden = self.first.forward(input)?;
        let hidden = match &self.norm {
            Some(norm) => norm.forward(&hidden)?,
            None => hidden,
        };
        self.second.forward(&hidden.tanh())
    }
}

fn wave(shape: &[i64], phase: f64) -> Tensor {
    let places = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, tch::Device::Cpu));
    (places * 0.7 + phase).sin().reshape(shape)
}

fn objects(constructor: fn(&ParamPath<'_>) -> Net) -> (Model<Net>, Optimizer) {
    let model =
        Model::builder().device(numeric_device()).kind(Kind::Double).build(constructor).unwrap();
    for (number, parameter) in model.parameters().iter().enumerate() {
        parameter.tensor.detach().copy_(&(wave(&parameter.tensor.size(), number as f64) * 0.4));
    }
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    (model, optimizer)
}

fn weights<M>(model: &Model<M>) -> Vec<f64> {
    let parameters = model.parameters();
    parameters
        .iter()
        .flat_map(|p| Vec::<f64>::try_from(p.tensor.detach().reshape([-1])).unwrap())
        .collect()
}

/// Compares, on a real GPU at least as closely as its sums of float64 allow.
#[track_caller]
fn close(found: &[f64], expected: &[f64], relative: f64, absolute: f64) {
    assert_close(found, expected, relative.max(tolerance(Kind::Double)), absolute);
}

fn loss(output: &Tensor) -> Tensor {
    output.square().mean(Kind::Double)
}

/// The batch of one rank in one round.
fn batch(rank: usize, round: usize) -> Tensor {
    on_device(&wave(&[4, 3], rank as f64 + 0.1 * round as f64))
}

/// One process that does what the ranks do together, if gradients of a round are divided by `divisor`
/// of the number of ranks that have a batch.
fn reference(rounds: &[usize], divisor: impl Fn(usize) -> f64) -> Vec<f64> {
    let (model, mut optimizer) = objects(Net::plain);
    for round in 0..rounds.iter().copied().max().unwrap() {
        let present: Vec<usize> = (0..rounds.len()).filter(|&rank| round < rounds[rank]).collect();
        let sum = present.iter().map(|&rank| loss(&model.forward(&batch(rank, round)).unwrap()));
        let sum = sum.reduce(|sum, term| sum + term).unwrap() / divisor(present.len());
        optimizer.zero_grad().unwrap();
        sum.backward();
        optimizer.step().unwrap();
    }
    weights(&model)
}

fn train(
    accelerator: &Accelerator,
    model: &PreparedModel<Net>,
    optimizer: &mut PreparedOptimizer,
    rounds: usize,
) -> Result<()> {
    for round in 0..rounds {
        let output = model.forward(&batch(accelerator.processes().process_index(), round))?;
        optimizer.zero_grad()?;
        accelerator.backward(&loss(&output))?;
        optimizer.step()?;
    }
    Ok(())
}

const ROUNDS: [usize; 3] = [5, 0, 3];

dist_test!(world = 3, dist_unequal_numbers_of_batches, |_world: World| -> Result<()> {
    let one = builder().build()?;
    let rounds = ROUNDS[one.processes().process_index()];
    let small =
        ReducerOptions { bucket_bytes: 64, first_bucket_bytes: 16, ..ReducerOptions::default() };
    let searching = ReducerOptions { find_unused_parameters: true, ..small };
    for options in [ReducerOptions::default(), small, searching] {
        let accelerator = Accelerator::builder().sharing(&one).reducer(options).build()?;
        for by_all in [true, false] {
            let (model, mut optimizer) = accelerator.prepare(objects(Net::plain))?;
            let join = JoinInputs { divide_by_initial_world_size: by_all, ..JoinInputs::default() };
            accelerator.join_uneven_inputs(&model, join, || {
                train(&accelerator, &model, &mut optimizer, rounds)
            })?;
            let divisor = |present: usize| if by_all { 3.0 } else { present as f64 };
            // On every rank: those that ended early have taken the weights of one that did not.
            close(&weights(model.inner()), &reference(&ROUNDS, divisor), 1e-12, 1e-13);
            // The model continues as before, with the number of all ranks.
            train(&accelerator, &model, &mut optimizer, 2)?;
            let all: Vec<Vec<f64>> =
                accelerator.processes().gather_object(weights(model.inner()))?;
            assert!(all.iter().all(|other| *other == all[0]));
        }
    }
    Ok(())
});

dist_test!(world = 2, dist_buffers_hooks_and_evaluation_in_a_join, |_world: World| -> Result<()> {
    let accelerator = builder().comm_hook(CommHook::Bf16).build()?;
    let (model, mut optimizer) = accelerator.prepare(objects(Net::normal))?;
    let rank = accelerator.processes().process_index();
    accelerator.join_uneven_inputs(&model, JoinInputs::default(), || {
        for round in 0..2 + 3 * rank {
            let input = batch(rank, round);
            let output = model.forward(&input)?;
            accelerator.backward(&loss(&output))?;
            optimizer.step()?;
            optimizer.zero_grad()?;
            let _ = tch::no_grad(|| model.forward(&input))?;
            // Batches in between, whose gradients are not reduced.
            accelerator.no_sync(&model, || accelerator.backward(&loss(&model.forward(&input)?)))?;
        }
        Ok(())
    })?;
    let state = model.inner().state_dict();
    let mine: Vec<f64> = state
        .iter()
        .flat_map(|(_, t)| Vec::<f64>::try_from(t.to_kind(Kind::Double).reshape([-1])).unwrap())
        .collect();
    let all = accelerator.processes().gather_object(mine)?;
    assert_eq!(all[0], all[1]);
    Ok(())
});

dist_test!(world = 2, dist_an_early_end_can_be_an_error, |_world: World| -> Result<()> {
    let accelerator = builder().build()?;
    let (model, mut optimizer) = accelerator.prepare(objects(Net::plain))?;
    let join = JoinInputs { throw_on_early_termination: true, ..JoinInputs::default() };
    let rounds = 2 + accelerator.processes().process_index();
    let outcome = accelerator
        .join_uneven_inputs(&model, join, || train(&accelerator, &model, &mut optimizer, rounds));
    let error = outcome.unwrap_err().to_string();
    assert!(error.contains("rank 0 has no more data"), "{error}");
    // The join leaves no state behind.
    accelerator.join_uneven_inputs(&model, join, || train(&accelerator, &model, &mut optimizer, 2))
});

dist_test!(world = 2, dist_ranks_that_disagree_get_an_error, |_world: World| -> Result<()> {
    let accelerator = builder().build()?;
    let (model, _) = accelerator.prepare(objects(Net::plain))?;
    let rank = accelerator.processes().process_index();
    let outcome = accelerator.join_uneven_inputs(&model, JoinInputs::default(), || {
        let pass = || accelerator.backward(&loss(&model.forward(&batch(rank, 0))?));
        if rank == 0 { pass() } else { accelerator.no_sync(&model, pass) }
    });
    let error = outcome.unwrap_err().to_string();
    assert!(
        error.contains("rank 0 reduces its gradients") && error.contains("rank 1 does not"),
        "{error}"
    );
    Ok(())
});

dist_test!(world = 2, dist_loaders_are_uneven_inside_only, |_world: World| -> Result<()> {
    let accelerator = builder().build()?;
    let data = TensorDataset::new((wave(&[10, 3], 0.0), wave(&[10, 1], 0.0)))?;
    let (model, _) = objects(Net::plain);
    let loader = DataLoader::new(data).batch_size(2);
    let (model, loader) = accelerator.prepare((model, loader))?;
    let count = || (&loader).into_iter().count();
    assert_eq!(count(), 3, "completed");
    let inside = accelerator.join_uneven_inputs(&model, JoinInputs::default(), || Ok(count()))?;
    assert_eq!(inside, [3, 2][accelerator.processes().process_index()]);
    let kept = JoinInputs { even_batches: None, ..JoinInputs::default() };
    assert_eq!(accelerator.join_uneven_inputs(&model, kept, || Ok(count()))?, 3);
    assert_eq!(count(), 3);
    Ok(())
});

dist_test!(world = 2, dist_local_sgd_averages_weights, |_world: World| -> Result<()> {
    let accelerator = builder().build()?;
    let rank = accelerator.processes().process_index();
    let (model, mut optimizer) = accelerator.prepare(objects(Net::plain))?;
    // Two ranks by hand.
    let mut both = [objects(Net::plain), objects(Net::plain)];
    let average = |both: &[(Model<Net>, Optimizer); 2]| {
        for (a, b) in both[0].0.parameters().iter().zip(both[1].0.parameters()) {
            let mean = (a.tensor.detach() + b.tensor.detach()) / 2.0;
            a.tensor.detach().copy_(&mean);
            b.tensor.detach().copy_(&mean);
        }
    };
    let mut local = accelerator.local_sgd(&model, 2, true)?;
    for round in 0..5 {
        for (rank, (model, optimizer)) in both.iter_mut().enumerate() {
            optimizer.zero_grad()?;
            loss(&model.forward(&batch(rank, round)).unwrap()).backward();
            optimizer.step()?;
        }
        if round % 2 == 1 {
            average(&both);
        }
        optimizer.zero_grad()?;
        accelerator.backward(&loss(&model.forward(&batch(rank, round))?))?;
        optimizer.step()?;
        local.step()?;
        close(&weights(model.inner()), &weights(&both[rank].0), 1e-12, 1e-14);
    }
    average(&both);
    local.finish()?;
    close(&weights(model.inner()), &weights(&both[rank].0), 1e-12, 1e-14);
    // Gradients are averaged again.
    train(&accelerator, &model, &mut optimizer, 1)?;
    let all = accelerator.processes().gather_object(weights(model.inner()))?;
    assert_eq!(all[0], all[1]);
    assert!(accelerator.local_sgd(&model, 0, true).is_err());
    accelerator.local_sgd(&model, 1, false)?.finish()
});

dist_test!(world = 3, dist_a_trigger_of_one_is_seen_by_all, |_world: World| -> Result<()> {
    let accelerator = builder().build()?;
    assert!(!accelerator.processes().check_trigger()?);
    if accelerator.processes().process_index() == 1 {
        accelerator.processes().set_trigger();
    }
    assert!(accelerator.processes().check_trigger()?);
    assert!(!accelerator.processes().check_trigger()?, "unset by the check");
    accelerator.processes().set_trigger();
    assert!(accelerator.processes().check_trigger()?);
    Ok(())
});

dist_test!(world = 2, dist_a_late_ranks_trigger_is_waited_for, |_world: World| -> Result<()> {
    let accelerator = builder().build()?;
    let store = accelerator.processes().group().unwrap().store().clone();
    for round in 0..20 {
        let late = round % 2;
        let key = format!("waits/{round}");
        if accelerator.processes().process_index() == late {
            // The other rank is at its check, or about to be.
            store.wait(&[&key], Duration::from_secs(60))?;
            accelerator.processes().set_trigger();
            assert!(accelerator.processes().check_trigger()?, "round {round}");
        } else {
            store.set(&key, b"1")?;
            assert!(accelerator.processes().check_trigger()?, "round {round}");
            // After the check: it counts for the next one.
            accelerator.processes().set_trigger();
        }
        assert!(accelerator.processes().check_trigger()?, "round {round}");
        assert!(!accelerator.processes().check_trigger()?, "round {round}");
    }
    Ok(())
});

#[test]
fn one_process_alone() -> Result<()> {
    let accelerator = builder().build()?;
    let (model, mut optimizer) = accelerator.prepare(objects(Net::plain))?;
    accelerator.join_uneven_inputs(&model, JoinInputs::default(), || {
        train(&accelerator, &model, &mut optimizer, 3)
    })?;
    close(&weights(model.inner()), &reference(&[3], |_| 1.0), 1e-14, 1e-15);
    accelerator.processes().set_trigger();
    assert!(accelerator.processes().check_trigger()?);
    assert!(!accelerator.processes().check_trigger()?);
    let mut local = accelerator.local_sgd(&model, 1, true)?;
    local.step()?;
    local.finish()
}
