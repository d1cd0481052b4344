//! The bits of a step do not depend on where tensors lie in memory.

use super::transformer::Block;
use brigade_models::{Cnn, ResNet};
use brigade_nn::{Linear, Model, Module, ParamPath};
use brigade_optim::{Adam, Optimizer};
use brigade_optim::{Overrides, all_optimizers};
use brigade_testkit::{World, dist_test};
use brigade_torch::{Compression, ReducerOptions, Result, shift_allocations};
use brigade_train::{Accelerator, CommHook, PowerSgd, Precision};
use parking_lot::Mutex;
use tch::{Device, Kind, Tensor};

/// The allocator and the random generator belong to the process, and tests run side by side in one.
static PROCESS: Mutex<()> = Mutex::new(());

/// Bytes behind a multiple of 64.
const SHIFTS: [usize; 5] = [0, 4, 8, 16, 32];

/// Layers of odd sizes, whose products take every path of a matrix library.
struct Odd(Vec<Linear>);

impl Odd {
    fn new(path: &ParamPath<'_>) -> Self {
        let sizes = [37, 65, 13, 7, 130, 10];
        let pairs = sizes.windows(2).enumerate();
        Self(pairs.map(|(i, pair)| Linear::new(path / format!("{i}"), pair[0], pair[1])).collect())
    }
}

impl Module<&Tensor> for Odd {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.0.iter().try_fold(input.shallow_clone(), |x, layer| Ok(layer.forward(&x)?.tanh()))
    }
}

/// Four steps from the same start; the weights' bits as whole numbers, by name.
fn train<M>(
    accelerator: &Accelerator,
    build: impl FnOnce(&ParamPath<'_>) -> M,
    shape: &[i64],
    optimizer: impl FnOnce(&Model<M>) -> Result<Optimizer>,
) -> Vec<(String, Tensor)>
where
    M: for<'a> Module<&'a Tensor, Output = Tensor> + 'static,
{
    accelerator.set_seed(7);
    let model = Model::new(build).unwrap();
    let optimizer = optimizer(&model).unwrap();
    let (mut model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    model.train();
    let rank = accelerator.processes().process_index() as i64;
    for step in 0..4 {
        tch::manual_seed(100 * rank + step);
        let input = Tensor::randn(shape, (Kind::Float, Device::Cpu));
        let target = Tensor::randint(10, [shape[0]], (Kind::Int64, Device::Cpu));
        let loss = model.forward(&input).unwrap().cross_entropy_for_logits(&target);
        optimizer.zero_grad().unwrap();
        accelerator.backward(&loss).unwrap();
        optimizer.step().unwrap();
    }
    let state = model.inner().state_dict();
    let bits = |tensor: &Tensor| match tensor.kind() {
        Kind::Float => tensor.detach().contiguous().view_dtype(Kind::Int).copy(),
        _ => tensor.copy(),
    };
    state.iter().map(|(name, tensor)| (name.to_owned(), bits(tensor))).collect()
}

/// Runs with every shift, and compares.
fn same_bits(what: &str, run: impl Fn() -> Vec<(String, Tensor)>) {
    let mut first = None;
    for shift in SHIFTS {
        shift_allocations(shift).unwrap();
        let found = run();
        let Some(expected) = &first else {
            first = Some(found);
            continue;
        };
        assert_eq!(found.len(), expected.len());
        for ((name, found), (_, expected)) in found.iter().zip(expected) {
            let different = found.not_equal_tensor(expected).sum(Kind::Int64).int64_value(&[]);
            let all = found.numel();
            assert_eq!(
                different, 0,
                "{what}: {different} of {all} numbers of {name} differ when tensors lie {shift} \
                 bytes further"
            );
        }
    }
}

fn adam<M>(model: &Model<M>) -> Result<Optimizer> {
    Adam::default().lr(1e-3).build(model)
}

fn one_process(precision: Precision) {
    let _alone = PROCESS.lock();
    let accelerator = Accelerator::builder().cpu(true).mixed_precision(precision).build().unwrap();
    let one = &accelerator;
    same_bits("CNN", || train(one, Cnn::new, &[6, 1, 28, 28], adam));
    same_bits("ResNet-18", || train(one, |p| ResNet::resnet18(p, 10), &[2, 3, 32, 32], adam));
    same_bits("transformer", || train(one, |path| Block::new(path, 96, 6), &[3, 17, 96], adam));
    same_bits("linear layers", || train(one, Odd::new, &[11, 37], adam));
    same_bits("one sample", || train(one, Odd::new, &[1, 37], adam));
}

#[test]
fn a_step_in_float32() {
    one_process(Precision::No);
}

#[test]
fn a_step_in_bfloat16() {
    one_process(Precision::Bf16);
}

#[test]
fn a_step_of_every_optimizer_some_in_bf16() {
    let _alone = PROCESS.lock();
    let accelerator = Accelerator::builder().cpu(true).build().unwrap();
    for (name, settings) in all_optimizers() {
        let build = |model: &Model<Odd>| {
            let mut parameters = model.trainable_parameters();
            // Muon takes matrices only.
            if settings.build_with(&parameters, Overrides::default()).is_err() {
                parameters.retain(|parameter| parameter.tensor.dim() == 2);
            }
            settings.build_with(&parameters, Overrides::default())
        };
        same_bits(name, || train(&accelerator, Odd::new, &[11, 37], build));
    }
}

dist_test!(world = 2, seconds = 180, dist_a_step_of_two_ranks, |_world: World| -> Result<()> {
    let first = Accelerator::builder().cpu(true).build()?;
    let power = |rank| PowerSgd {
        matrix_approximation_rank: rank,
        start_iteration: 2,
        min_compression_rate: 1.0,
        ..PowerSgd::default()
    };
    let hooks = [
        None,
        Some(CommHook::Bf16),
        Some(CommHook::PowerSgd(power(1))),
        Some(CommHook::PowerSgd(power(3))),
        Some(CommHook::PowerSgd(power(2)).wrapped(Compression::Bf16)),
    ];
    // One bucket, and many that begin at odd addresses.
    for bucket_bytes in [1 << 20, 1 << 10] {
        for hook in &hooks {
            let reducer = ReducerOptions {
                bucket_bytes,
                first_bucket_bytes: bucket_bytes,
                ..ReducerOptions::default()
            };
            let builder = Accelerator::builder().sharing(&first).reducer(reducer);
            let accelerator = match hook {
                Some(hook) => builder.comm_hook(hook.clone()).build()?,
                None => builder.build()?,
            };
            let what = format!("buckets of {bucket_bytes} bytes, {hook:?}");
            same_bits(&what, || train(&accelerator, Odd::new, &[11, 37], adam));
        }
    }
    Ok(())
});
