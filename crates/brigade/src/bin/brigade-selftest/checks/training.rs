//! Checks of a training step, metrics and weights through the Accelerator.

use anyhow::{Context, Result, ensure};
use brigade::data::TensorDataset;
use brigade::prelude::*;
use brigade::train::TrainError;
use brigade_rank_env::text::counted;

use super::Verdict;

const ROWS_OF_A_RANK: usize = 4;

fn net(path: &ParamPath<'_>) -> Sequential {
    Sequential::new().add(Linear::new(path / "hidden", 6, 5)).add(Linear::new(path / "head", 5, 3))
}

/// Creates weights by a formula, the same on every rank and in every version.
fn model() -> Result<Model<Sequential>> {
    let model = Model::builder().kind(Kind::Double).build(net)?;
    for parameter in model.parameters() {
        let tensor = parameter.tensor.f_detach()?;
        let values = Tensor::f_arange(tensor.numel() as i64, (Kind::Double, tensor.device()))?;
        let values = values.f_sin()?.f_mul_scalar(0.4)?.f_reshape(tensor.size())?;
        tensor.shallow_clone().f_copy_(&values)?;
    }
    Ok(model)
}

fn samples(count: usize, device: Device) -> Result<(Tensor, Tensor)> {
    let count = count as i64;
    let inputs = Tensor::f_arange(count * 6, (Kind::Double, device))?.f_sin()?;
    let targets = Tensor::f_arange(count * 3, (Kind::Double, device))?.f_cos()?;
    Ok((inputs.f_reshape([count, 6])?, targets.f_reshape([count, 3])?))
}

/// Compares two steps of all ranks, with a part of the batch each, with two steps of one process with the whole batch.
pub(super) fn step(accelerator: &Accelerator) -> Result<Verdict> {
    let (rank, size) =
        (accelerator.processes().process_index(), accelerator.processes().num_processes());
    let (inputs, targets) = samples(ROWS_OF_A_RANK * size, Device::Cpu)?;
    let alone = model()?;
    let mut optimizer = Sgd::new(0.1).momentum(0.9).build(&alone)?;
    for _ in 0..2 {
        let loss = alone.forward(&inputs)?.f_mse_loss(&targets, tch::Reduction::Mean)?;
        optimizer.zero_grad()?;
        loss.f_backward()?;
        optimizer.step()?;
    }

    let together = model()?;
    let optimizer = Sgd::new(0.1).momentum(0.9).build(&together)?;
    let (together, mut optimizer) = accelerator.prepare((together, optimizer))?;
    let part = |all: &Tensor| -> Result<Tensor> {
        let rows = ROWS_OF_A_RANK as i64;
        Ok(all.f_narrow(0, rank as i64 * rows, rows)?.f_to_device(accelerator.device())?)
    };
    let (inputs, targets) = (part(&inputs)?, part(&targets)?);
    for _ in 0..2 {
        let loss = together.forward(&inputs)?.f_mse_loss(&targets, tch::Reduction::Mean)?;
        optimizer.zero_grad()?;
        accelerator.backward(&loss)?;
        optimizer.step()?;
    }
    for (one, many) in alone.parameters().iter().zip(together.inner().parameters()) {
        let many = many.tensor.f_detach()?.f_to_device(Device::Cpu)?;
        let difference =
            one.tensor.f_detach()?.f_sub(&many)?.f_abs()?.f_max()?.f_double_value(&[])?;
        ensure!(
            difference < 1e-9,
            "{}: one process and {size} differ by {difference:e} in float64",
            one.name
        );
    }
    Ok(Verdict::Passed)
}

/// Number of samples, which the usual world sizes do not divide.
const SAMPLES: usize = 53;

pub(super) fn metrics(accelerator: &Accelerator) -> Result<Verdict> {
    let numbers = Tensor::f_arange(SAMPLES as i64, (Kind::Int64, Device::Cpu))?;
    let loader = DataLoader::new(TensorDataset::new(numbers)?).batch_size(4).shuffle(true);
    let loader = accelerator.prepare(loader)?;
    let mut seen = Vec::new();
    for batch in &loader {
        let batch = batch?;
        let all = accelerator.gather_for_metrics(&batch, &*batch)?;
        seen.extend(Vec::<i64>::try_from(all.f_to_device(Device::Cpu)?)?);
    }
    seen.sort_unstable();
    let every: Vec<i64> = (0..SAMPLES as i64).collect();
    ensure!(seen == every, "{} became {}: {seen:?}", counted(SAMPLES, "sample"), seen.len());
    Ok(Verdict::Passed)
}

/// Passes weights through a file in a temporary folder of rank 0, which rank 0 reads and sends to the others.
pub(super) fn weights(accelerator: &Accelerator) -> Result<Verdict> {
    let folder = accelerator.processes().on_main_process(|| {
        tempfile::tempdir().map_err(|source| TrainError::File {
            action: "cannot make folder",
            path: std::env::temp_dir(),
            source,
        })
    })?;
    let file = folder.as_ref().map(|folder| folder.path().join("model.safetensors"));
    let file =
        accelerator.processes().broadcast_object(file, 0)?.context("rank 0 has no folder")?;
    let saved = accelerator.prepare(model()?)?;
    accelerator.save_model(&saved, &file)?;
    let mut loaded = accelerator.prepare(Model::builder().kind(Kind::Double).build(net)?)?;
    accelerator.load_model(&mut loaded, &file)?;
    for (saved, loaded) in saved.inner().parameters().iter().zip(loaded.inner().parameters()) {
        ensure!(saved.tensor.f_equal(&loaded.tensor)?, "{} is not what was saved", saved.name);
    }
    Ok(Verdict::Passed)
}

/// Runs two steps, saves a checkpoint and runs two more steps; then repeats the last two from the checkpoint with
/// another model.
pub(super) fn checkpoint(accelerator: &Accelerator) -> Result<Verdict> {
    let folder = accelerator.processes().on_main_process(|| {
        tempfile::tempdir().map_err(|source| TrainError::File {
            action: "cannot make folder",
            path: std::env::temp_dir(),
            source,
        })
    })?;
    let path = folder.as_ref().map(|folder| folder.path().join("checkpoint"));
    let path =
        accelerator.processes().broadcast_object(path, 0)?.context("rank 0 has no folder")?;
    let (rank, size) =
        (accelerator.processes().process_index(), accelerator.processes().num_processes());
    let (inputs, targets) = samples(ROWS_OF_A_RANK * size, Device::Cpu)?;
    let rows = ROWS_OF_A_RANK as i64;
    let part = |all: &Tensor| -> Result<Tensor> {
        Ok(all.f_narrow(0, rank as i64 * rows, rows)?.f_to_device(accelerator.device())?)
    };
    let (inputs, targets) = (part(&inputs)?, part(&targets)?);

    let run = |load: bool| -> Result<Vec<(String, Tensor)>> {
        let own = Accelerator::builder().sharing(accelerator).build()?;
        let model = Model::builder().kind(Kind::Double).build(net)?;
        let optimizer = Adam::default().lr(0.1).build(&model)?;
        let (model, mut optimizer) = own.prepare((model, optimizer))?;
        if load {
            own.load_state(&path)?;
        }
        for step in if load { 2..4 } else { 0..4 } {
            if step == 2 && !load {
                own.save_state(&path)?;
            }
            let output = model.forward(&inputs)?;
            let loss = output.f_mse_loss(&targets, tch::Reduction::Mean)?;
            optimizer.zero_grad()?;
            own.backward(&loss)?;
            optimizer.step()?;
        }
        own.checkpoints().wait()?;
        let parameters = model.inner().parameters().into_iter();
        parameters.map(|named| Ok((named.name, named.tensor.f_detach()?))).collect()
    };
    let (whole, resumed) = (run(false)?, run(true)?);
    accelerator.processes().wait_for_everyone()?;
    for ((name, whole), (_, resumed)) in whole.iter().zip(&resumed) {
        let difference = whole.f_sub(resumed)?.f_abs()?.f_max()?.f_double_value(&[])?;
        ensure!(difference < 1e-9, "{name} differs by {difference:e} after a checkpoint");
    }
    Ok(Verdict::Passed)
}
