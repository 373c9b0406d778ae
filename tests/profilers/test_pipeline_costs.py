"""Costs of a pipeline's passes, messages and steps: the fit finds what made the steps."""

import dataclasses

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from hetflow.devices.backend import DeviceRequest, LocalDevice
from hetflow.devices.cpu import cpu_device
from hetflow.profilers.layers import graph_of
from hetflow.profilers.measurer import Measurer
from hetflow.profilers.pipeline_costs import affordable, launch_config, measure_pipeline, trials_of
from hetflow.profilers.pipeline_fit import KnownCosts, Ring, Trial, fit_costs
from hetflow.profilers.targets import parse
from hetflow.profilers.timing import RepeatPolicy
from hetflow.runtime.measurements import StepTimes
from hetflow.runtime.protocol.lower import lower
from hetflow.schema.launch import LaunchConfig
from hetflow.schema.plan import Prediction, Proof
from hetflow.schema.profile import LayerGraph, LayerNode, LinkPoint, Links, PipelineCosts
from hetflow.tests.plan_parts import pipeline_plan, pipeline_stage
from hetflow.tests.profiles import examples

pytestmark = pytest.mark.measures

SECONDS = st.floats(1e-4, 1e-2)
COST = st.floats(0, 5e-3)


def graph(*seconds: float, activation_bytes: int = 10_000) -> LayerGraph:
    nodes = tuple(
        LayerNode(
            id=f"layer{number}", op="Linear", forward_seconds=each, backward_seconds=2 * each,
            activation_bytes=activation_bytes, weight_bytes=1000,
        )
        for number, each in enumerate(seconds)
    )  # fmt: skip
    edges = tuple((f"layer{i}", f"layer{i + 1}") for i in range(len(seconds) - 1))
    return LayerGraph(microbatch_size=4, nodes=nodes, edges=edges)


def profiled(*seconds: float, scale: float = 1.0) -> KnownCosts:
    point = LinkPoint(num_bytes=1024, there_seconds=1e-4, back_seconds=1e-4, both_seconds=1e-4)
    links = Links(latency_seconds=1e-4, bytes_per_second=1e8, points=(point,))
    return KnownCosts(graph=graph(*seconds), links=links, update_seconds=2e-3, scale=scale)


def test_a_step_is_counted_as_by_hand() -> None:
    two = profiled(0.01, 0.01, scale=2.0)
    costs = PipelineCosts(pass_seconds=1e-3, message_seconds=2e-3, fixed_seconds=5e-3)
    forward, backward, message = 0.021, 0.041, 1e-4 + 2e-3
    # GPipe: the last stage runs all, after one message and before another; half of the update.
    expected = forward + message + 3 * (forward + backward) + message + backward + 1e-3 + 5e-3
    trial = Trial(cut=1, schedule="gpipe", num_microbatches=3)
    assert two.step_seconds(trial, costs) == pytest.approx(expected)


@settings(max_examples=examples(15))
@given(st.lists(SECONDS, min_size=4, max_size=8), COST, COST, COST)
@example([0.00390625, 0.00301, 0.00301, 0.00457], 0.00390625, 0.00301, 0.00457)
@pytest.mark.slow
def test_planted_costs_are_found(
    seconds: list[float], one_pass: float, message: float, fixed: float
) -> None:
    known = profiled(*seconds)
    planted = PipelineCosts(pass_seconds=one_pass, message_seconds=message, fixed_seconds=fixed)
    trials = trials_of(known.graph)
    measured = [known.step_seconds(trial, planted) for trial in trials]
    found = fit_costs(known, trials, measured)
    # Costs that no step shows apart may be exchanged; what counts is every step.
    for trial in (*trials, Trial(cut=2, schedule="1f1b", num_microbatches=16)):
        expected = known.step_seconds(trial, planted)
        assert known.step_seconds(trial, found) == pytest.approx(expected, rel=0.02)


def test_costs_that_steps_tell_apart_are_each_found() -> None:
    known = profiled(*[0.004] * 8)
    planted = PipelineCosts(pass_seconds=5e-4, message_seconds=3e-4, fixed_seconds=2e-3)
    trials = trials_of(known.graph)
    measured = [known.step_seconds(trial, planted) for trial in trials]
    measured[3] *= 2  # one disturbed
    found = fit_costs(known, trials, measured)
    assert found.pass_seconds == pytest.approx(5e-4, rel=1e-3)
    assert found.message_seconds == pytest.approx(3e-4, rel=1e-3)
    assert found.fixed_seconds == pytest.approx(2e-3, rel=1e-3)
    assert found.step_error is not None
    assert found.step_error < 1e-3  # the median's, not the disturbed one's


def test_nothing_is_negative_where_steps_are_shorter_than_their_layers() -> None:
    known = profiled(*[0.004] * 4)
    trials = trials_of(known.graph)
    nothing = PipelineCosts(pass_seconds=0.0, message_seconds=0.0, fixed_seconds=0.0)
    found = fit_costs(known, trials, [0.9 * known.step_seconds(t, nothing) for t in trials])
    assert (found.pass_seconds, found.message_seconds, found.fixed_seconds) == (0, 0, 0)
    assert found.step_error == pytest.approx(1 / 9)


def test_few_trials_where_steps_are_long() -> None:
    known = profiled(*[0.004] * 8)
    assert affordable(known, 1e9) == trials_of(known.graph)
    few = affordable(known, 0.0)
    assert [trial.num_replicas for trial in few] == [1, 1, 1, 1, 2, 2]
    assert len({trial.num_microbatches for trial in few}) == 2
    assert len({trial.schedule for trial in few}) == 2
    assert len({trial.cut for trial in few}) == 3


def test_one_stage_on_both_devices_is_counted_as_by_hand() -> None:
    both = dataclasses.replace(profiled(0.01, 0.01), reduce_seconds=0.03)
    costs = PipelineCosts(pass_seconds=1e-3, message_seconds=2e-3, fixed_seconds=5e-3)
    trial = Trial(cut=2, schedule="1f1b", num_microbatches=6, num_replicas=2)
    # Three microbatches each, no message, one all-reduce and the whole update.
    expected = 3 * (0.02 + 0.04 + 2e-3) + 0.03 + 2e-3 + 5e-3
    assert both.step_seconds(trial, costs) == pytest.approx(expected)


def test_a_stage_without_messages_tells_passes_from_messages() -> None:
    # Of two devices each has half of the layers, so every round of 1F1B has a message in it.
    known = profiled(0.004, 0.004)
    planted = PipelineCosts(
        pass_seconds=1e-3, lone_pass_seconds=4e-4, message_seconds=0.0, fixed_seconds=0.0
    )
    trials = trials_of(known.graph)
    measured = [known.step_seconds(trial, planted) for trial in trials]
    found = fit_costs(known, trials, measured)
    assert found.pass_seconds == pytest.approx(1e-3, rel=1e-6)
    assert found.lone_pass_seconds == pytest.approx(4e-4, rel=1e-6)
    assert found.message_seconds == pytest.approx(0.0, abs=1e-9)


def test_replicas_in_the_loop_wait_longer_than_for_the_ring_alone() -> None:
    alone = Ring(1e-4, 1e9)
    slower = alone.slowed_to(4e-3, 1_800_000)  # alone 0.2 ms of latency and 1.8 ms of bytes
    assert slower == pytest.approx(Ring(2e-4, 5e8))


def test_a_trial_is_what_a_launch_of_the_plan_would_run() -> None:
    known = profiled(*[0.004] * 4)
    trial = Trial(cut=1, schedule="1f1b", num_microbatches=3)
    config = launch_config(known.graph, trial, device_type="cpu")
    stages = tuple(
        pipeline_stage(
            layers=layers, num_replicas=1, device_type="cpu", first_device=first, num_in_flight=1,
            weight_versions=1, seconds_per_input=1.0, compute_seconds=1.0, output_seconds=0.0,
            memory_bytes=1,
        )
        for first, layers in enumerate([("layer0",), ("layer1", "layer2", "layer3")])
    )  # fmt: skip
    plan = pipeline_plan(
        model="model", global_batch_size=12, microbatch_size=4, num_microbatches=3, schedule="1f1b",
        recompute=False, stages=stages, predicted=Prediction(step_seconds=1, samples_per_second=1),
        proof=Proof(termination="optimal", objective=1.0, lower_bound=1.0, gap=0.0, method=""),
        noam=2, stage_cost="ring", solved="flat",
    )  # fmt: skip
    lowered = lower(plan)
    workers = tuple(dataclasses.replace(worker, device=None) for worker in lowered.workers)
    assert dataclasses.replace(lowered, workers=workers, predicted_step_seconds=None) == config


def test_a_trial_of_one_stage_has_both_devices_on_it() -> None:
    known = profiled(*[0.004] * 4)
    trial = Trial(cut=4, schedule="1f1b", num_microbatches=2, num_replicas=2)
    config = launch_config(known.graph, trial, device_type="cpu")
    assert config.pipeline is not None
    (stage,) = config.pipeline.stages
    assert stage.ranks == (0, 1)
    assert stage.layers == ("layer0", "layer1", "layer2", "layer3")
    dealt = [[node.index for node in worker.virtual_nodes] for worker in config.workers]
    assert dealt == [[0], [1]]


@pytest.mark.parametrize(
    ("cores", "layers", "message"),
    [
        (("cuda:0",), 4, "2 V100 devices are needed, 1 here"),
        (("cuda:0",) * 2, 1, "1 layers cannot"),
    ],
)
def test_where_no_pipeline_can_be_rehearsed(cores: tuple, layers: int, message: str) -> None:
    gpu = LocalDevice(
        device_type="V100", kind="cuda", name="V100", torch_devices=cores, memory_bytes=1 << 34
    )
    request = DeviceRequest(device_type="V100", local=gpu, torch_device="cuda:0")
    known = profiled(*[0.004] * layers)
    found = measure_pipeline(parse("zoo:mlp"), request, known, optimizer="sgd", budget_seconds=1.0)
    assert found[0] is None
    assert message in found[1]["skipped"]


class Halves:
    """Workers that hold half of a model each: a Crew without processes."""

    def __init__(self, *_: object) -> None:
        pass

    def __enter__(self) -> "Halves":
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def together_with_held(
        self, config: LaunchConfig, *, num_steps: int
    ) -> tuple[list[list[StepTimes]], list[int | None]]:
        return self.together(config, num_steps=num_steps), [None, None]

    def together(self, config: LaunchConfig, *, num_steps: int) -> list[list[StepTimes]]:
        assert config.pipeline is not None
        if len(config.pipeline.stages) == 1:
            raise MemoryError
        seconds = 0.02 * len(config.workers[0].virtual_nodes)
        step = StepTimes(
            asked_seconds=0.0, passes=(), computed=seconds, synchronised=seconds, ended=seconds
        )
        return [[step] * num_steps] * 2


def test_a_model_that_fits_in_halves_is_rehearsed_in_halves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("hetflow.profilers.pipeline_costs.Crew", Halves)
    cores = ("cuda:0", "cuda:1")
    gpu = LocalDevice(
        device_type="V100", kind="cuda", name="V100", torch_devices=cores, memory_bytes=1 << 34
    )
    request = DeviceRequest(device_type="V100", local=gpu, torch_device="cuda:0")
    known = profiled(*[0.004] * 4)
    costs, how = measure_pipeline(
        parse("zoo:mlp"), request, known, optimizer="sgd", budget_seconds=1.0
    )
    assert costs is not None, how
    assert costs.lone_pass_seconds is None  # only replicas tell it
    assert costs.fragmentation_bytes is None  # a GPU's allocator tells it elsewhere
    assert {trial["num_replicas"] for trial in how["trials"]} == {1}
    assert len(how["trials"]) >= 4
    assert "out of memory" in how["replicas"]["skipped"]


def test_what_a_step_takes_for_a_while_is_what_the_planner_counts() -> None:
    nodes = [
        dataclasses.replace(node, stashed_bytes=stashed, workspace_bytes=workspace)
        for node, stashed, workspace in zip(
            graph(1e-3, 1e-3, 1e-3).nodes, (100, 20, 3), (7000, 0, None), strict=True
        )
    ]
    known = dataclasses.replace(
        profiled(1e-3),
        graph=dataclasses.replace(graph(1e-3, 1e-3, 1e-3), nodes=tuple(nodes)),
        update_workspace_bytes=9,
    )
    for cut, schedule, number, replicas, recompute in (
        (1, "1f1b", 8, 1, False),
        (2, "gpipe", 8, 1, False),
        (1, "1f1b", 1, 1, False),
        (2, "1f1b", 8, 1, True),
        (3, "1f1b", 8, 2, False),
    ):
        trial = Trial(
            cut=cut, schedule=schedule, num_microbatches=number, num_replicas=replicas,
            recompute=recompute,
        )  # fmt: skip
        # The second layer's input and output, beside nothing; the first has 7000 and an output.
        aside = max(7000 + 10_000, 0 + 20_000) + 9
        in_flight = [number, number] if schedule == "gpipe" else [min(2, number), 1]
        by_hand = [
            (1 if recompute else k) * sum(n.stashed_bytes for n in part) + k * entering + aside
            for k, part, entering in zip(
                in_flight, (nodes[:cut], nodes[cut:]), (0, 10_000), strict=True
            )
            if part
        ]
        if replicas == 2:  # a single stage has one microbatch in flight
            by_hand = [sum(n.stashed_bytes for n in nodes) + aside]
        assert known.passing_bytes(trial) == by_hand, trial


@pytest.mark.slow
def test_real_pipelines_are_rehearsed() -> None:
    cpu = cpu_device()
    request = DeviceRequest(device_type="cpu", local=cpu, torch_device="cpu")
    target = parse("zoo:mlp")
    with Measurer(target, device="cpu", memory_bytes=cpu.memory_bytes, optimizer="sgd") as measurer:
        measurer.measure(4, RepeatPolicy(max_repeats=1, min_repeats=1))
        measured = graph_of(measurer.measure_layers(4, 3), 1.0)
    known = dataclasses.replace(profiled(0.004), graph=measured)
    costs, how = measure_pipeline(target, request, known, optimizer="sgd", budget_seconds=0.5)
    assert costs is not None, how
    assert costs.step_error is not None
    # zoo:mlp frees blocks of 4 MB in every pass; malloc keeps some, and less than all there is.
    assert costs.fragmentation_bytes is not None
    assert 0 < costs.fragmentation_bytes < 300 << 20
    assert 6 <= len(how["trials"]) <= len(trials_of(measured))
    assert how["reduction"]["repeats"] >= 6
    if how["reduction"]["median_seconds"] > 0:
        assert costs.reduce_bytes_per_second is not None
    for trial in (*how["trials"], how["recompute"]):
        assert trial["repeats"] >= 6
        assert trial["low_seconds"] <= trial["median_seconds"] <= trial["high_seconds"]
    eight = {t["schedule"]: t for t in how["trials"] if t["num_microbatches"] == 8}
    two = next(t for t in how["trials"] if t["num_microbatches"] == 2)
    assert eight["1f1b"]["median_seconds"] > two["median_seconds"] / 2  # they are steps of work
