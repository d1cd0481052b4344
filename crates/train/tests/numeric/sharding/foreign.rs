//! Models of `tch::nn` and TorchScript: one unit each, which trains as without sharding.

use std::collections::BTreeMap;
use std::path::Path;

use brigade_nn::{Model, TchModule, TorchScript};
use brigade_optim::AdamW;
use brigade_sharding::Sharding;
use brigade_train::{AcceleratorBuilder, PreparedModel};
use tch::{Device, Kind, Tensor, nn};

use super::{on_ranks, same_bits};

fn of_tch() -> Model<TchModule<nn::Sequential>> {
    let variables = nn::VarStore::new(Device::Cpu);
    let root = variables.root();
    let net = nn::seq()
        .add(nn::linear(&root / "hidden", 4, 6, nn::LinearConfig::default()))
        .add_fn(Tensor::tanh)
        .add(nn::linear(&root / "head", 6, 3, nn::LinearConfig::default()));
    Model::from_var_store(variables, net).unwrap()
}

/// With a tied weight, a batch normalisation, and a parameter without dimensions.
fn of_script() -> Model<TorchScript<BTreeMap<String, Tensor>>> {
    let file =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../nn/tests/fixtures/torchscript_script.pt");
    let mut model = Model::from_torchscript(file).unwrap();
    // Its dropout draws from a generator that ranks of one process share.
    model.eval();
    model
}

/// The weights after some steps, and the number of units.
fn trained<M>(
    builder: AcceleratorBuilder,
    rank: usize,
    model: Model<M>,
    loss: impl Fn(&PreparedModel<M>, &Tensor) -> Tensor,
) -> Vec<f64> {
    let accelerator = builder.build().unwrap();
    let wave = |count: i64, phase: f64| {
        let places = Tensor::arange(count, (Kind::Float, Device::Cpu));
        (places * 0.7 + phase).sin()
    };
    for (place, parameter) in model.parameters().into_iter().enumerate() {
        let values = wave(parameter.tensor.numel() as i64, place as f64) * 0.3;
        let mut tensor = parameter.tensor.detach();
        tensor.copy_(&values.reshape(parameter.tensor.size()));
    }
    let optimizer = AdamW::default().lr(1e-2).build(&model).unwrap();
    let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    for number in 0..3 {
        let input = wave(20, (rank * 3 + number) as f64).view([5, 4]);
        accelerator.backward(&loss(&model, &input)).unwrap();
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
    }
    model
        .gathered(|model| {
            let values = model.parameters().into_iter().map(|it| it.tensor.detach().flatten(0, -1));
            let all = Tensor::cat(&values.collect::<Vec<_>>(), 0).to_kind(Kind::Double);
            Ok(Vec::<f64>::try_from(all)?)
        })
        .unwrap()
}

fn as_without_sharding(run: impl Fn(AcceleratorBuilder, usize) -> Vec<f64> + Sync) {
    let expected = on_ranks(2, &run);
    for sharding in [Sharding::zero1(), Sharding::zero2(), Sharding::zero3(), Sharding::hybrid(1)] {
        let found = on_ranks(2, |builder, rank| run(builder.sharding(sharding.clone()), rank));
        for found in found {
            same_bits(&found, &expected[0], &format!("{sharding:?}"));
        }
    }
}

#[test]
fn models_of_tch() {
    as_without_sharding(|builder, rank| {
        trained(builder, rank, of_tch(), |model, input| {
            model.forward(input).unwrap().square().mean(Kind::Float)
        })
    });
}

#[test]
fn torchscript() {
    as_without_sharding(|builder, rank| {
        trained(builder, rank, of_script(), |model, input| {
            let output = model.forward((input, &input.neg())).unwrap();
            output["sum"].square().mean(Kind::Float)
        })
    });
}
