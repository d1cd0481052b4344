"""Writes parallel.json: what PyTorch trains on two ranks over Gloo, in float64, where ranks divide a model.

    python make_parallel.py parallel.json        # torch 2.13, transformers 5

`tensor` is a Llama whose layers, embedding and head `parallelize_module` divides, with `loss_parallel`; `1f1b` and
`gpipe` are a GPT-2 in two stages of torch.distributed.pipelining with two micro-batches. Each case has the loss and the
norm of the gradients of five steps of AdamW, and for each weight at the end the sum of its values times cosines.
"""

import json
import os
import sys
import tempfile

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    loss_parallel,
    parallelize_module,
)

STEPS = 5
MAX_NORM = 0.5


def fill(model):
    with torch.no_grad():
        for parameter in model.parameters():
            values = torch.sin(torch.arange(parameter.numel(), dtype=torch.float64)) * 0.4
            parameter.copy_(values.view_as(parameter))


def batches():
    places = torch.arange(STEPS * 12)
    ids = (places * 7 + places // 12 * 3) % 23
    return ids.view(STEPS, 2, 6)


def loss_of(logits, ids):
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=0.01, eps=1e-3)


def digests(weights):
    def digest(weight):
        values = weight.full_tensor() if isinstance(weight, DTensor) else weight
        values = values.detach().flatten()
        return (values * torch.cos(torch.arange(len(values), dtype=torch.float64))).sum().item()

    return {name: digest(weight) for name, weight in weights}


def in_float64(model):
    """transformers computes norms and rotary embeddings in float32 whatever the model has."""
    from transformers.models.llama.modeling_llama import LlamaRMSNorm

    def norm(module):
        def forward(x):
            variance = x.square().mean(-1, keepdim=True)
            return module.weight * (x * torch.rsqrt(variance + module.variance_epsilon))

        return forward

    def rotary(x, position_ids):
        width = model.config.hidden_size // model.config.num_attention_heads
        powers = torch.arange(0, width, 2, dtype=torch.float64) / width
        angles = position_ids[..., None].double() * 10000.0**-powers
        angles = torch.cat([angles, angles], -1)
        return angles.cos(), angles.sin()

    for module in model.modules():
        if isinstance(module, LlamaRMSNorm):
            module.forward = norm(module)
    model.model.rotary_emb.forward = rotary


def tensor(rank):
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=23,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).double()
    in_float64(model)
    fill(model)
    plan = {
        "model.embed_tokens": RowwiseParallel(
            input_layouts=Replicate(), output_layouts=Replicate()
        ),
        "lm_head": ColwiseParallel(use_local_output=False),
    }
    for layer in range(2):
        names = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"]
        for name in names + ["mlp.gate_proj", "mlp.up_proj"]:
            plan[f"model.layers.{layer}.{name}"] = ColwiseParallel()
        for name in ["self_attn.o_proj", "mlp.down_proj"]:
            plan[f"model.layers.{layer}.{name}"] = RowwiseParallel()
    parallelize_module(model, init_device_mesh("cpu", (2,)), plan)
    optimizer = adamw(model.parameters())
    losses, norms = [], []
    for ids in batches():
        logits = model(input_ids=ids).logits
        with loss_parallel():
            # The labels of a divided vocabulary: one row for each token that has a next one.
            loss = loss_of(logits, ids)
            loss.backward()
        found = [p.grad for p in model.parameters()]
        whole = [g.full_tensor() if isinstance(g, DTensor) else g for g in found]
        norm = torch.stack([g.norm() for g in whole]).norm()
        scale = min(1.0, MAX_NORM / (norm.item() + 1e-6))
        for gradient in found:
            gradient.mul_(scale)
        optimizer.step()
        optimizer.zero_grad()
        value = loss.full_tensor() if isinstance(loss, DTensor) else loss
        losses.append(value.item())
        norms.append(norm.item())
    return {"losses": losses, "norms": norms, "weights": digests(model.named_parameters())}


class First(nn.Module):
    def __init__(self, model):
        super().__init__()
        self.wte, self.wpe, self.block = model.wte, model.wpe, model.h[0]

    def forward(self, ids):
        hidden = self.wte(ids) + self.wpe.weight[: ids.shape[1]]
        out = self.block(hidden)
        return out[0] if isinstance(out, tuple) else out


class Last(nn.Module):
    def __init__(self, model, head):
        super().__init__()
        self.block, self.ln_f, self.head = model.h[1], model.ln_f, head

    def forward(self, hidden):
        out = self.block(hidden)
        return self.head(self.ln_f(out[0] if isinstance(out, tuple) else out))


def pipeline(rank, schedule):
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=23,
        n_positions=8,
        n_embd=12,
        n_layer=2,
        n_head=12,
        n_inner=24,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        attn_implementation="sdpa",
    )
    model = GPT2LMHeadModel(config).double()
    fill(model)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    stage = First(model.transformer) if rank == 0 else Last(model.transformer, model.lm_head)
    pipe = schedule(PipelineStage(stage, rank, 2, torch.device("cpu")), 2, loss_fn=loss_of)
    optimizer = adamw(stage.parameters())
    losses, norms = [], []
    for ids in batches():
        own = []
        if rank == 0:
            pipe.step(ids)
        else:
            pipe.step(target=ids, losses=own)
        square = sum(p.grad.square().sum() for p in stage.parameters())
        dist.all_reduce(square)
        norm = square.sqrt()
        scale = min(1.0, MAX_NORM / (norm.item() + 1e-6))
        for parameter in stage.parameters():
            parameter.grad.mul_(scale)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(loss.item() for loss in own) / 2)
        norms.append(norm.item())
    weights = digests((names[id(p)], p) for p in stage.parameters())
    found = [None, None]
    dist.all_gather_object(found, (losses, weights))
    return {"losses": found[1][0], "norms": norms, "weights": found[0][1] | found[1][1]}


def run(rank, file, results):
    dist.init_process_group("gloo", init_method=f"file://{file}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    found = {
        "tensor": tensor(rank),
        "1f1b": pipeline(rank, Schedule1F1B),
        "gpipe": pipeline(rank, ScheduleGPipe),
    }
    if rank == 0:
        results.put(found)
    dist.barrier()
    # The end of the groups that pipelining made aborts the process in torch 2.13.
    os._exit(0)


def main():
    results = mp.get_context("spawn").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = mp.spawn(run, (f"{folder}/store", results), 2, join=False)
        found = results.get()
        while not ranks.join():
            pass
    with open(sys.argv[1], "w") as out:
        json.dump({"torch": torch.__version__, **found}, out)
        out.write("\n")


if __name__ == "__main__":
    main()
