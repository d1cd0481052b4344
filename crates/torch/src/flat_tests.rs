//! Tests that one pass over memory and foreach operations have the same results, for all flags, and that the number of
//! operations does not depend on the number of parameters.

use super::*;
use crate::profiler::{ProfiledEvent, ProfilerOptions, Recording};
use tch::{Device, Kind};

use crate::bridge::borrow_all;

/// Shapes of parameters. One is longer than a parallel task, and one is empty.
const SHAPES: [&[i64]; 6] = [&[40_003], &[], &[3, 5], &[0], &[2, 3, 4, 5], &[513]];

fn values(shape: &[i64], number: usize, kind: Kind) -> Tensor {
    let i = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    (i * 0.37 + number as f64 * 1.7).sin().reshape(shape).to_kind(kind)
}

/// Creates the tensors of parameters of these shapes, role after role. The role `squares` contains a mean of squares,
/// well above the square of any mean.
fn made(shapes: &[&[i64]], roles: usize, squares: usize, kind: Kind) -> Vec<Tensor> {
    (0..roles)
        .flat_map(|role| shapes.iter().enumerate().map(move |(index, shape)| (role, index, shape)))
        .map(|(role, index, shape)| {
            let values = values(shape, role + 10 * index, kind);
            if role == squares { values.square() + 2 } else { values }
        })
        .collect()
}

type Rule<'a> = dyn Fn(&[ffi::TensorRef<'_>], usize, bool) -> Result<(), cxx::Exception> + 'a;

/// Runs both implementations on equal tensors and compares the results.
fn same(roles: usize, squares: usize, run: &Rule<'_>) {
    for (kind, tolerance) in [(Kind::Double, 1e-12), (Kind::Float, 2e-5)] {
        let made = || made(&SHAPES, roles, squares, kind);
        let (one_pass, operations) = (made(), made());
        for (tensors, as_operations) in [(&one_pass, false), (&operations, true)] {
            for _ in 0..3 {
                run(&borrow_all(tensors), SHAPES.len(), as_operations).unwrap();
            }
        }
        for (index, (a, b)) in one_pass.iter().zip(&operations).enumerate() {
            if a.numel() > 0 {
                let difference = (a - b).abs().max().double_value(&[]);
                assert!(difference <= tolerance, "tensor {index} of {kind:?}: {difference}");
            }
        }
        assert_ne!(one_pass[0], made()[0], "nothing was stepped");
    }
    rounds_half_precision_once(roles, squares, run, true);
}

/// Checks that a step of 16-bit tensors is the step of their values in float32, rounded at the end. Lists may contain
/// several kinds.
fn rounds_half_precision_once(roles: usize, squares: usize, run: &Rule<'_>, operations: bool) {
    let shapes: [&[i64]; 2] = [&[6, 4], &[9]];
    for kind in [Kind::BFloat16, Kind::Half] {
        let half = made(&shapes, roles, squares, kind);
        let wide: Vec<Tensor> = half.iter().map(|tensor| tensor.to_kind(Kind::Float)).collect();
        let mut mixed: Vec<&Tensor> = Vec::new();
        for role in 0..roles {
            mixed.extend([
                &half[2 * role],
                &half[2 * role + 1],
                &wide[2 * role],
                &wide[2 * role + 1],
            ]);
        }
        run(&borrow_all(&mixed), 4, operations).unwrap();
        for (half, wide) in half.iter().zip(&wide) {
            assert_eq!(*half, wide.to_kind(kind));
        }
    }
}

type InParts<'a> = dyn Fn(&[ffi::TensorRef<'_>], StepPart, &[ffi::TensorRef<'_>], bool) -> Result<(), cxx::Exception>
    + 'a;

/// Checks that the two passes of a rule with norms equal its step, also with sums of squares that are passed from one
/// to the other.
fn parts_are_the_whole(roles: usize, squares: usize, run: &InParts<'_>) {
    for (kind, operations) in
        [(Kind::Double, false), (Kind::Float, true), (Kind::Double, true), (Kind::Float, false)]
    {
        let made = || made(&SHAPES, roles, squares, kind);
        let (whole, parts) = (made(), made());
        run(&borrow_all(&whole), StepPart::Whole, &[], operations).unwrap();
        let pair = |_: &&[i64]| Tensor::zeros([2], (Kind::Double, Device::Cpu));
        let sums: Vec<Tensor> = SHAPES.iter().map(pair).collect();
        for part in [StepPart::Sums, StepPart::Update] {
            run(&borrow_all(&parts), part, &borrow_all(&sums), operations).unwrap();
        }
        assert_eq!(parts, whole, "{kind:?}");
    }
}

fn operations_do_not_grow(roles: usize, squares: usize, run: &Rule<'_>) {
    let events = |count: usize| {
        let shapes = vec![&[4i64, 3][..]; count];
        let tensors = made(&shapes, roles, squares, Kind::Float);
        let recording = Recording::start(ProfilerOptions::default()).unwrap();
        run(&borrow_all(&tensors), count, true).unwrap();
        recording.finish(None).unwrap()
    };
    let (few, many) = (events(2), events(40));
    assert!(!outermost(&few).is_empty());
    assert_eq!(outermost(&few), outermost(&many));
    let waits = ["aten::item", "aten::_local_scalar_dense", "aten::is_nonzero"];
    assert!(!many.iter().any(|event| waits.contains(&event.name.as_str())), "{many:?}");
}

/// Returns the operations that were called directly, without those that they called.
fn outermost(events: &[ProfiledEvent]) -> Vec<String> {
    let mut events: Vec<&ProfiledEvent> =
        events.iter().filter(|event| event.name.starts_with("aten::")).collect();
    events.sort_by_key(|event| (event.start_ns, u64::MAX - event.duration_ns));
    let mut end = 0;
    let mut names = Vec::new();
    for event in events {
        if event.start_ns >= end {
            end = event.start_ns + event.duration_ns;
            names.push(event.name.clone());
        }
    }
    names
}

/// Weight decay, whether it is decoupled, and whether the step maximizes.
const DECAYS: [(f64, bool, bool); 3] =
    [(0.0, true, false), (0.01, false, true), (0.1, true, false)];

#[test]
fn rmsprop_is_the_same_in_one_pass_and_by_operations() {
    for (weight_decay, decoupled, maximize) in DECAYS {
        for (centered, momentum, momentum_of_gradient) in
            [(false, 0.0, false), (true, 0.0, false), (true, 0.9, false), (false, 0.9, true)]
        {
            let step = ffi::RmsPropStep {
                lr: 0.01,
                alpha: 0.9,
                eps: 1e-3,
                momentum,
                weight_decay,
                decoupled,
                centered,
                momentum_of_gradient,
                maximize,
            };
            let roles = 3 + usize::from(centered) + usize::from(momentum != 0.0);
            let run = |tensors: &[ffi::TensorRef<'_>], count, operations| {
                ffi::rmsprop(tensors, count, &step, &[], operations)
            };
            same(roles, 2, &run);
            rounds_half_precision_once(roles, 2, &run, false);
            if maximize {
                operations_do_not_grow(roles, 2, &run);
            }
        }
    }
}

#[test]
fn radam_is_the_same_in_one_pass_and_by_operations() {
    for (weight_decay, decoupled, maximize) in DECAYS {
        for (steps, eps_of_unbiased) in [(2.0, false), (30.0, false), (30.0, true)] {
            let step = ffi::RectifiedStep {
                lr: 0.01,
                steps,
                beta1: 0.9,
                beta2: 0.99,
                eps: 1e-3,
                eps_of_unbiased,
                weight_decay,
                decoupled,
                maximize,
            };
            let run = |tensors: &[ffi::TensorRef<'_>], count, operations| {
                ffi::rectified(tensors, count, &step, &[], operations)
            };
            same(4, 3, &run);
            rounds_half_precision_once(4, 3, &run, false);
            if maximize {
                operations_do_not_grow(4, 3, &run);
            }
        }
    }
}

#[test]
fn qhadam_is_the_same_in_one_pass_and_by_operations() {
    for (weight_decay, decoupled, maximize) in DECAYS {
        for (nu1, nu2) in [(0.7, 1.0), (0.4, 0.6)] {
            let step = ffi::QhAdamStep {
                lr: 0.01,
                steps: 5.0,
                beta1: 0.9,
                beta2: 0.99,
                nu1,
                nu2,
                eps: 1e-3,
                weight_decay,
                decoupled,
                maximize,
            };
            let run = |tensors: &[ffi::TensorRef<'_>], count, operations| {
                ffi::qhadam(tensors, count, &step, &[], operations)
            };
            same(4, 3, &run);
            rounds_half_precision_once(4, 3, &run, false);
            if maximize {
                operations_do_not_grow(4, 3, &run);
            }
        }
    }
}

#[test]
fn lamb_is_the_same_in_one_pass_and_by_operations() {
    for (weight_decay, decoupled, maximize) in DECAYS {
        let step = ffi::LambStep {
            lr: 0.01,
            steps: 5.0,
            max_trust: 10.0,
            beta1: 0.9,
            beta2: 0.99,
            eps: 1e-3,
            weight_decay,
            decoupled,
            maximize,
        };
        let run = |tensors: &[ffi::TensorRef<'_>], count, operations| {
            ffi::lamb(tensors, count, &step, StepPart::Whole, &[], &[], operations)
        };
        same(4, 3, &run);
        parts_are_the_whole(4, 3, &|tensors, part, sums, operations| {
            ffi::lamb(tensors, SHAPES.len(), &step, part, sums, &[], operations)
        });
        if maximize {
            operations_do_not_grow(4, 3, &run);
        }
    }
}

#[test]
fn weights_of_zero_are_trusted_and_sums_of_another_type_refused() {
    let step = ffi::LambStep {
        lr: 0.5,
        steps: 1.0,
        max_trust: 10.0,
        beta1: 0.0,
        beta2: 0.0,
        eps: 0.0,
        weight_decay: 0.0,
        decoupled: true,
        maximize: false,
    };
    for operations in [false, true] {
        let zeros = || Tensor::zeros([2], (Kind::Float, Device::Cpu));
        let tensors = [zeros(), Tensor::from_slice(&[2f32, -3.0]), zeros(), zeros()];
        ffi::lamb(&borrow_all(&tensors), 1, &step, StepPart::Whole, &[], &[], operations).unwrap();
        assert_eq!(tensors[0], Tensor::from_slice(&[-0.5f32, 0.5]));
        let sums = [Tensor::zeros([2], (Kind::Float, Device::Cpu))];
        let part = StepPart::Update;
        let error =
            ffi::lamb(&borrow_all(&tensors), 1, &step, part, &borrow_all(&sums), &[], operations);
        assert!(error.unwrap_err().to_string().contains("double precision"));
    }
}

#[test]
fn larc_is_the_same_in_one_pass_and_by_operations() {
    for (weight_decay, decoupled, maximize) in DECAYS {
        for (clip, momentum) in [(true, 0.0), (false, 0.9)] {
            let step = ffi::LarcStep {
                lr: 0.1,
                trust: 0.02,
                clip,
                weight_decay,
                decoupled,
                momentum,
                eps: 1e-8,
                maximize,
            };
            let roles = 2 + usize::from(momentum != 0.0);
            let run = |tensors: &[ffi::TensorRef<'_>], count, operations| {
                ffi::larc(tensors, count, &step, StepPart::Whole, &[], &[], operations)
            };
            same(roles, roles, &run);
            parts_are_the_whole(roles, roles, &|tensors, part, sums, operations| {
                ffi::larc(tensors, SHAPES.len(), &step, part, sums, &[], operations)
            });
            if maximize {
                operations_do_not_grow(roles, roles, &run);
            }
        }
    }
}

#[test]
fn look_ahead_is_the_same_in_one_pass_and_by_operations() {
    for alpha in [0.3, 0.8] {
        let step = ffi::LookAheadStep { alpha, every: 1 };
        let run = |tensors: &[ffi::TensorRef<'_>], count, operations| {
            ffi::look_ahead(tensors, count, &step, &[], operations)
        };
        same(2, 2, &run);
        rounds_half_precision_once(2, 2, &run, false);
        operations_do_not_grow(2, 2, &run);
    }
}

#[test]
fn look_ahead_of_a_count_on_a_device_waits_for_its_turn() {
    for (steps, found, turns) in [(4f32, 0f32, true), (5.0, 0.0, false), (4.0, 1.0, false)] {
        let (fast, slow) = (Tensor::from_slice(&[3f32, -0.0]), Tensor::from_slice(&[1f32, 1.0]));
        let before = (bits(&fast), bits(&slow));
        let (steps, found) = (Tensor::from(steps), Tensor::from(found));
        let device = DeviceNumbers {
            steps: Some(&steps),
            found_inf: Some(&found),
            ..DeviceNumbers::default()
        };
        look_ahead(&[&fast], &[&slow], 0.5, 2, &device).unwrap();
        if turns {
            assert_eq!(fast, Tensor::from_slice(&[2f32, 0.5]));
            assert_eq!(fast, slow);
        } else {
            assert_eq!((bits(&fast), bits(&slow)), before);
        }
    }
}

fn bits(tensor: &Tensor) -> Vec<i32> {
    Vec::try_from(tensor.reshape([-1]).view_dtype(Kind::Int)).unwrap()
}

const RECTIFIED: RectifiedStep = RectifiedStep {
    lr: 1.0,
    steps: 1.0,
    beta1: 0.0,
    beta2: 0.9,
    eps: 0.0,
    eps_of_unbiased: false,
    weight_decay: 0.0,
    decoupled: false,
    maximize: false,
};

#[test]
fn a_gradient_in_another_layout_is_read_by_its_places() {
    let gradient = Tensor::arange(6, (Kind::Float, Device::Cpu)).reshape([3, 2]).tr();
    let zeros = || Tensor::zeros([2, 3], (Kind::Float, Device::Cpu));
    for found in [None, Some(Tensor::from(0f32))] {
        let device = DeviceNumbers { found_inf: found.as_ref(), ..DeviceNumbers::default() };
        let parameter = zeros();
        let (p, g) = ([&parameter], [&gradient]);
        rectified(&p, &g, &[&zeros()], &[&zeros()], &RECTIFIED, &device).unwrap();
        assert_eq!(parameter, -&gradient);
    }
}

#[test]
fn a_parameter_with_gaps_is_stepped_in_its_place() {
    for found in [None, Some(Tensor::from(0f32))] {
        let device = DeviceNumbers { found_inf: found.as_ref(), ..DeviceNumbers::default() };
        let all = Tensor::zeros([2, 4], (Kind::Float, Device::Cpu));
        let (gaps, dense) = (all.slice(1, 0, 4, 2), Tensor::zeros([3], (Kind::Float, Device::Cpu)));
        let ones: Vec<Tensor> = vec![gaps.ones_like(), dense.ones_like()];
        let states: Vec<Tensor> = (0..4).map(|i| ones[i % 2].zeros_like()).collect();
        rectified(
            &[&gaps, &dense],
            &[&ones[0], &ones[1]],
            &[&states[0], &states[1]],
            &[&states[2], &states[3]],
            &RECTIFIED,
            &device,
        )
        .unwrap();
        assert_eq!(gaps, -&ones[0]);
        assert_eq!(dense, -&ones[1]);
        assert_eq!(all.sum(Kind::Float).double_value(&[]), -4.0, "the gaps were written to");
    }
}

#[test]
fn other_shapes_lengths_and_layouts_are_refused() {
    let tensor = |size: i64| Tensor::zeros([size], (Kind::Float, Device::Cpu));
    let host = DeviceNumbers::default();
    let error = look_ahead(&[&tensor(3)], &[&tensor(2)], 0.5, 1, &host).unwrap_err().to_string();
    assert!(error.contains("[3]") && error.contains("[2]"), "{error}");
    let error = look_ahead(&[&tensor(3)], &[], 0.5, 1, &host).unwrap_err().to_string();
    assert!(error.contains("1 parameters have 0"), "{error}");
    assert!(look_ahead(&[], &[], 0.5, 1, &host).is_ok(), "no parameters are nothing to do");
    let matrix = || Tensor::zeros([2, 2], (Kind::Float, Device::Cpu));
    let sparse = matrix().to_sparse_sparse_dim(2);
    let states = [matrix(), matrix()];
    let error =
        rectified(&[&matrix()], &[&sparse], &[&states[0]], &[&states[1]], &RECTIFIED, &host);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("dense gradients only"), "{error}");
    let rates = Tensor::from_slice(&[0.1f32, 0.2]);
    let device = DeviceNumbers { lr: Some(&rates), ..host };
    let parameter = matrix();
    let gradient = matrix();
    let error =
        rectified(&[&parameter], &[&gradient], &[&states[0]], &[&states[1]], &RECTIFIED, &device);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("the learning rate of a step is one"), "{error}");
}
