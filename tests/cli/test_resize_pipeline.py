"""``hetflow resize`` of a running pipeline: which plan is asked for."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetflow.runtime.launcher.generations import check_same_job
from hetflow.runtime.launcher.supervisor import Inbox
from hetflow.runtime.protocol.lower import lower
from hetflow.schema import files
from hetflow.schema.errors import ProblemError
from hetflow.schema.plan import Plan
from hetflow.schema.profile import Profile
from hetflow.tests.plan_parts import with_rounds

from .test_pipeline import LINK, layered, solve

Hetflow = Callable[..., Any]


@pytest.fixture
def folder(tmp_path: Path, make_profile: Callable[..., Profile]) -> Path:
    target = tmp_path / "layered"
    target.mkdir()
    files.write(target / "v100.json", layered(make_profile("V100", 1.0)))
    return target


@pytest.fixture
def plan(hetflow: Hetflow, folder: Path, tmp_path: Path) -> Plan:
    asked = ("--strategy", "pipeline", "--no-replication", *LINK, "-o", tmp_path / "plan.json")
    assert solve(hetflow, folder, *asked).code == 0
    return files.read(tmp_path / "plan.json", Plan)


def test_profiles_cut_the_model_anew_for_the_same_microbatches(
    hetflow: Hetflow, folder: Path, plan: Plan, tmp_path: Path
) -> None:
    box = Inbox(tmp_path)
    box.show(lower(plan))
    ask = ("resize", tmp_path, "--no-wait", "--gpus", "1xV100")
    refused = hetflow(*ask)
    assert refused.code == 2
    assert "a pipeline is cut anew from the profiles of its layers" in refused.stderr
    assert "--profiles" in refused.stderr
    assert hetflow(*ask, "--profiles", folder).code == 0
    found = box.next()
    assert found is not None
    config = found[1].config
    assert config.world_size == 1
    assert config.pipeline is not None
    assert config.pipeline.schedule == plan.schedule
    assert config.pipeline.num_microbatches == plan.num_microbatches
    size, number = plan.microbatch_size * 2, plan.num_microbatches // 2
    stages = with_rounds(plan.stages, number, size)
    larger = replace(plan, microbatch_size=size, num_microbatches=number, stages=stages)
    files.write(tmp_path / "other.json", larger)
    other = hetflow("resize", tmp_path, "--no-wait", "--plan", tmp_path / "other.json")
    assert other.code == 2
    assert "the new plan has 4 microbatches of 16 samples, the job has 8 of 8" in other.stderr
    box.close()


def test_a_parallel_plan_is_changed_by_a_relaunch(
    hetflow: Hetflow, folder: Path, plan: Plan, tmp_path: Path
) -> None:
    target = tmp_path / "parallel.json"
    asked = ("--strategy", "parallel", *LINK, "-o", target)
    assert solve(hetflow, folder, *asked).code == 0
    parallel = lower(files.read(target, Plan))
    box = Inbox(tmp_path)
    box.show(parallel)
    for ask in (("--gpus", "1xV100"), ("--gpus", "1xV100", "--profiles", folder),
                ("--plan", target), ("--plan", tmp_path / "plan.json")):  # fmt: skip
        refused = hetflow("resize", tmp_path, "--no-wait", *ask)
        assert refused.code == 2
        assert "a parallel plan cannot be changed while it runs" in refused.stderr
        assert "launch the new plan with the same folder" in refused.stderr
        assert refused.stderr.count("\n") <= 2
    box.show(lower(plan))
    refused = hetflow("resize", tmp_path, "--no-wait", "--plan", target)
    assert refused.code == 2
    assert "can be resized to another one only, this is a parallel plan" in refused.stderr
    assert "launch the new plan with the same folder" in refused.stderr
    assert box.next() is None
    box.close()
    with pytest.raises(ProblemError, match="a parallel plan cannot be changed"):
        check_same_job(lower(plan), parallel)  # who asks by a file of their own
