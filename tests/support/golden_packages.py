"""Write the golden packages of the current format version; see golden/README.md."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.export import Dim

import aot_backward as ab

from ..golden_operators import cube


class Pair(nn.Module):
    """A module that exercises the format: tied weights, a mutated buffer, a frozen parameter, nested arguments and
    results, a symbol."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(3, 3)
        self.second = nn.Linear(3, 3)
        self.second.weight = self.first.weight
        self.scale = nn.Parameter(torch.full((3,), 2.0), requires_grad=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor, more: dict[str, torch.Tensor]) -> dict[str, Any]:
        self.calls += 1
        h = torch.tanh(self.first(x)) * self.scale
        return {"out": self.second(h) + more["bias"], "h": (h, None), "rows": x.shape[0]}


def arguments() -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    torch.manual_seed(1)
    return torch.randn(4, 3, requires_grad=True), {"bias": torch.randn(3)}


def backward_passes(batches: Sequence[int]) -> list[list[torch.Tensor]]:
    """Run a script's passes and return the gradients of a small net's parameters, a list for each batch."""
    torch.manual_seed(2)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    out = []
    for n in batches:
        net.zero_grad()
        net(torch.randn(n, 4)).square().mean().backward()
        out.append([p.grad for p in net.parameters() if p.grad is not None])
    return out


def write_passes(path: Path) -> None:
    """Write passes that were timed at two sizes."""
    with ab.record(path, tune="quick") as recording:
        backward_passes([6, 9] * 45)
    assert not recording.skipped


def write_pair(path: Path) -> None:
    net = Pair()

    def loss(x: torch.Tensor) -> torch.Tensor:
        return net.first(x).square().sum()

    rows = {0: Dim("rows", min=2, max=64)}
    ab.export(
        path,
        {
            "pair": ab.Module(net, [ab.Variant(arguments(), dynamic_shapes={"x": rows, "more": {"bias": None}})]),
            "loss": ab.Grad(
                loss, [ab.Variant((arguments()[0],), dynamic_shapes={"x": rows})], wrt=["x", "net.first.weight"]
            ),
        },
    )


def training() -> ab.Step:
    """Return a step that exercises the format: groups, accumulation, clipping, skipping, a symbol, weights that are not
    stored."""
    torch.manual_seed(3)
    net = nn.Sequential(nn.Linear(4, 8, bias=False), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = torch.optim.AdamW(
        [{"params": net[:2].parameters(), "lr": 1e-3}, {"params": net[3].parameters()}], lr=1e-2
    )
    rows = {0: Dim("rows", min=4, max=64)}
    variant = ab.Variant(samples(8), dynamic_shapes=(rows, rows))
    return ab.Step(
        net,
        [variant],
        optimizer,
        loss_fn=nn.functional.cross_entropy,
        accumulate=True,
        clip_norm=0.5,
        skip_nonfinite=True,
    )


def samples(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
    return x, x[:, :3].argmax(1)


def write_step(path: Path) -> None:
    ab.export(path, {"fit": training()})


class Curved(nn.Module):
    """Its gradients depend on every input and parameter, and its backward on intermediate activations."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.body = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Dropout(0.5), nn.Linear(6, 6))
        self.head = nn.Linear(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.nn.functional.silu(self.body(x)))


def write_orders(path: Path) -> None:
    """Write a twice differentiable module, with one variant for all gradients and one for its head only."""
    rows, x = {0: Dim("rows", min=2, max=64)}, torch.randn(4, 3)
    subsets = (("x", "parameters"), ("head",))
    variants = [ab.Variant((x,), dynamic_shapes=(rows,), requires_grad=names, mode="train") for names in subsets]
    ab.export(path, {"curved": ab.Module(Curved(), variants, order=2)})


def bend(x: torch.Tensor) -> torch.Tensor:
    return (torch.tanh(x) * x.sum(1, keepdim=True)).square().mean()


def write_targets(path: Path) -> None:
    """Write one gradient for two levels of processors, with its portable graph."""
    rows = {0: Dim("rows", min=2, max=64)}
    ab.export(
        path,
        {"bend": ab.Grad(bend, [ab.Variant((torch.ones(4, 3),), dynamic_shapes=(rows,))])},
        target="cpu:avx2,cpu:sse4",
    )


def write_machines(path: Path) -> None:
    """Write one gradient for two machines, whose code for the other one ran in an emulator."""
    rows = {0: Dim("rows", min=2, max=64)}
    gradient = ab.Grad(bend, [ab.Variant((torch.ones(4, 3),), dynamic_shapes=(rows,))])
    ab.export(path, {"bend": gradient}, target="cpu:avx2,cpu:neon", tune="none")


def cubed(x: torch.Tensor) -> torch.Tensor:
    return (cube(x) * x).sum()


def write_operators(path: Path) -> None:
    """Write a gradient through an operator that PyTorch does not have."""
    ab.export(path, {"cubed": ab.Grad(cubed, [ab.Variant((torch.ones(4),))])})


def grid() -> torch.Tensor:
    return torch.linspace(-2, 2, 130 * 130).reshape(130, 130)


def write_sketches(path: Path) -> None:
    """Write a gradient that is too large to be stored whole."""
    ab.export(path, {"bend": ab.Grad(bend, [ab.Variant((grid(),))])})


def write_speed(path: Path) -> None:
    """Write a gradient that was timed against eager, at two sizes."""
    rows = {0: Dim("rows", min=2, max=64)}
    ab.export(path, {"bend": ab.Grad(bend, [ab.Variant((torch.ones(4, 3),), dynamic_shapes=(rows,))])}, tune="quick")


def write_standalone(path: Path) -> None:
    """Write one entry that runs without PyTorch, and one that calls an operator which only PyTorch has."""

    def swing(x: torch.Tensor) -> torch.Tensor:
        return torch.linalg.det(x).square()

    ab.export(
        path,
        {
            "bend": ab.Grad(bend, [ab.Variant((torch.ones(4, 3),))]),
            "swing": ab.Grad(swing, [ab.Variant((torch.eye(3) + 1,))]),
        },
        tune="none",
    )


def momentum(steps: int) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Return the parameters and the optimizer after some steps on made-up gradients: two groups, state, a parameter
    without a gradient."""
    torch.manual_seed(6)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
    groups = [{"params": net[0].parameters(), "weight_decay": 0.1}, {"params": net[2].parameters()}]
    optimizer = torch.optim.SGD(groups, lr=0.1, momentum=0.9)
    for step in range(steps):
        for p in (net[0].weight, net[0].bias, net[2].weight):
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step))
        optimizer.step()
    return [p.detach() for p in net.parameters()], optimizer


def write_updates(path: Path) -> None:
    """Write recorded optimizer steps."""
    with ab.record(path, tune="quick"):
        momentum(4)


def clipped(step: int) -> list[torch.Tensor]:
    """Return clipped made-up gradients and their norm."""
    made = [nn.Parameter(torch.zeros(shape)) for shape in ((8, 4), (8,), (2, 8))]
    for i, p in enumerate(made):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + i))
    norm = nn.utils.clip_grad_norm_(made, 1.0)
    nn.utils.clip_grad_value_(made[:2], 0.05)
    return [norm, *(p.grad for p in made if p.grad is not None)]


def write_clippings(path: Path) -> None:
    """Write recorded clippings of gradients, by norm and by value."""
    with ab.record(path, tune="quick"):
        for step in range(3):
            clipped(step)


# A golden package holds the digest of the source of this class, its docstring included.
class Gated(nn.Module):
    """Attributes of its own, and a submodule in another mode."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(8)
        self.lin, self.drop = nn.Linear(4, 4), nn.Dropout(0.5).eval()
        self.sharpness, self.options = 3.0, {"skip": True}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated = torch.sigmoid(self.sharpness * self.drop(self.lin(x)))
        return gated + x if self.options["skip"] else gated


def gated_gradients(net: nn.Module, batches: Sequence[int] = (4, 4, 6, 6)) -> list[torch.Tensor]:
    """Return the gradients accumulated by some calls of the module."""
    for rows in batches:
        net(torch.linspace(-1, 1, 4 * rows).view(rows, 4)).square().sum().backward()
    return [p.grad for p in net.parameters()]


def write_layers(path: Path) -> None:
    rows = {"x": {0: Dim("rows", min=2)}}
    ab.export_module(Gated(), (torch.linspace(-1, 1, 16).view(4, 4),), dynamic_shapes=rows, path=path)


def bent(x: torch.Tensor) -> dict[str, Any]:
    """Return what ``bend`` computes, and its gradient, by name."""
    y = x.detach().requires_grad_()
    value = bend(y)
    return {"value": value, "by": {"x": torch.autograd.grad(value, y)[0]}}


def write_metadata(path: Path) -> None:
    """Write a function without gradients with named outputs, and metadata of the package and of the entry."""
    rows = {0: Dim("rows", min=2, max=64)}
    entry = ab.Function(
        bent, [ab.Variant((torch.ones(4, 3),), dynamic_shapes=(rows,))], metadata={"cutoff": 5.0, "species": ["H", "O"]}
    )
    ab.export(path, {"bent": entry}, metadata={"author": "nobody"}, tune="none")


WRITERS = {
    "pair": write_pair,
    "passes": write_passes,
    "step": write_step,
    "orders": write_orders,
    "targets": write_targets,
    "operators": write_operators,
    "sketches": write_sketches,
    "speed": write_speed,
    "standalone": write_standalone,
    "updates": write_updates,
    "layers": write_layers,
    "clippings": write_clippings,
    "digest": write_standalone,
    "metadata": write_metadata,
    "machines": write_machines,
}

if __name__ == "__main__":
    from tests.support.golden_packages import WRITERS  # the import gives classes the name of their module

    WRITERS[Path(sys.argv[1]).stem.rpartition("-")[2]](Path(sys.argv[1]))
