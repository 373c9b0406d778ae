"""The judge refuses a plan for every way of being wrong, and accepts the right one."""

from dataclasses import replace

import pytest

from hetflow.planning.checks.batch_split import check
from hetflow.schema.plan import Plan, Prediction, Proof, ReplicaGroup
from hetflow.schema.problem import DeviceCosts, DeviceOption, SplitProblem
from hetflow.schema.profile import BatchPoint, Sync, SyncPoint
from hetflow.tests.plan_parts import split_plan, whole_group, with_groups


def option(name: str, number: int, speed: float, update: float) -> DeviceOption:
    return DeviceOption(
        device_type=name,
        num_devices=number,
        batch_curve=tuple(
            BatchPoint(batch_size=s, step_seconds=s / speed, peak_memory_bytes=1) for s in (2, 4)
        ),
        update_seconds=update,
        weight_bytes=1,
        sync=Sync(num_devices=2, sync_seconds=0.25),
        interpolated_sizes=(),
    )


PROBLEM = SplitProblem(
    model="m", global_batch_size=20, devices=(option("A", 2, 4.0, 0.5), option("B", 1, 2.0, 1.0))
)


def group(name: str, number: int, passes: int, size: int, seconds: float | None) -> ReplicaGroup:
    return whole_group(
        device_type=name,
        num_devices=number,
        device_batch_size=passes * size,
        virtual_nodes=passes,
        virtual_node_batch_size=size,
        pass_seconds=seconds,
    )


# 2 A x 2 x 4 and 1 B x 2 x 2: both 2.0 s; sync 0.25 s, update 1.0 s.
PLAN = split_plan(
    model="m",
    global_batch_size=20,
    groups=(group("A", 2, 2, 4, 1.0), group("B", 1, 2, 2, 1.0)),
    predicted=Prediction(
        step_seconds=3.25,
        samples_per_second=20 / 3.25,
        compute_seconds=2.0,
        sync_seconds=0.25,
        update_seconds=1.0,
    ),
    proof=Proof(termination="optimal", objective=3.25, lower_bound=3.25, gap=0.0, method="by hand"),
)


def test_a_right_plan_has_no_faults() -> None:
    assert check(PLAN, PROBLEM) == []
    assert check(PLAN, None) == []


def predicted(**changes: float) -> Plan:
    return replace(PLAN, predicted=replace(PLAN.predicted, **changes))


def proof(**changes: object) -> Plan:
    return replace(PLAN, proof=replace(PLAN.proof, **changes))


def groups(*changed: ReplicaGroup) -> Plan:
    return with_groups(PLAN, groups=changed)


A, B = PLAN.groups
ALONE = [
    (predicted(step_seconds=3.25 + 1e-8), "add up to 3.25 s"),
    (predicted(samples_per_second=6.0), "is not the global batch of 20"),
    (predicted(compute_seconds=1.9, step_seconds=3.15), "as long as the passes of no group"),
    (groups(replace(A, pass_seconds=2.0), B), "a group takes 4.0 s before its update"),
    (proof(objective=3.2, lower_bound=3.2), "is not the predicted step time"),
    (proof(lower_bound=None, gap=None), "optimal without a lower_bound"),
    (proof(lower_bound=3.3), "is above the objective"),
    (proof(gap=0.1), "gap is 0.1"),
    (proof(lower_bound=3.0, gap=0.25 / 3.25), "optimal, but the bound leaves a gap"),
    (replace(PLAN, objective="waste"), "est: missing"),
]


@pytest.mark.parametrize(("plan", "fault"), ALONE, ids=[fault for _, fault in ALONE])
def test_a_plan_at_odds_with_itself_is_refused(plan: Plan, fault: str) -> None:
    assert any(fault in found for found in check(plan, None))


def slower(seconds: float) -> Plan:
    """A plan whose numbers agree with each other but not with the profiles."""
    step = seconds + 1.25
    return with_groups(
        PLAN,
        groups=(replace(A, pass_seconds=None), replace(B, pass_seconds=None)),
        predicted=replace(
            PLAN.predicted,
            compute_seconds=seconds,
            step_seconds=step,
            samples_per_second=20 / step,
        ),
        proof=replace(PLAN.proof, objective=step, lower_bound=step),
    )


AGAINST = [
    (replace(PLAN, model="other"), "model is 'other'"),
    (groups(group("A", 2, 2, 4, 1.0), group("C", 1, 2, 2, 1.0)), "'C' is not usable; there are A"),
    (groups(group("A", 4, 1, 4, 1.0), group("B", 1, 1, 4, 2.0)), "4 devices of A are used"),
    (groups(A, group("B", 1, 1, 4, 2.0)), None),
    (groups(group("A", 2, 1, 8, 2.0), B), "a pass of 8 samples on A is not profiled"),
    (groups(replace(A, pass_seconds=1.1), B), "pass_seconds is 1.1, counted 1.0"),
    (groups(replace(A, interpolated=True), B), "interpolated is True"),
    (slower(1.9), "predicted.compute_seconds is 1.9, counted 2.0"),
    (slower(1.9), "predicted.step_seconds is 3.15"),
    (slower(0.4), "predicted.step_seconds is 1.65, counted"),
]


@pytest.mark.parametrize(("plan", "fault"), AGAINST, ids=[str(fault) for _, fault in AGAINST])
def test_a_plan_at_odds_with_its_problem_is_refused(plan: Plan, fault: str | None) -> None:
    faults = check(plan, PROBLEM)
    assert any(fault in found for found in faults) if fault else faults == []


def test_another_batch_is_refused() -> None:
    other = replace(PROBLEM, global_batch_size=24)
    assert "global_batch_size is 20, the problem asks for 24" in check(PLAN, other)


def test_the_uniform_regime_fixes_number_and_size() -> None:
    faults = check(PLAN, replace(PROBLEM, virtual_nodes=5))
    assert "the plan has 6 virtual nodes, the problem asks for 5" in faults
    assert any("virtual nodes hold 2 samples; 5 of them need 4" in fault for fault in faults)


def test_an_optimal_claim_is_refuted_by_an_obvious_plan() -> None:
    """All on B takes 11 s; two As with 10 samples each take 2.5 + 0.25 + 0.5 s."""
    step = 10.0 + 1.0
    plan = with_groups(
        PLAN,
        groups=(group("B", 1, 5, 4, 2.0),),
        predicted=Prediction(step_seconds=step, samples_per_second=20 / step),
        proof=replace(PLAN.proof, objective=step, lower_bound=step),
    )
    faults = check(plan, PROBLEM)
    assert len(faults) == 1
    assert "refuted by 2 A x 5 x 2, 3.25 s" in faults[0]
    honest = replace(plan.proof, termination="feasible", lower_bound=2.5, gap=8.5 / 11)
    assert check(replace(plan, proof=honest), PROBLEM) == []


def test_a_single_device_must_not_claim_synchronisation() -> None:
    plan = with_groups(
        PLAN,
        groups=(group("B", 1, 5, 4, 2.0),),
        predicted=Prediction(
            step_seconds=11.25,
            samples_per_second=20 / 11.25,
            compute_seconds=10.0,
            sync_seconds=0.25,
            update_seconds=1.0,
        ),
        proof=replace(PLAN.proof, objective=11.25, lower_bound=11.25),
    )
    assert any("one device has nothing to synchronise" in fault for fault in check(plan, None))


def est_plan() -> tuple[Plan, SplitProblem]:
    from hetflow.papers.easyscale.waste import solve

    problem = replace(PROBLEM, virtual_nodes=5)
    return solve(problem, top=3), problem


EST = [
    ("waste", 9.0, "waste: is 9.0"),
    ("throughput", 9.0, "throughput: is 9.0"),
    ("overload_factor", 9.0, "overload_factor: is 9.0"),
    ("num_ests", 9, "num_ests: is 9"),
    ("max_p", 4, "max_p: the groups do not hold 4 ESTs"),
    ("capability", {"A": 1.0, "B": 0.7}, "capability of B is not 1 / t(4)"),
    ("capability", {"B": 0.5}, "capability: missing for A"),
]


@pytest.mark.parametrize(("field", "value", "fault"), EST, ids=[f"{e[0]} {e[1]}" for e in EST])
def test_a_wrong_estimate_is_refused(field: str, value: object, fault: str) -> None:
    plan, problem = est_plan()
    assert check(plan, problem) == []
    wrong = replace(plan.est, **{field: value})
    assert any(fault in found for found in check(replace(plan, est=wrong), problem))
    first = replace(plan.alternatives[0], est=replace(plan.alternatives[0].est, **{field: value}))
    altered = replace(plan, alternatives=(first, *plan.alternatives[1:]))
    assert any("alternatives[0]" in found for found in check(altered, problem))


def test_alternatives_must_be_ranked_and_hold_the_batch() -> None:
    plan, problem = est_plan()
    second, third = plan.alternatives
    best = with_groups(third, groups=plan.groups, est=plan.est)
    out_of_order = with_groups(
        plan, groups=third.groups, est=third.est, alternatives=(second, best)
    )
    assert any("a higher throughput than" in fault for fault in check(out_of_order, None))
    short = with_groups(second, groups=second.groups[:1])
    faults = check(replace(plan, alternatives=(short,)), problem)
    assert any("samples, not 20" in fault for fault in faults)


def test_a_plan_that_says_it_is_uniform_is_held_to_it_without_profiles() -> None:
    assert any("differ from 20/5" in fault for fault in check(_uniform(PLAN, 5), None))
    alike = with_groups(PLAN, groups=(group("A", 2, 2, 4, 1.0), group("B", 1, 1, 4, 2.0)))
    assert check(_uniform(alike, 5), None) == []
    assert any("not uniform_virtual_nodes 4" in fault for fault in check(_uniform(alike, 4), None))


def _uniform(plan: Plan, nodes: int) -> Plan:
    return replace(plan, uniform_virtual_nodes=nodes)


def busy_problem() -> SplitProblem:
    """Two devices at 1.2 s a pass beside each other, at 1 s alone; with parts and spreads."""
    curve = tuple(
        BatchPoint(
            batch_size=size,
            step_seconds=seconds,
            peak_memory_bytes=1,
            load_seconds=0.2,
            virtual_node_seconds=0.1,
            step_seconds_error=0.02,
        )
        for size, seconds in ((8, 1.2), (24, 3.64))
    )
    alone = DeviceCosts(
        batch_curve=tuple(replace(p, step_seconds=p.step_seconds / 1.2) for p in curve),
        update_seconds=0.2,
        fixed_seconds=0.1,
    )
    device = replace(option("A", 2, 1.0, 0.3), batch_curve=curve, fixed_seconds=0.15, alone=alone)
    return SplitProblem(model="m", global_batch_size=96, devices=(device,))


def altered(plan: Plan, **predicted: object) -> Plan:
    return replace(plan, predicted=replace(plan.predicted, **predicted))


def test_terms_and_intervals_are_recomputed() -> None:
    from hetflow.solvers.split.solve import solve

    problem = busy_problem()
    plan = solve(problem)
    assert plan.num_devices == 2
    assert check(plan, problem) == []
    told = plan.predicted
    moved = told.load_seconds / 2
    wrong = {
        "load_seconds is": altered(
            plan, load_seconds=moved, compute_seconds=told.compute_seconds + moved
        ),
        "virtual_node_seconds is": altered(
            plan,
            virtual_node_seconds=None,
            compute_seconds=told.compute_seconds + told.virtual_node_seconds,
        ),
        "update_seconds is": altered(
            plan, fixed_seconds=None, update_seconds=told.update_seconds + told.fixed_seconds
        ),
        "step_seconds_high is": altered(plan, step_seconds_high=told.step_seconds_high * 1.01),
        "step_seconds_low is": altered(plan, step_seconds_low=told.step_seconds_low * 0.99),
        "step_seconds_high is None": altered(plan, step_seconds_low=None, step_seconds_high=None),
        "come together": altered(plan, step_seconds_low=None),
        "is not within": altered(plan, step_seconds_low=told.step_seconds * 1.01),
        "its parts add up": altered(plan, fixed_seconds=None),
        "measured_busy is False": with_groups(
            plan, groups=tuple(replace(g, measured_busy=False) for g in plan.groups)
        ),
    }
    for fault, found in wrong.items():
        assert any(fault in said for said in check(found, problem)), fault


def test_what_a_size_hides_of_synchronisation_is_recomputed() -> None:
    from hetflow.solvers.split.solve import solve

    points = tuple(
        SyncPoint(batch_size=size, sync_seconds=seconds) for size, seconds in ((8, 0.9), (24, 0.2))
    )
    problem = busy_problem()
    (device,) = problem.devices
    sync = Sync(num_devices=2, sync_seconds=0.5, by_batch_size=points)
    problem = replace(problem, devices=(replace(device, sync=sync),))
    plan = solve(problem)
    assert plan.groups[0].virtual_node_batch_size == 24
    assert plan.groups[0].exposed_seconds == 0.0
    assert check(plan, problem) == []
    moved = with_groups(plan, groups=tuple(replace(g, exposed_seconds=0.1) for g in plan.groups))
    assert any("exposed_seconds is 0.1" in fault for fault in check(moved, problem))
    told = plan.predicted
    hidden = altered(plan, sync_seconds=0.1, update_seconds=told.update_seconds + 0.1)
    assert any("predicted.sync_seconds is 0.1" in fault for fault in check(hidden, problem))
    small = with_groups(
        plan,
        groups=tuple(replace(g, virtual_nodes=6, virtual_node_batch_size=8) for g in plan.groups),
    )
    assert any("exposed_seconds is 0.0" in fault for fault in check(small, problem))


def test_a_gap_is_optimal_only_within_its_tolerance() -> None:
    from hetflow.solvers.split.solve import solve

    problem = busy_problem()
    simple, fastest = solve(problem), solve(problem, fastest=True)
    assert 0 < simple.proof.gap < 0.02
    bare = replace(simple, proof=replace(simple.proof, tolerance=None))
    assert any("leaves a gap" in fault for fault in check(bare, None))
    narrow = replace(simple, proof=replace(simple.proof, tolerance=simple.proof.gap / 2))
    assert any("beyond its tolerance" in fault for fault in check(narrow, None))
    wide = replace(simple, proof=replace(simple.proof, tolerance=0.1))
    assert any("wider than any spread" in fault for fault in check(wide, problem))
    said = replace(fastest, proof=replace(fastest.proof, tolerance=simple.proof.tolerance))
    assert any("and simpler" in fault for fault in check(said, problem))
    unknown = replace(problem.devices[0], alone=None)
    other = replace(problem, devices=(unknown,))
    assert any("measured_busy is True" in fault for fault in check(simple, other))
