//! Experts that several ranks have between them, each with other tokens.

use std::thread;

use brigade_nn::{
    ExpertParallel, Experts, ExpertsOptions, Model, ModelBuilder, ModelError, ParamPath,
    TensorParallel, take_part,
};
use brigade_sharding::{ExpertStep, TensorPlan};
use brigade_torch::{Backend, GlooDevice, GroupOptions, ProcessGroup, ReduceOp, Store, backward};
use tch::{Device, Kind, Tensor};

use super::{EXPERTS, HIDDEN, INNER, model, options, prefer, same, take_gradients, tokens, wave};

fn on_ranks(ranks: usize, body: impl Fn(ProcessGroup) + Sync) {
    let store = Store::hash().unwrap();
    thread::scope(|scope| {
        for rank in 0..ranks {
            let (store, body) = (store.clone(), &body);
            scope.spawn(move || {
                let gloo = Backend::Gloo(GlooDevice::Address("127.0.0.1".into()));
                body(
                    ProcessGroup::new(&store, rank, ranks, gloo, GroupOptions::default()).unwrap(),
                );
            });
        }
    });
}

fn fake(size: usize) -> ProcessGroup {
    let store = Store::hash().unwrap();
    ProcessGroup::new(&store, 1, size, Backend::Fake, GroupOptions::default()).unwrap()
}

fn over(group: &ProcessGroup) -> ModelBuilder {
    Model::builder().expert_parallel(ExpertParallel { group: Some(group.clone()) })
}

/// Decoupled weight decay, as in PyTorch.
struct AdamW {
    moments: Vec<(Tensor, Tensor)>,
    step: i32,
}

impl AdamW {
    fn new(model: &Model<Experts>) -> Self {
        let zeros = |it: &Tensor| (it.detach().zeros_like(), it.detach().zeros_like());
        let moments = model.parameters().iter().map(|it| zeros(&it.tensor)).collect();
        Self { moments, step: 0 }
    }

    fn step(&mut self, model: &Model<Experts>, gradients: &[Tensor]) {
        const RATE: f64 = 0.01;
        self.step += 1;
        let parameters = model.parameters().into_iter();
        for ((parameter, gradient), moments) in parameters.zip(gradients).zip(&mut self.moments) {
            moments.0 = &moments.0 * 0.9 + gradient * 0.1;
            moments.1 = &moments.1 * 0.999 + gradient.square() * 0.001;
            let mean = &moments.0 / (1.0 - 0.9f64.powi(self.step));
            let square = &moments.1 / (1.0 - 0.999f64.powi(self.step));
            let mut tensor = parameter.tensor.detach();
            let _ = tensor.g_mul_scalar_(1.0 - RATE * 0.01);
            let _ = tensor.g_sub_(&(mean / (square.sqrt() + 1e-8) * RATE));
        }
    }
}

/// Tokens of each rank.
fn own_tokens(counts: &[i64], rank: usize, step: i64) -> Tensor {
    tokens(counts[rank], rank as f64 + 0.31 * step as f64)
}

/// A rank's part of a mean over ranks.
fn loss(model: &Model<Experts>, tokens: &Tensor, target: f64) -> (Tensor, Tensor) {
    let output = model.forward(tokens).unwrap();
    let target = wave(&tokens.size(), target);
    let loss = (output.sin() * target).sum(Kind::Double);
    (output, loss)
}

/// 5 steps on each rank, and on all tokens in one process.
fn agrees(counts: &[i64], options: ExpertsOptions, preferred: Option<i64>) {
    let ranks = counts.len();
    on_ranks(ranks, |group| {
        let whole = model(Model::builder(), options);
        let own = model(over(&group), options);
        for model in [&whole, &own] {
            if let Some(expert) = preferred {
                prefer(model, expert);
            }
        }
        let divided = own.divided_parameters();
        let names: Vec<&str> = divided.iter().map(|it| it.name.as_str()).collect();
        assert_eq!(names, ["experts.gate_up_proj", "experts.down_proj"]);
        assert!(divided.iter().all(|it| it.is_expert));
        let part_of = |name: &str| divided.iter().find(|it| it.name == name).map(|it| &it.part);
        let mut optimizers = (AdamW::new(&whole), AdamW::new(&own));
        for step in 0..5 {
            let mut expected = Vec::new();
            let mut total = Tensor::zeros([0i64; 0], (Kind::Double, Device::Cpu));
            for rank in 0..ranks {
                let (output, part) = loss(&whole, &own_tokens(counts, rank, step), rank as f64);
                expected.push(output.detach());
                total += part / ranks as f64;
            }
            backward(&total).unwrap();
            let of_whole = take_gradients(&whole);

            let (output, part) =
                loss(&own, &own_tokens(counts, group.rank(), step), group.rank() as f64);
            same(&output, &expected[group.rank()]);
            backward(&part).unwrap();
            let mut of_own = take_gradients(&own);
            let parameters = whole.parameters().into_iter().zip(&of_whole);
            for ((parameter, expected), found) in parameters.zip(&mut of_own) {
                match part_of(&parameter.name) {
                    // One group has all experts: nothing is averaged over ranks with the same ones.
                    Some(part) => {
                        same(found, &take_part(expected, part).unwrap());
                    }
                    None => {
                        group.all_reduce(found, ReduceOp::Mean).unwrap();
                        same(found, expected);
                    }
                }
            }
            optimizers.0.step(&whole, &of_whole);
            optimizers.1.step(&own, &of_own);
        }
        let together = own.whole_state_dict().unwrap();
        for (name, expected) in whole.state_dict() {
            same(together.get(&name).unwrap(), &expected);
        }
    });
}

/// One expert, whose weight is not 1 for all tokens: the router's gradient would be rounding alone.
fn single() -> ExpertsOptions {
    ExpertsOptions { normalize: false, ..options(1) }
}

#[test]
fn two_ranks_with_experts_are_one_process() {
    agrees(&[5, 9], options(2), None);
    agrees(&[3, 4], ExpertsOptions { shared_intermediate_size: Some(3), ..single() }, None);
}

#[test]
fn three_ranks_with_experts_are_one_process() {
    agrees(&[4, 1, 7], options(2), None);
    agrees(&[0, 1, 1], single(), None);
}

#[test]
fn four_ranks_with_experts_are_one_process() {
    agrees(&[6, 2, 3, 11], options(3), None);
    agrees(&[2, 0, 5, 1], single(), Some(8));
}

#[test]
fn a_rank_without_tokens_takes_part_with_inputs_of_no_gradient_and_of_one() {
    on_ranks(2, |group| {
        for requires_grad in [false, true] {
            let own = model(over(&group), options(1));
            prefer(&own, 11);
            let count = 3 * group.rank() as i64;
            let input = tokens(count, 0.3).set_requires_grad(requires_grad);
            let output = own.forward(&input).unwrap();
            backward(&output.sum(Kind::Double)).unwrap();
            let load = own.module().load().unwrap();
            assert_eq!(load.tokens[11], count);
            let largest = take_gradients(&own)[1].abs().max().double_value(&[]);
            assert_eq!(largest > 0.0, group.rank() == 1);
        }
    });
}

#[test]
fn first_values_are_slices_of_all_experts() {
    let build = |builder: ModelBuilder| {
        tch::manual_seed(9);
        builder.build(|path| Experts::new(path / "mlp", HIDDEN, INNER, options(2))).unwrap()
    };
    let whole = build(Model::builder());
    for ranks in [2, 3, 4] {
        let group = fake(ranks);
        let mut deferred = build(over(&group).deferred());
        tch::manual_seed(9);
        deferred.materialize().unwrap();
        for own in [build(over(&group)), deferred] {
            for it in own.divided_parameters() {
                assert_eq!(own.whole_size(&it.name), Some(whole.tensor(&it.name).unwrap().size()));
                let expected = take_part(&whole.tensor(&it.name).unwrap(), &it.part).unwrap();
                assert_eq!(it.tensor.size()[0], EXPERTS / ranks as i64);
                assert_eq!(it.tensor.detach(), expected);
            }
            let gate = "mlp.gate.weight";
            assert_eq!(own.tensor(gate).unwrap(), whole.tensor(gate).unwrap());
        }
    }
}

#[test]
fn weights_of_all_experts_are_read_by_parts() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("experts.safetensors");
    let whole = model(Model::builder(), options(2));
    whole.save_weights(&path).unwrap();
    for builder in [over(&fake(3)), over(&fake(3)).deferred()] {
        let build = |path: &ParamPath<'_>| Experts::new(path, HIDDEN, INNER, options(2));
        let mut own = builder.kind(Kind::Double).build(build).unwrap();
        own.load_weights(&path).unwrap();
        own.materialize().unwrap();
        for it in own.divided_parameters() {
            let expected = take_part(&whole.tensor(&it.name).unwrap(), &it.part).unwrap();
            assert_eq!(it.tensor.detach(), expected);
        }
        let error = own.save_weights(&path).unwrap_err().to_string();
        assert!(error.contains("has a part of `experts.gate_up_proj`"), "{error}");
    }
}

#[test]
fn numbers_that_do_not_fit_are_named() {
    let problems = |builder: ModelBuilder| {
        let built = builder.build(|path: &ParamPath<'_>| {
            Experts::new(path / "mlp", HIDDEN, INNER, ExpertsOptions { experts: 10, ..options(2) })
        });
        let error = built.map(drop).unwrap_err();
        let Some(ModelError::Build { problems }) = error.downcast_ref() else { panic!("{error}") };
        problems.clone()
    };
    let found = problems(over(&fake(4)));
    assert!(
        found[0].contains(
            "mlp.experts.gate_up_proj: 4 expert ranks do not divide 10 experts: take 8 or 12, or other ranks"
        ),
        "{found:?}"
    );
    let plan = TensorPlan::new();
    let tensor = TensorParallel { group: Some(fake(2)), plan };
    let found = problems(over(&fake(5)).tensor_parallel(tensor));
    assert!(
        found[0].contains(
            "5 expert ranks are not whole groups of 2 tensor ranks: take a multiple of 2"
        ),
        "{found:?}"
    );
    let plan = TensorPlan::new().column("*gate_up_proj");
    let tensor = TensorParallel { group: Some(fake(2)), plan };
    let found = problems(Model::builder().tensor_parallel(tensor));
    assert!(found[0].contains("mlp.experts.gate_up_proj: the tensor plan divides it"), "{found:?}");
}

/// Forward one message of counts and two of tokens, back two of gradients.
#[test]
fn what_a_rank_would_send_is_counted() {
    const TOKENS: i64 = 512;
    const CHOSEN: i64 = 2;
    for ranks in [8, 64, 1024] {
        let group = fake(ranks);
        let options = ExpertsOptions {
            experts: 2 * ranks as i64,
            experts_per_token: CHOSEN,
            ..Default::default()
        };
        let builder = over(&group).without_first_values();
        let model = builder.build(|path| Experts::new(path, HIDDEN, INNER, options)).unwrap();
        // A router that chooses the experts of rank 0, and no other.
        let _ = tch::no_grad(|| model.tensor("gate.weight").unwrap().narrow(0, 0, 2).fill_(1.0));
        let input = Tensor::ones([TOKENS, HIDDEN], (Kind::Float, Device::Cpu));
        let input = input.set_requires_grad(true);
        let output = model.forward(&input).unwrap();
        let sent = || {
            let all = group.traffic();
            group.reset_traffic();
            all.into_iter().map(|(name, it)| (name, it.messages, it.bytes)).collect::<Vec<_>>()
        };
        let rows = (TOKENS * CHOSEN * HIDDEN * 4) as u64;
        let counts = 2 * 8 * (ranks as u64 - 1);
        let step = ExpertStep {
            experts: 2 * ranks as u64,
            hidden: HIDDEN as u64,
            element_bytes: 4,
            leaving_rows: (TOKENS * CHOSEN) as u64,
        };
        let formula = step.messages(ranks as u64).into_iter();
        let formula: Vec<_> = formula.map(|it| (it.messages, it.bytes)).collect();
        assert_eq!(formula, [(3, 2 * rows + counts), (2, 2 * rows)], "{ranks} ranks");
        assert_eq!(sent(), [("all_to_all".to_owned(), 3, 2 * rows + counts)], "{ranks} ranks");
        backward(&output.sum(Kind::Float)).unwrap();
        assert_eq!(sent(), [("all_to_all".to_owned(), 2, 2 * rows)], "{ranks} ranks");
    }
}
