"""Stages whose replicas share weights: launches and their checkpoints, and what is refused."""

import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from hetflow.runtime.protocol.lower import lower
from hetflow.schema import files
from hetflow.schema.errors import ProblemError
from hetflow.schema.plan import Plan
from hetflow.tests import programs

from .sharded_plans import shared
from .test_pipeline import CHAIN2, CHAIN4, make_plan

HERE = Path(__file__).parent
LAYERS = (
    "words",
    *(f"blocks.{n}.{name}" for n in range(3) for name in ("norm", "up", "down")),
    "head",
)


def staged(at: tuple[int, ...], shares: tuple[int, ...], *, recompute: bool) -> Plan:
    """A plan of stages that begin at these layers, on two positions."""
    cut = tuple(LAYERS[a:b] for a, b in pairwise((0, *at, len(LAYERS))))
    schedule = "1f1b" if len(cut) == 2 else "interleaved"
    plan = make_plan(schedule, cut, (2, 2), 4, recompute, shares)
    stages = []
    for stage in plan.stages:
        groups = (replace(g, samples=4, virtual_node_batch_size=2) for g in stage.replicas)
        stages.append(replace(stage, replicas=tuple(groups)))
    return replace(plan, global_batch_size=8, microbatch_size=2, stages=tuple(stages))


@pytest.mark.slow
@pytest.mark.processes
def test_checkpoints_move_between_stages_and_splits(
    tmp_path: Path, plan_of: Callable[..., Plan]
) -> None:
    """Tied weights over both positions, and blocks in several stages; AdamW, clipped."""

    def launch(plan: Plan, epochs: int) -> dict[str, Any]:
        files.write(tmp_path / f"{epochs}.json", plan)
        command = [sys.executable, "-m", "hetflow.cli.main", "launch", "-o", tmp_path / f"{epochs}"]
        command += ["--checkpoint", tmp_path / "kept", tmp_path / f"{epochs}.json"]
        saved = tmp_path / f"{epochs}.pt"
        done = programs.run([*command, HERE / "sharded_run.py", str(epochs), saved], timeout=240)
        assert done.returncode == 0, done.stderr
        found: dict[str, Any] = torch.load(saved)
        return found

    launch(staged((5,), (1, 3), recompute=False), 1)
    launch(shared(plan_of([(2, 2), (2, 2)]), "all", (1000, 3000)), 2)
    launch(staged((8,), (1, 1), recompute=True), 3)
    found = launch(staged((3, 5, 9), (3, 1), recompute=True), 4)
    done = programs.run(
        [sys.executable, HERE / "sharded_run.py", "4", tmp_path / "one.pt"], timeout=60
    )
    assert done.returncode == 0, done.stderr
    torch.testing.assert_close(found, torch.load(tmp_path / "one.pt"), rtol=1e-10, atol=1e-12)


def test_stages_that_do_not_run_alike_are_refused() -> None:
    plan = staged((5,), (1, 1), recompute=False)
    assert lower(plan).shard == "all"
    one = replace(plan.stages[1].replicas[0], samples=8, virtual_nodes=4)
    fewer = replace(plan.stages[1], replicas=(one,))
    wrong = [
        (replace(plan, stages=(plan.stages[0], fewer)), "unlike numbers of replicas"),
        (replace(plan, stages=(plan.stages[0], replace(fewer, shard=None))), "weights of all"),
        (make_plan("2bw", CHAIN2, (2, 2), 6, False, (1, 1)), "updates in between"),
        (make_plan("zb-h1", CHAIN4, (2,) * 4, 8, False, (1, 1)), "halves"),
    ]
    for other, said in wrong:
        with pytest.raises(ProblemError, match=said):
            lower(other)
