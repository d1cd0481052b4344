"""Device maps that Accelerate makes of random modules and limits: accelerate-1.15.0.json.

    python make.py

A case has the tensors of a model in the order of its modules, the names of the blocks that are not split, a rule, limits, and
the map. Models have no modules without tensors, since lists of tensors do not tell of them.
"""

import json
import logging
import random
import sys
import warnings
from pathlib import Path

import accelerate
import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory, modeling
from torch import nn

CASES = 320
DEPTH = 3
TYPES = {"F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64, "U8": torch.uint8}

# It goes through a set, whose order is another one in each process.
unordered = modeling.find_tied_parameters


def in_order(model, **_):
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    return sorted(unordered(model), key=lambda tie: min(names.index(name) for name in tie))


modeling.find_tied_parameters = in_order


def named(kind):
    """Each block has a class of its own, so that the largest of a kind is not the first one that is found."""
    return type(f"Block{kind}", (nn.Module,), {})


class Plain(nn.Module):
    pass


def own_tensors(module, rng, fewest, prefix):
    for index in range(rng.randint(fewest, 2)):
        dtype = TYPES[rng.choice(["F32", "F32", "F16", "BF16"])]
        shape = [rng.randint(1, 9) for _ in range(rng.randint(1, 2))]
        module.register_parameter(f"{prefix}{index}", nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
    if rng.random() < 0.25:
        name = rng.choice(list(TYPES))
        tensor = torch.empty([rng.randint(1, 9)], dtype=TYPES[name], device="meta")
        module.register_buffer("b0", tensor, persistent=rng.random() < 0.7)


def tree(rng, depth, blocks):
    is_block = depth < DEPTH and rng.random() < 0.35
    module = named(len(blocks))() if is_block else Plain()
    if is_block:
        blocks.append(type(module).__name__)
    if depth == 0:
        own_tensors(module, rng, 1, "w")
        return module
    own_tensors(module, rng, 0, "r" if depth == DEPTH else "w")
    for index in range(rng.randint(1, 4)):
        # Names that begin alike: a point ends a name. Those of the outermost modules are nowhere else, since Accelerate takes
        # `w0` for a module around `m0.w0.weight`, and leaves the ties of such weights apart.
        level = "m" if depth == DEPTH else "n"
        name = rng.choice([f"{level}{index}", f"{level}{index}", f"{level}{index}_x"])
        module.add_module(name, tree(rng, depth - rng.randint(1, 2) if depth > 1 else 0, blocks))
    return module


def tie(model, rng):
    owners = [
        (module, name) for module in model.modules() if not isinstance(module, nn.ModuleList)
        for name, _ in module.named_parameters(recurse=False)
    ]
    for _ in range(rng.choice([0, 0, 1, 1, 2])):
        if len(owners) < 2:
            return
        (first, name), (second, other) = rng.sample(owners, 2)
        setattr(second, other, getattr(first, name))


def tensors(model):
    """In the order of modules: a module's parameters and buffers, then those of its children."""
    first, answer = {}, []
    transient = modeling.get_non_persistent_buffers(model, recurse=True, fqns=True)
    order = {name: place for place, (name, _) in enumerate(model.named_parameters())}
    for prefix, module in model.named_modules():
        own = list(module._parameters.items()) + list(module._buffers.items())
        for name, tensor in own:
            full = f"{prefix}.{name}" if prefix else name
            dtype = next(key for key, value in TYPES.items() if value == tensor.dtype)
            entry = [full, list(tensor.shape), dtype]
            if id(tensor) in first:
                entry.append(first[id(tensor)])
            elif isinstance(tensor, nn.Parameter):
                assert full in order
                first[id(tensor)] = full
            else:
                entry.append(1 if full in transient else 0)
            answer.append(entry)
    return answer


def case(seed):
    rng = random.Random(seed)
    blocks = []
    model = tree(rng, DEPTH, blocks)
    tie(model, rng)
    listed = tensors(model)
    total = modeling.compute_module_sizes(model)[""]
    part = lambda low, high: max(1, int(total * rng.uniform(low, high)))
    gpus = rng.choice([0, 1, 1, 2, 2, 3])
    limits = {gpu: part(0.05, 0.9) for gpu in range(gpus)}
    if gpus == 0 or rng.random() < 0.8:
        limits["cpu"] = part(0.05, 1.2)
    options = {}
    if rng.random() < 0.4:
        options["dtype"] = rng.choice(["F16", "BF16", "F32"])
    if rng.random() < 0.3:
        name = rng.choice([entry[0] for entry in listed if not (len(entry) > 3 and isinstance(entry[3], str))])
        options["special_dtypes"] = {name: rng.choice(["F32", "F16", "U8"])}
    rule = rng.choice(["sequential", "sequential", "balanced", "balanced_low_0"])
    fallback = rng.random() < 0.4
    given = {
        "no_split_module_classes": blocks,
        "dtype": TYPES[options["dtype"]] if "dtype" in options else None,
        "special_dtypes": {name: TYPES[dtype] for name, dtype in options.get("special_dtypes", {}).items()} or None,
    }
    units = [name for name, module in model.named_modules() if type(module).__name__ in blocks]
    try:
        memory = dict(limits)
        if rule != "sequential":
            memory = get_balanced_memory(model, memory, low_zero=rule == "balanced_low_0", **given)
        found = infer_auto_device_map(model, memory, fallback_allocation=fallback, **given)
    except (IndexError, AttributeError, ValueError):
        # It fails where the other name of a tied weight is not in a module that is left.
        return None
    answer = {"tensors": listed, "units": units, "rule": rule, "limits": limits, "map": found}
    if fallback:
        answer["fallback"] = True
    return answer | options


def main():
    assert accelerate.__version__ == "1.15.0", accelerate.__version__
    warnings.simplefilter("ignore")
    logging.disable()
    cases, seed, skipped = [], 0, 0
    while len(cases) < CASES:
        found = case(seed)
        seed += 1
        if found is None or len(found["tensors"]) > 24:
            skipped += 1
            continue
        cases.append(found)
    lines = ",\n".join(json.dumps(case, separators=(",", ":")) for case in cases)
    path = Path(__file__).parent / "accelerate-1.15.0.json"
    path.write_text(f"[\n{lines}\n]\n")
    several = sum(len(case["map"]) > 1 for case in cases)
    print(f"{len(cases)} cases, {skipped} skipped, {several} with several entries, {path.stat().st_size} bytes", file=sys.stderr)


main()
