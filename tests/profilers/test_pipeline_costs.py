"""What a pipeline's passes cost: found again where it was planted, and layers as in stages."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetflow.devices.backend import DeviceRequest, LocalDevice
from hetflow.devices.cpu import cpu_device
from hetflow.profilers.layers import graph_of
from hetflow.profilers.pipeline_costs import (
    KnownCosts,
    Ring,
    TimedStep,
    Trial,
    affordable,
    calibrated,
    launch_config,
    measure_pipeline,
    trials_of,
    with_passes,
)
from hetflow.profilers.process import Loading, Measurer
from hetflow.profilers.targets import parse
from hetflow.profilers.timing import RepeatPolicy
from hetflow.runtime.measurements import StagePass, StepTimes
from hetflow.runtime.protocol.lower import lower
from hetflow.schema.launch import LaunchConfig
from hetflow.schema.plan import Prediction, Proof
from hetflow.schema.profile import (
    BatchPoint,
    BusyHost,
    LayerGraph,
    LayerNode,
    LinkPoint,
    Links,
    PipelineCosts,
    Profile,
)
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


def timed(known: KnownCosts, trial: Trial, costs: PipelineCosts, slowed: float = 1.0) -> TimedStep:
    """A step that takes what the planner predicts, and its passes as a clock shows them."""
    inside = costs.lone_pass_seconds or 0.0
    parts = [known.graph.nodes[: trial.cut], known.graph.nodes[trial.cut :]]
    took = [
        (
            slowed * known.scale * sum(node.forward_seconds for node in part) + inside,
            slowed * known.scale * sum(node.backward_seconds for node in part) + inside,
        )
        for part in parts
        if part
    ]
    return TimedStep(known.step_seconds(trial, costs, took), took)


@settings(max_examples=examples(30))
@given(st.lists(SECONDS, min_size=4, max_size=8), COST, COST, COST)
def test_planted_time_between_passes_is_found(
    seconds: list[float], inside: float, between: float, fixed: float
) -> None:
    """Also where the machine is slower for some trials, and other work disturbs half of a trial."""
    known = profiled(*seconds, scale=1.5)
    planted = PipelineCosts(
        pass_seconds=inside + between, lone_pass_seconds=inside, message_seconds=1e-4,
        fixed_seconds=fixed,
    )  # fmt: skip
    trials = trials_of(known.graph)
    steps = [
        [timed(known, trial, planted, slowed=1 + number % 3) for _ in range(8)]
        for number, trial in enumerate(trials)
    ]
    steps[3] = [
        step._replace(seconds=step.seconds * (1 + i % 2)) for i, step in enumerate(steps[3])
    ]
    given = dataclasses.replace(planted, pass_seconds=inside)
    found = with_passes(known, given, trials, steps)
    assert found.pass_seconds == pytest.approx(planted.pass_seconds, rel=0.02, abs=1e-7)
    assert found == dataclasses.replace(
        planted, pass_seconds=found.pass_seconds, step_error=found.step_error
    )


def test_the_error_is_that_of_the_planner_s_step() -> None:
    known = profiled(*[0.004] * 4)
    costs = PipelineCosts(
        pass_seconds=0.0, lone_pass_seconds=0.0, message_seconds=0.0, fixed_seconds=0.0
    )
    trials = trials_of(known.graph)
    shorter = [
        [step._replace(seconds=0.9 * step.seconds)]
        for step in (timed(known, trial, costs) for trial in trials)
    ]
    found = with_passes(known, costs, trials, shorter)
    assert found.pass_seconds == 0  # never negative
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


def profile(known: KnownCosts) -> Profile:
    """Of a device whose virtual nodes load for 1 ms, and beside a busy one take twice as long."""
    point = BatchPoint(
        batch_size=4, step_seconds=0.041, peak_memory_bytes=1, load_seconds=7e-4,
        virtual_node_seconds=3e-4,
    )  # fmt: skip
    busy = dataclasses.replace(point, step_seconds=0.081)
    return Profile(
        model="m", device_type="V100", device_memory_bytes=1 << 34, weight_bytes=4000,
        update_seconds=1e-3, batch_curve=(point,), layers=known.graph, links=known.links,
        busy=BusyHost(
            num_devices=2, batch_curve=(busy,), update_seconds=2e-3, fixed_seconds=3e-3
        ),
    )  # fmt: skip


def test_layers_take_in_stages_what_stages_took() -> None:
    """Stages beside a busy device: layers are of a device alone, whose passes take half."""
    before = profile(profiled(0.004, 0.004, 0.002, 0.006))
    known = KnownCosts.of(before)
    assert (known.scale, known.update_seconds) == (2.0, 2e-3)
    two = Trial(cut=2, schedule="1f1b", num_microbatches=3)
    whole = Trial(cut=4, schedule="1f1b", num_microbatches=3, num_replicas=2)
    took = [[(0.0125, 0.0405), (0.0325, 0.0165)], [(9.0, 9.0)]]
    after = calibrated(before, (two, whole), took)
    assert after.layers is not None
    forward = [node.forward_seconds for node in after.layers.nodes]
    backward = [node.backward_seconds for node in after.layers.nodes]
    assert forward == pytest.approx([0.003, 0.003, 0.004, 0.012])
    assert backward == pytest.approx([0.010, 0.010, 0.002, 0.006])
    costs = after.pipeline
    assert costs is not None
    assert (costs.message_seconds, costs.fixed_seconds) == (1e-4, 3e-3)
    assert costs.pass_seconds == costs.lone_pass_seconds == pytest.approx(5e-4)
    assert calibrated(before, (whole,), took[1:]).layers == before.layers


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
    workers = tuple(dataclasses.replace(w, device=None, memory_bytes=None) for w in lowered.workers)
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
    before = profile(known)
    found = measure_pipeline(parse("zoo:mlp"), request, before, optimizer="sgd", budget_seconds=1.0)
    assert found[0] == before
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
        return [[self.step(stage, seconds)] * num_steps for stage in (0, 1)]

    @staticmethod
    def step(stage: int, seconds: float) -> StepTimes:
        passes = tuple(
            StagePass(stage=stage, is_backward=back, seconds=0.005) for back in (False, True)
        )
        return StepTimes(
            asked_seconds=0.0, passes=(), computed=seconds, synchronised=seconds, ended=seconds,
            stages=passes,
        )  # fmt: skip


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
    found, how = measure_pipeline(
        parse("zoo:mlp"), request, profile(known), optimizer="sgd", budget_seconds=1.0
    )
    costs = found.pipeline
    assert costs is not None, how
    assert costs.reduce_bytes_per_second is None  # only replicas tell it
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
    loading = Loading(target=target, memory_bytes=cpu.memory_bytes, optimizer="sgd")
    with Measurer(loading, device="cpu") as measurer:
        measurer.measure(4, RepeatPolicy(max_repeats=1, min_repeats=1))
        measured = graph_of(measurer.measure_layers(4, 3), 1.0)
    before = profile(dataclasses.replace(profiled(0.004), graph=measured))
    found, how = measure_pipeline(target, request, before, optimizer="sgd", budget_seconds=0.5)
    costs = found.pipeline
    assert costs is not None, how
    assert found.layers != before.layers
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
