//! Metrics against fastai's and scikit-learn's values, over batches and ranks, and where data are missing or wrong.

use std::sync::Arc;

use brigade_metrics::{
    Accuracy, AccuracyMulti, Average, AveragePrecision, AveragePrecisionMulti, BalancedAccuracy,
    Brier, ClassesLast, CohenKappa, CorpusBleu, Dice, DiceMulti, ErrorRate, ExpRmspe,
    ExplainedVariance, F1, F1Multi, FBeta, FBetaMulti, Folded, ForegroundAccuracy, HammingLoss,
    HammingLossMulti, IGNORED, IntoMetrics, Jaccard, JaccardCoeff, JaccardCoeffMulti, JaccardMulti,
    KappaWeights, Mae, Matthews, Metric, Mse, Msle, MultiClass, Pearson, Perplexity, Precision,
    PrecisionMulti, R2, Recall, RecallMulti, Rmse, RocAuc, RocAucBinary, RocAucMulti, Spearman,
    TopK, mean_of, of_rows,
};
use brigade_testkit::assert_close;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::fill::{classes, u, uniform_tensor};
use crate::fold::{folded, value};

fn golden(text: &str) -> Vec<Value> {
    let file: Value = serde_json::from_str(text).unwrap();
    file["cases"].as_array().unwrap().clone()
}

fn average(args: &Value, default: Average) -> Average {
    match args["average"].as_str() {
        None => default,
        Some("binary") => Average::Binary,
        Some("macro") => Average::Macro,
        Some("micro") => Average::Micro,
        Some("weighted") => Average::Weighted,
        Some("samples") => Average::Samples,
        Some(other) => panic!("average {other}"),
    }
}

/// The metric of a golden row: by fastai's name or ours.
fn metric(row: &Value) -> Arc<dyn Metric<Value = f64>> {
    let args = &row["args"];
    let beta = args["beta"].as_f64().unwrap_or(f64::INFINITY);
    let positive =
        args["pos_label"].as_u64().or_else(|| args["positive"].as_u64()).unwrap_or(1) as usize;
    let (binary, of_labels) = (average(args, Average::Binary), average(args, Average::Macro));
    macro_rules! single {
        ($metric:expr) => {
            Arc::new($metric.average(binary).positive(positive))
        };
    }
    macro_rules! multi {
        ($metric:expr) => {{
            let mut metric = $metric.average(of_labels);
            if let Some(at) = args["thresh"].as_f64() {
                metric = metric.threshold(at);
            }
            if args["sigmoid"] == false {
                metric = metric.probabilities();
            }
            Arc::new(metric)
        }};
    }
    match row["metric"].as_str().unwrap() {
        "accuracy" | "Accuracy" => Arc::new(Accuracy),
        "error_rate" => Arc::new(ErrorRate),
        "top_k_accuracy" | "TopK" => Arc::new(TopK(args["k"].as_i64().unwrap())),
        "accuracy_multi" => {
            let mut metric = AccuracyMulti::new();
            if let Some(at) = args["thresh"].as_f64() {
                metric = metric.threshold(at);
            }
            Arc::new(if args["sigmoid"] == false { metric.probabilities() } else { metric })
        }
        "F1Score" | "F1" => single!(F1::new()),
        "FBeta" => single!(FBeta::new(beta)),
        "Precision" => single!(Precision::new()),
        "Recall" => single!(Recall::new()),
        "Jaccard" => single!(Jaccard::new()),
        "F1ScoreMulti" | "F1Multi" => multi!(F1Multi::new()),
        "FBetaMulti" => multi!(FBetaMulti::new(beta)),
        "PrecisionMulti" => multi!(PrecisionMulti::new()),
        "RecallMulti" => multi!(RecallMulti::new()),
        "JaccardMulti" => multi!(JaccardMulti::new()),
        "RocAuc" => {
            let multi = match args["multi_class"].as_str() {
                Some("ovo") => MultiClass::OneVsOne,
                _ => MultiClass::OneVsRest,
            };
            Arc::new(RocAuc::new().average(of_labels).multi_class(multi))
        }
        "RocAucBinary" => Arc::new(RocAucBinary),
        "RocAucMulti" => Arc::new(RocAucMulti::new().average(of_labels)),
        "APScoreBinary" | "AveragePrecision" => Arc::new(AveragePrecision),
        "APScoreMulti" | "AveragePrecisionMulti" => {
            Arc::new(AveragePrecisionMulti::new().average(of_labels))
        }
        "MatthewsCorrCoef" | "Matthews" => Arc::new(Matthews),
        "CohenKappa" => Arc::new(CohenKappa::new().weights(match args["weights"].as_str() {
            Some("linear") => KappaWeights::Linear,
            Some("quadratic") => KappaWeights::Quadratic,
            _ => KappaWeights::Equal,
        })),
        "BalancedAccuracy" if args["adjusted"] == true => {
            Arc::new(BalancedAccuracy::new().adjusted())
        }
        "BalancedAccuracy" => Arc::new(BalancedAccuracy::new()),
        "HammingLoss" => Arc::new(HammingLoss),
        "HammingLossMulti" => Arc::new(HammingLossMulti::new()),
        "Perplexity" => Arc::new(Perplexity),
        "Brier" => Arc::new(Brier),
        "Dice" => Arc::new(Dice),
        "DiceMulti" => Arc::new(DiceMulti),
        "JaccardCoeff" => Arc::new(JaccardCoeff),
        "JaccardCoeffMulti" => Arc::new(JaccardCoeffMulti),
        "foreground_acc" => {
            Arc::new(ForegroundAccuracy::new().background(args["bkg_idx"].as_i64().unwrap_or(0)))
        }
        "CorpusBLEUMetric" => Arc::new(CorpusBleu),
        "mse" | "Mse" => Arc::new(Mse),
        "mae" | "Mae" => Arc::new(Mae),
        "msle" => Arc::new(Msle),
        "rmse" | "Rmse" => Arc::new(Rmse),
        "exp_rmspe" => Arc::new(ExpRmspe),
        "R2Score" | "R2" => Arc::new(R2),
        "ExplainedVariance" => Arc::new(ExplainedVariance),
        "PearsonCorrCoef" | "Pearson" => Arc::new(Pearson),
        "SpearmanCorrCoef" | "Spearman" => Arc::new(Spearman),
        other => panic!("no metric for {other}"),
    }
}

/// Adds 1.2 at the targets' classes, in dimension 1.
fn toward(scores: &Tensor, targets: &Tensor) -> Tensor {
    let there = targets.unsqueeze(1);
    let raised = scores.gather(1, &there, false) + 1.2;
    scores.scatter(1, &there, &raised)
}

/// The given predictions and targets of one of fastai's eight kinds of data, classes in dimension 1.
fn given(case: &Value) -> (Tensor, Tensor) {
    let size = |name: &str| case["sizes"][name].as_i64().unwrap();
    let (n, h, w) = (size("n"), size("h"), size("w"));
    let there = |stream| {
        let labels = size("labels");
        let drawn: Vec<f32> =
            (0..(n * labels) as u64).map(|it| f32::from(u(it, stream) < 0.4)).collect();
        Tensor::from_slice(&drawn).view([n, labels])
    };
    let scored = |shape: &[i64], count: i64, stream| {
        let targets = classes(&[&shape[..1], &shape[2..]].concat(), count, stream + 1);
        (toward(&uniform_tensor(shape, -2.0, 2.0, stream), &targets), targets)
    };
    match case["data"].as_str().unwrap() {
        "multiclass" => scored(&[n, 5], 5, 1800),
        "binary" => scored(&[n, 2], 2, 1810),
        "multilabel" => {
            let targets = there(1821);
            (uniform_tensor(&[n, 4], -2.0, 2.0, 1820) + &targets * 0.8, targets)
        }
        "multilabel_probabilities" => (uniform_tensor(&[n, 4], 0.0, 1.0, 1830), there(1831)),
        "segmentation" => scored(&[n, 2, h, w], 2, 1840),
        "segmentation_multi" => scored(&[n, 3, h, w], 3, 1850),
        "regression" => {
            let targets = uniform_tensor(&[n, 1], 0.0, 3.0, 1861);
            (&targets * 0.8 + uniform_tensor(&[n, 1], -0.5, 0.5, 1860), targets)
        }
        "language" => {
            let (tokens, words) = (size("seq"), size("vocab"));
            let targets = classes(&[n, tokens], words, 1871);
            let scores = uniform_tensor(&[n, tokens, words], -2.0, 2.0, 1870);
            (toward(&scores.movedim_int(-1, 1), &targets), targets)
        }
        other => panic!("data {other}"),
    }
}

/// Metrics that fastai computes in float32, and those that it averages over batches.
fn rounded_in_fastai(name: &str) -> bool {
    name.chars().next().is_some_and(char::is_lowercase)
        || ["Perplexity", "R2Score", "ExplainedVariance", "PearsonCorrCoef"].contains(&name)
}

#[test]
fn fastai_golden() {
    let mut compared = 0;
    for case in golden(include_str!("../golden/metrics.json")) {
        let data = case["data"].as_str().unwrap();
        let (predictions, targets) = given(&case);
        // The golden language model has its classes last, in memory and in the listed first values.
        let listed = if data == "language" {
            predictions.movedim_int(1, -1)
        } else {
            predictions.shallow_clone()
        };
        for (name, tensor) in [("first_pred", &listed), ("first_y", &targets)] {
            let expected: Vec<f64> = serde_json::from_value(case[name].clone()).unwrap();
            let found =
                tensor.to_kind(Kind::Double).reshape([-1]).narrow(0, 0, expected.len() as i64);
            assert_close(&Vec::try_from(&found).unwrap(), &expected, 1e-7, 0.0);
        }
        let size = case["sizes"]["bs"].as_i64().unwrap();
        for row in case["metrics"].as_array().unwrap() {
            let called = row["metric"].as_str().unwrap();
            let metric = metric(row);
            let found = if data == "language" {
                value(&ClassesLast(metric.clone()), &listed, &targets, size, 1)
            } else {
                value(&*metric, &predictions, &targets, size, 1)
            };
            let found = found.unwrap_or_else(|error| panic!("{data} {called}: {error}"));
            let Some(expected) = row["value"].as_f64() else {
                // fastai fails on probabilities for the curves of labels; only their order matters here.
                assert_eq!(row["error"], "ValueError");
                assert!((0.0..=1.0).contains(&found), "{data} {called}: {found}");
                continue;
            };
            assert_eq!(metric.name(), row["name"].as_str().unwrap());
            let found = if called == "foreground_acc" {
                // fastai takes the mean of the batches' shares, ours is the share of all pixels.
                assert!((found - expected).abs() < 5e-3, "{found} {expected}");
                mean_of_batches(&*metric, &predictions, &targets, size)
            } else {
                found
            };
            let tolerance = if rounded_in_fastai(called) { 1e-6 } else { 1e-12 };
            let off = (found - expected).abs() / expected.abs();
            assert!(off <= tolerance, "{data} {row}: {found}, off by {off:e}");
            compared += 1;
        }
    }
    assert_eq!(compared, 95);
}

fn mean_of_batches(
    metric: &dyn Metric<Value = f64>,
    predictions: &Tensor,
    targets: &Tensor,
    size: i64,
) -> f64 {
    let rows = predictions.size()[0];
    let share = |start: i64| {
        let length = size.min(rows - start);
        let part = |tensor: &Tensor| tensor.narrow(0, start, length);
        value(metric, &part(predictions), &part(targets), length, 1).unwrap() * length as f64
    };
    (0..rows).step_by(size as usize).map(share).sum::<f64>() / rows as f64
}

/// Explicit predictions and targets of scikit-learn's cases.
fn explicit(case: &Value) -> (Tensor, Tensor) {
    fn rows(value: &Value) -> Tensor {
        let flat = |row: &Value| -> Vec<f64> { serde_json::from_value(row.clone()).unwrap() };
        if value[0].is_array() {
            let rows: Vec<Vec<f64>> = value.as_array().unwrap().iter().map(flat).collect();
            Tensor::from_slice2(&rows)
        } else {
            Tensor::from_slice(&flat(value))
        }
    }
    let targets = rows(&case["targets"]);
    let targets = if case["kind"] == "classes" { targets.to_kind(Kind::Int64) } else { targets };
    (rows(&case["predictions"]), targets)
}

#[test]
fn scikit_learn_golden() {
    let mut compared = 0;
    for case in golden(include_str!("../golden/sklearn.json")) {
        let (predictions, targets) = explicit(&case);
        let name = case["name"].as_str().unwrap();
        for row in case["metrics"].as_array().unwrap() {
            let found = value(&*metric(row), &predictions, &targets, 7, 1);
            compared += 1;
            if row["error"].is_string() {
                let error = found.unwrap_err().to_string();
                assert!(error.contains("is never a target"), "{name} {row}: {error}");
                continue;
            }
            let expected = match &row["value"] {
                Value::String(text) => text.parse().unwrap(),
                number => number.as_f64().unwrap(),
            };
            let found = found.unwrap_or_else(|error| panic!("{name} {row}: {error}"));
            let close = found == expected
                || (found.is_nan() && expected.is_nan())
                || (found - expected).abs() <= 1e-12 * expected.abs().max(1e-3);
            assert!(close, "{name} {row}: {found}");
        }
    }
    assert!(compared > 500, "{compared}");
}

/// Scores whose largest is each token: `[n, vocabulary, tokens]`.
fn scores_of(tokens: &Tensor, vocabulary: i64) -> Tensor {
    tokens.one_hot(vocabulary).movedim_int(-1, 1).to_kind(Kind::Float)
}

#[test]
fn bleu_golden() {
    fn rows(value: &Value) -> Tensor {
        let rows: Vec<Vec<i64>> = serde_json::from_value(value.clone()).unwrap();
        Tensor::from_slice2(&rows)
    }
    let mut compared = 0;
    for case in golden(include_str!("../golden/bleu.json")) {
        let [predicted, targets] = ["predicted", "targets"].map(|name| rows(&case[name]));
        let scores = scores_of(&predicted, case["vocab_sz"].as_i64().unwrap());
        for size in [1, 3, 100] {
            for ranks in [1, 2, 3] {
                let found = value(&CorpusBleu, &scores, &targets, size, ranks).unwrap();
                let expected = case["value"].as_f64().unwrap_or(f64::NAN);
                let close =
                    (found - expected).abs() <= 1e-15 || found.is_nan() && expected.is_nan();
                assert!(close, "{}: {found}, not {expected}", case["name"]);
            }
        }
        // Padding whose target is ignored.
        let padded = |tokens: &Tensor, with: i64| {
            tokens.constant_pad_nd([0, 2].as_slice()) + {
                let columns = Tensor::arange(tokens.size()[1] + 2, (Kind::Int64, Device::Cpu));
                columns.ge(tokens.size()[1]).to_kind(Kind::Int64) * with
            }
        };
        if predicted.size() == targets.size() {
            let scores = scores_of(&padded(&predicted, 1), case["vocab_sz"].as_i64().unwrap());
            let ignored = value(&CorpusBleu, &scores, &padded(&targets, IGNORED), 3, 1).unwrap();
            let plain = scores_of(&predicted, case["vocab_sz"].as_i64().unwrap());
            let plain = value(&CorpusBleu, &plain, &targets, 3, 1).unwrap();
            assert_eq!(ignored.to_bits(), plain.to_bits(), "{}", case["name"]);
        }
        compared += 1;
    }
    assert_eq!(compared, 6);
    let scores = Tensor::zeros([2, 5], (Kind::Float, Device::Cpu));
    let error = CorpusBleu.fold(&scores, &classes(&[2], 5, 1)).unwrap_err().to_string();
    assert!(error.contains("[2, 5]") && error.contains("ClassesLast"), "{error}");
}

/// Metrics, with predictions and targets that they take.
pub(crate) type Taken = (Vec<Arc<dyn Metric<Value = f64>>>, Tensor, Tensor);

/// One of each metric: of classes, of two, of labels, and of numbers.
pub(crate) fn one_of_each() -> Vec<Taken> {
    let targets = classes(&[41], 5, 1);
    let of_classes = (
        (Accuracy, ErrorRate, TopK(2), F1::new().average(Average::Macro), RocAuc::new(), Matthews),
        (
            CohenKappa::new(),
            CohenKappa::new().weights(KappaWeights::Quadratic),
            BalancedAccuracy::new(),
            Perplexity,
            Brier,
            DiceMulti,
            ForegroundAccuracy::new(),
        ),
    );
    let mut classes_of_each = of_classes.0.into_metrics();
    classes_of_each.extend(of_classes.1.into_metrics());
    let two = classes(&[41], 2, 3);
    let of_two = (Precision::new(), RocAucBinary, AveragePrecision, Dice, JaccardCoeff);
    let labels = uniform_tensor(&[41, 3], 0.0, 1.0, 5).ge(0.6).to_kind(Kind::Float);
    let of_labels = (
        AccuracyMulti::new(),
        RecallMulti::new(),
        JaccardMulti::new().average(Average::Samples),
        RocAucMulti::new(),
        AveragePrecisionMulti::new(),
        HammingLossMulti::new(),
    );
    let numbers = uniform_tensor(&[41, 1], 0.0, 3.0, 7);
    let of_numbers = ((Mse, Mae, Rmse, Msle, ExpRmspe), (R2, ExplainedVariance, Pearson, Spearman));
    let mut numbers_of_each = of_numbers.0.into_metrics();
    numbers_of_each.extend(of_numbers.1.into_metrics());
    let sentences = classes(&[41, 9], 4, 9);
    vec![
        (classes_of_each, toward(&uniform_tensor(&[41, 5], -2.0, 2.0, 0), &targets), targets),
        (of_two.into_metrics(), toward(&uniform_tensor(&[41, 2], -2.0, 2.0, 2), &two), two),
        (of_labels.into_metrics(), uniform_tensor(&[41, 3], -2.0, 2.0, 4), labels),
        (numbers_of_each, &numbers * 0.8 + uniform_tensor(&[41, 1], -0.5, 0.5, 6), numbers),
        (
            vec![Arc::new(CorpusBleu) as Arc<dyn Metric<Value = f64>>],
            toward(&uniform_tensor(&[41, 4, 9], -2.0, 2.0, 8), &sentences),
            sentences,
        ),
    ]
}

/// The same batches on any number of ranks give the same bits. Other batches do, too, where counts or rows are kept:
/// only sums of fractions are added in another order then.
#[test]
fn ranks_and_batches() {
    let fractions = ["perplexity", "brier_score_loss", "jaccard_score", "mse", "mae", "msle"];
    let mut seen = 0;
    for (metrics, predictions, targets) in one_of_each() {
        for metric in metrics {
            let name = metric.name();
            let alone = value(&*metric, &predictions, &targets, 8, 1).unwrap();
            assert!(alone.is_finite(), "{name}: {alone}");
            for ranks in [2, 3, 5] {
                let shared = value(&*metric, &predictions, &targets, 8, ranks).unwrap();
                assert_eq!(alone.to_bits(), shared.to_bits(), "{name} on {ranks} ranks");
            }
            for size in [1, 5, 41] {
                let other = value(&*metric, &predictions, &targets, size, 1).unwrap();
                if name.starts_with('_') || fractions.contains(&&*name) {
                    assert!(
                        (other - alone).abs() <= 1e-14 * alone.abs(),
                        "{name}: {other} {alone}"
                    );
                } else {
                    assert_eq!(alone.to_bits(), other.to_bits(), "{name} of batches of {size}");
                }
            }
            seen += 1;
        }
    }
    assert_eq!(seen, 34);
}

#[test]
fn without_a_batch() {
    for (metrics, ..) in one_of_each() {
        for metric in metrics {
            let value = metric.value(&Folded::Sums(Vec::new())).unwrap();
            assert!(value.is_nan(), "{}: {value}", metric.name());
        }
    }
}

#[test]
fn batches_without_rows_change_nothing() {
    for (metrics, predictions, targets) in one_of_each() {
        for metric in metrics {
            let none = (predictions.narrow(0, 0, 0), targets.narrow(0, 0, 0));
            let kept = metric.fold(&none.0, &none.1).unwrap();
            if let brigade_metrics::Fold::Sums(sums) = kept {
                assert_eq!(
                    sums.abs().sum(Kind::Double).double_value(&[]),
                    0.0,
                    "{}",
                    metric.name()
                );
            }
        }
    }
}

#[test]
fn shapes_that_do_not_fit() {
    for (metrics, predictions, targets) in one_of_each() {
        for metric in metrics {
            let short = targets.narrow(0, 0, 40);
            let error = metric.fold(&predictions, &short).unwrap_err().to_string();
            let both = [predictions.size(), short.size()].map(|it| format!("{it:?}"));
            assert!(error.contains(&metric.name()), "{error}");
            assert!(both.iter().all(|it| error.contains(it.as_str())), "{error}");
        }
    }
}

/// What was kept of another metric, or of another number of classes.
#[test]
fn folds_that_do_not_fit() {
    for (metrics, predictions, targets) in one_of_each() {
        for metric in metrics {
            let wrong = match folded(&*metric, &predictions, &targets, 8, 1).unwrap() {
                Folded::Sums(_) => Folded::Rows(
                    Tensor::zeros([2], (Kind::Float, Device::Cpu)),
                    Tensor::zeros([2], (Kind::Float, Device::Cpu)),
                ),
                Folded::Rows(..) => Folded::Sums(vec![1.0]),
            };
            assert!(metric.value(&wrong).is_err(), "{}", metric.name());
            if let Folded::Rows(..) = wrong {
                assert!(metric.value(&Folded::Sums(vec![1.0; 8])).is_err(), "{}", metric.name());
            }
        }
    }
}

#[test]
fn nan_predictions() {
    let nan = [
        "roc_auc_score",
        "average_precision_score",
        "perplexity",
        "brier_score_loss",
        "mse",
        "mae",
        "_rmse",
        "msle",
        "_exp_rmspe",
        "r2_score",
        "explained_variance_score",
        "pearsonr",
        "spearmanr",
    ];
    for (metrics, predictions, targets) in one_of_each() {
        let predictions = predictions.copy();
        let _ = predictions.narrow(0, 3, 1).fill_(f64::NAN);
        for metric in metrics {
            let name = metric.name();
            let found = value(&*metric, &predictions, &targets, 8, 1).unwrap();
            assert_eq!(found.is_nan(), nan.contains(&&*name), "{name}: {found}");
        }
    }
    // Where a class is chosen, NaN is the largest score; of the k largest it takes a place, and is never right.
    let scores =
        Tensor::from_slice2(&[[f64::NAN, 9.0, 1.0], [2.0, f64::NAN, 1.0], [2.0, 1.0, f64::NAN]]);
    let targets = Tensor::from_slice(&[1i64, 0, 2]);
    assert_eq!(value(&TopK(1), &scores, &targets, 3, 1).unwrap(), 0.0);
    assert_eq!(value(&TopK(2), &scores, &targets, 3, 1).unwrap(), 2.0 / 3.0);
}

#[test]
fn targets_that_name_no_class() {
    let scores = uniform_tensor(&[4, 5], -2.0, 2.0, 0);
    for (wrong, said) in [(5, "1 targets name no class"), (-1, "1 targets name no class")] {
        let targets = Tensor::from_slice(&[0i64, wrong, 2, 3]);
        for metric in one_of_each().remove(0).0 {
            let error = value(&*metric, &scores, &targets, 2, 1).unwrap_err().to_string();
            assert!(error.contains(said), "{}: {error}", metric.name());
        }
    }
    let labels = Tensor::from_slice2(&[[0.0, 1.0, 0.5], [1.0, 1.0, 0.0]]);
    for metric in one_of_each().remove(2).0 {
        let error = value(&*metric, &labels, &labels, 2, 1).unwrap_err().to_string();
        assert!(error.contains("1 targets of labels are neither 0 nor 1"), "{error}");
    }
    let fractions = Tensor::from_slice(&[0.0, 1.0, 2.0, 3.0]);
    assert!(Accuracy.fold(&scores, &fractions).unwrap_err().to_string().contains("class numbers"));
}

/// Ignored targets are as if their rows were not there.
#[test]
fn ignored_targets() {
    let (metrics, predictions, targets) = one_of_each().remove(0);
    let left_out = targets.copy();
    let kept: Vec<i64> = (0..41).filter(|it| it % 4 != 1).collect();
    for row in (0..41).filter(|it| it % 4 == 1) {
        let _ = left_out.narrow(0, row, 1).fill_(IGNORED);
    }
    let kept = Tensor::from_slice(&kept);
    let (fewer, of_fewer) = (predictions.index_select(0, &kept), targets.index_select(0, &kept));
    for metric in metrics {
        let all = value(&*metric, &predictions, &left_out, 41, 1).unwrap();
        let some = value(&*metric, &fewer, &of_fewer, 41, 1).unwrap();
        assert!((all - some).abs() <= 1e-15 * some.abs(), "{}: {all} {some}", metric.name());
    }
    let nothing = targets.full_like(IGNORED);
    for metric in one_of_each().remove(0).0 {
        let found = value(&*metric, &predictions, &nothing, 8, 1).unwrap();
        assert!(found.is_nan(), "{}: {found}", metric.name());
    }
}

#[test]
fn refusals_say_what_to_choose() {
    let five = uniform_tensor(&[4, 5], -2.0, 2.0, 0);
    let targets = Tensor::from_slice(&[0i64, 1, 2, 3]);
    let labels = five.ge(0.0);
    let says = |metric: &dyn Metric<Value = f64>, targets: &Tensor, text: &str| {
        let error = metric.fold(&five, targets).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    says(&F1::new(), &targets, "binary average is for 2 classes, but there are 5");
    says(&F1::new().average(Average::Samples), &targets, "of labels, not of classes");
    says(&F1Multi::new().average(Average::Binary), &labels, "for 1 label, but there are 5");
    says(&RocAucMulti::new().average(Average::Binary), &labels, "for 1 label, but there are 5");
    says(&RocAucBinary, &targets, "it is for 2 classes, but there are 5");
    says(&Dice, &targets, "use `dice_multi`");
    says(&TopK(0), &targets, "k is 0");
    says(&RocAuc::new().average(Average::Samples), &targets, "choose Average::Macro");
    says(
        &RocAuc::new().average(Average::Micro).multi_class(MultiClass::OneVsOne),
        &targets,
        "choose Average::Macro",
    );
    let two = five.narrow(1, 0, 2);
    let error = F1::new().positive(2).fold(&two, &targets).unwrap_err().to_string();
    assert!(error.contains("of two classes it is 0 or 1"), "{error}");
    let one = five.narrow(1, 0, 1);
    assert!(Accuracy.fold(&one, &targets).unwrap_err().to_string().contains("…Multi"));
    let last = Tensor::zeros([4, 6, 5], (Kind::Float, Device::Cpu));
    let tokens = Tensor::zeros([4, 6], (Kind::Int64, Device::Cpu));
    assert!(Accuracy.fold(&last, &tokens).unwrap_err().to_string().contains("ClassesLast"));
}

/// One score of one label, in both shapes that targets have.
#[test]
fn one_label() {
    let scores = Tensor::from_slice(&[2.0, -1.0, 0.5, -3.0]).view([4, 1]);
    let targets = Tensor::from_slice(&[1i64, 1, 0, 0]);
    for targets in [targets.shallow_clone(), targets.view([4, 1])] {
        assert_eq!(value(&AccuracyMulti::new(), &scores, &targets, 2, 1).unwrap(), 0.5);
        let f1 = F1Multi::new().average(Average::Binary);
        assert_eq!(value(&f1, &scores, &targets, 2, 1).unwrap(), 0.5);
        assert_eq!(value(&RocAucMulti::new(), &scores, &targets, 2, 1).unwrap(), 0.75);
    }
}

/// A softmax in float32 would make both scores 1, and the order a tie.
#[test]
fn order_of_certain_predictions() {
    let scores = Tensor::from_slice2(&[[0f32, 40.0], [0.0, 50.0], [0.0, -1.0]]);
    let targets = Tensor::from_slice(&[0i64, 1, 0]);
    assert_eq!(value(&RocAucBinary, &scores, &targets, 3, 1).unwrap(), 1.0);
    assert_eq!(value(&AveragePrecision, &scores, &targets, 3, 1).unwrap(), 1.0);
}

/// Masks with a channel, and predictions with a graph, of which nothing is kept.
#[test]
fn masks_and_graphs() {
    let targets = classes(&[3, 1, 4, 4], 2, 9);
    let scores = uniform_tensor(&[3, 2, 4, 4], -2.0, 2.0, 8).set_requires_grad(true) * 1.0;
    for metric in (Dice, Accuracy, ForegroundAccuracy::new(), Perplexity).into_metrics() {
        let with = metric.fold(&scores, &targets).unwrap();
        let brigade_metrics::Fold::Sums(sums) = with else { panic!("rows") };
        assert!(!sums.requires_grad() && sums.kind() == Kind::Double && sums.dim() == 1);
        let without = metric.fold(&scores, &targets.squeeze_dim(1)).unwrap();
        let brigade_metrics::Fold::Sums(other) = without else { panic!("rows") };
        assert_eq!(sums, other);
    }
}

#[test]
fn half_precision() {
    let (metrics, predictions, targets) = one_of_each().remove(0);
    let half = predictions.to_kind(Kind::BFloat16);
    let same = half.to_kind(Kind::Float);
    for metric in metrics {
        let (of_half, of_full) = (
            value(&*metric, &half, &targets, 8, 1).unwrap(),
            value(&*metric, &same, &targets, 8, 1).unwrap(),
        );
        assert_eq!(of_half.to_bits(), of_full.to_bits(), "{}", metric.name());
    }
}

#[test]
fn functions_and_adapters() {
    let (_, predictions, targets) = one_of_each().remove(3);
    let squared = mean_of("squared", |p: &Tensor, t: &Tensor| {
        Ok((p - t).f_to_kind(Kind::Double)?.f_square()?)
    });
    let found = value(&squared, &predictions, &targets, 8, 2).unwrap();
    let expected = value(&Mse, &predictions, &targets, 8, 1).unwrap();
    assert_close(&[found], &[expected], 1e-6, 0.0);
    let bias = brigade_metrics::fold(
        "bias",
        |p: &Tensor, t: &Tensor| {
            Ok(Tensor::f_stack(&[p.f_sum(Kind::Double)?, t.f_sum(Kind::Double)?], 0)?)
        },
        |sums: &[f64]| sums[0] / sums[1],
    );
    let found = value(&bias, &predictions, &targets, 8, 1).unwrap();
    let expected = (predictions.sum(Kind::Double) / targets.sum(Kind::Double)).double_value(&[]);
    assert_close(&[found], &[expected], 1e-12, 0.0);
    assert!(bias.value(&Folded::Sums(Vec::new())).unwrap().is_nan());
    let largest = of_rows("largest", |p: &Tensor, t: &Tensor| {
        Ok((p - t).f_abs()?.f_max()?.f_double_value(&[])?)
    });
    let found = value(&largest, &predictions, &targets, 8, 3).unwrap();
    assert_eq!(found, (&predictions - &targets).abs().max().double_value(&[]));
    assert!(largest.value(&Folded::Sums(Vec::new())).unwrap().is_nan());
    assert!(format!("{bias:?}{squared:?}{largest:?}").contains("bias"));

    let renamed = Mse.named("valid_mse");
    assert_eq!(renamed.name(), "valid_mse");
    assert_eq!(
        value(&renamed, &predictions, &targets, 8, 1).unwrap(),
        value(&Mse, &predictions, &targets, 8, 1).unwrap()
    );
}

#[test]
fn lists_of_metrics() {
    let boxed: Vec<Box<dyn Metric<Value = f64>>> =
        vec![Box::new(Accuracy), Box::new(TopK(3).named("top_3"))];
    let names = |list: Vec<Arc<dyn Metric<Value = f64>>>| {
        list.iter().map(|it| it.name()).collect::<Vec<_>>()
    };
    let list = boxed.into_metrics();
    let chosen: Arc<dyn Metric<Value = f64>> = list[1].clone();
    assert_eq!(names(list.into_metrics()), ["accuracy", "top_3"]);
    assert_eq!(names((Mse, chosen).into_metrics()), ["mse", "top_3"]);
    let eight = (Mse, Mae, Rmse, Msle, R2, Pearson, Spearman, ExpRmspe).into_metrics();
    assert_eq!(names(eight)[7], "_exp_rmspe");
    assert!(().into_metrics().is_empty());
}
