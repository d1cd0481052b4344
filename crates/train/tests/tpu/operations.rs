//! Operations for which Brigade has a kernel in the place of TorchTPU's, against the CPU's.

use brigade_test_needs::needs;
use brigade_torch::{DeviceExt, TPU};
use tch::{Device, Kind, Tensor};

const CPU: (Kind, Device) = (Kind::Float, Device::Cpu);

/// Compares an operation on both devices, which gets tensors by a function that moves them there. `bits` are those of
/// the significand in which it rounds.
#[track_caller]
fn same(name: &str, bits: i32, operation: impl Fn(&dyn Fn(&Tensor) -> Tensor) -> Tensor) {
    let expected = operation(&Tensor::shallow_clone);
    let found = operation(&|it| it.to_device(TPU));
    assert_eq!((found.device(), found.kind()), (TPU, expected.kind()), "{name}");
    let (found, expected) = (found.to_device(Device::Cpu), expected.to_kind(Kind::Double));
    let largest = expected.abs().max().double_value(&[]);
    // Sums of few values, each of which is rounded.
    let allowed = 16.0 * f64::exp2(-f64::from(bits)) * largest;
    let off = (found.to_kind(Kind::Double) - expected).abs().max().double_value(&[]);
    assert!(off <= allowed, "{name}: {off} off, {allowed} allowed");
}

#[needs(Tpu)]
fn attention_takes_masks() {
    TPU.load().unwrap();
    tch::manual_seed(3);
    let [query, key, value] = [(); 3].map(|()| Tensor::randn([3, 2, 9, 4], CPU));
    let lengths = Tensor::from_slice(&[4i64, 9, 2]).unsqueeze(-1);
    let seen = Tensor::arange(9, (Kind::Int64, Device::Cpu)).lt_tensor(&lengths);
    let attend = |to: &dyn Fn(&Tensor) -> Tensor, mask: &Tensor| {
        let (query, key, value) = (to(&query).set_requires_grad(true), to(&key), to(&value));
        let mask = Some(to(mask));
        let attended = Tensor::scaled_dot_product_attention(
            &query, &key, &value, mask, 0.0, false, None, false,
        );
        attended.square().sum(Kind::Float).backward();
        Tensor::stack(&[attended.detach(), query.grad()], 0)
    };
    let keys = seen.view([3, 1, 1, 9]);
    same("keys that are padding", 24, |to| attend(to, &keys));
    same("queries that see no key", 24, |to| {
        attend(to, &seen.view([3, 1, 9, 1]).expand([3, 1, 9, 9], false))
    });
    let added = keys.logical_not().to_kind(Kind::Float) * -1e4;
    same("values that are added", 24, |to| attend(to, &added));
}

#[needs(Tpu)]
fn cumulative_operations_are_computed() {
    TPU.load().unwrap();
    tch::manual_seed(3);
    let x = Tensor::randn([3, 9], CPU);
    let counts = Tensor::arange(27, (Kind::Int64, Device::Cpu)).view([3, 9]);
    same("of whole numbers", 24, |to| to(&counts).gt(4).cumsum(-1, None));
    same("in place", 24, |to| (to(&x) + 0.0).cumsum_(0, None));
    same("into a tensor", 24, |to| {
        let into = to(&x).zeros_like();
        to(&x).cumsum_out(&into, 1, None)
    });
    same("products", 53, |to| to(&x).cumprod(-1, Kind::Double));
    same("logarithms of powers", 24, |to| to(&x).logcumsumexp(-1));
    same("gradients", 24, |to| {
        let x = to(&x).detach().set_requires_grad(true);
        (x.cumsum(-1, None) * x.cumprod(0, None)).sum(Kind::Float).backward();
        x.grad()
    });
}

#[needs(Tpu)]
fn the_sum_of_two_powers_has_a_logarithm() {
    TPU.load().unwrap();
    let infinity = f32::INFINITY;
    let one = Tensor::from_slice(&[0.0, -3.0, 80.0, -infinity, -infinity, 1.0, infinity, infinity]);
    let other = Tensor::from_slice(&[0.0, 2.5, -90.0, 1.0, -infinity, -infinity, infinity, 2.0]);
    let found = one.to_device(TPU).logaddexp(&other.to_device(TPU)).to_device(Device::Cpu);
    let expected = one.logaddexp(&other);
    let close = found.isclose(&expected, 1e-6, 0.0, false);
    assert!(bool::try_from(close.all()).unwrap(), "{found:?} {expected:?}");
}

#[needs(Tpu)]
fn mish_is_computed() {
    TPU.load().unwrap();
    let x = Tensor::from_slice(&[-60f32, -3.0, -0.5, 0.0, 0.25, 4.0, 30.0]);
    for (kind, bits) in [(Kind::Float, 24), (Kind::BFloat16, 8)] {
        same("values", bits, |to| to(&x).to_kind(kind).mish());
        same("in place", bits, |to| to(&x).copy().to_kind(kind).mish_());
        same("gradients", bits, |to| {
            let x = to(&x).to_kind(kind).detach().set_requires_grad(true);
            x.mish().square().sum(Kind::Float).backward();
            x.grad()
        });
    }
}

#[needs(Tpu)]
fn a_layer_norm_of_16_bits_takes_parameters_in_float32() {
    TPU.load().unwrap();
    tch::manual_seed(3);
    let [x, parameters] = [[6, 9], [2, 9]].map(|shape| Tensor::randn(shape, CPU));
    let normalised = |to: &dyn Fn(&Tensor) -> Tensor, wants_gradients: bool| {
        let x = to(&x).to_kind(Kind::BFloat16).set_requires_grad(true);
        let parameters = to(&parameters).set_requires_grad(true);
        let [weight, bias] = [0, 1].map(|it| parameters.get(it));
        let normed = x.layer_norm([9], Some(&weight), Some(&bias), 1e-5, false);
        assert_eq!(normed.kind(), Kind::BFloat16);
        if !wants_gradients {
            return normed.detach();
        }
        (normed.to_kind(Kind::Float) * to(&upstream())).sum(Kind::Float).backward();
        Tensor::cat(&[x.grad().to_kind(Kind::Float), parameters.grad()], 0)
    };
    same("values", 8, |to| normalised(to, false));
    same("gradients", 8, |to| normalised(to, true));
}

/// Gradients of the outputs of a layer norm.
fn upstream() -> Tensor {
    (Tensor::arange(54, CPU) * 0.7).sin().view([6, 9])
}
