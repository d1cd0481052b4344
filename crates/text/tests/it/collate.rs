//! Collators by themselves: what is drawn, and what is refused.

use brigade_data::{BatchContext, BatchedDataset, DataError, DataLoader};
use brigade_models::{Gpt2LmHead, Gpt2Options, Tokens};
use brigade_nn::Model;
use brigade_testkit::Reviews;
use brigade_text::{
    Blocks, IGNORED, MaskedTokens, PackedTexts, Sequence, SequenceCollator, SequenceData,
    SequenceLabel, Sequences, align_labels,
};
use brigade_tokens::{BpeTrainer, TextSource};
use brigade_torch::{Result, TensorTree};
use tch::{Kind, Tensor};

fn numbers(tensor: &Tensor) -> Vec<i64> {
    tensor.reshape([-1]).try_into().unwrap()
}

/// Rows of `[CLS]` 1, 28 tokens from 10 to 999, `[SEP]` 2.
fn sequences(count: usize) -> Vec<Sequence> {
    let token = |row: usize, at: usize| 10 + ((row * 131 + at * 37) % 990) as i64;
    let ids = |row| [vec![1], (0..28).map(|at| token(row, at)).collect(), vec![2]].concat();
    (0..count).map(|row| Sequence::new(ids(row))).collect()
}

fn hiding() -> MaskedTokens {
    MaskedTokens::new(3, 1000, [0, 1, 2, 3]).unwrap()
}

#[test]
fn hidden_tokens_have_the_shares_of_bert_and_are_never_special() {
    let data = SequenceData::new(sequences(1000), SequenceCollator::new(0).masked(hiding()));
    let all: Vec<usize> = (0..1000).collect();
    let context = BatchContext { seed: 4, ..BatchContext::default() };
    let batch = data.batch(&all, &context).unwrap();
    let (mut chosen, mut masked, mut kept) = (0, 0, 0);
    let before: Vec<i64> = sequences(1000).into_iter().flat_map(|sequence| sequence.ids).collect();
    let labels = numbers(batch.labels.as_ref().unwrap());
    for ((before, id), label) in before.iter().zip(numbers(&batch.input_ids)).zip(labels) {
        if label == IGNORED {
            assert_eq!(*before, id);
            continue;
        }
        assert!(label >= 10 && label == *before);
        chosen += 1;
        masked += usize::from(id == 3);
        kept += usize::from(id == label);
    }
    let near = |found: usize, of: usize, share: f64| {
        // Five standard deviations of a binomial.
        let deviation = (of as f64 * share * (1.0 - share)).sqrt();
        assert!(
            (found as f64 - of as f64 * share).abs() < 5.0 * deviation,
            "{found} of {of}: {share}"
        );
    };
    near(chosen, 28_000, 0.15);
    near(masked, chosen, 0.8 + 0.1 / 1000.0);
    near(kept, chosen, 0.1 + 0.1 / 1000.0);
}

#[test]
fn draws_are_the_same_at_any_number_of_threads_and_new_in_each_epoch() {
    let epochs = |threads: usize| -> Vec<Vec<i64>> {
        let data = SequenceData::new(sequences(50), SequenceCollator::new(0).masked(hiding()));
        let loader =
            DataLoader::new(data).batch_size(7).shuffle(true).seed(9).threads(threads).prefetch(8);
        (0..2)
            .map(|_| loader.iter().flat_map(|batch| numbers(&batch.unwrap().input_ids)).collect())
            .collect()
    };
    let alone = epochs(0);
    assert_eq!(alone, epochs(3));
    let sorted = |ids: &Vec<i64>| {
        let mut ids = ids.clone();
        ids.sort_unstable();
        ids
    };
    assert_ne!(sorted(&alone[0]), sorted(&alone[1]));
}

#[test]
fn whole_words_are_hidden_whole() {
    let words = |sequence: Sequence| {
        let words = (0..30u32).map(|at| (1..29).contains(&at).then_some(at / 3)).collect();
        sequence.words(words)
    };
    let collator = SequenceCollator::new(0).masked(hiding().whole_words(true));
    let rows: Vec<Sequence> = sequences(400).into_iter().map(words).collect();
    let seeds: Vec<u64> = (0..400).collect();
    let batch = collator.collate(&rows, &seeds).unwrap();
    let (ids, labels) = (numbers(&batch.input_ids), numbers(&batch.labels.unwrap()));
    let mut hidden = 0;
    for (ids, labels) in ids.chunks(30).zip(labels.chunks(30)) {
        assert_eq!((ids[0], ids[29], labels[0], labels[29]), (1, 2, IGNORED, IGNORED));
        for at in 1..29 {
            assert_eq!(labels[at] != IGNORED, ids[at] == 3);
            if at % 3 != 0 && at > 1 {
                assert_eq!(ids[at] == 3, ids[at - 1] == 3, "a word is hidden in part");
            }
            hidden += usize::from(at % 3 == 0 && ids[at] == 3);
        }
    }
    // 9 words begin at such places in each row: 540 are expected, with a deviation of 21.
    assert!((430..650).contains(&hidden), "{hidden}");
    let error = collator.collate(&sequences(1), &[0]).unwrap_err().to_string();
    assert!(error.contains("has no word numbers"), "{error}");
}

#[test]
fn labels_of_every_kind_are_joined_and_mixed_ones_are_named() {
    let collate = |labels: Vec<SequenceLabel>| {
        let label = |label| Sequence::new(vec![5, 6]).label(label);
        let sequences: Vec<Sequence> = labels.into_iter().map(label).collect();
        SequenceCollator::new(0).collate(&sequences, &[])
    };
    let kinds = |batch: Result<brigade_text::SequenceBatch>| {
        let labels = batch.unwrap().labels.unwrap();
        (labels.kind(), labels.size())
    };
    use SequenceLabel::{Class, Number, Numbers, Tokens};
    assert_eq!(kinds(collate(vec![Class(1), Class(0)])), (Kind::Int64, vec![2]));
    assert_eq!(kinds(collate(vec![Number(1.5), Number(0.0)])), (Kind::Float, vec![2]));
    let rows = vec![Numbers(vec![1.0, 0.0, 1.0]); 2];
    assert_eq!(kinds(collate(rows)), (Kind::Float, vec![2, 3]));
    let error = |labels| collate(labels).unwrap_err().to_string();
    let mixed = error(vec![Class(1), Number(1.0)]);
    assert!(
        mixed.starts_with("sample 1 of the batch has a number, the first has a class"),
        "{mixed}"
    );
    let widths = error(vec![Numbers(vec![1.0]), Numbers(vec![1.0, 2.0])]);
    assert!(widths.contains("2 numbers, the first has 1 number:"), "{widths}");
    assert!(error(vec![Tokens(vec![1, 2]), Class(1)]).contains("sample 1 of the batch has"));
    assert!(error(vec![Tokens(vec![1])]).contains("has 2 tokens and 1 label:"));
}

#[test]
fn sequences_that_do_not_fit_are_named() {
    let one = [Sequence::new(vec![5, 6, 7])];
    let error = |collator: SequenceCollator, sequences: &[Sequence]| {
        collator.collate(sequences, &[]).unwrap_err().to_string()
    };
    let collator = SequenceCollator::new(0);
    assert!(
        error(collator.clone().max_length(2), &one)
            .contains("a sequence of 3 tokens does not fit in 2")
    );
    assert!(
        error(collator.clone().masked(hiding()), &one)
            .contains("found 0 seeds for 1 sequence whose")
    );
    let typed = [Sequence::new(vec![5]).type_ids(vec![0]), Sequence::new(vec![6])];
    assert!(error(collator.clone(), &typed).starts_with("sample 1 of the batch has none"));
    assert!(matches!(
        collator.collate(&[], &[]).unwrap_err().downcast_ref(),
        Some(DataError::EmptyBatch)
    ));
    assert!(hiding().probability(1.5).is_err() && hiding().shares(0.8, 0.3).is_err());
    assert!(hiding().shares(f64::NAN, 0.3).is_err() && MaskedTokens::new(0, 0, []).is_err());
    assert!(
        align_labels(&[Some(2)], &[1, 2], false)
            .unwrap_err()
            .to_string()
            .contains("word 2 has no label")
    );
    let data = SequenceData::new(sequences(2), collator);
    assert!(matches!(
        data.batch(&[2], &BatchContext::default()).unwrap_err().downcast_ref(),
        Some(DataError::Index { .. })
    ));
}

#[test]
fn a_batch_is_a_struct_and_makes_the_tuples_of_a_learner() {
    let collator = SequenceCollator::new(0).causal();
    let batch = || collator.collate(&sequences(4), &[]).unwrap();
    let halves = batch().split_rows(2).unwrap();
    assert_eq!(halves[1].input_ids.size(), [2, 30]);
    let ((ids, mask), labels) = batch().masked();
    assert_eq!((ids.size(), mask.kind(), labels.unwrap()), (vec![4, 30], Kind::Int64, ids));
    let ((_, _, types), _) = batch().typed().unwrap();
    assert_eq!(types.sum(Kind::Int64).int64_value(&[]), 0);
}

#[test]
fn blocks_are_the_texts_one_after_the_other() {
    let texts: Vec<Vec<u32>> =
        (0..9).map(|text| (0..text * 3).map(|at| text * 100 + at).collect()).collect();
    let all: Vec<i64> = texts.concat().into_iter().map(i64::from).collect();
    let blocks = Blocks::new(texts.clone(), 7).unwrap();
    assert_eq!((blocks.len(), blocks.lengths()[0]), (all.len() / 7, 7));
    let cut: Vec<i64> =
        (0..blocks.len()).flat_map(|block| blocks.get(block).unwrap().ids).collect();
    assert_eq!(cut, all[..cut.len()]);
    assert!(blocks.get(blocks.len()).is_err());
    let error = Blocks::new(texts, 200).unwrap_err().to_string();
    assert!(
        error.contains("9 texts of 108 tokens in all cannot be cut into sequences of 200"),
        "{error}"
    );
    assert!(Blocks::new(vec![vec![1i64]], 0).is_err());
}

#[test]
fn packed_rows_have_every_token_once_and_little_padding() {
    let length = |text: usize| 1 + text * 7919 % 130;
    let texts: Vec<Vec<i64>> = (0..500).map(|text| vec![text as i64 + 1; length(text)]).collect();
    let all: usize = texts.iter().map(Vec::len).sum();
    let packed = PackedTexts::new(texts.clone(), 64, 0).unwrap();
    // First fit decreasing takes at most 11/9 of the least number of rows.
    assert!(packed.num_samples() <= all.div_ceil(64) * 11 / 9 + 1);
    let rows: Vec<usize> = (0..packed.num_samples()).collect();
    let batch = packed.batch(&rows, &BatchContext::default()).unwrap();
    let (ids, places) = (numbers(&batch.input_ids), numbers(&batch.position_ids));
    let (sequences, labels) = (numbers(&batch.sequence_ids), numbers(&batch.labels));
    let mut found = vec![0; 501];
    for place in 0..ids.len() {
        found[ids[place] as usize] += 1;
        assert_eq!(ids[place] == 0, sequences[place] == 0);
        let begins = sequences[place] == 0 || places[place] == 0;
        assert_eq!(labels[place], if begins { IGNORED } else { ids[place] });
        if !begins {
            assert_eq!((ids[place - 1], places[place - 1] + 1), (ids[place], places[place]));
        }
    }
    let lengths: Vec<usize> = texts.iter().map(Vec::len).collect();
    assert_eq!(found[1..], lengths);
    assert_eq!(found[0], packed.num_samples() * 64 - all);

    let mask = batch.attention_mask(true).unwrap();
    assert_eq!((mask.kind(), mask.size()), (Kind::Bool, vec![rows.len() as i64, 1, 64, 64]));
    for row in [0, rows.len() - 1] {
        for (from, to) in [(0, 0), (5, 3), (3, 5), (63, 0), (40, 20), (63, 63), (63, 62)] {
            let of = |place: usize| sequences[row * 64 + place];
            let sees = from == to || (of(from) == of(to) && of(from) != 0 && to < from);
            let found = mask.get(row as i64).get(0).get(from as i64).get(to as i64);
            assert_eq!(found.int64_value(&[]) == 1, sees, "row {row}: {from} and {to}");
        }
    }
    let both = batch.attention_mask(false).unwrap();
    assert!(both.equal(&both.transpose(-1, -2)));
    assert!(PackedTexts::new(texts, 0, 0).is_err());
    assert!(PackedTexts::new(vec![Vec::<i64>::new()], 8, 0).is_err());
}

#[test]
fn pairs_of_a_tokenizer_of_hugging_face_become_batches() {
    let pairs: Vec<[String; 2]> = (0..12)
        .map(|index| Reviews::new(1).pair(index))
        .map(|(first, second, _)| [first, second])
        .collect();
    let texts = TextSource::rows(pairs.clone()).unwrap().mark_fields(false);
    let trainer = BpeTrainer::new(400).special_tokens(["[PAD]", "[MASK]"]);
    let tokenizer = trainer.train(&texts).unwrap();
    let [pad, mask] = ["[PAD]", "[MASK]"].map(|token| i64::from(tokenizer.id(token).unwrap()));
    let mut sequences = Vec::new();
    for [first, second] in &pairs {
        let encoding = tokenizer.encode_pair(first, second).unwrap();
        let sequence = Sequence::from(&encoding);
        assert_eq!(sequence.ids.len(), encoding.len());
        let words: Vec<i64> = (0..200).collect();
        let aligned = align_labels(&encoding.word_ids, &words, true).unwrap();
        let of_words = encoding.word_ids.iter().map(|word| word.map_or(IGNORED, i64::from));
        assert!(aligned.into_iter().eq(of_words));
        sequences.push(sequence);
    }
    let special: Vec<i64> = tokenizer.special_ids().into_iter().map(i64::from).collect();
    let hiding =
        MaskedTokens::new(mask, tokenizer.vocab_size(), special).unwrap().whole_words(true);
    let before = sequences.clone();
    let data =
        SequenceData::new(sequences, SequenceCollator::new(pad).multiple_of(8).masked(hiding));
    for batch in &DataLoader::new(data).batch_size(12).seed(1) {
        let batch = batch.unwrap();
        let width = batch.input_ids.size()[1];
        assert_eq!(width % 8, 0);
        let (ids, labels) = (numbers(&batch.input_ids), numbers(batch.labels.as_ref().unwrap()));
        assert!(ids.contains(&mask));
        for (row, sequence) in before.iter().enumerate() {
            for (at, id) in sequence.ids.iter().enumerate() {
                let place = row * width as usize + at;
                let shown = if labels[place] == IGNORED { ids[place] } else { labels[place] };
                assert_eq!((shown, labels[place] == IGNORED), (*id, ids[place] != mask));
            }
        }
    }
}

#[test]
fn a_model_reads_packed_texts_as_if_each_were_alone() {
    tch::manual_seed(7);
    let options =
        Gpt2Options { vocab_size: 60, n_embd: 16, n_head: 2, n_layer: 2, ..Gpt2Options::default() };
    let mut model = Model::new(|path| Gpt2LmHead::new(path, &options)).unwrap();
    model.eval();
    let texts: Vec<Vec<i64>> =
        (0..9).map(|text| (0..=text).map(|at| 1 + (7 * text + at) % 59).collect()).collect();
    let packed = PackedTexts::new(texts.clone(), 12, 0).unwrap();
    let rows: Vec<usize> = (0..packed.num_samples()).collect();
    let batch = packed.batch(&rows, &BatchContext::default()).unwrap();
    let mask = batch.attention_mask(true).unwrap();
    let tokens = Tokens {
        attention_mask: Some(&mask),
        position_ids: Some(&batch.position_ids),
        ..Tokens::from(&batch.input_ids)
    };
    let scores = tch::no_grad(|| model.forward(tokens)).unwrap();
    let sequences = Vec::<Vec<i64>>::try_from(&batch.sequence_ids).unwrap();
    let mut met = 0;
    for (row, sequences) in sequences.iter().enumerate() {
        for number in 1..=*sequences.iter().max().unwrap() {
            let of_text = |tensor: &Tensor| {
                let places = sequences.iter().enumerate().filter(|(_, found)| **found == number);
                let places: Vec<i64> = places.map(|(place, _)| place as i64).collect();
                tensor.get(row as i64).index_select(0, &Tensor::from_slice(&places))
            };
            let alone = of_text(&batch.input_ids);
            assert!(texts.contains(&numbers(&alone)));
            let expected = tch::no_grad(|| model.forward(&alone.unsqueeze(0))).unwrap().get(0);
            let difference = (of_text(&scores) - expected).abs().max().double_value(&[]);
            assert!(difference < 1e-5, "row {row}, text {number}: {difference}");
            met += 1;
        }
    }
    assert_eq!(met, 9);
}
