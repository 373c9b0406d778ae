"""A script for torchrun whose model DistributedDataParallel or fully_shard wraps.

It clears gradients between the forward and the backward pass, accumulates, clips, catches an error
of an update, reads gradients and weights, changes them, evaluates, lets the first worker read,
evaluate and save by itself, loads, and averages weights. A layer is never used. A second model
goes back after the first one's step. Usage: wrapped.py ANSWER KIND, where KIND is ddp, fsdp, mixing
(a model that mixes the samples of a batch), or choosing (layers by the samples).
"""

import json
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

answer, kind = sys.argv[1:]
torch.set_default_dtype(torch.float64)
dist.init_process_group("gloo")
rank, world_size = dist.get_rank(), dist.get_world_size()
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.idle, self.last = nn.Linear(6, 16), nn.Linear(3, 3), nn.Linear(16, 2)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16)) for _ in range(3)
        )

    def forward(self, x):
        x = self.first(x if kind != "mixing" else x - x.mean(0))
        for block in self.blocks:
            if kind != "choosing":
                x = x + block(x)
            # Few samples choose a layer: some workers have none of them.
            elif len(rows := (x[:, 0] > 1).nonzero()[:, 0]):
                x = x.index_add(0, rows, block(x[rows]))
        return self.last(x)


x = torch.randn(150, 6)
data = TensorDataset(x, (x.sum(1) > 0).long())
sampler = DistributedSampler(data, seed=3)
loader = DataLoader(data, batch_size=30 // world_size, sampler=sampler)
bare, critic = Net(), nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 1))
averaged = AveragedModel(bare)
if kind == "fsdp":
    for block in bare.blocks:
        fully_shard(block)
    model, critic = fully_shard(bare), fully_shard(critic)
else:
    model, critic = DDP(bare, find_unused_parameters=True), DDP(critic)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
critics = torch.optim.Adagrad(critic.parameters(), lr=0.01)  # it makes its state at once
losses, norms, right = [], [], []


def strike(*_):
    if step == 3:
        raise ArithmeticError("no update")


get_state_dict(bare, optimizer)  # it steps by zeros before the first pass, to have a state
optimizer.register_step_pre_hook(strike)
for epoch in range(2):
    sampler.set_epoch(epoch)
    for step, (inputs, targets) in enumerate(loader):
        error = (critic(inputs)[:, 0] - inputs.sum(1)).square().mean()
        loss = nn.functional.cross_entropy(model(inputs), targets)
        if step % 2 == 0:
            optimizer.zero_grad()
        loss.backward()
        norms.append(nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        try:
            optimizer.step()
        except ArithmeticError:
            losses.append(0.0)
        critics.zero_grad()
        error.backward()
        critics.step()
        losses += [loss.item(), error.item()]
        norms += [p.grad.std().item() for p in bare.last.parameters()]
        bare.last.weight.grad -= bare.last.weight.grad.mean(1, keepdim=True)
        bare.first.weight.data[0] = bare.first.weight.data[1] / 2
        if rank == 0 and step == 2:
            losses.append(bare.first.weight.norm().item())
            with torch.no_grad():
                losses.append(nn.functional.cross_entropy(bare(x), data.tensors[1]).item())
    averaged.update_parameters(bare)
    if kind == "fsdp":
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        weights = get_model_state_dict(bare, options=options)
        held = dict(zip(("model", "optim"), get_state_dict(bare, optimizer), strict=True))
        dcp.save(held, checkpoint_id=f"{answer}.dcp")
    if rank == 0:
        weights = weights if kind == "fsdp" else bare.state_dict()
        torch.save({"model": weights, "optimizer": optimizer.state_dict()}, f"{answer}.pt")
    if epoch < 1:
        found = torch.zeros(2)
        model.eval()
        with torch.no_grad():
            for inputs, targets in loader:
                found[0] += (model(inputs).argmax(1) == targets).sum()
                found[1] += len(targets)
        dist.all_reduce(found)
        model.train()
        right.append(found.tolist())
        saved = torch.load(f"{answer}.pt")
        if kind == "fsdp":
            held = dict(zip(("model", "optim"), get_state_dict(bare, optimizer), strict=True))
            for value in held["model"].values():
                value.zero_()
            dcp.load(held, checkpoint_id=f"{answer}.dcp")
            own, states = held["model"], held["optim"]
            set_state_dict(bare, optimizer, model_state_dict=own, optim_state_dict=states)
        else:
            bare.load_state_dict(saved["model"])
            optimizer.load_state_dict(saved["optimizer"])
dist.barrier()
if rank == 0:
    saved = torch.load(f"{answer}.pt")
    moments = [[v.tolist() for v in s.values()] for s in saved["optimizer"]["state"].values()]
    parameters = {name: value.tolist() for name, value in saved["model"].items()}
    parameters["averaged"] = [p.tolist() for p in averaged.parameters()]
    numbers = {"losses": losses, "norms": norms, "right": right, "moments": moments}
    with open(answer, "w") as stream:
        json.dump({**numbers, "parameters": [*parameters.values()]}, stream)
dist.destroy_process_group()
