//! Fused steps refuse states that do not fit, instead of writing beside them.

use brigade_test_device::{numeric_device, on_device};
use brigade_torch::{DeviceNumbers, channels_last, fused};
use tch::{Kind, Tensor};

const HOST: DeviceNumbers<'_> =
    DeviceNumbers { lr: None, steps: None, grad_scale: None, found_inf: None };

const ADAM: fused::AdamStep = fused::AdamStep {
    lr: 0.1,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.0,
    amsgrad: false,
    maximize: false,
    decoupled: false,
};
const SGD: fused::SgdStep = fused::SgdStep {
    lr: 0.1,
    momentum: 0.9,
    dampening: 0.0,
    weight_decay: 0.0,
    decoupled: false,
    nesterov: false,
    maximize: false,
    first: false,
};
const ADAGRAD: fused::AdagradStep =
    fused::AdagradStep { lr: 0.1, lr_decay: 0.0, weight_decay: 0.0, eps: 1e-8, maximize: false };

fn zeros(shape: &[i64]) -> Tensor {
    Tensor::zeros(shape, (Kind::Float, numeric_device()))
}

/// A step of each rule with this in the place of one state.
fn refused(parameter: &Tensor, state: &Tensor, word: &str) {
    let gradient = parameter.ones_like();
    let sound = parameter.zeros_like();
    let steps = on_device(&Tensor::from(1f32));
    let (p, g, s) = (&[parameter][..], &[&gradient][..], &[&steps][..]);
    let errors = [
        fused::adam(p, g, &[state], &[&sound], &[], s, &ADAM, &HOST),
        fused::adam(p, g, &[&sound], &[state], &[], s, &ADAM, &HOST),
        fused::adam(
            p,
            g,
            &[&sound],
            &[&sound.copy()],
            &[state],
            s,
            &fused::AdamStep { amsgrad: true, ..ADAM },
            &HOST,
        ),
        fused::sgd(p, g, &[state], &SGD, &HOST),
        fused::adagrad(p, g, &[state], s, &ADAGRAD, &HOST),
    ];
    for (number, result) in errors.into_iter().enumerate() {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(word), "rule {number}: {error}");
    }
    assert_eq!(parameter.abs().sum(Kind::Double).double_value(&[]), 0.0, "nothing was stepped");
}

#[test]
fn states_that_do_not_fit_are_refused() {
    let large = zeros(&[1_000_000]);
    refused(&large, &zeros(&[8]), "[8]");
    refused(&large, &zeros(&[1]).expand([1_000_000], false), "memory");
    refused(&large, &Tensor::zeros([1_000_000], (Kind::Double, numeric_device())), "Double");
    let matrix = zeros(&[300, 500]);
    refused(&matrix, &zeros(&[500, 300]), "[500, 300]");
    // Of the same shape, but its elements lie in another order.
    refused(&matrix, &zeros(&[500, 300]).tr(), "order");
    refused(&matrix, &Tensor::new(), "undefined");
    let images = channels_last(&zeros(&[4, 8, 5, 5])).unwrap();
    refused(&images, &zeros(&[4, 8, 5, 5]), "order");
}

#[test]
fn lists_of_other_lengths_are_refused() {
    let (parameter, gradient) = (zeros(&[4]), zeros(&[4]).ones_like());
    let state = || zeros(&[4]);
    let steps = on_device(&Tensor::from(1f32));
    let p = [&parameter, &parameter];
    let g = [&gradient, &gradient];
    assert!(
        fused::adam(
            &p,
            &g,
            &[&state()],
            &[&state(), &state()],
            &[],
            &[&steps, &steps],
            &ADAM,
            &HOST
        )
        .is_err()
    );
    assert!(
        fused::adam(
            &p,
            &g,
            &[&state(), &state()],
            &[&state(), &state()],
            &[],
            &[&steps],
            &ADAM,
            &HOST
        )
        .is_err()
    );
    assert!(
        fused::adam(
            &p,
            &g[..1],
            &[&state(), &state()],
            &[&state(), &state()],
            &[],
            &[&steps, &steps],
            &ADAM,
            &HOST
        )
        .is_err()
    );
    let amsgrad = fused::AdamStep { amsgrad: true, ..ADAM };
    assert!(
        fused::adam(&p[..1], &g[..1], &[&state()], &[&state()], &[], &[&steps], &amsgrad, &HOST)
            .is_err()
    );
    assert!(fused::sgd(&p, &g, &[&state()], &SGD, &HOST).is_err());
    assert!(fused::sgd(&p[..1], &g[..1], &[], &SGD, &HOST).is_err(), "a momentum without a buffer");
    for steps in [on_device(&Tensor::from(1f64)), zeros(&[2]), zeros(&[0])] {
        assert!(fused::adagrad(&p[..1], &g[..1], &[&state()], &[&steps], &ADAGRAD, &HOST).is_err());
    }
    // Of another type than the parameter.
    let half = gradient.to_kind(Kind::Half);
    assert!(fused::sgd(&p[..1], &[&half], &[&state()], &SGD, &HOST).is_err());
    assert!(fused::sgd(&[], &[], &[], &SGD, &HOST).is_ok(), "no parameters are nothing to do");
}
