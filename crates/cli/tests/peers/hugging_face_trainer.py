"""Trains a line with Hugging Face's Trainer, on the ranks that the launcher has started."""

import sys

import torch
from transformers import Trainer, TrainingArguments


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 1)

    def forward(self, x, labels):
        out = self.fc(x).squeeze(-1)
        return {"loss": ((out - labels) ** 2).mean(), "logits": out}


torch.manual_seed(0)
points = torch.randn(64, 4)
data = [{"x": x, "labels": y} for x, y in zip(points, points.sum(-1))]
arguments = TrainingArguments(
    sys.argv[1],
    num_train_epochs=4,
    per_device_train_batch_size=4,
    learning_rate=0.1,
    use_cpu=True,
    report_to=[],
    save_strategy="no",
)
model = Net()
trainer = Trainer(model, arguments, train_dataset=data)
result = trainer.train()
# The same on both ranks, if gradients are averaged.
weights = " ".join(f"{it:.6f}" for it in model.fc.weight.flatten().tolist())
print(f"{arguments.world_size} ranks, {result.global_step} steps, weights {weights}", flush=True)
