"""Training steps of transformers' GPT-2 small or BERT base with Accelerate: seconds of each as JSON, or bytes.

Without flags everything is as the libraries set it: dropout of 0.1, fused attention, the optimizer's loop over
parameters, fp32.
"""

import argparse
import json
import os
import resource
import time

import torch
from accelerate import Accelerator
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    GPT2Config,
    GPT2LMHeadModel,
)

WARM_UP = 2


def options():
    parser = argparse.ArgumentParser()
    parser.add_argument("--model", choices=["gpt2", "bert"], required=True)
    parser.add_argument("--precision", choices=["no", "bf16"], default="no")
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--memory", action="store_true")
    return parser.parse_args()


def batch_of(model):
    if model == "gpt2":
        ids = torch.randint(50_257, (4, 256))
        return {"input_ids": ids, "labels": ids}
    ids = torch.randint(1000, 30_522, (8, 128))
    lengths = torch.tensor([128, 120, 112, 104, 96, 88, 80, 72])
    mask = (torch.arange(128)[None] < lengths[:, None]).long()
    types = (torch.arange(128)[None] >= lengths[:, None] // 2).long() * mask
    return {
        "input_ids": ids * mask,
        "attention_mask": mask,
        "token_type_ids": types,
        "labels": torch.randint(2, (8,)),
    }


def main():
    given = options()
    torch.manual_seed(1)
    accelerator = Accelerator(cpu=True, mixed_precision=given.precision)
    if given.model == "gpt2":
        model = GPT2LMHeadModel(GPT2Config())
    else:
        model = BertForSequenceClassification(BertConfig(num_labels=2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True if given.fused else None)
    model, optimizer = accelerator.prepare(model, optimizer)
    model.train()
    # The first steps, which are not measured, compile it.
    run = torch.compile(model) if given.compile else model
    batches = [batch_of(given.model) for _ in range(4)]
    seconds = []
    for number in range(WARM_UP + given.steps):
        start = time.perf_counter()
        loss = run(**batches[number % len(batches)]).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - start)
    if given.memory:
        # Kilobytes on Linux.
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        with open("/proc/self/statm") as statm:
            resident = int(statm.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
        print(json.dumps([[resident], [peak]]))
    elif accelerator.is_main_process:
        print(json.dumps([seconds]))
    # A reducer that outlives its process group aborts now and then at the end of the process.
    del loss, run
    model, optimizer = accelerator.free_memory(model, optimizer)
    accelerator.end_training()


main()
