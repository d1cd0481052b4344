//! The numbers of PyTorch where ranks divide a model (`tests/golden/make_parallel.py`): `parallelize_module` with
//! `loss_parallel`, and `torch.distributed.pipelining`. Losses and norms of five steps, and the weights after them.

use brigade_models::{Gpt2LmHead, Gpt2Options, Labelled, LlamaForCausalLm, TokenLoss};
use brigade_nn::{Model, Module, ParamPath, TensorParallelPlan};
use brigade_optim::AdamW;
use brigade_sharding::pipeline::Schedule;
use brigade_testkit::assert_close;
use brigade_train::{AcceleratorBuilder, ClipNorm, PipelineOptions};
use serde_json::Value;
use tch::{Device, Kind, Tensor};

use crate::net::fill;
use crate::sharding::on_ranks;
use crate::tensor_parallel::{gpt2, llama};

const STEPS: i64 = 5;

/// Two texts of six tokens.
fn batch(step: i64) -> Tensor {
    let places = Tensor::arange_start(step * 12, (step + 1) * 12, (Kind::Int64, Device::Cpu));
    (&places * 7 + places.floor_divide_scalar(12) * 3).remainder(23).view([2, 6])
}

/// What a rank finds: losses, norms, and on rank 0 the digests of whole weights.
type Found = (Vec<f64>, Vec<f64>, Vec<(String, f64)>);

fn train<M>(builder: AcceleratorBuilder, new: impl Fn(&ParamPath<'_>) -> M) -> Found
where
    M: for<'a> Module<Labelled<'a>, Output = TokenLoss> + TensorParallelPlan,
{
    let whole = Model::builder().kind(Kind::Double).build(&new).unwrap();
    fill(&whole);
    let accelerator = builder.build().unwrap();
    let options = accelerator.parallel().model_builder(M::tensor_plan()).kind(Kind::Double);
    let mut model = options.build(&new).unwrap();
    model.load_state_dict(&whole.state_dict()).unwrap();
    let optimizer = AdamW::default().lr(0.01).eps(1e-3).build(&model).unwrap();
    let (model, mut optimizer) = accelerator.prepare((model, optimizer)).unwrap();
    let (mut losses, mut norms) = (Vec::new(), Vec::new());
    for step in 0..STEPS {
        let loss = accelerator.forward_backward(&model, &batch(step), |model, ids| {
            model.forward(Labelled::new(ids, ids))?.mean()
        });
        losses.push(loss.unwrap().value());
        let clip = ClipNorm { max_norm: 0.5, ..ClipNorm::default() };
        let norm = accelerator.clip_grad_norm(&model, clip).unwrap();
        norms.push(norm.unwrap().double_value(&[]));
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
    }
    let digest = |(name, weight): (&str, &Tensor)| {
        let values = weight.detach().reshape([-1]);
        let places = Tensor::arange(values.numel() as i64, (Kind::Double, Device::Cpu));
        (name.to_owned(), (values * places.cos()).sum(Kind::Double).double_value(&[]))
    };
    let state = model.full_state_dict().unwrap();
    (losses, norms, state.iter().flat_map(|state| state.iter().map(digest)).collect())
}

fn check(case: &str, found: Vec<Found>) {
    let golden: Value = serde_json::from_str(include_str!("../golden/parallel.json")).unwrap();
    let golden = &golden[case];
    let numbers = |key: &str| -> Vec<f64> {
        golden[key].as_array().unwrap().iter().map(|it| it.as_f64().unwrap()).collect()
    };
    assert_eq!(found[0].2.len(), golden["weights"].as_object().unwrap().len());
    for (losses, norms, weights) in found {
        assert_close(&losses, &numbers("losses"), 1e-12, 1e-14);
        assert_close(&norms, &numbers("norms"), 1e-11, 1e-13);
        for (name, digest) in weights {
            let expected = golden["weights"][&name].as_f64().unwrap();
            assert!((digest - expected).abs() < 1e-11, "{case} {name}: {digest}, not {expected}");
        }
    }
}

#[test]
fn divided_layers_and_vocabulary_are_those_of_parallelize_module() {
    let found = on_ranks(2, |builder, _| {
        train(builder.sharding(None).tensor_parallel(2), |path| {
            LlamaForCausalLm::new(path, &llama())
        })
    });
    check("tensor", found);
}

#[test]
fn pipelines_are_those_of_pipelining() {
    let untied = Gpt2Options { tie_word_embeddings: false, ..gpt2() };
    for (case, schedule) in [("gpipe", Schedule::GPipe), ("1f1b", Schedule::OneForwardOneBackward)]
    {
        let found = on_ranks(2, |builder, _| {
            let options = PipelineOptions::new(2).schedule(schedule);
            let builder = builder.sharding(None).pipeline_parallel(2).pipeline_options(options);
            train(builder, |path| Gpt2LmHead::new(path, &untied))
        });
        check(case, found);
    }
}
