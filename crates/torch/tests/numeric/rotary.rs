//! Rotary embeddings against libtorch's operations.

use brigade_test_device::{assert_same, fake, numeric_device};
use brigade_torch::{BackwardOptions, Fault, GradOptions, TorchError, grad, rotary};
use tch::{Kind, Tensor};

use crate::distance::apart;

/// Batch, heads, tokens, width.
const SHAPES: [[i64; 4]; 6] =
    [[2, 3, 5, 8], [1, 1, 1, 2], [3, 2, 7, 34], [2, 4, 33, 128], [1, 8, 3, 6], [2, 2, 0, 4]];

fn random(shape: &[i64], kind: Kind) -> Tensor {
    Tensor::randn(shape, (Kind::Double, numeric_device())).to_kind(kind)
}

/// Returns cosines and sines, whose halves differ, so that no mix-up of both is hidden.
fn tables(batch: i64, [_, _, tokens, width]: [i64; 4], kind: Kind) -> (Tensor, Tensor) {
    let angles = random(&[batch, 1, tokens, width], Kind::Double);
    (angles.cos().to_kind(kind), angles.sin().to_kind(kind))
}

fn by_operations(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Tensor {
    let half = x.size().last().unwrap() / 2;
    let turned = Tensor::cat(&[x.narrow(-1, half, half).neg(), x.narrow(-1, 0, half)], -1);
    (x * cos).addcmul(&turned, sin)
}

fn ours(x: &Tensor, cos: &Tensor, sin: &Tensor) -> Tensor {
    rotary(x, cos, sin).unwrap()
}

/// A GPU has kernels for all kinds but float64, which round less often: `rotary_kernels` tests them.
fn is_gpu() -> bool {
    numeric_device().is_cuda() && !fake::is_installed()
}

type Rotate = fn(&Tensor, &Tensor, &Tensor) -> Tensor;

/// Returns the result and the gradient of `x` after a view of it.
fn run(
    rotate: Rotate,
    x: &Tensor,
    view: impl Fn(&Tensor) -> Tensor,
    [cos, sin, upstream]: [&Tensor; 3],
) -> [Tensor; 2] {
    let leaf = x.detach().copy().set_requires_grad(true);
    let output = rotate(&view(&leaf), cos, sin);
    (&output * upstream).sum(Kind::Double).backward();
    [output.detach(), leaf.grad()]
}

fn compare(kind: Kind) {
    if kind != Kind::Double && is_gpu() {
        return;
    }
    tch::manual_seed(6);
    for shape in SHAPES {
        let [batch, heads, tokens, width] = shape;
        for table_batch in [1, batch] {
            let (cos, sin) = tables(table_batch, shape, kind);
            let upstream = random(&shape, kind);
            let same = |x: &Tensor, view: &dyn Fn(&Tensor) -> Tensor, what: &str| {
                let given = [&cos, &sin, &upstream];
                let [found, expected] =
                    [ours, by_operations].map(|it: Rotate| run(it, x, view, given));
                for (found, expected) in found.iter().zip(&expected) {
                    assert_same(found, expected, &format!("{kind:?}, {shape:?}, {what}"));
                }
            };
            same(&random(&shape, kind), &Tensor::shallow_clone, "contiguous");
            // As a projection's output lies.
            let packed = random(&[batch, tokens, heads, width], kind);
            same(&packed, &|x| x.transpose(1, 2), "heads inside of tokens");
            let packed = random(&[batch, tokens, heads, 3 * width], kind);
            same(&packed, &|x| x.narrow(-1, width, width).transpose(1, 2), "part of a projection");
            let packed = random(&[batch, heads, width, tokens], kind);
            same(&packed, &|x| x.transpose(2, 3), "features apart");
        }
    }
}

#[test]
fn float32_and_float64_have_the_bits_of_the_operations() {
    compare(Kind::Float);
    compare(Kind::Double);
}

#[test]
fn sixteen_bits_have_the_bits_of_the_operations() {
    compare(Kind::BFloat16);
    compare(Kind::Half);
}

#[test]
fn tables_of_another_precision_are_converted() {
    if is_gpu() {
        return;
    }
    tch::manual_seed(6);
    let shape = [2, 3, 5, 8];
    let (cos, sin) = tables(1, shape, Kind::Float);
    let x = random(&shape, Kind::BFloat16);
    let [narrow_cos, narrow_sin] = [&cos, &sin].map(|table| table.to_kind(Kind::BFloat16));
    assert_same(&ours(&x, &cos, &sin), &by_operations(&x, &narrow_cos, &narrow_sin), "bfloat16");
}

#[test]
fn gradients_of_float64_are_those_of_differences_and_have_gradients() {
    tch::manual_seed(6);
    let shape = [2, 3, 5, 8];
    let (cos, sin) = tables(2, shape, Kind::Double);
    let x = random(&shape, Kind::Double).set_requires_grad(true);
    let direction = random(&shape, Kind::Double);
    let loss = |x: &Tensor| ours(x, &cos, &sin).sin().sum(Kind::Double);
    let backward = BackwardOptions { create_graph: true, ..Default::default() };
    let options = GradOptions { backward, ..Default::default() };
    let first = grad(&[&loss(&x)], &[&x], options).unwrap().remove(0).unwrap();
    let step = 1e-5;
    let difference = |f: &dyn Fn(&Tensor) -> f64| {
        let moved = |step: f64| f(&(x.detach() + &direction * step));
        (moved(step) - moved(-step)) / (2.0 * step)
    };
    let along = |gradient: &Tensor| (gradient * &direction).sum(Kind::Double).double_value(&[]);
    let expected = difference(&|x| loss(x).double_value(&[]));
    // The error of a central difference: 1e-10 of the third derivative, and roundings of the losses over the step.
    assert!((along(&first) - expected).abs() < 1e-7, "{} {expected}", along(&first));

    first.square().sum(Kind::Double).backward();
    let expected = difference(&|x| {
        let x = x.detach().set_requires_grad(true);
        loss(&x).backward();
        x.grad().square().sum(Kind::Double).double_value(&[])
    });
    assert!((along(&x.grad()) - expected).abs() < 1e-6, "{} {expected}", along(&x.grad()));
}

#[test]
fn other_shapes_and_tables_that_are_trained_go_by_operations() {
    tch::manual_seed(6);
    let x = random(&[5, 8], Kind::Float);
    let (cos, sin) = (random(&[5, 8], Kind::Float), random(&[8], Kind::Float));
    assert_same(&ours(&x, &cos, &sin), &by_operations(&x, &cos, &sin), "two dimensions");

    let shape = [2, 3, 5, 8];
    let (cos, sin) = tables(1, shape, Kind::Double);
    let x = random(&shape, Kind::Double);
    let gradients = |rotate: Rotate| {
        let [cos, sin] = [&cos, &sin].map(|table| table.detach().set_requires_grad(true));
        rotate(&x, &cos, &sin).sin().sum(Kind::Double).backward();
        [cos.grad(), sin.grad()]
    };
    for (found, expected) in gradients(ours).iter().zip(&gradients(by_operations)) {
        assert!(apart(found, expected) < 1e-14);
    }
}

#[test]
fn an_odd_number_of_features_is_refused() {
    let x = random(&[1, 1, 2, 3], Kind::Float);
    let error = rotary(&x, &x, &x).unwrap_err();
    let found = error.downcast_ref::<TorchError>();
    assert!(
        matches!(found, Some(TorchError::Libtorch { fault: Fault::Invalid, .. })),
        "{error}: {found:?}"
    );
    assert!(error.to_string().contains("[1, 1, 2, 3]"), "{error}");
}
