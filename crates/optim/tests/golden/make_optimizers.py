"""Makes torch_optimizers.json and the optimizer_*.pt files beside it, with PyTorch 2.13:

    python make_optimizers.py

Parameters and gradients are filled as in optimizers.json: value[i] = scale * sin(0.37 * i + 1.7 * j), i the
flat index; parameters have scale .5 and j their number, gradients at step t (from 0) scale .3 and j their
number + 10 * (t + 1). Numbers are float32, or float64 where the case says so.

An optimizer_*.pt file is what `torch.save(optimizer.state_dict())` writes after 3 steps; its case in the
JSON holds the parameters after these 3 steps and after 3 more.
"""

import json
import math
import pathlib

import torch

HERE = pathlib.Path(__file__).parent
SHAPES = [[4, 3], [7], [2, 3, 3, 3]]
MATRICES = [[4, 3], [3, 8]]


def fill(shape, number, scale, dtype):
    count = math.prod(shape)
    values = [scale * math.sin(0.37 * i + 1.7 * number) for i in range(count)]
    return torch.tensor(values, dtype=torch.float64).to(torch.float32).to(dtype).reshape(shape)


def parameters(shapes, dtype):
    return [torch.nn.Parameter(fill(s, n, 0.5, dtype)) for n, s in enumerate(shapes)]


def take(optimizer, params, steps):
    for t in steps:
        for n, p in enumerate(params):
            p.grad = fill(list(p.shape), n + 10 * (t + 1), 0.3, p.dtype)
        optimizer.step()


def values(params):
    return [p.detach().double().reshape(-1).tolist() for p in params]


def case(make, args, shapes=SHAPES, dtype=torch.float32):
    params = parameters(shapes, dtype)
    take(make(params, **args), params, range(6))
    return {"args": args, "kind": str(dtype), "params": values(params)}


def groups(make, common, groups):
    """groups: (numbers of parameters, their own arguments)"""
    params = parameters(SHAPES, torch.float32)
    take(make([{"params": [params[n] for n in ns], **own} for ns, own in groups], **common), params, range(6))
    return {"args": {**common, "groups": groups}, "kind": "torch.float32", "params": values(params)}


def saved(name, make, args, groups=None, named=False):
    params = parameters(SHAPES, torch.float32)
    names = [f"p{n}" for n in range(len(params))]
    listed = list(zip(names, params)) if named else params
    if groups is not None:
        listed = [{"params": [listed[n] for n in ns], **own} for ns, own in groups]
    optimizer = make(listed, **args)
    take(optimizer, params, range(3))
    torch.save(optimizer.state_dict(), HERE / f"optimizer_{name}.pt")
    halfway = values(params)
    take(optimizer, params, range(3, 6))
    return {"args": args, "kind": "torch.float32", "halfway": halfway, "params": values(params)}


o = torch.optim
f64 = torch.float64
cases = {
    "adafactor": case(o.Adafactor, {}),
    "adafactor_wd": case(o.Adafactor, {"lr": 0.5, "weight_decay": 0.1, "d": 1.5, "eps": [1e-3, 1e-2]}),
    "adafactor_f64": case(o.Adafactor, {"maximize": True}, dtype=f64),
    "muon": case(o.Muon, {"lr": 0.02}, shapes=MATRICES),
    "muon_rms": case(
        o.Muon,
        {"lr": 0.02, "nesterov": False, "weight_decay": 0.0, "adjust_lr_fn": "match_rms_adamw", "ns_steps": 3},
        shapes=MATRICES,
    ),
    "radam": case(o.RAdam, {"lr": 0.01, "weight_decay": 0.1}),
    "radam_f64": case(
        o.RAdam,
        {"lr": 0.01, "betas": [0.9, 0.9], "weight_decay": 0.1, "decoupled_weight_decay": True, "maximize": True},
        dtype=f64,
    ),
    "rmsprop_wd_f64": case(o.RMSprop, {"weight_decay": 0.1, "momentum": 0.5, "maximize": True}, dtype=f64),
    "rmsprop_centered_f64": case(o.RMSprop, {"centered": True, "alpha": 0.9}, dtype=f64),
    "adagrad_f64": case(
        o.Adagrad,
        {"lr": 0.05, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2, "maximize": True},
        dtype=f64,
    ),
    "sgd_f64": case(
        o.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 0.01, "maximize": True}, dtype=f64
    ),
    "adam_f64": case(o.Adam, {"lr": 0.01, "weight_decay": 0.01, "amsgrad": True, "maximize": True}, dtype=f64),
    "adamw_f64": case(o.AdamW, {"lr": 0.01}, dtype=f64),
    "groups": groups(
        o.AdamW, {"lr": 0.01, "weight_decay": 0.1}, [([0], {}), ([1], {"lr": 0.001, "weight_decay": 0.0}), ([2], {"lr": 0.1})]
    ),
    "sgd_groups": groups(
        o.SGD, {"lr": 0.1, "momentum": 0.9}, [([0, 2], {}), ([1], {"momentum": 0.5})]
    ),
    "saved_adam": saved("adam", o.Adam, {"lr": 0.01, "amsgrad": True, "betas": [0.8, 0.9]}),
    "saved_adamw_groups": saved(
        "adamw_groups",
        o.AdamW,
        {"lr": 0.01, "weight_decay": 0.1},
        groups=[([0, 2], {}), ([1], {"weight_decay": 0.0, "lr": 0.001})],
        named=True,
    ),
    "saved_sgd": saved("sgd", o.SGD, {"lr": 0.1, "momentum": 0.9}),
    "saved_sgd_plain": saved("sgd_plain", o.SGD, {"lr": 0.1}),
    "saved_rmsprop": saved("rmsprop", o.RMSprop, {"momentum": 0.9, "centered": True}),
    "saved_adagrad": saved("adagrad", o.Adagrad, {"lr_decay": 0.1}),
    "saved_radam": saved("radam", o.RAdam, {"lr": 0.01}),
    "saved_adafactor": saved("adafactor", o.Adafactor, {}),
}
document = {"source": f"torch.optim of PyTorch {torch.__version__}, by make_optimizers.py", "cases": cases}
(HERE / "torch_optimizers.json").write_text(json.dumps(document, indent=1) + "\n")
