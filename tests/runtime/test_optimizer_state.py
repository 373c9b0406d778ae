"""The script's optimizer beside what its plan counted."""

from dataclasses import replace

import pytest
import torch
from torch import nn, optim

from hetflow.runtime.setup import beyond_masters, keeps_masters, state_ratio, warning_of
from hetflow.runtime.sharding.precision import Precision
from hetflow.schema.launch import LaunchConfig, VirtualNode, WorkerSlot
from hetflow.schema.optimizer import OptimizerState, named_optimizer


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda p: optim.SGD(p, lr=0.1), 0.0),
        (lambda p: optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True), 1.0),
        (lambda p: optim.Adam(p), 2.0),
        (lambda p: optim.Adam(p, amsgrad=True, fused=True), 3.0),
        (lambda p: optim.AdamW(p, lr=torch.tensor(0.1), capturable=True), 2.0),
        (lambda p: optim.RMSprop(p, centered=True, momentum=0.5), 3.0),
        (lambda p: optim.Adafactor(p), None),
        (lambda p: optim.LBFGS(p), None),
    ],
)
def test_what_an_optimizer_will_keep(make, expected):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    before = [p.detach().clone() for p in model.parameters()]
    optimizer = make(list(model.parameters()))
    assert state_ratio([optimizer]) == expected
    # Nothing of the script's is touched.
    assert not optimizer.state
    assert all(torch.equal(old, p) for old, p in zip(before, model.parameters(), strict=True))


def test_groups_with_options_of_their_own_are_weighed_by_their_bytes():
    wide, narrow = nn.Parameter(torch.zeros(30)), nn.Parameter(torch.zeros(10))
    frozen = nn.Parameter(torch.zeros(99), requires_grad=False)
    groups = [{"params": [wide, frozen]}, {"params": [narrow], "momentum": 0.9}]
    assert state_ratio([optim.SGD(groups, lr=0.1)]) == pytest.approx(0.25)


def test_more_than_the_plan_counted_is_said():
    adam = optim.Adam(nn.Linear(2, 2).parameters())
    said = warning_of([adam], named_optimizer("sgd-momentum"))
    assert said.startswith("warning: Adam keeps 2 bytes of state a byte of weights, the plan's")
    assert "sgd-momentum (1 bytes of state" in said
    assert "optimizer=OptimizerState(state_bytes_per_weight_byte=2)" in said
    measured = OptimizerState(name="Adam", state_bytes_per_weight_byte=2.0003)
    assert warning_of([adam], measured) is None
    assert warning_of([adam], None) is None
    said = warning_of([adam], measured, masters=True)
    assert said is not None
    assert "keeps masters" in said
    assert warning_of([adam], measured.with_masters(), masters=True) is None
    assert warning_of([], named_optimizer("sgd")) is None


def test_several_optimizers_are_weighed_by_their_bytes():
    body, head = nn.Parameter(torch.zeros(30)), nn.Parameter(torch.zeros(10))
    both = [optim.SGD([body], lr=0.1), optim.Adam([head])]
    assert state_ratio(both) == pytest.approx(0.5)
    assert state_ratio([*both, optim.LBFGS([body])]) is None
    said = warning_of(both, named_optimizer("sgd"))
    assert said.startswith("warning: SGD and Adam keep 0.5 bytes")


def test_what_a_policy_keeps_beyond_its_plan_is_said():
    model = nn.Sequential(nn.Linear(1024, 1024, bias=False), nn.Linear(1024, 512, bias=False))
    model[1].requires_grad_(False)
    precision = Precision(running=torch.bfloat16, summed=torch.float32)
    adam = named_optimizer("adam")

    def planned(weight_bytes: int, **options):
        nodes = (VirtualNode(index=0, batch_size=2),)
        slot = WorkerSlot(
            rank=0, device_type="cpu", virtual_nodes=nodes, state_share_bytes=weight_bytes
        )
        return LaunchConfig(model="m", global_batch_size=2, workers=(slot,), **options)

    bfloat16, float32 = (
        planned(bits << 16, shard="all", optimizer=adam) for bits in (3 * 16, 6 * 16)
    )
    assert keeps_masters(model, precision, bfloat16)
    assert not keeps_masters(model, precision, float32)  # it counts more than such a run takes
    assert keeps_masters(model, precision, replace(float32, shard="gradients"))
    assert not keeps_masters(model, precision, None)
    assert beyond_masters(model, precision, bfloat16) is None
    counted = replace(bfloat16, optimizer=adam.with_masters())
    assert "up to 1 MiB" in beyond_masters(model, precision, counted)  # frozen weights
    assert "up to 3 MiB" in beyond_masters(model, precision, replace(counted, shard="optimizer"))
    assert beyond_masters(model[0], precision, counted) is None
