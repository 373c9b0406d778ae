"""From run records to figures: errors of steps, of their terms and of peaks, and regret."""

import math
import statistics

TERMS = ("compute", "load", "virtual_node", "fixed", "sync", "update", "transfer", "wait")


def row_of(plan, runs, peaks, name, *, is_solved=False):
    """One plan: predicted beside the median over its launches.

    Args:
        plan: With its prediction.
        runs: Records of its launches that ended well.
        peaks: [ranks] predicted peak of each worker in bytes, None where nothing was predicted.
        name: Of the plan.
        is_solved: Whether it is the solver's own choice.
    """
    measured = statistics.median(run.measured_step_seconds for run in runs)
    predicted = plan.predicted.step_seconds
    terms = terms_of(plan, runs)
    return {
        "plan": name,
        "kind": "pipeline" if plan.kind == "pipeline" else "split",
        "is_solved": is_solved,
        "global_batch_size": plan.global_batch_size,
        "predicted_step_seconds": predicted,
        "predicted_low_seconds": plan.predicted.step_seconds_low,
        "predicted_high_seconds": plan.predicted.step_seconds_high,
        "measured_step_seconds": measured,
        "measured_each_seconds": [run.measured_step_seconds for run in runs],
        "error": predicted / measured - 1,
        "terms": terms,
        "worst_term": worst_term(terms),
        "peaks": [
            {"predicted_bytes": peak, "measured_bytes": measured_peak}
            for peak, measured_peak in zip(peaks, _measured_peaks(runs), strict=True)
        ],
    }


def terms_of(plan, runs):
    """Predicted and measured seconds of each term, of the worker whose passes take longest.

    That worker waits for nobody, so what it waits in an all-reduce is the all-reduce. A term is
    left out where nothing tells of it on both sides; parts of the prediction that a record does
    not tell apart are in its ``compute``.
    """
    devices = [max(run.devices, key=lambda device: device.compute_seconds or 0.0) for run in runs]
    found, untold = {}, 0.0
    for term in TERMS:
        key = f"{term}_seconds"
        predicted = getattr(plan.predicted, key, None)
        values = [getattr(device, key, None) for device in devices]
        told = [value for value in values if value is not None]
        if predicted is None:
            continue
        if told:
            measured = statistics.median(told)
            found[term] = {"predicted_seconds": predicted, "measured_seconds": measured}
        else:
            untold += predicted
    if "compute" in found:
        found["compute"]["predicted_seconds"] += untold
    return found


def worst_term(terms):
    """The name of the term that is most seconds off; None where no term is told."""
    if not terms:
        return None
    return max(terms, key=lambda term: abs(_gap(terms[term])))


def _gap(term):
    return term["predicted_seconds"] - term["measured_seconds"]


def _measured_peaks(runs):
    """[ranks] the highest over the launches: a limit must hold for all of them."""
    columns = zip(*(run.devices for run in runs), strict=True)
    return [
        max(
            (device.peak_memory_bytes for device in column if device.peak_memory_bytes),
            default=None,
        )
        for column in columns
    ]


def summary_of(rows):
    """Mean and worst errors of rows of one or several models, splits and pipelines apart."""
    found = {}
    for kind in ("split", "pipeline"):
        mine = [row for row in rows if row["kind"] == kind]
        if not mine:
            continue
        errors = [abs(row["error"]) for row in mine]
        memory = [error for row in mine for error in memory_errors(row)]
        found[kind] = {
            "num_plans": len(mine),
            "mean_error": statistics.fmean(errors),
            "worst_error": max(errors),
            "mean_memory_error": statistics.fmean(map(abs, memory)) if memory else None,
            "most_under_memory": max(0.0, -min(memory)) if memory else None,
        }
    return found


def speed_drift(rows):
    """How much longer a fixed loop took beside the slowest launches than beside the fastest.

    The 90th percentile over the 10th, minus 1; None where fewer than ten launches are known.
    """
    loops = [
        load["loop_seconds"] for row in rows for load in row["loads"] if "loop_seconds" in load
    ]
    if len(loops) < 10:
        return None
    tenths = statistics.quantiles(loops, n=10)
    return tenths[-1] / tenths[0] - 1


def repeat_of(first, again):
    """By kind, how far a plan's median in one turn is from its median in another: mean and worst.

    What no prediction can be better than, as long as the machine is not steadier. The solver's own
    plans are left out: they may differ between turns.
    """
    found = {}
    for kind in ("split", "pipeline"):
        before, after = (
            {
                (model, row["plan"]): row["measured_step_seconds"]
                for model, own in models.items()
                for row in own
                if row["kind"] == kind and not row["plan"].startswith("solved")
            }
            for models in (first, again)
        )
        errors = [abs(before[key] / after[key] - 1) for key in sorted(before.keys() & after.keys())]
        if errors:
            found[kind] = {
                "num_plans": len(errors),
                "mean_error": statistics.fmean(errors),
                "worst_error": max(errors),
            }
    return found


def memory_errors(row):
    """Of each worker (predicted - measured) / measured peak."""
    return [
        peak["predicted_bytes"] / peak["measured_bytes"] - 1
        for peak in row["peaks"]
        if peak["predicted_bytes"] and peak["measured_bytes"]
    ]


def regret_of(rows, kind):
    """How much longer the solver's plan took than the best measured at its batch, relative.

    None where the solver's plan was not launched.
    """
    mine = [row for row in rows if row["kind"] == kind]
    solved = [row for row in mine if row["is_solved"]]
    if not solved:
        return None
    own = min(solved, key=lambda row: row["predicted_step_seconds"])
    best = min(
        row["measured_step_seconds"]
        for row in mine
        if row["global_batch_size"] == own["global_batch_size"]
    )
    return own["measured_step_seconds"] / best - 1


def steps_of(predicted_seconds, asked_seconds, *, fewest=40, most_seconds=5.0):
    """Steps of a launch: some seconds' worth, at least ``fewest``, within ``most_seconds``.

    Never below 8, so that a median is left after the warm-up.
    """
    wanted = max(fewest, math.ceil(asked_seconds / predicted_seconds))
    return max(8, min(wanted, math.floor(most_seconds / predicted_seconds)))
