"""How far estimates of a device from its data sheet are from measured runs, held out.

Efficiencies (planning/costs/efficiency.py) are fitted to layers of OPT-350M that Sailor measured
on four types of GPU, steps of GPT models that vTrain measured on A100 and of ResNet-50 that Gavel
measured on three types. Each error below is of a fit that had not seen what it is
judged on: one device left out, or one configuration (a microbatch size; a model's width and depth).

    python benchmarks/device_estimates.py            about 20 CPU seconds
    python benchmarks/device_estimates.py --quick    one fit, and devices left out
    python benchmarks/device_estimates.py --write    fit to all runs; write costs/efficiency.py
"""

import argparse
import json
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "tests" / "data"), str(ROOT / "benchmarks")]

import reference  # noqa: E402
from estimates_parts.gavel import SPECS as GAVEL  # noqa: E402
from estimates_parts.gavel import gavel_steps  # noqa: E402
from estimates_parts.gh200 import gh200_errors  # noqa: E402
from estimates_parts.measured import (  # noqa: E402
    SPECS,
    Measured,
    link_shares,
    sailor_layers,
    vtrain_steps,
)
from estimates_parts.published import PUBLISHED, published_steps  # noqa: E402

from hetflow.planning.costs.roofline import Efficiency  # noqa: E402

TARGET = ROOT / "planning" / "costs" / "efficiency.py"
PRIOR = (0.6, 0.5, 0.5, 0.6, 0.3, 0.4, 0.7, 1.0)
"""Of what no run tells, when those that do are left out."""
PRIOR_WEIGHT = 0.3
NOT_FITTED = ("K80",)  # half as efficient at convolutions as all later types, so judged alone
PUBLISHED_WEIGHT = 3.0  # NVIDIA's figures are of tuned scripts, and of newer libraries than Gavel's
WITHIN = 0.9  # the share of held-out errors that the stated error holds


def fit(runs: Sequence[Measured], link: float) -> Efficiency:
    """Least squares of the logarithm of estimated over measured.

    vTrain's steps together weigh as much as Sailor's layers.
    """
    runs = [run for run in runs if run.device not in NOT_FITTED]
    steps = sum(run.device == "vTrain" for run in runs)
    layers = sum(run.device in SPECS for run in runs)
    weights = {"vTrain": math.sqrt(layers / steps) if steps else 0.0}
    weights |= {run.device: PUBLISHED_WEIGHT for run in runs if run.device in PUBLISHED}
    weight = np.array([weights.get(run.device, 1.0) for run in runs])

    def apart(values: Sequence[float]) -> np.ndarray:
        now = _efficiency(values, link)
        runs_apart = weight * np.log([run.estimated(now) / run.seconds for run in runs])
        return np.append(runs_apart, PRIOR_WEIGHT * np.log(np.array(values) / PRIOR))

    found = least_squares(
        apart,
        PRIOR,
        # A Winograd convolution of 3 x 3 takes fewer products than are counted.
        bounds=([0.05] * 8, [1.0] * 3 + [1.5] + [1.0] * 3 + [10.0]),
    )
    return _efficiency(found.x, link)


def _efficiency(values: Sequence[float], link: float) -> Efficiency:
    vector, tf32, half, on_vector, in_tf32, in_half, memory, launch = map(float, values)
    return Efficiency(
        vector=vector,
        tf32=tf32,
        half=half,
        convolution_vector=on_vector,
        convolution_tf32=in_tf32,
        convolution_half=in_half,
        memory=memory,
        link=link,
        launch_seconds=launch * 1e-5,
    )


def whole_errors(runs: Iterable[Measured], efficiency: Efficiency) -> dict[str, float]:
    """Relative errors of whole passes or steps: a pass's parts add up."""
    sums: dict[str, list[float]] = {}
    for number, run in enumerate(runs):
        own = f"{run.device}, {number if run.device == 'vTrain' else run.config.split(', ')[0]}"
        found = sums.setdefault(own, [0.0, 0.0])
        found[0] += run.weight * run.estimated(efficiency)
        found[1] += run.weight * run.seconds
    return {name: estimated / measured - 1 for name, (estimated, measured) in sums.items()}


def held_out(
    runs: Sequence[Measured], link: float, group_of: Callable[[Measured], str]
) -> dict[str, list[float]]:
    """Errors of each group, by a fit to all others."""
    errors = {}
    for group in dict.fromkeys(map(group_of, runs)):
        efficiency = fit([run for run in runs if group_of(run) != group], link)
        judged = [run for run in runs if group_of(run) == group]
        errors[group] = list(whole_errors(judged, efficiency).values())
    return errors


def left_out(runs: Sequence[Measured], link: float, device: str) -> list[float]:
    """Errors of whole passes on a device, by a fit to all others."""
    efficiency = fit([run for run in runs if run.device != device], link)
    return list(whole_errors([r for r in runs if r.device == device], efficiency).values())


def carried(
    runs: Sequence[Measured], link: float, devices: Iterable[str]
) -> dict[str, list[float]]:
    """Errors of measured passes of one device carried to another, which the fit has not seen."""
    errors: dict[str, list[float]] = {}
    for target in devices:
        efficiency = fit([run for run in runs if run.device != target], link)
        for source in devices:
            if source == target:
                continue
            error = {
                name: whole_errors([run for run in runs if run.device == name], efficiency)
                for name in (source, target)
            }
            for name, of_target in error[target].items():
                of_source = error[source].get(name.replace(target, source))
                if of_source is not None:
                    key = f"{source} to {target}"
                    errors.setdefault(key, []).append((1 + of_target) / (1 + of_source) - 1)
    return errors


def apart_from_published(
    runs: Sequence[Measured], published: Sequence[Measured], link: float
) -> tuple[dict[str, dict[str, list[float]]], dict[str, list[float]]]:
    """Errors of published runs by fits without their GPU type, or their model, wherever measured.

    Returns:
        By ``type`` and ``model``, the errors of each; and by model the errors of how many times
        longer a sample takes on a V100 than on an A100, in the same precision or its default.
    """
    types = {run.spec.device_type for run in published}
    errors: dict[str, dict[str, list[float]]] = {"type": {}, "model": {}}
    for own in sorted(types):
        efficiency = fit([run for run in runs if run.spec.device_type != own], link)
        judged = [run for run in published if run.spec.device_type == own]
        errors["type"][own] = [run.estimated(efficiency) / run.seconds - 1 for run in judged]
    ratios: dict[str, list[float]] = {}
    for own in dict.fromkeys(run.config for run in published):
        others = [
            r for r in runs if r.config != own and not (own == "ResNet-50" and r.device in GAVEL)
        ]
        efficiency = fit(others, link)
        judged = [run for run in published if run.config == own]
        errors["model"][own] = [run.estimated(efficiency) / run.seconds - 1 for run in judged]
        off = {run.device: run.estimated(efficiency) / run.seconds for run in judged}
        pairs = (("V100, float32", "A100, tf32"), ("V100, float16", "A100, float16"))
        ratios[own] = [off[a] / off[b] - 1 for a, b in pairs if a in off and b in off]
    return errors, ratios


def summary(errors: Iterable[float]) -> dict[str, float]:
    """Mean and largest size of errors, the size that nine in ten stay within, and their mean."""
    sizes = sorted(map(abs, errors := list(errors)))
    return {
        "number": len(sizes),
        "mean": statistics.mean(sizes),
        "within_90_percent": sizes[math.ceil(WITHIN * len(sizes)) - 1],
        "largest": sizes[-1],
        "bias": statistics.mean(errors),
    }


def write(
    efficiency: Efficiency, estimated: tuple[float, float], carried: tuple[float, float]
) -> None:
    """The module of fitted figures."""
    values = "\n".join(
        f"    {field.name}={getattr(efficiency, field.name):.4g}," for field in fields(efficiency)
    )
    text = (
        '"""Efficiencies fitted to measured runs, and how far held-out estimates were off.\n\n'
        "Written by `python benchmarks/device_estimates.py --write`; do not edit.\n"
        '"""\n\nfrom .roofline import Efficiency, HeldOutError\n\n'
        f"FITTED = Efficiency(\n{values}\n)\n"
        + "".join(
            f"{name}_ERROR = HeldOutError(products={error[0]:.2f}, convolutions={error[1]:.2f})\n"
            for name, error in (("ESTIMATED", estimated), ("CARRIED", carried))
        )
    )
    TARGET.write_text(text, encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="leave devices out only")
    parser.add_argument("--write", action="store_true", help="write planning/costs/efficiency.py")
    parser.add_argument("--json", type=Path, help="write the results here")
    arguments = parser.parse_args()
    folder = reference.gpu_runs()
    published = list(published_steps())
    runs = [
        *sailor_layers(folder),
        *vtrain_steps(folder),
        *gavel_steps(reference.folder()),
        *published,
    ]
    link = statistics.geometric_mean(link_shares(folder).values())
    efficiency = fit(runs, link)
    print("fitted to all:", efficiency)
    result: dict[str, object] = {"efficiency": str(efficiency)}
    stated = {}
    for kind, devices, what in (
        ("products", SPECS, "passes of OPT-350M"),
        ("convolutions", GAVEL, "steps of ResNet-50"),
    ):
        alone = {device: left_out(runs, link, device) for device in devices}
        show(f"{what}, device left out of the fit", alone, result)
        across = carried(runs, link, devices)
        show(f"measured {what} carried to a device left out of the fit", across, result)
        stated[kind] = [summary(sum(e.values(), []))["within_90_percent"] for e in (alone, across)]
    errors, ratios = apart_from_published(runs, published, link)
    for group, title in (("type", "GPU type"), ("model", "model")):
        show(f"published runs, {title} left out of the fit", errors[group], result)
    show("ratios of V100 to A100 of a sample, model left out of the fit", ratios, result)
    of_types = [error for found in errors["type"].values() for error in found]
    stated["convolutions"][0] = max(
        stated["convolutions"][0], summary(of_types)["within_90_percent"]
    )
    if not arguments.quick:
        seen = fit([run for run in runs if run.device != "GH-96"], link)
        nodes = gh200_errors(folder, seen)
        show("15 runs on GH200 nodes, GH200 left out of the fit", nodes, result)
        models = held_out(runs, link, lambda r: r.config if r.device == "vTrain" else "")
        del models[""]
        show("steps on A100 in 16 bits, model left out of the fit", models, result)
        of_models = summary(sum(models.values(), []))["within_90_percent"]
        stated["products"][0] = max(stated["products"][0], of_models)
        sizes = held_out(runs, link, lambda r: r.config.split(", ")[0] if r.device in SPECS else "")
        del sizes[""]
        show("passes of OPT-350M, microbatch size left out of the fit", sizes, result)
    print("stated, estimated and carried:", stated)
    if arguments.write:
        estimated, across_types = zip(stated["products"], stated["convolutions"], strict=True)
        write(efficiency, estimated, across_types)
    if arguments.json:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def show(title: str, errors: dict[str, list[float]], result: dict[str, object]) -> None:
    """One line a group, and one for all of them."""
    print(f"\n{title}")
    table = {name: summary(found) for name, found in errors.items()}
    table["all"] = summary(sum(errors.values(), []))
    for name, row in table.items():
        print(
            f"  {name:28s} {row['number']:4d}: mean {row['mean']:6.1%}, "
            f"9 in 10 within {row['within_90_percent']:6.1%}, "
            f"largest {row['largest']:6.1%}, bias {row['bias']:+.1%}"
        )
    result[title] = table


if __name__ == "__main__":
    main()
