//! What a sharded run saves is gone on with on any other ranks and strategies.

use std::path::Path;

use brigade_checkpoint::Safetensors;
use brigade_checkpoint::convert::{AccelerateRun, Target, convert};
use brigade_checkpoint::pth::{PthFile, StoredTensor};
use brigade_nn::{Model, weights};
use brigade_sharding::Sharding;
use brigade_testkit::assert_close;
use brigade_torch::Result;
use brigade_train::{Accelerator, AcceleratorBuilder, TrainError};
use tch::Kind;

use super::{Net, Prepared, Recipe, Rule, net, on_ranks, step, values};

const RECIPE: Recipe = Recipe { rule: Rule::AdamW, window: 1, clip: None };

fn prepared(builder: AcceleratorBuilder) -> (Accelerator, Prepared) {
    let accelerator = builder.sync_batch_norm(true).build().unwrap();
    let model = net();
    let optimizer = RECIPE.rule.build(&model);
    let objects = accelerator.prepare((model, optimizer)).unwrap();
    (accelerator, objects)
}

/// Trains on all samples of `samples` ranks, which `ranks` ranks share out; `None`: without sharding.
fn run<R: Send>(
    ranks: usize,
    sharding: Option<&Sharding>,
    body: impl Fn(&Accelerator, &mut Prepared, std::ops::Range<usize>) -> R + Sync,
) -> Vec<R> {
    on_ranks(ranks, |builder, rank| {
        let builder = builder.sharding(sharding.cloned());
        let (accelerator, mut objects) = prepared(builder);
        let share = SAMPLES / ranks;
        body(&accelerator, &mut objects, rank * share..(rank + 1) * share)
    })
}

const SAMPLES: usize = 4;

/// Saves after two steps; returns the weights after two more.
fn save(ranks: usize, sharding: Option<&Sharding>, folder: &Path) -> Vec<f64> {
    run(ranks, sharding, |accelerator, objects, samples| {
        for number in 0..2 {
            step(accelerator, objects, &RECIPE, samples.clone(), number).unwrap();
        }
        accelerator.save_state(folder).unwrap();
        accelerator.checkpoints().wait().unwrap();
        for number in 2..4 {
            step(accelerator, objects, &RECIPE, samples.clone(), number).unwrap();
        }
        values(&objects.0)
    })
    .remove(0)
}

fn resume(ranks: usize, sharding: Option<&Sharding>, folder: &Path) -> Vec<f64> {
    run(ranks, sharding, |accelerator, objects, samples| {
        let loaded = accelerator.load_state(folder).unwrap();
        assert_eq!(loaded.step, 2);
        for number in 2..4 {
            step(accelerator, objects, &RECIPE, samples.clone(), number).unwrap();
        }
        values(&objects.0)
    })
    .remove(0)
}

#[test]
fn any_ranks_and_strategies_go_on() {
    let folder = tempfile::tempdir().unwrap();
    let forms = [
        (1, None),
        (2, None),
        (1, Some(Sharding::zero3())),
        (2, Some(Sharding::zero1())),
        (2, Some(Sharding::zero3())),
        (4, Some(Sharding::zero2())),
        (4, Some(Sharding::zero3())),
        (4, Some(Sharding::hybrid(2))),
    ];
    for (number, (ranks, sharding)) in forms.iter().enumerate() {
        let folder = folder.path().join(number.to_string());
        let expected = save(*ranks, sharding.as_ref(), &folder);
        for (others, other) in &forms {
            let found = resume(*others, other.as_ref(), &folder);
            if ranks == others && sharding == other {
                assert_eq!(found, expected);
            }
            assert_close(&found, &expected, 1e-12, 1e-14);
        }
    }
}

/// Each tensor's rows lie in the files of the ranks that have them, once.
#[test]
fn each_rank_writes_what_it_has() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("saved");
    save(4, Some(&Sharding::hybrid(2)), &folder);
    let checkpoint = brigade_checkpoint::layout::Checkpoint::open(&folder).unwrap();
    assert!(checkpoint.verify().is_empty());
    let manifest = checkpoint.manifest();
    let axes: Vec<_> = manifest.mesh.iter().map(|axis| (axis.name.as_str(), axis.size)).collect();
    assert_eq!(axes, [("dp_replicate", 2), ("dp_shard", 2)]);
    let of = |kind: &str| manifest.of_kind(kind).next().unwrap();
    let weight = &of("model").tensors["blocks.0.up.weight"];
    assert_eq!(weight.shape, [5, 7]);
    let rows: Vec<_> =
        weight.chunks.iter().map(|chunk| (chunk.offset[0], chunk.shape[0])).collect();
    assert_eq!(rows, [(0, 3), (3, 2)]);
    let files: Vec<_> = weight.chunks.iter().map(|chunk| chunk.file.as_str()).collect();
    assert_eq!(
        files,
        ["model-rows-00001-of-00002.safetensors", "model-rows-00002-of-00002.safetensors"]
    );
    let moment = &of("optimizer").tensors["state.blocks.0.up.weight.exp_avg"];
    assert_eq!((moment.shape.len(), moment.chunks.len()), (2, 2));
    let count = &of("optimizer").tensors["state.blocks.0.up.weight.step"];
    assert_eq!(count.chunks.len(), 1);
    let scale = &of("model").tensors["scale"];
    assert_eq!(scale.chunks.len(), 1);
}

#[test]
fn another_model_is_refused_before_anything_changes() {
    let folder = tempfile::tempdir().unwrap();
    let folder = folder.path().join("saved");
    save(2, Some(&Sharding::zero3()), &folder);
    let outcomes = on_ranks(2, |builder, _| {
        let accelerator = builder.sharding(Sharding::zero3()).build().unwrap();
        let other = Model::builder()
            .kind(Kind::Double)
            .build(|path| brigade_nn::Linear::new(path / "stem", 5, 8))
            .unwrap();
        let optimizer = RECIPE.rule.build(&other);
        let (model, _optimizer) = accelerator.prepare((other, optimizer)).unwrap();
        let before = model.gathered(|model| Ok(crate::net::weights(model))).unwrap();
        let error = accelerator.load_state(&folder).unwrap_err();
        assert_eq!(before, model.gathered(|model| Ok(crate::net::weights(model))).unwrap());
        (
            matches!(error.downcast_ref(), Some(TrainError::CheckpointMismatch { .. })),
            error.to_string(),
        )
    });
    for (is_mismatch, text) in outcomes {
        assert!(is_mismatch && text.contains("stem.weight") && text.contains("[8, 5]"), "{text}");
    }
}

/// Weights are those of the unsharded model, in a file and out of one.
#[test]
fn weights_files_are_whole() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("net.safetensors");
    let parts = folder.path().join("parts");
    let expected = net();
    for (ranks, sharding) in [
        (1, Sharding::zero3()),
        (2, Sharding::zero1()),
        (3, Sharding::zero3()),
        (4, Sharding::hybrid(2)),
    ] {
        on_ranks(ranks, |builder, _| {
            let accelerator = builder.sharding(sharding.clone()).build().unwrap();
            let model = accelerator.prepare(net()).unwrap();
            accelerator.save_model(&model, &file).unwrap();
            accelerator.checkpoints().save_model_in_parts(&model, &parts, 300).unwrap();
        });
        let several = parts.join("model-00003-of-00014.safetensors");
        assert!(several.exists());
        for place in [&file, &parts] {
            let state = weights::load(place).unwrap();
            for (name, tensor) in expected.state_dict().iter() {
                assert_eq!(
                    *tensor,
                    state.get(name).unwrap().shallow_clone(),
                    "{name} {sharding:?}"
                );
            }
        }
        // Into a model of other values.
        let found = on_ranks(ranks, |builder, _| {
            let accelerator = builder.sharding(sharding.clone()).build().unwrap();
            let mut model = accelerator
                .prepare(Model::builder().kind(Kind::Double).build(Net::new).unwrap())
                .unwrap();
            accelerator.load_model(&mut model, &file).unwrap();
            values(&model)
        });
        for found in found {
            assert_eq!(found, crate::net::weights(&expected));
        }
        let missing = on_ranks(ranks, |builder, _| -> Result<()> {
            let accelerator = builder.sharding(sharding.clone()).build()?;
            let mut model = accelerator.prepare(net())?;
            accelerator.load_model(&mut model, folder.path().join("missing.safetensors"))
        });
        assert!(missing.iter().all(|it| it.as_ref().unwrap_err().to_string().contains("missing")));
        let unwritable = on_ranks(ranks, |builder, _| -> Result<()> {
            let accelerator = builder.sharding(sharding.clone()).build()?;
            let model = accelerator.prepare(net())?;
            accelerator.save_model(&model, file.join("below.safetensors"))
        });
        assert!(unwritable.iter().all(Result::is_err));
    }
}

/// The command line's conversions join the rows of models and of optimizers.
#[test]
fn rows_are_joined_by_conversions() {
    let folder = tempfile::tempdir().unwrap();
    let saved = folder.path().join("saved");
    let expected = run(4, Some(&Sharding::zero3()), |accelerator, objects, samples| {
        step(accelerator, objects, &RECIPE, samples, 0).unwrap();
        accelerator.save_state(&saved).unwrap();
        accelerator.checkpoints().wait().unwrap();
        values(&objects.0)
    })
    .remove(0);
    let file = folder.path().join("net.safetensors");
    convert(&saved, &file, Target::Weights(&Safetensors)).unwrap();
    let mut model = Model::builder().kind(Kind::Double).build(Net::new).unwrap();
    model.load_weights(&file).unwrap();
    assert_eq!(crate::net::weights(&model), expected);

    let accelerate = folder.path().join("accelerate");
    convert(&saved, &accelerate, Target::Accelerate(AccelerateRun::default())).unwrap();
    let optimizer = accelerate.join("optimizer.bin");
    let file = std::fs::File::open(&optimizer).unwrap();
    let optimizer = PthFile::from_file(&optimizer, file).unwrap();
    let mut shapes = Vec::new();
    let tree = optimizer.value().unwrap().try_map(&mut |_, tensor: StoredTensor| {
        shapes.push(tensor.info().shape);
        Ok::<_, std::convert::Infallible>(())
    });
    assert!(tree.is_ok());
    // Both moments of each block's second weight, whole.
    assert_eq!(shapes.iter().filter(|shape| **shape == [5, 7]).count(), 2 * 3);
}
