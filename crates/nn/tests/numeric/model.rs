//! Registration, freezing, moving, state dictionaries.

use brigade_nn::{
    BatchNorm2d, Conv2d, Conv2dOptions, Dropout, Embedding, EmbeddingOptions, Flatten, Init,
    Linear, MaxPool2d, Model, ModelError, Module, ParamPath, Relu, Sequential, StateDict,
};
use brigade_test_device::{numeric_device, on_device};
use tch::{Kind, Tensor};

use crate::device::build;

fn names(tensors: Vec<brigade_torch::NamedTensor>) -> Vec<String> {
    tensors.into_iter().map(|named| named.name).collect()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::<f64>::try_from(tensor.flatten(0, -1).to_kind(Kind::Double)).unwrap()
}

#[test]
fn every_problem_of_a_constructor_is_reported() {
    let error = build(|p: &ParamPath<'_>| {
        let p = p / "net";
        let _ = p.parameter("weight", &[2], Init::Zeros);
        let _ = p.buffer("weight", &Tensor::from(0i64));
        let _ = p.parameter("a.b", &[2], Init::Zeros);
        let _ = p.parameter("negative", &[2, -1], Init::Zeros);
        let _ = p.tie("tied", &Tensor::from(1f32));
        Conv2d::new(&p / "conv", 3, 4, [0, 3], Conv2dOptions { groups: 2, ..Default::default() });
        Dropout::new(&p / "drop", 1.5);
        Embedding::with_options(&p / "table", 3, 2, EmbeddingOptions { padding: Some(3) });
        Linear::new(&p / "", 1, 1);
    })
    .unwrap_err();
    let Some(ModelError::Build { problems }) = error.downcast_ref() else { panic!("{error}") };
    for expected in [
        "net.weight: this name is registered twice",
        "net: `a.b` is not a name",
        "net.negative: the shape [2, -1] has a negative size",
        "net.tied: ties a tensor that is not a parameter of this model",
        "net.conv: 2 groups do not divide 3 input and 4 output channels",
        "net.conv: kernel [0, 3]",
        "net.drop: the dropout probability 1.5 is not in [0, 1]",
        "net.table: padding row 3 is not among 3 rows",
        "`` is not a name",
    ] {
        assert!(problems.iter().any(|p| p.contains(expected)), "{expected} not in {problems:#?}");
    }
}

#[test]
fn only_floating_point_models_are_built() {
    let error = Model::builder().kind(Kind::Int64).build(|p| Linear::new(p, 1, 1)).unwrap_err();
    assert!(matches!(
        error.downcast_ref(),
        Some(ModelError::NotFloatingPoint { kind: Kind::Int64 })
    ));
    let mut model = build(|p| Linear::new(p, 1, 1)).unwrap();
    assert!(matches!(
        model.to_kind(Kind::Bool).unwrap_err().downcast_ref(),
        Some(ModelError::NotFloatingPoint { .. })
    ));
}

struct Tied {
    table: Embedding,
    head: Tensor,
}

fn tied() -> Model<Tied> {
    build(|p: &ParamPath<'_>| {
        let table = Embedding::new(p / "table", 5, 2);
        let _ = p.non_persistent_buffer("scratch", &Tensor::from(1i64));
        let head = (p / "head").tie("weight", table.weight());
        Tied { table, head }
    })
    .unwrap()
}

impl Module<(&Tensor, &Tensor)> for Tied {
    type Output = Tensor;

    fn forward(&self, (indices, scale): (&Tensor, &Tensor)) -> brigade_torch::Result<Tensor> {
        Ok((self.table.forward(indices)? * scale).linear(&self.head, None::<Tensor>))
    }
}

#[test]
fn shared_parameters_count_once_and_are_saved_twice() {
    let mut model = tied();
    assert_eq!(names(model.parameters()), ["table.weight"]);
    assert_eq!(names(model.buffers()), ["scratch"]);
    assert_eq!(model.num_parameters(), 10);
    assert_eq!(model.state_dict().names().collect::<Vec<_>>(), ["table.weight", "head.weight"]);
    assert_eq!(model.requires_grad_under("head", false).unwrap(), 1);
    assert!(model.trainable_parameters().is_empty());

    // One of the two names suffices.
    let mut state = StateDict::new();
    state.insert("head.weight", Tensor::ones([5, 2], (Kind::Float, model.device()))).unwrap();
    let report = model.load_state_dict(&state).unwrap();
    assert_eq!((report.loaded, report.is_complete()), (1, true));
    assert_eq!(values(model.module().table.weight()), [1.0; 10]);
    let error = model.load_state_dict(&StateDict::new()).unwrap_err();
    let Some(ModelError::Mismatch(report)) = error.downcast_ref() else { panic!("{error}") };
    assert_eq!(report.missing, ["table.weight", "head.weight"]);
}

#[test]
fn a_forward_takes_several_tensors() {
    let model = tied();
    let (indices, scale) = (on_device(&Tensor::from_slice(&[1i64, 2, 4])), Tensor::from(2f32));
    assert_eq!(model.forward((&indices, &scale)).unwrap().size(), [3, 5]);
}

#[test]
fn a_model_without_parameters_works() {
    let model = build(|p| Dropout::new(p, 0.0)).unwrap();
    assert_eq!(model.num_parameters(), 0);
    assert!(model.state_dict().is_empty());
    let input = on_device(&Tensor::from_slice(&[1f32]));
    assert_eq!(model.forward(&input).unwrap(), input);
}

#[test]
fn a_model_can_be_sent_to_another_thread() {
    let model = build(|p| Linear::new(p, 3, 10)).unwrap();
    let size = std::thread::spawn(move || {
        let input = Tensor::zeros([2, 3], (Kind::Float, model.device()));
        model.forward(&input).unwrap().size()
    });
    assert_eq!(size.join().unwrap(), [2, 10]);
}

#[test]
fn freezing_follows_whole_names() {
    let mut model = build(|p: &ParamPath<'_>| {
        for index in [1, 10] {
            Linear::new(p / format!("block{index}"), 2, 2);
        }
    })
    .unwrap();
    assert_eq!(model.requires_grad_under("block1", false).unwrap(), 2);
    assert_eq!(names(model.trainable_parameters()), ["block10.weight", "block10.bias"]);
    assert_eq!(model.requires_grad_under("block10.bias", false).unwrap(), 1);
    let error = model.requires_grad_under("block", false).unwrap_err();
    assert_eq!(
        error.to_string(),
        "no parameter is called `block` or lies under it; the model has block1, block10"
    );
    model.requires_grad(true).unwrap();
    assert_eq!(model.trainable_parameters().len(), 4);
}

#[test]
fn changing_the_kind_keeps_the_tensors_that_others_hold() {
    let mut model = build(|p| BatchNorm2d::new(p, 3)).unwrap();
    let held = model.parameters().remove(0).tensor;
    let input = Tensor::randn([4, 3, 2, 2], (Kind::Float, model.device()));
    model.forward(&input).unwrap().sum(Kind::Float).backward();
    let gradient = values(&held.grad());

    model.to_kind(Kind::Double).unwrap();
    assert_eq!(
        (model.kind(), held.kind(), held.grad().kind()),
        (Kind::Double, Kind::Double, Kind::Double)
    );
    assert_eq!(values(&held.grad()), gradient);
    assert!(held.requires_grad());
    let kinds: Vec<_> = model.buffers().iter().map(|buffer| buffer.tensor.kind()).collect();
    assert_eq!(kinds, [Kind::Double, Kind::Double, Kind::Int64]);

    // The layer follows, and gradients are accumulated in the new kind.
    let output = model.forward(&input.to_kind(Kind::Double)).unwrap();
    assert_eq!(output.kind(), Kind::Double);
    output.sum(Kind::Double).backward();
    assert_eq!(held.grad().kind(), Kind::Double);
    model.zero_grad().unwrap();
    assert_eq!(values(&held.grad()), [0.0; 3]);
}

#[test]
fn training_is_one_switch_for_all_layers() {
    let mut model = build(|p: &ParamPath<'_>| {
        let norms = [0, 1].map(|index| BatchNorm2d::new(p / index, 3));
        let dropout = Dropout::new(p / 2, 0.5);
        norms.into_iter().fold(Sequential::new(), Sequential::add).add(dropout)
    })
    .unwrap();
    assert!(model.is_training());
    let images = Tensor::randn([4, 3, 6, 6], (Kind::Float, model.device()));
    let counter = || model.buffers()[2].tensor.int64_value(&[]);
    let _ = model.forward(&images).unwrap();
    assert_eq!(counter(), 1);
    let before = values(&model.buffers()[0].tensor);
    model.eval();
    assert!(!model.is_training());
    let first = model.forward(&images).unwrap();
    assert_eq!(model.forward(&images).unwrap(), first);
    assert_eq!(values(&model.buffers()[0].tensor), before);
}

#[test]
fn a_strict_load_changes_nothing_unless_all_fits() {
    let mut model = build(|p| Linear::new(p, 2, 3)).unwrap();
    let before = model.state_dict().deep_clone().unwrap();
    let mut state = StateDict::new();
    state.insert("weight", Tensor::ones([3, 2], (Kind::Double, model.device()))).unwrap();
    state.insert("bias", Tensor::ones([4], (Kind::Float, model.device()))).unwrap();
    state.insert("head", Tensor::from(1f32)).unwrap();
    let error = model.load_state_dict(&state).unwrap_err();
    assert_eq!(
        error.to_string(),
        "the weights do not fit the model, and nothing was changed: 1 tensor fits; unexpected in the \
         weights: head; different in shape: bias ([3] in the model, [4] in the weights)"
    );
    for ((_, now), (_, then)) in model.state_dict().iter().zip(before.iter()) {
        assert_eq!(values(now), values(then));
    }

    // Tensors that fit are loaded, converted to the model's kind.
    let report = model.load_matching(&state).unwrap();
    assert_eq!((report.loaded, report.unexpected.len(), report.mismatched.len()), (1, 1, 1));
    let weight = model.parameters().remove(0).tensor;
    assert_eq!((weight.kind(), values(&weight)), (Kind::Float, vec![1.0; 6]));
    assert!(weight.requires_grad());
}

#[test]
fn prefixes_of_wrappers_are_taken_off_where_the_model_has_none() {
    let wrapped = |prefix: &str| {
        let mut state = StateDict::new();
        for (name, shape) in [("weight", vec![1, 2]), ("bias", vec![1])] {
            let ones = Tensor::ones(&shape[..], (Kind::Float, numeric_device()));
            state.insert(format!("{prefix}{name}"), ones).unwrap();
        }
        state
    };
    let mut plain = build(|p| Linear::new(p, 2, 1)).unwrap();
    for prefix in ["", "module.", "_orig_mod.", "module._orig_mod."] {
        assert_eq!(plain.load_state_dict(&wrapped(prefix)).unwrap().loaded, 2, "{prefix}");
    }
    assert!(plain.load_state_dict(&wrapped("encoder.")).is_err());
    // Here the prefix is a name of the model.
    let mut named = build(|p: &ParamPath<'_>| Linear::new(p / "module", 2, 1)).unwrap();
    assert_eq!(named.load_state_dict(&wrapped("module.")).unwrap().loaded, 2);
    assert!(named.load_state_dict(&wrapped("")).is_err());
}

#[test]
fn a_state_dict_shares_memory_and_its_clone_does_not() {
    let model = build(|p| Linear::new(p, 2, 1)).unwrap();
    let (shared, snapshot) = (model.state_dict(), model.state_dict().deep_clone().unwrap());
    let before = values(shared.get("weight").unwrap());
    for parameter in model.parameters() {
        let _ = tch::no_grad(|| parameter.tensor.shallow_clone().fill_(9.0));
    }
    assert_eq!(values(shared.get("weight").unwrap()), [9.0, 9.0]);
    assert_eq!(values(snapshot.get("weight").unwrap()), before);
    assert!(!shared.get("weight").unwrap().requires_grad());
}

/// tch has a tensor without a value; it is refused like any other that does not fit.
#[test]
fn an_undefined_tensor_is_an_error_everywhere() {
    let undefined = Tensor::new();
    let error = build(|p: &ParamPath<'_>| {
        let _ = p.buffer("buffer", &undefined);
        let _ = p.parameter_from("parameter", &undefined);
        let _ = p.tie("tied", &undefined);
        p.adopt_parameter("adopted", &undefined);
        p.adopt_buffer("adopted_buffer", &undefined);
    })
    .unwrap_err();
    let Some(ModelError::Build { problems }) = error.downcast_ref() else { panic!("{error}") };
    assert_eq!(problems.len(), 5, "{problems:#?}");

    let mut state = StateDict::new();
    state.insert("weight", undefined.shallow_clone()).unwrap();
    state.insert("bias", Tensor::from_slice(&[0f32])).unwrap();
    let mut model = build(|p| Linear::new(p, 1, 1)).unwrap();
    assert!(model.load_state_dict(&state).is_err());
    assert!(state.deep_clone().is_err());
    let folder = tempfile::tempdir().unwrap();
    assert!(brigade_nn::weights::save(&state, folder.path().join("undefined")).is_err());

    let layers: [&dyn for<'a> Module<&'a Tensor, Output = Tensor>; 4] =
        [model.module(), &Flatten, &MaxPool2d::new(2), &Relu];
    for layer in layers {
        assert!(layer.forward(&undefined).is_err());
    }
    let norm = build(|p| BatchNorm2d::new(p, 1)).unwrap();
    assert!(norm.module().forward(&undefined).is_err());
}

#[test]
fn a_layer_held_in_evaluation_leaves_its_statistics() {
    let layers = |path: &ParamPath<'_>| {
        Sequential::new()
            .add(BatchNorm2d::new(path / "body", 3))
            .add(BatchNorm2d::new(path / "body2", 3))
            .add(Dropout::new(path / "drop", 1.0))
    };
    let mut model = build(layers).unwrap();
    assert_eq!(model.hold_in_eval("body", true).unwrap(), 1);
    assert_eq!(model.hold_in_eval("drop", true).unwrap(), 1);
    model.train();
    let images = Tensor::randn([4, 3, 5, 5], (Kind::Float, numeric_device())) + 3.0;
    let output = model.forward(&images).unwrap();
    assert!(output.abs().max().double_value(&[]) > 0.0, "the dropout passes");
    let state = model.state_dict();
    let mean = |name: &str| state.get(name).unwrap().abs().max().double_value(&[]);
    assert_eq!(mean("body.running_mean"), 0.0);
    assert_eq!(mean("body.num_batches_tracked"), 0.0);
    assert!(mean("body2.running_mean") > 0.0);

    model.hold_in_eval("body", false).unwrap();
    let _ = model.forward(&images).unwrap();
    assert!(model.state_dict().get("body.num_batches_tracked").unwrap().int64_value(&[]) == 1);
    let error = model.hold_in_eval("head", true).unwrap_err().to_string();
    assert!(error.contains("head") && error.contains("body2"), "{error}");
}
