"""Launches whose workers part: they end with an error that names the parameter and the cause."""

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from hetflow.schema import files
from hetflow.schema.plan import Plan
from hetflow.tests import programs
from hetflow.tests.plan_parts import with_replicas

from .elastic_runs import HETFLOW, Launch

SCRIPT = Path(__file__).with_name("parting_script.py")
pytestmark = [pytest.mark.slow, pytest.mark.processes]


@pytest.fixture
def parts(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """What goes wrong in the launches of a test; see ``parting_script.py``."""
    return lambda what: monkeypatch.setenv("PARTING", what)


def test_a_scheduler_that_is_not_registered_is_found_before_the_first_unlike_update(
    tmp_path: Path, parts: Callable[[str], None]
) -> None:
    """A resize used to end with exit code 0 and two models."""
    parts("schedule")
    run = Launch(tmp_path, [4, 4], script=SCRIPT, holds=[5])
    run.wait_for_step(5, workers=2)
    asked = run.resize_later("--gpus", "3xcpu:fast")
    run.wait_for_newcomers(3)
    run.go(5)
    code, err = run.end()
    asked.communicate(timeout=60)
    assert code == 2, err
    assert "body.weight and all of its group would diverge" in err
    assert "lr of the optimizer's group 0 (body.weight) is" in err
    assert "on worker 2" in err
    assert "parting_script.py, line" in err
    assert "hint: set it alike on every worker; give the scheduler" in err
    assert "warning: a learning-rate scheduler steps within the epoch" in err
    assert run.record()["status"] == "failed"


@pytest.mark.parametrize(
    ("step", "options", "since"),
    [
        (5, ["--checkpoint", "saved", "--checkpoint-every", "4"], "(steps 5 to 8)"),
        (12, [], "(steps 11 to 12)"),  # the last one
    ],
)
def test_one_flipped_bit_is_found_and_no_checkpoint_keeps_it(
    tmp_path: Path, parts: Callable[[str], None], step: int, options: list[str], since: str
) -> None:
    parts(f"bit {step}")
    saved = tmp_path / "saved"
    given = ["--compare-every", "10", *(str(saved) if o == "saved" else o for o in options)]
    code, err = Launch(tmp_path, [4, 4], *given, script=SCRIPT).end()
    assert code == 2, err
    assert (
        f"head.weight on worker 1 is not what it is on worker 0: the workers have diverged {since}"
        in err
    )
    assert "memory" in err
    kept = [folder.name for folder in saved.glob("[!.]*")] if saved.exists() else []
    assert kept == (["step-000000004"] if options else [])


def test_replicas_of_a_stage_are_compared_as_well(
    tmp_path: Path, parts: Callable[[str], None], two_stages: Plan
) -> None:
    """The last stage, on worker 2, has nothing to compare but settings."""
    parts("bit 12")
    first, last = two_stages.stages
    stages = (
        with_replicas(
            dataclasses.replace(first, layers=("body",), num_in_flight=3),
            num_replicas=2, samples=16, virtual_nodes=2, virtual_node_batch_size=4,
        ),
        with_replicas(
            dataclasses.replace(last, layers=("relu", "head")),
            first_device=2, samples=16, virtual_nodes=4, virtual_node_batch_size=4,
        ),
    )  # fmt: skip
    plan = dataclasses.replace(
        two_stages,
        stages=stages,
        global_batch_size=16,
        microbatch_size=4,
        num_microbatches=4,
        noam=3,
    )
    files.write(tmp_path / "plan.json", plan)
    command = [*HETFLOW, "launch", "-o", str(tmp_path / "run"), str(tmp_path / "plan.json")]
    done = programs.run(
        [*command, str(SCRIPT), str(tmp_path / "digest"), "4", "0"],
        timeout=120,
    )
    assert done.returncode == 2, done.stderr
    assert "body.weight on worker 1 is not what it is on worker 0" in done.stderr
    assert json.loads((tmp_path / "run" / "run.json").read_text())["status"] == "failed"
