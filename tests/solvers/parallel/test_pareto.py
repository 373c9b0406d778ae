"""What fewer and more devices would do to a plan of three dimensions."""

from dataclasses import replace

from hetflow.schema.parallel import ParallelProblem
from hetflow.solvers.parallel.pareto import alternatives, gains
from hetflow.solvers.parallel.solve import solve
from hetflow.tests.solvers.parallel.every_plan import two_types


def types_of_alternatives(problem: ParallelProblem) -> list[set[str]]:
    found = alternatives(problem, solve(problem), 100)
    return [{g.device_type for stage in one.stages for g in stage.replicas} for one in found]


def test_cheaper_devices_are_points_of_their_own() -> None:
    """Slow devices alone are beaten in time by as many fast ones, never in dollars."""
    problem = two_types()
    priced = replace(
        problem,
        pools=tuple(
            replace(pool, dollars_per_hour=price)
            for pool, price in zip(problem.pools, (9.0, 1.0), strict=True)
        ),
    )
    assert {"slow"} not in types_of_alternatives(problem)
    assert {"slow"} in types_of_alternatives(priced)


def test_what_one_more_device_and_server_buy() -> None:
    problem = two_types()
    plan = solve(problem)
    found = {(g.device_type, g.num_devices): g.step_seconds for g in gains(problem, plan)}
    assert found.keys() == {("fast", 1), ("fast", 4), ("slow", 1), ("slow", 4)}
    assert all(step <= plan.predicted.step_seconds for step in found.values())
    assert found["fast", 4] < found["slow", 4] < plan.predicted.step_seconds
