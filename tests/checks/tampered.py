"""Plans of every kind, each changed in one field, that the judge must refuse.

``python -m tests.checks.tampered`` runs the whole campaign: 500 changed plans, drawn by a seed. It
prints what the judge accepts, and ends with exit code 1 if there is anything. test_tampered.py
changes every field of every plan, and a sample of them in the fast suite.
"""

import argparse
import json
import random
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cache
from typing import Any, Literal, get_args, get_origin, get_type_hints

import hetflow
from hetflow.schema.cluster import Cluster
from hetflow.schema.errors import HetflowError
from hetflow.schema.files import from_json, to_json
from hetflow.schema.optimizer import named_optimizer
from hetflow.schema.plan import Plan
from hetflow.schema.profile import (
    BatchPoint,
    Emulation,
    Estimate,
    LayerGraph,
    LayerNode,
    PipelineCosts,
    Profile,
    Sync,
)

CAMPAIGN = 500

NOT_JUDGED = {
    r"provenance": "free text: where a plan comes from",
    r"assumptions": "sentences about links that were assumed",
    r"proof\.(method|space)": "a sentence: how the plan was found",
    r"(optimizer|cluster|link_bytes_per_second|workers|sequence_parallel|shard_\w+)\b": (
        "the question: what a plan was solved for; a flag of check replaces it"
    ),
    r"reserves(\[\d+\]\.asked_bytes)?$": "the question: what the user asked to leave free",
    r"restrictions": "the question too: a judge refuses a plan that breaks one, not one without",
    r"proof\.bound": "how solve's judge knew the bound: check says how it knows it",
    r"proof\.certificate": "what replays is a proof, whatever it is: test_certificates.py",
    r"with_more_devices": "steps of plans for other pools, which the file does not hold",
}
"""Start of a field's path -> why the judge does not refuse another value."""

_SAME = {"groups", "replicas", "reserves", "estimates", "emulated", "passes"}  # in any order
_LISTS_OF_SOME = {"alternatives"}  # a shorter list says less, and nothing wrong
_UP_ONLY = {"tolerance"}  # a plan within a smaller one keeps to more than it has to


def profile(device_type: str, slowness: float) -> Profile:
    """Batch curve and layers of one type, with every cost that a plan counts."""
    nodes = tuple(
        LayerNode(
            id=f"l{n}", op="Linear", forward_seconds=slowness * (0.001 + 0.0002 * n),
            backward_seconds=slowness * 0.002, activation_bytes=1 << 16,
            weight_bytes=(3 + n) << 20, stashed_bytes=1 << 18,
            input_gradient_share=0.6, repeated_share=0.05,
        )
        for n in range(6)
    )  # fmt: skip
    return Profile(
        model="m", device_type=device_type, device_memory_bytes=16 << 30,
        weight_bytes=33 << 20, update_seconds=slowness * 0.001, blocks=("l1", "l2", "l5"),
        batch_curve=tuple(
            BatchPoint(
                batch_size=size, step_seconds=slowness * (0.002 + 0.001 * size),
                peak_memory_bytes=(1 << 30) + size * (50 << 20), load_seconds=0.0005,
                virtual_node_seconds=0.0001, step_seconds_error=0.03,
            )
            for size in (4, 8, 16)
        ),
        layers=LayerGraph(
            microbatch_size=4, nodes=nodes,
            edges=tuple((f"l{n}", f"l{n + 1}") for n in range(5)),
        ),
        optimizer=named_optimizer("sgd"), sync=Sync(num_devices=2, sync_seconds=0.002),
        fixed_seconds=0.001, step_error=0.01,
        pipeline=PipelineCosts(
            pass_seconds=0.0001, fixed_seconds=0.0005, message_seconds=0.00005, step_error=0.02,
            reduce_bytes_per_second=5e8, reduce_latency_seconds=0.00002,
        ),
    )  # fmt: skip


def emulated() -> list[Profile]:
    """The same types, one estimated and one emulated."""
    estimate = Estimate(device_type="A", spec="A", source="a table", step_error=0.1)
    first, second = PROFILES
    return [
        replace(first, estimate=estimate),
        replace(second, emulation=Emulation(speed=0.5, base_device_type="cpu")),
    ]


def repeated() -> list[Profile]:
    """The first type, with layers that repeat."""
    first = PROFILES[0]
    assert first.layers is not None
    alike = tuple(replace(node, weight_bytes=4 << 20) for node in first.layers.nodes)
    return [replace(first, layers=replace(first.layers, nodes=alike))]


PROFILES = [profile("A", 1.0), profile("B", 2.0)]
POOL = replace(
    Cluster.parse("2xA,2xB"),
    device_types={
        name: replace(kind, dollars_per_hour=price)
        for (name, kind), price in zip(
            Cluster.parse("2xA,2xB").device_types.items(), (2.0, 1.0), strict=True
        )
    },
)
_LINK = {"link_bytes_per_second": 1e9}
QUESTIONS: dict[str, dict[str, Any]] = {
    "split": {"batch_size": 48},
    "fastest split": {"batch_size": 48, "fastest": True},
    "equal virtual nodes": {"batch_size": 48, "virtual_nodes": 12},
    "least waste": {"batch_size": 48, "virtual_nodes": 6, "objective": "waste", "top": 2},
    "shared states": {"batch_size": 48, "shard": "all", "optimizer": "adam"},
    "shared optimizer": {"batch_size": 48, "shard": "optimizer", "optimizer": "adam"},
    "estimated split": {"profiles": emulated(), "batch_size": 48},
    "1f1b": {"batch_size": 32, "strategy": "pipeline", "num_stages": 2, **_LINK},
    "gpipe": {"batch_size": 32, "strategy": "pipeline", "schedule": "gpipe", "num_stages": 4,
              "replication": False, "fastest": True, **_LINK},
    "interleaved": {"batch_size": 32, "strategy": "pipeline", "schedule": "interleaved", **_LINK},
    "zero bubble": {"batch_size": 32, "strategy": "pipeline", "schedule": "zb-h1",
                    "num_stages": 2, **_LINK},
    "zero bubble of two peaks": {"batch_size": 32, "strategy": "pipeline", "schedule": "zb-h2",
                                 **_LINK},
    "zero bubble in a V": {"batch_size": 32, "strategy": "pipeline", "schedule": "zb-v", **_LINK},
    "vertical sync": {"batch_size": 32, "strategy": "pipeline",
                      "schedule": "pipedream-vertical-sync", "num_stages": 2, **_LINK},
    "pipedream": {"batch_size": 32, "strategy": "pipeline", "schedule": "pipedream",
                  "num_stages": 2, **_LINK},
    "2bw": {"batch_size": 32, "strategy": "pipeline", "schedule": "2bw", "num_stages": 2, **_LINK},
    "repetitive": {"profiles": repeated(), "pool": "4xA", "batch_size": 32,
                   "strategy": "pipeline", "schedule": "2bw", "repetitive": True, **_LINK},
    "nested": {"profiles": PROFILES[:1], "pool": "4xA", "batch_size": 32, "strategy": "pipeline",
               "schedule": "pipedream", "stage_cost": "published", **_LINK},
    "parallel": {"batch_size": 32, "strategy": "parallel", "top": 3, **_LINK},
    "shared weights": {"batch_size": 32, "strategy": "parallel", "shard": "all", **_LINK},
    "chunked parallel": {"batch_size": 32, "strategy": "parallel", "num_model_chunks": 2, **_LINK},
}  # fmt: skip


@dataclass(frozen=True)
class Answer:
    """A solved question, with what it is judged against."""

    plan: Plan
    profiles: list[Profile]
    pool: Cluster

    def faults(self, plan: Plan) -> list[str]:
        """Return what the judge says of a plan for this question, its refusal to judge included."""
        try:
            return hetflow.check(plan, self.profiles, self.pool)
        except HetflowError as error:
            return [error.message]


@cache
def answer(name: str) -> Answer:
    """Solve a question by its name in ``QUESTIONS``."""
    options = dict(QUESTIONS[name])
    profiles, pool = options.pop("profiles", PROFILES), options.pop("pool", POOL)
    pool = Cluster.parse(pool) if isinstance(pool, str) else pool
    options.setdefault("strategy", "split")
    return Answer(hetflow.solve(profiles, pool, **options), profiles, pool)


def places(value: Any, hint: Any = None, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of every field of a record, of those inside it and of lists."""
    if is_dataclass(value):
        for field in fields(value):
            yield from places(getattr(value, field.name), None, (*path, field.name))
        return
    yield path
    if isinstance(value, dict):
        for key, each in value.items():
            yield from places(each, None, (*path, key))
    elif isinstance(value, (tuple, list)):
        # Alternatives are judged alike, one after another.
        for number, each in enumerate(value[:1] if path == ("alternatives",) else value):
            yield from places(each, None, (*path, number))


def named(path: tuple[Any, ...]) -> str:
    """Return a path as the judge writes it: ``stages[0].layers``."""
    return "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in path)[1:]


def why_not_judged(path: tuple[Any, ...]) -> str | None:
    """Return why a field is not judged; None if it is."""
    return next((why for at, why in NOT_JUDGED.items() if re.match(at, named(path))), None)


def changed(
    plan: Plan, plain: Any, path: tuple[Any, ...], draw: random.Random
) -> Iterator[Plan | None]:
    """Yield a plan with other values of a field; None for a file that is refused when read.

    ``plain`` is the plan's file, as read from JSON.
    """
    *way, last = path
    inner = plain
    for step in way:
        inner = inner[step]
    is_told = isinstance(inner, list) or last in inner  # the file leaves out what is None
    kept = inner[last] if is_told else None
    for other in _others(plan, kept, path, draw):
        inner[last] = other
        text = json.dumps(plain)
        if is_told:
            inner[last] = kept
        else:
            del inner[last]
        try:
            yield from_json(text, type(plan))
        except HetflowError:
            yield None


def _others(plan: Plan, plain: Any, path: tuple[Any, ...], draw: random.Random) -> Iterator[Any]:
    """Yield values that a field does not have; ``plain`` is its own, as read from JSON."""
    owner: Any = plan
    for step in path[:-1]:
        owner = owner[step] if isinstance(step, (int, str)) and not is_dataclass(owner) else (
            getattr(owner, step)
        )  # fmt: skip
    last = path[-1]
    value = getattr(owner, last) if is_dataclass(owner) else owner[last]
    hint = get_type_hints(type(owner)).get(last) if is_dataclass(owner) else None
    if get_origin(hint) is Literal:
        yield from (each for each in get_args(hint) if each != value)
    elif value is None:
        yield from (0.25, 1, True)
    elif isinstance(value, bool):
        yield not value
    elif isinstance(value, int):
        least = 1 if value < 1000 else value // 100  # bytes are stated as whole numbers
        yield value + draw.choice((least, 2 * least, value or 1))
        if value:
            yield value - least
    elif isinstance(value, float):
        yield value * draw.choice((1.01, 1.5)) + (0.0 if value else 0.001)
        if value and last not in _UP_ONLY:
            yield value * draw.choice((0.99, 0.5))
            yield 0.0
    elif isinstance(value, str):
        swapped = {"A": "B", "B": "A", "1f1b": "gpipe", "gpipe": "1f1b", "zb-h1": "zb-h2"}
        yield swapped.get(value, f"{value}x")
    elif isinstance(value, (tuple, list)) and value:
        if last not in _SAME and plain != plain[::-1]:
            yield plain[::-1]
        if last not in _LISTS_OF_SOME:
            yield plain[:-1]


def main() -> int:
    """Change 500 plans, and print those that the judge accepts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--number", type=int, default=CAMPAIGN)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    draw = random.Random(asked.seed)
    accepted = []
    for _ in range(asked.number):
        name = draw.choice(list(QUESTIONS))
        question = answer(name)
        judged = [path for path in places(question.plan) if why_not_judged(path) is None]
        plain = json.loads(to_json(question.plan))
        others: list[Plan | None] = []
        while not others:
            path = draw.choice(judged)
            others = list(changed(question.plan, plain, path, draw))
        plan = draw.choice(others)
        if plan is not None and plan != question.plan and not question.faults(plan):
            accepted.append(f"{name}: {named(path)}")
            sys.stdout.write(f"accepted: {accepted[-1]}\n")
    refused = asked.number - len(accepted)
    sys.stdout.write(f"{refused} of {asked.number} changed plans refused\n")
    return bool(accepted)


if __name__ == "__main__":
    sys.exit(main())
