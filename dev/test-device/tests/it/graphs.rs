//! Tests of graphs on GPUs made of host memory: replays have the same results as the steps.

#![cfg(not(feature = "cuda"))] // libtorch's own kernels have their places

use std::ffi::{c_char, c_void};

use brigade_test_device::fake::{self, Graph};
use brigade_torch::{DeviceNumbers, fused};
use tch::{Device, Kind, Reduction, Tensor};

const GPU: Device = Device::Cuda(0);

struct Mlp {
    weights: Vec<Tensor>,
    momenta: Vec<Tensor>,
    inputs: Tensor,
    classes: Tensor,
    loss: Tensor,
}

impl Mlp {
    fn new() -> Self {
        tch::manual_seed(3);
        let sizes: [&[i64]; 4] = [&[8, 6], &[8], &[4, 8], &[4]];
        let weights: Vec<Tensor> = sizes
            .iter()
            .map(|size| {
                (Tensor::randn(*size, (Kind::Float, GPU)) * 0.3).detach().set_requires_grad(true)
            })
            .collect();
        Self {
            momenta: weights.iter().map(|it| it.detach().zeros_like()).collect(),
            weights,
            inputs: Tensor::zeros([5, 6], (Kind::Float, GPU)),
            classes: Tensor::zeros([5], (Kind::Int64, GPU)),
            loss: Tensor::zeros([], (Kind::Float, GPU)),
        }
    }

    fn batch(&mut self, step: i64) {
        self.inputs.copy_(
            &(Tensor::arange(30, (Kind::Float, Device::Cpu)).view([5, 6]) * (step + 1)).sin(),
        );
        self.classes.copy_(&(Tensor::arange(5, (Kind::Int64, Device::Cpu)) + step).remainder(4));
    }

    fn step(&mut self) {
        let hidden =
            self.inputs.linear(&self.weights[0], Some(&self.weights[1])).relu().dropout(0.2, true);
        let logits = hidden.linear(&self.weights[2], Some(&self.weights[3]));
        let loss =
            logits.cross_entropy_loss(&self.classes, None::<Tensor>, Reduction::Mean, -100, 0.0);
        for weight in &mut self.weights {
            weight.zero_grad();
        }
        loss.backward();
        tch::no_grad(|| {
            let gradients: Vec<Tensor> = self.weights.iter().map(Tensor::grad).collect();
            let step = fused::SgdStep {
                lr: 0.1,
                momentum: 0.9,
                dampening: 0.0,
                weight_decay: 0.01,
                decoupled: false,
                nesterov: false,
                maximize: false,
                first: false,
            };
            fused::sgd(
                &self.weights.iter().collect::<Vec<_>>(),
                &gradients.iter().collect::<Vec<_>>(),
                &self.momenta.iter().collect::<Vec<_>>(),
                &step,
                &DeviceNumbers::default(),
            )
            .unwrap();
            self.loss.copy_(&loss);
        });
    }

    fn numbers(&self) -> Vec<f32> {
        let all: Vec<Tensor> = self
            .weights
            .iter()
            .chain(&self.momenta)
            .chain([&self.loss])
            .map(|tensor| tensor.detach().flatten(0, -1))
            .collect();
        Vec::<f32>::try_from(Tensor::cat(&all, 0)).unwrap()
    }
}

#[test]
fn replays_of_a_training_step_are_the_steps() {
    fake::install(1).unwrap();
    let eager = {
        let mut mlp = Mlp::new();
        (0..6)
            .map(|at| {
                mlp.batch(at);
                mlp.step();
                mlp.numbers()
            })
            .collect::<Vec<_>>()
    };
    let mut mlp = Mlp::new();
    let mut found = Vec::new();
    for at in 0..2 {
        mlp.batch(at);
        mlp.step();
        found.push(mlp.numbers());
    }
    let before = mlp.numbers();
    let mut graph = None;
    let waits = fake::synchronizations(|| {
        graph = Some(Graph::capture(0, || mlp.step()).unwrap());
    });
    assert_eq!(waits, [""; 0]);
    assert_eq!(mlp.numbers(), before, "a capture runs nothing");
    let graph = graph.unwrap();
    for at in 2..6 {
        mlp.batch(at);
        graph.replay().unwrap();
        found.push(mlp.numbers());
    }
    assert_eq!(found, eager);
    assert_ne!(found[4], found[5]);
}

#[test]
fn each_replay_draws_new_numbers() {
    fake::install(1).unwrap();
    let ones = Tensor::ones([100], (Kind::Float, GPU));
    let mut out = ones.zeros_like();
    tch::manual_seed(1);
    let graph = Graph::capture(0, || out.copy_(&ones.dropout(0.5, true))).unwrap();
    let draw = |graph: &Graph| {
        graph.replay().unwrap();
        Vec::<f32>::try_from(&out).unwrap()
    };
    let (first, second) = (draw(&graph), draw(&graph));
    assert_ne!(first, second);
    tch::manual_seed(1);
    assert_eq!(Vec::<f32>::try_from(ones.dropout(0.5, true)).unwrap(), first);
}

#[test]
fn a_capture_permits_no_wait() {
    fake::install(2).unwrap();
    let x = Tensor::ones([3], (Kind::Float, GPU));
    let host = Tensor::ones([3], (Kind::Float, Device::Cpu));
    let refused: [&dyn Fn() -> Result<(), tch::TchError>; 4] = [
        &|| x.f_double_value(&[0]).map(drop),
        &|| x.f_to_device(Device::Cpu).map(drop),
        &|| host.f_to_device(GPU).map(drop),
        &|| x.f_nonzero().map(drop),
    ];
    for (at, refused) in refused.iter().enumerate() {
        let ended = Graph::capture(0, || {
            assert!(fake::is_capturing(0));
            let error = refused().unwrap_err().to_string();
            assert!(
                error.contains("operation not permitted when stream is capturing"),
                "{at}: {error}"
            );
        });
        let error = ended.unwrap_err().to_string();
        assert!(error.contains("due to a previous error during capture"), "{at}: {error}");
        assert!(!fake::is_capturing(0));
    }
    // Another device is not affected.
    let other = Tensor::ones([3], (Kind::Float, Device::Cuda(1)));
    let mut sum = x.zeros_like();
    let graph = Graph::capture(0, || {
        let _ = other.f_add(&other).unwrap();
        let nested = Graph::capture(1, || ()).unwrap_err().to_string();
        assert!(nested.contains("captured already"), "{nested}");
        let _ = sum.g_add_(&x);
    })
    .unwrap();
    graph.replay().unwrap();
    graph.replay().unwrap();
    assert_eq!(Vec::<f32>::try_from(&sum).unwrap(), [2.0; 3]);
}

#[test]
fn pinned_memory_is_read_at_each_replay() {
    fake::install(1).unwrap();
    let mut from = Tensor::from_slice(&[1.0f32, 2.0]).pin_memory(GPU);
    let mut out = Tensor::zeros([2], (Kind::Float, GPU));
    let graph = Graph::capture(0, || {
        let there = from.to_device_(GPU, Kind::Float, true, false);
        out.copy_(&(there * 2.0));
    })
    .unwrap();
    for value in [3.0, 4.0] {
        let _ = from.fill_(value);
        graph.replay().unwrap();
        assert_eq!(Vec::<f32>::try_from(&out).unwrap(), [2.0 * value as f32; 2]);
    }
}

/// `FakeGpuGraphs` of `cpp/fake_gpu.h`.
#[repr(C)]
struct Table {
    begin: extern "C" fn(i32) -> *mut c_char,
    end: extern "C" fn(*mut *mut c_void) -> *mut c_char,
    replay: extern "C" fn(*mut c_void) -> *mut c_char,
    free: extern "C" fn(*mut c_void),
    is_capturing: extern "C" fn(i32) -> bool,
}

#[test]
fn a_library_in_cpp_gets_a_table_of_functions() {
    fake::install(1).unwrap();
    // SAFETY: the table lives as long as the program, and has these fields.
    let table = unsafe { &*fake::graph_functions().cast::<Table>() };
    let mut sum = Tensor::zeros([2], (Kind::Float, GPU));
    assert!((table.begin)(0).is_null());
    assert!((table.is_capturing)(0));
    let _ = sum.g_add_scalar_(1.0);
    let mut graph = std::ptr::null_mut();
    assert!((table.end)(&raw mut graph).is_null());
    assert!(!(table.is_capturing)(0));
    for _ in 0..3 {
        assert!((table.replay)(graph).is_null());
    }
    (table.free)(graph);
    assert_eq!(Vec::<f32>::try_from(&sum).unwrap(), [3.0; 2]);
}
