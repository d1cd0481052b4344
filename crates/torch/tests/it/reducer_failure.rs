//! Models that differ, parameters that were not reached, ranks that die in backward.

use std::time::{Duration, Instant};

use brigade_testkit::dist_test;
use brigade_torch::{
    Bucket, Error, Fault, GradientHook, JoinOptions, ProcessGroup, ReduceOp, Reducer,
    ReducerOptions, TorchError, clear_gradient,
};
use tch::{Device, Kind, Tensor};

use crate::rendezvous::{self, LIMIT, assert_fault, missing};

fn parameters() -> Vec<(String, Tensor)> {
    ["first", "second"]
        .map(|name| {
            let tensor = Tensor::ones([1000], (Kind::Float, Device::Cpu));
            (name.to_owned(), tensor.set_requires_grad(true))
        })
        .into()
}

/// Two buckets, so that one may be under way when the peer is lost.
fn reducer(group: &ProcessGroup, parameters: &[(String, Tensor)]) -> Reducer {
    let options =
        ReducerOptions { bucket_bytes: 1, first_bucket_bytes: 1, ..ReducerOptions::default() };
    Reducer::new(group, parameters, &[], options).unwrap()
}

fn loss(reducer: &Reducer, parameters: &[(String, Tensor)]) -> Result<Tensor, Error> {
    for (_, parameter) in parameters {
        clear_gradient(parameter)?;
    }
    reducer.before_forward(true)?;
    let output = parameters.iter().fold(Tensor::from(0f32), |sum, (_, p)| sum + p.sum(Kind::Float));
    reducer.after_forward(output, true)
}

fn step(reducer: &Reducer, parameters: &[(String, Tensor)]) -> Result<(), Error> {
    let loss = loss(reducer, parameters)?;
    reducer.group().backward(&loss)
}

dist_test!(world = 3, dist_a_rank_that_dies_before_its_backward, |world| {
    let parameters = parameters();
    if world.rank.as_usize() == 2 {
        rendezvous::by_a_child_that_dies(|| {
            let group = rendezvous::group(&world);
            let reducer = reducer(&group, &parameters);
            for _ in 0..3 {
                step(&reducer, &parameters).unwrap();
            }
            let _ = loss(&reducer, &parameters).unwrap();
            rendezvous::die();
        });
        return;
    }
    let group = rendezvous::group(&world);
    let reducer = reducer(&group, &parameters);
    for _ in 0..3 {
        step(&reducer, &parameters).unwrap();
    }
    let begun = Instant::now();
    let error = assert_fault(step(&reducer, &parameters), Fault::PeerLost);
    assert_eq!(missing(&error), [2], "{error}");
    assert!(error.to_string().starts_with("backward on group \"world\" failed"), "{error}");
    drop((reducer, group));
    assert!(begun.elapsed() < LIMIT);
});

dist_test!(world = 2, dist_a_rank_that_never_comes_to_backward, |world| {
    let group = rendezvous::group(&world);
    let pair = group.subgroup(&[0, 1]).unwrap().unwrap();
    let parameters = parameters();
    let reducer = reducer(&pair, &parameters);
    step(&reducer, &parameters).unwrap();
    let unfinished = loss(&reducer, &parameters).unwrap();
    if pair.rank() == 0 {
        pair.set_timeout(Duration::from_millis(400)).unwrap();
        let failed = pair.backward(&unfinished);
        let error = assert_fault(failed, Fault::Timeout);
        assert_eq!(missing(&error), [1], "{error}");
    }
    group.barrier().unwrap();
});

dist_test!(world = 2, dist_a_parameter_unused_on_one_rank_does_not_hang, |world| {
    let group = rendezvous::group(&world);
    let pair = group.subgroup(&[0, 1]).unwrap().unwrap();
    let parameters = parameters();
    let reducer = reducer(&pair, &parameters);
    step(&reducer, &parameters).unwrap();
    if pair.rank() == 0 {
        let failed = step(&reducer, &parameters);
        assert_fault(failed, Fault::PeerLost);
    } else {
        reducer.before_forward(true).unwrap();
        let output = reducer.after_forward(parameters[0].1.sum(Kind::Float), true).unwrap();
        output.f_backward().unwrap();
        let text = reducer.before_forward(true).unwrap_err().to_string();
        assert!(text.contains("find_unused_parameters") && text.contains("second"), "{text}");
        // The rank with the reason ends the operation for all.
        drop(reducer);
        pair.abort().unwrap();
    }
    group.barrier().unwrap();
});

/// What the reducer does without a hook; without memory where asked for.
struct Mean {
    memory: bool,
}

impl GradientHook for Mean {
    fn reduce(&self, group: &ProcessGroup, bucket: &mut Bucket) -> Result<(), Error> {
        if !self.memory {
            let text = "CUDA out of memory. Tried to allocate 2.00 GiB".to_owned();
            return Err(tch::TchError::Torch(text).into());
        }
        group.all_reduce(&mut bucket.buffer, ReduceOp::Mean)
    }
}

dist_test!(world = 2, dist_a_hooks_error_keeps_its_kind, |world| {
    let group = rendezvous::group(&world);
    let hooked = |parameters: &[(String, Tensor)]| {
        let reducer = reducer(&group, parameters);
        reducer.set_hook(Mean { memory: false }).unwrap();
        reducer
    };
    let trained = parameters();
    let error = assert_fault(step(&hooked(&trained), &trained), Fault::OutOfMemory);
    assert!(matches!(error.downcast_ref(), Some(TorchError::Tensor(_))), "{error}");
    // It is not returned again in place of another error.
    let error = group.backward(&Tensor::from(1.0)).unwrap_err();
    assert!(
        matches!(error.downcast_ref(), Some(TorchError::Libtorch { operation: "backward", .. })),
        "{error}"
    );
    // In the hook of a rank that has run out of data.
    let trained = parameters();
    let reducer = hooked(&trained);
    reducer.begin_join(JoinOptions::default());
    let failed =
        if group.rank() == 0 { reducer.shadow().map(drop) } else { step(&reducer, &trained) };
    assert_fault(failed, Fault::OutOfMemory);
    group.barrier().unwrap();
});

dist_test!(world = 3, dist_a_peer_lost_in_a_hook_is_named, |world| {
    let parameters = parameters();
    let reducer = |group: &ProcessGroup| {
        let reducer = reducer(group, &parameters);
        reducer.set_hook(Mean { memory: true }).unwrap();
        step(&reducer, &parameters).unwrap();
        reducer
    };
    if world.rank.as_usize() == 2 {
        rendezvous::by_a_child_that_dies(|| {
            let group = rendezvous::group(&world);
            let reducer = reducer(&group);
            let _ = loss(&reducer, &parameters).unwrap();
            rendezvous::die();
        });
        return;
    }
    let group = rendezvous::group(&world);
    let reducer = reducer(&group);
    let error = assert_fault(step(&reducer, &parameters), Fault::PeerLost);
    assert_eq!(missing(&error), [2], "{error}");
});
