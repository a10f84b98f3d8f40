"""If compiled code computes a program wrong, export calls eager's kernels for as few operators as possible, and names
them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import aot_backward as ab
from aot_backward_exporters.inductor import graph_fixes
from aot_backward_exporters.toolchain import compile_cache
from aot_backward_runtime import load


def pooled(x: Tensor) -> Tensor:
    """Inductor divides by the whole window if it reaches beyond the image. The exporter knows that, and calls eager's
    kernel."""
    return (functional.avg_pool2d(x.tanh() * 2, 3, 2, ceil_mode=True).sin() * 3).sum()


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.1))

    def forward(self, x: Tensor) -> Tensor:
        return pooled(x * self.scale)


@pytest.fixture
def said() -> Iterator[list[str]]:
    """Yield the lines that a test's exports log for you."""
    handler, lines = logging.Handler(logging.WARNING), list[str]()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("aot_backward").addHandler(handler)
    yield lines
    logging.getLogger("aot_backward").removeHandler(handler)


def test_the_operator_at_fault_is_found_and_named(
    tmp_path: Path, said: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    shared = compile_cache.cache_root() / "shared"
    shared.mkdir(parents=True, exist_ok=True)
    # Wrongly compiled code stays out of the shared cache
    monkeypatch.setenv("AOT_BACKWARD_CACHE", str(tmp_path / "cache"))
    (tmp_path / "cache").mkdir()
    (tmp_path / "cache" / "shared").symlink_to(shared)
    monkeypatch.setattr(graph_fixes, "_miscompiled", lambda node: False)
    net, x = Scaled(), torch.randn(2, 2, 6, 6)
    entries = {
        "grad": ab.Grad(pooled, [ab.Variant((x,))], wrt="x"),
        "step": ab.Step(net, [ab.Variant((x,))], torch.optim.SGD(net.parameters(), lr=0.1)),
    }
    path = ab.export(tmp_path / "pooled.pt2", entries, tune="none")
    for name in entries:
        (line,) = [text for text in said if text.startswith(f"{name}: ")]
        assert (
            "PyTorch's own kernels compute aten.avg_pool2d_backward.default (" in line
            and "test_kernel_search.py" in line
            and "off by" in line
        )
    ab.rebuild(path, tmp_path / "rebuilt.pt2")
    for file in (path, tmp_path / "rebuilt.pt2"):
        package = load(file)
        assert "aten.avg_pool2d_backward.default" in package.manifest.notes["kernels of grad"]
        given = torch.randn(2, 2, 6, 6, requires_grad=True)
        (eager,) = torch.autograd.grad(pooled(given), given)
        torch.testing.assert_close(package.grad("grad")(given.detach())[1], eager)
        step = package.step("step")
        step(x)
        (gradient,) = torch.autograd.grad(net(x), net.scale)
        torch.testing.assert_close(step.parameters["scale"], net.scale - 0.1 * gradient)
