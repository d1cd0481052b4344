//! LSTMs against PyTorch's: names, first values for a seed, outputs, states and gradients.

use brigade_nn::{Lstm, LstmOptions, LstmState, Model, ModelError};
use brigade_test_device::on_device;
use brigade_torch::{Autocast, emulated_kind};
use serde_json::Value;
use tch::{Kind, Tensor};

use crate::device::build;

fn numbers(value: &Value) -> Vec<f64> {
    serde_json::from_value(value.clone()).unwrap()
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.detach().to_kind(Kind::Double).flatten(0, -1)).unwrap()
}

fn assert_close(found: &[f64], expected: &[f64], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (place, (found, expected)) in found.iter().zip(expected).enumerate() {
        let error = (found - expected).abs();
        assert!(
            error <= 1e-5 * expected.abs().max(1.0),
            "{what}[{place}]: {found}, PyTorch has {expected}"
        );
    }
}

#[test]
fn outputs_states_and_gradients_are_pytorchs() {
    let golden: Value = serde_json::from_str(include_str!("../fixtures/lstm.json")).unwrap();
    let plain = LstmOptions::default();
    let cases = [
        ("plain", plain),
        ("deep", LstmOptions { layers: 2, batch_first: true, ..plain }),
        ("both", LstmOptions { layers: 2, bidirectional: true, ..plain }),
        ("no_bias", LstmOptions { bias: false, batch_first: true, ..plain }),
    ];
    let words: Vec<f32> = (0..30u8).map(|i| f32::from(i).sin()).collect();
    let words = on_device(&Tensor::from_slice(&words).view([2, 5, 3]));
    for (name, options) in cases {
        let golden = &golden[name];
        tch::manual_seed(3);
        let model = build(|path| Lstm::with_options(path, 3, 4, options)).unwrap();
        let state = model.state_dict();
        let shapes: Vec<(String, Vec<i64>)> =
            serde_json::from_value(golden["state"].clone()).unwrap();
        let found = state.iter().map(|(name, tensor)| (name.to_owned(), tensor.size()));
        assert_eq!(found.collect::<Vec<_>>(), shapes, "{name}");
        assert_eq!(model.module().weights().len(), shapes.len());
        let sums: Vec<f64> = state.iter().map(|(_, tensor)| values(tensor).iter().sum()).collect();
        assert_close(&sums, &numbers(&golden["first"]), &format!("first values of {name}"));

        let (output, state) = model.forward(&words).unwrap();
        let shape: Vec<i64> = serde_json::from_value(golden["output_shape"].clone()).unwrap();
        assert_eq!(output.size(), shape, "{name}");
        let (again, last) = model.forward((&words, &state)).unwrap();
        let found = [
            (&output, "output"),
            (&state.hidden, "hidden"),
            (&state.cell, "cell"),
            (&again, "again"),
            (&last.hidden, "last"),
        ];
        for (tensor, field) in found {
            assert_close(&values(tensor), &numbers(&golden[field]), &format!("{name}: {field}"));
        }
        (output.sum(Kind::Float) + again.square().sum(Kind::Float)).backward();
        let gradients: Vec<f64> = model
            .parameters()
            .iter()
            .map(|parameter| values(&parameter.tensor.grad()).iter().map(|value| value.abs()).sum())
            .collect();
        assert_close(&gradients, &numbers(&golden["gradients"]), &format!("gradients of {name}"));
    }
}

#[test]
fn dropout_is_between_layers_and_in_training_only() {
    let options = LstmOptions { layers: 2, dropout: 0.5, ..LstmOptions::default() };
    let mut model = build(|path| Lstm::with_options(path, 3, 4, options)).unwrap();
    let words = Tensor::ones([6, 2, 3], (Kind::Float, model.device()));
    let run = |model: &Model<Lstm>| model.forward(&words).unwrap().0;
    assert_ne!(run(&model), run(&model));
    model.eval();
    assert_eq!(run(&model), run(&model));
}

#[test]
fn what_does_not_fit_is_refused() {
    let refused = |options| {
        build(|path| Lstm::with_options(path / "rnn", 3, 4, options)).unwrap_err().to_string()
    };
    let none = LstmOptions { layers: 0, ..LstmOptions::default() };
    assert!(refused(none).contains("rnn: an LSTM of 0 layers from 3 to 4 numbers"));
    let much = LstmOptions { dropout: 1.5, ..LstmOptions::default() };
    assert!(refused(much).contains("rnn: the dropout probability 1.5 is not in [0, 1]"));
    let model = build(|path| Lstm::new(path / "rnn", 3, 4)).unwrap();
    let flat = Tensor::ones([2, 3], (Kind::Float, model.device()));
    let error = model.forward(&flat).unwrap_err();
    assert!(
        matches!(error.downcast_ref(), Some(ModelError::Input { layer, .. }) if layer == "rnn"),
        "{error}"
    );
    let words = Tensor::ones([5, 2, 3], (Kind::Float, model.device()));
    let state = LstmState::zeros(1, 3, 4, &words).unwrap();
    let error = model.forward((&words, &state)).unwrap_err().to_string();
    assert!(error.ends_with("expected a hidden state of [1, 2, 4], found [1, 3, 4]"), "{error}");
    let wide = Tensor::ones([5, 2, 7], (Kind::Float, model.device()));
    let error = model.forward(&wide).unwrap_err().to_string();
    assert!(error.ends_with("expected an input of [5, 2, 3], found [5, 2, 7]"), "{error}");
}

/// In float32 where the processor has no 16-bit products, so that only the output is rounded.
#[test]
fn under_autocast_the_output_has_16_bits() {
    tch::manual_seed(3);
    let model = build(|path| Lstm::new(path, 3, 4)).unwrap();
    let words = Tensor::randn([5, 2, 3], (Kind::Float, model.device()));
    let (exact, _) = model.forward(&words).unwrap();
    let scope = Autocast::enter(model.device(), Kind::BFloat16, true).unwrap();
    let emulated = emulated_kind(&words).unwrap();
    let (short, state) = model.forward(&words).unwrap();
    let (again, _) = model.forward((&words.to_kind(Kind::BFloat16), &state)).unwrap();
    drop(scope);
    assert_eq!((short.kind(), again.kind()), (Kind::BFloat16, Kind::BFloat16));
    match emulated {
        Some(kind) => {
            assert_eq!((kind, state.hidden.kind()), (Kind::BFloat16, Kind::Float));
            assert_eq!(short, exact.to_kind(kind));
        }
        None => assert!((short - exact).abs().max().double_value(&[]) < 0.02),
    }
    again.sum(Kind::Float).backward();
    for parameter in model.parameters() {
        assert_eq!(parameter.tensor.grad().kind(), Kind::Float, "{}", parameter.name);
    }
}
