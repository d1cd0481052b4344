//! Models whose weights are quantised.

use brigade_nn::{Linear, Model, ParamPath, Relu, Sequential, Weights, weights};
use brigade_torch::has_memory;
use tch::{Device, Kind, Tensor, no_grad};

fn constructor(path: &ParamPath<'_>) -> Sequential {
    Sequential::new()
        .add(Linear::new(path / 0, 64, 128))
        .add(Relu)
        .add(Linear::new(path / 2, 128, 64))
        .add(Linear::new(path / "head", 64, 8))
}

fn model() -> Model<Sequential> {
    Model::new(constructor).unwrap()
}

fn input() -> Tensor {
    Tensor::arange(2 * 64, (Kind::Float, Device::Cpu)).view([2, 64]).sin()
}

fn error_of<T>(result: brigade_torch::Result<T>) -> String {
    result.map(drop).unwrap_err().to_string()
}

#[test]
fn outputs_are_near_those_of_the_float_model_and_the_head_stays() {
    for (weights, allowed) in
        [(Weights::int8(), 0.02), (Weights::int4(32).calibrated(), 0.2), (Weights::fp8(), 0.1)]
    {
        let mut model = model();
        let expected = no_grad(|| model.forward(&input())).unwrap();
        let report = model.quantize(&weights).unwrap();
        assert_eq!(report.layers, ["0", "2"]);
        assert!(!has_memory(&model.tensor("0.weight").unwrap()));
        assert_eq!(model.tensor("0.weight").unwrap().size(), [128, 64]);
        assert!(has_memory(&model.tensor("head.weight").unwrap()));
        let found = model.forward(&input()).unwrap();
        let error = (&found - &expected).abs().max().double_value(&[]);
        let scale = expected.abs().max().double_value(&[]);
        assert!(0.0 < error && error < allowed * scale, "{weights:?}: {error} of {scale}");
    }
}

#[test]
fn a_deferred_model_is_quantised_as_one_that_is_there() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut whole = model();
    whole.save_weights(&path).unwrap();
    for chosen in [Weights::int8(), Weights::int4(64).also("head").skip("0")] {
        let mut deferred = Model::deferred(constructor).unwrap();
        deferred.load_weights(&path).unwrap();
        let report = deferred.quantize(&chosen).unwrap();
        let mut other = model();
        other.load_weights(&path).unwrap();
        assert_eq!(other.quantize(&chosen).unwrap(), report);
        assert_eq!(deferred.forward(&input()).unwrap(), other.forward(&input()).unwrap());
    }
    // Drawn values, too.
    tch::manual_seed(5);
    let mut deferred = Model::deferred(constructor).unwrap();
    deferred.quantize(&Weights::int8()).unwrap();
    whole.quantize(&Weights::int8()).unwrap();
    assert_eq!(deferred.quantized_weight("2.weight").unwrap().size(), [64, 128]);
}

#[test]
fn what_needs_values_is_an_error_that_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let mut model = model();
    let state = model.state_dict().deep_clone().unwrap();
    model.quantize(&Weights::int8()).unwrap();
    assert!(model.trainable_parameters().is_empty() && !model.is_training());
    let text = "is quantised, and a quantised model is for inference";
    for error in [
        error_of(model.save_weights(folder.path().join("w.safetensors"))),
        error_of(model.load_state_dict(&state)),
        error_of(model.load_matching(&state)),
    ] {
        assert!(error.contains(text) && error.contains("save_quantized"), "{error}");
    }
    // A state has the names, and reading its tensors returns the reason why they have no values.
    let error = error_of(weights::save(&model.state_dict(), folder.path().join("w.safetensors")));
    assert!(error.contains("`save_quantized` writes it"), "{error}");
    let trained = input().set_requires_grad(true);
    let error = error_of(model.forward(&trained));
    assert!(error.contains("for inference"), "{error}");
}

#[test]
fn bad_choices_change_nothing() {
    let mut model = model();
    let expected = no_grad(|| model.forward(&input())).unwrap();
    let error = error_of(model.quantize(&Weights::int4(128)));
    assert!(
        error.contains("`0.weight`: groups of 128 columns do not divide 64 columns"),
        "{error}"
    );
    let error = error_of(model.quantize(&Weights::int8().skip("body.*")));
    assert!(
        error.contains("`body.*` matches no linear layer") && error.contains("0, 2, head"),
        "{error}"
    );
    assert!(!model.is_quantized());
    assert_eq!(no_grad(|| model.forward(&input())).unwrap(), expected);
    model.quantize(&Weights::int4(128).skip("0")).unwrap();
}

#[test]
fn another_kind_leaves_quantised_weights() {
    let mut model = model();
    model.quantize(&Weights::int8()).unwrap();
    let expected = model.forward(&input()).unwrap();
    model.to_kind(Kind::BFloat16).unwrap();
    model.to_device(Device::Cpu).unwrap();
    assert_eq!(model.tensor("0.weight").unwrap().kind(), Kind::BFloat16);
    let found = model.forward(&input().to_kind(Kind::BFloat16)).unwrap();
    let error = (found.to_kind(Kind::Float) - &expected).abs().max().double_value(&[]);
    assert!(error < 0.03 * expected.abs().max().double_value(&[]), "{error}");
    let mut float = Model::new(constructor).unwrap();
    assert!(float.quantize(&Weights::float(Kind::Half)).unwrap().layers.is_empty());
    assert_eq!(float.kind(), Kind::Half);
}

#[test]
fn a_saved_model_comes_back_to_the_bit() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    for chosen in [Weights::int8(), Weights::int4(64).also("head").calibrated(), Weights::fp8()] {
        let mut model = model();
        let report = model.quantize(&chosen).unwrap();
        model.save_quantized(&path).unwrap();
        let mut again = Model::deferred(constructor).unwrap();
        again.load_weights(&path).unwrap();
        // No format needs to be chosen: the file contains it.
        assert_eq!(again.quantize(&Weights::default()).unwrap(), report);
        for kind in [Kind::Float, Kind::BFloat16] {
            model.to_kind(kind).unwrap();
            again.to_kind(kind).unwrap();
            let input = input().to_kind(kind);
            assert_eq!(
                model.forward(&input).unwrap(),
                again.forward(&input).unwrap(),
                "{chosen:?} {kind:?}"
            );
        }
        // A model that is to be trained gets the dequantised values.
        let mut float = Model::new(constructor).unwrap();
        float.load_weights(&path).unwrap();
        assert!(!float.is_quantized());
        let stored = again.quantized_weight("0.weight").unwrap().dequantize(Kind::Float).unwrap();
        assert_eq!(float.tensor("0.weight").unwrap().detach(), stored);
    }
}
