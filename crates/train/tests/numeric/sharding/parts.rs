//! Parameters that are frozen and thawed, optimizers of shards, buffers, and types of the computation.

use brigade_data::{DataLoader, TensorDataset};
use brigade_nn::{Model, ParamPath};
use brigade_optim::{AdamW, Group};
use brigade_sharding::{MixedPrecision, ReduceGradients, Reshard, Sharding};
use brigade_testkit::assert_close;
use brigade_torch::Trainable;
use brigade_train::{Accelerator, AcceleratorBuilder, Precision};
use tch::{Device, Kind, Tensor};

use super::{Deep, Recipe, Rule, net, on_ranks, step, values};

const RECIPE: Recipe = Recipe { rule: Rule::AdamW, window: 1, clip: None };

/// Trains, freezes the blocks, trains, thaws them, trains.
fn with_frozen_blocks(builder: AcceleratorBuilder, ranks: std::ops::Range<usize>) -> Vec<f64> {
    let accelerator = builder.sync_batch_norm(true).build().unwrap();
    let model = net();
    let optimizer = AdamW::default()
        .lr(1e-2)
        .group(Group::matching("blocks.*").lr(5e-3))
        .build(&model)
        .unwrap();
    let mut objects = accelerator.prepare((model, optimizer)).unwrap();
    step(&accelerator, &mut objects, &RECIPE, ranks.clone(), 0).unwrap();
    assert_eq!(objects.0.set_trainable("blocks.*", false).unwrap(), 12);
    assert_eq!(objects.1.groups().unwrap().len(), 1);
    step(&accelerator, &mut objects, &RECIPE, ranks.clone(), 1).unwrap();
    objects.0.set_trainable("blocks.1.*", true).unwrap();
    assert_eq!(objects.1.groups().unwrap().len(), 2);
    step(&accelerator, &mut objects, &RECIPE, ranks, 2).unwrap();
    values(&objects.0)
}

#[test]
fn parameters_freeze_and_thaw() {
    let expected = with_frozen_blocks(Accelerator::builder().cpu(true).quiet(true), 0..2);
    for sharding in [Sharding::zero1(), Sharding::zero2(), Sharding::zero3()] {
        let found = on_ranks(2, |builder, rank| {
            with_frozen_blocks(builder.sharding(sharding.clone()), rank..rank + 1)
        });
        assert_close(&found[0], &expected, 1e-12, 1e-14);
        assert_eq!(found[0], found[1]);
    }
}

/// Trains on windows of two batches, the last of one, whose samples and ranks have unequal numbers of tokens.
fn weighted(builder: AcceleratorBuilder, ranks: usize) -> Vec<f64> {
    let accelerator = builder.sync_batch_norm(true).gradient_accumulation_steps(2).build().unwrap();
    let model = net();
    let optimizer = RECIPE.rule.build(&model);
    let wave = |count: i64| (Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.7).sin();
    let counts = (Tensor::arange(20, (Kind::Double, Device::Cpu)) * 7.0).fmod(5.0) + 1.0;
    let data = (wave(100).view([20, 5]), (wave(60).view([20, 3]), counts.view([20, 1])));
    // Four rows of all ranks together.
    let loader = DataLoader::new(TensorDataset::new(data).unwrap()).batch_size(4 / ranks);
    let (model, mut optimizer, loader) = accelerator.prepare((model, optimizer, loader)).unwrap();
    for batch in &loader {
        let batch = batch.unwrap();
        let (inputs, (targets, counts)) = &*batch;
        let step = || {
            let loss = (model.forward(inputs)? - targets).square() * counts;
            let total = counts.sum(Kind::Double);
            accelerator.backward_weighted(&model, &loss.sum(Kind::Double), &total)?;
            accelerator.clip_grad_norm(&model, 0.5)?;
            optimizer.step()?;
            optimizer.zero_grad()
        };
        accelerator.accumulate(&model, &batch, step).unwrap();
    }
    values(&model)
}

#[test]
fn losses_of_unequal_weights() {
    let expected = weighted(Accelerator::builder().cpu(true).quiet(true), 1);
    let strategies = [
        Sharding::zero1(),
        Sharding::zero2(),
        Sharding::zero3(),
        Sharding::zero3().reduce(ReduceGradients::Window),
        Sharding::hybrid(1),
    ];
    for sharding in strategies {
        let found = on_ranks(2, |builder, _| weighted(builder.sharding(sharding.clone()), 2));
        assert_close(&found[0], &expected, 1e-12, 1e-14);
    }
}

/// An optimizer may be prepared before its model, with it, or be built of the prepared one.
#[test]
fn an_optimizer_is_built_in_any_order() {
    let run = |order: usize| {
        on_ranks(2, |builder, rank| {
            let accelerator = builder.sharding(Sharding::zero3()).build().unwrap();
            let model = net();
            let mut objects = match order {
                0 => {
                    let optimizer = RECIPE.rule.build(&model);
                    let (optimizer, model) = accelerator.prepare((optimizer, model)).unwrap();
                    (model, optimizer)
                }
                1 => {
                    let optimizer = RECIPE.rule.build(&model);
                    accelerator.prepare((model, optimizer)).unwrap()
                }
                _ => {
                    let model = accelerator.prepare(model).unwrap();
                    assert_eq!(model.trainable_parameters()[0].tensor.size()[1], 5);
                    let optimizer = RECIPE.rule.build(&model);
                    let optimizer = accelerator.prepare(optimizer).unwrap();
                    (model, optimizer)
                }
            };
            for number in 0..2 {
                step(&accelerator, &mut objects, &RECIPE, rank..rank + 1, number).unwrap();
            }
            values(&objects.0)
        })
    };
    let expected = run(0);
    assert_eq!(run(1), expected);
    assert_eq!(run(2), expected);
}

/// In 16 bits the loss falls, shards stay in 32, and files have 32.
#[test]
fn sixteen_bits() {
    let cases = [
        (Some(Precision::Bf16), MixedPrecision::default()),
        (None, MixedPrecision::bf16()),
        (Some(Precision::Fp16), MixedPrecision::default()),
    ];
    for (precision, mixed) in cases {
        let losses = on_ranks(2, |builder, rank| {
            let builder = builder.sharding(Sharding::zero3().mixed(mixed));
            let builder = match precision {
                Some(precision) => builder.mixed_precision(precision),
                None => builder,
            };
            let accelerator = builder.build().unwrap();
            let mut model = net();
            model.to_kind(Kind::Float).unwrap();
            let optimizer = RECIPE.rule.build(&model);
            let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
            let (inputs, targets) = super::samples(rank, 0);
            let (inputs, targets) = (inputs.to_kind(Kind::Float), targets.to_kind(Kind::Float));
            let mut losses = Vec::new();
            for _ in 0..20 {
                let output = model.forward(&inputs).unwrap();
                assert_eq!(output.kind(), Kind::Float);
                let loss = (output - &targets).square().mean(Kind::Float);
                accelerator.backward(&loss).unwrap();
                accelerator.clip_grad_norm(&model, 1.0).unwrap();
                optimizer.step().unwrap();
                optimizer.zero_grad().unwrap();
                losses.push(loss.double_value(&[]));
            }
            assert!(model.trainable_parameters().iter().all(|it| it.tensor.kind() == Kind::Float));
            losses
        });
        for losses in losses {
            assert!(losses[19] < losses[0] * 0.8, "{precision:?} {mixed:?}: {losses:?}");
        }
    }
}

/// Within 5 % of the plan, padding and all, once the optimizer has stepped.
#[test]
fn memory_is_as_planned() {
    for sharding in [Sharding::zero1(), Sharding::zero2(), Sharding::zero3()] {
        let reports = on_ranks(2, |builder, rank| {
            let accelerator = builder.sharding(sharding.clone()).build().unwrap();
            assert!(accelerator.parallel().memory_report().unwrap().is_none());
            let model = net();
            let optimizer = RECIPE.rule.build(&model);
            let mut objects = accelerator.prepare((model, optimizer)).unwrap();
            step(&accelerator, &mut objects, &RECIPE, rank..rank + 1, 0).unwrap();
            let loss = objects.0.forward(&super::samples(rank, 1).0).unwrap().sum(Kind::Double);
            accelerator.backward(&loss).unwrap();
            accelerator.parallel().memory_report().unwrap().unwrap()
        });
        // Rank 0 has the most rows.
        for row in &reports[0].rows[..3] {
            // With ZeRO-1 whole gradients stay within a window of several batches alone.
            if row.kind == "gradients" && sharding == Sharding::zero1() {
                continue;
            }
            let (planned, measured) = (row.planned as f64, row.measured as f64);
            assert!((measured / planned - 1.0).abs() < 0.05, "{sharding:?} {row:?}");
        }
        assert!(reports.iter().all(|it| it.measured() <= it.planned()), "{sharding:?} {reports:?}");
        assert!(reports[0].to_string().contains("optimizer"));
    }
}

/// A backward has the gradients of the unit that it computes and of the one that is summed, from the first step on.
#[test]
fn whole_parameters_and_gradients_are_as_planned() {
    let kept = Sharding::zero3().reshard_after_forward(Reshard::No);
    for sharding in [Sharding::zero2(), Sharding::zero3(), kept] {
        for width in [6, 7] {
            let reports = on_ranks(2, |builder, _| {
                let accelerator = builder.sharding(sharding.clone()).build().unwrap();
                let new = |path: &ParamPath<'_>| Deep::new(path, 4, width);
                let model = Model::builder().kind(Kind::Double).build(new).unwrap();
                let model = accelerator.prepare(model).unwrap();
                let input = Tensor::ones([2, width], (Kind::Double, Device::Cpu));
                let loss = model.forward(&input).unwrap().sum(Kind::Double);
                accelerator.backward(&loss).unwrap();
                accelerator.parallel().memory_report().unwrap().unwrap()
            });
            for row in reports.iter().flat_map(|report| &report.rows[3..]) {
                assert_eq!(row.measured, row.planned, "{sharding:?} {width} {row:?}");
            }
        }
    }
}
