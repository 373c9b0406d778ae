"""Batches of like lengths from a batch sampler of the script's own, in another order each epoch."""

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, Sampler

accelerator = Accelerator()
set_seed(2)
drawn = torch.Generator().manual_seed(0)
lengths = torch.randint(2, 4, (100,), generator=drawn).tolist()
data = [torch.randn(length, 4, dtype=torch.float64, generator=drawn) for length in lengths]


class Buckets(Sampler):
    """Batches of up to 32 samples, all of one length."""

    def __init__(self):
        self.epoch = 0

    def set_epoch(self, epoch):
        """Choose the order."""
        self.epoch = epoch

    def batches(self):
        """The batches of this epoch."""
        order = torch.randperm(100, generator=torch.Generator().manual_seed(self.epoch)).tolist()
        for length in (2, 3):
            alike = [index for index in order if lengths[index] == length]
            yield from (alike[start : start + 32] for start in range(0, len(alike), 32))

    def __iter__(self):
        return self.batches()

    def __len__(self):
        return sum(1 for _ in self.batches())


loader = DataLoader(data, batch_sampler=Buckets(), collate_fn=torch.stack)
model = nn.GRU(4, 8, batch_first=True).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for epoch in range(2):
    loader.set_epoch(epoch)
    for batch in loader:
        loss = (model(batch)[0][:, -1, :4] - batch.sum(1)).square().mean()
        losses.append(accelerator.gather(loss.detach()).mean().item())
        accelerator.backward(loss)
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
if accelerator.is_main_process:
    final = accelerator.unwrap_model(model)
    with open(sys.argv[1], "w") as stream:
        json.dump(
            {"losses": losses, "parameters": [p.tolist() for p in final.parameters()]}, stream
        )
