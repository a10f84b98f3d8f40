"""The parts. Each yields the function of one repetition, and has a number of repetitions."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from aot_backward_runtime import InputError, load, replay

ROWS, WIDTH = 4, 16
Once = Callable[[int], object]


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.body(x)).square().mean()


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 3))


def made(folder: Path) -> None:
    """Export the packages of all parts."""
    import aot_backward as ab

    x, target = torch.randn(ROWS, WIDTH), torch.randint(3, (ROWS,))
    own = net()
    optimizer = torch.optim.SGD(own.parameters(), lr=1e-4)
    entries: dict[str, ab.Module | ab.Grad | ab.Step] = {
        "net": ab.Module(own, [ab.Variant((x,))]),
        "loss": ab.Grad(Loss(), [ab.Variant((x,))], wrt=["body.weight"]),
        "fit": ab.Step(own, [ab.Variant((x, target))], optimizer, loss_fn=nn.functional.cross_entropy),
    }
    ab.export(folder / "entries.pt2", entries)
    with ab.record(folder / "passes.pt2", tune="none"):
        for _ in range(2):
            own(x).square().mean().backward()


def _input() -> torch.Tensor:
    return torch.randn(ROWS, WIDTH)


@contextlib.contextmanager
def module(folder: Path) -> Iterator[Once]:
    model, x = load(folder / "entries.pt2").module("net"), _input()
    yield lambda _: model(x).sum().backward()


@contextlib.contextmanager
def grad(folder: Path) -> Iterator[Once]:
    function, x = load(folder / "entries.pt2").grad("loss"), _input()
    yield lambda _: function(x)


@contextlib.contextmanager
def step(folder: Path) -> Iterator[Once]:
    training, x, target = load(folder / "entries.pt2").step("fit"), _input(), torch.zeros(ROWS, dtype=torch.int64)
    yield lambda _: training(x, target)


@contextlib.contextmanager
def replayed(folder: Path) -> Iterator[Once]:
    own, x = net(), _input()
    with replay(folder / "passes.pt2", strict=True):
        yield lambda _: own(x).square().mean().backward()


@contextlib.contextmanager
def rejected(folder: Path) -> Iterator[Once]:
    package, x = load(folder / "entries.pt2"), _input()
    model, function, training = package.module("net"), package.grad("loss"), package.step("fit")
    bad = [(x.double(),), (x[:, :5],), (None,), (x.to("meta"),), (x, x, x, x)]

    def once(number: int) -> None:
        called = (model, function, training)[number % 3]
        try:
            called(*bad[number % len(bad)])
        except InputError:
            return
        raise AssertionError(f"repetition {number}: expected InputError, got no error")

    yield once


@contextlib.contextmanager
def loads(folder: Path) -> Iterator[Once]:
    x, target = _input(), torch.zeros(ROWS, dtype=torch.int64)

    def once(_: int) -> None:
        package = load(folder / "entries.pt2")
        package.module("net")(x).sum().backward()
        package.grad("loss")(x)
        package.step("fit")(x, target)

    yield once


@contextlib.contextmanager
def bindings(folder: Path) -> Iterator[Once]:
    """``.data =``, ``load_state_dict(assign=True)``, ``functional_call`` and ``deepcopy`` in turn."""
    model, x = load(folder / "entries.pt2").module("net"), _input()

    def data() -> None:
        for parameter in model.parameters():
            parameter.data = parameter.data.clone()
        model(x).sum().backward()

    def assign() -> None:
        model.load_state_dict({k: t.clone() for k, t in model.state_dict().items()}, assign=True)
        model(x).sum().backward()

    def functional() -> None:
        others = {k: p.detach().clone().requires_grad_() for k, p in model.named_parameters()}
        torch.func.functional_call(model, others, (x,)).sum().backward()

    def copied() -> None:
        copy.deepcopy(model)(x).sum().backward()

    ways = (data, assign, functional, copied)
    yield lambda number: ways[number % 4]()


@contextlib.contextmanager
def structures(folder: Path) -> Iterator[Once]:
    """Change a constant of the graph in each pass, like a scheduled limit."""
    weight, x = torch.ones(WIDTH, requires_grad=True), _input()
    with replay(folder / "passes.pt2"):
        yield lambda number: (x * weight).clamp(max=1 + number * 1e-3).sum().backward()


@contextlib.contextmanager
def leaking(folder: Path) -> Iterator[Once]:
    """Leak, for the test that a leak is found. Runs only on request."""
    kept: list[object] = []
    yield lambda _: kept.append((Path("/dev/null").open("rb"), bytearray(1 << 16)))  # noqa: SIM115


@dataclass(frozen=True)
class Part:
    run: Callable[[Path], contextlib.AbstractContextManager[Once]]
    calls: int
    shown: str


PARTS = {
    "module": Part(module, 10**6, "module: forward and backward"),
    "grad": Part(grad, 10**6, "grad"),
    "step": Part(step, 10**6, "step"),
    "replay": Part(replayed, 10**6, "replay: the same pass"),
    "rejected": Part(rejected, 10**6, "rejected calls"),
    "loads": Part(loads, 300, "loaded, each entry called, dropped"),
    "bindings": Part(bindings, 4000, "weights bound again"),
    "structures": Part(structures, 10**4, "replay: a structure never seen before"),
}
HIDDEN = {"leaking": Part(leaking, 1000, "a leak")}
