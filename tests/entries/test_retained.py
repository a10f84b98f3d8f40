"""Activations saved for a backward: kept if the graph is retained, overwritten if autograd frees them anyway."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.profiler import profile

import aot_backward as ab
from aot_backward.capture import fx_graph
from aot_backward_runtime import load
from aot_backward_runtime.native.library import Library
from aot_backward_runtime.package.archive import open_package

from ..support import exports
from ..support.oracle import assert_same, run

WIDTH = 96


class Layers(nn.Module):
    """The backward also saves the second output and the input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(5))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        middle = torch.sigmoid(x)
        for layer in self.layers:
            x = torch.nn.functional.gelu(layer(x))
        return x, middle * x


def layers() -> nn.Module:
    torch.manual_seed(6)
    return Layers()


def _make(path: Path) -> None:
    rows = {0: Dim("rows", min=2, max=100_000)}
    ab.export_module(layers(), (torch.randn(8, WIDTH, requires_grad=True),), dynamic_shapes=(rows,), path=path)


@pytest.fixture(scope="module")
def package() -> Path:
    return exports.shared("retained", _make)


def test_it_writes_over_what_nobody_else_sees(package: Path) -> None:
    manifest = open_package(package).manifest
    (variant,) = manifest.entries["module"].variants
    assert "consumes" in manifest.required_features
    assert variant.forward is not None and variant.backward is not None
    visible = {
        *variant.forward.outputs,
        *(s for s in variant.forward.saved if s.startswith("input")),
        *variant.forward.watched,
    }
    consumed = {variant.forward.saved[i] for i in variant.backward.consumes}
    assert len(consumed) >= 4 and consumed.isdisjoint(visible)


def test_a_retained_graph_gives_the_same_twice(package: Path) -> None:
    module, eager = load(package).module(), layers()
    x = torch.randn(9, WIDTH, requires_grad=True)
    cotangents = [torch.randn(9, WIDTH), torch.randn(9, WIDTH)]
    assert_same(run(module, (x,), cotangents), run(eager, (x,), cotangents))
    out = module(x)
    first = torch.autograd.grad(out, [x, *module.parameters()], cotangents, retain_graph=True)
    second = torch.autograd.grad(out, [x, *module.parameters()], [2 * c for c in cotangents], retain_graph=True)
    last = torch.autograd.grad(out, [x, *module.parameters()], cotangents)
    for a, b, c in zip(first, second, last, strict=True):
        torch.testing.assert_close(2 * a, b, rtol=1e-5, atol=1e-6)
        assert torch.equal(a, c)


def test_a_second_backward_raises_as_in_eager(package: Path) -> None:
    x = torch.randn(3, WIDTH)
    messages = []
    for module in (load(package).module(), layers()):
        out = module(x)[0].sum()
        out.backward()
        with pytest.raises(RuntimeError) as caught:
            out.backward()
        messages.append(str(caught.value))
    assert messages[0] == messages[1] and "a second time" in messages[0]


def test_what_hooks_have_got_hold_of_is_left_alone(package: Path) -> None:
    module, x = load(package).module(), torch.randn(5, WIDTH, requires_grad=True)
    held: list[tuple[torch.Tensor, torch.Tensor]] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        held.append((tensor, tensor.clone()))
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = module(x)[0]
    out.sum().backward()
    assert len(held) > 4 and all(torch.equal(tensor, before) for tensor, before in held)
    with torch.autograd.graph.save_on_cpu():
        out = module(x)[0]
    expected, x.grad = x.grad, None
    out.sum().backward()
    assert torch.equal(x.grad, expected)


def test_a_backward_that_failed_half_way(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    module, x = load(package).module(), torch.randn(4, WIDTH, requires_grad=True)
    out = module(x)[0].sum()
    original: Callable[..., Any] = Library.run

    def failing(self: Library, inputs: list[torch.Tensor]) -> Any:
        original(self, inputs)
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(Library, "run", failing)
        with pytest.raises(RuntimeError, match="out of memory"):
            out.backward()
    with pytest.raises(RuntimeError, match=r"backward of this graph failed|a second time"):
        out.backward()
    assert x.grad is None


def peak(module: nn.Module, rows: int) -> int:
    """Return the peak bytes that one backward allocates."""
    out = module(torch.randn(rows, WIDTH, requires_grad=True))[0]
    incoming = torch.randn_like(out)
    with profile(profile_memory=True) as measured:
        out.backward(incoming)
    assert measured.profiler is not None
    now = top = 0
    for event in measured.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            top = max(top, now)
    return top


@pytest.mark.filterwarnings("ignore:.*Profiler clears events at the end")  # torch 2.11
def test_peak_memory_is_lower(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.setattr(fx_graph, "is_fresh", lambda node: False)
        _make(tmp_path / "leaves.pt2")
    rows = 4096
    consuming, leaving = (peak(load(path).module(), rows) for path in (package, tmp_path / "leaves.pt2"))
    a_gradient = WIDTH * WIDTH * 4  # of a weight: the two peaks are at different places of the backward
    assert consuming <= leaving - rows * WIDTH * 4 + a_gradient, f"{consuming:,} and {leaving:,} bytes"
