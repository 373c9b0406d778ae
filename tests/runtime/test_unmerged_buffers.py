"""A model that is saved with the statistics of one virtual node says so."""

import copy
import logging
import pickle

import pytest
import torch
from torch import nn

from hetflow.runtime.buffers import VirtualNodeBuffers, warn_of_saving


def test_a_state_dict_of_one_virtual_node_is_warned_of_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nn.Module, "state_dict", nn.Module.state_dict)
    monkeypatch.setattr(logging.getLogger("hetflow"), "propagate", True)
    model = nn.BatchNorm1d(3)
    buffers = VirtualNodeBuffers(model, [0, 1], (4, 4))
    warn_of_saving(model, buffers)

    def step() -> None:
        buffers.begin_step()
        for node in (0, 1):
            buffers.load(node)
            model(torch.randn(4, 3) + node)
            buffers.save(node)

    model.state_dict()
    step()
    buffers.install(buffers.merged(None))
    model.state_dict()
    assert caplog.messages == []
    step()
    copied = pickle.loads(pickle.dumps(copy.deepcopy(model)))
    copied.state_dict()  # its owner knows which values it keeps
    assert caplog.messages == []
    model.state_dict()
    assert "are those of one virtual node; call job.sync_buffers()" in caplog.text
    caplog.clear()
    model.state_dict()
    assert caplog.messages == []
