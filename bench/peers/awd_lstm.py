"""Steps of fastai's language model with all its defaults: seconds of each as JSON, or bytes of memory.

AWD-LSTM with its dropouts, its Adam, AR and TAR regularisation, 64 rows of 72 tokens of a vocabulary of 60,008,
drawn so that few words are frequent. Under torchrun each rank has 64 rows.
"""

import argparse
import json
import os
import resource
import time

import numpy as np
import torch
from fastai.callback.core import Callback
from fastai.data.core import DataLoaders
from fastai.losses import CrossEntropyLossFlat
from fastai.text.data import LMDataLoader
from fastai.text.learner import LMLearner
from fastai.text.models.awdlstm import AWD_LSTM, awd_lstm_lm_split
from fastai.text.models.core import get_language_model
from fastai.torch_core import TensorBase

WARM_UP = 2
VOCABULARY, ROWS, LENGTH = 60_008, 64, 72


class Timed(Callback):
    """Seconds from the start of a batch to the end of its step."""

    order = -100

    def before_batch(self):
        self.start = time.perf_counter()

    def after_batch(self):
        seconds.append(time.perf_counter() - self.start)


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--memory", action="store_true")
    return parser.parse_args()


given = options()
torch.manual_seed(1)
seconds = []
count = (WARM_UP + given.steps) * ROWS * LENGTH + ROWS
ids = (np.random.default_rng(1).random(count) ** 4 * VOCABULARY).astype(np.int64)
documents = [TensorBase(part) for part in torch.from_numpy(ids).split(300)]
loader = LMDataLoader(documents, bs=ROWS, seq_len=LENGTH, shuffle=False)
learner = LMLearner(
    DataLoaders(loader, loader, device=torch.device("cpu")),
    get_language_model(AWD_LSTM, VOCABULARY),
    loss_func=CrossEntropyLossFlat(),
    splitter=awd_lstm_lm_split,
    cbs=[Timed()],
)
learner.create_opt()
with learner.no_bar(), learner.no_logging():
    learner._do_epoch_validate = lambda *args, **kwargs: None
    learner.fit(1, 1e-3)
if given.memory:
    # Kilobytes on Linux.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    with open("/proc/self/statm") as statm:
        resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    print(json.dumps([[resident], [peak]]))
else:
    print(json.dumps([seconds[WARM_UP : WARM_UP + given.steps]]))
