//! The loop on one process or many: alone, under `brigade launch` or under torchrun.

#![allow(clippy::print_stdout)] // the program's answer

use std::time::{Duration, Instant};

use brigade::prelude::*;
use clap::Parser;
use fashion_mnist::Options;

fn main() -> MainResult {
    let options = Options::parse();
    let mut accelerator = Accelerator::builder();
    if options.nchw {
        accelerator = accelerator.channels_last(false);
    }
    let accelerator = accelerator.build()?;
    accelerator.set_seed(options.seed.into());

    accelerator.processes().local_main_process_first(|| options.data.fetch())?;
    let (train, test) = options.data.load()?;
    let train = DataLoader::new(train)
        .batch_size(options.batch_size)
        .shuffle(true)
        .seed(options.seed.into())
        .threads(options.threads);
    let test = DataLoader::new(test).batch_size(options.batch_size).threads(options.threads);

    let model = Model::new(Cnn::new)?;
    let optimizer = Adam::default().lr(options.lr).build(&model)?;
    let (mut model, mut optimizer, train, test) =
        accelerator.prepare((model, optimizer, train, test))?;

    let (mut training, mut samples) = (Duration::ZERO, 0);
    for epoch in 1..=options.epochs {
        let start = Instant::now();
        model.train();
        let mut last_loss = Tensor::from(0.0);
        for batch in accelerator.progress(&train) {
            let batch = batch?;
            let (images, labels) = &*batch;
            samples += batch.round().total_valid();
            let loss = model.forward(images)?.cross_entropy_for_logits(labels);
            optimizer.zero_grad()?;
            accelerator.backward(&loss)?;
            optimizer.step()?;
            last_loss = loss.detach();
        }
        training += start.elapsed();
        if options.log_losses {
            println!("epoch {epoch}/{}, loss = {:.4}", options.epochs, f64::try_from(&last_loss)?);
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
        accelerator.println(format!("epoch {epoch}/{}, accuracy = {percent:.2}", options.epochs));
    }
    let rate = samples as f64 / training.as_secs_f64();
    accelerator.println(format!("{rate:.0} samples per second"));

    if let Some(file) = &options.save {
        accelerator.save_model(&model, file)?;
    }
    Ok(())
}
