"""The only module that touches LP and MILP libraries: build, solve, read back.

It works around these traps: PuLP reports a run stopped by its time limit as Optimal (only
``sol_status`` differs); by default HiGHS stops at a gap of 1e-4 and CBC ignores gains under 1e-5;
both accept NaN silently; infeasible models still carry values; HiGHS prints a banner on the
process's stdout before its maker can turn that off, which would spoil what a command prints.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from ..schema.errors import BackendError

Backend = Literal["cbc", "highs"]


@dataclass(frozen=True, slots=True)
class Solved:
    """A backend's answer, its status translated.

    ``values`` is empty unless there is a solution. ``lower_bound`` is None where the backend
    does not tell it.
    """

    termination: Literal["optimal", "feasible", "infeasible", "unknown"]
    objective: float | None
    lower_bound: float | None
    values: dict[str, float]


class Program:
    """A minimisation under construction; a thin, checked layer over PuLP."""

    def __init__(self, name: str) -> None:
        import pulp

        # hetflow pins pulp<4 (4 drops the bundled CBC): its warnings about 4 help nobody here.
        getattr(pulp, "set_v4_migration_warnings", bool)(False)
        self._pulp: Any = pulp
        self._model: Any = pulp.LpProblem(name, pulp.LpMinimize)

    def variable(self, name: str, *, high: float | None = None, integer: bool = False) -> Any:
        """A variable of at least 0, whole if ``integer``."""
        kind = self._pulp.LpInteger if integer else self._pulp.LpContinuous
        return self._pulp.LpVariable(name, 0, high, kind)

    def total(self, terms: Sequence[tuple[float, Any]]) -> Any:
        """The sum of coefficient * variable.

        Raises:
            BackendError: A coefficient is NaN or infinite, which no backend refuses.
        """
        if not all(math.isfinite(factor) for factor, _ in terms):
            raise BackendError("a coefficient of the program is not finite")
        return self._pulp.lpSum(factor * variable for factor, variable in terms)

    def require(self, constraint: Any) -> None:
        """Add a constraint, as PuLP's comparisons make them."""
        self._model += constraint

    def solve(
        self, objective: Any, backend: Backend, time_limit_seconds: float | None = None
    ) -> Solved:
        """Minimise ``objective`` to a gap of zero, or until the time limit.

        Raises:
            BackendError: The library fails, or its answer makes no sense.
        """
        self._model.setObjective(objective)
        solver = self._solver(backend, time_limit_seconds)
        try:
            self._model.solve(solver)
        except self._pulp.PulpError as error:
            raise BackendError(f"{backend} failed: {error}") from None
        return self._read_back(backend)

    def _solver(self, backend: Backend, time_limit_seconds: float | None) -> Any:
        if backend == "cbc":
            return self._pulp.PULP_CBC_CMD(
                msg=False,
                gapRel=0.0,
                gapAbs=0.0,
                timeLimit=time_limit_seconds,
                # By default CBC ignores gains under 1e-5, and calls that optimal.
                options=["increment 1e-11", "primalTolerance 1e-9", "integerTolerance 1e-9"],
            )
        options = {
            "threads": 1, "mip_rel_gap": 0.0, "mip_abs_gap": 0.0,
            "mip_feasibility_tolerance": 1e-9, "primal_feasibility_tolerance": 1e-9,
        }  # fmt: skip
        if time_limit_seconds is not None:
            options["time_limit"] = float(time_limit_seconds)

        class Quiet(self._pulp.HiGHS):  # type: ignore[misc, name-defined]
            def createAndConfigureSolver(self, lp: Any) -> None:
                lp.solverModel = _silent_highs(options)

        return Quiet(msg=False)

    def _read_back(self, backend: Backend) -> Solved:
        termination = self._termination(backend)
        if termination in ("infeasible", "unknown"):
            return Solved(termination, None, None, {})
        values = {variable.name: variable.varValue for variable in self._model.variables()}
        objective = self._pulp.value(self._model.objective)
        if any(value is None for value in values.values()) or not math.isfinite(objective):
            raise BackendError(f"{backend} reports a solution but gives no values")
        bound = objective if termination == "optimal" else self._bound(backend)
        return Solved(termination, objective, bound, values)

    def _termination(
        self, backend: Backend
    ) -> Literal["optimal", "feasible", "infeasible", "unknown"]:
        pulp, found = self._pulp, self._model.sol_status
        if found == pulp.LpSolutionOptimal:
            return "optimal"
        if found == pulp.LpSolutionIntegerFeasible:
            return "feasible" if self._has_solution(backend) else "unknown"
        if self._model.status == pulp.LpStatusInfeasible:
            return "infeasible"
        return "unknown"

    def _has_solution(self, backend: Backend) -> bool:
        if backend != "highs":
            return True
        # PuLP says "integer feasible" whenever HiGHS ran out of time, solution or not.
        status = self._model.solverModel.getInfo().primal_solution_status
        return int(status) == 2  # kSolutionStatusFeasible

    def _bound(self, backend: Backend) -> float | None:
        if backend != "highs":
            return None  # CBC's command line does not hand its bound back
        bound = float(self._model.solverModel.getInfo().mip_dual_bound)
        return bound if math.isfinite(bound) else None


def _silent_highs(options: Mapping[str, float | bool]) -> Any:
    """A HiGHS that prints nothing from its first instruction on, with these options."""
    import highspy

    class Silent(highspy.Highs):
        # From highspy 1.16 on, ``Highs()`` prints when it sets its callbacks up, before it
        # returns. So output is off from the start of that step, and again afterwards for versions
        # without it.
        def enableCallbacks(self) -> None:
            self.setOptionValue("output_flag", False)
            super().enableCallbacks()  # type: ignore[no-untyped-call]

    highs: Any = Silent()  # type: ignore[no-untyped-call]
    for name, value in {"output_flag": False, **options}.items():
        highs.setOptionValue(name, value)
    return highs


def assign(cost: Any) -> tuple[Any, Any]:
    """The assignment of rows to columns of least total cost; every row gets a column.

    ``cost`` is finite [rows, columns], with at least as many columns as rows.

    Returns:
        Rows and their columns.

    Raises:
        BackendError: A cost is NaN or infinite.
    """
    import numpy
    from scipy.optimize import linear_sum_assignment

    if not numpy.isfinite(cost).all():
        raise BackendError("a cost of the assignment is not finite")
    rows, columns = linear_sum_assignment(cost)
    return rows, columns


@dataclass(frozen=True, slots=True)
class LinearAnswer:
    """An optimum of a linear program: values [columns], prices (duals) [rows]."""

    objective: float
    values: Any
    prices: Any


class LinearSession:
    """A linear program held open in HiGHS: changed a little, solved again from its last basis.

    It maximises. Columns are at least 0. Rows and columns are numbered as they were added.
    """

    def __init__(self, *, generates_columns: bool = False) -> None:
        """Start with an empty program; ``generates_columns`` says that columns join an optimum."""
        import highspy
        import numpy

        self._np: Any = numpy
        self._optimal: Any = highspy.HighsModelStatus.kOptimal
        self._highs: Any = _silent_highs({
            "threads": 1, "random_seed": 0,
            "primal_feasibility_tolerance": 1e-9, "dual_feasibility_tolerance": 1e-9,
        })  # fmt: skip
        self._highs.changeObjectiveSense(highspy.ObjSense.kMaximize)
        # HiGHS's numbers of the dual and the primal simplex method.
        self._dual, self._primal, self._grown = 1, 4, False
        self._generates_columns = generates_columns
        self._empty: Any = (numpy.zeros(0, numpy.int32), numpy.zeros(0))

    def add_rows(self, low: Any, high: Any) -> None:
        """Add empty rows with bounds [rows]."""
        starts = self._np.zeros(len(low), self._np.int32)
        self._highs.addRows(len(low), low, high, 0, starts, *self._empty)

    def add_full_rows(self, low: Any, starts: Any, columns: Any, values: Any) -> None:
        """Add rows of at least ``low`` in compressed form, like ``add_columns``.

        Raises:
            BackendError: A coefficient is NaN or infinite, which no backend refuses.
        """
        if not (self._np.isfinite(values).all() and self._np.isfinite(low).all()):
            raise BackendError("a coefficient of the program is not finite")
        high = self._np.full(len(low), self._np.inf)
        starts, columns = starts.astype(self._np.int32), columns.astype(self._np.int32)
        self._highs.addRows(len(low), low, high, len(values), starts, columns, values)

    def add_columns(self, cost: Any, starts: Any, rows: Any, values: Any) -> None:
        """Add columns in compressed form: column i holds entries starts[i] to starts[i + 1].

        Raises:
            BackendError: A coefficient is NaN or infinite, which no backend refuses.
        """
        if not (self._np.isfinite(values).all() and self._np.isfinite(cost).all()):
            raise BackendError("a coefficient of the program is not finite")
        number = len(cost)
        low, high = self._np.zeros(number), self._np.full(number, self._np.inf)
        starts, rows = starts.astype(self._np.int32), rows.astype(self._np.int32)
        self._grown = True
        self._highs.addCols(number, cost, low, high, len(values), starts, rows, values)

    def set_coefficient(self, row: int, column: int, value: float) -> None:
        """Change one coefficient."""
        self._highs.changeCoeff(row, column, value)

    def set_rows(self, rows: Any, low: Any, high: Any) -> None:
        """Change the bounds of some rows."""
        self._highs.changeRowsBounds(len(rows), rows.astype(self._np.int32), low, high)

    def set_column(self, column: int, high: float) -> None:
        """Change the upper bound of one column."""
        self._highs.changeColBounds(column, 0.0, high)

    def solve(self, with_prices: bool = True) -> LinearAnswer | None:
        """Maximise; None where HiGHS finds no optimum (infeasible, unbounded, numbers)."""
        # A basis from before there were new columns is still a primal one.
        # The primal method goes on from there; the dual one, HiGHS's choice, after changes of
        # bounds.
        if self._generates_columns:
            strategy = self._primal if self._grown else self._dual
            self._highs.setOptionValue("simplex_strategy", strategy)
        self._grown = False
        self._highs.run()
        if self._highs.getModelStatus() != self._optimal:
            self._highs.clearSolver()  # the old basis may be what leads astray
            self._highs.run()
        if self._highs.getModelStatus() != self._optimal:
            return None
        solution = self._highs.getSolution()
        return LinearAnswer(
            float(self._highs.getObjectiveValue()),
            self._np.array(solution.col_value),
            self._np.array(solution.row_dual if with_prices else []),
        )
