//! Loaders against fastai's: streams of a language model, padding; shares of ranks, and what is refused.

use brigade_data::{BatchContext, BatchedDataset, DataError, DataLoader};
use brigade_sampling::ShardOptions;
use brigade_text::{Documents, IGNORED, LabelledTexts, LanguageModelData, Padding, SortedSampler};
use brigade_tokens::Side;
use brigade_torch::Result;
use serde_json::Value;
use tch::Tensor;

fn golden(of: &str) -> Value {
    let text = include_str!("../golden/text.json");
    serde_json::from_str::<Value>(text).unwrap()[of].take()
}

fn cases(value: &Value) -> &[Value] {
    value.as_array().unwrap()
}

fn size(case: &Value, key: &str) -> usize {
    case[key].as_u64().unwrap() as usize
}

fn ids(value: &Value) -> Vec<i64> {
    serde_json::from_value(value.clone()).unwrap()
}

fn rows(tensor: &Tensor) -> Vec<Vec<i64>> {
    tensor.try_into().unwrap()
}

/// The golden file's texts of these lengths.
fn texts(lengths: &[usize]) -> Vec<Vec<i64>> {
    let token = |text: usize, at: usize| 2 + ((5 * text + 3 * at + at / 4) % 48) as i64;
    let text = |(text, length): (usize, &usize)| (0..*length).map(|at| token(text, at)).collect();
    lengths.iter().enumerate().map(text).collect()
}

type Step = (Vec<Vec<i64>>, Vec<Vec<i64>>);

/// The batches of an epoch.
fn steps<D: Documents + 'static>(loader: &DataLoader<LanguageModelData<D>>) -> Vec<Step> {
    let step = |batch: Result<brigade_data::Batch<(Tensor, Tensor)>>| {
        let (x, y) = batch.unwrap().into_data();
        (rows(&x), rows(&y))
    };
    loader.iter().map(step).collect()
}

#[test]
fn streams_of_a_language_model_are_fastais() {
    for case in cases(&golden("lm_loader")["cases"]) {
        let lengths: Vec<usize> = serde_json::from_value(case["lens"].clone()).unwrap();
        let (rows, seq_len) = (size(case, "bs"), size(case, "seq_len"));
        let data = LanguageModelData::new(texts(&lengths), rows, seq_len).unwrap();
        assert_eq!((data.steps(), data.num_samples()), (size(case, "len"), size(case, "n")));
        assert_eq!(data.targets(), size(case, "bl") * rows);
        let expected: Vec<Step> = serde_json::from_value(case["batches"].clone()).unwrap();
        assert_eq!(steps(&DataLoader::new(data).batch_size(rows)), expected, "{case}");
    }
}

/// Puts the batches of ranks beside each other.
fn joined(ranks: Vec<Vec<Step>>) -> Vec<Step> {
    let mut ranks = ranks.into_iter();
    let mut all = ranks.next().unwrap();
    for rank in ranks {
        assert_eq!(rank.len(), all.len());
        for ((all_x, all_y), (x, y)) in all.iter_mut().zip(rank) {
            all_x.extend(x);
            all_y.extend(y);
        }
    }
    all
}

#[test]
fn ranks_have_their_own_rows_at_every_step_however_batches_are_shared_out() {
    let lengths: Vec<usize> = (0..57).map(|text| text * 13 % 29).collect();
    let loader = |batch_size| {
        let data = LanguageModelData::new(texts(&lengths), 12, 7).unwrap().shuffle(true);
        DataLoader::new(data).batch_size(batch_size).seed(5).threads(2)
    };
    let alone = steps(&loader(12));
    let first: Vec<i64> = alone.iter().flat_map(|(x, _)| x[0].clone()).collect();
    assert_ne!(
        first,
        texts(&lengths).concat()[..first.len()],
        "a shuffle changes the texts' order"
    );
    for world in [2, 3, 4] {
        for split_batches in [false, true] {
            let options = ShardOptions { split_batches, ..ShardOptions::default() };
            let batch_size = if split_batches { 12 } else { 12 / world };
            let of_rank = |rank| steps(&loader(batch_size).shard(rank, world, options).unwrap());
            assert_eq!(joined((0..world).map(of_rank).collect()), alone, "{world} ranks");
        }
    }
}

#[test]
fn rows_are_streams_and_every_epoch_has_another_one() {
    let lengths = [31, 0, 17, 40, 5, 23];
    let data = LanguageModelData::new(texts(&lengths), 3, 4).unwrap().shuffle(true);
    let loader = DataLoader::new(data).batch_size(3).seed(1).threads(2).overlap_epochs(true);
    let mut firsts = Vec::new();
    for _epoch in 0..4 {
        let steps = steps(&loader);
        let stream = |row: usize, side: fn(&Step) -> &Vec<Vec<i64>>| {
            steps.iter().flat_map(|step| side(step)[row].clone()).collect::<Vec<_>>()
        };
        for row in 0..3 {
            let (x, y) = (stream(row, |step| &step.0), stream(row, |step| &step.1));
            assert_eq!((&x[1..], x.len()), (&y[..y.len() - 1], 38));
        }
        // The first row ends where the second one begins.
        assert_eq!(stream(0, |step| &step.1).last(), stream(1, |step| &step.0).first());
        firsts.push(stream(0, |step| &step.0));
    }
    firsts.sort();
    firsts.dedup();
    assert_eq!(firsts.len(), 4);
    // From the middle of an epoch, the rest is the same.
    loader.set_epoch(2);
    let whole = steps(&loader);
    loader.set_epoch(2);
    loader.set_skip_batches(5);
    assert_eq!(steps(&loader), whole[5..]);
}

#[test]
fn every_token_is_a_target_once_where_that_is_asked_for() {
    for (length, rows) in [(30, 4), (33, 4), (31, 4), (5, 4), (41, 3), (9, 1)] {
        for seq_len in [1, 3, 8, 72] {
            let text: Vec<i64> = (0..length).collect();
            let data = LanguageModelData::new(vec![text], rows, seq_len).unwrap().every_token(true);
            assert_eq!(data.targets(), length as usize - 1);
            let steps = steps(&DataLoader::new(data).batch_size(rows));
            let mut targets = Vec::new();
            for (x, y) in &steps {
                for (x, y) in x.iter().flatten().zip(y.iter().flatten()) {
                    if *y != IGNORED {
                        assert_eq!(*y, x + 1);
                        targets.push(*y);
                    }
                }
            }
            targets.sort_unstable();
            assert!(targets.into_iter().eq(1..length), "{length} tokens in {rows} rows");
        }
    }
}

#[test]
fn data_that_make_no_streams_are_named() {
    let new = |texts: Vec<Vec<i64>>, rows, seq_len| {
        LanguageModelData::new(texts, rows, seq_len).unwrap_err().to_string()
    };
    assert!(
        new(vec![], 4, 72)
            .contains("a batch of 4 rows takes at least 5 tokens, found 0 in 0 texts")
    );
    assert!(new(texts(&[2, 2]), 4, 72).contains("takes at least 5 tokens"));
    assert!(new(texts(&[9]), 0, 72).contains("0 rows of 72 tokens"));
    assert!(new(texts(&[9]), 1, 0).contains("1 row of 0 tokens"));
    assert!(LanguageModelData::new(texts(&[3, 2]), 4, 72).is_ok());
}

#[test]
fn loaders_that_would_break_the_streams_are_refused() {
    let data = || LanguageModelData::new(texts(&[100]), 4, 5).unwrap();
    let first_error = |loader: &DataLoader<_>| {
        let error = loader.iter().find_map(Result::err).expect("a batch that is refused");
        error.to_string()
    };
    let shuffled = DataLoader::new(data()).batch_size(4).shuffle(true).seed(2);
    assert!(first_error(&shuffled).contains("the loader must not shuffle"));
    assert!(first_error(&DataLoader::new(data()).batch_size(3)).contains("is not a step"));
    assert!(
        first_error(&DataLoader::new(data()).batch_size(2))
            .contains("rank 0 has 2 rows from row 2 on")
    );
    // Rows of one rank only: rank 1 would read rank 0's next step.
    let rank1 = DataLoader::new(data()).batch_size(4).shard(1, 2, ShardOptions::default()).unwrap();
    assert!(first_error(&rank1).contains("as many rows as all ranks have together"));
    let context = BatchContext::default();
    assert!(matches!(
        data().batch(&[20], &context).unwrap_err().downcast_ref(),
        Some(DataError::Index { index: 20, len: 20 })
    ));
    assert!(matches!(
        data().batch(&[], &context).unwrap_err().downcast_ref(),
        Some(DataError::EmptyBatch)
    ));
}

#[test]
fn a_large_corpus_is_neither_copied_nor_read_before_a_batch_needs_it() {
    /// Texts that are only counted, and a text that is made when it is read.
    #[derive(Debug)]
    struct Counted(std::sync::atomic::AtomicUsize);

    impl Documents for Counted {
        fn len(&self) -> usize {
            100_000
        }

        fn tokens(&self, _: usize) -> usize {
            1_000
        }

        fn read(
            &self,
            document: usize,
            range: std::ops::Range<usize>,
            ids: &mut Vec<i64>,
        ) -> Result<()> {
            self.0.fetch_add(range.len(), std::sync::atomic::Ordering::Relaxed);
            ids.extend(range.map(|at| (document * 1_000 + at) as i64));
            Ok(())
        }
    }

    let data = LanguageModelData::new(Counted(0.into()), 64, 72).unwrap();
    let loader = DataLoader::new(data).batch_size(64);
    let (x, _) = loader.iter().next().unwrap().unwrap().into_data();
    assert_eq!(x.int64_value(&[63, 71]), 63 * ((100_000_000 - 1) / 64) + 71);
    loader.set_skip_batches(loader.len() - 1);
    assert_eq!(steps(&loader).len(), 1);
}

#[test]
fn padding_is_fastais() {
    let golden = golden("padding");
    for case in cases(&golden["cases"]["pad_chunk"]) {
        let padding = if case["pad_first"].as_bool().unwrap() {
            Padding::chunks(size(case, "seq_len"))
        } else {
            Padding::at(Side::Right)
        };
        let padding = padding.id(case["pad_idx"].as_i64().unwrap());
        assert_eq!(padding.pad(&ids(&case["x"]), size(case, "pad_len")), ids(&case["result"]));
    }
    for case in cases(&golden["cases"]["pad_input"]) {
        let arguments = &case["args"];
        let flag = |name: &str| arguments[name].as_bool().unwrap_or_default();
        let side = if flag("pad_first") { Side::Left } else { Side::Right };
        let padding = Padding::at(side).id(arguments["pad_idx"].as_i64().unwrap_or(1));
        let fields = match &arguments["pad_fields"] {
            Value::Null => vec![0],
            Value::Number(field) => vec![field.as_u64().unwrap() as usize],
            fields => serde_json::from_value(fields.clone()).unwrap(),
        };
        for field in fields {
            let column = |of: &str| -> Vec<Vec<i64>> {
                cases(&case[of]).iter().map(|sample| ids(&sample[field])).collect()
            };
            let mut samples = column("samples");
            if flag("backwards") {
                samples = samples
                    .into_iter()
                    .map(|mut text| {
                        text.reverse();
                        text
                    })
                    .collect();
            }
            assert_eq!(rows(&padding.tensor(&samples).unwrap()), column("result"), "{case}");
        }
    }
    for (of, result, padding) in [
        ("pad_input_chunk", "result", None),
        ("pad_chunk_transform", "result", None),
        ("pad_chunk_transform", "result_pad_last", Some(Padding::at(Side::Right).id(0))),
    ] {
        for case in cases(&golden["cases"][of]) {
            let padding = padding.unwrap_or_else(|| Padding::chunks(size(case, "seq_len")));
            let samples = cases(&case["samples"]);
            let labels = samples.iter().map(|sample| sample[1].as_i64().unwrap()).collect();
            let texts: Vec<Vec<i64>> = samples.iter().map(|sample| ids(&sample[0])).collect();
            let all: Vec<usize> = (0..texts.len()).collect();
            let data = LabelledTexts::new(texts, labels, padding).unwrap();
            let (texts, labels) = data.batch(&all, &BatchContext::default()).unwrap();
            let found: Vec<Value> = rows(&texts)
                .into_iter()
                .zip(Vec::<i64>::try_from(&labels).unwrap())
                .map(|(text, label)| serde_json::json!([text, label]))
                .collect();
            assert_eq!(found, cases(&case[result]), "{of} {case}");
        }
    }
    assert!(matches!(
        Padding::chunks(3).tensor::<Vec<i64>>(&[]).unwrap_err().downcast_ref(),
        Some(DataError::EmptyBatch)
    ));
}

#[test]
fn sorted_validation_gives_the_ranks_texts_of_one_length() {
    let lengths: Vec<usize> = (0..41).map(|text| 1 + text * 17 % 41).collect();
    let labels: Vec<i64> = (0..41).collect();
    let data = || LabelledTexts::new(texts(&lengths), labels.clone(), Padding::chunks(4)).unwrap();
    let loader = |rank| {
        let sampler = SortedSampler::longest_first(data().lengths());
        let uneven = ShardOptions { even_batches: false, ..ShardOptions::default() };
        DataLoader::new(data()).batch_size(4).sampler(sampler).shard(rank, 2, uneven).unwrap()
    };
    let of_rank = |rank| -> Vec<(Vec<i64>, i64)> {
        let batch = |batch: Result<brigade_data::Batch<(Tensor, Tensor)>>| {
            let (ids, labels) = batch.unwrap().into_data();
            (Vec::try_from(labels).unwrap(), ids.size()[1])
        };
        loader(rank).iter().map(batch).collect()
    };
    let (one, two) = (of_rank(0), of_rank(1));
    assert_eq!((one.len(), two.len()), (6, 5));
    for ((_, longer), (_, shorter)) in one.iter().zip(&two) {
        assert_eq!(longer - shorter, 4, "neighbours in the order are in one round");
    }
    let mut seen: Vec<i64> = one.into_iter().chain(two).flat_map(|(labels, _)| labels).collect();
    seen.sort_unstable();
    assert_eq!(seen, labels);
}

#[test]
fn labels_are_classes_rows_of_numbers_or_none() {
    let context = BatchContext::default();
    let several = LabelledTexts::new(
        texts(&[2, 3]),
        vec![vec![0.0f32, 1.0], vec![1.0, 1.0]],
        Padding::chunks(8),
    );
    assert_eq!(several.unwrap().batch(&[1, 0], &context).unwrap().1.size(), [2, 2]);
    let number = LabelledTexts::new(texts(&[2, 3]), vec![0.5f32, 2.0], Padding::chunks(8)).unwrap();
    let numbers: Vec<f32> = number.batch(&[1, 0], &context).unwrap().1.try_into().unwrap();
    assert_eq!(numbers, [2.0, 0.5]);
    let none =
        LabelledTexts::new(texts(&[2, 3]), vec![None::<i64>; 2], Padding::chunks(8)).unwrap();
    assert!(none.batch(&[1], &context).unwrap().1.is_none());
    let error = LabelledTexts::new(texts(&[2, 3]), vec![1i64], Padding::chunks(8)).unwrap_err();
    assert!(error.to_string().contains("found 1 label for 2 texts"));
    let error = LabelledTexts::new(texts(&[2, 0]), vec![1i64, 2], Padding::chunks(8)).unwrap_err();
    assert!(error.to_string().starts_with("text 1 of 2 has no token"));
    assert!(number.batch(&[2], &context).is_err());
}
