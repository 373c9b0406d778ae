"""What accelerate and Trainer may not do under a plan, one thing after another: what was said."""

import json
import sys
import tempfile

import torch
import torch.distributed as dist
from accelerate import Accelerator, DataLoaderConfiguration, DistributedType
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torch.utils.data.distributed import DistributedSampler
from transformers import Trainer, TrainingArguments

from hetflow.schema.errors import TargetError

answer, *kinds = sys.argv[1:]
accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
torch.manual_seed(0)
data = TensorDataset(torch.randn(33, 3), torch.randn(33, 3))


class Layers(nn.Module):
    """A model as Trainer wants it."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x, labels=None):
        """The outputs and their loss."""
        found = self.layer(x)
        if labels is None:
            return {"logits": found}
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


class Unknown(Trainer):
    """A loss in which samples count by what they are."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The largest error."""
        outputs = model(**inputs)
        loss = (outputs["logits"] - inputs["labels"]).abs().max()
        return (loss, outputs) if return_outputs else loss


class Twice(Trainer):
    """A training step that adds a term of its own to the loss."""

    def training_step(self, model, inputs, num_items_in_batch=None):
        """The model's loss, and the size of its outputs."""
        model.train()
        loss = self.compute_loss(model, self._prepare_inputs(inputs))
        loss = loss + model(inputs["x"])["logits"].square().sum()
        self.accelerator.backward(loss)
        return loss.detach()


class Gathering(Trainer):
    """A loss that gathers results of all workers."""

    def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
        """The model's loss."""
        outputs = model(**inputs)
        self.accelerator.gather(outputs["loss"].detach())
        return (outputs["loss"], outputs) if return_outputs else outputs["loss"]


class Unlike(IterableDataset):
    """Other samples on each worker."""

    def __iter__(self):
        """Samples."""
        return iter(torch.randn(40, 3) + accelerator.process_index)


def prepared(dataset=data, **options):
    model = nn.Linear(3, 3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loader = DataLoader(dataset, batch_size=32, **options)
    return accelerator.prepare(model, optimizer, loader)


def root_of_the_mean():
    model, _, loader = prepared()
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y).sqrt())


def counted_twice():
    _, _, loader = prepared()
    for x, _ in loader:  # the last batch has one sample
        accelerator.reduce(torch.tensor(len(x)))


def unlike_streams():
    for _ in prepared(Unlike())[2]:
        pass


def split_by_node():
    rows = Dataset.from_dict({"x": list(range(40))}).to_iterable_dataset(num_shards=4)
    prepared(split_dataset_by_node(rows, accelerator.process_index, dist.get_world_size()))


def rows_by_node():
    rows = Dataset.from_dict({"x": torch.randn(66, 3), "y": torch.randn(66, 3)})
    rows = rows.with_format("torch")
    rows = split_dataset_by_node(rows, accelerator.process_index, dist.get_world_size())
    model, _, loader = prepared(rows)
    for batch in loader:
        accelerator.backward(nn.functional.mse_loss(model(batch["x"]), batch["y"]))


def unsampled():
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    for x, y in DataLoader(data, batch_size=16):
        nn.functional.mse_loss(model(x), y).backward()


def divided_sum():
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    for x, y in DataLoader(data, batch_size=16, sampler=DistributedSampler(data)):
        (nn.functional.mse_loss(model(x), y, reduction="sum") / 16).backward()


def sum_for_a_mean():
    """As DistributedDataParallel's mean over workers is undone."""
    model = nn.parallel.DistributedDataParallel(nn.Linear(3, 3))
    for x, y in DataLoader(data, batch_size=16, sampler=DistributedSampler(data)):
        loss = nn.functional.mse_loss(model(x), y, reduction="sum") * dist.get_world_size()
        (loss / 96).backward()


def split_by_hand():
    rank = accelerator.process_index
    model, _, loader = prepared(TensorDataset(*(t[rank:32:2] for t in data.tensors)))
    for x, y in loader:
        accelerator.backward(nn.functional.mse_loss(model(x), y))


def stateful():
    accelerator.dataloader_config.use_stateful_dataloader = True
    prepared()


def fully_sharded():
    accelerator.state.distributed_type = DistributedType.FSDP
    accelerator.prepare_model(nn.Linear(3, 3))


def trained(trainer=Trainer, **options):
    arguments = TrainingArguments(
        tempfile.mkdtemp(),
        per_device_train_batch_size=32,
        report_to=[],
        disable_tqdm=True,
        save_strategy="no",
        max_steps=1,
        **options,
    )
    rows = [{"x": x, "labels": y} for x, y in data]
    trainer(Layers(), arguments, train_dataset=rows).train()


FAULTS = {
    "root": root_of_the_mean,
    "twice": counted_twice,
    "unlike": unlike_streams,
    "nodes": split_by_node,
    "rows by node": rows_by_node,
    "unsampled": unsampled,
    "divided sum": divided_sum,
    "sum for a mean": sum_for_a_mean,
    "by hand": split_by_hand,
    "own step": lambda: trained(Twice),
    "stateful": stateful,
    "fsdp": fully_sharded,
    "compiled": lambda: trained(torch_compile=True),
    "finding": lambda: trained(auto_find_batch_size=True),
    "rebalanced": lambda: trained(train_sampling_strategy="batch_rebalance"),
    "unknown": lambda: trained(Unknown),
    "gathering": lambda: trained(Gathering),
}
said = {}
for kind in kinds:
    try:
        FAULTS[kind]()
    except TargetError as error:
        said[kind] = str(error)
if accelerator.is_main_process:
    with open(answer, "w") as stream:
        json.dump(said, stream)
