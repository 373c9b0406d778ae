"""Trainer on a causal language model with padding: accumulation, evaluation, saving, resuming."""

import json
import sys

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

set_seed(1)
config = GPT2Config(
    vocab_size=64,
    n_positions=32,
    n_embd=16,
    n_layer=1,
    n_head=2,
    resid_pdrop=0,
    embd_pdrop=0,
    attn_pdrop=0,
)
model = GPT2LMHeadModel(config).double()
drawn = torch.Generator().manual_seed(0)
data = []
for _ in range(110):
    length = int(torch.randint(4, 16, (1,), generator=drawn))
    ids = torch.randint(0, 64, (16,), generator=drawn)
    seen = torch.arange(16) < length
    labels = ids.masked_fill(~seen, -100)
    data.append({"input_ids": ids, "labels": labels, "attention_mask": seen.long()})
arguments = TrainingArguments(
    sys.argv[2],
    per_device_train_batch_size=32,
    per_device_eval_batch_size=20,
    gradient_accumulation_steps=2,
    num_train_epochs=3,
    learning_rate=1e-3,
    logging_steps=1,
    eval_strategy="epoch",
    save_steps=3,
    report_to=[],
    fsdp="full_shard auto_wrap" if "fsdp" in sys.argv else None,
    disable_tqdm=True,
)
trainer = Trainer(model, arguments, train_dataset=data, eval_dataset=data[:50])
trainer.train(resume_from_checkpoint=sys.argv[3] if len(sys.argv) > 3 else None)
if trainer.is_world_process_zero():
    names = ("loss", "grad_norm", "learning_rate", "eval_loss")
    logs = [{n: e[n] for n in names if n in e} for e in trainer.state.log_history]
    with open(sys.argv[1], "w") as stream:
        parameters = [p.tolist() for p in trainer.model.state_dict().values()]
        json.dump({"logs": logs, "parameters": parameters}, stream)
