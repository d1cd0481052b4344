//! Steps whose numbers are tensors: the same as those of numbers, left out without a trace, and in operations
//! that do not grow with the number of parameters.

use brigade_nn::Model;
use brigade_optim::{
    Adafactor, Adagrad, Adam, AdamW, DeviceScalars, Group, Lamb, Lars, Lookahead, Muon, Optimizer,
    QHAdam, RAdam, RmsProp, Rule, Sgd, Step, all_optimizers,
};
use brigade_test_device::{fake, gpu, kernels, numeric_device};
use brigade_torch::{ErrorKind, ProfiledEvent, ProfilerOptions, Recording, Result, set_gradient};
use tch::{Device, Kind, Tensor};

use crate::filled::{
    Filled, SHAPES, assert_all_close, backward, build_any, model_of, model_on, values,
};

type Build = fn(&Model<Filled>) -> Result<Optimizer>;

/// Optimizers with all that changes their operations. Those with fused kernels come first.
const FUSED: [(&str, Build); 8] = [
    ("SGD", |model| Sgd::new(0.125).build(model)),
    ("SGD with momentum", |model| {
        Sgd::new(0.125).momentum(0.9).nesterov(true).weight_decay(0.01).build(model)
    }),
    ("SGD with decoupled decay", |model| {
        let sgd = Sgd::new(0.125).momentum(0.9).weight_decay(0.1).maximize(true);
        sgd.decoupled_weight_decay(true).build(model)
    }),
    ("Adam", |model| Adam::default().weight_decay(0.01).build(model)),
    ("amsgrad", |model| Adam::default().lr(0.01).amsgrad(true).maximize(true).build(model)),
    ("AdamW", |model| AdamW::default().weight_decay(0.1).build(model)),
    ("AdamW in groups", |model| {
        AdamW::default().group(Group::matching("p1").lr(0.01).weight_decay(0.0)).build(model)
    }),
    ("Adam with Lookahead", |model| {
        Adam::default().lr(0.01).lookahead(Lookahead::default().every(2)).build(model)
    }),
];

const OPERATIONS: [(&str, Build); 18] = [
    ("SGD with dampening", |model| {
        let sgd = Sgd::new(0.125).momentum(0.9).dampening(0.25);
        sgd.weight_decay(0.01).maximize(true).build(model)
    }),
    ("Adagrad", |model| Adagrad::default().lr_decay(0.1).weight_decay(0.1).build(model)),
    ("Adagrad upwards", |model| {
        Adagrad::default().initial_accumulator_value(0.2).maximize(true).build(model)
    }),
    ("RMSprop", |model| RmsProp::default().eps(0.0).build(model)),
    ("RMSprop, centered", |model| {
        RmsProp::default().centered(true).momentum(0.9).weight_decay(0.1).build(model)
    }),
    ("RMSprop of fastai", |model| {
        let rmsprop = RmsProp::default().momentum(0.9).momentum_of_gradient(true);
        rmsprop.weight_decay(0.1).decoupled_weight_decay(true).maximize(true).build(model)
    }),
    ("RAdam", |model| RAdam::default().betas(0.9, 0.9).weight_decay(0.1).build(model)),
    ("RAdam of fastai", |model| RAdam::fastai().betas(0.9, 0.8).maximize(true).build(model)),
    ("Ranger", |model| {
        let lookahead = Lookahead::default().every(2).alpha(0.75);
        RAdam::ranger().lookahead(lookahead).build(model)
    }),
    ("QHAdam", |model| QHAdam::default().weight_decay(0.1).build(model)),
    ("QHAdam upwards", |model| {
        let qhadam = QHAdam::default().betas(0.9, 0.9).nus(0.4, 0.6).weight_decay(0.1);
        qhadam.decoupled_weight_decay(false).maximize(true).build(model)
    }),
    ("LAMB", |model| Lamb::default().weight_decay(0.1).build(model)),
    ("LAMB upwards", |model| {
        Lamb::default().weight_decay(0.1).decoupled_weight_decay(false).maximize(true).build(model)
    }),
    ("LARS", |model| Lars::new(0.125).weight_decay(0.1).build(model)),
    ("LARC", |model| Lars::larc(0.01).momentum(0.0).maximize(true).build(model)),
    ("Adafactor", |model| Adafactor::default().build(model)),
    ("Adafactor upwards", |model| {
        Adafactor::default().lr(0.5).weight_decay(0.1).maximize(true).build(model)
    }),
    ("Muon", |model| Muon::default().only("p0").build(model)),
];

type DynBuild = Box<dyn Fn(&Model<Filled>) -> Result<Optimizer>>;

/// These and the table of all optimizers.
fn all() -> impl Iterator<Item = (&'static str, DynBuild)> {
    let variants = FUSED.into_iter().chain(OPERATIONS);
    let variants = variants.map(|(name, build)| (name, Box::new(build) as DynBuild));
    variants.chain(all_optimizers().into_iter().map(|(name, settings)| {
        let build: DynBuild = Box::new(move |model| build_any(&*settings, model));
        (name, build)
    }))
}

fn number(value: f64) -> Tensor {
    Tensor::from(value)
}

/// The values of parameters and states, and their names.
fn everything(model: &Model<Filled>, optimizer: &Optimizer) -> (Vec<Vec<f64>>, Vec<String>) {
    let mut numbers = values(model);
    let mut names = Vec::new();
    for parameter in optimizer.state_dict().unwrap().parameters {
        for (name, tensor) in parameter.tensors {
            numbers.push(Vec::try_from(tensor.to_kind(Kind::Double).reshape([-1])).unwrap());
            names.push(name);
        }
    }
    (numbers, names)
}

/// The same as bits.
fn bits(model: &Model<Filled>, optimizer: &Optimizer) -> Vec<Vec<u64>> {
    let (numbers, _) = everything(model, optimizer);
    numbers.iter().map(|values| values.iter().map(|value| value.to_bits()).collect()).collect()
}

#[test]
fn numbers_on_a_device_give_the_same_steps() {
    const SCALE: f64 = 1024.0;
    for (name, build) in all() {
        let run = |on_device: bool| {
            let model = model_of(&SHAPES, Kind::Double);
            let mut optimizer = build(&model).unwrap();
            for step in 0..6 {
                if step == 3 {
                    optimizer.set_lr(optimizer.lr() / 2.0).unwrap();
                }
                optimizer.zero_grad().unwrap();
                // The last parameter has no gradient once, and the second comes late.
                let without = [Some(1), None, Some(2)].get(step as usize).copied().flatten();
                if on_device {
                    backward(&model, step, SCALE, without);
                    let (lr, scale, found) = (number(optimizer.lr()), number(SCALE), number(0.0));
                    let scalars = DeviceScalars {
                        lr: Some(&lr),
                        grad_scale: Some(&scale),
                        found_inf: (step % 2 == 0).then_some(&found),
                    };
                    optimizer.step_with(&scalars).unwrap();
                } else {
                    backward(&model, step, 1.0, without);
                    optimizer.step().unwrap();
                }
            }
            assert_eq!(optimizer.steps(), 6, "{name}");
            everything(&model, &optimizer)
        };
        println!("{name}");
        let ((host, host_names), (device, device_names)) = (run(false), run(true));
        assert_eq!(host_names, device_names);
        // The fused kernels take the rate in 32 bits; Muon computes in 16.
        let tolerance = if name == "Muon" { 2e-3 } else { 1e-7 };
        assert_all_close(&device, &host, tolerance, tolerance);
    }
}

#[test]
fn a_step_that_is_left_out_changes_no_bit() {
    for (name, build) in all() {
        for kind in [Kind::Float, Kind::BFloat16] {
            println!("{name} in {kind:?}");
            // In 16 bits on the CPU, for the reason of `sgd_has_a_momentum_in_16_bits`.
            let device = if kind == Kind::Float { numeric_device() } else { Device::Cpu };
            let run = |left_out: &[i64]| {
                let model = model_on(device, &SHAPES, kind);
                let _ = tch::no_grad(|| model.module().0[0].get(0).f_fill_(-0.0).unwrap());
                let mut optimizer = build(&model).unwrap();
                for step in 0..4 {
                    if left_out.contains(&step) {
                        optimizer.zero_grad().unwrap();
                        backward(&model, step, f64::NAN, None);
                        let found = number(1.0);
                        let scalars =
                            DeviceScalars { found_inf: Some(&found), ..DeviceScalars::default() };
                        // States of zeros are created.
                        if step == 0 {
                            optimizer.step_with(&scalars).unwrap();
                        }
                        let (before, steps) = (bits(&model, &optimizer), optimizer.steps());
                        optimizer.step_with(&scalars).unwrap();
                        assert_eq!(bits(&model, &optimizer), before);
                        assert_eq!(optimizer.steps(), steps);
                    }
                    optimizer.zero_grad().unwrap();
                    backward(&model, step, 1.0, None);
                    let found = number(0.0);
                    let scalars =
                        DeviceScalars { found_inf: Some(&found), ..DeviceScalars::default() };
                    optimizer.step_with(&scalars).unwrap();
                }
                assert_eq!(optimizer.steps(), 4);
                bits(&model, &optimizer)
            };
            assert_eq!(run(&[0, 2, 3]), run(&[]));
        }
    }
}

#[test]
fn steps_of_both_kinds_follow_each_other() {
    for (name, build) in all() {
        println!("{name}");
        let run = |mixed: bool| {
            let model = model_of(&SHAPES, Kind::Double);
            let mut optimizer = build(&model).unwrap();
            for step in 0..6 {
                optimizer.zero_grad().unwrap();
                backward(&model, step, 1.0, None);
                if mixed && step % 3 != 0 {
                    let scale = number(1.0);
                    let scalars =
                        DeviceScalars { grad_scale: Some(&scale), ..DeviceScalars::default() };
                    optimizer.step_with(&scalars).unwrap();
                } else {
                    optimizer.step().unwrap();
                }
            }
            everything(&model, &optimizer).0
        };
        let tolerance = if name == "Muon" { 2e-3 } else { 1e-9 };
        assert_all_close(&run(true), &run(false), tolerance, tolerance);
    }
}

#[test]
fn dampening_begins_with_the_first_step_that_is_made() {
    let run = |left_out: bool| {
        let model = model_of(&SHAPES, Kind::Double);
        let sgd = Sgd::new(0.125).momentum(0.9).dampening(0.5);
        let mut optimizer = sgd.build(&model).unwrap();
        if left_out {
            backward(&model, 0, f64::INFINITY, None);
            let found = number(1.0);
            let scalars = DeviceScalars { found_inf: Some(&found), ..DeviceScalars::default() };
            optimizer.step_with(&scalars).unwrap();
        }
        crate::filled::take(&model, &mut optimizer, 0..3);
        values(&model)
    };
    assert_eq!(run(true), run(false));
}

/// libtorch's kernel for the CPU, which parameters on the CPU do not use, reads such a momentum wrongly.
#[test]
fn sgd_has_a_momentum_in_16_bits() {
    let run = |kind: Kind, nesterov: bool| {
        // The CPU's: libtorch's kernel for it, which a GPU made of host memory runs, reads past such a momentum's end.
        let model = model_on(Device::Cpu, &[&[100]], kind);
        let sgd = Sgd::new(0.125).momentum(0.9).nesterov(nesterov).weight_decay(0.01);
        crate::filled::take(&model, &mut sgd.build(&model).unwrap(), 0..4);
        values(&model)
    };
    for nesterov in [false, true] {
        let (half, single) = (run(Kind::BFloat16, nesterov), run(Kind::Float, nesterov));
        assert_all_close(&half, &single, 2e-2, 1e-2);
        assert_eq!(half, run(Kind::BFloat16, nesterov));
    }
}

#[test]
fn groups_have_rates_of_their_own_on_a_device() {
    let run = |rates: Option<&Tensor>| {
        let model = model_of(&SHAPES, Kind::Double);
        let group = Group::matching("p1").lr(0.5);
        let mut optimizer = Sgd::new(0.25).group(group).build(&model).unwrap();
        backward(&model, 0, 1.0, None);
        match rates {
            Some(lr) => {
                let scalars = DeviceScalars { lr: Some(lr), ..DeviceScalars::default() };
                optimizer.step_with(&scalars).unwrap();
            }
            None => optimizer.step().unwrap(),
        }
        values(&model)
    };
    let host = run(None);
    // One factor for all groups keeps the ratio of rates; one each sets them.
    assert_all_close(&run(Some(&number(0.25))), &host, 1e-12, 1e-12);
    let groups = {
        let model = model_of(&SHAPES, Kind::Double);
        Sgd::new(0.25).group(Group::matching("p1").lr(0.5)).build(&model).unwrap().groups()
    };
    let rates: Vec<f64> = groups.iter().map(|group| group.lr()).collect();
    assert_all_close(&run(Some(&Tensor::from_slice(&rates))), &host, 1e-12, 1e-12);
}

fn recorded(build: Build, count: usize, with_rate: bool) -> Vec<ProfiledEvent> {
    let shapes = vec![&[4i64, 3][..]; count];
    let model = model_of(&shapes, Kind::Float);
    let mut optimizer = build(&model).unwrap();
    let (lr, scale, found) = (number(0.1), number(2.0), number(0.0));
    let scalars = DeviceScalars {
        lr: with_rate.then_some(&lr),
        grad_scale: Some(&scale),
        found_inf: Some(&found),
    };
    let mut step = || {
        optimizer.zero_grad().unwrap();
        backward(&model, 0, 1.0, None);
        let recording = Recording::start(ProfilerOptions::default()).unwrap();
        optimizer.step_with(&scalars).unwrap();
        recording.finish(None).unwrap()
    };
    // The first makes states.
    let _ = step();
    step()
}

/// The operations that were called, without those that they called, and without those that read no memory.
fn outermost(events: &[ProfiledEvent]) -> Vec<&str> {
    let mut events: Vec<&ProfiledEvent> =
        events.iter().filter(|event| event.name.starts_with("aten::")).collect();
    events.sort_by_key(|event| (event.start_ns, u64::MAX - event.duration_ns));
    let mut end = 0;
    let mut names = Vec::new();
    for event in events {
        if event.start_ns >= end {
            end = event.start_ns + event.duration_ns;
            names.push(event.name.as_str());
        }
    }
    names.retain(|name| *name != "aten::as_strided");
    names
}

#[test]
fn steps_make_as_many_operations_for_many_parameters_as_for_few() {
    let muon = |model: &Model<Filled>| Muon::default().build(model);
    let others = OPERATIONS.into_iter().filter(|(name, _)| {
        // Adafactor reduces each matrix by operations of its own.
        !name.starts_with("Adafactor") && *name != "Muon"
    });
    for (name, build) in FUSED.into_iter().chain(others).chain([("Muon", muon as Build)]) {
        // A group of its own is more operations, of the same number.
        let (few, many) = (recorded(build, 3, false), recorded(build, 40, false));
        assert!(outermost(&few).len() > 1, "{name}");
        assert_eq!(outermost(&few), outermost(&many), "{name}");
    }
}

#[test]
fn no_step_reads_a_number_from_the_device() {
    let muon = |model: &Model<Filled>| Muon::default().build(model);
    // libtorch's fused kernels for the CPU, which a GPU made of host memory runs, read a tensor's rate, and Adam's its
    // count of steps; CUDA's take addresses.
    let fused = FUSED.into_iter().filter(|(name, _)| name.starts_with("SGD"));
    let fused = fused.map(|(name, build)| (name, build, false));
    let others = OPERATIONS.into_iter().filter(|(name, _)| *name != "Muon");
    let others = others.chain([("Muon", muon as Build)]).map(|(name, build)| (name, build, true));
    for (name, build, with_rate) in fused.chain(others) {
        for event in recorded(build, 3, with_rate) {
            let waits = ["aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"];
            assert!(!waits.contains(&event.name.as_str()), "{name} calls {}", event.name);
        }
    }
}

#[test]
fn sparse_gradients_are_refused() {
    for (name, build) in all() {
        // On the CPU: a GPU made of host memory has no sparse tensors.
        let model = model_on(Device::Cpu, &SHAPES, Kind::Float);
        let mut optimizer = build(&model).unwrap();
        let parameter = &model.module().0[0];
        set_gradient(parameter, &parameter.detach().to_sparse_sparse_dim(2)).unwrap();
        let found = number(0.0);
        let scalars = DeviceScalars { found_inf: Some(&found), ..DeviceScalars::default() };
        for result in [optimizer.step(), optimizer.step_with(&scalars)] {
            let text = result.unwrap_err().to_string();
            assert!(text.contains("dense gradients only"), "{name}: {text}");
        }
    }
}

#[derive(Debug)]
struct Plain;

impl Rule for Plain {
    fn name(&self) -> &'static str {
        "Plain"
    }

    fn slots(&self) -> &'static [&'static str] {
        &[]
    }

    fn step(&self, step: &mut Step<'_>) -> Result<()> {
        assert!(step.device_numbers().found_inf.is_none());
        Ok(())
    }
}

#[test]
fn scalars_that_do_not_fit_are_refused() {
    let model = model_of(&SHAPES, Kind::Float);
    let found = number(0.0);
    let scalars = DeviceScalars { found_inf: Some(&found), ..DeviceScalars::default() };
    let mut own = Optimizer::with_rule(Plain, 0.1).build(&model).unwrap();
    backward(&model, 0, 1.0, None);
    let error = own.step_with(&scalars).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument, "{error}");
    assert!(error.to_string().contains("Plain"), "{error}");
    assert_eq!(own.steps(), 0);
    own.step_with(&DeviceScalars::default()).unwrap();
    let mut sgd = Sgd::new(0.1).build(&model).unwrap();
    let two = Tensor::zeros([2], (Kind::Float, Device::Cpu));
    for (scalars, named) in [
        (DeviceScalars { lr: Some(&two), ..DeviceScalars::default() }, "one for each of 1 groups"),
        (DeviceScalars { grad_scale: Some(&two), ..DeviceScalars::default() }, "the scale"),
        (DeviceScalars { found_inf: Some(&two), ..DeviceScalars::default() }, "found_inf"),
    ] {
        let text = sgd.step_with(&scalars).unwrap_err().to_string();
        assert!(text.contains(named), "{text}");
    }
    assert_eq!(sgd.steps(), 0);
}

/// States that were saved after steps by the kernels of a GPU go on with them bit for bit. They have the names of those
/// of libtorch's kernels, and are in each step within a unit in the last place as close to float64.
#[test]
fn states_of_steps_by_kernels_of_a_gpu_are_those_of_libtorchs() {
    const STEPS: i64 = 6;
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    for (name, build) in FUSED {
        println!("{name}");
        let run = |device: Device, kind: Kind, saved_at: i64| {
            let model = model_on(device, &SHAPES, kind);
            let mut optimizer = build(&model).unwrap();
            crate::filled::take(&model, &mut optimizer, 0..saved_at);
            if saved_at > 0 {
                let state = optimizer.state_dict().unwrap();
                optimizer = build(&model).unwrap();
                optimizer.load_state_dict(&state).unwrap();
            }
            crate::filled::take(&model, &mut optimizer, saved_at..STEPS);
            everything(&model, &optimizer)
        };
        let launches = fake::account(|| {
            kernels::emulated(|| run(device, Kind::Float, 0));
        });
        let is_own = |name: &String| name.starts_with("brigade::optimizer");
        assert!(launches.0.keys().any(is_own), "{launches}");
        let (found, names) = kernels::emulated(|| run(device, Kind::Float, 0));
        let (resumed, _) = kernels::emulated(|| run(device, Kind::Float, STEPS / 2));
        assert_eq!(found, resumed);
        let (plain, plain_names) = run(device, Kind::Float, 0);
        let (exact, _) = run(Device::Cpu, Kind::Double, 0);
        assert_eq!(names, plain_names);
        for (index, exact) in exact.iter().enumerate() {
            let apart = |values: &[f64]| {
                let errors = values.iter().zip(exact).map(|(value, exact)| (value - exact).abs());
                errors.fold(0.0, f64::max)
            };
            let size = exact.iter().fold(0.0, |size: f64, value| size.max(value.abs()));
            let allowed = apart(&plain[index]) + STEPS as f64 * f64::from(f32::EPSILON) * size;
            let found = apart(&found[index]);
            assert!(found <= allowed, "{index}: {found:e} > {allowed:e}");
        }
    }
}
