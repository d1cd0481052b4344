//! Dropout without a mask.

use brigade_test_device::numeric_device;
use brigade_torch::{TorchError, dropout, recomputed, rng_state, set_rng_state};
use tch::{Device, Kind, Tensor};

use super::alone;

fn ones(shape: &[i64]) -> Tensor {
    Tensor::ones(shape, (Kind::Float, numeric_device()))
}

/// Whether two tensors hold the same bits.
fn same(one: &Tensor, other: &Tensor) -> bool {
    one.kind() == other.kind() && one.equal(other)
}

/// [Philox4x32](https://www.thesalmons.org/john/random123/papers/random123sc11.pdf).
fn philox(mut counter: [u32; 4], mut key: [u32; 2], rounds: usize) -> [u32; 4] {
    let halves = |product: u64| ((product >> 32) as u32, product as u32);
    for _ in 0..rounds {
        let (high0, low0) = halves(0xD251_1F53 * u64::from(counter[0]));
        let (high1, low1) = halves(0xCD9E_8D57 * u64::from(counter[2]));
        counter = [high1 ^ counter[1] ^ key[0], low1, high0 ^ counter[3] ^ key[1], low0];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    counter
}

/// The value of 16 bits that belongs to a place: tiles of 128 of them, from 16 counters.
fn random_at(seed: u64, place: u64) -> u32 {
    let (tile, at) = (place / 128, place % 128);
    let counter = [(at % 16) as u32, tile as u32, (tile >> 32) as u32, 0];
    let numbers = philox(counter, [seed as u32, (seed >> 32) as u32], 7);
    let half = at / 16;
    numbers[(half / 2) as usize] >> (16 * (half % 2)) & 0xFFFF
}

#[test]
fn what_is_dropped_follows_from_the_generators_next_number() {
    let _generator = alone();
    // From Random123's known answers.
    let known = [0x6627_E8D5, 0xE169_C58D, 0xBC57_AC4C, 0x9B00_DBD8];
    assert_eq!(philox([0; 4], [0; 2], 10), known);
    tch::manual_seed(3);
    let before = rng_state(Device::Cpu).unwrap();
    let seed = Tensor::zeros([1], (Kind::Int64, Device::Cpu)).random_from(i64::MIN, None);
    let after = rng_state(Device::Cpu).unwrap();
    set_rng_state(Device::Cpu, &before).unwrap();
    let output = dropout(&ones(&[1000]).to_device(Device::Cpu), 0.25, None).unwrap();
    assert_eq!(rng_state(Device::Cpu).unwrap(), after);
    let seed = seed.int64_value(&[0]) as u64;
    let expected: Vec<f32> = (0..1000)
        .map(|place| if random_at(seed, place) < 16384 { 0.0 } else { 1.0 / 0.75 })
        .collect();
    assert_eq!(Vec::<f32>::try_from(&output).unwrap(), expected);
}

#[test]
fn as_many_are_dropped_as_were_asked_for_and_the_mean_stays() {
    let _generator = alone();
    tch::manual_seed(3);
    let count = 1_000_000.0;
    for probability in [0.02, 0.1, 0.5, 0.9] {
        let output = dropout(&ones(&[1_000_000]), probability, None).unwrap();
        let dropped = output.eq(0.0).sum(Kind::Int64).int64_value(&[]) as f64;
        let deviation = (count * probability * (1.0 - probability)).sqrt();
        assert!((dropped - count * probability).abs() < 5.0 * deviation, "{dropped}");
        let kept = output.max().double_value(&[]);
        assert!((kept * (1.0 - probability) - 1.0).abs() < 1e-4, "{kept}");
        // Neighbours at any distance of a tile are dropped independently of each other.
        let mask = output.eq(0.0).to_kind(Kind::Double);
        for distance in [1, 16, 32, 128] {
            let long = 1_000_000 - distance;
            let both = mask.narrow(0, 0, long) * mask.narrow(0, distance, long);
            let share = both.mean(Kind::Double).double_value(&[]);
            let expected = probability * probability;
            let deviation = (expected * (1.0 - expected) / count).sqrt();
            assert!((share - expected).abs() < 7.0 * deviation, "{distance}: {share}");
        }
    }
}

#[test]
fn one_state_of_the_generator_gives_one_result_with_any_number_of_threads() {
    let _generator = alone();
    let before = tch::get_num_threads();
    let input = Tensor::randn([40_001], (Kind::Float, Device::Cpu)).set_requires_grad(true);
    let runs = [1, 2, 3].map(|threads| {
        tch::set_num_threads(threads);
        tch::manual_seed(9);
        let (first, second) = (dropout(&input, 0.3, None), dropout(&input, 0.3, None));
        let (first, second) = (first.unwrap(), second.unwrap());
        assert!(!same(&first, &second));
        first.sum(Kind::Float).backward();
        let gradient = input.grad().copy();
        let _ = input.grad().zero_();
        [first.detach(), second.detach(), gradient]
    });
    tch::set_num_threads(before);
    for other in &runs[1..] {
        assert!(runs[0].iter().zip(other).all(|(one, other)| same(one, other)));
    }
}

#[test]
fn the_backward_drops_what_the_forward_has_dropped() {
    let _generator = alone();
    tch::manual_seed(3);
    for kind in [Kind::Float, Kind::Double, Kind::BFloat16, Kind::Half] {
        // Not in the order of memory, and a tile that is not full.
        let random = || Tensor::randn([33, 7], (Kind::Float, numeric_device())).to_kind(kind).tr();
        let input = random().set_requires_grad(true);
        let residual = random().set_requires_grad(true);
        let upstream = random();
        let output = dropout(&input, 0.5, Some(&residual)).unwrap();
        assert_eq!(output.kind(), kind);
        let factor = (&output - &residual).ne(0.0).to_kind(kind) * 2.0;
        assert!(output.allclose(&(&input * &factor + &residual), 0.01, 0.01, false));
        (&output * &upstream).sum(Kind::Float).backward();
        assert!(same(&input.grad(), &(&upstream * &factor)));
        assert!(same(&residual.grad(), &upstream));
    }
}

#[test]
fn a_wider_residual_keeps_its_kind() {
    let _generator = alone();
    let input = ones(&[300]).to_kind(Kind::BFloat16).set_requires_grad(true);
    let output = dropout(&input, 0.5, Some(&ones(&[300]))).unwrap();
    assert_eq!(output.kind(), Kind::Float);
    output.sum(Kind::Float).backward();
    assert!(same(&input.grad(), &(output.detach() - 1.0).to_kind(Kind::BFloat16)));
}

#[test]
fn gradients_have_gradients_and_recomputing_drops_the_same() {
    let _generator = alone();
    tch::manual_seed(3);
    let input = Tensor::randn([50], (Kind::Double, numeric_device())).set_requires_grad(true);
    let output = dropout(&input.square(), 0.5, None).unwrap();
    let first = Tensor::run_backward(&[output.sum(Kind::Double)], &[&input], true, true);
    let second = Tensor::run_backward(&[first[0].sum(Kind::Double)], &[&input], false, false);
    assert!(same(&second[0], &(output.ne(0.0).to_kind(Kind::Double) * 4.0)));

    let output =
        recomputed(&[&input], |inputs| dropout(&inputs[0].square(), 0.5, None).unwrap()).unwrap();
    output.sum(Kind::Double).backward();
    let expected = output.ne(0.0).to_kind(Kind::Double) * 4.0 * &input;
    assert!(same(&input.grad(), &expected));
}

#[test]
fn the_ends_of_the_range_and_what_is_beyond() {
    let _generator = alone();
    let input = ones(&[10]);
    assert!(same(&dropout(&input, 0.0, Some(&input)).unwrap(), &(&input * 2.0)));
    assert!(same(&dropout(&input, 1.0, Some(&input)).unwrap(), &input));
    assert_eq!(dropout(&ones(&[0, 3]), 0.5, None).unwrap().size(), [0, 3]);
    for wrong in [-0.1, 1.1, f64::NAN] {
        let error = dropout(&input, wrong, None).unwrap_err().to_string();
        assert!(error.contains("expected 0 to 1"), "{error}");
    }
    let error = dropout(&input, 0.5, Some(&ones(&[5]))).unwrap_err();
    assert!(
        matches!(error.downcast_ref(), Some(TorchError::Libtorch { .. }))
            && error.to_string().contains("residual is [5]")
    );
}
