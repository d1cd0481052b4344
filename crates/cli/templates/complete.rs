//! Trains a small network on handwritten digits, with all that a long run needs: mixed precision,
//! accumulation, clipping, a schedule, a tracker, and checkpoints.
//!
//! Stopped at any moment and started again with `--resume`, it ends with the same weights, bit for
//! bit: `brigade launch --nproc 2 -- --resume`.

use std::path::PathBuf;

use brigade::prelude::*;
use clap::Parser;
use serde::Serialize;

/// Trains a small network on handwritten digits, and goes on where it was stopped.
#[derive(Debug, Clone, Parser, Serialize)]
struct Options {
    /// Where checkpoints, the tracker's files and the weights go.
    #[arg(long, default_value = "run", value_name = "FOLDER")]
    folder: PathBuf,
    /// Go on from the newest checkpoint, where there is one.
    #[arg(long)]
    resume: bool,
    /// Passes over the training data.
    #[arg(long, default_value_t = 10)]
    epochs: u64,
    /// Batches of each process whose gradients become one step.
    #[arg(long, default_value_t = 2)]
    accumulate: u16,
    /// Optimizer steps from one checkpoint to the next.
    #[arg(long, default_value_t = 20)]
    checkpoint_every: u64,
    /// The highest learning rate of the one-cycle schedule.
    #[arg(long, default_value_t = 0.01)]
    max_lr: f64,
}

/// Two linear layers: from images `[n, 1, 8, 8]` to logits `[n, 10]`.
struct Net {
    hidden: Linear,
    output: Linear,
}

impl Net {
    fn new(path: &ParamPath<'_>) -> Self {
        Self {
            hidden: Linear::new(path / "hidden", 8 * 8, 128),
            output: Linear::new(path / "output", 128, 10),
        }
    }
}

impl Module<&Tensor> for Net {
    type Output = Tensor;

    fn forward(&self, images: &Tensor) -> Result<Tensor> {
        self.output.forward(&self.hidden.forward(&images.flatten(1, -1))?.relu())
    }
}

fn main() -> Result<()> {
    train(Accelerator::builder(), &Options::parse())?;
    Ok(())
}

/// Trains as the options say; the accuracy in percent on all of the test data.
fn train(builder: AcceleratorBuilder, options: &Options) -> Result<f64> {
    // The precision is that of `brigade launch --mixed-precision bf16`, or of the settings file.
    let accelerator = builder
        .gradient_accumulation_steps(options.accumulate.into())
        .project(ProjectConfiguration::new(&options.folder).total_limit(2))
        .logging_dir(options.folder.join("runs"))
        .build()?;
    accelerator.set_seed(42);

    let train = DataLoader::new(Digits::train()?).batch_size(32).shuffle(true).seed(42);
    let test = DataLoader::new(Digits::test()?).batch_size(64);
    let (train, test) = accelerator.prepare((train, test))?;

    let steps = train.len().div_ceil(options.accumulate.into()) as u64 * options.epochs;
    let model = Model::new(Net::new)?;
    let optimizer = AdamW::default().no_decay_on_norms_and_biases(true).build(&model)?;
    let schedule = Schedule::one_cycle(OneCycle::new(options.max_lr, steps))?;
    let scheduler = Scheduler::new(&optimizer, schedule);
    let (mut model, mut optimizer, mut scheduler) =
        accelerator.prepare((model, optimizer, scheduler))?;

    accelerator.trackers().start("digits", options)?;
    if options.resume && accelerator.checkpoints().latest()?.is_some() {
        let loaded = accelerator.checkpoints().load_latest()?;
        accelerator.println(format!("goes on after step {}", loaded.step));
    }

    let mut percent = 0.0;
    for epoch in train.epoch()..options.epochs {
        model.train();
        for batch in accelerator.progress(&train) {
            let batch = batch?;
            let (images, labels) = &*batch;
            let loss = accelerator.accumulate(&model, &batch, || {
                let loss = model.forward(images)?.cross_entropy_for_logits(labels);
                accelerator.backward(&loss)?;
                accelerator.clip_grad_norm(&model, 1.0)?;
                optimizer.step()?;
                scheduler.step()?;
                optimizer.zero_grad()?;
                Ok(loss.detach())
            })?;
            if accelerator.sync_gradients() {
                let step = optimizer.steps()?;
                let loss = f64::try_from(&accelerator.processes().reduce(&loss, ReduceOp::Mean)?)?;
                accelerator.log([("loss", loss), ("lr", scheduler.lr()?)], step)?;
                if step % options.checkpoint_every == 0 {
                    // Training waits only for a copy; a thread writes.
                    accelerator.checkpoints().save_numbered()?;
                }
            }
        }

        model.eval();
        let mut accuracy = MetricState::new(Accuracy);
        for batch in &test {
            let batch = batch?;
            let (images, labels) = &*batch;
            let scores = no_grad(|| model.forward(images))?;
            accelerator.update_metric(&mut accuracy, &batch, &scores, labels)?;
        }
        percent = 100.0 * accelerator.compute_metric(&accuracy)?;
        let epochs = options.epochs;
        accelerator.println(format!("epoch {}/{epochs}, accuracy = {percent:.2} %", epoch + 1));
        accelerator.log([("accuracy", percent)], optimizer.steps()?)?;
    }
    accelerator.checkpoints().wait()?;
    accelerator.save_model(&model, options.folder.join("model.safetensors"))?;
    accelerator.trackers().finish()?;
    Ok(percent)
}

#[cfg(test)]
mod tests {
    use brigade_testkit::dist_test;

    use super::*;

    // Starts this test as two processes, which are the ranks 0 and 1 of one group.
    dist_test!(world = 2, a_resumed_run_ends_with_the_same_weights, |_world| -> Result<()> {
        let accelerator = Accelerator::new()?;
        // One folder for both ranks: rank 0 makes it and tells its name.
        let made = accelerator.is_main_process().then(tempfile::tempdir).transpose();
        let made = made.expect("a temporary folder can be made");
        let name = made.as_ref().map(|it| it.path().to_owned());
        let folder =
            accelerator.processes().broadcast_object(name, 0)?.expect("rank 0 has made it");

        let arguments = ["digits", "--epochs", "3", "--checkpoint-every", "5"];
        let options = Options { folder, ..Options::parse_from(arguments) };
        let weights = || std::fs::read(options.folder.join("model.safetensors")).unwrap();
        let run = |options: &Options| train(Accelerator::builder().sharing(&accelerator), options);
        assert!(run(&options)? > 60.0);
        let uninterrupted = weights();
        // From the last checkpoint, which was taken before the end.
        run(&Options { resume: true, ..options.clone() })?;
        assert!(weights() == uninterrupted);
        Ok(())
    });
}
