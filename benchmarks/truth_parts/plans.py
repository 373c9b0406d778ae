"""Which splits and pipelines of a model are compared, and what each is predicted to take."""

import dataclasses
from dataclasses import dataclass

from hetflow.planning.costs.compute import point_at
from hetflow.planning.costs.split import predict
from hetflow.planning.pipeline_problem import pipeline_problem
from hetflow.planning.split_problem import split_problem
from hetflow.schema.cluster import Cluster
from hetflow.schema.plan import Proof
from hetflow.schema.plan import split_plan as made_split
from hetflow.schema.problem import Problem
from hetflow.tests.plan_parts import whole_group

from .stated import stated_plan

STATED = Proof(termination="feasible", objective=0.0, lower_bound=None, gap=None, method="stated")


@dataclass(frozen=True)
class Model:
    """A workload, and how it is trained.

    ``size`` is the samples of a small virtual node and of a microbatch. One device trains 6 of
    them in a step, two devices 12.
    """

    factory: str
    size: int

    @property
    def batch_sizes(self):
        """What is profiled: everything that the plans run, and no more."""
        return tuple(self.size * number for number in (1, 2, 3, 6))


MODELS = {
    "mlp": Model("mlp", 16),
    "digits-cnn": Model("digits_cnn", 16),
    "cnn": Model("cnn", 8),
    "resnet18": Model("resnet18", 4),
    "gpt": Model("gpt", 4),
    "lstm": Model("lstm", 4),
}


@dataclass(frozen=True)
class Split:
    """Devices as (how many, virtual nodes, small sizes in one of them)."""

    name: str
    groups: tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Pipeline:
    """Shares of the model's forward + backward time by stage, and the replicas of each.

    ``merged`` small sizes make a microbatch.
    """

    name: str
    shares: tuple[float, ...]
    replicas: tuple[int, ...]
    schedule: str = "1f1b"
    merged: int = 1


# Beside these come the solver's own. Six small sizes a device and step, or twelve on one device.
SPLITS = (
    Split("1 device, 6 nodes", ((1, 6, 1),)),
    Split("1 device, 2 nodes", ((1, 2, 3),)),
    Split("2 devices, 6 nodes each", ((2, 6, 1),)),
    Split("2 devices, 3 nodes each", ((2, 3, 2),)),
    Split("2 devices, 8 small and 2 large nodes", ((1, 8, 1), (1, 2, 2))),
)
PIPELINES = (
    Pipeline("half and half", (0.5, 0.5), (1, 1)),
    Pipeline("a third and two thirds", (1 / 3, 2 / 3), (1, 1)),
    Pipeline("half and half, gpipe", (0.5, 0.5), (1, 1), schedule="gpipe"),
    Pipeline("half and half, large microbatches", (0.5, 0.5), (1, 1), merged=2),
    # With two devices only a single stage can have replicas: data parallelism.
    Pipeline("one stage twice", (1.0,), (2,)),
)
QUICK_SPLITS, QUICK_PIPELINES = (SPLITS[0], SPLITS[2]), (PIPELINES[0], PIPELINES[2])


def split_plan(profile, model, split):
    """A stated split, predicted by the tool's own cost model."""
    num_devices = sum(number for number, _, _ in split.groups)
    groups = tuple(
        whole_group(
            device_type=profile.device_type,
            num_devices=number,
            device_batch_size=nodes * times * model.size,
            virtual_nodes=nodes,
            virtual_node_batch_size=times * model.size,
        )
        for number, nodes, times in split.groups
    )
    batch_size = sum(group.num_devices * group.device_batch_size for group in groups)
    pool = Cluster.parse(f"{num_devices}x{profile.device_type}")
    problem = split_problem(Problem((profile,), pool, batch_size))
    predicted = predict(problem, groups)
    return made_split(
        model=profile.model,
        global_batch_size=batch_size,
        groups=groups,
        predicted=predicted,
        proof=dataclasses.replace(STATED, objective=predicted.step_seconds),
    )


def pipeline_plan(profile, model, pipeline):
    """A stated partition, priced by the solver's own assembly."""
    problem = pipeline_problem(
        Problem((profile,), Cluster.parse(f"2x{profile.device_type}"), 12 * model.size),
        microbatch_size=pipeline.merged * model.size,
        schedule=pipeline.schedule,
        launchable=True,
    )
    names = layers_by_share(problem, pipeline.shares)
    stages = list(zip(names, pipeline.replicas, strict=True))
    return dataclasses.replace(stated_plan(problem, stages), trace=profile.layers.trace)


def layers_by_share(problem, shares):
    """Ids of the layers of each stage, in the model's order, no stage empty.

    A stage ends where its share of the time of all layers is reached most nearly.
    """
    pool = problem.pools[0]
    times = [f + b for f, b in zip(pool.forward_seconds, pool.backward_seconds, strict=True)]
    total, ends, wanted = sum(times), [0], 0.0
    for number, share in enumerate(shares[:-1]):
        wanted += share * total
        last = len(times) - (len(shares) - 1 - number)
        candidates = range(ends[-1] + 1, last + 1)
        ends.append(min(candidates, key=lambda end: abs(sum(times[:end]) - wanted)))
    ends.append(len(times))
    ids = [layer.id for layer in problem.layers]
    return [ids[first:last] for first, last in zip(ends, ends[1:], strict=False)]


def signature(plan):
    """What a plan runs, whatever it was predicted to take: equal ones are launched once."""
    if plan.kind == "pipeline":
        stages = tuple((stage.layers, stage.num_replicas) for stage in plan.stages)
        return (plan.schedule, plan.microbatch_size, plan.num_microbatches, plan.recomputes, stages)
    return tuple((g.num_devices, g.virtual_nodes, g.virtual_node_batch_size) for g in plan.groups)


def peaks_of(profile, plan):
    """[ranks] the peak that is predicted of each worker, in bytes; None where none is.

    A split's is the profile's peak at the size of the device's virtual nodes. A stage's is its
    ``memory_bytes``, which is a whole worker's only where the profile has a base.
    """
    if plan.kind == "pipeline":
        told = profile.base_memory_bytes is not None
        return [
            stage.memory_bytes if told else None
            for stage in plan.stages
            for _ in range(stage.num_replicas)
        ]
    curve = profile.batch_curve
    if plan.num_devices > 1 and profile.busy is not None:
        curve = profile.busy.batch_curve
    return [
        point_at(curve, group.virtual_node_batch_size).peak_memory_bytes
        for group in plan.groups
        for _ in range(group.num_devices)
    ]
