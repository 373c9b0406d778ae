"""The layer over PuLP: every status is read for what it is."""

import subprocess
import sys
from pathlib import Path

import pytest

from hetflow.schema.errors import BackendError
from hetflow.solvers.lp import Backend, Program

BACKENDS = pytest.mark.parametrize("backend", ["cbc", "highs"])


@BACKENDS
def test_optimal_has_value_and_bound(backend: Backend) -> None:
    program = Program("p")
    x, y = program.variable("x", integer=True), program.variable("y")
    program.require(program.total([(2, x), (1, y)]) >= 3.5)
    solved = program.solve(program.total([(1, x), (3, y)]), backend)
    assert solved.termination == "optimal"
    assert solved.values == {"x": 2, "y": 0}
    assert solved.objective == solved.lower_bound == 2


@BACKENDS
def test_infeasible_carries_no_values(backend: Backend) -> None:
    program = Program("p")
    x = program.variable("x", high=1, integer=True)
    program.require(program.total([(2, x)]) == 1)
    solved = program.solve(program.total([(1, x)]), backend)
    assert (solved.termination, solved.objective, solved.values) == ("infeasible", None, {})


@BACKENDS
def test_gains_of_a_millionth_are_not_left_behind(backend: Backend) -> None:
    program = Program("p")
    choices = [program.variable(f"x{i}", high=1, integer=True) for i in range(4)]
    program.require(program.total([(1, x) for x in choices]) == 1)
    costs = [1.0, 1.0 - 1e-7, 1.0 + 1e-7, 1.0 - 2e-7]
    solved = program.solve(program.total(list(zip(costs, choices, strict=True))), backend)
    assert solved.values["x3"] == 1


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_coefficient_that_is_no_number_is_refused(bad: float) -> None:
    program = Program("p")
    with pytest.raises(BackendError, match="not finite"):
        program.total([(bad, program.variable("x"))])


def test_highs_prints_nothing_on_the_process_stdout(tmp_path: Path) -> None:
    """It greets once in a process, so the process is a new one; what it says spoils --json."""
    code = """if True:
        from hetflow.solvers.lp import LinearSession, Program
        program = Program("p")
        program.require(program.total([(2, x := program.variable("x", integer=True))]) >= 3)
        assert program.solve(program.total([(1, x)]), "highs", 9).objective == 2
        LinearSession().solve()
    """
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=tmp_path
    )
    assert (done.stdout, done.stderr) == ("", "")
