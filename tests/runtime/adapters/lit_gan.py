"""A GAN as in Lightning's own examples: manual optimization, two optimizers, their toggles."""

import json
import sys

import pytorch_lightning as L
import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
L.seed_everything(5)


class Gan(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
        self.critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
        self.logged = []

    def training_step(self, batch, batch_idx):
        real, noise = batch
        of_generator, of_critic = self.optimizers()
        self.toggle_optimizer(of_generator)
        guess = self.critic(self.generator(noise))
        loss = bce(guess, torch.ones_like(guess))
        self.log("generator", loss, prog_bar=True)
        self.manual_backward(loss)
        of_generator.step()
        of_generator.zero_grad()
        self.untoggle_optimizer(of_generator)
        self.toggle_optimizer(of_critic)
        guess = self.critic(real)
        real_loss = bce(guess, torch.ones_like(guess))
        guess = self.critic(self.generator(noise).detach())
        loss = (real_loss + bce(guess, torch.zeros_like(guess))) / 2
        self.log("critic", loss, prog_bar=True)
        self.manual_backward(loss)
        self.clip_gradients(of_critic, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
        of_critic.step()
        of_critic.zero_grad()
        self.untoggle_optimizer(of_critic)
        if self.trainer.is_last_batch:
            self.lr_schedulers().step()

    def on_train_batch_end(self, outputs, batch, batch_idx):
        metrics = self.trainer.callback_metrics
        self.logged.append({k: float(v) for k, v in metrics.items()})

    def configure_optimizers(self):
        of_generator = torch.optim.Adam(self.generator.parameters(), lr=0.01, betas=(0.5, 0.9))
        of_critic = torch.optim.Adam(self.critic.parameters(), lr=0.01, betas=(0.5, 0.9))
        return [of_generator, of_critic], [torch.optim.lr_scheduler.StepLR(of_critic, 1, 0.5)]


data = TensorDataset(torch.randn(80, 4) + 1, torch.randn(80, 3))
gan = Gan()
trainer = L.Trainer(
    accelerator="auto",
    devices=1,
    max_epochs=3,
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
)
trainer.fit(gan, DataLoader(data, batch_size=32, shuffle=True))
if trainer.is_global_zero:
    with open(sys.argv[1], "w") as stream:
        parameters = [p.tolist() for p in gan.parameters()]
        json.dump({"logged": gan.logged, "parameters": parameters}, stream)
