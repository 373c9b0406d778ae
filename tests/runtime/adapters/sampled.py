"""A script for torchrun: DistributedDataParallel and DistributedSampler."""

import json
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)
x = torch.randn(150, 6)
data = TensorDataset(x, (x.sum(1) > 0).long())
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=30 // world_size, sampler=sampler)
model = DDP(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2)))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(inputs), targets).backward()
        optimizer.step()
right = torch.zeros(2)
with torch.no_grad():
    for inputs, targets in loader:
        right[0] += (model(inputs).argmax(1) == targets).sum()
        right[1] += len(targets)
dist.all_reduce(right)
if rank == 0:
    with open(sys.argv[1], "w") as stream:
        parameters = [p.tolist() for p in model.state_dict().values()]
        json.dump({"right": right.tolist(), "parameters": parameters}, stream)
dist.destroy_process_group()
