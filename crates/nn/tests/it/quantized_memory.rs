//! Quantising weights while they are loaded takes the memory of one weight beside what stays, and a model on the disk
//! runs with less memory than its weights. Each test is alone in its process, whose memory it measures.

use std::fs;
use std::path::Path;

use brigade_nn::{Init, Linear, Model, Module, ParamPath, QuantizedSlot, Weights};
use brigade_sharding::device_map::DeviceMap;
use brigade_torch::{ErrorKind, Result};
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tch::{Device, Kind, Tensor};

use crate::status::status;

const MIB: usize = 1 << 20;
const WIDTH: i64 = 3072;
const LAYERS: i64 = 2;

/// Linear layer whose weight is `[in, out]` in files, as in GPT-2.
struct Transposed {
    weight: Tensor,
    quantized: QuantizedSlot,
}

impl Transposed {
    fn new(path: &ParamPath<'_>) -> Self {
        let weight = path.parameter("weight", &[WIDTH, WIDTH], Init::Zeros);
        Self { weight, quantized: path.quantizable("weight", true) }
    }
}

impl Module<&Tensor> for Transposed {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        match self.quantized.get() {
            Some(weight) => weight.linear(input, None),
            None => Ok(input.f_matmul(&self.weight)?),
        }
    }
}

fn plain(path: &ParamPath<'_>) -> Vec<Linear> {
    (0..LAYERS).map(|layer| Linear::new(path / layer, WIDTH, WIDTH)).collect()
}

fn transposed(path: &ParamPath<'_>) -> Vec<Transposed> {
    (0..LAYERS).map(|layer| Transposed::new(&(path / layer))).collect()
}

/// Returns the most bytes that `run` takes beside those that were taken before, without pages of libraries that it is the
/// first to touch.
fn peak<T>(run: impl FnOnce() -> T) -> (usize, T) {
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let (before, libraries) = (status("VmRSS"), status("RssFile"));
    let result = run();
    let touched = status("RssFile").saturating_sub(libraries);
    (status("VmHWM").saturating_sub(before + touched), result)
}

/// Quantises a model while it is loaded, with or without a device map.
fn check<M>(
    new: impl Fn(&ParamPath<'_>) -> M + Copy,
    file: &Path,
    weights: &Weights,
    maps: &[bool],
) {
    // A weight is read in the type of the file.
    let one = fs::metadata(file).unwrap().len() as usize / LAYERS as usize;
    for &is_mapped in maps {
        let load = || {
            let mut model = Model::deferred(new).unwrap();
            model.load_weights(file).unwrap();
            peak(|| {
                if is_mapped {
                    model.place_as(&DeviceMap::by_hand([("", "cpu")]), weights).unwrap()
                } else {
                    model.quantize(weights).unwrap();
                    model
                }
            })
        };
        // What else the system and the allocator do can only add to it.
        let (more, model) = (0..3).map(|_| load()).min_by_key(|(more, _)| *more).unwrap();
        let report = model.quantize_report();
        assert_eq!(report.layers.len(), LAYERS as usize);
        // The parts of 4 MB that are quantised, their results, and what the allocator keeps of them. A second weight
        // would be 36 MiB.
        let most = report.bytes + one + 32 * MIB;
        let format = weights.format().unwrap();
        assert!(
            more <= most,
            "{}, {format}, device map {is_mapped}: {more} bytes, of which {} stay; a weight has {one}",
            file.display(),
            report.bytes
        );
    }
}

#[test]
fn quantising_while_loading_takes_one_weight_beside_what_stays() {
    let folder = tempfile::tempdir().unwrap();
    let file = |name: &str| folder.path().join(name);
    {
        let mut model = Model::new(plain).unwrap();
        model.save_weights(file("f32.safetensors")).unwrap();
        model.to_kind(Kind::BFloat16).unwrap();
        model.save_weights(file("bf16.safetensors")).unwrap();
        Model::new(transposed).unwrap().save_weights(file("transposed.safetensors")).unwrap();
    }
    // The first weight of a format also loads the kernels and starts their threads.
    for weights in [Weights::int8(), Weights::int4(128), Weights::fp8()] {
        let mut small = Model::new(|path| Linear::new(path / 0, 128, 64)).unwrap();
        small.quantize(&weights).unwrap();
    }
    check(plain, &file("f32.safetensors"), &Weights::int8(), &[false]);
    check(plain, &file("f32.safetensors"), &Weights::int4(128), &[false, true]);
    check(plain, &file("bf16.safetensors"), &Weights::int4(32), &[true]);
    check(transposed, &file("transposed.safetensors"), &Weights::fp8(), &[false]);
}

/// 16 MiB each, and 384 MiB in all.
const UNITS: i64 = 24;

fn deep(path: &ParamPath<'_>) -> Vec<Linear> {
    (0..UNITS).map(|layer| Linear::new(path / layer, 2048, 2048)).collect()
}

fn run(model: &Model<Vec<Linear>>, input: &Tensor) -> Tensor {
    let layers = model.module().iter();
    layers.fold(input.shallow_clone(), |hidden, layer| layer.forward(&hidden).unwrap())
}

/// The limit is `RLIMIT_DATA`: the kernel refuses memory beyond it, whatever the process does.
#[test]
fn a_model_on_the_disk_runs_with_a_quarter_of_its_memory_and_one_in_memory_does_not() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("model.safetensors");
    let input = Tensor::ones([2, 2048], (Kind::Float, Device::Cpu));
    let expected = {
        let whole = Model::new(deep).unwrap();
        whole.save_weights(&file).unwrap();
        tch::no_grad(|| run(&whole, &input))
    };
    let before = getrlimit(Resource::Data);
    let limit = (status("VmData") + 96 * MIB) as u64;
    setrlimit(Resource::Data, Rlimit { current: Some(limit), ..before }).unwrap();
    let model = Model::deferred(deep).unwrap();
    let model = model.dispatch(&file, &DeviceMap::by_hand([("", "disk")])).unwrap();
    for _ in 0..2 {
        assert_eq!(tch::no_grad(|| run(&model, &input)), expected);
    }
    drop(model);
    // Last, since the C library keeps the memory of the attempt.
    let mut whole = Model::deferred(deep).unwrap();
    whole.load_weights(&file).unwrap();
    let error = whole.materialize().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::OutOfMemory, "{error}");
    setrlimit(Resource::Data, before).unwrap();
}
