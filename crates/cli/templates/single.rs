//! Trains a small network on handwritten digits, on one process: `cargo run`.
//!
//! Nothing in it is distributed. `brigade new --template loop` makes the same program for any number
//! of processes: the difference between the two is what that takes.

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
    let (model, _accuracy) = train(10)?;
    model.save_weights("model.safetensors")?;
    Ok(())
}

/// Trains for some epochs; the model, and its accuracy in percent on the test data.
fn train(epochs: u32) -> Result<(Model<Net>, f64)> {
    brigade::tch::manual_seed(42);
    let mut model = Model::new(Net::new)?;
    let mut optimizer = Adam::default().lr(5e-3).build(&model)?;
    let train = DataLoader::new(Digits::train()?).batch_size(32).shuffle(true);
    let test = DataLoader::new(Digits::test()?).batch_size(64);

    let mut percent = 0.0;
    for epoch in 1..=epochs {
        model.train();
        for batch in &train {
            let (images, labels) = batch?.into_data();
            let loss = model.forward(&images)?.cross_entropy_for_logits(&labels);
            optimizer.zero_grad()?;
            loss.backward();
            optimizer.step()?;
        }

        model.eval();
        let mut accuracy = MetricState::new(Accuracy);
        for batch in &test {
            let (images, labels) = batch?.into_data();
            let scores = no_grad(|| model.forward(&images))?;
            accuracy.update(&scores, &labels)?;
        }
        percent = 100.0 * accuracy.compute(None)?;
        println!("epoch {epoch}/{epochs}, accuracy = {percent:.2} %");
    }
    Ok((model, percent))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_learns() {
        let (_model, accuracy) = train(5).unwrap();
        assert!(accuracy > 80.0, "{accuracy} %");
    }
}
