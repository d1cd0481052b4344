//! Mixtures whose experts ranks have between them train as whole ones do.

use std::path::Path;

use brigade_checkpoint::layout::Checkpoint;
use brigade_models::{Labelled, MixtralForCausalLm, MixtralOptions};
use brigade_nn::{Model, ParamPath, TensorParallelPlan};
use brigade_optim::{Adafactor, AdamW};
use brigade_sharding::{Axis, ContextMethod, Mesh, Reshard, Sharding};
use brigade_train::{
    Accelerator, CommHook, JoinInputs, PipelineOptions, PreparedModel, PreparedOptimizer,
    TrainError,
};
use tch::{Device, Kind, Tensor};

use super::checkpoints::{Weights, same};
use super::{ADAM, Recipe, check, numbers};
use crate::net::fill;
use crate::sharding::on_ranks;

fn options() -> MixtralOptions {
    MixtralOptions {
        vocab_size: 23,
        hidden_size: 8,
        intermediate_size: 12,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: Some(1),
        num_local_experts: 4,
        output_router_logits: true,
        router_aux_loss_coef: 0.1,
        ..Default::default()
    }
}

fn new(path: &ParamPath<'_>) -> MixtralForCausalLm {
    MixtralForCausalLm::new(path, &options())
}

fn mesh(replicate: usize, shard: usize, expert: usize) -> Mesh {
    let builder = Mesh::builder().replicate(replicate).shard(shard).expert(expert);
    builder.build(replicate * shard).unwrap()
}

#[test]
fn experts_are_divided_over_all_ranks() {
    for ranks in [2, 4] {
        check(new, &mesh(1, ranks, ranks), None, ADAM);
    }
}

#[test]
fn ranks_with_the_same_experts_average_them() {
    for norm_type in [2.0, f64::INFINITY, 0.0] {
        let recipe = Recipe { momentum: true, micro_batches: 2, norm_type, ..ADAM };
        check(new, &mesh(1, 4, 2), None, recipe);
    }
    check(new, &mesh(2, 2, 2), None, ADAM);
}

#[test]
fn all_else_is_sharded_beside_experts() {
    for sharding in [Sharding::zero1(), Sharding::zero2(), Sharding::zero3()] {
        for expert in [2, 4] {
            let recipe = Recipe { micro_batches: 2, ..ADAM };
            check(new, &mesh(1, 4, expert), Some(&sharding), recipe);
        }
    }
    let norms = Recipe { momentum: true, norm_type: 0.0, ..ADAM };
    check(new, &mesh(1, 2, 2), Some(&Sharding::zero3()), norms);
    check(new, &mesh(2, 2, 2), Some(&Sharding::hybrid(2)), ADAM);
}

/// Context ranks have other tokens, so that experts are divided over them as well.
#[test]
fn experts_are_divided_over_parts_of_sequences() {
    for (method, shard, expert) in
        [(ContextMethod::Gather, 1, 2), (ContextMethod::Gather, 2, 4), (ContextMethod::Ring, 2, 2)]
    {
        let mesh = Mesh::builder().shard(shard).context(2).expert(expert);
        let recipe = Recipe { method: Some(method), ..ADAM };
        check(new, &mesh.build(2 * shard).unwrap(), None, recipe);
    }
}

type Run<'a> =
    (&'a Accelerator, &'a mut PreparedModel<MixtralForCausalLm>, &'a mut PreparedOptimizer);

/// A mesh, how parameters are sharded on it, and the model.
type Form = (Mesh, Option<Sharding>, fn(&ParamPath<'_>) -> MixtralForCausalLm);

fn run((mesh, sharding, new): &Form, body: impl Fn(Run<'_>) + Sync) -> Weights {
    on_ranks(mesh.world_size(), |builder, _| {
        let builder = builder.sharding(sharding.clone()).mesh(mesh.clone());
        let builder = match mesh.size(Axis::Pipeline) {
            1 => builder,
            _ => builder.pipeline_options(PipelineOptions::new(2)),
        };
        let accelerator = builder.build().unwrap();
        let plan = MixtralForCausalLm::tensor_plan();
        let options = accelerator.parallel().model_builder(plan).kind(Kind::Double);
        let model = options.without_first_values().build(new).unwrap();
        let optimizer = AdamW::default().lr(0.01).eps(1e-3).build(&model).unwrap();
        let (mut model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
        body((&accelerator, &mut model, &mut optimizer));
        model.full_state_dict().unwrap().map(|state| numbers(&state)).unwrap_or_default()
    })
    .remove(0)
}

/// One step of four texts, with a loss of routers for each, so that it does not depend on the ranks.
fn step((accelerator, model, optimizer): &mut Run<'_>, number: i64) {
    let data = accelerator.data_processes();
    let share = 4 / data.num_processes() as i64;
    let places = Tensor::arange(4 * 6, (Kind::Int64, Device::Cpu));
    let ids = (places * 7 + number * 3).remainder(23).view([-1, 6]);
    if accelerator.parallel().micro_batches() > 1 {
        let ids = ids.narrow(0, data.process_index() as i64 * share, share);
        let loss = accelerator.forward_backward(&**model, &ids, |model, micro| {
            model.forward(Labelled::new(micro, micro))?.mean()
        });
        assert!(loss.unwrap().value() > 0.0);
        optimizer.step().unwrap();
        return optimizer.zero_grad().unwrap();
    }
    for text in 0..share {
        let ids = ids.narrow(0, data.process_index() as i64 * share + text, 1);
        let run = || {
            let loss = model.forward(Labelled::new(&ids, &ids))?.mean()?;
            accelerator.backward(&(loss / share as f64))
        };
        if text + 1 < share { accelerator.no_sync(&**model, run) } else { run() }.unwrap();
    }
    optimizer.step().unwrap();
    optimizer.zero_grad().unwrap();
}

/// Saves after two steps; returns the weights after two more.
fn save(form: &Form, folder: &Path) -> Weights {
    let builder = Model::builder().kind(Kind::Double);
    let whole = builder.build(form.2).unwrap();
    fill(&whole);
    let first = folder.with_extension("safetensors");
    whole.save_weights(&first).unwrap();
    run(form, |mut run| {
        run.0.load_model(run.1, &first).unwrap();
        (0..2).for_each(|number| step(&mut run, number));
        run.0.save_state(folder).unwrap();
        run.0.checkpoints().wait().unwrap();
        run.0.save_model(run.1, folder.with_extension("model")).unwrap();
        (2..4).for_each(|number| step(&mut run, number));
    })
}

fn resume(form: &Form, folder: &Path) -> Weights {
    run(form, |mut run| {
        assert_eq!(run.0.load_state(folder).unwrap().step, 2);
        (2..4).for_each(|number| step(&mut run, number));
    })
}

/// Saves on each form, and goes on with it on the forms at these distances, and on itself.
fn go_on(forms: &[Form], distances: [usize; 2], folder: &Path) {
    let mut first: Option<Weights> = None;
    for (number, form) in forms.iter().enumerate() {
        let folder = folder.join(number.to_string());
        let expected = save(form, &folder);
        same(&expected, first.get_or_insert_with(|| expected.clone()));
        for distance in distances {
            same(&resume(&forms[(number + distance) % forms.len()], &folder), &expected);
        }
        assert_eq!(resume(form, &folder), expected);
    }
}

/// The mesh of a checkpoint, and the number of experts of a layer and of the parts of their tensor.
fn manifest(folder: &Path, number: usize) -> (String, u64, usize) {
    let checkpoint = Checkpoint::open(folder.join(number.to_string())).unwrap();
    assert!(checkpoint.verify().is_empty());
    let manifest = checkpoint.manifest();
    let axes: Vec<String> =
        manifest.mesh.iter().map(|axis| format!("{} {}", axis.name, axis.size)).collect();
    let model = manifest.of_kind("model").next().unwrap();
    let experts = &model.tensors["model.layers.0.mlp.experts.down_proj"];
    assert_eq!(experts.placements.len(), axes.len());
    (axes.join(" x "), experts.shape[0], experts.chunks.len())
}

#[test]
fn any_mesh_with_stages_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let stages = |shard: usize, expert: usize| {
        let builder = Mesh::builder().pipeline(2).shard(shard).expert(expert);
        builder.build(2 * shard).unwrap()
    };
    let forms: [Form; 5] = [
        (mesh(1, 1, 1), None, new),
        (stages(2, 2), None, new),
        (mesh(1, 4, 2), Some(Sharding::zero3()), new),
        (stages(2, 2), Some(Sharding::zero3()), new),
        (beside(2, 4), None, new),
    ];
    go_on(&forms, [1, 2], folder.path());
    assert_eq!(manifest(folder.path(), 1), ("pp 2 x ep 2".to_owned(), 4, 2));
    assert_eq!(manifest(folder.path(), 3), ("pp 2 x ep 2".to_owned(), 4, 2));
}

/// Experts beside layers that two ranks divide.
fn beside(shard: usize, expert: usize) -> Mesh {
    Mesh::builder().shard(shard).tensor(2).expert(expert).build(2 * shard).unwrap()
}

#[test]
fn experts_beside_divided_layers() {
    for norm_type in [2.0, f64::INFINITY, 0.0] {
        let recipe = Recipe { momentum: true, micro_batches: 2, norm_type, ..ADAM };
        check(new, &beside(2, 4), None, recipe);
    }
    check(new, &beside(2, 2), Some(&Sharding::zero3()), Recipe { norm_type: 0.0, ..ADAM });
    check(new, &beside(2, 4), Some(&Sharding::zero2()), Recipe { regions: true, ..ADAM });
}

#[test]
fn any_mesh_with_divided_layers_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let forms: [Form; 5] = [
        (beside(2, 2), Some(Sharding::zero3()), new),
        (mesh(1, 2, 2), None, new),
        (beside(1, 2), None, new),
        (beside(2, 4), Some(Sharding::zero1()), new),
        (beside(2, 4), None, new),
    ];
    go_on(&forms, [1, 2], folder.path());
    let mesh = |number| manifest(folder.path(), number);
    // Tensor ranks divide the experts, and each part is sharded over two ranks.
    assert_eq!(mesh(0), ("dp_shard 2 x tp 2".to_owned(), 4, 4));
    assert_eq!(mesh(2), ("tp 2".to_owned(), 4, 2));
    assert_eq!(mesh(3), ("ep 2 x tp 2".to_owned(), 4, 4));
    assert_eq!(mesh(4), ("ep 2 x tp 2".to_owned(), 4, 4));
}

/// Debug mode compares the gradients of what tensor ranks have whole, to which experts do not belong.
#[test]
fn debug_mode_takes_experts_beside_divided_layers() {
    on_ranks(4, |builder, _| {
        let builder = builder.sharding(None).mesh(beside(2, 4)).debug(true);
        let accelerator = builder.build().unwrap();
        let model = accelerator.parallel().model(new).unwrap();
        let optimizer = AdamW::default().lr(0.01).build(&model).unwrap();
        let (mut model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
        step(&mut (&accelerator, &mut model, &mut optimizer), 0);
        let state = optimizer.full_state_dict().unwrap();
        optimizer.load_full_state_dict(state).unwrap();
        step(&mut (&accelerator, &mut model, &mut optimizer), 1);
    });
}

#[test]
fn any_mesh_goes_on() {
    let folder = tempfile::tempdir().unwrap();
    let tensor = Mesh::builder().tensor(2).build(2).unwrap();
    let forms: [Form; 10] = [
        (mesh(1, 1, 1), None, new),
        (mesh(1, 2, 2), None, new),
        (mesh(1, 4, 4), None, new),
        (mesh(1, 4, 2), None, new),
        (mesh(2, 2, 2), None, new),
        (mesh(1, 2, 1), Some(Sharding::zero3()), new),
        (tensor, None, new),
        (mesh(1, 4, 2), Some(Sharding::zero3()), new),
        (mesh(1, 4, 4), Some(Sharding::zero1()), new),
        (mesh(2, 2, 2), Some(Sharding::hybrid(2)), new),
    ];
    go_on(&forms, [1, 4], folder.path());
    let manifest = |number| manifest(folder.path(), number);
    assert_eq!(manifest(2), ("ep 4".to_owned(), 4, 4));
    assert_eq!(manifest(3), ("dp_replicate 2 x ep 2".to_owned(), 4, 2));
    assert_eq!(manifest(7), ("dp_shard 2 x ep 2".to_owned(), 4, 4));
    assert_eq!(manifest(9), ("dp_replicate 2 x ep 2".to_owned(), 4, 2));
}

/// A mixture with as many experts as ranks divide them over: ranks with the same expert have rows of each matrix.
fn with_two_experts(path: &ParamPath<'_>) -> MixtralForCausalLm {
    MixtralForCausalLm::new(path, &MixtralOptions { num_local_experts: 2, ..options() })
}

#[test]
fn ranks_with_the_same_expert_have_rows_of_it() {
    for sharding in [Sharding::zero1(), Sharding::zero2(), Sharding::zero3()] {
        let recipe = Recipe { micro_batches: 2, ..ADAM };
        check(with_two_experts, &mesh(1, 4, 2), Some(&sharding), recipe);
    }
    let in_parts = Sharding::zero3().reshard_after_forward(Reshard::To(2));
    for norm_type in [2.0, f64::INFINITY, 0.0] {
        let recipe = Recipe { momentum: true, norm_type, ..ADAM };
        check(with_two_experts, &mesh(1, 4, 2), Some(&in_parts), recipe);
    }
    check(new, &mesh(1, 4, 2), Some(&in_parts), ADAM);

    let folder = tempfile::tempdir().unwrap();
    let forms: [Form; 4] = [
        (mesh(1, 1, 1), None, with_two_experts),
        (mesh(1, 4, 2), Some(Sharding::zero3()), with_two_experts),
        (mesh(1, 2, 2), None, with_two_experts),
        (mesh(1, 4, 2), Some(Sharding::zero1()), with_two_experts),
    ];
    go_on(&forms, [1, 3], folder.path());
    let manifest = |number| manifest(folder.path(), number);
    assert_eq!(manifest(1), ("dp_shard 2 x ep 2".to_owned(), 2, 4));
    assert_eq!(manifest(2), ("ep 2".to_owned(), 2, 2));
}

#[test]
fn a_loss_that_is_not_finite_is_an_error_on_every_rank() {
    let errors = on_ranks(4, |builder, rank| {
        let accelerator = builder.sharding(None).mesh(mesh(1, 4, 2)).build().unwrap();
        let model = accelerator.parallel().model(new).unwrap();
        let model = accelerator.prepare(model).unwrap();
        let ids = Tensor::arange(6, (Kind::Int64, Device::Cpu)).view([1, 6]);
        let loss = model.forward(Labelled::new(&ids, &ids)).unwrap().mean().unwrap();
        let loss = if rank == 2 { loss * f64::NAN } else { loss };
        let error = accelerator.backward(&loss).unwrap_err();
        match error.downcast_ref() {
            Some(TrainError::LossNotFinite { rank, .. }) => *rank,
            _ => panic!("{error}"),
        }
    });
    assert_eq!(errors, [Some(2); 4]);
}

#[test]
fn what_does_not_go_together_is_named() {
    let refusals =
        |set: &(
              dyn Fn(brigade_train::AcceleratorBuilder) -> brigade_train::AcceleratorBuilder + Sync
          )| {
            let texts = on_ranks(4, |builder, _| {
                set(builder.sharding(None)).build().map(drop).unwrap_err().to_string()
            });
            assert!(texts.iter().all(|text| *text == texts[0]), "{texts:?}");
            texts[0].clone()
        };
    let tensor = Mesh::builder().tensor(4).expert(2).build(4).unwrap();
    let error = refusals(&|builder| builder.mesh(tensor.clone()));
    assert!(error.contains("divides experts over 2 ranks"), "{error}");
    assert!(error.contains("take a multiple of 4 along ep"), "{error}");
    let error = refusals(&|builder| builder.expert_parallel(3));
    assert!(error.contains("3") && error.contains("ep"), "{error}");
    let error = refusals(&|builder| builder.expert_parallel(2).mesh(mesh(1, 4, 2)));
    assert!(error.contains("`expert_parallel(2)` contradict"), "{error}");
    let error = refusals(&|builder| builder.expert_parallel(2).comm_hook(CommHook::Bf16));
    assert!(error.contains("a communication hook") && error.contains("divide experts"), "{error}");

    on_ranks(2, |builder, _| {
        let accelerator = builder.sharding(None).expert_parallel(2).build().unwrap();
        assert_eq!(accelerator.parallel().mesh().unwrap(), mesh(1, 2, 2));
        assert_eq!(accelerator.data_processes().num_processes(), 2);
        let error = accelerator.prepare(Model::new(new).unwrap()).unwrap_err().to_string();
        assert!(error.contains("divide experts") && error.contains("built whole"), "{error}");
        let model = accelerator.parallel().model(new).unwrap();
        let optimizer = Adafactor::default().build(&model).unwrap();
        let model = accelerator.prepare(model).unwrap();
        let error = accelerator.prepare(optimizer).unwrap_err().to_string();
        assert!(error.contains("each of 2 expert ranks has a part"), "{error}");
        let error = accelerator.local_sgd(&model, 2, true).unwrap_err().to_string();
        assert!(error.contains("local_sgd") && error.contains("divide experts"), "{error}");
        let joined = accelerator.join_uneven_inputs(&model, JoinInputs::default(), || Ok(()));
        let error = joined.unwrap_err().to_string();
        assert!(error.contains("join_uneven_inputs") && error.contains("as many"), "{error}");
        let alone = Accelerator::builder().cpu(true).quiet(true).sharding(None).build().unwrap();
        let model = accelerator.parallel().model(new).unwrap();
        let error = alone.prepare(model).unwrap_err().to_string();
        assert!(error.contains("this rank has a part of `model.layers.0.mlp.experts"), "{error}");
    });
}
