//! Trains a small network on handwritten digits.
//!
//! `cargo run` trains on one process, `brigade launch --nproc 2` on two.

use brigade::prelude::*;

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
    // What `brigade launch` has set up; started alone, one process.
    let accelerator = Accelerator::new()?;
    let (model, _accuracy) = train(&accelerator, 10)?;
    accelerator.save_model(&model, "model.safetensors")
}

/// Trains for some epochs; the model, and its accuracy in percent on all of the test data.
fn train(accelerator: &Accelerator, epochs: u32) -> Result<(PreparedModel<Net>, f64)> {
    accelerator.set_seed(42);
    let model = Model::new(Net::new)?;
    let optimizer = Adam::default().lr(5e-3).build(&model)?;
    let train = DataLoader::new(Digits::train()?).batch_size(32).shuffle(true);
    let test = DataLoader::new(Digits::test()?).batch_size(64);
    // From here on each process has a part of the data, and gradients are averaged over all of them.
    let (mut model, mut optimizer, train, test) =
        accelerator.prepare((model, optimizer, train, test))?;

    let mut percent = 0.0;
    for epoch in 1..=epochs {
        model.train();
        for batch in accelerator.progress(&train) {
            let (images, labels) = batch?.into_data();
            let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
            optimizer.zero_grad()?;
            accelerator.backward(&loss)?;
            optimizer.step()?;
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
        accelerator.println(format!("epoch {epoch}/{epochs}, accuracy = {percent:.2} %"));
    }
    Ok((model, percent))
}

#[cfg(test)]
mod tests {
    use brigade_testkit::dist_test;

    use super::*;

    // Starts this test as two processes, which are the ranks 0 and 1 of one group.
    dist_test!(world = 2, two_ranks_learn_the_same, |_world| -> Result<()> {
        let accelerator = Accelerator::new()?;
        let (model, accuracy) = train(&accelerator, 5)?;
        assert!(accuracy > 80.0, "{accuracy} %");
        // Row r is the sum of rank r's weights.
        let parameters = model.inner().parameters();
        let weights: Tensor = parameters.iter().map(|it| it.tensor.sum(Kind::Double)).sum();
        let of_all = accelerator.processes().gather(&weights.reshape([1]))?;
        assert_eq!(of_all.double_value(&[0]), of_all.double_value(&[1]));
        Ok(())
    });
}
