//! A rank of Brigade's engine of ZeRO-3 and one of PyTorch's `fully_shard` (FSDP2), which train one model together.

use brigade_nn::{Model, ParamPath};
use brigade_optim::Sgd;
use brigade_sharding::{Sharding, ShardingPlan};
use brigade_test_needs::{needs, part};
use brigade_torch::{ProcessGroup, ShardingGroups, backward};
use tch::{Device, Kind, Tensor};

use crate::fsdp2_net::Net;
use crate::torchrun::{losses_of, say_losses};

const STEPS: usize = 5;

/// The same numbers as in the script.
fn wave(size: &[i64], phase: f64) -> Tensor {
    let places = Tensor::arange(size.iter().product::<i64>(), (Kind::Double, Device::Cpu));
    (places * 0.7 + phase).sin().view(size)
}

/// The loss of this rank's samples at each step.
fn losses(group: &ProcessGroup) -> Vec<f64> {
    let new = |path: &ParamPath<'_>| Net::new(path, 1);
    let mut model = Model::builder().kind(Kind::Double).build(new).unwrap();
    for parameter in model.parameters() {
        let tensor = parameter.tensor.detach();
        tensor.shallow_clone().copy_(&(wave(&tensor.size(), 0.1) * 0.4));
    }
    let sharding = Sharding::zero3();
    let parameters = model.sharding_parameters().unwrap();
    let mesh = sharding.mesh(group.size()).unwrap();
    let plan = ShardingPlan::new(&parameters, &sharding, &mesh).unwrap();
    // FSDP2 has one group for parameters and gradients.
    let groups = ShardingGroups {
        gather: group.clone(),
        reduce: group.clone(),
        replicas: None,
        parts: None,
        experts: None,
    };
    let (sharder, shards) = model.shard(groups, plan).unwrap();
    let mut optimizer = Sgd::new(0.05).momentum(0.9).build(&shards).unwrap();
    let step = |number: usize| {
        let phase = (group.rank() * 31 + number * 17) as f64;
        let (input, target) = (wave(&[2, 5], phase), wave(&[2, 1], phase + 0.5));
        let output = sharder.run_root(|| model.forward(&input)).unwrap();
        let loss = (output - target).square().mean(Kind::Double);
        backward(&loss).unwrap();
        optimizer.step().unwrap();
        optimizer.zero_grad().unwrap();
        sharder.shards_changed().unwrap();
        loss.double_value(&[])
    };
    (0..STEPS).map(step).collect()
}

#[part]
fn rank() {
    say_losses(|group| {
        let losses = losses(&group);
        group.barrier().unwrap();
        losses
    });
}

/// The last block is not gathered again for its backward, as PyTorch recommends and the engine does. In float64 FSDP2
/// would divide gradients before their sum, and the engine divides the sum. Without the end in order of the interpreter,
/// in which PyTorch 2.13 sometimes aborts after FSDP2 on Gloo.
const PYTHON: &str = "\
import os, torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
dist.init_process_group('gloo')
rank = dist.get_rank()
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(7, 5), nn.Linear(5, 7)
    def forward(self, x): return x + self.down(torch.tanh(self.up(x)))
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem = nn.Linear(5, 7)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(7, 1)
    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks: x = block(x)
        return self.head(x)
def wave(size, phase):
    places = torch.arange(torch.Size(size).numel(), dtype=torch.float64)
    return (places * 0.7 + phase).sin().view(size)
model = Net().double()
with torch.no_grad():
    for parameter in model.parameters(): parameter.copy_(wave(parameter.shape, 0.1) * 0.4)
for block in model.blocks: fully_shard(block)
fully_shard(model)
for module in [model, *model.blocks]: module.set_gradient_divide_factor(1.0)
optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
model.blocks[2].set_reshard_after_forward(False)
found = []
for step in range(5):
    phase = float(rank * 31 + step * 17)
    loss = (model(wave([2, 5], phase)) - wave([2, 1], phase + 0.5)).square().mean()
    loss.backward()
    for parameter in model.parameters(): parameter.grad /= 2
    optimizer.step()
    optimizer.zero_grad()
    found.append(repr(loss.item()))
dist.barrier()
os.write(1, f'rank {rank}: {\" \".join(found)}\\n'.encode())
os._exit(0)
";

/// The losses of both ranks, of which one may be PyTorch's.
fn both(python: Option<usize>) -> [Vec<f64>; 2] {
    let is_python = python.map_or_else(|| "false".to_owned(), |rank| format!("[ $RANK = {rank} ]"));
    let line = format!(
        "{is_python} && exec \"$1\" -c \"$PYTHON_RANK\"; exec \"$0\" --part fsdp2_ranks::rank"
    );
    losses_of(PYTHON, &line)
}

#[needs(Pytorch)]
fn a_rank_of_fsdp2_shards_a_model_together_with_one_of_ours() {
    let expected = both(None);
    assert!(expected[0][STEPS - 1] < expected[0][0], "{expected:?}");
    for python in [0, 1] {
        let found = both(Some(python));
        for (found, expected) in found.iter().flatten().zip(expected.iter().flatten()) {
            // One unit in the last place of a loss, which two builds of libtorch may round differently.
            let most = 1e-15 * expected.abs().max(1.0);
            assert!(
                (found - expected).abs() <= most,
                "{found:e} {expected:e}, Python's rank {python}"
            );
        }
    }
}
