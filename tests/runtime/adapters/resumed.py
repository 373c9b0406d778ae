"""LoRA of peft's with accelerate's states: save in the middle, load, lower rates on plateaus."""

import json
import sys

import torch
from accelerate import Accelerator, DataLoaderConfiguration
from accelerate.utils import ProjectConfiguration, set_seed
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

answer, folder, *saved = sys.argv[1:]
torch.set_default_dtype(torch.float64)
accelerator = Accelerator(
    dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True),
    project_config=ProjectConfiguration(project_dir=folder),
)
set_seed(3)
x = torch.randn(75, 6)
data = TensorDataset(x, x[:, :2].square())
loader = DataLoader(data, batch_size=32, shuffle=True)
layers = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 2))
model = get_peft_model(layers, LoraConfig(r=2, target_modules=["0", "2"], lora_dropout=0.0))
optimizer = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.1)
scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
accelerator.register_for_checkpointing(scheduler)
first, seen = 0, 0
if saved:
    accelerator.load_state(saved[0])
    first, seen = 1, 2
losses = []
for epoch in range(first, 4):
    loader.set_epoch(epoch)
    skipped = seen if epoch == first else 0
    batches = accelerator.skip_first_batches(loader, skipped) if skipped else loader
    for step, (inputs, targets) in enumerate(batches, skipped):
        loss = nn.functional.mse_loss(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        scheduler.step(losses[-1])
        if (epoch, step) == (1, 1) and not saved:
            accelerator.save_state(folder)
            break
    if not saved and epoch == 1:
        break
evaluation, evaluated = accelerator.prepare(DataLoader(data, batch_size=20)), []
for inputs, targets in evaluation:  # as accelerate's examples do
    with torch.no_grad():
        loss = nn.functional.mse_loss(model(inputs), targets)
    evaluated.append(accelerator.gather_for_metrics(loss.repeat(20)))
losses.append(torch.cat(evaluated).mean().item())
trained = [p for p in accelerator.unwrap_model(model).parameters() if p.requires_grad]
if accelerator.is_main_process and saved:
    with open(answer, "w") as stream:
        rates = [group["lr"] for group in optimizer.param_groups]
        parameters = [p.tolist() for p in trained]
        json.dump({"losses": losses, "rates": rates, "parameters": parameters}, stream)
torch.set_default_dtype(torch.float32)
