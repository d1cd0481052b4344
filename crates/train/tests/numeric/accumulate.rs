//! In float64, one process with the whole batch and any mix of ranks and accumulation give the same
//! weights.

use brigade_data::{DataLoader, TensorDataset};
use brigade_nn::Model;
use brigade_optim::{Optimizer, Scheduler, Sgd};
use brigade_test_device::{numeric_device, on_device, tolerance};
use brigade_testkit::{World, assert_close, dist_test};
use brigade_torch::Result;
use brigade_train::{Accelerator, GradientAccumulationOptions};
use tch::{Kind, Tensor};

use crate::device::builder;
use crate::net::Net;

const SAMPLES: i64 = 24;

fn tensors(samples: i64) -> (Tensor, Tensor) {
    let inputs = Tensor::arange(samples * 5, (Kind::Double, tch::Device::Cpu)).sin();
    let targets = Tensor::arange(samples * 3, (Kind::Double, tch::Device::Cpu)).cos();
    (inputs.reshape([samples, 5]), targets.reshape([samples, 3]))
}

fn model() -> (Model<Net>, Optimizer) {
    let model =
        Model::builder().device(numeric_device()).kind(Kind::Double).build(Net::new).unwrap();
    // Computed by a formula: libtorch's random numbers belong to the whole process, and so to other tests too.
    for parameter in model.parameters() {
        let tensor = parameter.tensor.detach();
        let values = Tensor::arange(tensor.numel() as i64, (Kind::Double, tch::Device::Cpu));
        tensor.shallow_clone().copy_(&(values.sin() * 0.4).reshape(tensor.size()));
    }
    // A rate that float32 has: an optimizer on a GPU takes it from a tensor of that kind.
    let optimizer = Sgd::new(0.125).momentum(0.9).build(&model).unwrap();
    (model, optimizer)
}

fn weights(model: &Model<Net>) -> Vec<f64> {
    model
        .parameters()
        .iter()
        .flat_map(|p| Vec::<f64>::try_from(p.tensor.detach().reshape([-1])).unwrap())
        .collect()
}

/// The plain loop: batches of these sizes, one step each, three epochs.
fn reference(samples: i64, batches: &[i64]) -> Vec<f64> {
    let (model, mut optimizer) = model();
    let (inputs, targets) = tensors(samples);
    let (inputs, targets) = (on_device(&inputs), on_device(&targets));
    for _ in 0..3 {
        let mut start = 0;
        for &rows in batches {
            let output = model.forward(&inputs.narrow(0, start, rows)).unwrap();
            let loss = output.mse_loss(&targets.narrow(0, start, rows), tch::Reduction::Mean);
            optimizer.zero_grad().unwrap();
            loss.backward();
            optimizer.step().unwrap();
            start += rows;
        }
    }
    weights(&model)
}

/// The same through the Accelerator. Returns the weights and the optimizer steps taken.
fn accelerated(
    accelerator: &Accelerator,
    samples: i64,
    batch_size: usize,
) -> Result<(Vec<f64>, u64, u64)> {
    let (model, optimizer) = model();
    let schedule = brigade_schedule::Schedule::constant(0.125)?;
    let scheduler = Scheduler::new(&optimizer, schedule);
    let loader = DataLoader::new(TensorDataset::new(tensors(samples))?).batch_size(batch_size);
    let (scheduler, loader, model, optimizer) =
        accelerator.prepare((scheduler, loader, model, optimizer))?;
    let (mut scheduler, mut optimizer) = (scheduler, optimizer);
    for _ in 0..3 {
        for batch in &loader {
            let batch = batch?;
            let (inputs, targets) = &*batch;
            accelerator.accumulate(&model, &batch, || {
                let loss = model.forward(inputs)?.mse_loss(targets, tch::Reduction::Mean);
                accelerator.backward(&loss)?;
                optimizer.step()?;
                scheduler.step()?;
                optimizer.zero_grad()
            })?;
        }
    }
    Ok((weights(model.inner()), optimizer.steps()?, scheduler.position()?))
}

fn same(found: &[f64], expected: &[f64]) {
    assert_close(found, expected, tolerance(Kind::Double).max(1e-12), 1e-14);
}

#[test]
fn accumulation_alone() {
    for (steps, batch_size) in [(1, 8), (2, 4), (4, 2), (8, 1)] {
        let accelerator = builder().gradient_accumulation_steps(steps).build().unwrap();
        let (found, taken, scheduled) = accelerated(&accelerator, SAMPLES, batch_size).unwrap();
        same(&found, &reference(SAMPLES, &[8, 8, 8]));
        assert_eq!((taken, scheduled), (9, 9));
    }
}

#[test]
fn a_window_that_the_data_cut_short_has_its_real_length() {
    // Five batches of 2 in windows of 4: a step on 8 samples, then one on 2.
    let accelerator = builder().gradient_accumulation_steps(4).build().unwrap();
    let (found, taken, _) = accelerated(&accelerator, 10, 2).unwrap();
    same(&found, &reference(10, &[8, 2]));
    assert_eq!(taken, 6);
}

#[test]
fn a_window_may_go_on_in_the_next_epoch() {
    // Three batches an epoch, windows of two: nine batches are four windows and a half.
    let settings = GradientAccumulationOptions {
        steps: 2,
        sync_with_dataloader: false,
        ..GradientAccumulationOptions::default()
    };
    let accelerator = builder().gradient_accumulation(settings).build().unwrap();
    let (_, taken, scheduled) = accelerated(&accelerator, 12, 4).unwrap();
    assert_eq!((taken, scheduled), (4, 4));
}

/// Every combination of accumulation and an end that is uneven, with batches of equal size.
fn every_combination(first: &Accelerator) -> Result<()> {
    let ranks = first.processes().num_processes() as i64;
    for steps in 1..=4 {
        for samples in [8 * ranks, 10 * ranks, 14 * ranks] {
            let (batch, mut left) = (2 * ranks, samples);
            let mut windows = Vec::new();
            while left > 0 {
                windows.push(left.min(batch * steps));
                left -= windows[windows.len() - 1];
            }
            let expected = reference(samples, &windows);
            for sync_each_batch in [false, true] {
                let settings = GradientAccumulationOptions {
                    steps: usize::try_from(steps).unwrap(),
                    sync_each_batch,
                    ..GradientAccumulationOptions::default()
                };
                let accelerator = Accelerator::builder()
                    .sharing(first)
                    .gradient_accumulation(settings)
                    .build()?;
                let (found, taken, _) = accelerated(&accelerator, samples, 2)?;
                same(&found, &expected);
                assert_eq!(taken, 3 * windows.len() as u64);
            }
        }
    }
    Ok(())
}

#[test]
fn every_combination_alone() {
    every_combination(&builder().build().unwrap()).unwrap();
}

dist_test!(world = 2, dist_every_combination_on_two_ranks, |_world: World| -> Result<()> {
    every_combination(&builder().build()?)
});

dist_test!(world = 4, dist_every_combination_on_four_ranks, |_world: World| -> Result<()> {
    every_combination(&builder().build()?)
});

dist_test!(world = 2, dist_two_ranks_equal_one, |_world: World| -> Result<()> {
    let one = builder().build()?;
    same(&accelerated(&one, SAMPLES, 4)?.0, &reference(SAMPLES, &[8, 8, 8]));
    let two = Accelerator::builder().sharing(&one).gradient_accumulation_steps(2).build()?;
    same(&accelerated(&two, SAMPLES, 2)?.0, &reference(SAMPLES, &[8, 8, 8]));
    // A short window on two ranks: 3 batches of 2 on each rank, windows of 2.
    let (found, taken, scheduled) = accelerated(&two, 12, 2)?;
    same(&found, &reference(12, &[8, 4]));
    assert_eq!((taken, scheduled), (6, 6));
    let split = Accelerator::builder().sharing(&one).split_batches(true).build()?;
    same(&accelerated(&split, SAMPLES, 8)?.0, &reference(SAMPLES, &[8, 8, 8]));
    let dispatched = Accelerator::builder().sharing(&one).dispatch_batches(true).build()?;
    same(&accelerated(&dispatched, SAMPLES, 4)?.0, &reference(SAMPLES, &[8, 8, 8]));
    Ok(())
});

dist_test!(world = 4, dist_four_ranks_equal_one, |_world: World| -> Result<()> {
    let accelerator = builder().gradient_accumulation_steps(2).build()?;
    same(&accelerated(&accelerator, SAMPLES, 1)?.0, &reference(SAMPLES, &[8, 8, 8]));
    Ok(())
});

/// Two models, one optimizer each: a loss of both, or one after the other.
fn two_models(accelerator: &Accelerator, batch_size: usize, together: bool) -> Result<Vec<f64>> {
    let ((first, one), (second, two)) = (model(), model());
    let loader = DataLoader::new(TensorDataset::new(tensors(SAMPLES))?).batch_size(batch_size);
    let (first, second, mut one, mut two, loader) =
        accelerator.prepare((first, second, one, two, loader))?;
    for batch in &loader {
        let batch = batch?;
        let (inputs, targets) = &*batch;
        accelerator.accumulate(&(&first, &second), &batch, || {
            let loss = |output: Tensor| output.mse_loss(targets, tch::Reduction::Mean);
            let a = loss(first.forward(inputs)?);
            let b = loss(second.forward(&(inputs * 0.5))?);
            if together {
                accelerator.backward(&(a + b))?;
            } else {
                accelerator.backward(&a)?;
                accelerator.backward(&b)?;
            }
            let norm = accelerator.clip_grad_norm(&(&first, &second), 0.5)?;
            assert_eq!(norm.is_some(), accelerator.sync_gradients());
            one.step()?;
            two.step()?;
            one.zero_grad()?;
            two.zero_grad()
        })?;
    }
    assert_eq!((one.steps()?, two.steps()?), (3, 3));
    Ok([weights(first.inner()), weights(second.inner())].concat())
}

dist_test!(world = 2, dist_two_models_accumulate_together, |_world: World| -> Result<()> {
    let one = builder().build()?;
    // The whole batch at once, clipped by the norm over both.
    let expected = {
        let ((first, mut a), (second, mut b)) = (model(), model());
        let (inputs, targets) = tensors(SAMPLES);
        let (inputs, targets) = (on_device(&inputs), on_device(&targets));
        for step in 0..3 {
            let rows = |tensor: &Tensor| tensor.narrow(0, 8 * step, 8);
            let loss = |output: Tensor| output.mse_loss(&rows(&targets), tch::Reduction::Mean);
            let both = loss(first.forward(&rows(&inputs)).unwrap())
                + loss(second.forward(&(rows(&inputs) * 0.5)).unwrap());
            both.backward();
            let all: Vec<_> = first.parameters().into_iter().chain(second.parameters()).collect();
            one.clip_grad_norm(&all, 0.5)?;
            for optimizer in [&mut a, &mut b] {
                optimizer.step()?;
                optimizer.zero_grad()?;
            }
        }
        [weights(&first), weights(&second)].concat()
    };
    for (steps, batch_size) in [(1, 4), (2, 2), (4, 1)] {
        let accelerator = Accelerator::builder()
            .sharing(&one)
            .quiet(true)
            .gradient_accumulation_steps(steps)
            .build()?;
        for together in [true, false] {
            same(&two_models(&accelerator, batch_size, together)?, &expected);
        }
    }
    Ok(())
});

#[test]
fn no_steps_are_refused() {
    let error = builder().gradient_accumulation_steps(0).build().unwrap_err();
    assert!(error.to_string().contains("gradient_accumulation_steps is 0"), "{error}");
}
