"""Timing when a package is made, the choice among candidates, and the report if eager is faster."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.export import Dim
from torch.fx import GraphModule

import aot_backward as ab
from aot_backward.capture import partition
from aot_backward.packaging import tuning
from aot_backward_runtime import load
from aot_backward_runtime.format.manifest import Speed
from aot_backward_runtime.package.archive import open_package

from ..conftest import aot_backward
from ..support import exports
from ..support.oracle import assert_same, run

aten = torch.ops.aten
SIDE = 192


class Net(nn.Module):
    """Its buffer and its count show whether a timed call left changes behind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(SIDE, SIDE), nn.BatchNorm1d(SIDE), nn.Linear(SIDE, 3)
        self.calls, self.seen, self.kept = 0, ["nothing"], {"a": 1}

    def forward(self, x: Tensor) -> Tensor:
        print("called")
        self.calls += 1
        self.seen.append(self.calls)
        self.kept["b"] = 2
        return self.last(self.norm(self.first(x).tanh()))


def made() -> tuple[Net, Tensor]:
    torch.manual_seed(3)
    return Net(), torch.randn(SIDE, SIDE) / SIDE**0.5


def speeds(path: Path, entry: str = "net") -> list[Speed | None]:
    return [v.speed for v in open_package(path).manifest.entries[entry].variants]


def measured(path: Path, entry: str = "net") -> Speed:
    (found,) = speeds(path, entry)
    assert found is not None
    return found


def spoiling(wanted: str, spoil: Callable[[GraphModule], None]) -> Any:
    """Return ``split_module`` that spoils only the graphs of one partitioner."""
    split = partition.split_module

    def spoilt(joint: Any, *rest: Any, partitioner: str, **options: Any) -> Any:
        partitions = split(joint, *rest, partitioner=partitioner, **options)
        if partitioner == wanted:
            spoil(next(g for g in partitions.graphs if g.name.endswith("forward")).module)
        return partitions

    return spoilt


def slow(graph: GraphModule) -> None:
    """Add sixty products that change nothing to the first output."""
    (output,) = graph.graph.find_nodes(op="output")
    (x,) = [n for n in graph.graph.find_nodes(op="placeholder") if n.meta["val"].shape == (SIDE, SIDE)]
    result = output.args[0][0]
    with graph.graph.inserting_before(output):
        value = x
        for _ in range(60):
            value = graph.graph.call_function(aten.mm.default, (value, x))
            value.meta = {"val": x.meta["val"]}
        nothing = graph.graph.call_function(
            aten.mul.Tensor, (graph.graph.call_function(aten.sum.default, (value,)), 0.0)
        )
        nothing.args[0].meta = nothing.meta = {"val": x.meta["val"].new_empty(())}
        added = graph.graph.call_function(aten.add.Tensor, (result, nothing))
        added.meta = dict(result.meta)
    output.args = ([added, *output.args[0][1:]],)
    graph.recompile()


def wrong(graph: GraphModule) -> None:
    (output,) = graph.graph.find_nodes(op="output")
    with graph.graph.inserting_before(output):
        doubled = graph.graph.call_function(aten.mul.Tensor, (output.args[0][0], 2.0))
        doubled.meta = dict(output.args[0][0].meta)
    output.args = ([doubled, *output.args[0][1:]],)
    graph.recompile()


def try_both(monkeypatch: pytest.MonkeyPatch) -> None:
    """Try both partitioners, however little memory the backward keeps."""
    monkeypatch.setattr(tuning, "_MUCH", 0)
    monkeypatch.setattr(tuning, "_MORE", 0)


@pytest.mark.parametrize(("spoil", "spoilt"), [(slow, "default"), (slow, "min_cut"), (wrong, "default")])
def test_a_candidate_that_is_slow_or_wrong_is_not_shipped(
    spoil: Callable[[GraphModule], None],
    spoilt: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    net, x = made()
    state = {n: t.clone() for n, t in net.state_dict().items()}
    drawn = torch.get_rng_state()
    monkeypatch.setattr(partition, "split_module", spoiling(spoilt, spoil))
    try_both(monkeypatch)
    path = ab.export(tmp_path / "net.pt2", {"net": ab.Module(net, [ab.Variant((x,))])}, tune="quick")
    found = measured(path)
    other = next(n for n in partition.PARTITIONERS if n != spoilt)
    assert found.chosen == other
    assert {t.name for t in found.timings} == ({"eager", other, spoilt} if spoil is slow else {"eager", other})
    assert torch.equal(torch.get_rng_state(), drawn)
    assert all(torch.equal(net.state_dict()[name], tensor) for name, tensor in state.items())
    assert_same(run(load(path).module(), (x,), 1), run(net, (x,), 1))
    assert capsys.readouterr().out.count("called") < 60  # timed calls print nothing


def test_nothing_of_a_candidate_that_is_not_shipped_is_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    net, x = made()
    one = ab.export(tmp_path / "one.pt2", {"net": ab.Module(net, [ab.Variant((x,))])}, tune="none")
    monkeypatch.setattr(partition, "split_module", spoiling("default", slow))
    try_both(monkeypatch)
    two = ab.export(tmp_path / "two.pt2", {"net": ab.Module(net, [ab.Variant((x,))])}, tune="quick")
    assert speeds(one) == [None] and measured(two).chosen == "min_cut"
    names = [set(open_package(path).members()) for path in (one, two)]
    assert names[0] == names[1]
    assert open_package(one).manifest.weights.keys() == open_package(two).manifest.weights.keys()


def test_what_is_slower_than_eager_is_said_by_name_and_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    net, x = made()
    monkeypatch.setattr(partition, "split_module", spoiling("default", slow))
    path = ab.export(tmp_path / "net.pt2", {"net": ab.Module(net, [ab.Variant((x,))])}, tune="quick")
    (said,) = capsys.readouterr().err.splitlines()
    found = measured(path)
    assert found.chosen == "default" and found.ratios[0] > 1 and found.tune == "quick"
    ours, eager = found.timings[1].microseconds[0], found.timings[0].microseconds[0]
    assert (
        said.startswith("net is slower than eager")
        and f"{ours:,.1f} µs, eager {eager:,.1f} µs ({found.ratios[0]:.2f} times)" in said
    )
    shown = aot_backward("inspect", path).stdout
    assert f"default {ours:,.1f} µs ({found.ratios[0]:.2f} of eager's time)" in shown


def everything() -> Path:
    """Return a package of a module with two variants, one of them dynamic, a gradient function and a step."""

    def make(path: Path) -> None:
        net, x = made()
        rows = Dim("rows", min=2, max=4096)
        entries = {
            "net": ab.Module(
                net, [ab.Variant((x[:8],), dynamic_shapes=({0: rows},)), ab.Variant((x[:5],), mode="eval")]
            ),
            "grad": ab.Grad(lambda x, y: ((x @ y).tanh() ** 2).sum(), [ab.Variant((x, x.t().contiguous()))]),
            "step": ab.Step(
                net,
                [ab.Variant((x[:6], torch.arange(6) % 3))],
                torch.optim.SGD(net.parameters(), momentum=0.5),
                loss_fn=nn.CrossEntropyLoss(),
            ),
        }
        before = {n: t.clone() for n, t in net.state_dict().items()}
        ab.export(path, entries, tune="quick")
        after = net.state_dict()
        assert all(torch.equal(after[n], t) for n, t in before.items())
        assert (net.calls, net.seen, net.kept) == (0, ["nothing"], {"a": 1})
        assert all(p.grad is None for p in net.parameters()) and not entries["step"].optimizer.state

    return exports.shared("tuned", make)


def test_every_entry_is_timed_beside_eager() -> None:
    path = everything()
    dynamic, alone = speeds(path)
    for found in (dynamic, alone, measured(path, "grad"), measured(path, "step")):
        assert (
            found is not None
            and found.target == "cpu:avx2"
            and found.torch == torch.__version__
            and found.threads >= 1
            and found.processor
        )
        assert found.timings[0].name == "eager" and found.timings[0].saved == -1
        assert all(0 < t < 60e6 for timing in found.timings for t in timing.microseconds)
    assert dynamic is not None and alone is not None
    assert dynamic.sizes == ("rows=8", "rows=32") and alone.sizes == ("",)
    assert dynamic.timings[1].saved > 8 * SIDE * 4 and measured(path, "step").timings[1].saved == 0


def test_what_was_measured_is_shown() -> None:
    path = everything()
    dynamic = speeds(path)[0]
    assert dynamic is not None
    line = f"at rows=32: eager {dynamic.timings[0].microseconds[1]:,.1f} µs, default {dynamic.timings[1].microseconds[1]:,.1f} µs"
    assert line in aot_backward("inspect", path).stdout
    said = json.loads(aot_backward("inspect", path, "--json").stdout)
    timings = said["entries"]["net"]["variants"][0]["speed"]["timings"]
    assert [t["name"] for t in timings] == ["eager", "default"]
    assert timings[1]["microseconds"] == list(dynamic.timings[1].microseconds)
    page = path.with_suffix(".html")
    aot_backward("inspect", path, "--html", page)
    assert line in page.read_text()


def test_a_rebuilt_package_says_of_what_code_the_times_are(tmp_path: Path) -> None:
    path = tmp_path / "rebuilt.pt2"
    assert aot_backward("rebuild", everything(), "-o", path).returncode == 0
    assert speeds(path) == speeds(everything())
    assert f"code for cpu:avx2 by torch {torch.__version__}" in aot_backward("inspect", path).stdout


def test_what_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = {"f": ab.Grad(lambda x: (x * x).sum(), [ab.Variant((torch.ones(3),))])}
    with pytest.raises(ab.ExportError, match="tune is 'fast'; expected one of 'none', 'quick'"):
        ab.export(tmp_path / "f.pt2", entries, tune="fast")
    monkeypatch.setenv(tuning.VARIABLE, "much")
    with pytest.raises(ab.ExportError, match="AOT_BACKWARD_TUNE is 'much'; expected one of"):
        ab.export(tmp_path / "f.pt2", entries)
    monkeypatch.setenv(tuning.VARIABLE, "")
    assert measured(ab.export(tmp_path / "f.pt2", entries), "f").tune == "quick"
    failed = aot_backward("export", "examples/digits/export.py:entries", "-o", tmp_path / "g.pt2", "--tune", "slow")
    assert failed.returncode == 2 and "'slow' is not one of 'none', 'quick'" in failed.stderr


def test_a_program_that_fails_at_a_larger_size_is_timed_at_its_own(tmp_path: Path) -> None:
    def small(x: Tensor) -> Tensor:
        if not torch.compiler.is_compiling() and x.shape[0] > 10:
            raise ValueError("too large")
        return (x.tanh() ** 2).sum()

    rows = Dim("rows", min=2, max=64)
    path = ab.export(
        tmp_path / "f.pt2",
        {"f": ab.Grad(small, [ab.Variant((torch.ones(4, 2),), dynamic_shapes=({0: rows},))])},
        tune="quick",
    )
    assert measured(path, "f").sizes == ("rows=4",)


def test_a_size_that_is_not_cheap_is_not_timed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(tuning, "SECONDS", 1e-5)
    rows = Dim("rows", min=2, max=64)
    entries = {"f": ab.Grad(lambda x: (x * x).sum(), [ab.Variant((torch.ones(4, 2),), dynamic_shapes=({0: rows},))])}
    assert measured(ab.export(tmp_path / "f.pt2", entries, tune="quick"), "f").sizes == ("rows=4",)


def test_a_variant_without_a_backward_is_timed(tmp_path: Path) -> None:
    frozen = nn.Linear(4, 2).requires_grad_(False)
    found = measured(ab.export_module(frozen, (torch.ones(3, 4),), tune="quick", path=tmp_path / "f.pt2"), "module")
    assert [t.name for t in found.timings] == ["eager", "default"]
