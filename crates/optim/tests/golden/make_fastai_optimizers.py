"""Makes fastai_optimizers.json, with fastai 2.8.12:

    python make_fastai_optimizers.py

Parameters and gradients are filled as make_optimizers.py says; each case takes twelve steps.
"""

import json
import math
import pathlib

import fastai
import torch
from fastai.optimizer import QHAdam

SHAPES = [[4, 3], [7], [2, 3, 3, 3]]
STEPS = 12


def fill(shape, number, scale):
    values = [scale * math.sin(0.37 * i + 1.7 * number) for i in range(math.prod(shape))]
    return torch.tensor(values, dtype=torch.float64).float().reshape(shape)


def case(make, **args):
    params = [torch.nn.Parameter(fill(shape, number, 0.5)) for number, shape in enumerate(SHAPES)]
    optimizer = make(params, **args)
    for step in range(STEPS):
        for number, param in enumerate(params):
            param.grad = fill(list(param.shape), number + 10 * (step + 1), 0.3)
        optimizer.step()
    return {"args": args, "steps": STEPS, "params": [p.detach().double().reshape(-1).tolist() for p in params]}


cases = {
    "qhadam": case(QHAdam, lr=0.01),
    "qhadam_options": case(
        QHAdam, lr=0.02, mom=0.9, sqr_mom=0.99, nu_1=0.4, nu_2=0.6, eps=1e-5, wd=0.1
    ),
    "qhadam_l2": case(QHAdam, lr=0.01, wd=0.1, decouple_wd=False),
}
document = {"source": f"fastai.optimizer of fastai {fastai.__version__}, by make_fastai_optimizers.py", "cases": cases}
pathlib.Path(__file__).with_name("fastai_optimizers.json").write_text(json.dumps(document) + "\n")
