//! Normalisation over ranks refuses parameters and statistics that do not fit, before it sends anything.

use brigade_testkit::dist_test;
use brigade_torch::{BatchNormState, Fault, sync_batch_norm};
use tch::{Device, Kind, Tensor};

use crate::rendezvous::{self, assert_fault};

fn ones(shape: &[i64]) -> Tensor {
    Tensor::ones(shape, (Kind::Float, Device::Cpu))
}

dist_test!(world = 2, dist_parameters_that_do_not_fit_are_refused, |world| {
    let group = rendezvous::group(&world);
    let input = ones(&[4, 4096, 2, 2]) * (1 + world.rank.as_usize() as i64);
    let sound = ones(&[4096]);
    let wrong = [
        ones(&[8]),
        ones(&[1]),
        ones(&[1, 4096]),
        sound.to_kind(Kind::Int64),
        sound.to_sparse_sparse_dim(1),
        Tensor::new(),
    ];
    // Rank 1 sends nothing meanwhile: a refusal that followed a message would wait for it.
    if world.rank.as_usize() == 0 {
        for wrong in &wrong {
            let running = |running_mean, running_var| BatchNormState {
                running_mean,
                running_var,
                ..BatchNormState::default()
            };
            let states = [
                ("weight", BatchNormState { weight: Some(wrong), ..BatchNormState::default() }),
                ("bias", BatchNormState { bias: Some(wrong), ..BatchNormState::default() }),
                ("running_mean", running(Some(wrong), Some(&sound))),
                ("running_var", running(Some(&sound), Some(wrong))),
            ];
            for (name, state) in states {
                let outcome = sync_batch_norm(&group, &input, state, 0.1, 1e-5);
                let text = assert_fault(outcome, Fault::Invalid).to_string();
                assert!(text.contains(name) && text.contains("[4096]"), "{text}");
            }
        }
    }
    let before = sound.copy();
    let state =
        BatchNormState { weight: Some(&sound), bias: Some(&sound), ..BatchNormState::default() };
    let output = sync_batch_norm(&group, &input, state, 0.1, 0.0).unwrap();
    assert_eq!(sound, before, "a refusal has changed nothing");
    // One half of all values is 1, the other 2: -1 and 1 when normalised.
    let expected = ones(&input.size()) * (2 * world.rank.as_usize() as i64);
    assert!(output.allclose(&expected, 1e-5, 1e-5, false));
});
