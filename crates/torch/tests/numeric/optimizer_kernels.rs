//! Steps of Adam, AdamW and SGD by the kernels of a GPU, emulated without one, against float64 and libtorch's fused
//! kernels.

use brigade_test_device::{fake, gpu, kernels};
use brigade_torch::{Autocast, DeviceNumbers, Graph, fused, linear};
use tch::{Device, Kind, Tensor};

/// Values of a chunk in `optimizer.cu`, and parameters of a launch.
const CHUNK: i64 = 16_384;
const OF_A_LAUNCH: u64 = 56;
/// One value, none, vectors of eight and a part of one, more than one chunk.
const SIZES: [i64; 8] = [1, 0, 7, 8, 9, 64, 1_003, CHUNK + 13];

const HOST: DeviceNumbers<'_> =
    DeviceNumbers { lr: None, steps: None, grad_scale: None, found_inf: None };
const ADAMW: fused::AdamStep = fused::AdamStep {
    lr: 0.01,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.1,
    amsgrad: false,
    maximize: false,
    decoupled: true,
};
const ADAM_STEPS: [fused::AdamStep; 6] = [
    ADAMW,
    fused::AdamStep { decoupled: false, maximize: true, ..ADAMW },
    fused::AdamStep { amsgrad: true, ..ADAMW },
    fused::AdamStep { amsgrad: true, decoupled: false, weight_decay: 0.0, eps: 0.1, ..ADAMW },
    fused::AdamStep { beta1: 0.0, beta2: 0.25, maximize: true, ..ADAMW },
    fused::AdamStep { weight_decay: 0.0, beta2: 0.95, ..ADAMW },
];
const SGD: fused::SgdStep = fused::SgdStep {
    lr: 0.01,
    momentum: 0.9,
    dampening: 0.0,
    weight_decay: 0.1,
    decoupled: false,
    nesterov: false,
    maximize: false,
    first: false,
};
const SGD_STEPS: [fused::SgdStep; 6] = [
    SGD,
    fused::SgdStep { momentum: 0.0, maximize: true, ..SGD },
    fused::SgdStep { nesterov: true, decoupled: true, ..SGD },
    fused::SgdStep { dampening: 0.3, weight_decay: 0.0, ..SGD },
    fused::SgdStep { first: true, dampening: 0.3, maximize: true, ..SGD },
    fused::SgdStep { first: true, nesterov: true, weight_decay: 0.0, ..SGD },
];

/// A parameter, its gradient, three states and its count of steps. Adam's states are the means of the gradient and of
/// its square, and the largest of the latter; the first one is SGD's momentum buffer.
#[derive(Debug)]
struct Parameter {
    of: [Tensor; 5],
    count: Tensor,
}

impl Parameter {
    /// Returns random values, some of them zeros and some of the second moments small.
    fn random(size: i64, count: f32) -> Self {
        let options = (Kind::Float, Device::Cpu);
        let normal = || Tensor::randn([size], options);
        let small = |scale: f64| Tensor::rand([size], options).square() * scale;
        let zeros = Tensor::rand([size], options).lt(0.02);
        let square = small(1.0) * Tensor::rand([size], options).pow_tensor_scalar(8.0);
        let of = [
            normal(),
            normal().masked_fill(&zeros, 0.0),
            normal() * 0.1,
            square.masked_fill(&zeros, 0.0),
            small(0.5),
        ];
        Self { of, count: Tensor::from(count) }
    }

    fn on(&self, device: Device) -> Self {
        Self {
            of: self.of.each_ref().map(|it| it.to_device(device).copy()),
            count: self.count.to_device(device).copy(),
        }
    }
}

/// A step of all parameters.
type Run<'a> = &'a dyn Fn(&[Parameter]);

fn on(parameters: &[Parameter], device: Device) -> Vec<Parameter> {
    parameters.iter().map(|it| it.on(device)).collect()
}

fn role(parameters: &[Parameter], role: usize) -> Vec<&Tensor> {
    parameters.iter().map(|it| &it.of[role]).collect()
}

fn adam(parameters: &[Parameter], step: &fused::AdamStep, device: &DeviceNumbers<'_>) {
    let [p, g, m, v, x] = [0, 1, 2, 3, 4].map(|index| role(parameters, index));
    let x = if step.amsgrad { x } else { Vec::new() };
    let counts: Vec<&Tensor> = parameters.iter().map(|it| &it.count).collect();
    fused::adam(&p, &g, &m, &v, &x, &counts, step, device).unwrap();
}

fn sgd(parameters: &[Parameter], step: &fused::SgdStep, device: &DeviceNumbers<'_>) {
    let [p, g, buffers] = [0, 1, 2].map(|index| role(parameters, index));
    let buffers = if step.momentum == 0.0 { Vec::new() } else { buffers };
    fused::sgd(&p, &g, &buffers, step, device).unwrap();
}

/// Runs the function with the kernels of the GPU.
fn by_kernels<R>(function: impl FnOnce() -> R) -> R {
    if fake::is_installed() { kernels::emulated(function) } else { function() }
}

/// Returns the device on which steps are libtorch's formulas in float32, and not the kernels.
fn plain_device(device: Device) -> Device {
    if fake::is_installed() { device } else { Device::Cpu }
}

/// Steps a value with its gradient and states by the formula of libtorch's kernel.
fn adam_in_float64(step: &fused::AdamStep, count: f64, of: [f64; 5]) -> [f64; 5] {
    let fused::AdamStep { lr, beta1, beta2, eps, weight_decay, .. } = *step;
    let [mut p, own, m, v, x] = of;
    let mut g = if step.maximize { -own } else { own };
    if weight_decay != 0.0 && step.decoupled {
        p -= lr * weight_decay * p;
    } else if weight_decay != 0.0 {
        g += p * weight_decay;
    }
    let m = beta1 * m + (1.0 - beta1) * g;
    let v = beta2 * v + (1.0 - beta2) * g * g;
    let largest = if step.amsgrad && (v > x || v.is_nan()) { v } else { x };
    let spread = if step.amsgrad { largest } else { v };
    let denominator = spread.sqrt() / (1.0 - beta2.powf(count)).sqrt() + eps;
    p -= lr / (1.0 - beta1.powf(count)) * m / denominator;
    [p, own, m, v, largest]
}

fn sgd_in_float64(step: &fused::SgdStep, of: [f64; 5]) -> [f64; 5] {
    let fused::SgdStep { lr, momentum, dampening, weight_decay, .. } = *step;
    let [mut p, own, buffer, v, x] = of;
    let mut g = if step.maximize { -own } else { own };
    if weight_decay != 0.0 && step.decoupled {
        p -= lr * weight_decay * p;
    } else if weight_decay != 0.0 {
        g += p * weight_decay;
    }
    let mut sum = buffer;
    if momentum != 0.0 {
        sum = if step.first { g } else { momentum * buffer + (1.0 - dampening) * g };
        g = if step.nesterov { g + momentum * sum } else { sum };
    }
    [p - lr * g, own, sum, v, x]
}

fn values(tensor: &Tensor) -> Vec<f64> {
    let own = tensor.to_device(Device::Cpu).to_kind(Kind::Double).reshape([-1]);
    Vec::try_from(own).unwrap()
}

/// The distance of neighbouring float32 numbers of this size.
fn unit(value: f64) -> f64 {
    2f64.powf((value.abs().max(f64::from(f32::MIN_POSITIVE)).log2().floor() - 23.0).max(-149.0))
}

/// Returns the largest error of the parameters and states, each in units in the last place of the larger of the values
/// before and after the step.
fn errors(
    found: &[Parameter],
    before: &[Parameter],
    reference: &dyn Fn(f64, [f64; 5]) -> [f64; 5],
) -> [f64; 5] {
    let mut largest = [0f64; 5];
    for (found, before) in found.iter().zip(before) {
        let count = before.count.double_value(&[]);
        let [of, given] = [&found.of, &before.of].map(|it| it.each_ref().map(values));
        for place in 0..of[0].len() {
            let given = [0, 1, 2, 3, 4].map(|role| given[role][place]);
            let exact = reference(count, given);
            for role in 0..5 {
                let size = unit(given[role].abs().max(exact[role].abs()));
                largest[role] = largest[role].max((of[role][place] - exact[role]).abs() / size);
            }
        }
    }
    largest
}

/// Checks a step by the kernels against float64: the error is at most that of libtorch's kernel and a unit in the last
/// place. Two runs give the same bits.
fn check(
    what: &str,
    device: Device,
    scale: f64,
    step: Run<'_>,
    reference: &dyn Fn(f64, [f64; 5]) -> [f64; 5],
) {
    for count in [1f32, 1_000.0] {
        tch::manual_seed(5);
        let unscaled: Vec<Parameter> =
            SIZES.into_iter().map(|size| Parameter::random(size, count)).collect();
        let given = on(&unscaled, Device::Cpu);
        for parameter in &given {
            let _ = parameter.of[1].shallow_clone().g_mul_scalar_(scale);
        }
        let [found, again] = [(); 2].map(|()| {
            let own = on(&given, device);
            by_kernels(|| step(&own));
            own
        });
        let plain = on(&given, plain_device(device));
        step(&plain);
        for own in [&found, &again, &plain] {
            // Gradients have no defined content after a step with a scale.
            for (own, unscaled) in own.iter().zip(&unscaled) {
                own.of[1].shallow_clone().copy_(&unscaled.of[1]);
            }
        }
        for (found, again) in found.iter().zip(&again) {
            assert!(found.of.iter().zip(&again.of).all(|(one, other)| one.equal(other)), "{what}");
        }
        let [found, plain] = [found, plain].map(|own| errors(&own, &unscaled, reference));
        for (role, (found, plain)) in found.iter().zip(plain).enumerate() {
            assert!(*found <= plain + 1.0, "{what}, {role}, {count}: {found} > {plain} + 1");
        }
    }
}

/// Calls with numbers on the host, and with those of a device; the learning rate and the scale are powers of two.
fn on_both_sides(device: Device, run: impl Fn(f64, f64, &DeviceNumbers<'_>)) {
    run(0.01, 1.0, &HOST);
    let [lr, scale, found] =
        [2f64.powi(-7), 1_024.0, 0.0].map(|it| Tensor::from(it as f32).to_device(device));
    let numbers =
        DeviceNumbers { lr: Some(&lr), grad_scale: Some(&scale), found_inf: Some(&found), ..HOST };
    run(2f64.powi(-7), 1_024.0, &numbers);
}

#[test]
fn kernels_of_adam_are_within_a_unit_of_libtorchs_kernel() {
    let (device, _alone) = gpu();
    for own in ADAM_STEPS {
        on_both_sides(device, |lr, scale, numbers| {
            let exact = fused::AdamStep { lr, ..own };
            let what = format!("{exact:?}, scale {scale}");
            check(
                &what,
                device,
                scale,
                &|parameters| adam(parameters, &own, numbers),
                &|count, of| adam_in_float64(&exact, count, of),
            );
        });
    }
}

#[test]
fn kernels_of_sgd_are_within_a_unit_of_libtorchs_kernel() {
    let (device, _alone) = gpu();
    for own in SGD_STEPS {
        on_both_sides(device, |lr, scale, numbers| {
            let exact = fused::SgdStep { lr, ..own };
            let what = format!("{exact:?}, scale {scale}");
            check(&what, device, scale, &|parameters| sgd(parameters, &own, numbers), &|_, of| {
                sgd_in_float64(&exact, of)
            });
        });
    }
}

fn assert_bits(found: &Tensor, expected: &Tensor, what: &str) {
    let bits = |tensor: &Tensor| tensor.to_device(Device::Cpu).contiguous().view_dtype(Kind::Int);
    assert!(bits(found).equal(&bits(expected)), "{what}");
}

/// In vectors and one by one, in one chunk and in another, as one parameter and as parts of it.
#[test]
fn kernels_give_a_value_the_same_bits_in_every_place() {
    let (device, _alone) = gpu();
    tch::manual_seed(5);
    let size = CHUNK + 1_003;
    let given = [Parameter::random(size, 3.0)];
    let amsgrad = fused::AdamStep { amsgrad: true, ..ADAMW };
    let rules: [Run<'_>; 2] = [&|own| adam(own, &amsgrad, &HOST), &|own| sgd(own, &SGD, &HOST)];
    for rule in rules {
        let whole = on(&given, device);
        by_kernels(|| rule(&whole));
        // Each role alone begins at an odd place, within values that stay.
        for odd in 0..5 {
            let around =
                [0, 1, 2, 3, 4].map(|_| Tensor::full([size + 2], f64::NAN, (Kind::Float, device)));
            let of = [0, 1, 2, 3, 4].map(|index| {
                let place = around[index].narrow(0, i64::from(index == odd), size);
                place.shallow_clone().copy_(&given[0].of[index].to_device(device));
                place
            });
            let own = [Parameter { of, count: given[0].count.to_device(device) }];
            by_kernels(|| rule(&own));
            for (index, around) in around.iter().enumerate() {
                assert_bits(&own[0].of[index], &whole[0].of[index], "an odd place");
                let nans = around.isnan().sum(Kind::Int64).int64_value(&[]);
                assert_eq!(nans, 2, "role {index} was written beyond its end");
            }
        }
        let own = on(&given, device);
        let cuts = [0, 5, 8_000, CHUNK + 1, size];
        let parts: Vec<Parameter> = cuts
            .windows(2)
            .map(|cut| Parameter {
                of: own[0].of.each_ref().map(|it| it.narrow(0, cut[0], cut[1] - cut[0])),
                count: own[0].count.shallow_clone(),
            })
            .collect();
        by_kernels(|| rule(&parts));
        for (found, expected) in own[0].of.iter().zip(&whole[0].of) {
            assert_bits(found, expected, "parts");
        }
    }
}

#[test]
fn kernels_step_more_parameters_than_a_launch_takes() {
    let (device, _alone) = gpu();
    tch::manual_seed(5);
    let sizes: Vec<i64> = (0..130).map(|index| index % 5).collect();
    let whole = [Parameter::random(sizes.iter().sum(), 2.0).on(device)];
    let mut begin = 0;
    let parts: Vec<Parameter> = sizes
        .iter()
        .map(|&size| {
            let of = whole[0].of.each_ref().map(|it| it.narrow(0, begin, size).copy());
            begin += size;
            Parameter { of, count: whole[0].count.copy() }
        })
        .collect();
    by_kernels(|| {
        adam(&whole, &ADAMW, &HOST);
        adam(&parts, &ADAMW, &HOST);
        sgd(&whole, &SGD, &HOST);
        sgd(&parts, &SGD, &HOST);
    });
    for (index, whole) in whole[0].of.iter().enumerate() {
        assert_bits(&Tensor::cat(&role(&parts, index), 0), whole, "parts");
    }
    if fake::is_installed() {
        let account = kernels::counted(|| fake::account(|| adam(&parts, &ADAMW, &HOST)));
        let nonempty = sizes.iter().filter(|&&size| size > 0).count() as u64;
        let launches = account.0["brigade::optimizer_adam"].calls;
        assert_eq!(launches, nonempty.div_ceil(OF_A_LAUNCH), "{account}");
        assert_eq!(account.calls(), launches, "nothing else runs: {account}");
        // Three are read and written, one is read.
        assert_eq!(account.bytes(), sizes.iter().sum::<i64>() as u64 * 7 * 4, "{account}");
    }
}

#[test]
fn kernels_keep_all_bits_of_a_step_that_is_skipped() {
    let (device, _alone) = gpu();
    tch::manual_seed(5);
    let given: Vec<Parameter> = SIZES.map(|size| Parameter::random(size, 3.0)).into();
    for (found, changes) in [(1f32, false), (0.0, true)] {
        let own = on(&given, device);
        let flag = Tensor::from(found).to_device(device);
        let numbers = DeviceNumbers { found_inf: Some(&flag), ..HOST };
        by_kernels(|| {
            adam(&own, &ADAMW, &numbers);
            sgd(&own, &SGD, &numbers);
        });
        let same = own.iter().zip(&given).all(|(own, given)| {
            own.of.iter().zip(&given.of).all(|(one, other)| {
                let bits = [one, other].map(|it| it.to_device(Device::Cpu).view_dtype(Kind::Int));
                bits[0].equal(&bits[1])
            })
        });
        assert_eq!(same, !changes);
    }
}

/// Numbers that are not finite are where the formula has them: an infinite mean stays infinite, and NaN stays NaN.
#[test]
fn kernels_have_the_infinities_and_nan_of_the_formula() {
    let (device, _alone) = gpu();
    tch::manual_seed(5);
    let special = [f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
    let size = 5 * special.len() as i64 + 4;
    let given = [Parameter::random(size, 3.0)];
    for (index, tensor) in given[0].of.iter().enumerate() {
        for (number, value) in special.into_iter().enumerate() {
            // Squares are not negative.
            let value = if index > 2 { value.abs() } else { value };
            let _ = tensor.narrow(0, (index * special.len() + number) as i64, 1).fill_(value);
        }
    }
    // Gradients whose squares are beyond float32, but not what is added to the mean of squares.
    let _ = given[0].of[1].narrow(0, size - 2, 2).fill_(1e20);
    let compare = |found: &Parameter, reference: &dyn Fn([f64; 5]) -> [f64; 5], what: &str| {
        let [of, before] = [&found.of, &given[0].of].map(|it| it.each_ref().map(values));
        for place in 0..size as usize {
            let exact = reference([0, 1, 2, 3, 4].map(|role| before[role][place]));
            for role in 0..5 {
                let (found, exact) = (of[role][place], f64::from(exact[role] as f32));
                let same = found == exact || (found.is_nan() && exact.is_nan());
                let both_finite = found.is_finite() && exact.is_finite();
                assert!(same || both_finite, "{what}, {role}, {place}: {found} is not {exact}");
            }
        }
    };
    for step in ADAM_STEPS {
        let own = on(&given, device);
        by_kernels(|| adam(&own, &step, &HOST));
        compare(&own[0], &|of| adam_in_float64(&step, 3.0, of), &format!("{step:?}"));
    }
    for step in SGD_STEPS {
        let own = on(&given, device);
        by_kernels(|| sgd(&own, &step, &HOST));
        compare(&own[0], &|of| sgd_in_float64(&step, of), &format!("{step:?}"));
    }
}

/// Gradients that lie otherwise than their parameter, and parameters with gaps, are copied before.
#[test]
fn kernels_step_parameters_and_gradients_of_other_layouts() {
    let (device, _alone) = gpu();
    tch::manual_seed(5);
    let given = Parameter::random(12 * 10, 2.0).on(device);
    let expected = [Parameter {
        of: given.of.each_ref().map(|it| it.view([12, 10]).copy()),
        count: given.count.copy(),
    }];
    let wide = Tensor::full([12, 16], 7.0, (Kind::Float, device));
    let mut of = expected[0].of.each_ref().map(Tensor::copy);
    of[0] = wide.narrow(1, 3, 10);
    of[0].shallow_clone().copy_(&expected[0].of[0]);
    of[1] = expected[0].of[1].tr().contiguous().tr();
    let own = [Parameter { of, count: given.count.copy() }];
    by_kernels(|| {
        adam(&expected, &ADAMW, &HOST);
        adam(&own, &ADAMW, &HOST);
    });
    for (found, expected) in own[0].of.iter().zip(&expected[0].of) {
        assert_bits(found, expected, "layout");
    }
    let sevens = wide.eq(7.0).sum(Kind::Int64).int64_value(&[]);
    assert_eq!(sevens, 12 * 6, "values between the rows were written");
}

/// What the kernels do not take has the bits of libtorch's.
#[test]
fn kernels_leave_other_types_to_libtorch() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    tch::manual_seed(5);
    let given = [Parameter::random(100, 2.0)];
    for kind in [Kind::BFloat16, Kind::Half, Kind::Double] {
        let converted = || {
            let own = given[0].on(device);
            [Parameter { of: own.of.map(|it| it.to_kind(kind)), count: own.count }]
        };
        let [found, expected] = [converted(), converted()];
        let account = fake::account(|| kernels::emulated(|| adam(&found, &ADAMW, &HOST)));
        adam(&expected, &ADAMW, &HOST);
        assert!(account.0.keys().all(|name| !name.starts_with("brigade::")), "{account}");
        for (found, expected) in found[0].of.iter().zip(&expected[0].of) {
            assert!(found.equal(expected), "{kind:?}");
        }
    }
}

/// A replay reads the learning rate and the gradients at their addresses, and makes copies of weights stale.
#[test]
fn kernels_of_a_recorded_step_read_its_numbers_in_16_bits() {
    let (device, _alone) = gpu();
    tch::manual_seed(5);
    let given = [Parameter::random(40 * 24, 1.0)];
    let shaped = |parameter: &Parameter| {
        let own = parameter.on(device);
        let of = own.of.map(|it| it.view([40, 24]).copy());
        [Parameter { of, count: own.count }]
    };
    let (own, expected) = (shaped(&given[0]), shaped(&given[0]));
    let input = Tensor::randn([3, 24], (Kind::Float, device));
    let product = |weight: &Tensor| {
        let _scope = Autocast::enter(device, Kind::BFloat16, true).unwrap();
        tch::no_grad(|| linear(&input, weight, None).unwrap())
    };
    let rate = Tensor::from(0.5f32).to_device(device);
    let numbers = DeviceNumbers { lr: Some(&rate), ..HOST };
    by_kernels(|| {
        // There is a copy before the recording.
        let _ = product(&own[0].of[0]);
        let step = || -> brigade_torch::Result<()> {
            let _ = own[0].count.shallow_clone().g_add_scalar_(1.0);
            adam(&own, &ADAMW, &numbers);
            Ok(())
        };
        let (mut graph, ()) = Graph::record(device, None, step).unwrap();
        assert_bits(&own[0].of[0], &expected[0].of[0], "a recording steps nothing");
        for lr in [0.25f32, 0.125, 1.0] {
            let _ = rate.shallow_clone().fill_(f64::from(lr));
            let _ = own[0].of[1].shallow_clone().g_mul_scalar_(-0.5);
            graph.replay().unwrap();
            let _ = expected[0].of[1].shallow_clone().g_mul_scalar_(-0.5);
            let _ = expected[0].count.shallow_clone().g_add_scalar_(1.0);
            let by_number = fused::AdamStep { lr: f64::from(lr), ..ADAMW };
            adam(&expected, &by_number, &HOST);
            for (found, expected) in own[0].of.iter().zip(&expected[0].of) {
                assert_bits(found, expected, "replay");
            }
            let fresh = product(&own[0].of[0].copy());
            assert!(product(&own[0].of[0]).equal(&fresh), "a copy was stale");
        }
    });
}
