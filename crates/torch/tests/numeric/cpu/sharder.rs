//! Sharded parameters: the gradients and steps of one process, whatever the ranks, strategies and ways through the model.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread;

use brigade_sharding::{
    Mesh, MixedPrecision, Parameter, Reshard, Sharding, ShardingPlan, Strategy,
};
use brigade_testkit::assert_close;
use brigade_torch::{
    BackwardOptions, Error, GroupOptions, NamedTensor, ProcessGroup, Reducer, ReducerOptions,
    Sharder, ShardingGroups, Store, backward, backward_with, clear_gradient, dtype_of, gradient,
    try_recomputed,
};
use tch::{Device, Kind, Tensor};

use crate::rendezvous::{LIMIT, gloo, values};

const WIDTH: i64 = 6;
const BLOCKS: usize = 4;

/// A unit's part of a forward.
type Part<'a> = &'a mut dyn FnMut() -> Result<Tensor, Error>;
/// What runs the parts of units, given their numbers.
type RunUnit<'a> = &'a dyn Fn(usize, Part<'_>) -> Result<Tensor, Error>;

/// Runs each rank in a thread of its own, and gives back what each returns.
fn on_ranks<R: Send>(ranks: usize, run: impl Fn(ShardingGroups) -> R + Sync) -> Vec<R> {
    let store = Store::hash().unwrap();
    thread::scope(|scope| {
        let (store, run) = (&store, &run);
        let started: Vec<_> = (0..ranks)
            .map(|rank| {
                scope.spawn(move || {
                    let group = |name: &str| {
                        let options = GroupOptions {
                            name: name.into(),
                            timeout: LIMIT,
                            ..GroupOptions::default()
                        };
                        ProcessGroup::new(store, rank, ranks, gloo(), options).unwrap()
                    };
                    run(ShardingGroups {
                        gather: group("gather"),
                        reduce: group("reduce"),
                        replicas: None,
                        parts: None,
                        experts: None,
                    })
                })
            })
            .collect();
        started.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Residual blocks between an embedding that is the head as well: rows that no number of ranks divides, fewer rows
/// than ranks, and a parameter without dimensions.
struct Net {
    /// The root's, then each block's.
    units: Vec<Vec<NamedTensor>>,
}

impl Net {
    fn new(kind: Kind) -> Self {
        let mut seed = 0.0;
        let mut new = |name: String, shape: &[i64]| {
            seed += 1.0;
            let count = shape.iter().product::<i64>();
            let places = Tensor::arange(count, (Kind::Double, Device::Cpu));
            let tensor = ((places * 0.37 + seed).sin() * 0.4).to_kind(kind).reshape(shape);
            NamedTensor { name, tensor: tensor.set_requires_grad(true) }
        };
        let mut units = vec![vec![new("wte".into(), &[7, WIDTH]), new("scale".into(), &[])]];
        for block in 0..BLOCKS {
            let shapes: [(&str, &[i64]); 4] =
                [("up", &[10, WIDTH]), ("bias", &[10]), ("down", &[2, 10]), ("out", &[WIDTH, 2])];
            let unit = shapes.map(|(name, shape)| new(format!("{block}.{name}"), shape));
            units.push(unit.into());
        }
        Self { units }
    }

    fn parameters(&self) -> impl Iterator<Item = &NamedTensor> {
        self.units.iter().flatten()
    }

    fn block(&self, unit: usize, x: &Tensor) -> Result<Tensor, Error> {
        let [up, bias, down, out] = &self.units[unit][..] else { unreachable!() };
        let hidden = x.f_linear(&up.tensor, Some(&bias.tensor))?.tanh();
        let hidden = hidden.f_linear(&down.tensor, None::<&Tensor>)?;
        Ok(x + hidden.f_linear(&out.tensor, None::<&Tensor>)?)
    }

    /// The loss of the tokens, with `run` around each unit.
    fn loss(&self, tokens: &Tensor, run: RunUnit<'_>) -> Result<Tensor, Error> {
        let [wte, scale] = &self.units[0][..] else { unreachable!() };
        run(0, &mut || {
            let mut x = Tensor::embedding(&wte.tensor, tokens, -1, false, false);
            for unit in 1..self.units.len() {
                x = run(unit, &mut || self.block(unit, &x))?;
            }
            let logits = x.f_linear(&wte.tensor, None::<&Tensor>)? * &scale.tensor;
            Ok(logits.cross_entropy_for_logits(&(tokens + 1).remainder(7)))
        })
    }

    fn plain_loss(&self, tokens: &Tensor) -> Tensor {
        self.loss(tokens, &|_, forward| forward()).unwrap()
    }

    fn sharded_loss(&self, sharder: &Sharder, tokens: &Tensor) -> Result<Tensor, Error> {
        self.loss(tokens, &|unit, forward| sharder.run(unit, forward))
    }

    fn values(&self) -> Vec<f64> {
        self.parameters().flat_map(|named| values(&named.tensor)).collect()
    }
}

/// What a rank sees in a step.
fn tokens(rank: usize, step: usize) -> Tensor {
    let places = Tensor::arange(5, (Kind::Int64, Device::Cpu));
    (places * 3 + (2 * rank + step) as i64).remainder(7)
}

fn shard(net: &Net, groups: ShardingGroups, sharding: &Sharding) -> (Sharder, Vec<NamedTensor>) {
    let copies = groups.replicas.as_ref().map_or(1, ProcessGroup::size);
    let mesh = Mesh::builder().replicate(copies).shard(groups.gather.size());
    let mesh = mesh.build(copies * groups.gather.size()).unwrap();
    let mut parameters = Vec::new();
    for (number, unit) in net.units.iter().enumerate() {
        for NamedTensor { name, tensor } in unit {
            let shape: Vec<u64> = tensor.size().iter().map(|size| size.unsigned_abs()).collect();
            let parameter = Parameter::new(name, &shape, dtype_of(tensor.kind()).unwrap());
            let unit = format!("{}", number.saturating_sub(1));
            parameters.push(if number == 0 { parameter } else { parameter.in_unit(unit) });
        }
    }
    let plan = ShardingPlan::new(&parameters, sharding, &mesh).unwrap();
    let tensors: Vec<Tensor> = net.parameters().map(|named| named.tensor.shallow_clone()).collect();
    let (sharder, shards) = Sharder::new(groups, plan, &tensors).unwrap();
    assert_eq!((sharder.unit(""), sharder.unit("1"), sharder.unit("9")), (Some(0), Some(2), None));
    (sharder, shards)
}

/// One step of gradient descent with what gradients there are.
fn descend<'a>(parameters: impl IntoIterator<Item = &'a NamedTensor>) {
    tch::no_grad(|| {
        for NamedTensor { tensor, .. } in parameters {
            let gradient = gradient(tensor).unwrap().expect("all are trained");
            let _ = tensor.shallow_clone().g_sub_(&(gradient * 0.1));
            clear_gradient(tensor).unwrap();
        }
    });
}

const STEPS: usize = 3;

/// The parameters after some steps of one process on the batches of all ranks, each of several batches.
fn by_one_process(ranks: usize, batches: usize, kind: Kind) -> Vec<f64> {
    let net = Net::new(kind);
    for step in 0..STEPS {
        let mut sums: Vec<Tensor> = Vec::new();
        for rank in 0..ranks {
            for batch in 0..batches {
                backward(&net.plain_loss(&tokens(rank, step * batches + batch))).unwrap();
            }
            // The ranks' gradients one after the other, as they are added up over the ranks.
            for (place, parameter) in net.parameters().enumerate() {
                let gradient = gradient(&parameter.tensor).unwrap().unwrap();
                clear_gradient(&parameter.tensor).unwrap();
                match sums.get_mut(place) {
                    Some(sum) => *sum = &*sum + gradient,
                    None => sums.push(gradient),
                }
            }
        }
        tch::no_grad(|| {
            for (parameter, sum) in net.parameters().zip(sums) {
                let _ = parameter.tensor.shallow_clone().g_sub_(&(sum / ranks as f64 * 0.1));
            }
        });
    }
    net.values()
}

#[test]
fn steps_are_those_of_one_process() {
    tch::set_num_threads(1);
    for ranks in 1..=4 {
        for batches in [1, 2] {
            let expected = by_one_process(ranks, batches, Kind::Double);
            for (strategy, reshard, window) in [
                (Strategy::Zero3, Reshard::Yes, false),
                (Strategy::Zero3, Reshard::No, false),
                (Strategy::Zero3, Reshard::Yes, true),
                (Strategy::Zero2, Reshard::Yes, false),
                (Strategy::Zero1, Reshard::Yes, true),
            ] {
                let what = format!(
                    "{ranks} ranks, {batches} batches, {strategy}, {reshard:?}, window {window}"
                );
                let found = on_ranks(ranks, |groups| {
                    let rank = groups.gather.rank();
                    let net = Net::new(Kind::Double);
                    let sharding = Sharding::from(strategy).reshard_after_forward(reshard);
                    let (sharder, shards) = shard(&net, groups, &sharding);
                    for step in 0..STEPS {
                        for batch in 0..batches {
                            sharder
                                .set_sync(!window || batch + 1 == batches, batch + 1 == batches)
                                .unwrap();
                            let tokens = tokens(rank, step * batches + batch);
                            backward(&net.sharded_loss(&sharder, &tokens).unwrap()).unwrap();
                        }
                        descend(&shards);
                        sharder.shards_changed().unwrap();
                    }
                    let meter = sharder.meter().unwrap();
                    if strategy == Strategy::Zero3 {
                        assert_eq!(meter.gathered_bytes, 0, "{what}");
                        let most = if reshard == Reshard::Yes { 3 } else { 1 + BLOCKS as u64 };
                        assert!(meter.peak_whole_units <= most, "{what}: {meter:?}");
                    }
                    sharder.gathered(|| Ok::<_, Error>(net.values())).unwrap()
                });
                for found in found {
                    if batches == 1 || window {
                        // The same additions in the same order: the sum of each rank's batches, rank by rank.
                        assert_eq!(found, expected, "{what}");
                    } else {
                        assert_close(&found, &expected, 0.0, 1e-14);
                    }
                }
            }
        }
    }
}

#[test]
fn every_strategy_has_the_bits_of_a_reducer() {
    tch::set_num_threads(1);
    // Numbers of ranks by which a division is exact: the reducer divides each gradient, the sharder their sum.
    for ranks in [2, 4] {
        let expected = on_ranks(ranks, |groups| {
            let rank = groups.gather.rank();
            let net = Net::new(Kind::Float);
            let named: Vec<(String, Tensor)> = net
                .parameters()
                .map(|named| (named.name.clone(), named.tensor.shallow_clone()))
                .collect();
            let reducer =
                Reducer::new(&groups.reduce, &named, &[], ReducerOptions::default()).unwrap();
            for step in 0..STEPS {
                reducer.before_forward(true).unwrap();
                let loss =
                    reducer.after_forward(net.plain_loss(&tokens(rank, step)), true).unwrap();
                groups.reduce.backward(&loss).unwrap();
                descend(net.parameters());
            }
            net.values()
        });
        for strategy in [Strategy::Zero1, Strategy::Zero2, Strategy::Zero3] {
            let found = on_ranks(ranks, |groups| {
                let rank = groups.gather.rank();
                let net = Net::new(Kind::Float);
                let (sharder, shards) = shard(&net, groups, &Sharding::from(strategy));
                for step in 0..STEPS {
                    let tokens = tokens(rank, step);
                    backward(&net.sharded_loss(&sharder, &tokens).unwrap()).unwrap();
                    descend(&shards);
                    sharder.shards_changed().unwrap();
                }
                sharder.gathered(|| Ok::<_, Error>(net.values())).unwrap()
            });
            assert_eq!(found, expected, "{strategy} on {ranks} ranks");
        }
    }
}

/// Units that are gathered as soon as they were stepped are gathered once, and have the bits of a step of all.
#[test]
fn units_change_one_after_the_other() {
    tch::set_num_threads(1);
    let run = |one_by_one: bool| {
        on_ranks(2, |groups| {
            let rank = groups.gather.rank();
            let net = Net::new(Kind::Float);
            let (sharder, shards) = shard(&net, groups, &Sharding::zero2());
            for step in 0..STEPS {
                backward(&net.sharded_loss(&sharder, &tokens(rank, step)).unwrap()).unwrap();
                let mut shards = shards.iter();
                let before = sharder.meter().unwrap().gathers;
                for (unit, parameters) in net.units.iter().enumerate() {
                    descend(shards.by_ref().take(parameters.len()));
                    if one_by_one {
                        sharder.unit_changed(unit).unwrap();
                        assert_eq!(sharder.meter().unwrap().gathers - before, unit as u64 + 1);
                    }
                }
                if !one_by_one {
                    sharder.shards_changed().unwrap();
                }
                assert_eq!(sharder.meter().unwrap().gathers - before, 1 + BLOCKS as u64);
            }
            sharder.gathered(|| Ok::<_, Error>(net.values())).unwrap()
        })
    };
    assert_eq!(run(true), run(false));
}

/// As after a step that has failed behind the first unit: the same unit is stepped again, or weights are loaded.
#[test]
fn a_unit_that_changes_twice_is_gathered_twice() {
    on_ranks(2, |groups| {
        let net = Net::new(Kind::Float);
        let (sharder, shards) = shard(&net, groups, &Sharding::zero2());
        let first = &shards[..net.units[0].len()];
        let scale = |factor: f64| {
            tch::no_grad(|| {
                for it in first {
                    let _ = it.tensor.shallow_clone().g_mul_scalar_(factor);
                }
            });
        };
        let values = || sharder.gathered(|| Ok::<_, Error>(net.values())).unwrap();
        let before = values();
        scale(2.0);
        sharder.unit_changed(0).unwrap();
        assert_ne!(values(), before);
        scale(2.0);
        sharder.unit_changed(0).unwrap();
        scale(0.25);
        sharder.unit_changed(0).unwrap();
        assert_eq!(values(), before);
        scale(2.0);
        sharder.unit_changed(0).unwrap();
        scale(0.5);
        sharder.shards_changed().unwrap();
        assert_eq!(values(), before);
    });
}

#[test]
fn a_read_outside_of_its_unit_is_an_error_that_names_the_parameter_and_the_unit() {
    on_ranks(2, |groups| {
        let net = Net::new(Kind::Double);
        let (sharder, shards) = shard(&net, groups, &Sharding::zero3());
        let up = &net.units[2][0].tensor;
        assert_eq!((up.size(), up.requires_grad()), (vec![10, WIDTH], true));
        assert_eq!(shards[6].tensor.size(), [5, WIDTH]);
        for error in [
            up.f_sum(Kind::Double).unwrap_err(),
            up.f_add(up).unwrap_err(),
            up.f_to_kind(Kind::Float).unwrap_err(),
        ] {
            let text = error.to_string();
            assert!(text.contains("`1.up`") && text.contains("sharded in unit `1`"), "{text}");
            assert!(text.contains("gathered"), "{text}");
        }
        let sum = sharder.gathered(|| Ok::<_, Error>(up.sum(Kind::Double))).unwrap();
        assert!(sum.double_value(&[]).is_finite());
        let nested = sharder.gathered(|| sharder.gathered(|| Ok::<_, Error>(())));
        assert!(nested.unwrap_err().to_string().contains("`gathered` inside of `gathered`"));
        assert!(up.f_sum(Kind::Double).is_err());
        // A block alone, without the model around it.
        let alone = sharder
            .run(1, || net.block(1, &Tensor::zeros([1, WIDTH], (Kind::Double, Device::Cpu))));
        assert!(alone.unwrap_err().to_string().contains("outside of its prepared model's forward"));
    });
}

#[test]
fn what_is_written_inside_of_a_scope_goes_to_the_shards() {
    on_ranks(3, |groups| {
        let net = Net::new(Kind::Double);
        let (sharder, shards) = shard(&net, groups, &Sharding::zero3());
        let before = values(&shards[0].tensor);
        let failed = sharder.gathered_mut(|| {
            let _ = tch::no_grad(|| net.units[0][0].tensor.shallow_clone().fill_(7.0));
            Err::<(), _>(Error::invalid_argument("no"))
        });
        assert!(failed.is_err());
        assert_eq!(values(&shards[0].tensor), before, "an error leaves the shards alone");
        sharder
            .gathered_mut(|| {
                let _ = tch::no_grad(|| net.units[0][0].tensor.shallow_clone().fill_(7.0));
                Ok::<_, Error>(())
            })
            .unwrap();
        assert!(values(&shards[0].tensor).iter().all(|&value| value == 7.0));
        let whole = sharder.gathered(|| Ok::<_, Error>(values(&net.units[0][0].tensor))).unwrap();
        assert_eq!(whole, [7.0; 7 * WIDTH as usize]);
    });
}

/// The gradients of all ranks' shards after `step`, which a plain network takes as well.
fn same_gradients(
    ranks: usize,
    sharded: impl Fn(usize, &Net, &Sharder) + Sync,
    plain: impl Fn(usize, &Net),
) {
    let found = on_ranks(ranks, |groups| {
        let rank = groups.gather.rank();
        let net = Net::new(Kind::Double);
        let (sharder, shards) = shard(&net, groups, &Sharding::zero3());
        sharded(rank, &net, &sharder);
        assert_eq!(sharder.meter().unwrap().gathered_bytes, 0);
        shards
            .iter()
            .map(|shard| gradient(&shard.tensor).unwrap().map(|gradient| values(&gradient)))
            .collect::<Vec<_>>()
    });
    let net = Net::new(Kind::Double);
    let mut sums: Vec<Option<Tensor>> = net.parameters().map(|_| None).collect();
    for rank in 0..ranks {
        plain(rank, &net);
        for (parameter, sum) in net.parameters().zip(&mut sums) {
            let Some(gradient) = gradient(&parameter.tensor).unwrap() else { continue };
            clear_gradient(&parameter.tensor).unwrap();
            *sum = Some(match sum.take() {
                Some(sum) => sum + gradient,
                None => gradient,
            });
        }
    }
    for (place, (parameter, sum)) in net.parameters().zip(sums).enumerate() {
        let whole: Vec<f64> = if parameter.tensor.dim() == 0 {
            found[0][place].clone().unwrap_or_default()
        } else {
            found.iter().flat_map(|rank| rank[place].clone().unwrap_or_default()).collect()
        };
        let expected = match sum {
            Some(sum) => values(&(sum / ranks as f64)),
            None => vec![
                0.0;
                if parameter.tensor.requires_grad() { parameter.tensor.numel() } else { 0 }
            ],
        };
        assert_eq!(whole.len(), expected.len(), "{}", parameter.name);
        assert_close(&whole, &expected, 0.0, 1e-14);
    }
}

#[test]
fn parameters_that_a_rank_does_not_use_count_as_zeros() {
    // Rank 0 leaves the third block out of its loss, not out of its forward; no rank uses the fourth.
    let run = |rank: usize, net: &Net, forward: RunUnit<'_>| {
        net.loss(&tokens(rank, 0), &|unit, part| {
            let kept = forward(unit, part)?;
            Ok(match unit {
                4 => kept.detach() * 0.0 + 0.5,
                3 if rank == 0 => kept.detach(),
                _ => kept,
            })
        })
    };
    same_gradients(
        2,
        |rank, net, sharder| {
            let loss = run(rank, net, &|unit, part| sharder.run(unit, part)).unwrap();
            backward(&loss).unwrap();
        },
        |rank, net| backward(&run(rank, net, &|_, part| part()).unwrap()).unwrap(),
    );
}

#[test]
fn forwards_and_backwards_come_in_any_order() {
    let two = |rank: usize, net: &Net, loss: &dyn Fn(&Tensor) -> Tensor| {
        let _ = net;
        // Two forwards before a backward of both, and two backwards of one forward.
        let both = loss(&tokens(rank, 0)) + loss(&tokens(rank, 1)) * 2.0;
        backward(&both).unwrap();
        let kept = loss(&tokens(rank, 2));
        let options = BackwardOptions { retain_graph: true, ..BackwardOptions::default() };
        backward_with(&kept, options).unwrap();
        backward(&(kept * 3.0)).unwrap();
        // A forward without a backward.
        let _ = loss(&tokens(rank, 3));
    };
    same_gradients(
        3,
        |rank, net, sharder| {
            two(rank, net, &|tokens| net.sharded_loss(sharder, tokens).unwrap());
            let _ = tch::no_grad(|| net.sharded_loss(sharder, &tokens(rank, 0))).unwrap();
        },
        |rank, net| two(rank, net, &|tokens| net.plain_loss(tokens)),
    );
}

#[test]
fn frozen_parameters_have_no_gradient_and_can_be_trained_later() {
    let freeze = |net: &Net, trained: bool| {
        for named in net.units[2].iter().chain(&net.units[3][1..3]) {
            let _ = named.tensor.set_requires_grad(trained);
        }
    };
    same_gradients(
        2,
        |rank, net, sharder| {
            freeze(net, false);
            sharder.update_trained().unwrap();
            backward(&net.sharded_loss(sharder, &tokens(rank, 0)).unwrap()).unwrap();
            freeze(net, true);
            sharder.update_trained().unwrap();
            backward(&net.sharded_loss(sharder, &tokens(rank, 1)).unwrap()).unwrap();
        },
        |rank, net| {
            freeze(net, false);
            backward(&net.plain_loss(&tokens(rank, 0))).unwrap();
            freeze(net, true);
            backward(&net.plain_loss(&tokens(rank, 1))).unwrap();
        },
    );
}

#[test]
fn errors_and_panics_leave_the_sharder_usable() {
    same_gradients(
        2,
        |rank, net, sharder| {
            let fail = |panics: bool| {
                net.loss(&tokens(rank, 0), &|unit, part| {
                    sharder.run(unit, || {
                        let output = part()?;
                        match (unit, panics) {
                            (3, true) => panic!("in a unit"),
                            (3, false) => Err(Error::invalid_argument("in a unit")),
                            _ => Ok(output),
                        }
                    })
                })
            };
            assert!(fail(false).is_err());
            assert_eq!(sharder.meter().unwrap().gathered_bytes, 0);
            assert!(catch_unwind(AssertUnwindSafe(|| fail(true))).is_err());
            assert_eq!(sharder.meter().unwrap().gathered_bytes, 0);
            // A gradient of a gradient is refused in the backward.
            let loss = net.sharded_loss(sharder, &tokens(rank, 0)).unwrap();
            let options = BackwardOptions { create_graph: true, ..BackwardOptions::default() };
            let refused = backward_with(&loss, options).unwrap_err().to_string();
            assert!(refused.contains("gradients of gradients"), "{refused}");
            sharder.set_sync(false, false).unwrap();
            backward(&net.sharded_loss(sharder, &tokens(rank, 1)).unwrap()).unwrap();
            // Gradients of the window's earlier batch are kept.
            assert!(fail(false).is_err());
            sharder.set_sync(true, true).unwrap();
            backward(&net.sharded_loss(sharder, &tokens(rank, 2)).unwrap()).unwrap();
        },
        |rank, net| {
            for batch in [1, 2] {
                backward(&net.plain_loss(&tokens(rank, batch))).unwrap();
            }
        },
    );
}

#[test]
fn a_recomputed_part_gathers_its_unit_once() {
    same_gradients(
        2,
        |rank, net, sharder| {
            let loss = |tokens: &Tensor| {
                net.loss(tokens, &|unit, part| {
                    sharder.run(unit, || {
                        if unit != 2 {
                            return part();
                        }
                        // Inside of the unit, as peers advise.
                        let parameters: Vec<Tensor> =
                            net.units[2].iter().map(|named| named.tensor.shallow_clone()).collect();
                        let x = part()?.detach();
                        let again = try_recomputed(&[&x], move |inputs| {
                            let hidden =
                                inputs[0].f_linear(&parameters[0], Some(&parameters[1]))?;
                            let hidden = hidden.tanh().f_linear(&parameters[2], None::<&Tensor>)?;
                            hidden.f_linear(&parameters[3], None::<&Tensor>)
                        })?;
                        Ok(x + again?)
                    })
                })
            };
            backward(&loss(&tokens(rank, 0)).unwrap()).unwrap();
            // The root once, each block in the forward, and all but the last in the backward: nothing for recomputed
            // parts.
            assert_eq!(sharder.meter().unwrap().gathers, 2 * BLOCKS as u64);
            for named in net.parameters() {
                assert!(
                    gradient(&named.tensor).unwrap().is_none(),
                    "whole gradients are given back"
                );
            }
        },
        |rank, net| {
            let loss = net.loss(&tokens(rank, 0), &|unit, part| {
                let output = part()?;
                if unit != 2 {
                    return Ok(output);
                }
                let x = output.detach();
                let more = net.block(2, &x)? - &x;
                Ok(&x + more)
            });
            backward(&loss.unwrap()).unwrap();
        },
    );
}

#[test]
fn whole_parameters_and_sums_can_have_types_of_their_own() {
    let found = on_ranks(2, |groups| {
        let rank = groups.gather.rank();
        let net = Net::new(Kind::Float);
        let sharding = Sharding::zero3().mixed(MixedPrecision::bf16());
        let (sharder, shards) = shard(&net, groups, &sharding);
        for batch in 0..2 {
            sharder.set_sync(batch == 1, batch == 1).unwrap();
            let loss = net.sharded_loss(&sharder, &tokens(rank, batch)).unwrap();
            backward(&loss).unwrap();
        }
        shards
            .iter()
            .map(|shard| {
                let gradient = gradient(&shard.tensor).unwrap().unwrap();
                assert_eq!((shard.tensor.kind(), gradient.kind()), (Kind::Float, Kind::Float));
                values(&gradient)
            })
            .collect::<Vec<_>>()
    });
    // One process that casts at the same places, and adds up in float32.
    let net = Net::new(Kind::Float);
    let masters: Vec<Tensor> = net.parameters().map(|named| named.tensor.detach()).collect();
    for (named, master) in net.parameters().zip(&masters) {
        let mut tensor = named.tensor.shallow_clone();
        tensor.set_data(&master.to_kind(Kind::BFloat16));
    }
    let mut sums: Vec<Option<Tensor>> = masters.iter().map(|_| None).collect();
    for rank in 0..2 {
        let mut own: Vec<Option<Tensor>> = masters.iter().map(|_| None).collect();
        for batch in 0..2 {
            backward(&net.plain_loss(&tokens(rank, batch))).unwrap();
            for (named, own) in net.parameters().zip(&mut own) {
                let gradient = gradient(&named.tensor).unwrap().unwrap().to_kind(Kind::Float);
                clear_gradient(&named.tensor).unwrap();
                *own = Some(own.take().map_or_else(|| gradient.copy(), |own| own + &gradient));
            }
        }
        for (sum, own) in sums.iter_mut().zip(own) {
            *sum = Some(match (sum.take(), own.unwrap()) {
                (Some(sum), own) => sum + own,
                (None, own) => own,
            });
        }
    }
    for (place, (master, sum)) in masters.iter().zip(sums).enumerate() {
        let whole: Vec<f64> = if master.dim() == 0 {
            found[0][place].clone()
        } else {
            found.iter().flat_map(|rank| rank[place].clone()).collect()
        };
        assert_eq!(whole, values(&(sum.unwrap() / 2.0)), "parameter {place}");
    }
}

#[test]
fn replicas_of_shards_add_up_their_gradients() {
    let ranks = 4;
    let expected = by_one_process(ranks, 2, Kind::Double);
    let store = Store::hash().unwrap();
    let found: Vec<Vec<f64>> = thread::scope(|scope| {
        let store = &store;
        let started: Vec<_> = (0..ranks)
            .map(|rank| {
                scope.spawn(move || {
                    let group = |name: &str, size: usize, rank: usize| {
                        let options = GroupOptions {
                            name: name.into(),
                            timeout: LIMIT,
                            ..GroupOptions::default()
                        };
                        ProcessGroup::new(store, rank, size, gloo(), options).unwrap()
                    };
                    // Ranks 0 and 1 share a model, and so do 2 and 3.
                    let (shard_rank, replica) = (rank % 2, rank / 2);
                    let groups = ShardingGroups {
                        gather: group(&format!("gather {replica}"), 2, shard_rank),
                        reduce: group(&format!("reduce {replica}"), 2, shard_rank),
                        replicas: Some(group(&format!("replicas {shard_rank}"), 2, replica)),
                        parts: None,
                        experts: None,
                    };
                    let net = Net::new(Kind::Double);
                    let (sharder, shards) = shard(&net, groups, &Sharding::zero3());
                    for step in 0..STEPS {
                        for batch in 0..2 {
                            let tokens = tokens(rank, step * 2 + batch);
                            backward(&net.sharded_loss(&sharder, &tokens).unwrap()).unwrap();
                        }
                        descend(&shards);
                        sharder.shards_changed().unwrap();
                    }
                    sharder.gathered(|| Ok::<_, Error>(net.values())).unwrap()
                })
            })
            .collect();
        started.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for found in found {
        assert_close(&found, &expected, 0.0, 1e-14);
    }
}
