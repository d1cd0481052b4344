//! States of metrics on ranks that are threads: the same bits as on one, and errors that all ranks have.

use std::thread;

use brigade_metrics::{
    Accuracy, F1, Fold, Folded, Mae, Mean, Metric, MetricState, PredictedClasses, RocAucBinary,
    gather_in_data_order,
};
use brigade_torch::{Backend, Error, GlooDevice, GroupOptions, ProcessGroup, Result, Store};
use tch::{Kind, Tensor};

use crate::fill::{classes, uniform_tensor};
use crate::metrics::one_of_each;

/// Runs a body on so many ranks, and returns what each has found.
fn on_ranks<T: Send>(ranks: usize, body: impl Fn(&ProcessGroup) -> T + Sync) -> Vec<T> {
    let store = Store::hash().unwrap();
    thread::scope(|scope| {
        let started: Vec<_> = (0..ranks)
            .map(|rank| {
                let (store, body) = (store.clone(), &body);
                scope.spawn(move || {
                    let gloo = Backend::Gloo(GlooDevice::Address("127.0.0.1".into()));
                    let group =
                        ProcessGroup::new(&store, rank, ranks, gloo, GroupOptions::default());
                    body(&group.unwrap())
                })
            })
            .collect();
        started.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Updates a state twice with all batches of 4 that are rank `rank`'s of `ranks`.
fn twice<M: Metric>(
    state: &mut MetricState<M>,
    (predictions, targets): (&Tensor, &Tensor),
    rank: usize,
    ranks: usize,
) {
    let rows = predictions.size()[0];
    for _epoch in 0..2 {
        for (number, start) in (0..rows).step_by(4).skip(rank).step_by(ranks).enumerate() {
            let part = |tensor: &Tensor| tensor.narrow(0, start, (rows - start).min(4));
            state.update_at(number, &part(predictions), &part(targets)).unwrap();
        }
    }
}

#[test]
fn values_have_the_same_bits_on_any_number_of_ranks() {
    for metrics in 0..one_of_each().len() {
        let values = |rank, ranks, group: Option<&ProcessGroup>| -> Vec<u64> {
            let (metrics, predictions, targets) = one_of_each().remove(metrics);
            let values = metrics.into_iter().map(|metric| {
                let mut state = MetricState::new(metric);
                twice(&mut state, (&predictions, &targets), rank, ranks);
                state.compute(group).unwrap().to_bits()
            });
            values.collect()
        };
        let alone = values(0, 1, None);
        // The last rank of 12 has no batch of 11.
        for ranks in [2, 3, 12] {
            let found = on_ranks(ranks, |group| values(group.rank(), ranks, Some(group)));
            assert!(found.iter().all(|it| *it == alone), "{ranks} ranks: {found:?}, not {alone:?}");
        }
    }
}

#[test]
fn a_state_goes_on_after_a_value_and_begins_anew_after_a_reset() {
    let mut accuracy = MetricState::new(Accuracy);
    let scores = Tensor::from_slice2(&[[0.3, 2.0], [1.5, -1.0]]);
    assert!(accuracy.compute(None).unwrap().is_nan());
    accuracy.update(&scores, &Tensor::from_slice(&[1i64, 0])).unwrap();
    assert_eq!(accuracy.compute(None).unwrap(), 1.0);
    accuracy.update(&scores, &Tensor::from_slice(&[0i64, 1])).unwrap();
    assert_eq!(accuracy.compute(None).unwrap(), 0.5);
    accuracy.reset();
    assert!(accuracy.compute(None).unwrap().is_nan());
    assert!(accuracy.folded(None).unwrap().is_none());
}

#[test]
fn no_value_keeps_a_graph() {
    let values = Tensor::from_slice(&[1.0, 3.0]).set_requires_grad(true);
    let mut mean = MetricState::new(Mean);
    mean.update(&(&values * 2.0), &values.ones_like()).unwrap();
    assert_eq!(mean.compute(None).unwrap(), 4.0);
    let mut rows = MetricState::new(RocAucBinary);
    let scores = uniform_tensor(&[8, 2], -1.0, 1.0, 0).set_requires_grad(true);
    rows.update(&(&scores * 2.0), &classes(&[8], 2, 1)).unwrap();
    let Some(Folded::Rows(scores, _)) = rows.folded(None).unwrap() else { panic!() };
    assert!(!scores.requires_grad());
}

#[test]
fn ranks_with_different_metrics_all_fail() {
    let scores =
        |classes: usize| Tensor::ones([3, classes as i64], (Kind::Float, tch::Device::Cpu));
    let targets = || Tensor::from_slice(&[0i64, 1, 0]);
    let errors = on_ranks(2, |group| {
        let mut f1 = MetricState::new(F1::new().per_class());
        f1.update(&scores(2 + group.rank()), &targets()).unwrap();
        f1.compute(Some(group)).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("rank 0's metric has 7 sums, rank 1's 10"), "{error}");
    }
    let errors = on_ranks(2, |group| {
        let mut metric: MetricState<Box<dyn Metric<Value = f64>>> =
            MetricState::new(if group.rank() == 0 {
                Box::new(Accuracy)
            } else {
                Box::new(RocAucBinary)
            });
        metric.update(&scores(2), &targets()).unwrap();
        metric.compute(Some(group)).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.contains("rank 0 keeps sums of its batches"), "{error}");
    }
}

/// Keeps as many sums as a batch has rows, which no two batches may differ in.
#[derive(Debug)]
struct Unequal;

impl Metric for Unequal {
    type Value = f64;

    fn name(&self) -> String {
        "unequal".to_owned()
    }

    fn fold(&self, predictions: &Tensor, _targets: &Tensor) -> Result<Fold> {
        match predictions.size()[0] {
            0 => Err(Error::custom("no row")),
            9 => panic!("nine rows"),
            _ => Fold::sums(&[predictions.shallow_clone()]),
        }
    }

    fn value(&self, _folded: &Folded) -> Result<f64> {
        Ok(0.0)
    }
}

#[test]
fn a_rank_that_fails_fails_the_others() {
    let errors = on_ranks(2, |group| {
        let mut metric = MetricState::new(Unequal);
        for rows in 1..2 + group.rank() as i64 {
            let row = uniform_tensor(&[rows], 0.0, 1.0, 0);
            metric.update(&row, &row).unwrap();
        }
        metric.compute(Some(group)).unwrap_err().to_string()
    });
    for error in errors {
        assert!(error.starts_with("the metric `unequal` failed: "), "{error}");
    }
}

#[test]
fn errors_and_panics_of_a_metric_have_its_name_once() {
    let rows = |count: i64| uniform_tensor(&[count], 0.0, 1.0, 0);
    let fails = |count| {
        MetricState::new(Unequal).update(&rows(count), &rows(count)).unwrap_err().to_string()
    };
    assert_eq!(fails(0), "the metric `unequal` failed: no row");
    assert_eq!(fails(9), "the metric `unequal` failed: it panicked: nine rows");
    let error = MetricState::new(Mae).update(&rows(2), &rows(3)).unwrap_err().to_string();
    assert_eq!(error.matches("the metric").count(), 1, "{error}");
}

#[test]
fn class_numbers_are_read_as_scores_are() {
    let (targets, predicted) = (classes(&[41], 5, 1), classes(&[41], 5, 2));
    let scores = predicted.one_hot(5);
    let mut numbers = MetricState::new(PredictedClasses::new(F1::new().per_class(), 5));
    let mut scored = MetricState::new(F1::new().per_class());
    numbers.update(&predicted, &targets).unwrap();
    scored.update(&scores, &targets).unwrap();
    assert_eq!(numbers.compute(None).unwrap(), scored.compute(None).unwrap());
    let error = numbers.update(&(&predicted + 1), &targets).unwrap_err().to_string();
    assert!(error.contains("are not classes below 5"), "{error}");
    assert!(numbers.update(&scores.to_kind(Kind::Float), &targets).is_err());
}

#[test]
fn rows_of_other_shapes_are_refused_on_every_rank() {
    let errors = on_ranks(2, |group| {
        let rows = uniform_tensor(&[2, 1 + group.rank() as i64], 0.0, 1.0, 0);
        gather_in_data_order(Some(group), &[0], vec![rows]).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|it| it.contains("the ranks' rows cannot be joined")), "{errors:?}");
    let errors = on_ranks(2, |group| {
        let widths = if group.rank() == 0 { [1, 1] } else { [1, 2] };
        let batches = widths.map(|width| uniform_tensor(&[2, width], 0.0, 1.0, 0));
        gather_in_data_order(Some(group), &[0, 1], batches.into()).unwrap_err().to_string()
    });
    assert!(errors.iter().all(|it| it.contains("rank 1's batches cannot be joined")), "{errors:?}");
}
