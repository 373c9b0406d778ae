"""Batch norm of several kinds, with short batches: ``norms.py LIBRARY ANSWER``.

Each library takes its own way to the same training.
"""

import json
import os
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

library, answer = sys.argv[1:]
torch.set_default_dtype(torch.float64)
torch.manual_seed(0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5, momentum=None), nn.ReLU())
        self.again = nn.Sequential(nn.Conv2d(5, 5, 1), nn.BatchNorm2d(5), nn.Tanh())
        self.frozen = nn.BatchNorm2d(5)
        self.last = nn.Sequential(
            nn.Flatten(), nn.Linear(20, 6), nn.BatchNorm1d(6, affine=False), nn.Linear(6, 3)
        )

    def train(self, mode=True):
        super().train(mode)
        self.frozen.eval()
        return self

    def forward(self, pixels, labels=None):
        pixels = self.frozen(checkpoint(self.again, self.first(pixels), use_reentrant=False))
        logits = self.last(pixels)
        if labels is None:
            return logits
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


x = 3 + torch.randn(98, 2, 4, 4)  # the last batch has two samples
data = TensorDataset(x, torch.randint(3, (98,)))
model = Net()


def train(model, loader, backward=torch.Tensor.backward):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for epoch in range(2):
        if library == "ddp":
            loader.sampler.set_epoch(epoch)
        for pixels, labels in loader:
            backward(model(pixels, labels)["loss"])
            optimizer.step()
            optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        return model(x).sum(0).tolist()


if library == "ddp":
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    if world_size > 1:  # which torch refuses in one process without a GPU
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    loader = DataLoader(data, 24 // world_size, sampler=DistributedSampler(data))
    logits = train(nn.parallel.DistributedDataParallel(model), loader)
elif library == "accelerate":
    from accelerate import Accelerator

    accelerator = Accelerator()
    wrapped, loader = accelerator.prepare(model, DataLoader(data, 24, shuffle=True))
    rank, logits = accelerator.process_index, train(wrapped, loader, accelerator.backward)
else:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        answer + "-out",
        per_device_train_batch_size=24,
        num_train_epochs=2,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        use_cpu=True,
        lr_scheduler_type="constant",
        max_grad_norm=0,
        logging_steps=1,
    )
    rows = [{"pixels": pixels, "labels": label} for pixels, label in data]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    trainer = Trainer(model, arguments, train_dataset=rows, optimizers=(optimizer, None))
    trainer.train()
    trainer.accelerator.reduce(torch.ones(()))  # though a worker had no sample of the last batch
    rank = int(os.environ.get("RANK", 0))
    logits = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

if rank == 0:
    parameters = [value.tolist() for value in model.state_dict().values()]
    with open(answer, "w") as stream:
        json.dump({"logits": logits, "parameters": parameters}, stream)
