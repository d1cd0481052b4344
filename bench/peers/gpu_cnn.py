"""The CNN at batch 64 on a GPU, eager or with `--compile`: steps on request, see gpu_common.py."""

import sys

import torch
from torch import nn

from cnn import BATCH, cnn
from gpu_common import Training, device, size

MODES = ["reduce-overhead"] if "--compile" in sys.argv else []


class Loss(nn.Module):
    """The network and its loss, to be compiled as one."""

    def __init__(self, network):
        super().__init__()
        self.network = network

    def forward(self, images, labels):
        return nn.functional.cross_entropy(self.network(images), labels)


place = device()
torch.manual_seed(1)
loss_of = Loss(cnn()).to(place).train()
optimizer = torch.optim.Adam(loss_of.parameters(), lr=1e-3, fused=True)
batches = [
    (torch.rand(BATCH, 1, 28, 28, device=place), torch.randint(10, (BATCH,), device=place))
    for _ in range(8)
]
training = Training(loss_of, lambda number: batches[number % len(batches)], optimizer, MODES)
training.serve(size(1000, 8))
