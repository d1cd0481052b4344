//! Steps on the CPU are their formulas in IEEE arithmetic, bit for bit: no operation is contracted, so that results
//! depend neither on the instruction set nor on an element's place.

use brigade_torch::{DeviceNumbers, fused};
use tch::{Device, Kind, Tensor};

/// Not a multiple of any vector's length.
const LENGTH: i64 = 1_003;
const HOST: DeviceNumbers<'_> =
    DeviceNumbers { lr: None, steps: None, grad_scale: None, found_inf: None };

/// Numbers with all bits of their mantissas in use: where a product is not rounded before an addition, most sums
/// come out otherwise.
fn numbers(seed: u64, kind: Kind) -> Tensor {
    let mut state = seed;
    let value = |_| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let fraction = (state >> 11) as f64 / (1u64 << 53) as f64;
        fraction * 2.0 - 1.0
    };
    let values: Vec<f64> = (0..LENGTH).map(value).collect();
    Tensor::from_slice(&values).to_kind(kind)
}

fn state(seed: u64, kind: Kind) -> Tensor {
    numbers(seed, kind).abs()
}

/// A tensor as a vector of the type that its elements are computed in, and back.
macro_rules! vector {
    ($type:ty, $tensor:expr) => {{
        let kind = if size_of::<$type>() == 8 { Kind::Double } else { Kind::Float };
        Vec::<$type>::try_from($tensor.to_kind(kind)).unwrap()
    }};
}

fn assert_bits(name: &str, found: &Tensor, expected: &Tensor) {
    let kind = found.kind();
    let integer = match kind {
        Kind::Double => Kind::Int64,
        Kind::Float => Kind::Int,
        _ => Kind::Int16,
    };
    let expected = expected.to_kind(kind);
    let differing = found.view_dtype(integer).ne_tensor(&expected.view_dtype(integer));
    let count = differing.sum(Kind::Int64).int64_value(&[]);
    let first = differing.to_kind(Kind::Int).argmax(0, false).int64_value(&[]);
    assert_eq!(
        count,
        0,
        "{name} in {kind:?}: {count} elements differ, the first is {first}: {} and {}",
        found.double_value(&[first]),
        expected.double_value(&[first]),
    );
}

/// The formulas in one type, for tensors of `kind`.
macro_rules! formulas {
    ($module:ident, $type:ty) => {
        mod $module {
            use super::*;

            type C = $type;

            pub(super) fn adam(kind: Kind, step: &fused::AdamStep) {
                let [p, g] = [1, 2].map(|seed| numbers(seed, kind));
                let [m, v, x] = [3, 4, 5].map(|seed| state(seed, kind));
                let [mut weights, gradients, mut means, mut squares, mut largest] =
                    [&p, &g, &m, &v, &x].map(|tensor| vector!(C, tensor));
                let maxima = if step.amsgrad { vec![&x] } else { Vec::new() };
                // A power of 1 is exact.
                let count = Tensor::from(1f32);
                fused::adam(&[&p], &[&g], &[&m], &[&v], &maxima, &[&count], step, &HOST).unwrap();
                let keep =
                    if step.decoupled { (1.0 - step.lr * step.weight_decay) as C } else { 1.0 };
                let (first, second) = ((1.0 - step.beta1) as C, (1.0 - step.beta2) as C);
                let size = (step.lr / (1.0 - step.beta1)) as C;
                let root = (1.0 - step.beta2).sqrt() as C;
                for i in 0..weights.len() {
                    let weight = weights[i] * keep;
                    let mut slope = if step.maximize { -gradients[i] } else { gradients[i] };
                    if !step.decoupled {
                        slope += weight * step.weight_decay as C;
                    }
                    means[i] = if first < 0.5 {
                        means[i] + first * (slope - means[i])
                    } else {
                        slope + (first - 1.0) * (slope - means[i])
                    };
                    squares[i] = squares[i] * step.beta2 as C + second * slope * slope;
                    let mut spread = squares[i];
                    if step.amsgrad {
                        largest[i] = largest[i].max(spread);
                        spread = largest[i];
                    }
                    let denominator = spread.sqrt() / root + step.eps as C;
                    weights[i] = weight - size * means[i] / denominator;
                }
                let expected =
                    [&weights, &means, &squares, &largest].map(|it| Tensor::from_slice(it));
                for (found, expected) in [&p, &m, &v, &x].into_iter().zip(&expected) {
                    assert_bits(&format!("{step:?}"), found, expected);
                }
            }

            pub(super) fn sgd(kind: Kind, step: &fused::SgdStep) {
                let [p, g, b] = [1, 2, 3].map(|seed| numbers(seed, kind));
                let [mut weights, gradients, mut buffers] =
                    [&p, &g, &b].map(|tensor| vector!(C, tensor));
                let states = if step.momentum == 0.0 { Vec::new() } else { vec![&b] };
                fused::sgd(&[&p], &[&g], &states, step, &HOST).unwrap();
                let keep =
                    if step.decoupled { (1.0 - step.lr * step.weight_decay) as C } else { 1.0 };
                for i in 0..weights.len() {
                    let weight = weights[i] * keep;
                    let mut slope = if step.maximize { -gradients[i] } else { gradients[i] };
                    if !step.decoupled {
                        slope += weight * step.weight_decay as C;
                    }
                    let mut change = slope;
                    if step.momentum != 0.0 {
                        buffers[i] = if step.first {
                            slope
                        } else {
                            buffers[i] * step.momentum as C + slope * (1.0 - step.dampening) as C
                        };
                        change = if step.nesterov {
                            slope + buffers[i] * step.momentum as C
                        } else {
                            buffers[i]
                        };
                    }
                    weights[i] = weight - change * step.lr as C;
                }
                assert_bits(&format!("{step:?}"), &p, &Tensor::from_slice(&weights));
                assert_bits(&format!("{step:?}"), &b, &Tensor::from_slice(&buffers));
            }

            pub(super) fn adagrad(kind: Kind, step: &fused::AdagradStep) {
                let [p, g] = [1, 2].map(|seed| numbers(seed, kind));
                let s = state(3, kind);
                let [mut weights, gradients, mut sums] = [&p, &g, &s].map(|it| vector!(C, it));
                let count = Tensor::from(3f32);
                fused::adagrad(&[&p], &[&g], &[&s], &[&count], step, &HOST).unwrap();
                let rate = (step.lr / (1.0 + 2.0 * step.lr_decay)) as C;
                for i in 0..weights.len() {
                    let slope = if step.maximize { -gradients[i] } else { gradients[i] };
                    let slope = slope + weights[i] * step.weight_decay as C;
                    sums[i] += slope * slope;
                    weights[i] -= rate * slope / (sums[i].sqrt() + step.eps as C);
                }
                assert_bits(&format!("{step:?}"), &p, &Tensor::from_slice(&weights));
                assert_bits(&format!("{step:?}"), &s, &Tensor::from_slice(&sums));
            }
        }
    };
}

formulas!(single, f32);
formulas!(double, f64);

/// 16-bit types are computed in 32 bits.
const SINGLE: [Kind; 3] = [Kind::Float, Kind::BFloat16, Kind::Half];

#[test]
fn adam_is_its_formula_bit_for_bit() {
    for (beta1, amsgrad, maximize, decoupled) in [
        (0.9, false, false, true),
        (0.9, true, true, false),
        (0.3, false, true, false),
        (0.0, true, false, true),
    ] {
        let step = fused::AdamStep {
            lr: 0.1,
            beta1,
            beta2: 0.999,
            eps: 1e-8,
            weight_decay: 0.01,
            amsgrad,
            maximize,
            decoupled,
        };
        SINGLE.iter().for_each(|&kind| single::adam(kind, &step));
        double::adam(Kind::Double, &step);
    }
}

#[test]
fn sgd_is_its_formula_bit_for_bit() {
    for (momentum, nesterov, maximize, decoupled, first) in [
        (0.0, false, false, false, false),
        (0.9, false, true, false, false),
        (0.9, true, false, false, false),
        (0.9, false, false, true, false),
        (0.9, true, true, true, true),
    ] {
        let dampening = if nesterov { 0.0 } else { 0.3 };
        let step = fused::SgdStep {
            lr: 0.1,
            momentum,
            dampening,
            weight_decay: 0.01,
            decoupled,
            nesterov,
            maximize,
            first,
        };
        SINGLE.iter().for_each(|&kind| single::sgd(kind, &step));
        double::sgd(Kind::Double, &step);
    }
}

#[test]
fn adagrad_is_its_formula_bit_for_bit() {
    for (weight_decay, maximize) in [(0.01, false), (0.3, true)] {
        let step =
            fused::AdagradStep { lr: 0.1, lr_decay: 0.1, weight_decay, eps: 1e-10, maximize };
        SINGLE.iter().for_each(|&kind| single::adagrad(kind, &step));
        double::adagrad(Kind::Double, &step);
    }
}

/// Where there is no weight decay it is not computed: an infinite weight's gradient stays a number.
#[test]
fn without_weight_decay_an_infinite_weight_leaves_its_mean_alone() {
    let infinite = || Tensor::from_slice(&[f32::INFINITY; 3]);
    let gradient = Tensor::from_slice(&[0.5f32; 3]);
    let (p, mean, square) = (infinite(), gradient.zeros_like(), gradient.zeros_like());
    let step = fused::AdamStep {
        lr: 0.1,
        beta1: 0.0,
        beta2: 0.9,
        eps: 1e-8,
        weight_decay: 0.0,
        amsgrad: false,
        maximize: false,
        decoupled: false,
    };
    let count = Tensor::from(1f32);
    fused::adam(&[&p], &[&gradient], &[&mean], &[&square], &[], &[&count], &step, &HOST).unwrap();
    assert_eq!(mean, gradient);
    assert_eq!(p, infinite());
}

#[test]
fn a_kind_without_loops_is_refused() {
    let eight = |_| Tensor::zeros([3], (Kind::Float, Device::Cpu)).to_kind(Kind::Float8e4m3fn);
    let [p, g] = [0, 1].map(eight);
    let step = fused::SgdStep {
        lr: 0.1,
        momentum: 0.0,
        dampening: 0.0,
        weight_decay: 0.0,
        decoupled: false,
        nesterov: false,
        maximize: false,
        first: false,
    };
    let error = fused::sgd(&[&p], &[&g], &[], &step, &HOST).unwrap_err().to_string();
    assert!(error.contains("Float8_e4m3fn"), "{error}");
}
