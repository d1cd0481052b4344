//! What training does on a GPU and not on a CPU: one made of host memory, or a real one where
//! `BRIGADE_TEST_DEVICE=cuda` says so.

use std::time::Duration;

use brigade_data::{DataLoader, TensorDataset};
use brigade_metrics::{Accuracy, F1, Folded, Mean, MetricState, TopK};
use brigade_models::{Gpt2LmHead, Gpt2Options, Labelled};
use brigade_nn::{BatchNorm2d, Conv2d, Conv2dOptions, Dropout, Linear, Model, Module, ParamPath};
use brigade_optim::{Adam, AdamW, Lamb, Optimizer, Rule, Scheduler, Sgd, Step};
use brigade_rank_env::{StoreEndpoint, World, WorldSize};
use brigade_schedule::Schedule;
use brigade_test_device::{fake, gpu, kernels, without_waiting};
use brigade_testkit::dist_test;
use brigade_torch::{Backend, DeviceExt, DeviceMemory, Error, GpuMath, Result, Store};
use brigade_train::{
    Accelerator, AcceleratorBuilder, CapturedStep, GradScalerOptions, Precision, PreparedModel,
    PreparedOptimizer, TrainError,
};
use tch::{Device, Kind, Tensor};

/// Without TF32, whose products differ from a CPU's in the fourth digit.
pub(crate) fn builder(device: Device) -> AcceleratorBuilder {
    Accelerator::builder().device(device).tf32(false).quiet(true)
}

struct Net {
    first: Linear,
    dropout: Dropout,
    last: Linear,
}

impl Net {
    fn new(path: &ParamPath<'_>) -> Self {
        Self {
            first: Linear::new(path / "first", 6, 8),
            dropout: Dropout::new(path / "dropout", 0.25),
            last: Linear::new(path / "last", 8, 3),
        }
    }
}

impl Module<&Tensor> for Net {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.last.forward(&self.dropout.forward(&self.first.forward(input)?.relu())?)
    }
}

/// Rows of sines, and their labels.
fn data(rows: i64) -> (Tensor, Tensor) {
    let inputs = (Tensor::arange(rows * 6, (Kind::Float, Device::Cpu)) * 0.7).sin();
    let labels = Tensor::arange(rows, (Kind::Int64, Device::Cpu)).remainder(3);
    (inputs.reshape([rows, 6]), labels)
}

fn weights<M>(model: &PreparedModel<M>) -> Vec<f32> {
    let flat = |t: &Tensor| Vec::<f32>::try_from(t.detach().to_device(Device::Cpu).flatten(0, -1));
    model.inner().parameters().iter().flat_map(|it| flat(&it.tensor).unwrap()).collect()
}

fn number(tensor: &Tensor) -> f64 {
    tensor.double_value(&[])
}

#[test]
fn batches_come_through_pinned_memory_and_no_step_waits() {
    let (device, _alone) = gpu();
    let accelerator = builder(device).build().unwrap();
    tch::manual_seed(1);
    let model = Model::new(Net::new).unwrap();
    let optimizer = Adam::default().lr(1e-2).build(&model).unwrap();
    let scheduler = Scheduler::new(&optimizer, Schedule::linear(1e-2, 0.0, 100).unwrap());
    let (inputs, labels) = data(48);
    let set = TensorDataset::new((inputs.shallow_clone(), labels.shallow_clone())).unwrap();
    let loader = DataLoader::new(set).batch_size(8).threads(2);
    let (mut model, mut optimizer, mut scheduler, loader) =
        accelerator.prepare((model, optimizer, scheduler, loader)).unwrap();
    model.train();
    let mut metrics = (
        MetricState::new(Accuracy),
        MetricState::new(TopK(2)),
        MetricState::new(F1::new().per_class()),
        MetricState::new(Mean),
    );
    let mut losses = Vec::new();
    for epoch in 0..3 {
        let mut batches = loader.iter();
        assert_eq!(batches.size_hint().1, Some(6));
        let mut seen = 0;
        loop {
            let last = without_waiting(|| {
                let Some(batch) = batches.next() else { return true };
                let batch = batch.unwrap();
                let (inputs, labels) = &*batch;
                assert_eq!((inputs.device(), labels.device()), (device, device));
                let scores = model.forward(inputs).unwrap();
                let loss = scores.cross_entropy_for_logits(labels);
                optimizer.zero_grad().unwrap();
                accelerator.backward(&loss).unwrap();
                accelerator.clip_grad_norm(&model, 1.0).unwrap();
                optimizer.step().unwrap();
                scheduler.step().unwrap();
                metrics.0.update(&scores, labels).unwrap();
                metrics.1.update(&scores, labels).unwrap();
                metrics.2.update(&scores, labels).unwrap();
                metrics
                    .3
                    .update(&loss.detach().reshape([1]), &loss.ones_like().reshape([1]))
                    .unwrap();
                losses.push(loss.detach());
                false
            });
            if last {
                break;
            }
            seen += 1;
        }
        assert_eq!(seen, 6, "epoch {epoch}");
    }
    let first: f64 = losses[..6].iter().map(number).sum();
    let last: f64 = losses[12..].iter().map(number).sum();
    assert!(last < 0.9 * first, "{first} to {last}");
    assert_eq!(optimizer.steps().unwrap(), 18);
    assert!((optimizer.lr().unwrap() - 1e-2 * (1.0 - 18.0 / 100.0)).abs() < 1e-9);
    let accuracy = metrics.0.compute(None).unwrap();
    assert!(metrics.1.compute(None).unwrap() >= accuracy);
    let Some(Folded::Sums(accuracy)) = metrics.0.folded(None).unwrap() else { panic!() };
    assert_eq!(accuracy[1], 144.0, "every sample counts once");
    assert!(
        (metrics.3.compute(None).unwrap() - losses.iter().map(number).sum::<f64>() / 18.0).abs()
            < 1e-6
    );
    let Some(Folded::Sums(counts)) = metrics.2.folded(None).unwrap() else { panic!() };
    let counted: f64 = counts[6..9].iter().sum();
    assert_eq!(counted, 144.0, "every target counts once");
    // In order, as on the CPU.
    let seen: Vec<Tensor> = loader.iter().map(|batch| batch.unwrap().into_data().1).collect();
    assert_eq!(Tensor::cat(&seen, 0).to_device(Device::Cpu), labels);
    if fake::is_installed() {
        assert_eq!(fake::contexts(), [1], "no rank opens a context on another's GPU");
    }
}

#[test]
fn an_accelerator_that_shares_changes_the_settings_of_gpus_that_it_names() {
    let (device, _alone) = gpu();
    let before = GpuMath::current().unwrap();
    let _first = Accelerator::builder().device(device).quiet(true).build().unwrap();
    let math = |tf32, benchmark, deterministic| GpuMath { tf32, benchmark, deterministic };
    assert_eq!(GpuMath::current().unwrap(), math(true, false, false));
    let first = builder(device).build().unwrap();
    let shared = |set: fn(AcceleratorBuilder) -> AcceleratorBuilder| {
        let _ = set(Accelerator::builder().sharing(&first).quiet(true)).build().unwrap();
        GpuMath::current().unwrap()
    };
    assert_eq!(shared(|it| it), math(false, false, false));
    assert_eq!(shared(|it| it.benchmark_kernels(true)), math(false, true, false));
    assert_eq!(shared(|it| it.tf32(true)), math(true, true, false));
    assert_eq!(shared(|it| it.deterministic(true)), math(true, true, true));
    assert_eq!(
        shared(|it| it.benchmark_kernels(false).deterministic(false)),
        math(true, false, false)
    );
    // An Accelerator on the CPU does not change the settings of GPUs.
    let _ = Accelerator::builder().cpu(true).tf32(false).quiet(true).build().unwrap();
    assert_eq!(GpuMath::current().unwrap(), math(true, false, false));
    before.apply();
}

#[test]
fn a_loop_that_ends_early_and_a_batch_that_fails() {
    let (device, _alone) = gpu();
    let accelerator = builder(device).build().unwrap();
    let numbers = Tensor::arange(40, (Kind::Int64, Device::Cpu));
    let loader = DataLoader::new(TensorDataset::new(numbers).unwrap()).batch_size(4);
    let loader = accelerator.prepare(loader).unwrap();
    let mut batches = loader.iter();
    assert_eq!(batches.next().unwrap().unwrap().int64_value(&[3]), 3);
    drop(batches);
    assert_eq!(loader.iter().count(), 10);

    let fails = brigade_data::dataset_from_fn(6, |index, _| {
        if index == 4 {
            Err(Error::custom("the fifth is damaged"))
        } else {
            Ok(Tensor::from(index as i64))
        }
    });
    let loader = accelerator.prepare(DataLoader::new(fails).batch_size(2)).unwrap();
    let outcomes: Vec<Result<_>> = loader.iter().collect();
    assert!(outcomes[0].is_ok() && outcomes[1].is_ok());
    let error = outcomes[2].as_ref().unwrap_err().to_string();
    assert!(error.contains("the fifth is damaged"), "{error}");
}

/// Trains some batches, as they are or captured, and gives losses and weights.
struct Run {
    precision: Precision,
    captured: bool,
    /// Moves the momentum, too.
    one_cycle: bool,
}

impl Run {
    fn losses(&self, device: Device, factors: &[f64]) -> (Vec<f64>, Vec<f32>, Option<f64>, f64) {
        let options =
            GradScalerOptions { init_scale: 1024.0, growth_interval: 4, ..Default::default() };
        let builder = builder(device).mixed_precision(self.precision).grad_scaler(options);
        let accelerator = builder.build().unwrap();
        tch::manual_seed(7);
        let model = Model::new(Net::new).unwrap();
        let optimizer = AdamW::default().lr(1e-2).build(&model).unwrap();
        let linear = Schedule::linear(1e-2, 0.0, 100).unwrap();
        let schedule = if self.one_cycle {
            linear.with_momentum(Schedule::linear(0.95, 0.5, 10).unwrap())
        } else {
            linear
        };
        let scheduler = Scheduler::new(&optimizer, schedule);
        let (mut model, mut optimizer, mut scheduler) =
            accelerator.prepare((model, optimizer, scheduler)).unwrap();
        model.train();
        let (inputs, labels) = data(16);
        let (inputs, labels) = (inputs.to_device(device), labels.to_device(device));
        let one = |(inputs, labels, factor): &(Tensor, Tensor, Tensor),
                   model: &PreparedModel<Net>,
                   optimizer: &mut PreparedOptimizer| {
            let loss = (model.forward(inputs)? * factor).cross_entropy_for_logits(labels);
            optimizer.zero_grad()?;
            accelerator.backward(&loss)?;
            accelerator.clip_grad_norm(model, 1.0)?;
            optimizer.step()?;
            Ok(loss)
        };
        let batches: Vec<(Tensor, Tensor, Tensor)> = factors
            .iter()
            .enumerate()
            .map(|(index, &factor)| {
                let factor = Tensor::full([1], factor, (Kind::Float, device));
                (&inputs + index as f64 * 0.01, labels.shallow_clone(), factor)
            })
            .collect();
        let mut losses = Vec::new();
        if self.captured {
            let mut step: CapturedStep<'_, _, Tensor> =
                accelerator.capture(|batch| one(batch, &model, &mut optimizer));
            assert_eq!(step.records(), Ok(()));
            for (index, batch) in batches.iter().enumerate() {
                // The recording itself waits for work in flight.
                let loss = if index > 3 {
                    without_waiting(|| step.run(batch).unwrap())
                } else {
                    step.run(batch).unwrap()
                };
                losses.push(loss);
                scheduler.step().unwrap();
            }
            assert_eq!(step.records(), Ok(()), "it was recorded to the end");
        } else {
            for batch in &batches {
                losses.push(one(batch, &model, &mut optimizer).unwrap().detach());
                scheduler.step().unwrap();
            }
        }
        let lr = scheduler.lr().unwrap();
        assert_eq!(optimizer.lr().unwrap(), lr);
        let scale = accelerator.grad_scaler().map(|scaler| scaler.scale());
        (losses.iter().map(number).collect(), weights(&model), scale, lr)
    }
}

#[test]
fn a_captured_step_has_the_bits_of_one_that_is_not() {
    let (device, _alone) = gpu();
    for precision in [Precision::No, Precision::Bf16] {
        let one_cycle = false;
        let plain = Run { precision, captured: false, one_cycle }.losses(device, &[1.0; 12]);
        let captured = Run { precision, captured: true, one_cycle }.losses(device, &[1.0; 12]);
        assert_eq!(plain, captured, "{precision}");
        let mut distinct = plain.0.clone();
        distinct.dedup();
        assert_eq!(distinct.len(), 12, "dropout, the batch and the rate change: {:?}", plain.0);
    }
}

#[test]
fn a_replay_in_bf16_casts_the_weights_alone_that_were_written_since() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let copies_of_replays = |precision: Precision| {
        let accelerator = builder(device).mixed_precision(precision).build().unwrap();
        tch::manual_seed(7);
        let model = Model::new(|p| Linear::new(p, 6, 3)).unwrap();
        let optimizer = AdamW::default().lr(1e-2).build(&model).unwrap();
        let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
        let (inputs, labels) = data(16);
        let batch = (inputs.to_device(device), labels.to_device(device));
        let mut step = accelerator.capture(|(inputs, labels): &(Tensor, Tensor)| {
            let loss = model.forward(inputs)?.cross_entropy_for_logits(labels);
            optimizer.zero_grad()?;
            accelerator.backward(&loss)?;
            optimizer.step()?;
            Ok(loss)
        });
        let mut copies = Vec::new();
        kernels::emulated(|| {
            for at in 0..9 {
                if at == 7 {
                    // As a checkpoint is loaded: the weight, and not the bias.
                    let weight = &model.inner().parameters()[0].tensor;
                    tch::no_grad(|| drop(weight.shallow_clone().g_mul_scalar_(0.5)));
                }
                let account = fake::account(|| drop(step.run(&batch).unwrap()));
                copies.push(account.0.get("aten::copy_").map_or(0, |it| it.calls));
            }
        });
        assert_eq!(step.records(), Ok(()));
        copies[5..].to_vec()
    };
    let plain = copies_of_replays(Precision::No);
    assert_eq!(plain, [plain[0]; 4]);
    let [weight, usual] = [plain[0] + 1, plain[0]];
    assert_eq!(copies_of_replays(Precision::Bf16), [usual, usual, weight, usual]);
}

#[test]
fn overflows_are_left_out_on_the_device_and_schedules_stay() {
    let (device, _alone) = gpu();
    // The gradients of steps 3, 7 and 8 overflow.
    let mut factors = [1.0; 14];
    for at in [3, 7, 8] {
        factors[at] = f64::INFINITY;
    }
    let run = |captured, one_cycle| {
        Run { precision: Precision::Fp16, captured, one_cycle }.losses(device, &factors)
    };
    let plain = run(false, false);
    assert_eq!(format!("{plain:?}"), format!("{:?}", run(true, false)));
    let cycled = run(false, true);
    assert_eq!(format!("{cycled:?}"), format!("{:?}", run(true, true)));
    assert!(cycled.1 != plain.1 && cycled.2 == plain.2);
    let (losses, weights, scale, lr) = plain;
    assert!(weights.iter().all(|it| it.is_finite()), "{weights:?}");
    assert!(losses.iter().enumerate().all(|(at, it)| it.is_finite() == (factors[at] == 1.0)));
    // 3 good, overflow (512), 3 good, overflow (256), overflow (128), 4 good (256), 1 good.
    assert_eq!(scale, Some(256.0));
    assert!((lr - 1e-2 * (1.0 - 11.0 / 100.0)).abs() < 1e-12, "{lr}");
}

/// Gradient descent as a program's own rule, with the learning rate of the host.
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
            let _ = parameter.shallow_clone().f_sub_(&(gradient * lr))?;
            Ok(())
        })
    }
}

#[test]
fn optimizers_with_numbers_of_the_host_step_between_recordings() {
    let (device, _alone) = gpu();
    // Double precision, whose rates are passed by value, and a rule that takes nothing from the device. Two
    // optimizers, the first of which steps before the loss of the second is made.
    let train = |kind: Kind, own_rule: bool, captured: bool| {
        let accelerator = builder(device).build().unwrap();
        tch::manual_seed(3);
        let mut model = Model::new(|p| Linear::new(p, 6, 3)).unwrap();
        let mut head = Model::new(|p| Linear::new(p, 3, 2)).unwrap();
        model.to_kind(kind).unwrap();
        head.to_kind(kind).unwrap();
        let first = if own_rule {
            Optimizer::with_rule(Descent, 0.1).build(&model).unwrap()
        } else {
            AdamW::default().lr(0.1).build(&model).unwrap()
        };
        let second = AdamW::default().lr(0.1).build(&head).unwrap();
        let schedule = Schedule::linear(0.1, 0.01, 14).unwrap();
        let schedulers = [&first, &second].map(|it| Scheduler::new(it, schedule.clone()));
        let [one, other] = schedulers;
        let (model, head, mut first, mut second) =
            accelerator.prepare((model, head, first, second)).unwrap();
        let (mut one, mut other) = accelerator.prepare((one, other)).unwrap();
        let (inputs, _) = data(8);
        let inputs = inputs.to_device(device).to_kind(kind);
        let mut body = |inputs: &Tensor| -> Result<Tensor> {
            let loss = model.forward(inputs)?.square().mean(kind);
            first.zero_grad()?;
            accelerator.backward(&loss)?;
            first.step()?;
            let features = model.forward(inputs)?.detach();
            let loss = (head.forward(&features)? - 1.0).square().mean(kind);
            second.zero_grad()?;
            accelerator.backward(&loss)?;
            second.step()?;
            Ok(loss * 2.0)
        };
        // Of two shapes, each with a recording and gradients of its own.
        let batches: Vec<Tensor> = (0..14)
            .map(|at| inputs.narrow(0, 0, 8 - at % 2 * 3) * (1.0 + at as f64 * 0.1))
            .collect();
        let mut losses = Vec::new();
        let mut schedule = || {
            one.step().unwrap();
            other.step().unwrap();
        };
        if captured {
            let mut step = accelerator.capture(body);
            for batch in &batches {
                losses.push(number(&step.run(batch).unwrap()));
                schedule();
            }
            assert_eq!(step.records(), Ok(()));
        } else {
            for batch in &batches {
                losses.push(number(&body(batch).unwrap()));
                schedule();
            }
        }
        losses
    };
    for (kind, own_rule) in [(Kind::Double, false), (Kind::Float, true), (Kind::Double, true)] {
        let plain = train(kind, own_rule, false);
        assert_eq!(plain, train(kind, own_rule, true), "{kind:?}, a rule of its own: {own_rule}");
        assert!(plain.iter().all(|it| it.is_finite()) && plain[13] != plain[11], "{plain:?}");
    }
}

#[test]
fn language_models_are_recorded_and_their_labels_counted_on_the_device() {
    let (device, _alone) = gpu();
    let options = Gpt2Options {
        vocab_size: 20,
        n_positions: 8,
        n_embd: 16,
        n_layer: 2,
        n_head: 2,
        ..Gpt2Options::default()
    };
    let ids = Tensor::arange(24, (Kind::Int64, Device::Cpu)).remainder(20).view([3, 8]);
    // Other batches have other numbers of labels.
    let batches: Vec<(Tensor, Tensor)> = (0..8)
        .map(|at| {
            let ids = (&ids + at).remainder(20);
            let labels = ids.copy();
            let _ = labels.narrow(1, 0, 1 + at % 6).fill_(-100);
            (ids.to_device(device), labels.to_device(device))
        })
        .collect();
    let train = |weighted: bool, captured: bool| {
        let accelerator = builder(device).build().unwrap();
        tch::manual_seed(3);
        let model = Model::new(|path| Gpt2LmHead::new(path, &options)).unwrap();
        let optimizer = AdamW::default().lr(1e-2).build(&model).unwrap();
        let (mut model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
        model.train();
        let mut body = |(ids, labels): &(Tensor, Tensor)| -> Result<Tensor> {
            let loss = model.forward(Labelled::new(ids, labels))?;
            optimizer.zero_grad()?;
            if weighted {
                accelerator.backward_weighted(&model, &loss.sum, &loss.count)?;
            } else {
                accelerator.backward(&loss.mean()?)?;
            }
            optimizer.step()?;
            loss.mean()
        };
        let losses: Vec<Tensor> = if captured {
            let mut step = accelerator.capture(body);
            let losses = batches.iter().map(|batch| step.run(batch).unwrap()).collect();
            assert_eq!(step.records(), Ok(()));
            losses
        } else {
            let mut run = |batch| body(batch).unwrap().detach();
            let first = run(&batches[0]);
            let rest = without_waiting(|| batches[1..].iter().map(run).collect::<Vec<_>>());
            std::iter::once(first).chain(rest).collect()
        };
        losses.iter().map(number).collect::<Vec<f64>>()
    };
    let plain = train(false, false);
    assert!(plain.iter().all(|it| it.is_finite()) && plain[7] < plain[0], "{plain:?}");
    assert_eq!(train(false, true), plain);
    let weighted = train(true, false);
    assert_eq!(train(true, true), weighted);
    let close = plain.iter().zip(&weighted).all(|(one, other)| (one - other).abs() < 1e-3);
    assert!(close, "{plain:?} {weighted:?}");
}

#[test]
fn a_schedule_steps_once_for_each_window_while_overflows_are_on_their_way() {
    let (device, _alone) = gpu();
    let scaler = GradScalerOptions { init_scale: 8.0, ..GradScalerOptions::default() };
    let builder = builder(device).mixed_precision(Precision::Fp16).grad_scaler(scaler);
    let accelerator = builder.gradient_accumulation_steps(2).build().unwrap();
    let model = Model::new(|p| Linear::new(p, 6, 3)).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let scheduler = Scheduler::new(&optimizer, Schedule::linear(0.1, 0.0, 100).unwrap());
    let loader = DataLoader::new(TensorDataset::new(data(32)).unwrap()).batch_size(4);
    let (model, mut optimizer, mut scheduler, loader) =
        accelerator.prepare((model, optimizer, scheduler, loader)).unwrap();
    for batch in &loader {
        let batch = batch.unwrap();
        let (inputs, labels) = &*batch;
        let step = accelerator.accumulate(&model, &batch, || {
            accelerator.backward(&model.forward(inputs)?.cross_entropy_for_logits(labels))?;
            optimizer.step()?;
            scheduler.step()?;
            optimizer.zero_grad()
        });
        step.unwrap();
    }
    assert_eq!((optimizer.steps().unwrap(), scheduler.position().unwrap()), (4, 4));
}

#[test]
fn other_shapes_and_momenta_are_recorded_and_what_waits_runs_as_it_is() {
    let (device, _alone) = gpu();
    let accelerator = builder(device).build().unwrap();
    let model = Model::new(|p| Linear::new(p, 6, 3)).unwrap();
    let optimizer = Sgd::new(0.1).momentum(0.9).build(&model).unwrap();
    let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    let calls = std::cell::Cell::new(0);
    let looks = std::cell::Cell::new(false);
    let cell = std::cell::RefCell::new(&mut optimizer);
    let mut step = accelerator.capture(|(inputs, labels): &(Tensor, Tensor)| {
        calls.set(calls.get() + 1);
        let loss = model.forward(inputs)?.cross_entropy_for_logits(labels);
        let mut optimizer = cell.borrow_mut();
        optimizer.zero_grad()?;
        accelerator.backward(&loss)?;
        if looks.get() {
            loss.f_double_value(&[])?;
        }
        optimizer.step()?;
        Ok((loss.shallow_clone(), vec![loss * 2]))
    });
    let batch = |rows: i64| {
        let (inputs, labels) = data(rows);
        (inputs.to_device(device), labels.to_device(device))
    };
    let mut last = f64::INFINITY;
    for _ in 0..8 {
        let (loss, twice) = step.run(&batch(8)).unwrap();
        assert!(number(&loss) < last && (number(&twice[0]) - 2.0 * number(&loss)).abs() < 1e-6);
        last = number(&loss);
    }
    assert_eq!(calls.get(), 4, "three as they are, one recorded");
    for _ in 0..4 {
        let _ = step.run(&batch(5)).unwrap();
    }
    assert_eq!(calls.get(), 6, "one as it is, one recorded");
    cell.borrow().settled().unwrap().set_group_momentum(0, 0.5).unwrap();
    let _ = step.run(&batch(8)).unwrap();
    let _ = step.run(&batch(8)).unwrap();
    assert_eq!(calls.get(), 7, "recorded again with the other momentum");
    for momentum in [0.25, 0.0, 0.75] {
        cell.borrow().settled().unwrap().set_group_momentum(0, momentum).unwrap();
        let _ = step.run(&batch(8)).unwrap();
    }
    assert_eq!(calls.get(), 7, "the optimizer steps between two recordings");
    looks.set(true);
    step.forget();
    let before = cell.borrow().steps().unwrap();
    for _ in 0..3 {
        let _ = step.run(&batch(8)).unwrap();
    }
    assert!(step.records().is_err());
    assert_eq!(
        cell.borrow().steps().unwrap(),
        before + 3,
        "a recording that failed has not stepped"
    );
    assert_eq!(cell.borrow().settled().unwrap().launched_steps(), before + 3);
}

#[test]
fn a_recorded_step_of_several_ranks_has_their_time_limit() {
    let (device, _alone) = gpu();
    let world = World::on_one_host(0, WorldSize::new(2).unwrap(), StoreEndpoint::alone()).unwrap();
    let builder = builder(device).world(world).store(Store::hash().unwrap());
    let accelerator = builder.backend(Backend::Fake).build().unwrap();
    let model = Model::new(|p| Linear::new(p, 6, 3)).unwrap();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    let mut step = accelerator.capture(|(inputs, labels): &(Tensor, Tensor)| {
        let loss = model.forward(inputs)?.cross_entropy_for_logits(labels);
        optimizer.zero_grad()?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        Ok(loss)
    });
    let (inputs, labels) = data(8);
    let batch = (inputs.to_device(device), labels.to_device(device));
    let mut last = f64::INFINITY;
    for _ in 0..8 {
        let loss = number(&step.run(&batch).unwrap());
        assert!(loss < last, "{loss} after {last}");
        last = loss;
    }
    step.records().unwrap();
    // A replay in which the other rank does not come.
    let group = accelerator.processes().group().unwrap();
    group.within(Duration::from_millis(100)).watch("replay", || Ok(false)).unwrap();
    let error = loop {
        match step.run(&batch) {
            Ok(_) => std::thread::sleep(Duration::from_millis(10)),
            Err(error) => break error.to_string(),
        }
    };
    assert!(error.contains("timed out") && error.contains("rank 1 had not arrived"), "{error}");
    let error = step.run(&batch).unwrap_err().to_string();
    assert!(error.contains("aborted"), "{error}");
}

#[test]
fn after_a_recording_that_failed_random_numbers_and_memory_are_as_before() {
    let (device, _alone) = gpu();
    let accelerator = builder(device).build().unwrap();
    let mut model = Model::new(Net::new).unwrap();
    model.train();
    let optimizer = Sgd::new(0.1).build(&model).unwrap();
    let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    let mut step = accelerator.capture(|(inputs, labels): &(Tensor, Tensor)| {
        let loss = model.forward(inputs)?.cross_entropy_for_logits(labels);
        optimizer.zero_grad()?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        assert!(loss.f_double_value(&[])?.is_finite());
        Ok(loss)
    });
    let loader = DataLoader::new(TensorDataset::new(data(1 << 16)).unwrap());
    let loader = loader.batch_size(512).shuffle(true).threads(2);
    let loader = accelerator.prepare(loader).unwrap();
    let mut reserved = Vec::new();
    for _epoch in 0..6 {
        for batch in &loader {
            // With dropout, whose generator takes part in a recording.
            let _ = step.run(&batch.unwrap()).unwrap();
        }
        device.synchronize().unwrap();
        reserved.push(DeviceMemory::of(device).unwrap().unwrap().reserved);
    }
    assert!(step.records().is_err());
    // An epoch's batches have 2 MB: none may stay allocated.
    assert!(reserved[5] <= reserved[1] + (4 << 20), "{reserved:?}");
}

#[test]
fn a_recording_that_is_dropped_leaves_the_others_what_they_use() {
    let (device, _alone) = gpu();
    let accelerator = builder(device).build().unwrap();
    // Large enough for products that are split, whose parts lie in the library's workspace.
    let model = Model::new(|p| Linear::new(p, 4096, 64)).unwrap();
    let model = accelerator.prepare(model).unwrap();
    let inputs = Tensor::randn([32, 4096], (Kind::Float, device));
    let expected = model.forward(&inputs).unwrap();
    let capture = || accelerator.capture(|inputs: &Tensor| model.forward(inputs));
    let (mut kept, mut dropped) = (capture(), capture());
    for _ in 0..5 {
        let _ = (kept.run(&inputs).unwrap(), dropped.run(&inputs).unwrap());
    }
    kept.records().unwrap();
    dropped.records().unwrap();
    drop(dropped);
    // Freed memory is overwritten.
    let filled: Vec<Tensor> =
        (0..64).map(|_| Tensor::full([1 << 18], 7, (Kind::Float, device))).collect();
    let found = kept.run(&inputs).unwrap();
    assert!(found.allclose(&expected, 1e-5, 1e-5, false));
    assert!(filled.iter().all(|it| number(&it.min()) == 7.0 && number(&it.max()) == 7.0));
}

#[test]
fn a_non_finite_loss_is_an_error_of_the_next_step_captured_or_not() {
    let (device, _alone) = gpu();
    for captured in [false, true] {
        let accelerator = builder(device).build().unwrap();
        let model = Model::new(|p| Linear::new(p, 6, 3)).unwrap();
        let optimizer = Sgd::new(0.1).build(&model).unwrap();
        let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
        let mut one = |inputs: &Tensor| -> Result<Tensor> {
            let loss = model.forward(inputs)?.square().mean(Kind::Float);
            optimizer.zero_grad()?;
            accelerator.backward(&loss)?;
            optimizer.step()?;
            Ok(loss)
        };
        let (inputs, _) = data(8);
        let inputs = inputs.to_device(device);
        let run = |one: &mut dyn FnMut(&Tensor) -> Result<Tensor>| {
            for _ in 0..6 {
                let _ = one(&inputs).unwrap();
            }
            let _ = one(&(&inputs * f64::NAN)).unwrap();
            one(&inputs).unwrap_err()
        };
        let error = if captured {
            let mut step = accelerator.capture(one);
            run(&mut |inputs| step.run(inputs))
        } else {
            run(&mut one)
        };
        let Some(TrainError::LossNotFinite { rank, step, weights_corrupted }) =
            error.downcast_ref()
        else {
            panic!("{error}")
        };
        assert_eq!(
            (*rank, *step, *weights_corrupted),
            (Some(0), Some(7), true),
            "captured: {captured}"
        );
    }
}

#[test]
fn a_resumed_run_has_the_bits_of_one_that_was_not_stopped() {
    let (device, _alone) = gpu();
    let folder = tempfile::tempdir().unwrap();
    let train = |from: Option<usize>, to: usize, seed: i64| {
        let accelerator = builder(device).deterministic(true).build().unwrap();
        tch::manual_seed(seed);
        let model = Model::new(Net::new).unwrap();
        let optimizer = Lamb::default().build(&model).unwrap();
        let (mut model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
        model.train();
        let path = folder.path().join("state");
        if from.is_some() {
            accelerator.load_state(&path).unwrap();
        }
        let (inputs, labels) = data(16);
        let (inputs, labels) = (inputs.to_device(device), labels.to_device(device));
        for step in from.unwrap_or(0)..to {
            let loss = model.forward(&inputs).unwrap().cross_entropy_for_logits(&labels);
            optimizer.zero_grad().unwrap();
            accelerator.backward(&loss).unwrap();
            optimizer.step().unwrap();
            if from.is_none() && step == 3 {
                accelerator.save_state(&path).unwrap();
            }
        }
        (weights(&model), optimizer.steps().unwrap())
    };
    let whole = train(None, 8, 5);
    assert_eq!(train(Some(4), 8, 99), whole);
}

#[test]
fn memory_that_does_not_suffice_halves_the_batch() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let accelerator = builder(device).build().unwrap();
    fake::set_capacity(1, 8 << 20).unwrap();
    let mut tried = Vec::new();
    let mut texts = Vec::new();
    let size = accelerator
        .find_executable_batch_size(1 << 20, |size| -> Result<usize> {
            tried.push(size);
            let made = Tensor::f_zeros([size as i64, 8], (Kind::Float, device));
            if let Err(error) = &made {
                texts.push(error.to_string());
            }
            Ok(made.map(|_| size)?)
        })
        .unwrap();
    assert!(tried.len() > 1 && size * 32 <= 8 << 20, "{tried:?}");
    assert!(texts[0].contains("out of memory"), "{}", texts[0]);
    // Inside of prepared objects, the error contains the operation and the state of memory.
    let model =
        accelerator.prepare(Model::new(|p| Linear::new(p / "wide", 8, 8192)).unwrap()).unwrap();
    let inputs = Tensor::ones([512, 8], (Kind::Float, device));
    let error = model.forward(&inputs).unwrap_err();
    assert!(
        error.is_out_of_memory()
            && matches!(error.downcast_ref(), Some(TrainError::OutOfMemory(_))),
        "{error}"
    );
    let text = error.to_string();
    let start = "rank 0 ran out of memory on cuda:1 in the forward pass: ";
    assert!(text.starts_with(start) && text.contains("wide"), "{text}");
    assert!(text.contains("GiB are free; tensors of this process have"), "{text}");
    let memory = DeviceMemory::of(device).unwrap().unwrap();
    assert!(memory.peak <= 8 << 20 && memory.allocated <= memory.reserved);
}

#[test]
fn a_model_without_room_on_its_gpu_names_the_parameter() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let accelerator = builder(device).build().unwrap();
    fake::set_capacity(1, 8 << 20).unwrap();
    let model = Model::new(|p| {
        (Linear::new(p / "small", 8, 16), Linear::new(p / "decoder" / "large", 1024, 4096))
    });
    let error = accelerator.prepare(model.unwrap()).map(drop).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(TrainError::OutOfMemory(_))), "{error}");
    let text = error.to_string();
    let start = "rank 0 ran out of memory on cuda:1 in the move of the model to the GPU: ";
    assert!(text.starts_with(start), "{text}");
    let parameter = "decoder.large.weight (Float [4096, 1024], 16777216 bytes)";
    assert!(text.contains(parameter) && !text.contains("small"), "{text}");
    assert!(text.contains("GiB are free; tensors of this process have"), "{text}");
    assert!(text.ends_with("prepare it in 16 bits, or use a GPU with more memory"), "{text}");
    // What fits is moved.
    let model = Model::new(|p| Linear::new(p / "small", 8, 16)).unwrap();
    assert_eq!(accelerator.prepare(model).unwrap().inner().device(), device);
}

/// One convolution with normalisation, whose statistics are those of all ranks.
struct Normed(Conv2d, BatchNorm2d);

impl Module<&Tensor> for Normed {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Ok(self.1.forward(&self.0.forward(input)?)?.mean_dim([2i64, 3].as_slice(), false, None))
    }
}

dist_test!(world = 2, dist_ranks_share_a_gpu_over_gloo, |world| {
    let (device, _alone) = gpu();
    // The second job of these processes connects through the store of the first.
    let shared = std::cell::RefCell::new(None::<Store>);
    let train = |device: Device| {
        let builder =
            builder(device).sync_batch_norm(true).backend(Backend::Gloo(Default::default()));
        let accelerator = match shared.borrow().as_ref() {
            None => builder.build().unwrap(),
            Some(store) => builder.store(Store::clone(store)).build().unwrap(),
        };
        *shared.borrow_mut() =
            accelerator.processes().group().map(|group| group.store().prefix("cpu").unwrap());
        tch::manual_seed(3);
        let model = Model::new(|p| {
            let options = Conv2dOptions { padding: [1, 1], ..Conv2dOptions::default() };
            Normed(Conv2d::new(p / "conv", 2, 3, [3, 3], options), BatchNorm2d::new(p / "norm", 3))
        })
        .unwrap();
        let optimizer = Sgd::new(0.1).build(&model).unwrap();
        let (mut model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
        model.train();
        let rank = accelerator.processes().process_index() as f64;
        let images = (Tensor::arange(96, (Kind::Float, Device::Cpu)) * (0.3 + rank))
            .sin()
            .reshape([3, 2, 4, 4]);
        let images = images.to_device(accelerator.device());
        for _ in 0..3 {
            let loss = model.forward(&images).unwrap().square().mean(Kind::Float);
            optimizer.zero_grad().unwrap();
            accelerator.backward(&loss).unwrap();
            optimizer.step().unwrap();
        }
        let mine = Tensor::from(rank + 1.0).to_kind(Kind::Float).to_device(accelerator.device());
        let sum = accelerator.processes().reduce(&mine, brigade_torch::ReduceOp::Sum).unwrap();
        assert_eq!((sum.device(), number(&sum)), (accelerator.device(), 3.0));
        weights(&model)
    };
    let (on_gpu, on_cpu) = (train(device), train(Device::Cpu));
    for (gpu, cpu) in on_gpu.iter().zip(&on_cpu) {
        assert!((gpu - cpu).abs() < 1e-4, "{on_gpu:?}, on the CPU {on_cpu:?}");
    }
    assert_eq!(world.world_size.as_usize(), 2);
});
