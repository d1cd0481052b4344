//! The head of a language model with its loss on a GPU: its products have padded rows, which no result shows.

use brigade_test_device::{fake, gpu, kernels};
use brigade_torch::{Autocast, CrossEntropyOptions, linear_cross_entropy};
use tch::{Device, Kind, Reduction, Tensor};

use crate::distance::apart;

const IGNORED: i64 = -100;
const WIDTH: i64 = 16;

/// Returns hidden states, weight and bias, and targets of which some are ignored.
fn inputs(rows: i64, classes: i64, kind: Kind) -> ([Tensor; 3], Tensor) {
    tch::manual_seed(5);
    let cpu = |kind| (kind, Device::Cpu);
    let place = Tensor::arange(rows, cpu(Kind::Int64));
    let targets = Tensor::randint(classes, [rows], cpu(Kind::Int64))
        .masked_fill(&place.remainder(7).eq(1), IGNORED);
    let leaves = [
        Tensor::randn([rows, WIDTH], cpu(Kind::Double)),
        Tensor::randn([classes, WIDTH], cpu(Kind::Double)) * 0.3,
        Tensor::randn([classes], cpu(Kind::Double)),
    ];
    (leaves.map(|leaf| leaf.to_kind(kind)), targets)
}

fn on(device: Device, leaves: &[Tensor; 3]) -> [Tensor; 3] {
    leaves.each_ref().map(|leaf| leaf.to_device(device).detach().set_requires_grad(true))
}

/// Returns the loss and the gradients of the leaves, copied to the CPU.
fn fused(
    leaves: &[Tensor; 3],
    targets: &Tensor,
    device: Device,
    autocast: Option<Kind>,
    options: &CrossEntropyOptions,
) -> [Tensor; 4] {
    let leaves = on(device, leaves);
    let [hidden, weight, bias] = &leaves;
    let loss = {
        let _scope = autocast.map(|kind| Autocast::enter(device, kind, true).unwrap());
        let targets = targets.to_device(device);
        linear_cross_entropy(hidden, weight, Some(bias), &targets, options).unwrap().loss
    };
    loss.backward();
    let gradients = leaves.each_ref().map(|leaf| {
        let gradient = leaf.grad();
        assert_eq!((gradient.size(), gradient.kind()), (leaf.size(), leaf.kind()));
        assert!(gradient.is_contiguous());
        gradient.to_device(Device::Cpu)
    });
    let [hidden, weight, bias] = gradients;
    [loss.detach().to_device(Device::Cpu), hidden, weight, bias]
}

/// Returns the loss and the gradients that libtorch's operations compute on the CPU.
fn plain(leaves: &[Tensor; 3], targets: &Tensor, autocast: Option<Kind>) -> [Tensor; 4] {
    plain_smoothed(leaves, targets, autocast, 0.0)
}

fn plain_smoothed(
    leaves: &[Tensor; 3],
    targets: &Tensor,
    autocast: Option<Kind>,
    label_smoothing: f64,
) -> [Tensor; 4] {
    let leaves = on(Device::Cpu, leaves);
    let [hidden, weight, bias] = &leaves;
    let logits = match autocast {
        Some(kind) => {
            let [hidden, weight, bias] = [hidden, weight, bias].map(|it| it.to_kind(kind));
            hidden.linear(&weight, Some(&bias)).to_kind(Kind::Float)
        }
        None => hidden.linear(weight, Some(bias)),
    };
    let loss = logits.cross_entropy_loss::<Tensor>(
        targets,
        None,
        Reduction::Mean,
        IGNORED,
        label_smoothing,
    );
    loss.backward();
    let [hidden, weight, bias] = leaves.each_ref().map(Tensor::grad);
    [loss.detach(), hidden, weight, bias]
}

fn bounded(logit_bytes: Option<u64>) -> CrossEntropyOptions {
    CrossEntropyOptions { logit_bytes, ..Default::default() }
}

#[test]
fn a_head_of_any_vocabulary_equals_the_operations() {
    let (device, _alone) = gpu();
    for classes in [1, 2, 63, 64, 65, 127, 300] {
        // One chunk, and three of which the last is shorter.
        for (rows, logit_bytes) in [(9, None), (290, Some(1))] {
            let (leaves, targets) = inputs(rows, classes, Kind::Double);
            let expected = plain(&leaves, &targets, None);
            let found = fused(&leaves, &targets, device, None, &bounded(logit_bytes));
            for (index, (found, expected)) in found.iter().zip(&expected).enumerate() {
                // One class has gradients of 0.
                let apart = if classes == 1 {
                    (found - expected).abs().max().double_value(&[])
                } else {
                    apart(found, expected)
                };
                assert!(apart < 1e-12, "{classes} classes, {rows} rows, {index}: {apart}");
            }
        }
    }
}

#[test]
fn sixteen_bits_are_no_further_from_float64_than_the_operations() {
    let (device, _alone) = gpu();
    for kind in [Kind::BFloat16, Kind::Half] {
        for classes in [65, 300] {
            let (leaves, targets) = inputs(290, classes, Kind::Float);
            // Exact results for operands that are rounded as those of the products.
            let rounded = leaves.each_ref().map(|it| it.to_kind(kind).to_kind(Kind::Double));
            let exact = plain(&rounded, &targets, None);
            let unfused = plain(&leaves, &targets, Some(kind));
            let found = fused(&leaves, &targets, device, Some(kind), &bounded(Some(1)));
            for (index, found) in found.iter().enumerate() {
                // A unit in the last place of the logits' gradients.
                let unit = if kind == Kind::Half { 2_f64.powi(-10) } else { 2_f64.powi(-7) };
                let allowed = apart(&unfused[index], &exact[index]) + unit;
                let apart = apart(found, &exact[index]);
                assert!(apart <= allowed, "{kind:?}, {classes}, {index}: {apart} > {allowed}");
            }
        }
    }
}

/// On a real GPU the other tests call the kernels.
#[test]
fn the_kernels_losses_and_gradients_are_no_further_from_float64_than_the_operations() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    for kind in [Kind::BFloat16, Kind::Half, Kind::Float] {
        for classes in [65, 300] {
            for label_smoothing in [0.0, 0.1] {
                let (leaves, targets) = inputs(12, classes, Kind::Float);
                let rounded = leaves.each_ref().map(|it| it.to_kind(kind).to_kind(Kind::Double));
                let autocast = (kind != Kind::Float).then_some(kind);
                let smoothed = |leaves: &[Tensor; 3], autocast| {
                    plain_smoothed(leaves, &targets, autocast, label_smoothing)
                };
                let (exact, unfused) = (smoothed(&rounded, None), smoothed(&leaves, autocast));
                let options = CrossEntropyOptions { label_smoothing, ..bounded(None) };
                let found =
                    kernels::emulated(|| fused(&leaves, &targets, device, autocast, &options));
                for (index, found) in found.iter().enumerate() {
                    // A unit in the last place of the logits' gradients; of sums of float32, one for each addition.
                    let unit = match kind {
                        Kind::Half => 2_f64.powi(-10),
                        Kind::BFloat16 => 2_f64.powi(-7),
                        _ => 12.0 * 2_f64.powi(-24),
                    };
                    let allowed = apart(&unfused[index], &exact[index]) + unit;
                    let apart = apart(found, &exact[index]);
                    assert!(apart <= allowed, "{kind:?}, {classes}, {index}: {apart} > {allowed}");
                }
            }
        }
    }
}

/// A chunk adds its part of the weight's gradient in the product itself, and rounds nothing.
#[test]
fn chunks_change_the_weights_gradient_by_float32_roundings() {
    let (device, _alone) = gpu();
    let (leaves, targets) = inputs(512, 300, Kind::Float);
    let [whole, chunks] = [None, Some(1)]
        .map(|bytes| fused(&leaves, &targets, device, Some(Kind::BFloat16), &bounded(bytes)));
    // Sums of 512 products in another order.
    let apart = apart(&chunks[2], &whole[2]);
    assert!(apart < 512.0 * 2_f64.powi(-24), "{apart}");
}

#[test]
fn a_chunk_has_no_more_operators_than_before() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let (leaves, targets) = inputs(256, 60, Kind::Float);
    let leaves = on(device, &leaves);
    let targets = targets.to_device(device);
    let account = |logit_bytes| {
        fake::account(|| {
            let [hidden, weight, _] = &leaves;
            let _scope = Autocast::enter(device, Kind::BFloat16, true).unwrap();
            let _loss = linear_cross_entropy(hidden, weight, None, &targets, &bounded(logit_bytes))
                .unwrap();
        })
    };
    let of_chunk = |ceiling: u64| {
        let (one, two) = (account(None), account(Some(1)));
        let calls = two.calls() - one.calls();
        assert!(
            calls <= ceiling,
            "{calls} calls of a chunk, expected at most {ceiling}. Two chunks:\n{two}"
        );
    };
    of_chunk(16);
    // Three products, the kernel, and the losses' sum.
    kernels::emulated(|| of_chunk(6));
}
