//! The mean over all tokens: in float64 the gradients are the big batch's, however tokens are spread.

use brigade_data::{DataLoader, TensorDataset};
use brigade_nn::Model;
use brigade_optim::{Optimizer, Sgd};
use brigade_test_device::{numeric_device, on_device, tolerance};
use brigade_testkit::{World, assert_close, dist_test};
use brigade_torch::Result;
use brigade_train::{Accelerator, GradientAccumulationOptions, TrainError};
use tch::{Kind, Tensor};

use crate::device;
use crate::net::{self, Net, weights};

/// Inputs, targets, and how many of a sample's three outputs count: 0 to 3.
fn data(samples: i64) -> (Tensor, (Tensor, Tensor)) {
    let double = (Kind::Double, tch::Device::Cpu);
    let inputs = Tensor::arange(samples * 5, double).sin().view([samples, 5]);
    let targets = Tensor::arange(samples * 3, double).cos().view([samples, 3]);
    let counted = (Tensor::arange(samples, double) * 7.0).fmod(4.0).view([samples, 1]);
    let mask = Tensor::arange(3, double).lt_tensor(&counted).to_kind(Kind::Double);
    (inputs, (targets, mask))
}

fn model() -> (Model<Net>, Optimizer) {
    let mut model = net::model(Kind::Double);
    model.to_device(numeric_device()).unwrap();
    // A rate that float32 has: an optimizer on a GPU takes it from a tensor of that kind.
    let optimizer = Sgd::new(0.125).momentum(0.9).build(&model).unwrap();
    (model, optimizer)
}

fn sum_of_squares(output: &Tensor, targets: &Tensor, mask: &Tensor) -> Tensor {
    ((output - targets).square() * mask).sum(Kind::Double)
}

/// One step for each of these groups of rows, with the mean over all that counts in it.
fn reference(samples: i64, groups: &[Vec<i64>]) -> Vec<f64> {
    let (model, mut optimizer) = model();
    let (inputs, (targets, mask)) = data(samples);
    for rows in groups {
        let rows = Tensor::from_slice(rows);
        let [inputs, targets, mask] =
            [&inputs, &targets, &mask].map(|tensor| on_device(&tensor.index_select(0, &rows)));
        let loss = sum_of_squares(&model.forward(&inputs).unwrap(), &targets, &mask);
        optimizer.zero_grad().unwrap();
        (loss / mask.sum(Kind::Double)).backward();
        optimizer.step().unwrap();
    }
    weights(&model)
}

/// The same through the Accelerator, and the rows that each of its steps saw.
fn accelerated(
    accelerator: &Accelerator,
    samples: i64,
    batch_size: usize,
) -> Result<(Vec<f64>, Vec<Vec<i64>>)> {
    let (inputs, (targets, mask)) = data(samples);
    let rows = Tensor::arange(samples, (Kind::Int64, tch::Device::Cpu));
    let dataset = TensorDataset::new((inputs, targets, mask, rows))?;
    let loader = DataLoader::new(dataset).batch_size(batch_size);
    let (model, optimizer) = model();
    let (model, mut optimizer, loader) = accelerator.prepare((model, optimizer, loader))?;
    let (mut groups, mut group) = (Vec::new(), Vec::new());
    for batch in &loader {
        let batch = batch?;
        let (inputs, targets, mask, rows) = &*batch;
        accelerator.accumulate(&model, &batch, || {
            let loss = sum_of_squares(&model.forward(inputs)?, targets, mask);
            let tokens = mask.sum(Kind::Double).double_value(&[]);
            accelerator.backward_weighted(&model, &loss, tokens)?;
            optimizer.step()?;
            optimizer.zero_grad()
        })?;
        let rows = accelerator.processes().gather(&rows.view([1, -1]))?;
        group.extend(Vec::<i64>::try_from(rows.reshape([-1]))?);
        if accelerator.sync_gradients() {
            groups.push(std::mem::take(&mut group));
        }
    }
    Ok((weights(model.inner()), groups))
}

fn same_as_the_big_batch(first: &Accelerator) -> Result<()> {
    // The last window is shorter for some, the last batch for others.
    for samples in [22, 24] {
        for steps in 1..=4 {
            for sync_each_batch in [false, true] {
                let settings = GradientAccumulationOptions {
                    steps,
                    sync_each_batch,
                    ..GradientAccumulationOptions::default()
                };
                let accelerator = Accelerator::builder()
                    .sharing(first)
                    .quiet(true)
                    .gradient_accumulation(settings)
                    .build()?;
                for batch_size in [2, 3] {
                    let (found, groups) = accelerated(&accelerator, samples, batch_size)?;
                    let allowed = tolerance(Kind::Double).max(1e-12);
                    assert_close(&found, &reference(samples, &groups), allowed, 1e-14);
                }
            }
        }
    }
    Ok(())
}

#[test]
fn one_process_equals_the_big_batch() {
    let first = device::builder().build().unwrap();
    same_as_the_big_batch(&first).unwrap();
}

#[test]
fn a_batch_that_is_left_out_has_no_tokens() {
    for wrong in 0..2 {
        // On the CPU, where a loss is looked at before its backward; on a GPU that would wait for it.
        let accelerator = Accelerator::builder().cpu(true).quiet(true);
        let accelerator = accelerator.gradient_accumulation_steps(3).build().unwrap();
        let (inputs, (targets, mask)) = data(6);
        let _ = inputs.narrow(0, 2 * wrong, 2).fill_(f64::NAN);
        let loader = DataLoader::new(TensorDataset::new((inputs, targets, mask)).unwrap());
        let (model, optimizer) = model();
        let (model, mut optimizer, loader) =
            accelerator.prepare((model, optimizer, loader.batch_size(2))).unwrap();
        let mut left_out = 0;
        for batch in &loader {
            let batch = batch.unwrap();
            let (inputs, targets, mask) = &*batch;
            let outcome = accelerator.accumulate(&model, &batch, || {
                let loss = sum_of_squares(&model.forward(inputs)?, targets, mask);
                let tokens = mask.sum(Kind::Double).double_value(&[]);
                accelerator.backward_weighted(&model, &loss, tokens)?;
                optimizer.step()
            });
            left_out += usize::from(matches!(
                outcome.as_ref().err().and_then(|error| error.downcast_ref()),
                Some(TrainError::LossNotFinite { .. })
            ));
        }
        assert_eq!((left_out, optimizer.steps().unwrap()), (1, 1));
        let rows = (0..6).filter(|row| row / 2 != wrong).collect();
        assert_close(
            &weights(model.inner()),
            &reference(6, &[rows]),
            tolerance(Kind::Double).max(1e-12),
            1e-14,
        );
    }
}

dist_test!(world = 2, dist_two_ranks_equal_the_big_batch, |_world: World| -> Result<()> {
    same_as_the_big_batch(&device::builder().build()?)
});

dist_test!(world = 4, dist_four_ranks_equal_the_big_batch, |_world: World| -> Result<()> {
    same_as_the_big_batch(&device::builder().build()?)
});

dist_test!(
    world = 2,
    dist_a_wrong_weight_is_an_error_on_every_rank,
    |world: World| -> Result<()> {
        let first = device::builder().build()?;
        let model = first.prepare(model().0)?;
        let loss =
            || model.forward(&Tensor::ones([1, 5], (Kind::Double, numeric_device()))).unwrap();
        let weight = if world.rank.as_usize() == 1 { -3.0 } else { 3.0 };
        let error = first.backward_weighted(&model, &loss().sum(Kind::Double), weight).unwrap_err();
        assert!(error.to_string().contains("backward_weighted"), "{error}");
        let weights = vec![1.0; 1 + world.rank.as_usize()];
        let error = first
            .backward_weighted(&model, &loss().sum(Kind::Double), Tensor::from_slice(&weights))
            .unwrap_err();
        assert!(error.to_string().contains("several elements"), "{error}");
        // No token on any rank: nothing to learn, and no NaN.
        let second = Accelerator::builder().sharing(&first).quiet(true).build()?;
        let model = second.prepare(net::model(Kind::Double))?;
        let output = model.forward(&Tensor::ones([1, 5], (Kind::Double, numeric_device())))?;
        second.backward_weighted(&model, &output.sum(Kind::Double), 0.0)?;
        for parameter in model.inner().parameters() {
            assert_eq!(parameter.tensor.grad().abs().max().double_value(&[]), 0.0);
        }
        Ok(())
    }
);
