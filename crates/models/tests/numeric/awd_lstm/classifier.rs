//! The classifier: scores, what is pooled, steps of training.

use brigade_models::{AwdLstmOptions, TextClassifier, TextClassifierOptions, masked_concat_pool};
use brigade_nn::Model;
use brigade_test_device::{numeric_device, on_device};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::{
    KINDS, Sgd, Trained, assert_close, assert_digest, assert_group_ends, assert_groups,
    assert_names, assert_tensor, assert_training, build, fill, golden, numbers, options, values,
    words,
};

fn classifier_options(args: &Value) -> TextClassifierOptions {
    let defaults = TextClassifierOptions::default();
    let list =
        |name: &str| args.get(name).map(|list| serde_json::from_value(list.clone()).unwrap());
    TextClassifierOptions {
        encoder: options(&args["config"]),
        seq_len: args["seq_len"].as_i64().unwrap(),
        max_len: args["max_len"].as_i64(),
        hidden: args
            .get("lin_ftrs")
            .map_or(defaults.hidden, |list| serde_json::from_value(list.clone()).unwrap()),
        dropout: list("ps"),
        fastai_last: true,
        y_range: args.get("y_range").map(|range| serde_json::from_value(range.clone()).unwrap()),
    }
    .drop_mult(args["drop_mult"].as_f64().unwrap())
}

fn plain(kind: Kind) -> Model<TextClassifier> {
    let golden = golden();
    let args = &golden["awd_lstm"]["classifiers"]["cases"]["plain"]["args"];
    build(kind, |path| TextClassifier::new(path, 26, 3, &classifier_options(args)))
}

fn input() -> Tensor {
    words(&golden()["awd_lstm"]["classifiers"]["cases"]["plain"]["input"])
}

#[test]
fn scores_are_fastais() {
    let golden = golden();
    for (name, expected) in golden["awd_lstm"]["classifiers"]["cases"].as_object().unwrap() {
        let options = classifier_options(&expected["args"]);
        for kind in KINDS {
            let mut model = build(kind, |path| TextClassifier::new(path, 26, 3, &options));
            assert_names(&model, expected);
            assert_groups(&model, &expected["split_clas"]);
            model.eval();
            for _ in 0..2 {
                let scores = tch::no_grad(|| model.forward(&input()).unwrap());
                assert_tensor(&scores, &expected["logits"], name);
            }
            let (outputs, padding) = tch::no_grad(|| model.module().encode(&input()).unwrap());
            assert_digest(&outputs, &expected["encoder_out"], name);
            assert_eq!(values(&padding), numbers(&expected["mask"]));
        }
    }
}

#[test]
fn the_last_words_of_long_texts_are_fastais() {
    let golden = golden();
    let classifiers = &golden["awd_lstm"]["classifiers"];
    for case in classifiers["max_len"].as_array().unwrap() {
        let mut options = classifier_options(&classifiers["cases"]["plain"]["args"]);
        options.max_len = case["max_len"].as_i64();
        let mut model = build(Kind::Float, |path| TextClassifier::new(path, 26, 3, &options));
        model.eval();
        let scores = tch::no_grad(|| model.forward(&input()).unwrap());
        assert_tensor(&scores, &case["logits"], &format!("max_len {}", case["max_len"]));
        let (outputs, padding) = tch::no_grad(|| model.module().encode(&input()).unwrap());
        assert_eq!(
            outputs.size(),
            serde_json::from_value::<Vec<i64>>(case["encoder_out_shape"].clone()).unwrap()
        );
        assert_close(
            &[values(&padding).iter().sum()],
            &numbers(&case["mask_sum"]),
            0.0,
            "mask_sum",
        );
    }
}

#[test]
fn steps_of_training_are_fastais() {
    let golden = golden();
    let expected = &golden["awd_lstm"]["classifier_sgd_steps"];
    let steps = expected["losses"].as_array().unwrap().len();
    let targets = on_device(&Tensor::from_slice(&[0i64, 1, 2, 0, 1]));
    for kind in KINDS {
        let loss = |model: &Model<TextClassifier>, _: usize| {
            model.forward(&input()).unwrap().cross_entropy_for_logits(&targets)
        };
        assert_training(expected, |seed| {
            let sgd = Sgd { rate: 0.1, momentum: 0.0, decay: 0.0, velocities: Vec::new() };
            Trained::new(plain(kind), sgd, steps, loss, seed)
        });
    }
}

#[test]
fn a_text_has_the_same_classes_whatever_batch_it_is_in() {
    let encoder = AwdLstmOptions { embedding: 8, hidden: 12, ..AwdLstmOptions::classifier() };
    let options = TextClassifierOptions { encoder, seq_len: 5, ..Default::default() };
    let builder = Model::builder().device(numeric_device()).kind(Kind::Double);
    let mut model = builder.build(|path| TextClassifier::new(path, 26, 3, &options)).unwrap();
    model.eval();
    let words =
        |count: i64| (0..count).map(|place| 2 + (7 * place + count) % 24).collect::<Vec<_>>();
    // Whole parts of padding in front, the rest at the end.
    let padded = |count: i64, width: i64| {
        let padding = width - count;
        let (front, end) = (padding / 5 * 5, padding % 5);
        [vec![1; front as usize], words(count), vec![1; end as usize]].concat()
    };
    let scores = |rows: &[Vec<i64>]| {
        let width = rows[0].len() as i64;
        let batch = on_device(&Tensor::from_slice(&rows.concat())).view([rows.len() as i64, width]);
        tch::no_grad(|| model.forward(&batch)).unwrap()
    };
    for count in 1..=13 {
        let alone = scores(&[words(count)]);
        for width in count..=27 {
            let found = scores(&[words(width), padded(count, width)]).get(1).unsqueeze(0);
            assert!(found.allclose(&alone, 1e-12, 1e-12, false), "{count} words among {width}");
        }
    }
}

#[test]
fn pooling_is_fastais() {
    for case in golden()["awd_lstm"]["masked_concat_pool"]["cases"].as_array().unwrap() {
        let shape: Vec<i64> = serde_json::from_value(case["shape"].clone()).unwrap();
        let list = |name: &str| -> Vec<i64> { serde_json::from_value(case[name].clone()).unwrap() };
        let (front, end) = (list("padding_in_front"), list("padding_at_end"));
        let is_padding =
            |row: usize, place: i64| place < front[row] || place >= shape[1] - end[row];
        let mask: Vec<bool> = (0..shape[0] as usize)
            .flat_map(|row| (0..shape[1]).map(move |place| (row, place)))
            .map(|(row, place)| is_padding(row, place))
            .collect();
        let mask = on_device(&Tensor::from_slice(&mask)).view([shape[0], shape[1]]);
        let outputs = fill(&shape, 330, -1.0, 1.0);
        let pooled = masked_concat_pool(&outputs, &mask, case["bptt"].as_i64()).unwrap();
        assert_tensor(&pooled, &case["result"], "masked_concat_pool");
    }
}

#[test]
fn default_sizes_are_fastais() {
    let golden = golden();
    let golden = &golden["awd_lstm"]["default_sizes"];
    assert_eq!(AwdLstmOptions::classifier(), options(&golden["configs"]["clas"]));
    let options = TextClassifierOptions::default();
    let model = super::try_build(|path| TextClassifier::new(path, 1000, 2, &options)).unwrap();
    let expected = &golden["models"]["text_classifier"];
    assert_names(&model, expected);
    assert_group_ends(&model, &expected["groups"]);
}

/// What fastai takes for granted and this does not: every text's scores depend on the text alone.
#[test]
fn a_text_has_the_same_scores_in_every_batch() {
    let mut model = plain(Kind::Double);
    model.eval();
    let forward = |words: &Tensor| tch::no_grad(|| model.forward(words).unwrap());
    let together = forward(&input());
    let shuffled = on_device(&Tensor::from_slice(&[3i64, 0, 4, 2, 1]));
    let found = forward(&input().index_select(0, &shuffled));
    assert!(found.allclose(&together.index_select(0, &shuffled), 1e-12, 1e-12, false));
    // In parts of 5 words: the last part of the second text is padding, and not that of the shorter third one,
    // which fastai leaves out then.
    let word = |length: i64| super::doc(length, length);
    let layout = [(0, 13), (0, 9), (10, 2)];
    let padded = layout.map(|(front, length)| {
        let ends = [Tensor::ones([front], int()), Tensor::ones([13 - front - length], int())];
        Tensor::cat(&[&ends[0], &word(length), &ends[1]], 0)
    });
    let encode = |words: &Tensor| tch::no_grad(|| model.module().encode(words).unwrap());
    let (together, padding) = encode(&Tensor::stack(&padded, 0));
    assert_eq!(values(&padding).iter().sum::<f64>(), 3.0 * 13.0 - 13.0 - 9.0 - 2.0);
    for (row, (front, length)) in (0..).zip(layout) {
        let (alone, _) = encode(&word(length).unsqueeze(0));
        let found = together.narrow(0, row, 1).narrow(1, front, length);
        assert!(alone.allclose(&found, 1e-12, 1e-12, false), "{length} words");
    }
}

fn int() -> (Kind, tch::Device) {
    (Kind::Int64, numeric_device())
}

#[test]
fn texts_without_words_are_refused() {
    let model = plain(Kind::Float);
    let refused = |words: &Tensor| model.forward(words).unwrap_err().to_string();
    let padding = on_device(&Tensor::from_slice(&[2i64, 3, 1, 1])).view([2, 2]);
    assert!(
        refused(&padding).starts_with("text 1 of the batch has no word other than padding (1)")
    );
    assert!(refused(&padding.narrow(1, 0, 0)).starts_with("a batch of 2 texts of 0 words"));
    let mut short =
        classifier_options(&golden()["awd_lstm"]["classifiers"]["cases"]["plain"]["args"]);
    short.max_len = Some(2);
    let model = super::try_build(|path| TextClassifier::new(path, 26, 3, &short)).unwrap();
    let error = model.forward(&input()).unwrap_err().to_string();
    assert!(
        error.contains("max_len 2 keeps none of it: choose one of seq_len, 5, at least"),
        "{error}"
    );
    short.dropout = Some(vec![0.1, 0.2]);
    let error =
        super::try_build(|path| TextClassifier::new(path, 26, 3, &short)).unwrap_err().to_string();
    assert!(error.contains("3 probabilities of dropout for 2 linear layers"), "{error}");
}
