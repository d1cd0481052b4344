//! Layers that the ranks of a group divide: what cannot be divided, files, sums, and random numbers.

mod loading;

use std::sync::{Arc, Mutex};
use std::thread;

use brigade_nn::{
    Conv2d, Embedding, Init, LayerNorm, Linear, LinearOptions, Model, ModelBuilder, ModelError,
    Module, ParamPath, PreActivation, StateDict, TensorParallel, TensorRegion,
};
use brigade_rank_env::StoreHost;
use brigade_sharding::{Heads, TensorPlan};
use brigade_testkit::{World, assert_close, dist_test};
use brigade_torch::{
    Activation, Backend, Error, GlooDevice, GroupOptions, ProcessGroup, Store, TcpStore, backward,
    gradient, inherited_socket,
};
use tch::{Device, Kind, Tensor};

fn on_ranks(ranks: usize, body: impl Fn(ProcessGroup) + Sync) {
    let store = Store::hash().unwrap();
    thread::scope(|scope| {
        for rank in 0..ranks {
            let (store, body) = (store.clone(), &body);
            scope.spawn(move || body(group(&store, rank, ranks)));
        }
    });
}

fn group(store: &Store, rank: usize, ranks: usize) -> ProcessGroup {
    let gloo = Backend::Gloo(GlooDevice::Address("127.0.0.1".into()));
    ProcessGroup::new(store, rank, ranks, gloo, GroupOptions::default()).unwrap()
}

fn builder(group: Option<&ProcessGroup>, plan: TensorPlan) -> ModelBuilder {
    let tensor = TensorParallel { group: group.cloned(), plan };
    Model::builder().kind(Kind::Double).without_first_values().tensor_parallel(tensor)
}

/// The problems of a model that cannot be built.
fn problems<M>(
    group: Option<&ProcessGroup>,
    plan: TensorPlan,
    new: impl FnOnce(&ParamPath<'_>) -> M,
) -> Vec<String> {
    let error = builder(group, plan).build(new).map(drop).unwrap_err();
    let Some(ModelError::Build { problems }) = error.downcast_ref() else { panic!("{error}") };
    problems.clone()
}

#[track_caller]
fn assert_problems(found: &[String], expected: &[&str]) {
    assert_eq!(found.len(), expected.len(), "{found:#?}");
    for (found, expected) in found.iter().zip(expected) {
        assert!(found.contains(expected), "{found}\nhas not\n{expected}");
    }
}

/// Distinct numbers between -1 and 1.
fn wave(shape: &[i64], phase: f64) -> Tensor {
    let count = shape.iter().product::<i64>();
    ((Tensor::arange(count, (Kind::Double, Device::Cpu)) * 0.7 + phase).sin()).view(shape)
}

/// The piece of a rank, of a size that differs by one from others where ranks do not divide it.
fn piece(whole: &Tensor, dim: i64, group: &ProcessGroup) -> Tensor {
    whole.tensor_split(group.size() as i64, dim)[group.rank()].contiguous()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().reshape([-1])).unwrap()
}

#[track_caller]
fn same(found: &Tensor, expected: &Tensor) {
    assert_eq!(found.size(), expected.size());
    assert_close(&values(found), &values(expected), 1e-13, 1e-14);
}

#[test]
fn sizes_that_ranks_do_not_divide_are_all_named_with_the_nearest() {
    let plan = TensorPlan::new()
        .column("up.weight")
        .row("down.weight")
        .heads("qkv.weight", Heads::fused(3))
        .heads("grouped.weight", Heads::grouped(4, 2))
        .column("small.weight")
        .vocabulary("table.weight");
    on_ranks(4, |group| {
        let found = problems(Some(&group), plan.clone(), |path| {
            Linear::new(path / "up", 6, 10);
            Linear::new(path / "down", 10, 6);
            Linear::new(path / "qkv", 6, 18);
            Linear::new(path / "grouped", 6, 40);
            Linear::new(path / "small", 6, 3);
            Embedding::new(path / "table", 3, 2);
        });
        let ranks = "4 tensor ranks do not divide";
        assert_problems(
            &found,
            &[
                &format!("`up.weight`: {ranks} 10 (shape [10, 6], dimension 0): take 8 or 12,"),
                &format!("`down.weight`: {ranks} 10 (shape [6, 10], dimension 1): take 8 or 12,"),
                &format!("`qkv.weight`: {ranks} 18 (shape [18, 6], dimension 0): take 12 or 24,"),
                &format!("`grouped.weight`: {ranks} 40 (shape [40, 6], dimension 0): take 32 or"),
                &format!("`small.weight`: {ranks} 3 (shape [3, 6], dimension 0): take 4, or"),
                "`table.weight`: a vocabulary of 3 entries leaves some of 4 tensor ranks",
            ],
        );
    });
}

#[test]
fn a_pattern_that_matches_nothing_is_an_error_on_any_number_of_ranks() {
    let plan = TensorPlan::new().column("up.weight").row("h.*.down.weight").vocabulary("count");
    let check = |group: Option<&ProcessGroup>| {
        let found = problems(group, plan.clone(), |path| {
            let _ = path.buffer("count", &Tensor::zeros([8], (Kind::Float, Device::Cpu)));
            Linear::new(path / "up", 6, 8);
        });
        assert_problems(
            &found,
            &["`h.*.down.weight` and `count` match no parameter; the model has up.weight, up.bias"],
        );
        let built = builder(group, plan.clone().optional()).build(|path: &ParamPath<'_>| {
            Linear::new(path / "up", 6, 8);
        });
        let size = built.unwrap().tensor("up.weight").unwrap().size();
        assert_eq!(size, [8 / group.map_or(1, ProcessGroup::size) as i64, 6]);
    };
    check(None);
    for ranks in [1, 2] {
        on_ranks(ranks, |group| check(Some(&group)));
    }
}

#[test]
fn parameters_that_are_read_whole_cannot_be_divided() {
    let plan = TensorPlan::new()
        .column("conv.weight")
        .row("norm.*")
        .vocabulary("scale")
        .column("adopted.weight")
        .column("table.weight");
    on_ranks(2, |group| {
        let found = problems(Some(&group), plan.clone(), |path| {
            Conv2d::new(path / "conv", 2, 4, [3, 3], Default::default());
            LayerNorm::new(path / "norm", &[4]);
            let _ = path.parameter("scale", &[4], Init::Ones);
            let theirs = Tensor::ones([4, 4], tch::kind::FLOAT_CPU).set_requires_grad(true);
            path.adopt_parameter("adopted.weight", &theirs);
            Embedding::new(path / "table", 8, 4);
        });
        assert_problems(
            &found,
            &[
                "conv.weight: the tensor plan divides it (column), and the module reads it whole",
                "norm.weight: the tensor plan divides it (row), and the module reads it whole",
                "norm.bias: the tensor plan divides it (row), and the module reads it whole",
                "scale: the tensor plan divides it (vocabulary), and the module reads it whole",
                "adopted.weight: the tensor plan divides it, and something else made it",
                "table: an embedding is divided by its vocabulary, but the tensor plan has column",
            ],
        );
    });
}

#[test]
fn replicated_paths_and_patterns_are_whole() {
    let plan = TensorPlan::new().column("*.weight").replicated("kept.weight");
    on_ranks(2, |group| {
        let model = builder(Some(&group), plan.clone()).build(|path: &ParamPath<'_>| {
            let whole = path.replicated() / "shared";
            assert_eq!((whole.tensor_ranks(), path.tensor_ranks()), (2, 2));
            let _ = whole.join("own").parameter("weight", &[5], Init::Ones);
            [
                Linear::new(path / "up", 3, 4),
                Linear::new(&whole / "keys", 3, 5),
                Linear::new(path / "kept", 3, 5),
            ]
        });
        let model = model.unwrap();
        assert_eq!(
            model.module().each_ref().map(|it| it.divided().is_some()),
            [true, false, false]
        );
        let divided = model.divided_parameters();
        let names: Vec<&str> = divided.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(names, ["up.weight", "up.bias"]);
        for (name, own, whole) in [
            ("up.weight", vec![2, 3], vec![4, 3]),
            ("up.bias", vec![2], vec![4]),
            ("shared.own.weight", vec![5], vec![5]),
            ("shared.keys.weight", vec![5, 3], vec![5, 3]),
            ("shared.keys.bias", vec![5], vec![5]),
            ("kept.weight", vec![5, 3], vec![5, 3]),
        ] {
            assert_eq!(model.tensor(name).unwrap().size(), own, "{name}");
            assert_eq!(model.whole_size(name), Some(whole), "{name}");
        }
    });
}

#[test]
fn further_names_of_divided_parameters_have_the_same_part() {
    let new = |path: &ParamPath<'_>| {
        let table = Embedding::new(path / "table", 7, 3);
        let _ = (path / "head").tie("weight", table.weight());
        path.adopt_parameter("again.weight", table.weight());
    };
    on_ranks(2, |group| {
        let plan = TensorPlan::new().vocabulary("table.weight").vocabulary("head.weight");
        let model = filled(builder(Some(&group), plan).build(new).unwrap());
        let whole = model.whole_state_dict().unwrap();
        assert_eq!((model.divided_parameters().len(), whole.len()), (1, 3));
        for (name, tensor) in whole.iter() {
            assert_eq!(model.whole_size(name), Some(vec![7, 3]), "{name}");
            assert_eq!(tensor, &wave(&[7, 3], 0.0), "{name}");
        }
        // The first name decides.
        let found = problems(Some(&group), TensorPlan::new().vocabulary("head.weight"), new);
        assert_problems(
            &found,
            &[
                "head.weight: the tensor plan divides it (vocabulary), and it is tied to `table.weight`",
            ],
        );
    });
}

type Forward = fn(&Linear, &Tensor) -> brigade_torch::Result<Tensor>;

/// Output and gradients of the input, the weight and the bias, for a loss whose gradient is `weights`.
fn computed(layer: &Linear, forward: Forward, input: &Tensor, weights: &Tensor) -> Vec<Tensor> {
    let input = input.detach().set_requires_grad(true);
    let output = forward(layer, &input).unwrap();
    backward(&(&output * weights).sum(Kind::Double)).unwrap();
    let inputs = [Some(&input), Some(layer.weight()), layer.bias()].into_iter().flatten();
    let gradients = inputs.map(|tensor| gradient(tensor).unwrap().unwrap());
    [output.detach()].into_iter().chain(gradients).collect()
}

const FORWARDS: [Forward; 6] = [
    |layer, input| layer.forward(input),
    |layer, input| layer.forward_gelu(input, "tanh"),
    |layer, input| layer.forward_gelu(input, "none"),
    // As the forward, for an input that has entered.
    |layer, input| match layer.divided() {
        Some(divided) => layer.forward_entered(&divided.region.enter(input)?),
        None => layer.forward_entered(input),
    },
    |layer, input| {
        layer.forward_activated(&PreActivation::new(input.shallow_clone()), Activation::Silu)
    },
    |layer, input| {
        let (gate, up) = (input.shallow_clone(), input * 0.5 + 1.0);
        let [gate, up] = [gate, up].map(PreActivation::new);
        layer.forward_gated(&gate, &up, Activation::Silu)
    },
];

/// The state of an undivided model of these names and shapes.
fn whole_state<M>(model: &Model<M>) -> StateDict {
    let mut state = StateDict::new();
    let own = model.state_dict();
    for name in own.names() {
        // Tied weights are one tensor.
        let first = model.parameter_name(name).unwrap();
        let place = own.names().position(|known| known == first).unwrap();
        state.insert(name, wave(&model.whole_size(name).unwrap(), place as f64)).unwrap();
    }
    state
}

fn filled<M>(mut model: Model<M>) -> Model<M> {
    let state = whole_state(&model);
    model.load_state_dict(&state).unwrap();
    model
}

fn linear(bias: bool) -> impl Fn(&ParamPath<'_>) -> Linear {
    move |path| Linear::with_options(path, 8, 12, LinearOptions { bias })
}

/// An undivided layer and one of which this rank has a part, with the same values.
fn linears(group: &ProcessGroup, plan: TensorPlan, bias: bool) -> [Model<Linear>; 2] {
    let whole = Model::builder().kind(Kind::Double).build(linear(bias));
    let divided = builder(Some(group), plan).build(linear(bias));
    [whole, divided].map(|built| filled(built.unwrap()))
}

#[test]
fn row_layers_add_up_and_have_the_bias_once() {
    on_ranks(2, |group| {
        let (input, weights) = (wave(&[5, 8], 0.3), wave(&[5, 12], 0.4));
        for (forward, bias) in FORWARDS.into_iter().flat_map(|it| [(it, true), (it, false)]) {
            let [whole, divided] = linears(&group, TensorPlan::new().row("weight"), bias);
            let expected = computed(whole.module(), forward, &input, &weights);
            // The input of a row layer is divided already, so it must not be divided again.
            let forward: Forward = match divided.module().divided() {
                Some(_) if std::ptr::fn_addr_eq(forward, FORWARDS[3]) => Linear::forward_entered,
                _ => forward,
            };
            let found = computed(divided.module(), forward, &piece(&input, -1, &group), &weights);
            assert_eq!(found.len(), 3 + usize::from(bias));
            same(&found[0], &expected[0]);
            same(&found[1], &piece(&expected[1], -1, &group));
            same(&found[2], &piece(&expected[2], 1, &group));
            if bias {
                same(&found[3], &expected[3]);
            }
        }
    });
}

#[test]
fn column_layers_have_their_outputs_and_whole_gradients_of_the_input() {
    on_ranks(2, |group| {
        let (input, weights) = (wave(&[5, 8], 0.3), wave(&[5, 12], 0.4));
        for (forward, bias) in FORWARDS.into_iter().flat_map(|it| [(it, true), (it, false)]) {
            let [whole, divided] = linears(&group, TensorPlan::new().column("weight"), bias);
            let expected = computed(whole.module(), forward, &input, &weights);
            let weights = piece(&weights, -1, &group);
            let found = computed(divided.module(), forward, &input, &weights);
            assert_eq!(found.len(), 3 + usize::from(bias));
            same(&found[0], &piece(&expected[0], -1, &group));
            same(&found[1], &expected[1]);
            for (found, expected) in found[2..].iter().zip(&expected[2..]) {
                same(found, &piece(expected, 0, &group));
            }
        }
    });
}

#[test]
fn layers_with_the_same_input_enter_once() {
    on_ranks(3, |group| {
        let [whole, divided] = linears(&group, TensorPlan::new().column("weight"), true);
        let (input, weights) = (wave(&[5, 8], 0.3), wave(&[5, 12], 0.4));
        let twice = |layer: &Linear, region: &TensorRegion, weights: &Tensor| {
            let input = input.copy().set_requires_grad(true);
            let entered = region.enter(&input).unwrap();
            let outputs = [0, 1].map(|_| layer.forward_entered(&entered).unwrap());
            backward(&(&outputs[0] * &outputs[1] * weights).sum(Kind::Double)).unwrap();
            gradient(&input).unwrap().unwrap()
        };
        let expected = twice(whole.module(), &TensorRegion::default(), &weights);
        let region = TensorRegion::new(group.clone());
        let found = twice(divided.module(), &region, &piece(&weights, -1, &group));
        same(&found, &expected);
        // Without the edge a rank has only its summand.
        let own = twice(divided.module(), &TensorRegion::default(), &piece(&weights, -1, &group));
        assert!(!own.allclose(&expected, 1e-3, 1e-3, false));
    });
}

#[test]
fn hooks_see_and_change_the_output_once() {
    on_ranks(2, |group| {
        for (plan, is_row) in
            [(TensorPlan::new().row("weight"), true), (TensorPlan::new().column("weight"), false)]
        {
            let [whole, mut divided] = linears(&group, plan, true);
            let input = wave(&[5, 8], 0.3);
            let expected = tch::no_grad(|| whole.forward(&input)).unwrap();
            let (input, expected) = if is_row {
                (piece(&input, -1, &group), expected)
            } else {
                (input, piece(&expected, -1, &group))
            };
            let seen = Arc::new(Mutex::new(Vec::new()));
            let log = Arc::clone(&seen);
            let hook = divided.forward_hook("", move |_, output| {
                log.lock().unwrap().push(output.copy());
                Some(output * 3.0)
            });
            let found = tch::no_grad(|| divided.forward(&input)).unwrap();
            let seen = seen.lock().unwrap();
            assert_eq!(seen.len(), 1);
            same(&seen[0], &expected);
            same(&found, &(expected * 3.0));
            drop(hook);
        }
    });
}

#[test]
fn an_input_of_another_width_names_the_layer() {
    on_ranks(2, |group| {
        let model = builder(Some(&group), TensorPlan::new().row("down.weight"))
            .build(|path: &ParamPath<'_>| Linear::new(path / "down", 8, 4));
        // The whole input, of which a rank takes its part.
        let error = model.unwrap().forward(&wave(&[5, 8], 0.0)).unwrap_err().to_string();
        assert!(error.contains("down") && error.contains("[5, 8]"), "{error}");
    });
}

fn joined(world: &World) -> ProcessGroup {
    let store = match world.store.host {
        StoreHost::Rank0Fd(fd) => {
            TcpStore::server_on_socket(inherited_socket(fd).unwrap()).unwrap()
        }
        _ => TcpStore::client(&world.store.addr, world.store.port),
    };
    group(&store.open().unwrap(), world.rank.as_usize(), world.world_size.as_usize())
}

dist_test!(world = 3, dist_random_numbers_inside_of_divided_layers, |world: World| {
    let group = joined(&world);
    let region = TensorRegion::new(group.clone());
    let draw = || Tensor::rand([8], (Kind::Double, Device::Cpu));
    // Numbers of a region that fails, of two others, and of what is between and behind them, of all ranks.
    let run = |seed: i64| -> Vec<Vec<Vec<f64>>> {
        tch::manual_seed(seed);
        let failed: brigade_torch::Result<()> = region.with_own_random_numbers(Device::Cpu, || {
            let _ = draw();
            Err(Error::custom("the body's own"))
        });
        assert_eq!(failed.unwrap_err().to_string(), "the body's own");
        let own = || region.with_own_random_numbers(Device::Cpu, || Ok(draw())).unwrap();
        let drawn = [own(), draw(), own(), draw()];
        let of_all = drawn.map(|own| group.all_gather(&own).unwrap());
        of_all.iter().map(|ranks| ranks.iter().map(values).collect()).collect()
    };
    let first = run(5);
    for (place, ranks) in first.iter().enumerate() {
        let is_own = place % 2 == 0;
        for (left, right) in [(0, 1), (0, 2), (1, 2)] {
            assert_eq!(ranks[left] != ranks[right], is_own, "{place}: {ranks:?}");
        }
    }
    let of_rank_0: Vec<_> = first.iter().map(|ranks| &ranks[0]).collect();
    for (place, numbers) in of_rank_0.iter().enumerate() {
        assert!(!of_rank_0[..place].contains(numbers), "{of_rank_0:?}");
    }
    assert_eq!(run(5), first);
    assert_ne!(run(6), first);
    // Rank 0 serves the store until all are done.
    group.barrier().unwrap();
});

#[test]
fn a_region_of_one_rank_draws_as_without_it() {
    let region = TensorRegion::default();
    tch::manual_seed(5);
    let expected = Tensor::rand([8], (Kind::Double, Device::Cpu));
    tch::manual_seed(5);
    let draw = || Ok(Tensor::rand([8], (Kind::Double, Device::Cpu)));
    assert_eq!(region.with_own_random_numbers(Device::Cpu, draw).unwrap(), expected);
}
