"""Makes bleu.json beside it, with fastai 2.8.12: `CorpusBLEUMetric` over batches of three samples.

    python make_bleu.py
"""

import json
import pathlib
import random
from types import SimpleNamespace

import torch
from fastai.metrics import CorpusBLEUMetric

random.seed(4)


def case(name, predicted, targets, vocab_sz):
    metric = CorpusBLEUMetric(vocab_sz=vocab_sz)
    for start in range(0, len(predicted), 3):
        tokens = torch.tensor(predicted[start : start + 3])
        scores = torch.nn.functional.one_hot(tokens, vocab_sz).float()
        y = torch.tensor(targets[start : start + 3])
        metric.accumulate(SimpleNamespace(training=False, pred=scores, y=y))
    try:
        value = metric.value
    except ZeroDivisionError:
        value = None
    return {"name": name, "vocab_sz": vocab_sz, "predicted": predicted, "targets": targets, "value": value}


def drawn(rows, length, vocab_sz):
    return [[random.randrange(vocab_sz) for _ in range(length)] for _ in range(rows)]


def changed(rows, share, vocab_sz):
    return [[random.randrange(vocab_sz) if random.random() < share else token for token in row] for row in rows]


targets = drawn(8, 11, 6)
cases = [
    case("the same", targets, targets, 6),
    case("a third changed", changed(targets, 0.3, 6), targets, 6),
    case("nothing in common", [[5] * 7] * 4, [[1, 2, 3, 4, 1, 2, 3]] * 4, 6),
    case("shorter than the targets", [row[:8] for row in changed(targets, 0.2, 6)], targets, 6),
    case("longer than the targets", changed(targets, 0.2, 6), [row[:8] for row in targets], 6),
    case("too short for four", [[1, 2, 3], [2, 2, 1]], [[1, 2, 3], [1, 2, 2]], 4),
]
pathlib.Path(__file__).with_name("bleu.json").write_text(json.dumps({"cases": cases}) + "\n")
