//! An embedding and a head with one weight, against separate uses of the weight.

use brigade_test_device::{assert_same, fake, gpu, numeric_device};
use brigade_torch::{
    BackwardOptions, CrossEntropyOptions, GradOptions, TensorId, backward, backward_with, grad,
    linear_cross_entropy, tied_embedding,
};
use tch::{Device, Kind, Tensor};

use crate::distance::apart;

const VOCABULARY: i64 = 61;
const WIDTH: i64 = 24;
const PADDING: i64 = 5;

fn weight(kind: Kind) -> Tensor {
    let values = Tensor::randn([VOCABULARY, WIDTH], (Kind::Double, numeric_device()));
    values.to_kind(kind).set_requires_grad(true)
}

/// Returns ids of which some occur often, and some never: squares of random numbers.
fn ids(count: i64) -> Tensor {
    let places = Tensor::rand([count / 3, 3], (Kind::Double, numeric_device())).square();
    (places * VOCABULARY as f64).to_kind(Kind::Int64)
}

type Uses = fn(&Tensor, &Tensor, Option<i64>) -> (Tensor, Tensor);

/// Returns the rows and the weight of the head by one operation.
fn tied(weight: &Tensor, ids: &Tensor, padding: Option<i64>) -> (Tensor, Tensor) {
    tied_embedding(weight, ids, padding).unwrap()
}

/// Returns the same by separate uses of the weight.
fn separate(weight: &Tensor, ids: &Tensor, padding: Option<i64>) -> (Tensor, Tensor) {
    let rows = Tensor::embedding(weight, ids, padding.unwrap_or(-1), false, false);
    (rows, weight.shallow_clone())
}

/// Computes the logits of a model that has nothing but an activation between its embedding and its head.
fn logits(uses: Uses, weight: &Tensor, ids: &Tensor, padding: Option<i64>) -> Tensor {
    let (rows, head) = uses(weight, ids, padding);
    rows.tanh().linear::<Tensor>(&head, None)
}

/// Returns the weight's gradient for a loss with the logits in memory.
fn gradient(uses: Uses, weight: &Tensor, ids: &Tensor, padding: Option<i64>) -> Tensor {
    let weight = weight.detach().set_requires_grad(true);
    let upstream = Tensor::arange(VOCABULARY, (Kind::Float, weight.device())).sin();
    let logits = logits(uses, &weight, ids, padding);
    (logits * upstream.to_kind(weight.kind())).sum(Kind::Double).backward();
    weight.grad()
}

/// Returns the weight's gradient for a head with its loss.
fn gradient_of_head(uses: Uses, weight: &Tensor, ids: &Tensor, padding: Option<i64>) -> Tensor {
    let weight = weight.detach().set_requires_grad(true);
    let (rows, head) = uses(&weight, ids, padding);
    let options = CrossEntropyOptions::default();
    linear_cross_entropy(&rows.tanh(), &head, None, ids, &options).unwrap().loss.backward();
    weight.grad()
}

/// Compares gradients of the weight for ids. On a CPU they have the same bits. A device adds each row to the dense gradient,
/// not their sum: each addition rounds, and there are no more of them than ids.
fn assert_same_gradient(found: &Tensor, expected: &Tensor, ids: &Tensor, what: &str) {
    if found.device() == Device::Cpu || ids.numel() == 0 {
        return assert_same(found, expected, what);
    }
    let unit = if found.kind() == Kind::Double { f64::EPSILON } else { f64::from(f32::EPSILON) };
    let (apart, allowed) = (apart(found, expected), unit * ids.numel() as f64);
    assert!(apart <= allowed, "{what}: {apart} > {allowed}");
}

#[test]
fn the_gradient_has_the_bits_of_separate_uses() {
    tch::manual_seed(4);
    for kind in [Kind::Float, Kind::Double] {
        let weight = weight(kind);
        // Many occurrences of a token, one of each, and no token.
        for ids in [ids(6000), ids(6), ids(0)] {
            for padding in [None, Some(PADDING)] {
                let (rows, head) = tied(&weight, &ids, padding);
                let (expected, _) = separate(&weight, &ids, padding);
                assert_same(&rows, &expected, "rows");
                assert_same(&head, &weight, "weight");
                let [found, expected] =
                    [tied, separate].map(|uses| gradient(uses, &weight, &ids, padding));
                assert_same_gradient(&found, &expected, &ids, "gradient of logits");
                let [found, expected] =
                    [tied, separate].map(|uses| gradient_of_head(uses, &weight, &ids, padding));
                if ids.numel() > 0 {
                    assert_same_gradient(&found, &expected, &ids, "gradient of a head");
                }
            }
        }
        // Ids of 32 bits.
        let ids = ids(60).to_kind(Kind::Int);
        let [found, expected] = [tied, separate].map(|uses| gradient(uses, &weight, &ids, None));
        assert_same_gradient(&found, &expected, &ids, "gradient of ids in 32 bits");
    }
}

/// A width at which a few tokens are worth a thread.
#[test]
fn the_gradient_does_not_depend_on_the_number_of_threads() {
    if numeric_device() != Device::Cpu {
        return;
    }
    tch::manual_seed(4);
    let weight = Tensor::randn([40, 4096], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let ids = Tensor::randint(40, [300], (Kind::Int64, Device::Cpu));
    let threads = tch::get_num_threads();
    let [one, three] = [1, 3].map(|threads| {
        tch::set_num_threads(threads);
        let leaf = weight.detach().set_requires_grad(true);
        let (rows, head) = tied(&leaf, &ids, None);
        // Elementwise alone: products of other operations may depend on the number of threads.
        (rows.sin().sum(Kind::Double) + head.cos().sum(Kind::Double)).backward();
        leaf.grad()
    });
    tch::set_num_threads(threads);
    assert_same(&three, &one, "three threads against one");
}

#[test]
fn gradients_of_float64_are_those_of_differences() {
    tch::manual_seed(4);
    let (weight, ids) = (weight(Kind::Double), ids(30));
    let loss = |values: &Tensor| {
        let logits = logits(tied, values, &ids, Some(PADDING));
        // The padding's row of the rows, which gets no gradient from the lookup, is cut off.
        let counts = ids.ne(PADDING).unsqueeze(-1);
        (logits.sin() * counts).sum(Kind::Double)
    };
    loss(&weight).backward();
    let direction = Tensor::randn_like(&weight);
    let moved = |step: f64| {
        let values = weight.detach() + &direction * step;
        loss(&values).double_value(&[])
    };
    // The error of a central difference is a sixth of the third derivative times the squared step: some 1e-10 of the
    // derivative, as are the roundings of the losses divided by the step.
    let step = 1e-5;
    let expected = (moved(step) - moved(-step)) / (2.0 * step);
    let found = (weight.grad() * direction).sum(Kind::Double).double_value(&[]);
    assert!((found - expected).abs() < 1e-6 * expected.abs().max(1.0), "{found}, {expected}");
}

#[test]
fn sixteen_bits_are_no_further_from_float64_than_separate_uses() {
    tch::manual_seed(4);
    let wide = weight(Kind::Double);
    let ids = ids(3000);
    for kind in [Kind::BFloat16, Kind::Half] {
        let narrow = wide.detach().to_kind(kind);
        let exact = gradient(separate, &narrow.to_kind(Kind::Double), &ids, None);
        let [found, unfused] = [tied, separate].map(|uses| gradient(uses, &narrow, &ids, None));
        let unit = if kind == Kind::Half { 2_f64.powi(-10) } else { 2_f64.powi(-7) };
        let (apart, allowed) = (apart(&found, &exact), apart(&unfused, &exact) + unit);
        assert!(apart <= allowed, "{kind:?}: {apart} > {allowed}");
    }
}

#[test]
fn either_use_may_be_missing() {
    tch::manual_seed(4);
    let (weight, ids) = (weight(Kind::Float), ids(60));
    let of = |uses: Uses, first: f64, second: f64| {
        let leaf = weight.detach().set_requires_grad(true);
        let (rows, head) = uses(&leaf, &ids, None);
        let mut loss = Tensor::zeros([], (Kind::Double, leaf.device()));
        if first != 0.0 {
            loss += rows.sin().sum(Kind::Double) * first;
        }
        if second != 0.0 {
            loss += head.cos().sum(Kind::Double) * second;
        }
        loss.backward();
        leaf.grad()
    };
    for (first, second) in [(1.0, 0.0), (0.0, 1.0), (1.0, 2.0)] {
        let [found, expected] = [tied, separate].map(|uses| of(uses, first, second));
        assert_same_gradient(&found, &expected, &ids, &format!("{first}, {second}"));
    }
}

#[test]
fn a_kept_graph_and_a_present_gradient_add_up() {
    tch::manual_seed(4);
    let (weight, ids) = (weight(Kind::Float), ids(60));
    let once = gradient(tied, &weight, &ids, None);
    let upstream = Tensor::arange(VOCABULARY, (Kind::Float, weight.device())).sin();
    let loss = (logits(tied, &weight, &ids, None) * upstream).sum(Kind::Double);
    backward_with(&loss, BackwardOptions { retain_graph: true, ..Default::default() }).unwrap();
    assert_same(&weight.grad(), &once, "first backward");
    backward(&loss).unwrap();
    assert_same(&weight.grad(), &(&once * 2.0), "second backward");
}

#[test]
fn gradients_have_gradients() {
    tch::manual_seed(4);
    let ids = ids(30);
    let weight = weight(Kind::Double);
    let second = |uses: Uses| {
        let leaf = weight.detach().set_requires_grad(true);
        let loss = logits(uses, &leaf, &ids, None).sin().sum(Kind::Double);
        let backward = BackwardOptions { create_graph: true, ..Default::default() };
        let options = GradOptions { backward, ..Default::default() };
        let first = grad(&[&loss], &[&leaf], options).unwrap().remove(0).unwrap();
        first.square().sum(Kind::Double).backward();
        leaf.grad()
    };
    let apart = apart(&second(tied), &second(separate));
    assert!(apart < 1e-13, "{apart}");
}

/// The rows are added to a gradient of the backward's own, and to a copy of one that somebody else has.
#[test]
fn a_gradient_that_the_caller_holds_is_not_changed() {
    tch::manual_seed(4);
    let (weight, ids) = (weight(Kind::Float), ids(60));
    let (rows, head) = tied(&weight, &ids, None);
    let given = [rows.ones_like(), head.ones_like()];
    let options = GradOptions { output_gradients: &[&given[0], &given[1]], ..Default::default() };
    let found = grad(&[&rows, &head], &[&weight], options).unwrap().remove(0).unwrap();
    assert_same(&given[1], &head.ones_like(), "the given gradient");
    let counts = ids.flatten(0, -1).bincount::<Tensor>(None, VOCABULARY);
    let expected = (counts + 1).to_kind(Kind::Float).unsqueeze(-1).expand([-1, WIDTH], false);
    assert_same(&found, &expected.contiguous(), "the weight's gradient");
}

#[test]
fn without_a_gradient_the_second_result_is_the_weight() {
    let weight = weight(Kind::Float);
    let ids = ids(6);
    let frozen = weight.detach();
    let (rows, head) = tied(&frozen, &ids, None);
    assert!(!rows.requires_grad());
    assert_eq!(TensorId::of(&head), TensorId::of(&frozen));
    let (_, head) = tch::no_grad(|| tied(&weight, &ids, None));
    assert_eq!(TensorId::of(&head), TensorId::of(&weight));
}

#[test]
fn a_gpu_adds_the_rows_in_one_operation() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    tch::manual_seed(4);
    let weight = Tensor::randn([VOCABULARY, WIDTH], (Kind::Float, device)).set_requires_grad(true);
    let ids = Tensor::randint(VOCABULARY, [3], (Kind::Int64, device));
    let of = |uses: Uses| {
        let account = fake::account(|| {
            let leaf = weight.detach().set_requires_grad(true);
            let (rows, head) = uses(&leaf, &ids, None);
            (rows.sum(Kind::Float) + head.sin().sum(Kind::Float)).backward();
        });
        let table = (VOCABULARY * WIDTH * 4) as u64;
        (account.bytes() / table, account)
    };
    let ((tied, account), (separate, _)) = (of(tied), of(separate));
    // No table of zeros is written, read, and added to the other gradient.
    assert!(
        tied + 2 <= separate,
        "{tied} passes over the weight, separately {separate}\n{account}"
    );
}
