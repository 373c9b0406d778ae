"""The allocation policies as anyone would write them in PuLP with CBC, and in cvxpy with ECOS.

One explicit variable for every job, and with space sharing every pair, on every type. Finish-time
fairness is one convex program in cvxpy and a bisection with CBC; water filling is the thesis's
(5.4.3): for each level a linear program, and a MILP that counts who can still rise.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetflow.solvers.allocation import Instance

RISE = 1e-3  # a job that cannot rise by this part of its level is stuck
ROOM, MILP_ROOM = 1e-9, 2e-7  # floors are loosened by this part
ROUNDING = 1e-6
RHO_ERROR = 1e-6


@dataclass
class Model:
    """Columns with their throughput [jobs, columns], time [jobs, columns], use [types, columns]."""

    reach: Any
    time: Any
    use: Any
    gain: Any
    capacity: Any


def model_of(jobs: Instance, worth: Any) -> Model:
    """All columns of an instance, sparse."""
    from scipy import sparse

    number, types = jobs.rate.shape
    m, c = np.nonzero(jobs.rate > 0)
    a, b, column = m, np.full(len(m), -1), c
    first, second = jobs.rate[m, c], np.zeros(len(m))
    if jobs.pair_rate is not None:
        i, j = np.triu_indices(number, 1)
        both = jobs.pair_rate[jobs.kind[i], jobs.kind[j]]
        back = jobs.pair_rate[jobs.kind[j], jobs.kind[i]]
        fits = (both > 0) & (back > 0) & (jobs.scale[i] == jobs.scale[j])[:, None]
        k, c = np.nonzero(fits & (jobs.rate[i] > 0) & (jobs.rate[j] > 0))
        a, b, column = np.append(a, i[k]), np.append(b, j[k]), np.append(column, c)
        first, second = np.append(first, both[k, c]), np.append(second, back[k, c])
    place, pairs = np.arange(len(a)), np.flatnonzero(b >= 0)
    rows, columns = np.append(a, b[pairs]), np.append(place, pairs)
    values = np.append(first, second[pairs])
    reach = sparse.csr_matrix((values, (rows, columns)), (number, len(a)))
    time = sparse.csr_matrix((np.ones(len(rows)), (rows, columns)), (number, len(a)))
    use = sparse.csr_matrix((jobs.usage[a, column], (column, place)), (types, len(a)))
    gain = worth[a, column] * first + np.where(b >= 0, worth[b, column] * second, 0.0)
    return Model(reach, time, use, gain, jobs.capacity)


def statement(jobs: Instance, policy: str) -> tuple[Any, Any, Any]:
    """The policy as (worth [jobs, types], level [jobs], floor [jobs])."""
    zero, none = np.zeros(jobs.num_jobs), np.zeros_like(jobs.rate)
    if policy == "las":
        return none, jobs.equal / jobs.scale, zero
    if policy == "las_water_filling":
        return none, jobs.weight * jobs.equal / jobs.scale, zero
    if policy == "hierarchical":
        return none, jobs.equal / jobs.scale, zero
    if policy == "makespan":
        return none, jobs.steps, zero
    if policy == "fifo":
        order = jobs.num_jobs - np.arange(jobs.num_jobs)
        return (order / jobs.rate.max(axis=1))[:, None] + none, zero, zero
    if policy == "min_cost_slo":
        return 1.0 / jobs.dollars + none, zero, jobs.steps / jobs.slo_seconds
    return none, zero, zero


class Cbc:
    """PuLP with CBC."""

    name = "pulp+cbc"

    def solve(self, model: Model, gain: Any, level: Any, floor: Any, whole: Any = None) -> Any:
        """Maximise gain . x + z (or the number of whole ones); (objective, whole [jobs])."""
        import pulp

        problem = pulp.LpProblem("allocation", pulp.LpMaximize)
        x = [pulp.LpVariable(f"x{i}", 0) for i in range(model.reach.shape[1])]
        row = np.maximum(model.reach.max(axis=1).toarray().ravel(), 1e-300)
        row = row if whole is None else np.where(floor > 0, floor, row)
        unit = 1.0 / (level / row).max() if level.any() else 1.0
        z = pulp.LpVariable("z")
        binary: dict[int, Any] = {}
        if whole is not None:
            binary = {
                m: pulp.LpVariable(f"y{m}", cat="Binary") for m in np.flatnonzero(whole).tolist()
            }
            problem += pulp.lpSum(binary.values())
        elif level.any():
            problem += z
        else:
            problem += pulp.lpSum(g * v for g, v in zip(gain, x, strict=True) if g)
        for matrix, limit in ((model.time, np.ones(len(row))), (model.use, model.capacity)):
            for i, most in enumerate(limit):
                problem += _sum(matrix, i, x) <= most
        for m in np.flatnonzero((level > 0) | (floor > 0)).tolist():
            reached = _sum(model.reach, m, x, 1 / row[m])
            if m in binary:
                reached = reached - whole[m] / row[m] * binary[m]
            if level[m]:
                reached = reached - level[m] * unit / row[m] * z
            problem += reached >= floor[m] / row[m]
        problem.solve(pulp.PULP_CBC_CMD(msg=False, threads=1))
        chosen = np.zeros(len(row))
        for m, variable in binary.items():
            chosen[m] = variable.varValue or 0.0
        return float(pulp.value(problem.objective)) * (unit if level.any() else 1.0), chosen

    def fairest(self, jobs: Instance, model: Model) -> float:
        """The least largest rho, by bisection."""
        alone = jobs.isolated_seconds + jobs.steps / jobs.isolated
        worst = jobs.elapsed_seconds + jobs.steps / (jobs.isolated * 0.999)
        low, high = float((jobs.elapsed_seconds / alone).max()), float((worst / alone).max())
        while high - low > RHO_ERROR * high:
            rho = 0.5 * (low + high)
            needed = jobs.steps / (rho * alone - jobs.elapsed_seconds)
            share, _ = self.solve(model, model.gain, needed, 0 * needed)
            low, high = (low, rho) if share >= 1 else (rho, high)
        return high


def _sum(matrix: Any, i: int, x: list[Any], scale: float = 1.0) -> Any:
    import pulp

    part = slice(matrix.indptr[i], matrix.indptr[i + 1])
    terms = zip(matrix.indices[part], matrix.data[part], strict=True)
    return pulp.lpSum(float(value) * scale * x[k] for k, value in terms)


class Cvxpy:
    """cvxpy with ECOS (Gavel's solver); its MILPs with HiGHS."""

    name = "cvxpy"

    def solve(self, model: Model, gain: Any, level: Any, floor: Any, whole: Any = None) -> Any:
        """Maximise gain . x + z (or the number of whole ones); (objective, whole [jobs])."""
        import cvxpy

        x = cvxpy.Variable(model.reach.shape[1], nonneg=True)
        limits = [model.time @ x <= 1, model.use @ x <= model.capacity]
        row = np.maximum(model.reach.max(axis=1).toarray().ravel(), 1e-300)
        row = row if whole is None else np.where(floor > 0, floor, row)
        reached = cvxpy.multiply(model.reach @ x, 1 / row)
        if whole is not None:
            chosen = cvxpy.Variable(len(row), boolean=True)
            limits.append(reached >= floor / row + cvxpy.multiply(whole / row, chosen))
            goal = (whole > 0).astype(float) @ chosen
        elif level.any():
            z, unit = cvxpy.Variable(), 1.0 / (level / row).max()
            limits.append(reached >= floor / row + level / row * unit * z)
            goal = z  # of the order of one: ECOS's tolerance is absolute
        else:
            limits.append(reached >= floor / row)
            goal = gain @ x
        problem = cvxpy.Problem(cvxpy.Maximize(goal), limits)
        problem.solve(solver="HIGHS" if whole is not None else "ECOS")
        if whole is not None:
            return float(problem.value), chosen.value
        return float(problem.value) * (unit if level.any() else 1.0), None

    def fairest(self, jobs: Instance, model: Model) -> float:
        """The least largest rho, as one convex program."""
        import cvxpy

        x = cvxpy.Variable(model.reach.shape[1], nonneg=True)
        alone = jobs.isolated_seconds + jobs.steps / jobs.isolated
        # Throughputs in units of the steps, as 1 / (seconds to finish), scaled to about 1.
        unit = float(np.median(alone))
        speed = cvxpy.multiply(model.reach @ x, unit / jobs.steps)
        rho = jobs.elapsed_seconds / alone + cvxpy.multiply(cvxpy.inv_pos(speed), unit / alone)
        limits = [model.time @ x <= 1, model.use @ x <= model.capacity]
        problem = cvxpy.Problem(cvxpy.Minimize(cvxpy.max(rho)), limits)
        problem.solve(solver="ECOS")
        return float(problem.value)


def objective(peer: Any, jobs: Instance, policy: str) -> float:
    """The policy's figure by a peer, as ``ours`` in allocation.py states it."""
    worth, level, floor = statement(jobs, policy)
    model = model_of(jobs, worth)
    if policy == "finish_time_fairness":
        return float(peer.fairest(jobs, model))
    if policy in ("las_water_filling", "hierarchical"):
        return water_filling(peer, jobs, model, policy)
    return float(peer.solve(model, model.gain, level, floor)[0])


def water_filling(peer: Any, jobs: Instance, model: Model, policy: str) -> float:
    """The sum of all levels over weights: a program and a MILP for each level."""
    unit = jobs.equal / jobs.scale
    level, active = np.zeros(jobs.num_jobs), np.ones(jobs.num_jobs, dtype=bool)
    shares = _tree_shares(jobs) if policy == "hierarchical" else lambda on: jobs.weight * on
    while active.any():
        share = shares(active)
        rise, _ = peer.solve(model, model.gain, unit * share, unit * level * (1 - ROOM))
        level = level + max(rise, 0.0) * share
        more = np.where(active, RISE * unit * level, 0.0)
        _, chosen = peer.solve(model, model.gain, 0 * unit, unit * level * (1 - MILP_ROOM), more)
        risen = active & (np.round(chosen) > 0)
        if (risen == active).all():
            # The floors' leeway hides who is stuck; no more to give than that leeway: the end.
            if (rise * share <= ROUNDING * level)[active].all():
                break
            raise RuntimeError("the MILP finds nobody stuck")
        active = risen
    return float(level.sum())


def _tree_shares(jobs: Instance) -> Callable[[Any], Any]:
    """Shares of a flat row of fair entities."""
    heavy = np.array([entity.weight for entity in jobs.entities])

    def shares(active: Any) -> Any:
        inside = np.bincount(jobs.entity, weights=jobs.weight * active, minlength=len(heavy))
        whole = heavy[inside > 0].sum()
        part = np.where(inside > 0, heavy / np.maximum(inside, 1e-300), 0.0) / whole
        return np.where(active, part[jobs.entity] * jobs.weight, 0.0)

    return shares
