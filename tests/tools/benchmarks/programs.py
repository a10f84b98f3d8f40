"""Programs of the benchmarks: the models of tests/support/zoo.py and larger ones, their loss, and their packages."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tests.support import zoo

from . import processes

SMALL, LARGE = 3, 48  # rows in a batch


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


def deep() -> nn.Module:
    """A transformer of 2 layers of width 128. Its activations need more memory than its parameters."""
    layer = nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def make(name: str) -> nn.Module:
    """Return the model of that name, with the same weights each time."""
    if name in zoo.NAMES:
        return zoo.make(name).module.train()
    torch.manual_seed(7)
    return {"wide": wide, "deep": deep}[name]().train()


def inputs(name: str, rows: int) -> tuple[torch.Tensor, ...]:
    """Return the arguments of a call. None requires a gradient, as in a training step."""
    if name in zoo.NAMES:
        made = zoo.make(name).args(rows)
        torch.manual_seed(1)
        return tuple(torch.randn_like(v.detach()) if v.is_floating_point() else v for v in made)
    torch.manual_seed(1)
    return (torch.randn(rows, 256) if name == "wide" else torch.randn(rows, 64, 128),)


def random_masks(name: str) -> bool:
    """Return whether the model draws random numbers. Inductor's generator draws different ones than eager."""
    return any(isinstance(m, nn.Dropout) and m.p > 0 for m in make(name).modules())


_EXPORT = """
import json, sys, time
import torch
import aot_backward as ab
from tests.tools.benchmarks import programs
name, path, rows = sys.argv[1], sys.argv[2], [int(r) for r in sys.argv[3].split(",")]
start = time.perf_counter()
model = programs.make(name)
variants = [ab.Variant(programs.inputs(name, r)) for r in rows]
kinds = sys.argv[4].split(",")
entries = {}
if "module" in kinds:
    entries["net"] = ab.Module(model, variants)
if "grad" in kinds:
    entries["loss"] = ab.Grad(programs.Loss(model), variants)
ab.export(path, entries)
print(json.dumps({"seconds": time.perf_counter() - start}))
"""


def export(name: str, rows: Sequence[int], kinds: str = "module,grad", **more: str) -> tuple[Path, float]:
    """Export a model in a fresh process: entries ``net`` and ``loss``, a static variant per batch size.

    Return the package and the seconds of the export. They include the import of Inductor, but not of torch and this
    project."""
    path = processes.package(f"{name}-{'-'.join(map(str, rows))}-{kinds.replace(',', '-')}")
    _, answer = processes.run(_EXPORT, name, path, ",".join(map(str, rows)), kinds, threads=2, **more)
    return path, float(answer["seconds"])


def exported(name: str, rows: Sequence[int]) -> Path:
    """Return the package with both entries. With ``--reuse``, take it from an earlier run if it exists."""
    path = processes.package(f"{name}-{'-'.join(map(str, rows))}-module-grad")
    return path if processes.REUSE and path.exists() else export(name, rows)[0]
