//! Two ranks have the data of one process with twice the batch: streams, sorted texts, resume, and errors on both.

use std::fs;
use std::time::Duration;

use brigade_data::{Batch, DataLoader};
use brigade_learn::{Learner, Part};
use brigade_nn::{Embedding, Model, Module, ParamPath};
use brigade_testkit::{Reviews, World, dist_test, step};
use brigade_text::{TextBatches, TextCodec, TextLoaders};
use brigade_tokens::FolderOptions;
use brigade_train::{Accelerator, DataLoaderConfiguration, PreparedLoader};
use tch::{Kind, Tensor};

use super::alone;

/// This rank of the group that the environment describes.
fn joined(split_batches: bool) -> Accelerator {
    let limit = Duration::from_secs(60);
    let accelerator = Accelerator::builder().cpu(true).quiet(true).timeout(limit);
    accelerator.split_batches(split_batches).build().unwrap()
}

type Row = (Vec<i64>, Vec<i64>);
type Rows = Vec<Row>;

/// The rows of a batch that count: tokens and targets.
fn rows(batch: Batch<(Tensor, Tensor)>) -> Rows {
    let valid = batch.valid();
    let (x, y) = batch.into_data();
    let row = |tensor: &Tensor, row| Vec::try_from(tensor.get(row).reshape([-1])).unwrap();
    (0..valid as i64).map(|at| (row(&x, at), row(&y, at))).collect()
}

/// The steps of an epoch, each with the rows of all ranks in their order.
fn steps<L: IntoIterator<Item = Result<Batch<(Tensor, Tensor)>, E>>, E: std::fmt::Debug>(
    batches: L,
    accelerator: &Accelerator,
) -> Vec<Rows> {
    let own: Vec<Rows> = batches.into_iter().map(|batch| rows(batch.unwrap())).collect();
    let all: Vec<Vec<Rows>> = accelerator.processes().gather_object(own).unwrap();
    let longest = all.iter().map(Vec::len).max().unwrap();
    let step = |step| all.iter().filter_map(|rank| rank.get(step)).flatten().cloned().collect();
    (0..longest).map(step).collect()
}

fn training(
    data: DataLoader<TextBatches>,
    accelerator: &Accelerator,
) -> PreparedLoader<DataLoader<TextBatches>> {
    accelerator.prepare(data).unwrap()
}

/// Validation as the Learner shares it out.
fn validation(data: Option<DataLoader<TextBatches>>, accelerator: &Accelerator) -> Vec<Rows> {
    let whole = DataLoaderConfiguration { even_batches: false, ..Default::default() };
    let loader = PreparedLoader::new(data.unwrap(), accelerator.processes(), whole).unwrap();
    steps(&loader, accelerator)
}

fn reviews(folder: &std::path::Path) -> TextLoaders {
    TextLoaders::from_folder(folder).folders("train", "test").min_freq(2).seed(5)
}

/// A folder that all ranks read.
fn written() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    Reviews::new(20).sentences(3).write(folder.path()).unwrap();
    folder
}

dist_test!(world = 2, dist_streams_and_sorted_texts_are_those_of_one_process, |_world: World| {
    agrees_with_one_process(false);
});

dist_test!(world = 2, dist_split_batches_are_those_of_one_process, |_world: World| {
    agrees_with_one_process(true);
});

fn agrees_with_one_process(split_batches: bool) {
    let folder = written();
    let (one, two) = (alone(), joined(split_batches));
    let batch_size = if split_batches { 8 } else { 4 };
    for language_model in [true, false] {
        step!("language model {language_model}");
        // Ranks pad their own rows to their own longest one.
        let comparable = |steps| if language_model { steps } else { unpadded(steps) };
        let texts = || {
            if language_model {
                reviews(folder.path()).language_model().seq_len(9)
            } else {
                reviews(folder.path())
            }
        };
        let expected = texts().data_loaders(&one, 8).unwrap();
        let found = texts().data_loaders(&two, batch_size).unwrap();
        let (single, both) = (training(expected.train, &one), training(found.train, &two));
        for epoch in 0..2 {
            let (expected, found) = (steps(&single, &one), steps(&both, &two));
            assert!(expected.len() > 3);
            assert_eq!(comparable(found), comparable(expected), "epoch {epoch}");
        }
        let expected = texts().data_loaders(&one, 2 * batch_size).unwrap();
        let (expected, found) = (validation(expected.valid, &one), validation(found.valid, &two));
        assert_eq!(comparable(found), comparable(expected));
    }
}

/// Rows without their padding, whose number is 1.
fn unpadded(mut steps: Vec<Rows>) -> Vec<Rows> {
    steps.iter_mut().flatten().for_each(|(ids, _)| ids.retain(|id| *id != 1));
    steps
}

dist_test!(
    world = 2,
    dist_validation_has_every_target_once_and_rows_are_streams,
    |_world: World| {
        let (folder, two) = (written(), joined(false));
        let texts =
            reviews(folder.path()).language_model().seq_len(7).every_token(true).backwards(true);
        let data = texts.data_loaders(&two, 3).unwrap();
        let steps = validation(data.valid, &two);
        let mut targets = Vec::new();
        for row in 0..6 {
            let stream = |side: fn(&Row) -> &Vec<i64>| {
                steps.iter().flat_map(|step| side(&step[row]).clone()).collect::<Vec<_>>()
            };
            let (x, mut y) = (stream(|row| &row.0), stream(|row| &row.1));
            y.retain(|target| *target != -100);
            assert_eq!(x[1..y.len()], y[..y.len() - 1]);
            targets.extend(y);
        }
        // All tokens of the texts but the first, in their order.
        let whole = reviews(folder.path()).language_model().seq_len(1_000_000).backwards(true);
        let whole = whole.data_loaders(&alone(), 1).unwrap().valid.unwrap();
        let (_, y) = whole.iter().next().unwrap().unwrap().into_data();
        assert_eq!(targets, Vec::<i64>::try_from(y.get(0)).unwrap());
    }
);

dist_test!(world = 2, dist_ranks_have_texts_of_one_length_in_a_round, |_world: World| {
    let (folder, two) = (written(), joined(false));
    let valid = reviews(folder.path()).data_loaders(&two, 4).unwrap().valid;
    let steps = validation(valid, &two);
    let lengths = |rows: &[Row]| -> Vec<usize> {
        rows.iter().map(|(ids, _)| ids.iter().filter(|id| **id != 1).count()).collect()
    };
    let order: Vec<usize> = steps.iter().flat_map(|step| lengths(step)).collect();
    assert_eq!(order.len(), 14);
    assert!(order.is_sorted_by(|longer, shorter| longer >= shorter), "{order:?}");
});

dist_test!(world = 2, dist_an_epoch_goes_on_from_its_middle, |_world: World| {
    let (folder, two) = (written(), joined(false));
    for language_model in [true, false] {
        let loader = || {
            let texts = reviews(folder.path()).seq_len(9);
            let texts = if language_model { texts.language_model() } else { texts };
            training(texts.data_loaders(&two, 4).unwrap().train, &two)
        };
        let whole = loader();
        let (_, expected) = (steps(&whole, &two), steps(&whole, &two));
        let resumed = loader();
        resumed.set_epoch(1);
        resumed.skip_first_batches(2);
        assert_eq!(steps(&resumed, &two), expected[2..]);
    }
});

dist_test!(world = 2, dist_all_ranks_fail_when_one_does, |world: World| {
    let (folder, two) = (tempfile::tempdir().unwrap(), joined(false));
    let rank = world.rank.as_usize();
    let message = |text: &[u8], cached: bool| {
        fs::write(folder.path().join("texts.txt"), text).unwrap();
        let path = folder.path().join("texts.txt");
        let mut texts = TextLoaders::from_source(move || brigade_tokens::TextSource::lines(path));
        if cached {
            texts = texts.cache(folder.path().join("cache"));
        }
        let made = texts.language_model().min_freq(1).data_loaders(&two, 1);
        made.map(|data| data.train.len()).map_err(|error| error.to_string())
    };
    for cached in [false, true] {
        step!("cached: {cached}");
        let lines = "one two three four five six\n".repeat(9);
        let with = |last: &[u8]| [lines.as_bytes(), last, b"\n"].concat();
        let (fine, bad, other) = (with(b"seven"), with(b"\xff"), with(b"eight"));
        let (fine, bad, other) = (fine.as_slice(), bad.as_slice(), other.as_slice());
        assert!(message(fine, cached).is_ok());
        for failing in [0, 1] {
            let error = message(if rank == failing { bad } else { fine }, cached).unwrap_err();
            if rank == failing {
                assert!(error.contains("is not UTF-8"), "{error}");
            } else {
                let told = format!("rank {failing} could not prepare its texts: ");
                assert!(error.starts_with(&told) && error.contains("is not UTF-8"), "{error}");
            }
        }
        let error = message(if rank == 1 { other } else { fine }, cached).unwrap_err();
        assert!(error.starts_with("rank 1 sees other texts than rank 0"), "{error}");
    }
});

/// A model that knows no more than a weight for each token.
struct Weights(Embedding);

impl Module<&Tensor> for Weights {
    type Output = Tensor;

    fn forward(&self, ids: &Tensor) -> brigade_torch::Result<Tensor> {
        let real = ids.f_ne(1)?.f_to_kind(Kind::Float)?.f_unsqueeze(-1)?;
        Ok(self.0.forward(ids)?.f_mul(&real)?.f_sum_dim_intlist(1, false, Kind::Float)?)
    }
}

dist_test!(world = 2, dist_predictions_are_in_the_order_of_the_texts, |_world: World| {
    let folder = written();
    let predicted = |accelerator: &Accelerator, batch_size| {
        let data = reviews(folder.path()).loaders(accelerator, batch_size).unwrap();
        let tokens = data.vocabulary.len() as i64;
        let codec = TextCodec::of(&data.loaders).unwrap().clone();
        tch::manual_seed(3);
        let weights = |path: &ParamPath<'_>| Weights(Embedding::new(path / "weights", tokens, 2));
        let model = Model::new(weights).unwrap();
        let mut learner = Learner::new(accelerator, data.loaders, model).unwrap().quiet(true);
        let found = learner.predictions_on(Part::Valid).unwrap();
        let targets: Vec<i64> = found.targets.unwrap().try_into().unwrap();
        // The same texts without their labels.
        let texts = FolderOptions::new().folders(["test"]).open(folder.path()).unwrap();
        let unlabelled = codec.loader(&texts, 72, batch_size).unwrap();
        let again = learner.predictions_of(unlabelled).unwrap();
        assert_eq!(again.predictions, found.predictions);
        (Vec::<Vec<f32>>::try_from(&found.predictions).unwrap(), targets)
    };
    let (expected, labels) = predicted(&alone(), 14);
    // The texts of the class `neg` come first.
    assert_eq!(labels, [[0; 7], [1; 7]].concat());
    let (found, targets) = predicted(&joined(false), 3);
    assert_eq!(targets, labels);
    for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
        assert!((found - expected).abs() < 1e-4, "{found} and {expected}");
    }
});
