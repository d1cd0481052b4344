"""fastai's Imagewoof program with its defaults: seconds of each epoch as JSON.

`imagewoof.py FOLDER EPOCHS`: xresnet50, random crops of 160, flips, MixUp, a flat cosine, in fp32 on the CPU.
"""

import json
import sys
import time

import torch
from fastai.vision.all import (
    Callback,
    CategoryBlock,
    DataBlock,
    FlipItem,
    GrandparentSplitter,
    ImageBlock,
    Learner,
    MixUp,
    Normalize,
    RandomResizedCrop,
    accuracy,
    get_image_files,
    imagenet_stats,
    parent_label,
    top_k_accuracy,
    xresnet50,
)


class Epochs(Callback):
    order = -1000

    def before_fit(self):
        self.seconds = []

    def before_epoch(self):
        self.began = time.perf_counter()

    def after_epoch(self):
        self.seconds.append(time.perf_counter() - self.began)


folder, epochs = sys.argv[1], int(sys.argv[2])
torch.manual_seed(1)
data = DataBlock(
    blocks=(ImageBlock, CategoryBlock),
    splitter=GrandparentSplitter(valid_name="val"),
    get_items=get_image_files,
    get_y=parent_label,
    item_tfms=[RandomResizedCrop(160), FlipItem(0.5)],
    batch_tfms=Normalize.from_stats(*imagenet_stats),
).dataloaders(folder, bs=64)
learner = Learner(data, xresnet50(n_out=data.c), metrics=[accuracy, top_k_accuracy])
timer = Epochs()
with learner.no_bar(), learner.no_logging():
    learner.fit_flat_cos(epochs, 1e-3, cbs=[MixUp(0.1), timer])
print(json.dumps([timer.seconds]))
