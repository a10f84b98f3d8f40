"""Functions for tests of ``aot-backward export cli_program.py:NAME``: one per kind of answer."""

from __future__ import annotations

import torch
from torch import nn

import aot_backward as ab


class Net(nn.Module):
    """Takes a dict and returns a dict. One of its two outputs does not require grad."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        hidden = torch.tanh(self.layer(batch["x"])) * batch["weight"]
        return {"out": hidden, "largest": hidden.detach().amax(1)}


def net() -> Net:
    torch.manual_seed(0)
    return Net()


def distance(pos: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (pos - target).square().sum().sqrt()


def entries() -> dict[str, ab.Module | ab.Grad]:
    batch = {"x": torch.randn(5, 4, requires_grad=True), "weight": torch.rand(5, 1)}
    rows = torch.export.Dim("rows", min=2, max=64)
    shapes = {"batch": {"x": {0: rows}, "weight": {0: rows}}}
    return {
        "net": ab.Module(net(), [ab.Variant((batch,), dynamic_shapes=shapes)]),
        "distance": ab.Grad(distance, [ab.Variant((torch.randn(3), torch.randn(3)))], wrt="pos"),
    }


def sole() -> ab.Grad:
    return ab.Grad(distance, [ab.Variant((torch.randn(3), torch.randn(3)))], wrt="pos")


def raising() -> ab.Grad:
    raise ValueError("no data\nhere")


def number() -> int:
    return 3


def unexportable() -> ab.Grad:
    return ab.Grad(distance, [ab.Variant((torch.randn(3), torch.randn(3)))], wrt="nonsuch")


CONSTANT = 3


def training() -> dict[str, ab.Step | ab.Grad]:
    """Return a step with dropout, BatchNorm, momentum, clipping and gradient accumulation, and another entry."""
    torch.manual_seed(0)
    layers = [nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)]
    module = nn.Sequential(*layers)
    batch = torch.export.Dim("batch", min=4, max=64)
    variant = ab.Variant((torch.randn(16, 4), torch.randint(3, (16,))), dynamic_shapes=({0: batch}, {0: batch}))
    optimizer = torch.optim.AdamW(
        [{"params": layers[0].parameters(), "lr": 1e-3}, {"params": module[1:].parameters()}], lr=1e-2
    )
    step = ab.Step(module, [variant], optimizer, loss_fn=nn.functional.cross_entropy, accumulate=True, clip_norm=1.0)
    return {"fit": step, "distance": sole()}


def static() -> ab.Step:
    """Return the smallest step, for batches of 8 only."""
    torch.manual_seed(0)
    module = nn.Linear(4, 3)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    return ab.Step(
        module,
        [ab.Variant((torch.randn(8, 4), torch.randint(3, (8,))))],
        optimizer,
        loss_fn=nn.functional.cross_entropy,
        distributed=True,
    )
