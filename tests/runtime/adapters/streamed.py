"""A causal language model on a stream of datasets', read by one worker or by each (`alike`)."""

import json
import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import set_seed
from datasets import IterableDataset
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel

reading = sys.argv[2]
settings = DataLoaderConfiguration(dispatch_batches=False if reading == "alike" else None)
accelerator = Accelerator(dataloader_config=settings)
set_seed(1)


def rows(shards):
    for shard in shards:
        drawn = torch.Generator().manual_seed(shard)
        for _ in range(25):
            ids = torch.randint(0, 64, (12,), generator=drawn)
            yield {"input_ids": ids.tolist(), "labels": ids.tolist()}


data = IterableDataset.from_generator(rows, gen_kwargs={"shards": [0, 1, 2, 3]})
data = data.shuffle(seed=7, buffer_size=30).with_format("torch")
loader = DataLoader(data, batch_size=32, num_workers=2 if reading == "alike" else 0)
config = GPT2Config(
    vocab_size=64,
    n_positions=16,
    n_embd=16,
    n_layer=1,
    n_head=2,
    resid_pdrop=0,
    embd_pdrop=0,
    attn_pdrop=0,
)
model = GPT2LMHeadModel(config).double()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
losses = []
for epoch in range(3):
    loader.set_epoch(epoch)
    batches = accelerator.skip_first_batches(loader, 1) if epoch == 1 else loader
    for batch in batches:
        loss = model(**batch).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.reduce(loss.detach(), "mean").item())
if accelerator.is_main_process:
    final = accelerator.unwrap_model(model)
    with open(sys.argv[1], "w") as stream:
        json.dump(
            {"losses": losses, "parameters": [p.tolist() for p in final.parameters()]}, stream
        )
