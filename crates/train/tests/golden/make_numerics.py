"""Writes numerics.json: PyTorch's clipping and loss scaling, for tests/numerics. Usage: make_numerics.py FOLDER"""
import json, math, pathlib, sys
import torch

torch.set_default_dtype(torch.float64)
clipping = []
for p in (0.5, 1.0, 2.0, 3.0, math.inf):
    for max_norm in (0.7, 100.0):
        weights = [torch.zeros(2, 3, requires_grad=True), torch.zeros(4, requires_grad=True)]
        for k, w in enumerate(weights):
            w.grad = (torch.arange(w.numel()).double() + 3.0 * k).sin().reshape(w.shape) * 2
        norm = torch.nn.utils.clip_grad_norm_(weights, max_norm, p)
        clipping.append({"p": "inf" if p == math.inf else p, "max_norm": max_norm, "norm": norm.item(),
                         "gradients": [w.grad.flatten().tolist() for w in weights]})

torch.set_default_dtype(torch.float32)
scaling = []
weight = torch.tensor([0.5, -1.0, 2.0], requires_grad=True)
optimizer = torch.optim.SGD([weight], lr=0.125, momentum=0.5)
scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_factor=4.0, backoff_factor=0.25, growth_interval=3)
factors = [1.0, 0.5, math.inf, 2.0, 1.5, 1.0, 0.25, 1.0, 3.0e38, 1.0, 0.75, 0.5, 1.0]
for step, factor in enumerate(factors):
    optimizer.zero_grad()
    loss = (weight * torch.tensor([1.0, 2.0, -1.0]) * factor).sum()
    scaler.scale(loss).backward()
    if step % 2:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_([weight], 1.0)
    scaler.step(optimizer)
    scaler.update()
    scaling.append({"weight": weight.tolist(), "scale": scaler.get_scale(),
                    "tracker": scaler.state_dict()["_growth_tracker"]})
factors = ["inf" if f == math.inf else f for f in factors]
out = {"torch": torch.__version__, "clipping": clipping, "factors": factors, "scaling": scaling}
(pathlib.Path(sys.argv[1]) / "numerics.json").write_text(json.dumps(out, separators=(",", ":")) + "\n")
