"""A policy is one file, also outside the package: the one in docs/policies.md works as written."""

import dataclasses
import importlib
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from hetflow.planning.checks.allocation import check
from hetflow.planning.checks.judges import JUDGES, judge_of
from hetflow.schema.errors import ProblemError
from hetflow.solvers.allocation import Policy, allocate, instance_of, policy_named, solve
from hetflow.solvers.allocation.policy import POLICIES

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "plugins" / "even_progress" / "even_progress.py"


@pytest.fixture
def own_policy(tmp_path, monkeypatch):
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    [text] = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    (tmp_path / "even_progress.py").write_text(text, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.import_module("even_progress")  # the decorator alone registers it in a process
    yield "even_progress"
    POLICIES.remove("even_progress")
    JUDGES.remove("even_progress")
    del sys.modules["even_progress"]


def test_the_page_shows_the_example_plug_in():
    page = (ROOT / "docs" / "policies.md").read_text(encoding="utf-8")
    assert EXAMPLE.read_text(encoding="utf-8") in page


def test_the_policy_of_the_page_works_in_every_setting(own_policy, draw):
    for changes in ({}, {"space_sharing": True}, {"heterogeneity": "agnostic"}):
        asked = draw(4, **changes)
        found = allocate(asked, own_policy)
        assert check(found, asked) == []
        same = allocate(asked, "makespan").certificate.objective
        assert 1 / found.certificate.objective == pytest.approx(same, rel=1e-9)


def test_its_claim_is_judged(own_policy, draw):
    asked = draw(4)
    found = allocate(asked, own_policy)
    told = dataclasses.replace(found.certificate, objective=1.1 * found.certificate.objective)
    faults = check(dataclasses.replace(found, certificate=told), asked)
    assert any("stated" in fault and "computed" in fault for fault in faults), faults


def test_it_is_gone_with_its_file(draw):
    with pytest.raises(ProblemError, match="no policy"):
        allocate(draw(4), "even_progress")
    assert judge_of("even_progress") is None


def test_a_goal_of_ones_own_optimises_itself(draw):
    class HalfOf:
        """Half of what a goal reaches."""

        def __init__(self, goal):
            self.goal = goal

        def optimise(self, instance):
            found = self.goal.optimise(instance)
            return replace(found, x=found.x / 2, objective=found.objective / 2)

    las, instance = policy_named("las"), instance_of(draw(4))
    half = Policy(
        name="half", title="half of LAS", sense="max", unit="1", goal=lambda i: HalfOf(las.goal(i))
    )
    whole, found = solve(instance, las), solve(instance, half)
    assert found.objective == whole.objective / 2
    assert (found.x == whole.x / 2).all()
