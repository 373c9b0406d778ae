"""The judge refuses a plan of which one field was changed, whatever its kind and its field."""

import json
import random
import re

import pytest
from tests.checks import tampered

from hetflow.schema.files import to_json

A_FEW = 20  # fields of each kind of plan in the fast suite


@pytest.mark.parametrize("name", tampered.QUESTIONS)
@pytest.mark.parametrize(
    "most", [A_FEW, pytest.param(None, marks=pytest.mark.slow)], ids=["a few", "all"]
)
def test_fields_of_plans_are_judged(name: str, most: int | None) -> None:
    solved, draw = tampered.answer(name), random.Random(name)
    assert solved.faults(solved.plan) == []
    paths = [at for at in tampered.places(solved.plan) if tampered.why_not_judged(at) is None]
    accepted, plain = [], json.loads(to_json(solved.plan))
    for path in draw.sample(paths, most) if most else paths:
        for plan in tampered.changed(solved.plan, plain, path, draw):
            if plan is not None and plan != solved.plan and not solved.faults(plan):
                accepted.append(tampered.named(path))
    assert accepted == []


def test_only_fields_that_plans_have_are_left_out() -> None:
    plans = [tampered.answer(name).plan for name in tampered.QUESTIONS]
    known = {tampered.named(path) for plan in plans for path in tampered.places(plan)}
    unknown = [at for at in tampered.NOT_JUDGED if not any(re.match(at, path) for path in known)]
    assert unknown == []
