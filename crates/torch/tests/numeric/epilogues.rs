//! Products with epilogues, in place of which the GPU made of host memory has its own, and the choice between them and
//! operations apart.

use std::process::Command;

use brigade_test_device::{fake, gpu, kernels};
use brigade_torch::{
    Activation, Autocast, BackwardOptions, GpuMath, GradOptions, LinearParameters, feed_forward,
    grad, linear,
};
use kernels::ProductTimes;
use tch::{Device, Kind, Tensor};

use crate::distance::apart;

const NOTHING: ProductTimes<'_> =
    ProductTimes { algorithms: &[], launch: 0.0, named: ("", 0.0), identity: "" };
/// Each launch takes longer than the only algorithm, so that it is chosen.
const CHOSEN: ProductTimes<'_> = ProductTimes { algorithms: &[0.0], launch: 1e6, ..NOTHING };
/// Runs after which a choice between two candidates is made: three of each, and one that reads the last event.
const RUNS: usize = 7;

#[derive(Debug, Clone, Copy)]
struct Case {
    rows: i64,
    /// Features of the input, of the hidden layer and of the output.
    widths: [i64; 3],
    kind: Kind,
    /// Weights as GPT-2 has them, `[in, out]`.
    transposed: bool,
    /// The second layer has a bias.
    biased: bool,
    /// The input's rows have other values between them.
    strided: bool,
}

const CASE: Case = Case {
    rows: 10,
    widths: [16, 24, 8],
    kind: Kind::BFloat16,
    transposed: false,
    biased: true,
    strided: false,
};

/// Input, first weight and bias, second weight and bias.
struct Leaves([Tensor; 5]);

impl Leaves {
    /// Returns random values that the kind can hold, in float32: weights `[out, in]`.
    fn new(case: Case) -> Self {
        tch::manual_seed(11);
        let [inputs, hidden, outputs] = case.widths;
        let random = |size: &[i64], factor: f64| {
            let values = Tensor::randn(size, (Kind::Float, Device::Cpu)) * factor;
            values.to_kind(case.kind).to_kind(Kind::Float)
        };
        Self([
            random(&[case.rows, inputs], 1.0),
            random(&[hidden, inputs], (inputs as f64).powf(-0.5)),
            random(&[hidden], 0.5),
            random(&[outputs, hidden], (hidden as f64).powf(-0.5)),
            random(&[outputs], 0.5),
        ])
    }

    /// Returns leaves of their own, in the case's layouts.
    fn on(&self, device: Device, kind: Kind, case: Case) -> Self {
        Self(std::array::from_fn(|index| {
            let values = self.0[index].to_device(device).to_kind(kind);
            let values = match index {
                0 if case.strided => {
                    Tensor::cat(&[&values, &values], 1).narrow(1, 0, case.widths[0])
                }
                1 | 3 if case.transposed => values.tr().contiguous().tr(),
                _ => values,
            };
            values.detach().set_requires_grad(true)
        }))
    }

    fn used(&self, case: Case) -> Vec<&Tensor> {
        self.0.iter().take(if case.biased { 5 } else { 4 }).collect()
    }
}

fn ours(leaves: &Leaves, case: Case) -> Tensor {
    let [input, weight, bias, second_weight, second_bias] = &leaves.0;
    let second_bias = case.biased.then_some(second_bias);
    feed_forward(
        input,
        LinearParameters { weight, bias: Some(bias) },
        Activation::GeluTanh,
        LinearParameters { weight: second_weight, bias: second_bias },
    )
    .unwrap()
}

fn by_operations(leaves: &Leaves, case: Case) -> Tensor {
    let [input, weight, bias, second_weight, second_bias] = &leaves.0;
    let hidden = input.linear(weight, Some(bias)).gelu("tanh");
    hidden.linear(second_weight, case.biased.then_some(second_bias))
}

fn upstream(case: Case) -> Tensor {
    tch::manual_seed(12);
    let size = [case.rows, case.widths[2]];
    Tensor::randn(size, (Kind::Float, Device::Cpu)).to_kind(case.kind)
}

/// Returns the output and the gradients of the leaves that are used, under autocast in 16 bits.
fn run(
    leaves: &Leaves,
    used: &[&Tensor],
    case: Case,
    function: impl Fn(&Leaves, Case) -> Tensor,
) -> Vec<Tensor> {
    let device = leaves.0[0].device();
    let output = {
        let autocast = leaves.0[0].kind() != Kind::Double;
        let _scope = autocast.then(|| Autocast::enter(device, case.kind, true).unwrap());
        // A change in place, as of a residual addition behind the layer.
        function(leaves, case).f_mul_scalar_(2).unwrap()
    };
    let upstream = upstream(case).to_device(device).to_kind(output.kind());
    let options = GradOptions { output_gradients: &[&upstream], ..GradOptions::default() };
    let mut all = vec![output.detach()];
    all.extend(grad(&[&output], used, options).unwrap().into_iter().map(|it| it.unwrap()));
    all.into_iter().map(|it| it.to_device(Device::Cpu)).collect()
}

/// Unit in the last place of the kind.
fn unit(kind: Kind) -> f64 {
    if kind == Kind::Half { 2f64.powi(-10) } else { 2f64.powi(-7) }
}

/// Returns the names of the products with epilogues that the function launches.
fn products(function: impl FnOnce()) -> Vec<String> {
    let account = fake::account(function);
    let calls = account.0.iter().filter(|(name, _)| name.starts_with("brigade::product"));
    calls.flat_map(|(name, it)| vec![name.clone(); it.calls as usize]).collect()
}

/// Errors of results against float64, and what is allowed: those of the operations and a unit in the last place.
fn check(found: &[Tensor], plain: &[Tensor], exact: &[Tensor], about: &str, kind: Kind) {
    for (index, found) in found.iter().enumerate() {
        assert!(found.size() == exact[index].size(), "{about}, {index}");
        let allowed = apart(&plain[index], &exact[index]) + unit(kind);
        let apart = apart(found, &exact[index]);
        assert!(apart <= allowed, "{about}, {index}: {apart:e} > {allowed:e}");
    }
}

#[test]
fn all_candidates_are_no_further_from_float64_than_the_operations_in_16_bits() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let mut cases = Vec::new();
    for kind in [Kind::BFloat16, Kind::Half] {
        for (transposed, biased) in [(false, true), (true, true), (true, false), (false, false)] {
            cases.push((Case { kind, transposed, biased, ..CASE }, true));
        }
    }
    cases.push((Case { strided: true, ..CASE }, true));
    cases.push((Case { rows: 1, ..CASE }, true));
    cases.push((Case { widths: [16, 24, 7], ..CASE }, false));
    cases.push((Case { widths: [12, 24, 8], ..CASE }, false));
    cases.push((Case { widths: [16, 20, 8], transposed: true, ..CASE }, false));
    for (case, is_fused) in cases {
        let leaves = Leaves::new(case);
        let exact = leaves.on(Device::Cpu, Kind::Double, case);
        let exact = run(&exact, &exact.used(case), case, by_operations);
        let plain = leaves.on(device, Kind::Float, case);
        let plain = run(&plain, &plain.used(case), case, by_operations);
        for with_kernels in [true, false] {
            let own = leaves.on(device, Kind::Float, case);
            let step = || run(&own, &own.used(case), case, ours);
            kernels::with_products(CHOSEN, || {
                for attempt in 0..=RUNS {
                    let mut found = Vec::new();
                    let launched = products(|| {
                        found = if with_kernels { kernels::emulated(step) } else { step() };
                    });
                    check(&found, &plain, &exact, &format!("{case:?}, run {attempt}"), case.kind);
                    if attempt == RUNS {
                        // A hidden layer with its gradient, and the second layer's bias.
                        let expected = if is_fused { 2 + usize::from(case.biased) } else { 0 };
                        let all: Vec<_> =
                            launched.iter().filter(|it| !it.contains("sums")).collect();
                        assert!(
                            if is_fused { launched.len() == expected } else { all.is_empty() },
                            "{case:?}: {launched:?}"
                        );
                    }
                }
            });
        }
    }
}

#[test]
fn gradients_of_a_part_of_the_leaves_are_those_of_all_in_16_bits() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let leaves = Leaves::new(CASE).on(device, Kind::Float, CASE);
    // The heuristic's first in each run. A sum may be added up in another order, and then rounded once.
    with_deterministic(|| {
        kernels::with_products(CHOSEN, || {
            let all = run(&leaves, &leaves.used(CASE), CASE, ours);
            for index in 0..5 {
                let frozen = Leaves(std::array::from_fn(|other| {
                    let leaf = leaves.0[other].detach();
                    if other == index { leaf.set_requires_grad(true) } else { leaf }
                }));
                let found = run(&frozen, &[&frozen.0[index]], CASE, ours);
                let apart = apart(&found[1], &all[1 + index]);
                assert!(apart <= unit(CASE.kind), "{index}: {apart:e}");
            }
        });
    });
}

#[test]
fn the_gradient_of_a_bias_is_a_sum_in_the_weights_product_in_16_bits() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    for transposed in [false, true] {
        let case = Case { transposed, widths: [16, 24, 24], ..CASE };
        let layer = |leaves: &Leaves, _: Case| {
            linear(&leaves.0[0], &leaves.0[1], Some(&leaves.0[2])).unwrap()
        };
        let plain = |leaves: &Leaves, _: Case| leaves.0[0].linear(&leaves.0[1], Some(&leaves.0[2]));
        let leaves = Leaves::new(case);
        let on = |device, kind, function: &dyn Fn(&Leaves, Case) -> Tensor| {
            let own = leaves.on(device, kind, case);
            run(&own, &own.0[..3].iter().collect::<Vec<_>>(), case, function)
        };
        let exact = on(Device::Cpu, Kind::Double, &plain);
        let plain = on(device, Kind::Float, &plain);
        kernels::with_products(CHOSEN, || {
            for attempt in 0..=RUNS {
                let mut found = Vec::new();
                let launched = products(|| found = on(device, Kind::Float, &layer));
                check(&found, &plain, &exact, &format!("{transposed}, run {attempt}"), case.kind);
                if attempt == RUNS {
                    assert_eq!(launched, ["brigade::product_sums/0"]);
                }
            }
        });
    }
}

#[test]
fn gradients_of_gradients_are_those_of_the_operations_in_16_bits() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let case = CASE;
    let leaves = Leaves::new(case);
    let second = |device, kind, function: &dyn Fn(&Leaves, Case) -> Tensor| {
        let leaves = leaves.on(device, kind, case);
        let used: Vec<&Tensor> = leaves.0.iter().collect();
        let output = {
            let autocast = kind != Kind::Double;
            let _scope = autocast.then(|| Autocast::enter(device, case.kind, true).unwrap());
            function(&leaves, case)
        };
        let upstream = upstream(case).to_device(device).to_kind(output.kind());
        let options = GradOptions {
            output_gradients: &[&upstream],
            backward: BackwardOptions { create_graph: true, ..BackwardOptions::default() },
            ..GradOptions::default()
        };
        let first = grad(&[&output], &used, options).unwrap().into_iter().map(|it| it.unwrap());
        let penalty: Tensor =
            first.map(|it| it.to_kind(Kind::Double).square().sum(Kind::Double)).sum();
        let found = grad(&[&penalty], &used[..4], GradOptions::default()).unwrap();
        found.into_iter().map(|it| it.unwrap().to_device(Device::Cpu)).collect::<Vec<_>>()
    };
    let exact = second(Device::Cpu, Kind::Double, &by_operations);
    let plain = second(device, Kind::Float, &by_operations);
    let found = kernels::with_products(CHOSEN, || second(device, Kind::Float, &ours));
    check(&found, &plain, &exact, "second gradients", case.kind);
}

#[test]
fn what_has_no_epilogue_has_the_bits_of_both_layers_one_by_one() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let case = CASE;
    for (device, kind) in [
        (device, Kind::Double),
        (device, Kind::Float),
        (Device::Cpu, Kind::Float),
        (Device::Cpu, Kind::Double),
    ] {
        let leaves = Leaves::new(case);
        let results = |function: &dyn Fn(&Leaves, Case) -> Tensor| {
            let leaves = leaves.on(device, kind, case);
            let output = function(&leaves, case);
            let upstream = upstream(case).to_device(device).to_kind(kind);
            let options = GradOptions { output_gradients: &[&upstream], ..GradOptions::default() };
            let gradients = grad(&[&output], &leaves.used(case), options).unwrap();
            let mut all = vec![output.detach()];
            all.extend(gradients.into_iter().map(|it| it.unwrap()));
            all
        };
        let mut found = Vec::new();
        let launched = products(|| found = kernels::with_products(CHOSEN, || results(&ours)));
        assert_eq!(launched, [""; 0], "{device:?}, {kind:?}");
        for (index, (found, plain)) in found.iter().zip(results(&by_operations)).enumerate() {
            assert!(found.equal(&plain), "{index} on {device:?} in {kind:?}");
        }
    }
}

/// Runs a function in deterministic mode.
fn with_deterministic<R>(function: impl FnOnce() -> R) -> R {
    struct Restore(GpuMath);
    impl Drop for Restore {
        fn drop(&mut self) {
            self.0.apply();
        }
    }
    let before = GpuMath::current().unwrap();
    let _restore = Restore(before);
    GpuMath { deterministic: true, ..before }.apply();
    function()
}

/// Returns which algorithm of the first product each of some forwards takes; `None` for the operations apart.
fn forwards(leaves: &Leaves, count: usize) -> Vec<Option<u32>> {
    let forward = || {
        let launched = products(|| {
            let _scope = Autocast::enter(leaves.0[0].device(), CASE.kind, true).unwrap();
            drop(ours(leaves, CASE));
        });
        assert!(launched.len() <= 1, "{launched:?}");
        launched.first().map(|it| it.rsplit('/').next().unwrap().parse().unwrap())
    };
    (0..count).map(|_| forward()).collect()
}

#[test]
fn the_candidate_with_the_smallest_median_of_three_runs_is_taken_in_16_bits() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let leaves = Leaves::new(CASE).on(device, Kind::Float, CASE);
    let of = |algorithms: &[f64], launch: f64, count: usize| {
        let times = ProductTimes { algorithms, launch, ..NOTHING };
        kernels::with_products(times, || forwards(&leaves, count))
    };
    let found = of(&[9e6, 5e6, 7e6], 2e7, 18);
    let measured: Vec<_> = [None, Some(0), Some(1), Some(2)].repeat(3);
    assert_eq!(found[..12], measured);
    assert_eq!(found[12..], [Some(1); 6]);
    // Slower than the operations apart.
    assert_eq!(of(&[9e9, 5e9], 1e6, 12)[9..], [None; 3]);
    // An algorithm that does not run is not tried again, and the operations take its place.
    let found = of(&[-1.0, 5e6], 2e7, 12);
    assert_eq!(found.iter().filter(|it| **it == Some(0)).count(), 0, "{found:?}");
    assert_eq!(found[8..], [Some(1); 4], "{found:?}");
    assert_eq!(of(&[-1.0], 1e6, 8), [None; 8]);
    assert_eq!(of(&[], 1e6, 4), [None; 4]);
}

#[test]
fn in_deterministic_mode_nothing_is_measured_in_16_bits() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let leaves = Leaves::new(CASE).on(device, Kind::Float, CASE);
    let times = ProductTimes { algorithms: &[9e9, 5e6], launch: 1e6, ..NOTHING };
    kernels::with_products(times, || {
        let found = with_deterministic(|| forwards(&leaves, 12));
        assert_eq!(found, [Some(0); 12]);
        // Measured once it is allowed.
        assert_eq!(forwards(&leaves, 4), [None, Some(0), Some(1), None]);
        assert_eq!(with_deterministic(|| forwards(&leaves, 2)), [Some(0); 2]);
    });
}

#[test]
fn measuring_has_the_host_wait_for_nothing_in_16_bits() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let leaves = Leaves::new(CASE).on(device, Kind::Float, CASE);
    // Copies are made before: they wait.
    let upstream = upstream(CASE).to_device(device);
    kernels::with_products(CHOSEN, || {
        let waits = fake::synchronizations(|| {
            for _ in 0..=RUNS {
                let _scope = Autocast::enter(device, CASE.kind, true).unwrap();
                let output = ours(&leaves, CASE);
                let options =
                    GradOptions { output_gradients: &[&upstream], ..GradOptions::default() };
                drop(grad(&[&output], &leaves.used(CASE), options).unwrap());
            }
        });
        assert_eq!(waits, [""; 0]);
    });
}

#[test]
fn a_recorded_step_measures_nothing_and_has_other_data_in_each_replay_in_16_bits() {
    let (device, _alone) = gpu();
    let Device::Cuda(index) = device else { return };
    if !fake::is_installed() {
        return;
    }
    let leaves = Leaves::new(CASE).on(device, Kind::Float, CASE);
    let upstream = upstream(CASE).to_device(device);
    let step = || {
        let output = {
            let _scope = Autocast::enter(device, CASE.kind, true).unwrap();
            ours(&leaves, CASE)
        };
        let options = GradOptions { output_gradients: &[&upstream], ..GradOptions::default() };
        let gradients = grad(&[&output], &leaves.used(CASE), options).unwrap();
        let mut all = vec![output.detach()];
        all.extend(gradients.into_iter().map(|it| it.unwrap()));
        all
    };
    // Steps before the recording: none, some of the measured ones, and enough for a choice.
    for (before, expected) in [(0, "/0"), (2, "/0"), (12, "/1")] {
        let times = ProductTimes { algorithms: &[9e5, 5e5], launch: 2e6, ..NOTHING };
        kernels::with_products(times, || {
            for _ in 0..before {
                step();
            }
            let mut results = Vec::new();
            let mut graph = None;
            let launched = products(|| {
                graph = Some(fake::Graph::capture(index, || results = step()).unwrap());
            });
            assert!(
                launched.len() == 3 && launched.iter().all(|it| it.ends_with(expected)),
                "{before}: {launched:?}"
            );
            for data in 0..2 {
                tch::manual_seed(data);
                tch::no_grad(|| {
                    let random = Tensor::randn([CASE.rows, 16], (Kind::Float, device));
                    leaves.0[0].shallow_clone().copy_(&random);
                });
                graph.as_ref().unwrap().replay().unwrap();
                // All algorithms of this library compute the same.
                let expected = with_deterministic(step);
                for (index, (found, expected)) in results.iter().zip(expected).enumerate() {
                    assert!(found.equal(&expected), "{index} of replay {data} after {before}");
                }
            }
        });
    }
}

/// Set for a process of the test below: the folder of its cache is its own.
const CHILD: &str = "BRIGADE_TEST_OF_CHOICES";

#[test]
fn choices_are_kept_for_other_processes_in_16_bits() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let times = ProductTimes { algorithms: &[9e6, 5e6], launch: 2e7, identity: "a GPU", ..NOTHING };
    let leaves = || Leaves::new(CASE).on(device, Kind::Float, CASE);
    if let Ok(expected) = std::env::var(CHILD) {
        let found = kernels::with_products(times, || forwards(&leaves(), 10));
        let measured = [None, Some(0), Some(1)].repeat(3);
        match expected.as_str() {
            "measures" => assert_eq!(found[..9], measured),
            // What is kept is the slower one here: it was read.
            _ => assert_eq!(found, [Some(1); 10]),
        }
        assert_eq!(found[9], Some(1));
        // Deterministic mode reads no file.
        let first = with_deterministic(|| kernels::with_products(times, || forwards(&leaves(), 1)));
        assert_eq!(first, [Some(0)]);
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let kept = folder.path().join("brigade/kernels");
    let child = |expected: &str| {
        let name = "epilogues::choices_are_kept_for_other_processes_in_16_bits";
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", name, "--nocapture"])
            .env(CHILD, expected)
            .env("XDG_CACHE_HOME", folder.path())
            .output()
            .unwrap();
        let text = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{expected}: {text}");
        text
    };
    child("measures");
    let files: Vec<_> = std::fs::read_dir(&kept).unwrap().map(|it| it.unwrap().path()).collect();
    assert_eq!(files.len(), 1, "{files:?}");
    child("reads");
    // A damaged file costs a warning, and is written again.
    std::fs::write(&files[0], "damaged").unwrap();
    let text = child("measures");
    assert_eq!(text.matches("it is written again").count(), 1, "{text}");
    child("reads");
}
