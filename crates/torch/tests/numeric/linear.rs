//! Linear layers whose products the processor may not have in 16 bits.

use brigade_test_device::{assert_same, numeric_device};
use brigade_torch::{Autocast, gelu_linear, linear};
use tch::{Kind, Tensor};

use crate::distance::apart;

fn random(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, (Kind::Double, numeric_device()))
}

/// Output, and gradients of input, weight and bias.
fn run(
    leaves: &[Tensor; 3],
    upstream: &Tensor,
    autocast: Option<Kind>,
    product: impl Fn(&Tensor, &Tensor, &Tensor) -> Tensor,
) -> Vec<Tensor> {
    let leaves = leaves.each_ref().map(|leaf| leaf.copy().set_requires_grad(true));
    let [input, weight, bias] = &leaves;
    let output = {
        let _scope = autocast.map(|kind| Autocast::enter(numeric_device(), kind, true).unwrap());
        // A change in place, as of a residual addition behind the layer.
        product(input, weight, bias).f_mul_scalar_(1).unwrap()
    };
    (&output * upstream.to_kind(output.kind())).sum(Kind::Double).backward();
    let mut results = vec![output.detach()];
    results.extend(leaves.iter().map(Tensor::grad));
    results
}

fn ours(input: &Tensor, weight: &Tensor, bias: &Tensor) -> Tensor {
    linear(input, weight, Some(bias)).unwrap()
}

fn libtorchs(input: &Tensor, weight: &Tensor, bias: &Tensor) -> Tensor {
    input.linear(weight, Some(bias))
}

fn activated(approximate: &str) -> impl Fn(&Tensor, &Tensor, &Tensor) -> Tensor {
    move |input, weight, bias| gelu_linear(input, approximate, weight, Some(bias)).unwrap()
}

fn by_operations(approximate: &str) -> impl Fn(&Tensor, &Tensor, &Tensor) -> Tensor {
    move |input, weight, bias| input.gelu(approximate).linear(weight, Some(bias))
}

#[test]
fn an_activation_that_is_computed_again_is_the_same() {
    tch::manual_seed(2);
    let leaves = [random(&[3, 17, 40]), random(&[23, 40]), random(&[23])];
    let upstream = random(&[3, 17, 23]);
    for approximate in ["none", "tanh"] {
        let (mine, theirs) = (activated(approximate), by_operations(approximate));
        let exact = run(&leaves, &upstream, None, &theirs);
        for (mine, theirs) in run(&leaves, &upstream, None, &mine).iter().zip(&exact) {
            assert!(apart(mine, theirs) < 1e-14);
        }
        // Under autocast, and on its own: float32 leaves.
        let single = leaves.each_ref().map(|leaf| leaf.to_kind(Kind::Float));
        for (autocast, allowed) in [(None, 1e-6), (Some(Kind::BFloat16), 0.02)] {
            for (mine, exact) in run(&single, &upstream, autocast, &mine).iter().zip(&exact) {
                let found = apart(mine, exact);
                assert!(found < allowed, "{approximate}, {autocast:?}: {found}");
            }
        }
    }
    let error = gelu_linear(&leaves[0], "sigmoid", &leaves[1], None).unwrap_err().to_string();
    assert!(error.contains("expected none or tanh"), "{error}");
}

#[test]
fn a_transposed_weight_gets_its_gradient_in_its_own_layout() {
    tch::manual_seed(2);
    let input = random(&[5, 4]).to_kind(Kind::Float);
    let weight = random(&[4, 3]).to_kind(Kind::Float).set_requires_grad(true);
    let expected =
        input.gelu("none").tr().matmul(&Tensor::ones([5, 3], (Kind::Float, numeric_device())));
    let upstream = Tensor::ones([5, 3], (Kind::Float, numeric_device()));
    let output = gelu_linear(&input, "none", &weight.tr(), None).unwrap();
    (output * upstream).sum(Kind::Float).backward();
    assert_eq!(weight.grad().stride(), weight.stride());
    assert!(apart(&weight.grad(), &expected) < 1e-6);
}

#[test]
fn sixteen_bits_are_as_close_to_float64_as_libtorchs() {
    tch::manual_seed(2);
    let exact = [random(&[3, 17, 40]), random(&[23, 40]), random(&[23])];
    let upstream = random(&[3, 17, 23]);
    for kind in [Kind::BFloat16, Kind::Half] {
        let rounded = exact.each_ref().map(|leaf| leaf.to_kind(kind));
        for (leaves, autocast) in [
            // With an input and a bias of other kinds than the weight's, as between layers of a model.
            (
                [&rounded[0], &rounded[1], &rounded[2]].map(|leaf| leaf.to_kind(Kind::Float)),
                Some(kind),
            ),
            ([rounded[0].copy(), rounded[1].to_kind(Kind::Float), rounded[2].copy()], Some(kind)),
            (rounded.each_ref().map(Tensor::copy), None),
        ] {
            let wide = leaves.each_ref().map(|leaf| leaf.to_kind(Kind::Double));
            let upstream = upstream.to_kind(kind);
            let expected = run(&wide, &upstream, None, libtorchs);
            let (mine, theirs) = (
                run(&leaves, &upstream, autocast, ours),
                run(&leaves, &upstream, autocast, libtorchs),
            );
            for (index, (mine, expected)) in mine.iter().zip(&expected).enumerate() {
                assert_eq!(mine.kind(), theirs[index].kind());
                assert_eq!(mine.size(), expected.size());
                let allowed = 2_f64.powi(-9).max(1.1 * apart(&theirs[index], expected));
                let found = apart(mine, expected);
                assert!(found <= allowed, "{kind:?}, {autocast:?}, {index}: {found}");
            }
        }
    }
}

#[test]
fn other_kinds_are_libtorchs_bit_for_bit() {
    tch::manual_seed(2);
    for kind in [Kind::Float, Kind::Double] {
        let leaves = [[3, 17, 40].as_slice(), &[23, 40], &[23]].map(|s| random(s).to_kind(kind));
        let upstream = random(&[3, 17, 23]);
        let mine = run(&leaves, &upstream, None, ours);
        let theirs = run(&leaves, &upstream, None, libtorchs);
        for (mine, theirs) in mine.iter().zip(&theirs) {
            assert_same(mine, theirs, "ours against libtorch's");
        }
    }
}

#[test]
fn gradients_have_gradients_and_frozen_weights_none() {
    tch::manual_seed(2);
    let input = random(&[5, 4]).to_kind(Kind::Float).set_requires_grad(true);
    let weight = random(&[3, 4]).to_kind(Kind::Float);
    let _scope = Autocast::enter(numeric_device(), Kind::BFloat16, true).unwrap();
    let loss =
        linear(&input, &weight, None).unwrap().to_kind(Kind::Float).square().sum(Kind::Float);
    let first = Tensor::run_backward(&[&loss], &[&input], true, true);
    let second = Tensor::run_backward(&[first[0].sum(Kind::Float)], &[&input], false, false);
    // The second derivative of |x wT|^2, summed over rows.
    let expected =
        (weight.tr().matmul(&weight) * 2.0).sum_dim_intlist([0_i64].as_slice(), false, Kind::Float);
    assert!(apart(&second[0], &expected.expand([5, 4], false)) < 0.05);
}

#[test]
fn shapes_that_do_not_fit_are_libtorchs_error() {
    let input = random(&[5, 4]).to_kind(Kind::BFloat16);
    assert!(linear(&input, &random(&[3, 5]).to_kind(Kind::BFloat16), None).is_err());
    assert!(linear(&input, &random(&[3, 4]), None).is_err());
}
