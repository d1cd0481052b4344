//! Models that are split over ranks unit by unit have the gradients of whole models.

use std::thread;
use std::time::Duration;

use brigade_models::{
    BertForSequenceClassification, BertOptions, ConvNeXt, ConvNeXtOptions, Gpt2LmHead, Gpt2Options,
    LlamaForCausalLm, LlamaOptions, Mixtral, MixtralForCausalLm, MixtralOptions, ResNet,
    ResNetOptions, UNet, UNetOptions, VisionTransformer, VisionTransformerOptions, XResNet,
    XResNetOptions,
};
use brigade_nn::{Model, Module, ParamPath, load_balancing_loss};
use brigade_sharding::{Sharding, ShardingPlan};
use brigade_testkit::assert_close;
use brigade_torch::{
    Backend, GlooDevice, GroupOptions, ProcessGroup, Result, ShardingGroups, Store, backward,
    gradient,
};
use tch::{Device, Kind, Tensor};

const RANKS: usize = 2;

/// A rank's tokens `[2, 5]`.
fn tokens(rank: usize) -> Tensor {
    let places = Tensor::arange(10, (Kind::Int64, Device::Cpu));
    (places * 7 + rank as i64).remainder(31).view([2, 5])
}

/// A rank's images `[2, 3, 32, 32]`.
fn images(rank: usize) -> Tensor {
    let places = Tensor::arange(2 * 3 * 32 * 32, (Kind::Double, Device::Cpu));
    (places * 0.37 + rank as f64).sin().view([2, 3, 32, 32])
}

fn values(tensor: &Tensor) -> Vec<f64> {
    Vec::try_from(tensor.flatten(0, -1)).unwrap()
}

/// Compares the gradients of a model on two ranks with the mean of two whole models' gradients. `units` are the expected
/// names.
fn same_gradients<M>(
    units: &[&str],
    input: impl Fn(usize) -> Tensor + Sync,
    build: impl Fn(&ParamPath<'_>) -> M,
) where
    M: for<'t> Module<&'t Tensor, Output = Tensor> + Send,
{
    let new = || {
        tch::manual_seed(5);
        Model::builder().kind(Kind::Double).build(&build).unwrap()
    };
    let whole = new();
    for rank in 0..RANKS {
        let output = whole.forward(&input(rank)).unwrap();
        backward(&loss(&output)).unwrap();
    }
    let expected: Vec<Vec<f64>> = whole
        .parameters()
        .iter()
        .map(|named| values(&(gradient(&named.tensor).unwrap().unwrap() / RANKS as f64)))
        .collect();

    let store = Store::hash().unwrap();
    let models: Vec<Model<M>> = (0..RANKS).map(|_| new()).collect();
    let found: Vec<Vec<Vec<f64>>> = thread::scope(|scope| {
        let (store, input) = (&store, &input);
        let started: Vec<_> = models
            .into_iter()
            .enumerate()
            .map(|(rank, mut model)| {
                scope.spawn(move || {
                    let group = |name: &str| {
                        let options = GroupOptions {
                            name: name.into(),
                            timeout: Duration::from_secs(120),
                            ..GroupOptions::default()
                        };
                        let gloo = Backend::Gloo(GlooDevice::Address("127.0.0.1".into()));
                        ProcessGroup::new(store, rank, RANKS, gloo, options).unwrap()
                    };
                    let groups = ShardingGroups {
                        gather: group("gather"),
                        reduce: group("reduce"),
                        replicas: None,
                        parts: None,
                        experts: None,
                    };
                    let sharding = Sharding::zero3();
                    let parameters = model.sharding_parameters().unwrap();
                    let mesh = sharding.mesh(RANKS).unwrap();
                    let plan = ShardingPlan::new(&parameters, &sharding, &mesh).unwrap();
                    let names: Vec<&str> = plan.units().iter().map(|unit| &*unit.name).collect();
                    assert_eq!(names, units);
                    let (sharder, shards) = model.shard(groups, plan).unwrap();
                    // Twice: the second time the order of the units is known, and they are gathered ahead.
                    for _ in 0..2 {
                        let input = input(rank);
                        let loss =
                            sharder.run_root(|| -> Result<_> { Ok(loss(&model.forward(&input)?)) });
                        backward(&loss.unwrap()).unwrap();
                    }
                    assert_eq!(sharder.meter().unwrap().gathered_bytes, 0);
                    shards
                        .iter()
                        .map(|shard| values(&(gradient(&shard.tensor).unwrap().unwrap() / 2.0)))
                        .collect()
                })
            })
            .collect();
        started.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    for (place, expected) in expected.iter().enumerate() {
        let joined: Vec<f64> = found.iter().flat_map(|rank| rank[place].clone()).collect();
        assert_close(&joined, expected, 1e-12, 1e-14);
    }
}

/// A number that each output counts in differently.
fn loss(output: &Tensor) -> Tensor {
    let places = Tensor::arange(output.numel() as i64, (Kind::Double, Device::Cpu));
    (output * (places * 0.1).sin().view_as(output)).sum(Kind::Double)
}

#[test]
fn language_models() {
    for recompute in [false, true] {
        let options = Gpt2Options {
            vocab_size: 31,
            n_embd: 12,
            n_head: 2,
            n_layer: 3,
            n_positions: 8,
            embd_pdrop: 0.0,
            attn_pdrop: 0.0,
            resid_pdrop: 0.0,
            recompute,
            ..Gpt2Options::default()
        };
        let blocks = ["", "transformer.h.0", "transformer.h.1", "transformer.h.2"];
        same_gradients(&blocks, tokens, |path| Gpt2LmHead::new(path, &options));
    }
    let options = LlamaOptions {
        vocab_size: 31,
        hidden_size: 12,
        intermediate_size: 20,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        max_position_embeddings: 8,
        ..LlamaOptions::default()
    };
    let layers = ["", "model.layers.0", "model.layers.1"];
    same_gradients(&layers, tokens, |path| LlamaForCausalLm::new(path, &options));
    let options = BertOptions {
        vocab_size: 31,
        hidden_size: 12,
        intermediate_size: 20,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        max_position_embeddings: 8,
        hidden_dropout_prob: 0.0,
        attention_probs_dropout_prob: 0.0,
        ..BertOptions::default()
    };
    let layers = ["", "bert.encoder.layer.0", "bert.encoder.layer.1"];
    same_gradients(&layers, tokens, |path| BertForSequenceClassification::new(path, &options));
}

/// Mixtral's hidden numbers with the loss of its routers.
struct Balanced(Mixtral);

impl Module<&Tensor> for Balanced {
    type Output = Tensor;

    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let (hidden, routers) = self.0.forward_routed(ids)?;
        let routers: Vec<&Tensor> = routers.iter().collect();
        Ok(hidden.f_add(&load_balancing_loss(&routers, 2, None)?)?)
    }
}

#[test]
fn experts_with_and_without_the_loss_of_routers() {
    for recompute in [false, true] {
        let options = MixtralOptions {
            vocab_size: 31,
            hidden_size: 12,
            intermediate_size: 10,
            num_hidden_layers: 2,
            num_attention_heads: 2,
            num_key_value_heads: None,
            num_local_experts: 5,
            recompute,
            ..MixtralOptions::default()
        };
        let layers = ["", "model.layers.0", "model.layers.1"];
        same_gradients(&layers, tokens, |path| MixtralForCausalLm::new(path, &options));
        let layers = ["", "layers.0", "layers.1"];
        same_gradients(&layers, tokens, |path| Balanced(Mixtral::new(path, &options)));
    }
}

#[test]
fn image_classifiers() {
    let vit = VisionTransformerOptions {
        image_size: 32,
        patch_size: 16,
        depth: 2,
        ..VisionTransformerOptions::new(12, 2)
    };
    same_gradients(&["", "blocks.0", "blocks.1"], images, |path| {
        VisionTransformer::new(path, 5, vit)
    });
    let convnext = ConvNeXtOptions {
        channels: [4, 8, 8, 12],
        blocks: [1, 1, 2, 1],
        stochastic_depth: 0.0,
        ..ConvNeXtOptions::tiny()
    };
    let blocks =
        ["", "features.1.0", "features.3.0", "features.5.0", "features.5.1", "features.7.0"];
    same_gradients(&blocks, images, |path| ConvNeXt::new(path, 5, convnext));
}

#[test]
fn residual_networks() {
    let options = ResNetOptions::basic([1, 1, 1, 1]);
    let blocks = ["", "layer1.0", "layer2.0", "layer3.0", "layer4.0"];
    same_gradients(&blocks, images, |path| ResNet::new(path, 5, options));
    let options = XResNetOptions::basic([1, 1]);
    same_gradients(&["", "4.0", "5.0"], images, |path| XResNet::new(path, 5, &options));
}

#[test]
fn a_decoder_beside_an_encoder() {
    let encoder = ResNetOptions::basic([1, 1, 1, 1]);
    let blocks = ["", "layers.0.4.0", "layers.0.5.0", "layers.0.6.0", "layers.0.7.0"];
    let decoder = ["layers.4", "layers.5", "layers.6", "layers.7"];
    same_gradients(&[&blocks[..], &decoder].concat(), images, |path| {
        UNet::new(path, encoder, UNetOptions::new(3))
    });
}
