//! Models whose parameters get their memory later.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use brigade_nn::{
    BatchNorm2d, Conv2d, DeferredValue, Embedding, EmbeddingOptions, Init, LayerNorm, Linear, Lstm,
    Model, ModelError, Module, ParamPath,
};
use brigade_torch::{Result, TensorId, has_memory, rng_state};
use tch::{Device, Kind, Tensor};

/// Layers of all kinds, one with values that are drawn again, and a tie.
struct Net {
    embedding: Embedding,
    linear: Linear,
    head: Tensor,
}

impl Net {
    fn new(path: &ParamPath<'_>) -> Self {
        let padding = EmbeddingOptions { padding: Some(1) };
        let embedding = Embedding::with_options(path / "embedding", 7, 4, padding);
        let _ = Conv2d::new(path / "conv", 3, 5, [3, 3], Default::default());
        let _ = BatchNorm2d::new(path / "bn", 5);
        let _ = LayerNorm::new(path / "norm", &[4]);
        let _ = Lstm::new(path / "lstm", 4, 3);
        let linear = Linear::new(path / "linear", 4, 4);
        path.redraw(linear.weight(), |values| values.f_normal_(0.0, 0.02).map(drop));
        let head = (path / "head").tie("weight", embedding.weight());
        let _ = path.parameter("scale", &[], Init::Constant(3.0));
        let noise = path.buffer("noise", &Tensor::zeros([3], (Kind::Float, Device::Cpu)));
        path.redraw(&noise, |values| values.f_normal_(0.0, 1.0).map(drop));
        Self { embedding, linear, head }
    }
}

impl Module<&Tensor> for Net {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let hidden = self.linear.forward(&self.embedding.forward(input)?)?;
        Ok(hidden.f_matmul(&self.head.f_tr()?)?)
    }
}

fn values<M>(model: &Model<M>) -> Vec<(String, Tensor)> {
    let all = model.parameters().into_iter().chain(model.buffers());
    all.map(|named| (named.name, named.tensor.copy())).collect()
}

fn assert_same<M, N>(left: &Model<M>, right: &Model<N>) {
    let (left, right) = (values(left), values(right));
    assert_eq!(left.len(), right.len());
    for ((name, left), (other, right)) in left.iter().zip(&right) {
        assert_eq!(name, other);
        assert_eq!((left.kind(), left.size()), (right.kind(), right.size()), "{name}");
        assert!(left.equal(right), "{name}");
    }
}

#[test]
fn values_are_those_of_the_undeferred_model_and_the_generator_goes_on() {
    for kind in [Kind::Float, Kind::Double, Kind::Half] {
        tch::manual_seed(5);
        let plain = Model::builder().kind(kind).build(Net::new).unwrap();
        let after = rng_state(Device::Cpu).unwrap();

        tch::manual_seed(5);
        let mut model = Model::builder().kind(kind).deferred().build(Net::new).unwrap();
        assert!(model.is_deferred());
        assert!(model.parameters().iter().all(|it| !has_memory(&it.tensor)));
        model.materialize().unwrap();
        assert!(!model.is_deferred());
        assert_same(&plain, &model);
        assert_eq!(after, rng_state(Device::Cpu).unwrap());
        model.materialize().unwrap();
        assert_same(&plain, &model);
    }
}

#[test]
fn what_was_drawn_in_between_changes_no_value() {
    tch::manual_seed(5);
    let plain = Model::new(Net::new).unwrap();
    tch::manual_seed(5);
    let mut model = Model::deferred(Net::new).unwrap();
    let _ = Tensor::randn([5], (Kind::Float, Device::Cpu));
    let between = rng_state(Device::Cpu).unwrap();
    model.materialize().unwrap();
    assert_same(&plain, &model);
    assert_eq!(between, rng_state(Device::Cpu).unwrap());
}

#[test]
fn identities_flags_ties_and_conversions_are_kept() {
    tch::manual_seed(5);
    let mut plain = Model::new(Net::new).unwrap();
    tch::manual_seed(5);
    let mut model = Model::deferred(Net::new).unwrap();
    let ids = |model: &Model<Net>| -> Vec<TensorId> {
        model.parameters().iter().map(|it| TensorId::of(&it.tensor)).collect()
    };
    let before = ids(&model);
    assert_eq!(model.num_parameters(), plain.num_parameters());
    for model in [&mut plain, &mut model] {
        model.requires_grad_under("conv", false).unwrap();
        model.to_kind(Kind::Double).unwrap();
        model.to_channels_last().unwrap();
        model.to_device(Device::Cpu).unwrap();
    }
    let strides = |model: &Model<Net>| model.tensor("conv.weight").unwrap().stride();
    assert_eq!(strides(&model), strides(&plain));
    model.materialize().unwrap();
    assert_eq!(before, ids(&model));
    assert_same(&plain, &model);
    assert_eq!(strides(&model), strides(&plain));
    assert!(!model.tensor("conv.weight").unwrap().requires_grad());
    let (tied, table) =
        (model.tensor("head.weight").unwrap(), model.tensor("embedding.weight").unwrap());
    assert_eq!(TensorId::of(&tied), TensorId::of(&table));
    let input = Tensor::from_slice(&[2i64, 3]).view([1, 2]);
    assert_eq!(model.forward(&input).unwrap(), plain.forward(&input).unwrap());
}

#[test]
fn what_needs_values_is_refused_before() {
    let mut model = Model::deferred(Net::new).unwrap();
    let state = Model::new(Net::new).unwrap().state_dict();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("net.safetensors");
    let input = Tensor::from_slice(&[2i64, 3]).view([1, 2]);
    let errors = [
        model.forward(&input).map(drop),
        model.load_state_dict(&state).map(drop),
        model.load_matching(&state).map(drop),
    ];
    for error in errors {
        let error = error.unwrap_err();
        assert!(matches!(error.downcast_ref(), Some(ModelError::Deferred { .. })), "{error}");
    }
    let error = model.module().forward(&input).unwrap_err().to_string();
    assert!(error.contains("embedding.weight") && error.contains("materialize"), "{error}");
    let error = model.save_weights(&file).unwrap_err().to_string();
    assert!(error.contains("has no memory yet"), "{error}");
    assert!(!file.exists());
}

#[test]
fn weights_are_read_when_the_parameters_get_their_memory() {
    let folder = tempfile::tempdir().unwrap();
    let plain = Model::new(Net::new).unwrap();
    for file in ["net.safetensors", "net.pth"].map(|name| folder.path().join(name)) {
        match file.extension() {
            Some(extension) if extension == "pth" => {
                brigade_nn::weights::save_pth(&plain.state_dict(), &file).unwrap();
            }
            _ => plain.save_weights(&file).unwrap(),
        }
        let before = rng_state(Device::Cpu).unwrap();
        let mut model = Model::deferred(Net::new).unwrap();
        let report = model.load_weights(&file).unwrap();
        assert!(report.is_complete());
        assert!(model.is_deferred());
        assert!(model.parameters().iter().all(|it| !has_memory(&it.tensor)));
        model.materialize().unwrap();
        assert_same(&plain, &model);
        assert_eq!(before, rng_state(Device::Cpu).unwrap(), "nothing was drawn");
    }
    let mut model = Model::deferred(|path| Linear::new(path, 4, 3)).unwrap();
    let other = folder.path().join("other.safetensors");
    Model::new(|path| Linear::new(path, 4, 2)).unwrap().save_weights(&other).unwrap();
    let error = model.load_weights(&other).unwrap_err();
    assert!(matches!(error.downcast_ref(), Some(ModelError::Mismatch(_))), "{error}");
}

#[test]
fn one_parameter_is_drawn_at_a_time() {
    let alive = Arc::new(AtomicUsize::new(0));
    let counted = Arc::clone(&alive);
    let mut model = Model::deferred(move |path: &ParamPath<'_>| {
        for index in 0..4 {
            let counted = Arc::clone(&counted);
            let _ = path.parameter_with(&format!("p{index}"), &[8], move |values| {
                assert_eq!(counted.fetch_add(1, Ordering::Relaxed), 0);
                values.f_fill_(f64::from(index)).map(drop)
            });
        }
    })
    .unwrap();
    let mut order = Vec::new();
    let values = model.take_deferred_values().unwrap();
    values
        .for_each(|id, value| {
            let DeferredValue::Drawn(values) = value else { panic!("no file was given") };
            let place = model.parameters().iter().position(|it| TensorId::of(&it.tensor) == id);
            order.push((place.unwrap(), values.double_value(&[7]) as usize));
            alive.fetch_sub(1, Ordering::Relaxed);
            Ok(())
        })
        .unwrap();
    assert_eq!(order, [(0, 0), (1, 1), (2, 2), (3, 3)]);
}

#[test]
fn a_constructor_may_not_redraw_what_is_not_its_own() {
    let other = Tensor::zeros([2], (Kind::Float, Device::Cpu));
    for builder in [Model::builder(), Model::builder().deferred()] {
        let error = builder
            .build(|path: &ParamPath<'_>| {
                path.redraw(&other, |values| values.f_fill_(1.0).map(drop));
            })
            .unwrap_err()
            .to_string();
        assert!(error.contains("not of this model"), "{error}");
    }
    let error = Model::deferred(|path: &ParamPath<'_>| path.parameter("w", &[-1], Init::Zeros));
    assert!(error.unwrap_err().to_string().contains("negative"));
}
