//! Loss scaling: PyTorch's numbers, skipped steps, agreement between ranks.

use brigade_nn::Model;
use brigade_optim::{Optimizer, Rule, Scheduler, Sgd, Step};
use brigade_schedule::Schedule;
use brigade_test_device::{numeric_device, on_device};
use brigade_testkit::{World, dist_test};
use brigade_torch::Result;
use brigade_train::{
    AcceleratorBuilder, GradScalerOptions, GradScalerState, JoinInputs, Precision, TrainError,
};
use serde_json::Value;
use tch::{Kind, Tensor};

use crate::device;
use crate::net::{Weight, weights};

fn golden() -> Value {
    serde_json::from_str(include_str!("../golden/numerics.json")).unwrap()
}

fn number(value: &Value) -> f64 {
    value.as_f64().unwrap_or(f64::INFINITY)
}

fn fp16() -> AcceleratorBuilder {
    device::builder().mixed_precision(Precision::Fp16)
}

fn start() -> Model<Weight> {
    let model = Model::builder().device(numeric_device()).build(Weight::new).unwrap();
    let values = Tensor::from_slice(&[0.5f32, -1.0, 2.0]);
    tch::no_grad(|| model.parameters()[0].tensor.shallow_clone().copy_(&values));
    model
}

#[test]
fn steps_and_scales_are_pytorchs() {
    let golden = golden();
    let options = GradScalerOptions {
        init_scale: 16.0,
        growth_factor: 4.0,
        backoff_factor: 0.25,
        growth_interval: 3,
    };
    let accelerator = fp16().grad_scaler(options).build().unwrap();
    let model = start();
    let optimizer = Sgd::new(0.125).momentum(0.5).build(&model).unwrap();
    let scheduler = Scheduler::new(&optimizer, Schedule::constant(0.125).unwrap());
    let (model, mut optimizer, mut scheduler) =
        accelerator.prepare((model, optimizer, scheduler)).unwrap();
    let input = on_device(&Tensor::from_slice(&[1.0f32, 2.0, -1.0]));
    let factors = golden["factors"].as_array().unwrap();
    let mut moved = 0;
    for (step, (factor, expected)) in
        factors.iter().zip(golden["scaling"].as_array().unwrap()).enumerate()
    {
        let before = weights(model.inner());
        optimizer.zero_grad().unwrap();
        let loss = (model.forward(&input).unwrap() * number(factor)).sum(Kind::Float);
        accelerator.backward(&loss).unwrap();
        if step % 2 == 1 {
            accelerator.clip_grad_norm(&model, 1.0).unwrap();
        }
        optimizer.step().unwrap();
        scheduler.step().unwrap();
        let skipped = accelerator.optimizer_step_was_skipped();
        moved += u64::from(!skipped);
        assert_eq!(scheduler.position().unwrap(), moved, "step {step}");
        assert_eq!(skipped, weights(model.inner()) == before, "step {step}");
        let expected_weight: Vec<f64> = serde_json::from_value(expected["weight"].clone()).unwrap();
        for (found, expected) in weights(model.inner()).iter().zip(&expected_weight) {
            assert!((found - expected).abs() < 1e-6, "step {step}: {found}, PyTorch {expected}");
        }
        let state = accelerator.grad_scaler().unwrap().state();
        assert_eq!(state.scale, expected["scale"].as_f64().unwrap(), "step {step}");
        let tracker = expected["tracker"].as_u64().unwrap();
        assert_eq!(u64::from(state.growth_tracker), tracker, "step {step}");
    }
    assert!(moved < factors.len() as u64, "a step was to be left out");
    assert_eq!(optimizer.steps().unwrap(), moved);
}

#[derive(Debug)]
struct Descent;

impl Rule for Descent {
    fn name(&self) -> &'static str {
        "Descent"
    }

    fn slots(&self) -> &'static [&'static str] {
        &[]
    }

    fn step(&self, step: &mut Step<'_>) -> Result<()> {
        let lr = step.lr();
        step.each(|parameter, gradient, _| {
            let _ = parameter.shallow_clone().f_sub_(&gradient.f_mul_scalar(lr)?)?;
            Ok(())
        })
    }
}

/// A device that keeps the scale is asked before the step.
#[test]
fn a_rule_without_numbers_of_the_device_is_not_stepped_after_an_overflow() {
    let accelerator = fp16().build().unwrap();
    let model = start();
    let optimizer = Optimizer::with_rule(Descent, 0.5).build(&model).unwrap();
    let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    let input = on_device(&Tensor::from_slice(&[1f32, 2.0, -1.0]));
    for (factor, expected) in
        [(1.0, [0.0, -2.0, 2.5]), (1e36, [0.0, -2.0, 2.5]), (2.0, [-1.0, -4.0, 3.5])]
    {
        optimizer.zero_grad().unwrap();
        let loss = (model.forward(&input).unwrap() * factor).sum(Kind::Float);
        accelerator.backward(&loss).unwrap();
        optimizer.step().unwrap();
        assert_eq!(accelerator.optimizer_step_was_skipped(), factor > 2.0);
        assert_eq!(weights(model.inner()), expected);
    }
    assert_eq!(optimizer.steps().unwrap(), 2);
}

#[test]
fn only_fp16_has_a_scaler_and_its_state_goes_both_ways() {
    for precision in [Precision::No, Precision::Bf16] {
        let accelerator = device::builder().mixed_precision(precision);
        assert!(accelerator.build().unwrap().grad_scaler().is_none());
    }
    let accelerator = fp16().build().unwrap();
    let scaler = accelerator.grad_scaler().unwrap();
    assert_eq!(scaler.state(), GradScalerState { scale: 65536.0, growth_tracker: 0 });
    let state = GradScalerState { scale: 1024.0, growth_tracker: 7 };
    let text = serde_json::to_string(&state).unwrap();
    scaler.load_state(serde_json::from_str(&text).unwrap()).unwrap();
    assert_eq!((scaler.state(), scaler.scale()), (state, 1024.0));
    let nothing = GradScalerState { scale: f64::NAN, growth_tracker: 0 };
    assert!(scaler.load_state(nothing).is_err());
    assert_eq!(scaler.state(), state);
}

#[test]
fn gradients_are_unscaled_once() {
    let accelerator = fp16().build().unwrap();
    let model = start();
    let optimizer = Sgd::new(1.0).build(&model).unwrap();
    let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    let loss =
        model.forward(&on_device(&Tensor::from_slice(&[1f32, 2.0, 3.0]))).unwrap().sum(Kind::Float);
    accelerator.backward(&loss).unwrap();
    assert!(!accelerator.unscale_gradients(&model).unwrap());
    assert!(!accelerator.unscale_gradients(&model).unwrap());
    let norm = accelerator.clip_grad_norm(&model, 100.0).unwrap().unwrap();
    assert!((norm.double_value(&[]) - 14f64.sqrt()).abs() < 1e-5);
    accelerator.clip_grad_value(&model, 2.0).unwrap();
    optimizer.step().unwrap();
    assert_eq!(weights(model.inner()), [-0.5, -3.0, 0.0]);

    // Clipped, discarded, and continued: no step is pending.
    optimizer.zero_grad().unwrap();
    let loss = || {
        model.forward(&on_device(&Tensor::from_slice(&[1f32, 2.0, 3.0]))).unwrap().sum(Kind::Float)
    };
    accelerator.backward(&loss()).unwrap();
    accelerator.clip_grad_norm(&model, 1.0).unwrap();
    optimizer.zero_grad().unwrap();
    accelerator.backward(&loss()).unwrap();
    accelerator.clip_grad_norm(&model, 1.0).unwrap();
    let error = accelerator.backward(&loss()).unwrap_err().to_string();
    assert!(error.contains("before the optimizer's step"), "{error}");
}

#[test]
fn clipping_by_value_alone_unscales_once() {
    let accelerator = fp16().build().unwrap();
    let model = start();
    let optimizer = Sgd::new(1.0).build(&model).unwrap();
    let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    let loss = model
        .forward(&on_device(&Tensor::from_slice(&[1f32, 2.0, -3.0])))
        .unwrap()
        .sum(Kind::Float);
    accelerator.backward(&loss).unwrap();
    for limit in [2.5, 1.5] {
        accelerator.clip_grad_value(&model, limit).unwrap();
    }
    optimizer.step().unwrap();
    assert_eq!(weights(model.inner()), [0.5 - 1.0, -1.0 - 1.5, 2.0 + 1.5]);
}

#[test]
fn two_optimizers_step_under_one_scale() {
    let options = GradScalerOptions { growth_interval: 1, ..GradScalerOptions::default() };
    let accelerator = fp16().grad_scaler(options).build().unwrap();
    let (first, second) = (start(), start());
    let (one, two) = (Sgd::new(1.0).build(&first).unwrap(), Sgd::new(1.0).build(&second).unwrap());
    let (first, second, mut one, mut two) = accelerator.prepare((first, second, one, two)).unwrap();
    let input = on_device(&Tensor::from_slice(&[1f32, 1.0, 1.0]));
    let wild = on_device(&Tensor::from_slice(&[1f32, f32::INFINITY, 1.0]));
    for (second_input, second_moves) in [(&input, true), (&wild, false), (&input, true)] {
        let before = (weights(first.inner()), weights(second.inner()));
        one.zero_grad().unwrap();
        two.zero_grad().unwrap();
        let loss = first.forward(&input).unwrap().sum(Kind::Float)
            + second.forward(second_input).unwrap().sum(Kind::Float);
        accelerator.backward(&loss).unwrap();
        let scale = accelerator.grad_scaler().unwrap().scale();
        one.step().unwrap();
        two.step().unwrap();
        // The gradient is 1, not twice or half of it.
        let moved: Vec<f64> = before.0.iter().map(|weight| weight - 1.0).collect();
        assert_eq!(weights(first.inner()), moved);
        assert_eq!(weights(second.inner()) != before.1, second_moves);
        assert_eq!(accelerator.optimizer_step_was_skipped(), !second_moves);
        let factor = if second_moves { 2.0 } else { 0.5 };
        assert_eq!(accelerator.grad_scaler().unwrap().scale(), scale * factor);
    }
}

#[test]
fn a_non_finite_loss_is_an_error() {
    let accelerator = fp16().build().unwrap();
    let model = start();
    let optimizer = Sgd::new(1.0).build(&model).unwrap();
    let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    let before = weights(model.inner());
    let input = on_device(&Tensor::from_slice(&[1f32, f32::NAN, 1.0]));
    for step in 0..100 {
        optimizer.zero_grad().unwrap();
        let loss = model.forward(&input).unwrap().sum(Kind::Float);
        match accelerator.backward(&loss) {
            Ok(()) => optimizer.step().unwrap(),
            Err(error) => {
                assert!(
                    matches!(error.downcast_ref(), Some(TrainError::NotFinite { .. })),
                    "{error}"
                );
                assert!(step > 16, "a scale that is too high is not an error: {step}");
                assert_eq!(weights(model.inner()), before);
                return;
            }
        }
    }
    panic!("a hundred steps were left out without a word");
}

dist_test!(world = 2, dist_all_ranks_leave_a_step_out, |world: World| -> Result<()> {
    let accelerator = fp16().build()?;
    let rank = world.rank.as_usize();
    // Prepared: the reducer spreads the infinity. Not prepared: only the flag does.
    for prepared in [true, false] {
        let model = start();
        let optimizer = accelerator.prepare(Sgd::new(1.0).build(&model)?)?;
        let mut optimizer = optimizer;
        let scale = accelerator.grad_scaler().unwrap().scale();
        let input = match rank {
            1 => on_device(&Tensor::from_slice(&[1f32, f32::INFINITY, 1.0])),
            _ => on_device(&Tensor::from_slice(&[1f32, 1.0, 1.0])),
        };
        let before = weights(&model);
        let after = if prepared {
            let model = accelerator.prepare(model)?;
            accelerator.backward(&model.forward(&input)?.sum(Kind::Float))?;
            optimizer.step()?;
            weights(model.inner())
        } else {
            accelerator.backward(&model.forward(&input).unwrap().sum(Kind::Float))?;
            optimizer.step()?;
            weights(&model)
        };
        assert_eq!(after, before, "prepared: {prepared}");
        assert!(accelerator.optimizer_step_was_skipped());
        assert_eq!(accelerator.grad_scaler().unwrap().scale(), scale / 2.0);
    }
    Ok(())
});

dist_test!(
    world = 2,
    dist_the_schedule_counts_the_steps_that_were_made,
    |world: World| -> Result<()> {
        let accelerator = fp16().build()?;
        let model = start();
        let optimizer = Sgd::new(0.0).build(&model)?;
        let schedule = Schedule::linear(1.0, 0.0, 8)?;
        let scheduler = Scheduler::new(&optimizer, schedule.clone());
        let (model, mut optimizer, mut scheduler) =
            accelerator.prepare((model, optimizer, scheduler))?;
        let mut made = 0;
        // The rank that overflows, if one does.
        for wild in [None, Some(0), None, Some(1), Some(1), None, None] {
            let value = if wild == Some(world.rank.as_usize()) { f32::INFINITY } else { 1.0 };
            let before = weights(model.inner());
            let input = on_device(&Tensor::from_slice(&[1f32, value, 1.0]));
            optimizer.zero_grad()?;
            accelerator.backward(&model.forward(&input)?.sum(Kind::Float))?;
            optimizer.step()?;
            scheduler.step()?;
            made += u64::from(wild.is_none());
            assert_eq!(weights(model.inner()) == before, wild.is_some());
            assert_eq!(accelerator.optimizer_step_was_skipped(), wild.is_some());
            assert_eq!((scheduler.position()?, optimizer.steps()?), (made, made));
            assert_eq!(optimizer.lr().unwrap(), schedule.lr(made));
        }
        Ok(())
    }
);

dist_test!(world = 2, dist_ranks_with_unequal_numbers_of_batches, |world: World| -> Result<()> {
    let options = GradScalerOptions { growth_interval: 1, ..GradScalerOptions::default() };
    let accelerator = fp16().grad_scaler(options).build()?;
    let model = start();
    let optimizer = Sgd::new(0.5).build(&model)?;
    let (model, mut optimizer) = accelerator.prepare((model, optimizer))?;
    let input = on_device(&Tensor::from_slice(&[1f32, 1.0, 1.0]));
    let batches = 2 + 2 * world.rank.as_usize();
    accelerator.join_uneven_inputs(&model, JoinInputs::default(), || {
        for _ in 0..batches {
            optimizer.zero_grad()?;
            accelerator.backward(&model.forward(&input)?.sum(Kind::Float))?;
            optimizer.step()?;
        }
        Ok(())
    })?;
    // Two steps on both ranks with a gradient of 1, then two on rank 1 with half of it.
    assert_eq!(weights(model.inner()), [-1.0, -2.5, 0.5]);
    let scale = accelerator.grad_scaler().unwrap().scale();
    assert_eq!(scale, 65536.0 * 4.0, "the scale of the rank that stepped least");
    Ok(())
});
