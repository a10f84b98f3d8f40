"""Programs of the benchmarks: the models of tests/support/zoo.py and a larger one, their loss, and their packages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.support import zoo

from . import processes


class Loss(nn.Module):
    """The sum of the mean squares of all floating-point outputs of ``model``."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, *args: torch.Tensor) -> torch.Tensor:
        return total(self.model(*args))


def total(outputs: Any) -> torch.Tensor:
    leaves = [v for v in pytree.tree_leaves(outputs) if isinstance(v, torch.Tensor) and v.is_floating_point()]
    return sum((v.square().mean() for v in leaves[1:]), leaves[0].square().mean())


def wide() -> nn.Module:
    """2.2 million parameters: 8.7 MB of weights."""
    return nn.Sequential(nn.Linear(256, 1024), nn.GELU(), nn.Linear(1024, 1024), nn.GELU(), nn.Linear(1024, 832))


def make(name: str) -> nn.Module:
    """Return the model of that name, with the same weights each time."""
    if name in zoo.NAMES:
        return zoo.make(name).module.train()
    torch.manual_seed(7)
    return wide().train()


def inputs(name: str, rows: int) -> tuple[torch.Tensor, ...]:
    """Return the arguments of a call. None requires a gradient, as in a training step."""
    if name in zoo.NAMES:
        made = zoo.make(name).args(rows)
        torch.manual_seed(1)
        return tuple(torch.randn_like(v.detach()) if v.is_floating_point() else v for v in made)
    torch.manual_seed(1)
    return (torch.randn(rows, 256),)


_EXPORT = """
import sys
import aot_backward as ab
from tests.tools.benchmarks import programs
name, path, rows = sys.argv[1], sys.argv[2], int(sys.argv[3])
model, variants = programs.make(name), [ab.Variant(programs.inputs(name, rows))]
ab.export(path, {"net": ab.Module(model, variants), "loss": ab.Grad(programs.Loss(model), variants)})
print("{}")
"""


def exported(name: str, rows: int) -> Path:
    """Return a package with the entries ``net`` and ``loss``, static, exported in a fresh process.

    With ``--reuse``, take it from an earlier run if it exists."""
    path = processes.package(f"{name}-{rows}-module-grad")
    if not (processes.REUSE and path.exists()):
        processes.run(_EXPORT, name, path, rows, threads=2)
    return path
