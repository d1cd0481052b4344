//! Collators against those of transformers: on cases whose results are in a file, and on random ones where
//! transformers is installed.

use std::path::PathBuf;
use std::process::Command;

use brigade_data::{BatchContext, BatchedDataset};
use brigade_sampling::{Sampler, Shuffle};
use brigade_test_needs::{Need, needs};
use brigade_text::{
    LengthGrouped, MaskedTokens, PackedTexts, Sequence, SequenceBatch, SequenceCollator,
    SequenceLabel, words_of_offsets,
};
use brigade_tokens::Side;
use fastrand::Rng;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tch::Tensor;

/// The special tokens of the script's tokenizer are 0 to 4: padding, unknown, `[CLS]`, `[SEP]`, `[MASK]`.
const MASK: i64 = 4;
const SEED: u64 = 11;

#[derive(Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
enum Case {
    Padding(Padded),
    Tokens(Padded),
    Causal(Padded),
    Masked(Padded),
    WholeWords(Padded),
    Flat { texts: Vec<Vec<i64>> },
    Words { offsets: Vec<(usize, usize)>, special: Vec<bool> },
    Grouped { lengths: Vec<usize>, batch_size: usize, permutation: Vec<usize> },
}

#[derive(Serialize, Deserialize)]
struct Padded {
    sequences: Vec<Features>,
    #[serde(with = "side")]
    side: Side,
    max_length: Option<usize>,
    multiple_of: Option<usize>,
    probability: f64,
}

/// A side as transformers names it.
mod side {
    use brigade_tokens::Side;
    use serde::{Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(side: &Side, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(if *side == Side::Left { "left" } else { "right" })
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(side: D) -> Result<Side, D::Error> {
        Ok(if String::deserialize(side)? == "left" { Side::Left } else { Side::Right })
    }
}

#[derive(Serialize, Deserialize)]
struct Features {
    input_ids: Vec<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    token_type_ids: Option<Vec<i64>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    special_tokens_mask: Option<Vec<u8>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset_mapping: Option<Vec<(usize, usize)>>,
    #[serde(skip_serializing_if = "Option::is_none")]
    label: Option<i64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    labels: Option<Vec<i64>>,
}

#[derive(Deserialize)]
struct Done {
    #[serde(flatten)]
    case: Case,
    result: Value,
}

#[needs()]
fn batches_are_those_of_a_file() {
    let done: Vec<Done> =
        serde_json::from_str(include_str!("../golden/transformers.json")).unwrap();
    assert_eq!(done.len(), 16);
    done.iter().for_each(agrees);
}

#[needs(TorchModels)]
fn batches_of_random_sequences_are_the_same() {
    let folder = tempfile::tempdir().unwrap();
    let [given, made] = ["given.json", "made.json"].map(|file| folder.path().join(file));
    let mut random = brigade_test_needs::random();
    let cases: Vec<Case> = (0..240).map(|number| random_case(number, &mut random)).collect();
    std::fs::write(&given, serde_json::to_string(&cases).unwrap()).unwrap();
    let script = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/transformers/collate.py");
    let python = brigade_test_needs::python(Need::TorchModels).unwrap();
    let output = Command::new(python).arg(script).arg(&given).arg(&made).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let done: Vec<Done> = serde_json::from_str(&std::fs::read_to_string(made).unwrap()).unwrap();
    assert_eq!(done.len(), cases.len());
    done.iter().for_each(agrees);
}

/// Compares what this crate makes of a case with what transformers has made of it.
fn agrees(done: &Done) {
    let Done { case, result } = done;
    let found = match case {
        Case::Padding(it) | Case::Tokens(it) => it.batch(&collator(it)),
        Case::Causal(it) => it.batch(&collator(it).causal()),
        Case::Masked(it) => it.batch(&collator(it).masked(it.hiding())),
        Case::WholeWords(it) => it.batch(&collator(it).masked(it.hiding().whole_words(true))),
        Case::Flat { texts } => flat(texts),
        Case::Words { offsets, special } => {
            let words = words_of_offsets(offsets, special);
            json!(
                words
                    .into_iter()
                    .map(|word| word.map_or(-1, |word| i64::from(word) + 1))
                    .collect::<Vec<_>>()
            )
        }
        Case::Grouped { lengths, batch_size, .. } => {
            json!(LengthGrouped::new(lengths.clone(), *batch_size, SEED).order(0))
        }
    };
    assert_eq!(&found, result, "{}", serde_json::to_string(case).unwrap());
}

fn collator(it: &Padded) -> SequenceCollator {
    let collator = SequenceCollator::new(0).side(it.side).multiple_of(it.multiple_of.unwrap_or(1));
    it.max_length.into_iter().fold(collator, SequenceCollator::max_length)
}

impl Padded {
    fn hiding(&self) -> MaskedTokens {
        let masked = MaskedTokens::new(MASK, 100, [0, 1, 2, 3, 4]).unwrap();
        masked.probability(self.probability).unwrap().shares(1.0, 0.0).unwrap()
    }

    fn batch(&self, collator: &SequenceCollator) -> Value {
        let sequences: Vec<Sequence> = self.sequences.iter().map(Features::sequence).collect();
        let seeds: Vec<u64> = (0..sequences.len() as u64).collect();
        let batch = collator.collate(&sequences, &seeds).unwrap();
        let SequenceBatch { input_ids, attention_mask, token_type_ids, labels } = batch;
        let mut found =
            json!({ "input_ids": list(&input_ids), "attention_mask": list(&attention_mask) });
        if let Some(types) = token_type_ids {
            found["token_type_ids"] = list(&types);
        }
        if let Some(labels) = labels {
            found["labels"] = list(&labels);
        }
        found
    }
}

impl Features {
    fn sequence(&self) -> Sequence {
        let mut sequence = Sequence::new(self.input_ids.clone());
        sequence.type_ids = self.token_type_ids.clone();
        let special: Option<Vec<bool>> =
            self.special_tokens_mask.as_ref().map(|mask| mask.iter().map(|it| *it == 1).collect());
        if let (Some(offsets), Some(special)) = (&self.offset_mapping, &special) {
            sequence.words = Some(words_of_offsets(offsets, special));
        }
        sequence.special = special;
        let of_tokens = self.labels.clone().map(SequenceLabel::Tokens);
        sequence.label = self.label.map(SequenceLabel::Class).or(of_tokens);
        sequence
    }
}

/// The texts in one row, in the order of their lengths, in which the script has them as well.
fn flat(texts: &[Vec<i64>]) -> Value {
    let tokens = texts.iter().map(Vec::len).sum();
    let packed = PackedTexts::new(texts.to_vec(), tokens, 0).unwrap();
    assert_eq!((packed.num_samples(), packed.padding()), (1, 0.0));
    let batch = packed.batch(&[0], &BatchContext::default()).unwrap();
    json!({
        "input_ids": list(&batch.input_ids),
        "labels": list(&batch.labels),
        "position_ids": list(&batch.position_ids),
        "seq_idx": list(&(batch.sequence_ids - 1)),
    })
}

fn list(tensor: &Tensor) -> Value {
    match tensor.dim() {
        1 => json!(Vec::<i64>::try_from(tensor).unwrap()),
        _ => json!(Vec::<Vec<i64>>::try_from(tensor).unwrap()),
    }
}

fn random_case(number: usize, random: &mut Rng) -> Case {
    match number % 8 {
        5 => {
            let rows = random.usize(1..6);
            let mut texts: Vec<Vec<i64>> = (0..rows).map(|_| random_ids(random)).collect();
            texts.sort_by_key(|text| std::cmp::Reverse(text.len()));
            Case::Flat { texts }
        }
        6 => {
            let special: Vec<bool> = random_ids(random).iter().map(|id| *id < 5).collect();
            Case::Words { offsets: random_offsets(&special, random), special }
        }
        7 => {
            let texts = random.usize(1..300);
            let lengths: Vec<usize> = (0..texts).map(|_| random.usize(1..40)).collect();
            let permutation = Shuffle::new(lengths.len(), SEED).order(0);
            Case::Grouped { lengths, batch_size: random.usize(1..10), permutation }
        }
        kind => {
            let typed = random.bool();
            let sequences =
                (0..random.usize(1..7)).map(|_| features(kind, typed, random)).collect();
            let padded = Padded {
                sequences,
                side: if random.bool() { Side::Left } else { Side::Right },
                max_length: (kind < 2 && random.bool()).then(|| random.usize(12..20)),
                multiple_of: random.bool().then(|| random.usize(1..9)),
                // Between 0 and 1, draws are each side's own.
                probability: if random.u8(0..4) == 0 { 0.0 } else { 1.0 },
            };
            match kind {
                0 => Case::Padding(padded),
                1 => Case::Tokens(padded),
                2 => Case::Causal(padded),
                3 => Case::Masked(padded),
                _ => Case::WholeWords(padded),
            }
        }
    }
}

fn features(kind: usize, typed: bool, random: &mut Rng) -> Features {
    let input_ids = random_ids(random);
    let special: Vec<bool> = input_ids.iter().map(|id| *id < 5).collect();
    let mut of_tokens =
        |bound: i64| input_ids.iter().map(|_| random.i64(0..bound)).collect::<Vec<i64>>();
    let token_type_ids = typed.then(|| of_tokens(2));
    let labels = (kind == 1).then(|| of_tokens(7));
    Features {
        token_type_ids,
        special_tokens_mask: (kind >= 3).then(|| special.iter().map(|it| u8::from(*it)).collect()),
        offset_mapping: (kind == 4).then(|| random_offsets(&special, random)),
        label: (kind == 0).then(|| random.i64(0..3)),
        labels,
        input_ids,
    }
}

/// 1 to 12 tokens: special ones among others, padding's never.
fn random_ids(random: &mut Rng) -> Vec<i64> {
    let tokens = random.usize(1..13);
    let id = |_| if random.u8(0..5) == 0 { random.i64(2..4) } else { random.i64(5..100) };
    (0..tokens).map(id).collect()
}

/// Places of tokens, some of which touch; special ones have none.
fn random_offsets(special: &[bool], random: &mut Rng) -> Vec<(usize, usize)> {
    let mut end = 0;
    let offset = |special: &bool| {
        if *special {
            return (0, 0);
        }
        let start = end + random.usize(0..2);
        end = start + random.usize(1..5);
        (start, end)
    };
    special.iter().map(offset).collect()
}
