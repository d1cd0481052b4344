//! Pictures as data, predictions of photographs, and what a model gets wrong.

use std::cell::RefCell;
use std::fs;
use std::path::Path;
use std::rc::Rc;
use std::sync::Arc;

use brigade_learn::callbacks::{ActivationStats, ShowGraph};
use brigade_learn::data::{
    DataBlock, Flip, Normalize, Resize, categories, grandparent, images, masks, parent_name,
};
use brigade_learn::interpretation::{ClassInterpretation, Confusion};
use brigade_learn::{Item, ItemCodec, Learner, LrFindOptions, Part, Predictor, Suggestion};
use brigade_metrics::Accuracy;
use brigade_nn::{Conv2d, Conv2dOptions, Flatten, Linear, ParamPath, Relu, Sequential};
use brigade_plot::{Gallery, Marker, Panel, Plot, Scale};
use brigade_testkit::{Photos, World, dist_test};
use brigade_train::Accelerator;
use serde_json::Value;
use tch::{Kind, Tensor};

use crate::cpu::golden::recipe;
use crate::setup::*;

fn network(path: &ParamPath<'_>) -> Sequential {
    let options = Conv2dOptions { stride: [2, 2], padding: [1, 1], ..Conv2dOptions::default() };
    Sequential::new()
        .add(Conv2d::new(path / 0, 3, 8, [3, 3], options))
        .add(Relu)
        .add(Conv2d::new(path / 2, 8, 16, [3, 3], options))
        .add(Relu)
        .add_fn(|maps| maps.adaptive_avg_pool2d([2, 2]))
        .add(Flatten)
        .add(Linear::new(path / 6, 64, 3))
}

fn photos() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    Photos::new(3, 15).size(60, 45).write(folder.path()).unwrap();
    folder
}

fn learner(accelerator: &Accelerator, folder: &Path) -> Learner {
    with_codec(accelerator, folder).0
}

fn with_codec(accelerator: &Accelerator, folder: &Path) -> (Learner, Arc<dyn ItemCodec>) {
    accelerator.set_seed(1);
    let block = DataBlock::new(images(), categories())
        .label(parent_name)
        .split(grandparent("train", "val"))
        .item_transforms((Resize::new(32), Flip::new(0.5)))
        .batch_transforms(Normalize::imagenet())
        .seed(1);
    let data =
        block.loaders(accelerator, folder, 6 / accelerator.processes().num_processes()).unwrap();
    let codec = Arc::clone(data.item_codec().unwrap());
    let learner = Learner::new(accelerator, data, network).unwrap();
    (learner.metrics(Accuracy).quiet(true), codec)
}

/// Draws it, and keeps the file where one wants to look at it.
fn drawn(name: &str, plot: &impl Plot) {
    let png = plot.to_png().unwrap();
    assert!(png.starts_with(b"\x89PNG"), "{name}");
    assert!(plot.to_svg().starts_with("<svg"), "{name}");
    assert!(!plot.to_text(60, 20).trim().is_empty(), "{name}");
    if let Some(folder) = std::env::var_os("BRIGADE_TEST_PICTURES") {
        fs::write(Path::new(&folder).join(format!("{name}.png")), png).unwrap();
    }
}

fn captions(gallery: &Gallery) -> Vec<Vec<(&str, bool)>> {
    let lines = gallery.pictures.iter().map(|picture| {
        picture.captions.iter().map(|caption| (caption.text.as_str(), caption.wrong)).collect()
    });
    lines.collect()
}

#[test]
fn the_graph_of_losses_is_drawn_after_each_epoch() {
    let folder = photos();
    let mut learner = learner(&alone(), folder.path());
    let charts = Rc::new(RefCell::new(Vec::new()));
    let kept = Rc::clone(&charts);
    let show = ShowGraph::with(move |chart| {
        kept.borrow_mut().push(chart.clone());
        Ok(())
    });
    let (text, png) = (folder.path().join("graphs/loss.txt"), folder.path().join("loss.png"));
    let callbacks = (show, ShowGraph::file(&text), ShowGraph::file(&png), ShowGraph::new());
    learner.fit(3, 1e-3, callbacks).unwrap();
    // A pass outside of a fit draws nothing.
    learner.validate().unwrap();
    let charts = charts.borrow();
    assert_eq!(charts.len(), 3);
    let recorder = learner.recorder();
    let per_epoch = recorder.iters()[0];
    for (epoch, chart) in charts.iter().enumerate() {
        assert_eq!(chart.x.range, Some((0.0, 3.0 * per_epoch as f64)));
        let lengths: Vec<usize> = chart.series.iter().map(|series| series.points.len()).collect();
        assert_eq!(lengths, [(epoch + 1) * per_epoch, epoch + 1]);
    }
    let last = charts.last().unwrap();
    let losses = recorder
        .smooth_losses()
        .iter()
        .copied()
        .chain(recorder.column("valid_loss").into_iter().flatten());
    assert_eq!(last.y.range, Some((0.0, losses.fold(0.0, f64::max))));
    assert_eq!(fs::read_to_string(text).unwrap(), last.to_text(100, 30));
    assert_eq!(fs::read(png).unwrap(), last.to_png().unwrap());

    let error = learner.fit(1, 1e-3, ShowGraph::file("loss.doc")).unwrap_err().to_string();
    assert!(error.contains("loss.doc"), "{error}");
    assert!(learner.recorder().losses().is_empty(), "a batch was trained before");
}

#[test]
fn pictures_of_a_fit_and_of_what_the_model_sees() {
    let folder = photos();
    let accelerator = alone();
    let mut learner = learner(&accelerator, folder.path());

    let batch = learner.show_batch(5).unwrap();
    drawn("show_batch", &batch);
    assert_eq!(learner.show_batch(5).unwrap(), batch, "the position in the data stays");
    let classes = ["disc", "square", "triangle"];
    let shown = captions(&batch);
    assert_eq!(shown.len(), 5);
    assert!(
        shown.iter().all(|lines| lines.len() == 1 && classes.contains(&lines[0].0)),
        "{shown:?}"
    );
    // Normalisation is undone: photographs have bytes from all the range.
    let pixels = batch.pictures[0].pixels();
    assert_eq!((batch.pictures[0].size().width, pixels.len()), (32, 32 * 32 * 3));
    assert!(pixels.iter().max().unwrap() - pixels.iter().min().unwrap() > 100);

    let found =
        learner.lr_find_with(LrFindOptions { steps: 30, ..LrFindOptions::default() }).unwrap();
    let chart = found.plot(&Suggestion::ALL);
    drawn("lr_find", &chart);
    assert_eq!(chart.x.scale, Scale::Log10);
    let (lrs, losses) = found.curve();
    let expected: Vec<(f64, f64)> = lrs.iter().copied().zip(losses.iter().copied()).collect();
    assert_eq!(chart.series[0].points, expected);
    let suggested = Suggestion::ALL.into_iter().filter(|rule| found.suggest(*rule).is_ok()).count();
    assert_eq!(chart.markers.len(), suggested);
    assert!(chart.markers.iter().all(|marker| match marker {
        Marker::Point { x, y, .. } => lrs[0] / 10.0 <= *x && losses.contains(y),
        other => panic!("{other:?}"),
    }));

    learner.add(ActivationStats::new(["0", "2"]));
    learner.fit_one_cycle(4, 0.01, ()).unwrap();
    let recorder = learner.recorder();
    let loss = recorder.plot_loss(2);
    drawn("loss", &loss);
    let points = |index: usize| loss.series[index].points.clone();
    let smooth: Vec<(f64, f64)> = recorder
        .smooth_losses()
        .iter()
        .enumerate()
        .skip(2)
        .map(|(at, loss)| (at as f64, *loss))
        .collect();
    assert_eq!(points(0), smooth);
    let valid: Vec<f64> = recorder.column("valid_loss").into_iter().flatten().collect();
    let ends = recorder.iters().iter().map(|batches| (batches - 1) as f64);
    assert_eq!(points(1), ends.zip(valid).collect::<Vec<_>>());
    let chart_of = |panel: &Panel| match panel {
        Panel::Chart(chart) => chart.clone(),
        other => panic!("{other:?}"),
    };
    let schedule = recorder.plot_schedule();
    drawn("schedule", &schedule);
    let values = |chart: &brigade_plot::Chart| -> Vec<f64> {
        chart.series[0].points.iter().map(|point| point.1).collect()
    };
    assert_eq!(values(&chart_of(&schedule.panels[0])), recorder.lrs());
    assert_eq!(values(&chart_of(&schedule.panels[1])), recorder.momenta());
    let metrics = recorder.plot_metrics();
    drawn("metrics", &metrics);
    let accuracy: Vec<f64> = recorder.column("accuracy").into_iter().flatten().collect();
    assert_eq!(values(&chart_of(&metrics.panels[1])), accuracy);
    assert_eq!(chart_of(&metrics.panels[0]).series.len(), 2);

    let stats = learner.callback::<ActivationStats>().unwrap();
    drawn("activations", &stats.plot_stats());
    let histogram = stats.plot_histogram("2").unwrap();
    drawn("histogram", &histogram);
    assert_eq!((histogram.rows(), histogram.columns()), (40, recorder.losses().len()));
    assert_eq!(histogram.x_range, Some((0.0, recorder.losses().len() as f64)));
    let sum: f64 = histogram.values().iter().sum();
    // 16 channels of 8 x 8 outputs of the samples of each batch.
    let rows = 6.0 * recorder.losses().len() as f64;
    assert_eq!(sum, 16.0 * 64.0 * rows);
    assert!(stats.plot_histogram("9").unwrap_err().to_string().contains("there are 0, 2"));

    let results = learner.show_results(9).unwrap();
    drawn("show_results", &results);
    let predicted = learner.predictions().unwrap();
    let numbers = |tensor: &Tensor| Vec::<i64>::try_from(tensor).unwrap();
    let (targets, decoded) = (numbers(&predicted.targets.unwrap()), numbers(&predicted.decoded));
    for (row, lines) in captions(&results).into_iter().enumerate() {
        let [target, found] = [targets[row], decoded[row]].map(|class| classes[class as usize]);
        assert_eq!(lines, [(target, false), (found, target != found)]);
    }
}

#[test]
fn losses_confusion_and_single_predictions_of_photographs() {
    let folder = photos();
    let accelerator = alone();
    let (mut learner, codec) = with_codec(&accelerator, folder.path());
    learner.fit_one_cycle(3, 0.01, ()).unwrap();
    let found = ClassInterpretation::from_learner(&mut learner).unwrap();
    let matrix = found.plot_confusion_matrix(false).unwrap();
    drawn("confusion", &matrix);
    let counts: Vec<f64> =
        found.confusion_matrix().into_iter().flatten().map(|it| it as f64).collect();
    assert_eq!(matrix.values(), counts);
    let normal = found.plot_confusion_matrix(true).unwrap();
    drawn("confusion_by_row", &normal);
    for row in normal.values().chunks(3) {
        assert!((row.iter().sum::<f64>() - 1.0).abs() < 1e-12);
    }
    let top = found.plot_top_losses(&learner, 4).unwrap();
    drawn("top_losses", &top);
    let expected = found.interpretation().top_losses(4);
    assert!(expected.windows(2).all(|pair| pair[0].1 >= pair[1].1));
    for ((index, loss), lines) in expected.iter().zip(captions(&top)) {
        let predicted = &found.interpretation().predictions();
        let row = |tensor: &Tensor| tensor.int64_value(&[*index as i64]);
        let class = row(&predicted.decoded);
        let actual = row(predicted.targets.as_ref().unwrap());
        let probability = predicted.predictions.double_value(&[*index as i64, class]);
        let names = found.class_names();
        let first = format!("{} / {}", names[class as usize], names[actual as usize]);
        let second = format!("{loss:.2} / {probability:.2}");
        assert_eq!(lines, [(first.as_str(), class != actual), (second.as_str(), false)]);
    }
    drawn("top_losses_plain", &found.interpretation().plot_top_losses(&learner, 2).unwrap());
    // The picture is that of the item: the one that its index names.
    let path = |index: usize| {
        let class = ["disc", "square", "triangle"][index / 3];
        folder.path().join(format!("val/{class}/000{}.jpg", index % 3))
    };
    let inputs = codec.encode(&Item::File(path(expected[0].0))).unwrap();
    let picture = codec.picture(&inputs, 0).unwrap().unwrap();
    assert_eq!(top.pictures[0].pixels(), picture.rgb);

    // One photograph, from its file, from its bytes, and from an exported file.
    let file = folder.path().join("model.pth");
    learner.export(&file).unwrap();
    let mut predictor = Predictor::load::<Tensor, _>(&accelerator, &file, network).unwrap();
    assert_eq!(predictor.class_names().unwrap(), ["disc", "square", "triangle"]);
    let all = learner.predictions().unwrap();
    for index in [0, 4, 8] {
        let one = learner.predict(path(index)).unwrap();
        let row = all.predictions.get(index as i64);
        assert!((&one.probabilities - row).abs().max().double_value(&[]) < 1e-5);
        assert!((one.probabilities.sum(Kind::Float).double_value(&[]) - 1.0).abs() < 1e-5);
        let again = predictor.predict(fs::read(path(index)).unwrap()).unwrap();
        assert!((&again.probabilities - &one.probabilities).abs().max().double_value(&[]) < 1e-6);
        assert_eq!(again.class, one.class);
    }
    assert!(learner.predict("none.jpg").unwrap_err().to_string().contains("none.jpg"));
    assert!(learner.predict(b"no image".to_vec()).is_err());
    // Test-time augmentation: all of the plain prediction is the plain prediction.
    let plain = learner.tta(2, 1.0).unwrap();
    assert!((plain.predictions - &all.predictions).abs().max().double_value(&[]) < 1e-6);
    let mixed = learner.tta(3, 0.25).unwrap();
    assert!((mixed.predictions - &all.predictions).abs().max().double_value(&[]) > 1e-6);
}

#[test]
fn masks_are_drawn_over_their_images_and_beside_what_is_predicted() {
    let folder = photos();
    // The left half of each image is of class 1.
    let mask = brigade_track::Image::new(
        60,
        45,
        1,
        (0..45 * 60).map(|at| u8::from(at % 60 < 30)).collect(),
    );
    let mask = mask.unwrap().png().unwrap();
    let beside = tempfile::tempdir().unwrap();
    let file = beside.path().join("mask.png");
    fs::write(&file, mask).unwrap();
    let block = DataBlock::new(images(), masks(["right", "left"]))
        .label(move |_: &Path| file.clone())
        .split(grandparent("train", "val"))
        .item_transforms(Resize::squish(32))
        .batch_transforms(Normalize::imagenet());
    let accelerator = alone();
    accelerator.set_seed(1);
    let data = block.loaders(&accelerator, folder.path(), 6).unwrap();
    let pixels = |path: &ParamPath<'_>| {
        Sequential::new().add(Conv2d::new(path / 0, 3, 2, [1, 1], Conv2dOptions::default()))
    };
    let mut learner = Learner::new(&accelerator, data, pixels).unwrap().quiet(true);
    learner.fit(1, 0.01, ()).unwrap();
    let batch = learner.show_batch(3).unwrap();
    drawn("show_batch_masks", &batch);
    assert_eq!(batch.pictures.len(), 3);
    let results = learner.show_results(3).unwrap();
    drawn("show_results_masks", &results);
    // Target and prediction of each, side by side; the same image under two masks.
    let expected = [vec![("target", false)], vec![("prediction", false)]];
    let shown = captions(&results);
    assert_eq!(shown.len(), 6);
    assert!(shown.chunks(2).all(|pair| pair == expected), "{shown:?}");
    for pair in results.pictures.chunks(2) {
        assert_eq!(pair[0].size(), pair[1].size());
        assert_ne!(pair[0].pixels(), pair[1].pixels());
    }
}

dist_test!(world = 2, dist_photographs_are_predicted_in_order_on_two_ranks, |_world: World| {
    let folder = photos();
    let accelerator = joined();
    // The files are the same on both ranks; the folders' names do not count.
    let mut learner = learner(&accelerator, folder.path());
    learner.fit_one_cycle(1, 0.01, ()).unwrap();
    ranks_agree(&learner);
    let found = ClassInterpretation::from_learner(&mut learner).unwrap();
    let targets = found.interpretation().predictions().targets.as_ref().unwrap();
    assert_eq!(bits(targets), bits(&Tensor::from_slice(&[0i64, 0, 0, 1, 1, 1, 2, 2, 2])));
    let predictions = bits(&learner.predictions().unwrap().predictions);
    let tta = bits(&learner.tta(2, 0.25).unwrap().predictions);
    same_on_all(&accelerator, (predictions.clone(), tta, found.confusion_matrix()));
    // One process with these weights predicts the same.
    let mut single = self::learner(&alone(), folder.path());
    single.state_mut().load_state_dict(&learner.state_dict()).unwrap();
    assert_eq!(bits(&single.predictions().unwrap().predictions), predictions);
});

fn golden() -> Value {
    serde_json::from_str(include_str!("../../../golden/interpretation.json")).unwrap()
}

#[test]
fn interpretation_is_fastais() {
    let golden = golden();
    let names: Vec<String> = serde_json::from_value(golden["vocab"].clone()).unwrap();
    let data = recipe::loaders(recipe::data("class", true), recipe::data("class", false), 8);
    let mut learner = recipe::learner_of("mlp", data.classes(names)).metrics(Accuracy);
    learner.fit(2, 1e-2, ()).unwrap();
    for (row, theirs) in learner.recorder().rows().iter().zip(golden["epochs"].as_array().unwrap())
    {
        let ours: Vec<f64> = row.values.iter().copied().flatten().collect();
        close(&ours, &recipe::numbers(theirs), 1e-5);
    }
    let found = ClassInterpretation::from_learner(&mut learner).unwrap();
    let matrix =
        |value: &Value| -> Vec<Vec<u64>> { serde_json::from_value(value.clone()).unwrap() };
    assert_eq!(found.confusion_matrix(), matrix(&golden["confusion_matrix"]));
    let pairs = |value: &Value| -> Vec<Confusion> {
        let pairs: Vec<(String, String, u64)> = serde_json::from_value(value.clone()).unwrap();
        let pairs = pairs.into_iter();
        pairs.map(|(actual, predicted, count)| Confusion { actual, predicted, count }).collect()
    };
    assert_eq!(found.most_confused(1), pairs(&golden["most_confused"]));
    assert_eq!(found.most_confused(3), pairs(&golden["most_confused"])[..1]);
    let base = found.interpretation();
    close(base.losses(), &recipe::numbers(&golden["losses"]), 1e-5);
    let indices = |found: &[(usize, f64)]| found.iter().map(|it| it.0 as f64).collect::<Vec<_>>();
    assert_eq!(indices(&base.top_losses(22)), recipe::numbers(&golden["top_losses_idx"]));
    let least = &golden["smallest_5"];
    assert_eq!(indices(&base.least_losses(5)), recipe::numbers(&least[1]));
    let values: Vec<f64> = base.least_losses(5).iter().map(|it| it.1).collect();
    close(&values, &recipe::numbers(&least[0]), 1e-5);
    let flat =
        |tensor: &Tensor| Vec::<f64>::try_from(&tensor.to_kind(Kind::Double).view([-1])).unwrap();
    let expected: Vec<f64> =
        golden["preds"].as_array().unwrap().iter().flat_map(recipe::numbers).collect();
    close(&flat(&base.predictions().predictions), &expected, 1e-5);
    assert_eq!(flat(&base.predictions().decoded), recipe::numbers(&golden["decoded"]));
    assert_eq!(
        flat(base.predictions().targets.as_ref().unwrap()),
        recipe::numbers(&golden["targets"])
    );
    let report: Vec<String> =
        serde_json::from_value(golden["classification_report"].clone()).unwrap();
    assert_eq!(found.classification_report().trim_end(), report.join("\n").trim_end());
    let train = ClassInterpretation::on(&mut learner, Part::Train).unwrap();
    assert_eq!(train.confusion_matrix(), matrix(&golden["train_confusion_matrix"]));
    assert_eq!(train.most_confused(1), pairs(&golden["train_most_confused"]));
}
