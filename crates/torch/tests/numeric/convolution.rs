//! Convolutions with copies of their weights in 16 bits.

use brigade_test_device::{assert_same, fake, gpu, kernels, numeric_device};
use brigade_torch::{
    Autocast, DeviceNumbers, channels_last, clear_gradient, convolution2d, fused, set_data,
};
use kernels::ProductTimes;
use tch::{Device, Kind, Tensor};

use crate::distance::apart;

const HOST: DeviceNumbers<'_> =
    DeviceNumbers { lr: None, steps: None, grad_scale: None, found_inf: None };
const SGD: fused::SgdStep = fused::SgdStep {
    lr: 0.5,
    momentum: 0.9,
    dampening: 0.0,
    weight_decay: 0.0,
    decoupled: false,
    nesterov: false,
    maximize: false,
    first: false,
};

fn leaf(shape: &[i64], device: Device) -> Tensor {
    Tensor::randn(shape, (Kind::Float, device)).set_requires_grad(true)
}

/// Returns the output of a convolution under autocast, and the gradients of what it is made of.
fn results(kind: Kind, inputs: [&Tensor; 3], groups: i64, by_libtorch: bool) -> Vec<Tensor> {
    let [images, weight, bias] = inputs;
    inputs.iter().for_each(|it| clear_gradient(it).unwrap());
    let output = {
        let _scope = Autocast::enter(images.device(), kind, true).unwrap();
        if by_libtorch {
            images.conv2d(weight, Some(bias), [2, 1], [1, 0], [1, 2], groups)
        } else {
            convolution2d(images, weight, Some(bias), [2, 1], [1, 0], [1, 2], groups).unwrap()
        }
    };
    output.to_kind(Kind::Float).square().sum(Kind::Float).backward();
    let gradients = inputs.map(|it| it.grad());
    [output.detach()].into_iter().chain(gradients).collect()
}

#[test]
fn convolutions_in_16_bits_have_the_bits_of_libtorch() {
    let device = numeric_device();
    tch::manual_seed(2);
    for (groups, in_last) in [(1, false), (1, true), (2, true)] {
        let [images, weight, bias] =
            [&[3, 4, 9, 8][..], &[6, 4 / groups, 3, 2], &[6]].map(|shape| leaf(shape, device));
        if in_last {
            for tensor in [&images, &weight] {
                let last = channels_last(&tensor.detach()).unwrap();
                set_data(tensor, &last).unwrap();
            }
        }
        for kind in [Kind::BFloat16, Kind::Half] {
            let inputs = [&images, &weight, &bias];
            let expected = results(kind, inputs, groups, true);
            for round in ["with a cast", "with a copy"] {
                let found = results(kind, inputs, groups, false);
                for (found, expected) in found.iter().zip(&expected) {
                    let what = format!("{kind:?}, {groups} groups, in last: {in_last}, {round}");
                    assert_eq!(found.kind(), expected.kind(), "{what}");
                    assert_same(found, expected, &what);
                }
            }
        }
    }
}

/// Two batches, and two uses of the weight in each, between steps.
#[test]
fn weights_of_convolutions_in_16_bits_are_not_cast_after_a_step_on_a_gpu() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    tch::manual_seed(2);
    for in_last in [false, true] {
        let weight = leaf(&[8, 8, 3, 3], device);
        if in_last {
            let last = channels_last(&weight.detach()).unwrap();
            set_data(&weight, &last).unwrap();
        }
        let images = Tensor::randn([2, 8, 6, 6], (Kind::BFloat16, device));
        let images = if in_last { channels_last(&images).unwrap() } else { images };
        let buffer = weight.detach().zeros_like();
        let output = || {
            let _scope = Autocast::enter(device, Kind::BFloat16, true).unwrap();
            let twice = convolution2d(&images, &weight, None, [1; 2], [1; 2], [1; 2], 1).unwrap();
            convolution2d(&twice, &weight, None, [1; 2], [1; 2], [1; 2], 1).unwrap()
        };
        let batch = || output().sum(Kind::Float).backward();
        let casts = || fake::account(batch).0.get("aten::copy_").map_or(0, |it| it.calls);
        let first = casts();
        let usual = casts();
        assert_eq!(first, usual + 1, "the first use casts");
        for round in 0..2 {
            let step = || {
                let (p, g, b) = (&[&weight], &[&weight.grad()], &[&buffer]);
                fused::sgd(p, g, b, &SGD, &HOST).unwrap();
            };
            kernels::emulated(step);
            for batch in 0..2 {
                assert_eq!(casts(), usual, "round {round}, batch {batch}, in last: {in_last}");
            }
            let found = output();
            let mut fresh = weight.detach().copy();
            fresh.copy_(&weight.detach());
            set_data(&weight, &fresh).unwrap();
            assert!(output().equal(&found), "round {round}, in last: {in_last}");
        }
    }
}

/// Two candidates with three runs each, and one that reads the last time.
const MEASURED_RUNS: usize = 7;

#[test]
fn convolutions_of_single_pixels_in_16_bits_are_products_where_those_are_faster() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    tch::manual_seed(3);
    let values = [&[3, 16, 5, 4][..], &[24, 16, 1, 1], &[24]]
        .map(|shape| Tensor::randn(shape, (Kind::BFloat16, Device::Cpu)).to_kind(Kind::Float));
    let upstream = Tensor::randn([3, 24, 5, 4], (Kind::BFloat16, Device::Cpu));
    for (kind, biased, in_last) in [
        (Kind::BFloat16, true, true),
        (Kind::BFloat16, false, true),
        (Kind::Half, true, true),
        (Kind::BFloat16, true, false),
    ] {
        let run = |device: Device, of: Kind, ours: bool| {
            let leaves = values.each_ref().map(|it| {
                let it = it.to_device(device).to_kind(of);
                let it = if in_last && it.dim() == 4 { channels_last(&it).unwrap() } else { it };
                it.detach().set_requires_grad(true)
            });
            let [images, weight, bias] = &leaves;
            let bias = biased.then_some(bias);
            let mut output = {
                let autocast = of != Kind::Double;
                let _scope = autocast.then(|| Autocast::enter(device, kind, true).unwrap());
                if ours {
                    convolution2d(images, weight, bias, [1; 2], [0; 2], [1; 2], 1).unwrap()
                } else {
                    images.conv2d(weight, bias, [1; 2], [0; 2], [1; 2], 1)
                }
            };
            assert_eq!(output.is_contiguous(), !in_last);
            // A change in place, as of an activation behind the convolution.
            let output = output.f_mul_scalar_(2).unwrap();
            let upstream = upstream.to_device(device).to_kind(output.kind());
            Tensor::f_backward(&(&output * upstream).sum(Kind::Float)).unwrap();
            let mut all = vec![output.detach()];
            all.extend(leaves.iter().filter(|it| it.grad().defined()).map(Tensor::grad));
            all.into_iter().map(|it| it.to_device(Device::Cpu)).collect::<Vec<_>>()
        };
        let exact = run(Device::Cpu, Kind::Double, false);
        let plain = run(device, Kind::Float, false);
        assert_eq!(exact.len(), if biased { 4 } else { 3 });
        for (slow, by_products) in [("convolution", true), ("mm", false)] {
            let times = ProductTimes { launch: 1.0, named: (slow, 1e6), ..ProductTimes::default() };
            kernels::with_products(times, || {
                for attempt in 0..=MEASURED_RUNS {
                    let mut found = Vec::new();
                    let account = fake::account(|| found = run(device, Kind::Float, true));
                    for (index, found) in found.iter().enumerate() {
                        let unit = if kind == Kind::Half { 2f64.powi(-10) } else { 2f64.powi(-7) };
                        let allowed = apart(&plain[index], &exact[index]) + unit;
                        let apart = apart(found, &exact[index]);
                        let about = format!("{kind:?}, {biased}, run {attempt}, {slow}, {index}");
                        assert!(apart <= allowed, "{about}: {apart:e} > {allowed:e}");
                    }
                    let convolved: Vec<_> =
                        account.0.keys().filter(|name| name.contains("convolution")).collect();
                    if attempt == MEASURED_RUNS {
                        let expected = by_products && in_last;
                        assert_eq!(convolved.is_empty(), expected, "{slow}: {convolved:?}");
                    }
                }
            });
        }
    }
}
