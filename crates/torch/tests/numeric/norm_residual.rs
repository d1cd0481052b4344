//! Normalisation of a residual stream with the addition of a branch: the kernels of a GPU, emulated without one, and the
//! operations that take their place.

use brigade_test_device::kernels::kept_by_dropout;
use brigade_test_device::{fake, gpu, kernels};
use brigade_torch::{
    Autocast, BackwardOptions, GradOptions, NormResidualOptions, ResidualBranch, dropout, grad,
    norm_residual, norm_residual_adds_bias, norm_residual_seeds, rng_state, set_rng_state,
};
use tch::{Device, Kind, Tensor};

use crate::distance::{apart, assert_finite_differences};

/// A normalisation and what is added before it.
#[derive(Debug, Clone, Copy)]
struct Case {
    rms: bool,
    post: bool,
    affine: bool,
    branch: bool,
    branch_bias: bool,
    dropout: f64,
}

const LAYER: Case =
    Case { rms: false, post: false, affine: true, branch: true, branch_bias: false, dropout: 0.0 };
const CASES: [Case; 7] = [
    LAYER,
    Case { dropout: 0.1, branch_bias: true, ..LAYER },
    Case { branch: false, ..LAYER },
    Case { dropout: 1.0, affine: false, ..LAYER },
    Case { rms: true, dropout: 0.5, ..LAYER },
    Case { rms: true, branch: false, ..LAYER },
    Case { post: true, dropout: 0.1, ..LAYER },
];

/// Stream, branch, weight, bias and the branch's bias.
#[derive(Debug)]
struct Leaves([Tensor; 5]);

impl Leaves {
    /// Returns random leaves; the stream is far from zero.
    fn new(rows: i64, width: i64, kind: Kind) -> Self {
        let random = |size: &[i64]| Tensor::randn(size, (Kind::Float, Device::Cpu));
        Self([
            random(&[rows, width]) + 3.0,
            random(&[rows, width]).to_kind(kind),
            random(&[width]) * 0.1 + 1.0,
            random(&[width]) * 0.1,
            random(&[width]) * 0.1,
        ])
    }

    fn on(&self, device: Device) -> Self {
        Self(self.0.each_ref().map(|it| it.to_device(device).detach().set_requires_grad(true)))
    }

    fn exact(&self) -> Self {
        Self(self.0.each_ref().map(|it| it.to_kind(Kind::Double).detach().set_requires_grad(true)))
    }

    fn used(&self, case: Case) -> Vec<&Tensor> {
        let [stream, branch, weight, bias, branch_bias] = &self.0;
        let used = [
            (stream, true),
            (branch, case.branch),
            (weight, case.affine),
            (bias, case.affine && !case.rms),
            (branch_bias, case.branch && case.branch_bias),
        ];
        used.into_iter().filter(|(_, is_used)| *is_used).map(|(leaf, _)| leaf).collect()
    }
}

/// The next stream, the normalised values, and the gradients of the leaves that are used.
fn names(case: Case) -> Vec<&'static str> {
    let all = [
        ("stream", true),
        ("normed", true),
        ("gradient of the stream", true),
        ("gradient of the branch", case.branch),
        ("gradient of the weight", case.affine),
        ("gradient of the bias", case.affine && !case.rms),
        ("gradient of the branch's bias", case.branch && case.branch_bias),
    ];
    all.into_iter().filter(|(_, is_there)| *is_there).map(|(name, _)| name).collect()
}

const EPS: f64 = 1e-5;

fn run(leaves: &Leaves, case: Case) -> [Tensor; 2] {
    let [stream, branch, weight, bias, branch_bias] = &leaves.0;
    let branch = case.branch.then_some(ResidualBranch {
        values: branch,
        bias: case.branch_bias.then_some(branch_bias),
        dropout: case.dropout,
        seed: None,
    });
    let shape = [stream.size()[1]];
    let options = NormResidualOptions {
        weight: case.affine.then_some(weight),
        bias: (case.affine && !case.rms).then_some(bias),
        eps: EPS,
        rms: case.rms,
        post: case.post,
        ..NormResidualOptions::new(&shape)
    };
    let output = norm_residual(stream, branch, &options).unwrap();
    [output.stream, output.normed]
}

/// The operations one by one, with the given factors of dropout. The branch is computed in its own type, the rest in that
/// of the stream; the normalised values have the type `normed`.
fn operations(leaves: &Leaves, case: Case, factors: &Tensor, normed: Kind) -> [Tensor; 2] {
    let [stream, branch, weight, bias, branch_bias] = &leaves.0;
    let mut sum = stream.shallow_clone();
    if case.branch {
        let kind = branch.kind();
        let mut added = branch.shallow_clone();
        if case.branch_bias {
            added = &added + branch_bias.to_kind(kind);
        }
        if case.dropout > 0.0 {
            added = &added * factors.to_kind(kind);
        }
        sum = added.to_kind(stream.kind()) + stream;
    }
    let weight = case.affine.then_some(weight);
    let width = sum.size()[1];
    let normal = if case.rms {
        sum.rms_norm([width], weight, EPS)
    } else {
        sum.layer_norm([width], weight, case.affine.then_some(bias), EPS, false)
    };
    let stream = if case.post { normal.shallow_clone() } else { sum };
    [stream, normal.to_kind(normed)]
}

/// Appends the gradients for gradients of both outputs, and copies all to the CPU.
fn with_gradients(
    outputs: [Tensor; 2],
    leaves: &Leaves,
    case: Case,
    upstream: &[Tensor; 2],
) -> Vec<Tensor> {
    let upstream =
        [0, 1].map(|i| upstream[i].to_device(outputs[i].device()).to_kind(outputs[i].kind()));
    let options = GradOptions { output_gradients: &upstream.each_ref(), ..GradOptions::default() };
    let gradients = grad(&outputs.each_ref(), &leaves.used(case), options).unwrap();
    let mut all: Vec<Tensor> = outputs.into_iter().map(|it| it.detach()).collect();
    all.extend(gradients.into_iter().map(|it| it.unwrap()));
    all.into_iter().map(|it| it.to_device(Device::Cpu)).collect()
}

/// Runs the function with the kernels of the GPU.
pub(crate) fn by_kernels<R>(function: impl FnOnce() -> R) -> R {
    if fake::is_installed() { kernels::emulated(function) } else { function() }
}

fn by_kernels_in(
    kind: Kind,
    leaves: &Leaves,
    case: Case,
    device: Device,
    upstream: &[Tensor; 2],
) -> Vec<Tensor> {
    let leaves = leaves.on(device);
    by_kernels(|| {
        let outputs = {
            let _scope = Autocast::enter(device, kind, true).unwrap();
            run(&leaves, case)
        };
        assert_eq!(outputs[0].kind(), Kind::Float);
        assert_eq!(outputs[1].kind(), kind, "the kernels have not run: {case:?}");
        with_gradients(outputs, &leaves, case, upstream)
    })
}

/// Returns the factors that dropout on the CPU has for a seed.
pub(crate) fn factors_of(seed: u64, rows: i64, width: i64, probability: f64) -> Tensor {
    let below = (probability * 65536.0).round() as u32;
    let keep = if below == 65536 { 0.0 } else { 65536.0 / f64::from(65536 - below) };
    let tiles = (rows * width).div_euclid(128) + 1;
    let kept: Vec<Tensor> = (0..tiles)
        .map(|tile| {
            let [_, on_cpu] = kept_by_dropout(seed, tile as u64, 1, below).unwrap();
            on_cpu
        })
        .collect();
    let flat = Tensor::cat(&kept, 0).narrow(0, 0, rows * width).to_kind(Kind::Double) * keep;
    flat.view([rows, width])
}

/// Returns the seed that the next dropout on the device draws.
pub(crate) fn next_seed(device: Device) -> u64 {
    let before = rng_state(device).unwrap();
    let seed = Tensor::zeros([1], (Kind::Int64, device)).random_from(i64::MIN, None);
    set_rng_state(device, &before).unwrap();
    seed.int64_value(&[0]) as u64
}

/// Largest error that is allowed beside that of the operations: a unit in the last place of the result's type; of sums in
/// float32, a rounding for each addition.
pub(crate) fn unit(kind: Kind, additions: i64) -> f64 {
    match kind {
        Kind::Half => 2f64.powi(-10),
        Kind::BFloat16 => 2f64.powi(-7),
        _ => (additions + 1) as f64 * 2f64.powi(-24),
    }
}

fn upstream(rows: i64, width: i64, kind: Kind) -> [Tensor; 2] {
    let random = || Tensor::randn([rows, width], (Kind::Float, Device::Cpu));
    [random(), random().to_kind(kind)]
}

/// Checks the kernels against float64: the error is at most that of the operations and a unit in the last place.
fn check(rows: i64, width: i64, kind: Kind, case: Case, device: Device) {
    tch::manual_seed(7);
    let leaves = Leaves::new(rows, width, kind);
    let upstream = upstream(rows, width, kind);
    let factors = if case.branch && case.dropout > 0.0 {
        factors_of(next_seed(device), rows, width, case.dropout)
    } else {
        Tensor::ones([rows, width], (Kind::Double, Device::Cpu))
    };
    let start = rng_state(device).unwrap();
    let found = by_kernels_in(kind, &leaves, case, device, &upstream);
    set_rng_state(device, &start).unwrap();
    let again = by_kernels_in(kind, &leaves, case, device, &upstream);
    let exact = leaves.exact();
    let exact =
        with_gradients(operations(&exact, case, &factors, Kind::Double), &exact, case, &upstream);
    let plain = leaves.on(Device::Cpu);
    let plain = with_gradients(operations(&plain, case, &factors, kind), &plain, case, &upstream);
    for (index, name) in names(case).into_iter().enumerate() {
        let (found, exact) = (&found[index], &exact[index]);
        assert!(found.equal(&again[index]), "{name}: other bits in a second run, {case:?}");
        assert_eq!(found.kind(), plain[index].kind(), "{name}, {case:?}");
        if exact.abs().max().double_value(&[]) == 0.0 {
            assert_eq!(found.abs().max().double_value(&[]), 0.0, "{name}, {case:?}");
            continue;
        }
        // Columns are added up of values that sums over the width were made for.
        let additions =
            if name.contains("of the stream") || index < 2 { width } else { width + rows };
        let allowed = apart(&plain[index], exact) + unit(found.kind(), additions);
        let apart = apart(found, exact);
        assert!(
            apart <= allowed,
            "{name}: {apart:e} > {allowed:e}; {rows} x {width} of {kind:?}, {case:?}"
        );
    }
}

#[test]
fn the_kernels_are_no_further_from_float64_than_the_operations_in_16_bits() {
    let (device, _alone) = gpu();
    for kind in [Kind::BFloat16, Kind::Half] {
        // One vector; a warp that is not full; whole tiles of dropout; several warps.
        for (rows, width) in [(1, 8), (3, 40), (5, 128), (2, 384)] {
            for case in CASES {
                check(rows, width, kind, case, device);
            }
        }
    }
}

#[test]
fn a_block_of_the_backward_pass_has_several_rows_in_16_bits() {
    let (device, _alone) = gpu();
    if fake::is_installed() {
        // More rows than blocks: 16 blocks for each of two processors.
        check(70, 8, Kind::BFloat16, CASES[1], device);
    }
}

#[test]
fn rows_of_two_vectors_for_each_thread_and_more_are_normalised_in_16_bits() {
    let (device, _alone) = gpu();
    check(1, 4104, Kind::BFloat16, CASES[1], device);
    check(2, 8200, Kind::BFloat16, CASES[4], device);
}

#[test]
fn infinities_and_nan_stay_in_their_rows_in_16_bits() {
    let (device, _alone) = gpu();
    let (rows, width, kind) = (4, 128, Kind::BFloat16);
    let case = Case { branch_bias: true, ..LAYER };
    tch::manual_seed(3);
    let leaves = Leaves::new(rows, width, kind);
    let set = |leaf: usize, row, value: f64| {
        let _ = leaves.0[leaf].get(row).narrow(0, 5, 1).fill_(value);
    };
    set(0, 0, f64::NAN);
    set(1, 1, f64::INFINITY);
    set(1, 2, f64::MAX);
    let upstream = upstream(rows, width, kind);
    let found = by_kernels_in(kind, &leaves, case, device, &upstream);
    let plain = leaves.on(Device::Cpu);
    let factors = Tensor::ones([rows, width], (Kind::Double, Device::Cpu));
    let plain = with_gradients(operations(&plain, case, &factors, kind), &plain, case, &upstream);
    for (index, name) in names(case).into_iter().enumerate() {
        let [found, plain] = [&found[index], &plain[index]].map(|it| it.isfinite());
        assert!(found.equal(&plain), "{name}: {found} is not {plain}");
    }
    assert!(bool::try_from(found[0].isfinite().all_dim(1, false).get(3)).unwrap());
}

#[test]
fn dropout_drops_what_it_drops_on_the_cpu_for_the_same_seed_in_16_bits() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        // Seeds of another generator.
        return;
    }
    // Rows that begin with a tile of 128 values, and rows that do not.
    for width in [256, 72] {
        let ones = |kind| Tensor::ones([5, width], (kind, Device::Cpu));
        tch::manual_seed(11);
        let expected = dropout(&ones(Kind::Float), 0.3, None).unwrap();
        tch::manual_seed(11);
        let leaves = Leaves([
            Tensor::zeros([5, width], (Kind::Float, Device::Cpu)),
            ones(Kind::BFloat16),
            ones(Kind::Float).get(0),
            ones(Kind::Float).get(0),
            ones(Kind::Float).get(0),
        ]);
        let case = Case { dropout: 0.3, ..LAYER };
        let found = by_kernels_in(
            Kind::BFloat16,
            &leaves,
            case,
            device,
            &upstream(5, width, Kind::BFloat16),
        );
        assert!(found[0].equal(&expected), "width {width}");
    }
}

#[test]
fn gradients_of_gradients_are_those_of_the_operations_in_16_bits() {
    let (device, _alone) = gpu();
    let (rows, width, kind) = (3, 128, Kind::BFloat16);
    for case in [CASES[1], CASES[4], CASES[6]] {
        tch::manual_seed(5);
        let leaves = Leaves::new(rows, width, kind);
        let upstream = upstream(rows, width, kind);
        let factors = factors_of(next_seed(device), rows, width, case.dropout);
        let second = |outputs: [Tensor; 2], leaves: &Leaves| {
            let upstream = [0, 1]
                .map(|i| upstream[i].to_device(outputs[i].device()).to_kind(outputs[i].kind()));
            let options = GradOptions {
                output_gradients: &upstream.each_ref(),
                backward: BackwardOptions { create_graph: true, ..BackwardOptions::default() },
                ..GradOptions::default()
            };
            let used = leaves.used(case);
            let first = grad(&outputs.each_ref(), &used, options).unwrap();
            let penalty: Tensor = first
                .into_iter()
                .map(|gradient| gradient.unwrap().to_kind(Kind::Double).square().sum(Kind::Double))
                .sum();
            let options = GradOptions { allow_unused: true, ..GradOptions::default() };
            let second = grad(&[&penalty], &used, options).unwrap();
            second
                .into_iter()
                .map(|gradient| gradient.map(|gradient| gradient.to_device(Device::Cpu)))
                .collect::<Vec<Option<Tensor>>>()
        };
        let own = leaves.on(device);
        let found = by_kernels(|| {
            let outputs = {
                let _scope = Autocast::enter(device, kind, true).unwrap();
                run(&own, case)
            };
            second(outputs, &own)
        });
        let exact = leaves.exact();
        let exact = second(operations(&exact, case, &factors, Kind::Double), &exact);
        let plain = leaves.on(Device::Cpu);
        let plain = second(operations(&plain, case, &factors, kind), &plain);
        for (index, name) in names(case)[2..].iter().enumerate() {
            // A bias changes no gradient.
            let Some(exact) = &exact[index] else { continue };
            // The penalty's gradient of a 16-bit gradient is rounded to its type.
            let allowed = apart(plain[index].as_ref().unwrap(), exact) + unit(kind, 0);
            let apart = apart(found[index].as_ref().unwrap(), exact);
            assert!(apart <= allowed, "{name}: {apart:e} > {allowed:e}, {case:?}");
        }
    }
}

#[test]
fn without_kernels_it_is_the_operations_bit_for_bit() {
    let (device, _alone) = gpu();
    let device = if fake::is_installed() { Device::Cpu } else { device };
    for (width, kind) in [(12, Kind::Float), (128, Kind::Float), (128, Kind::Double)] {
        for case in CASES {
            tch::manual_seed(2);
            let leaves = Leaves::new(5, width, Kind::Float);
            let leaves = Leaves(leaves.0.map(|it| it.to_kind(kind))).on(device);
            let upstream = upstream(5, width, kind);
            let start = rng_state(device).unwrap();
            let dropped = Tensor::ones([5, width], (kind, device));
            let factors = dropout(&dropped, case.dropout, None).unwrap();
            set_rng_state(device, &start).unwrap();
            let found = with_gradients(run(&leaves, case), &leaves, case, &upstream);
            let plain =
                with_gradients(operations(&leaves, case, &factors, kind), &leaves, case, &upstream);
            for ((name, found), plain) in names(case).iter().zip(&found).zip(&plain) {
                assert!(found.equal(plain), "{name}, width {width} of {kind:?}, {case:?}");
            }
        }
    }
}

/// A row of an odd width, a branch in another type, float64, and no autocast.
#[test]
fn what_the_kernels_do_not_take_is_left_to_the_operations() {
    let (device, _alone) = gpu();
    let normed = |width, stream: Kind, branch: Kind, autocast: bool| {
        let stream = Tensor::zeros([2, width], (stream, device));
        let branch = Tensor::zeros([2, width], (branch, device));
        let shape = [width];
        let _scope = autocast.then(|| Autocast::enter(device, Kind::BFloat16, true).unwrap());
        let options = NormResidualOptions::new(&shape);
        let branch = Some(ResidualBranch::new(&branch));
        by_kernels(|| norm_residual(&stream, branch, &options)).unwrap().normed.kind()
    };
    assert_eq!(normed(16, Kind::Float, Kind::BFloat16, true), Kind::BFloat16);
    assert_eq!(normed(12, Kind::Float, Kind::BFloat16, true), Kind::Float);
    assert_eq!(normed(16, Kind::Float, Kind::Float, true), Kind::Float);
    assert_eq!(normed(16, Kind::Double, Kind::BFloat16, true), Kind::Double);
    assert_eq!(normed(16, Kind::Float, Kind::BFloat16, false), Kind::Float);
}

#[test]
fn gradients_equal_finite_differences() {
    let (device, _alone) = gpu();
    let device = if fake::is_installed() { Device::Cpu } else { device };
    for case in CASES {
        tch::manual_seed(9);
        let leaves = Leaves::new(2, 6, Kind::Float).on(device);
        let leaves = Leaves(leaves.0.map(|it| it.to_kind(Kind::Double))).on(device);
        let upstream = upstream(2, 6, Kind::Double).map(|it| it.to_kind(Kind::Double));
        let start = rng_state(device).unwrap();
        let loss = || {
            set_rng_state(device, &start).unwrap();
            let [stream, normed] = run(&leaves, case);
            let [of_stream, of_normed] = upstream.each_ref().map(|it| it.to_device(device));
            (stream * of_stream + normed * of_normed).sum(Kind::Double)
        };
        let used = leaves.used(case);
        assert_finite_differences(&format!("{case:?}"), &used, &loss);
    }
}

#[test]
fn a_branch_is_dropped_by_its_seed_in_16_bits() {
    let (device, _alone) = gpu();
    let (rows, width, kind) = (3, 40, Kind::BFloat16);
    tch::manual_seed(5);
    let stream = Tensor::zeros([rows, width], (Kind::Float, device));
    let ones = Tensor::ones([rows, width], (kind, device));
    let sizes = [width];
    let options = NormResidualOptions::new(&sizes);
    assert!(norm_residual_seeds(&stream, 3).unwrap().is_none(), "without autocast");
    let _scope = Autocast::enter(device, kind, true).unwrap();
    by_kernels(|| {
        assert!(norm_residual_seeds(&stream, 0).unwrap().is_none());
        let start = rng_state(device).unwrap();
        let seeds = norm_residual_seeds(&stream, 3).unwrap().unwrap();
        set_rng_state(device, &start).unwrap();
        assert!(seeds.equal(&norm_residual_seeds(&stream, 3).unwrap().unwrap()));
        let state = rng_state(device).unwrap();
        for index in [2, 0] {
            let seed = seeds.narrow(0, index, 1);
            let branch =
                ResidualBranch { dropout: 0.3, seed: Some(&seed), ..ResidualBranch::new(&ones) };
            let found = norm_residual(&stream, Some(branch), &options).unwrap().stream;
            let seed = seeds.int64_value(&[index]) as u64;
            let factors = factors_of(seed, rows, width, 0.3).to_kind(Kind::Float);
            assert!(found.to_device(Device::Cpu).equal(&factors), "seed {index}");
        }
        assert_eq!(rng_state(device).unwrap(), state, "nothing else was drawn");
        let seed = Tensor::zeros([1], (Kind::Float, device));
        let branch =
            ResidualBranch { dropout: 0.3, seed: Some(&seed), ..ResidualBranch::new(&ones) };
        let error = norm_residual(&stream, Some(branch), &options).unwrap_err().to_string();
        assert!(error.contains("seed"), "{error}");
    });
}

#[test]
fn biases_are_added_where_there_are_kernels_for_them_in_16_bits() {
    let (device, _alone) = gpu();
    let input = Tensor::zeros([2, 8], (Kind::Float, device));
    let adds = |width: i64, kind: Kind, autocast: bool| {
        let bias = Tensor::zeros([width], (kind, device));
        let _scope = autocast.then(|| Autocast::enter(device, Kind::BFloat16, true).unwrap());
        by_kernels(|| norm_residual_adds_bias(&input, &bias).unwrap())
    };
    assert!(adds(16, Kind::Float, true));
    assert!(!adds(12, Kind::Float, true));
    assert!(!adds(16, Kind::Double, true));
    assert!(!adds(16, Kind::Float, false));
}

#[test]
fn a_probability_that_is_none_and_a_branch_of_another_shape_are_errors() {
    let stream = Tensor::zeros([2, 8], (Kind::Float, Device::Cpu));
    let options = NormResidualOptions::new(&[8]);
    let branch = ResidualBranch { dropout: 1.5, ..ResidualBranch::new(&stream) };
    let error = norm_residual(&stream, Some(branch), &options).unwrap_err().to_string();
    assert!(error.contains("1.5"), "{error}");
    let other = Tensor::zeros([3, 8], (Kind::Float, Device::Cpu));
    let branch = ResidualBranch::new(&other);
    let error = norm_residual(&stream, Some(branch), &options).unwrap_err().to_string();
    assert!(error.contains("[3, 8]") && error.contains("[2, 8]"), "{error}");
}

#[test]
fn a_step_is_one_kernel_forward_and_two_backward() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let (rows, width) = (4, 128);
    let leaves = Leaves::new(rows, width, Kind::BFloat16).on(device);
    let case = Case { dropout: 0.1, branch_bias: true, ..LAYER };
    let upstream = upstream(rows, width, Kind::BFloat16).map(|it| it.to_device(device));
    let account = kernels::counted(|| {
        fake::account(|| {
            let outputs = {
                let _scope = Autocast::enter(device, Kind::BFloat16, true).unwrap();
                run(&leaves, case)
            };
            let options =
                GradOptions { output_gradients: &upstream.each_ref(), ..GradOptions::default() };
            let _ = grad(&outputs.each_ref(), &leaves.used(case), options).unwrap();
        })
    });
    // The seed, the forward, the backward, and the sums of its blocks.
    assert_eq!(account.calls(), 4, "{account}");
    let values = (rows * width) as u64;
    let sums = 4 * 3 * width as u64 * 4;
    assert_eq!(account.bytes(), 8 + values * 12 + values * 16 + 2 * sums, "{account}");
}

#[test]
fn a_recorded_step_has_other_data_and_other_dropout_in_each_replay_in_16_bits() {
    let (device, _alone) = gpu();
    let Device::Cuda(index) = device else { return };
    if !fake::is_installed() {
        return;
    }
    let (rows, width, kind) = (3, 128, Kind::BFloat16);
    let case = Case { dropout: 0.3, branch_bias: true, ..LAYER };
    let leaves = Leaves::new(rows, width, kind).on(device);
    let upstream = upstream(rows, width, kind);
    let own = upstream.each_ref().map(|it| it.to_device(device));
    let step = || {
        let outputs = {
            let _scope = Autocast::enter(device, kind, true).unwrap();
            run(&leaves, case)
        };
        let options = GradOptions { output_gradients: &own.each_ref(), ..GradOptions::default() };
        let gradients = grad(&outputs.each_ref(), &leaves.used(case), options).unwrap();
        let mut all: Vec<Tensor> = outputs.into_iter().map(|it| it.detach()).collect();
        all.extend(gradients.into_iter().map(|it| it.unwrap()));
        all
    };
    kernels::emulated(|| {
        let mut results = Vec::new();
        let graph = fake::Graph::capture(index, || results = step()).unwrap();
        let mut dropped = Vec::new();
        for data in 0..2 {
            tch::manual_seed(data);
            tch::no_grad(|| {
                leaves.0[0]
                    .shallow_clone()
                    .copy_(&Tensor::randn([rows, width], (Kind::Float, device)));
            });
            let start = rng_state(device).unwrap();
            graph.replay().unwrap();
            let replayed: Vec<Tensor> = results.iter().map(Tensor::copy).collect();
            set_rng_state(device, &start).unwrap();
            for (index, (found, expected)) in replayed.iter().zip(step()).enumerate() {
                assert!(found.equal(&expected), "{index} of replay {data}");
            }
            dropped.push(replayed[3].eq(0.0));
        }
        assert!(!dropped[0].equal(&dropped[1]), "the same values were dropped twice");
    });
}
