"""A policy is one file: the one that docs/policies.md shows works as soon as it lies there."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from hetflow.checks.allocation import check
from hetflow.schema.errors import ProblemError
from hetflow.solvers.allocation import (
    Policy,
    all_policies,
    allocate,
    instance_of,
    policies,
    policy_named,
    solve,
)

PAGE = Path(__file__).resolve().parents[3] / "docs" / "policies.md"


@pytest.fixture
def own_policy(tmp_path, monkeypatch):
    [text] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "even_progress.py").write_text(text, encoding="utf-8")
    monkeypatch.setattr(policies, "__path__", [*policies.__path__, str(tmp_path)])
    all_policies.cache_clear()
    yield "even_progress"
    all_policies.cache_clear()


def test_the_policy_of_the_page_works_in_every_setting(own_policy, draw):
    for changes in ({}, {"space_sharing": True}, {"heterogeneity": "agnostic"}):
        asked = draw(4, **changes)
        found = allocate(asked, own_policy)
        assert check(found, asked) == []
        same = allocate(asked, "makespan").certificate.objective
        assert 1 / found.certificate.objective == pytest.approx(same, rel=1e-9)


def test_it_is_gone_with_its_file(draw):
    with pytest.raises(ProblemError, match="no policy"):
        allocate(draw(4), "even_progress")


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
