//! Architectures with a device map: outputs, generated tokens and memory are those that the map promises.

use std::fs;

use brigade_models::{
    BertForMaskedLm, BertForSequenceClassification, BertOptions, CacheKind, CausalModel,
    GenerationOptions, Gpt2LmHead, Gpt2Options, KeyValueCache, LlamaForCausalLm, LlamaOptions,
    MixtralForCausalLm, MixtralOptions, ResNetOptions, Tokens, Transformer, TransformerOptions,
    UNet, UNetOptions, convnext_tiny, resnet18,
};
use brigade_nn::{Model, Module, ParamPath, Weights};
use brigade_sharding::device_map::{DeviceMap, Place};
use brigade_test_device::fake;
use tch::{Device, Kind, Tensor};

const MAPS: [&[(&str, &str)]; 3] =
    [&[("", "cpu")], &[("", "disk")], &[("", "disk"), ("BODY.LAYERS.1", "cpu")]];

/// A map with the names of an architecture.
fn named(map: &[(&str, &str)], layers: &str) -> DeviceMap {
    let names: Vec<(String, &str)> =
        map.iter().map(|(name, place)| (name.replace("BODY.LAYERS", layers), *place)).collect();
    DeviceMap::by_hand(names.iter().map(|(name, place)| (name.as_str(), *place)))
}

fn ids(batch: i64, length: i64) -> Tensor {
    Tensor::arange(batch * length, (Kind::Int64, Device::Cpu)).remainder(17).view([batch, length])
}

/// Compares logits and generated tokens on each map with those of the model in memory.
fn check_causal<M>(whole: Model<M>, layers: &str)
where
    M: Transformer + CausalModel + for<'t> Module<&'t Tensor, Output = Tensor>,
{
    let mut whole = whole;
    let folder = tempfile::tempdir().unwrap();
    M::save_pretrained(&whole, folder.path()).unwrap();
    whole.eval();
    let mut maps: Vec<DeviceMap> = MAPS.iter().map(|map| named(map, layers)).collect();
    // In a process of its own a test has GPUs made of host memory.
    if fake::install(2).is_ok() {
        let first = format!("{layers}.0");
        maps.push(DeviceMap::by_hand([("", "cuda:0"), (layers, "cpu"), (first.as_str(), "disk")]));
    }
    for (place, map) in maps.iter().enumerate() {
        let model = M::from_pretrained_on(folder.path(), map, &Weights::default()).unwrap();
        assert!(!model.is_training());
        for ids in [ids(2, 5), ids(1, 1), ids(2, 5)] {
            let expected = tch::no_grad(|| whole.forward(&ids)).unwrap();
            let output = tch::no_grad(|| model.forward(&ids)).unwrap();
            // On simulated GPUs, only attention uses other kernels.
            let tolerance = if output.device() == Device::Cpu { 0.0 } else { 1e-5 };
            let difference = output.to_device(Device::Cpu).f_sub(&expected).unwrap().abs().max();
            assert!(difference.double_value(&[]) <= tolerance, "map {place}: {difference:?}");
        }
        let greedy = GenerationOptions { max_new_tokens: 6, ..Default::default() };
        let sampled = GenerationOptions { do_sample: true, seed: Some(3), ..greedy.clone() };
        for options in [greedy, sampled] {
            let mask = Tensor::from_slice(&[1i64, 1, 1, 0, 1, 1]).view([2, 3]);
            let expected = options.generate(&whole, &ids(2, 3), Some(&mask)).unwrap();
            let written = options.generate(&model, &ids(2, 3), Some(&mask)).unwrap();
            assert_eq!(written, expected, "map {place}");
        }
    }
}

#[test]
fn gpt2_writes_the_same_tokens_on_any_map() {
    let options = Gpt2Options {
        vocab_size: 20,
        n_positions: 16,
        n_embd: 16,
        n_layer: 3,
        n_head: 2,
        ..Default::default()
    };
    check_causal(Model::new(|path| Gpt2LmHead::new(path, &options)).unwrap(), "transformer.h");
}

#[test]
fn llama_writes_the_same_tokens_on_any_map() {
    let options = LlamaOptions {
        vocab_size: 20,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        ..Default::default()
    };
    check_causal(Model::new(|path| LlamaForCausalLm::new(path, &options)).unwrap(), "model.layers");
}

#[test]
fn mixtral_writes_the_same_tokens_on_any_map() {
    let options = MixtralOptions {
        vocab_size: 20,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 3,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        num_local_experts: 3,
        ..Default::default()
    };
    check_causal(
        Model::new(|path| MixtralForCausalLm::new(path, &options)).unwrap(),
        "model.layers",
    );
}

#[test]
fn bert_gives_the_same_logits_on_any_map() {
    for tie_word_embeddings in [true, false] {
        let options = BertOptions {
            vocab_size: 20,
            hidden_size: 16,
            intermediate_size: 24,
            num_hidden_layers: 3,
            num_attention_heads: 2,
            tie_word_embeddings,
            ..Default::default()
        };
        let mut whole = Model::new(|path| BertForMaskedLm::new(path, &options)).unwrap();
        let folder = tempfile::tempdir().unwrap();
        BertForMaskedLm::save_pretrained(&whole, folder.path()).unwrap();
        whole.eval();
        for map in MAPS {
            let map = named(map, "bert.encoder.layer");
            let model =
                BertForMaskedLm::from_pretrained_on(folder.path(), &map, &Weights::default())
                    .unwrap();
            let ids = ids(2, 5);
            let output = model.forward(Tokens::from(&ids)).unwrap();
            assert_eq!(output, whole.forward(Tokens::from(&ids)).unwrap());
        }
    }
}

#[test]
fn a_model_on_a_map_is_loaded_with_the_report_of_load_pretrained() {
    let options = BertOptions {
        vocab_size: 20,
        hidden_size: 16,
        intermediate_size: 24,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        ..Default::default()
    };
    let folder = tempfile::tempdir().unwrap();
    let saved = Model::new(|path| BertForMaskedLm::new(path, &options)).unwrap();
    BertForMaskedLm::save_pretrained(&saved, folder.path()).unwrap();
    type Classifier = BertForSequenceClassification;
    let mut whole = Model::new(|path| Classifier::new(path, &options)).unwrap();
    let expected = Classifier::load_pretrained(&mut whole, folder.path()).unwrap();
    assert!(!expected.head.is_empty() && !expected.unused.is_empty(), "{expected:?}");
    for map in [
        DeviceMap::by_hand([("", "cpu")]),
        DeviceMap::by_hand([("", "cpu"), ("bert.encoder", "disk")]),
    ] {
        let (model, report) =
            Classifier::load_pretrained_on(folder.path(), &map, &Weights::default()).unwrap();
        assert_eq!(report, expected);
        assert_eq!(model.forward(Tokens::from(&ids(2, 5))).unwrap().size(), [2, 2]);
    }
    // The head has initial values, which are in no file.
    let map = DeviceMap::by_hand([("", "disk")]);
    let error = Classifier::load_pretrained_on(folder.path(), &map, &Weights::default());
    let error = error.unwrap_err().to_string();
    assert!(expected.head.iter().any(|name| error.contains(&format!("`{name}`"))), "{error}");
    assert!(error.contains("its values are in no file"), "{error}");
}

#[test]
fn the_cache_of_a_generation_is_reserved_in_the_map() {
    let options = LlamaOptions {
        vocab_size: 20,
        hidden_size: 64,
        intermediate_size: 64,
        num_hidden_layers: 6,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        ..Default::default()
    };
    let mut whole = Model::new(|path| LlamaForCausalLm::new(path, &options)).unwrap();
    let folder = tempfile::tempdir().unwrap();
    LlamaForCausalLm::save_pretrained(&whole, folder.path()).unwrap();
    whole.eval();
    let bytes: usize = whole.parameters().iter().map(|it| it.tensor.numel() * 4).sum();
    let inference = options.inference(3, 40, Kind::Float).unwrap();
    // Keys and values of 2 heads of 16 numbers.
    assert_eq!(inference.cache_of_layer(), 2 * 2 * 16 * 4 * 3 * 40);
    let map = DeviceMap::auto().max_memory([("cpu".to_owned(), (bytes + 40_000).to_string())]);
    let load = |map: &DeviceMap| {
        LlamaForCausalLm::from_pretrained_on(folder.path(), map, &Weights::default()).unwrap()
    };
    let on_disk = |model: &Model<LlamaForCausalLm>| {
        let layers = model.device_map().unwrap().layers().iter();
        layers.filter(|it| it.place == Place::Disk).count()
    };
    let (all, kept) = (load(&map), load(&map.clone().reserve(inference.reserve())));
    assert_eq!(on_disk(&all), 0);
    assert!(on_disk(&kept) > 0, "{}", kept.device_map().unwrap());
    let placement = kept.device_map().unwrap();
    assert!(placement.reserved(Place::Cpu) >= inference.cache() + inference.logits());
    let greedy = GenerationOptions { max_new_tokens: 8, ..Default::default() };
    let expected = greedy.generate(&whole, &ids(3, 5), None).unwrap();
    assert_eq!(greedy.generate(&kept, &ids(3, 5), None).unwrap(), expected);
}

/// Writes a Llama to a folder.
fn llama_in(folder: &std::path::Path, layers: usize) {
    let options = LlamaOptions {
        vocab_size: 20,
        hidden_size: 64,
        intermediate_size: 64,
        num_hidden_layers: layers,
        num_attention_heads: 4,
        num_key_value_heads: Some(2),
        ..Default::default()
    };
    let model = Model::new(|path| LlamaForCausalLm::new(path, &options)).unwrap();
    LlamaForCausalLm::save_pretrained(&model, folder).unwrap();
}

/// Loads it with one layer on the GPU, two on the disk and the others in the host's memory.
fn offloaded_llama(folder: &std::path::Path, caches_too: bool) -> Model<LlamaForCausalLm> {
    let map = DeviceMap::by_hand([
        ("", "cuda:0"),
        ("model.layers", "cpu"),
        ("model.layers.1", "cuda:0"),
        ("model.layers.2", "disk"),
        ("model.layers.3", "disk"),
    ]);
    let map = map.offload_caches(caches_too);
    LlamaForCausalLm::from_pretrained_on(folder, &map, &Weights::default()).unwrap()
}

#[test]
fn a_cache_that_is_offloaded_with_its_weights_has_the_same_numbers() {
    if fake::install(1).is_err() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    llama_in(folder.path(), 4);
    let models = [false, true].map(|offloads| offloaded_llama(folder.path(), offloads));
    let logits = |model: &Model<LlamaForCausalLm>, mut cache: KeyValueCache| {
        let mut steps = Vec::new();
        let ids = ids(3, 9).to_device(Device::Cuda(0));
        for (at, count) in [(0, 5), (5, 1), (6, 1), (7, 2)] {
            let ids = ids.narrow(1, at, count);
            let step = || model.run(|model| model.forward_cached((&ids).into(), &mut cache));
            steps.push(tch::no_grad(step).unwrap());
            // Texts change their order, as in a beam search.
            let rows = Tensor::from_slice(&[2i64, 0, 1]).to_device(Device::Cuda(0));
            cache.select_rows(&rows).unwrap();
        }
        Tensor::cat(&steps, 1).to_device(Device::Cpu)
    };
    // With room for all tokens, and with memory that grows.
    for (kind, room) in [(CacheKind::Computed, 1), (CacheKind::Bf16, 9), (CacheKind::Int8, 1)] {
        let [expected, found] =
            models.each_ref().map(|model| logits(model, KeyValueCache::with_room(room).kind(kind)));
        assert_eq!(found, expected, "{kind:?}, room {room}");
    }
    let options = GenerationOptions {
        num_beams: 3,
        num_return_sequences: 2,
        max_new_tokens: 4,
        cache_kind: CacheKind::Int8,
        ..Default::default()
    };
    let mask = Tensor::from_slice(&[1i64, 1, 1, 0, 1, 1]).view([2, 3]);
    let [expected, found] =
        models.each_ref().map(|model| options.generate(model, &ids(2, 3), Some(&mask)).unwrap());
    assert_eq!(found, expected);
}

/// Alone in its process, whose device it measures.
#[test]
fn an_offloaded_cache_takes_the_memory_of_two_units_on_a_gpu() {
    if fake::install(1).is_err() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    llama_in(folder.path(), 8);
    const ROOM: i64 = 2048;
    // Keys and values of 2 heads of 16 numbers, for four texts.
    let cache_of_unit = 2 * 2 * 16 * 4 * 4 * ROOM as u64;
    let run = |offloads: bool| {
        let before = fake::memory(0).unwrap().allocated;
        let model = offloaded_llama(folder.path(), offloads);
        let weights = fake::memory(0).unwrap().allocated - before;
        let mut cache = KeyValueCache::with_room(ROOM);
        for count in [7, 1, 1] {
            let ids = ids(4, count).to_device(Device::Cuda(0));
            let step = || model.run(|model| model.forward_cached((&ids).into(), &mut cache));
            let _ = tch::no_grad(step).unwrap();
        }
        fake::memory(0).unwrap().peak - before - weights
    };
    // The cache of the unit on the GPU, two more, and activations of 28 tokens.
    let bound = 3 * cache_of_unit + (1 << 19);
    let offloaded = run(true);
    assert!(offloaded < bound, "{offloaded} bytes with caches of {cache_of_unit}");
    let on_gpu = run(false);
    assert!(on_gpu > 8 * cache_of_unit, "{on_gpu} bytes with caches of {cache_of_unit}");
}

/// Compares outputs on a map that has all on the disk, and on one that has all on a GPU with blocks in the host's memory.
fn check_images<M>(name: &str, new: impl Fn(&ParamPath<'_>) -> M)
where
    M: for<'t> Module<&'t Tensor, Output = Tensor>,
{
    tch::manual_seed(5);
    let mut whole = Model::new(&new).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    whole.save_weights(&path).unwrap();
    whole.eval();
    let images = Tensor::rand([2, 3, 64, 64], (Kind::Float, Device::Cpu));
    let expected = tch::no_grad(|| whole.forward(&images)).unwrap();
    let mut maps = vec![vec![("", "disk")]];
    if fake::install(2).is_ok() {
        maps.push(vec![("", "cpu"), (whole.layers()[0].as_str(), "cuda:1")]);
    }
    for map in maps {
        let model = Model::deferred(&new).unwrap();
        let mut model = model.dispatch(&path, &DeviceMap::by_hand(map.clone())).unwrap();
        model.eval();
        for _ in 0..2 {
            let output = tch::no_grad(|| model.forward(&images)).unwrap();
            assert_eq!(output.to_device(Device::Cpu), expected, "{name}, {map:?}");
        }
    }
}

#[test]
fn image_models_give_the_same_outputs_on_any_map() {
    check_images("resnet18", resnet18(5));
    check_images("convnext_tiny", convnext_tiny(5));
    check_images("unet", |path| {
        UNet::new(path, ResNetOptions::basic([2, 2, 2, 2]), UNetOptions::new(4))
    });
}

const MIB: usize = 1 << 20;

/// A size in bytes, of those in /proc/self/status.
fn status(key: &str) -> usize {
    let status = fs::read_to_string("/proc/self/status").unwrap();
    let line = status.lines().find(|line| line.starts_with(key)).unwrap();
    line.split_whitespace().nth(1).unwrap().parse::<usize>().unwrap() * 1024
}

/// Alone in its process, whose memory it measures.
#[test]
fn a_model_on_the_disk_takes_the_memory_of_two_units() {
    let options = LlamaOptions {
        vocab_size: 2000,
        hidden_size: 512,
        intermediate_size: 2048,
        num_hidden_layers: 12,
        num_attention_heads: 8,
        tie_word_embeddings: true,
        ..Default::default()
    };
    let folder = tempfile::tempdir().unwrap();
    let (bytes, block) = {
        let whole = Model::new(|path| LlamaForCausalLm::new(path, &options)).unwrap();
        LlamaForCausalLm::save_pretrained(&whole, folder.path()).unwrap();
        let of = |name: &str| {
            let under = whole.parameters_under(name).unwrap();
            under.iter().map(|it| it.tensor.numel() * 4).sum::<usize>()
        };
        (of(""), of("model.layers.0"))
    };
    assert!(bytes > 11 * block && block > 15 * MIB);
    let ids = ids(1, 8);
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let (before, libraries) = (status("VmRSS"), status("RssFile"));
    let model = LlamaForCausalLm::from_pretrained_on(
        folder.path(),
        &named(MAPS[1], ""),
        &Weights::default(),
    )
    .unwrap();
    let options = GenerationOptions { max_new_tokens: 3, ..Default::default() };
    let _ = options.generate(&model, &ids, None).unwrap();
    // Pages of libraries that are read for the first time depend on the processor's kernels.
    let touched = status("RssFile").saturating_sub(libraries);
    let more = status("VmHWM").saturating_sub(before + touched);
    // Two places, and what activations and the reader take.
    assert!(more < 2 * block + 24 * MIB, "{more} bytes for units of {block}");
}
