//! A Learner on ranks that divide layers, sequences, or both and samples finds what one process finds.

use std::path::Path;

use brigade_data::{DataLoader, TensorDataset};
use brigade_learn::callbacks::{Checkpoint, Ema, GradientAccumulation, GradientClip, SaveModel};
use brigade_learn::{Event, Learner, Loaders, Part, Predictor};
use brigade_metrics::{Accuracy, TopK};
use brigade_models::{BertForSequenceClassification, BertOptions};
use brigade_nn::{Model, ParamPath, TensorParallelPlan};
use brigade_optim::AdamW;
use brigade_rank_env::{StoreEndpoint, WorldSize};
use brigade_sharding::{Axis, Mesh, Sharding};
use brigade_testkit::{World, dist_test, step};
use brigade_torch::{Error, Result, Store};
use brigade_train::Accelerator;
use tch::{Device, Kind, Tensor};

use crate::setup::*;

const WORDS: i64 = 23;

fn options() -> BertOptions {
    let options = BertOptions {
        vocab_size: WORDS,
        hidden_size: 8,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        intermediate_size: 12,
        hidden_dropout_prob: 0.0,
        attention_probs_dropout_prob: 0.0,
        max_position_embeddings: 8,
        initializer_range: 0.3,
        ..BertOptions::default()
    };
    options.with_classes(4)
}

fn new(path: &ParamPath<'_>) -> BertForSequenceClassification {
    BertForSequenceClassification::new(path, &options())
}

/// Texts of six words, none of which is padding, and classes.
fn texts(rows: i64, batch: usize) -> DataLoader<TensorDataset<(Tensor, Tensor)>> {
    let places = Tensor::arange(rows * 6, (Kind::Int64, Device::Cpu));
    let ids = (&places * 7 + places.floor_divide_scalar(6) * 3).remainder(WORDS - 1) + 1;
    let labels = Tensor::arange(rows, (Kind::Int64, Device::Cpu)).remainder(4);
    loader((ids.view([-1, 6]), labels), batch)
}

/// The Learner of these ranks, with the same first weights on any of them; a batch of all has 8 texts.
fn classifier(accelerator: &Accelerator, shuffle: bool) -> Learner {
    let batch = 8 / accelerator.data_processes().num_processes();
    let data = Loaders::new(texts(48, batch).shuffle(shuffle), texts(13, 3)).unwrap();
    accelerator.set_seed(7);
    let plan = BertForSequenceClassification::tensor_plan();
    let model = accelerator.parallel().model_builder(plan).kind(Kind::Double).build(new).unwrap();
    Learner::new(accelerator, data, model)
        .unwrap()
        .split_by_prefix(&[&["bert.embeddings", "bert.encoder"], &["bert.pooler", "classifier"]])
        .unwrap()
        .optimizer(AdamW::default().eps(1e-3))
        .metrics((Accuracy, TopK(2)))
        .quiet(true)
}

fn recorded(learner: &Learner) -> Vec<f64> {
    let recorder = learner.recorder();
    let rows = recorder.rows().iter().flat_map(|row| row.values.iter().flatten());
    recorder.losses().iter().chain(rows).copied().collect()
}

type Recipe = (&'static str, fn(&mut Learner));

const RECIPES: [Recipe; 4] = [
    ("clipped, averaged", |learner| {
        learner.fit_one_cycle(2, 0.02, (GradientClip::new(0.1), Ema::new(0.7))).unwrap();
    }),
    ("frozen, then not", |learner| {
        learner.freeze().unwrap();
        learner.fit(1, 0.02, ()).unwrap();
        learner.unfreeze().unwrap();
        learner.fit_one_cycle(1, 1e-3..0.02, ()).unwrap();
    }),
    ("accumulated", |learner| {
        learner.fit(1, 0.02, GradientAccumulation::new(16)).unwrap();
    }),
    ("a rate is looked for, the best epoch", |learner| {
        let found = learner.lr_find().unwrap();
        assert!(found.losses().len() > 20);
        let folder = tempfile::tempdir().unwrap();
        let processes = learner.accelerator().processes().clone();
        let path = processes.broadcast_object(folder.path().to_owned(), 0).unwrap();
        let save = SaveModel::new(path.join("best.pth")).with_optimizer(true);
        learner.fit(2, found.valley().unwrap(), save).unwrap();
        processes.wait_for_everyone().unwrap();
    }),
];

fn finds_what_one_process_finds(mesh: &Mesh, sharding: Option<Sharding>) {
    let one = alone();
    let builder = Accelerator::builder().cpu(true).quiet(true).sharding(sharding);
    let accelerator = builder.mesh(mesh.clone()).build().unwrap();
    assert_eq!(accelerator.data_processes().num_processes(), mesh.size(Axis::Data));
    for (name, fit) in RECIPES {
        step!("{name}");
        let (mut whole, mut divided) = (classifier(&one, true), classifier(&accelerator, true));
        fit(&mut whole);
        fit(&mut divided);
        close(&recorded(&divided), &recorded(&whole), 1e-11);
        same_on_all(&accelerator, recorded(&divided));
        if let Some(state) = divided.full_state_dict().unwrap() {
            assert!(apart(&whole.state_dict(), &state) < 1e-10, "{name}");
        }
        // 13 texts in batches of 3 over the ranks: each counts once.
        let (found, expected) = (divided.validate().unwrap(), whole.validate().unwrap());
        close(&[found.loss], &[expected.loss], 1e-11);
        assert_eq!(found.metrics, expected.metrics);
        let (found, expected) = (
            divided.predictions_on(Part::Valid).unwrap(),
            whole.predictions_on(Part::Valid).unwrap(),
        );
        close(&values(&found.predictions), &values(&expected.predictions), 1e-10);
        assert_eq!(bits(&found.targets.unwrap()), bits(&expected.targets.unwrap()));
        let text = Tensor::from_slice(&[5_i64, 6, 7, 8, 9, 10]);
        let (found, expected) =
            (divided.predict(text.copy()).unwrap(), whole.predict(text).unwrap());
        close(&values(&found.probabilities), &values(&expected.probabilities), 1e-10);
    }
    step!("files");
    goes_on_from_files(&accelerator);
}

/// Files are those of whole models, and each is read by the other; so are checkpoints with an average.
fn goes_on_from_files(accelerator: &Accelerator) {
    let folder = tempfile::tempdir().unwrap();
    let path = accelerator.processes().broadcast_object(folder.path().to_owned(), 0).unwrap();
    let mut learner = classifier(accelerator, false);
    learner.fit(1, 0.02, ()).unwrap();
    learner.save(path.join("divided.pth"), true).unwrap();
    learner.export(path.join("export.pth")).unwrap();
    learner.fit(1, 0.02, ()).unwrap();
    let goes_on = learner.full_state_dict().unwrap();
    let mut other = classifier(accelerator, false);
    other.load(path.join("divided.pth"), true).unwrap();
    other.fit(1, 0.02, ()).unwrap();
    let state = other.full_state_dict().unwrap();
    assert!(state.zip(goes_on.as_ref()).is_none_or(|(it, at)| apart(at, &it) < 1e-10));
    let one = alone();
    if let Some(goes_on) = &goes_on {
        let mut whole = classifier(&one, false);
        whole.load(path.join("divided.pth"), true).unwrap();
        whole.fit(1, 0.02, ()).unwrap();
        assert!(apart(goes_on, &whole.state_dict()) < 1e-10);
        let model = Model::builder().kind(Kind::Double).build(new).unwrap();
        Predictor::load::<Tensor, _>(&one, path.join("export.pth"), model).unwrap();
    }
    // An interrupted fit continues with its average, on these ranks and on one.
    let fit = |on: &Accelerator, folder: &Path, stop: Option<usize>| {
        // Checkpoints of its own, without what another fit has registered.
        let accelerator = Accelerator::builder().sharing(on).quiet(true).build().unwrap();
        let mut learner = classifier(&accelerator, true);
        learner.add((Checkpoint::new(folder).every(4), Ema::new(0.7)));
        if let Some(stop) = stop {
            let mut batches = 0;
            let interrupts = At::new([Event::AfterBatch], move |_, learner| {
                batches += usize::from(learner.is_training());
                let stops = batches == stop && learner.is_training();
                if stops { Err(Error::custom("interrupted").into()) } else { Ok(()) }
            });
            learner.add(interrupts.order(200));
        }
        let outcome = learner.fit_one_cycle(2, 0.02, ());
        assert_eq!(outcome.is_err(), stop.is_some(), "{outcome:?}");
        learner
    };
    let straight = fit(&one, &folder.path().join("straight"), None);
    fit(accelerator, &path.join("first"), Some(9));
    fit(accelerator, &path.join("second"), Some(9));
    let learner = fit(accelerator, &path.join("first"), None);
    let agrees = |learner: &Learner| {
        close(&recorded(learner), &recorded(&straight), 1e-11);
        let state = learner.full_state_dict().unwrap();
        assert!(state.is_none_or(|state| apart(&straight.state_dict(), &state) < 1e-10));
    };
    agrees(&learner);
    if accelerator.is_main_process() {
        agrees(&fit(&one, &path.join("second"), None));
    }
    accelerator.processes().wait_for_everyone().unwrap();
}

fn mesh(replicate: usize, context: usize, tensor: usize) -> Mesh {
    let builder = Mesh::builder().replicate(replicate).context(context).tensor(tensor);
    builder.build(replicate * context * tensor).unwrap()
}

dist_test!(world = 2, seconds = 120, dist_tensor_ranks_alone, |_world: World| {
    finds_what_one_process_finds(&mesh(1, 1, 2), None);
});

dist_test!(world = 2, seconds = 120, dist_context_ranks_alone, |_world: World| {
    finds_what_one_process_finds(&mesh(1, 2, 1), None);
});

dist_test!(world = 4, seconds = 180, dist_tensor_ranks_with_other_samples, |_world: World| {
    finds_what_one_process_finds(&mesh(2, 1, 2), None);
});

dist_test!(world = 4, seconds = 180, dist_tensor_ranks_with_context_ranks, |_world: World| {
    finds_what_one_process_finds(&mesh(1, 2, 2), None);
});

dist_test!(world = 4, seconds = 180, dist_tensor_ranks_with_shards, |_world: World| {
    let mesh = Mesh::builder().shard(2).tensor(2).build(4).unwrap();
    finds_what_one_process_finds(&mesh, Some(Sharding::zero3()));
});

dist_test!(world = 2, dist_parts_need_their_ranks, |_world: World| {
    let refused = |outcome: Result<()>, expected: &str| {
        let error = outcome.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    };
    let builder = || Accelerator::builder().cpu(true).quiet(true);
    let accelerator = builder().mesh(mesh(1, 1, 2)).build().unwrap();
    let learner = classifier(&accelerator, false);
    refused(
        learner.save("model.pth", false).map(drop),
        "which is not prepared yet: call this within",
    );
    let whole = Model::builder().kind(Kind::Double).build(new).unwrap();
    let data = Loaders::train_only(texts(8, 4)).unwrap();
    let mut whole = Learner::new(&accelerator, data, whole).unwrap().quiet(true);
    refused(whole.fit(1, 0.1, ()), "build it by `Accelerator::parallel().model`");
});

#[test]
fn a_pipeline_is_refused() {
    let store = Store::hash().unwrap();
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let store = store.clone();
            scope.spawn(move || {
                let size = WorldSize::new(2).unwrap();
                let world = World::on_one_host(rank, size, StoreEndpoint::alone()).unwrap();
                let builder = Accelerator::builder().world(world).store(store);
                let builder = builder.cpu(true).quiet(true).pipeline_parallel(2);
                let accelerator = builder.build().unwrap();
                let data = Loaders::train_only(texts(8, 4)).unwrap();
                let model = Model::builder().build(new).unwrap();
                let error = Learner::new(&accelerator, data, model).unwrap_err().to_string();
                let expected = "does not train on the mesh pp 2";
                assert!(error.contains(expected), "{error}");
                assert!(error.contains("`Accelerator::forward_backward`"), "{error}");
            });
        }
    });
}
