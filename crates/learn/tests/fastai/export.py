"""Trains an xresnet18 with fastai on the CPU, and writes what a test compares: `export.py FOLDER`.

In float64, so that a difference is one of the arithmetic and not of rounding, which training multiplies.
For `fit_one_cycle` and `fit_flat_cos`, each from the same first weights and over the same batches in order:
`NAME.json` has learning rate, momentum and loss of every training batch, and the metrics of each epoch. The first
weights and all batches are in `data.safetensors`.
"""

import json
import sys
from pathlib import Path

import fastai.callback.progress  # noqa: F401 (no_bar)
import fastai.callback.schedule  # noqa: F401 (fit_one_cycle, fit_flat_cos)
import torch
from fastai.basics import Callback, DataLoader, DataLoaders, Learner, accuracy, top_k_accuracy
from fastai.losses import CrossEntropyLossFlat
from fastai.vision.models.xresnet import xresnet18
from safetensors.torch import save_file

CLASSES, SIZE, BATCH, TRAIN, VALID = 5, 32, 8, 60, 20


class Export(Callback):
    """Notes what each training batch was and gave."""

    order = 100

    def before_fit(self):
        self.lr, self.mom, self.loss_of, self.batches = [], [], [], []

    def before_batch(self):
        if self.training:
            self.batches.append((self.x.clone(), self.y.clone()))

    def before_step(self):
        self.lr.append(self.opt.hypers[-1]["lr"])
        self.mom.append(self.opt.hypers[-1]["mom"])
        self.loss_of.append(self.loss.item())


def samples(count, seed):
    random = torch.Generator().manual_seed(seed)
    targets = torch.randint(CLASSES, (count,), generator=random)
    images = torch.randn(count, 3, SIZE, SIZE, generator=random, dtype=torch.float64)
    # A class is brighter in rows of its own.
    for image, target in zip(images, targets):
        image[:, int(target) :: CLASSES] += 0.8
    return images, targets


def loader(images, targets):
    items = [(image, target) for image, target in zip(images, targets)]
    return DataLoader(items, bs=BATCH, shuffle=False, drop_last=False, num_workers=0)


folder = Path(sys.argv[1])
torch.set_num_threads(1)
train, valid = samples(TRAIN, 1), samples(VALID, 2)
torch.manual_seed(3)
model = xresnet18(n_out=CLASSES).double()
first = {name: value.clone() for name, value in model.state_dict().items()}
written = {f"model.{name}": value for name, value in first.items()}
for part, (images, targets) in {"train": train, "valid": valid}.items():
    written |= {f"{part}.x": images, f"{part}.y": targets}

for name in ["fit_one_cycle", "fit_flat_cos"]:
    model.load_state_dict({key: value.clone() for key, value in first.items()})
    export = Export()
    learner = Learner(
        DataLoaders(loader(*train), loader(*valid), device="cpu"),
        model,
        loss_func=CrossEntropyLossFlat(),
        metrics=[accuracy, top_k_accuracy],
        cbs=export,
    )
    with learner.no_bar(), learner.no_logging():
        getattr(learner, name)(2, 3e-3)
    # The order of the data is that of the batches: both sides see the same.
    seen = torch.cat([x for x, _ in export.batches[: -(-TRAIN // BATCH)]])
    assert torch.equal(seen, train[0])
    facts = {
        "lr": export.lr,
        "mom": export.mom,
        "loss": export.loss_of,
        "epochs": [list(map(float, row)) for row in learner.recorder.values],
    }
    (folder / f"{name}.json").write_text(json.dumps(facts))
save_file(written, folder / "data.safetensors")
