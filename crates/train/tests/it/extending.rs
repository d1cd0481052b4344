//! What a program brings itself: an optimizer's rule, schedules, metrics, and ranks that are threads.

use std::thread;

use brigade_checkpoint::Value;
use brigade_data::{DataLoader, TensorDataset};
use brigade_metrics::{Accuracy, FBeta, Mean, MetricState, PredictedClasses, TopK};
use brigade_nn::{Init, Model, Module, ParamPath};
use brigade_optim::{Adam, Group, Optimizer, Rule, Scheduler, Sgd, Step};
use brigade_rank_env::{StoreEndpoint, WorldSize};
use brigade_schedule::LrSchedule;
use brigade_testkit::{World, dist_test};
use brigade_torch::{Backend, ErrorKind, ReduceOp, Result, Store};
use brigade_train::{
    Accelerator, ConnectOptions, PreparedModel, PreparedOptimizer, PreparedScheduler, Processes,
    Stateful, TrainError,
};
use tch::{Device, Kind, Tensor};

/// `y = a x + b`, from numbers that do not depend on libtorch's random ones.
struct Line {
    a: Tensor,
    b: Tensor,
}

impl Line {
    fn new(path: &ParamPath<'_>) -> Self {
        let parameter = |name: &str, value: f64| {
            let parameter = path.parameter(name, &[4], Init::Zeros);
            let _ = tch::no_grad(|| parameter.shallow_clone().fill_(value));
            parameter
        };
        Self { a: parameter("head", 0.5), b: parameter("body", -0.25) }
    }
}

impl Module<&Tensor> for Line {
    type Output = Tensor;

    fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(&self.a * x + &self.b)
    }
}

/// Descends along the running mean of the gradient, and shrinks weights.
#[derive(Debug)]
struct Momentum;

impl Rule for Momentum {
    fn name(&self) -> &'static str {
        "Momentum"
    }

    fn slots(&self) -> &'static [&'static str] {
        &["mean"]
    }

    fn counts_steps(&self) -> bool {
        true
    }

    fn momentum_name(&self) -> Option<&'static str> {
        Some("momentum")
    }

    fn step(&self, step: &mut Step<'_>) -> Result<()> {
        step.fill_missing(0)?;
        let (lr, momentum) = (step.lr(), step.momentum());
        step.each(|parameter, gradient, slots| {
            let mut mean = slots.require(0)?.shallow_clone();
            // The first mean is the gradient itself.
            let part = if slots.steps() == 1 { 1.0 } else { 1.0 - momentum };
            mean.f_copy_(&(&mean * (1.0 - part) + gradient * part))?;
            let _ = parameter.shallow_clone().f_sub_(&(mean * lr))?;
            Ok(())
        })
    }
}

type Objects = (PreparedModel<Line>, PreparedOptimizer, PreparedScheduler);

fn objects(accelerator: &Accelerator) -> Objects {
    let model = Model::new(Line::new).unwrap();
    let optimizer = Optimizer::with_rule(Momentum, 0.1)
        .momentum(0.5)
        .group(Group::matching("body").momentum(0.75))
        .build(&model)
        .unwrap();
    let head: Box<dyn LrSchedule> = Box::new(|step: u64| 0.1 / (1.0 + step as f64));
    let body: Box<dyn LrSchedule> = Box::new(|step: u64| if step < 2 { 0.0 } else { 0.05 });
    let scheduler = Scheduler::per_group(&optimizer, vec![head, body]).unwrap();
    accelerator.prepare((model, optimizer, scheduler)).unwrap()
}

fn steps(
    accelerator: &Accelerator,
    (model, optimizer, scheduler): &mut Objects,
    steps: std::ops::Range<i64>,
) -> Result<()> {
    for step in steps {
        let place = accelerator.processes().process_index() as f64 + 1.0 + step as f64;
        let x = (Tensor::arange(4, (Kind::Float, Device::Cpu)) * 0.3 + place).sin();
        optimizer.zero_grad()?;
        let loss = (model.forward(&x)? - &x * 2.0 + 1.0).square().mean(Kind::Float);
        accelerator.backward(&loss)?;
        optimizer.step()?;
        scheduler.step()?;
    }
    Ok(())
}

fn values(model: &PreparedModel<Line>) -> Vec<Vec<f32>> {
    let parameters = model.inner().parameters();
    parameters.iter().map(|it| Vec::try_from(it.tensor.detach()).unwrap()).collect()
}

#[test]
fn ones_own_rule_and_schedules_resume_from_a_checkpoint() -> Result<()> {
    let folder = tempfile::tempdir().unwrap();
    let first = Accelerator::builder().cpu(true).quiet(true).build()?;
    let mut through = objects(&first);
    let untouched = values(&through.0)[1].clone();
    steps(&first, &mut through, 0..2)?;
    assert_eq!(values(&through.0)[1], untouched, "the body's rate is 0 for two steps");
    steps(&first, &mut through, 2..3)?;
    first.save_state(folder.path().join("saved"))?;
    first.checkpoints().wait()?;
    steps(&first, &mut through, 3..6)?;

    let second = Accelerator::builder().sharing(&first).build()?;
    let mut resumed = objects(&second);
    second.load_state(folder.path().join("saved"))?;
    assert_eq!((resumed.1.steps()?, resumed.2.position()?), (3, 3));
    let rates: Vec<f64> = resumed.1.groups().unwrap().iter().map(|group| group.lr()).collect();
    assert_eq!(rates, [0.1 / 4.0, 0.05]);
    steps(&second, &mut resumed, 3..6)?;
    assert_eq!(values(&resumed.0), values(&through.0));

    // Another rule refuses that state, and nothing changes.
    let other = Accelerator::builder().sharing(&first).build()?;
    let model = Model::new(Line::new)?;
    let optimizer = Sgd::new(0.1).momentum(0.5).group(Group::matching("body")).build(&model)?;
    let scheduler = Scheduler::new(&optimizer, |_: u64| 0.1);
    let _objects = other.prepare((model, optimizer, scheduler))?;
    let error = other.load_state(folder.path().join("saved")).unwrap_err().to_string();
    assert!(error.contains("is of Momentum, but this optimizer is SGD"), "{error}");
    Ok(())
}

#[test]
fn losses_that_are_not_finite_do_not_reach_ones_own_rule() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    let (model, mut optimizer, mut scheduler) = objects(&accelerator);
    let before = values(&model);
    let x = Tensor::full([4], f64::NAN, (Kind::Float, Device::Cpu));
    let loss = model.forward(&x)?.sum(Kind::Float);
    let error = accelerator.backward(&loss).unwrap_err();
    assert!(
        matches!(
            error.downcast_ref(),
            Some(TrainError::LossNotFinite { weights_corrupted: false, .. })
        ),
        "{error}"
    );
    scheduler.step()?;
    assert_eq!(scheduler.position()?, 0, "the schedule waits for the optimizer");
    optimizer.zero_grad()?;
    optimizer.step()?;
    assert_eq!(values(&model), before);
    // An accumulated window: nothing is stepped before its end.
    let accumulating = Accelerator::builder().sharing(&accelerator).gradient_accumulation_steps(2);
    let accumulating = accumulating.build()?;
    let (model, mut optimizer, _scheduler) = objects(&accumulating);
    let data = TensorDataset::new(Tensor::ones([4, 4], (Kind::Float, Device::Cpu))).unwrap();
    let loader = accumulating.prepare(DataLoader::new(data).batch_size(1))?;
    for batch in &loader {
        let batch = batch?;
        accumulating.accumulate(&model, &batch, || {
            accumulating.backward(&model.forward(&batch)?.sum(Kind::Float))?;
            optimizer.step()?;
            optimizer.zero_grad()
        })?;
    }
    assert_eq!(optimizer.steps()?, 2);
    Ok(())
}

#[test]
fn an_invalid_rate_never_reaches_the_weights() -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    let model = Model::new(Line::new)?;
    let optimizer = Sgd::new(0.1).build(&model)?;
    let scheduler = Scheduler::new(&optimizer, |step: u64| if step == 1 { f64::NAN } else { 0.5 });
    let (model, mut optimizer, mut scheduler) =
        accelerator.prepare((model, optimizer, scheduler))?;
    let before = values(&model);
    let error = scheduler.step().unwrap_err().to_string();
    assert!(error.contains("learning rate NaN for step 1"), "{error}");
    assert_eq!((scheduler.position()?, optimizer.lr()?), (0, 0.5));
    let first = Scheduler::new(&optimizer.settled().unwrap(), |_: u64| -1.0);
    let loss = model.forward(&Tensor::ones([4], (Kind::Float, Device::Cpu)))?.sum(Kind::Float);
    accelerator.backward(&loss)?;
    let error = optimizer.step().unwrap_err().to_string();
    assert!(error.contains("group 0 has the learning rate -1"), "{error}");
    assert_eq!(values(&model), before);
    drop(first);
    let error =
        Scheduler::per_group(&optimizer.settled().unwrap(), Vec::new()).unwrap_err().to_string();
    assert!(error.contains("has 0 schedules, expected 1"), "{error}");
    Ok(())
}

dist_test!(world = 2, dist_metrics_count_every_sample_once, |_: World| -> Result<()> {
    let accelerator = Accelerator::new()?;
    // 11 samples in batches of 3 on 2 ranks: the last round has 5, and 1 duplicate.
    let labels: Vec<i64> = (0..11).map(|i| i % 3).collect();
    let predicted: Vec<i64> = (0..11).map(|i| if i % 4 == 0 { 0 } else { i % 3 }).collect();
    let data = (Tensor::from_slice(&predicted), Tensor::from_slice(&labels));
    let loader = DataLoader::new(TensorDataset::new(data).unwrap()).batch_size(3);
    let loader = accelerator.prepare(loader)?;
    let mut accuracy = MetricState::new(PredictedClasses::new(Accuracy, 3));
    let mut top = MetricState::new(TopK(1));
    let mut f2 = MetricState::new(FBeta::new(2.0).per_class());
    let mut mean = MetricState::new(Mean);
    for batch in &loader {
        let batch = batch?;
        let (predicted, labels) = &*batch;
        let scores = predicted.one_hot(3);
        accelerator.update_metric(&mut accuracy, &batch, predicted, labels)?;
        accelerator.update_metric(&mut top, &batch, &scores, labels)?;
        accelerator.update_metric(&mut f2, &batch, &scores, labels)?;
        let ones = labels.ones_like();
        accelerator.update_metric(&mut mean, &batch, labels, &ones)?;
    }
    let right = labels.iter().zip(&predicted).filter(|(a, b)| a == b).count() as f64;
    assert_eq!(accelerator.compute_metric(&accuracy)?, right / 11.0);
    assert_eq!(accelerator.compute_metric(&top)?, right / 11.0);
    let sum = labels.iter().sum::<i64>() as f64;
    assert_eq!(accelerator.compute_metric(&mean)?, sum / 11.0);
    let mut alone = MetricState::new(FBeta::new(2.0).per_class());
    alone.update(&Tensor::from_slice(&predicted).one_hot(3), &Tensor::from_slice(&labels))?;
    assert_eq!(accelerator.compute_metric(&f2)?, alone.compute(None)?);
    // Metrics that differ between ranks are refused on both.
    let mut odd = MetricState::new(FBeta::new(1.0).per_class());
    let classes = 2 + accelerator.processes().process_index() as i64;
    odd.update(&Tensor::from_slice(&[0i64, 1]).one_hot(classes), &Tensor::from_slice(&[0i64, 1]))?;
    let error = accelerator.compute_metric(&odd).unwrap_err().to_string();
    assert!(error.contains("rank 0's metric has 7 sums, rank 1's 10"), "{error}");
    accuracy.reset();
    assert!(accelerator.compute_metric(&accuracy)?.is_nan());
    Ok(())
});

/// Trains the line as rank `rank` of two that are threads.
fn as_thread(rank: usize, store: Store) -> Result<Vec<Vec<f32>>> {
    let world = World::on_one_host(rank, WorldSize::new(2)?, StoreEndpoint::alone())?;
    let accelerator =
        Accelerator::builder().world(world).store(store).cpu(true).quiet(true).build()?;
    let mut objects = objects(&accelerator);
    steps(&accelerator, &mut objects, 0..5)?;
    Ok(values(&objects.0))
}

dist_test!(world = 2, dist_threads_train_as_processes_do, |_: World| -> Result<()> {
    let accelerator = Accelerator::new()?;
    let mut processes = objects(&accelerator);
    steps(&accelerator, &mut processes, 0..5)?;
    let expected = values(&processes.0);
    let store = Store::hash()?;
    let found: Vec<Vec<Vec<f32>>> = thread::scope(|scope| {
        let rank = |rank| {
            scope.spawn({
                let store = store.clone();
                move || as_thread(rank, store).unwrap()
            })
        };
        [rank(0), rank(1)].map(|rank| rank.join().unwrap()).into()
    });
    assert_eq!(found, [expected.clone(), expected]);
    Ok(())
});

#[test]
fn one_process_plays_a_rank_of_a_large_world() -> Result<()> {
    let world = World::on_one_host(3, WorldSize::new(8)?, StoreEndpoint::alone())?;
    let builder = Accelerator::builder().world(world).store(Store::hash()?).cpu(true).quiet(true);
    let accelerator = builder.backend(Backend::Fake).build()?;
    assert_eq!(
        (accelerator.processes().process_index(), accelerator.processes().num_processes()),
        (3, 8)
    );
    let one = Tensor::from(2.0);
    let sum = accelerator.processes().reduce(&one, ReduceOp::Sum)?.double_value(&[]);
    assert!(sum.is_finite());
    Ok(())
}

#[test]
fn contradicting_options_are_refused() -> Result<()> {
    let first = Accelerator::builder().cpu(true).quiet(true).build()?;
    let refused = |builder: brigade_train::AcceleratorBuilder| {
        builder.sharing(&first).build().unwrap_err().to_string()
    };
    let world = World::alone();
    let text = refused(Accelerator::builder().world(world));
    assert!(text.contains("`world` contradicts `sharing`"), "{text}");
    let text = refused(Accelerator::builder().timeout(std::time::Duration::from_secs(1)));
    assert!(text.contains("`timeout` contradicts `sharing`"), "{text}");
    let text = refused(Accelerator::builder().store(Store::hash()?));
    assert!(text.contains("`store` contradicts `sharing`"), "{text}");
    let text = refused(Accelerator::builder().keep_memory(false));
    assert!(text.contains("`keep_memory` contradicts `sharing`"), "{text}");
    let text = refused(Accelerator::builder().debug(true));
    assert!(text.contains("`debug` contradicts `sharing`"), "{text}");
    // A decision of the other rank that is the same does not interfere.
    assert!(Accelerator::builder().cpu(true).sharing(&first).build().is_ok());
    let error = Accelerator::builder().cpu(true).device(Device::Cuda(0)).build().unwrap_err();
    assert!(error.to_string().contains("contradict each other"), "{error}");
    let two = World::on_one_host(0, WorldSize::new(2)?, StoreEndpoint::alone())?;
    let error = Accelerator::builder().world(two).build().unwrap_err();
    assert!(
        error.kind() == ErrorKind::InvalidArgument && error.to_string().contains("store"),
        "{error}"
    );
    Ok(())
}

/// Everything that `prepare` gives back, and a model's state is refused before a tensor is changed.
#[test]
fn prepared_objects_are_stateful() {
    fn round_trip(object: &impl Stateful) -> Value<Tensor> {
        let state = object.state_dict().unwrap();
        object.load_state_dict(&state).unwrap();
        state
    }
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build().unwrap();
    let model = Model::new(|path| brigade_nn::Linear::new(path, 3, 2)).unwrap();
    let optimizer = Adam::default().build(&model).unwrap();
    let scheduler = Scheduler::new(&optimizer, |_: u64| 0.5);
    let rows = Tensor::arange(8, (Kind::Int64, Device::Cpu));
    let loader = DataLoader::new(TensorDataset::new(rows).unwrap()).batch_size(4);
    let prepared = accelerator.prepare((model, optimizer, scheduler, loader)).unwrap();
    let (model, optimizer, scheduler, loader) = prepared;
    let before = round_trip(&model).get("weight").unwrap().as_tensor().unwrap().copy();
    round_trip(&optimizer);
    round_trip(&scheduler);
    loader.set_epoch(3);
    assert_eq!(round_trip(&loader).get("epoch").and_then(Value::as_int), Some(3));

    let zeros = |shape: &[i64]| Value::Tensor(Tensor::zeros(shape, (Kind::Float, Device::Cpu)));
    let fits = Value::dict([("weight", zeros(&[2, 3])), ("bias", zeros(&[2]))]);
    for (state, reason) in [
        (Value::dict([("weight", zeros(&[2, 3]))]), "it lacks `bias`"),
        (Value::dict([("weight", zeros(&[2, 3])), ("bias", zeros(&[3]))]), "`bias` is"),
        (
            Value::dict([("weight", zeros(&[2, 3])), ("bias", zeros(&[2])), ("b", zeros(&[1]))]),
            "it has `b`",
        ),
    ] {
        let error = model.load_state_dict(&state).unwrap_err().to_string();
        assert!(error.contains(reason), "{error}");
        let now = model.state_dict().unwrap();
        assert_eq!(now.get("weight").unwrap().as_tensor().unwrap(), &before);
    }
    model.load_state_dict(&fits).unwrap();
    let now = model.state_dict().unwrap();
    assert_eq!(
        now.get("weight").unwrap().as_tensor().unwrap().abs().sum(Kind::Float).double_value(&[]),
        0.0
    );
}

/// An Accelerator takes ranks that were joined without one, and refuses to join them otherwise.
#[test]
fn an_accelerator_is_built_on_joined_processes() {
    let store = Store::hash().unwrap();
    thread::scope(|scope| {
        for rank in 0..2 {
            let store = store.clone();
            scope.spawn(move || {
                let world = WorldSize::new(2).unwrap();
                let world = World::on_one_host(rank, world, StoreEndpoint::alone()).unwrap();
                let (world, store) = (Some(world), Some(store));
                let options = ConnectOptions { cpu: true, world, store, ..Default::default() };
                let processes = Processes::join(options).unwrap();
                assert_eq!(processes.gather_object(rank).unwrap(), [0, 1]);

                let accelerator =
                    Accelerator::builder().processes(&processes).quiet(true).build().unwrap();
                assert_eq!(accelerator.processes().process_index(), rank);
                assert_eq!(accelerator.processes().gather_object(rank).unwrap(), [0, 1]);
                if rank == 1 {
                    processes.set_trigger();
                }
                assert!(accelerator.processes().check_trigger().unwrap(), "one flag for both");

                let builder = Accelerator::builder().processes(&processes);
                let error = builder.backend(Backend::Fake).build().unwrap_err().to_string();
                assert!(error.contains("`backend` contradicts `processes`"), "{error}");
                let both = Accelerator::builder().processes(&processes).sharing(&accelerator);
                let error = both.build().unwrap_err().to_string();
                assert!(error.contains("`processes` and `sharing` contradict"), "{error}");
                processes.wait_for_everyone().unwrap();
            });
        }
    });
}
