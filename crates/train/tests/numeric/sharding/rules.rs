//! Optimizers that need more of a parameter than a rank has: their steps over shards are those of whole parameters.

use std::path::Path;

use brigade_checkpoint::convert::{AccelerateRun, Target, convert};
use brigade_checkpoint::pth::{PthFile, StoredTensor};
use brigade_nn::{Init, Linear, Model, Module, ParamPath, Unit};
use brigade_optim::{Adafactor, AdamW, Group, Lamb, Lars, Lookahead, Muon, Optimizer};
use brigade_sharding::Sharding;
use brigade_testkit::assert_close;
use brigade_torch::{Result, Trainable};
use brigade_train::{Accelerator, PreparedModel, PreparedOptimizer};
use tch::{Device, Kind, Tensor};

use super::messages::fake;
use super::{on_ranks, same_bits};
use crate::net::{fill, weights};

/// Matrices whose rows no number of ranks divides or that have one row alone, a parameter of three dimensions, one of a
/// single element, one without dimensions, and a frozen one.
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

fn matrices(kind: Kind) -> Model<Matrices> {
    let model = Model::builder().kind(kind).build(Matrices::new).unwrap();
    fill(&model);
    let of = |name: &str| model.parameters().into_iter().find(|it| it.name == name).unwrap().tensor;
    let _ = tch::no_grad(|| of("scale").fill_(0.7));
    let _ = of("head.weight").set_requires_grad(false);
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

struct Run<'a> {
    accelerator: &'a Accelerator,
    model: PreparedModel<Matrices>,
    optimizers: Vec<PreparedOptimizer>,
}

impl<'a> Run<'a> {
    fn new(accelerator: &'a Accelerator, rule: &str) -> Self {
        Self::of_kind(accelerator, rule, Kind::Double)
    }

    fn of_kind(accelerator: &'a Accelerator, rule: &str, kind: Kind) -> Self {
        let model = matrices(kind);
        let optimizers = optimizers(rule, &model).unwrap();
        let model = accelerator.prepare(model).unwrap();
        let optimizers = optimizers.into_iter().map(|it| accelerator.prepare(it).unwrap());
        Self { accelerator, model, optimizers: optimizers.collect() }
    }

    fn steps(&mut self, numbers: std::ops::Range<i64>) {
        let processes = self.accelerator.processes();
        let count = ROWS / processes.num_processes() as i64;
        let first = processes.process_index() as i64 * count;
        let wave = |columns: i64, phase: i64| {
            let all = Tensor::arange(ROWS * columns, (Kind::Double, Device::Cpu)) * 0.7 + phase;
            all.sin().view([ROWS, columns]).narrow(0, first, count)
        };
        let kind = self.model.trainable_parameters()[0].tensor.kind();
        for number in numbers {
            let output = self.model.forward(&wave(6, 17 * number).to_kind(kind)).unwrap();
            let loss = (output.to_kind(Kind::Double) - wave(2, 5 * number + 1)).square();
            let loss = loss.mean(Kind::Double);
            self.accelerator.backward(&loss).unwrap();
            for optimizer in &mut self.optimizers {
                optimizer.step().unwrap();
                optimizer.zero_grad().unwrap();
            }
        }
    }

    /// Trains, freezes a matrix, trains, thaws all, trains.
    fn with_frozen(mut self) -> Vec<f64> {
        self.steps(0..2);
        assert_eq!(self.model.set_trainable("block.deep.weight", false).unwrap(), 1);
        self.steps(2..3);
        self.model.set_trainable("*", true).unwrap();
        self.steps(3..5);
        self.values()
    }

    /// Saves after two of four steps.
    fn save(mut self, folder: &Path) -> Vec<f64> {
        self.steps(0..2);
        self.accelerator.save_state(folder).unwrap();
        self.accelerator.checkpoints().wait().unwrap();
        self.steps(2..4);
        self.values()
    }

    /// Goes on from what was saved.
    fn resume(mut self, folder: &Path) -> Vec<f64> {
        // Of other values.
        self.steps(7..8);
        self.accelerator.load_state(folder).unwrap();
        self.steps(2..4);
        self.values()
    }

    fn trained(mut self) -> Vec<f64> {
        self.steps(0..4);
        self.values()
    }

    fn values(&self) -> Vec<f64> {
        self.model.gathered(|model| Ok(weights(model))).unwrap()
    }
}

/// Runs each of these rules on all ranks, and compares with one process.
fn as_one_process<const RULES: usize>(
    rules: [&str; RULES],
    ranks: usize,
    sharding: Option<&Sharding>,
    run: impl Fn(Run<'_>, &str) -> Vec<f64> + Sync,
    expected: &[Vec<f64>; RULES],
) {
    let found = on_ranks(ranks, |builder, _| {
        let accelerator = builder.sharding(sharding.cloned()).build().unwrap();
        rules.map(|rule| run(Run::new(&accelerator, rule), rule))
    });
    for (number, rule) in rules.iter().enumerate() {
        let about = format!("{rule}, {ranks} ranks, {sharding:?}");
        let pairs = || found[0][number].iter().zip(&expected[number]);
        let fits = |(a, b): (&f64, &f64)| (a - b).abs() <= 1e-14 + 1e-12 * b.abs();
        let differs = pairs().find(|&pair| !fits(pair));
        assert!(differs.is_none(), "{about}: found and expected {differs:?}");
        found.iter().for_each(|rank| same_bits(&rank[number], &found[0][number], &about));
    }
}

fn alone() -> Accelerator {
    Accelerator::builder().cpu(true).quiet(true).build().unwrap()
}

#[test]
fn steps_are_those_of_whole_parameters() {
    let expected = RULES.map(|rule| Run::new(&alone(), rule).with_frozen());
    for ranks in 1..=4 {
        let hybrid = (ranks == 4).then(|| Sharding::hybrid(2));
        let all =
            [Sharding::zero1(), Sharding::zero2(), Sharding::zero3()].into_iter().chain(hybrid);
        for sharding in all {
            as_one_process(RULES, ranks, Some(&sharding), |run, _| run.with_frozen(), &expected);
        }
    }
}

/// The states of a checkpoint are whole, by any number of ranks: any other goes on with them.
#[test]
fn checkpoints_go_on_with_any_ranks() {
    let rules = ["LAMB with Lookahead", "LARS", "Adafactor", "Muon"];
    let expected = rules.map(|rule| Run::new(&alone(), rule).trained());
    let folder = tempfile::tempdir().unwrap();
    let zero3 = Sharding::zero3();
    for saving in [1, 2] {
        let folder = |rule: &str| folder.path().join(format!("{rule} {saving}"));
        let by = (saving > 1).then_some(&zero3);
        as_one_process(rules, saving, by, |run, rule| run.save(&folder(rule)), &expected);
        let forms = [(1, None), (3, Some(Sharding::zero1())), (4, Some(Sharding::hybrid(2)))];
        for (ranks, into) in forms {
            let resume = |run: Run<'_>, rule: &str| run.resume(&folder(rule));
            as_one_process(rules, ranks, into.as_ref(), resume, &expected);
        }
    }
}

/// Means over rows are the same on all ranks, and are saved once.
#[test]
fn factors_of_a_variance_are_saved_as_they_are_spread() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("saved");
    on_ranks(2, |builder, _| {
        let accelerator = builder.sharding(Sharding::zero3()).build().unwrap();
        Run::new(&accelerator, "Adafactor").save(&folder)
    });
    let checkpoint = brigade_checkpoint::layout::Checkpoint::open(&folder).unwrap();
    assert!(checkpoint.verify().is_empty());
    let optimizer = checkpoint.manifest().of_kind("optimizer").next().unwrap();
    let chunks = |name: &str| {
        let tensor = &optimizer.tensors[&format!("state.{name}")];
        (tensor.shape.clone(), tensor.chunks.len())
    };
    assert_eq!(chunks("stem.weight.row_var"), (vec![7, 1], 2));
    assert_eq!(chunks("stem.weight.col_var"), (vec![1, 6], 1));
    // Rank 0 has one row, as many as the means of the columns.
    assert_eq!(chunks("block.narrow.weight.row_var"), (vec![1, 1], 1));
    assert_eq!(chunks("block.narrow.weight.col_var"), (vec![1, 5], 1));
    assert_eq!(chunks("block.taps.col_var"), (vec![5, 1, 3], 2));
    assert_eq!(chunks("stem.bias.variance"), (vec![7], 2));

    let accelerate = folder.with_extension("accelerate");
    convert(&folder, &accelerate, Target::Accelerate(AccelerateRun::default())).unwrap();
    let file = accelerate.join("optimizer.bin");
    let optimizer = PthFile::from_file(&file, std::fs::File::open(&file).unwrap()).unwrap();
    let mut shapes = Vec::new();
    let tree = optimizer.value().unwrap().try_map(&mut |_, tensor: StoredTensor| {
        shapes.push(tensor.info().shape);
        Ok::<_, std::convert::Infallible>(())
    });
    assert!(tree.is_ok());
    assert!(shapes.contains(&vec![7, 1]) && shapes.contains(&vec![1, 6]), "{shapes:?}");
}

/// An optimizer may be prepared before its model, or be built of the prepared one.
#[test]
fn an_optimizer_is_built_in_any_order() {
    for rule in ["LAMB", "Adafactor", "Muon"] {
        let expected = Run::new(&alone(), rule).trained();
        for before in [true, false] {
            let found = on_ranks(2, |builder, _| {
                let accelerator = builder.sharding(Sharding::zero3()).build().unwrap();
                let model = matrices(Kind::Double);
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
                Run { accelerator: &accelerator, model, optimizers }.trained()
            });
            assert_close(&found[0], &expected, 1e-12, 1e-14);
        }
    }
}

/// All parameters share the messages of a step.
#[test]
fn a_step_sends_few_messages() {
    let planned = [("LAMB", [1, 0]), ("LARS", [1, 0]), ("Adafactor", [2, 0]), ("Muon", [0, 2])];
    let accelerator = fake(3).sharding(Sharding::zero3()).build().unwrap();
    for (rule, expected) in planned {
        let mut run = Run::new(&accelerator, rule);
        let group = run.model.sharder().unwrap().groups().gather.clone();
        group.reset_traffic();
        run.steps(0..1);
        let traffic = group.traffic();
        let messages = |operation: &str| traffic.get(operation).map_or(0, |it| it.messages);
        let found = [messages("all_reduce"), messages("all_to_all")];
        assert_eq!(found, expected, "{rule}: {traffic:?}");
    }
}

/// Averages of weights are averages of shards (EMA): an average is validated in the place of the weights.
#[test]
fn shards_are_averaged_and_exchanged() {
    let averaged = |run: &mut Run<'_>| {
        let shards = run.model.trainable_parameters();
        let live: Vec<Tensor> = shards.iter().map(|it| it.tensor.detach()).collect();
        let mut averages: Vec<Tensor> = live.iter().map(Tensor::copy).collect();
        for number in 0..3 {
            run.steps(number..number + 1);
            for (average, shard) in averages.iter_mut().zip(&live) {
                let _ = average.lerp_(shard, 0.1);
            }
        }
        live.iter()
            .zip(&averages)
            .for_each(|(shard, average)| shard.shallow_clone().copy_(average));
        if let Some(sharder) = run.model.sharder() {
            sharder.shards_changed().unwrap();
        }
        run.values()
    };
    let expected = averaged(&mut Run::new(&alone(), "LAMB"));
    for sharding in [Sharding::zero1(), Sharding::zero2(), Sharding::zero3()] {
        let found = on_ranks(3, |builder, _| {
            let accelerator = builder.sharding(sharding.clone()).build().unwrap();
            averaged(&mut Run::new(&accelerator, "LAMB"))
        });
        assert_close(&found[0], &expected, 1e-12, 1e-14);
    }
}

/// In fewer bits steps are as far from those in 64 bits as without sharding.
#[test]
fn fewer_bits() {
    let expected = RULES.map(|rule| Run::new(&alone(), rule).trained());
    for kind in [Kind::Float, Kind::BFloat16] {
        let distances = |values: [Vec<f64>; RULES.len()]| {
            let mut pairs = values.iter().zip(&expected);
            RULES.map(|_| {
                let (found, expected) = pairs.next().unwrap();
                found.iter().zip(expected).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
            })
        };
        let run = |accelerator: &Accelerator| {
            RULES.map(|rule| Run::of_kind(accelerator, rule, kind).trained())
        };
        let whole = distances(run(&alone()));
        let found =
            on_ranks(3, |builder, _| run(&builder.sharding(Sharding::zero3()).build().unwrap()));
        assert!(found.iter().all(|rank| *rank == found[0]));
        let found = distances(found[0].clone());
        for (number, rule) in RULES.iter().enumerate() {
            assert!(found[number] < 3.0 * whole[number], "{rule}, {kind:?}: {found:?}, {whole:?}");
        }
    }
}
