//! Copies of weights in 16 bits: whatever writes to a weight, the next product takes its new values.

use brigade_test_device::{assert_same, fake, gpu, kernels, numeric_device};
use brigade_torch::{
    Autocast, CrossEntropyOptions, DeviceNumbers, Graph, ProfilerOptions, Recording,
    clear_gradient, convolution2d, emulated_kind, from_vec, fused, gelu_linear, linear,
    linear_cross_entropy, recomputed, set_data, tied_embedding,
};
use tch::nn::OptimizerConfig;
use tch::{Device, Kind, Tensor, nn};

/// Together more elements than a step's loop takes at once, and than one thread takes.
const ROWS: i64 = 129;
const WIDTH: i64 = 160;
const HOST: DeviceNumbers<'_> =
    DeviceNumbers { lr: None, steps: None, grad_scale: None, found_inf: None };
const ADAMW: fused::AdamStep = fused::AdamStep {
    lr: 0.1,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.01,
    amsgrad: false,
    maximize: false,
    decoupled: true,
};
const SGD: fused::SgdStep = fused::SgdStep {
    lr: 0.5,
    momentum: 0.9,
    dampening: 0.0,
    weight_decay: 0.0,
    decoupled: false,
    nesterov: false,
    maximize: false,
    first: false,
};

fn random(shape: &[i64]) -> Tensor {
    Tensor::randn(shape, (Kind::Float, numeric_device()))
}

fn weight() -> Tensor {
    random(&[ROWS, WIDTH]).set_requires_grad(true)
}

/// Returns outputs of products with the weight, and its gradient: of a layer, of one with a transposed weight, of one
/// with an activation, of a convolution, and of a head with its loss.
fn products(weight: &Tensor, kind: Kind) -> Vec<Tensor> {
    let device = weight.device();
    tch::manual_seed(8);
    let options = (Kind::Float, device);
    let (wide, narrow) = (Tensor::randn([7, WIDTH], options), Tensor::randn([7, ROWS], options));
    let targets = Tensor::randint(ROWS, [7], (Kind::Int64, device));
    let images = Tensor::randn([2, WIDTH / 4, 3, 3], options);
    let kernel = weight.view([ROWS, WIDTH / 4, 2, 2]);
    clear_gradient(weight).unwrap();
    let (mut results, loss) = {
        let _scope = Autocast::enter(device, kind, true).unwrap();
        let outputs = [
            linear(&wide, weight, None).unwrap(),
            linear(&narrow, &weight.tr(), None).unwrap(),
            gelu_linear(&wide, "tanh", weight, None).unwrap(),
            convolution2d(&images, &kernel, None, [1; 2], [1; 2], [1; 2], 1).unwrap(),
        ];
        let head = CrossEntropyOptions::default();
        let loss = linear_cross_entropy(&wide, weight, None, &targets, &head).unwrap().loss;
        let sum = outputs.iter().fold(loss, |sum, output| sum + output.sum(Kind::Float));
        (Vec::from(outputs.map(|output| output.detach())), sum)
    };
    if weight.requires_grad() {
        loss.backward();
        results.push(weight.grad());
    }
    results.push(loss.detach());
    results
}

/// Asserts that products take the values that the weight has now: those of another tensor with the same values.
#[track_caller]
fn assert_current(weight: &Tensor, what: &str) {
    for kind in [Kind::BFloat16, Kind::Half] {
        let fresh = weight.detach().copy().set_requires_grad(weight.requires_grad());
        let (found, expected) = (products(weight, kind), products(&fresh, kind));
        assert_eq!(found.len(), expected.len());
        for (found, expected) in found.iter().zip(&expected) {
            assert_same(found, expected, &format!("{what}, {kind:?}"));
        }
    }
}

#[test]
fn sixteen_bits_of_a_weight_follow_whatever_writes_to_it() {
    tch::manual_seed(3);
    let weight = weight();
    let mut alias = weight.data();
    let detached = weight.detach();
    let view = weight.data().view([-1]).narrow(0, 5, 3);
    let writers: [(&str, &dyn Fn()); 9] = [
        ("nothing", &|| {}),
        ("in place", &|| tch::no_grad(|| drop(weight.shallow_clone().g_add_scalar_(0.5)))),
        ("copy_", &|| tch::no_grad(|| weight.shallow_clone().copy_(&random(&[ROWS, WIDTH])))),
        ("data", &|| drop(weight.data().g_add_scalar_(0.5))),
        ("an older alias by data", &|| drop(alias.shallow_clone().g_mul_scalar_(-1.0))),
        ("detach", &|| drop(detached.shallow_clone().g_add_scalar_(0.25))),
        ("part of a view", &|| drop(view.shallow_clone().fill_(9.0))),
        ("set_data", &|| set_data(&weight, &random(&[ROWS, WIDTH])).unwrap()),
        ("an alias of the memory before", &|| drop(alias.shallow_clone().g_add_scalar_(1.0))),
    ];
    for (what, write) in writers {
        assert_current(&weight, "before");
        write();
        assert_current(&weight, what);
    }
    // A write between the forward and the next, of a tensor that is used as a weight itself.
    set_data(&weight, &alias).unwrap();
    alias = alias.set_requires_grad(true);
    assert_current(&weight, "one of two tensors with one memory");
    assert_current(&alias, "the other");
    let _ = alias.data().g_add_scalar_(1.0);
    assert_current(&alias, "the other after a write");
    assert_current(&weight, "the first after the other was used");
}

#[test]
fn sixteen_bits_of_a_weight_follow_the_steps_of_optimizers() {
    tch::manual_seed(3);
    let weight = weight();
    let gradient = random(&[ROWS, WIDTH]);
    let [mean, square, buffer] = [(); 3].map(|()| weight.detach().zeros_like());
    let count = Tensor::ones([], (Kind::Float, numeric_device()));
    let lists = (&[&weight][..], &[&gradient][..]);
    for round in 0..3 {
        assert_current(&weight, "before");
        let (p, g) = lists;
        fused::adam(p, g, &[&mean], &[&square], &[], &[&count], &ADAMW, &HOST).unwrap();
        assert_current(&weight, &format!("AdamW, {round}"));
        fused::sgd(p, g, &[&buffer], &SGD, &HOST).unwrap();
        assert_current(&weight, &format!("SGD, {round}"));
    }
    // libtorch's own writes through `data()`.
    let store = nn::VarStore::new(numeric_device());
    let own = store.root().randn("weight", &[ROWS, WIDTH], 0.0, 1.0);
    let mut optimizer = nn::Sgd::default().build(&store, 0.5).unwrap();
    for _ in 0..2 {
        assert_current(&own, "before");
        clear_gradient(&own).unwrap();
        own.square().sum(Kind::Float).backward();
        optimizer.step();
        assert_current(&own, "tch's SGD");
    }
}

#[test]
fn sixteen_bits_of_weights_in_other_forms_are_right() {
    tch::manual_seed(3);
    let all = random(&[3 * ROWS, WIDTH]);
    // Frozen; a part of a larger tensor; memory that is not libtorch's; one that is computed.
    assert_current(&random(&[ROWS, WIDTH]), "frozen");
    assert_current(&all.narrow(0, ROWS, ROWS).set_requires_grad(true), "a part");
    let values = (0..ROWS * WIDTH).map(|it| it as f32 * 1e-3).collect();
    let foreign = from_vec::<f32>(values, &[ROWS, WIDTH]).unwrap().to_device(numeric_device());
    assert_current(&foreign, "memory of the program");
    let base = random(&[ROWS, WIDTH]).set_requires_grad(true);
    let _scope = Autocast::enter(numeric_device(), Kind::BFloat16, true).unwrap();
    let input = random(&[4, WIDTH]);
    for factor in [1.0, 2.0] {
        let found = linear(&input, &(&base * factor), None).unwrap();
        let expected = linear(&input, &(&base * factor).detach().copy(), None).unwrap();
        assert_same(&found.detach(), &expected, "a weight that is computed");
    }
}

/// The copy of a tied weight is that of its alias, too.
#[test]
fn sixteen_bits_of_a_tied_weight_have_the_gradient_of_separate_uses() {
    tch::manual_seed(3);
    let weight = weight();
    let ids = Tensor::randint(ROWS, [20], (Kind::Int64, numeric_device()));
    let gradient = |tied: bool| {
        clear_gradient(&weight).unwrap();
        let _scope = Autocast::enter(numeric_device(), Kind::BFloat16, true).unwrap();
        let (rows, head) = if tied {
            tied_embedding(&weight, &ids, None).unwrap()
        } else {
            (Tensor::embedding(&weight, &ids, -1, false, false), weight.shallow_clone())
        };
        let options = CrossEntropyOptions::default();
        let loss = linear_cross_entropy(&rows, &head, None, &ids, &options).unwrap().loss;
        loss.backward();
        weight.grad()
    };
    assert_same(&gradient(true), &gradient(false), "gradient");
}

/// Returns the number of conversions and copies.
fn conversions(account: &fake::Account) -> u64 {
    account.0.get("aten::copy_").map_or(0, |it| it.calls)
}

#[test]
fn sixteen_bits_of_a_weight_are_cast_once_for_many_uses_on_a_gpu() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    tch::manual_seed(3);
    let options = (Kind::Float, device);
    let weight = Tensor::randn([ROWS, WIDTH], options).set_requires_grad(true);
    let input = Tensor::randn([4, WIDTH], options).to_kind(Kind::BFloat16);
    // One scope for each use, as for each batch of an accumulation or each token of a text.
    let forward = || {
        let _scope = Autocast::enter(device, Kind::BFloat16, true).unwrap();
        drop(tch::no_grad(|| linear(&input, &weight, None).unwrap()));
    };
    let count = |run: &dyn Fn()| conversions(&fake::account(run));
    assert_eq!(count(&forward), 1, "the first use casts");
    assert_eq!(count(&forward), 0, "the next does not");
    tch::no_grad(|| drop(weight.shallow_clone().g_add_scalar_(1.0)));
    assert_eq!(count(&forward), 1, "after a write");
    assert_eq!(count(&forward), 0, "once");
    let without_cache = || {
        let _scope = Autocast::enter(device, Kind::BFloat16, false).unwrap();
        drop(tch::no_grad(|| linear(&input, &weight, None).unwrap()));
    };
    assert_eq!(count(&without_cache), 1, "without a cache each use casts");
    // The product writes the gradient in float32.
    let backward = || {
        let output = {
            let _scope = Autocast::enter(device, Kind::BFloat16, true).unwrap();
            linear(&input, &weight, None).unwrap()
        };
        output.backward_from_ones();
    };
    assert_eq!(count(&backward), 0, "forward and backward");
}

/// Sums in float32 of a product that is rounded to 16 bits differ from those that are not.
#[test]
fn gradients_of_parts_of_a_buffer_are_not_rounded_to_16_bits_on_a_gpu() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    tch::manual_seed(3);
    let options = (Kind::Float, device);
    let part = Tensor::randn([3 * ROWS, WIDTH], options).narrow(0, ROWS, ROWS);
    let input = Tensor::randn([40, WIDTH], (Kind::BFloat16, device));
    let gradients = |weight: &Tensor| {
        ["", "none"].map(|approximate| {
            clear_gradient(weight).unwrap();
            let output = {
                let _scope = Autocast::enter(device, Kind::BFloat16, true).unwrap();
                if approximate.is_empty() {
                    linear(&input, weight, None).unwrap()
                } else {
                    gelu_linear(&input, approximate, weight, None).unwrap()
                }
            };
            output.square().sum(Kind::Float).backward();
            weight.grad()
        })
    };
    let whole = part.copy().set_requires_grad(true);
    let expected = gradients(&whole);
    let found = gradients(&part.detach().set_requires_grad(true));
    for (found, expected) in found.iter().zip(&expected) {
        assert_same(found, expected, "gradient");
        let rounded = found.to_kind(Kind::BFloat16).to_kind(Kind::Float);
        assert!(!rounded.equal(found), "the gradient is rounded");
    }
}

trait BackwardFromOnes {
    fn backward_from_ones(&self);
}

impl BackwardFromOnes for Tensor {
    fn backward_from_ones(&self) {
        let ones = self.ones_like();
        brigade_torch::backward_from(&[self], &[&ones], &[], Default::default()).unwrap();
    }
}

/// What a replay writes, no function of libtorch sees.
#[test]
fn sixteen_bits_of_a_weight_follow_a_recorded_step() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    tch::manual_seed(3);
    let weight = Tensor::randn([ROWS, WIDTH], (Kind::Float, device)).set_requires_grad(true);
    assert_current(&weight, "before");
    let step = || -> brigade_torch::Result<Tensor> {
        let _scope = Autocast::enter(device, Kind::BFloat16, true).unwrap();
        let input = Tensor::ones([1, WIDTH], (Kind::Float, device));
        let output = tch::no_grad(|| linear(&input, &weight, None).unwrap());
        tch::no_grad(|| drop(weight.shallow_clone().g_add_scalar_(0.5)));
        Ok(output)
    };
    let (mut graph, output) = Graph::record(device, None, step).unwrap();
    for replay in 0..3 {
        let before = weight.detach().copy();
        graph.replay().unwrap();
        let expected = before.to_kind(Kind::BFloat16).to_kind(Kind::Double).sum_dim_intlist(
            [1].as_slice(),
            false,
            Kind::Double,
        );
        let found = output.to_kind(Kind::Double).view([-1]);
        let apart = (&found - &expected).abs().max().double_value(&[]);
        // A unit in the last place of the largest sum in bfloat16, whose products are exact.
        let allowed = 2_f64.powi(-7) * expected.abs().max().double_value(&[]);
        assert!(apart <= allowed, "replay {replay}: {apart} > {allowed}");
        assert_current(&weight, &format!("replay {replay}"));
    }
}

/// The weights, moments and count of a step of AdamW, of a layer and of a head.
struct Trained {
    weights: [Tensor; 2],
    means: [Tensor; 2],
    squares: [Tensor; 2],
    count: Tensor,
}

impl Trained {
    fn new(given: [&Tensor; 2]) -> Self {
        let weights = given.map(|it| it.detach().copy().set_requires_grad(true));
        let [means, squares] = [(); 2].map(|()| given.map(|it| it.detach().zeros_like()));
        Self { weights, means, squares, count: given[0].sum(Kind::Float).zeros_like() }
    }

    /// Makes a step of two batches, the second with a part that is computed again.
    fn step(&self, input: &Tensor, targets: &Tensor) -> Tensor {
        let [layer, head] = &self.weights;
        self.weights.iter().for_each(|it| clear_gradient(it).unwrap());
        let mut sum = self.count.zeros_like();
        for recompute in [false, true] {
            let _scope = Autocast::enter(input.device(), Kind::BFloat16, true).unwrap();
            let hidden = if recompute {
                let own = layer.shallow_clone();
                recomputed(&[input], move |x| linear(&x[0], &own, None).unwrap()).unwrap()
            } else {
                linear(input, layer, None).unwrap()
            };
            let options = CrossEntropyOptions::default();
            let loss = linear_cross_entropy(&hidden, head, None, targets, &options).unwrap().loss;
            loss.backward();
            sum += loss.detach();
        }
        let gradients = self.weights.each_ref().map(|it| it.grad());
        let _ = self.count.shallow_clone().g_add_scalar_(1.0);
        let [p, g, m, v] = [&self.weights, &gradients, &self.means, &self.squares]
            .map(|it| it.iter().collect::<Vec<_>>());
        fused::adam(&p, &g, &m, &v, &[], &[&self.count; 2], &ADAMW, &HOST).unwrap();
        sum
    }
}

/// The kernel of a recorded step writes the copies in each replay, and what the host has written is cast before it.
#[test]
fn sixteen_bits_of_weights_are_written_by_the_replays_of_a_recorded_step() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    tch::manual_seed(3);
    let options = (Kind::Float, device);
    let given = [[ROWS, WIDTH], [50, ROWS]].map(|shape| Tensor::randn(shape, options));
    let loaded = given.each_ref().map(|it| it.randn_like());
    let input = Tensor::randn([4, WIDTH], (Kind::BFloat16, device)).set_requires_grad(true);
    let targets = Tensor::randint(50, [4], (Kind::Int64, device));
    let other = Tensor::randn([ROWS, WIDTH], options).set_requires_grad(true);
    let product = |weight: &Tensor, kind: Kind| {
        let _scope = Autocast::enter(device, kind, true).unwrap();
        let input = Tensor::ones([1, WIDTH], (kind, device));
        drop(tch::no_grad(|| linear(&input, weight, None).unwrap()));
    };
    let [own, expected] = [(); 2].map(|()| Trained::new(given.each_ref()));
    let write = |what: &str, trained: &Trained| {
        for (weight, loaded) in trained.weights.iter().zip(&loaded) {
            match what {
                "a checkpoint" => tch::no_grad(|| weight.shallow_clone().copy_(loaded)),
                "an average" => drop(weight.data().f_lerp_(loaded, 0.25).unwrap()),
                _ => {}
            }
        }
        if what == "another type" {
            product(&trained.weights[0], Kind::Half);
        }
    };
    kernels::emulated(|| {
        for trained in [&own, &expected] {
            let _ = trained.step(&input, &targets);
        }
        let usual = conversions(&fake::account(|| drop(expected.step(&input, &targets))));
        product(&other, Kind::BFloat16);
        // What is stale when the recording begins is cast before it.
        write("a checkpoint", &own);
        let mut recorded = None;
        let account = fake::account(|| {
            let body = || -> brigade_torch::Result<Tensor> { Ok(own.step(&input, &targets)) };
            recorded = Some(Graph::record(device, None, body).unwrap());
        });
        assert_eq!(conversions(&account), usual + 2, "casts of a recording\n{account}");
        let (mut graph, sum) = recorded.unwrap();
        // The moments are those of the first steps, and the recording has made none.
        for (own, expected) in [(&own.means, &expected.means), (&own.squares, &expected.squares)] {
            for (own, expected) in own.iter().zip(expected) {
                expected.shallow_clone().copy_(own);
            }
        }
        expected.count.shallow_clone().copy_(&own.count);
        write("a checkpoint", &expected);
        // Another type takes the place of the copy, so that the graph's own is cast for each replay.
        let rounds = [
            ("nothing", None),
            ("nothing", Some(0)),
            ("a checkpoint", Some(2)),
            ("nothing", Some(0)),
            ("an average", Some(2)),
            ("nothing", Some(0)),
            ("another type", Some(1)),
            ("nothing", Some(1)),
        ];
        for (round, (what, casts)) in rounds.into_iter().enumerate() {
            write(what, &own);
            write(what, &expected);
            let account = fake::account(|| graph.replay().unwrap());
            if let Some(casts) = casts {
                assert_eq!(conversions(&account), casts, "{what}, replay {round}\n{account}");
            }
            let loss = expected.step(&input, &targets);
            assert!(sum.equal(&loss), "{what}, replay {round}: {sum} {loss}");
            for (own, expected) in own.weights.iter().zip(&expected.weights) {
                assert_same(&own.detach(), &expected.detach(), &format!("{what}, {round}"));
            }
            let of_other = fake::account(|| product(&other, Kind::BFloat16));
            assert_eq!(conversions(&of_other), 0, "a weight that the step does not write");
        }
        for weight in &own.weights[..1] {
            assert_current(weight, "after the replays");
        }
    });
}

/// A weight that the host steps between two graphs is cast before the second.
#[test]
fn sixteen_bits_of_a_weight_follow_a_step_between_two_graphs() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    tch::manual_seed(3);
    let weight = Tensor::randn([ROWS, WIDTH], (Kind::Float, device)).set_requires_grad(true);
    let input = Tensor::randn([4, WIDTH], (Kind::BFloat16, device));
    let product = |weight: &Tensor| {
        let _scope = Autocast::enter(device, Kind::BFloat16, true).unwrap();
        tch::no_grad(|| linear(&input, weight, None))
    };
    let _ = product(&weight);
    let (mut first, before) = Graph::record(device, None, || product(&weight)).unwrap();
    let (mut second, after) = Graph::record(device, Some(&first), || product(&weight)).unwrap();
    for replay in 0..3 {
        first.replay().unwrap();
        assert!(before.equal(&product(&weight.detach().copy()).unwrap()), "replay {replay}");
        let _ = weight.data().g_add_scalar_(0.5);
        second.replay().unwrap();
        assert!(after.equal(&product(&weight.detach().copy()).unwrap()), "replay {replay}");
    }
}

#[test]
fn sixteen_bits_of_a_weight_are_freed_with_it() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    let Device::Cuda(index) = device else { panic!("{device:?}") };
    let allocated = || fake::memory(index).unwrap().allocated;
    let options = (Kind::Float, device);
    let input = Tensor::randn([4, WIDTH], options);
    let before = allocated();
    {
        let weight = Tensor::randn([ROWS, WIDTH], options).set_requires_grad(true);
        let own = allocated() - before;
        let _scope = Autocast::enter(device, Kind::BFloat16, true).unwrap();
        drop(tch::no_grad(|| linear(&input, &weight, None).unwrap()));
        let with_copy = allocated() - before;
        assert!(with_copy > own, "there is no copy: {with_copy} bytes, {own} before");
        let shallow = weight.detach();
        drop(weight);
        assert_eq!(allocated() - before, own, "only the values are left");
        drop(shallow);
    }
    assert_eq!(allocated(), before);
}

/// The CPU's step writes the copy beside the weight, so that no cast is left in training.
#[test]
fn sixteen_bits_of_a_weight_are_written_by_a_step_on_the_cpu() {
    if numeric_device() != Device::Cpu {
        return;
    }
    tch::manual_seed(3);
    let weight = weight();
    if emulated_kind(&weight.to_kind(Kind::BFloat16)).unwrap().is_some() {
        // This processor multiplies in float32.
        return;
    }
    let input = random(&[4, WIDTH]).to_kind(Kind::BFloat16);
    let gradient = random(&[ROWS, WIDTH]);
    let [mean, square] = [(); 2].map(|()| weight.detach().zeros_like());
    let count = Tensor::ones([], (Kind::Float, Device::Cpu));
    let casts = |run: &dyn Fn()| {
        let options = ProfilerOptions { shapes: true, ..Default::default() };
        let recording = Recording::start(options).unwrap();
        run();
        let events = recording.finish(None).unwrap();
        let shape = format!("[{ROWS}, {WIDTH}]");
        let is_cast = |name: &str| name == "aten::copy_" || name == "aten::_to_copy";
        events.iter().filter(|it| is_cast(&it.name) && it.shapes.contains(&shape)).count()
    };
    let forward = || {
        let _scope = Autocast::enter(Device::Cpu, Kind::BFloat16, true).unwrap();
        drop(tch::no_grad(|| linear(&input, &weight, None).unwrap()));
    };
    assert_ne!(casts(&forward), 0, "the first use casts");
    for _ in 0..2 {
        let (p, g) = (&[&weight][..], &[&gradient][..]);
        fused::adam(p, g, &[&mean], &[&square], &[], &[&count], &ADAMW, &HOST).unwrap();
        assert_eq!(casts(&forward), 0, "after a step");
        assert_current(&weight, "AdamW");
        // The comparison has made a copy in the other type.
        forward();
    }
}

/// The kernel of a GPU writes the copies beside the weights, so that no cast is left in training.
#[test]
fn sixteen_bits_of_a_weight_are_written_by_a_step_on_a_gpu() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    tch::manual_seed(3);
    let options = (Kind::Float, device);
    let weights = [ROWS, WIDTH].map(|rows| Tensor::randn([rows, WIDTH], options));
    // Without a product there is no copy.
    let [first, second] = weights.map(|it| it.set_requires_grad(true));
    let all = [first, second, Tensor::randn([WIDTH], options)];
    let gradients = all.each_ref().map(|it| it.detach().randn_like());
    let states = [(); 2].map(|()| all.each_ref().map(|it| it.detach().zeros_like()));
    let count = Tensor::ones([], options);
    let input = Tensor::randn([4, WIDTH], options);
    let targets = Tensor::randint(ROWS, [4], (Kind::Int64, device));
    let product = |weight: &Tensor, kind: Kind| {
        let _scope = Autocast::enter(device, kind, true).unwrap();
        tch::no_grad(|| linear(&input.to_kind(kind), weight, None).unwrap())
    };
    // The head's copy has rows of zeros behind its own.
    let loss = |weight: &Tensor, kind: Kind| {
        let _scope = Autocast::enter(device, kind, true).unwrap();
        let head = CrossEntropyOptions::default();
        linear_cross_entropy(&input.to_kind(kind), weight, None, &targets, &head).unwrap().loss
    };
    let casts = |run: &dyn Fn()| conversions(&fake::account(run));
    let lists = [&all, &gradients, &states[0], &states[1]].map(|it| it.iter().collect::<Vec<_>>());
    let counts = [&count; 3];
    let adam = |numbers: &DeviceNumbers<'_>| {
        let [p, g, m, v] = &lists;
        fused::adam(p, g, m, v, &[], &counts, &ADAMW, numbers).unwrap();
    };
    let sgd = || fused::sgd(&lists[0], &lists[1], &lists[2], &SGD, &HOST).unwrap();
    let skipped = Tensor::from(1f32).to_device(device);
    let skip = DeviceNumbers { found_inf: Some(&skipped), ..HOST };
    let steps: [(&str, &dyn Fn()); 3] =
        [("AdamW", &|| adam(&HOST)), ("SGD", &sgd), ("a skipped step", &|| adam(&skip))];
    // The kinds of the copies of both weights.
    for kinds in [[Kind::BFloat16; 2], [Kind::Half; 2], [Kind::BFloat16, Kind::Half]] {
        let uses = || {
            drop(loss(&all[0], kinds[0]));
            drop(product(&all[1], kinds[1]));
        };
        uses();
        // Those of the inputs.
        let usual = casts(&uses);
        for (what, step) in steps {
            kernels::emulated(step);
            assert_eq!(casts(&uses), usual, "{what}, {kinds:?}: a cast after the step");
            for (weight, kind) in all[..2].iter().zip(kinds) {
                let fresh = weight.detach().copy();
                assert!(product(weight, kind).equal(&product(&fresh, kind)), "{what}, {kind:?}");
            }
            let fresh = all[0].detach().copy();
            assert!(loss(&all[0], kinds[0]).equal(&loss(&fresh, kinds[0])), "{what}, {kinds:?}");
        }
        // A copy that is stale is not taken for the weight.
        tch::no_grad(|| drop(all[1].shallow_clone().g_add_scalar_(1.0)));
        kernels::emulated(|| adam(&HOST));
        assert_eq!(casts(&uses), usual + 1, "{kinds:?}: one weight is cast");
        let fresh = all[1].detach().copy();
        assert!(product(&all[1], kinds[1]).equal(&product(&fresh, kinds[1])), "{kinds:?}");
    }
}

/// Forwards and backwards of several batches between two steps, also with layers that are computed again.
#[test]
fn sixteen_bits_of_a_weight_are_not_cast_while_gradients_are_accumulated_on_a_gpu() {
    let (device, _alone) = gpu();
    if !fake::is_installed() {
        return;
    }
    tch::manual_seed(3);
    let options = (Kind::Float, device);
    let weight = Tensor::randn([ROWS, WIDTH], options).set_requires_grad(true);
    let [mean, square] = [(); 2].map(|()| weight.detach().zeros_like());
    let count = Tensor::ones([], options);
    let input = Tensor::randn([4, WIDTH], options).to_kind(Kind::BFloat16).set_requires_grad(true);
    for recompute in [false, true] {
        let batch = || {
            let output = {
                let _scope = Autocast::enter(device, Kind::BFloat16, true).unwrap();
                if recompute {
                    let own = weight.shallow_clone();
                    recomputed(&[&input], move |x| linear(&x[0], &own, None).unwrap()).unwrap()
                } else {
                    linear(&input, &weight, None).unwrap()
                }
            };
            output.backward_from_ones();
        };
        let casts = || conversions(&fake::account(batch));
        let step = || {
            let (p, g, m, v) = (&[&weight], &[&weight.grad()], &[&mean], &[&square]);
            fused::adam(p, g, m, v, &[], &[&count], &ADAMW, &HOST).unwrap();
        };
        batch();
        batch();
        // The weight's gradient becomes one in float32.
        let usual = casts();
        for batches in [1, 3] {
            kernels::emulated(step);
            clear_gradient(&weight).unwrap();
            for batch in 0..batches {
                assert_eq!(casts(), usual, "batch {batch} of {batches}, recompute {recompute}");
            }
        }
        tch::no_grad(|| drop(weight.shallow_clone().g_add_scalar_(1.0)));
        assert_eq!(casts(), usual + 1, "after a write, recompute {recompute}");
    }
}
