//! Activations of linear layers and gated pairs: the kernels of a GPU, emulated without one, the loops of a CPU, and the
//! operations that take their place.

use std::iter::repeat_n;

use brigade_test_device::{fake, gpu, kernels};
use brigade_torch::{
    Activation, Autocast, BackwardOptions, Biased, GatedPair, GradOptions, activation,
    activation_linear, gated_activation, gated_linear, grad,
};
use tch::{Device, Kind, Tensor};

use crate::distance::{apart, assert_finite_differences};

const ACTIVATIONS: [Activation; 6] = [
    Activation::Gelu,
    Activation::GeluTanh,
    Activation::Silu,
    Activation::Mish,
    Activation::Relu,
    Activation::ReluSquared,
];

/// What an activation is computed of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Form {
    One,
    Packed,
    Two,
}

const FORMS: [Form; 3] = [Form::One, Form::Packed, Form::Two];

#[derive(Debug, Clone, Copy)]
struct Case {
    form: Form,
    biased: bool,
    activation: Activation,
}

impl Case {
    /// Returns `true` if a CPU has a loop for the case, in float32 and 16 bits.
    fn has_loop(self) -> bool {
        self.form != Form::One && !self.biased
    }
}

fn cases() -> impl Iterator<Item = Case> {
    let forms = FORMS.into_iter().flat_map(|form| [(form, false), (form, true)]);
    forms.flat_map(|(form, biased)| ACTIVATIONS.map(|activation| Case { form, biased, activation }))
}

/// Values, `up`, and their biases. Unused ones are there, too.
#[derive(Debug)]
struct Leaves([Tensor; 4]);

impl Leaves {
    /// Returns random values in a kind, and biases in float32.
    fn new(rows: i64, width: i64, kind: Kind, form: Form) -> Self {
        let columns = if form == Form::Packed { 2 * width } else { width };
        let random = |size: &[i64]| Tensor::randn(size, (Kind::Float, Device::Cpu));
        Self([
            (random(&[rows, columns]) * 2.0).to_kind(kind),
            random(&[rows, width]).to_kind(kind),
            random(&[columns]),
            random(&[width]),
        ])
    }

    fn map(&self, f: impl Fn(&Tensor) -> Tensor) -> Self {
        Self(self.0.each_ref().map(|leaf| f(leaf).detach().set_requires_grad(true)))
    }

    fn on(&self, device: Device) -> Self {
        self.map(|leaf| leaf.to_device(device))
    }

    fn exact(&self) -> Self {
        self.map(|leaf| leaf.to_kind(Kind::Double))
    }

    fn used(&self, case: Case) -> Vec<&Tensor> {
        let [values, up, bias, up_bias] = &self.0;
        let two = case.form == Form::Two;
        let used = [(values, true), (up, two), (bias, case.biased), (up_bias, case.biased && two)];
        used.into_iter().filter(|(_, is_used)| *is_used).map(|(leaf, _)| leaf).collect()
    }
}

fn names(case: Case) -> Vec<&'static str> {
    let two = case.form == Form::Two;
    let all = [
        ("output", true),
        ("gradient of the values", true),
        ("gradient of up", two),
        ("gradient of the bias", case.biased),
        ("gradient of the bias of up", case.biased && two),
    ];
    all.into_iter().filter(|(_, is_there)| *is_there).map(|(name, _)| name).collect()
}

fn gate(leaves: &Leaves, case: Case) -> Biased<'_> {
    Biased { values: &leaves.0[0], bias: case.biased.then_some(&leaves.0[2]) }
}

fn pair(leaves: &Leaves, case: Case) -> GatedPair<'_> {
    match case.form {
        Form::Packed => GatedPair::Packed(gate(leaves, case)),
        _ => GatedPair::Two {
            gate: gate(leaves, case),
            up: Biased { values: &leaves.0[1], bias: case.biased.then_some(&leaves.0[3]) },
        },
    }
}

fn run(leaves: &Leaves, case: Case) -> Tensor {
    match case.form {
        Form::One => activation(gate(leaves, case), case.activation),
        _ => gated_activation(pair(leaves, case), case.activation),
    }
    .unwrap()
}

fn applied(x: &Tensor, activation: Activation) -> Tensor {
    match activation {
        Activation::Gelu => x.gelu("none"),
        Activation::GeluTanh => x.gelu("tanh"),
        Activation::Silu => x.silu(),
        Activation::Mish => x.mish(),
        Activation::Relu => x.relu(),
        Activation::ReluSquared => x.relu().square(),
        _ => unreachable!("all activations are here"),
    }
}

/// The operations one by one, in the type of the values.
fn operations(leaves: &Leaves, case: Case) -> Tensor {
    let [values, up, bias, up_bias] = &leaves.0;
    let add = |values: &Tensor, bias: &Tensor| {
        if case.biased { values + bias.to_kind(values.kind()) } else { values.shallow_clone() }
    };
    let values = add(values, bias);
    match case.form {
        Form::One => applied(&values, case.activation),
        Form::Packed => {
            let halves = values.chunk(2, -1);
            applied(&halves[0], case.activation) * &halves[1]
        }
        Form::Two => applied(&values, case.activation) * add(up, up_bias),
    }
}

/// The output and the gradients of the leaves that are used, on the CPU.
fn with_gradients(output: &Tensor, leaves: &[&Tensor], upstream: &Tensor) -> Vec<Tensor> {
    let upstream = upstream.to_device(output.device()).to_kind(output.kind());
    let options = GradOptions { output_gradients: &[&upstream], ..GradOptions::default() };
    let gradients = grad(&[output], leaves, options).unwrap();
    let mut all = vec![output.detach()];
    all.extend(gradients.into_iter().map(|it| it.unwrap()));
    all.into_iter().map(|it| it.to_device(Device::Cpu)).collect()
}

/// Runs the function with the kernels of the GPU.
fn by_kernels<R>(function: impl FnOnce() -> R) -> R {
    if fake::is_installed() { kernels::emulated(function) } else { function() }
}

/// Returns the launches of kernels in a function, which runs without values.
fn launches(function: impl FnOnce()) -> Vec<(String, u64)> {
    let account = fake::account(|| kernels::counted(function));
    account.0.iter().map(|(name, entry)| (name.clone(), entry.calls)).collect()
}

/// Largest error that is allowed beside that of the operations: a unit in the last place of the result's type; of sums in
/// float32, a rounding for each addition.
fn unit(kind: Kind, additions: i64) -> f64 {
    match kind {
        Kind::Half => 2f64.powi(-10),
        Kind::BFloat16 => 2f64.powi(-7),
        _ => (additions + 1) as f64 * 2f64.powi(-23),
    }
}

fn upstream(rows: i64, width: i64, kind: Kind) -> Tensor {
    Tensor::randn([rows, width], (Kind::Float, Device::Cpu)).to_kind(kind)
}

/// Checks the kernels against float64: the error is at most that of the operations and a unit in the last place.
fn check(rows: i64, width: i64, kind: Kind, case: Case, device: Device) {
    tch::manual_seed(7);
    let leaves = Leaves::new(rows, width, kind, case.form);
    let upstream = upstream(rows, width, kind);
    let own = leaves.on(device);
    let by_kernels = || by_kernels(|| with_gradients(&run(&own, case), &own.used(case), &upstream));
    let found = by_kernels();
    // Sums are what an order could change.
    let again = if case.biased { by_kernels() } else { found.iter().map(Tensor::copy).collect() };
    let exact = leaves.exact();
    let exact = with_gradients(&operations(&exact, case), &exact.used(case), &upstream);
    let plain = leaves.on(Device::Cpu);
    let plain = with_gradients(&operations(&plain, case), &plain.used(case), &upstream);
    for (index, name) in names(case).into_iter().enumerate() {
        let (found, exact) = (&found[index], &exact[index]);
        let place = format!("{name}; {rows} x {width} of {kind:?}, {case:?}");
        assert!(found.equal(&again[index]), "other bits in a second run: {place}");
        assert_eq!((found.kind(), found.size()), (plain[index].kind(), plain[index].size()));
        if exact.abs().max().double_value(&[]) == 0.0 {
            assert!(found.equal(&found.zeros_like()), "not zero: {place}");
            continue;
        }
        let additions = if name.contains("bias") { rows } else { 0 };
        let allowed = apart(&plain[index], exact) + unit(found.kind(), additions);
        let apart = apart(found, exact);
        assert!(apart <= allowed, "{apart:e} > {allowed:e}: {place}");
    }
}

#[test]
fn the_kernels_are_no_further_from_float64_than_the_operations_in_16_bits() {
    let (device, _alone) = gpu();
    // Each thread of a block is one of the CPU: pairs without biases only of one activation.
    for case in cases()
        .filter(|case| case.form == Form::One || case.biased || case.activation == Activation::Silu)
    {
        check(3, 13, Kind::BFloat16, case, device);
    }
    // One value; whole vectors, fewer and more than a block has along the columns; more of them that are not aligned.
    for (kind, rows, width) in
        [(Kind::Half, 1, 1), (Kind::Half, 5, 8), (Kind::BFloat16, 9, 272), (Kind::Half, 2, 250)]
    {
        for case in cases().filter(|case| case.activation == Activation::Gelu) {
            check(rows, width, kind, case, device);
        }
    }
}

#[test]
fn the_kernels_are_no_further_from_float64_than_the_operations_in_float32() {
    let (device, _alone) = gpu();
    for case in cases().filter(|case| case.biased) {
        check(4, 12, Kind::Float, case, device);
    }
    for case in cases().filter(|case| case.activation == Activation::Silu) {
        check(3, 131, Kind::Float, case, device);
    }
}

#[test]
fn parts_of_several_rows_are_added_up_in_16_bits() {
    let (device, _alone) = gpu();
    // On two emulated processors there are 16 parts of at most eight rows at once: each part has several of them, and the
    // last one fewer.
    for case in cases().filter(|case| case.biased && case.activation == Activation::Silu) {
        check(1000, 8, Kind::BFloat16, case, device);
        check(261, 3, Kind::Half, case, device);
    }
}

#[test]
fn the_loops_of_a_cpu_are_no_further_from_float64_than_the_operations_in_16_bits() {
    for case in cases().filter(|case| case.has_loop()) {
        // One value; less than a tile, several of them, and rows of a packed pair that end within one.
        for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
            for (rows, width) in [(1, 1), (3, 13), (2, 1100), (70, 96)] {
                check(rows, width, kind, case, Device::Cpu);
            }
        }
    }
}

#[test]
fn a_pair_on_a_cpu_is_computed_in_float32_and_rounded_once_in_16_bits() {
    for case in cases().filter(|case| case.has_loop()) {
        for kind in [Kind::BFloat16, Kind::Half] {
            tch::manual_seed(8);
            let leaves = Leaves::new(9, 130, kind, case.form);
            let upstream = upstream(9, 130, kind);
            let wide = leaves.map(|leaf| leaf.to_kind(Kind::Float));
            let [found, expected] = [&leaves.on(Device::Cpu), &wide]
                .map(|it| with_gradients(&run(it, case), &it.used(case), &upstream));
            for (found, expected) in found.iter().zip(&expected) {
                assert!(found.equal(&expected.to_kind(kind)), "{case:?}, {kind:?}");
            }
        }
    }
}

/// The gradients of a pair, behind its output, of leaves that may lie anywhere.
fn of_pair(gate: &Tensor, up: &Tensor, activation: Activation, upstream: &Tensor) -> Vec<Tensor> {
    let [gate, up] = [gate, up].map(|it| it.detach().set_requires_grad(true));
    let pair = GatedPair::Two { gate: (&gate).into(), up: (&up).into() };
    with_gradients(&gated_activation(pair, activation).unwrap(), &[&gate, &up], upstream)
}

#[test]
fn threads_place_alignment_and_layout_change_no_bit_of_a_pair_on_a_cpu_in_16_bits() {
    let before = tch::get_num_threads();
    for kind in [Kind::Float, Kind::BFloat16, Kind::Half] {
        tch::manual_seed(4);
        let random = || (Tensor::randn([50, 600], (Kind::Float, Device::Cpu)) * 3.0).to_kind(kind);
        let [gate, up, upstream] = [random(), random(), random()];
        for activation in ACTIVATIONS {
            let run = |part: &dyn Fn(&Tensor) -> Tensor| {
                of_pair(&part(&gate), &part(&up), activation, &part(&upstream))
            };
            let whole = run(&Tensor::shallow_clone);
            let same = |found: Vec<Tensor>, part: &dyn Fn(&Tensor) -> Tensor, about: &str| {
                for (index, (found, whole)) in found.iter().zip(&whole).enumerate() {
                    assert!(
                        found.equal(&part(whole)),
                        "{about}: {index}, {activation:?}, {kind:?}"
                    );
                }
            };
            for threads in [1, 2, 3] {
                tch::set_num_threads(threads);
                let found = run(&Tensor::shallow_clone);
                same(found, &Tensor::shallow_clone, &format!("{threads} threads"));
            }
            tch::set_num_threads(before);
            let parts: [&dyn Fn(&Tensor) -> Tensor; 6] = [
                &|it| it.narrow(1, 1, 599),
                &|it| it.narrow(1, 37, 5).contiguous(),
                &|it| it.flatten(0, -1).narrow(0, 3, 29_000),
                &|it| it.tr(),
                &|it| it.view([50, 6, 100]).transpose(0, 1),
                &|it| it.narrow(0, 7, 1).expand([4, 600], false),
            ];
            for (index, part) in parts.into_iter().enumerate() {
                same(run(part), part, &format!("part {index}"));
            }
            // Both halves of one product.
            let packed = Tensor::cat(&[&gate, &up], 1).set_requires_grad(true);
            let output = gated_activation(GatedPair::Packed((&packed).into()), activation).unwrap();
            let [output, gradient] = with_gradients(&output, &[&packed], &upstream)
                .try_into()
                .expect("an output and a gradient");
            let halves = gradient.chunk(2, 1);
            same(
                vec![output, halves[0].copy(), halves[1].copy()],
                &Tensor::shallow_clone,
                "packed",
            );
        }
    }
}

/// Rows that lie apart, a transposed matrix, a middle dimension, and a start that is no multiple of 16 bytes.
#[test]
fn values_of_any_layout_are_read_in_16_bits() {
    let (device, _alone) = gpu();
    tch::manual_seed(3);
    let kind = Kind::BFloat16;
    let whole = Tensor::randn([7, 40], (Kind::Float, device)).to_kind(kind);
    let layouts = [
        whole.narrow(1, 8, 16),
        whole.narrow(1, 3, 16),
        whole.tr(),
        whole.view([7, 5, 8]).transpose(0, 1),
        whole.view([7, 5, 8]).select(1, 2),
        whole.narrow(0, 0, 1).expand([6, 40], false),
    ];
    for (index, values) in layouts.iter().enumerate() {
        for activation in [Activation::GeluTanh, Activation::Relu] {
            let leaf = values.detach().set_requires_grad(true);
            let dense = values.contiguous().set_requires_grad(true);
            let upstream = Tensor::randn(values.size(), (Kind::Float, Device::Cpu)).to_kind(kind);
            let [found, expected] = [&leaf, &dense].map(|leaf| {
                by_kernels(|| {
                    let output = brigade_torch::activation(leaf, activation).unwrap();
                    with_gradients(&output, &[leaf], &upstream)
                })
            });
            for (found, expected) in found.iter().zip(&expected) {
                assert!(found.equal(expected), "layout {index}");
            }
        }
    }
}

#[test]
fn nothing_beyond_the_values_is_read_or_written_in_16_bits() {
    let (device, _alone) = gpu();
    let kind = Kind::BFloat16;
    // The values lie within NaN, and results in a matrix whose other places are compared.
    for (rows, width) in [(3, 8), (5, 7), (17, 1), (2, 264)] {
        tch::manual_seed(width);
        let within = Tensor::full([rows + 2, width + 16], f64::NAN, (kind, device));
        let place = within.narrow(0, 1, rows).narrow(1, 8, width);
        let values = Tensor::randn([rows, width], (Kind::Float, Device::Cpu)).to_kind(kind);
        place.shallow_clone().copy_(&values);
        let before = within.copy();
        let leaf = place.detach().set_requires_grad(true);
        let bias = Tensor::full([width + 2], f64::NAN, (Kind::Float, device));
        let bias = bias.narrow(0, 1, width).fill_(0.5).detach().set_requires_grad(true);
        let upstream = upstream(rows, width, kind);
        let found = by_kernels(|| {
            let input = Biased { values: &leaf, bias: Some(&bias) };
            let output = activation(input, Activation::Silu).unwrap();
            with_gradients(&output, &[&leaf, &bias], &upstream)
        });
        assert!(found.iter().all(|it| bool::try_from(it.isfinite().all()).unwrap()));
        let [now, before] = [&within, &before].map(|it| it.nan_to_num(9.0, None, None));
        assert!(now.equal(&before), "{rows} x {width}");
    }
}

#[test]
fn infinities_and_nan_give_what_the_operations_give_in_16_bits() {
    let (device, _alone) = gpu();
    let kind = Kind::BFloat16;
    for case in cases().filter(|case| !case.biased) {
        tch::manual_seed(3);
        let leaves = Leaves::new(6, 16, kind, case.form);
        let upstream = upstream(6, 16, kind);
        let set = |tensor: &Tensor, row, column, value: f64| {
            let _ = tensor.get(row).narrow(0, column, 1).fill_(value);
        };
        for (row, value) in [f64::NAN, f64::INFINITY, f64::NEG_INFINITY].into_iter().enumerate() {
            set(&leaves.0[0], row as i64, 2, value);
        }
        set(&leaves.0[1], 3, 4, f64::INFINITY);
        // Where ReLU cuts off, and where it does not.
        set(&leaves.0[0], 4, 1, -3.0);
        set(&leaves.0[0], 4, 2, 3.0);
        set(&upstream, 4, 1, f64::INFINITY);
        set(&upstream, 4, 2, f64::NAN);
        let own = |device| {
            let own = leaves.on(device);
            by_kernels(|| with_gradients(&run(&own, case), &own.used(case), &upstream))
        };
        let mut all = vec![own(device)];
        if case.has_loop() {
            all.push(own(Device::Cpu));
        }
        // libtorch's vectors for 16 bits on a CPU have NaN for GELU of infinity.
        let exact = leaves.exact();
        let exact = with_gradients(&operations(&exact, case), &exact.used(case), &upstream);
        for (index, name) in names(case).into_iter().enumerate() {
            let kinds: [fn(&Tensor) -> Tensor; 2] = [Tensor::isnan, Tensor::isinf];
            for (found, kind_of) in all.iter().flat_map(|it| kinds.map(|kind_of| (it, kind_of))) {
                let [found, exact] = [&found[index], &exact[index]].map(kind_of);
                assert!(found.equal(&exact), "{name}, {case:?}: {found} is not {exact}");
            }
        }
    }
}

#[test]
fn without_kernels_it_is_the_operations_bit_for_bit() {
    let (device, _alone) = gpu();
    let device = if fake::is_installed() { Device::Cpu } else { device };
    for (rows, width, kind) in [(3, 13, Kind::Float), (0, 8, Kind::Float), (4, 6, Kind::Double)] {
        if kind == Kind::Float && device.is_cuda() && rows > 0 {
            continue; // The kernels take these.
        }
        // A CPU has loops for the others.
        for case in cases().filter(|case| !case.has_loop() || kind == Kind::Double || rows == 0) {
            tch::manual_seed(2);
            let leaves = Leaves::new(rows, width, kind, case.form).on(device);
            let upstream = upstream(rows, width, kind);
            let found = with_gradients(&run(&leaves, case), &leaves.used(case), &upstream);
            let plain = with_gradients(&operations(&leaves, case), &leaves.used(case), &upstream);
            for ((name, found), plain) in names(case).iter().zip(&found).zip(&plain) {
                assert!(found.equal(plain), "{name}, {rows} x {width} of {kind:?}, {case:?}");
            }
        }
    }
}

/// Returns the product and all gradients.
fn product(leaves: &Leaves, weight: &Tensor, case: Case, upstream: &Tensor) -> Vec<Tensor> {
    let output = match case.form {
        Form::One => activation_linear(gate(leaves, case), case.activation, weight, None),
        _ => gated_linear(pair(leaves, case), case.activation, weight, None),
    };
    let mut used = leaves.used(case);
    used.push(weight);
    with_gradients(&output.unwrap(), &used, upstream)
}

#[test]
fn a_product_of_an_activation_is_that_of_both_one_by_one_in_16_bits() {
    let (device, _alone) = gpu();
    let kind = Kind::BFloat16;
    let chosen = [Activation::GeluTanh, Activation::Silu];
    let chosen = || cases().filter(|case| chosen.contains(&case.activation));
    let with_loops = chosen().filter(|case| case.has_loop()).map(|case| (case, Device::Cpu));
    for (case, device) in chosen().map(|case| (case, device)).chain(with_loops) {
        tch::manual_seed(5);
        let leaves = Leaves::new(6, 16, kind, case.form).on(device);
        let weight = Tensor::randn([10, 16], (Kind::Float, device)).to_kind(kind);
        let weight = weight.set_requires_grad(true);
        let upstream = upstream(6, 10, kind);
        let found = by_kernels(|| product(&leaves, &weight, case, &upstream));
        let expected = by_kernels(|| {
            let output = run(&leaves, case).linear::<Tensor>(&weight, None);
            let mut used = leaves.used(case);
            used.push(&weight);
            with_gradients(&output, &used, &upstream)
        });
        for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
            // Products of the same numbers, which libtorch may add up in another order before it rounds.
            let apart = apart(found, expected);
            assert!(apart <= unit(kind, 0), "{index}: {apart:e}, {case:?}");
        }
    }
}

#[test]
fn a_frozen_weight_and_frozen_values_get_no_gradient_in_16_bits() {
    let (device, _alone) = gpu();
    let kind = Kind::BFloat16;
    for case in cases().filter(|case| case.activation == Activation::Gelu) {
        tch::manual_seed(5);
        let leaves = Leaves::new(6, 16, kind, case.form).on(device);
        let weight = Tensor::randn([10, 16], (Kind::Float, device)).to_kind(kind);
        let learned = weight.copy().set_requires_grad(true);
        let upstream = upstream(6, 10, kind);
        let frozen = leaves.0.each_ref().map(Tensor::detach);
        let (of_weight, of_leaves, all) = by_kernels(|| {
            let frozen = Leaves(frozen);
            let run = |leaves: &Leaves, weight: &Tensor, wanted: &[&Tensor]| {
                let output = match case.form {
                    Form::One => {
                        activation_linear(gate(leaves, case), case.activation, weight, None)
                    }
                    _ => gated_linear(pair(leaves, case), case.activation, weight, None),
                };
                with_gradients(&output.unwrap(), wanted, &upstream)
            };
            (
                run(&frozen, &learned, &[&learned]),
                run(&leaves, &weight, &leaves.used(case)),
                product(&leaves, &learned, case, &upstream),
            )
        });
        assert!(of_weight[1].equal(all.last().unwrap()), "{case:?}");
        for (index, found) in of_leaves.iter().enumerate() {
            assert!(found.equal(&all[index]), "{index}, {case:?}");
        }
    }
}

/// Gradients of an output that can be differentiated once more.
fn first(output: &Tensor, used: &[&Tensor], upstream: &Tensor) -> Vec<Tensor> {
    let upstream = upstream.to_device(output.device()).to_kind(output.kind());
    let options = GradOptions {
        output_gradients: &[&upstream],
        backward: BackwardOptions { create_graph: true, ..BackwardOptions::default() },
        ..GradOptions::default()
    };
    let first = grad(&[output], used, options).unwrap();
    first.into_iter().map(|gradient| gradient.unwrap()).collect()
}

/// Gradients of the squared length of gradients, on the CPU; none where those are constant.
fn of_first(first: Vec<Tensor>, used: &[&Tensor]) -> Vec<Option<Tensor>> {
    let squares = first.into_iter().map(|it| it.to_kind(Kind::Double).square().sum(Kind::Double));
    let penalty: Tensor = squares.sum();
    if !penalty.requires_grad() {
        return Vec::new();
    }
    let options = GradOptions { allow_unused: true, ..GradOptions::default() };
    let second = grad(&[&penalty], used, options).unwrap();
    second.into_iter().map(|it| it.map(|it| it.to_device(Device::Cpu))).collect()
}

fn second(output: &Tensor, used: &[&Tensor], upstream: &Tensor) -> Vec<Option<Tensor>> {
    of_first(first(output, used, upstream), used)
}

/// Checks that second gradients are no further from float64 than those of the operations.
fn check_second(found: &[Option<Tensor>], plain: &[Option<Tensor>], exact: &[Option<Tensor>]) {
    assert_eq!(found.len(), plain.len());
    for (index, found) in found.iter().enumerate() {
        let (Some(plain), Some(exact)) = (&plain[index], &exact[index]) else { continue };
        if exact.abs().max().double_value(&[]) == 0.0 {
            continue;
        }
        let found = found.as_ref().expect("a second gradient");
        let allowed = apart(plain, exact) + unit(found.kind(), 3);
        let apart = apart(found, exact);
        assert!(apart <= allowed, "{index}: {apart:e} > {allowed:e}");
    }
}

#[test]
fn gradients_of_gradients_are_those_of_the_operations_in_16_bits() {
    let (device, _alone) = gpu();
    let kind = Kind::BFloat16;
    let with_loops = cases().filter(|case| case.has_loop()).map(|case| (case, Device::Cpu));
    for (case, device) in cases().map(|case| (case, device)).chain(with_loops) {
        tch::manual_seed(5);
        let leaves = Leaves::new(3, 16, kind, case.form);
        let upstream = upstream(3, 16, kind);
        let own = leaves.on(device);
        let found = by_kernels(|| second(&run(&own, case), &own.used(case), &upstream));
        let plain = leaves.on(Device::Cpu);
        let plain = second(&operations(&plain, case), &plain.used(case), &upstream);
        let exact = leaves.exact();
        let exact = second(&operations(&exact, case), &exact.used(case), &upstream);
        check_second(&found, &plain, &exact);
    }
}

#[test]
fn gradients_of_gradients_go_through_a_product_in_16_bits() {
    let (device, _alone) = gpu();
    let kind = Kind::BFloat16;
    let curved = || cases().filter(|case| case.activation != Activation::Relu);
    let with_loops = curved().filter(|case| case.has_loop()).map(|case| (case, Device::Cpu));
    let biased = curved().filter(|case| case.biased).map(|case| (case, device));
    for (case, device) in biased.chain(with_loops) {
        tch::manual_seed(5);
        let leaves = Leaves::new(3, 16, kind, case.form);
        let weight = Tensor::randn([4, 16], (Kind::Float, Device::Cpu)).to_kind(kind);
        let upstream = upstream(3, 4, kind);
        let run = |device: Device, kind: Kind, fused: bool, of_weight: bool| {
            let leaves = match kind {
                Kind::Double => leaves.exact(),
                _ => leaves.on(device),
            };
            let weight = weight.to_device(device).to_kind(kind).detach().set_requires_grad(true);
            let output = match (fused, case.form) {
                (false, _) => operations(&leaves, case).linear::<Tensor>(&weight, None),
                (true, Form::One) => {
                    activation_linear(gate(&leaves, case), case.activation, &weight, None).unwrap()
                }
                (true, _) => {
                    gated_linear(pair(&leaves, case), case.activation, &weight, None).unwrap()
                }
            };
            let mut used = leaves.used(case);
            // The gradient of the weight alone depends on the values, too.
            if of_weight {
                let first = first(&output, &[&weight], &upstream);
                return of_first(first, &used);
            }
            used.push(&weight);
            second(&output, &used, &upstream)
        };
        for of_weight in [false, true] {
            let found = by_kernels(|| run(device, kind, true, of_weight));
            let plain = run(Device::Cpu, kind, false, of_weight);
            check_second(&found, &plain, &run(Device::Cpu, Kind::Double, false, of_weight));
        }
    }
}

#[test]
fn gradients_equal_finite_differences() {
    let (device, _alone) = gpu();
    let device = if fake::is_installed() { Device::Cpu } else { device };
    for case in cases() {
        tch::manual_seed(9);
        let leaves = Leaves::new(2, 3, Kind::Float, case.form).exact().on(device);
        let upstream = upstream(2, 3, Kind::Double).to_device(device);
        let loss = || (run(&leaves, case) * &upstream).sum(Kind::Double);
        let used = leaves.used(case);
        assert_finite_differences(&format!("{case:?}"), &used, &loss);
    }
}

/// float64 and values without elements.
#[test]
fn what_the_kernels_do_not_take_is_left_to_the_operations() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let counted = |size: [i64; 2], kind| {
        let values = Tensor::zeros(size, (kind, device));
        let found = launches(|| drop(activation(&values, Activation::Gelu).unwrap()));
        found.iter().any(|(name, _)| name.starts_with("brigade::activation"))
    };
    for (size, kind, expected) in [
        ([2, 8], Kind::BFloat16, true),
        ([2, 8], Kind::Half, true),
        ([2, 7], Kind::Float, true),
        ([2, 8], Kind::Double, false),
        ([0, 8], Kind::Float, false),
        ([2, 0], Kind::Float, false),
    ] {
        assert_eq!(counted(size, kind), expected, "{size:?} of {kind:?}");
    }
}

#[test]
fn wrong_shapes_are_errors_that_contain_them() {
    let form = (Kind::Float, Device::Cpu);
    let (values, other) = (Tensor::zeros([2, 8], form), Tensor::zeros([2, 6], form));
    let pair = GatedPair::Two { gate: (&values).into(), up: (&other).into() };
    let error = gated_activation(pair, Activation::Silu).unwrap_err().to_string();
    assert!(error.contains("[2, 8]") && error.contains("[2, 6]"), "{error}");
    let odd = Tensor::zeros([2, 7], form);
    let error = gated_activation(GatedPair::Packed((&odd).into()), Activation::Silu);
    assert!(error.unwrap_err().to_string().contains("[2, 7]"));
    let bias = Tensor::zeros([7], form);
    let input = Biased { values: &values, bias: Some(&bias) };
    let error = activation(input, Activation::Silu).unwrap_err().to_string();
    assert!(error.contains("[7]") && error.contains("[2, 8]"), "{error}");
    let number = Tensor::from(0f32);
    assert!(activation(Biased { values: &number, bias: Some(&bias) }, Activation::Silu).is_err());
    assert!(gated_activation(GatedPair::Packed((&number).into()), Activation::Silu).is_err());
    assert_eq!(activation(&number, Activation::Silu).unwrap().double_value(&[]), 0.0);
}

#[test]
fn a_feed_forward_layer_has_a_kernel_forward_and_two_backward() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let (rows, width, kind) = (4, 16, Kind::BFloat16);
    for form in FORMS {
        let case = Case { form, biased: true, activation: Activation::Silu };
        let leaves = Leaves::new(rows, width, kind, form).on(device);
        let weight = Tensor::zeros([8, width], (Kind::Float, device)).set_requires_grad(true);
        let upstream = Tensor::zeros([rows, 8], (kind, device));
        let account = fake::account(|| {
            kernels::counted(|| {
                let output = {
                    let _scope = Autocast::enter(device, kind, true).unwrap();
                    match form {
                        Form::One => {
                            activation_linear(gate(&leaves, case), case.activation, &weight, None)
                        }
                        _ => gated_linear(pair(&leaves, case), case.activation, &weight, None),
                    }
                };
                let mut used = leaves.used(case);
                used.push(&weight);
                let options =
                    GradOptions { output_gradients: &[&upstream], ..GradOptions::default() };
                let _ = grad(&[&output.unwrap()], &used, options).unwrap();
            });
        });
        let prefix =
            if form == Form::One { "brigade::activation" } else { "brigade::activation_gated" };
        let bytes = (rows * width) as u64 * 2;
        // Forward: one or two tensors read, one written. Backward: beside these the gradient read, and as many gradients
        // as inputs written.
        let inputs = if form == Form::One { 1 } else { 2 };
        let sums = inputs * width as u64 * 4;
        for (name, expected) in [
            (prefix.to_owned(), (inputs + 1) * bytes),
            (format!("{prefix}_backward"), (2 * inputs + 2) * bytes + sums),
            ("brigade::activation_sums".to_owned(), sums),
        ] {
            let entry = account.0.get(&name).unwrap_or_else(|| panic!("{name} in {account}"));
            assert_eq!((entry.calls, entry.bytes), (1, expected), "{name}, {form:?}");
        }
        let own = account.0.keys().filter(|name| name.starts_with("brigade::activation")).count();
        assert_eq!(own, 3, "{account}");
    }
}

#[test]
fn a_recorded_step_has_other_data_in_each_replay_in_16_bits() {
    let (device, _alone) = gpu();
    let Device::Cuda(index) = device else { return };
    if !fake::is_installed() {
        return;
    }
    let case = Case { form: Form::Packed, biased: true, activation: Activation::Silu };
    let leaves = Leaves::new(5, 16, Kind::BFloat16, case.form).on(device);
    let upstream = upstream(5, 16, Kind::BFloat16).to_device(device);
    let step = || {
        let output = run(&leaves, case);
        let options = GradOptions { output_gradients: &[&upstream], ..GradOptions::default() };
        let gradients = grad(&[&output], &leaves.used(case), options).unwrap();
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
                let random = Tensor::randn([5, 32], (Kind::Float, device));
                leaves.0[0].shallow_clone().copy_(&random);
            });
            graph.replay().unwrap();
            let replayed: Vec<Tensor> = results.iter().map(Tensor::copy).collect();
            for (index, (found, expected)) in replayed.iter().zip(step()).enumerate() {
                assert!(found.equal(&expected), "{index} of replay {data}");
            }
        }
    });
}

/// Sizes, layouts and options drawn by a seed: values within a larger matrix, of which nothing else is read or written.
#[test]
fn random_shapes_are_no_further_from_float64_than_the_operations_in_16_bits() {
    let (device, _alone) = gpu();
    tch::manual_seed(29);
    let draw =
        |below: i64| Tensor::randint(below, [1], (Kind::Int64, Device::Cpu)).int64_value(&[0]);
    let cases: Vec<Case> = cases().collect();
    let kinds = [Kind::BFloat16, Kind::Half, Kind::Float];
    let drawn: Vec<(i64, i64, Kind, Case)> = repeat_n((), 24)
        .map(|()| {
            let case = cases[draw(cases.len() as i64) as usize];
            (1 + draw(70), 1 + draw(600), kinds[draw(3) as usize], case)
        })
        .collect();
    for (rows, width, kind, case) in drawn {
        check(rows, width, kind, case, device);
    }
}
