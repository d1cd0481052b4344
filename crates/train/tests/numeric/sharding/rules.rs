//! Optimizers that need more of a parameter than a rank has: their steps over shards are those of whole parameters.

use std::path::Path;

use brigade_nn::{Init, Linear, Model, Module, ParamPath, Unit};
use brigade_optim::{Adafactor, AdamW, Group, Lamb, Lars, Lookahead, Muon, Optimizer};
use brigade_sharding::Sharding;
use brigade_testkit::assert_close;
use brigade_torch::{Result, Trainable};
use brigade_train::{Accelerator, AcceleratorBuilder, PreparedModel, PreparedOptimizer};
use tch::{Device, Kind, Tensor};

use super::{on_ranks, same_bits};
use crate::net::{fill, weights};

/// Matrices whose rows no number of ranks divides or that have one row alone, a parameter of three dimensions, one of a
/// single element, and one without dimensions.
struct Matrices {
    stem: Linear,
    unit: Unit,
    /// `[5, 2, 3]`.
    taps: Tensor,
    deep: Linear,
    narrow: Linear,
    scale: Tensor,
    head: Linear,
}

impl Matrices {
    fn new(path: &ParamPath<'_>) -> Self {
        let block = path / "block";
        Self {
            stem: Linear::new(path / "stem", 6, 7),
            unit: block.unit(),
            taps: block.parameter("taps", &[5, 2, 3], Init::Ones),
            deep: Linear::new(&block / "deep", 7, 5),
            narrow: Linear::new(&block / "narrow", 5, 1),
            scale: path.parameter("scale", &[], Init::Ones),
            head: Linear::new(path / "head", 5, 2),
        }
    }
}

impl Module<&Tensor> for Matrices {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let x = self.stem.forward(input)?.tanh();
        let x = self.unit.run(|| {
            let deep = self.deep.forward(&x)?.tanh();
            let taps =
                Tensor::einsum("nij,oij->no", &[&input.view([-1, 2, 3]), &self.taps], None::<i64>);
            let narrow = self.narrow.forward(&deep)?;
            Ok::<_, brigade_torch::Error>(deep + taps * 0.1 + narrow)
        })?;
        self.head.forward(&(x * &self.scale))
    }
}

fn matrices() -> Model<Matrices> {
    let model = Model::builder().kind(Kind::Double).build(Matrices::new).unwrap();
    fill(&model);
    let scale = model.parameters().into_iter().find(|it| it.name == "scale").unwrap();
    let _ = tch::no_grad(|| scale.tensor.shallow_clone().fill_(0.7));
    model
}

const RULES: [&str; 8] = [
    "LAMB",
    "LAMB with Lookahead",
    "LARS",
    "LARC",
    "Adafactor",
    "Adafactor of raised bounds",
    "Muon",
    "Muon without Nesterov",
];

fn optimizers(rule: &str, model: &impl Trainable) -> Result<Vec<Optimizer>> {
    let block = || Group::matching("block.*").lr(0.03).weight_decay(0.2);
    let lamb = || Lamb::default().lr(0.01).weight_decay(0.01).group(block());
    let muon = || Muon::default().lr(0.02).only("*.weight").group(block().momentum(0.8));
    let others = || AdamW::default().lr(0.01).except("*.weight").build(model);
    Ok(match rule {
        "LAMB" => vec![lamb().build(model)?],
        "LAMB with Lookahead" => {
            let lamb =
                lamb().decoupled_weight_decay(false).lookahead(Lookahead::default().every(2));
            vec![lamb.build(model)?]
        }
        "LARS" => vec![Lars::new(0.5).weight_decay(0.01).group(block()).build(model)?],
        "LARC" => {
            let larc = Lars::larc(0.5).momentum(0.0).weight_decay(0.1).group(block());
            vec![larc.decoupled_weight_decay(false).build(model)?]
        }
        "Adafactor" => vec![Adafactor::default().lr(0.05).group(block()).build(model)?],
        "Adafactor of raised bounds" => {
            vec![
                Adafactor::default()
                    .lr(0.05)
                    .eps1(1e-2)
                    .eps2(0.5)
                    .weight_decay(0.1)
                    .build(model)?,
            ]
        }
        "Muon" => vec![muon().build(model)?, others()?],
        _ => vec![muon().nesterov(false).build(model)?, others()?],
    })
}

/// The rows of data in each step, of all ranks together.
const ROWS: i64 = 12;

struct Run {
    accelerator: Accelerator,
    model: PreparedModel<Matrices>,
    optimizers: Vec<PreparedOptimizer>,
    /// This rank's rows of the data.
    first: i64,
    count: i64,
}

impl Run {
    fn new(builder: AcceleratorBuilder, rule: &str, rank: usize, ranks: usize) -> Self {
        let accelerator = builder.build().unwrap();
        let model = matrices();
        let optimizers = optimizers(rule, &model).unwrap();
        let model = accelerator.prepare(model).unwrap();
        let optimizers = optimizers.into_iter().map(|it| accelerator.prepare(it).unwrap());
        let count = ROWS / ranks as i64;
        let optimizers = optimizers.collect();
        Self { accelerator, model, optimizers, first: rank as i64 * count, count }
    }

    fn alone(rule: &str) -> Self {
        Self::new(Accelerator::builder().cpu(true).quiet(true), rule, 0, 1)
    }

    fn steps(&mut self, numbers: std::ops::Range<i64>) {
        let wave = |columns: i64, phase: i64| {
            let all = Tensor::arange(ROWS * columns, (Kind::Double, Device::Cpu)) * 0.7 + phase;
            all.sin().view([ROWS, columns]).narrow(0, self.first, self.count)
        };
        for number in numbers {
            let output = self.model.forward(&wave(6, 17 * number)).unwrap();
            let loss = (output - wave(2, 5 * number + 1)).square().mean(Kind::Double);
            self.accelerator.backward(&loss).unwrap();
            for optimizer in &mut self.optimizers {
                optimizer.step().unwrap();
                optimizer.zero_grad().unwrap();
            }
        }
    }

    /// Trains, freezes a matrix, trains, thaws it, trains.
    fn with_frozen(mut self) -> Vec<f64> {
        self.steps(0..2);
        assert_eq!(self.model.set_trainable("block.deep.weight", false).unwrap(), 1);
        self.steps(2..3);
        self.model.set_trainable("block.deep.weight", true).unwrap();
        self.steps(3..5);
        self.values()
    }

    fn values(&self) -> Vec<f64> {
        self.model.gathered(|model| Ok(weights(model))).unwrap()
    }
}

fn strategies(ranks: usize) -> Vec<Sharding> {
    let mut all = vec![Sharding::zero1(), Sharding::zero2(), Sharding::zero3()];
    if ranks == 4 {
        all.push(Sharding::hybrid(2));
    }
    all
}

#[test]
fn steps_are_those_of_whole_parameters() {
    for rule in RULES {
        let expected = Run::alone(rule).with_frozen();
        for ranks in 1..=4 {
            for sharding in strategies(ranks) {
                let found = on_ranks(ranks, |builder, rank| {
                    let builder = builder.sharding(sharding.clone());
                    Run::new(builder, rule, rank, ranks).with_frozen()
                });
                let about = format!("{rule}, {ranks} ranks, {sharding:?}");
                println!("{about}");
                assert_close(&found[0], &expected, 1e-12, 1e-14);
                found.iter().for_each(|rank| same_bits(rank, &found[0], &about));
            }
        }
    }
}

/// A checkpoint's states are whole, whoever has written them: another number of ranks goes on with them.
#[test]
fn checkpoints_go_on_with_any_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let forms = [
        (1, None),
        (1, Some(Sharding::zero3())),
        (2, Some(Sharding::zero3())),
        (3, Some(Sharding::zero1())),
        (4, Some(Sharding::hybrid(2))),
    ];
    for rule in ["LAMB with Lookahead", "LARS", "Adafactor", "Muon"] {
        let mut whole = Run::alone(rule);
        whole.steps(0..4);
        let expected = whole.values();
        for (saving, by) in &forms {
            let folder = folder.path().join(format!("{rule} {saving} {}", by.is_some()));
            let on_some = |ranks: usize,
                           sharding: &Option<Sharding>,
                           body: &(dyn Fn(Run) -> Vec<f64> + Sync)| {
                let all = on_ranks(ranks, |builder, rank| {
                    body(Run::new(builder.sharding(sharding.clone()), rule, rank, ranks))
                });
                assert_close(&all[0], &expected, 1e-12, 1e-14);
            };
            on_some(*saving, by, &|mut run: Run| save_and_go_on(&mut run, &folder));
            for (loading, into) in &forms {
                on_some(*loading, into, &|mut run: Run| {
                    // Of other values.
                    run.steps(7..8);
                    run.accelerator.load_state(&folder).unwrap();
                    run.steps(2..4);
                    run.values()
                });
            }
        }
    }
}

fn save_and_go_on(run: &mut Run, folder: &Path) -> Vec<f64> {
    run.steps(0..2);
    run.accelerator.save_state(folder).unwrap();
    run.accelerator.checkpoints().wait().unwrap();
    run.steps(2..4);
    run.values()
}

/// Means over rows are the same on all ranks, and are saved once.
#[test]
fn factors_of_a_variance_are_saved_as_they_are_spread() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("saved");
    on_ranks(2, |builder, rank| {
        let mut run = Run::new(builder.sharding(Sharding::zero3()), "Adafactor", rank, 2);
        save_and_go_on(&mut run, &folder)
    });
    let checkpoint = brigade_checkpoint::layout::Checkpoint::open(&folder).unwrap();
    assert!(checkpoint.verify().is_empty());
    let optimizer = checkpoint.manifest().of_kind("optimizer").next().unwrap();
    let chunks = |name: &str| {
        let tensor = &optimizer.tensors[&format!("state.{name}")];
        (tensor.shape.clone(), tensor.chunks.len())
    };
    // Rank 0 has one of the two rows, as many as the means of the columns.
    assert_eq!(chunks("head.weight.row_var"), (vec![2, 1], 2));
    assert_eq!(chunks("head.weight.col_var"), (vec![1, 5], 1));
    assert_eq!(chunks("block.narrow.weight.row_var"), (vec![1, 1], 1));
    assert_eq!(chunks("block.narrow.weight.col_var"), (vec![1, 5], 1));
    assert_eq!(chunks("block.taps.col_var"), (vec![5, 1, 3], 2));
    assert_eq!(chunks("stem.bias.variance"), (vec![7], 2));
}

/// An optimizer may be prepared before its model, or be built of the prepared one.
#[test]
fn an_optimizer_is_built_in_any_order() {
    for rule in ["LAMB", "Adafactor", "Muon"] {
        let mut whole = Run::alone(rule);
        whole.steps(0..3);
        for before in [true, false] {
            let found = on_ranks(2, |builder, rank| {
                let accelerator = builder.sharding(Sharding::zero3()).build().unwrap();
                let model = matrices();
                let all = |found: Vec<Optimizer>| -> Vec<PreparedOptimizer> {
                    found.into_iter().map(|it| accelerator.prepare(it).unwrap()).collect()
                };
                let (model, optimizers) = if before {
                    let optimizers = all(optimizers(rule, &model).unwrap());
                    (accelerator.prepare(model).unwrap(), optimizers)
                } else {
                    let model = accelerator.prepare(model).unwrap();
                    let optimizers = all(optimizers(rule, &model).unwrap());
                    (model, optimizers)
                };
                let count = ROWS / 2;
                let first = rank as i64 * count;
                let mut run = Run { accelerator, model, optimizers, first, count };
                run.steps(0..3);
                run.values()
            });
            assert_close(&found[0], &whole.values(), 1e-12, 1e-14);
        }
    }
}
