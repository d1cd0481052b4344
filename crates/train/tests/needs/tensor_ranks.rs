//! A tensor group of a rank of Brigade's and one of plain PyTorch, which sends the same two sums for a divided perceptron.

use brigade_nn::{LayerNorm, Linear, Model, Module, ParamPath, StateDict, TensorParallel};
use brigade_sharding::TensorPlan;
use brigade_test_needs::{needs, part};
use brigade_testkit::assert_close;
use brigade_torch::{ProcessGroup, Result, backward, clear_gradient, gradient};
use tch::{Device, Kind, Tensor};

use crate::torchrun::{losses_of, say_losses};

const STEPS: usize = 4;

struct Perceptron {
    norm: LayerNorm,
    up: Linear,
    down: Linear,
}

impl Perceptron {
    fn new(path: &ParamPath<'_>) -> Self {
        Self {
            norm: LayerNorm::new(path / "norm", &[6]),
            up: Linear::new(path / "up", 6, 8),
            down: Linear::new(path / "down", 8, 6),
        }
    }
}

impl Module<&Tensor> for Perceptron {
    type Output = Tensor;

    fn forward(&self, input: &Tensor) -> Result<Tensor> {
        let inner = self.up.forward(&self.norm.forward(input)?)?.gelu("none");
        Ok(input + self.down.forward(&inner)?)
    }
}

/// The same numbers as in the script.
fn wave(size: &[i64], phase: f64) -> Tensor {
    let places = Tensor::arange(size.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    (places * 0.37 + phase).sin().view(size)
}

fn weights() -> StateDict {
    let mut state = StateDict::new();
    for (name, size, phase) in [
        ("norm.weight", &[6][..], 0.1),
        ("norm.bias", &[6], 0.2),
        ("up.weight", &[8, 6], 0.3),
        ("up.bias", &[8], 0.4),
        ("down.weight", &[6, 8], 0.5),
        ("down.bias", &[6], 0.6),
    ] {
        state.insert(name, wave(size, phase)).unwrap();
    }
    state
}

/// The loss of each step of gradient descent.
fn losses(group: Option<ProcessGroup>) -> Vec<f64> {
    let plan = TensorPlan::new().column("up.weight").row("down.weight");
    let builder = Model::builder().kind(Kind::Double).without_first_values();
    let builder = builder.tensor_parallel(TensorParallel { group, plan });
    let mut model = builder.build(Perceptron::new).unwrap();
    model.load_state_dict(&weights()).unwrap();
    let (input, target) = (wave(&[3, 6], 0.7), wave(&[3, 6], 0.8));
    let step = |_| {
        let loss = (model.forward(&input).unwrap() - &target).square().mean(Kind::Double);
        backward(&loss).unwrap();
        for parameter in model.parameters() {
            let by = gradient(&parameter.tensor).unwrap().unwrap() * -1e-3;
            let _ = tch::no_grad(|| parameter.tensor.shallow_clone().f_add_(&by)).unwrap();
            clear_gradient(&parameter.tensor).unwrap();
        }
        loss.double_value(&[])
    };
    (0..STEPS).map(step).collect()
}

#[part]
fn rank() {
    say_losses(|group| losses(Some(group)));
}

/// The perceptron as PyTorch's tensors: this rank's rows of `up` and columns of `down`.
const PYTHON: &str = "\
import torch, torch.distributed as dist
import torch.nn.functional as F
dist.init_process_group('gloo')
rank = dist.get_rank()
def wave(size, phase):
    places = torch.arange(torch.Size(size).numel(), dtype=torch.float64)
    return (places * 0.37 + phase).sin().view(size)
class Enter(torch.autograd.Function):
    @staticmethod
    def forward(context, values): return values.view_as(values)
    @staticmethod
    def backward(context, gradient):
        gradient = gradient.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(gradient)
        return gradient
class Leave(torch.autograd.Function):
    @staticmethod
    def forward(context, values):
        values = values.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(values)
        return values
    @staticmethod
    def backward(context, gradient): return gradient
part = lambda values, dim: values.chunk(2, dim)[rank].clone()
weights = [wave([6], 0.1), wave([6], 0.2), part(wave([8, 6], 0.3), 0), part(wave([8], 0.4), 0),
           part(wave([6, 8], 0.5), 1), wave([6], 0.6)]
for weight in weights: weight.requires_grad_()
norm, norm_bias, up, up_bias, down, down_bias = weights
inputs, target = wave([3, 6], 0.7), wave([3, 6], 0.8)
found = []
for _ in range(4):
    hidden = Enter.apply(F.layer_norm(inputs, [6], norm, norm_bias))
    inner = F.gelu(F.linear(hidden, up, up_bias))
    loss = (inputs + (Leave.apply(F.linear(inner, down)) + down_bias) - target).square().mean()
    loss.backward()
    with torch.no_grad():
        for weight in weights:
            weight -= 1e-3 * weight.grad
            weight.grad = None
    found.append(repr(loss.item()))
print(f'rank {rank}: ' + ' '.join(found), flush=True)
dist.destroy_process_group()
";

#[needs(Pytorch)]
fn a_rank_of_pythons_computes_the_other_half_of_a_layer() {
    let expected = losses(None);
    assert!(expected.windows(2).all(|pair| pair[1] < pair[0]), "{expected:?}");
    for python in [0, 1] {
        let line = format!(
            "[ $RANK = {python} ] && exec \"$1\" -c \"$PYTHON_RANK\"; exec \"$0\" --part tensor_ranks::rank"
        );
        for found in losses_of(PYTHON, &line) {
            assert_close(&found, &expected, 1e-13, 1e-15);
        }
    }
}
