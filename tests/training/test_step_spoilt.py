"""The self-check of a training step finds a gradient or an update that is off by a thousandth, and no package is written."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward.capture.step import optimizer_graph
from aot_backward.checks.verify import verify_package

aten = torch.ops.aten


def _scaled_gradient(graph: torch.fx.Graph, parameters: int) -> None:
    gradient = next(iter(graph.find_nodes(op="placeholder")))
    with graph.inserting_before(next(n for n in graph.nodes if n.op != "placeholder")):
        scaled = graph.call_function(aten.mul.Tensor, (gradient, 1.001))
    scaled.meta = dict(gradient.meta)
    gradient.replace_all_uses_with(scaled, delete_user_cb=lambda user: user is not scaled)


def _scaled_update(graph: torch.fx.Graph, parameters: int) -> None:
    before = list(graph.find_nodes(op="placeholder"))[parameters]
    output = next(iter(graph.find_nodes(op="output")))
    after, *others = output.args[0]
    with graph.inserting_before(output):
        change = graph.call_function(aten.mul.Tensor, (graph.call_function(aten.sub.Tensor, (after, before)), 1.001))
        made = graph.call_function(aten.add.Tensor, (before, change))
    for node in (*change.all_input_nodes, change, made):
        node.meta.setdefault("val", before.meta["val"])
    output.args = ([made, *others],)


class Diverging(nn.Module):
    """One element of a large parameter becomes NaN in the first step, and no other."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(160, 160) + 0.5)
        with torch.no_grad():
            self.weight[0, 0] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight.sqrt() * x.mean()).sum()


def _net(kind: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], Any]:
    """A module, its arguments and its loss."""
    torch.manual_seed(0)
    if kind == "diverging":
        return Diverging(), (torch.rand(3) + 1,), None
    width = 8 if kind == "small" else 160  # the latter's weights are compared by sketches
    net = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))
    return net, (torch.randn(12, width), torch.randint(0, 4, (12,))), nn.CrossEntropyLoss()


def test_a_large_moment_that_becomes_infinite(tmp_path: Path) -> None:
    """Squares of gradients overflow, and the parameters stay finite."""

    class Mean(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).mean()

    torch.manual_seed(0)
    net = Mean(160, 160)
    path = ab.export_step(net, (torch.randn(4, 160) * 1e25,), optimizer=torch.optim.Adam(net.parameters()), path=tmp_path / "step.pt2")
    assert verify_package(path).ok


@pytest.mark.parametrize(
    ("spoil", "optimizer", "kind"),
    [
        (_scaled_gradient, torch.optim.SGD, "small"),
        (_scaled_update, torch.optim.AdamW, "small"),
        (_scaled_update, torch.optim.AdamW, "large"),
        (_scaled_gradient, torch.optim.SGD, "diverging"),
    ],
)
def test_what_is_off_by_a_thousandth_fails_the_export(
    spoil: Callable[[torch.fx.Graph, int], None], optimizer: Any, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = optimizer_graph.trace

    def spoilt(about: Any, gradients: Any, parameters: Any, fake_mode: Any, settings: Any) -> Any:
        update = original(about, gradients, parameters, fake_mode, settings)
        with fake_mode:
            spoil(update.graph.graph, len(parameters))
        update.graph.recompile()
        return update

    net, arguments, loss_fn = _net(kind)
    path = tmp_path / "step.pt2"
    path.write_bytes(b"the old package")
    with monkeypatch.context() as patch:
        patch.setattr(optimizer_graph, "trace", spoilt)
        with pytest.raises(ab.ExportError, match=r"wrong: off by .* from eager, .* is allowed; nothing was written"):
            ab.export_step(net, arguments, loss_fn=loss_fn, optimizer=optimizer(net.parameters(), lr=0.1), path=path)
    assert path.read_bytes() == b"the old package"
    if kind == "diverging":
        ab.export_step(net, arguments, loss_fn=loss_fn, optimizer=optimizer(net.parameters(), lr=0.1), path=path)
        assert verify_package(path).ok
