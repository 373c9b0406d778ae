"""Lightning's Trainer on a causal language model of transformers, with padding, in the middle."""

import json
import sys

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader
from transformers import GPT2Config, GPT2LMHeadModel, get_linear_schedule_with_warmup

L.seed_everything(1)


class Language(L.LightningModule):
    def __init__(self, lr=1e-2):
        super().__init__()
        self.save_hyperparameters()
        sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
        config = GPT2Config(**sizes, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0)
        self.model = GPT2LMHeadModel(config)
        self.losses = []

    def training_step(self, batch):
        loss = self.model(**batch).loss
        self.log("train_loss", loss, on_step=True, on_epoch=True)
        return {"loss": loss, "rows": batch["labels"].shape[0] * torch.ones(len(batch["labels"]))}

    def on_before_optimizer_step(self, optimizer):
        squares = [p.grad.square().sum() for p in self.parameters()]
        self.log("grad_norm", torch.stack(squares).sum().sqrt())

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.losses.append(float(outputs["loss"]))

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        self.log("val_loss", self.model(**batch).loss, prog_bar=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = get_linear_schedule_with_warmup(
            optimizer, 2, self.trainer.estimated_stepping_batches
        )
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


class Texts(L.LightningDataModule):
    def setup(self, stage):
        drawn = torch.Generator().manual_seed(0)
        self.rows = []
        for _ in range(110):
            length = int(torch.randint(4, 16, (1,), generator=drawn))
            ids = torch.randint(0, 64, (16,), generator=drawn)
            seen = torch.arange(16) < length
            labels = ids.masked_fill(~seen, -100)
            self.rows.append({"input_ids": ids, "labels": labels, "attention_mask": seen.long()})

    def train_dataloader(self):
        return DataLoader(self.rows, batch_size=32)

    def val_dataloader(self):
        return [DataLoader(self.rows[:50], batch_size=20), DataLoader(self.rows[50:], 20)]


trainer = L.Trainer(
    max_epochs=3,
    precision="64-true",
    accumulate_grad_batches=2,
    gradient_clip_val=0.5,
    logger=False,
    callbacks=[ModelCheckpoint("checkpoints", "{epoch}", save_top_k=-1)],
    enable_progress_bar=False,
    enable_model_summary=False,
    default_root_dir=sys.argv[2],
)
model = Language()
resumed = sys.argv[3] if len(sys.argv) > 3 else None
trainer.fit(model, datamodule=Texts(), ckpt_path=resumed)
answers = {
    "metrics": {k: float(v) for k, v in trainer.callback_metrics.items()},
    "losses": model.losses[-8:],
    "steps": trainer.global_step,
    "rates": trainer.lr_scheduler_configs[0].scheduler.get_last_lr(),
    "parameters": [p.tolist() for p in model.state_dict().values()],
}
if trainer.is_global_zero:
    with open(sys.argv[1], "w") as stream:
        json.dump(answers, stream)
