"""Losses of training scripts: those that virtual nodes train exactly, and those that they cannot.

Each is made from a model, and takes a batch of ``(x, y)``: [samples, 5] and [samples] classes of 3,
of which -100 is no target.
"""

import random

import numpy as np
import torch
from torch import nn

from hetflow import runtime as hf

F = nn.functional


def each(model, x, y):
    return F.cross_entropy(model(x), y.clamp(min=0), reduction="none")


def mean(model):
    return lambda x, y: each(model, x, y).mean()


def smoothed(model):
    return lambda x, y: F.cross_entropy(model(x), y.clamp(min=0), label_smoothing=0.1)


def ignoring(model):
    return lambda x, y: hf.Weighted(F.cross_entropy(model(x), y), int((y != -100).sum()))


def masked(model):
    def loss_of(x, y):
        mask = (x[:, 0] > 0).to(x)
        return hf.Weighted((each(model, x, y) * mask).sum() / mask.sum(), mask.sum())

    return loss_of


def penalised(model):
    return lambda x, y: each(model, x, y).mean() + 0.1 * model[0].weight.square().sum()


def penalised_first(model):
    def loss_of(x, y):
        penalty = sum(weight.data.square().sum() for weight in model.parameters())
        return each(model, x, y).mean() * (1 + 0.01 * penalty)

    return loss_of


def diffusion(model):
    def loss_of(x, y):
        level = torch.rand(len(x), 1, dtype=x.dtype)
        noise = torch.randn_like(x)
        seen = model((1 - level) * x + level * noise)
        return (seen - noise[:, :3]).square().mean()

    return loss_of


def dropped(model):
    return lambda x, y: each(lambda x: model(F.dropout(x, 0.3)), x, y).mean()


def mixed_up(model):
    def loss_of(x, y):
        share, order = np.random.beta(0.4, 0.4), torch.randperm(len(x))  # noqa: NPY002
        logits = model(share * x + (1 - share) * x[order])
        y = y.clamp(min=0)
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[order])

    return loss_of


def with_gradient_penalty(model):
    def loss_of(x, y):
        x = x.requires_grad_()
        found = torch.autograd.grad(each(model, x, y).sum(), x, create_graph=True)[0]
        return each(model, x, y).mean() + found.square().sum(1).mean()

    return loss_of


def scaled_at_random(model):
    rng, counts = np.random.default_rng(0), {"calls": 0}

    def loss_of(x, y):
        counts["calls"] += 1
        return (1 + rng.random() + random.random()) * each(model, x, y).mean()

    return loss_of


RIGHT = {
    f.__name__: f
    for f in (
        mean, smoothed, ignoring, masked, penalised, penalised_first, diffusion, dropped, mixed_up,
        with_gradient_penalty, scaled_at_random,
    )
}  # fmt: skip


def _contrast(model):
    def loss_of(x, y):
        a, b = F.normalize(model(x)), F.normalize(model(x.flip(1)))
        return F.cross_entropy(a @ b.T / 0.2, torch.arange(len(x)))

    return loss_of


def _vae(model):
    def loss_of(x, y):
        made = torch.sigmoid(model(x))
        return F.binary_cross_entropy(made, torch.sigmoid(x[:, :3]), reduction="sum") + 0.5 * (
            model(x).square().sum()
        )

    return loss_of


def _weighted_by_batch(model):
    def loss_of(x, y):
        weights = each(model, x, y).detach()
        return (each(model, x, y) * weights / weights.sum()).sum()

    return loss_of


def _scheduled_by_hand(model):
    counts = {"calls": 0}

    def loss_of(x, y):
        counts["calls"] += 1
        return (1 + 0.01 * counts["calls"]) * each(model, x, y).mean()

    return loss_of


def _carried_on(model):
    state = [0.0]

    def loss_of(x, y):
        seen = torch.tanh(model(x).mean(0) + state[0])
        state[0] = seen.detach()
        return (model(x) * seen.detach()).sum(1).square().mean()

    return loss_of


def _backward_inside(model):
    def loss_of(x, y):
        (0.1 * model(x).square().mean()).backward()
        return each(model, x, y).mean()

    return loss_of


def _standardised(model):
    def loss_of(x, y):
        gain = (x[:, 0] - x[:, 0].mean()) / (x[:, 0].std() + 1e-8)
        return (each(model, x, y) * gain).mean()

    return loss_of


def _masked_mean(model):
    def loss_of(x, y):
        mask = (x[:, 0] > 0).to(x)
        return (each(model, x, y) * mask).sum() / mask.sum()

    return loss_of


OTHERS, SUM, NOT_SAMPLES = "other samples of the batch", "a sum over samples", "something else than"
WRONG = {
    "a pair": (lambda m: lambda x, y: (each(m, x, y).mean(), 3), "returned a tuple of 2"),
    "sum": (lambda m: lambda x, y: each(m, x, y).sum(), SUM),
    "sum / 16": (lambda m: lambda x, y: each(m, x, y).sum() / 16, SUM),
    "vae": (_vae, SUM),
    "in-batch negatives": (_contrast, OTHERS),
    "weights of the batch": (_weighted_by_batch, "so virtual nodes would train on another loss"),
    "top 2": (lambda m: lambda x, y: each(m, x, y).topk(2).values.mean(), "fails on 1 sample"),
    "top half": (
        lambda m: lambda x, y: each(m, x, y).topk((len(x) + 1) // 2).values.mean(), NOT_SAMPLES
    ),
    "log of the mean": (lambda m: lambda x, y: each(m, x, y).mean().log(), NOT_SAMPLES),
    "root of the mean": (lambda m: lambda x, y: m(x).square().mean().sqrt(), NOT_SAMPLES),
    "counts its calls": (_scheduled_by_hand, "depends on its earlier calls"),
    "carried on": (_carried_on, "parts|earlier calls"),
    "backward inside": (_backward_inside, r"calls backward\(\) itself"),
    "standard deviation": (_standardised, "a statistic of the batch"),
    "empty mask": (_masked_mean, "over nothing in one of the parts"),
    "ignored": (lambda m: lambda x, y: F.cross_entropy(m(x), y), "parts"),
    "a fixed batch": (
        lambda m: lambda x, y: F.cross_entropy(m(x), torch.arange(16) % 3), "fails on 1 sample"
    ),
}  # fmt: skip
