"""Square roots at the level heterogeneous: the nearest number, on any processor."""

import sys
from pathlib import Path

import pytest

from hetflow.tests import programs

SCRIPT = """
import warnings

warnings.simplefilter("error")
import numpy as np
import torch
from hetflow.runtime.determinism import apply_level

apply_level("heterogeneous")
draw = torch.Generator().manual_seed(0)
for dtype in (torch.float32, torch.float64):
    for shape in ((), (0, 3), (7,), (33, 65)):
        values = torch.rand(shape, generator=draw, dtype=dtype)
        for one in (values, values.t() if values.dim() == 2 else values, values[..., ::2]
                    if values.dim() else values):
            exact = torch.from_numpy(np.asarray(np.sqrt(one.numpy())))
            found = one.sqrt()
            assert torch.equal(found, exact), (dtype, shape)
            assert found.stride() == torch.empty_like(one).stride()
            assert torch.equal(torch.sqrt(one, out=torch.empty(0, dtype=dtype)), exact)
            assert torch.equal(one.clone().sqrt_(), exact)
            assert all(map(torch.equal, torch._foreach_sqrt([one]), [exact]))
assert torch.tensor([-1.0, 4.0]).sqrt().isnan().tolist() == [True, False]
assert torch.tensor([9]).sqrt().tolist() == [3.0]
half = torch.rand(100, generator=draw).bfloat16()
assert torch.equal(half.sqrt(), half.double().sqrt().bfloat16())
leaf = torch.full((3,), 4.0, requires_grad=True)
leaf.sqrt().sum().backward()
assert leaf.grad.tolist() == [0.25] * 3
print("exact")
"""


@pytest.mark.slow
def test_they_are_rounded_as_ieee_754_says(tmp_path: Path) -> None:
    script = tmp_path / "roots.py"
    script.write_text(SCRIPT)
    done = programs.run([sys.executable, str(script)], timeout=100)
    assert done.stdout.strip() == "exact", done.stderr
