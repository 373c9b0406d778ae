"""Lightning's average of weights, and a number that with ``late`` comes in the second epoch."""

import json
import sys

import lightning as L
import torch
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
L.seed_everything(3)


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 64), nn.Tanh(), nn.Linear(64, 3))
        self.seen = []

    def training_step(self, batch, batch_idx):
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("loss", loss)
        if self.current_epoch or "late" not in sys.argv:
            self.log("right", (logits.argmax(1) == batch[1]).double().mean())
        return loss

    def on_train_batch_end(self, outputs, batch, batch_idx):
        self.seen.append(float(outputs["loss"]))

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1)


x = torch.randn(90, 6)
model = Classifier()
trainer = L.Trainer(
    accelerator="cpu",
    max_epochs=4,
    logger=False,
    callbacks=[StochasticWeightAveraging(0.05, swa_epoch_start=1)],
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(model, DataLoader(TensorDataset(x, (x.sum(1) > 0).long()), 32, shuffle=True))
if trainer.is_global_zero:
    answers = {
        "losses": model.seen,
        "right": float(trainer.callback_metrics["right"]),
        "parameters": [p.tolist() for p in model.state_dict().values()],
    }
    with open(sys.argv[1], "w") as stream:
        json.dump(answers, stream)
