"""``export_step``: whole training steps in one native call, beside the same steps in eager."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward_runtime import InputError, load

from . import exports
from .step_cases import FAMILIES, SCHEDULES, WAITING, Eager, assert_equal, assert_same_change, batch, eager, everything, package


def _ten(training: Any, schedule: Any, waiting: bool) -> list[float]:
    """Ten steps of changing sizes, the schedule moved after each. ``waiting``: the fourth is of four micro-batches, the eighth of two by
    ``step()``."""
    torch.manual_seed(5)
    losses = []
    for i in range(10):
        for part in range({3: 4, 7: 2}.get(i, 1) if waiting else 1):
            waits = waiting and ((i == 3 and part < 3) or i == 7)
            losses.append(float(training(*batch(10 * i + part, rows=4 + i % 3), update=not waits)))
        if waiting and i == 7:
            training.step()
        schedule.step()
    return losses


@pytest.mark.parametrize("name", FAMILIES)
def test_ten_steps_as_in_eager(name: str) -> None:
    """Two groups, momentum or betas and learning rate under a schedule, clipping, accumulation (of two), dropout, BatchNorm, changing sizes."""
    step, other = load(package(name)).step(), eager(name)
    before = everything(other)
    assert_equal(everything(step), before)
    assert step.state_dict()["optimizer"]["state"].keys() == other.optimizer.state_dict()["state"].keys()  # none, but for Adagrad
    waiting = name in WAITING
    ours, theirs = _ten(step, SCHEDULES[name](step), waiting), _ten(other, SCHEDULES[name](other.optimizer), waiting)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    assert_same_change(step, other, before)
    torch.testing.assert_close(step.grad_norm, other.grad_norm, rtol=1e-4, atol=0)
    assert step.count == 10 and step.skipped == 0 and step.accumulated == 0
    for mine, group in zip(step.param_groups, other.optimizer.param_groups, strict=True):
        numbers = {k: v for k, v in group.items() if k != "params"}
        assert {k: mine[k] for k in numbers} == numbers
        assert [step.state[p].keys() for p in mine["params"]] == [other.state[p].keys() for p in group["params"]]
