//! Normalisation, shortcut, ReLU and max pooling as one operation, against the operations.

use brigade_test_device::{fake, gpu, kernels, numeric_device};
use brigade_torch::{
    BackwardOptions, BatchNormState, GradOptions, batch_norm, batch_norm_relu,
    batch_norm_relu_max_pool, grad, max_pool2d,
};
use tch::{Device, Kind, Tensor, get_num_threads, set_num_threads};

use crate::distance::{apart, assert_finite_differences};

const EPS: f64 = 1e-5;
const MOMENTUM: f64 = 0.1;

/// Output, running statistics, and gradients of input, weight, bias and shortcut.
type Results = Vec<Tensor>;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Mode {
    Plain,
    Relu,
    Shortcut,
    Pool,
}

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum By {
    /// libtorch's operations, one after the other.
    Operations,
    Brigade,
    /// The kernels of the GPU, emulated without one.
    Kernels,
    /// The kernels of normalisation and ReLU, and libtorch's pooling of their output in float32.
    KernelsAndPooling,
}

struct Case {
    input: Tensor,
    shortcut: Option<Tensor>,
    upstream: Tensor,
    channels: i64,
    mode: Mode,
}

impl Case {
    fn new(shape: [i64; 4], mode: Mode) -> Self {
        tch::manual_seed(7);
        let random =
            |shape: [i64; 4]| channels_last(&Tensor::randn(shape, (Kind::Float, numeric_device())));
        let [images, channels, height, width] = shape;
        let output = match mode {
            Mode::Pool => [images, channels, (height + 1) / 2, (width + 1) / 2],
            _ => shape,
        };
        Self {
            // A mean far from zero: sums of squares would lose half of their digits.
            input: random(shape) * 2.0 + 5.0,
            shortcut: (mode == Mode::Shortcut).then(|| random(shape)),
            upstream: random(output),
            channels,
            mode,
        }
    }

    fn on(&self, device: Device) -> Self {
        Self {
            input: self.input.to_device(device),
            shortcut: self.shortcut.as_ref().map(|it| it.to_device(device)),
            upstream: self.upstream.to_device(device),
            ..*self
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
        let state = BatchNormState {
            weight: Some(&weight),
            bias: Some(&bias),
            running_mean: Some(&running_mean),
            running_var: Some(&running_var),
        };
        let relu = || batch_norm_relu(&input, shortcut.as_ref(), state, true, MOMENTUM, EPS);
        let step = || {
            let output = match (by, self.mode) {
                (By::Operations, mode) => operations(&input, shortcut.as_ref(), state, mode),
                (By::KernelsAndPooling, _) => pooled(&relu().unwrap().to_kind(Kind::Float)),
                (_, Mode::Plain) => batch_norm(&input, state, true, MOMENTUM, EPS).unwrap(),
                (_, Mode::Pool) => {
                    batch_norm_relu_max_pool(&input, state, true, MOMENTUM, EPS).unwrap()
                }
                (_, Mode::Relu | Mode::Shortcut) => relu().unwrap(),
            };
            let upstream = self.upstream.to_kind(output.kind());
            (&output * upstream).sum(of_parameters).backward();
            output.detach().to_kind(kind)
        };
        let output =
            if matches!(by, By::Operations | By::Brigade) { step() } else { by_kernels(step) };
        let mut results = vec![output, running_mean, running_var];
        results.extend([&input, &weight, &bias].map(Tensor::grad));
        results.extend(shortcut.as_ref().map(Tensor::grad));
        results.into_iter().map(|it| it.to_device(self.input.device())).collect()
    }

    /// Computes by kernels on the device, and returns the results on the CPU.
    fn run_on(&self, device: Device, kind: Kind, by: By) -> Results {
        let results = self.on(device).run(kind, by);
        results.into_iter().map(|it| it.to_device(Device::Cpu)).collect()
    }
}

fn operations(
    input: &Tensor,
    shortcut: Option<&Tensor>,
    state: BatchNormState<'_>,
    mode: Mode,
) -> Tensor {
    let BatchNormState { weight, bias, running_mean, running_var } = state;
    let normal =
        input.batch_norm(weight, bias, running_mean, running_var, true, MOMENTUM, EPS, false);
    match (mode, shortcut) {
        (Mode::Plain, _) => normal,
        (Mode::Pool, _) => pooled(&normal.relu()),
        (_, Some(shortcut)) => (normal + shortcut).relu(),
        (_, None) => normal.relu(),
    }
}

fn pooled(maps: &Tensor) -> Tensor {
    maps.max_pool2d([3, 3], [2, 2], [1, 1], [1, 1], false)
}

/// Runs the function with the kernels of the GPU.
fn by_kernels<R>(function: impl FnOnce() -> R) -> R {
    if fake::is_installed() { kernels::emulated(function) } else { function() }
}

/// A half of the last digit of a type; of float32, what a few values decide.
fn least(kind: Kind) -> f64 {
    match kind {
        Kind::BFloat16 => 2_f64.powi(-8),
        Kind::Half => 2_f64.powi(-11),
        _ => 2e-6,
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

fn assert_as_close_as_the_operations(
    kind: Kind,
    shapes: &[[i64; 4]],
    modes: &[Mode],
    run: &dyn Fn(&Case) -> Results,
) {
    for &shape in shapes {
        for &mode in modes {
            let case = Case::new(shape, mode).rounded_to(kind);
            let fused = run(&case);
            let [exact, plain] = [Kind::Double, kind].map(|kind| case.run(kind, By::Operations));
            assert_eq!(fused.len(), exact.len());
            // Which value of a window is the largest depends on rounding, and with it where its gradient goes.
            let compared = if mode == Mode::Pool { 3 } else { fused.len() };
            for (index, (fused, exact)) in fused.iter().zip(&exact).take(compared).enumerate() {
                assert_eq!(fused.kind(), plain[index].kind());
                let exact = exact.to_device(fused.device());
                let plain = plain[index].to_device(fused.device());
                let allowed = least(fused.kind()).max(1.1 * apart(&plain, &exact));
                let found = apart(fused, &exact);
                let what = format!("{kind:?}, {shape:?}, {mode:?}, {index}");
                assert!(found <= allowed, "{what}: {found}, allowed {allowed}");
            }
            if mode != Mode::Pool {
                // TPUs have contiguous tensors only.
                assert_eq!(fused[0].stride(), case.input.relu().stride());
            }
        }
    }
}

#[test]
fn sixteen_bits_are_as_close_to_float64_as_the_operations_are() {
    for kind in [Kind::BFloat16, Kind::Half] {
        let shapes = [[2, 16, 3, 3], [8, 64, 23, 17], [1, 2048, 1, 2]];
        let modes = [Mode::Plain, Mode::Relu, Mode::Shortcut];
        assert_as_close_as_the_operations(kind, &shapes, &modes, &|case| {
            case.run(kind, By::Brigade)
        });
    }
}

/// Two rows, rows that no number of threads divides, more channels than a block has threads for, a number of channels
/// that fills no warp; images of one row or column, and with odd sides.
const SHAPES: [[i64; 4]; 6] = [
    [1, 2048, 1, 2],
    [2, 16, 3, 3],
    [8, 64, 23, 17],
    [4, 512, 5, 3],
    [3, 24, 9, 7],
    [2, 296, 6, 5],
];

#[test]
fn kernels_for_gpus_are_as_close_to_float64_as_the_operations_are() {
    let (device, _alone) = gpu();
    let modes = [Mode::Plain, Mode::Relu, Mode::Shortcut, Mode::Pool];
    for (kind, shapes) in [(Kind::BFloat16, &SHAPES[..]), (Kind::Half, &SHAPES[3..])] {
        assert_as_close_as_the_operations(kind, shapes, &modes, &|case| {
            case.run_on(device, kind, By::Kernels)
        });
    }
}

/// The output is the same bits. The gradients of what is pooled are added up in another order.
fn assert_pools_as_libtorch(case: &Case, kind: Kind, device: Device, what: &str) {
    let fused = case.run_on(device, kind, By::Kernels);
    let separate = case.run_on(device, kind, By::KernelsAndPooling);
    assert_eq!(fused.len(), separate.len());
    for (index, (fused, separate)) in fused.iter().zip(&separate).enumerate() {
        let found = if index < 3 {
            f64::from(u8::from(!fused.equal(separate)))
        } else {
            apart(fused, separate)
        };
        let allowed = if index < 3 { 0.0 } else { least(fused.kind()) };
        assert!(found <= allowed, "{kind:?}, {what}, {index}: {found}, allowed {allowed}");
    }
}

#[test]
fn kernels_for_gpus_pool_as_libtorch_does_in_16_bits() {
    let (device, _alone) = gpu();
    let sides = [[1, 8, 1, 2], [2, 8, 2, 1], [1, 16, 1, 1 << 7], [5, 40, 2, 3], [1, 2056, 3, 4]];
    for kind in [Kind::BFloat16, Kind::Half] {
        for shape in SHAPES[1..].iter().chain(&sides) {
            let case = Case::new(*shape, Mode::Pool).rounded_to(kind);
            assert_pools_as_libtorch(&case, kind, device, &format!("{shape:?}"));
        }
    }
}

#[test]
fn kernels_for_gpus_take_the_first_of_equal_values_in_16_bits() {
    let (device, _alone) = gpu();
    let mut case = Case::new([2, 24, 9, 12], Mode::Pool).rounded_to(Kind::BFloat16);
    // Most windows have several largest values, and many of them are 0 behind ReLU.
    case.input = channels_last(&case.input.round().clamp(3.0, 6.0));
    assert_pools_as_libtorch(&case, Kind::BFloat16, device, "ties");
}

#[test]
fn kernels_for_gpus_give_the_same_bits_in_each_run() {
    let (device, _alone) = gpu();
    for mode in [Mode::Shortcut, Mode::Pool] {
        let case = Case::new([8, 64, 23, 17], mode);
        let [one, other] = [(); 2].map(|()| case.run_on(device, Kind::BFloat16, By::Kernels));
        assert!(one.iter().zip(&other).all(|(one, other)| one.equal(other)), "{mode:?}");
    }
}

#[test]
fn kernels_for_gpus_keep_nan_and_infinity_in_their_channels() {
    let (device, _alone) = gpu();
    // The value that distances are measured from, and another one. Infinity has no variance.
    for (image, value) in [(0, f64::NAN), (7, f64::NAN), (7, f64::INFINITY)] {
        for mode in [Mode::Relu, Mode::Shortcut, Mode::Pool] {
            let case = Case::new([8, 16, 12, 12], mode);
            let _ = case.input.get(image).get(3).get(0).get(0).fill_(value);
            let found = case.run_on(device, Kind::BFloat16, By::Kernels);
            let expected = case.run_on(Device::Cpu, Kind::Float, By::Operations);
            assert!(bool::try_from(found[0].isnan().any()).unwrap());
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                // The mean of values and an infinity is an infinity or NaN, which depends on the order of additions.
                if index != 1 || value.is_nan() {
                    assert!(found.isnan().equal(&expected.isnan()), "{image}, {mode:?}, {index}");
                }
            }
        }
    }
}

#[test]
fn infinite_shortcuts_and_nan_pass_gradients_as_the_operations_do_in_16_bits() {
    let (device, _alone) = gpu();
    let case = Case::new([2, 16, 5, 4], Mode::Shortcut);
    let shortcut = case.shortcut.as_ref().unwrap();
    for (row, value) in (0..).zip([f64::NAN, f64::INFINITY, f64::NEG_INFINITY]) {
        let _ = shortcut.get(1).get(5).get(row).fill_(value);
    }
    let found = case.run_on(device, Kind::BFloat16, By::Kernels);
    let expected = case.run_on(Device::Cpu, Kind::BFloat16, By::Operations);
    // The shortcut's gradient is the upstream one or 0. Elsewhere that may depend on rounding.
    let of_rows = |results: &Results| results[6].get(1).get(5).narrow(0, 0, 3);
    assert!(of_rows(&found).equal(&of_rows(&expected)));
    assert!(found[0].isnan().equal(&expected[0].isnan()));
}

#[test]
fn pooling_without_kernels_is_the_operations() {
    // The kernels' layout, the usual one, few channels, float64, none at all on the GPU.
    let case = Case::new([3, 16, 5, 6], Mode::Pool);
    let contiguous = Case { input: case.input.contiguous(), ..case.on(case.input.device()) };
    let few = Case::new([4, 3, 6, 5], Mode::Pool);
    let mut cases = vec![
        (&case, Kind::Float),
        (&contiguous, Kind::Float),
        (&few, Kind::Float),
        (&case, Kind::Double),
    ];
    if fake::is_installed() || numeric_device() == Device::Cpu {
        cases.push((&case, Kind::BFloat16));
    }
    for (case, kind) in cases {
        let leaf = || case.input.detach().to_kind(kind).set_requires_grad(true);
        let run = |pool: &dyn Fn(&Tensor, BatchNormState<'_>) -> Tensor| {
            let input = leaf();
            let ones = Tensor::ones([case.channels], (Kind::Float, input.device()));
            let zeros = ones.zeros_like();
            let (mean, var) = (zeros.copy(), ones.copy());
            let state = BatchNormState {
                weight: Some(&ones),
                bias: Some(&zeros),
                running_mean: Some(&mean),
                running_var: Some(&var),
            };
            let output = if kind == Kind::Double {
                pool(&input, BatchNormState::default())
            } else {
                pool(&input, state)
            };
            (&output * case.upstream.to_kind(kind)).sum(Kind::Float).backward();
            [output.detach(), input.grad(), mean, var]
        };
        let fused = run(&|input, state| {
            batch_norm_relu_max_pool(input, state, true, MOMENTUM, EPS).unwrap()
        });
        let separate = run(&|input, state| {
            let maps = batch_norm_relu(input, None, state, true, MOMENTUM, EPS).unwrap();
            max_pool2d(&maps, [3, 3], [2, 2], [1, 1]).unwrap()
        });
        for (fused, separate) in fused.iter().zip(&separate) {
            assert!(fused.equal(separate), "{kind:?}");
        }
    }
    let volumes = Tensor::zeros([2, 16, 5, 6, 3], (Kind::Float, numeric_device()));
    let state = BatchNormState::default();
    assert!(batch_norm_relu_max_pool(&volumes, state, true, MOMENTUM, EPS).is_err());
}

#[test]
fn gradients_of_pooled_values_equal_finite_differences() {
    tch::manual_seed(3);
    let double = (Kind::Double, numeric_device());
    let input = Tensor::randn([2, 2, 3, 4], double).set_requires_grad(true);
    let [weight, bias] = [(); 2].map(|()| Tensor::randn([2], double).set_requires_grad(true));
    let upstream = Tensor::randn([2, 2, 2, 2], double);
    let loss = || {
        let state = BatchNormState {
            weight: Some(&weight),
            bias: Some(&bias),
            ..BatchNormState::default()
        };
        let output = batch_norm_relu_max_pool(&input, state, true, MOMENTUM, EPS).unwrap();
        (output * &upstream).sum(Kind::Double)
    };
    assert_finite_differences("pooled", &[&input, &weight, &bias], &loss);
}

#[test]
fn gradients_of_gradients_are_those_of_the_operations_in_16_bits() {
    let (device, _alone) = gpu();
    for mode in [Mode::Relu, Mode::Shortcut, Mode::Pool] {
        let case = Case::new([2, 16, 5, 4], mode).rounded_to(Kind::BFloat16);
        let second = |kind: Kind, by: By| {
            let device = if by == By::Kernels { device } else { Device::Cpu };
            let case = case.on(device);
            let input = case.input.to_kind(kind).set_requires_grad(true);
            let shortcut = case.shortcut.as_ref().map(|it| it.to_kind(kind));
            let ones = Tensor::ones([16], (Kind::Float, device)).set_requires_grad(true);
            let zeros = ones.zeros_like().set_requires_grad(true);
            let (mean, var) = (zeros.detach().copy(), ones.detach().copy());
            let parameters = [&ones, &zeros, &mean, &var]
                .map(|it| it.to_kind(if kind == Kind::Double { kind } else { Kind::Float }));
            let state = BatchNormState {
                weight: Some(&parameters[0]),
                bias: Some(&parameters[1]),
                running_mean: Some(&parameters[2]),
                running_var: Some(&parameters[3]),
            };
            let step = || {
                let output = match (by, mode) {
                    (By::Operations, _) => operations(&input, shortcut.as_ref(), state, mode),
                    (_, Mode::Pool) => {
                        batch_norm_relu_max_pool(&input, state, true, MOMENTUM, EPS).unwrap()
                    }
                    _ => batch_norm_relu(&input, shortcut.as_ref(), state, true, MOMENTUM, EPS)
                        .unwrap(),
                };
                let upstream = case.upstream.to_kind(kind);
                let options = GradOptions {
                    output_gradients: &[&upstream],
                    backward: BackwardOptions { create_graph: true, ..BackwardOptions::default() },
                    ..GradOptions::default()
                };
                let first = grad(&[&output], &[&input], options).unwrap();
                first[0].as_ref().unwrap().square().sum(Kind::Float).backward();
                [first[0].as_ref().unwrap().detach(), input.grad(), ones.grad()]
            };
            let found = if by == By::Kernels { by_kernels(step) } else { step() };
            found.map(|it| it.to_device(Device::Cpu))
        };
        let found = second(Kind::BFloat16, By::Kernels);
        let plain = second(Kind::BFloat16, By::Operations);
        let exact = second(Kind::Double, By::Operations);
        for (index, exact) in exact.iter().enumerate() {
            let errors = [&found, &plain].map(|it| apart(&it[index], exact));
            // Roundings of the same operations, of which one has an input that is rounded in another way.
            let allowed = least(Kind::BFloat16).max(2.0 * errors[1]);
            assert!(errors[0] <= allowed, "{mode:?}, {index}: {errors:?}");
        }
    }
}

#[test]
fn a_recorded_step_has_other_data_in_each_replay_in_16_bits() {
    let (device, _alone) = gpu();
    let Device::Cuda(index) = device else { return };
    if !fake::is_installed() {
        return;
    }
    for mode in [Mode::Shortcut, Mode::Pool] {
        let case = Case::new([2, 16, 5, 4], mode).on(device);
        let kind = Kind::BFloat16;
        let input = case.input.to_kind(kind).set_requires_grad(true);
        let shortcut = case.shortcut.as_ref().map(|it| it.to_kind(kind));
        let upstream = case.upstream.to_kind(kind);
        let ones = Tensor::ones([16], (Kind::Float, device)).set_requires_grad(true);
        let zeros = ones.zeros_like();
        let (mean, var) = (zeros.copy(), ones.detach().copy());
        let step = || {
            let state = BatchNormState {
                weight: Some(&ones),
                bias: Some(&zeros),
                running_mean: Some(&mean),
                running_var: Some(&var),
            };
            let output = match mode {
                Mode::Pool => batch_norm_relu_max_pool(&input, state, true, MOMENTUM, EPS).unwrap(),
                _ => {
                    batch_norm_relu(&input, shortcut.as_ref(), state, true, MOMENTUM, EPS).unwrap()
                }
            };
            let options = GradOptions { output_gradients: &[&upstream], ..GradOptions::default() };
            let gradients = grad(&[&output], &[&input, &ones], options).unwrap();
            let mut all = vec![output.detach()];
            all.extend(gradients.into_iter().map(|it| it.unwrap()));
            all
        };
        kernels::emulated(|| {
            let mut results = Vec::new();
            let graph = fake::Graph::capture(index, || results = step()).unwrap();
            for data in 0..2 {
                tch::manual_seed(data);
                tch::no_grad(|| {
                    let random = Tensor::randn([2, 16, 5, 4], (Kind::Float, device));
                    input.shallow_clone().copy_(&random);
                });
                graph.replay().unwrap();
                let replayed: Vec<Tensor> = results.iter().map(Tensor::copy).collect();
                for (index, (found, expected)) in replayed.iter().zip(step()).enumerate() {
                    assert!(found.equal(&expected), "{index} of replay {data}, {mode:?}");
                }
            }
        });
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
        mode: Mode::Shortcut,
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
