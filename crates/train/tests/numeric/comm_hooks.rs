//! Communication hooks against PyTorch's (`fixtures/comm_hooks.py`), and what must hold for any.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use brigade_checkpoint::{TensorInfo, Value};
use parking_lot::Mutex;

use brigade_data::DataLoader;
use brigade_datasets::Digits;
use brigade_models::Cnn;
use brigade_nn::{Init, Model, Module, ParamPath};
use brigade_optim::Adam;
use brigade_test_device::on_device;
use brigade_testkit::{World, assert_close, dist_test};
use brigade_torch::{Bucket, Compression, Error, GradientHook, ReduceOp, ReducerOptions, Result};
use brigade_train::{Accelerator, CommHook, PowerSgd, PreparedModel, Stateful, StatefulHook};
use tch::{Device, Kind, Tensor};

use crate::device::builder;

const SHAPES: [(&str, &[i64]); 3] = [("a", &[12, 10]), ("b", &[10]), ("c", &[6, 7, 2])];

/// Its output's gradients are whatever the fixture says.
struct Net(Vec<Tensor>);

impl Net {
    fn new(path: &ParamPath<'_>) -> Self {
        Self(SHAPES.iter().map(|(name, shape)| path.parameter(name, shape, Init::Zeros)).collect())
    }
}

impl Module<(usize, usize)> for Net {
    type Output = Tensor;

    fn forward(&self, (rank, step): (usize, usize)) -> Result<Tensor> {
        let terms = self.0.iter().enumerate();
        let terms =
            terms.map(|(index, tensor)| (tensor * gradient(index, rank, step)).sum(tensor.kind()));
        Ok(terms.reduce(|sum, term| sum + term).unwrap())
    }
}

/// The same formula as in `comm_hooks.py`.
fn gradient(index: usize, rank: usize, step: usize) -> Tensor {
    let shape = SHAPES[index].1;
    let place = Tensor::arange(shape.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    let phase = 1.0 + index as f64 + 3.0 * rank as f64 + 0.7 * step as f64;
    let values = (&place * 0.37 + phase).sin() + (&place * &place * 0.011 * phase).cos() * 0.25;
    on_device(&values.to_kind(Kind::Float).reshape(shape))
}

fn prepared(accelerator: &Accelerator, kind: Kind) -> PreparedModel<Net> {
    accelerator.prepare(Model::builder().kind(kind).build(Net::new).unwrap()).unwrap()
}

/// One backward; the gradients afterwards.
fn pass(accelerator: &Accelerator, model: &mut PreparedModel<Net>, step: usize) -> Vec<Vec<f64>> {
    model.inner_mut().zero_grad().unwrap();
    let loss = model.forward((accelerator.processes().process_index(), step)).unwrap();
    accelerator.backward(&loss).unwrap();
    let parameters = model.inner().parameters();
    parameters.iter().map(|p| values(&p.tensor.grad())).collect()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_kind(Kind::Double).reshape([-1])).unwrap()
}

fn power(rank: i64) -> PowerSgd {
    PowerSgd { matrix_approximation_rank: rank, start_iteration: 2, ..PowerSgd::default() }
}

/// A prepared model whose first factors are the formula's, not random.
fn with_known_factors(accelerator: &Accelerator, steps: usize) -> PreparedModel<Net> {
    let mut scout = prepared(accelerator, Kind::Float);
    for step in 0..=steps {
        pass(accelerator, &mut scout, step);
    }
    let model = prepared(accelerator, Kind::Float);
    let Some(reached) = scout.comm_hook_state().unwrap() else {
        return model;
    };
    let mut factors = Vec::new();
    for (name, tensor) in reached.get("factor").and_then(Value::as_dict).unwrap() {
        let tensor = tensor.as_tensor().unwrap();
        let places = Tensor::arange(tensor.numel() as i64, (Kind::Double, Device::Cpu));
        let formula = (places * 0.9 + 0.3).cos().reshape(tensor.size()).to_kind(tensor.kind());
        factors.push((name.as_str().unwrap(), Value::Tensor(formula)));
    }
    assert!(!factors.is_empty(), "nothing was compressed");
    let state = Value::dict([("iteration", Value::Int(0)), ("factor", Value::dict(factors))]);
    model.load_comm_hook_state(&state).unwrap();
    model
}

dist_test!(world = 2, dist_hooks_are_pytorchs, |_world: World| -> Result<()> {
    let one = builder().build()?;
    let fixture: serde_json::Value =
        serde_json::from_str(include_str!("../fixtures/comm_hooks.json")).unwrap();
    let unlimited = |rank| PowerSgd { min_compression_rate: 1.0, ..power(rank) };
    let cases = [
        ("fp16", CommHook::Fp16, 1e-7),
        ("bf16", CommHook::Bf16, 1e-7),
        ("power1", CommHook::PowerSgd(unlimited(1)), 2e-5),
        ("power3", CommHook::PowerSgd(unlimited(3)), 2e-5),
        (
            "power1_plain",
            CommHook::PowerSgd(PowerSgd { use_error_feedback: false, ..power(1) }),
            2e-5,
        ),
        // Sums of 16-bit floats, in whatever order a matrix product takes them.
        ("power1_fp16", CommHook::PowerSgd(power(1)).wrapped(Compression::Fp16), 2e-2),
        ("power1_bf16", CommHook::PowerSgd(power(1)).wrapped(Compression::Bf16), 1.5e-1),
    ];
    for (name, hook, tolerance) in cases {
        // The formula's factors have rank 2: the third direction is what QR makes of rounding errors, which depend on
        // the library.
        if name == "power3" && brigade_test_device::tolerance(Kind::Float) > 0.0 {
            continue;
        }
        let accelerator = Accelerator::builder().sharing(&one).comm_hook(hook).build()?;
        let mut model = with_known_factors(&accelerator, 2);
        for (step, expected) in fixture["hooks"][name].as_array().unwrap().iter().enumerate() {
            let found = pass(&accelerator, &mut model, step);
            for ((parameter, _), found) in SHAPES.iter().zip(found) {
                let expected: Vec<f64> = expected[parameter]
                    .as_array()
                    .unwrap()
                    .iter()
                    .map(|v| v.as_f64().unwrap())
                    .collect();
                let tolerance = brigade_test_device::tolerance(Kind::Float).max(tolerance);
                let furthest =
                    found.iter().zip(&expected).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
                assert!(
                    furthest <= tolerance,
                    "{name}, step {step}, {parameter}: off by {furthest}"
                );
            }
        }
    }
    Ok(())
});

dist_test!(world = 3, dist_full_rank_is_the_mean, |_world: World| -> Result<()> {
    let hook = PowerSgd { matrix_approximation_rank: 100, min_compression_rate: 0.01, ..power(1) };
    let accelerator = builder().comm_hook(CommHook::PowerSgd(hook)).build()?;
    let mut model = prepared(&accelerator, Kind::Double);
    for step in 0..6 {
        let found = pass(&accelerator, &mut model, step);
        for (index, found) in found.iter().enumerate() {
            let mean = (0..3).map(|rank| gradient(index, rank, step).to_kind(Kind::Double));
            let mean = mean.reduce(|sum, term| sum + term).unwrap() / 3.0;
            assert_close(found, &values(&mean), 1e-9, 1e-9);
        }
    }
    assert!(model.comm_hook_state()?.unwrap().get("factor").is_some());
    Ok(())
});

dist_test!(world = 2, dist_errors_are_not_lost, |_world: World| -> Result<()> {
    // The applied gradients and the ranks' remaining errors add up to the sum of all mean gradients.
    let accelerator = builder().comm_hook(CommHook::PowerSgd(power(1))).build()?;
    let mut model = prepared(&accelerator, Kind::Double);
    let (mut applied, mut given) = (0.0, 0.0);
    let mut once = 0.0;
    for step in 0..8 {
        let found: f64 = pass(&accelerator, &mut model, step).iter().flatten().sum();
        let mean: f64 = (0..6)
            .map(|i| gradient(i / 2, i % 2, step).to_kind(Kind::Double).sum(Kind::Double) / 2.0)
            .map(|sum| sum.double_value(&[]))
            .sum();
        applied += found;
        given += mean;
        once = (found - mean).abs();
    }
    assert!(once > 1e-3, "one step alone loses something: {once}");
    let state = model.comm_hook_state()?.unwrap();
    assert_eq!(state.get("iteration").and_then(Value::as_int), Some(8));
    let mut owed = 0.0;
    for name in ["a", "c"] {
        let error = state.get("error").and_then(|errors| errors.get(name)?.as_tensor());
        let mut error = error.unwrap().shallow_clone();
        accelerator.processes().group().unwrap().all_reduce(&mut error, ReduceOp::Mean)?;
        owed += error.sum(Kind::Double).double_value(&[]);
    }
    assert!((given - applied - owed).abs() < 1e-9, "{given} - {applied} - {owed}");
    Ok(())
});

dist_test!(world = 2, dist_state_resumes, |_world: World| -> Result<()> {
    let accelerator = builder().comm_hook(CommHook::PowerSgd(power(2))).build()?;
    let mut through = prepared(&accelerator, Kind::Float);
    let mut resumed = prepared(&accelerator, Kind::Float);
    for step in 0..4 {
        pass(&accelerator, &mut through, step);
    }
    resumed.load_comm_hook_state(&through.comm_hook_state()?.unwrap())?;
    for step in 4..7 {
        let expected = pass(&accelerator, &mut through, step);
        assert_eq!(pass(&accelerator, &mut resumed, step), expected);
    }
    let foreign = Value::dict([("exp_avg", Value::Tensor(Tensor::from(1.0)))]);
    let error = through.load_comm_hook_state(&foreign).unwrap_err().to_string();
    assert!(error.contains("`iteration`"), "{error}");
    Ok(())
});

dist_test!(
    world = 2,
    dist_buckets_under_way_together_change_nothing,
    |_world: World| -> Result<()> {
        // Each parameter a bucket of its own, whose messages overlap with backward, against one bucket.
        let first = builder().build()?;
        let through = |bucket_bytes: usize,
                       hook: CommHook|
         -> Result<(usize, Vec<Vec<Vec<f64>>>)> {
            let reducer = ReducerOptions {
                bucket_bytes,
                first_bucket_bytes: bucket_bytes,
                ..ReducerOptions::default()
            };
            let accelerator =
                Accelerator::builder().sharing(&first).reducer(reducer).comm_hook(hook).build()?;
            let mut model = prepared(&accelerator, Kind::Float);
            let passes = (0..6).map(|step| pass(&accelerator, &mut model, step)).collect();
            Ok((model.reducer().unwrap().bucket_bytes()?.len(), passes))
        };
        for hook in [
            CommHook::PowerSgd(power(1)),
            CommHook::PowerSgd(PowerSgd { warm_start: false, ..power(2) }),
            CommHook::PowerSgd(power(1)).wrapped(Compression::Bf16),
            CommHook::Custom(Arc::new(Counting(Arc::default()))).wrapped(Compression::Fp16),
        ] {
            let (one, together) = through(1 << 20, hook.clone())?;
            let (several, apart) = through(1, hook)?;
            assert_eq!((one, several), (1, SHAPES.len()));
            assert_eq!(together, apart);
        }
        Ok(())
    }
);

/// Counts, and averages.
struct Counting(Arc<AtomicUsize>);

impl GradientHook for Counting {
    fn reduce(&self, group: &brigade_torch::ProcessGroup, bucket: &mut Bucket) -> Result<()> {
        self.0.fetch_add(1, Ordering::Relaxed);
        assert!(bucket.index != 7, "the hook's own panic");
        group.all_reduce(&mut bucket.buffer, ReduceOp::Mean)
    }
}

dist_test!(world = 2, dist_ones_own_hook, |_world: World| -> Result<()> {
    let count = Arc::new(AtomicUsize::new(0));
    let hook = CommHook::Custom(Arc::new(Counting(Arc::clone(&count))));
    let accelerator = builder().comm_hook(hook).build()?;
    let mut model = prepared(&accelerator, Kind::Float);
    for step in 0..3 {
        let found = pass(&accelerator, &mut model, step);
        let mean = (gradient(1, 0, step) + gradient(1, 1, step)) / 2.0;
        assert_close(&found[1], &values(&mean), 1e-6, 1e-6);
    }
    assert_eq!(count.load(Ordering::Relaxed), 3, "one bucket");
    assert!(model.load_comm_hook_state(&Value::None).is_err());
    Ok(())
});

/// Averages, and keeps for each parameter the sum of this rank's own gradients.
struct Summing {
    names: Vec<String>,
    sums: Mutex<BTreeMap<String, f64>>,
}

impl Summing {
    fn new(parameters: &[brigade_torch::NamedTensor]) -> Self {
        let names = parameters.iter().map(|parameter| parameter.name.clone()).collect();
        Self { names, sums: Mutex::default() }
    }
}

impl GradientHook for Summing {
    fn reduce(&self, group: &brigade_torch::ProcessGroup, bucket: &mut Bucket) -> Result<()> {
        for (gradient, &parameter) in bucket.gradients.iter().zip(&bucket.parameters) {
            let mut sums = self.sums.lock();
            *sums.entry(self.names[parameter].clone()).or_default() +=
                gradient.sum(Kind::Double).double_value(&[]);
        }
        group.all_reduce(&mut bucket.buffer, ReduceOp::Mean)
    }
}

impl Stateful for Summing {
    fn state_dict(&self) -> Result<Value<Tensor>> {
        let sums = self.sums.lock();
        Ok(Value::dict(sums.iter().map(|(name, sum)| (name.clone(), Value::Float(*sum)))))
    }

    fn check_state_dict(&self, state: &Value<TensorInfo>) -> Result<(), String> {
        let names = state.as_dict().ok_or("no sums")?.iter().filter_map(|(name, _)| name.as_str());
        let mut unknown = names.filter(|name| !self.names.iter().any(|known| known == name));
        unknown.next().map_or(Ok(()), |name| Err(format!("it has a sum of `{name}`")))
    }

    fn load_state_dict(&self, state: &Value<Tensor>) -> Result<()> {
        self.load_from_ranks(&[state])
    }
}

impl StatefulHook for Summing {
    fn load_from_ranks(&self, states: &[&Value<Tensor>]) -> Result<()> {
        let mut sums = BTreeMap::new();
        for (name, sum) in states.iter().filter_map(|state| state.as_dict()).flatten() {
            let name = name.as_str().ok_or_else(|| Error::custom("no name"))?.to_owned();
            *sums.entry(name).or_default() +=
                sum.as_float().ok_or_else(|| Error::custom("no number"))?;
        }
        *self.sums.lock() = sums;
        Ok(())
    }
}

dist_test!(
    world = 2,
    dist_ones_own_hooks_state_is_kept_for_each_rank,
    |_world: World| -> Result<()> {
        let accelerator = builder().comm_hook(CommHook::stateful(Summing::new)).build()?;
        let folder = accelerator.is_main_process().then(|| tempfile::tempdir().unwrap());
        let path = folder.as_ref().map(|folder| folder.path().join("saved"));
        let saved = accelerator.processes().broadcast_object(path, 0)?.unwrap();
        let mut model = prepared(&accelerator, Kind::Float);
        for step in 0..2 {
            pass(&accelerator, &mut model, step);
        }
        accelerator.save_state(&saved)?;
        let kept = model.comm_hook_state()?.unwrap();
        let rank = accelerator.processes().process_index();
        let sum: f64 =
            (0..2).map(|step| gradient(0, rank, step).sum(Kind::Double).double_value(&[])).sum();
        let found = kept.get("a").and_then(Value::as_float).unwrap();
        assert!((found - sum).abs() < 1e-4, "{found} is not {sum}");
        pass(&accelerator, &mut model, 2);
        assert_ne!(model.comm_hook_state()?.unwrap(), kept);
        accelerator.load_state(&saved)?;
        assert_eq!(model.comm_hook_state()?.unwrap(), kept);
        accelerator.processes().wait_for_everyone()
    }
);

dist_test!(world = 2, dist_training_converges_with_power_sgd, |_world: World| -> Result<()> {
    let hook = PowerSgd { matrix_approximation_rank: 2, ..power(2) };
    let accelerator = builder().comm_hook(CommHook::PowerSgd(hook)).build()?;
    accelerator.set_seed(1);
    let model = Model::new(Cnn::new)?;
    let optimizer = Adam::default().lr(2e-3).build(&model)?;
    let train = DataLoader::new(Digits::train()?.resize(28, 28)?).batch_size(32).shuffle(true);
    let (mut model, mut optimizer, train) = accelerator.prepare((model, optimizer, train))?;
    let mut losses = Vec::new();
    model.train();
    for batch in (&train).into_iter().take(20) {
        let (images, labels) = batch?.into_data();
        let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
        optimizer.zero_grad()?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
        losses.push(loss.double_value(&[]));
    }
    let mean = |losses: &[f64]| losses.iter().sum::<f64>() / losses.len() as f64;
    let (first, last) = (mean(&losses[..4]), mean(&losses[16..]));
    assert!(last < 0.5 * first, "loss from {first} to {last}");
    // The ranks have equal weights.
    let weights = model.inner().parameters();
    let mine = weights.iter().flat_map(|p| values(&p.tensor)).collect::<Vec<_>>();
    let all = accelerator.processes().gather_object(mine)?;
    assert_eq!(all[0], all[1]);
    Ok(())
});

#[test]
fn impossible_numbers_are_refused() {
    let refused = |options: PowerSgd, word: &str| {
        let hook = CommHook::PowerSgd(options).wrapped(Compression::Bf16);
        let error = builder().comm_hook(hook).build().unwrap_err().to_string();
        assert!(error.contains(word), "{error}");
    };
    refused(PowerSgd { start_iteration: 1, ..PowerSgd::default() }, "start_iteration is 1");
    refused(power(0), "matrix_approximation_rank is 0");
    refused(PowerSgd { min_compression_rate: f64::NAN, ..PowerSgd::default() }, "NaN");
}
