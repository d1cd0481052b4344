//! What a run on one mesh saves is gone on with on any other.

use std::path::Path;

use brigade_checkpoint::Safetensors;
use brigade_checkpoint::convert::{Target, convert};
use brigade_checkpoint::layout::Checkpoint;
use brigade_models::{Gpt2LmHead, Labelled};
use brigade_nn::{Model, TensorParallelPlan, weights};
use brigade_optim::AdamW;
use brigade_sharding::Sharding;
use brigade_testkit::assert_close;
use brigade_train::{Accelerator, PreparedModel, PreparedOptimizer};
use tch::{Device, Kind, Tensor};

use super::{gpt2, mesh, numbers};
use crate::net::fill;
use crate::sharding::on_ranks;

/// Replicas, shards and tensor ranks; `None`: without sharding.
#[derive(Debug, Clone, Copy)]
struct Form {
    sizes: [usize; 3],
    sharding: Option<fn() -> Sharding>,
}

impl Form {
    fn ranks(self) -> usize {
        self.sizes.iter().product()
    }
}

const SAMPLES: usize = 4;

pub(super) type Weights = Vec<(String, Vec<f64>)>;

fn run(
    form: Form,
    body: impl Fn(&Accelerator, &mut PreparedModel<Gpt2LmHead>, &mut PreparedOptimizer) + Sync,
) -> Weights {
    on_ranks(form.ranks(), |builder, _| {
        let [replicate, shard, tensor] = form.sizes;
        let builder = builder.sharding(form.sharding.map(|new| new()));
        let accelerator = builder.mesh(mesh(replicate, shard, tensor)).build().unwrap();
        let options =
            accelerator.parallel().model_builder(Gpt2LmHead::tensor_plan()).kind(Kind::Double);
        let options = options.without_first_values();
        let model = options.build(|path| Gpt2LmHead::new(path, &gpt2())).unwrap();
        let optimizer = AdamW::default().lr(0.01).eps(1e-3).build(&model).unwrap();
        let (mut model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
        body(&accelerator, &mut model, &mut optimizer);
        model.full_state_dict().unwrap().map(|state| numbers(&state)).unwrap_or_default()
    })
    .remove(0)
}

fn step(
    accelerator: &Accelerator,
    model: &PreparedModel<Gpt2LmHead>,
    optimizer: &mut PreparedOptimizer,
    number: usize,
) {
    let data = accelerator.data_processes();
    let share = SAMPLES / data.num_processes();
    let first = (data.process_index() * share) as i64;
    let places = Tensor::arange((SAMPLES * 6) as i64, (Kind::Int64, Device::Cpu));
    let ids = (places * 7 + number as i64 * 3).remainder(23).view([-1, 6]);
    let ids = ids.narrow(0, first, share as i64);
    let loss = model.forward(Labelled::new(&ids, &ids)).unwrap().mean().unwrap();
    accelerator.backward(&loss).unwrap();
    optimizer.step().unwrap();
    optimizer.zero_grad().unwrap();
}

/// Saves after two steps; returns the weights after two more.
fn save(form: Form, folder: &Path) -> Weights {
    let whole = Model::builder().kind(Kind::Double).build(|path| Gpt2LmHead::new(path, &gpt2()));
    let whole = whole.unwrap();
    fill(&whole);
    let first = folder.with_extension("safetensors");
    whole.save_weights(&first).unwrap();
    run(form, |accelerator, model, optimizer| {
        accelerator.load_model(model, &first).unwrap();
        for number in 0..2 {
            step(accelerator, model, optimizer, number);
        }
        accelerator.save_state(folder).unwrap();
        accelerator.checkpoints().wait().unwrap();
        for number in 2..4 {
            step(accelerator, model, optimizer, number);
        }
    })
}

fn resume(form: Form, folder: &Path) -> Weights {
    run(form, |accelerator, model, optimizer| {
        assert_eq!(accelerator.load_state(folder).unwrap().step, 2);
        for number in 2..4 {
            step(accelerator, model, optimizer, number);
        }
    })
}

pub(super) fn same(found: &Weights, expected: &Weights) {
    assert_eq!(found.len(), expected.len());
    for ((name, found), (expected_name, expected)) in found.iter().zip(expected) {
        assert_eq!(name, expected_name);
        assert_close(found, expected, 1e-11, 1e-13);
    }
}

const FORMS: [Form; 10] = [
    Form { sizes: [1, 1, 1], sharding: None },
    Form { sizes: [2, 1, 1], sharding: None },
    Form { sizes: [1, 2, 1], sharding: Some(Sharding::zero3) },
    Form { sizes: [1, 1, 2], sharding: None },
    Form { sizes: [1, 1, 3], sharding: None },
    Form { sizes: [1, 1, 4], sharding: None },
    Form { sizes: [2, 1, 2], sharding: None },
    Form { sizes: [1, 2, 2], sharding: Some(Sharding::zero1) },
    Form { sizes: [1, 2, 2], sharding: Some(Sharding::zero3) },
    Form { sizes: [2, 2, 2], sharding: Some(Sharding::zero3) },
];

#[test]
fn any_mesh_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let mut first: Option<Weights> = None;
    for (number, form) in FORMS.into_iter().enumerate() {
        let folder = folder.path().join(number.to_string());
        let expected = save(form, &folder);
        same(&expected, first.get_or_insert_with(|| expected.clone()));
        // Each mesh is loaded by those that differ from it by one axis or more, in turns.
        for other in [number + 1, number + 7].map(|other| FORMS[other % FORMS.len()]) {
            same(&resume(other, &folder), &expected);
        }
        assert_eq!(resume(form, &folder), expected);
    }
}

#[test]
fn files_do_not_depend_on_the_mesh() {
    let folder = tempfile::tempdir().unwrap();
    let mut known: Option<Weights> = None;
    for (number, sizes) in [[1, 1, 1], [1, 1, 3], [1, 2, 2]].into_iter().enumerate() {
        let sharding: Option<fn() -> Sharding> = (sizes[1] > 1).then_some(Sharding::zero3);
        let saved = folder.path().join(number.to_string());
        save(Form { sizes, sharding }, &saved);
        let checkpoint = Checkpoint::open(&saved).unwrap();
        assert!(checkpoint.verify().is_empty());
        let manifest = checkpoint.manifest();
        let axes: Vec<String> =
            manifest.mesh.iter().map(|axis| format!("{} {}", axis.name, axis.size)).collect();
        let model = manifest.of_kind("model").next().unwrap();
        // Queries, keys and values of each rank lie at their places in the whole weight.
        let fused = &model.tensors["transformer.h.0.attn.c_attn.weight"];
        assert_eq!(fused.shape, [12, 36]);
        let expected = match number {
            0 => (vec![], 1),
            1 => (vec!["tp 3".to_owned()], 9),
            _ => (vec!["dp_shard 2".to_owned(), "tp 2".to_owned()], 12),
        };
        if number > 0 {
            assert_eq!((axes, fused.chunks.len()), expected);
        }
        let merged = folder.path().join(format!("{number}-merged.safetensors"));
        convert(&saved, &merged, Target::Weights(&Safetensors)).unwrap();
        let found = numbers(&weights::load(&merged).unwrap());
        let mut found: Weights = found.into_iter().collect();
        found.sort_by(|(left, _), (right, _)| left.cmp(right));
        same(&found, known.get_or_insert_with(|| found.clone()));
    }
}
