//! Normalisation, shortcut and ReLU as one operation, against the operations.

use brigade_test_device::kernels::NormRelu;
use brigade_test_device::numeric_device;
use brigade_torch::{BatchNormState, batch_norm, batch_norm_relu};
use tch::{Device, Kind, Tensor, get_num_threads, set_num_threads};

use crate::distance::apart;

const EPS: f64 = 1e-5;
const MOMENTUM: f64 = 0.1;

/// Output, running statistics, and gradients of input, weight, bias and shortcut.
type Results = Vec<Tensor>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Plain,
    Relu,
    Shortcut,
}

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    /// libtorch's operations, one after the other.
    Operations,
    Brigade,
    /// The kernels for GPUs, compiled for the CPU.
    Kernels,
}

struct Case {
    input: Tensor,
    shortcut: Option<Tensor>,
    upstream: Tensor,
    channels: i64,
    relu: bool,
}

impl Case {
    fn new(shape: [i64; 4], mode: Mode) -> Self {
        tch::manual_seed(7);
        let random = || channels_last(&Tensor::randn(shape, (Kind::Float, numeric_device())));
        Self {
            // A mean far from zero: sums of squares would lose half of their digits.
            input: random() * 2.0 + 5.0,
            shortcut: (mode == Mode::Shortcut).then(random),
            upstream: random(),
            channels: shape[1],
            relu: mode != Mode::Plain,
        }
    }

    fn on(self, device: Device) -> Self {
        Self {
            input: self.input.to_device(device),
            shortcut: self.shortcut.map(|it| it.to_device(device)),
            upstream: self.upstream.to_device(device),
            ..self
        }
    }

    /// With values that the type has.
    fn rounded_to(self, kind: Kind) -> Self {
        let rounded = |tensor: Tensor| tensor.to_kind(kind).to_kind(Kind::Float);
        Self {
            input: rounded(self.input),
            shortcut: self.shortcut.map(rounded),
            upstream: rounded(self.upstream),
            ..self
        }
    }

    fn run(&self, kind: Kind, by: By) -> Results {
        // As under autocast.
        let of_parameters = if kind == Kind::Double { kind } else { Kind::Float };
        let leaf = |tensor: &Tensor| tensor.detach().to_kind(kind).set_requires_grad(true);
        let vector = |from: f64| {
            Tensor::linspace(from, from + 1.0, self.channels, (Kind::Double, self.input.device()))
                .to_kind(of_parameters)
        };
        let (input, shortcut) = (leaf(&self.input), self.shortcut.as_ref().map(leaf));
        let (weight, bias) = (vector(0.5), vector(-0.5));
        let [weight, bias] = [weight, bias].map(|vector| vector.set_requires_grad(true));
        let (running_mean, running_var) = (vector(0.0), vector(1.0));
        let upstream = self.upstream.to_kind(kind);
        let state = BatchNormState {
            weight: Some(&weight),
            bias: Some(&bias),
            running_mean: Some(&running_mean),
            running_var: Some(&running_var),
        };
        let output = match by {
            By::Brigade if self.relu => {
                batch_norm_relu(&input, shortcut.as_ref(), state, true, MOMENTUM, EPS).unwrap()
            }
            By::Brigade => batch_norm(&input, state, true, MOMENTUM, EPS).unwrap(),
            By::Operations => {
                let normal = input.batch_norm(
                    Some(&weight),
                    Some(&bias),
                    Some(&running_mean),
                    Some(&running_var),
                    true,
                    MOMENTUM,
                    EPS,
                    false,
                );
                match &shortcut {
                    Some(shortcut) => (normal + shortcut).relu(),
                    None if self.relu => normal.relu(),
                    None => normal,
                }
            }
            By::Kernels => {
                let mut results = NormRelu {
                    input: &input,
                    shortcut: shortcut.as_ref(),
                    weight: &weight,
                    bias: &bias,
                    running_mean: &running_mean,
                    running_var: &running_var,
                    upstream: &upstream,
                    momentum: MOMENTUM,
                    eps: EPS,
                    relu: self.relu,
                }
                .run()
                .unwrap();
                results.splice(1..1, [running_mean, running_var]);
                return results;
            }
        };
        (&output * upstream).sum(of_parameters).backward();
        let mut results = vec![output, running_mean, running_var];
        results.extend([&input, &weight, &bias].map(Tensor::grad));
        results.extend(shortcut.as_ref().map(Tensor::grad));
        results
    }
}

fn channels_last(tensor: &Tensor) -> Tensor {
    tensor.permute([0, 2, 3, 1]).contiguous().permute([0, 3, 1, 2])
}

#[test]
fn it_equals_the_operations_in_float64() {
    // Fewer rows than a block has, a last block that is not full, many channels.
    for shape in [[2, 16, 3, 3], [8, 64, 23, 17], [4, 512, 4, 4], [1, 2048, 1, 2]] {
        for mode in [Mode::Relu, Mode::Shortcut] {
            let case = Case::new(shape, mode);
            let fused = case.run(Kind::Float, By::Brigade);
            let [exact, plain] = [Kind::Double, Kind::Float].map(|it| case.run(it, By::Operations));
            for (index, (fused, exact)) in fused.iter().zip(&exact).enumerate() {
                // No further off than libtorch's own float32, which a few values decide.
                let allowed = 2e-6_f64.max(2.0 * apart(&plain[index], exact));
                let found = apart(fused, exact);
                assert!(found <= allowed, "{shape:?}, {mode:?}, {index}: {found}");
            }
            // TPUs have contiguous tensors only.
            assert_eq!(fused[0].stride(), case.input.relu().stride());
        }
    }
}

fn assert_as_close_as_the_operations(by: By, kind: Kind, shapes: &[[i64; 4]]) {
    for &shape in shapes {
        for mode in [Mode::Plain, Mode::Relu, Mode::Shortcut] {
            let mut case = Case::new(shape, mode).rounded_to(kind);
            if by == By::Kernels {
                case = case.on(Device::Cpu);
            }
            let fused = case.run(kind, by);
            let [exact, plain] = [Kind::Double, kind].map(|kind| case.run(kind, By::Operations));
            assert_eq!(fused.len(), exact.len());
            for (index, (fused, exact)) in fused.iter().zip(&exact).enumerate() {
                assert_eq!(fused.kind(), plain[index].kind());
                // Half of the type's last digit; of float32, what a few values decide.
                let least = match fused.kind() {
                    Kind::BFloat16 => 2_f64.powi(-8),
                    Kind::Half => 2_f64.powi(-11),
                    _ => 2e-6,
                };
                let allowed = least.max(1.1 * apart(&plain[index], exact));
                let found = apart(fused, exact);
                let what = format!("{by:?}, {kind:?}, {shape:?}, {mode:?}, {index}");
                assert!(found <= allowed, "{what}: {found}, allowed {allowed}");
            }
            // TPUs have contiguous tensors only.
            assert_eq!(fused[0].stride(), case.input.relu().stride());
        }
    }
}

#[test]
fn sixteen_bits_are_as_close_to_float64_as_the_operations_are() {
    for kind in [Kind::BFloat16, Kind::Half] {
        let shapes = [[2, 16, 3, 3], [8, 64, 23, 17], [1, 2048, 1, 2]];
        assert_as_close_as_the_operations(By::Brigade, kind, &shapes);
    }
}

#[test]
fn kernels_for_gpus_are_as_close_to_float64_as_the_operations_are() {
    // Two rows, rows that no number of threads divides, more channels than a block has threads for, a number of
    // channels that fills no warp.
    let shapes = [
        [1, 2048, 1, 2],
        [2, 16, 3, 3],
        [8, 64, 23, 17],
        [4, 512, 5, 3],
        [3, 24, 9, 7],
        [2, 296, 6, 5],
    ];
    assert_as_close_as_the_operations(By::Kernels, Kind::BFloat16, &shapes);
    assert_as_close_as_the_operations(By::Kernels, Kind::Half, &shapes[3..]);
}

#[test]
fn kernels_for_gpus_give_the_same_bits_in_each_run() {
    let case = Case::new([8, 64, 23, 17], Mode::Shortcut).on(Device::Cpu);
    let [one, other] = [(); 2].map(|()| case.run(Kind::BFloat16, By::Kernels));
    assert!(one.iter().zip(&other).all(|(one, other)| one.equal(other)));
}

#[test]
fn kernels_for_gpus_keep_nan_in_its_channel() {
    // The value that distances are measured from, and another one.
    for image in [0, 7] {
        let case = Case::new([8, 16, 12, 12], Mode::Relu).on(Device::Cpu);
        let _ = case.input.get(image).get(3).get(0).get(0).fill_(f64::NAN);
        let found = case.run(Kind::BFloat16, By::Kernels);
        let expected = case.run(Kind::Float, By::Operations);
        assert!(bool::try_from(found[0].isnan().any()).unwrap());
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            assert!(found.isnan().equal(&expected.isnan()), "{image}, {index}");
        }
    }
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    let before = get_num_threads();
    let case = Case::new([8, 64, 23, 17], Mode::Shortcut).on(Device::Cpu);
    for kind in [Kind::Float, Kind::BFloat16] {
        let runs = [1, 2, 3].map(|threads| {
            set_num_threads(threads);
            case.run(kind, By::Brigade)
        });
        for (first, other) in runs[0].iter().zip(runs[1].iter().chain(&runs[2])) {
            assert!(first.equal(other), "{kind:?}");
        }
    }
    set_num_threads(before);
}

#[test]
fn where_it_cannot_be_one_operation_it_is_three() {
    // The usual layout, few channels, float64, evaluation without gradients.
    let case = Case::new([3, 16, 5, 5], Mode::Shortcut);
    let plain = Case {
        input: case.input.contiguous(),
        shortcut: case.shortcut.as_ref().map(Tensor::contiguous),
        upstream: case.upstream.contiguous(),
        channels: 16,
        relu: true,
    };
    for (case, kind) in [
        (&plain, Kind::Float),
        (&Case::new([4, 3, 6, 6], Mode::Relu), Kind::Float),
        (&case, Kind::Double),
    ] {
        let [fused, apart] = [By::Brigade, By::Operations].map(|by| case.run(kind, by));
        for (fused, apart) in fused.iter().zip(&apart) {
            assert!(fused.allclose(apart, 1e-6, 1e-6, false));
        }
    }
    let state = BatchNormState::default();
    let error = batch_norm_relu(&case.input, None, state, false, MOMENTUM, EPS).unwrap_err();
    assert!(error.to_string().contains("running_mean"), "{error}");
}

#[test]
fn nan_stays_nan_and_is_not_hidden_by_relu() {
    let case = Case::new([2, 16, 4, 4], Mode::Relu);
    let _ = case.input.get(0).get(3).get(0).get(0).fill_(f64::NAN);
    for kind in [Kind::Float, Kind::BFloat16] {
        let output = &case.run(kind, By::Brigade)[0];
        let of_channel = |channel| output.select(1, channel).isnan();
        assert!(bool::try_from(of_channel(3).all()).unwrap(), "{kind:?}");
        assert!(!bool::try_from(of_channel(4).any()).unwrap(), "{kind:?}");
    }
}

#[test]
fn a_gradient_has_a_gradient() {
    let case = Case::new([2, 16, 4, 4], Mode::Shortcut);
    let second = |fused: bool| {
        let input = case.input.detach().set_requires_grad(true);
        let ones = Tensor::ones([16], (Kind::Float, numeric_device())).set_requires_grad(true);
        let zeros = ones.zeros_like().set_requires_grad(true);
        let (mean, var) = (zeros.detach().copy(), ones.detach().copy());
        let shortcut = case.shortcut.as_ref().unwrap();
        let output = if fused {
            let state = BatchNormState {
                weight: Some(&ones),
                bias: Some(&zeros),
                running_mean: Some(&mean),
                running_var: Some(&var),
            };
            batch_norm_relu(&input, Some(shortcut), state, true, MOMENTUM, EPS).unwrap()
        } else {
            let normal = input.batch_norm(
                Some(&ones),
                Some(&zeros),
                Some(&mean),
                Some(&var),
                true,
                MOMENTUM,
                EPS,
                false,
            );
            (normal + shortcut).relu()
        };
        let loss = (output.square() * &case.upstream).sum(Kind::Float);
        let first = Tensor::run_backward(&[loss], &[&input], true, true);
        first[0].square().sum(Kind::Float).backward();
        input.grad()
    };
    let found = apart(&second(true), &second(false));
    assert!(found < 1e-4, "{found}");
}
