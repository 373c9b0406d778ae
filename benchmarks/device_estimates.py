"""How far estimates of a device from its data sheet are from measured runs, held out.

Efficiencies (planning/costs/efficiency.py) are fitted to runs that others measured on 16 forms of
GPU: layers of OPT-350M (Sailor), steps of GPT (vTrain) and ResNet-50 (Gavel), and what NVIDIA's
examples reach by NVIDIA's and by Lambda's tables. Each error is of a fit without all figures of one
type of GPU, or of one model. Five targets are judged: times, ratios between two types, splits over
two types, memory, and whether the stated error holds for nine in ten. Two more tables are of
Lambda's figures of two years earlier, which no fit saw: how far the stated estimates are off, and
how far the ratios of both publications differ.

    python benchmarks/device_estimates.py            about 80 CPU seconds
    python benchmarks/device_estimates.py --quick    errors of the fit to all
    python benchmarks/device_estimates.py --write    write planning/costs/efficiency.py too
    python benchmarks/device_estimates.py --count    count the convolutional models anew before
"""

import argparse
import itertools
import json
import math
import statistics
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "data"), str(ROOT / "benchmarks")]

import reference  # noqa: E402
from estimates_parts.fitting import Runs, Whole  # noqa: E402
from estimates_parts.gavel import gavel_steps  # noqa: E402
from estimates_parts.gh200 import gh200_errors  # noqa: E402
from estimates_parts.measured import (  # noqa: E402
    Measured,
    link_shares,
    sailor_layers,
    vtrain_steps,
    write_counts,
)
from estimates_parts.memory import memory_errors  # noqa: E402
from estimates_parts.published import EARLIER, convolutional_models, published_steps  # noqa: E402

from hetflow.planning.costs.device_table import spec_of  # noqa: E402
from hetflow.planning.costs.efficiency import (  # noqa: E402
    ESTIMATED_ERROR,
    FITTED,
    RATIO_ERROR,
)
from hetflow.planning.costs.roofline import Efficiency  # noqa: E402

TARGET = ROOT / "planning" / "costs" / "efficiency.py"
WITHIN = 0.9  # the share of held-out errors that the stated error holds
RATIO_TARGET = 0.15
FAMILIES = ("ResNeXt-101", "EfficientNet")
LATER_FORMS = {"V100-SXM2-32GB": "V100-SXM2-16GB"}  # as fast: the memory's size differs
Errors = dict[str, list[tuple[str, float]]]
"""By group, the errors and the figure that each is of: those of one figure count together once."""
Kind = dict[str, dict[str, list[tuple[str, float, set[str]]]]]
"""By what was left out, errors as above, and the types and the model that each has to do with."""


def measured_runs() -> Runs:
    """All that others measured."""
    folder = reference.gpu_runs()
    runs = [
        *sailor_layers(folder),
        *vtrain_steps(folder),
        *gavel_steps(reference.folder()),
        *published_steps(),
    ]
    return Runs(runs, statistics.geometric_mean(link_shares(folder).values()))


def type_of(run: Measured) -> str:
    """The type of a run's device, whatever its form."""
    return run.spec.device_type


def model_of(run: Measured | Whole) -> str:
    """A run's model; vTrain's are all one, and so are those that differ little."""
    name = run.model.partition(" ")[0]
    return next((family for family in FAMILIES if family in name), name)


def held_out(runs: Runs, group_of: Callable[[Measured], str]) -> dict[str, list[Whole]]:
    """All wholes by fits that had not seen a group, by group."""
    found = {}
    for group in dict.fromkeys(map(group_of, runs.runs)):
        rest = Runs([run for run in runs.runs if group_of(run) != group], runs.link)
        found[group] = runs.wholes(rest.fit())
    return found


def pairs(wholes: Iterable[Whole]) -> Iterator[tuple[Whole, Whole]]:
    """Two forms of unlike types by one source, with one model and configuration."""
    alike: dict[tuple[str, str, str], list[Whole]] = defaultdict(list)
    for whole in wholes:
        alike[whole.source, whole.model, whole.config].append(whole)
    for group in alike.values():
        for one, other in itertools.combinations(group, 2):
            if own_type(one) != own_type(other):
                yield one, other


def own_type(whole: Whole) -> str:
    """The type of a whole's device."""
    return spec_of(whole.form).device_type


def split_errors(one: Whole, other: Whole) -> tuple[float, float]:
    """Of a batch split over two devices by estimates: the step's error, and what is lost by it.

    Returns:
        The planned step over what it takes, less 1; and that over the best split's step, less 1.
    """
    shares = [1 / (whole.seconds * math.exp(whole.off)) for whole in (one, other)]
    planned, best = 1 / sum(shares), 1 / (1 / one.seconds + 1 / other.seconds)
    took = max(
        planned * share * whole.seconds for share, whole in zip(shares, (one, other), strict=True)
    )
    return planned / took - 1, took / best - 1


def within(errors: Iterable[tuple[str, float]], share: float = WITHIN) -> float:
    """The size that such a share of errors stay within, where each figure counts once."""
    errors = sorted(errors, key=lambda pair: abs(pair[1]))
    numbers = Counter(figure for figure, _ in errors)
    left = share * len(numbers) - 1e-9
    for figure, error in errors:
        left -= 1 / numbers[figure]
        if left <= 0:
            return abs(error)
    raise ValueError("there are no errors")


def summary(errors: Sequence[tuple[str, float]]) -> dict[str, float]:
    """Mean and largest size of errors, the size that nine in ten stay within, and their mean."""
    sizes = [abs(error) for _, error in errors]
    by_figure: dict[str, list[float]] = defaultdict(list)
    for figure, error in errors:
        by_figure[figure].append(abs(error))
    return {
        "number": len(sizes),
        "mean": statistics.mean(map(statistics.mean, by_figure.values())),
        "mean_of_runs": statistics.mean(sizes),
        "within_15_percent": sum(size <= RATIO_TARGET for size in sizes) / len(sizes),
        "within_90_percent": within(errors),
        "largest": max(sizes),
        "bias": statistics.mean(error for _, error in errors),
    }


def show(title: str, errors: Errors, result: dict[str, object]) -> dict[str, float]:
    """One line a group, and one for all of them."""
    print(f"\n{title}")
    everything = [error for found in errors.values() for error in found]
    table = {name: summary(found) for name, found in errors.items()}
    table["all"] = summary(everything)
    for name, row in table.items():
        print(
            f"  {name:28s} {row['number']:4.0f}: mean {row['mean']:6.1%} "
            f"(of runs {row['mean_of_runs']:6.1%}), "
            f"{row['within_15_percent']:4.0%} within 15 %, "
            f"9 in 10 within {row['within_90_percent']:6.1%}, "
            f"largest {row['largest']:6.1%}, bias {row['bias']:+.1%}"
        )
    result[title] = table
    return table["all"]


def stated_error(errors: Errors) -> float:
    """What holds for nine in ten of a group that is not among these.

    Of nine groups or more the share is larger, as in conformal prediction (Vovk et al., 2005).
    """
    everything = [error for found in errors.values() for error in found]
    share = WITHIN * (1 + 1 / len(errors))
    return within(everything, share if share <= 1 else WITHIN)


def stated(kind: Kind) -> float:
    """What is stated of new types and of new models alike: the larger of both."""
    found = []
    for groups in kind.values():
        errors = {name: [one[:2] for one in own] for name, own in groups.items() if own}
        found += [stated_error(errors)] if errors else []
    return max(found)


def held(kind: Kind, left_out: str) -> float:
    """The share of errors within what the rest states: all that has nothing to do with their group.

    Each figure counts once, as it does in what is stated.
    """
    found: dict[str, list[bool]] = defaultdict(list)
    for group, own in kind[left_out].items():
        rest: Kind = {
            title: {
                name: [one for one in errors if group not in one[2]]
                for name, errors in groups.items()
            }
            for title, groups in kind.items()
        }
        limit = stated(rest)
        for figure, error, _ in own:
            found[figure].append(abs(error) <= limit)
    return statistics.mean(map(statistics.mean, found.values()))


def judged(
    apart: dict[str, dict[str, list[Whole]]], is_convolutional: bool, result: dict[str, object]
) -> tuple[float, float]:
    """Print all of one kind of models.

    Args:
        apart: By what was left out, ``held_out``.
        is_convolutional: Of which kind.
        result: Gets what is printed.

    Returns:
        The errors to state: of times, and of ratios.
    """
    kind = "convolutions" if is_convolutional else "products"
    times, ratios = Kind(), Kind()
    for title, groups in apart.items():
        errors, between = times.setdefault(title, {}), ratios.setdefault(title, {})
        planned: Errors = defaultdict(list)
        lost: Errors = defaultdict(list)
        for group, wholes in groups.items():
            of_kind = [one for one in wholes if one.is_convolutional is is_convolutional]
            for one in of_kind:
                tags = {own_type(one), model_of(one)}
                if group in tags:
                    figure = f"{one.source}, {own_type(one)}"
                    found = figure, math.exp(one.off) - 1, tags
                    errors.setdefault(group, []).append(found)
            for one, other in pairs(of_kind):
                tags = {own_type(one), own_type(other), model_of(one)}
                if group in tags:
                    figure = f"{one.source}, {own_type(one)}, {own_type(other)}"
                    found = figure, math.exp(one.off - other.off) - 1, tags
                    between.setdefault(group, []).append(found)
                    step, regret = split_errors(one, other)
                    planned[group].append((figure, step))
                    lost[group].append((figure, regret))
        left = f"{kind}, {title} left out"
        for name, of in (("times", errors), ("ratios", between)):
            plain = {group: [one[:2] for one in own] for group, own in of.items()}
            show(f"{name} of {left}", plain, result)
        show(f"steps of splits of {left}", planned, result)
        show(f"slower than the best split of {left}", lost, result)
    for name, of_kind in (("times", times), ("ratios", ratios)):
        for title in of_kind:
            left = f"{name} of {kind}, {title} left out"
            share = result[f"held by the stated error, {left}"] = held(of_kind, title)
            print(f"  what all others would state holds for {share:.0%} of the {left}")
    return stated(times), stated(ratios)


def earlier(runs: Runs, result: dict[str, object]) -> None:
    """Print the errors of what is stated now, and of one publication by the other."""
    wholes = Runs([*published_steps(EARLIER)], runs.link).wholes(FITTED)
    seen = [one for one in runs.wholes(FITTED) if one.source == "lambdal"]
    for is_convolutional in (False, True):
        kind = "convolutions" if is_convolutional else "products"
        found = [one for one in wholes if one.is_convolutional is is_convolutional]
        off = [math.exp(one.off) - 1 for one in found]
        between = [math.exp(one.off - other.off) - 1 for one, other in pairs(found)]
        for name, errors, stated in (
            ("times", off, getattr(ESTIMATED_ERROR, kind)),
            ("ratios", between, getattr(RATIO_ERROR, kind)),
        ):
            title = f"{name} of {kind}, earlier figures"
            show(title, {"all": [(str(n), error) for n, error in enumerate(errors)]}, result)
            share = sum(abs(error) <= stated for error in errors) / len(errors)
            result[f"held by the stated error, {title}"] = share
            print(f"  the stated error holds for {share:.0%}")
        later = {(one.form, one.model, one.config): one.seconds for one in seen}
        faster = {  # how many times as fast a figure was two years later
            one: one.seconds / later[key]
            for one in found
            if (key := (LATER_FORMS.get(one.form, one.form), one.model, one.config)) in later
        }
        apart = [
            (f"{one.form}, {other.form}", max(ratio, 1 / ratio) - 1)
            for one, other in pairs(faster)
            for ratio in [faster[one] / faster[other]]
        ]
        show(f"ratios of {kind}, later figures against earlier", {"all": apart}, result)


def write(efficiency: Efficiency, stated: dict[str, tuple[float, float]]) -> None:
    """The module of fitted figures."""
    values = "\n".join(
        f"    {field.name}={getattr(efficiency, field.name):.4g},"
        for field in fields(efficiency)
        if field.name != "forms"
    )
    forms = "\n".join(f'        "{name}": {value:.3g},' for name, value in efficiency.forms.items())
    text = (
        '"""Efficiencies fitted to measured runs, and how far held-out estimates were off.\n\n'
        "Written by `python benchmarks/device_estimates.py --write`; do not edit.\n"
        '"""\n\nfrom .roofline import Efficiency, HeldOutError\n\n'
        f"FITTED = Efficiency(\n{values}\n    forms={{\n{forms}\n    }},\n)\n"
        + "".join(
            f"{name}_ERROR = HeldOutError("
            + ", ".join(f"{kind}={errors[place]:.2f}" for kind, errors in stated.items())
            + ")\n"
            for place, name in enumerate(("ESTIMATED", "RATIO"))
        )
    )
    TARGET.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave nothing out")
    parser.add_argument("--write", action="store_true", help="write planning/costs/efficiency.py")
    parser.add_argument("--json", type=Path, help="write the results here")
    parser.add_argument("--count", action="store_true", help="count convolutional models anew")
    arguments = parser.parse_args()
    if arguments.count:
        write_counts(convolutional_models())
    runs = measured_runs()
    efficiency = runs.fit()
    print("fitted to all:", efficiency)
    result: dict[str, object] = {"efficiency": str(efficiency)}
    if arguments.quick:
        seen = [(one.form, math.exp(one.off) - 1) for one in runs.wholes(efficiency)]
        show("times, nothing left out", {"of a fit to all": seen}, result)
        return
    apart = {"type of GPU": held_out(runs, type_of), "model": held_out(runs, model_of)}
    to_state = {
        kind: judged(apart, kind == "convolutions", result) for kind in ("products", "convolutions")
    }
    rest = Runs([run for run in runs.runs if run.spec.device_type != "GH200"], runs.link)
    nodes = gh200_errors(reference.gpu_runs(), rest.fit())
    titled = {name: [(name, error) for error in errors] for name, errors in nodes.items()}
    show("15 runs of OPT-350M on GH200 nodes, GH200 left out", titled, result)
    earlier(runs, result)
    show("memory", {name: [(name, error)] for name, error in memory_errors().items()}, result)
    print("\nstated, of times and of ratios:", to_state)
    result["stated"] = to_state
    if arguments.write:
        write(efficiency, to_state)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
