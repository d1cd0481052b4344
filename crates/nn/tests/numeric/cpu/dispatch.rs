//! Models whose weights a device map has on the disk: outputs, errors and memory.

use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom, Write};
use std::path::Path;

use brigade_checkpoint::safetensors::Header;
use brigade_checkpoint::{OpenWeights, WeightsFile, WeightsReader};
use brigade_nn::{
    Embedding, Init, LayerNorm, Linear, Model, Module, ParamPath, Relu, Sequential, Unit, Weights,
};
use brigade_sharding::device_map::{DeviceMap, Place};
use brigade_test_device::fake;
use brigade_torch::{ErrorKind, Result, Trainable, has_memory};
use tch::{Kind, Tensor};

const CPU: (Kind, tch::Device) = (Kind::Float, tch::Device::Cpu);
const WIDTH: i64 = 48;
const VOCABULARY: i64 = 31;
const BLOCKS: usize = 4;

struct Block {
    unit: Unit,
    scale: Tensor,
    layers: Sequential,
}

impl Block {
    fn new(path: &ParamPath<'_>) -> Self {
        Self {
            unit: path.unit(),
            scale: path.parameter("scale", &[WIDTH], Init::Normal { mean: 1.0, std: 0.1 }),
            layers: Sequential::new()
                .add(LayerNorm::new(path / "norm", &[WIDTH]))
                .add(Linear::new(path / "up", WIDTH, 2 * WIDTH))
                .add(Relu)
                .add(Linear::new(path / "down", 2 * WIDTH, WIDTH)),
        }
    }
}

impl Module<&Tensor> for Block {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        self.unit.run_on(input, |input| {
            Ok(input.f_add(&self.layers.forward(input)?.f_mul(&self.scale)?)?)
        })
    }
}

/// Tokens to logits, with the embedding's weight as that of the head, and a parameter that belongs to no layer.
struct Words {
    embedding: Embedding,
    blocks: Vec<Block>,
    norm: LayerNorm,
    head: brigade_nn::LayerWeights,
    bias: Tensor,
}

impl Words {
    fn new(path: &ParamPath<'_>) -> Self {
        let embedding = Embedding::new(path / "embedding", VOCABULARY, WIDTH);
        let blocks = (0..BLOCKS).map(|index| Block::new(&(path / "blocks" / index))).collect();
        let norm = LayerNorm::new(path / "norm", &[WIDTH]);
        let head = path / "head";
        let _ = head.tie("weight", embedding.weight());
        let bias = path.parameter("bias", &[VOCABULARY], Init::Normal { mean: 0.0, std: 1.0 });
        Self { embedding, blocks, norm, head: head.layer_weights(), bias }
    }
}

impl Module<&Tensor> for Words {
    type Output = Tensor;

    fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        let mut hidden = self.embedding.forward(ids)?;
        for block in &self.blocks {
            hidden = block.forward(&hidden)?;
        }
        let hidden = self.norm.forward(&hidden)?;
        self.head.run(&hidden, |hidden| {
            Ok(hidden.f_matmul(&self.embedding.weight().f_tr()?)?.f_add(&self.bias)?)
        })
    }
}

fn saved(folder: &Path) -> (Model<Words>, std::path::PathBuf) {
    let whole = Model::new(Words::new).unwrap();
    let path = folder.join("model.safetensors");
    whole.save_weights(&path).unwrap();
    (whole, path)
}

fn ids(batch: i64, length: i64) -> Tensor {
    Tensor::arange(batch * length, (Kind::Int64, tch::Device::Cpu))
        .remainder(VOCABULARY)
        .view([batch, length])
}

fn dispatched<const N: usize>(path: &Path, map: [(&str, &str); N]) -> Model<Words> {
    let model = Model::deferred(Words::new).unwrap();
    model.dispatch(path, &DeviceMap::by_hand(map)).unwrap()
}

#[test]
fn outputs_have_the_bits_of_the_model_in_memory_on_any_map() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, path) = saved(folder.path());
    let maps = [
        vec![("", "cpu")],
        vec![("", "disk")],
        vec![("", "cpu"), ("blocks", "disk")],
        vec![("", "cpu"), ("blocks.1", "disk"), ("blocks.3", "disk")],
        vec![("", "cpu"), ("embedding", "disk"), ("head", "disk")],
        vec![("", "cpu"), ("bias", "disk")],
        vec![("", "cpu"), ("blocks.2.up", "disk"), ("norm", "disk")],
    ];
    for map in maps {
        let model = Model::deferred(Words::new).unwrap();
        let model = model.dispatch(&path, &DeviceMap::by_hand(map.clone())).unwrap();
        // Other batches and lengths, and each of them again, when the order is known.
        for (batch, length) in [(1, 1), (3, 5), (3, 5), (1, 1), (2, 9)] {
            let ids = ids(batch, length);
            assert_eq!(model.forward(&ids).unwrap(), whole.forward(&ids).unwrap(), "{map:?}");
        }
        for parameter in model.parameters() {
            let place = model.device_map().unwrap().place_of(&parameter.name).unwrap();
            assert_eq!(has_memory(&parameter.tensor), place == Place::Cpu, "{}", parameter.name);
        }
    }
}

#[test]
fn units_that_come_next_are_read_while_others_compute_and_a_tied_weight_stays_for_the_next_pass() {
    let folder = tempfile::tempdir().unwrap();
    let (_, path) = saved(folder.path());
    let model = dispatched(&path, [("", "disk")]);
    let ids = ids(2, 3);
    let _ = model.forward(&ids).unwrap();
    let first = model.weight_rings()[0];
    for _ in 0..3 {
        let _ = model.forward(&ids).unwrap();
    }
    let last = model.weight_rings()[0];
    // The bias is in memory for the whole forward, beside the two places that the other weights share.
    assert_eq!(last.bytes % 3, 0);
    let largest = (WIDTH * 2 * WIDTH * 2 + 3 * WIDTH + 2 * WIDTH + 3 * WIDTH) * 4;
    assert!(
        last.bytes / 3 >= largest.unsigned_abs() / 2 && last.bytes / 3 < 2 * largest.unsigned_abs()
    );
    // In each pass the blocks, the norm, the bias and the shared weight are read at most once, except for the weight
    // that is used at both ends.
    let in_a_pass = BLOCKS as u64 + 3 + 1;
    assert!(last.fetches - first.fetches <= 3 * in_a_pass, "{first:?} {last:?}");
}

#[test]
fn weights_outside_of_a_forward_and_training_are_errors_with_the_reason() {
    let folder = tempfile::tempdir().unwrap();
    let (_, path) = saved(folder.path());
    let mut model = dispatched(&path, [("", "cpu"), ("blocks", "disk")]);
    let weight = model.tensor("blocks.1.up.weight").unwrap();
    let error = weight.f_sum(Kind::Float).unwrap_err().to_string();
    assert!(error.contains("the weights of `blocks.1` are not in memory"), "{error}");
    let loss = model.forward(&ids(1, 2)).unwrap().sum(Kind::Float);
    let error = brigade_torch::backward(&loss).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::InvalidArgument);
    assert!(error.to_string().contains("use sharding with offload"), "{error}");
    let error = model.check_trainable().unwrap_err().to_string();
    assert!(error.starts_with("cannot train the model: a device map has the weights"), "{error}");
    let error = model.to_kind(Kind::Half).unwrap_err().to_string();
    assert!(error.starts_with("cannot move the model"), "{error}");
    let error =
        model.save_weights(folder.path().join("other.safetensors")).unwrap_err().to_string();
    assert!(error.contains("the weights of `blocks.0` are not in memory"), "{error}");
    let error = model.load_weights(&path).unwrap_err().to_string();
    assert!(error.contains("cannot load weights"), "{error}");
    let error = model.place(&DeviceMap::by_hand([("", "cpu")])).unwrap_err().to_string();
    assert!(error.contains("another device map"), "{error}");
    // Gradients of inputs cannot be computed through weights that are no longer in memory.
    let model = dispatched(&path, [("", "cpu"), ("blocks", "disk")]);
    let input = Tensor::randn([2, WIDTH], CPU).set_requires_grad(true);
    let block = &model.module().blocks[0];
    let loss = block.forward(&input).unwrap().sum(Kind::Float);
    let error = brigade_torch::backward(&loss).unwrap_err().to_string();
    assert!(error.contains("the weights of `blocks.0` are not in memory"), "{error}");
}

#[test]
fn files_that_change_or_end_early_are_errors_of_the_unit_and_a_file_that_is_back_is_read_again() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, path) = saved(folder.path());
    let model = dispatched(&path, [("", "cpu"), ("blocks", "disk")]);
    let ids = ids(2, 3);
    let expected = whole.forward(&ids).unwrap();
    assert_eq!(model.forward(&ids).unwrap(), expected);
    let bytes = std::fs::read(&path).unwrap();

    // The time of the file changes, not its content.
    let file = OpenOptions::new().write(true).open(&path).unwrap();
    file.set_modified(std::time::SystemTime::UNIX_EPOCH).unwrap();
    assert_eq!(model.forward(&ids).unwrap(), expected);

    // Other values at the end of the file, where the blocks are.
    let at = find(&bytes, &whole, "blocks.2.down.weight");
    let mut file = OpenOptions::new().write(true).open(&path).unwrap();
    file.seek(SeekFrom::Start(at)).unwrap();
    file.write_all(&[1, 2, 3]).unwrap();
    file.sync_all().unwrap();
    file.set_modified(std::time::SystemTime::now()).unwrap();
    let error = failure(&model, &ids);
    for part in [
        "the weights of `blocks.2` could not be brought",
        "model.safetensors",
        "was changed while the model",
    ] {
        assert!(error.contains(part), "{error}");
    }
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(recovered(&model, &ids), expected);

    // Cut within a block.
    file.set_len(at + 8).unwrap();
    let error = failure(&model, &ids);
    assert!(
        error.contains("could not be brought into memory") && error.contains("cut short"),
        "{error}"
    );
    std::fs::write(&path, &bytes).unwrap();
    assert_eq!(recovered(&model, &ids), expected);
}

#[test]
fn a_safetensors_file_that_is_replaced_by_renaming_another_one_stays_in_use() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, path) = saved(folder.path());
    let model = dispatched(&path, [("", "disk")]);
    let ids = ids(2, 3);
    let expected = whole.forward(&ids).unwrap();
    assert_eq!(model.forward(&ids).unwrap(), expected);
    let other = folder.path().join("other.safetensors");
    Model::new(Words::new).unwrap().save_weights(&other).unwrap();
    std::fs::rename(&other, &path).unwrap();
    for _ in 0..3 {
        assert_eq!(model.forward(&ids).unwrap(), expected);
    }
    std::fs::remove_file(&path).unwrap();
    assert_eq!(model.forward(&ids).unwrap(), expected);
}

/// Writes the weights as Accelerate's offload folder: a file for each tensor, which is opened for each read.
fn offloaded(whole: &Model<Words>, folder: &Path) {
    let state = whole.state_dict();
    let entries = state.iter().map(|(name, tensor)| {
        let values = brigade_torch::bytes(&tensor.detach()).unwrap().to_vec();
        std::fs::write(folder.join(format!("{name}.dat")), values).unwrap();
        format!("\"{name}\": {{\"dtype\": \"float32\", \"shape\": {:?}}}", tensor.size())
    });
    let entries: Vec<String> = entries.collect();
    std::fs::write(folder.join("index.json"), format!("{{{}}}", entries.join(", "))).unwrap();
}

#[test]
fn a_file_of_one_tensor_that_is_removed_replaced_or_a_pipe_is_an_error_of_the_unit_until_it_is_back()
 {
    let folder = tempfile::tempdir().unwrap();
    let (whole, _) = saved(folder.path());
    let parts = folder.path().join("parts");
    std::fs::create_dir(&parts).unwrap();
    offloaded(&whole, &parts);
    let model = dispatched(&parts, [("", "cpu"), ("blocks", "disk")]);
    let ids = ids(2, 3);
    let expected = whole.forward(&ids).unwrap();
    assert_eq!(model.forward(&ids).unwrap(), expected);
    let file = parts.join("blocks.2.down.weight.dat");
    let aside = folder.path().join("aside");
    for (fate, reason) in [
        ("removed", "No such file"),
        ("replaced", "was replaced while the weights were in use"),
        ("pipe", "not a regular file"),
        ("cut", "cut short"),
    ] {
        let bytes = std::fs::read(&file).unwrap();
        match fate {
            "cut" => OpenOptions::new().write(true).open(&file).unwrap().set_len(9).unwrap(),
            _ => std::fs::rename(&file, &aside).unwrap(),
        }
        match fate {
            "replaced" => std::fs::write(&file, &bytes).unwrap(),
            "pipe" => {
                let mode = rustix::fs::Mode::RUSR;
                let kind = rustix::fs::FileType::Fifo;
                rustix::fs::mknodat(rustix::fs::CWD, &file, kind, mode, 0).unwrap();
            }
            _ => {}
        }
        let error = failure(&model, &ids);
        for part in ["weights of `blocks.2`", "blocks.2.down.weight.dat", reason] {
            assert!(error.contains(part), "{fate}: {error}");
        }
        match fate {
            "cut" => std::fs::write(&file, &bytes).unwrap(),
            _ => std::fs::rename(&aside, &file).unwrap(),
        }
        assert_eq!(recovered(&model, &ids), expected, "{fate}");
    }
}

/// `/proc/self/mem` is a file whose first bytes cannot be read, with the error of a damaged disk.
#[test]
fn a_disk_that_fails_is_an_error_with_the_file_the_tensor_and_the_unit() {
    let folder = tempfile::tempdir().unwrap();
    let (_, path) = saved(folder.path());
    let entries = Header::read(&path, &std::fs::File::open(&path).unwrap()).unwrap().tensors;
    let names: Vec<String> = entries.iter().map(|entry| entry.name.clone()).collect();
    let failing = std::fs::File::open("/proc/self/mem").unwrap();
    let weights = OpenWeights::Ranges(failing.into(), entries);
    let reader = WeightsReader::new(vec![WeightsFile { path, weights }]).unwrap();
    let mut model = Model::deferred(Words::new).unwrap();
    let tensors = names.into_iter().map(|name| {
        let tensor = model.tensor(&name).unwrap();
        (name, tensor)
    });
    let tensors = tensors.collect();
    model.read_from(reader, tensors).unwrap();
    let model = model.place(&DeviceMap::by_hand([("", "disk")])).unwrap();
    let error = model.module().blocks[1].forward(&Tensor::ones([2, WIDTH], CPU)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Checkpoint);
    let error = error.to_string();
    for part in ["weights of `blocks.1`", "`blocks.1.", "model.safetensors", "os error 5"] {
        assert!(error.contains(part), "{error}");
    }
}

/// The error of the forward in which a damaged file is noticed: parts that were read before may be used once more.
fn failure(model: &Model<Words>, ids: &Tensor) -> String {
    (0..3).find_map(|_| model.forward(ids).err()).expect("the file is damaged").to_string()
}

/// The output when errors of reads that were made ahead have been told.
fn recovered(model: &Model<Words>, ids: &Tensor) -> Tensor {
    (0..3).find_map(|_| model.forward(ids).ok()).expect("the file is whole again")
}

/// Where a parameter's first values lie in a file.
fn find(bytes: &[u8], whole: &Model<Words>, name: &str) -> u64 {
    let values = brigade_torch::bytes(&whole.tensor(name).unwrap()).unwrap().to_vec();
    bytes.windows(16).position(|window| window == &values[..16]).unwrap() as u64
}

#[test]
fn maps_that_cannot_be_carried_out_are_refused() {
    let folder = tempfile::tempdir().unwrap();
    let (whole, path) = saved(folder.path());
    let error = whole.dispatch(&path, &DeviceMap::by_hand([("", "disk")])).unwrap_err().to_string();
    assert!(error.contains("build it by `Model::deferred`"), "{error}");
    // Initial values are not in a file.
    let model = Model::deferred(Words::new).unwrap();
    let error = model.place(&DeviceMap::by_hand([("", "disk")])).unwrap_err().to_string();
    assert!(error.contains("its values are in no file"), "{error}");
    // And need no file if they stay in memory.
    tch::manual_seed(3);
    let drawn =
        Model::deferred(Words::new).unwrap().place(&DeviceMap::by_hand([("", "cpu")])).unwrap();
    tch::manual_seed(3);
    assert_eq!(
        drawn.forward(&ids(1, 4)).unwrap(),
        Model::new(Words::new).unwrap().forward(&ids(1, 4)).unwrap()
    );
}

/// On GPUs made of host memory, whose copies are late where nothing waits for them: a missing event gives other numbers.
#[test]
fn gpus_take_weights_from_the_host_and_the_disk_while_they_compute() {
    if fake::install(2).is_err() {
        // A real GPU gives other bits; `BRIGADE_TEST_DEVICE=cuda` tests those.
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (whole, path) = saved(folder.path());
    let inputs = [ids(3, 5), ids(1, 1), ids(2, 9)];
    let expected = inputs.iter().map(|ids| whole.forward(ids).unwrap()).collect::<Vec<_>>();
    let maps = [
        vec![("", "cuda:0")],
        vec![("", "cuda:0"), ("blocks", "cpu")],
        vec![("", "cuda:0"), ("blocks", "disk")],
        vec![("", "cuda:0"), ("blocks.0", "cpu"), ("blocks.2", "disk"), ("blocks.3", "cpu")],
        vec![
            ("", "cuda:1"),
            ("embedding", "cuda:0"),
            ("head", "cuda:0"),
            ("bias", "cuda:0"),
            ("blocks.0", "cuda:0"),
            ("blocks.2", "disk"),
        ],
        vec![("", "cpu"), ("norm", "cuda:1")],
    ];
    for map in maps {
        let model = Model::deferred(Words::new).unwrap();
        let model = model.dispatch(&path, &DeviceMap::by_hand(map.clone())).unwrap();
        for round in 0..3 {
            for (ids, expected) in inputs.iter().zip(&expected) {
                let output = model.forward(ids).unwrap();
                assert_ne!(output.device(), tch::Device::Cpu);
                assert_eq!(&output.to_device(tch::Device::Cpu), expected, "{map:?}, round {round}");
            }
        }
    }
    // A model that is in memory is moved.
    let maps = [
        vec![("", "cuda:0"), ("blocks", "cpu")],
        vec![("", "cuda:1"), ("embedding", "cpu"), ("head", "cpu")],
    ];
    for map in maps {
        let mut model = Model::new(Words::new).unwrap();
        model.load_weights(&path).unwrap();
        let model = model.place(&DeviceMap::by_hand(map.clone())).unwrap();
        for (ids, expected) in inputs.iter().zip(&expected) {
            let output = model.forward(ids).unwrap().to_device(tch::Device::Cpu);
            assert_eq!(&output, expected, "{map:?}");
        }
    }
    let model = Model::deferred(Words::new).unwrap();
    let split = DeviceMap::by_hand([("", "cuda:0"), ("blocks.1.up", "cuda:1")]);
    let error = model.dispatch(&path, &split).unwrap_err().to_string();
    assert!(
        error.contains("the unit `blocks.1` computes on one device") && error.contains("cuda:1"),
        "{error}"
    );
}

/// A unit, a layer outside of units and the model itself, each with buffers of its own.
struct Shifted {
    unit: Unit,
    layer: brigade_nn::LayerWeights,
    weights: [Tensor; 2],
    /// Buffers of the unit, of the layer and of the model: one that is saved, and one that is not.
    shifts: [[Tensor; 2]; 3],
}

impl Shifted {
    fn new(path: &ParamPath<'_>) -> Self {
        let shifts = |path: &ParamPath<'_>, value: f64| {
            let values = Tensor::full([WIDTH], value, CPU);
            let saved = path.buffer("saved", &values);
            [saved, path.non_persistent_buffer("computed", &(values * 0.5))]
        };
        let (block, layer) = (path / "block", path / "layer");
        let weight = |path: &ParamPath<'_>| path.parameter("weight", &[WIDTH], Init::Ones);
        Self {
            unit: block.unit(),
            weights: [weight(&block), weight(&layer)],
            shifts: [shifts(&block, 1.0), shifts(&layer, 2.0), shifts(path, 4.0)],
            layer: layer.layer_weights(),
        }
    }
}

impl Module<&Tensor> for Shifted {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let shifted = |input: &Tensor, [saved, computed]: &[Tensor; 2]| -> Result<Tensor> {
            Ok(input.f_add(saved)?.f_add(computed)?)
        };
        let [block, layer] = &self.weights;
        let hidden =
            self.unit.run_on(input, |input| shifted(&input.f_mul(block)?, &self.shifts[0]))?;
        let hidden =
            self.layer.run(&hidden, |input| shifted(&input.f_mul(layer)?, &self.shifts[1]))?;
        shifted(&hidden.f_to_device(self.shifts[2][0].device())?, &self.shifts[2])
    }
}

/// Buffers are not brought for a use: each is in memory on the device that computes with it.
#[test]
fn buffers_stay_on_the_device_that_computes_with_them() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("model.safetensors");
    let mut whole = Model::new(Shifted::new).unwrap();
    let saved = whole.tensor("layer.saved").unwrap();
    let _ = tch::no_grad(|| saved.shallow_clone().fill_(3.0));
    whole.save_weights(&path).unwrap();
    whole.eval();
    let input = Tensor::full([2, WIDTH], 0.25, CPU);
    let expected = whole.forward(&input).unwrap();
    assert_eq!(expected.double_value(&[0, 0]), 0.25 + 1.5 + 3.0 + 1.0 + 6.0);
    let cpu = tch::Device::Cpu;
    let mut cases = vec![
        (vec![("", "disk")], [cpu; 3]),
        (vec![("", "cpu"), ("block.saved", "disk"), ("computed", "disk")], [cpu; 3]),
    ];
    if fake::install(2).is_ok() {
        let [first, second] = [0, 1].map(tch::Device::Cuda);
        cases.push((vec![("", "cuda:0"), ("block", "cuda:1")], [second, first, first]));
        cases.push((vec![("", "cuda:0"), ("block", "cpu"), ("layer", "disk")], [first; 3]));
    }
    for (map, devices) in cases {
        let model = Model::deferred(Shifted::new).unwrap();
        let model = model.dispatch(&path, &DeviceMap::by_hand(map.clone())).unwrap();
        for _ in 0..2 {
            let output = model.forward(&input).unwrap().to_device(cpu);
            assert_eq!(output, expected, "{map:?}");
        }
        let owners = ["block.", "layer.", ""];
        for (owner, device) in owners.into_iter().zip(devices) {
            for name in ["saved", "computed"] {
                let buffer = model.tensor(&format!("{owner}{name}")).unwrap();
                assert!(has_memory(&buffer));
                assert_eq!(buffer.device(), device, "{map:?}: {owner}{name}");
            }
        }
    }
}

#[test]
fn a_tied_weight_does_not_come_to_two_gpus() {
    if fake::install(2).is_err() {
        return;
    }
    // A head with a bias of its own on another GPU than the first one, where the embedding computes.
    let layers = |path: &ParamPath<'_>| {
        let embedding = Embedding::new(path / "embedding", 8, 4);
        let head = path / "head";
        let _ = head.tie("weight", embedding.weight());
        let _ = head.parameter("bias", &[8], Init::Zeros);
        (embedding, head.layer_weights())
    };
    let map = DeviceMap::by_hand([
        ("embedding", "cpu"),
        ("head.weight", "cpu"),
        ("head.bias", "cuda:1"),
        ("", "cuda:0"),
    ]);
    let error = Model::deferred(layers).unwrap().place(&map).unwrap_err().to_string();
    assert!(error.contains("`embedding.weight` is a weight of the layer `embedding`"), "{error}");
    assert!(error.contains("give the two one device"), "{error}");
}

#[test]
fn a_gpu_holds_what_stays_and_two_units() {
    if fake::install(1).is_err() {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (_, path) = saved(folder.path());
    let map = DeviceMap::by_hand([("", "cuda:0"), ("blocks", "disk")]);
    let model = Model::deferred(Words::new).unwrap().dispatch(&path, &map).unwrap();
    let held = fake::memory(0).unwrap().allocated;
    let of = |name: &str| {
        let tensors = model.parameters().into_iter().filter(|it| it.name.starts_with(name));
        tensors.map(|it| it.tensor.numel() as u64 * 4).sum::<u64>()
    };
    // The allocator rounds each tensor up to 512 bytes, and the ring each tensor to 64.
    let stays = of("") - of("blocks");
    let places = 2 * of("blocks.0");
    assert!(held >= stays + places && held < stays + places + 16 * 512, "{held} {stays} {places}");
    let _ = model.forward(&ids(1, 2)).unwrap();
    drop(model);
    assert!(fake::memory(0).unwrap().allocated < 8 * 512, "{:?}", fake::memory(0));
}

#[test]
fn quantised_weights_come_from_the_host_and_the_disk_with_the_outputs_of_those_in_memory() {
    let layers = |path: &ParamPath<'_>| {
        Sequential::new()
            .add(Linear::new(path / 0, 64, 128))
            .add(Relu)
            .add(Linear::new(path / 2, 128, 64))
            .add(Linear::new(path / "head", 64, 5))
    };
    let folder = tempfile::tempdir().unwrap();
    let plain = folder.path().join("model.safetensors");
    tch::manual_seed(7);
    Model::new(layers).unwrap().save_weights(&plain).unwrap();
    let input = Tensor::randn([3, 64], CPU);
    let has_gpus = fake::install(1).is_ok();
    for weights in [Weights::int8(), Weights::int4(32), Weights::fp8()] {
        let mut whole = Model::new(layers).unwrap();
        whole.load_weights(&plain).unwrap();
        whole.quantize(&weights).unwrap();
        let quantised = folder.path().join("quantised.safetensors");
        whole.save_quantized(&quantised).unwrap();
        let expected = whole.forward(&input).unwrap();
        let load = |path: &Path, map: Vec<(&'static str, &'static str)>, weights: &Weights| {
            let mut model = Model::deferred(layers).unwrap();
            model.load_weights(path).unwrap();
            model.place_as(&DeviceMap::by_hand(map), weights)
        };
        let cases = [
            (&plain, vec![("", "cpu")], &weights),
            (&quantised, vec![("", "cpu")], &Weights::default()),
            (&quantised, vec![("", "disk")], &Weights::default()),
            (&quantised, vec![("", "cpu"), ("2", "disk")], &weights),
        ];
        for (path, map, weights) in cases {
            let model = load(path, map.clone(), weights).unwrap();
            assert_eq!(model.quantize_report().layers, ["0", "2"]);
            for _ in 0..3 {
                assert_eq!(model.forward(&input).unwrap(), expected, "{weights:?} {map:?}");
            }
        }
        let error = load(&plain, vec![("", "disk")], &weights).unwrap_err().to_string();
        assert!(
            error.contains("on the disk, where it is not quantised") && error.contains("--weights"),
            "{error}"
        );
        if has_gpus {
            let mut reference = None;
            for map in [
                vec![("", "cuda:0")],
                vec![("", "cuda:0"), ("0", "cpu")],
                vec![("", "cuda:0"), ("0", "disk"), ("2", "cpu")],
            ] {
                let model = load(&quantised, map.clone(), &Weights::default()).unwrap();
                for _ in 0..3 {
                    let output = model.forward(&input).unwrap().to_device(tch::Device::Cpu);
                    let reference = reference.get_or_insert_with(|| output.shallow_clone());
                    assert_eq!(&output, reference, "{weights:?} {map:?}");
                }
            }
        }
    }
}

/// The tensors of a weight of 4 MB are read from the disk by several threads, its scales before or after its values.
#[test]
fn large_quantised_weights_come_from_the_disk() {
    let layers = |path: &ParamPath<'_>| Linear::new(path / 0, 2048, 2048);
    let folder = tempfile::tempdir().unwrap();
    let quantised = folder.path().join("quantised.safetensors");
    tch::manual_seed(7);
    let mut whole = Model::new(layers).unwrap();
    whole.quantize(&Weights::int8()).unwrap();
    whole.save_quantized(&quantised).unwrap();
    let input = Tensor::randn([3, 2048], CPU);
    let expected = whole.forward(&input).unwrap();
    let model = Model::deferred(layers).unwrap();
    let model = model.dispatch(&quantised, &DeviceMap::by_hand([("", "disk")])).unwrap();
    for _ in 0..20 {
        assert_eq!(model.forward(&input).unwrap(), expected);
    }
}
