//! A small run with everything that a checkpoint must keep.

#![allow(dead_code)] // each program uses its part

use std::path::{Path, PathBuf};

use brigade_data::{BatchContext, BatchesFromFn, DataLoader, batches_from_fn};
use brigade_nn::{BatchNorm1d, Dropout, Linear, Model, Module, ParamPath};
use brigade_optim::{Adam, Scheduler};
use brigade_torch::{Result, from_vec};
use brigade_train::{
    Accelerator, PreparedLoader, PreparedModel, PreparedOptimizer, PreparedScheduler,
};
use tch::{Device, Kind, Tensor};

pub(crate) const SAMPLES: usize = 29;
pub(crate) const EPOCHS: u64 = 2;
pub(crate) const BATCH: usize = 3;

pub(crate) struct Net {
    hidden: Linear,
    norm: BatchNorm1d,
    dropout: Dropout,
    head: Linear,
}

impl Net {
    pub(crate) fn new(path: &ParamPath<'_>) -> Self {
        Self {
            hidden: Linear::new(path / "hidden", 6, 8),
            norm: BatchNorm1d::new(path / "norm", 8),
            dropout: Dropout::new(path / "dropout", 0.3),
            head: Linear::new(path / "head", 8, 3),
        }
    }
}

impl Module<&Tensor> for Net {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let hidden = self.norm.forward(&self.hidden.forward(input)?)?.relu();
        self.head.forward(&self.dropout.forward(&hidden)?)
    }
}

type Make = fn(&[usize], &BatchContext) -> Result<(Tensor, Tensor, Tensor)>;
pub(crate) type Data = BatchesFromFn<Make>;

/// Inputs, targets and the samples' numbers. The inputs are turned at random in each epoch.
fn make(indices: &[usize], context: &BatchContext) -> Result<(Tensor, Tensor, Tensor)> {
    let rows = indices.len() as i64;
    let (mut inputs, mut targets, mut numbers) = (Vec::new(), Vec::new(), Vec::new());
    for &index in indices {
        let turn = (context.sample_seed(index) % 1000) as f32 / 1000.0;
        inputs.extend((0..6).map(|column| ((index * 6 + column) as f32 + turn).sin()));
        targets.push((index % 3) as i64);
        numbers.push(index as i64);
    }
    Ok((from_vec(inputs, &[rows, 6])?, from_vec(targets, &[rows])?, from_vec(numbers, &[rows])?))
}

pub(crate) fn data() -> Data {
    batches_from_fn(SAMPLES, make as Make)
}

/// What was prepared, and how far it came.
pub(crate) struct Run {
    pub(crate) model: PreparedModel<Net>,
    pub(crate) optimizer: PreparedOptimizer,
    pub(crate) scheduler: PreparedScheduler,
    pub(crate) loader: PreparedLoader<DataLoader<Data>>,
    pub(crate) batches: usize,
    /// The bits of the newest loss.
    pub(crate) loss: u64,
    pub(crate) epochs: u64,
    /// The samples of this rank's batches, in order.
    pub(crate) seen: Vec<i64>,
}

impl Run {
    pub(crate) fn new(accelerator: &Accelerator, seed: i64) -> Self {
        accelerator.processes().set_seed_per_process(seed);
        let model = Model::new(Net::new).unwrap();
        let optimizer = Adam::default().lr(0.05).build(&model).unwrap();
        let schedule = brigade_schedule::Schedule::cosine(0.05, 0.001, 12).unwrap();
        let scheduler = Scheduler::new(&optimizer, schedule);
        let loader = DataLoader::new(data()).batch_size(BATCH).shuffle(true).threads(1);
        let loader = loader.seed(seed.unsigned_abs() * 77);
        let (model, optimizer, scheduler, loader) =
            accelerator.prepare((model, optimizer, scheduler, loader)).unwrap();
        Self {
            model,
            optimizer,
            scheduler,
            loader,
            batches: 0,
            loss: 0,
            epochs: EPOCHS,
            seen: Vec::new(),
        }
    }

    pub(crate) fn save(&self, accelerator: &Accelerator, path: &Path) {
        accelerator.save_state(path).unwrap();
    }

    /// To the end, or until `after` says so. Returns the bits of the losses.
    pub(crate) fn go(
        &mut self,
        accelerator: &Accelerator,
        mut after: impl FnMut(&Self, usize) -> bool,
    ) -> Vec<u64> {
        let mut losses = Vec::new();
        self.model.train();
        for _ in self.loader.epoch()..self.epochs {
            for batch in self.loader.iter() {
                let batch = batch.unwrap();
                let Self { model, optimizer, scheduler, .. } = self;
                let loss = accelerator.accumulate(&*model, &batch, || {
                    let (inputs, targets, _) = &*batch;
                    let loss = model.forward(inputs)?.cross_entropy_for_logits(targets);
                    accelerator.backward(&loss)?;
                    optimizer.step()?;
                    scheduler.step()?;
                    optimizer.zero_grad()?;
                    Ok(loss.double_value(&[]))
                });
                self.loss = loss.unwrap().to_bits();
                losses.push(self.loss);
                let numbers = Vec::<i64>::try_from(&batch.2).unwrap();
                self.seen.extend(&numbers[..batch.valid()]);
                self.batches += 1;
                if !after(self, self.batches) {
                    return losses;
                }
            }
        }
        losses
    }

    /// The bits of the parameters, which are the same on all ranks.
    pub(crate) fn parameters(&self) -> Vec<(String, Vec<u64>)> {
        let buffers = self.model.inner().buffers();
        let mut weights = self.weights();
        weights.retain(|(name, _)| buffers.iter().all(|buffer| buffer.name != *name));
        weights
    }

    /// The bits of parameters and buffers.
    pub(crate) fn weights(&self) -> Vec<(String, Vec<u64>)> {
        let state = self.model.inner().state_dict();
        state
            .iter()
            .map(|(name, tensor)| {
                let flat = tensor.to_device(Device::Cpu).to_kind(Kind::Double).reshape([-1]);
                let values = Vec::<f64>::try_from(flat).unwrap();
                (name.to_owned(), values.into_iter().map(f64::to_bits).collect())
            })
            .collect()
    }
}

/// A folder of rank 0 that all know; removed when all ranks are done with it.
pub(crate) struct Shared {
    accelerator: Accelerator,
    path: PathBuf,
    _folder: Option<tempfile::TempDir>,
}

impl Shared {
    pub(crate) fn new(accelerator: &Accelerator) -> Self {
        let folder = accelerator.is_main_process().then(|| tempfile::tempdir().unwrap());
        let path = folder.as_ref().map(|folder| folder.path().to_owned());
        let path = accelerator.processes().broadcast_object(path, 0).unwrap().unwrap();
        Self { accelerator: accelerator.clone(), path, _folder: folder }
    }

    pub(crate) fn join(&self, name: impl AsRef<Path>) -> PathBuf {
        self.path.join(name)
    }
}

impl Drop for Shared {
    fn drop(&mut self) {
        // After a panic the others no longer reach this.
        if !std::thread::panicking() {
            self.accelerator.processes().wait_for_everyone().unwrap();
        }
    }
}
