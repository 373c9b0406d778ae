"""A script for Trainer, as people have it: GPT-2 from its configuration, on drawn tokens.

It was written for one process, torchrun or accelerate. The callback writes when steps ended.
"""

import argparse
import json
import os
import time
from pathlib import Path

import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=60)
parser.add_argument("--steps", type=int, default=20)
parser.add_argument("--out", type=Path, default=Path("out"))
options = parser.parse_args()


class Times(TrainerCallback):
    """Seconds on the wall and of this process's arithmetic at the end of each step."""

    def __init__(self):
        self.walls, self.cpus, self.losses = [], [], []

    def on_step_end(self, args, state, control, **kwargs):
        """Note the time."""
        self.walls.append(time.perf_counter())
        self.cpus.append(time.process_time())

    def on_log(self, args, state, control, logs=None, **kwargs):
        """Note the loss."""
        if "loss" in (logs or {}):
            self.losses.append(float(logs["loss"]))

    def on_train_end(self, args, state, control, **kwargs):
        """Write what was noted."""
        options.out.mkdir(parents=True, exist_ok=True)
        found = {"walls": self.walls, "cpus": self.cpus, "losses": self.losses}
        path = options.out / f"times-{os.environ.get('RANK', '0')}.json"
        path.write_text(json.dumps(found))


set_seed(1)
config = GPT2Config(
    vocab_size=512, n_positions=32, n_embd=128, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0,
    resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
)  # fmt: skip
drawn = torch.Generator().manual_seed(0)
rows = torch.randint(0, 512, (1200, 32), generator=drawn)
trainer = Trainer(
    GPT2LMHeadModel(config),
    TrainingArguments(
        str(options.out),
        per_device_train_batch_size=options.batch_size,
        max_steps=options.steps,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        logging_steps=5,
        use_cpu=not torch.cuda.is_available(),  # else torchrun's workers train apart on a CPU
        dataloader_pin_memory=False,
    ),
    train_dataset=[{"input_ids": row, "labels": row} for row in rows],
    callbacks=[Times()],
)
trainer.train()
