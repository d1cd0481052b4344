//! The loop on one process, with nothing distributed in it. `fashion_mnist.rs` beside it is the same
//! loop for any number of processes: the difference between the two is what Brigade asks for.

#![allow(clippy::print_stdout)] // the program's answer

use std::time::{Duration, Instant};

use brigade::prelude::*;
use clap::Parser;
use fashion_mnist::Options;

fn main() -> MainResult {
    let options = Options::parse();
    tch::manual_seed(options.seed.into());

    options.data.fetch()?;
    let (train, test) = options.data.load()?;
    let train = DataLoader::new(train)
        .batch_size(options.batch_size)
        .shuffle(true)
        .seed(options.seed.into())
        .threads(options.threads);
    let test = DataLoader::new(test).batch_size(options.batch_size).threads(options.threads);

    let mut model = Model::new(Cnn::new)?;
    let mut optimizer = Adam::default().lr(options.lr).build(&model)?;

    let (mut training, mut samples) = (Duration::ZERO, 0);
    for epoch in 1..=options.epochs {
        let start = Instant::now();
        model.train();
        let mut last_loss = Tensor::from(0.0);
        for batch in &train {
            let (images, labels) = batch?.into_data();
            samples += labels.numel();
            let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
            optimizer.zero_grad()?;
            loss.backward();
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
            let (images, labels) = batch?.into_data();
            let scores = no_grad(|| model.forward(&images))?;
            accuracy.update(&scores, &labels)?;
        }
        let percent = 100.0 * accuracy.compute(None)?;
        println!("epoch {epoch}/{}, accuracy = {percent:.2}", options.epochs);
    }
    println!("{:.0} samples per second", samples as f64 / training.as_secs_f64());

    if let Some(file) = &options.save {
        model.save_weights(file)?;
    }
    Ok(())
}
