"""A float64 model that runs in float32 by a policy of FSDP: `cast.py ANSWER [hand] KIND...`.

Kinds are accelerate, lightning, fsdp2, short (accelerate's bfloat16) and unlike (policies of two
modules, which are refused). With ``hand`` one process trains float64 masters of a float32 copy in
place of each.
"""

import json
import os
import sys
from copy import deepcopy

import lightning as L
import torch
import torch.distributed as dist
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.state import AcceleratorState
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.distributed.fsdp import MixedPrecision, MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

from hetflow.schema.errors import TargetError

torch.set_default_dtype(torch.float64)
target, *kinds = sys.argv[1:]
by_hand = kinds[0] == "hand"
policy = MixedPrecisionPolicy(param_dtype=torch.float32, reduce_dtype=torch.float64)
older = MixedPrecision(param_dtype=torch.float32, reduce_dtype=torch.float64)
seen = set()


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        seen.add((self.up.weight.element_size(), x.element_size()))
        return x + self.down(self.up(x).tanh())


class Net(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 16), nn.Linear(16, 2)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.losses = []

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)

    def training_step(self, batch, _):
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def on_train_batch_end(self, outputs, *_):
        self.losses.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return optimizer_of(self)


def optimizer_of(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(model, batches, optimizer, backward=torch.Tensor.backward):
    losses = []
    for x, y in batches:
        loss = nn.functional.cross_entropy(model(x), y)
        optimizer.zero_grad()
        backward(loss)
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses


def evaluated(model):
    losses = []
    model.eval()
    with torch.no_grad():  # read, written to and saved between two evaluations
        losses.append(model(data[:20][0]).square().mean().item())
        next(model.parameters()).mul_(1.0001)
        losses.append(model(data[:20][0]).square().mean().item())
    return losses


class ByHand(nn.Module):
    """A model whose float32 copy runs."""

    def __init__(self, model):
        super().__init__()
        self.model, self.copy = model, [deepcopy(model).float()]

    def forward(self, x):
        for own, other in zip(self.model.parameters(), self.copy[0].parameters(), strict=True):
            other.data.copy_(own.data)
            other.grad = None
        return self.copy[0](x.float())

    def backward(self, loss):
        loss.backward()
        for own, other in zip(self.model.parameters(), self.copy[0].parameters(), strict=True):
            own.grad = other.grad.double()


def whole(kind):
    model = ByHand(Net())
    losses = train(model, DataLoader(data, 24), optimizer_of(model), model.backward)
    return losses + ([] if kind == "lightning" else evaluated(model)), model.model


def with_accelerate(_):
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, mixed_precision_policy=policy)
    accelerator = Accelerator(fsdp_plugin=plugin)
    model = Net()
    made = accelerator.prepare(model, DataLoader(data, 24), optimizer_of(model))
    losses = train(*made, accelerator.backward) + evaluated(made[0])
    return losses, accelerator.unwrap_model(made[0])


def with_lightning(_):
    model = Net()
    trainer = L.Trainer(
        strategy=FSDPStrategy(auto_wrap_policy={Block}, mixed_precision=older),
        max_epochs=1,
        gradient_clip_val=0.5,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
    )
    trainer.fit(model, DataLoader(data, 24))
    return model.losses, model


def with_fsdp2(_):
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    model = Net()
    for module in (*model.blocks, model):
        fully_shard(module, mp_policy=policy)
    loader = DataLoader(
        data, 24 // dist.get_world_size(), sampler=DistributedSampler(data, shuffle=False)
    )
    return train(model, loader, optimizer_of(model)) + evaluated(model), model


def with_bfloat16(_):
    AcceleratorState._reset_state()
    model = Net()
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=FullyShardedDataParallelPlugin())
    made = accelerator.prepare(model, DataLoader(data, 24), optimizer_of(model))
    for x, y in made[1]:
        accelerator.backward(nn.functional.cross_entropy(made[0](x), y))
        made[2].step()
    return [], nn.Module()


def refuses_unlike_policies():
    model = Net()
    fully_shard(model.blocks[0], mp_policy=policy)
    fully_shard(model)
    try:
        model(x)
    except TargetError as error:
        return "with unlike policies (mp_policy) for parts of a model" in str(error)


ways = {"accelerate": with_accelerate, "lightning": with_lightning, "fsdp2": with_fsdp2}
generator = torch.Generator().manual_seed(1)
x = torch.randn(240, 6, generator=generator)
data = TensorDataset(x, (x.sum(1) > 0).long())
answers = {}
for kind in kinds[by_hand:]:
    torch.manual_seed(3)
    seen.clear()
    if kind == "unlike":
        losses, model = [float(by_hand or refuses_unlike_policies())], nn.Module()
    elif kind == "short":
        losses, model = ([], nn.Module()) if by_hand else with_bfloat16(kind)
        seen |= {(2, 2)} if by_hand else set()
    else:
        losses, model = (whole if by_hand else ways[kind])(kind)
    state = [p.tolist() for p in model.state_dict().values()]
    sizes = [p.element_size() for p in model.parameters()]
    seen.discard((8, 8))  # Lightning's step is tried before workers share anything
    answers[kind] = {"seen": sorted(seen), "losses": losses, "sizes": sizes, "parameters": state}
if os.environ.get("RANK", "0") == "0":
    with open(target, "w") as stream:
        json.dump(answers, stream)
