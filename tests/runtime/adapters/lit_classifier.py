"""Lightning's Trainer on a classifier with batch norm, metrics, a plateau and early stopping."""

import json
import sys

import lightning as L
import torch
from lightning.pytorch.callbacks import (
    BasePredictionWriter,
    EarlyStopping,
    LearningRateMonitor,
    ModelCheckpoint,
)
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.strategies import FSDPStrategy
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from torchmetrics.classification import MulticlassF1Score

torch.set_default_dtype(torch.float64)
L.seed_everything(3)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        norm = nn.BatchNorm1d if "norm" in sys.argv else nn.LayerNorm
        self.net = nn.Sequential(
            nn.Linear(6, 16, bias=False), norm(16), nn.Tanh(), nn.Linear(16, 3)
        )
        self.f1 = MulticlassF1Score(3)
        self.seen = []

    def forward(self, x):
        return self.net(x)

    def training_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        right = (logits.argmax(1) == y).double()
        self.log("train_loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        self.log_dict({"train_acc": right.mean(), "num_right": right.sum()})
        self.log("worst", -nn.functional.cross_entropy(logits, y, reduction="none").max())
        return loss

    def validation_step(self, batch, batch_idx):
        x, y = batch
        logits = self(x)
        self.f1(logits, y)
        self.log("val_loss", nn.functional.cross_entropy(logits, y), sync_dist=True)
        self.log("val_f1", self.f1)

    def test_step(self, batch, batch_idx):
        x, y = batch
        self.log("test_loss", nn.functional.cross_entropy(self(x), y), batch_size=len(y))

    def predict_step(self, batch, batch_idx):
        return {"guess": self(batch[0]).argmax(1), "target": batch[1]}

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.02 * self.trainer.world_size)
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0, threshold=0.2)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "monitor": "val_loss"},
        }


class Writer(BasePredictionWriter):
    def __init__(self):
        super().__init__("batch")
        self.written = []

    def write_on_batch_end(self, trainer, module, prediction, indices, batch, number, loader):
        self.written.append({"indices": indices, "guess": prediction["guess"].tolist()})


x = torch.randn(98, 6)  # the last batch has two samples
y = torch.bucketize(x.sum(1), torch.tensor([-1.0, 1.0]))
train = DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True)
val = DataLoader(TensorDataset(x[:51], y[:51]), batch_size=25)
model = Classifier()
writer = Writer()
trainer = L.Trainer(
    strategy=FSDPStrategy(auto_wrap_policy={nn.Linear}) if "fsdp" in sys.argv else "auto",
    max_epochs=4,
    logger=CSVLogger(sys.argv[2]),
    callbacks=[
        EarlyStopping("val_loss", min_delta=0.01, patience=1),
        ModelCheckpoint(monitor="val_f1", mode="max", filename="{epoch}-{val_f1:.6f}"),
        LearningRateMonitor("step"),
        writer,
    ],
    log_every_n_steps=1,
    enable_progress_bar=False,
)
trainer.fit(model, train, val)
tested = trainer.test(model, val, ckpt_path="best", verbose=False)
guesses = trainer.predict(model, val)
trainer.logger.save()
if trainer.is_global_zero:
    with open(f"{trainer.logger.log_dir}/metrics.csv") as stream:
        names, *rows = (line.strip().split(",") for line in stream)
    logged = [
        {n: float(v) for n, v in zip(names, row, strict=True) if v and "hetflow" not in n}
        for row in rows
    ]
    best = trainer.checkpoint_callback
    answers = {
        "logged": logged,
        "seen": model.seen,
        "tested": tested,
        "best": [float(best.best_model_score), best.best_model_path.count("epoch=")],
        "guesses": [{k: v.tolist() for k, v in g.items()} for g in guesses],
        "written": writer.written,
        "epochs": trainer.current_epoch,
        "parameters": [p.tolist() for p in model.state_dict().values()],
    }
    with open(sys.argv[1], "w") as stream:
        json.dump(answers, stream)
