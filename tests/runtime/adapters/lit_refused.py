"""Trainings of Lightning's Trainer that a plan cannot do exactly: what each is refused with."""

import json
import os
import sys

import lightning as L
import torch
from lightning.fabric import Fabric
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import nn
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    SequentialSampler,
    TensorDataset,
)
from torchmetrics.classification import MulticlassF1Score

from hetflow.schema.errors import TargetError

torch.set_default_dtype(torch.float64)
L.seed_everything(1)


class Plain(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(3, 2)
        self.seen = []

    def training_step(self, batch, batch_idx):
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Contrast(Plain):
    def training_step(self, batch, batch_idx):
        features = self.net(batch[0])
        return nn.functional.cross_entropy(features @ features.T, torch.arange(len(features)))


class Perplexity(Plain):
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.log("perplexity", loss.exp())
        return loss


class Epoch(Plain):
    def validation_step(self, batch, batch_idx):
        self.seen.append(super().training_step(batch, batch_idx))

    def on_validation_epoch_end(self):
        self.log("mean_of_batches", torch.stack(self.seen).mean())


class OnSteps(Plain):
    def __init__(self):
        super().__init__()
        self.f1 = MulticlassF1Score(2)

    def training_step(self, batch, batch_idx):
        self.f1(self.net(batch[0]), batch[1])
        self.log("f1", self.f1)
        return super().training_step(batch, batch_idx)


class NoLoss(Plain):
    def training_step(self, batch, batch_idx):
        return None


class ByHand(Plain):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, batch_idx):
        self.manual_backward(super().training_step(batch, batch_idx))
        self.optimizers().step()


class Several(Plain):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch[0], 0) + super().training_step(batch[1], 0)


class Stream(IterableDataset):
    def __iter__(self):
        return iter(data)


data = TensorDataset(torch.randn(64, 3), torch.arange(64) % 2)
loader = DataLoader(data, batch_size=32)
odd = DataLoader(data, batch_size=32, collate_fn=lambda rows: [torch.zeros(5), torch.zeros(7)])
said = {}


def refused(name, model, train, val=None, **options):
    try:
        trainer = L.Trainer(
            max_epochs=1,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            **options,
        )
        trainer.fit(model, train, val)
        said[name] = "was trained"
    except TargetError as error:
        said[name] = str(error)


refused("fsdp", Plain(), loader, strategy="fsdp")
refused("batch size", Plain(), DataLoader(data, batch_size=6))
refused("stream", Plain(), DataLoader(Stream(), batch_size=32))
refused("several loaders", Several(), [loader, loader])
refused("contrast", Contrast(), loader)
refused("perplexity", Perplexity(), loader)
refused("epoch", Epoch(), loader, loader, num_sanity_val_steps=0)
refused("metric on steps", OnSteps(), loader)
refused("no loss", NoLoss(), loader)
refused("by hand", ByHand(), loader)
refused("compiled", torch.compile(Plain(), backend="eager"), loader)
refused("uncut", Plain(), odd)
kind = ("bf16-mixed", "16-mixed")[os.environ["RANK"] == "0"]
scaler = torch.amp.GradScaler("cpu") if kind == "16-mixed" else None
refused("scalers", Plain(), loader, plugins=[MixedPrecision(kind, "cpu", scaler)])


class Stateful(DataLoader):
    def load_state_dict(self, state):
        pass


class Bucketed(BatchSampler):
    pass


def looped(loader=loader, **options):
    fabric = Fabric(**options)
    model = nn.Linear(3, 2)
    model, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for x, y in fabric.setup_dataloaders(loader):
        fabric.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()


def refused_loop(name, *values, **options):
    try:
        looped(*values, **options)
        said[name] = "was trained"
    except TargetError as error:
        said[name] = str(error)


refused("stateful", Plain(), Stateful(data, batch_size=32))
refused_loop("fabric fsdp", strategy="fsdp")
refused_loop("fabric stream", DataLoader(Stream(), batch_size=32))
bucketed = Bucketed(SequentialSampler(data), 32, False)
refused_loop("fabric batches", DataLoader(data, batch_sampler=bucketed))
if torch.distributed.get_rank() == 0:
    with open(sys.argv[-1], "w") as stream:
        json.dump(said, stream)
