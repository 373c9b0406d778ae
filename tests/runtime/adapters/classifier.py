"""A classifier as in accelerate's own tour: accumulation, clipping, a scheduler, evaluation."""

import json
import sys

import torch
from accelerate import Accelerator, FullyShardedDataParallelPlugin
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
wrapped = {"auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 100}
plugin = FullyShardedDataParallelPlugin(**wrapped) if "fsdp" in sys.argv else None
accelerator = Accelerator(gradient_accumulation_steps=2, fsdp_plugin=plugin)
set_seed(3)
x = torch.randn(161, 6)  # the last batch has one sample
data = TensorDataset(x, (x.sum(1) > 0).long())
train = DataLoader(data, batch_size=32, shuffle=True)
evaluate = DataLoader(data, batch_size=20)
model = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * accelerator.num_processes)
scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4 * accelerator.num_processes, 0.5)
model, optimizer, train, evaluate, scheduler = accelerator.prepare(
    model, optimizer, train, evaluate, scheduler
)
answers = []
for _ in range(2):
    model.train()
    for inputs, targets in train:
        with accelerator.accumulate(model):
            loss = nn.functional.cross_entropy(model(inputs), targets)
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    model.eval()
    right = []
    for inputs, targets in evaluate:
        with torch.no_grad():
            guess = model(inputs).argmax(-1)
        guess, targets = accelerator.gather_for_metrics((guess, targets))
        right.append(guess == targets)
    answers.append(torch.cat(right).tolist())
final = accelerator.unwrap_model(model)
if accelerator.is_main_process:
    with open(sys.argv[1], "w") as stream:
        parameters = [p.tolist() for p in final.state_dict().values()]
        rates = scheduler.get_last_lr()
        json.dump({"right": answers, "rates": rates, "parameters": parameters}, stream)
accelerator.end_training()
