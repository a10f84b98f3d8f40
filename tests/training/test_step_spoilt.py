"""The self-check of a training step finds a gradient or an update that is off by a thousandth, and writes no
package."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import aot_backward as ab
from aot_backward.capture.step import optimizer_graph
from aot_backward.checks import step_check
from aot_backward.checks.verify import verify_package
from aot_backward_runtime.package.archive import open_package

from ..support import golden_files

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
    """Only one element of a large parameter becomes NaN in the first step."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(160, 160) + 0.5)
        with torch.no_grad():
            self.weight[0, 0] = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.weight.sqrt() * x.mean()).sum()


def _net(kind: str) -> tuple[nn.Module, tuple[torch.Tensor, ...], Any]:
    """Return a module, its arguments and its loss."""
    torch.manual_seed(0)
    if kind == "diverging":
        return Diverging(), (torch.rand(3) + 1,), None
    width = 8 if kind == "small" else 160  # the larger weights are compared by sketches
    net = nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, 4))
    return net, (torch.randn(12, width), torch.randint(0, 4, (12,))), nn.CrossEntropyLoss()


def test_a_large_moment_that_becomes_infinite(tmp_path: Path) -> None:
    """Squares of gradients overflow, and the parameters stay finite."""

    class Mean(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).mean()

    torch.manual_seed(0)
    net = Mean(160, 160)
    path = ab.export_step(
        net, (torch.randn(4, 160) * 1e25,), optimizer=torch.optim.Adam(net.parameters()), path=tmp_path / "step.pt2"
    )
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
    spoil: Callable[[torch.fx.Graph, int], None],
    optimizer: Any,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
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
    shutil.copy(golden_files.PAIR, path)
    with monkeypatch.context() as patch:
        patch.setattr(optimizer_graph, "trace", spoilt)
        with pytest.raises(ab.ExportError, match=r"wrong: off by .* from eager, .* is allowed; nothing was written"):
            ab.export_step(net, arguments, loss_fn=loss_fn, optimizer=optimizer(net.parameters(), lr=0.1), path=path)
    assert path.read_bytes() == golden_files.PAIR.read_bytes()
    if kind == "diverging":
        ab.export_step(net, arguments, loss_fn=loss_fn, optimizer=optimizer(net.parameters(), lr=0.1), path=path)
        assert verify_package(path).ok


class PerGroup(nn.Module):
    """The mean over groups of a sum divided by its number of rows, which is 0 for an empty group. ``beside`` is
    independent of that; with ``mixed`` it becomes NaN, too."""

    def __init__(self, mixed: bool) -> None:
        super().__init__()
        self.weight, self.beside, self.mixed = nn.Parameter(torch.ones(())), nn.Parameter(torch.ones(3)), mixed

    def forward(self, x: torch.Tensor, group: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        rows = torch.zeros_like(target).index_add(0, group, torch.ones_like(x))
        sums = torch.zeros_like(target).index_add(0, group, x * self.weight)
        loss = ((sums - target) / rows).square().mean()
        return (loss - loss.detach() if self.mixed else loss) + self.beside.square().sum() * (
            loss.detach() if self.mixed else 1.0
        )


def test_infinities_at_a_size_that_the_export_chose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eager's loss is Inf there, too. Finite values are compared. A size whose results include an all-NaN tensor is not
    called verified."""
    example = (
        torch.tensor([0.5, -1.0, 2.0, 1.0, 0.3, -0.7]),
        torch.tensor([0, 0, 0, 1, 1, 1]),
        torch.tensor([0.3, -0.4]),
    )
    rows, groups = {0: Dim("rows", min=1, max=99)}, {0: Dim("groups", min=1, max=9)}
    original = step_check.steps_of_entry

    def export(mixed: bool) -> tuple[str, ...]:
        net = PerGroup(mixed)
        path = ab.export_step(
            net,
            example,
            optimizer=torch.optim.AdamW(net.parameters()),
            dynamic_shapes=(rows, rows, groups),
            tune="none",
            path=tmp_path / "step.pt2",
        )
        return open_package(path).manifest.entries["step"].variants[0].verdict.sizes

    assert export(False) == ("rows=6, groups=2", "rows=7, groups=4", "rows=1, groups=1", "rows=1, groups=2")
    for name, message in (
        ("loss 0", r"loss 0 is 2 in the compiled step and inf in eager"),
        ("parameter beside", r"the change of parameter beside"),
    ):

        def spoilt(package: Any, entry: str, sized: Any, *rest: Any) -> step_check.StepResults:
            results = original(package, entry, sized, *rest)
            if sized.tensors[2].shape[0] == 4:
                (results.losses if name in results.losses else results.after)[name].fill_(2.0)  # noqa: B023
            return results

        with monkeypatch.context() as patch:
            patch.setattr(step_check, "steps_of_entry", spoilt)
            with pytest.raises(ab.ExportError, match=message):
                export(False)
    assert export(True) == ("rows=6, groups=2", "rows=1, groups=1")
