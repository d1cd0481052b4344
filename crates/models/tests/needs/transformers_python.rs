//! Folders that transformers wrote here, and folders that it reads.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use brigade_models::{
    Bert, BertForMaskedLm, BertForSequenceClassification, BertForTokenClassification, BertOptions,
    CausalModel, GenerationOptions, Gpt2, Gpt2LmHead, LlamaForCausalLm, MixtralForCausalLm, Tokens,
    Transformer, TransformerOptions, no_decay_parameters,
};
use brigade_nn::{Model, Module, weights};
use brigade_test_needs::{Need, needs};
use tch::{Kind, Tensor};

#[needs(TorchModels)]
fn folders_go_to_transformers_and_back() {
    let (theirs, ours) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    python("write", theirs.path());
    fs::copy(theirs.path().join("inputs.safetensors"), ours.path().join("inputs.safetensors"))
        .unwrap();
    let folders = (theirs.path(), ours.path());
    let gpt2: Model<Gpt2LmHead> = agrees("gpt2", folders, Parts::One);
    writes("gpt2", theirs.path(), &gpt2);
    agrees::<Gpt2LmHead>("gpt2_untied", folders, Parts::Several);
    agrees::<Gpt2>("gpt2_body", folders, Parts::One);
    let llama: Model<LlamaForCausalLm> = agrees("llama", folders, Parts::Several);
    writes("llama", theirs.path(), &llama);
    let llama: Model<LlamaForCausalLm> = agrees("llama3", folders, Parts::One);
    writes("llama3", theirs.path(), &llama);
    let mixtral: Model<MixtralForCausalLm> = agrees("mixtral", folders, Parts::Several);
    writes("mixtral", theirs.path(), &mixtral);
    agrees::<Bert>("bert", folders, Parts::One);
    agrees::<BertForMaskedLm>("bert_masked_lm", folders, Parts::One);
    agrees::<BertForSequenceClassification>("bert_classifier", folders, Parts::Several);
    agrees::<BertForTokenClassification>("bert_tokens", folders, Parts::One);
    let options = BertOptions::from_folder(theirs.path().join("bert_tokens")).unwrap();
    assert_eq!(options.labels, ["O", "B-PER", "I-PER"]);
    python("read", ours.path());
}

fn python(what: &str, folder: &Path) {
    let script =
        PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/check_transformers.py");
    let python = brigade_test_needs::python(Need::TorchModels).unwrap();
    let output = Command::new(python).arg(script).arg(what).arg(folder).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

/// In how many files a model is written.
#[derive(Clone, Copy)]
enum Parts {
    One,
    Several,
}

/// Reads transformers' folder, computes the same, and writes a folder.
fn agrees<M>(name: &str, (theirs, ours): (&Path, &Path), parts: Parts) -> Model<M>
where
    M: Transformer + for<'a> Module<Tokens<'a>, Output = Tensor>,
{
    let inputs = weights::load(theirs.join("inputs.safetensors")).unwrap();
    let (ids, mask) = (inputs.get("ids").unwrap(), inputs.get("mask").unwrap());
    let file = format!("{name}_expected.safetensors");
    let expected = weights::load(theirs.join(&file)).unwrap();
    let expected = expected.get("output").unwrap();
    let mut model = M::from_pretrained(theirs.join(name)).unwrap();
    model.eval();
    let found = tch::no_grad(|| model.forward(Tokens::from((ids, mask)))).unwrap();
    // Outputs of padding are not used.
    let seen = |output: &Tensor| match output.dim() {
        3 => output * mask.unsqueeze(-1),
        _ => output.shallow_clone(),
    };
    let off = (seen(&found) - seen(expected)).abs().max().double_value(&[]);
    let largest = expected.abs().max().double_value(&[]).max(1.0);
    assert!(off < 1e-5 * largest, "{name}: {off} off");

    let decay = fs::read_to_string(theirs.join("decay.json")).unwrap();
    let decay: serde_json::Value = serde_json::from_str(&decay).unwrap();
    let decay = decay[name].as_array().unwrap();
    let spared = no_decay_parameters(&model);
    for parameter in model.parameters() {
        let decays = decay.iter().any(|it| *it == *parameter.name);
        assert_eq!(spared.contains(&parameter.name), !decays, "{name}: {}", parameter.name);
    }

    let folder = ours.join(name);
    match parts {
        Parts::One => M::save_pretrained(&model, &folder),
        Parts::Several => M::save_pretrained_in_parts(&model, &folder, 60_000),
    }
    .unwrap();
    fs::copy(theirs.join(&file), ours.join(&file)).unwrap();
    model
}

/// Greedy texts from rows that are padded on the left.
fn writes<M: CausalModel>(name: &str, folder: &Path, model: &Model<M>) {
    let inputs = weights::load(folder.join("inputs.safetensors")).unwrap();
    let (ids, mask) = (inputs.get("ids").unwrap(), inputs.get("mask").unwrap());
    let expected = weights::load(folder.join(format!("{name}_expected.safetensors"))).unwrap();
    let options = GenerationOptions { max_new_tokens: 9, ..GenerationOptions::default() };
    let found = options.generate(model, ids, Some(&mask.flip([1]))).unwrap();
    let same = found.eq_tensor(expected.get("greedy").unwrap()).all();
    assert_eq!(same.to_kind(Kind::Int64).int64_value(&[]), 1, "{name}");
}
