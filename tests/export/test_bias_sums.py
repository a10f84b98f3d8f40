"""Matrix products with an added term are compiled as a product and a sum, which joins the loop that reads it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim

import aot_backward as ab
from aot_backward_exporters import torch_api
from aot_backward_exporters.rewrites.bias_sums import split_bias_sums
from aot_backward_runtime import load

from ..support import rewriting

aten = torch.ops.aten
RANDOM = torch.Generator().manual_seed(0)


def some(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(*shape, generator=RANDOM).to(dtype)


class Gated(nn.Module):
    """Layers with results for a loop, for another product and for both, and products that are added to existing
    tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8)
        self.second = nn.Linear(8, 8)
        self.third = nn.Linear(8, 5)
        self.plain = nn.Linear(8, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.second(self.first(x))
        return self.third(hidden * torch.sigmoid(self.plain(hidden)) + self.plain(hidden.relu()))


def called(package: Any) -> dict[str, bool]:
    code = b"".join(package._archive.library(name).read_bytes() for name in package.manifest.libraries)
    return {name: f"aoti_torch_cpu_{name}_out".encode() in code for name in ("addmm", "mm")}


@pytest.mark.parametrize("shape", [(4, 6), (3, 4, 6)])
def test_layers_are_eagers(shape: tuple[int, ...], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, x = Gated(), some(*shape).requires_grad_()
    package = load(
        ab.export_module(
            model, (x,), dynamic_shapes={"x": {0: Dim("rows", min=2, max=64)}}, path=tmp_path / "gated.pt2"
        )
    )
    assert called(package) == {"addmm": False, "mm": True}
    for rows in (shape[0], 2, 33):
        exported, given = package.module(), some(rows, *shape[1:]).requires_grad_()
        expected, ours = model(given), exported(given)
        torch.testing.assert_close(ours, expected)
        assert ours.stride() == expected.stride()
        of_ours = torch.autograd.grad(ours.square().sum(), [given, *exported.parameters()])
        torch.testing.assert_close(
            of_ours, torch.autograd.grad(expected.square().sum(), [given, *model.parameters()]), rtol=1e-4, atol=1e-5
        )


X, Y = some(4, 6), some(6, 5)
REWRITTEN: dict[str, tuple[bool, Any, list[Tensor]]] = {
    "a row is added": (True, torch.addmm, [some(5), X, Y]),
    "one number is added": (True, torch.addmm, [some(1), X, Y]),
    "a matrix is added": (True, torch.addmm, [some(4, 5), X, Y]),
    "a product is added": (True, lambda x, y, z: x + y @ z, [some(4, 5), X, Y]),
    "two products": (True, lambda x, y: x @ y + (x * 2) @ y.sin(), [X, Y]),
    "strides of what is added": (True, lambda x, y, z: x.t() + y @ z, [some(5, 4), X, Y]),
    "strides of the product": (True, lambda x, y, z: y @ z + x.t(), [some(5, 4), X, Y]),
    "a scaled product": (False, lambda b, x, y: torch.addmm(b, x, y, alpha=0.5), [some(5), X, Y]),
    "a product is used twice": (False, lambda x, y, z: ((p := y @ z) + x) * p, [some(4, 5), X, Y]),
    "more dimensions are added": (False, lambda x, y, z: x + y @ z, [some(2, 4, 5), X, Y]),
    "half precision": (False, torch.addmm, [t.bfloat16() for t in (some(5), X, Y)]),
    "double precision": (False, torch.addmm, [t.double() for t in (some(5), X, Y)]),
    "another dtype": (False, lambda x, y, z: x + y @ z, [some(4, 5).bfloat16(), X, Y]),
}


@pytest.mark.parametrize("case", REWRITTEN)
def test_what_is_rewritten(case: str) -> None:
    found, function, given = REWRITTEN[case]
    graph = torch_api.make_fx(function, tracing_mode="fake")(*given)
    before = str(graph.graph)
    rewriting.rewritten(graph, split_bias_sums)
    assert (str(graph.graph) != before) == found
    assert not (found and graph.graph.find_nodes(op="call_function", target=aten.addmm.default))
    expected, ours = function(*given), graph(*given)
    torch.testing.assert_close(ours, expected)
    assert ours.stride() == expected.stride()
