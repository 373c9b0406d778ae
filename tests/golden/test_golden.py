"""Plans, allocations, simulations, launch configurations and trained bits stay as they are.

On the machine that computed the golden answers the comparison is of bytes. Elsewhere another
release of a library, or another processor, may round the last digits otherwise: numbers are then
compared to ``NEAR``, and digests of what holds such numbers are not. Nor are certificates: an
optimum has many, and rounding decides which one is found (tests/checks confirm them).
"""

import json
from pathlib import Path
from typing import Any

import pytest

from . import answers
from .inputs import write_inputs

NEAR = 1e-6


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("golden")
    write_inputs(made)
    return made


@pytest.fixture(scope="module")
def golden() -> tuple[dict[str, str], dict[str, str]]:
    return answers.read()


def compare(found: str, expected: str, made_on: dict[str, str]) -> None:
    if made_on == answers.machine():
        assert found == expected
    else:
        assert _rounded(json.loads(found)) == _Near(_rounded(json.loads(expected)))


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        left_out = ("sha256", "digest", "characters", "certificate")
        return {key: _rounded(entry) for key, entry in value.items() if key not in left_out}
    return value


class _Near:
    """Equal to documents of the same form whose numbers are near."""

    def __init__(self, value: Any) -> None:
        self.value = value

    def __eq__(self, other: object) -> bool:
        mine = self.value
        if isinstance(mine, dict) and isinstance(other, dict):
            return mine.keys() == other.keys() and all(other[k] == _Near(mine[k]) for k in mine)
        if isinstance(mine, list) and isinstance(other, list):
            return len(mine) == len(other) and all(map(_Near.__eq__, map(_Near, mine), other))
        if isinstance(mine, float):
            return bool(other == pytest.approx(mine, rel=NEAR, abs=NEAR))
        return bool(mine == other)

    def __repr__(self) -> str:
        return f"near {self.value!r}"


def test_no_case_is_lost(golden: tuple[dict[str, str], dict[str, str]]) -> None:
    assert sorted(golden[1]) == sorted((*answers.COMMANDS, *answers.TRAININGS))
    assert len(golden[1]) >= 60


# Calls the water filling often enough that it is compiled, for 20 CPU s in a new clone.
_COMPILES = "simulate-policy-las_water_filling"


@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.slow] * (n == _COMPILES)) for n in answers.COMMANDS],
)
def test_a_command_answers_as_before(
    name: str, folder: Path, golden: tuple[dict[str, str], dict[str, str]]
) -> None:
    compare(answers.of_command(name, folder), golden[1][name], golden[0])


def test_trainings_end_with_the_same_bits(
    folder: Path, golden: tuple[dict[str, str], dict[str, str]]
) -> None:
    found = answers.of_trainings(folder)
    assert sorted(found) == sorted(answers.TRAININGS)
    for name, answer in found.items():
        compare(answer, golden[1][name], golden[0])
