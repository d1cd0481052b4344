//! Gradient checkpointing lowers the peak of memory of a step. Alone in its process, whose memory it measures.

use std::fs;

use brigade_nn::{Linear, Model, ParamPath, Recompute, Sequential};
use tch::{Device, Kind, Tensor};

use crate::status::status;

const PARTS: usize = 5;
const LAYERS_PER_PART: usize = 5;
const WIDTH: i64 = 256;
const ROWS: i64 = 8192;
/// Of one layer's output: 8 MiB. A layer and its GELU save two of these for the backward.
const ACTIVATION: usize = (WIDTH * ROWS * 4) as usize;

fn net(path: &ParamPath<'_>, recompute: bool) -> Sequential {
    let part = |path: ParamPath<'_>| {
        (0..LAYERS_PER_PART).fold(Sequential::new(), |part, layer| {
            part.add(Linear::new(&path / layer, WIDTH, WIDTH)).add_fn(|x| x.gelu("none"))
        })
    };
    (0..PARTS).fold(Sequential::new(), |net, index| {
        if recompute {
            net.add(Recompute::new(part(path / index)))
        } else {
            net.add(part(path / index))
        }
    })
}

/// The most memory that the process had during a step, and the gradients.
fn step(recompute: bool) -> (usize, Vec<Tensor>) {
    tch::manual_seed(0);
    let model = Model::new(|p: &ParamPath<'_>| net(p, recompute)).unwrap();
    let input = Tensor::ones([ROWS, WIDTH], (Kind::Float, Device::Cpu));
    // The peak of memory is measured from here.
    fs::write("/proc/self/clear_refs", "5").unwrap();
    let output = model.forward(&input).unwrap();
    brigade_torch::backward(&output.mean(Kind::Float)).unwrap();
    let peak = status("VmHWM");
    let gradients = model.parameters().into_iter().map(|parameter| parameter.tensor.grad());
    (peak, gradients.collect())
}

#[test]
fn recomputed_parts_keep_their_inputs_only() {
    // As the Accelerator does: freed memory is reused, so the process is as large as its tensors were.
    brigade_torch::keep_freed_memory();
    // Libraries, threads and their buffers.
    let _ = Tensor::ones([WIDTH, WIDTH], (Kind::Float, Device::Cpu))
        .matmul(&Tensor::ones([WIDTH, WIDTH], (Kind::Float, Device::Cpu)));
    let before = status("VmRSS");
    // First, so that nothing that the plain step leaves allocated is counted.
    let (recomputed, gradients) = step(true);
    let (plain, expected) = step(false);
    assert_eq!(gradients, expected);

    let (recomputed, plain) = (recomputed - before, plain - before);
    let layers = PARTS * LAYERS_PER_PART;
    assert!(plain > 2 * layers * ACTIVATION, "{plain} bytes do not hold what {layers} layers save");
    // An input for each part, one part's layers, and what operations need while they run.
    let needed = (PARTS + 2 * LAYERS_PER_PART + 10) * ACTIVATION;
    assert!(recomputed < needed, "{recomputed} bytes with recomputation, expected under {needed}");
    assert!(2 * recomputed < plain, "{recomputed} bytes with recomputation, {plain} without");
}
