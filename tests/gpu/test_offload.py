"""Activations offloaded on the software device: its bits, its memory, and no race."""

import json

from hetflow.tests.testing.hosts import GpuHost

SCRIPT = """
import json
import torch
import _fakecuda
from torch import nn
from hetflow.runtime.activations import repeated_layers, treat

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.first, self.drop = nn.LayerNorm(96), nn.Linear(96, 384), nn.Dropout(0.1)
        self.last = nn.Linear(384, 96)

    def forward(self, x, mask):
        found = self.last(self.drop(torch.relu(self.first(self.norm(x)))))
        first, second = found.chunk(2, -1)
        return x + torch.cat([first * second.sigmoid(), second * mask], -1)

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(8))

    def forward(self, x):
        mask = x[..., :48].abs()
        for block in self.blocks:
            x = block(x, mask)
        return x.square().mean()

def run(how):
    torch.manual_seed(0)
    model = Model().cuda()
    treat(repeated_layers(model).values(), how)
    x = torch.randn(256, 96, device="cuda")
    model(x).backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    _fakecuda.reset_counts()
    before = torch.cuda.memory_allocated()
    for _ in range(2):
        model(x).backward()
    peak = torch.cuda.max_memory_allocated() - before
    waits = _fakecuda.counts().get("host_sync", 0)
    model(x)  # nothing goes back
    loss = model(x) + model(x)  # layers of two passes
    loss.backward(retain_graph=True)
    loss.backward()
    del loss
    torch.cuda.synchronize()
    left = torch.cuda.memory_allocated() - before
    return [p.grad.tolist() for p in model.parameters()], peak, waits, left

kept, recomputed, offloaded = map(run, ("kept", "recomputed", "offloaded"))
print(json.dumps([kept[0] == recomputed[0], kept[0] == offloaded[0], kept[1:], offloaded[1:]]))
"""


def test_offloaded_layers_train_alike_in_the_memory_of_two(software: GpuHost) -> None:
    """The host waits for nothing; a missing wait of the device would be a race."""
    found = json.loads(software("V100").python(SCRIPT))
    are_equal, (kept_bytes, *_), (offloaded_bytes, host_waits, bytes_left) = found[:2], *found[2:]
    assert are_equal == [True, True]
    assert offloaded_bytes < 3 / 8 * kept_bytes  # of 8 layers two, and what a layer works with
    assert host_waits == 0
    assert bytes_left == 0
