"""float16 with a scaler on the first worker, bfloat16 on the second; the first overflows once."""

import json
import os
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

how, path = sys.argv[1:]
rank = int(os.environ.get("RANK", "-1"))  # -1: one process, in float32, without what overflows
SPOILT = 4
torch.manual_seed(4)
data = TensorDataset(torch.randn(96, 6), torch.arange(96) % 3)
kept = [n for n in range(96) if rank >= 0 or n // 16 != SPOILT]
loader = DataLoader(torch.utils.data.Subset(data, kept), batch_size=16)
net = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)


def loss_of(model, batch, number):
    """The loss; on the first worker it overflows once."""
    loss = nn.functional.cross_entropy(model(batch[0]).float(), batch[1])
    return loss * (float("inf") if number == SPOILT and rank == 0 else 1.0)


def by_accelerate():
    """A loop of the script's own."""
    from accelerate import Accelerator

    accelerator = Accelerator(mixed_precision=("fp16", "bf16", "no")[rank])
    model, own, batches, schedule = accelerator.prepare(net, optimizer, loader, scheduler)
    for number, batch in enumerate(batches):
        accelerator.backward(loss_of(model, batch, number))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        own.step()
        schedule.step()
        own.zero_grad()


def by_lightning():
    """Lightning's loop, which goes back within the optimizer's step where there is no scaler."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self):
            super().__init__()
            self.net = net

        def training_step(self, batch, number):
            return loss_of(self.net, batch, number)

        def configure_optimizers(self):
            return optimizer

    lightning.Trainer(
        max_epochs=1,
        precision=("16-mixed", "bf16-mixed", "32-true")[rank],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        gradient_clip_val=1.0,
    ).fit(Module(), loader)


{"accelerate": by_accelerate, "lightning": by_lightning}[how]()
values = [value for parameter in net.parameters() for value in parameter.flatten().tolist()]
with open(f"{path}{rank}", "w") as stream:
    json.dump({"parameters": values, "rate": scheduler.get_last_lr()}, stream)
