//! Models that others wrote, on one rank and two: `tch::nn`, TorchScript; second backwards and recomputed parts.

use std::path::{Path, PathBuf};

use std::collections::BTreeMap;

use brigade_nn::{
    BatchNorm1d, Dropout, Linear, Model, Module, ParamPath, Recompute, Sequential, TchModule,
    TorchScript,
};
use brigade_optim::Adam;
use brigade_test_device::{numeric_device, on_device};
use brigade_testkit::{World, dist_test};
use brigade_torch::{BackwardOptions, GradOptions, grad, gradient};
use brigade_train::{Accelerator, Precision, PreparedModel, PreparedOptimizer};
use tch::{Kind, Tensor, nn};

use crate::device::builder;

fn fixture(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../nn/tests/fixtures").join(name)
}

fn net() -> Model<TchModule<nn::SequentialT>> {
    let variables = nn::VarStore::new(numeric_device());
    let root = variables.root();
    let mut net = nn::seq_t()
        .add(nn::linear(&root / "hidden", 4, 6, nn::LinearConfig::default()))
        .add(nn::batch_norm1d(&root / "norm", 6, nn::BatchNormConfig::default()));
    net = net.add_fn_t(|x, train| x.relu().dropout(0.3, train));
    net = net.add(nn::linear(&root / "head", 6, 2, nn::LinearConfig::default()));
    Model::from_var_store(variables, net).unwrap()
}

fn script() -> Model<TorchScript<BTreeMap<String, Tensor>>> {
    Model::from_torchscript(fixture("torchscript_script.pt")).unwrap()
}

/// This rank's batch of a step.
fn batch(rank: usize, step: u64) -> Tensor {
    let numbers = (0..20).map(|i| ((i + 20 * rank as u64 + 40 * step) as f32).sin());
    on_device(&Tensor::from_slice(&numbers.collect::<Vec<_>>())).reshape([5, 4])
}

type Loss<M> = fn(&PreparedModel<M>, &Tensor) -> Tensor;

struct Run<M> {
    model: PreparedModel<M>,
    optimizer: PreparedOptimizer,
    loss: Loss<M>,
}

impl<M> Run<M> {
    fn new(accelerator: &Accelerator, model: Model<M>, loss: Loss<M>) -> Self {
        let optimizer = Adam::default().lr(0.05).build(&model).unwrap();
        let (model, optimizer) = accelerator.prepare((model, optimizer)).unwrap();
        Self { model, optimizer, loss }
    }

    fn go(&mut self, accelerator: &Accelerator, steps: std::ops::Range<u64>) -> Vec<u64> {
        self.model.train();
        steps
            .map(|step| {
                let loss =
                    (self.loss)(&self.model, &batch(accelerator.processes().process_index(), step));
                self.optimizer.zero_grad().unwrap();
                accelerator.backward(&loss).unwrap();
                self.optimizer.step().unwrap();
                loss.double_value(&[]).to_bits()
            })
            .collect()
    }

    fn bits(&self) -> Vec<(String, Vec<u64>)> {
        let parameters = self.model.inner().parameters().into_iter();
        parameters.map(|parameter| (parameter.name, bits(&parameter.tensor))).collect()
    }
}

fn bits(tensor: &Tensor) -> Vec<u64> {
    let flat = tensor.detach().to_kind(Kind::Double).reshape([-1]);
    Vec::<f64>::try_from(flat).unwrap().into_iter().map(f64::to_bits).collect()
}

fn same_on_all_ranks(accelerator: &Accelerator, tensors: &[(String, Vec<u64>)]) {
    let all = accelerator.processes().gather_object(tensors.to_vec()).unwrap();
    assert!(all.iter().all(|other| *other == all[0]), "ranks differ");
}

/// Trains, saves in the middle, goes on with another model, saves weights and loads them.
fn resumed<M>(world: &World, make: fn() -> Model<M>, loss: Loss<M>, names: &[&str]) {
    // Ranks begin with different values; rank 0's are used.
    tch::manual_seed(1 + world.rank.as_usize() as i64);
    let accelerator = builder().build().unwrap();
    let folder = accelerator.is_main_process().then(|| tempfile::tempdir().unwrap());
    let path = folder.as_ref().map(|folder| folder.path().to_owned());
    let path = accelerator.processes().broadcast_object(path, 0).unwrap().unwrap();
    let again = || Accelerator::builder().sharing(&accelerator).build().unwrap();

    let first = again();
    let mut run = Run::new(&first, make(), loss);
    let before = run.go(&first, 0..3);
    first.save_state(path.join("state")).unwrap();
    first.checkpoints().wait().unwrap();
    first.processes().wait_for_everyone().unwrap();
    let rest = run.go(&first, 3..7);
    let weights = run.bits();
    same_on_all_ranks(&first, &weights);
    assert_ne!(before, rest);

    let second = again();
    tch::manual_seed(99);
    let mut resumed = Run::new(&second, make(), loss);
    second.load_state(path.join("state")).unwrap();
    assert_eq!(resumed.go(&second, 3..7), rest, "losses");
    assert_eq!(resumed.bits(), weights, "weights");

    let file = path.join("model.safetensors");
    second.save_model(&resumed.model, &file).unwrap();
    second.processes().wait_for_everyone().unwrap();
    check_file(&file, names, make(), &weights);
    second.processes().wait_for_everyone().unwrap();
}

fn check_file<M>(file: &Path, names: &[&str], mut model: Model<M>, weights: &[(String, Vec<u64>)]) {
    let state = brigade_nn::weights::load(file).unwrap();
    let mut found: Vec<&str> = state.names().collect();
    found.sort_unstable();
    assert_eq!(found, names);
    let _ = model.load_state_dict(&state).unwrap();
    for (parameter, (name, bits_of)) in model.parameters().iter().zip(weights) {
        assert_eq!((&parameter.name, &bits(&parameter.tensor)), (name, bits_of));
    }
}

const OF_TCH: [&str; 8] = [
    "head.bias",
    "head.weight",
    "hidden.bias",
    "hidden.weight",
    "norm.bias",
    "norm.running_mean",
    "norm.running_var",
    "norm.weight",
];
const OF_SCRIPT: [&str; 10] = [
    "again.weight",
    "body.0.bias",
    "body.0.weight",
    "body.1.bias",
    "body.1.num_batches_tracked",
    "body.1.running_mean",
    "body.1.running_var",
    "body.1.weight",
    "head.weight",
    "scale",
];

fn loss_of_tch(model: &PreparedModel<TchModule<nn::SequentialT>>, input: &Tensor) -> Tensor {
    model.forward(input).unwrap().square().mean(Kind::Float)
}

fn loss_of_script(
    model: &PreparedModel<TorchScript<BTreeMap<String, Tensor>>>,
    input: &Tensor,
) -> Tensor {
    let output = model.forward((input, &input.neg())).unwrap();
    output["sum"].square().mean(Kind::Float)
}

dist_test!(world = 1, seconds = 120, one_rank_resumes_a_model_of_tch, |world: World| {
    resumed(&world, net, loss_of_tch, &OF_TCH);
});
dist_test!(world = 2, seconds = 120, two_ranks_resume_a_model_of_tch, |world: World| {
    resumed(&world, net, loss_of_tch, &OF_TCH);
});
dist_test!(world = 1, seconds = 120, one_rank_resumes_torchscript, |world: World| {
    resumed(&world, script, loss_of_script, &OF_SCRIPT);
});
dist_test!(world = 2, seconds = 120, two_ranks_resume_torchscript, |world: World| {
    resumed(&world, script, loss_of_script, &OF_SCRIPT);
});

fn gradients(model: &PreparedModel<impl Sized>) -> Vec<Vec<u64>> {
    let parameters = model.inner().parameters();
    parameters.iter().map(|it| bits(&gradient(&it.tensor).unwrap().unwrap())).collect()
}

// Two backwards through one forward: twice the averaged gradient, on every rank.
dist_test!(world = 2, a_kept_graph_is_reduced_again, |_world: World| {
    let accelerator = builder().build().unwrap();
    let mut model = accelerator.prepare(Model::new(|p| Linear::new(p, 4, 3)).unwrap()).unwrap();
    let keep = BackwardOptions { retain_graph: true, ..Default::default() };
    for step in 0..3 {
        let input = batch(accelerator.processes().process_index(), step);
        let once = |model: &PreparedModel<Linear>| {
            let loss = model.forward(&input).unwrap().square().mean(Kind::Float);
            accelerator.backward(&loss).unwrap();
            gradients(model)
        };
        model.inner_mut().zero_grad().unwrap();
        let single = once(&model);
        model.inner_mut().zero_grad().unwrap();
        let loss = model.forward(&input).unwrap().square().mean(Kind::Float);
        accelerator.backward_with(&loss, keep).unwrap();
        assert_eq!(gradients(&model), single);
        accelerator.backward(&loss).unwrap();
        // The second average is one of (first average + own gradient): it is rounded like the own gradients, of which a
        // small average is the difference of larger ones.
        let values = |of: &[Vec<u64>]| -> Vec<f64> {
            of.iter().flatten().map(|bits| f64::from_bits(*bits)).collect()
        };
        let single = values(&single);
        let largest = single.iter().fold(0.0f64, |largest, it| largest.max(it.abs()));
        for (found, once) in values(&gradients(&model)).into_iter().zip(single) {
            let error = (found - 2.0 * once).abs();
            assert!(error <= 1e-6 * largest, "step {step}: {found} {once}, of up to {largest}");
        }
        let named = gradients(&model).into_iter().map(|bits| (String::new(), bits));
        same_on_all_ranks(&accelerator, &named.collect::<Vec<_>>());
    }
});

dist_test!(world = 2, a_kept_graph_that_cannot_be_reduced_again_is_an_error, |_world: World| {
    let options =
        brigade_torch::ReducerOptions { find_unused_parameters: true, ..Default::default() };
    let accelerator = builder().reducer(options).build().unwrap();
    let model = accelerator.prepare(Model::new(|p| Linear::new(p, 4, 3)).unwrap()).unwrap();
    let loss = model.forward(&batch(0, 0)).unwrap().square().mean(Kind::Float);
    let keep = BackwardOptions { retain_graph: true, ..Default::default() };
    accelerator.backward_with(&loss, keep).unwrap();
    let error = accelerator.backward(&loss).unwrap_err().to_string();
    assert!(error.contains("find_unused_parameters"), "{error}");
});

/// A linear critic's gradient penalty has a closed form: with score `w·x`, the slope is `w` for every sample,
/// so d penalty / dw = 2 (|w| − 1) w / |w|, whatever the data are.
fn gradient_penalty() {
    let accelerator = builder().build().unwrap();
    let critic = accelerator.prepare(Model::new(|p| Linear::new(p, 4, 1)).unwrap()).unwrap();
    let weight = critic.inner().parameters().remove(0).tensor.detach().copy();
    for step in 0..2 {
        let (real, fake) = (batch(accelerator.processes().process_index(), step), batch(7, step));
        let mix = Tensor::rand([5, 1], (Kind::Float, accelerator.device()));
        let mixed = (&real + (&fake - &real) * &mix).detach().set_requires_grad(true);
        let distance = critic.forward(&fake).unwrap().mean(Kind::Float)
            - critic.forward(&real).unwrap().mean(Kind::Float);
        let score = critic.forward(&mixed).unwrap().sum(Kind::Float);
        let create = BackwardOptions { create_graph: true, ..Default::default() };
        let options = GradOptions { backward: create, ..Default::default() };
        let slope = grad(&[&score], &[&mixed], options).unwrap().remove(0).unwrap();
        let norm = slope.square().sum_dim_intlist(1, false, None).sqrt();
        let penalty = (norm - 1.0).square().mean(Kind::Float);
        let mut parameters = critic.inner().parameters();
        for parameter in &mut parameters {
            brigade_torch::clear_gradient(&parameter.tensor).unwrap();
        }
        accelerator.backward(&(&distance + &penalty * 10.0)).unwrap();
        let found = gradient(&parameters[0].tensor).unwrap().unwrap();

        let apart = (fake.mean_dim(0, false, None) - real.mean_dim(0, false, None)).reshape([1, 4]);
        let apart = accelerator.processes().reduce(&apart, brigade_torch::ReduceOp::Mean).unwrap();
        let length = weight.norm();
        let expected = apart + (&length - 1.0) * &weight / &length * 20.0;
        let difference = (found - expected).abs().max().double_value(&[]);
        assert!(difference < 1e-4, "step {step}: {difference}");
    }
}

dist_test!(world = 1, a_gradient_penalty_has_its_analytic_gradient, |_world: World| {
    gradient_penalty();
});
dist_test!(
    world = 2,
    a_gradient_penalty_has_its_analytic_gradient_on_two_ranks,
    |_world: World| {
        gradient_penalty();
    }
);

struct Deep {
    blocks: Sequential,
}

impl Deep {
    fn new(p: &ParamPath<'_>, recompute: bool) -> Self {
        let block = |p: ParamPath<'_>| {
            Sequential::new()
                .add(Linear::new(&p / 0, 4, 4))
                .add(BatchNorm1d::new(&p / 1, 4))
                .add_fn(Tensor::relu)
                .add(Dropout::new(&p / 2, 0.2))
        };
        let mut blocks = Sequential::new();
        for i in 0..3 {
            let part = Sequential::new().add(block(p / (2 * i))).add(block(p / (2 * i + 1)));
            blocks = if recompute { blocks.add(Recompute::new(part)) } else { blocks.add(part) };
        }
        Self { blocks }
    }
}

impl Module<&Tensor> for Deep {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> brigade_torch::Result<Tensor> {
        self.blocks.forward(input)
    }
}

/// Losses, gradients and buffers of some steps.
fn trained(accelerator: &Accelerator, recompute: bool, precision: Precision) -> Vec<Vec<u64>> {
    let own =
        Accelerator::builder().sharing(accelerator).mixed_precision(precision).build().unwrap();
    tch::manual_seed(5);
    let model = Model::new(|p: &ParamPath<'_>| Deep::new(p, recompute)).unwrap();
    let mut run: Run<Deep> = Run::new(&own, model, |model, input| {
        model.forward(input).unwrap().square().mean(Kind::Float)
    });
    let mut found = vec![run.go(&own, 0..4)];
    found.extend(gradients(&run.model));
    found.extend(run.bits().into_iter().map(|(_, bits)| bits));
    found.extend(run.model.inner().buffers().iter().map(|buffer| bits(&buffer.tensor)));
    found
}

fn recomputed_as_without() {
    // cuDNN's fastest gradients of weights have other last digits in every run.
    let accelerator = builder().deterministic(true).build().unwrap();
    for precision in [Precision::No, Precision::Bf16] {
        let plain = trained(&accelerator, false, precision);
        assert_eq!(plain, trained(&accelerator, true, precision), "{precision:?}");
    }
}

dist_test!(world = 1, seconds = 120, recomputed_parts_train_with_the_same_bits, |_world: World| {
    recomputed_as_without();
});
dist_test!(
    world = 2,
    seconds = 120,
    recomputed_parts_train_with_the_same_bits_on_two_ranks,
    |_world: World| {
        recomputed_as_without();
    }
);
