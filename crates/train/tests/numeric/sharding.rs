//! Sharded models train as whole ones do, whatever the ranks, the strategy, accumulation and clipping.

mod checkpoints;
mod foreign;
mod fsdp2;
mod generate;
mod limits;
mod messages;
mod mixed;
mod offload;
mod parts;
mod rules;

use brigade_nn::{Init, Linear, Model, Module, ParamPath, Unit};
use brigade_optim::{AdamW, Optimizer, Sgd};
use brigade_rank_env::{StoreEndpoint, World, WorldSize};
use brigade_sharding::{ReduceGradients, Reshard, Sharding};
use brigade_testkit::assert_close;
use brigade_torch::{Result, Store};
use brigade_train::{Accelerator, AcceleratorBuilder, ClipNorm, PreparedModel, PreparedOptimizer};
use tch::{Device, Kind, Tensor};

use crate::net::{fill, weights};

/// Residual blocks that are units, with rows that no number of ranks divides, fewer rows than ranks, a parameter without
/// dimensions, and buffers that training changes.
pub(crate) struct Net {
    stem: Linear,
    scale: Tensor,
    norm: brigade_nn::BatchNorm1d,
    blocks: Vec<Block>,
    head: Linear,
}

struct Block {
    unit: Unit,
    up: Linear,
    down: Linear,
}

impl Net {
    pub(crate) fn new(path: &ParamPath<'_>) -> Self {
        let blocks = (0..3).map(|number| {
            let path = path / "blocks" / number;
            Block {
                unit: path.unit(),
                up: Linear::new(&path / "up", 7, 5),
                down: Linear::new(&path / "down", 5, 7),
            }
        });
        Self {
            stem: Linear::new(path / "stem", 5, 7),
            scale: path.parameter("scale", &[], Init::Ones),
            norm: brigade_nn::BatchNorm1d::new(path / "norm", 5),
            blocks: blocks.collect(),
            head: Linear::new(path / "head", 7, 3),
        }
    }
}

impl Module<&Tensor> for Net {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        // First, so that no bias before it has a gradient of zero, whose rounding Adam would enlarge.
        let mut x = self.stem.forward(&self.norm.forward(input)?)? * &self.scale;
        for Block { unit, up, down } in &self.blocks {
            x = unit.run(|| {
                let hidden = up.forward(&x)?.tanh();
                Ok::<_, brigade_torch::Error>(&x + down.forward(&hidden)?)
            })?;
        }
        self.head.forward(&x)
    }
}

/// Residual layers that are units, without a root.
pub(crate) struct Deep(Vec<(Unit, Linear)>);

impl Deep {
    pub(crate) fn new(path: &ParamPath<'_>, units: i64, width: i64) -> Self {
        let unit = |number| {
            let path = path / "blocks" / number;
            (path.unit(), Linear::new(&path / "linear", width, width))
        };
        Self((0..units).map(unit).collect())
    }
}

impl Module<&Tensor> for Deep {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let mut x = input.shallow_clone();
        for (unit, linear) in &self.0 {
            x = unit.run(|| Ok::<_, brigade_torch::Error>(&x + linear.forward(&x)?.tanh()))?;
        }
        Ok(x)
    }
}

pub(crate) fn net() -> Model<Net> {
    let model = Model::builder().kind(Kind::Double).build(Net::new).unwrap();
    fill(&model);
    model
}

/// Inputs `[2, 5]` and targets `[2, 3]` of a rank in a micro-batch.
pub(crate) fn samples(rank: usize, micro: usize) -> (Tensor, Tensor) {
    let wave = |count: i64, phase: f64| {
        (Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.7 + phase).sin()
    };
    let phase = (rank * 31 + micro * 17) as f64;
    (wave(10, phase).view([2, 5]), wave(6, phase + 0.5).view([2, 3]))
}

/// Runs each rank in a thread of its own, and gives back what each returns.
pub(crate) fn on_ranks<R: Send>(
    ranks: usize,
    run: impl Fn(AcceleratorBuilder, usize) -> R + Sync,
) -> Vec<R> {
    let store = Store::hash().unwrap();
    std::thread::scope(|scope| {
        let run = &run;
        let started: Vec<_> = (0..ranks)
            .map(|rank| {
                let store = store.clone();
                scope.spawn(move || {
                    let size = WorldSize::new(ranks).unwrap();
                    let world = World::on_one_host(rank, size, StoreEndpoint::alone()).unwrap();
                    let builder = Accelerator::builder().world(world).store(store);
                    run(builder.cpu(true).quiet(true), rank)
                })
            })
            .collect();
        started.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Rule {
    AdamW,
    Momentum,
}

impl Rule {
    pub(crate) fn build(self, model: &impl brigade_torch::Trainable) -> Optimizer {
        match self {
            Self::AdamW => AdamW::default().lr(1e-2).build(model).unwrap(),
            Self::Momentum => Sgd::new(0.05).momentum(0.9).weight_decay(1e-2).build(model).unwrap(),
        }
    }
}

/// How a run trains.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Recipe {
    pub(crate) rule: Rule,
    /// Micro-batches of a window.
    pub(crate) window: usize,
    pub(crate) clip: Option<ClipNorm>,
}

pub(crate) const STEPS: usize = 3;

pub(crate) type Prepared = (PreparedModel<Net>, PreparedOptimizer);

/// One optimizer step with the samples of these ranks together.
pub(crate) fn step(
    accelerator: &Accelerator,
    (model, optimizer): &mut Prepared,
    recipe: &Recipe,
    ranks: std::ops::Range<usize>,
    number: usize,
) -> Result<f64> {
    let mut sum = 0.0;
    for micro in 0..recipe.window {
        let backward = || {
            let parts: Vec<_> =
                ranks.clone().map(|rank| samples(rank, number * recipe.window + micro)).collect();
            let inputs = Tensor::cat(&parts.iter().map(|it| &it.0).collect::<Vec<_>>(), 0);
            let targets = Tensor::cat(&parts.iter().map(|it| &it.1).collect::<Vec<_>>(), 0);
            let (inputs, targets) =
                (inputs.to(accelerator.device()), targets.to(accelerator.device()));
            let loss = (model.forward(&inputs)? - targets).square().mean(Kind::Double);
            accelerator.backward(&(&loss / recipe.window as f64))?;
            Ok(loss.double_value(&[]))
        };
        sum += if micro + 1 < recipe.window {
            accelerator.no_sync(&*model, backward)?
        } else {
            backward()?
        };
    }
    if let Some(clip) = recipe.clip {
        accelerator.clip_grad_norm(&*model, clip)?;
    }
    optimizer.step()?;
    optimizer.zero_grad()?;
    Ok(sum)
}

fn values(model: &PreparedModel<Net>) -> Vec<f64> {
    model.gathered(|model| Ok(weights(model))).unwrap()
}

/// The weights after some steps.
fn trained(
    builder: AcceleratorBuilder,
    recipe: &Recipe,
    ranks: std::ops::Range<usize>,
) -> Vec<f64> {
    let accelerator = builder.sync_batch_norm(true).build().unwrap();
    let model = net();
    let optimizer = recipe.rule.build(&model);
    let mut objects = accelerator.prepare((model, optimizer)).unwrap();
    for number in 0..STEPS {
        step(&accelerator, &mut objects, recipe, ranks.clone(), number).unwrap();
    }
    values(&objects.0)
}

fn strategies(ranks: usize) -> Vec<Sharding> {
    let mut all = vec![
        Sharding::zero1(),
        Sharding::zero2(),
        Sharding::zero2().reduce(ReduceGradients::Window),
        Sharding::zero3(),
        Sharding::zero3().reshard_after_forward(Reshard::No),
        Sharding::zero3().reduce(ReduceGradients::Window),
    ];
    if ranks == 4 {
        all.push(Sharding::zero3().reshard_after_forward(Reshard::To(2)));
        // Has no effect there.
        all.push(Sharding::zero2().reshard_after_forward(Reshard::To(2)));
    }
    if ranks.is_multiple_of(2) {
        all.push(Sharding::hybrid(2));
        all.push(Sharding::hybrid(1));
    }
    all
}

pub(crate) fn same_bits(found: &[f64], expected: &[f64], about: &str) {
    assert_eq!(found.len(), expected.len());
    let differs = |place: &usize| found[*place].to_bits() != expected[*place].to_bits();
    let places: Vec<usize> = (0..found.len()).filter(differs).collect();
    if let Some(first) = places.first() {
        panic!(
            "{} values differ, the first [{first}]: {} and {}; {about}",
            places.len(),
            found[*first],
            expected[*first]
        );
    }
}

/// On `ranks` ranks, all strategies are equal to one process, and to each other bit for bit where nothing is clipped.
fn as_one_process(ranks: usize) {
    let clips = [
        None,
        Some(ClipNorm { max_norm: 0.05, ..ClipNorm::default() }),
        Some(ClipNorm { max_norm: 0.01, norm_type: f64::INFINITY, ..ClipNorm::default() }),
        Some(ClipNorm { max_norm: 0.3, norm_type: 1.0, ..ClipNorm::default() }),
    ];
    for rule in [Rule::AdamW, Rule::Momentum] {
        for (window, clip) in clips.iter().map(|clip| (1, *clip)).chain([(2, None), (3, clips[1])])
        {
            let recipe = Recipe { rule, window, clip };
            let alone = Accelerator::builder().cpu(true).quiet(true);
            let expected = trained(alone, &recipe, 0..ranks);
            let plain = on_ranks(ranks, |builder, rank| trained(builder, &recipe, rank..rank + 1));
            for sharding in strategies(ranks) {
                let all = on_ranks(ranks, |builder, rank| {
                    trained(builder.sharding(sharding.clone()), &recipe, rank..rank + 1)
                });
                for found in &all {
                    same_bits(found, &all[0], &format!("{recipe:?} {sharding:?}"));
                    assert_close(found, &expected, 1e-12, 1e-14);
                }
                let one_reduction = window == 1
                    || sharding.reduce == ReduceGradients::Window
                    || sharding == Sharding::zero1();
                let plain_order = sharding.strategy != Sharding::hybrid(2).strategy;
                // DDP divides before it adds, which is exact for powers of two alone.
                let exact = ranks.is_power_of_two();
                if clip.is_none() && one_reduction && plain_order && exact {
                    same_bits(&all[0], &plain[0], &format!("{recipe:?} {sharding:?}"));
                }
            }
        }
    }
}

#[test]
fn one_rank() {
    as_one_process(1);
}

/// One rank takes the steps of a program without sharding, bit for bit, and copies no parameters: the whole ones lie in
/// the memory of the shards.
#[test]
fn one_rank_has_the_bits_of_the_plain_program() {
    let alone = || Accelerator::builder().cpu(true).quiet(true);
    let clip = Some(ClipNorm { max_norm: 0.05, ..ClipNorm::default() });
    for rule in [Rule::AdamW, Rule::Momentum] {
        for (window, clip) in [(1, None), (1, clip), (3, None), (3, clip)] {
            let recipe = Recipe { rule, window, clip };
            let expected = trained(alone(), &recipe, 0..1);
            for sharding in strategies(1) {
                let found = trained(alone().sharding(sharding.clone()), &recipe, 0..1);
                same_bits(&found, &expected, &format!("{recipe:?} {sharding:?}"));
            }
        }
    }
    let accelerator = alone().sharding(Sharding::zero3()).build().unwrap();
    let model = accelerator.prepare(net()).unwrap();
    let shards: Vec<_> = model.local_parameters().iter().map(|it| it.tensor.data_ptr()).collect();
    let whole = |model: &Model<Net>| {
        Ok(model.parameters().iter().map(|it| it.tensor.data_ptr()).collect::<Vec<_>>())
    };
    assert_eq!(model.gathered(whole).unwrap(), shards);
    let gathered = model.sharder().unwrap().meter().unwrap();
    assert!(gathered.gathers > 0 && gathered.peak_gathered_bytes == 0, "{gathered:?}");
}

#[test]
fn two_ranks() {
    as_one_process(2);
}

#[test]
fn three_ranks() {
    as_one_process(3);
}

#[test]
fn four_ranks() {
    as_one_process(4);
}
