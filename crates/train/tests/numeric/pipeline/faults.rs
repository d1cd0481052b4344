//! Pipelines that cannot run, and ranks that fail within a step.

use std::time::{Duration, Instant};

use brigade_models::Gpt2LmHead;
use brigade_nn::{BatchNorm1d, Linear, Model, ParamPath, Sequential};
use brigade_sharding::pipeline::Schedule;
use brigade_torch::{Error, ErrorKind, GroupOptions};
use brigade_train::{Pipeline, PipelineOptions, TrainError};
use tch::{Kind, Tensor};

use super::{built, causal, gpt2, ids, on_ranks};

#[test]
fn numbers_that_do_not_fit_are_named() {
    on_ranks(2, &GroupOptions::default(), |group| {
        let error = |options| Pipeline::new(group.clone(), options).unwrap_err();
        let few = error(PipelineOptions::new(1));
        assert_eq!(few.kind(), ErrorKind::InvalidArgument);
        assert!(few.to_string().contains('2'), "{few}");
        let chunks = error(PipelineOptions::new(4).chunks(3));
        assert!(chunks.to_string().contains("one stage"), "{chunks}");

        let pipeline = Pipeline::new(group.clone(), PipelineOptions::new(4)).unwrap();
        let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2(2));
        let model = built(Some(&pipeline), &new);
        let run = |model: &Model<Gpt2LmHead>, rows| {
            let batch = ids(0, rows);
            pipeline.forward_backward(model, &batch, |micro| causal(model, micro))
        };
        let short = run(&model, 3).unwrap_err().to_string();
        assert!(short.contains("a batch of 3 rows cannot be cut into 4 micro-batches"), "{short}");
        let whole = run(&built(None, &new), 4).unwrap_err().to_string();
        assert!(whole.contains("was not built for rank"), "{whole}");
        let none = pipeline.forward(&model, &ids(0, 1).narrow(0, 0, 0), |it| model.forward(it));
        assert!(none.unwrap_err().to_string().contains("a batch with rows"));
        // Nothing was sent.
        run(&model, 4).unwrap();

        let norm = |path: &ParamPath<'_>| {
            let layers = Sequential::new().add(Linear::new(path / 0, 6, 6));
            let layers = layers.add(BatchNorm1d::new(path / 1, 6)).add(Linear::new(path / 2, 6, 1));
            layers.in_stages(path.stages(0..3))
        };
        let mut model = built(Some(&pipeline), &norm);
        let batch = ids(0, 8).to_kind(Kind::Double);
        let run = |model: &Model<Sequential>| {
            pipeline.forward_backward(model, &batch, |micro| {
                Ok(model.forward(micro)?.square().mean(Kind::Double))
            })
        };
        let refused = run(&model).unwrap_err().to_string();
        assert!(refused.contains("the batch normalisation `1`"), "{refused}");
        model.convert_sync_batch_norm(&group);
        model.eval();
        run(&model).unwrap();
    });
}

/// The time limit of groups whose ranks are to end without it.
fn long() -> GroupOptions {
    GroupOptions { timeout: Duration::from_secs(120), ..GroupOptions::default() }
}

#[test]
fn a_rank_that_fails_ends_all_others() {
    for schedule in Schedule::ALL {
        for (failing, at) in [(0, 0), (1, 3), (2, 5)] {
            let begun = Instant::now();
            let errors = on_ranks(3, &long(), |group| {
                let rank = group.rank();
                let options = PipelineOptions::new(6).schedule(schedule);
                let pipeline = Pipeline::new(group, options).unwrap();
                let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2(6));
                let model = built(Some(&pipeline), &new);
                let batch = ids(0, 6);
                let mut calls = 0;
                pipeline
                    .forward_backward(&model, &batch, |micro| {
                        calls += 1;
                        if rank == failing && calls == at + 1 {
                            return Err(Error::custom("the disk is full"));
                        }
                        causal(&model, micro)
                    })
                    .unwrap_err()
            });
            assert!(begun.elapsed() < Duration::from_secs(100));
            for (rank, error) in errors.iter().enumerate() {
                let text = error.to_string();
                assert!(text.starts_with(&format!("rank {rank} of the pipeline, ")), "{text}");
                assert!(matches!(error.downcast_ref(), Some(TrainError::Pipeline { .. })));
                if rank == failing {
                    assert_eq!(error.kind(), ErrorKind::Custom);
                    assert!(text.contains("forward of stage"), "{text}");
                    assert!(text.ends_with("the disk is full"), "{text}");
                } else {
                    assert_eq!(error.kind(), ErrorKind::Communication, "{text}");
                }
            }
        }
    }
}

#[test]
fn a_rank_that_leaves_is_named() {
    let options = GroupOptions { timeout: Duration::from_secs(5), ..GroupOptions::default() };
    let errors = on_ranks(2, &options, |group| {
        let rank = group.rank();
        let pipeline = Pipeline::new(group, PipelineOptions::new(4)).unwrap();
        let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2(2));
        let model = built(Some(&pipeline), &new);
        if rank == 1 {
            return None;
        }
        let batch = ids(0, 4);
        let run = pipeline.forward_backward(&model, &batch, |micro| causal(&model, micro));
        Some(run.unwrap_err())
    });
    let error = errors[0].as_ref().unwrap();
    assert_eq!(error.kind(), ErrorKind::Communication);
    assert!(error.to_string().contains("rank 1"), "{error}");
}

#[test]
fn shapes_that_depend_on_values_are_refused() {
    let errors = on_ranks(2, &long(), |group| {
        let pipeline = Pipeline::new(group, PipelineOptions::new(2)).unwrap();
        let new = |path: &ParamPath<'_>| Gpt2LmHead::new(path, &gpt2(2));
        let model = built(Some(&pipeline), &new);
        let batch = ids(0, 4);
        let mut calls = 0;
        let run = pipeline.forward_backward(&model, &batch, |micro| {
            calls += 1;
            let micro: Tensor =
                if calls == 1 { micro.shallow_clone() } else { micro.narrow(1, 0, 3) };
            causal(&model, &micro)
        });
        run.unwrap_err().to_string()
    });
    assert!(
        errors[0].contains("make shapes depend on the shapes of the batch alone"),
        "{errors:?}"
    );
}
