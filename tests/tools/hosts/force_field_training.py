"""Training steps of public force fields with random weights, in eager and compiled: :mod:`.force_fields` writes them
into its page.

The loss has energies and forces (``examples/forcefields/force_matching.py``); a step clips the gradients, updates by
AdamW and averages the parameters. Losses are compared before times are taken; peers take turns in one process with one
thread, and a time is the median.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aot_backward_native as abn
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import aot_backward as ab
from aot_backward_runtime import load
from tests.forcefields.models import load_example, system, with_dtype

BATCHES = {(4, 20): 7.0, (2, 200): 14.0}
"""Structures, and atoms in each, with the edge of their box in Å."""
CALLS = 21
COMPARED = 5  # steps
Step = Callable[..., Any]


class _Potential(nn.Module):
    """A model whose energies have the dtype of its positions: MACE adds up energies in float64."""

    def __init__(self, model: nn.Module):
        super().__init__()
        self.model = model

    def forward(self, positions: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        energies: torch.Tensor = self.model(positions, *rest)
        return energies.to(positions.dtype)


def batch(structures: int, atoms: int, box: float, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Return the arguments of the loss, with random energies and forces."""
    parts = []
    for number in range(structures):
        positions, species, src, dst, shift, *_ = with_dtype(system(atoms, box, 5.0, seed=number), dtype)
        first = number * atoms
        parts.append((positions, species, src + first, dst + first, shift, torch.full((atoms,), number)))
    random = torch.Generator().manual_seed(0)
    energy = torch.randn(structures, generator=random)
    forces = 0.1 * torch.randn(structures * atoms, 3, generator=random)
    return (*(torch.cat(column) for column in zip(*parts, strict=True)), energy.to(dtype), forces.to(dtype))


def in_eager(loss: nn.Module, optimizer: torch.optim.Optimizer, call: Step) -> Step:
    """Return the step of a loop in eager. ``call``: the loss, perhaps compiled."""
    averaged = AveragedModel(loss, multi_avg_fn=get_ema_multi_avg_fn(0.99))

    def step(*arguments: torch.Tensor) -> torch.Tensor:
        optimizer.zero_grad()
        value: torch.Tensor = call(*arguments)
        value.backward()
        nn.utils.clip_grad_norm_(loss.parameters(), 10.0)
        optimizer.step()
        averaged.update_parameters(loss)
        return value

    return step


def without_torch(path: Path) -> Step:
    step = abn.load(path, unchecked=True).step()
    return lambda *arguments: step(*(t.numpy() for t in arguments))


def measure(name: str, file: str, kind: tuple[str, ...], dtype: torch.dtype, folder: Path) -> list[dict[str, Any]]:
    """Return a row for each batch."""
    made, matching = load_example(file), load_example("force_matching")

    def loss(rebuilt: bool = True) -> nn.Module:
        model = made["random_model"](dtype, *kind)
        if name == "MACE":
            model = made["Energies"](made["without_torchscript"](model) if rebuilt else model)
        made_loss: nn.Module = matching["Matching"](_Potential(model)).train()
        return made_loss

    def eager(of: nn.Module, call: Step) -> Step:
        return in_eager(of, matching["optimizer_of"](of), call)

    path, start, exported = folder / "step.pt2", time.perf_counter(), loss()
    structures, atoms, edges = ({0: torch.export.Dim(n, min=1)} for n in ("structures", "atoms", "edges"))
    sizes = (atoms, atoms, edges, edges, edges, atoms, structures, atoms)
    variant = ab.Variant(batch(2, 20, 7.0, dtype), dynamic_shapes=sizes, mode="train")
    ab.export(
        path,
        {"fit": ab.Step(exported, [variant], matching["optimizer_of"](exported), clip_norm=10.0, ema=0.99)},
        tune="none",
    )
    seconds, rows = time.perf_counter() - start, []
    for (count, size), box in BATCHES.items():
        arguments = batch(count, size, box, dtype)
        by_torch, plain = loss(), loss()
        peers = {"eager": eager(plain, plain), "ours": load(path).step(), "ours, no PyTorch": without_torch(path)}
        peers["torch.compile"] = eager(by_torch, torch.compile(by_torch, dynamic=True))
        if name == "MACE":
            own = loss(rebuilt=False)
            peers["eager, TorchScript"] = eager(own, own)
        losses = dict[str, float]()
        for peer in tuple(peers):
            try:
                losses[peer] = [float(peers[peer](*arguments)) for _ in range(COMPARED)][-1]
            except Exception as error:  # of TorchScript or torch.compile, of any kind
                print(f"{name}, training: no {peer}: {str(error).strip().splitlines()[0]}")
                del peers[peer]
        times: dict[str, list[float]] = {peer: [] for peer in peers}
        for _ in range(CALLS):
            for peer, step in peers.items():
                start = time.perf_counter()
                step(*arguments)
                times[peer].append(1e3 * (time.perf_counter() - start))
        row = {
            "model": name,
            "dtype": str(dtype).removeprefix("torch."),
            "structures": count,
            "atoms": count * size,
            "edges": len(arguments[2]),
        }
        row |= {
            "export s": seconds,
            "difference": max(abs(losses[p] / losses["eager"] - 1) for p in ("ours", "ours, no PyTorch")),
        }
        rows.append(row | {f"{peer}: ms": statistics.median(t) for peer, t in times.items()})
        print(rows[-1], flush=True)
    return rows


def table(rows: list[dict[str, Any]]) -> list[str]:
    """Return the rows as lines of Markdown."""
    peers = ["eager", "eager, TorchScript", "torch.compile", "ours", "ours, no PyTorch"]
    peers = [p for p in peers if any(f"{p}: ms" in row for row in rows)]
    lines = [
        "## Training steps",
        "",
        "Milliseconds for one step: a loss with energies and forces (`examples/forcefields/force_matching.py`), its gradient, clipping, AdamW and",
        "averages of the parameters; in parentheses, how many times as fast as eager. `mace_run_train` trains with parts in TorchScript.",
        "`torch.compile` has a column if it takes the loss; that of torch 2.13 has no second derivatives.",
        f"*difference*: of the loss of step {COMPARED}, relative to eager's.",
        "",
        f"| model | dtype | structures | atoms | edges | {' | '.join(peers)} | difference | export, s |",
        "|---" * (7 + len(peers)) + "|",
    ]
    for row in rows:
        ms = [row.get(f"{p}: ms") for p in peers]
        cells = [row["model"], row["dtype"], row["structures"], row["atoms"], row["edges"]]
        cells += ["–" if m is None else f"{m:.1f} ({ms[0] / m:.2f})" for m in ms]
        lines.append(f"| {' | '.join(map(str, [*cells, format(row['difference'], '.0e'), round(row['export s'])]))} |")
    return lines
