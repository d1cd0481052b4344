//! Plans, their messages, volume, memory and description, against formulas and as properties.

use brigade_checkpoint::Dtype;
use brigade_checkpoint::layout::Placement;
use proptest::prelude::{
    Just, any, prop_assert, prop_assert_eq, prop_assert_ne, prop_oneof, proptest,
};
use proptest::strategy::Strategy as Generator;

use crate::*;

/// Returns an embedding, a head tied to it, and blocks. The rows of all parameters are multiples of `rows`.
fn model(rows: u64, blocks: u64) -> Vec<Parameter> {
    let f32 = |name: String, shape: &[u64]| Parameter::new(name, shape, Dtype::F32);
    let mut parameters = vec![f32("wte.weight".to_owned(), &[rows * 3, 4]).tied("lm_head.weight")];
    for block in 0..blocks {
        let unit = format!("h.{block}");
        parameters.push(f32(format!("{unit}.attn.weight"), &[rows, 5]).in_unit(&unit));
        parameters.push(f32(format!("{unit}.mlp.weight"), &[rows * 2, 3]).in_unit(&unit));
        parameters.push(f32(format!("{unit}.mlp.bias"), &[rows]).in_unit(&unit));
    }
    parameters
}

fn plan(parameters: &[Parameter], sharding: &Sharding, world_size: usize) -> ShardingPlan {
    ShardingPlan::new(parameters, sharding, &sharding.mesh(world_size).unwrap()).unwrap()
}

fn names(plan: &ShardingPlan) -> Vec<&str> {
    plan.units().iter().map(Unit::title).collect()
}

fn fault(parameters: &[Parameter], sharding: &Sharding, world_size: usize) -> String {
    let mesh = sharding.mesh(world_size).unwrap();
    ShardingPlan::new(parameters, sharding, &mesh).unwrap_err().to_string()
}

mod units {
    use super::*;

    #[test]
    fn what_no_block_has_is_the_root_and_runs_first() {
        let mut parameters = model(4, 2);
        parameters.push(Parameter::new("ln_f.weight", &[4], Dtype::F32));
        let plan = plan(&parameters, &Sharding::zero3(), 2);
        assert_eq!(names(&plan), ["the root", "h.0", "h.1"]);
        assert_eq!(plan.units()[0].parameters[1].parameter.name(), "ln_f.weight");
        assert_eq!(plan.units()[0].reshard, Reshard::No);
        assert_eq!(plan.units()[1].reshard, Reshard::Yes);
    }

    #[test]
    fn without_a_root_the_last_unit_stays_whole() {
        let plan = plan(&model(4, 2)[1..], &Sharding::zero3(), 2);
        let reshard: Vec<_> = plan.units().iter().map(|unit| unit.reshard).collect();
        assert_eq!(reshard, [Reshard::Yes, Reshard::No]);
    }

    #[test]
    fn a_model_without_units_is_one_and_the_price_is_told() {
        let parameters = [Parameter::new("weight", &[4, 4], Dtype::F32)];
        let notes = plan(&parameters, &Sharding::zero3(), 2).notes().to_vec();
        assert_eq!(notes, [Note::OneUnit { bytes: 64 }]);
        assert!(notes[0].to_string().contains("all of its 64 bytes"));
        assert!(plan(&parameters, &Sharding::zero1(), 2).notes().is_empty());
    }

    #[test]
    fn a_tie_across_units_makes_one_of_them() {
        let mut parameters = model(4, 3);
        parameters
            .push(Parameter::new("h.0.norm", &[4], Dtype::F32).in_unit("h.0").tied("h.2.norm"));
        let plan = plan(&parameters, &Sharding::zero3(), 2);
        assert_eq!(names(&plan), ["the root", "h.0", "h.1"]);
        assert_eq!(plan.units()[1].modules, ["h.0", "h.2"]);
        assert_eq!(plan.units()[1].parameters.len(), 7);
        assert_eq!(plan.notes().len(), 1);
        assert_eq!(
            plan.notes()[0].to_string(),
            "units h.0 and h.2 are one: they share h.0.norm = h.2.norm"
        );
    }

    #[test]
    fn a_head_that_is_a_unit_joins_the_root_whose_weight_it_has() {
        let mut parameters = model(4, 1);
        parameters.push(Parameter::new("lm_head.bias", &[12], Dtype::F32).in_unit("lm_head"));
        let plan = plan(&parameters, &Sharding::zero3(), 2);
        assert_eq!(names(&plan), ["the root", "h.0"]);
        assert_eq!(plan.units()[0].modules, ["", "lm_head"]);
    }

    #[test]
    fn patterns_make_a_unit_of_each_module() {
        let by = |patterns: &[&str]| {
            let patterns = patterns.iter().map(|pattern| (*pattern).to_owned()).collect();
            Sharding::zero3().units(Units::Matching(patterns))
        };
        let parameters = model(4, 2);
        assert_eq!(names(&plan(&parameters, &by(&["h.*"]), 2)), ["the root", "h.0", "h.1"]);
        let plan_of_modules = plan(&parameters, &by(&["h.?.mlp", "wte", "lm_head"]), 2);
        assert_eq!(names(&plan_of_modules), ["the root", "wte", "h.0.mlp", "h.1.mlp"]);
        assert_eq!(plan_of_modules.units()[1].modules, ["wte", "lm_head"]);
        assert_eq!(
            fault(&parameters, &by(&["layers.*"]), 2),
            "the pattern `layers.*` of units matches nothing; there are wte.weight, lm_head.weight, h.0, h.1"
        );
        assert_eq!(
            fault(&parameters, &by(&["h.*", "h.0.mlp"]), 2),
            "the patterns `h.*` and `h.0.mlp` of units both match h.0.mlp.weight: make one of them narrower"
        );
    }

    #[test]
    fn blocks_are_joined_until_they_are_large_enough() {
        let parameters = model(4, 7); // blocks of 48
        let modules = |elements| {
            let sharding = Sharding::zero3().units(Units::AtLeast(elements));
            let plan = plan(&parameters, &sharding, 2);
            plan.units().iter().map(|unit| unit.modules.len()).collect::<Vec<_>>()
        };
        assert_eq!(modules(1), [1, 1, 1, 1, 1, 1, 1, 1]);
        assert_eq!(modules(49), [1, 2, 2, 3]);
        assert_eq!(modules(97), [1, 3, 4]);
        assert_eq!(modules(1 << 40), [1, 7]);
    }
}

mod bad_input {
    use super::*;

    #[test]
    fn is_named() {
        let zero3 = Sharding::zero3();
        let of = |parameters: &[Parameter]| fault(parameters, &zero3, 2);
        let f32 = |shape: &[u64]| Parameter::new("a", shape, Dtype::F32);
        assert_eq!(of(&[]), "there are no parameters to shard");
        assert_eq!(of(&[f32(&[2]), f32(&[3])]), "two parameters have the name a");
        assert_eq!(of(&[f32(&[2]).tied("a")]), "two parameters have the name a");
        let nameless = Parameter { names: Vec::new(), ..f32(&[2]) };
        assert_eq!(of(&[nameless]), "a parameter of shape [2] has no name");
        let integer = Parameter::new("a", &[2], Dtype::I64);
        assert!(of(std::slice::from_ref(&integer)).contains("is trained and of type I64"));
        plan(&[integer.frozen()], &zero3, 2);
        let mixed = MixedPrecision { reduce: Some(Dtype::I8), ..MixedPrecision::default() };
        let integers = fault(&[f32(&[2])], &zero3.clone().mixed(mixed), 2);
        assert_eq!(integers, "the type of reductions is I8: it must be F64, F32, F16 or BF16");
        for shape in [&[u64::MAX][..], &[1, u64::MAX, 2], &[1 << 40, 1 << 40], &[u64::MAX, 2]] {
            assert!(of(&[f32(shape)]).contains("more elements than can be counted"), "{shape:?}");
        }
    }

    #[test]
    fn numbers_of_ranks_have_to_divide() {
        let to = |size| Sharding::zero3().reshard_after_forward(Reshard::To(size));
        for size in [0, 1, 3, 8, 16] {
            assert!(fault(&model(8, 1), &to(size), 8).contains("divides the 8 ranks"), "{size}");
        }
        plan(&model(8, 1), &to(4), 8);
        let mesh = Mesh::builder().shard(8).build(8).unwrap();
        let fault = ShardingPlan::new(&model(8, 1), &Sharding::hybrid(4), &mesh).unwrap_err();
        assert_eq!(
            fault.to_string(),
            "hybrid=4 needs a mesh with dp_shard 4, and this one is dp_shard 8"
        );
    }
}

mod traffic {
    use super::*;

    /// Returns the number of elements of the root, which is not freed after the forward pass, and of the blocks.
    fn sizes(plan: &ShardingPlan) -> (u64, u64) {
        let root = plan.units()[0].elements();
        (root, plan.units()[1..].iter().map(Unit::elements).sum())
    }

    fn last(plan: &ShardingPlan) -> u64 {
        plan.units().last().map_or(0, Unit::elements)
    }

    /// Compares with the table of the reference, in elements that a rank sends.
    #[test]
    fn is_that_of_the_table() {
        for world in [2, 3, 4, 7, 8, 64, 1000, 1024] {
            let parameters = model(world, 3);
            for batches in [1, 2, 5] {
                let sent = |sharding: Sharding| {
                    let plan = plan(&parameters, &sharding, world as usize);
                    let sum: u64 =
                        plan.messages(batches).map(|message| message.sent_elements()).sum();
                    assert_eq!(plan.volume(batches).elements(), sum);
                    let (root, blocks) = sizes(&plan);
                    (sum, root, blocks, last(&plan))
                };
                let once = |elements: u64| elements / world * (world - 1);
                let check = |sharding: &Sharding, times_root: u64, times_blocks: u64| {
                    let (sum, root, blocks, last) = sent(sharding.clone());
                    let mut expected = times_root * once(root) + times_blocks * once(blocks);
                    let is_freed = !sharding.strategy.keeps_parameters_whole()
                        && sharding.reshard_after_forward == Reshard::Yes;
                    if is_freed {
                        // The backward pass begins with the last block, which is still whole.
                        expected -= batches * once(last);
                    }
                    assert_eq!(sum, expected, "{sharding:?}, {world} ranks, {batches} batches");
                };
                check(&Sharding::zero1(), 2, 2);
                check(&Sharding::zero2(), batches + 1, batches + 1);
                check(&Sharding::zero2().reduce(ReduceGradients::Window), 2, 2);
                check(&Sharding::zero3(), 2 * batches, 3 * batches);
                let window = Sharding::zero3().reduce(ReduceGradients::Window);
                check(&window, batches + 1, 2 * batches + 1);
                let kept = Sharding::zero3().reshard_after_forward(Reshard::No);
                check(&kept, 2 * batches, 2 * batches);
                check(&kept.reduce(ReduceGradients::Window), batches + 1, batches + 1);
                let elements = parameters.iter().map(|it| it.shape.iter().product::<u64>()).sum();
                assert_eq!(Volume::replicated(elements, 4, world).elements(), 2 * once(elements));
            }
        }
    }

    #[test]
    fn of_hybrid_crosses_groups_once_in_a_window() {
        for (ranks, replicas) in [(2, 2), (4, 2), (8, 128)] {
            let plan = plan(
                &model(ranks * replicas, 3),
                &Sharding::hybrid(ranks as usize),
                (ranks * replicas) as usize,
            );
            let (root, blocks) = sizes(&plan);
            let volume = plan.volume(3);
            let inside = |elements: u64| elements / ranks * (ranks - 1);
            let again = inside(blocks) - inside(last(&plan));
            assert_eq!(volume.gathered.elements, 3 * (inside(root) + inside(blocks) + again));
            assert_eq!(volume.scattered.elements, 3 * inside(root + blocks));
            let part = (root + blocks) / ranks;
            assert_eq!(volume.reduced.elements, 2 * part / replicas * (replicas - 1));
        }
    }

    #[test]
    fn of_a_part_stays_within_it() {
        let sharding = Sharding::zero3().reshard_after_forward(Reshard::To(4));
        let plan = plan(&model(64, 3), &sharding, 64);
        let (root, blocks) = sizes(&plan);
        let gathered = plan.volume(1).gathered.elements;
        assert_eq!(gathered, (root + blocks) / 64 * 63 + (blocks - last(&plan)) / 4 * 3);
        let within = plan.messages(1).find(|message| message.peers == Peers::Part(4)).unwrap();
        assert_eq!((within.phase, within.unit, within.ranks), (Phase::Backward, 2, 4));
    }

    #[test]
    fn bytes_are_those_of_the_types_on_the_way() {
        let sharding = Sharding::zero3().mixed(MixedPrecision::bf16());
        let volume = plan(&model(8, 3), &sharding, 8).volume(1);
        assert_eq!(volume.gathered.bytes, 2 * volume.gathered.elements);
        assert_eq!(volume.scattered.bytes, 4 * volume.scattered.elements);
        assert!((volume.seconds(1e3) - volume.bytes() as f64 / 1e3).abs() < 1e-12);
    }

    #[test]
    fn gathers_start_ahead_of_reductions() {
        let plan = plan(&model(4, 3), &Sharding::zero3(), 2);
        let order: Vec<_> = plan
            .messages(1)
            .map(|message| (message.phase, message.operation, message.unit))
            .collect();
        use Operation::{AllGather, ReduceScatter};
        use Phase::{Backward, Forward};
        assert_eq!(
            order,
            [
                (Forward, AllGather, 0),
                (Forward, AllGather, 1),
                (Forward, AllGather, 2),
                (Forward, AllGather, 3),
                (Backward, AllGather, 2),
                (Backward, ReduceScatter, 3),
                (Backward, AllGather, 1),
                (Backward, ReduceScatter, 2),
                (Backward, ReduceScatter, 1),
                (Backward, ReduceScatter, 0),
            ]
        );
    }

    #[test]
    fn frozen_parameters_are_gathered_and_not_reduced() {
        let frozen = |unit: &str| {
            let parameters = model(4, 3).into_iter();
            let parameters =
                parameters.map(|it| if it.names[0].starts_with(unit) { it.frozen() } else { it });
            plan(&parameters.collect::<Vec<_>>(), &Sharding::zero3(), 2)
        };
        let reduced = |plan: &ShardingPlan| {
            let scatters = plan.messages(1).filter(|it| it.operation == Operation::ReduceScatter);
            scatters.map(|message| message.unit).collect::<Vec<_>>()
        };
        let middle = frozen("h.1");
        assert_eq!(reduced(&middle), [3, 1, 0]);
        assert_eq!(middle.messages(1).filter(|message| message.unit == 2).count(), 2);
        assert_eq!(reduced(&frozen("")), [0; 0]);
        let zero1 = Sharding::zero1();
        let parameters: Vec<_> = model(4, 1).into_iter().map(Parameter::frozen).collect();
        assert_eq!(plan(&parameters, &zero1, 2).messages(3).count(), 0);
    }

    #[test]
    fn scalars_are_whole_and_reduced_once() {
        let parameters = [
            Parameter::new("weight", &[4], Dtype::F32),
            Parameter::new("temperature", &[], Dtype::F32),
        ];
        let plan = plan(&parameters, &Sharding::hybrid(2), 4);
        let scalar: Vec<_> = plan.messages(2).filter(|message| message.elements == 1).collect();
        assert_eq!(scalar.len(), 1);
        assert_eq!(scalar[0].peers, Peers::Axis(Axis::DataContext));
        let temperature = &plan.units()[0].parameters[1];
        assert_eq!(plan.region(temperature, 3).unwrap(), brigade_checkpoint::Region::whole(&[]));
        assert_eq!(plan.placements(temperature), [Placement::Replicate; 2]);
        let weight = &plan.units()[0].parameters[0];
        assert_eq!(plan.placements(weight), [Placement::Replicate, Placement::Shard(0)]);
        assert_eq!(plan.region(weight, 3).unwrap().offset, [2]);
        assert_eq!(plan.divisor(), 4);
    }

    #[test]
    fn placements_are_shards_along_all_axes_of_a_copy() {
        let parameters = [Parameter::new("weight", &[16], Dtype::F32)];
        let mesh = Mesh::builder().replicate(2).shard(2).context(2).sequence(2).build(16).unwrap();
        let plan = ShardingPlan::new(&parameters, &Sharding::zero3(), &mesh).unwrap();
        let weight = &plan.units()[0].parameters[0];
        let axes = mesh.axes();
        let divided: usize = axes
            .iter()
            .zip(plan.placements(weight))
            .filter(|(_, placement)| *placement == Placement::Shard(0))
            .map(|(axis, _)| axis.size)
            .product();
        assert_eq!((divided, plan.shard_ranks()), (8, 8));
        assert_eq!(plan.state_placements(weight), plan.placements(weight));
    }

    #[test]
    fn experts_are_sharded_over_the_ranks_with_the_same() {
        let experts = Parameter::new("experts.down", &[4, 8], Dtype::F32).of_experts();
        let parameters = [Parameter::new("gate", &[16, 8], Dtype::F32), experts];
        let mesh = |expert| Mesh::builder().shard(8).expert(expert).build(8).unwrap();
        let zero3 = Sharding::zero3();
        let plan = |expert| ShardingPlan::new(&parameters, &zero3, &mesh(expert)).unwrap();
        let sent = |expert| -> Vec<(Operation, Peers, u64, u64)> {
            let plan = plan(expert);
            let messages = plan.messages(1);
            messages.map(|it| (it.operation, it.peers, it.ranks, it.elements)).collect()
        };
        let (shared, same) = (Peers::Axis(Axis::ShardContext), Peers::Axis(Axis::ExpertShard));
        assert_eq!(
            sent(2),
            [
                (Operation::AllGather, shared, 8, 128),
                (Operation::AllGather, same, 4, 32),
                (Operation::ReduceScatter, shared, 8, 128),
                (Operation::ReduceScatter, same, 4, 32),
            ]
        );
        // Experts that no other rank has are in no message.
        assert!(sent(8).iter().all(|(_, peers, ..)| *peers == shared), "{:?}", sent(8));
        assert_eq!((plan(2).divisor(), plan(2).expert_divisor()), (8, 4));
        let memory = plan(2).memory(Workload { states: 2, ..Workload::default() });
        assert_eq!(memory.parameters, 4 * (16 + 8));
        assert_eq!(memory.optimizer, 2 * 4 * (16 + 8));
        assert_eq!(plan(2).units()[0].storage_bytes(), 4 * (16 * 8 + 32));
        // The experts have memory of their own, and no place in the storage.
        assert_eq!(plan(8).units()[0].storage_bytes(), 4 * 16 * 8);
        let memory = plan(8).memory(Workload { states: 2, ..Workload::default() });
        assert_eq!(memory.parameters, 4 * (16 + 32));
        assert_eq!(memory.optimizer, 2 * 4 * (16 + 32));
        let offload = Sharding::zero3().offload(Offload::Cpu { pin: false });
        let plan = ShardingPlan::new(&parameters, &offload, &mesh(8)).unwrap();
        assert_eq!(plan.units()[0].storage_bytes(), 4 * (16 * 8 + 32));
    }

    #[test]
    fn ranks_that_do_not_divide_the_experts_have_rows_of_each() {
        let experts = |count| Parameter::new("up", &[count, 10, 3], Dtype::F32).of_experts();
        let mesh = Mesh::builder().replicate(2).shard(8).expert(2).build(16).unwrap();
        let plan =
            |count| ShardingPlan::new(&[experts(count)], &Sharding::hybrid(8), &mesh).unwrap();
        for (count, dim, chunk) in [(8, 0, 2), (4, 0, 1), (2, 1, 3), (6, 1, 3)] {
            let plan = plan(count);
            let slot = plan.units()[0].parameters[0].slot;
            assert_eq!((slot.dim, slot.chunk(), slot.ranks), (dim, chunk, 4), "{count}");
            // Ranks 0 and 1 have different experts, ranks 0 and 2 other rows of the same.
            let region = |rank| plan.region(&plan.units()[0].parameters[0], rank).unwrap();
            assert_eq!(region(0), region(1));
            assert_eq!(region(0), region(8), "a replica");
            let covered: u64 = [0, 2, 4, 6].map(|rank| region(rank).elements()).iter().sum();
            assert_eq!(covered, count * 10 * 3);
            assert_eq!(region(2).offset[dim], chunk);
        }
        let plan = plan(4);
        let replicas = plan.messages(1).last().unwrap();
        assert_eq!(replicas.peers, Peers::Axis(Axis::Replicate));
        assert_eq!((replicas.operation, replicas.elements), (Operation::AllReduce, 30));
    }

    #[test]
    fn one_rank_sends_nothing() {
        for sharding in [Sharding::zero1(), Sharding::zero2(), Sharding::zero3()] {
            assert_eq!(plan(&model(4, 3), &sharding, 1).messages(2).count(), 0);
        }
    }
}

mod memory {
    use super::*;

    const ADAM: Workload = Workload { states: 2, buffers: 0, activations: 0, logits: 0 };

    /// Compares with the formulas of the reference, between steps and during a batch.
    #[test]
    fn is_that_of_the_formulas() {
        let world = 8;
        let parameters = model(64, 3); // no bytes lost to alignment
        let n: u64 = parameters.iter().map(|it| it.shape.iter().product::<u64>()).sum();
        let of = |sharding: Sharding| plan(&parameters, &sharding, world as usize).memory(ADAM);
        let rest = |memory: Memory| memory.parameters + memory.gradients + memory.optimizer;

        let replicated = Memory::replicated(&parameters, MixedPrecision::default(), ADAM);
        assert_eq!(replicated.total(), 16 * n);
        let autocast = Memory::replicated(&parameters, MixedPrecision::bf16(), ADAM);
        assert_eq!(autocast.total(), 18 * n);
        assert_eq!(rest(of(Sharding::zero1())), 8 * n + 8 * n / world);
        assert_eq!(rest(of(Sharding::zero2())), 4 * n + 12 * n / world);
        assert_eq!(rest(of(Sharding::zero3())), 16 * n / world);
        let window = Sharding::zero3().reduce(ReduceGradients::Window);
        assert_eq!(rest(of(window)), 16 * n / world + 4 * n);
        assert_eq!(of(Sharding::zero1()).gathered, 0);
        let mixed = of(Sharding::zero1().mixed(MixedPrecision::bf16()));
        assert_eq!(rest(mixed), (2 + 4) * n + 12 * n / world);
    }

    #[test]
    fn two_units_and_the_root_are_whole() {
        let plan_of = |sharding: Sharding| plan(&model(64, 3), &sharding, 4);
        let blocks = plan(&model(64, 3)[1..], &Sharding::zero3(), 4);
        let plan = plan_of(Sharding::zero3());
        let [root, block] = [&plan.units()[0], &plan.units()[1]].map(Unit::storage_bytes);
        assert_eq!(plan.memory(ADAM).gathered, root + 2 * block);
        assert_eq!(blocks.memory(ADAM).gathered, 2 * block);
        let kept = plan_of(Sharding::zero3().reshard_after_forward(Reshard::No)).memory(ADAM);
        assert_eq!(kept.gathered, root + 3 * block);
        let part = plan_of(Sharding::zero3().reshard_after_forward(Reshard::To(2))).memory(ADAM);
        assert_eq!(part.gathered, root + 2 * block / 2 + 2 * block);
    }

    #[test]
    fn a_backward_has_the_gradients_of_two_units_and_of_the_root() {
        let reduce = |sharding: &Sharding, world: usize, parameters: &[Parameter]| {
            plan(parameters, sharding, world).memory(ADAM).reduce
        };
        // The root and each block have 768 elements, whose rows 4 ranks divide.
        let n = 768;
        let all = model(64, 3);
        let (zero2, zero3) = (Sharding::zero2(), Sharding::zero3());
        for sharding in [&zero2, &zero3] {
            // What is computed, what is summed with this rank's rows of the sum, and the root.
            assert_eq!(reduce(sharding, 4, &all), 4 * (n + (n + n / 4) + n));
            assert_eq!(reduce(sharding, 4, &all[1..]), 4 * (n + (n + n / 4)));
            // One unit at a time: nothing is computed while it is summed.
            assert_eq!(reduce(sharding, 4, &all[..1]), 4 * (n + n / 4));
            // A single rank's rows are those of the sum.
            assert_eq!(reduce(sharding, 1, &all), 4 * 3 * n);
            // Rows that 5 ranks do not divide are copied with padding: 65 and 130 for 64 and 128.
            let (padded, rows) = (65 * 5 + 130 * 3 + 65, 13 * 5 + 26 * 3 + 13);
            assert_eq!(reduce(sharding, 5, &all[1..]), 4 * (n + padded + rows));
        }
        let mixed = zero3.clone().mixed(MixedPrecision::bf16());
        assert_eq!(reduce(&mixed, 4, &all), 2 * n + 4 * (n + n / 4) + 2 * n);
        // Gradients of a window are kept: what is made of them is their rows, and in 16 bits the last batch's.
        let window = zero3.clone().reduce(ReduceGradients::Window);
        assert_eq!(reduce(&window, 4, &all), 4 * n / 4);
        let mixed = window.mixed(MixedPrecision::bf16());
        assert_eq!(reduce(&mixed, 4, &all), 2 * n + 4 * n / 4 + 2 * n);
        // The rows of a third block are on their way to the host's memory.
        let offload = zero3.offload(Offload::Cpu { pin: true });
        assert_eq!(reduce(&offload, 4, &all), 4 * (n + (n + n / 4) + n + n / 4));
        // Rows that wait for the replicas: of all units in the device's memory, if the gradients are not there.
        let hybrid = Sharding::hybrid(4);
        let at_once = 4 * (n + (n + n / 4) + n);
        assert_eq!(reduce(&hybrid, 8, &all), at_once);
        let offload = hybrid.offload(Offload::Cpu { pin: true });
        assert_eq!(reduce(&offload, 8, &all), at_once + 4 * 4 * n / 4);
    }

    #[test]
    fn offload_leaves_what_a_batch_needs() {
        let offload = Sharding::zero3().offload(Offload::Cpu { pin: true });
        let (on_device, offloaded) =
            (plan(&model(8, 3), &Sharding::zero3(), 4), plan(&model(8, 3), &offload, 4));
        let (on_device, offloaded) = (on_device.memory(ADAM), offloaded.memory(ADAM));
        // The rows of a block's gradients, on their way.
        let leaving = 4 * 96 / 4;
        assert_eq!(offloaded.total() + offloaded.offloaded, on_device.total() + leaving);
        assert_eq!(offloaded.total(), on_device.gathered + on_device.reduce + leaving);
    }
}

mod description {
    use super::*;

    #[test]
    fn the_first_parameter_that_differs_is_named() {
        let here = plan(&model(4, 3), &Sharding::zero3(), 2);
        let there = |change: &dyn Fn(&mut Vec<Parameter>)| {
            let mut parameters = model(4, 3);
            change(&mut parameters);
            plan(&parameters, &Sharding::zero3(), 2).description()
        };
        type Change<'a> = &'a dyn Fn(&mut Vec<Parameter>);
        let changes: [(&str, Change<'_>); 4] = [
            ("`h.1.mlp.bias`: [4] F32, trained", &|them| them[6].trained = false),
            ("`h.0.attn.weight`: [4, 5] F32", &|them| them[1].dtype = Dtype::F64),
            ("`h.0.mlp.weight`", &|them| them.swap(2, 3)),
            ("`h.2.mlp.bias`", &|them| drop(them.pop())),
        ];
        for (expected, change) in changes {
            let difference = here.difference(&there(change)).unwrap();
            assert!(difference.here.as_ref().unwrap().starts_with(expected), "{difference}");
        }
        assert_eq!(here.difference(&there(&|_| {})), None);
    }

    #[test]
    fn a_name_cannot_forge_a_line() {
        let forged = [Parameter::new("a`: [1] F32\n`b", &[1], Dtype::F32)];
        let description = plan(&forged, &Sharding::zero1(), 1).description();
        assert_eq!(description.lines().count(), 4, "{description}");
    }
}

fn shardings() -> impl Generator<Value = Sharding> {
    let strategies = prop_oneof![
        Just(Sharding::zero1()),
        Just(Sharding::zero2()),
        Just(Sharding::zero3()),
        Just(Sharding::hybrid(2)),
    ];
    let reshard = prop_oneof![Just(Reshard::Yes), Just(Reshard::No)];
    let mixed = prop_oneof![Just(MixedPrecision::default()), Just(MixedPrecision::bf16())];
    let units = prop_oneof![Just(Units::Blocks), (1u64..200).prop_map(Units::AtLeast)];
    let reduce = prop_oneof![Just(ReduceGradients::EachBatch), Just(ReduceGradients::Window)];
    let offload =
        prop_oneof![Just(Offload::None), any::<bool>().prop_map(|pin| Offload::Cpu { pin })];
    (strategies, reshard, mixed, units, reduce, offload).prop_map(
        |(sharding, reshard, mixed, units, reduce, offload)| {
            let sharding = sharding.reshard_after_forward(reshard).mixed(mixed).units(units);
            sharding.reduce(reduce).offload(offload)
        },
    )
}

fn parameters() -> impl Generator<Value = Vec<Parameter>> {
    let dtype = prop_oneof![Just(Dtype::F32), Just(Dtype::BF16), Just(Dtype::F64)];
    let one = (proptest::collection::vec(0u64..9, 0..4), dtype, any::<bool>(), 0usize..4);
    proptest::collection::vec(one, 1..12).prop_map(|them| {
        let named =
            them.into_iter().enumerate().map(|(number, (shape, dtype, trained, unit))| Parameter {
                names: vec![format!("p.{number}")],
                shape,
                dtype,
                trained,
                unit: unit.checked_sub(1).map(|unit| format!("u.{unit}")),
                keeps_dtype: number % 3 == 1,
                is_expert: false,
            });
        named.collect()
    })
}

proptest! {
    #[test]
    fn ranks_cover_each_parameter_once(
        parameters in parameters(), sharding in shardings(), replicas in 1usize..4,
    ) {
        let plan = plan(&parameters, &sharding, 2 * replicas);
        let mut seen: Vec<_> = plan.parameters().map(|parameter| parameter.index).collect();
        seen.sort_unstable();
        prop_assert_eq!(seen, (0..parameters.len()).collect::<Vec<_>>());
        for parameter in plan.parameters().filter(|parameter| !parameter.slot.is_whole) {
            for group in plan.mesh().groups(Axis::ShardContext) {
                let mut next = 0;
                for (place, rank) in group.into_iter().enumerate() {
                    let region = plan.region(parameter, rank).unwrap();
                    let rows = parameter.slot.rows_of(place as u64);
                    prop_assert_eq!(region.offset[0], rows.start);
                    prop_assert_eq!(region.shape[0], rows.end - rows.start);
                    prop_assert_eq!(region.elements(), parameter.slot.elements_of(place as u64));
                    prop_assert_eq!(rows.start, next);
                    prop_assert!(rows.end - rows.start <= parameter.slot.chunk());
                    next = rows.end;
                }
                prop_assert_eq!(next, parameter.slot.rows);
            }
        }
    }

    #[test]
    fn regions_are_aligned_and_apart(parameters in parameters(), sharding in shardings()) {
        for unit in plan(&parameters, &sharding, 4).units() {
            let mut end = 0;
            for parameter in &unit.parameters {
                let slot = parameter.slot;
                prop_assert!(slot.offset >= end && slot.offset.is_multiple_of(ALIGNMENT));
                prop_assert_eq!(slot.element_bytes, parameter.compute_dtype.bytes());
                end = slot.offset + slot.bytes();
            }
            prop_assert_eq!(unit.storage_bytes(), end);
        }
    }

    #[test]
    fn a_change_of_any_field_changes_the_fingerprint(
        parameters in parameters(), sharding in shardings(), which in any::<proptest::sample::Index>(),
    ) {
        let of = |parameters: &[Parameter], sharding: &Sharding| plan(parameters, sharding, 4).fingerprint();
        let before = of(&parameters, &sharding);
        prop_assert_eq!(before, of(&parameters, &sharding));
        let changed = |change: &dyn Fn(&mut Parameter)| {
            let mut changed = parameters.clone();
            change(&mut changed[which.index(parameters.len())]);
            of(&changed, &sharding)
        };
        prop_assert_ne!(before, changed(&|it| it.names[0].push('x')));
        prop_assert_ne!(before, changed(&|it| it.names.push("tied".to_owned())));
        prop_assert_ne!(before, changed(&|it| it.shape.push(2)));
        prop_assert_ne!(before, changed(&|it| it.trained = !it.trained));
        prop_assert_ne!(before, changed(&|it| it.dtype = Dtype::F16));
        prop_assert_ne!(before, changed(&|it| it.unit = Some("other".to_owned())));
        let others = [
            Sharding { strategy: Strategy::Hybrid(4), ..sharding.clone() },
            sharding.clone().reshard_after_forward(Reshard::To(2)).reduce(ReduceGradients::Window),
            sharding.clone().mixed(MixedPrecision::fp16()),
            sharding.clone().units(Units::AtLeast(1000)),
        ];
        for other in others.iter().filter(|other| other.mesh(4).is_ok() && other.strategy != Strategy::Hybrid(2)) {
            prop_assert_ne!(before, of(&parameters, other));
        }
        let eight = plan(&parameters, &sharding, 8).fingerprint();
        prop_assert_ne!(before, eight);
    }

    #[test]
    fn each_axis_divides_the_ranks(sizes in proptest::array::uniform6(1usize..4), expert in 1usize..5) {
        let world = sizes.iter().product();
        let [pipeline, replicate, shard, context, sequence, tensor] = sizes;
        let mesh = Mesh::builder().pipeline(pipeline).replicate(replicate).shard(shard).context(context);
        let mesh = mesh.sequence(sequence).tensor(tensor);
        let inner = shard * context * sequence * tensor;
        let mesh = mesh.expert(if inner.is_multiple_of(expert) { expert } else { 1 }).build(world).unwrap();
        for axis in Axis::ALL {
            let groups = mesh.groups(axis);
            let mut ranks: Vec<_> = groups.iter().flatten().copied().collect();
            ranks.sort_unstable();
            prop_assert_eq!(ranks, (0..world).collect::<Vec<_>>());
            for group in groups {
                prop_assert_eq!(group.len(), mesh.size(axis));
                for (place, rank) in group.iter().enumerate() {
                    prop_assert_eq!(mesh.coordinate(*rank, axis).unwrap(), place);
                    prop_assert_eq!(&mesh.group(*rank, axis).unwrap(), &group);
                }
            }
        }
        let mut made: Vec<_> = mesh.process_groups().into_iter().map(|group| group.ranks).collect();
        let groups = made.len();
        made.sort_unstable();
        made.dedup();
        prop_assert_eq!(made.len(), groups);
    }
}
