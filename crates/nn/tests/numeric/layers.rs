//! Outputs, gradients and buffers of every layer against those of PyTorch.

use brigade_nn::{
    BatchNorm1d, BatchNorm2d, BatchNormOptions, Conv2d, Conv2dOptions, Dropout, Embedding,
    EmbeddingOptions, Flatten, LayerNorm, LayerNormOptions, Linear, LinearOptions, MaxPool2d,
    Model, ModelError, Module, ParamPath, Recompute, Relu, Sequential,
};
use brigade_test_device::{assert_same, on_device};
use brigade_torch::{Error, TensorId};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::device::{build, float};

/// Both sides compute in 32-bit floats, in an order of their own.
const TOLERANCE: f64 = 2e-5;

/// `sin(i + phase)`, computed in float64.
fn wave(shape: &[i64], phase: f64) -> Tensor {
    let numel = shape.iter().product::<i64>();
    let values: Vec<f32> = (0..numel).map(|i| (i as f64 + phase).sin() as f32).collect();
    on_device(&Tensor::from_slice(&values).view(shape))
}

fn assert_values(found: &Tensor, expected: &Value, what: &str) {
    let expected: Vec<f64> = serde_json::from_value(expected.clone()).unwrap();
    let found = Vec::<f64>::try_from(found.flatten(0, -1).to_kind(Kind::Double)).unwrap();
    assert_eq!(found.len(), expected.len(), "{what}: number of values");
    for (i, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let error = (found - expected).abs() / expected.abs().max(1.0);
        assert!(error < TOLERANCE, "{what}[{i}] = {found}, PyTorch has {expected}");
    }
}

fn check<M>(case: &str, constructor: impl FnOnce(&ParamPath<'_>) -> M, input: &Tensor)
where
    M: for<'a> Module<&'a Tensor, Output = Tensor>,
{
    let golden: Value = serde_json::from_str(include_str!("../fixtures/layers.json")).unwrap();
    let golden = &golden[case];
    let mut model = build(constructor).unwrap();
    let names: Vec<String> = serde_json::from_value(golden["state"].clone()).unwrap();
    assert_eq!(model.state_dict().names().collect::<Vec<_>>(), names, "{case}: names");
    for (j, parameter) in model.parameters().iter().enumerate() {
        let values = wave(&parameter.tensor.size(), 1.0 + j as f64);
        tch::no_grad(|| parameter.tensor.shallow_clone().copy_(&values));
    }
    for run in golden["runs"].as_array().unwrap() {
        if run["mode"] == "train" {
            model.train();
        } else {
            model.eval();
        }
        model.zero_grad().unwrap();
        let output = model.forward(input).unwrap();
        assert_eq!(serde_json::json!(output.size()), run["shape"], "{case}: shape");
        assert_values(&output, &run["output"], &format!("{case}: output"));
        if output.requires_grad() {
            (&output * wave(&output.size(), 7.0)).sum(Kind::Float).backward();
        }
        for (name, expected) in run["grads"].as_object().unwrap() {
            let parameters = model.parameters();
            let parameter = parameters.iter().find(|p| p.name == *name).unwrap();
            assert_values(
                &parameter.tensor.grad(),
                expected,
                &format!("{case}: gradient of {name}"),
            );
        }
        for (name, expected) in run["buffers"].as_object().unwrap() {
            let buffers = model.buffers();
            let buffer = buffers.iter().find(|b| b.name == *name).unwrap();
            assert_values(&buffer.tensor, expected, &format!("{case}: {name}"));
        }
    }
}

#[test]
fn convolutions() {
    check(
        "conv2d",
        |p| Conv2d::new(p, 1, 2, [3, 3], Conv2dOptions::default()),
        &wave(&[2, 1, 4, 5], 0.0),
    );
    let options =
        Conv2dOptions { stride: [2, 1], padding: [1, 2], dilation: [1, 2], groups: 2, bias: false };
    check("conv2d_options", |p| Conv2d::new(p, 4, 2, [2, 3], options), &wave(&[1, 4, 5, 6], 0.0));
}

#[test]
fn linear_maps() {
    check("linear", |p| Linear::new(p, 3, 2), &wave(&[2, 2, 3], 0.0));
    check(
        "linear_no_bias",
        |p| Linear::with_options(p, 3, 2, LinearOptions { bias: false }),
        &wave(&[2, 3], 0.0),
    );
}

#[test]
fn batch_norms() {
    check("batch_norm2d", |p| BatchNorm2d::new(p, 2), &wave(&[2, 2, 2, 2], 0.0));
    check("batch_norm1d", |p| BatchNorm1d::new(p, 3), &wave(&[4, 3], 0.0));
    check("batch_norm1d_sequence", |p| BatchNorm1d::new(p, 3), &wave(&[2, 3, 2], 0.0));
    let options = BatchNormOptions { eps: 1e-3, momentum: None, affine: false };
    check(
        "batch_norm_average",
        |p| BatchNorm2d::with_options(p, 2, options),
        &wave(&[2, 2, 2, 2], 0.0),
    );
}

#[test]
fn layer_norms() {
    check("layer_norm", |p| LayerNorm::new(p, &[2, 3]), &wave(&[2, 2, 3], 0.0));
    let options = LayerNormOptions { eps: 1e-2, affine: true, bias: false };
    check("layer_norm_no_bias", |p| LayerNorm::with_options(p, &[3], options), &wave(&[2, 3], 0.0));
}

#[test]
fn embeddings() {
    let indices = on_device(&Tensor::from_slice(&[0i64, 1, 3, 3]).view([2, 2]));
    let options = EmbeddingOptions { padding: Some(1) };
    check("embedding", |p| Embedding::with_options(p, 4, 2, options), &indices);

    let fresh = build(|p| Embedding::with_options(p, 4, 2, options)).unwrap();
    let row = fresh.forward(&on_device(&Tensor::from_slice(&[1i64]))).unwrap();
    assert_eq!(Vec::<f32>::try_from(row.flatten(0, -1)).unwrap(), [0.0, 0.0]);
}

#[test]
fn embeddings_name_an_index_that_has_no_row() {
    // On a GPU such an index would end the tests.
    let model = Model::builder().device(Device::Cpu).build(|p| Embedding::new(p / "words", 4, 2));
    let model = model.unwrap();
    for (indices, id, position) in [([0i64, 3, 4, 9], 4, [1, 0]), ([0, -1, 2, 3], -1, [0, 1])] {
        for kind in [Kind::Int64, Kind::Int] {
            let input = Tensor::from_slice(&indices).view([2, 2]).to_kind(kind);
            let tied = model.module().forward_tied(&input).map(drop);
            for error in [model.forward(&input).map(drop), tied].map(Result::unwrap_err) {
                assert_eq!(
                    error.to_string(),
                    format!(
                        "words: id {id} at {position:?} is beyond its table, which has the ids 0 to 3 (of tokens, \
                         vocab_size is 4); take the tokenizer that belongs to the model, or a model of a larger \
                         vocabulary"
                    )
                );
            }
        }
    }
    // libtorch reports other mistakes.
    let fractions = Tensor::from_slice(&[0.5f32]);
    assert!(matches!(
        model.forward(&fractions).unwrap_err().downcast_ref(),
        Some(ModelError::Layer { .. })
    ));
}

#[test]
fn an_embedding_with_a_tied_head_has_the_gradient_of_separate_uses() {
    let options = EmbeddingOptions { padding: Some(1) };
    // Each index once: a device adds the rows of one index singly to the head's gradient, which rounds otherwise than
    // adding their sum. `tied_embedding` of brigade-torch has a test with an allowance for that.
    let indices = on_device(&Tensor::from_slice(&[0i64, 1, 3, 2]).view([2, 2]));
    let run = |tied: bool| {
        tch::manual_seed(2);
        let model = build(|p| Embedding::with_options(p, 4, 2, options)).unwrap();
        let module = model.module();
        let (words, weight) = if tied {
            module.forward_tied(&indices).unwrap()
        } else {
            (model.forward(&indices).unwrap(), module.weight().shallow_clone())
        };
        words.sin().linear::<Tensor>(&weight, None).square().sum(Kind::Float).backward();
        (words.detach(), module.weight().grad())
    };
    let ((words, gradient), (expected_words, expected)) = (run(true), run(false));
    assert_same(&words, &expected_words, "words");
    assert_same(&gradient, &expected, "gradient");

    let model = build(|p| Embedding::with_options(p, 4, 2, options)).unwrap();
    let (_, weight) = tch::no_grad(|| model.module().forward_tied(&indices)).unwrap();
    assert_eq!(TensorId::of(&weight), TensorId::of(model.module().weight()));
}

#[test]
fn pooling() {
    let pool = MaxPool2d { kernel: [2, 3], stride: [1, 2], padding: [1, 1] };
    check("max_pool2d", |_| pool, &wave(&[1, 2, 3, 5], 0.0));
}

#[test]
fn dropout_drops_and_scales_in_training_only() {
    let mut model = build(|p| Dropout::new(p, 0.25)).unwrap();
    let ones = Tensor::ones([10_000], (Kind::Float, model.device()));
    let dropped = model.forward(&ones).unwrap();
    let zeros = dropped.eq(0.0).sum(Kind::Int64).int64_value(&[]);
    // Six standard deviations of a binomial of 10 000 and 1/4 are 260.
    assert!((2240..2760).contains(&zeros), "{zeros} of 10000 dropped");
    let kept = dropped.max().double_value(&[]);
    assert!((kept - 1.0 / 0.75).abs() < 1e-6, "kept values are {kept}");
    model.eval();
    assert_eq!(model.forward(&ones).unwrap(), ones);
}

#[test]
fn a_row_of_layers_applies_them_in_order() {
    let model = build(|p: &ParamPath<'_>| {
        Sequential::new().add_fn(|x| x - 2.0).add(Relu).add(Linear::new(p / 2, 2, 1))
    })
    .unwrap();
    for parameter in model.parameters() {
        let _ = tch::no_grad(|| parameter.tensor.shallow_clone().fill_(1.0));
    }
    let output = model.forward(&on_device(&Tensor::from_slice(&[1f32, 5.0]))).unwrap();
    assert_eq!(output.double_value(&[0]), 0.0 + 3.0 + 1.0);
    let identity = Sequential::new();
    assert!(identity.is_empty());
    assert_eq!(identity.forward(&output).unwrap(), output);
}

#[test]
fn errors_of_a_layer_have_its_name() {
    let refused =
        |model: &Model<BatchNorm1d>, input: &[i64]| model.forward(&wave(input, 0.0)).unwrap_err();
    let one = build(|p: &ParamPath<'_>| BatchNorm1d::new(p / "norm", 3)).unwrap();
    let error = refused(&one, &[1, 3]);
    assert!(matches!(error.downcast_ref(), Some(ModelError::Input { .. })));
    let text = error.to_string();
    assert!(text.starts_with("norm: a batch normalisation in training needs more than"), "{text}");
    assert!(text.ends_with("found an input of [1, 3]"), "{text}");
    let text = refused(&one, &[4]).to_string();
    assert!(text.contains("BatchNorm1d takes [n, features] or"), "{text}");
    let text = refused(&one, &[4, 7]).to_string();
    assert!(text.starts_with("norm cannot take an input of [4, 7]"), "{text}");
    assert!(!text.contains('\n'), "{text}");

    let linear = build(|p: &ParamPath<'_>| Linear::new(p / "head", 5, 2)).unwrap();
    let text = linear.forward(&wave(&[2, 4], 0.0)).unwrap_err().to_string();
    assert!(text.starts_with("head cannot take an input of [2, 4]"), "{text}");
    assert_eq!(linear.forward(&wave(&[2, 5], 0.0)).unwrap().size(), [2, 2], "and goes on");
}

#[test]
fn layers_without_a_name_are_called_by_their_type() {
    let text = |layer: &dyn for<'a> Module<&'a Tensor, Output = Tensor>, shape: &[i64]| {
        layer.forward(&wave(shape, 0.0)).unwrap_err().to_string()
    };
    let pool = text(&MaxPool2d::new(5), &[1, 1, 3, 3]);
    assert!(pool.starts_with("MaxPool2d cannot take an input of [1, 1, 3, 3]: "), "{pool}");
    let flat = text(&Flatten, &[3]);
    assert!(flat.starts_with("Flatten cannot take an input of [3]: Dimension out of"), "{flat}");
}

#[test]
fn a_panic_in_a_forward_is_an_error_with_its_text() {
    let model = |function: fn(&Tensor) -> Tensor| {
        build(|p: &ParamPath<'_>| Sequential::new().add(Linear::new(p / 0, 5, 2)).add_fn(function))
            .unwrap()
    };
    let operator = model(|x| x.matmul(x)).forward(&wave(&[3, 5], 0.0)).unwrap_err();
    assert!(matches!(operator.downcast_ref(), Some(ModelError::Panicked { .. })), "{operator:?}");
    assert_eq!(
        operator.to_string(),
        "the forward panicked: mat1 and mat2 shapes cannot be multiplied (3x2 and 3x2)"
    );
    let own = model(|x| panic!("{} rows", x.size()[0])).forward(&wave(&[3, 5], 0.0));
    assert_eq!(own.unwrap_err().to_string(), "the forward panicked: 3 rows");
    // A payload without a text is meant for another `catch_unwind`.
    let other = model(|_| std::panic::panic_any(7));
    let forward = || drop(other.forward(&wave(&[3, 5], 0.0)));
    let panic = std::panic::catch_unwind(std::panic::AssertUnwindSafe(forward)).unwrap_err();
    assert_eq!(panic.downcast_ref::<i32>(), Some(&7));
}

/// A model in a model, and operators whose errors it passes on.
struct Outer(Model<Linear>);

impl Module<&Tensor> for Outer {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> brigade_torch::Result<Tensor> {
        if input.size()[0] == 0 {
            return Err(Error::custom("an empty batch"));
        }
        Ok(self.0.forward(input)?.f_reshape([3, -1])?)
    }
}

#[test]
fn errors_pass_through_models_and_threads() {
    let inner = build(|p: &ParamPath<'_>| Linear::new(p / "inner", 5, 2)).unwrap();
    let outer = build(|_: &ParamPath<'_>| Outer(inner)).unwrap();
    let error = |shape: &[i64]| outer.forward(&wave(shape, 0.0)).unwrap_err().to_string();
    assert!(error(&[2, 4]).starts_with("inner cannot take an input of [2, 4]: "));
    let of_libtorch = Error::from(Tensor::zeros([2, 2], float()).f_reshape([3, -1]).unwrap_err());
    assert_eq!(error(&[2, 5]), of_libtorch.to_string());
    assert!(error(&[2, 5]).starts_with("tensor operation failed: "));
    assert_eq!(error(&[0, 5]), "an empty batch");
    let error = std::thread::spawn(move || outer.forward(&wave(&[2, 4], 0.0)).unwrap_err());
    assert!(matches!(error.join().unwrap().downcast_ref(), Some(ModelError::Layer { .. })));
}

/// Refuses its second forward.
struct Once(Linear, parking_lot::Mutex<bool>);

impl Module<&Tensor> for Once {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> brigade_torch::Result<Tensor> {
        let again = std::mem::replace(&mut *self.1.lock(), true);
        let input = if again { input.f_narrow(1, 0, 4)? } else { input.shallow_clone() };
        self.0.forward(&input)
    }
}

#[test]
fn a_failing_recomputation_is_an_error_of_the_backward() {
    let model = build(|p: &ParamPath<'_>| {
        Recompute::new(Once(Linear::new(p / "body", 5, 2), false.into()))
    })
    .unwrap();
    let output = model.forward(&wave(&[3, 5], 0.0)).unwrap();
    let error = brigade_torch::backward(&output.sum(Kind::Float)).unwrap_err().to_string();
    let reason = "failed when it ran again in backward: body cannot take an input of [3, 4]";
    assert!(error.contains(reason), "{error}");
    // An operation that fails in the first call is an error of the forward.
    let text = model.forward(&wave(&[3, 2], 0.0)).unwrap_err().to_string();
    assert!(text.starts_with("tensor operation failed"), "{text}");
}
