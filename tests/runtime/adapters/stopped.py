"""Trainer until it is told to stop: ANSWER FOLDER [resume]; logs to TensorBoard, a slow model."""

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn
from transformers import Trainer, TrainerCallback, TrainingArguments, set_seed
from transformers.trainer_utils import get_last_checkpoint

answer, folder, *options = sys.argv[1:]
set_seed(1)


class Layers(nn.Module):
    """A model as Trainer wants it."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 6)).double()

    def forward(self, x, labels=None):
        """The outputs and their loss."""
        found = self.layers(x)
        return {"loss": nn.functional.mse_loss(found, labels), "logits": found}


class Slow(TrainerCallback):
    """Tells that some steps are done, and waits for a signal."""

    def on_step_end(self, args, state, control, **others):
        """Wait a little after each step."""
        if "slow" in options:
            Path(folder).with_suffix(".stepped").touch()
            time.sleep(0.3)


x = torch.randn(90, 6, dtype=torch.float64)
arguments = TrainingArguments(
    folder,
    per_device_train_batch_size=32,
    max_steps=12,
    logging_steps=1,
    save_strategy="no",
    report_to="tensorboard",
    disable_tqdm=True,
)
rows = [{"x": row, "labels": row.square()} for row in x]
trainer = Trainer(Layers(), arguments, train_dataset=rows, callbacks=[Slow()])
trainer.train(resume_from_checkpoint=get_last_checkpoint(folder) if "resume" in options else None)
if trainer.is_world_process_zero():
    logs = [{n: e[n] for n in ("loss", "grad_norm") if n in e} for e in trainer.state.log_history]
    with open(answer, "w") as stream:
        parameters = [p.tolist() for p in trainer.model.parameters()]
        json.dump({"logs": logs, "parameters": parameters}, stream)
