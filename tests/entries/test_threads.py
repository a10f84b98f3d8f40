"""Native code is the same whatever number of threads it was exported with, and right with any number where it runs."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward_runtime import load


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("threads")
def test_exported_with_one_thread_and_run_with_several(tmp_path: Path) -> None:
    """Inductor leaves out what keeps threads from doing a thing twice where it counts one thread, and starts several nevertheless: the mean loss
    was divided by the batch once in each thread."""
    torch.manual_seed(0)
    body = [nn.Conv2d(1, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2)]
    net = nn.Sequential(*body, nn.Flatten(), nn.Linear(64, 10))
    x, y = torch.randn(16, 1, 8, 8), torch.randint(0, 10, (16,))
    torch.set_num_threads(1)
    optimizer = torch.optim.AdamW(net.parameters())
    path = ab.export_step(net, (x, y), loss_fn=nn.CrossEntropyLoss(), optimizer=optimizer, path=tmp_path / "step.pt2")
    for count in (1, 2, 4):
        torch.set_num_threads(count)
        step, eager = load(path).step(), copy.deepcopy(net)
        optimizer = torch.optim.AdamW(eager.parameters())
        for _ in range(3):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(eager(x), y)
            loss.backward()
            optimizer.step()
            torch.testing.assert_close(step(x, y), loss.detach(), rtol=1e-4, atol=1e-5)
