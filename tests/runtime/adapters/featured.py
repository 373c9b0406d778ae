"""Trainer with its arguments: `smooth` (early stopping, ...), `stream`, `bf16` or `generated`."""

import json
import sys

import torch
from transformers import (
    EarlyStoppingCallback,
    GPT2Config,
    GPT2LMHeadModel,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

answer, folder, kind, *saved = sys.argv[1:]
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
    use_cache=False,
    bos_token_id=None,
    eos_token_id=None,
)
model = GPT2LMHeadModel(config)
model = model if kind == "bf16" else model.double()
drawn = torch.Generator().manual_seed(0)
rows = []
for _ in range(110):
    ids = torch.randint(0, 64, (int(torch.randint(4, 16, (1,), generator=drawn)),), generator=drawn)
    rows.append({"input_ids": ids.tolist(), "labels": ids.tolist()})


def pad(rows):
    ids = [torch.as_tensor(row["input_ids"]) for row in rows]
    ids = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=-100)
    return {
        "input_ids": ids.clamp(min=0),
        "attention_mask": (ids >= 0).long(),
        "labels": ids,
    }


def right(predicted):
    labels = predicted.label_ids[:, 1:]
    guesses = predicted.predictions.argmax(-1)[:, :-1]
    return {"right": float((guesses == labels)[labels >= 0].mean())}


class Seen(TrainerCallback):
    """Notes the losses that callbacks are told."""

    def __init__(self):
        self.losses = []

    def on_log(self, args, state, control, logs=None, **others):
        """Note the loss."""
        self.losses += [logs["loss"]] if "loss" in logs else []


seen = Seen()
common = {
    "per_device_train_batch_size": 32,
    "per_device_eval_batch_size": 20,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "report_to": [],
    "disable_tqdm": True,
}
if kind == "stream":
    from datasets import IterableDataset

    data = IterableDataset.from_generator(lambda: iter(rows)).shuffle(seed=5, buffer_size=40)
    arguments = TrainingArguments(folder, max_steps=7, save_steps=3, **common)
    options = {}
elif kind == "bf16":
    data = rows
    arguments = TrainingArguments(folder, bf16=True, use_cpu=True, save_strategy="no", **common)
    options = {}
elif kind == "generated":
    data, evaluated = rows, {"eval_strategy": "epoch", "predict_with_generate": True}
    common |= evaluated | {"generation_max_length": 18, "generation_num_beams": 1}
    arguments = Seq2SeqTrainingArguments(folder, num_train_epochs=1, save_strategy="no", **common)
    options = {"eval_dataset": rows[:50]}
else:
    data = rows
    is_old = "group_by_length" in TrainingArguments.__dataclass_fields__
    by_length = (
        {"group_by_length": True} if is_old else {"train_sampling_strategy": "group_by_length"}
    )
    arguments = TrainingArguments(
        folder,
        num_train_epochs=6,
        gradient_accumulation_steps=2,
        label_smoothing_factor=0.1,
        gradient_checkpointing=True,
        **by_length,
        dataloader_num_workers=2,
        eval_strategy="epoch",
        save_strategy="epoch",
        load_best_model_at_end=True,
        metric_for_best_model="right",
        greater_is_better=False,
        save_total_limit=2,
        **common,
    )
    options = {
        "eval_dataset": rows[:50],
        "compute_metrics": right,
        "callbacks": [EarlyStoppingCallback(2)],
    }
made = Seq2SeqTrainer if kind == "generated" else Trainer
trainer = made(model, arguments, data_collator=pad, train_dataset=data, **options)
trainer.add_callback(seen)
trainer.train(resume_from_checkpoint=saved[0] if saved else None)
if trainer.is_world_process_zero():
    names = ("loss", "grad_norm", "learning_rate", "eval_loss", "eval_right")
    logs = [{n: e[n] for n in names if n in e} for e in trainer.state.log_history]
    best = int((trainer.state.best_model_checkpoint or "-0").rsplit("-", 1)[1])
    told = seen.losses[-4:]
    with open(answer, "w") as stream:
        parameters = [p.tolist() for p in trainer.model.parameters()]
        if kind == "bf16":
            json.dump({"rough": [entry.get("loss", 0) for entry in logs]}, stream)
        else:
            json.dump({"logs": logs, "best": best, "told": told, "parameters": parameters}, stream)
