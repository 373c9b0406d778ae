"""A GAN by accelerate: two models, two optimizers, three backward passes on a batch."""

import json
import sys

import torch
from accelerate import Accelerator
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.utils.data import DataLoader, TensorDataset

torch.set_default_dtype(torch.float64)
accelerator = Accelerator()
torch.manual_seed(5)
data = TensorDataset(torch.randn(80, 4) + 1, torch.randn(80, 3))
loader = DataLoader(data, batch_size=32, shuffle=True)
generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 4))
critic = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1))
of_generator = torch.optim.Adam(generator.parameters(), lr=0.01)
of_critic = torch.optim.Adam(critic.parameters(), lr=0.01)
generator, critic, of_generator, of_critic, loader = accelerator.prepare(
    generator, critic, of_generator, of_critic, loader
)
for _ in range(2):
    for real, noise in loader:
        of_critic.zero_grad()
        guess = critic(real)
        accelerator.backward(bce(guess, torch.ones_like(guess)))
        guess = critic(generator(noise).detach())
        accelerator.backward(bce(guess, torch.zeros_like(guess)))
        of_critic.step()
        of_generator.zero_grad()
        guess = critic(generator(noise))
        accelerator.backward(bce(guess, torch.ones_like(guess)))
        of_generator.step()
if accelerator.is_main_process:
    with open(sys.argv[1], "w") as stream:
        models = [*generator.parameters(), *critic.parameters()]
        json.dump({"parameters": [p.tolist() for p in models]}, stream)
accelerator.end_training()
