//! Sums of embeddings with dropout: the kernels of a GPU, emulated without one, and the operations that take their
//! place.

use brigade_test_device::{assert_same, fake, gpu, kernels};
use brigade_torch::{
    Autocast, BackwardOptions, EmbeddingRows, GradOptions, TensorId, dropout, embedding_sum, grad,
    rng_state, set_rng_state,
};
use tch::{Device, Kind, Tensor};

use crate::distance::{apart, assert_finite_differences};
use crate::norm_residual::{by_kernels, factors_of, next_seed, unit};

/// Sizes of a sum and the tables beside the words.
#[derive(Debug, Clone, Copy)]
struct Case {
    batch: i64,
    tokens: i64,
    width: i64,
    others: &'static [Other],
    dropout: f64,
    paddings: bool,
}

#[derive(Debug, Clone, Copy, PartialEq)]
enum Other {
    /// Position ids `[1, tokens]`.
    Positions,
    /// Ids `[batch, tokens]`.
    Types,
    /// The row of one id for all tokens.
    One,
    /// An id for each text, `[batch, 1]`.
    OfText,
}

const WORDS: i64 = 11;
const PLACES: i64 = 9;

/// GPT-2's sum.
const GPT2: Case = Case {
    batch: 3,
    tokens: 5,
    width: 16,
    others: &[Other::Positions],
    dropout: 0.1,
    paddings: false,
};
/// BERT's, for texts without token types.
const BERT: Case = Case { others: &[Other::Positions, Other::One], dropout: 0.0, ..GPT2 };

/// Tables, ids, and a gradient of the sum.
#[derive(Debug)]
struct Inputs {
    tables: Vec<Tensor>,
    ids: Vec<Tensor>,
    upstream: Tensor,
}

impl Inputs {
    fn new(case: Case) -> Self {
        let Case { batch, tokens, width, others, .. } = case;
        let table = |rows| Tensor::randn([rows, width], (Kind::Float, Device::Cpu));
        let drawn = |rows, sizes: [i64; 2]| {
            // Squares of random numbers: some ids occur often, and some never.
            let places = Tensor::rand(sizes, (Kind::Double, Device::Cpu)).square();
            (places * rows as f64).to_kind(Kind::Int64)
        };
        let (mut tables, mut ids) = (vec![table(WORDS)], vec![drawn(WORDS, [batch, tokens])]);
        for other in others {
            let (rows, own) = match other {
                Other::Positions => {
                    let places = Tensor::arange(tokens, (Kind::Int64, Device::Cpu));
                    (PLACES.max(tokens), places.unsqueeze(0))
                }
                Other::Types => (3, drawn(3, [batch, tokens])),
                Other::One => (2, Tensor::zeros([1, 1], (Kind::Int64, Device::Cpu))),
                Other::OfText => (4, drawn(4, [batch, 1])),
            };
            tables.push(table(rows));
            ids.push(own);
        }
        let upstream = Tensor::randn([batch, tokens, width], (Kind::Float, Device::Cpu));
        Self { tables, ids, upstream }
    }

    /// Returns copies whose tables are leaves.
    fn to(&self, device: Device, kind: Kind) -> Self {
        let leaf = |it: &Tensor| {
            it.to_device(device).to_kind(kind).detach().copy().set_requires_grad(true)
        };
        Self {
            tables: self.tables.iter().map(leaf).collect(),
            ids: self.ids.iter().map(|it| it.to_device(device)).collect(),
            upstream: self.upstream.to_device(device).to_kind(kind),
        }
    }

    fn rows(&self, case: Case) -> Vec<EmbeddingRows<'_>> {
        let tables = self.tables.iter().zip(&self.ids);
        tables
            .map(|(weight, ids)| EmbeddingRows {
                padding: case.paddings.then_some(1),
                ..EmbeddingRows::new(weight, ids)
            })
            .collect()
    }

    fn sum(&self, case: Case) -> (Tensor, Tensor) {
        let rows = self.rows(case);
        embedding_sum(rows[0], &rows[1..], case.dropout).unwrap()
    }

    /// Returns the sum by separate operations, with the factors of dropout, and the first weight.
    fn operations(&self, case: Case, factors: &Tensor) -> (Tensor, Tensor) {
        let rows = self.rows(case);
        let mut looked_up = rows
            .iter()
            .map(|it| Tensor::embedding(it.weight, it.ids, it.padding.unwrap_or(-1), false, false));
        let first = looked_up.next().unwrap();
        let sum = looked_up.fold(first, |sum, other| sum + other);
        let factors = factors.to_device(sum.device()).to_kind(sum.kind());
        (&sum * factors.view_as(&sum), self.tables[0].shallow_clone())
    }

    /// Returns the sum, and the gradients of all tables for a head with the first one.
    fn results(&self, (sum, head): (Tensor, Tensor)) -> Vec<Tensor> {
        let loss = (&sum * &self.upstream).sum(Kind::Double) + head.sin().sum(Kind::Double);
        let tables: Vec<&Tensor> = self.tables.iter().collect();
        let gradients = grad(&[&loss], &tables, GradOptions::default()).unwrap();
        let mut all = vec![sum.detach()];
        all.extend(gradients.into_iter().map(|it| it.unwrap()));
        all.into_iter().map(|it| it.to_device(Device::Cpu)).collect()
    }
}

/// Returns the factors of the dropout that is drawn next.
fn next_factors(case: Case, device: Device) -> Tensor {
    let (rows, width) = (case.batch * case.tokens, case.width);
    if case.dropout == 0.0 {
        return Tensor::ones([rows, width], (Kind::Double, Device::Cpu));
    }
    factors_of(next_seed(device), rows, width, case.dropout)
}

/// Returns the number of launches of the kernels while the function runs.
fn launches(function: impl FnOnce()) -> u64 {
    let account = fake::account(|| by_kernels(function));
    let own = account.0.iter().filter(|(name, _)| name.starts_with("brigade::embedding"));
    own.map(|(_, totals)| totals.calls).sum()
}

/// Checks the kernels against float64: the error is at most that of the operations and a unit in the last place.
fn check(case: Case, device: Device) {
    tch::manual_seed(7);
    let inputs = Inputs::new(case);
    let factors = next_factors(case, device);
    let own = inputs.to(device, Kind::Float);
    let start = rng_state(device).unwrap();
    let found = by_kernels(|| own.results(own.sum(case)));
    set_rng_state(device, &start).unwrap();
    let again = by_kernels(|| own.results(own.sum(case)));
    let exact = inputs.to(Device::Cpu, Kind::Double);
    let exact = exact.results(exact.operations(case, &factors));
    let plain = inputs.to(Device::Cpu, Kind::Float);
    let plain = plain.results(plain.operations(case, &factors));
    for (index, found) in found.iter().enumerate() {
        assert!(found.equal(&again[index]), "{index}: other bits in a second run, {case:?}");
        let exact = &exact[index];
        if exact.abs().max().double_value(&[]) == 0.0 {
            assert_eq!(found.abs().max().double_value(&[]), 0.0, "{index}, {case:?}");
            continue;
        }
        // A gradient adds up the places of a row in another order.
        let additions = if index == 0 { 0 } else { case.batch * case.tokens };
        let allowed = apart(&plain[index], exact) + unit(Kind::Float, additions);
        let apart = apart(found, exact);
        assert!(apart <= allowed, "{index}: {apart:e} > {allowed:e}, {case:?}");
    }
}

#[test]
fn the_kernels_are_no_further_from_float64_than_the_operations() {
    use Other::{OfText, One, Positions, Types};
    let (device, _alone) = gpu();
    // One value; one vector; whole tiles of dropout; several warps; rows that are no multiples of a vector.
    for (batch, tokens, width) in [(1, 1, 1), (1, 4, 8), (2, 3, 128), (2, 3, 264), (3, 5, 13)] {
        for case in [GPT2, BERT] {
            check(Case { batch, tokens, width, ..case }, device);
        }
    }
    let others: [&[Other]; 5] =
        [&[], &[Types, Positions], &[Positions, Types], &[OfText], &[One, OfText]];
    for others in others {
        for dropout in [0.0, 0.5, 1.0] {
            check(Case { others, dropout, ..GPT2 }, device);
            check(Case { others, dropout, paddings: true, width: 11, ..GPT2 }, device);
        }
    }
}

#[test]
fn more_columns_than_a_block_has_threads() {
    let (device, _alone) = gpu();
    check(Case { batch: 1, tokens: 2, width: 2056, ..GPT2 }, device);
}

#[test]
fn more_ids_than_a_block_has_threads() {
    let (device, _alone) = gpu();
    check(Case { batch: 2, tokens: 70, width: 8, ..GPT2 }, device);
    check(Case { batch: 2, tokens: 70, width: 5, others: &[Other::Types], ..GPT2 }, device);
}

#[test]
fn the_kernels_run_for_float32_on_a_gpu() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let count = |kind: Kind, case: Case| {
        let inputs = Inputs::new(case).to(device, kind);
        launches(|| drop(inputs.results(inputs.sum(case))))
    };
    // Forward, and the backward of the positions.
    assert_eq!(count(Kind::Float, GPT2), 2);
    // Without a small table, the dropout is a launch of its own.
    assert_eq!(count(Kind::Float, Case { others: &[], ..GPT2 }), 2);
    assert_eq!(count(Kind::Float, Case { others: &[], dropout: 0.0, ..GPT2 }), 1);
    // Other types, and more tables than the kernels add up.
    for kind in [Kind::Double, Kind::BFloat16] {
        assert_eq!(count(kind, GPT2), 0);
    }
    assert_eq!(count(Kind::Float, Case { others: &[Other::Types; 3], ..GPT2 }), 0);
    // Ids of 32 bits, and under autocast.
    let mut inputs = Inputs::new(GPT2).to(device, Kind::Float);
    for ids in &mut inputs.ids {
        *ids = ids.to_kind(Kind::Int);
    }
    let _scope = Autocast::enter(device, Kind::BFloat16, true).unwrap();
    assert_eq!(launches(|| drop(inputs.sum(GPT2))), 1);
}

#[test]
fn an_id_without_a_row_is_an_error() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        // The device would be lost.
        return;
    }
    let error = |device, table: usize, id: i64| {
        let inputs = Inputs::new(GPT2).to(device, Kind::Float);
        let _ = inputs.ids[table].narrow(1, 2, 1).fill_(id);
        let rows = inputs.rows(GPT2);
        by_kernels(|| embedding_sum(rows[0], &rows[1..], 0.0)).is_err()
    };
    for device in [device, Device::Cpu] {
        for id in [-1, i64::MIN, i64::MAX] {
            assert!(error(device, 0, id) && error(device, 1, id), "{id} on {device:?}");
        }
        assert!(error(device, 0, WORDS) && error(device, 1, PLACES), "{device:?}");
        assert!(!error(device, 0, WORDS - 1) && !error(device, 1, PLACES - 1), "{device:?}");
    }
}

#[test]
fn wrong_arguments_are_errors() {
    let inputs = Inputs::new(GPT2).to(Device::Cpu, Kind::Float);
    let rows = inputs.rows(GPT2);
    let error = embedding_sum(rows[0], &rows[1..], 1.5).unwrap_err().to_string();
    assert!(error.contains("1.5"), "{error}");
    let wider = Tensor::zeros([PLACES, 7], (Kind::Float, Device::Cpu));
    let other = EmbeddingRows::new(&wider, rows[1].ids);
    assert!(embedding_sum(rows[0], &[other], 0.0).is_err());
}

#[test]
fn infinities_and_nan_stay_with_their_tokens() {
    let (device, _alone) = gpu();
    let case = Case { dropout: 0.0, ..GPT2 };
    tch::manual_seed(3);
    let mut inputs = Inputs::new(case);
    inputs.ids[0] = Tensor::arange(15, (Kind::Int64, Device::Cpu)).remainder(WORDS).view([3, 5]);
    let set = |it: &Tensor, row: i64, value: f64| {
        let _ = it.view([-1, case.width]).get(row).narrow(0, 5, 1).fill_(value);
    };
    set(&inputs.tables[0], 2, f64::NAN);
    set(&inputs.tables[1], 3, f64::INFINITY);
    set(&inputs.upstream, 6, f64::NEG_INFINITY);
    set(&inputs.upstream, 9, f64::NAN);
    let own = inputs.to(device, Kind::Float);
    let found = by_kernels(|| own.results(own.sum(case)));
    let plain = inputs.to(Device::Cpu, Kind::Float);
    let factors = next_factors(case, device);
    let plain = plain.results(plain.operations(case, &factors));
    for (index, (found, plain)) in found.iter().zip(&plain).enumerate() {
        let [found, plain] = [found, plain].map(Tensor::isfinite);
        assert!(found.equal(&plain), "{index}: {found} is not {plain}");
    }
}

#[test]
fn dropout_drops_what_it_drops_on_the_cpu_for_the_same_seed() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        // Seeds of another generator.
        return;
    }
    for width in [256, 72, 5] {
        let case = Case { width, dropout: 0.3, ..GPT2 };
        let inputs = Inputs::new(case);
        tch::manual_seed(11);
        let (sum, _) = inputs.sum(Case { dropout: 0.0, ..case });
        let expected = dropout(&sum, 0.3, None).unwrap();
        tch::manual_seed(11);
        let own = inputs.to(device, Kind::Float);
        let (found, _) = by_kernels(|| own.sum(case));
        assert_same(&found.to_device(Device::Cpu), &expected, "sum");
    }
}

#[test]
fn gradients_of_gradients_are_those_of_the_operations() {
    let (device, _alone) = gpu();
    for case in [GPT2, BERT] {
        tch::manual_seed(5);
        let inputs = Inputs::new(case);
        let factors = next_factors(case, device);
        let second = |inputs: &Inputs, (sum, head): (Tensor, Tensor)| {
            let loss =
                (sum.sin() * &inputs.upstream).sum(Kind::Double) + head.sin().sum(Kind::Double);
            let tables: Vec<&Tensor> = inputs.tables.iter().collect();
            let backward = BackwardOptions { create_graph: true, ..BackwardOptions::default() };
            let options = GradOptions { backward, ..GradOptions::default() };
            let first = grad(&[&loss], &tables, options).unwrap();
            let penalty: Tensor =
                first.into_iter().map(|it| it.unwrap().square().sum(Kind::Double)).sum();
            let second = grad(&[&penalty], &tables, GradOptions::default()).unwrap();
            second.into_iter().map(|it| it.unwrap().to_device(Device::Cpu)).collect::<Vec<_>>()
        };
        let own = inputs.to(device, Kind::Float);
        let found = by_kernels(|| second(&own, own.sum(case)));
        let exact = inputs.to(Device::Cpu, Kind::Double);
        let exact = second(&exact, exact.operations(case, &factors));
        let plain = inputs.to(Device::Cpu, Kind::Float);
        let plain = second(&plain, plain.operations(case, &factors));
        for (index, found) in found.iter().enumerate() {
            let additions = 2 * case.batch * case.tokens;
            let allowed = apart(&plain[index], &exact[index]) + unit(Kind::Float, additions);
            let apart = apart(found, &exact[index]);
            assert!(apart <= allowed, "{index}: {apart:e} > {allowed:e}, {case:?}");
        }
    }
}

#[test]
fn without_kernels_it_is_the_operations_bit_for_bit() {
    for kind in [Kind::Float, Kind::Double] {
        for case in [GPT2, Case { others: &[Other::Types, Other::Positions], ..GPT2 }] {
            tch::manual_seed(2);
            let inputs = Inputs::new(case).to(Device::Cpu, kind);
            let start = rng_state(Device::Cpu).unwrap();
            let sizes = [case.batch, case.tokens, case.width];
            let ones = Tensor::ones(sizes, (kind, Device::Cpu));
            let factors = dropout(&ones, case.dropout, None).unwrap();
            set_rng_state(Device::Cpu, &start).unwrap();
            let (found, _) = inputs.sum(case);
            let (expected, _) = inputs.operations(Case { dropout: 0.0, ..case }, &factors);
            assert_same(&found, &expected, "sum");
        }
    }
    // The row of a single id is added to the positions first, which are fewer.
    let inputs = Inputs::new(BERT).to(Device::Cpu, Kind::Float);
    let [words, positions, one] =
        [0, 1, 2].map(|i| Tensor::embedding(&inputs.tables[i], &inputs.ids[i], -1, false, false));
    assert_same(&inputs.sum(BERT).0, &(words + (positions + one)), "BERT's sum");
}

#[test]
fn gradients_equal_finite_differences() {
    for case in [GPT2, Case { others: &[Other::Positions, Other::Types], ..GPT2 }] {
        tch::manual_seed(9);
        let case = Case { width: 2, ..case };
        let inputs = Inputs::new(case).to(Device::Cpu, Kind::Double);
        let start = rng_state(Device::Cpu).unwrap();
        let loss = || {
            set_rng_state(Device::Cpu, &start).unwrap();
            let (sum, head) = inputs.sum(case);
            (sum.sin() * &inputs.upstream).sum(Kind::Double) + head.sin().sum(Kind::Double)
        };
        let tables: Vec<&Tensor> = inputs.tables.iter().collect();
        assert_finite_differences(&format!("{case:?}"), &tables, &loss);
    }
}

#[test]
fn a_frozen_table_gets_no_gradient() {
    let (device, _alone) = gpu();
    let inputs = Inputs::new(GPT2).to(device, Kind::Float);
    let frozen = inputs.tables[0].detach();
    let of = |words: &Tensor, places: &Tensor| {
        let other = EmbeddingRows::new(places, &inputs.ids[1]);
        embedding_sum(EmbeddingRows::new(words, &inputs.ids[0]), &[other], 0.0).unwrap()
    };
    by_kernels(|| {
        let (sum, head) = of(&frozen, &inputs.tables[1]);
        assert_eq!(TensorId::of(&head), TensorId::of(&frozen));
        sum.sum(Kind::Float).backward();
        assert!(inputs.tables[1].grad().defined() && !frozen.grad().defined());
        let (sum, _) = of(&inputs.tables[0], &frozen.narrow(0, 0, PLACES));
        sum.sum(Kind::Float).backward();
        assert!(inputs.tables[0].grad().defined());
        let (sum, head) = tch::no_grad(|| of(&inputs.tables[0], &inputs.tables[1]));
        assert!(!sum.requires_grad());
        assert_eq!(TensorId::of(&head), TensorId::of(&inputs.tables[0]));
    });
}

/// Rows whose gradients lie at no multiple of 16 bytes.
#[test]
fn parts_of_other_tensors_are_read_at_any_address() {
    let (device, _alone) = gpu();
    tch::manual_seed(6);
    let inputs = Inputs::new(GPT2).to(device, Kind::Float);
    let shifted = |it: &Tensor| {
        let flat = Tensor::zeros([it.numel() as i64 + 1], (Kind::Float, device));
        let part = flat.narrow(0, 1, it.numel() as i64).view_as(it);
        part.shallow_clone().copy_(&it.detach());
        part.set_requires_grad(true)
    };
    let part = Inputs {
        tables: inputs.tables.iter().map(shifted).collect(),
        ids: inputs.ids.iter().map(Tensor::shallow_clone).collect(),
        upstream: inputs.upstream.transpose(0, 1).contiguous().transpose(0, 1),
    };
    let start = rng_state(device).unwrap();
    let expected = by_kernels(|| inputs.results(inputs.sum(GPT2)));
    set_rng_state(device, &start).unwrap();
    let found = by_kernels(|| part.results(part.sum(GPT2)));
    for (found, expected) in found.iter().zip(&expected) {
        assert_same(found, expected, "results");
    }
}

#[test]
fn a_step_is_one_kernel_in_each_direction() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let inputs = Inputs::new(GPT2).to(device, Kind::Float);
    let account = kernels::counted(|| {
        fake::account(|| {
            let (sum, head) = inputs.sum(GPT2);
            let gradients = [&inputs.upstream, &inputs.tables[0].detach()];
            let tables: Vec<&Tensor> = inputs.tables.iter().collect();
            let options = GradOptions { output_gradients: &gradients, ..GradOptions::default() };
            let _ = grad(&[&sum, &head], &tables, options).unwrap();
        })
    });
    // The seed, both directions, a copy of the head's gradient, which the caller holds, and the addition of the words'.
    assert_eq!(account.calls(), 5, "{account}");
    let launched = |name: &str| account.0[&format!("brigade::{name}")];
    let (row, places) = (GPT2.width as u64 * 4, 15);
    assert_eq!(launched("embedding").bytes, places * 3 * row + (15 + 5) * 8);
    assert_eq!(launched("embedding_backward").bytes, (2 * places + 9) * row + 5 * 8);
}

#[test]
fn a_recorded_step_has_other_ids_and_other_dropout_in_each_replay() {
    let (device, _alone) = gpu();
    let Device::Cuda(index) = device else { return };
    if !fake::is_installed() {
        return;
    }
    let case = Case { dropout: 0.3, ..GPT2 };
    let inputs = Inputs::new(case).to(device, Kind::Float);
    let step = || {
        let (sum, head) = inputs.sum(case);
        let gradients = [&inputs.upstream, &inputs.tables[0].detach()];
        let tables: Vec<&Tensor> = inputs.tables.iter().collect();
        let options = GradOptions { output_gradients: &gradients, ..GradOptions::default() };
        let found = grad(&[&sum, &head], &tables, options).unwrap();
        let mut all = vec![sum.detach()];
        all.extend(found.into_iter().map(|it| it.unwrap()));
        all
    };
    kernels::emulated(|| {
        let mut results = Vec::new();
        let graph = fake::Graph::capture(index, || results = step()).unwrap();
        let mut dropped = Vec::new();
        for data in 0..2 {
            tch::manual_seed(data);
            let ids = Tensor::randint(WORDS, [case.batch, case.tokens], (Kind::Int64, device));
            inputs.ids[0].shallow_clone().copy_(&ids);
            let start = rng_state(device).unwrap();
            graph.replay().unwrap();
            let replayed: Vec<Tensor> = results.iter().map(Tensor::copy).collect();
            set_rng_state(device, &start).unwrap();
            for (index, (found, expected)) in replayed.iter().zip(step()).enumerate() {
                assert!(found.equal(&expected), "{index} of replay {data}");
            }
            dropped.push(replayed[0].eq(0.0));
        }
        assert!(!dropped[0].equal(&dropped[1]), "the same values were dropped twice");
    });
}
