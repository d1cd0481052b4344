//! The language model: scores, losses, steps of training, generation.

use brigade_models::{
    LanguageModel, LanguageModelOptions, NextWordOptions, generate_words, next_word,
};
use brigade_nn::Model;
use brigade_test_device::on_device;
use tch::{Kind, Tensor};

use super::{
    KINDS, Sgd, Trained, assert_close, assert_digest, assert_groups, assert_names, assert_training,
    build, doc, golden, numbers, options, small_language_model, words,
};

#[test]
fn scores_and_losses_are_fastais() {
    let golden = golden();
    let golden = &golden["awd_lstm"];
    let (a, b) = (words(&golden["encoder"]["a"]), words(&golden["encoder"]["b"]));
    for (name, expected) in golden["language_models"].as_object().unwrap() {
        let config = &expected["config"];
        let options = LanguageModelOptions {
            encoder: options(config),
            tie_weights: config["tie_weights"].as_bool().unwrap(),
            bias: config["out_bias"].as_bool().unwrap(),
        };
        let factor = expected["drop_mult"].as_f64().unwrap();
        let options = options.drop_mult(factor);
        let dropout = options.encoder.dropout;
        for probability in expected["dropouts"].as_array().unwrap() {
            let found = match probability[0].as_str().unwrap() {
                "0.encoder_dp" => dropout.embedding,
                "0.input_dp" => dropout.input,
                "1.output_dp" => dropout.output,
                layer if layer.starts_with("0.rnns") => dropout.weight,
                _ => dropout.hidden,
            };
            assert_close(&[found], &numbers(&probability[2]), 1e-12, name);
        }
        for kind in KINDS {
            let mut model = build(kind, |path| LanguageModel::new(path, 26, &options));
            assert_names(&model, expected);
            assert_groups(&model, &expected["split_lm"]);
            model.eval();
            let forward = |words: &Tensor| tch::no_grad(|| model.forward(words).unwrap());
            let state = model.module().state();
            let scores = forward(&a);
            assert_digest(&scores, &expected["logits_a"], name);
            let rows = scores.view([-1, 26]);
            let loss = rows.cross_entropy_for_logits(&b.view([-1]));
            assert_close(&[loss.double_value(&[])], &numbers(&expected["loss_a"]), 2e-6, name);
            assert_digest(&forward(&b), &expected["then_logits_b"], name);
            state.reset();
            assert_digest(&forward(&b), &expected["reset_then_logits_b"], name);
            state.reset();
            let hidden = tch::no_grad(|| model.module().decoder_input(&a).unwrap());
            assert_digest(&hidden, &expected["raw_out"], name);
            assert_digest(&hidden, &expected["dropped_out"], name);
        }
    }
}

/// By scores and by the loss that never holds them.
#[test]
fn steps_of_training_are_fastais() {
    let golden = golden();
    for case in golden["awd_lstm"]["sgd_steps"]["cases"].as_array().unwrap() {
        for kind in KINDS {
            for fused in [false, true] {
                let steps = case["losses"].as_array().unwrap().len();
                let text = |number: usize| doc(number as i64, 21).view([3, 7]);
                let loss = |model: &Model<LanguageModel>, step: usize| {
                    let output = model.forward(&text(step)).unwrap();
                    assert_eq!(output.size()[2], if fused { 8 } else { 26 });
                    let head = model.module().head();
                    head.loss(&output, &text(step + 1), &Default::default()).unwrap().loss
                };
                assert_training(case, |seed| {
                    let model =
                        build(kind, |path| LanguageModel::new(path, 26, &small_language_model()));
                    model.module().head().fuse_loss(fused);
                    Trained::new(model, Sgd::new(&case["optimizer"]), steps, loss, seed)
                });
            }
        }
    }
}

#[test]
fn a_fused_model_gives_scores_in_evaluation() {
    let mut model =
        build(Kind::Double, |path| LanguageModel::new(path, 26, &small_language_model()));
    let head = model.module().head().clone();
    head.fuse_loss(true);
    let (text, targets) = (doc(0, 8).view([2, 4]), doc(1, 8).view([2, 4]));
    let hidden = model.forward(&text).unwrap();
    let fused = head.loss(&hidden, &targets, &Default::default()).unwrap();
    model.eval();
    model.module().state().reset();
    let scores = model.forward(&text).unwrap();
    assert_eq!(scores.size(), [2, 4, 26]);
    assert!(scores.allclose(&head.scores(&hidden).unwrap(), 1e-12, 1e-12, false));
    let plain = head.loss(&scores, &targets, &Default::default()).unwrap();
    assert_eq!(plain.count.int64_value(&[]), 8);
    assert_close(&[fused.loss.double_value(&[])], &[plain.loss.double_value(&[])], 1e-12, "loss");
}

#[test]
fn generation_goes_on_from_the_whole_text() {
    let mut model =
        build(Kind::Double, |path| LanguageModel::new(path, 26, &small_language_model()));
    let _ = model.forward(&doc(3, 8).view([2, 4])).unwrap();
    let before = model.module().state().hidden_state();
    let greedy = NextWordOptions { temperature: 0.0, never: Some(0), ..NextWordOptions::default() };
    let found = generate_words(&mut model, &[2, 9, 4], 6, &greedy).unwrap();
    assert!(model.is_training());
    let after = model.module().state().hidden_state();
    assert!(
        before
            .iter()
            .zip(&after)
            .all(|(old, new)| old.hidden == new.hidden && old.cell == new.cell)
    );

    // fastai computes the whole text again for every word.
    model.eval();
    let mut text = vec![2i64, 9, 4];
    for _ in 0..6 {
        model.module().state().reset();
        let scores = model.forward(&on_device(&Tensor::from_slice(&text)).unsqueeze(0)).unwrap();
        let _ = scores.narrow(2, 0, 1).fill_(f64::NEG_INFINITY);
        text.push(scores.select(1, -1).argmax(1, false).int64_value(&[0]));
    }
    assert_eq!(found, text[3..]);
    let alone = NextWordOptions { only_last_word: true, ..greedy };
    let found = generate_words(&mut model, &[2, 9, 4], 2, &alone).unwrap();
    assert_eq!(found[0], text[3]);
    assert_eq!(found[1], generate_words(&mut model, &found[..1], 1, &greedy).unwrap()[0]);
    let error = generate_words(&mut model, &[], 1, &greedy).unwrap_err().to_string();
    assert!(error.starts_with("nothing to continue from"), "{error}");
}

#[test]
fn words_are_drawn_by_their_probability() {
    let scores = on_device(&Tensor::from_slice(&[0.1f64, 0.2, 0.3, 0.4])).log();
    let share = |options: NextWordOptions| {
        tch::manual_seed(5);
        let mut counts = [0.0; 4];
        for _ in 0..4000 {
            counts[next_word(&scores, &options).unwrap() as usize] += 1.0 / 4000.0;
        }
        counts
    };
    let options = NextWordOptions::default();
    assert_close(&share(options), &[0.1, 0.2, 0.3, 0.4], 0.03, "plain");
    let never = NextWordOptions { never: Some(3), ..options };
    assert_close(&share(never), &[1.0 / 6.0, 1.0 / 3.0, 0.5, 0.0], 0.03, "never");
    let cold = NextWordOptions { temperature: 0.5, ..options };
    assert_close(&share(cold), &[1.0 / 30.0, 4.0 / 30.0, 0.3, 16.0 / 30.0], 0.03, "temperature");
    let likely = NextWordOptions { min_p: Some(0.25), ..options };
    assert_close(&share(likely), &[0.0, 0.0, 3.0 / 7.0, 4.0 / 7.0], 0.03, "min_p");
    // No gradient reaches it: all values stay, as in fastai.
    let none = NextWordOptions { min_p: Some(0.5), ..options };
    assert_close(&share(none), &[0.1, 0.2, 0.3, 0.4], 0.03, "min_p of none");
    let refused = |options| next_word(&scores, &options).unwrap_err().to_string();
    assert_eq!(
        refused(NextWordOptions { never: Some(4), ..options }),
        "word 4 is not in the vocabulary of 4 words"
    );
    assert!(refused(NextWordOptions { temperature: -1.0, ..options }).contains("temperature -1"));
    let broken = on_device(&Tensor::from_slice(&[f64::NAN, 0.0]));
    let error = next_word(&broken, &options).unwrap_err().to_string();
    assert!(error.starts_with("no word can be chosen"), "{error}");
}

#[test]
fn default_sizes_are_fastais() {
    let golden = golden();
    let golden = &golden["awd_lstm"]["default_sizes"];
    let config = &golden["configs"]["lm"];
    assert_eq!(LanguageModelOptions::default().encoder, options(config));
    let model =
        super::try_build(|path| LanguageModel::new(path, 1000, &LanguageModelOptions::default()))
            .unwrap();
    let expected = &golden["models"]["language_model"];
    assert_names(&model, expected);
    super::assert_group_ends(&model, &expected["groups"]);
    let words = model.parameters().remove(0).tensor;
    assert!(words.select(0, 1).abs().max().double_value(&[]) > 0.0);
    assert!(words.abs().max().double_value(&[]) <= f64::from(0.1_f32));
}
