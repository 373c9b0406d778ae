"""Trainer on token classification with a collator that pads: the loss is a mean over labels."""

import json
import sys

import torch
from transformers import (
    BertConfig,
    BertForTokenClassification,
    Trainer,
    TrainingArguments,
    set_seed,
)

set_seed(1)
config = BertConfig(
    vocab_size=64,
    hidden_size=16,
    num_hidden_layers=1,
    num_attention_heads=2,
    intermediate_size=32,
    hidden_dropout_prob=0,
    attention_probs_dropout_prob=0,
    num_labels=3,
)
model = BertForTokenClassification(config).double()
drawn = torch.Generator().manual_seed(0)
data = []
for _ in range(80):
    ids = torch.randint(1, 64, (int(torch.randint(3, 12, (1,), generator=drawn)),), generator=drawn)
    data.append({"input_ids": ids, "labels": ids % 3})


def pad(rows):
    length = max(len(row["labels"]) for row in rows)

    def filled(name, value):
        return torch.stack(
            [nn_pad(row[name], (0, length - len(row[name])), value=value) for row in rows]
        )

    ids = filled("input_ids", 0)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": filled("labels", -100)}


nn_pad = torch.nn.functional.pad
arguments = TrainingArguments(
    sys.argv[2],
    per_device_train_batch_size=32,
    num_train_epochs=2,
    logging_steps=1,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)


def mean_over_labels(outputs, labels, num_items_in_batch=None):
    return torch.nn.functional.cross_entropy(outputs["logits"].flatten(0, 1), labels.flatten())


trainer = Trainer(
    model, arguments, data_collator=pad, train_dataset=data, compute_loss_func=mean_over_labels
)
trainer.train()
if trainer.is_world_process_zero():
    logs = [{"loss": e["loss"]} for e in trainer.state.log_history if "loss" in e]
    with open(sys.argv[1], "w") as stream:
        parameters = [p.tolist() for p in trainer.model.parameters()]
        json.dump({"logs": logs, "parameters": parameters}, stream)
