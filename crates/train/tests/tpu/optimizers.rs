//! All optimizers against their steps on the CPU.

use brigade_nn::{Linear, LinearOptions, Model, Module, ParamPath};
use brigade_optim::{Overrides, all_optimizers};
use brigade_test_needs::needs;
use brigade_torch::{Result, TPU};
use tch::{Device, Kind, Tensor};

use crate::training::{Settings, distance, train};

struct Net {
    hidden: Linear,
    head: Linear,
}

impl Net {
    fn new(path: &ParamPath<'_>) -> Self {
        // Muon steps matrices alone.
        let options = LinearOptions { bias: false };
        Self {
            hidden: Linear::with_options(path / "hidden", 6, 8, options),
            head: Linear::with_options(path / "head", 8, 4, options),
        }
    }
}

impl Module<&Tensor> for Net {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.head.forward(&self.hidden.forward(input)?.tanh())
    }
}

#[needs(Tpu)]
fn each_optimizer_steps_as_on_the_cpu() {
    let mut failures = Vec::new();
    for (place, (name, _)) in all_optimizers().iter().enumerate() {
        let run = |device| {
            let settings = Settings { steps: 3, ..Settings::default() };
            train(
                device,
                &settings,
                Net::new,
                |model: &Model<Net>| {
                    let parameters = model.trainable_parameters();
                    all_optimizers()[place].1.build_with(&parameters, Overrides::default())
                },
                |model, device, _| {
                    let input = Tensor::arange(30, (Kind::Float, Device::Cpu)).sin();
                    let output = model.forward(&input.reshape([5, 6]).to_device(device))?;
                    Ok(output.f_square()?.f_mean(Kind::Float)?)
                },
            )
        };
        match run(TPU) {
            Ok(found) => {
                let apart = distance(&found, &run(Device::Cpu).unwrap());
                println!("{name}: {apart:.1e}");
                // Muon's products are in bf16.
                if apart > if *name == "Muon" { 2f64.powi(-7) } else { 1e-5 } {
                    failures.push(format!("{name}: {apart} apart"));
                }
            }
            Err(error) => failures.push(format!("{name}: {error}")),
        }
    }
    assert!(failures.is_empty(), "{failures:#?}");
}
