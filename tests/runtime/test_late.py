"""How far a host runs ahead of a device that takes its time."""

import pytest
import torch

from hetflow.runtime.pipeline import synchronise


class SlowDevice:
    """Its moments are numbers; it has passed those that the host waited for, or was told of."""

    def __init__(self) -> None:
        self.number, self.passed = 0, 0
        self.waited: list[int] = []

    def mark(self, _: torch.device) -> int:
        self.number += 1
        return self.number

    def has_passed(self, mark: int) -> bool:
        return mark <= self.passed

    def wait_for(self, mark: int) -> None:
        self.waited.append(mark)
        self.passed = mark


def test_a_host_is_at_most_one_step_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    device = SlowDevice()
    monkeypatch.setattr(synchronise, "backend_of", lambda _: device)
    lead = synchronise.HostLead(torch.device("cpu"))
    for step in range(1, 5):
        lead.end_step()
        assert device.passed == step - 1
    assert device.waited == [1, 2, 3]
    device.passed = 5
    lead.end_step()
    lead.end_step()
    assert device.waited == [1, 2, 3]  # it waits only for what has not passed
