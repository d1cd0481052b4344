//! A loop with all that a real run needs. Stopped at any moment and started again with `--resume`, it
//! gives the same weights, bit for bit, as if it had not been stopped.

use std::path::PathBuf;

use brigade::prelude::*;
use clap::Parser;
use serde::Serialize;

/// Trains a small CNN on the embedded digits, and goes on where it was stopped.
#[derive(Debug, Parser, Serialize)]
struct Options {
    /// Where checkpoints, the trackers' files and the weights go.
    #[arg(long, default_value = "run", value_name = "FOLDER")]
    folder: PathBuf,
    /// Go on from the newest checkpoint, where there is one.
    #[arg(long)]
    resume: bool,
    /// Passes over the training data.
    #[arg(long, default_value_t = 3, value_parser = clap::value_parser!(u64).range(1..))]
    epochs: u64,
    /// Batches of each process whose gradients become one step.
    #[arg(long, default_value_t = 2, value_parser = clap::value_parser!(u16).range(1..))]
    accumulate: u16,
    /// Optimizer steps from one checkpoint to the next.
    #[arg(long, default_value_t = 10, value_parser = clap::value_parser!(u64).range(1..))]
    checkpoint_every: u64,
    /// The highest learning rate.
    #[arg(long, default_value_t = 0.01)]
    max_lr: f64,
}

fn main() -> MainResult {
    let options = Options::parse();
    // The precision is that of `brigade launch --mixed-precision`, or of the settings file.
    let accelerator = Accelerator::builder()
        .gradient_accumulation_steps(options.accumulate.into())
        .project(ProjectConfiguration::new(&options.folder).total_limit(2))
        .logging_dir(options.folder.join("runs"))
        .build()?;
    accelerator.set_seed(42);

    let train = Digits::train()?.resize(28, 28)?;
    let test = Digits::test()?.resize(28, 28)?;
    let train = DataLoader::new(train).batch_size(32).shuffle(true).seed(42);
    let (train, test) = accelerator.prepare((train, DataLoader::new(test).batch_size(64)))?;

    let steps = train.len().div_ceil(options.accumulate.into()) as u64 * options.epochs;
    let model = Model::new(Cnn::new)?;
    let optimizer = AdamW::default().no_decay_on_norms_and_biases(true).build(&model)?;
    let schedule = Schedule::one_cycle(OneCycle::new(options.max_lr, steps))?;
    let scheduler = Scheduler::new(&optimizer, schedule);
    let (mut model, mut optimizer, mut scheduler) =
        accelerator.prepare((model, optimizer, scheduler))?;

    accelerator.trackers().start("digits", &options)?;
    if options.resume && accelerator.checkpoints().latest()?.is_some() {
        let loaded = accelerator.checkpoints().load_latest()?;
        accelerator.println(format!("goes on after step {}", loaded.step));
    }

    let mut meter = accelerator.processes().meter(20);
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
            meter.step(batch.valid());
            if accelerator.sync_gradients() {
                let step = optimizer.steps()?;
                let loss = f64::try_from(&accelerator.processes().reduce(&loss, ReduceOp::Mean)?)?;
                accelerator.log([("loss", loss), ("lr", scheduler.lr()?)], step)?;
                if step % options.checkpoint_every == 0 {
                    // Training waits only for the copy; a thread writes.
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
        let percent = 100.0 * accelerator.compute_metric(&accuracy)?;
        accelerator.println(format!(
            "epoch {}/{}, accuracy = {percent:.2}",
            epoch + 1,
            options.epochs
        ));
        accelerator.log([("accuracy", percent)], optimizer.steps()?)?;
        accelerator.log(meter.values(), optimizer.steps()?)?;
        meter.pause_ended();
    }
    accelerator.checkpoints().wait()?;
    accelerator.save_model(&model, options.folder.join("model.safetensors"))?;
    accelerator.trackers().finish()?;
    Ok(())
}
