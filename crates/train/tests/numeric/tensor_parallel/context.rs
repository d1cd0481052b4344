//! Models of which each rank computes a part of every text train as whole ones do.

use brigade_data::{Batch, DataLoader, TensorDataset};
use brigade_models::{Gpt2LmHead, LlamaForCausalLm};
use brigade_nn::{Linear, Model, ParamPath};
use brigade_sharding::{Axis, ContextMethod, Mesh, Sharding};
use brigade_torch::{Error, ReduceOp, Result};
use brigade_train::AcceleratorBuilder;
use tch::{Device, Kind, Tensor};

use super::{ADAM, Recipe, check, gpt2, llama};
use crate::sharding::on_ranks;

fn mesh([replicate, shard, context, sequence, tensor]: [usize; 5]) -> Mesh {
    let builder = Mesh::builder().replicate(replicate).shard(shard).context(context);
    let ranks = replicate * shard * context * sequence * tensor;
    builder.sequence(sequence).tensor(tensor).build(ranks).unwrap()
}

fn gpt(axes: [usize; 5], sharding: impl Into<Option<Sharding>>, recipe: Recipe) {
    let sharding = sharding.into();
    check(|path| Gpt2LmHead::new(path, &gpt2()), &mesh(axes), sharding.as_ref(), recipe);
}

#[test]
fn context_ranks_alone() {
    let ring = Recipe { method: Some(ContextMethod::Ring), ..ADAM };
    for context in [2, 3, 4] {
        gpt([1, 1, context, 1, 1], None, ADAM);
        gpt([1, 1, context, 1, 1], None, ring);
    }
    // Ulysses.
    gpt([1, 1, 1, 2, 1], None, ADAM);
    gpt([1, 1, 1, 4, 1], None, ADAM);
}

#[test]
fn with_replicas_shards_and_divided_layers() {
    let recipe = Recipe { momentum: true, micro_batches: 2, ..ADAM };
    gpt([2, 1, 2, 1, 1], None, recipe);
    let ring = Recipe { method: Some(ContextMethod::Ring), ..ADAM };
    gpt([1, 2, 2, 1, 1], Some(Sharding::zero3()), ring);
    gpt([1, 1, 2, 1, 1], Some(Sharding::zero3()), ADAM);
    gpt([1, 2, 2, 1, 1], Some(Sharding::zero1()), recipe);
    gpt([1, 2, 1, 2, 1], Some(Sharding::zero2()), recipe);
    gpt([1, 1, 2, 1, 2], None, ADAM);
    gpt([1, 1, 1, 2, 2], None, ADAM);
    gpt([2, 1, 2, 1, 2], None, recipe);
    let new = |path: &ParamPath<'_>| LlamaForCausalLm::new(path, &llama());
    check(new, &mesh([1, 2, 2, 1, 2]), Some(&Sharding::zero3()), ring);
    check(new, &mesh([2, 1, 2, 1, 1]), Some(&Sharding::zero3()), ADAM);
}

/// The sequences of the tests have 6 tokens, of which a rank of a context group has 4.
#[test]
fn with_sequence_regions() {
    let regions = Recipe { regions: true, ..ADAM };
    gpt([1, 1, 1, 1, 2], None, regions);
    gpt([1, 1, 1, 1, 3], None, Recipe { micro_batches: 2, ..regions });
    gpt([2, 1, 1, 1, 2], None, Recipe { momentum: true, ..regions });
    gpt([1, 2, 1, 1, 2], Sharding::zero3(), regions);
    gpt([1, 2, 1, 1, 2], Sharding::zero2(), regions);
    gpt([1, 1, 2, 1, 2], None, regions);
    gpt([1, 2, 2, 1, 2], Sharding::zero3(), regions);
    let new = |path: &ParamPath<'_>| LlamaForCausalLm::new(path, &llama());
    check(new, &mesh([1, 1, 1, 1, 2]), None, regions);
}

fn refusals(build: impl Fn(AcceleratorBuilder) -> AcceleratorBuilder + Sync) -> Vec<String> {
    on_ranks(4, |builder, _| match build(builder).build() {
        Ok(_) => String::new(),
        Err(error) => error.to_string(),
    })
}

#[test]
fn settings_that_contradict_each_other() {
    let all_contain = |errors: Vec<String>, words: &str| {
        assert!(errors.iter().all(|error| error.contains(words)), "{errors:?}");
    };
    let both = mesh([1, 1, 2, 2, 1]);
    all_contain(
        refusals(|it| it.mesh(both.clone())),
        "both cp and sp: use one of them, with 4 ranks",
    );
    let cp = mesh([1, 1, 4, 1, 1]);
    let ulysses = ContextMethod::Ulysses;
    all_contain(
        refusals(|it| it.mesh(cp.clone()).context_method(ulysses)),
        "Ulysses exchanges sequences for heads along sp: use `Mesh::builder().sequence(4)`",
    );
    let sp = mesh([1, 1, 1, 4, 1]);
    all_contain(
        refusals(|it| it.mesh(sp.clone()).context_method(ContextMethod::Ring)),
        "the method is ring: use `Mesh::builder().context(4)`",
    );
    all_contain(refusals(|it| it.mesh(cp.clone()).context_parallel(2)), "contradict each other");
    all_contain(refusals(|it| it.context_parallel(3)), "cp 3");
}

#[test]
fn models_that_compute_whole_sequences_are_refused() {
    let errors = on_ranks(2, |builder, _| {
        let accelerator = builder.context_parallel(2).build().unwrap();
        let prepared = |model| accelerator.prepare(model).map(drop).unwrap_err().to_string();
        let whole = Model::new(|path| Linear::new(path, 2, 2)).unwrap();
        let own = accelerator.parallel().model_builder(brigade_sharding::TensorPlan::new());
        let unaware = own.build(|path: &ParamPath<'_>| Linear::new(path, 2, 2)).unwrap();
        (prepared(whole), prepared(unaware))
    });
    for (whole, unaware) in errors {
        assert!(whole.contains("was built for whole sequences"), "{whole}");
        assert!(unaware.contains("no module of the model takes its part"), "{unaware}");
    }
}

/// The loader gives the ranks of a context group the same samples, and metrics count each sample once.
#[test]
fn samples_are_those_of_data_ranks() {
    let found = on_ranks(4, |builder, _| {
        let accelerator = builder.context_parallel(2).build()?;
        assert_eq!(accelerator.parallel().mesh()?.size(Axis::Context), 2);
        let data = accelerator.data_processes();
        let train = accelerator.prepare(super::loader(2))?;
        let batch = train.iter().next().unwrap()?;
        let counted = accelerator.gather_for_metrics(&batch, &batch.data())?;
        let sum = data.reduce(&Tensor::from(1i64), ReduceOp::Sum)?.int64_value(&[]);
        Ok::<_, Error>((data.process_index(), batch.data().copy(), counted.size()[0], sum))
    });
    let found: Vec<_> = found.into_iter().map(Result::unwrap).collect();
    assert_eq!(found.iter().map(|it| it.0).collect::<Vec<_>>(), [0, 0, 1, 1]);
    assert!(found[0].1 == found[1].1 && found[2].1 == found[3].1 && found[0].1 != found[2].1);
    assert!(found.iter().all(|it| it.2 == 4 && it.3 == 2));
}

/// In debug mode ranks of a context group that read other samples are told.
#[test]
fn debug_mode_compares_the_losses_of_a_context_group() {
    let errors = on_ranks(2, |builder, rank| {
        let accelerator = builder.context_parallel(2).debug(true).build().unwrap();
        let model = accelerator.parallel().model(|path| Gpt2LmHead::new(path, &gpt2())).unwrap();
        let model = accelerator.prepare(model).unwrap();
        let ids = Tensor::from_slice(&[1i64, 2, 3, 4]).view([1, 4]) + rank as i64;
        let loss =
            model.forward(brigade_models::Labelled::new(&ids, &ids)).unwrap().mean().unwrap();
        let loss = loss + rank as f64;
        accelerator.backward(&loss).unwrap_err().to_string()
    });
    for error in errors {
        assert!(
            error.contains("on context rank 1") && error.contains("the same samples"),
            "{error}"
        );
    }
}

/// Two context ranks read one sample for each batch, two replicas one each.
#[test]
fn loaders_go_on_after_the_samples_that_were_read() {
    let folder = tempfile::tempdir().unwrap();
    let samples = || {
        DataLoader::new(TensorDataset::new(Tensor::arange(12, (Kind::Int64, Device::Cpu))).unwrap())
    };
    let value = |batch: Result<Batch<Tensor>>| batch.unwrap().into_data().int64_value(&[0]);
    let seen = on_ranks(2, |builder, _| {
        let accelerator = builder.context_parallel(2).build().unwrap();
        let train = accelerator.prepare(samples()).unwrap();
        let mut batches = train.iter();
        let seen: Vec<i64> = batches.by_ref().take(4).map(value).collect();
        accelerator.save_state(folder.path().join("saved")).unwrap();
        seen
    });
    assert_eq!(seen, [[0, 1, 2, 3]; 2]);
    let rest = on_ranks(2, |builder, _| {
        let accelerator = builder.sharding(None).build().unwrap();
        let train = accelerator.prepare(samples()).unwrap();
        accelerator.load_state(folder.path().join("saved")).unwrap();
        train.iter().map(value).collect::<Vec<i64>>()
    });
    assert_eq!(rest, [[4, 6, 8, 10], [5, 7, 9, 11]]);
}
