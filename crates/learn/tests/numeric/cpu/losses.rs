//! Losses against fastai's values and gradients, and what they refuse.

use brigade_learn::loss::{
    BceWithLogits, CrossEntropy, DiceLoss, Focal, L1, LabelSmoothingCrossEntropy, Loss, Outputs,
    loss_from,
};
use brigade_metrics::{ClassesLast, Mse};
use brigade_testkit::assert_close;
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::fill::{classes, u, uniform_tensor};

fn numbers(value: &Value) -> Vec<f64> {
    match value {
        Value::Array(values) => values.iter().flat_map(numbers).collect(),
        Value::Bool(value) => vec![f64::from(*value)],
        value => vec![value.as_f64().unwrap()],
    }
}

fn flat(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(&tensor.detach().to_kind(Kind::Double).reshape([-1])).unwrap()
}

fn predictions() -> Tensor {
    uniform_tensor(&[7, 5], -2.0, 2.0, 1900)
}

fn labels() -> Tensor {
    let drawn: Vec<f32> = (0..35).map(|it| f32::from(u(it, 1902) < 0.5)).collect();
    Tensor::from_slice(&drawn).view([7, 5])
}

/// The loss of a golden case.
fn loss(case: &Value) -> Box<dyn Loss> {
    let args = &case["args"];
    let weight = args["weight"].is_array().then(|| numbers(&args["weight"]));
    macro_rules! weighted {
        ($loss:expr) => {
            match &weight {
                Some(weight) => Box::new($loss.weight(weight)),
                None => Box::new($loss),
            }
        };
    }
    match case["loss"].as_str().unwrap() {
        "CrossEntropyLossFlat" => weighted!(CrossEntropy::default()),
        "LabelSmoothingCrossEntropy" | "LabelSmoothingCrossEntropyFlat" => {
            weighted!(LabelSmoothingCrossEntropy::new(args["eps"].as_f64().unwrap_or(0.1)))
        }
        "FocalLossFlat" => weighted!(Focal::new(args["gamma"].as_f64().unwrap_or(2.0))),
        "BCEWithLogitsLossFlat" if args["pos_weight"].is_array() => {
            Box::new(BceWithLogits::default().pos_weight(&numbers(&args["pos_weight"])))
        }
        "BCEWithLogitsLossFlat" => weighted!(BceWithLogits::default()),
        "MSELossFlat" => Box::new(Mse),
        "L1LossFlat" => Box::new(L1),
        other => panic!("no loss for {other}"),
    }
}

#[test]
fn fastai_golden() {
    let file: Value = serde_json::from_str(include_str!("../../golden/losses.json")).unwrap();
    let cases = file["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 36);
    for case in cases {
        let loss = loss(case);
        let predictions = predictions().set_requires_grad(true);
        let targets =
            if loss.outputs() == Outputs::Classes { classes(&[7], 5, 1901) } else { labels() };
        let reduced = match case["args"]["reduction"].as_str().unwrap() {
            "mean" => loss.forward(&predictions, &targets).unwrap(),
            "sum" => loss.each(&predictions, &targets).unwrap().sum(None),
            _ => loss.each(&predictions, &targets).unwrap(),
        };
        assert_close(&flat(&reduced), &numbers(&case["value"]), 1e-6, 1e-9);
        reduced.sum(None::<Kind>).backward();
        let slope = predictions.grad().abs().sum(Kind::Double).double_value(&[]);
        assert_close(&[slope], &numbers(&case["grad_abs_sum"]), 1e-6, 0.0);
        if case["activation_of_first_row"].is_array() {
            let activation = loss.activation(&predictions).unwrap();
            assert_eq!(activation.size(), [7, 5]);
            let first = flat(&activation.get(0));
            assert_close(&first, &numbers(&case["activation_of_first_row"]), 1e-6, 0.0);
            // The golden decision on labels compares scores with 0.5, as if they were probabilities already.
            let of_scores = BceWithLogits::default().threshold(1.0 / (1.0 + (-0.5f64).exp()));
            let of_labels = case["loss"] == "BCEWithLogitsLossFlat";
            let decided: &dyn Loss = if of_labels { &of_scores } else { &*loss };
            let decoded = decided.decode(&predictions).unwrap();
            match &case["decoded"] {
                Value::Null => assert_eq!(decoded, predictions),
                expected => assert_close(&flat(&decoded), &numbers(expected), 0.0, 0.0),
            }
        }
    }
}

/// fastai's `get_preds` decides on labels from probabilities, and so does this: a score between 0 and the threshold is above it as a probability.
#[test]
fn labels_are_decided_from_probabilities() {
    let scores = Tensor::from_slice2(&[[0.1f32, -0.1, 0.9]]);
    let decoded = BceWithLogits::default().decode(&scores).unwrap();
    assert_eq!(flat(&decoded), [1.0, 0.0, 1.0]);
    let strict = BceWithLogits::default().threshold(0.7);
    assert_eq!(flat(&strict.decode(&scores).unwrap()), [0.0, 0.0, 1.0]);
}

/// PyTorch's smoothing weighs both parts, fastai's the second alone; without weights they are one.
#[test]
fn two_smoothings() {
    let (predictions, targets) = (predictions(), classes(&[7], 5, 1901));
    let weight = [0.5, 0.75, 1.0, 1.25, 1.5];
    let value = |loss: &dyn Loss| loss.forward(&predictions, &targets).unwrap().double_value(&[]);
    let (torch, fastai) =
        (CrossEntropy::default().label_smoothing(0.1), LabelSmoothingCrossEntropy::default());
    assert_eq!(value(&torch), value(&fastai));
    // Σ over rows of eps/5 · Σₖ wₖ·-ln pₖ + (1 - eps) · w·-ln p, over the sum of the rows' weights.
    let logs = predictions.to_kind(Kind::Double).log_softmax(1, Kind::Double);
    let (mut sum, mut whole) = (0.0, 0.0);
    for row in 0..7 {
        let target = targets.int64_value(&[row]) as usize;
        let log = |class: usize| -logs.double_value(&[row, class as i64]);
        sum += 0.1 / 5.0 * (0..5).map(|it| weight[it] * log(it)).sum::<f64>();
        sum += 0.9 * weight[target] * log(target);
        whole += weight[target];
    }
    assert_close(&[value(&torch.weight(&weight))], &[sum / whole], 1e-6, 0.0);
    let both = (value(&fastai.clone().weight(&weight)), value(&fastai));
    assert!((both.0 - both.1).abs() > 1e-4, "{both:?}");
}

/// The formula of fastai's `DiceLoss`, written out.
fn dice_by_hand(scores: &Tensor, targets: &Tensor, smooth: f64, square: bool) -> Vec<f64> {
    let (n, c, h, w) = scores.size4().unwrap();
    let mut losses = Vec::new();
    for image in 0..n {
        for class in 0..c {
            let (mut both, mut either) = (0.0, 0.0);
            for (row, column) in (0..h).flat_map(|row| (0..w).map(move |column| (row, column))) {
                let score = |class| scores.double_value(&[image, class, row, column]);
                let whole: f64 = (0..c).map(|it| score(it).exp()).sum();
                let p = score(class).exp() / whole;
                let t = f64::from(targets.int64_value(&[image, row, column]) == class);
                both += p * t;
                either += if square { p * p } else { p } + t;
            }
            losses.push(1.0 - (2.0 * both + smooth) / (either + smooth));
        }
    }
    losses
}

#[test]
fn dice() {
    let scores = uniform_tensor(&[2, 3, 4, 5], -2.0, 2.0, 30);
    let targets = classes(&[2, 4, 5], 3, 31);
    for (loss, smooth, square) in [
        (DiceLoss::default(), 1e-6, false),
        (DiceLoss::default().square_in_union(), 1e-6, true),
        (DiceLoss::default().smooth(1.0), 1.0, false),
    ] {
        let expected = dice_by_hand(&scores, &targets, smooth, square);
        assert_close(&flat(&loss.each(&scores, &targets).unwrap()), &expected, 1e-5, 0.0);
        let sum: f64 = expected.iter().sum();
        let mean = loss.forward(&scores, &targets).unwrap();
        assert_close(&flat(&mean), &[sum / 6.0], 1e-5, 0.0);
        let summed = loss.summed().forward(&scores, &targets.unsqueeze(1)).unwrap();
        assert_close(&flat(&summed), &[sum], 1e-5, 0.0);
    }
    let loss = DiceLoss::default();
    assert_eq!(flat(&loss.decode(&scores).unwrap()), flat(&scores.argmax(1, false)));
    let whole = loss.activation(&scores).unwrap().sum_dim_intlist([1].as_slice(), false, None);
    assert_close(&flat(&whole), &[1.0; 40], 1e-6, 0.0);
    let error = loss.forward(&scores.get(0).get(0), &targets.get(0).get(0).narrow(0, 0, 4));
    assert!(error.unwrap_err().to_string().contains("expected [n, classes, h, w]"));
}

/// Pixels and tokens count like samples; ignored ones do not.
#[test]
fn dimensions_and_ignored_targets() {
    let scores = uniform_tensor(&[2, 3, 4, 5], -2.0, 2.0, 40);
    let targets = classes(&[2, 4, 5], 3, 41);
    let _ = targets.narrow(1, 0, 2).narrow(2, 0, 2).fill_(-100);
    let rows = scores.movedim_int(1, -1).reshape([40, 3]);
    let last = scores.movedim_int(1, -1);
    let losses: [Box<dyn Loss>; 2] = [
        Box::new(CrossEntropy::default()),
        Box::new(CrossEntropy::default().weight(&[1.0, 2.0, 3.0])),
    ];
    for loss in losses {
        let (all, each) =
            (loss.forward(&scores, &targets).unwrap(), loss.each(&scores, &targets).unwrap());
        let of_rows = loss.forward(&rows, &targets.reshape([-1])).unwrap();
        assert_close(&flat(&all), &flat(&of_rows), 1e-6, 0.0);
        let of_rows = loss.each(&rows, &targets.reshape([-1])).unwrap();
        assert_close(&flat(&each), &flat(&of_rows), 1e-6, 0.0);
        assert_eq!(flat(&each).iter().filter(|&&it| it == 0.0).count(), 8);
    }
    let loss = ClassesLast(CrossEntropy::default());
    assert_eq!(
        flat(&loss.forward(&last, &targets).unwrap()),
        flat(&loss.0.forward(&scores, &targets).unwrap())
    );
    assert_eq!(loss.each(&last, &targets).unwrap(), loss.0.each(&scores, &targets).unwrap());
    assert_eq!(
        loss.activation(&last).unwrap(),
        loss.0.activation(&scores).unwrap().movedim_int(1, -1)
    );
    assert_eq!(loss.decode(&last).unwrap(), loss.0.decode(&scores).unwrap());
    assert!(loss.outputs() == Outputs::Classes && loss.name() == "cross_entropy");
}

/// In half precision a loss of `exp(11)` classes would be infinite, and one in `bfloat16` has three digits.
#[test]
fn half_precision_is_computed_in_full() {
    let half = predictions().to_kind(Kind::BFloat16);
    let full = half.to_kind(Kind::Float);
    let (of_classes, of_labels) = (classes(&[7], 5, 1901), labels());
    let losses: [Box<dyn Loss>; 6] = [
        Box::new(CrossEntropy::default().weight(&[1.0, 2.0, 3.0, 4.0, 5.0])),
        Box::new(LabelSmoothingCrossEntropy::default()),
        Box::new(Focal::default()),
        Box::new(BceWithLogits::default().pos_weight(&[1.0, 2.0, 3.0, 4.0, 5.0])),
        Box::new(Mse),
        Box::new(L1),
    ];
    for loss in losses {
        let targets = if loss.outputs() == Outputs::Classes { &of_classes } else { &of_labels };
        let value = loss.forward(&half, targets).unwrap();
        assert_eq!(value.kind(), Kind::Float);
        assert_eq!(value, loss.forward(&full, targets).unwrap(), "{}", loss.name());
        // Weights are cached in the predictions' dtype; another dtype makes them again.
        let double = loss.forward(&full.to_kind(Kind::Double), targets).unwrap();
        assert_eq!(double.kind(), Kind::Double);
        assert_close(&flat(&value), &flat(&double), 1e-6, 0.0);
    }
}

#[test]
fn shapes_and_weights_that_do_not_fit() {
    let targets = classes(&[7], 5, 1901);
    let losses: [Box<dyn Loss>; 7] = [
        Box::new(CrossEntropy::default()),
        Box::new(LabelSmoothingCrossEntropy::default()),
        Box::new(Focal::default()),
        Box::new(DiceLoss::default()),
        Box::new(BceWithLogits::default()),
        Box::new(Mse),
        Box::new(L1),
    ];
    for loss in losses {
        let wrong = Tensor::zeros([6], (Kind::Int64, Device::Cpu));
        for outcome in [loss.forward(&predictions(), &wrong), loss.each(&predictions(), &wrong)] {
            let error = outcome.unwrap_err().to_string();
            assert!(error.contains("[7, 5]") && error.contains("[6]"), "{error}");
        }
    }
    let refusal = |loss: &dyn Loss, targets: &Tensor, text: &str| {
        let error = loss.forward(&predictions(), targets).unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    };
    let said = "2 weights for 5 classes or labels";
    refusal(&CrossEntropy::default().weight(&[1.0, 2.0]), &targets, said);
    refusal(&Focal::default().weight(&[1.0, 2.0]), &targets, said);
    refusal(&BceWithLogits::default().weight(&[1.0, 2.0]), &labels(), said);
    refusal(&LabelSmoothingCrossEntropy::new(1.5), &targets, "label smoothing of 1.5");
    refusal(&CrossEntropy::default(), &targets.to_kind(Kind::Float), "expected class numbers");
    let outside = targets.full_like(5);
    assert!(CrossEntropy::default().forward(&predictions(), &outside).is_err());
    let last = Tensor::zeros([2, 6, 5], (Kind::Float, Device::Cpu));
    let tokens = Tensor::zeros([2, 6], (Kind::Int64, Device::Cpu));
    let error = CrossEntropy::default().forward(&last, &tokens).unwrap_err().to_string();
    assert!(error.contains("ClassesLast"), "{error}");
}

#[test]
fn integers_as_targets_of_numbers_and_labels() {
    let scores = predictions().narrow(1, 0, 1);
    let there = Tensor::from_slice(&[0i64, 1, 0, 1, 1, 0, 1]);
    let floats = there.to_kind(Kind::Float).view([7, 1]);
    let losses: [Box<dyn Loss>; 3] =
        [Box::new(BceWithLogits::default()), Box::new(Mse), Box::new(L1)];
    for loss in losses {
        assert_eq!(loss.forward(&scores, &there).unwrap(), loss.forward(&scores, &floats).unwrap());
        assert_eq!(loss.each(&scores, &there).unwrap().size(), [7]);
    }
}

#[test]
fn weights_of_labels() {
    let weight = [1.0, 2.0, 3.0, 4.0, 5.0];
    let plain = flat(&BceWithLogits::default().each(&predictions(), &labels()).unwrap());
    let weighted = BceWithLogits::default().weight(&weight);
    let expected: Vec<f64> = (0..35).map(|it| plain[it] * weight[it % 5]).collect();
    assert_close(&flat(&weighted.each(&predictions(), &labels()).unwrap()), &expected, 1e-6, 0.0);
}

#[test]
fn focal_without_gamma_is_the_cross_entropy() {
    let ordinary = predictions();
    let targets = classes(&[7], 5, 1901);
    let (zero, plain) = (Focal::new(0.0), CrossEntropy::default());
    assert_close(
        &flat(&zero.forward(&ordinary, &targets).unwrap()),
        &flat(&plain.forward(&ordinary, &targets).unwrap()),
        1e-6,
        0.0,
    );
}

#[test]
fn functions() {
    let loss = loss_from("quartic", |p: &Tensor, t: &Tensor| {
        Ok((p - t).f_pow_tensor_scalar(4)?.f_mean(None::<Kind>)?)
    });
    let (scores, there) = (predictions().set_requires_grad(true), labels());
    let value = loss.forward(&scores, &there).unwrap();
    value.backward();
    assert!(scores.grad().abs().sum(Kind::Double).double_value(&[]) > 0.0);
    assert_eq!(loss.name(), "quartic");
    assert!(loss.outputs() != Outputs::Classes);
    assert_eq!(loss.decode(&scores).unwrap(), scores);
    assert_eq!(loss.activation(&scores).unwrap(), scores);
    let error = loss.each(&scores, &there).unwrap_err().to_string();
    assert!(error.contains("`quartic`") && error.contains("LossFn::with_each"), "{error}");

    let loss = loss
        .with_each(|p: &Tensor, t: &Tensor| Ok((p - t).f_pow_tensor_scalar(4)?.f_reshape([-1])?))
        .read_as(CrossEntropy::default());
    assert_eq!(flat(&loss.each(&scores, &there).unwrap().mean(None)), flat(&value));
    assert!(loss.outputs() == Outputs::Classes);
    assert_eq!(loss.decode(&scores).unwrap(), scores.argmax(1, false));
    assert!(format!("{loss:?}").contains("quartic"));
}

#[test]
fn plain_data() {
    let loss = CrossEntropy::default().weight(&[1.0, 2.0]);
    let _ = loss.forward(&predictions().narrow(1, 0, 2), &classes(&[7], 2, 3)).unwrap();
    assert_eq!(loss.clone(), loss); // what is kept on a device is no part of it
    assert_ne!(loss, CrossEntropy::default());
    assert_eq!(
        format!("{loss:?}"),
        "CrossEntropy { weight: Some([1.0, 2.0]), label_smoothing: 0.0 }"
    );
}
