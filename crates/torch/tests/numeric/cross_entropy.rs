//! Cross-entropy with its gradients made in the forward, against libtorch's operations.

use brigade_test_device::{numeric_device, on_device};
use brigade_torch::{
    Autocast, BackwardOptions, CrossEntropyLoss, CrossEntropyOptions, Error, Fault, TorchError,
    backward_with, cross_entropy, linear_cross_entropy,
};
use tch::{Device, Kind, Reduction, Tensor};

use crate::distance::apart;

/// Loss, and gradients of hidden, weight and bias.
type Results = [Tensor; 4];

struct Case {
    hidden: Tensor,
    weight: Tensor,
    bias: Tensor,
    targets: Tensor,
}

const IGNORED: i64 = -100;

impl Case {
    fn new(rows: i64, width: i64, classes: i64, every_ignored: Option<i64>) -> Self {
        tch::manual_seed(5);
        let random = |shape: &[i64]| Tensor::randn(shape, (Kind::Double, numeric_device()));
        let targets = Tensor::randint(classes, [rows], (Kind::Int64, numeric_device()));
        let targets = match every_ignored {
            Some(every) => {
                let place = Tensor::arange(rows, (Kind::Int64, numeric_device()));
                targets.masked_fill(&place.remainder(every).eq(1), IGNORED)
            }
            None => targets,
        };
        Self {
            hidden: random(&[rows, width]),
            weight: random(&[classes, width]) * 0.3,
            bias: random(&[classes]),
            targets,
        }
    }

    fn on(&self, device: Device) -> Self {
        let of = |tensor: &Tensor| tensor.to_device(device);
        Self {
            hidden: of(&self.hidden),
            weight: of(&self.weight),
            bias: of(&self.bias),
            targets: of(&self.targets),
        }
    }

    fn in_kind(&self, kind: Kind) -> Self {
        let of = |tensor: &Tensor| tensor.to_kind(kind);
        Self {
            hidden: of(&self.hidden),
            weight: of(&self.weight),
            bias: of(&self.bias),
            targets: self.targets.shallow_clone(),
        }
    }

    fn leaves(&self) -> [Tensor; 3] {
        [&self.hidden, &self.weight, &self.bias].map(|t| t.copy().set_requires_grad(true))
    }

    fn fused(&self, options: &CrossEntropyOptions, upstream: f64) -> Results {
        let [hidden, weight, bias] = self.leaves();
        let found =
            linear_cross_entropy(&hidden, &weight, Some(&bias), &self.targets, options).unwrap();
        assert_eq!(
            found.count.int64_value(&[]),
            self.targets.ne(IGNORED).sum(Kind::Int64).int64_value(&[])
        );
        (&found.loss * upstream).backward();
        [found.loss.detach(), hidden.grad(), weight.grad(), bias.grad()]
    }

    fn plain(&self, options: &CrossEntropyOptions, upstream: f64) -> Results {
        let [hidden, weight, bias] = self.leaves();
        let logits = hidden.linear(&weight, Some(&bias));
        let loss = by_libtorch(&logits, &self.targets, options);
        (&loss * upstream).backward();
        [loss.detach(), hidden.grad(), weight.grad(), bias.grad()]
    }
}

fn by_libtorch(logits: &Tensor, targets: &Tensor, options: &CrossEntropyOptions) -> Tensor {
    let CrossEntropyOptions { ignore_index, label_smoothing, z_loss, reduction, .. } = *options;
    let loss = logits.cross_entropy_loss::<Tensor>(
        targets,
        None,
        reduction,
        ignore_index,
        label_smoothing,
    );
    if z_loss == 0.0 {
        return loss;
    }
    let counted = targets.ne(ignore_index).to_kind(logits.kind());
    let squares = (logits.logsumexp([1], false).square() * &counted).sum(None::<Kind>);
    let mean = reduction == Reduction::Mean;
    loss + z_loss * if mean { squares / counted.sum(None::<Kind>) } else { squares }
}

fn options(reduction: Reduction, label_smoothing: f64) -> CrossEntropyOptions {
    CrossEntropyOptions { reduction, label_smoothing, ..Default::default() }
}

fn all_options() -> impl Iterator<Item = CrossEntropyOptions> {
    let reductions = [Reduction::Mean, Reduction::Sum];
    reductions.into_iter().flat_map(|reduction| {
        [(0.0, 0.0), (0.1, 0.0), (1.0, 0.0), (0.0, 0.01), (0.1, 0.2)].map(
            |(label_smoothing, z_loss)| CrossEntropyOptions {
                z_loss,
                ..options(reduction, label_smoothing)
            },
        )
    })
}

fn fault_of(result: Result<CrossEntropyLoss, Error>) -> (Fault, String) {
    let error = result.unwrap_err();
    match error.downcast_ref() {
        Some(TorchError::Libtorch { fault, detail, .. }) => (*fault, detail.clone()),
        _ => panic!("{error}"),
    }
}

#[test]
fn it_equals_the_operations_in_float64() {
    // All rows and some; lanes that are not full, parts that are not.
    for case in
        [Case::new(7, 5, 3, None), Case::new(9, 16, 2500, Some(3)), Case::new(1, 4, 32, None)]
    {
        for options in all_options() {
            // The last makes a mean of a sum: all is done in the forward then.
            let count = case.targets.ne(IGNORED).sum(Kind::Int64).int64_value(&[]) as f64;
            for upstream in [1.0, -2.5, 1.0 / count] {
                let (fused, plain) =
                    (case.fused(&options, upstream), case.plain(&options, upstream));
                for (index, (fused, plain)) in fused.iter().zip(&plain).enumerate() {
                    let found = apart(fused, plain);
                    assert!(found < 1e-12, "{options:?}, {index}: {found}");
                    assert_eq!(fused.kind(), Kind::Double);
                }
            }
        }
    }
}

#[test]
fn it_goes_through_chunks() {
    let case = Case::new(290, 2, 1_000, Some(29));
    // A chunk has at least 128 rows.
    let options = CrossEntropyOptions { logit_bytes: Some(1), ..options(Reduction::Mean, 0.1) };
    for (fused, plain) in case.fused(&options, 1.0).iter().zip(&case.plain(&options, 1.0)) {
        assert!(apart(fused, plain) < 1e-12);
    }
}

#[test]
fn float32_is_as_close_to_float64_as_the_operations_are() {
    let case = Case::new(40, 64, 3000, Some(7));
    let single = case.in_kind(Kind::Float);
    for options in all_options() {
        let exact = case.plain(&options, 1.0);
        let (fused, plain) = (single.fused(&options, 1.0), single.plain(&options, 1.0));
        for (index, (fused, exact)) in fused.iter().zip(&exact).enumerate() {
            let allowed = 1e-6_f64.max(2.0 * apart(&plain[index], exact));
            let found = apart(fused, exact);
            assert!(found <= allowed, "{options:?}, {index}: {found}");
            assert_eq!(fused.kind(), Kind::Float);
        }
    }
}

#[test]
fn sixteen_bits_are_as_close_to_float64_as_the_operations_are() {
    for kind in [Kind::BFloat16, Kind::Half] {
        let rounded = Case::new(40, 64, 300, Some(7)).in_kind(kind);
        for options in all_options() {
            let exact = rounded.in_kind(Kind::Double).plain(&options, 1.0);
            let (fused, plain) = (rounded.fused(&options, 1.0), rounded.plain(&options, 1.0));
            assert_eq!(fused[0].kind(), Kind::Float);
            for (index, (fused, exact)) in fused.iter().zip(&exact).enumerate() {
                // Slopes and result are each rounded to 16 bits; where the processor multiplies in bfloat16 (AMX),
                // a sum of rounded slopes lies a little beyond twice the rounding of one.
                // A GPU, where it is three operations, rounds the slopes before it sums them for the bias, and its
                // products may add parts up in 16 bits.
                let roundings = if rounded.hidden.device() == Device::Cpu { 1.5 } else { 3.0 };
                let allowed = (roundings * 2_f64.powi(-8)).max(1.1 * apart(&plain[index], exact));
                let found = apart(fused, exact);
                assert!(found <= allowed, "{kind:?}, {options:?}, {index}: {found}");
                assert!(index == 0 || fused.kind() == kind);
            }
        }
    }
}

#[test]
fn autocast_changes_no_kind_of_a_gradient_and_leaves_its_cache_usable() {
    let case = Case::new(40, 64, 300, Some(7));
    let single = case.in_kind(Kind::Float);
    let options = CrossEntropyOptions::default();
    let exact = case.plain(&options, 1.0);
    let [hidden, weight, bias] = single.leaves();
    let (loss, again) = {
        let _scope = Autocast::enter(numeric_device(), Kind::BFloat16, true).unwrap();
        let found =
            linear_cross_entropy(&hidden, &weight, Some(&bias), &single.targets, &options).unwrap();
        // A tied weight that others multiply with, too: from the cache, with its history.
        (found.loss, hidden.detach().linear(&weight, None::<&Tensor>).sum(Kind::Float))
    };
    assert_eq!(loss.kind(), Kind::Float);
    assert!(apart(&loss, &exact[0]) < 0.01);
    loss.backward();
    for (gradient, exact) in [&hidden, &weight, &bias].map(Tensor::grad).iter().zip(&exact[1..]) {
        assert_eq!(gradient.kind(), Kind::Float);
        let found = apart(gradient, exact);
        assert!(found < 0.02, "{found}");
    }
    let before = weight.grad().copy();
    again.backward();
    assert!(!weight.grad().equal(&before));
}

#[test]
fn runs_and_numbers_of_threads_change_no_bit_of_the_loss() {
    let case = Case::new(150, 64, 3000, Some(7)).in_kind(Kind::Float).on(Device::Cpu);
    let options = options(Reduction::Mean, 0.1);
    let logits = case.hidden.linear(&case.weight, Some(&case.bias));
    let before = tch::get_num_threads();
    let of_logits = [1, 2, 3].map(|threads| {
        tch::set_num_threads(threads);
        let logits = logits.copy().set_requires_grad(true);
        let loss = cross_entropy(&logits, &case.targets, &options).unwrap().loss;
        loss.backward();
        [loss.detach(), logits.grad()]
    });
    tch::set_num_threads(before);
    for other in &of_logits[1..] {
        assert!(of_logits[0].iter().zip(other).all(|(one, other)| one.equal(other)));
    }
    let (first, second) = (case.fused(&options, 1.0), case.fused(&options, 1.0));
    assert!(first.iter().zip(&second).all(|(one, other)| one.equal(other)));
}

#[test]
fn given_logits_keep_their_values_and_get_libtorchs_gradient() {
    let case = Case::new(12, 16, 100, Some(3));
    let logits = case.hidden.linear(&case.weight, Some(&case.bias)).view([3, 4, 100]);
    for options in all_options() {
        let [mine, theirs] = [(); 2].map(|()| logits.copy().set_requires_grad(true));
        let loss = cross_entropy(&mine, &case.targets.view([3, 4]), &options).unwrap().loss;
        (loss.shallow_clone() * 3.0).backward();
        let flat = theirs.view([12, 100]);
        let expected = by_libtorch(&flat, &case.targets, &options);
        (expected.shallow_clone() * 3.0).backward();
        assert!(apart(&loss, &expected) < 1e-12);
        assert!(apart(&mine.grad(), &theirs.grad()) < 1e-12);
        assert!(mine.equal(&logits));
    }
}

#[test]
fn extreme_logits_are_as_in_libtorch() {
    let rows = [
        [0.0, f32::NEG_INFINITY, 1.0],
        [200.0, -200.0, 0.0],
        [1e30, -1e30, 0.0],
        [f32::NAN, 0.0, 1.0],
        [f32::INFINITY, 0.0, 1.0],
    ];
    let targets = on_device(&Tensor::from_slice(&[2_i64]));
    let options = CrossEntropyOptions::default();
    for row in rows {
        let [mine, theirs] = [(); 2]
            .map(|()| on_device(&Tensor::from_slice(&row).view([1, 3])).set_requires_grad(true));
        let loss = cross_entropy(&mine, &targets, &options).unwrap().loss;
        let expected = by_libtorch(&theirs, &targets, &options);
        assert!(loss.allclose(&expected, 1e-6, 0.0, true), "{row:?}: {loss}");
        loss.backward();
        expected.backward();
        assert!(mine.grad().allclose(&theirs.grad(), 1e-6, 1e-30, true), "{row:?}");
    }
}

#[test]
fn without_a_target_that_counts_the_gradients_are_zero() {
    let case = Case {
        targets: Tensor::full([7], IGNORED, (Kind::Int64, numeric_device())),
        ..Case::new(7, 5, 3, None)
    };
    let mean = case.fused(&options(Reduction::Mean, 0.0), 1.0);
    assert!(mean[0].double_value(&[]).is_nan());
    let sum = case.fused(&options(Reduction::Sum, 0.0), 1.0);
    assert_eq!(sum[0].double_value(&[]), 0.0);
    for gradient in mean[1..].iter().chain(&sum[1..]) {
        assert!(gradient.equal(&gradient.zeros_like()));
    }
}

#[test]
fn only_what_wants_a_gradient_gets_one() {
    let case = Case::new(7, 5, 3, None);
    let run = || {
        let [hidden, _, bias] = case.leaves();
        let frozen = &case.weight;
        let options = CrossEntropyOptions::default();
        let loss = linear_cross_entropy(&hidden, frozen, Some(&bias), &case.targets, &options);
        (loss.unwrap().loss, hidden, bias)
    };
    let (loss, hidden, bias) = run();
    loss.backward();
    let expected = case.plain(&CrossEntropyOptions::default(), 1.0);
    assert!(apart(&hidden.grad(), &expected[1]) < 1e-12);
    assert!(apart(&bias.grad(), &expected[3]) < 1e-12);
    assert!(!case.weight.grad().defined());
    let (loss, ..) = tch::no_grad(run);
    assert!(!loss.requires_grad());
    assert!(apart(&loss, &expected[0]) < 1e-12);
}

#[test]
fn a_second_backward_and_one_of_gradients_are_refused() {
    let case = Case::new(7, 5, 3, None);
    let [hidden, weight, bias] = case.leaves();
    let loss = || {
        let options = CrossEntropyOptions::default();
        linear_cross_entropy(&hidden, &weight, Some(&bias), &case.targets, &options).unwrap().loss
    };
    let once = loss();
    let retained = BackwardOptions { retain_graph: true, ..Default::default() };
    backward_with(&once, retained).unwrap();
    let error = backward_with(&once, retained).unwrap_err().to_string();
    assert!(error.contains("already differentiated"), "{error}");
    let differentiable = BackwardOptions { create_graph: true, ..retained };
    let error = backward_with(&loss(), differentiable).unwrap_err().to_string();
    assert!(error.contains("no gradients of gradients"), "{error}");
}

#[test]
fn what_does_not_fit_is_named() {
    let case = Case::new(4, 5, 3, None);
    let options = CrossEntropyOptions::default();
    let with = |targets: &Tensor, weight: &Tensor| {
        fault_of(linear_cross_entropy(&case.hidden, weight, None, targets, &options))
    };
    // On a GPU the kernel detects them, and ends all work of the process on the device.
    if numeric_device() == Device::Cpu {
        for (wrong, word) in [([0_i64, 3, 1, 2], "target 3"), ([0, -1, 1, 2], "target -1")] {
            let (fault, detail) = with(&Tensor::from_slice(&wrong), &case.weight);
            assert_eq!(fault, Fault::Invalid);
            assert!(detail.contains(word) && detail.contains("classes 0 to 2"), "{detail}");
        }
    }
    let three = with(&case.targets.narrow(0, 0, 3), &case.weight).1;
    assert!(three.contains("targets are [3]"), "{three}");
    let narrow = with(&case.targets, &case.weight.narrow(1, 0, 4)).1;
    assert!(narrow.contains("weight is [3, 4]"), "{narrow}");
    let short = with(&case.targets.to_kind(Kind::Int), &case.weight).1;
    assert!(short.contains("expected Int64"), "{short}");
    let mixed = with(&case.targets, &case.weight.to_kind(Kind::Float)).1;
    assert!(mixed.contains("expected one type"), "{mixed}");
    for z_loss in [-1.0, f64::NAN] {
        let options = CrossEntropyOptions { z_loss, ..options };
        let (fault, detail) = fault_of(cross_entropy(&case.hidden, &case.targets, &options));
        assert_eq!(fault, Fault::Invalid);
        assert!(detail.contains("z_loss is"), "{detail}");
    }
    let none = CrossEntropyOptions { reduction: Reduction::None, ..options };
    let error = cross_entropy(&case.hidden, &case.targets, &none).unwrap_err().to_string();
    assert!(error.contains("expected the reduction Mean or Sum"), "{error}");
}
