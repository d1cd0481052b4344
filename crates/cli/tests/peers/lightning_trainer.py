"""Trains a line with Lightning's Trainer, on the ranks that the launcher has started."""

import sys

import lightning
import torch


class Net(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.fc = torch.nn.Linear(4, 1)

    def training_step(self, batch, index):
        x, y = batch
        return ((self.fc(x).squeeze(-1) - y) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), 0.1)


torch.manual_seed(0)
points = torch.randn(64, 4)
dataset = torch.utils.data.TensorDataset(points, points.sum(-1))
trainer = lightning.Trainer(
    accelerator="cpu",
    devices=2,
    strategy="ddp",
    max_epochs=4,
    default_root_dir=sys.argv[1],
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
model = Net()
trainer.fit(model, torch.utils.data.DataLoader(dataset, 4))
# The same on both ranks, if gradients are averaged.
weights = " ".join(f"{it:.6f}" for it in model.fc.weight.flatten().tolist())
print(f"{trainer.world_size} ranks, {trainer.global_step} steps, weights {weights}", flush=True)
