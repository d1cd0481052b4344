//! AWD-LSTM beside fastai: first values and trainings with all dropouts from one seed, files both ways.

use std::path::{Path, PathBuf};
use std::process::Command;

use brigade_models::{
    AwdLstm, AwdLstmOptions, LanguageModel, LanguageModelOptions, PretrainedLanguageModel,
    RecurrentState, TextClassifier, TextClassifierOptions, save_encoder,
};
use brigade_nn::{Model, Module, ParamPath, StateDict, weights};
use brigade_test_needs::{Need, needs};
use tch::{Kind, Tensor};

const WORDS: i64 = 50;

fn text(number: i64, rows: i64, length: i64) -> Tensor {
    let word = |place: i64| 2 + (5 * number + 3 * place + place / 4) % (WORDS - 2);
    Tensor::from_slice(&(0..rows * length).map(word).collect::<Vec<_>>()).view([rows, length])
}

#[needs(Fastai)]
fn trainings_and_files_are_fastais() {
    tch::set_num_threads(1);
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path();
    let small = |options: AwdLstmOptions| AwdLstmOptions { embedding: 8, hidden: 12, ..options };
    let encoder = small(AwdLstmOptions::language_model());
    tch::manual_seed(5);
    let mut own = Model::new(|path| AwdLstm::new(path, WORDS, &encoder)).unwrap();
    save_encoder(&own, folder.join("encoder.pth")).unwrap();
    let expected = run_fastai(folder);
    own.eval();
    let output = tch::no_grad(|| own.forward(&text(3, 2, 7)).unwrap());
    assert_close(&output, expected.get("encoder.output").unwrap(), 1e-6, "encoder.output");

    for (name, tie_weights) in [("tied", true), ("untied", false)] {
        let options =
            LanguageModelOptions { encoder, tie_weights, ..LanguageModelOptions::default() };
        let build = |path: &ParamPath<'_>| LanguageModel::new(path, WORDS, &options);
        let batches: Vec<_> = (0..4).map(|step| (text(step, 4, 6), text(step + 1, 4, 6))).collect();
        let trained = trains_alike(name, build, LanguageModel::state, &batches, &expected);

        // Its file, with an optimizer beside the model.
        let vocabulary: Vec<String> = (0..WORDS).map(|word| format!("w{word}")).collect();
        let file = folder.join(format!("{name}.pth"));
        let pretrained = PretrainedLanguageModel::load(file, vocabulary.clone()).unwrap();
        let mut model = Model::new(build).unwrap();
        if tie_weights {
            let report = pretrained.load_into(&mut model, &vocabulary).unwrap();
            assert_eq!((report.loaded, report.known), (16, 50));
            assert_state(&model.state_dict(), &trained.state_dict(), 2e-5, "pretrained");
        }
    }

    let mut encoder = small(AwdLstmOptions::classifier());
    // The dropout layers here have a generator of their own.
    encoder.dropout.output = 0.0;
    let options = TextClassifierOptions {
        encoder,
        seq_len: 5,
        max_len: Some(10),
        hidden: vec![6],
        dropout: Some(vec![0.0]),
        fastai_last: true,
        ..TextClassifierOptions::default()
    };
    let words = text(1, 4, 13);
    for (row, start, length) in [(2, 0, 5), (2, 12, 1), (3, 0, 10)] {
        let _ = words.get(row).narrow(0, start, length).fill_(1);
    }
    let targets = Tensor::from_slice(&[0i64, 1, 2, 0]);
    let batches: Vec<_> =
        (0..3).map(|_| (words.shallow_clone(), targets.shallow_clone())).collect();
    let build = |path: &ParamPath<'_>| TextClassifier::new(path, WORDS, 3, &options);
    trains_alike("classifier", build, TextClassifier::state, &batches, &expected);
}

fn run_fastai(folder: &Path) -> StateDict {
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/make_awd_lstm.py");
    let python = brigade_test_needs::python(Need::Fastai).unwrap();
    let output = Command::new(python).arg(script).arg(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    weights::load(folder.join("expected.safetensors")).unwrap()
}

/// From one seed: the first values, then steps in which every dropout draws what fastai's draws.
fn trains_alike<M>(
    name: &str,
    build: impl Fn(&ParamPath<'_>) -> M,
    state: impl Fn(&M) -> &RecurrentState,
    batches: &[(Tensor, Tensor)],
    expected: &StateDict,
) -> Model<M>
where
    M: for<'a> Module<&'a Tensor, Output = Tensor>,
{
    let part = |part: &str| {
        let prefix = format!("{name}.{part}.");
        let mut chosen = StateDict::new();
        for (name, tensor) in expected.iter() {
            if let Some(name) = name.strip_prefix(&prefix) {
                chosen.insert(name, tensor.shallow_clone()).unwrap();
            }
        }
        chosen
    };
    tch::manual_seed(17);
    let mut model = Model::new(build).unwrap();
    assert_state(&model.state_dict(), &part("initial"), 1e-7, &format!("{name}: first values"));
    let state = state(model.module()).clone();
    state.keep_outputs(true);
    tch::manual_seed(29);
    let mut losses = Vec::new();
    for (words, targets) in batches {
        let scores = model.forward(words).unwrap();
        let classes = *scores.size().last().unwrap();
        let loss = scores.view([-1, classes]).cross_entropy_for_logits(&targets.view([-1]));
        losses.push(loss.double_value(&[]));
        let added = state.take_outputs().unwrap().regularization(2.0, 1.0).unwrap();
        (loss + added).backward();
        tch::no_grad(|| {
            for parameter in model.parameters() {
                let mut tensor = parameter.tensor;
                let _ = tensor.g_sub_(&(tensor.grad() * 0.2));
            }
        });
        model.zero_grad().unwrap();
    }
    let theirs = expected.get(&format!("{name}.losses")).unwrap();
    assert_close(&Tensor::from_slice(&losses), theirs, 1e-5, &format!("{name}: losses"));
    assert_state(&model.state_dict(), &part("trained"), 2e-5, name);
    model
}

fn assert_state(found: &StateDict, expected: &StateDict, noise: f64, what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (name, tensor) in found.iter() {
        assert_close(tensor, expected.get(name).unwrap(), noise, &format!("{what}: {name}"));
    }
}

fn assert_close(found: &Tensor, expected: &Tensor, noise: f64, what: &str) {
    assert_eq!(found.size(), expected.size(), "{what}");
    let error = (found.to_kind(Kind::Double) - expected.to_kind(Kind::Double))
        .abs()
        .max()
        .double_value(&[]);
    assert!(error <= noise, "{what} differs by {error}");
}
