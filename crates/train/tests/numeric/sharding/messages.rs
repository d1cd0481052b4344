//! Messages and memory of a step are those of the plan, also on worlds that no machine has.

use std::collections::BTreeMap;

use brigade_models::{
    Gpt2LmHead, Gpt2Options, LlamaForCausalLm, LlamaOptions, MixtralForCausalLm, MixtralOptions,
};
use brigade_nn::Model;
use brigade_optim::AdamW;
use brigade_rank_env::{StoreEndpoint, World, WorldSize};
use brigade_sharding::{Operation, ReduceGradients, Reshard, Sharding, ShardingPlan};
use brigade_torch::{Backend, Sharder, ShardingGroups, Store};
use brigade_train::{Accelerator, AcceleratorBuilder};
use tch::{Device, Kind, Tensor};

/// Of one operation: messages, and bytes that a rank sends.
type Traffic = BTreeMap<&'static str, (u64, u64)>;

fn planned(plan: &ShardingPlan, micro_batches: u64) -> Traffic {
    let mut traffic = Traffic::new();
    for message in plan.messages(micro_batches) {
        let sum = traffic.entry(message.operation.name()).or_default();
        sum.0 += 1;
        sum.1 += message.sent_bytes();
    }
    traffic
}

/// Rank 0 of a world in which every other rank sends what it does.
pub(super) fn fake(ranks: usize) -> AcceleratorBuilder {
    let size = WorldSize::new(ranks).unwrap();
    let world = World::on_one_host(0, size, StoreEndpoint::alone()).unwrap();
    let builder = Accelerator::builder().world(world).store(Store::hash().unwrap());
    builder.backend(Backend::Fake).cpu(true).quiet(true)
}

fn gpt2() -> Model<Gpt2LmHead> {
    let options = Gpt2Options {
        vocab_size: 101,
        n_embd: 16,
        n_head: 2,
        n_layer: 3,
        n_positions: 8,
        embd_pdrop: 0.0,
        attn_pdrop: 0.0,
        resid_pdrop: 0.0,
        ..Gpt2Options::default()
    };
    Model::new(|path| Gpt2LmHead::new(path, &options)).unwrap()
}

#[test]
fn a_step_sends_what_the_plan_says() {
    let tokens = Tensor::arange(10, (Kind::Int64, Device::Cpu)).view([2, 5]);
    for ranks in [8, 64, 1024] {
        let strategies = [
            Sharding::zero1(),
            Sharding::zero2(),
            Sharding::zero3(),
            Sharding::zero3().reshard_after_forward(Reshard::No),
            Sharding::zero3().reshard_after_forward(Reshard::To(4)),
            Sharding::zero3().reduce(ReduceGradients::Window),
            Sharding::hybrid(8),
        ];
        for sharding in strategies {
            // The largest world for those alone that differ by its size.
            let is_large = [Sharding::zero3(), Sharding::hybrid(8)].contains(&sharding);
            if ranks == 1024 && !is_large {
                continue;
            }
            let accelerator = fake(ranks).sharding(sharding.clone()).build().unwrap();
            let model = gpt2();
            let optimizer = AdamW::default().build(&model).unwrap();
            let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
            let mut train = || {
                for micro in 0..2 {
                    let backward = || {
                        let output = model.forward(&tokens)?;
                        accelerator.backward(&output.square().mean(Kind::Float))
                    };
                    if micro == 0 {
                        accelerator.no_sync(&model, backward).unwrap();
                    } else {
                        backward().unwrap();
                    }
                }
                optimizer.step().unwrap();
                optimizer.zero_grad().unwrap();
            };
            // The engine learns the order of the units in the first step, and gathers ahead from then on.
            for _ in 0..2 {
                sends_what_is_planned(model.sharder().unwrap(), 2, &mut train);
            }
        }
    }
}

/// Compares what a window of so many batches sends with the plan.
fn sends_what_is_planned(sharder: &Sharder, micro_batches: u64, train: impl FnOnce()) {
    let ShardingGroups { gather, reduce, replicas, parts, experts } = sharder.groups();
    let shards = experts.as_ref().and_then(|it| it.shards.as_ref());
    let of_experts = experts.iter().map(|it| &it.same);
    let of_experts = of_experts.chain(shards.into_iter().flat_map(|it| [&it.gather, &it.reduce]));
    let others = [replicas, parts].into_iter().flatten().chain(of_experts);
    let all: Vec<_> = [gather, reduce].into_iter().chain(others).collect();
    all.iter().for_each(|group| group.reset_traffic());
    train();
    let mut found = Traffic::new();
    for (operation, traffic) in all.iter().flat_map(|group| group.traffic()) {
        let names = [Operation::AllGather, Operation::ReduceScatter, Operation::AllReduce];
        let name = names.iter().map(|it| it.name()).find(|name| *name == operation);
        let sum = found.entry(name.expect("a planned operation")).or_default();
        sum.0 += traffic.messages;
        sum.1 += traffic.bytes;
    }
    let (plan, ranks) = (sharder.plan(), sharder.plan().divisor() as u64);
    for (operation, (messages, bytes)) in planned(plan, micro_batches) {
        let of = found.remove(operation).unwrap_or_default();
        // The plan rounds each rank's part of a ring up to whole elements.
        let rounding = messages * 2 * ranks * 4;
        let fits = of.0 == messages && of.1 <= bytes && of.1 + rounding >= bytes;
        assert!(fits, "{plan}: {operation} {of:?}, {messages} {bytes} planned");
    }
    assert!(found.is_empty(), "{found:?}");
}

/// Experts are gathered and reduced over the ranks with the same ones.
#[test]
fn experts_send_what_the_plan_says() {
    let tokens = Tensor::arange(10, (Kind::Int64, Device::Cpu)).view([2, 5]);
    let options = MixtralOptions {
        vocab_size: 101,
        hidden_size: 16,
        intermediate_size: 8,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: Some(1),
        num_local_experts: 16,
        ..MixtralOptions::default()
    };
    for (sharding, ranks, experts) in [
        (Sharding::zero3(), 64, 8),
        (Sharding::zero2(), 64, 4),
        (Sharding::zero1(), 16, 16),
        (Sharding::zero1(), 16, 4),
        (Sharding::hybrid(8), 32, 4),
        (Sharding::zero3().reshard_after_forward(Reshard::To(8)), 64, 8),
    ] {
        let accelerator = fake(ranks).sharding(sharding).expert_parallel(experts).build().unwrap();
        let model = accelerator.parallel().model(|path| MixtralForCausalLm::new(path, &options));
        let model = model.unwrap();
        let optimizer = AdamW::default().build(&model).unwrap();
        let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
        let mut train = || {
            let output = model.forward(&tokens).unwrap();
            accelerator.backward(&output.square().mean(Kind::Float)).unwrap();
            optimizer.step().unwrap();
            optimizer.zero_grad().unwrap();
        };
        for _ in 0..2 {
            sends_what_is_planned(model.sharder().unwrap(), 1, &mut train);
        }
    }
}

/// A line of /proc/self/status, in bytes.
fn status(name: &str) -> u64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(name)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<u64>().unwrap() * 1024
}

/// Alone in its process, whose memory it measures.
#[test]
fn a_model_of_70_billion_parameters_is_planned_for_1024_ranks() {
    let options = LlamaOptions {
        vocab_size: 128_256,
        hidden_size: 8192,
        intermediate_size: 28_672,
        num_hidden_layers: 80,
        num_attention_heads: 64,
        num_key_value_heads: Some(8),
        ..LlamaOptions::default()
    };
    let before = status("VmRSS");
    let model = Model::deferred(|path| LlamaForCausalLm::new(path, &options)).unwrap();
    let parameters = model.sharding_parameters().unwrap();
    let sharding = Sharding::zero3();
    let plan = ShardingPlan::new(&parameters, &sharding, &sharding.mesh(1024).unwrap()).unwrap();
    assert!(plan.messages(1).count() > 200);
    assert!(model.num_parameters() > 70_000_000_000);
    assert_eq!(plan.units().len(), 81);
    let more = status("VmHWM").saturating_sub(before);
    assert!(more < 200 << 20, "{more} bytes");
}
