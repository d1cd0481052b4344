//! The numbers of PyTorch's `fully_shard` (`tests/golden/make_fsdp2.py`): losses, norms of the gradients and weights.

use brigade_nn::{Model, ParamPath};
use brigade_sharding::{ReduceGradients, Reshard, Sharding};
use brigade_testkit::assert_close;
use brigade_train::{AcceleratorBuilder, ClipNorm};
use serde_json::Value;
use tch::{Kind, Tensor};

use super::{Rule, on_ranks, samples};
use crate::fsdp2_net::Net;
use crate::net::fill;

const STEPS: usize = 4;
const MICRO: usize = 2;

struct Trained {
    losses: Vec<f64>,
    norms: Vec<f64>,
    weights: Vec<(String, Vec<f64>)>,
}

/// What a rank finds.
fn trained(builder: AcceleratorBuilder, rank: usize, rule: Rule, max_norm: f64) -> Trained {
    let accelerator = builder.build().unwrap();
    let new = |path: &ParamPath<'_>| Net::new(path, 3);
    let model = Model::builder().kind(Kind::Double).build(new).unwrap();
    fill(&model);
    let optimizer = rule.build(&model);
    let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let mut sum = 0.0;
        for micro in 0..MICRO {
            let backward = || {
                let (inputs, targets) = samples(rank, step * MICRO + micro);
                let (inputs, targets) =
                    (inputs.to(accelerator.device()), targets.to(accelerator.device()));
                let loss = (model.forward(&inputs)? - targets).square().mean(Kind::Double);
                accelerator.backward(&(&loss / MICRO as f64))?;
                Ok::<_, brigade_torch::Error>(loss.double_value(&[]))
            };
            sum += if micro + 1 < MICRO {
                accelerator.no_sync(&model, backward).unwrap()
            } else {
                backward().unwrap()
            };
        }
        let clip = ClipNorm { max_norm, ..ClipNorm::default() };
        let norm = accelerator.clip_grad_norm(&model, clip).unwrap();
        norms.push(norm.unwrap().double_value(&[]));
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
        losses.push(sum);
    }
    let weights = model.gathered(|model| {
        let values = |tensor: Tensor| Vec::<f64>::try_from(tensor.detach().reshape([-1])).unwrap();
        Ok(model.parameters().into_iter().map(|it| (it.name, values(it.tensor))).collect())
    });
    Trained { losses, norms, weights: weights.unwrap() }
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().unwrap().iter().map(|it| it.as_f64().unwrap()).collect()
}

#[test]
fn losses_norms_and_weights_are_fsdp2s() {
    let golden: Value = serde_json::from_str(include_str!("../../golden/fsdp2.json")).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert_eq!(cases.len(), 8);
    for case in cases {
        let sharding = Sharding::zero3()
            .reshard_after_forward(if case["reshard"] == true { Reshard::Yes } else { Reshard::No })
            .reduce(if case["window"] == true {
                ReduceGradients::Window
            } else {
                ReduceGradients::EachBatch
            });
        let rule = if case["rule"] == "adamw" { Rule::AdamW } else { Rule::Momentum };
        let ranks = case["ranks"].as_u64().unwrap() as usize;
        let max_norm = case["clip"].as_f64().unwrap();
        let all = on_ranks(ranks, |builder, rank| {
            trained(builder.sharding(sharding.clone()), rank, rule, max_norm)
        });
        for (rank, Trained { losses, norms, weights }) in all.into_iter().enumerate() {
            assert_close(&losses, &numbers(&case["losses"][rank]), 1e-12, 1e-14);
            assert_close(&norms, &numbers(&case["norms"]), 1e-12, 1e-14);
            assert_eq!(weights.len(), case["weights"].as_object().unwrap().len());
            for (name, values) in weights {
                assert_close(&values, &numbers(&case["weights"][&name]), 1e-11, 1e-13);
            }
        }
    }
}
