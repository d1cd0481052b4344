//! Shards in the host's memory.

#[cfg(not(feature = "cuda"))]
use brigade_sharding::MixedPrecision;
use brigade_sharding::{Offload, ReduceGradients, Reshard, Sharding};
#[cfg(not(feature = "cuda"))]
use brigade_test_device::fake;
use brigade_testkit::assert_close;
use brigade_train::{Accelerator, ClipNorm};
use tch::{Device, Kind};

use super::{Recipe, Rule, STEPS, net, on_ranks, same_bits, step, trained, values};

fn strategies() -> Vec<Sharding> {
    vec![
        Sharding::zero1(),
        Sharding::zero2(),
        Sharding::zero3(),
        Sharding::zero3().reshard_after_forward(Reshard::No),
        Sharding::zero3().reduce(ReduceGradients::Window),
    ]
}

fn recipes() -> [Recipe; 3] {
    let clip = Some(ClipNorm { max_norm: 0.05, ..ClipNorm::default() });
    [
        Recipe { rule: Rule::AdamW, window: 1, clip: None },
        Recipe { rule: Rule::Momentum, window: 2, clip },
        Recipe { rule: Rule::AdamW, window: 2, clip: None },
    ]
}

/// Copies come late on this GPU: what is used too early is not a number.
#[cfg(not(feature = "cuda"))]
#[test]
fn a_gpu_trains_with_shards_in_the_hosts_memory() {
    fake::install(1).unwrap();
    for recipe in recipes() {
        for sharding in strategies() {
            let expected = on_ranks(1, |builder, _| {
                trained(builder.sharding(sharding.clone()), &recipe, 0..1)
            })
            .remove(0);
            for pin in [true, false] {
                let offloaded = sharding.clone().offload(Offload::Cpu { pin });
                let about = format!("{recipe:?} {offloaded:?}");
                let builder = Accelerator::builder().quiet(true).sharding(offloaded);
                let accelerator = builder.sync_batch_norm(true).build().unwrap();
                assert_eq!(accelerator.device(), Device::Cuda(0));
                let model = net();
                let optimizer = recipe.rule.build(&model);
                let mut objects = accelerator.prepare((model, optimizer)).unwrap();
                for number in 0..STEPS {
                    step(&accelerator, &mut objects, &recipe, 0..1, number).unwrap();
                }
                let found = values(&objects.0);
                assert!(found.iter().all(|it| it.is_finite()), "{about}");
                assert_close(&found, &expected, 1e-6, 1e-7);
                let report = accelerator.parallel().memory_report().unwrap().unwrap();
                let row = |kind: &str| *report.rows.iter().find(|row| row.kind == kind).unwrap();
                assert_eq!(row("optimizer").measured, 0, "{about}");
                assert!(row("offloaded").measured > 0, "{report}");
            }
        }
    }
}

/// Gathers and reductions with copies that end at random times have the bits of those whose copies are all late. A
/// failure prints the seed.
#[cfg(not(feature = "cuda"))]
#[test]
fn random_delays_of_copies_change_no_bit() {
    fake::install(1).unwrap();
    let recipe = recipes()[1];
    let mut random = brigade_test_needs::random();
    for sharding in strategies() {
        let run = || {
            let offloaded = sharding.clone().offload(Offload::Cpu { pin: true });
            let builder = Accelerator::builder().quiet(true).sharding(offloaded);
            trained(builder, &recipe, 0..1)
        };
        let expected = run();
        for _ in 0..8 {
            let seed = random.u64(..);
            let _delays = fake::random_delays(seed);
            same_bits(&run(), &expected, &format!("seed {seed}, {sharding:?}"));
        }
    }
}

/// Where parameters are whole between steps, a unit's copy to the GPU begins before the next unit is stepped.
#[cfg(not(feature = "cuda"))]
#[test]
fn a_unit_is_copied_while_the_next_is_stepped() {
    use std::sync::{Arc, Mutex, OnceLock};

    use brigade_nn::{Model, ParamPath};
    use brigade_optim::{Optimizer, Step};
    use brigade_torch::{Result, Sharder};
    use tch::Tensor;

    use super::Deep;

    /// The gathers that a model had begun at each call of the rule.
    #[derive(Debug, Default)]
    struct Watch(OnceLock<Arc<Sharder>>, Mutex<Vec<u64>>);

    #[derive(Debug)]
    struct Watching(Arc<Watch>);
    impl brigade_optim::Rule for Watching {
        fn name(&self) -> &'static str {
            "Watching"
        }
        fn slots(&self) -> &'static [&'static str] {
            &[]
        }
        fn is_elementwise(&self) -> bool {
            true
        }
        fn step(&self, step: &mut Step<'_>) -> Result<()> {
            let Watch(sharder, gathers) = &*self.0;
            gathers.lock().unwrap().push(sharder.get().unwrap().meter()?.gathers);
            let lr = step.lr();
            step.each(|parameter, gradient, _| {
                let _ = parameter.shallow_clone().f_sub_(&gradient.f_mul_scalar(lr)?)?;
                Ok(())
            })
        }
    }
    const UNITS: u64 = 4;
    fake::install(1).unwrap();
    for (sharding, in_parts) in
        [(Sharding::zero1(), true), (Sharding::zero2(), true), (Sharding::zero3(), false)]
    {
        let sharding = sharding.offload(Offload::Cpu { pin: true });
        let accelerator = Accelerator::builder().quiet(true).sharding(sharding).build().unwrap();
        let new = |path: &ParamPath<'_>| Deep::new(path, UNITS as i64, 8);
        let model = Model::builder().build(new).unwrap();
        let watch = Arc::new(Watch::default());
        let optimizer = Optimizer::with_rule(Watching(Arc::clone(&watch)), 0.1);
        let optimizer = optimizer.build(&model).unwrap();
        let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
        let sharder = model.sharder().unwrap();
        watch.0.set(Arc::clone(sharder)).unwrap();
        let input = Tensor::ones([2, 8], (Kind::Float, accelerator.device()));
        for _ in 0..2 {
            let loss = model.forward(&input).unwrap().square().mean(Kind::Float);
            accelerator.backward(&loss).unwrap();
            let before = sharder.meter().unwrap().gathers;
            optimizer.step().unwrap();
            optimizer.zero_grad().unwrap();
            let found: Vec<u64> = watch.1.lock().unwrap().drain(..).map(|it| it - before).collect();
            let after = sharder.meter().unwrap().gathers - before;
            if in_parts {
                assert_eq!((found, after), ((0..UNITS).collect(), UNITS));
            } else {
                assert_eq!((found, after), (vec![0], 0));
            }
        }
    }
}

/// Steps unit by unit have the bits of steps of all parameters at once, however late copies are.
#[cfg(not(feature = "cuda"))]
#[test]
fn a_step_in_parts_has_the_bits_of_a_whole_one() {
    use brigade_optim::{AdamW, Lookahead};

    fake::install(1).unwrap();
    let mut random = brigade_test_needs::random();
    let cases = recipes().into_iter().map(|recipe| (recipe, false)).chain([(recipes()[0], true)]);
    for (recipe, looks_ahead) in cases {
        for sharding in [Sharding::zero1(), Sharding::zero2()] {
            let run = |in_parts: bool| {
                let offloaded = sharding.clone().offload(Offload::Cpu { pin: true });
                let builder = Accelerator::builder().quiet(true).sharding(offloaded);
                let accelerator = builder.sync_batch_norm(true).build().unwrap();
                let model = net();
                let optimizer = if looks_ahead {
                    let lookahead = Lookahead::default().every(2);
                    AdamW::default().lr(1e-2).lookahead(lookahead).build(&model).unwrap()
                } else {
                    recipe.rule.build(&model)
                };
                let mut objects = accelerator.prepare((model, optimizer)).unwrap();
                if !in_parts {
                    objects.1.settled().unwrap().step_in_parts(&[], |_| Ok(()));
                }
                for number in 0..STEPS {
                    step(&accelerator, &mut objects, &recipe, 0..1, number).unwrap();
                }
                values(&objects.0)
            };
            let expected = run(false);
            same_bits(&run(true), &expected, &format!("{recipe:?}, {sharding:?}"));
            for _ in 0..4 {
                let seed = random.u64(..);
                let _delays = fake::random_delays(seed);
                same_bits(&run(true), &expected, &format!("seed {seed}, {recipe:?}, {sharding:?}"));
            }
        }
    }
}

/// Ranks that come to their gathers and reductions at random times have the bits of ranks that do not wait. A failure
/// prints the seed.
#[test]
fn random_delays_of_ranks_change_no_bit() {
    use std::cell::RefCell;
    use std::thread::sleep;
    use std::time::Duration;

    use brigade_nn::{Model, Module};
    use brigade_torch::Result;
    use tch::Tensor;

    /// Sleeps before units, inside of them and before the backward.
    struct Slow<F>(super::Net, RefCell<F>);
    impl<F: FnMut() -> Duration> Module<&Tensor> for Slow<F> {
        type Output = Tensor;
        fn forward(&self, input: &Tensor) -> Result<Tensor> {
            let Self(net, delay) = self;
            let wait = || sleep((delay.borrow_mut())());
            let mut x = net.stem.forward(&net.norm.forward(input)?)? * &net.scale;
            for block in &net.blocks {
                wait();
                x = block.unit.run(|| {
                    wait();
                    let hidden = block.up.forward(&x)?.tanh();
                    Ok::<_, brigade_torch::Error>(&x + block.down.forward(&hidden)?)
                })?;
            }
            let output = net.head.forward(&x)?;
            wait();
            Ok(output)
        }
    }
    let mut seeds = brigade_test_needs::random();
    let template = seeds.clone();
    let run = |sharding: &Sharding, seed: Option<u64>| {
        on_ranks(2, |builder, rank| {
            let mut random = template.clone();
            random.seed(seed.unwrap_or(0) + rank as u64);
            let delay = move || match seed {
                // A third of the delays is long enough for the other rank to come far.
                Some(_) => Duration::from_micros([0, 50, 2000][random.usize(0..3)]),
                None => Duration::ZERO,
            };
            let accelerator = builder.sharding(sharding.clone()).build().unwrap();
            let build =
                |path: &brigade_nn::ParamPath<'_>| Slow(super::Net::new(path), RefCell::new(delay));
            let model = Model::builder().kind(Kind::Double).build(build).unwrap();
            crate::net::fill(&model);
            let optimizer = Rule::AdamW.build(&model);
            let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
            for number in 0..STEPS {
                let (inputs, targets) = super::samples(rank, number);
                let loss = (model.forward(&inputs).unwrap() - targets).square().mean(Kind::Double);
                accelerator.backward(&loss).unwrap();
                optimizer.step().unwrap();
                optimizer.zero_grad().unwrap();
            }
            model.gathered(|model| Ok(crate::net::weights(model))).unwrap()
        })
    };
    for sharding in strategies() {
        let expected = run(&sharding, None);
        for _ in 0..4 {
            let seed = seeds.u64(..u64::MAX / 2);
            for (found, expected) in run(&sharding, Some(seed)).iter().zip(&expected) {
                same_bits(found, expected, &format!("seed {seed}, {sharding:?}"));
            }
        }
    }
}

/// The whole parameters of a GPU's model are there in their units alone.
#[cfg(not(feature = "cuda"))]
#[test]
fn the_gpu_holds_two_units_and_no_shards() {
    use brigade_nn::{Model, ParamPath};
    use brigade_optim::AdamW;
    use tch::Tensor;

    use super::Deep;

    const UNIT: u64 = 256 * 256 * 4 + 256 * 4;
    fake::install(1).unwrap();
    let bf16 =
        MixedPrecision { param: Some(brigade_checkpoint::Dtype::BF16), ..Default::default() };
    // The highest memory is that of the process: the precision that needs less comes first.
    for mixed in [bf16, MixedPrecision::default()] {
        let model = Model::deferred(|path: &ParamPath<'_>| Deep::new(path, 8, 256)).unwrap();
        let sharding = Sharding::zero3().mixed(mixed).offload(Offload::Cpu { pin: true });
        let accelerator = Accelerator::builder().quiet(true).sharding(sharding).build().unwrap();
        let optimizer = AdamW::default().build(&model).unwrap();
        let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
        let kind = if mixed.param.is_some() { Kind::BFloat16 } else { Kind::Float };
        let input = Tensor::ones([2, 256], (kind, accelerator.device()));
        let mut losses = Vec::new();
        for _ in 0..4 {
            let loss = model.forward(&input).unwrap().square().mean(Kind::Float);
            accelerator.backward(&loss).unwrap();
            optimizer.step().unwrap();
            optimizer.zero_grad().unwrap();
            losses.push(loss.double_value(&[]));
        }
        assert!(losses.windows(2).all(|pair| pair[1] < pair[0]), "{losses:?}");
        let report = accelerator.parallel().memory_report().unwrap().unwrap();
        let row = |kind: &str| *report.rows.iter().find(|row| row.kind == kind).unwrap();
        let (gathered, reduced) = (row("gathered"), row("reduced"));
        assert_eq!(gathered.measured, gathered.planned);
        assert_eq!(reduced.measured, reduced.planned);
        let (planned, peak) = (gathered.planned + reduced.planned, fake::memory(0).unwrap().peak);
        // The activations are small.
        assert!(peak <= planned + UNIT / 4, "{peak} bytes, {planned} planned, units of {UNIT}");
    }
}

/// With replicas, sums over the shards stay on the GPU until the replicas have summed them at the end of a window.
#[cfg(not(feature = "cuda"))]
#[test]
fn rows_that_wait_for_the_replicas_are_in_the_plan() {
    use brigade_nn::{Model, ParamPath};
    use brigade_rank_env::{StoreEndpoint, World, WorldSize};
    use brigade_torch::{Backend, Store};
    use tch::Tensor;

    use super::Deep;

    const UNITS: u64 = 8;
    const WIDTH: u64 = 256;
    const UNIT: u64 = (WIDTH * WIDTH + WIDTH) * 4;
    fake::install(2).unwrap();
    let store = Store::hash().unwrap();
    let run = |rank: usize, store: Store| {
        fake::set_current_device(rank).unwrap();
        let world = World::on_one_host(rank, WorldSize::new(2).unwrap(), StoreEndpoint::alone());
        let builder = Accelerator::builder().world(world.unwrap()).store(store).quiet(true);
        let builder = builder.device(Device::Cuda(rank)).backend(Backend::Gloo(Default::default()));
        let sharding = Sharding::hybrid(1).offload(Offload::Cpu { pin: true });
        let accelerator = builder.sharding(sharding).build().unwrap();
        let new = |path: &ParamPath<'_>| Deep::new(path, UNITS as i64, WIDTH as i64);
        let model = accelerator.prepare(Model::deferred(new).unwrap()).unwrap();
        let input = Tensor::ones([2, WIDTH as i64], (Kind::Float, accelerator.device()));
        let backward = || {
            let loss = model.forward(&input).unwrap().square().mean(Kind::Float);
            accelerator.backward(&loss)
        };
        for _ in 0..2 {
            accelerator.no_sync(&model, backward).unwrap();
            backward().unwrap();
        }
        let report = accelerator.parallel().memory_report().unwrap().unwrap();
        *report.rows.iter().find(|row| row.kind == "reduced").unwrap()
    };
    let rows: Vec<_> = std::thread::scope(|scope| {
        let run = &run;
        let start = |rank| {
            let store = store.clone();
            scope.spawn(move || run(rank, store))
        };
        let started: Vec<_> = (0..2).map(start).collect();
        started.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for row in rows {
        assert!(row.measured >= UNITS * UNIT, "{row:?}, units of {UNIT}");
        assert_eq!(row.measured, row.planned);
    }
}

/// What does not fit is told with the strategy, its plan, and the change that needs less.
#[cfg(not(feature = "cuda"))]
#[test]
fn memory_that_runs_out_is_explained() {
    use brigade_nn::{Linear, Model};
    use tch::Tensor;

    fake::install(1).unwrap();
    let linear = || Model::new(|path| Linear::new(path / "linear", 512, 1024)).unwrap();
    let prepared = |sharding: Sharding| {
        let accelerator = Accelerator::builder().quiet(true).sharding(sharding).build().unwrap();
        accelerator.prepare(linear())
    };
    fake::set_capacity(0, 1 << 20).unwrap();
    let error = prepared(Sharding::zero1()).map(drop).unwrap_err();
    let text = error.to_string();
    assert!(error.is_out_of_memory() && text.contains("the move of the model"), "{text}");
    fake::set_capacity(0, 40 << 20).unwrap();
    let model = prepared(Sharding::zero1()).unwrap();
    let inputs = Tensor::ones([1 << 14, 512], (Kind::Float, Device::Cuda(0)));
    let error = model.forward(&inputs).unwrap_err();
    let text = error.to_string();
    assert!(error.is_out_of_memory() && text.contains("linear"), "{text}");
    assert!(text.contains("; zero1 plans 0.01 GiB for parameters, gradients and states"), "{text}");
    assert!(text.contains("offload to the CPU would plan 0.00 GiB"), "{text}");
}

/// Where the model computes on the CPU its shards lie there in any case.
#[test]
fn on_the_cpu_nothing_changes() {
    for sharding in [Sharding::zero1(), Sharding::zero3()] {
        let recipe = recipes()[1];
        let run = |sharding: &Sharding| {
            on_ranks(2, |builder, rank| {
                trained(builder.sharding(sharding.clone()), &recipe, rank..rank + 1)
            })
        };
        let (plain, offloaded) =
            (run(&sharding), run(&sharding.clone().offload(Offload::Cpu { pin: true })));
        same_bits(&plain[0], &offloaded[0], "offload");
        same_bits(&plain[1], &offloaded[1], "offload");
    }
}
