"""Prints what PyTorch says of its CUDA and of the GPUs."""

import sys

import torch

print("Python", sys.version.split()[0], "PyTorch", torch.__version__, "CUDA", torch.version.cuda)
print("cuDNN", torch.backends.cudnn.version(), "NCCL", torch.cuda.nccl.version())
for number in range(torch.cuda.device_count()):
    print(number, torch.cuda.get_device_properties(number))
