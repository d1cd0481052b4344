//! Transformers with quantised weights.

use brigade_checkpoint::convert::{QuantizeOptions, quantize};
use brigade_models::{
    GenerationOptions, Gpt2LmHead, Gpt2Options, LlamaForCausalLm, LlamaOptions, MixtralForCausalLm,
    MixtralOptions, Transformer,
};
use brigade_nn::{Model, Module, Weights};
use brigade_sharding::device_map::DeviceMap;
use brigade_torch::Result;
use tch::{Kind, Tensor, no_grad};

fn ids() -> Tensor {
    Tensor::from_slice(&[7i64, 1, 4, 9, 3, 8]).view([2, 3])
}

fn gpt2() -> Gpt2Options {
    Gpt2Options { vocab_size: 50, n_embd: 64, n_head: 4, n_layer: 2, ..Default::default() }
}

fn llama() -> LlamaOptions {
    LlamaOptions {
        vocab_size: 50,
        hidden_size: 64,
        intermediate_size: 96,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        ..Default::default()
    }
}

/// Quantises while reading, compares with the float model, and reads again what was written.
fn check<M>(model: &Model<M>, weights: &Weights, layers: usize, allowed: f64)
where
    M: Transformer + for<'i> Module<&'i Tensor, Output = Tensor>,
{
    let folder = tempfile::tempdir().unwrap();
    let (original, written) = (folder.path().join("original"), folder.path().join("written"));
    M::save_pretrained(model, &original).unwrap();
    let mut model = M::from_pretrained(&original).unwrap();
    model.eval();
    let expected = no_grad(|| model.forward(&ids())).unwrap();
    let (quantized, report) =
        M::from_pretrained_quantized(&original, Model::builder(), weights).unwrap();
    assert_eq!(report.layers.len(), layers, "{report}: {:?}", report.layers);
    let found = quantized.forward(&ids()).unwrap();
    let error = (&found - &expected).abs().max().double_value(&[]);
    let scale = expected.abs().max().double_value(&[]);
    assert!(0.0 < error && error < allowed * scale, "{}: {error} of {scale}", M::ARCHITECTURE);
    M::save_quantized(&quantized, &written).unwrap();
    let again = M::from_pretrained(&written).unwrap();
    assert!(again.is_quantized() && !again.is_training());
    assert_eq!(again.forward(&ids()).unwrap(), found);
    let bytes = |folder: &std::path::Path| {
        std::fs::metadata(folder.join("model.safetensors")).unwrap().len()
    };
    assert!(bytes(&written) < bytes(&original));
    // The command line quantises to the same bits.
    let converted = folder.path().join("converted");
    let format = weights.format().unwrap();
    let also = weights.chooses("lm_head").then(|| "lm_head".to_owned()).into_iter().collect();
    let is_calibrated = weights.is_calibrated();
    let options = QuantizeOptions { format, is_calibrated, also, skip: Vec::new() };
    quantize(&original, &converted, &options).unwrap();
    let on_disk = DeviceMap::by_hand([("", "disk")]);
    let on_disk = M::from_pretrained_on(&converted, &on_disk, &Weights::default()).unwrap();
    let converted = M::from_pretrained(&converted).unwrap();
    for parameter in converted.parameters() {
        let name = parameter.name;
        match (converted.quantized_weight(&name), quantized.quantized_weight(&name)) {
            (Some(one), Some(other)) => {
                assert_eq!(one.to_packed().unwrap(), other.to_packed().unwrap(), "{name}");
            }
            (one, other) => assert_eq!(one.is_some(), other.is_some(), "{name}"),
        }
    }
    assert_eq!(converted.forward(&ids()).unwrap(), found);
    assert_eq!(on_disk.forward(&ids()).unwrap(), found);
    let error =
        M::save_pretrained(&quantized, folder.path().join("other")).unwrap_err().to_string();
    assert!(error.contains("`save_quantized` writes it"), "{error}");
}

#[test]
fn gpt2_llama_and_mixtral_are_quantised_and_come_back_to_the_bit() -> Result<()> {
    tch::manual_seed(3);
    let model = Model::new(|path| Gpt2LmHead::new(path, &gpt2()))?;
    check(&model, &Weights::int8(), 8, 0.05);
    check(&model, &Weights::int4(64).calibrated(), 8, 0.5);
    let model = Model::new(|path| LlamaForCausalLm::new(path, &llama()))?;
    check(&model, &Weights::int8().also("lm_head"), 15, 0.05);
    check(&model, &Weights::int4(32), 14, 0.5);
    let options = MixtralOptions {
        vocab_size: 50,
        hidden_size: 64,
        intermediate_size: 96,
        num_hidden_layers: 1,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        num_local_experts: 2,
        ..Default::default()
    };
    let model = Model::new(|path| MixtralForCausalLm::new(path, &options))?;
    // Four projections of attention, and the two stacks of experts.
    check(&model, &Weights::int8(), 6, 0.2);
    check(&model, &Weights::int4(32).calibrated(), 6, 0.8);
    let mut model = model;
    let report = model.quantize(&Weights::int8().skip("*.experts.down_proj"))?;
    assert_eq!(report.layers.len(), 5, "{:?}", report.layers);
    Ok(())
}

#[test]
fn stacked_experts_of_transformers_5_are_converted_to_the_same_bits() -> Result<()> {
    tch::manual_seed(3);
    let options = MixtralOptions {
        vocab_size: 50,
        hidden_size: 64,
        intermediate_size: 96,
        num_hidden_layers: 2,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        num_local_experts: 3,
        ..Default::default()
    };
    let model = Model::new(|path| MixtralForCausalLm::new(path, &options))?;
    let folder = tempfile::tempdir().unwrap();
    let newer = folder.path().join("newer");
    MixtralForCausalLm::save_config(&model, &newer)?;
    model.save_weights(newer.join("model.safetensors"))?;
    let skipped = "*.1.mlp.experts.down_proj";
    for weights in [Weights::int8(), Weights::int4(32).calibrated(), Weights::fp8()] {
        let weights = weights.skip(skipped);
        let format = weights.format().unwrap();
        let converted = folder.path().join(format.to_string().replace(':', "_"));
        let options = QuantizeOptions {
            format,
            is_calibrated: weights.is_calibrated(),
            also: Vec::new(),
            skip: vec![skipped.to_owned()],
        };
        let report = quantize(&newer, &converted, &options).unwrap();
        assert_eq!(report.changed, [format!("11 weights are stored in {format}")]);
        let builder = Model::builder();
        let (expected, of_model) =
            MixtralForCausalLm::from_pretrained_quantized(&newer, builder, &weights)?;
        assert_eq!(of_model.layers.len(), 11);
        let found = MixtralForCausalLm::from_pretrained(&converted)?;
        for parameter in found.parameters() {
            let name = parameter.name;
            let packed = |model: &Model<MixtralForCausalLm>| {
                model.quantized_weight(&name).map(|weight| weight.to_packed().unwrap())
            };
            assert_eq!(packed(&found), packed(&expected), "{name}");
            let is_stack = name.contains(".experts.") && !name.ends_with("1.mlp.experts.down_proj");
            assert!(packed(&found).is_some() || !is_stack, "{name}");
        }
        assert_eq!(found.forward(&ids())?, expected.forward(&ids())?);
    }
    Ok(())
}

#[test]
fn a_quantised_model_in_bf16_generates_and_has_a_loss() -> Result<()> {
    tch::manual_seed(4);
    let mut model = Model::new(|path| LlamaForCausalLm::new(path, &llama()))?;
    model.to_kind(Kind::BFloat16)?;
    let loss = |model: &Model<LlamaForCausalLm>| -> Result<f64> {
        let loss = no_grad(|| model.module().loss(&ids(), &ids(), 0.0))?;
        Ok(loss.sum.double_value(&[]) / loss.count.double_value(&[]))
    };
    let expected = loss(&model)?;
    model.quantize(&Weights::int8().also("lm_head"))?;
    let loss = loss(&model)?;
    assert!((loss - expected).abs() < 0.05 * expected, "{loss} {expected}");
    let options = GenerationOptions { max_new_tokens: 4, ..Default::default() };
    assert_eq!(options.generate(model.module(), &ids(), None)?.size(), [2, 7]);
    Ok(())
}

#[test]
fn a_head_that_is_the_embedding_stays() {
    let mut model = Model::new(|path| Gpt2LmHead::new(path, &gpt2())).unwrap();
    let error = model.quantize(&Weights::int8().also("lm_head")).unwrap_err().to_string();
    assert!(error.contains("`lm_head` matches no linear layer with an untied weight"), "{error}");
}
