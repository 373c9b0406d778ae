"""The moments of a pass at which devices that share states may hold most."""

import random

import torch
from torch import nn

from hetflow.planning.costs.compute import point_at
from hetflow.planning.costs.memory import most_of
from hetflow.profilers.operator_counts import tallied
from hetflow.profilers.pass_moments import PassWatch
from hetflow.schema.layers import PassMoment
from hetflow.schema.profile import BatchPoint


def drawn(draw: random.Random) -> list[PassMoment]:
    return [
        PassMoment(
            taken_bytes=draw.randint(0, 20),
            weight_bytes=draw.randint(0, 9),
            gradient_bytes=draw.randint(0, 9),
            summed_bytes=draw.randint(0, 15),
        )
        for _ in range(draw.randint(1, 12))
    ]


def held(moments: list[PassMoment], percent: int, counts: int) -> float:
    """The most that is held with a share of the gradients, and with weights if they count."""
    return max(
        one.taken_bytes
        + one.gradient_bytes
        + counts * one.weight_bytes
        + percent / 100 * one.summed_bytes
        for one in moments
    )


def test_what_is_kept_holds_as_much_at_every_share() -> None:
    for seed in range(300):
        every = drawn(random.Random(seed))
        kept = list(most_of(every))
        assert set(kept) <= set(every)
        for percent in range(101):
            for counts in (0, 1):
                assert held(kept, percent, counts) == held(every, percent, counts)


def test_between_two_sizes_no_less_is_held_than_on_the_line() -> None:
    for seed in range(50):
        draw = random.Random(seed)
        low, high = drawn(draw), drawn(draw)
        points = [
            BatchPoint(
                batch_size=size, step_seconds=1.0, peak_memory_bytes=1, moments=most_of(found)
            )
            for size, found in ((2, low), (6, high))
        ]
        between = list(point_at(points, 3).moments)
        for percent in range(0, 101, 10):
            line = 0.75 * held(low, percent, 1) + 0.25 * held(high, percent, 1)
            assert line - 1e-9 <= held(between, percent, 1) < line + 4  # each number is rounded up


def test_a_pass_is_watched_layer_by_layer() -> None:
    """Of equal layers, weights of two are whole while one runs, and gradients twice as one leaves.

    At the loss none is: there the activations are most, and of layers only what is no repeated one.
    The first one comes as the pass begins, the last one when the loss has gone back.
    """
    width, rows, layers = 64, 32, 5

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(width, 8 * width, bias=False)
            self.blocks = nn.ModuleList(
                nn.Sequential(nn.Linear(width, width, bias=False), nn.Tanh()) for _ in range(layers)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = block(x)
            found: torch.Tensor = self.head(x).exp()
            return found

    model = Model()
    inputs = torch.randn(rows, width)
    model(inputs).exp().mean().backward()
    with tallied() as tally:
        watch = PassWatch(model, tally.since)
        with watch.watching():
            model(inputs).exp().mean().backward()
    layer, head = 4 * width * width, 4 * 8 * width * width
    assert watch.most_bytes == tally.peak_bytes
    at_loss = max(watch.moments(), key=lambda one: one.taken_bytes)
    assert at_loss.taken_bytes == tally.peak_bytes
    assert (at_loss.weight_bytes, at_loss.gradient_bytes, at_loss.summed_bytes) == (head, head, 0)
    forward = 2 * layers + 1  # a layer begins or ends, or the loss
    after_loss = watch.every()[forward].weight_bytes
    assert (watch.every()[0].weight_bytes, after_loss) == (head + layer, head + layer)
    last = watch.every()[-1]
    assert last.summed_bytes == head + layers * layer
    assert last.weight_bytes == 0
    whole = [(one.weight_bytes, one.gradient_bytes) for one in watch.every()]
    assert max(whole) == (head + 2 * layer, head + 2 * layer)
    # A layer's gradients are copied end to end as they leave; those of no layer at the end.
    assert watch.every()[forward + 2].gradient_bytes == head + 2 * layer
    assert max(gradients for _, gradients in whole) == 2 * head
    assert not any(block._forward_hooks for block in model.blocks)
