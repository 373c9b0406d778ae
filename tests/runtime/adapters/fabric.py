"""A loop of Lightning's Fabric: accumulation, clipping, a scheduler, checks of all samples."""

import json
import sys

import torch
from lightning.fabric import Fabric
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
fabric = Fabric(accelerator="cpu", devices=1)
fabric.launch()
fabric.seed_everything(3)
x = torch.randn(158, 6)
data = TensorDataset(x, (x.sum(1) > 0).long())
train, val = fabric.setup_dataloaders(
    DataLoader(data, batch_size=32, shuffle=True), DataLoader(data, batch_size=53)
)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * fabric.world_size)
model, optimizer = fabric.setup(model, optimizer)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4, 0.5)
answers = {"losses": [], "norms": [], "right": [], "guesses": []}
for _ in range(2):
    model.train()
    for number, (inputs, targets) in enumerate(train):
        is_whole = number % 2 == 1 or number == len(train) - 1
        with fabric.no_backward_sync(model, enabled=not is_whole):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            fabric.backward(loss / 2)
        if is_whole:
            norm = fabric.clip_gradients(model, optimizer, max_norm=0.3)
            answers["norms"].append(float(norm))
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
        answers["losses"].append(float(fabric.all_reduce(loss.detach())))
    model.eval()
    right = torch.zeros((), device=fabric.device)
    for inputs, targets in val:
        with torch.no_grad():
            guess = model(inputs).argmax(1)
        right += (guess == targets).sum()
        answers["guesses"].append(fabric.all_gather(guess).tolist())
    answers["right"].append(float(fabric.all_reduce(right, reduce_op="sum")))
fabric.save("fabric.ckpt", {"model": model, "optimizer": optimizer})
fabric.load("fabric.ckpt", {"model": model, "optimizer": optimizer})
answers["parameters"] = [p.tolist() for p in model.state_dict().values()]
if fabric.is_global_zero:
    with open(sys.argv[1], "w") as stream:
        json.dump(answers, stream)
