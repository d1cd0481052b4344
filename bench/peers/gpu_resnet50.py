"""ResNet-50 in bf16, channels_last, at batch 256 on a GPU, eager or with `--compile`, in the fastest mode: steps on
request. `--account` prints the kernels of one step instead.

Each step moves a batch of bytes from pinned memory, and normalises it on the GPU.
"""

import sys

import torch
from torch import nn

from gpu_common import ImageLoss, Training, compile_modes, device, host_images, size

MODES = compile_modes() if "--compile" in sys.argv else []
BATCH, SIDE = size((256, 224), (2, 32))


class Bottleneck(nn.Module):
    """torchvision's, which has the stride in the 3x3 convolution."""

    def __init__(self, channels_in, width, stride):
        super().__init__()
        channels = 4 * width
        self.conv1 = nn.Conv2d(channels_in, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, channels, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels_in != channels:
            self.downsample = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x):
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += x if self.downsample is None else self.downsample(x)
        return self.relu(y)


def own_resnet50():
    layers = [
        nn.Conv2d(3, 64, 7, 2, 3, bias=False),
        nn.BatchNorm2d(64),
        nn.ReLU(inplace=True),
        nn.MaxPool2d(3, 2, 1),
    ]
    channels = 64
    for width, blocks, stride in [(64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)]:
        for block in range(blocks):
            layers.append(Bottleneck(channels, width, stride if block == 0 else 1))
            channels = 4 * width
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]
    return nn.Sequential(*layers)


def resnet50():
    try:
        from torchvision import models
    except ImportError:
        return own_resnet50()
    return models.resnet50()


place = device()
torch.manual_seed(1)
loss_of = ImageLoss(resnet50()).to(place, memory_format=torch.channels_last).train()
optimizer = torch.optim.SGD(
    loss_of.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4, fused=True
)
training = Training(loss_of, host_images(place, BATCH, SIDE), optimizer, MODES)
(training.account if "--account" in sys.argv else training.serve)(size(15, 1))
