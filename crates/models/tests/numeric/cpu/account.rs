//! Account of a training step on GPUs made of host memory: operators, and the bytes that they move outside of products,
//! convolutions and attention. A change that brings a cast or a copy back exceeds a ceiling.

use brigade_models::{Gpt2LmHead, Gpt2Options, ResNet};
use brigade_nn::Model;
use brigade_optim::{AdamW, Sgd};
use brigade_test_device::fake::{self, Account};
use brigade_test_device::kernels::{self, ProductTimes};
use brigade_torch::Autocast;
use tch::{Device, Kind, Tensor};

/// Sizes on which the account of a language model depends.
#[derive(Debug, Clone, Copy)]
struct Sizes {
    layers: usize,
    tokens: i64,
    width: i64,
    vocabulary: i64,
}

const HEAD_WIDTH: i64 = 16;
const TEXT: i64 = 32;
/// GPT-2 with 124 million parameters, 8 texts of 1,024 tokens.
const FULL: Sizes = Sizes { layers: 12, tokens: 8192, width: 768, vocabulary: 50257 };

/// Returns the account of the second step: the first one also allocates the optimizer's state.
fn second(mut step: impl FnMut()) -> Account {
    step();
    fake::account(step)
}

/// Returns the account of a step with the operators that take the place of Brigade's kernels, with the kernels, and with
/// products that have epilogues, too.
fn of_gpt2(sizes: Sizes) -> [Account; 3] {
    let device = Device::Cuda(0);
    let options = Gpt2Options {
        vocab_size: sizes.vocabulary,
        n_embd: sizes.width,
        n_head: sizes.width / HEAD_WIDTH,
        n_layer: sizes.layers,
        ..Default::default()
    };
    let model = Model::builder().device(device);
    let model = model.build(|path| Gpt2LmHead::new(path, &options)).unwrap();
    let mut optimizer = AdamW::default().build(&model).unwrap();
    let ids = Tensor::randint(sizes.vocabulary, [sizes.tokens / TEXT, TEXT], (Kind::Int64, device));
    let mut step = || {
        let loss = {
            let _scope = Autocast::enter(device, Kind::BFloat16, true).unwrap();
            model.module().loss(&ids, &ids, 0.0).unwrap().mean().unwrap()
        };
        loss.backward();
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
    };
    let by_operators = second(&mut step);
    let by_kernels = kernels::counted(|| second(&mut step));
    // Faster than any launch, so that they are chosen once both candidates were measured three times.
    let times = ProductTimes { algorithms: &[0.0], launch: 1e6, ..ProductTimes::default() };
    let with_epilogues = kernels::with_products(times, || {
        kernels::counted(|| {
            (0..6).for_each(|_| step());
            second(step)
        })
    });
    [by_operators, by_kernels, with_epilogues]
}

/// Returns the terms whose weighted sum the bytes of a step are.
fn terms(sizes: Sizes) -> [f64; 12] {
    let Sizes { layers, tokens, width, vocabulary } = sizes;
    let [l, t, w, v] = [layers as f64, tokens as f64, width as f64, vocabulary as f64];
    [1.0, w, t, t * w, v, v * w, v * t, l, l * w, l * w * w, l * t, l * t * w]
}

/// Returns the factors of [`terms`] from accounts of small models.
fn factors(accounts: &[(Sizes, u64)]) -> Vec<f64> {
    let rows: Vec<f64> = accounts.iter().flat_map(|(sizes, _)| terms(*sizes)).collect();
    let rows = Tensor::from_slice(&rows).view([accounts.len() as i64, 12]);
    let bytes: Vec<f64> = accounts.iter().map(|(_, bytes)| *bytes as f64).collect();
    let scale = rows.amax([0], true);
    let (solution, ..) =
        (&rows / &scale).linalg_lstsq(&Tensor::from_slice(&bytes).view([-1, 1]), None, "gelsd");
    Vec::try_from((solution.view([-1]) / scale.view([-1])).contiguous()).unwrap()
}

fn at(factors: &[f64], sizes: Sizes) -> f64 {
    factors.iter().zip(terms(sizes)).map(|(factor, term)| factor * term).sum()
}

/// Largest number of calls of a layer and beside the layers, and of gigabytes at full size.
struct Ceilings {
    of_layer: u64,
    rest: u64,
    gigabytes: f64,
}

#[test]
fn a_step_of_gpt2_stays_below_its_ceilings() {
    if fake::install(1).is_err() {
        return;
    }
    let ceilings = [
        Ceilings { of_layer: 48, rest: 51, gigabytes: 37.8 },
        // The sums of a kernel's blocks are those of the two processors of the emulation: 0.3 GB more on an H100.
        Ceilings { of_layer: 25, rest: 27, gigabytes: 13.5 },
        // With what epilogues read and write beside the operands and outputs of their products.
        Ceilings { of_layer: 23, rest: 27, gigabytes: 11.6 },
    ];
    let mut accounts = [Vec::new(), Vec::new(), Vec::new()];
    for layers in [1, 2] {
        for (tokens, width) in [(32, 32), (64, 32), (32, 64), (96, 48)] {
            for vocabulary in [127, 255] {
                let sizes = Sizes { layers, tokens, width, vocabulary };
                for (accounts, account) in accounts.iter_mut().zip(of_gpt2(sizes)) {
                    accounts.push((sizes, account));
                }
            }
        }
    }
    for (accounts, ceilings) in accounts.iter().zip(ceilings) {
        let bytes: Vec<_> = accounts.iter().map(|(sizes, it)| (*sizes, it.bytes())).collect();
        let factors = factors(&bytes);
        for (sizes, bytes) in &bytes {
            let error = at(&factors, *sizes) / *bytes as f64 - 1.0;
            assert!(
                error.abs() < 1e-6,
                "bytes are not a sum of these terms: {sizes:?} is off by {error}"
            );
        }
        let [one, two] =
            [accounts.len() / 2, accounts.len()].map(|end| accounts[end - 1].1.calls());
        let (of_layer, rest) = (two - one, 2 * one - two);
        let gigabytes = at(&factors, FULL) / 1e9;
        let last = &accounts[accounts.len() - 1].1;
        assert!(
            of_layer <= ceilings.of_layer
                && rest <= ceilings.rest
                && gigabytes <= ceilings.gigabytes,
            "{of_layer} calls of a layer, {rest} beside them; {gigabytes:.2} GB at full size. Two layers:\n{last}"
        );
    }
}

#[test]
fn a_step_of_resnet50_stays_below_its_ceilings() {
    if fake::install(1).is_err() {
        return;
    }
    const SIDE: i64 = 64;
    let device = Device::Cuda(0);
    let mut model =
        Model::builder().device(device).build(|path| ResNet::resnet50(path, 1000)).unwrap();
    model.to_channels_last().unwrap();
    let mut optimizer = Sgd::new(0.1).momentum(0.9).build(&model).unwrap();
    let accounts = [1, 2].map(|images| {
        let pictures = Tensor::randn([images, 3, SIDE, SIDE], (Kind::Float, device));
        let labels = Tensor::randint(1000, [images], (Kind::Int64, device));
        let mut step = || {
            let loss = {
                let _scope = Autocast::enter(device, Kind::BFloat16, true).unwrap();
                model.forward(&pictures).unwrap().cross_entropy_for_logits(&labels)
            };
            loss.backward();
            optimizer.step().unwrap();
            optimizer.zero_grad().unwrap();
        };
        let by_operators = second(&mut step);
        [by_operators, kernels::counted(|| second(step))]
    });
    // By libtorch's operators, and with the kernels.
    for (index, (most_calls, most_gigabytes)) in [(523, 74.3), (552, 48.8)].into_iter().enumerate()
    {
        let [one, two] = accounts.each_ref().map(|accounts| &accounts[index]);
        let of_image = (two.bytes() - one.bytes()) as f64 * (224.0 / SIDE as f64).powi(2);
        let gigabytes = (one.bytes() as f64 + 256.0 * of_image) / 1e9;
        let calls = two.calls();
        assert!(
            calls <= most_calls && gigabytes <= most_gigabytes,
            "{calls} calls; {gigabytes:.2} GB at full size. Two images:\n{two}"
        );
    }
}
