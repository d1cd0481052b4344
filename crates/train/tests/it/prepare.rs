//! What `prepare` takes and compares, and what prepared things do.

use std::path::PathBuf;

use brigade_checkpoint::layout::Checkpoint;
use brigade_data::{DataLoader, TensorDataset};
use brigade_nn::{BatchNorm1d, Init, Linear, Model, Module, ParamPath};
use brigade_optim::{Adam, Scheduler, Sgd};
use brigade_schedule::Schedule;
use brigade_sharding::device_map::DeviceMap;
use brigade_testkit::{World, dist_test};
use brigade_torch::{ErrorKind, Result, gradient};
use brigade_train::Accelerator;
use tch::{Kind, Tensor};

fn numbers(n: i64) -> TensorDataset<Tensor> {
    TensorDataset::new(Tensor::arange(n, (Kind::Int64, tch::Device::Cpu))).unwrap()
}

fn linear(path: &ParamPath<'_>) -> Linear {
    Linear::new(path, 3, 2)
}

/// First values that differ from rank to rank.
fn seeded_by_rank(world: &World) {
    tch::manual_seed(100 + world.rank.as_usize() as i64);
}

fn all_equal(accelerator: &Accelerator, tensor: &Tensor) -> bool {
    let gathered = accelerator.processes().gather(&tensor.detach().reshape([1, -1])).unwrap();
    let first = gathered.narrow(0, 0, 1).expand_as(&gathered);
    gathered == first
}

dist_test!(world = 2, dist_any_mix_in_any_order_keeps_its_shape, |world: World| -> Result<()> {
    seeded_by_rank(&world);
    let accelerator = Accelerator::new()?;
    let (first, second) = (Model::new(linear)?, Model::new(linear)?);
    let (adam, sgd) = (Adam::default().build(&first)?, Sgd::new(0.1).build(&second)?);
    let cosine = Scheduler::new(&adam, Schedule::cosine(0.1, 0.0, 10)?);
    let loader = DataLoader::new(numbers(8)).batch_size(2);
    let (cosine, second, (sgd, loader), adam, first) =
        accelerator.prepare((cosine, second, (sgd, loader), adam, first))?;
    assert_eq!(adam.lr()?, 0.1);
    assert_eq!((cosine.position()?, sgd.steps()?, loader.len()), (0, 0, 2));
    for model in [&first, &second] {
        for parameter in model.inner().parameters() {
            assert!(all_equal(&accelerator, &parameter.tensor), "{} differs", parameter.name);
        }
    }
    let single = accelerator.prepare(Model::new(linear)?)?;
    assert_eq!(single.into_inner().num_parameters(), 8);
    Ok(())
});

#[test]
fn a_model_with_a_device_map_is_refused_and_still_computes() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    Model::new(linear).unwrap().save_weights(&file).unwrap();
    let accelerator = Accelerator::new().unwrap();
    for place in ["cpu", "disk"] {
        let load = || {
            let model = Model::deferred(linear).unwrap();
            model.dispatch(&file, &DeviceMap::by_hand([("", place)])).unwrap()
        };
        let error = accelerator.prepare(load()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::InvalidArgument);
        for part in [
            "cannot train the model",
            "a device map has the weights",
            "use sharding with offload (`Sharding::zero3().offload(…)`)",
        ] {
            assert!(error.to_string().contains(part), "{place}: {error}");
        }
        let model = load();
        let error = Sgd::new(0.1).build(&model).unwrap_err().to_string();
        assert!(error.contains("a device map has the weights"), "{place}: {error}");
        let input = Tensor::ones([1, 3], (Kind::Float, tch::Device::Cpu));
        assert_eq!(model.forward(&input).unwrap().size(), [1, 2]);
    }
}

struct Frozen(Tensor);

impl Module<&Tensor> for Frozen {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        Ok(input * &self.0)
    }
}

dist_test!(world = 2, dist_a_model_without_trained_parameters, |world: World| -> Result<()> {
    seeded_by_rank(&world);
    let accelerator = Accelerator::new()?;
    let mut teacher = Model::new(|p: &ParamPath<'_>| {
        Frozen(p.parameter("scale", &[3], Init::Normal { mean: 0.0, std: 1.0 }))
    })?;
    teacher.requires_grad(false)?;
    let bare = Model::new(|p: &ParamPath<'_>| {
        Frozen(p.buffer("scale", &Tensor::from_slice(&[world.rank.as_usize() as f32])))
    })?;
    let (teacher, bare) = accelerator.prepare((teacher, bare))?;
    assert!(teacher.reducer().is_none() && bare.reducer().is_none());
    assert!(all_equal(&accelerator, &teacher.inner().parameters()[0].tensor));
    let output = bare.forward(&Tensor::ones([1], tch::kind::FLOAT_CPU))?;
    assert_eq!(f64::try_from(output)?, 0.0, "rank 0's buffer");
    Ok(())
});

dist_test!(world = 2, dist_thawing_after_prepare_is_an_error, |_world: World| -> Result<()> {
    let accelerator = Accelerator::new()?;
    let two = |p: &ParamPath<'_>| (Linear::new(p / "body", 3, 3), Linear::new(p / "head", 3, 2));
    let input = Tensor::ones([4, 3], tch::kind::FLOAT_CPU);
    for frozen in ["body", "head"] {
        let mut model = Model::new(|p: &ParamPath<'_>| Both(two(p)))?;
        model.requires_grad_under(frozen, false)?;
        let mut model = accelerator.prepare(model)?;
        let _ = model.forward(&input)?;
        model.inner_mut().requires_grad_under(frozen, true)?;
        let error = model.forward(&input).unwrap_err().to_string();
        assert!(error.contains(&format!("\"{frozen}.weight\" was frozen")), "{error}");
        // Evaluation needs no gradient.
        let _ = tch::no_grad(|| model.forward(&input))?;
        // Prepared again, it trains.
        let model = accelerator.prepare(model.into_inner())?;
        accelerator.backward(&model.forward(&input)?.sum(Kind::Float))?;
    }
    Ok(())
});

struct Both((Linear, Linear));

impl Module<&Tensor> for Both {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.0.1.forward(&self.0.0.forward(input)?)
    }
}

struct TwoInputs(Linear, Linear);

impl Module<(&Tensor, &Tensor)> for TwoInputs {
    type Output = (Tensor, Vec<Tensor>);

    fn forward(&self, (left, right): (&Tensor, &Tensor)) -> Result<Self::Output> {
        let (left, right) = (self.0.forward(left)?, self.1.forward(right)?);
        Ok((&left + &right, vec![left, right]))
    }
}

dist_test!(world = 2, dist_a_forward_of_several_tensors, |world: World| -> Result<()> {
    let accelerator = Accelerator::new()?;
    let model = Model::new(|p: &ParamPath<'_>| {
        TwoInputs(Linear::new(p / "left", 3, 2), Linear::new(p / "right", 3, 2))
    })?;
    let model = accelerator.prepare(model)?;
    let input = Tensor::full([4, 3], world.rank.as_usize() as f64 + 1.0, tch::kind::FLOAT_CPU);
    let (sum, parts) = model.forward((&input, &input))?;
    assert_eq!(parts.len(), 2);
    accelerator.backward(&sum.sum(Kind::Float))?;
    let weight = &model.inner().parameters()[0];
    let found = gradient(&weight.tensor)?.expect("a gradient after backward");
    // d sum / d weight is the column sum of the input, 4 and 8: their mean on both ranks.
    assert!(found.eq_tensor(&Tensor::from(6f32)).all().int64_value(&[]) == 1, "{found}");
    Ok(())
});

dist_test!(world = 2, dist_no_sync_adds_up_on_each_rank, |world: World| -> Result<()> {
    let accelerator = Accelerator::new()?;
    let model = accelerator.prepare(Model::new(linear)?)?;
    let rank = world.rank.as_usize() as f64;
    let input = Tensor::full([1, 3], rank + 1.0, tch::kind::FLOAT_CPU);
    let backward =
        || -> Result<()> { accelerator.backward(&model.forward(&input)?.sum(Kind::Float)) };
    let weight = model.inner().parameters().remove(0).tensor;
    accelerator.no_sync(&model, backward)?;
    let local = gradient(&weight)?.expect("a gradient").double_value(&[0, 0]);
    assert_eq!(local, rank + 1.0);
    backward()?;
    let summed = gradient(&weight)?.expect("a gradient").double_value(&[0, 0]);
    assert_eq!(summed, 3.0, "the mean of 2 and 4");
    Ok(())
});

struct Normed(Linear, BatchNorm1d);

impl Module<&Tensor> for Normed {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.1.forward(&self.0.forward(input)?)
    }
}

dist_test!(world = 2, dist_evaluation_uses_rank_0s_statistics, |world: World| -> Result<()> {
    let accelerator = Accelerator::new()?;
    let model = Model::new(|p: &ParamPath<'_>| {
        Normed(Linear::new(p / "linear", 3, 2), BatchNorm1d::new(p / "norm", 2))
    })?;
    let mut model = accelerator.prepare(model)?;
    model.train();
    tch::manual_seed(world.rank.as_usize() as i64);
    for _ in 0..2 {
        let input = Tensor::randn([8, 3], tch::kind::FLOAT_CPU);
        accelerator.backward(&model.forward(&input)?.sum(Kind::Float))?;
    }
    model.eval();
    let input = Tensor::ones([1, 3], tch::kind::FLOAT_CPU);
    let output = tch::no_grad(|| model.forward(&input))?;
    assert!(all_equal(&accelerator, &output));
    // Later forwards send nothing: ranks may evaluate unequal numbers of batches.
    for _ in 0..world.rank.as_usize() * 3 {
        let _ = tch::no_grad(|| model.forward(&input))?;
    }
    accelerator.processes().wait_for_everyone()
});

dist_test!(world = 3, dist_other_models_and_data_are_refused_everywhere, |world: World| {
    let accelerator = Accelerator::new().unwrap();
    let last = world.rank.as_usize() == 2;
    let wide = if last { 4 } else { 3 };
    let model = Model::new(|p: &ParamPath<'_>| Linear::new(p / "head", wide, 2)).unwrap();
    let text = accelerator.prepare(model).unwrap_err().to_string();
    assert!(text.contains("head.weight"), "{text}");
    assert!(
        text.contains("[2, 3]") && text.contains("[2, 4]") && text.contains("rank 2"),
        "{text}"
    );

    let loader = DataLoader::new(numbers(if last { 9 } else { 10 }));
    let text = accelerator.prepare(loader).unwrap_err().to_string();
    assert!(text.contains("rank 0 has 10 samples, rank 2 has 9"), "{text}");
    // And the ranks are still in step.
    accelerator.processes().wait_for_everyone().unwrap();
});

dist_test!(world = 2, dist_epochs_agree_without_a_seed, |_world: World| -> Result<()> {
    let accelerator = Accelerator::new()?;
    // Each rank's loader draws its own seed; rank 0's is used.
    let loader = accelerator.prepare(DataLoader::new(numbers(40)).batch_size(5).shuffle(true))?;
    let mut epochs = Vec::new();
    for _ in 0..3 {
        let mut order: Vec<i64> = Vec::new();
        for batch in &loader {
            let batch = batch?;
            order.extend(Vec::<i64>::try_from(accelerator.processes().gather(&*batch)?)?);
        }
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert_eq!(sorted, (0..40).collect::<Vec<_>>(), "a partition of the data");
        epochs.push(order);
    }
    assert!(epochs[0] != epochs[1] && epochs[1] != epochs[2]);
    loader.set_epoch(0);
    let mut again: Vec<i64> = Vec::new();
    for batch in &loader {
        again.extend(Vec::<i64>::try_from(accelerator.processes().gather(&*batch?)?)?);
    }
    assert_eq!(again, epochs[0]);
    Ok(())
});

dist_test!(world = 2, dist_weights_to_and_from_files, |world: World| -> Result<()> {
    seeded_by_rank(&world);
    let accelerator = Accelerator::new()?;
    // A folder of this test that both ranks use.
    let mine = tempfile::tempdir().unwrap();
    let folder: PathBuf = accelerator.processes().broadcast_object(mine.path().to_owned(), 0)?;
    let saved = accelerator.prepare(Model::new(linear)?)?;
    accelerator.save_model(&saved, &folder)?;
    assert!(folder.join("model.safetensors").is_file(), "there on return, on every rank");

    let mut loaded = accelerator.prepare(Model::new(linear)?)?;
    accelerator.load_model(&mut loaded, &folder)?;
    for (a, b) in saved.inner().parameters().iter().zip(loaded.inner().parameters()) {
        assert_eq!(a.tensor, b.tensor, "{}", a.name);
    }
    let missing = accelerator.load_model(&mut loaded, folder.join("nothing.safetensors"));
    assert!(missing.unwrap_err().to_string().contains("nothing.safetensors"));
    let forbidden = accelerator.save_model(&saved, "/proc/no/such/folder");
    assert!(forbidden.unwrap_err().to_string().contains("/proc/no"));
    let mut other = accelerator.prepare(Model::new(|p: &ParamPath<'_>| Linear::new(p, 5, 2))?)?;
    let text = accelerator.load_model(&mut other, &folder).unwrap_err().to_string();
    assert!(text.contains("weight"), "{text}");

    // Two models of [2, 2] and [2], under `model` and `model_ema`.
    let several = "../checkpoint/tests/fixtures/weights/several.pth";
    let mut two = accelerator.prepare(Model::new(|p: &ParamPath<'_>| Linear::new(p, 2, 2))?)?;
    let text = accelerator.load_model(&mut two, several).unwrap_err().to_string();
    assert!(text.contains("`model`, `model_ema`; choose one"), "{text}");
    accelerator.checkpoints().load_model_entry(&mut two, several, "model_ema")?;
    let bias = two.inner().parameters().swap_remove(1).tensor;
    assert_eq!(Vec::<f32>::try_from(bias)?, [2.0, 4.0]);
    accelerator.processes().wait_for_everyone()
});

dist_test!(world = 2, seconds = 60, dist_a_lost_rank_ends_the_others_step, |world: World| {
    let accelerator = Accelerator::new().unwrap();
    let model = accelerator.prepare(Model::new(linear).unwrap()).unwrap();
    if world.rank.as_usize() == 1 {
        // To its peers this rank has ended: its connections are closed.
        return accelerator.processes().group().unwrap().abort().unwrap();
    }
    let input = Tensor::ones([1, 3], tch::kind::FLOAT_CPU);
    let outcome =
        model.forward(&input).and_then(|output| accelerator.backward(&output.sum(Kind::Float)));
    let text = outcome.unwrap_err().to_string();
    assert!(text.contains("rank 0 of 2"), "{text}");
});

#[test]
fn a_loss_without_a_graph_is_an_error() {
    let accelerator = Accelerator::new().unwrap();
    let model = accelerator.prepare(Model::new(linear).unwrap()).unwrap();
    let input = Tensor::ones([2, 3], tch::kind::FLOAT_CPU);
    let output = model.forward(&input).unwrap();
    accelerator.backward(&output.mse_loss(&output.zeros_like(), tch::Reduction::Mean)).unwrap();
    let error = accelerator.backward(&Tensor::ones([2], tch::kind::FLOAT_CPU)).unwrap_err();
    assert!(!error.to_string().is_empty());
}

/// The program owns what was prepared; an object that was registered by a call stays.
#[test]
fn what_the_program_drops_is_not_saved_any_more() {
    let accelerator = Accelerator::builder().cpu(true).quiet(true).build().unwrap();
    let folder = tempfile::tempdir().unwrap();
    let objects = |name: &str| -> Vec<String> {
        let path = accelerator.save_state(folder.path().join(name)).unwrap();
        accelerator.checkpoints().wait().unwrap();
        let checkpoint = Checkpoint::open(path).unwrap();
        checkpoint.manifest().objects.iter().map(|object| object.name.to_string()).collect()
    };
    let prepare = || {
        let model = Model::new(linear).unwrap();
        let optimizer = Sgd::new(0.1).build(&model).unwrap();
        accelerator.prepare((model, optimizer, DataLoader::new(numbers(4)))).unwrap()
    };
    let first = prepare();
    let (model, optimizer, loader) = prepare();
    let kept = std::sync::Arc::new(std::sync::Mutex::new(1));
    accelerator.checkpoints().register_value(&kept);
    let registered = Sgd::new(0.1).build(&Model::new(linear).unwrap()).unwrap();
    accelerator.checkpoints().register(&registered);
    drop((first, kept, registered));
    assert_eq!(
        objects("second"),
        ["model", "optimizer", "optimizer_1", "loader", "custom", "run", "rank_0"]
    );
    // A handle of the optimizer that a program or a scheduler keeps is not the prepared one.
    let optimizer = optimizer.into_inner();
    assert_eq!(objects("model"), ["model", "optimizer", "loader", "custom", "run", "rank_0"]);
    drop((model, optimizer, loader));
    assert_eq!(objects("registered"), ["optimizer", "custom", "run", "rank_0"]);
}
