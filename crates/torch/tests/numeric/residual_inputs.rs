//! Gradients of the two uses of a residual block's input, which the backward of a normalisation adds: the kernels of a GPU,
//! emulated without one.

use brigade_test_device::{fake, gpu, kernels, numeric_device};
use brigade_torch::{
    BackwardOptions, BatchNormState, GradOptions, LossFlag, batch_norm_relu, channels_last, grad,
    recomputed, residual_inputs,
};
use tch::{Device, Kind, Tensor};

/// Input, shortcut, weight and bias of a normalisation.
struct Leaves([Tensor; 4]);

impl Leaves {
    fn new([images, channels, height, width]: [i64; 4], kind: Kind, device: Device) -> Self {
        tch::manual_seed(7);
        let maps = [(); 2].map(|()| images_like([images, channels, height, width], kind, device));
        let [input, shortcut] = maps;
        let vector = |from: f64| {
            Tensor::linspace(from, from + 1.0, channels, (Kind::Float, Device::Cpu))
                .to_device(device)
        };
        let all = [input, shortcut, vector(0.5), vector(-0.5)];
        Self(all.map(|it| it.set_requires_grad(true)))
    }

    fn output(&self) -> Tensor {
        normalised(&self.0)
    }

    fn gradients(
        &self,
        outputs: &[&Tensor],
        upstream: &[&Tensor],
        retain_graph: bool,
    ) -> Vec<Tensor> {
        let options = GradOptions {
            output_gradients: upstream,
            backward: BackwardOptions { retain_graph, ..BackwardOptions::default() },
            ..GradOptions::default()
        };
        let found = grad(outputs, &self.0.each_ref(), options).unwrap();
        found.into_iter().map(Option::unwrap).collect()
    }

    /// The gradients for one use of the output.
    fn for_one(&self, upstream: &Tensor) -> Vec<Tensor> {
        self.gradients(&[&self.output()], &[upstream], false)
    }
}

/// The end of a block: input, shortcut, weight and bias.
fn normalised(leaves: &[Tensor]) -> Tensor {
    let (mean, var) = (leaves[3].detach().copy(), leaves[2].detach().copy());
    let state = BatchNormState {
        weight: Some(&leaves[2]),
        bias: Some(&leaves[3]),
        running_mean: Some(&mean),
        running_var: Some(&var),
    };
    batch_norm_relu(&leaves[0], Some(&leaves[1]), state, true, 0.1, 1e-5).unwrap()
}

fn images_like(shape: [i64; 4], kind: Kind, device: Device) -> Tensor {
    let random = Tensor::randn(shape, (Kind::Float, Device::Cpu));
    channels_last(&random.to_kind(kind)).unwrap().to_device(device)
}

/// Runs the function with the kernels of the GPU.
fn by_kernels<R>(function: impl FnOnce() -> R) -> R {
    if fake::is_installed() { kernels::emulated(function) } else { function() }
}

#[track_caller]
fn assert_same_bits(found: &[Tensor], expected: &[Tensor], what: &str) {
    assert_eq!(found.len(), expected.len());
    for (index, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(found.equal(expected), "{what}: gradient {index}");
    }
}

const SHAPE: [i64; 4] = [2, 16, 5, 3];

/// Number of launches of the kernel that adds both gradients.
fn launches(leaves: &Leaves, run: impl Fn(&Leaves)) -> u64 {
    let account = kernels::counted(|| fake::account(|| run(leaves)));
    account.0.get("brigade::gradient_sums_two_uses").map_or(0, |it| it.calls)
}

#[test]
fn both_gradients_are_added_by_the_backward_with_the_bits_of_an_addition_in_16_bits() {
    let (device, _alone) = gpu();
    for kind in [Kind::BFloat16, Kind::Half] {
        for shape in [[1, 8, 1, 2], SHAPE, [3, 296, 4, 5], [1, 2056, 3, 3]] {
            let leaves = Leaves::new(shape, kind, device);
            let upstream = [(); 2].map(|()| images_like(shape, kind, device));
            let found = by_kernels(|| {
                let (branch, shortcut) = residual_inputs(&leaves.output()).unwrap();
                leaves.gradients(&[&branch, &shortcut], &upstream.each_ref(), false)
            });
            let sum = &upstream[0] + &upstream[1];
            let expected = by_kernels(|| leaves.for_one(&sum));
            assert_same_bits(&found, &expected, &format!("{kind:?}, {shape:?}"));
        }
    }
}

#[test]
fn there_is_no_addition_of_its_own() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let leaves = Leaves::new(SHAPE, Kind::BFloat16, device);
    let upstream = [(); 2].map(|()| images_like(SHAPE, Kind::BFloat16, device));
    let account = kernels::counted(|| {
        fake::account(|| {
            let (branch, shortcut) = residual_inputs(&leaves.output()).unwrap();
            let _ = leaves.gradients(&[&branch, &shortcut], &upstream.each_ref(), false);
        })
    });
    assert!(account.0.keys().all(|name| !name.starts_with("aten::add")), "{account}");
    let entry = &account.0["brigade::gradient_sums_two_uses"];
    // Input, both gradients and what ReLU lets through, a bit for each value, and two sums of one part.
    let values: i64 = SHAPE.iter().product();
    assert_eq!((entry.calls, entry.bytes), (1, values as u64 * 8 + values as u64 / 8 + 128));
}

#[test]
fn uses_elsewhere_and_repeated_passes_are_right_in_16_bits() {
    let (device, _alone) = gpu();
    let kind = Kind::BFloat16;
    let leaves = Leaves::new(SHAPE, kind, device);
    let [one, two, three, four] = [(); 4].map(|()| images_like(SHAPE, kind, device));
    by_kernels(|| {
        let sum = &one + &two;
        let expected = leaves.for_one(&sum);
        let output = leaves.output();
        let (branch, shortcut) = residual_inputs(&output).unwrap();
        for pass in 0..2 {
            let found = leaves.gradients(&[&branch, &shortcut], &[&one, &two], true);
            assert_same_bits(&found, &expected, &format!("pass {pass}"));
        }
        let found = leaves.gradients(&[&branch], &[&one], true);
        assert_same_bits(&found, &leaves.for_one(&one), "the branch alone");
        let found = leaves.gradients(&[&shortcut], &[&two], true);
        assert_same_bits(&found, &leaves.for_one(&two), "the shortcut alone");
        let other = two.contiguous();
        let found = leaves.gradients(&[&branch, &shortcut], &[&one, &other], true);
        assert_same_bits(&found, &expected, "another layout");
        let found = leaves.gradients(&[&branch, &shortcut, &output], &[&one, &two, &three], true);
        let expected = leaves.for_one(&((&three + &one) + &two));
        assert_same_bits(&found, &expected, "a third use");
        // The second pair adds its own gradients, which the engine adds to the first one of the first pair.
        let (more, last) = residual_inputs(&output).unwrap();
        let outputs = [&branch, &shortcut, &more, &last];
        let found = leaves.gradients(&outputs, &[&one, &two, &three, &four], false);
        let sums = [(&one + (&three + &four)) + &two, (&three + (&one + &two)) + &four];
        let expected = sums.map(|sum| leaves.for_one(&sum));
        assert!(
            expected.iter().any(|it| found.iter().zip(it).all(|(found, it)| found.equal(it))),
            "two pairs"
        );
    });
}

#[test]
fn whoever_sees_the_outputs_gradient_sees_the_sum_in_16_bits() {
    let (device, _alone) = gpu();
    let kind = Kind::BFloat16;
    let leaves = Leaves::new(SHAPE, kind, device);
    let [one, two] = [(); 2].map(|()| images_like(SHAPE, kind, device));
    let sum = &one + &two;
    let expected = by_kernels(|| leaves.for_one(&sum));
    by_kernels(|| {
        let output = leaves.output();
        let (branch, shortcut) = residual_inputs(&output).unwrap();
        let options = GradOptions { output_gradients: &[&one, &two], ..GradOptions::default() };
        let found = grad(&[&branch, &shortcut], &[&output], options).unwrap();
        assert!(found[0].as_ref().unwrap().equal(&sum));
    });
    let hooked = |leaves: &Leaves| {
        let output = leaves.output();
        let flag = LossFlag::new(&[&output]).unwrap();
        let (branch, shortcut) = residual_inputs(&output).unwrap();
        let found = leaves.gradients(&[&branch, &shortcut], &[&one, &two], false);
        assert!(flag.lower(), "the hook has not run");
        found
    };
    assert_same_bits(&by_kernels(|| hooked(&leaves)), &expected, "a hook");
    if fake::is_installed() {
        assert_eq!(launches(&leaves, |leaves| drop(hooked(leaves))), 0);
    }
}

#[test]
fn recomputed_parts_have_the_same_gradients_in_16_bits() {
    let (device, _alone) = gpu();
    let kind = Kind::BFloat16;
    let leaves = Leaves::new(SHAPE, kind, device);
    let upstream = [(); 2].map(|()| images_like(SHAPE, kind, device));
    by_kernels(|| {
        // A block whose output has two uses in the next one, which is recomputed, too.
        let step = |recompute: bool| {
            let inputs = leaves.0.each_ref();
            let first =
                if recompute { recomputed(&inputs, normalised) } else { Ok(leaves.output()) };
            let next = |x: &[Tensor]| {
                let (branch, shortcut) = residual_inputs(&x[0]).unwrap();
                normalised(&[branch, shortcut, x[1].shallow_clone(), x[2].shallow_clone()])
            };
            let first = first.unwrap();
            let second = [&first, &leaves.0[2], &leaves.0[3]];
            let output = if recompute {
                recomputed(&second, next).unwrap()
            } else {
                next(&second.map(Tensor::shallow_clone))
            };
            let (branch, shortcut) = residual_inputs(&output).unwrap();
            leaves.gradients(&[&branch, &shortcut], &upstream.each_ref(), false)
        };
        assert_same_bits(&step(true), &step(false), "recomputed");
    });
}

#[test]
fn gradients_of_gradients_are_those_of_two_uses_in_16_bits() {
    let (device, _alone) = gpu();
    let kind = Kind::BFloat16;
    let leaves = Leaves::new(SHAPE, kind, device);
    let upstream = [(); 2].map(|()| images_like(SHAPE, kind, device));
    let second = |pair: bool| {
        let output = leaves.output();
        let (branch, shortcut) = if pair {
            residual_inputs(&output).unwrap()
        } else {
            (output.shallow_clone(), output.shallow_clone())
        };
        let loss = (branch.square() * &upstream[0] + shortcut * &upstream[1]).sum(Kind::Float);
        let create_graph = BackwardOptions { create_graph: true, ..BackwardOptions::default() };
        let options = GradOptions { backward: create_graph, ..GradOptions::default() };
        let first = grad(&[&loss], &[&leaves.0[0]], options).unwrap();
        let loss = first[0].as_ref().unwrap().square().sum(Kind::Float);
        let found = grad(
            &[&loss],
            &leaves.0.each_ref(),
            GradOptions { allow_unused: true, ..GradOptions::default() },
        );
        found.unwrap().into_iter().flatten().collect::<Vec<_>>()
    };
    let [found, expected] = by_kernels(|| [true, false].map(second));
    assert!(!found.is_empty());
    assert_same_bits(&found, &expected, "second gradients");
}

#[test]
fn views_cannot_be_changed_in_place() {
    let (device, _alone) = gpu();
    let leaves = Leaves::new(SHAPE, Kind::BFloat16, device);
    by_kernels(|| {
        let (mut branch, shortcut) = residual_inputs(&leaves.output()).unwrap();
        assert!(branch.f_relu_().is_err());
        assert!(branch.equal(&shortcut));
    });
}

#[test]
fn other_tensors_are_returned_themselves() {
    let leaf = images_like(SHAPE, Kind::Float, numeric_device()).set_requires_grad(true);
    let sum = &leaf + 1.0;
    let leaves = Leaves::new(SHAPE, Kind::Float, numeric_device());
    let normed = leaves.output();
    for tensor in [&leaf, &sum, &normed, &tch::no_grad(|| leaves.output())] {
        let (branch, shortcut) = residual_inputs(tensor).unwrap();
        for use_of_it in [&branch, &shortcut] {
            assert_eq!(use_of_it.data_ptr(), tensor.data_ptr());
            assert_eq!(use_of_it.requires_grad(), tensor.requires_grad());
        }
    }
    let [one, two] = [(); 2].map(|()| images_like(SHAPE, Kind::Float, numeric_device()));
    let (branch, shortcut) = residual_inputs(&normed).unwrap();
    let found = leaves.gradients(&[&branch, &shortcut], &[&one, &two], false);
    assert_same_bits(&found, &leaves.for_one(&(&one + &two)), "on the CPU");
}
