//! What becomes of a job when the input of one rank does not fit its model.

use brigade_nn::{Linear, Model, Module, ParamPath};
use brigade_testkit::{DistTest, World};
use brigade_torch::Result;
use brigade_train::Accelerator;
use tch::{Kind, Tensor};

struct Net {
    encoder: Linear,
    head: Linear,
}

impl Module<&Tensor> for Net {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let hidden = self.encoder.forward(input)?.relu();
        // On rank 1 the third step's sequences are cut too short for the head.
        self.head.forward(&hidden.flatten(1, -1))
    }
}

/// Four steps; in the third, rank 1 has sequences of 5 positions instead of 6.
fn train(world: &World) -> Result<()> {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build()?;
    let model = accelerator.prepare(Model::new(|p: &ParamPath<'_>| Net {
        encoder: Linear::new(p / "encoder", 3, 4),
        head: Linear::new(p / "decoder" / "head", 24, 2),
    })?)?;
    for step in 0..4 {
        let positions = if step == 2 && world.rank.as_usize() == 1 { 5 } else { 6 };
        let input = Tensor::ones([8, positions, 3], tch::kind::FLOAT_CPU);
        let loss = model.forward(&input)?.mean(Kind::Float);
        accelerator.backward(&loss)?;
    }
    Ok(())
}

#[test]
fn dist_a_shape_error_on_one_rank_ends_the_job_with_the_layers_name() {
    let name = concat!(
        module_path!(),
        "::dist_a_shape_error_on_one_rank_ends_the_job_with_the_layers_name"
    );
    // Rank 1 returns its error, as from `main`; rank 0 waits for its gradients.
    let report = match DistTest::new(name, 2).run(|world| train(&world)) {
        None => return,
        Some(result) => result.unwrap_err().to_string(),
    };
    let expected = "decoder.head cannot take an input of [8, 20]: mat1 and mat2 shapes cannot be \
                    multiplied (8x20 and 24x2)";
    assert!(report.contains(expected), "{report}");
    assert!(report.lines().next().unwrap().contains("rank 1"), "{report}");
}

/// The rank whose peer has left gets an error as well, and learns which rank it was.
#[test]
fn dist_the_other_rank_names_the_one_that_left() {
    let name = concat!(module_path!(), "::dist_the_other_rank_names_the_one_that_left");
    DistTest::new(name, 2).run_or_panic(|world| {
        let error = train(&world).unwrap_err().to_string();
        if world.rank.as_usize() == 1 {
            assert!(error.starts_with("decoder.head cannot take"), "{error}");
        } else {
            assert!(error.contains("rank 1"), "{error}");
        }
    });
}
