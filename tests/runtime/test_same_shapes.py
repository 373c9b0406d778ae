"""Workers compare the shapes of each model that a script builds."""

from pathlib import Path

import pytest

from hetflow.schema import files

from .conftest import _plan_of
from .gloo_workers import run_workers

_SCRIPT = """
import os
import sys
import time
import torch
from hetflow.runtime.group import join
from hetflow.runtime.protocol.environment import PLAN, read_environment
from hetflow.runtime.setup import check_same_shapes
from hetflow.schema.errors import TargetError

os.environ[PLAN] = sys.argv[1]
place = join(read_environment())
check_same_shapes({"weight": torch.zeros(2)}, place)
if place.rank == 0:
    time.sleep(0.5)  # the other comes to the second model first
check_same_shapes({"weight": torch.zeros(3)}, place)
try:
    check_same_shapes({"weight": torch.zeros(4 + place.rank)}, place)
except TargetError as error:
    assert place.rank == 1 and "another model than worker 0" in str(error), error
else:
    assert place.rank == 0
"""


@pytest.mark.slow
@pytest.mark.processes
def test_a_second_model_is_not_compared_with_the_first_one(tmp_path: Path) -> None:
    script = tmp_path / "shapes.py"
    script.write_text(_SCRIPT)
    files.write(tmp_path / "plan.json", _plan_of([(1, 1), (1, 1)]))
    run_workers(script, 2, tmp_path / "plan.json", seconds=60)
