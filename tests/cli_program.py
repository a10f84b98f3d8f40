"""What ``aot-backward export cli_program.py:NAME`` is tested with: one function per kind of answer."""

from __future__ import annotations

import torch
from torch import nn

import aot_backward as ab


class Net(nn.Module):
    """Takes a dict and returns a dict; two outputs, of which one needs no gradient."""

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
