"""Unmeasured pairs of a table, filled in from reference models (5.3.3, 5.6)."""

import dataclasses

import numpy as np
import pytest

from hetflow.formats.importers.gavel import read_gavel_throughputs
from hetflow.planning.checks.allocation import check
from hetflow.schema.jobs import (
    AllocationProblem,
    Job,
    Jobs,
    ModelThroughput,
    PairThroughput,
    Throughputs,
)
from hetflow.solvers.allocation import allocate, fill_pairs
from hetflow.tests.data import reference

NAMES = [f"m{i}" for i in range(8)]


def table(known):
    """Eight models of rank 1, m7 twice as fast as m3 and like it otherwise; pairs as ``known``."""
    strength = np.linspace(0.5, 0.9, 8)
    strength[7] = strength[3]
    beside = np.outer(strength, 1.2 - 0.5 * strength)
    alone = np.arange(1.0, 9.0)
    alone[7] = 2 * alone[3]
    pairs = tuple(
        PairThroughput(
            models=(NAMES[i], NAMES[j]),
            steps_per_second={"V100": (beside[i, j] * alone[i], beside[j, i] * alone[j])},
        )
        for i in range(8)
        for j in range(i, 8)
        if known(i, j)
    )
    models = tuple(
        ModelThroughput(model=name, steps_per_second={"V100": float(rate)})
        for name, rate in zip(NAMES, alone, strict=True)
    )
    return Throughputs(models=models, pairs=pairs)


def rates_of(throughputs):
    return {pair.models: pair.steps_per_second["V100"] for pair in throughputs.pairs}


def test_a_new_model_gets_the_pairs_of_its_nearest_reference():
    whole = rates_of(table(lambda i, j: True))
    partial = table(lambda i, j: j < 7 or i in (0, 2, 5))
    filled = fill_pairs(partial, rank=1)
    found = rates_of(filled)
    assert {key: found[key] for key in rates_of(partial)} == rates_of(partial)
    for i in (1, 3, 4, 6):
        assert found["m7", NAMES[i]] == pytest.approx(whole[NAMES[i], "m7"][::-1], rel=1e-6)
    jobs = Jobs(jobs=(Job(id="a", model="m7", steps=1.0), Job(id="b", model="m4", steps=1.0)))
    asked = AllocationProblem(
        jobs=jobs, throughputs=filled, num_devices={"V100": 1}, space_sharing=True
    )
    shared = allocate(asked, "las")
    assert check(shared, asked) == []
    assert shared.pairs


def test_what_does_not_fit_is_known_and_nothing_is_made_of_nothing():
    partial = table(lambda i, j: j < 7)
    assert rates_of(fill_pairs(partial)) == rates_of(partial)
    never = tuple(
        dataclasses.replace(pair, steps_per_second={"V100": (0.0, 0.0)})
        if pair.models == ("m1", "m3") else pair
        for pair in table(lambda i, j: j < 7 or i in (0, 2, 3, 5)).pairs
    )  # fmt: skip
    filled = fill_pairs(dataclasses.replace(partial, pairs=never))
    assert rates_of(filled)["m1", "m3"] == (0.0, 0.0)


@pytest.mark.slow
@pytest.mark.parametrize("device", ["v100", "k80"])
def test_a_third_of_gavels_pairs_tell_the_others_better_than_their_mean(device):
    throughputs = reference.folder() / "gavel" / "throughputs"
    whole = read_gavel_throughputs(throughputs / "simulation_throughputs.json")
    models = tuple(
        dataclasses.replace(entry, steps_per_second={device: entry.steps_per_second[device]})
        for entry in whole.models
        if entry.scale_factor == 1 and entry.steps_per_second.get(device, 0.0) > 0
    )
    alone = {entry.model: entry.steps_per_second[device] for entry in models}
    truth = {
        pair.models: pair.steps_per_second[device]
        for pair in whole.pairs
        if pair.scale_factor == 1 and device in pair.steps_per_second
    }
    every = {(a, b): truth.get((a, b), truth.get((b, a), (0.0, 0.0))[::-1])
             for i, a in enumerate(alone) for b in list(alone)[i:]}  # fmt: skip
    errors, plain = [], []
    for new in list(alone)[::5]:
        draw = np.random.default_rng(0)
        hidden = [key for key in every if new in key and draw.random() < 2 / 3]
        pairs = tuple(
            PairThroughput(models=key, steps_per_second={device: rates})
            for key, rates in every.items()
            if key not in hidden
        )
        filled = fill_pairs(Throughputs(models=models, pairs=pairs))
        found = {pair.models: pair.steps_per_second[device] for pair in filled.pairs}
        own = [rates[key.index(new)] / alone[new] for key, rates in every.items()
               if new in key and key not in hidden]  # fmt: skip
        for key in hidden:
            guess = found.get(key) or found.get(key[::-1], ())[::-1]
            if guess:
                true = every[key][key.index(new)] / alone[new]
                errors.append(abs(guess[key.index(new)] / alone[new] - true))
                plain.append(abs(float(np.mean(own)) - true))
    assert len(errors) > 50
    assert np.mean(errors) < 0.75 * np.mean(plain)
