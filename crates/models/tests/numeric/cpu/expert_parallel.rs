//! Mixtral whose experts several ranks have between them, each with texts of its own.

use brigade_models::{Labelled, MixtralForCausalLm, MixtralOptions};
use brigade_nn::{ExpertParallel, Model, ModelBuilder, take_part};
use brigade_testkit::assert_close;
use brigade_torch::{ProcessGroup, ReduceOp, backward, gradient};
use tch::{Device, Kind, Tensor};

use super::tensor_parallel::{DRAWS, mean, mixtral, on_ranks, values};

fn build(builder: ModelBuilder, options: &MixtralOptions) -> Model<MixtralForCausalLm> {
    let _one_by_one = DRAWS.lock().unwrap_or_else(std::sync::PoisonError::into_inner);
    tch::manual_seed(11);
    builder.kind(Kind::Double).build(|path| MixtralForCausalLm::new(path, options)).unwrap()
}

/// A rank's texts, of which others have more or longer ones.
fn ids(rank: usize) -> Tensor {
    let (texts, length) = (1 + rank as i64 % 2, 4 + rank as i64);
    let places = Tensor::arange(texts * length, (Kind::Int64, Device::Cpu));
    (places * 7 + 3 + rank as i64).remainder(41).view([texts, length])
}

fn loss(model: &Model<MixtralForCausalLm>, rank: usize) -> Tensor {
    let ids = ids(rank);
    mean(model.forward(Labelled::new(&ids, &ids)))
}

#[test]
fn losses_and_gradients_are_those_of_a_model_with_all_experts() {
    for (ranks, recompute) in [(2, false), (3, true), (4, false)] {
        let options = MixtralOptions {
            recompute,
            output_router_logits: true,
            router_aux_loss_coef: 0.2,
            ..mixtral()
        };
        on_ranks(ranks, |group| compare(&group, &options));
    }
}

fn compare(group: &ProcessGroup, options: &MixtralOptions) {
    let whole = build(Model::builder(), options);
    let experts = ExpertParallel { group: Some(group.clone()) };
    let own = build(Model::builder().expert_parallel(experts), options);
    // A forward that is recomputed puts the generator back, from which other ranks, which are threads, may still draw.
    group.barrier().unwrap();
    let mut losses = Vec::new();
    for rank in 0..group.size() {
        let loss = loss(&whole, rank);
        backward(&loss).unwrap();
        losses.push(loss.double_value(&[]));
    }
    let found = loss(&own, group.rank());
    assert_close(&[found.double_value(&[])], &[losses[group.rank()]], 1e-12, 0.0);
    backward(&found).unwrap();
    let divided = own.divided_parameters();
    assert_eq!(divided.len(), 4);
    for (expected, it) in whole.parameters().into_iter().zip(own.parameters()) {
        assert_eq!(expected.name, it.name);
        let expected = gradient(&expected.tensor).unwrap().unwrap() / group.size() as f64;
        let mut found = gradient(&it.tensor).unwrap().unwrap().copy();
        let expected = match divided.iter().find(|part| part.name == it.name) {
            Some(part) => {
                assert!(part.is_expert);
                take_part(&expected, &part.part).unwrap()
            }
            None => {
                group.all_reduce(&mut found, ReduceOp::Mean).unwrap();
                expected
            }
        };
        assert_close(&values(&found), &values(&expected), 1e-11, 1e-13);
    }
    let together = own.whole_state_dict().unwrap();
    for (name, expected) in whole.state_dict() {
        assert_eq!(*together.get(&name).unwrap(), expected, "{name}");
    }
}
