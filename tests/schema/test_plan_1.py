"""Plans of the older form are read as those that the planners make today."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hetflow.schema import files
from hetflow.schema.errors import FileError
from hetflow.schema.plan import Alternative, Plan, Stage
from hetflow.schema.run import RunRecord
from hetflow.tests.checks import tampered

FOLDER = Path(__file__).parents[1] / "data" / "plan_1"
NAMES = sorted(path.stem for path in FOLDER.glob("*.json"))


@pytest.mark.parametrize("name", NAMES)
def test_a_plan_of_the_older_form_is_read(name: str) -> None:
    """Written by the last version of that form; today's planner has the same answer."""
    question = tampered.answer(name.replace("-", " "))
    found = files.read(FOLDER / f"{name}.json", Plan)
    if name in (
        "parallel",
        "chunked-parallel",
    ):  # its price has changed: messages are hidden behind passes
        assert found.proof.objective > question.plan.proof.objective
        priced = ("proof", "predicted", "alternatives")
        found = replace(found, **{field: getattr(question.plan, field) for field in priced})
    if name in ("equal-virtual-nodes", "least-waste"):
        # As slow by its passes as another type, whose longer update was stated; one device's now.
        today = question.plan.predicted
        assert found.predicted.step_seconds == pytest.approx(today.step_seconds, rel=1e-12)
        found = replace(found, predicted=today)
    # Sums in another order since then: the last digit of seconds.
    assert found.proof.objective == pytest.approx(question.plan.proof.objective, rel=1e-12)
    sums = {
        field: getattr(found, field)
        for field in ("provenance", "proof", "predicted", "with_more_devices")
    }
    plan = replace(question.plan, **sums)
    if name == "interleaved":  # a stage states what all of its device take since
        found = _with_memory(found, [stage.memory_bytes for stage in plan.stages])
    is_split = plan.kind == "split"  # of that form they stated none
    assert found == (_with_memory(plan, [None] * len(plan.stages)) if is_split else plan)
    assert question.faults(found) == []


def _with_memory(plan: Plan, memory_bytes: list[int | None]) -> Plan:
    """A plan whose stages state this; and its alternatives nothing, where it does not."""

    def stages(of: Plan | Alternative, stated: list[int | None]) -> tuple[Stage, ...]:
        return tuple(
            replace(stage, replicas=tuple(replace(r, memory_bytes=own) for r in stage.replicas))
            for stage, own in zip(of.stages, stated, strict=True)
        )

    others = plan.alternatives
    if None in memory_bytes:
        others = tuple(replace(o, stages=stages(o, [None] * len(o.stages))) for o in others)
    return replace(plan, stages=stages(plan, memory_bytes), alternatives=others)


def test_a_run_record_of_an_older_plan_is_read(tmp_path: Path) -> None:
    plan = json.loads((FOLDER / "1f1b.json").read_text())
    record = {
        "schema": "hetflow.run/1", "plan": plan, "status": "done", "exit_code": 0,
        "world_size": 2, "wall_seconds": 1.0, "num_steps": 3, "predicted_step_seconds": None,
        "measured_step_seconds": None, "step_seconds_error": None, "final_loss": None,
        "parameters_digest": None, "devices": [],
    }  # fmt: skip
    (tmp_path / "run.json").write_text(json.dumps(record))
    assert files.read(tmp_path / "run.json", RunRecord).plan.kind == "pipeline"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"kind": "cut"}, "$.kind: must be one of split, pipeline, parallel"),
        ({"groups": 3}, "$.groups: unknown key"),
        ({"colour": 1}, "$.colour: unknown key"),
        ({"groups": [{"device_type": "A"}]}, "$.stages: missing"),
    ],
)
def test_faults_of_the_older_form_are_one_line(
    tmp_path: Path, changes: dict[str, Any], said: str
) -> None:
    document = json.loads((FOLDER / "split.json").read_text()) | changes
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(document))
    with pytest.raises(FileError) as caught:
        files.read_any(path)
    assert said in caught.value.message
