//! Models that are built without memory, and get each rank's part of it in `prepare`.

use std::fs;

use brigade_nn::{Embedding, Init, Linear, Model, Module, ParamPath, Unit};
use brigade_optim::AdamW;
use brigade_sharding::{MixedPrecision, Sharding};
use brigade_testkit::{World, dist_test};
use brigade_torch::{Result, has_memory, rng_state};
use brigade_train::{Accelerator, ConnectOptions, PreparedModel, Processes};
use tch::{Device, Kind, Tensor};

/// Rows that two and four ranks do not divide, fewer rows than ranks, no dimensions, a tie, and a buffer that is drawn.
struct Net {
    table: Embedding,
    units: Vec<(Unit, Linear)>,
    scale: Tensor,
    head: Tensor,
}

impl Net {
    fn new(path: &ParamPath<'_>) -> Self {
        let table = Embedding::new(path / "table", 7, 5);
        let units = (0..2).map(|number| {
            let path = path / "blocks" / number;
            (path.unit(), Linear::new(&path / "linear", 5, 5))
        });
        let units: Vec<_> = units.collect();
        for (_, linear) in &units {
            path.redraw(linear.weight(), |values| values.f_normal_(0.0, 0.1).map(drop));
        }
        let _ = path.parameter("short", &[3], Init::Normal { mean: 0.0, std: 1.0 });
        let noise = path.buffer("noise", &Tensor::zeros([3], (Kind::Float, Device::Cpu)));
        path.redraw(&noise, |values| values.f_normal_(0.0, 1.0).map(drop));
        let head = (path / "head").tie("weight", table.weight());
        Self { table, units, scale: path.parameter("scale", &[], Init::Ones), head }
    }
}

impl Module<&Tensor> for Net {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let mut x = self.table.forward(input)?;
        for (unit, linear) in &self.units {
            x = unit.run(|| Ok(&x + linear.forward(&x)? * &self.scale))?;
        }
        Ok(x.f_matmul(&self.head.f_tr()?)?)
    }
}

fn all(model: &Model<Net>) -> Result<Vec<(String, Tensor)>> {
    Ok(model.state_dict().into_iter().map(|(name, tensor)| (name, tensor.copy())).collect())
}

fn whole(model: &PreparedModel<Net>) -> Vec<(String, Tensor)> {
    model.gathered(all).unwrap()
}

fn strategies(ranks: usize) -> Vec<Sharding> {
    let bf16 =
        MixedPrecision { param: Some(brigade_checkpoint::Dtype::BF16), ..Default::default() };
    let mut all = vec![
        Sharding::zero1(),
        Sharding::zero2(),
        Sharding::zero3(),
        Sharding::zero1().mixed(bf16),
        Sharding::zero3().mixed(bf16),
    ];
    if ranks == 4 {
        all.push(Sharding::hybrid(2));
    }
    all
}

fn step(accelerator: &Accelerator, model: Model<Net>, rank: i64) -> Vec<(String, Tensor)> {
    let optimizer = AdamW::default().lr(1e-2).build(&model).unwrap();
    let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    let input = Tensor::from_slice(&[rank % 7, 3]).view([1, 2]);
    for _ in 0..2 {
        let loss = model.forward(&input).unwrap().square().mean(Kind::Float);
        accelerator.backward(&loss).unwrap();
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
    }
    whole(&model)
}

fn joined() -> Processes {
    Processes::join(ConnectOptions { cpu: true, ..Default::default() }).unwrap()
}

/// The model that rank 0's seed gives.
fn expected() -> Model<Net> {
    tch::manual_seed(5);
    Model::new(Net::new).unwrap()
}

fn draws(world: &World) {
    let rank = world.rank.as_usize() as i64;
    let processes = joined();
    let builder = || Accelerator::builder().processes(&processes).quiet(true);
    for sharding in strategies(world.world_size.as_usize()) {
        let mixed = sharding.mixed.param.is_some();
        let about = format!("{sharding:?}");
        let accelerator = builder().sharding(sharding.clone()).build().unwrap();
        let plain = expected();
        let after = rng_state(Device::Cpu).unwrap();
        // Ranks draw different values, and rank 0's are used.
        tch::manual_seed(5 + rank);
        let model = Model::deferred(Net::new).unwrap();
        assert!(model.parameters().iter().all(|it| !has_memory(&it.tensor)));
        let model = accelerator.prepare(model).unwrap();
        if rank == 0 {
            assert_eq!(after, rng_state(Device::Cpu).unwrap(), "{about}");
        }
        for ((name, found), (_, expected)) in whole(&model).iter().zip(all(&plain).unwrap()) {
            let is_half = mixed && found.kind() == Kind::BFloat16;
            let expected = if is_half { expected.to_kind(Kind::BFloat16) } else { expected };
            assert!(found.equal(&expected), "{name} {about}");
        }
        drop(model);

        let trained = step(&builder().sharding(sharding.clone()).build().unwrap(), plain, rank);
        tch::manual_seed(5 + rank);
        let model = Model::deferred(Net::new).unwrap();
        let _ = Tensor::randn([3], (Kind::Float, Device::Cpu));
        let found = step(&builder().sharding(sharding.clone()).build().unwrap(), model, rank);
        for ((name, found), (_, expected)) in found.iter().zip(&trained) {
            assert!(found.equal(expected), "{name} {about}");
        }
    }
}

dist_test!(world = 2, two_ranks_have_rank_0s_first_values, |world| draws(&world));
dist_test!(world = 4, four_ranks_have_rank_0s_first_values, |world| draws(&world));

dist_test!(world = 2, without_sharding_each_rank_gets_the_whole_model, |world| {
    let rank = world.rank.as_usize() as i64;
    tch::manual_seed(5 + rank);
    let model = Model::deferred(Net::new).unwrap();
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build().unwrap();
    let model = accelerator.prepare(model).unwrap();
    for ((name, found), (_, expected)) in whole(&model).iter().zip(all(&expected()).unwrap()) {
        assert!(found.equal(&expected), "{name}");
    }
});

dist_test!(world = 3, each_rank_reads_its_rows_of_a_file, |world| {
    let folder =
        std::env::temp_dir().join(format!("deferred-{}", std::os::unix::process::parent_id()));
    let file = folder.join("net.safetensors");
    let plain = expected();
    let processes = joined();
    let builder = || Accelerator::builder().processes(&processes).quiet(true);
    for sharding in [Sharding::zero1(), Sharding::zero3()] {
        let accelerator = builder().sharding(sharding).build().unwrap();
        accelerator
            .processes()
            .on_main_process(|| -> Result<()> {
                fs::create_dir_all(&folder).unwrap();
                plain.save_weights(&file)
            })
            .unwrap();
        let mut model = Model::deferred(Net::new).unwrap();
        model.load_weights(&file).unwrap();
        let model = accelerator.prepare(model).unwrap();
        for ((name, found), (_, expected)) in whole(&model).iter().zip(all(&plain).unwrap()) {
            assert!(found.equal(&expected), "{name}");
        }

        // If a file is truncated after its validation, all ranks fail, one of them with its own reason.
        let mut model = Model::deferred(Net::new).unwrap();
        model.load_weights(&file).unwrap();
        accelerator.processes().wait_for_everyone().unwrap();
        accelerator
            .processes()
            .on_main_process(|| -> Result<()> {
                let bytes = fs::metadata(&file).unwrap().len();
                fs::OpenOptions::new()
                    .write(true)
                    .open(&file)
                    .unwrap()
                    .set_len(bytes - 60)
                    .unwrap();
                Ok(())
            })
            .unwrap();
        let error = accelerator.prepare(model).unwrap_err().to_string();
        assert!(error.contains("net.safetensors"), "{error}");
        accelerator.processes().wait_for_everyone().unwrap();
    }
    if world.rank.as_usize() == 0 {
        fs::remove_dir_all(&folder).unwrap();
    }
});

dist_test!(world = 2, ranks_must_all_defer, |world| {
    let accelerator =
        Accelerator::builder().cpu(true).quiet(true).sharding(Sharding::zero3()).build().unwrap();
    let model = match world.rank.as_usize() {
        0 => Model::deferred(Net::new),
        _ => Model::new(Net::new),
    };
    let error = accelerator.prepare(model.unwrap()).unwrap_err().to_string();
    assert!(error.contains("deferred on rank 0 and has its values on rank 1"), "{error}");
});
