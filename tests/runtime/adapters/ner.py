"""Token classification with padding, as accelerate's run_ner_no_trainer.py: labels count alike."""

import json
import sys

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch.utils.data import DataLoader
from transformers import BertConfig, BertForTokenClassification, get_scheduler

answer, folder = sys.argv[1:]
accelerator = Accelerator(
    gradient_accumulation_steps=2, split_batches=True, log_with="tensorboard", project_dir=folder
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
for _ in range(100):
    length = int(torch.randint(3, 12, (1,), generator=drawn))
    data.append(torch.randint(1, 64, (length,), generator=drawn))


def pad(rows):
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
    labels = (ids % 3).masked_fill(ids == 0, -100)
    return {"input_ids": ids, "attention_mask": (ids > 0).long(), "labels": labels}


train = DataLoader(data, shuffle=True, collate_fn=pad, batch_size=32)
evaluation = DataLoader(data[:45], collate_fn=pad, batch_size=20)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = get_scheduler("linear", optimizer, num_warmup_steps=0, num_training_steps=8)
model, optimizer, train, evaluation, scheduler = accelerator.prepare(
    model, optimizer, train, evaluation, scheduler
)
accelerator.init_trackers("ner")
losses, steps, rates, found = [], [], [], []
for epoch in range(3):
    model.train()
    total_loss = 0
    for batch in train:
        with accelerator.accumulate(model):
            outputs = model(**batch)
            loss = outputs.loss
            total_loss += loss.detach().float()
            accelerator.backward(loss)
            steps.append(accelerator.gather(loss).mean().item())
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    losses.append(total_loss.item() / len(train))
    accelerator.log({"train_loss": losses[-1]}, step=epoch)
    rates.append(scheduler.get_last_lr()[0])
    model.eval()
    for batch in evaluation:
        with torch.no_grad():
            outputs = model(**batch)
        predictions = outputs.logits.argmax(dim=-1)
        labels = batch["labels"]
        predictions = accelerator.pad_across_processes(predictions, dim=1, pad_index=-100)
        labels = accelerator.pad_across_processes(labels, dim=1, pad_index=-100)
        predictions, labels = accelerator.gather_for_metrics((predictions, labels))
        found += [int(right) for right in (predictions == labels)[labels != -100]]
for tracker in accelerator.trackers:
    tracker.finish()
if accelerator.is_main_process:
    final = accelerator.unwrap_model(model)
    with open(answer, "w") as stream:
        json.dump(
            {
                "losses": losses,
                "steps": steps,
                "rates": rates,
                "found": found,
                "parameters": [p.tolist() for p in final.parameters()],
            },
            stream,
        )
