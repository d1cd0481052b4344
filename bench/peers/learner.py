"""Steps of fastai's Learner on an xresnet50: seconds of each as JSON.

fastai's own loop: `one_batch` with its callbacks, its Adam and its loss, on batches that are in memory.
Without flags everything is as fastai sets it: fp32, NCHW.
"""

import argparse
import json
import time

import torch
from fastai.callback.core import Callback
from fastai.callback.fp16 import MixedPrecision
from fastai.data.core import DataLoaders
from fastai.data.load import DataLoader
from fastai.learner import Learner
from fastai.losses import CrossEntropyLossFlat
from fastai.vision.models.xresnet import xresnet50

WARM_UP = 3
SHAPE = (16, 3, 128, 128)
CLASSES = 10


class Timed(Callback):
    """Seconds from the start of a batch to the end of its step."""

    order = -100

    def before_batch(self):
        self.start = time.perf_counter()

    def after_batch(self):
        seconds.append(time.perf_counter() - self.start)


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--channels-last", action="store_true")
    parser.add_argument("--steps", type=int, default=12)
    return parser.parse_args()


given = options()
torch.manual_seed(1)
seconds = []
shape = torch.channels_last if given.channels_last else torch.contiguous_format
batches = [
    (torch.rand(SHAPE).contiguous(memory_format=shape), torch.randint(CLASSES, SHAPE[:1]))
    for _ in range(WARM_UP + given.steps)
]
loader = DataLoader(batches, bs=None, num_workers=0)
model = xresnet50(n_out=CLASSES).to(memory_format=shape)
callbacks = [Timed()]
if given.precision == "bf16":
    callbacks.append(MixedPrecision(amp_mode="bf16"))
learner = Learner(
    DataLoaders(loader, loader, device=torch.device("cpu")),
    model,
    loss_func=CrossEntropyLossFlat(),
    cbs=callbacks,
)
learner.create_opt()
with learner.no_bar(), learner.no_logging():
    learner.fit(1, 1e-3)
trained = seconds[WARM_UP : WARM_UP + given.steps]
print(json.dumps([trained]))
