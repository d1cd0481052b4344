//! A small problem in `f64` whose numbers no random generator has drawn, and what the tests look at.

use std::fmt;
use std::time::Duration;

use brigade_data::{DataLoader, TensorDataset};
use brigade_learn::callback::{Callback, Step};
use brigade_learn::{Event, Learner, LearnerState, Loaders};
use brigade_nn::{LayerNorm, Linear, Model, ParamPath, Relu, Sequential, StateDict};
use brigade_optim::Sgd;
use brigade_testkit::World;
use brigade_train::Accelerator;
use tch::{Kind, Tensor};

use crate::fill::{u, uniform_tensor};

pub(crate) const FEATURES: i64 = 6;
pub(crate) const CLASSES: i64 = 3;

/// A process without others, whatever the environment says.
pub(crate) fn alone() -> Accelerator {
    Accelerator::builder().world(World::alone()).cpu(true).quiet(true).build().unwrap()
}

/// This rank of the group that the environment describes.
pub(crate) fn joined() -> Accelerator {
    let limit = Duration::from_secs(30);
    Accelerator::builder().cpu(true).quiet(true).timeout(limit).build().unwrap()
}

/// Inputs `[rows, 6]` and classes, of which the inputs tell something.
pub(crate) fn data(rows: i64, stream: u64) -> (Tensor, Tensor) {
    let class = |row: i64| (CLASSES as f64 * u(row as u64, stream)).floor() as i64;
    let classes: Vec<i64> = (0..rows).map(class).collect();
    let classes = Tensor::from_slice(&classes);
    let noise = uniform_tensor(&[rows, FEATURES], -1.0, 1.0, stream + 1).to_kind(Kind::Double);
    let told = classes.one_hot(CLASSES).repeat([1, FEATURES / CLASSES]);
    (noise + told.to_kind(Kind::Double) * 0.7, classes)
}

pub(crate) fn loader(
    data: (Tensor, Tensor),
    batch: usize,
) -> DataLoader<TensorDataset<(Tensor, Tensor)>> {
    DataLoader::new(TensorDataset::new(data).unwrap()).batch_size(batch).seed(5).threads(0)
}

/// 48 shuffled samples to train with, 13 to validate with in batches of 3.
pub(crate) fn loaders(batch: usize) -> Loaders {
    Loaders::new(loader(data(48, 10), batch).shuffle(true), loader(data(13, 20), 3)).unwrap()
}

pub(crate) fn mlp(path: &ParamPath<'_>) -> Sequential {
    Sequential::new()
        .add(Linear::new(path / 0, FEATURES, 16))
        .add(LayerNorm::new(path / 1, &[16]))
        .add(Relu)
        .add(Linear::new(path / 3, 16, CLASSES))
}

/// A model in `f64` with the same weights each time.
pub(crate) fn model<M>(build: impl Fn(&ParamPath<'_>) -> M) -> Model<M> {
    let model = Model::builder().kind(Kind::Double).build(|path| build(path)).unwrap();
    let _without_autograd = tch::no_grad_guard();
    for (stream, it) in model.parameters().into_iter().enumerate() {
        let size = it.tensor.size();
        let (low, high) = match size.len() {
            1 if it.name.ends_with("weight") => (0.8, 1.2),
            1 => (-0.1, 0.1),
            _ => (-0.5, 0.5),
        };
        it.tensor.shallow_clone().copy_(&uniform_tensor(&size, low, high, stream as u64));
    }
    model
}

/// A Learner whose batch of all ranks together has 8 samples, with plain gradient descent.
pub(crate) fn learner(accelerator: &Accelerator) -> Learner {
    learner_of(accelerator, loaders(8 / accelerator.processes().num_processes()))
}

pub(crate) fn learner_of(accelerator: &Accelerator, loaders: Loaders) -> Learner {
    Learner::new(accelerator, loaders, model(mlp)).unwrap().optimizer(Sgd::new(0.1)).quiet(true)
}

/// The bits of a tensor, whatever its type.
pub(crate) fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.to_kind(Kind::Double).contiguous().view([-1])).unwrap()
}

pub(crate) fn bits(tensor: &Tensor) -> Vec<u64> {
    values(tensor).into_iter().map(f64::to_bits).collect()
}

/// The bits of all parameters and buffers. With a sharded model every rank calls it.
pub(crate) fn weights(state: &LearnerState) -> Vec<(String, Vec<u64>)> {
    state.gathered(|state| Ok(state_bits(&state.state_dict()))).unwrap()
}

pub(crate) fn state_bits(state: &StateDict) -> Vec<(String, Vec<u64>)> {
    state.iter().map(|(name, tensor)| (name.to_owned(), bits(tensor))).collect()
}

/// The largest distance between the values of two models.
pub(crate) fn apart(one: &StateDict, other: &StateDict) -> f64 {
    let distance = |(name, tensor): (&str, &Tensor)| {
        let other = other.get(name).unwrap();
        (tensor.to_kind(Kind::Double) - other.to_kind(Kind::Double)).abs().max().double_value(&[])
    };
    one.iter().map(distance).fold(0.0, f64::max)
}

/// All ranks have the same.
pub(crate) fn same_on_all<T>(accelerator: &Accelerator, what: T)
where
    T: serde::Serialize + serde::de::DeserializeOwned + PartialEq + fmt::Debug,
{
    let all = accelerator.processes().gather_object(what).unwrap();
    assert!(all.iter().all(|it| *it == all[0]), "{all:?}");
}

/// Weights and recorder are those of rank 0, but for the times.
pub(crate) fn ranks_agree(learner: &Learner) {
    let recorder = learner.recorder();
    let rows: Vec<Vec<Option<u64>>> = recorder
        .rows()
        .iter()
        .map(|row| row.values.iter().map(|value| value.map(f64::to_bits)).collect())
        .collect();
    let losses: Vec<u64> = recorder.losses().iter().map(|it| it.to_bits()).collect();
    let lrs: Vec<u64> = recorder.lrs().iter().map(|it| it.to_bits()).collect();
    same_on_all(learner.accelerator(), (weights(learner), rows, losses, lrs));
}

pub(crate) fn close(ours: &[f64], theirs: &[f64], limit: f64) {
    assert_eq!(ours.len(), theirs.len());
    for (a, b) in ours.iter().zip(theirs) {
        assert!((a - b).abs() <= limit * b.abs().max(1.0), "{ours:?} and {theirs:?}");
    }
}

type Action = Box<dyn FnMut(Event, &mut LearnerState) -> Step>;

/// A callback that is one function, called at the events that it names.
pub(crate) struct At {
    events: Vec<Event>,
    order: i32,
    action: Action,
}

impl At {
    pub(crate) fn new(
        events: impl IntoIterator<Item = Event>,
        action: impl FnMut(Event, &mut LearnerState) -> Step + 'static,
    ) -> Self {
        Self { events: events.into_iter().collect(), order: 70, action: Box::new(action) }
    }

    pub(crate) fn order(mut self, order: i32) -> Self {
        self.order = order;
        self
    }

    fn at(&mut self, event: Event, learner: &mut LearnerState) -> Step {
        if self.events.contains(&event) { (self.action)(event, learner) } else { Ok(()) }
    }
}

impl fmt::Debug for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("At").field("events", &self.events).finish_non_exhaustive()
    }
}

/// Forwards every event of a callback to a method `at`.
macro_rules! forwards {
    ($($method:ident $event:ident),+ $(,)?) => {
        $(fn $method(&mut self, learner: &mut brigade_learn::LearnerState) -> brigade_learn::callback::Step {
            self.at(brigade_learn::Event::$event, learner)
        })+
    };
    () => {
        $crate::setup::forwards! {
            before_fit BeforeFit, before_epoch BeforeEpoch, before_train BeforeTrain,
            before_batch BeforeBatch, after_pred AfterPred, after_loss AfterLoss,
            before_backward BeforeBackward, after_cancel_backward AfterCancelBackward,
            after_backward AfterBackward, before_step BeforeStep,
            after_cancel_step AfterCancelStep, after_step AfterStep,
            after_cancel_batch AfterCancelBatch, after_batch AfterBatch,
            after_cancel_train AfterCancelTrain, after_train AfterTrain,
            before_validate BeforeValidate, after_cancel_validate AfterCancelValidate,
            after_validate AfterValidate, after_cancel_epoch AfterCancelEpoch,
            after_epoch AfterEpoch, after_cancel_fit AfterCancelFit, after_fit AfterFit,
        }
    };
}
pub(crate) use forwards;

impl Callback for At {
    fn order(&self) -> i32 {
        self.order
    }

    forwards!();
}
