//! The CNN against PyTorch: its names and its loss curve.

use brigade_models::Cnn;
use brigade_nn::Model;
use brigade_test_device::{numeric_device, on_device};
use serde_json::Value;
use tch::{Kind, Tensor};

fn golden(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}

/// `value[i] = scale * sin(0.37 i + 1.7 j + phase)`, computed in float64.
fn fill(shape: &[i64], j: i64, scale: f64, phase: f64) -> Tensor {
    let value = |i| (scale * (0.37 * i as f64 + 1.7 * j as f64 + phase).sin()) as f32;
    let values: Vec<f32> = (0..shape.iter().product::<i64>()).map(value).collect();
    on_device(&Tensor::from_slice(&values).view(shape))
}

fn filled_cnn(phase: f64) -> Model<Cnn> {
    let model = Model::builder().device(numeric_device()).build(Cnn::new).unwrap();
    for (j, parameter) in (0..).zip(model.parameters()) {
        let mut values = fill(&parameter.tensor.size(), j, 0.05, phase);
        if parameter.name.ends_with(".1.weight") {
            values += 1.0;
        }
        tch::no_grad(|| parameter.tensor.shallow_clone().copy_(&values));
    }
    model
}

fn assert_close(found: f64, expected: f64, tolerance: f64, what: &str) {
    let error = (found - expected).abs() / expected.abs().max(1.0);
    assert!(error < tolerance, "{what}: {found}, PyTorch has {expected}");
}

#[test]
fn the_loss_curve_of_one_process_is_pytorchs() {
    let golden = golden(include_str!("../golden/ddp_cnn.json"));
    let cases = golden["cases"].as_array().unwrap();
    let case = cases
        .iter()
        .find(|case| {
            let config = &case["config"];
            config["world"] == 1 && config["opt"] == "sgd" && config["accumulate"] == 1
        })
        .expect("the table has a case of one process");
    let (config, rows) = (&case["config"], case["config"]["per_rank"].as_i64().unwrap());

    let model = filled_cnn(config["phase"].as_f64().unwrap());
    let parameters = model.parameters();
    let mut momenta: Vec<Option<Tensor>> = parameters.iter().map(|_| None).collect();
    for (step, expected) in (0..).zip(case["losses"].as_array().unwrap()) {
        let images = fill(&[rows, 1, 28, 28], 100 + step, 0.5, 0.0) + 0.5;
        let labels: Vec<i64> = (0..rows).map(|k| (7 * step + 3 * k + k * k) % 10).collect();
        let loss = model
            .forward(&images)
            .unwrap()
            .cross_entropy_for_logits(&on_device(&Tensor::from_slice(&labels)));
        assert_close(loss.double_value(&[]), expected.as_f64().unwrap(), 1e-5, "loss");
        loss.backward();
        // torch.optim.SGD: v = g at first, then v = 0.9 v + g; p -= lr v.
        tch::no_grad(|| {
            for (parameter, momentum) in parameters.iter().zip(&mut momenta) {
                let mut gradient = parameter.tensor.grad();
                let velocity = match momentum.take() {
                    Some(velocity) => velocity * 0.9 + &gradient,
                    None => gradient.copy(),
                };
                let _ = parameter.tensor.shallow_clone().subtract_(&(&velocity * 0.002));
                let _ = gradient.zero_();
                *momentum = Some(velocity);
            }
        });
    }

    let sum = |tensor: &Tensor| tensor.sum(Kind::Double).double_value(&[]);
    for parameter in &parameters {
        let expected = case["weight_sums"][&parameter.name].as_f64().unwrap();
        assert_close(sum(&parameter.tensor), expected, 1e-5, &parameter.name);
        let expected = case["weight_abs_sums"][&parameter.name].as_f64().unwrap();
        assert_close(sum(&parameter.tensor.abs()), expected, 1e-5, &parameter.name);
    }
    for buffer in model.buffers() {
        let expected = case["buffers"][&buffer.name].as_f64().unwrap();
        assert_close(sum(&buffer.tensor), expected, 1e-5, &buffer.name);
    }
}

#[test]
fn names_come_in_pytorchs_order() {
    let expected: Vec<String> = serde_json::from_value(
        golden(include_str!("../golden/ddp_cnn.json"))["parameter_names"].clone(),
    )
    .unwrap();
    let model = Model::builder().device(numeric_device()).build(Cnn::new).unwrap();
    let names: Vec<_> = model.parameters().into_iter().map(|parameter| parameter.name).collect();
    assert_eq!(names, expected);
    assert_eq!(model.num_parameters(), 253_706);

    let expected: Vec<String> = serde_json::from_value(
        golden(include_str!("../fixtures/cnn_seed.json"))["state_dict"].clone(),
    )
    .unwrap();
    assert_eq!(model.state_dict().names().collect::<Vec<_>>(), expected);
}
