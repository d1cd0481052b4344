//! Trains a small convolutional network on handwritten digits.
//!
//! `cargo run` trains on one process, `brigade launch --nproc 2` on two. The notebook beside
//! `Cargo.toml` launches the same function from a cell.

use brigade::prelude::*;

fn main() -> Result<()> {
    let losses = train((5e-3, 4))?;
    println!("the last loss is {}", losses[losses.len() - 1]);
    Ok(())
}

/// Trains for some epochs at a learning rate; the loss of each step on this rank's part of the data.
fn train((lr, epochs): (f64, u32)) -> Result<Vec<f64>> {
    // What `brigade launch` or the notebook has set up; started alone, one process.
    let accelerator = Accelerator::new()?;
    accelerator.set_seed(42);
    let model = Model::new(Cnn::new)?;
    let optimizer = Adam::default().lr(lr).build(&model)?;
    let train = DataLoader::new(Digits::train()?.resize(28, 28)?);
    let train = train.batch_size(64).shuffle(true).seed(42);
    let test = DataLoader::new(Digits::test()?.resize(28, 28)?).batch_size(64);
    // From here on each process has a part of the data, and gradients are averaged over all of them.
    let (mut model, mut optimizer, train, test) =
        accelerator.prepare((model, optimizer, train, test))?;

    let mut losses = Vec::new();
    for epoch in 1..=epochs {
        model.train();
        for batch in accelerator.progress(&train).label(format!("epoch {epoch}")) {
            let (images, labels) = batch?.into_data();
            let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
            optimizer.zero_grad()?;
            accelerator.backward(&loss)?;
            optimizer.step()?;
            losses.push(loss.double_value(&[]));
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
        accelerator.println(format!("epoch {epoch}/{epochs}, accuracy = {percent:.2} %"));
    }
    Ok(losses)
}

#[cfg(test)]
mod tests {
    use brigade::notebook::{NotebookError, debug_launcher};

    use super::*;

    #[test]
    fn two_ranks_learn() -> std::result::Result<(), NotebookError> {
        let losses = debug_launcher(train, (5e-3, 2), 2)?;
        assert_eq!(losses.len(), 2);
        assert!(losses.iter().all(|it| it[it.len() - 1] < 0.5 * it[0]), "{losses:?}");
        Ok(())
    }
}
