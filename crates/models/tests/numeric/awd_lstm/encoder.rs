//! The encoder: with given weights, with its hidden state.

use brigade_models::{AwdLstm, AwdLstmOptions, RnnOutputs};
use brigade_test_device::numeric_device;
use tch::{Kind, Tensor};

use super::{
    KINDS, assert_close, assert_digest, assert_names, assert_tensor, build, fill, golden, numbers,
    small, words,
};

#[test]
fn outputs_and_hidden_states_are_fastais() {
    let golden = &golden()["awd_lstm"]["encoder"];
    let (a, b) = (words(&golden["a"]), words(&golden["b"]));
    for kind in KINDS {
        let mut model = build(kind, |path| AwdLstm::new(path, 26, &small()));
        assert_names(&model, golden);
        model.eval();
        let forward = |words: &Tensor| tch::no_grad(|| model.forward(words).unwrap());
        let state = model.module().state();
        let digest = |found: &Tensor, name: &str| {
            assert_digest(found, &golden[name], &format!("{name} {kind:?}"));
        };
        assert_tensor(&forward(&a), &golden["forward_a"], "forward_a");
        digest(&forward(&b), "then_b");
        for (layer, expected) in
            state.hidden_state().iter().zip(golden["hidden_after_a_b"].as_array().unwrap())
        {
            assert_digest(&layer.hidden, &expected[0], "hidden");
            assert_digest(&layer.cell, &expected[1], "cell");
        }
        state.reset();
        digest(&forward(&b), "reset_then_b");
        state.reset();
        let _ = forward(&a);
        digest(&forward(&b.narrow(0, 0, 2)), "reset_a_then_b_with_one_row_less");
        digest(&forward(&b), "then_b_with_all_rows_again");
        state.reset();
        let vectors = Tensor::embedding(model.module().embedding(), &a, -1, false, false);
        digest(&tch::no_grad(|| model.module().forward_embedded(&vectors).unwrap()), "from_embeds");
    }
}

#[test]
fn both_directions_are_fastais() {
    let golden = golden();
    let (expected, encoder) =
        (&golden["awd_lstm"]["bidirectional"], &golden["awd_lstm"]["encoder"]);
    let options = AwdLstmOptions { bidirectional: true, ..small() };
    for kind in KINDS {
        let mut model = build(kind, |path| AwdLstm::new(path, 26, &options));
        assert_names(&model, expected);
        model.eval();
        for (input, name) in [("a", "forward_a"), ("b", "then_b")] {
            let output = tch::no_grad(|| model.forward(&words(&encoder[input])).unwrap());
            assert_digest(&output, &expected[name], name);
        }
    }
}

#[test]
fn the_regularization_is_fastais() {
    for case in golden()["awd_lstm"]["rnn_regularizer"]["cases"].as_array().unwrap() {
        let number = |name: &str| case[name].as_f64().unwrap();
        let rows = case["rows"].as_i64().unwrap();
        let values = |stream| fill(&[3, 7, 5], stream, -1.0, 1.0).narrow(0, 0, rows);
        let outputs = RnnOutputs { raw: values(311), dropped: values(310) };
        let added = outputs.regularization(number("alpha"), number("beta")).unwrap();
        let loss = number("loss_before") + added.double_value(&[]);
        assert_close(&[loss], &numbers(&case["loss_after"]), super::noise(), "loss_after");
    }
}

#[test]
fn a_single_time_step_has_no_change_to_punish() {
    let values = Tensor::ones([4, 1, 5], (Kind::Double, numeric_device()));
    let outputs = RnnOutputs { raw: values.shallow_clone(), dropped: values };
    let added = outputs.regularization(2.0, 1.0).unwrap();
    assert_eq!((added.double_value(&[]), added.kind()), (2.0, Kind::Double));
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let refused = |options: AwdLstmOptions| {
        super::try_build(|path| AwdLstm::new(path, 26, &options)).unwrap_err().to_string()
    };
    let odd = AwdLstmOptions { bidirectional: true, embedding: 7, ..small() };
    assert!(refused(odd).contains("two directions share 7 and 12 numbers: both have to be even"));
    let error = refused(AwdLstmOptions { padding: 26, ..small() });
    assert!(error.contains("encoder: padding row 26 is not among 26 rows"), "{error}");
    let mut dropping = small();
    dropping.dropout.weight = 1.0;
    let error = refused(dropping);
    assert!(
        error.contains("rnns.0: the probability 1 of dropping a weight is not in [0, 1)"),
        "{error}"
    );
}
