"""Packages of recorded passes: the command line's description, and tampered manifests that are refused before native
code runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import Tensor, nn

import aot_backward as ab
from aot_backward_runtime.package.archive import open_package

from ..commands.test_cli import called
from ..support.exports import shared
from ..support.packages import MANIFEST, put_together, taken_apart

Change = Callable[[dict[str, Any]], object]


class Halve(torch.autograd.Function):
    """Its backward has a side effect in Python, so no graph may contain it."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        Halve.calls += 1
        return grad * 0.5


class Plain:
    """A net, and its backward with and without Python code."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 2))

    def plain(self, rows: int) -> list[Tensor | None]:
        self.net.zero_grad()
        self.net(torch.linspace(-1, 1, rows * 6).reshape(rows, 6)).square().mean().backward()
        return [p.grad for p in self.net.parameters()]

    def hooked(self, rows: int) -> list[Tensor | None]:
        self.net.zero_grad()
        hidden = self.net[0](torch.linspace(-1, 1, rows * 6).reshape(rows, 6))
        hidden.register_hook(lambda grad: grad * 2)
        Halve.apply(self.net[2](torch.tanh(hidden))).square().sum().backward()
        return [p.grad for p in self.net.parameters()]


@pytest.fixture(scope="session")
def recorded() -> Path:
    """Return a package: structure 0 is :meth:`Plain.plain`, structure 1 :meth:`Plain.hooked`. Do not write to it."""

    def make(path: Path) -> None:
        program = Plain()
        with ab.record(path) as recording:
            for rows in (4, 7, 12):
                program.plain(rows)
                program.hooked(rows)
        assert not recording.skipped

    return shared("recorded-plain-and-hooked", make)


def edited(package: Path, path: Path, change: Change) -> Path:
    """Write a copy with a changed manifest."""
    members = taken_apart(package)
    manifest = json.loads(members[MANIFEST])
    change(manifest)
    put_together(path, {**members, MANIFEST: json.dumps(manifest).encode()})
    return path


def entry(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["entries"]["backward"]  # type: ignore[no-any-return]


def variant(manifest: dict[str, Any], structure: int = 0) -> dict[str, Any]:
    return entry(manifest)["structures"][structure]["variants"][0]  # type: ignore[no-any-return]


def segments(manifest: dict[str, Any], structure: int = 0) -> list[dict[str, Any]]:
    return variant(manifest, structure)["segments"]  # type: ignore[no-any-return]


def graph(manifest: dict[str, Any], structure: int = 0) -> dict[str, Any]:
    """Return the structure's last compiled graph."""
    return [s for s in segments(manifest, structure) if s.get("library")][-1]


def done(*arguments: object) -> Result:
    result = called(*arguments)
    assert result.exit_code == 0 and result.stderr == "", result.output
    return result


def test_inspect_in_words(recorded: Path) -> None:
    shown = done("inspect", recorded).stdout
    plain, hooked = (s.fingerprint[:12] for s in open_package(recorded).manifest.entries["backward"].structures)
    for words in (
        f"\n\nbackward replay\n  Structure {plain}\n    Recorded pass: 12 autograd nodes, 19 operations\n",
        " µs when it was recorded\n",
        "    Nodes: GraphRoot, MeanBackward0, PowBackward0, AddmmBackward0 × 2, TBackward0 × 2, AccumulateGrad × 4, TanhBackward0\n",
        f"    Variant 0: 15 operations in the graph pass.{plain}.0.0, 4 gradients handed to the leaves\n",
        "    Sizes: s0: 2 and more (dimension 0 of tensor 1 (of PowBackward0, node 2))\n",
        "    Compared: verified: %v",
        "run at s0=4, s0=7\n",
        f"  Structure {hooked}\n",
        "HalveBackward",
        ", 1 operation as recorded, ",
    ):
        assert words in shown


def test_inspect_says_what_limits_a_variant(recorded: Path, tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        v = variant(manifest)
        v["symbols"] = [
            {**v["symbols"][0], "label": "rows", "maximum": 64, "scale": 2, "offset": 1},
            *(
                {"name": f"s{i}", "label": f"s{i}", "input": -1, "dim": i, "minimum": 0, "maximum": None}
                for i in range(1, 11)
            ),
        ]
        v["guards"] = ["s10 % 8 == 0", "s0 > s1"]
        v["ambient"] = {"autocast": "bfloat16"}
        v["scalars"] = [1, 2.5]

    shown = done("inspect", edited(recorded, tmp_path / "limits.pt2", change)).stdout
    for words in (
        "rows: 2 to 64 (dimension 0 of tensor 1 (of PowBackward0, node 2) is 2 × rows + 1: 5 to 129)\n",
        "s10: 0 and more, a multiple of 8 (size 10 of the pass)\n",
        "rows is more than s1\n",
        "under autocast bfloat16\n",
        "Numbers: 1, 2.5\n",
    ):
        assert words in shown


def test_inspect_as_json(recorded: Path) -> None:
    described = json.loads(done("inspect", recorded, "--json").stdout)
    manifest = json.loads(taken_apart(recorded)[MANIFEST])
    assert described["entries"]["backward"]["kind"] == "replay"
    for shown, stored in zip(
        described["entries"]["backward"]["structures"], entry(manifest)["structures"], strict=True
    ):
        assert {k: shown[k] for k in ("fingerprint", "nodes", "operations")} == {
            k: stored[k] for k in ("fingerprint", "nodes", "operations")
        }
        assert shown["seconds_uncompiled"] == stored["seconds"] > 0
        ((v,), (w,)) = shown["variants"], stored["variants"]
        assert v["sizes"] == w["sizes"] and [t["shape"] for t in v["inputs"]] == [t["shape"] for t in w["inputs"]]
        assert [t["stride"] for t in v["inputs"]] == [t["stride"] for t in w["inputs"]]
        assert [s["ops"] for s in v["segments"]] == [s["ops"] for s in w["segments"]]
        assert [s["operands"] for s in v["segments"]] == [s.get("operands", []) for s in w["segments"]]
        assert v["symbols"][0]["read_from"] == "tensor 1 (of PowBackward0, node 2).shape[0]"
        assert v["verdict"]["status"] == "verified" and v["guards"] == v["guards_in_words"] == []


def test_verify_does_not_claim_to_have_run_recorded_passes(recorded: Path, tmp_path: Path) -> None:
    line = "entry 'backward': recorded passes of 2 structures, 2 variants: compared with the recorded numbers when it was built; not run here"
    shown = done("verify", recorded).stdout
    assert "digests match" in shown and line in shown
    assert "numbers were not compared: recorded passes store no example inputs" in shown
    shown = done("verify", recorded, "--no-run").stdout
    assert line in shown and "numbers were not compared: not requested" in shown
    report = json.loads(done("verify", recorded, "--json").stdout)
    assert report["ok"] and report["variants"] == [] and report["not_run"]
    (only,) = report["recorded"]
    assert only == {
        **{"entry": "backward", "structures": 2, "variants": 2, "updates": 0, "clippings": 0, "unproved": 0},
        "compared": "compared with the recorded numbers when it was built",
    }

    def change(manifest: dict[str, Any]) -> None:
        variant(manifest)["verdict"] = {"status": "not run: no such machine"}

    shown = done("verify", edited(recorded, tmp_path / "unproved.pt2", change)).stdout
    assert "when it was built (1 of them never were); not run here" in shown


def test_verify_runs_the_other_entries_of_a_package(tmp_path: Path) -> None:
    path = tmp_path / "both.pt2"
    net = nn.Linear(3, 2)
    ab.export_module(net, (torch.randn(4, 3),), path=path)
    with ab.record(path):
        for rows in (2, 3):
            net(torch.ones(rows, 3)).sum().backward()
    shown = done("verify", path).stdout
    assert (
        "tensors match eager's" in shown
        and "entry 'backward': recorded passes of 1 structure, 1 variant: compared" in shown
    )
    assert "numbers were not compared" not in shown


def test_verify_of_passes_for_another_torch(recorded: Path, tmp_path: Path) -> None:
    path = edited(recorded, tmp_path / "other.pt2", lambda m: m.update(torch="1.13.0"))
    result = called("verify", path)
    assert result.exit_code == 3 and "built with torch 1.13.0" in result.stderr
    assert called("verify", path, "--no-run").exit_code == 0


@pytest.mark.parametrize(
    "change", [lambda v: v["inputs"].pop(), lambda v: v["sizes"].pop(), lambda v: v.update(scalars=[1.5])]
)
def test_a_variant_of_another_number_of_operands_serves_no_pass(recorded: Path, tmp_path: Path, change: Change) -> None:
    path = edited(recorded, tmp_path / "edited.pt2", lambda m: change(variant(m, 1)))
    with ab.replay(path) as replaying:
        actual = Plain().hooked(5)
    torch.testing.assert_close(actual, Plain().hooked(5), rtol=0, atol=0)
    (reason,) = replaying.report.misses
    assert reason.startswith("the pass has another number of tensors or sizes than the recorded one; ")


@pytest.mark.parametrize("hook", ["of the node", "of the leaf"])
def test_a_gradient_that_is_not_the_leafs_alone_is_not_handed_to_it(tmp_path: Path, hook: str) -> None:
    path = tmp_path / "kept.pt2"
    kept: list[Any] = []

    def passes(rows: int) -> Tensor | None:
        leaf = torch.zeros(rows, requires_grad=True)
        product = leaf * torch.linspace(0, 1, rows)
        assert product.grad_fn is not None
        if hook == "of the leaf":
            leaf.register_hook(lambda grad: kept.append(grad * 1) or kept[-1])
        else:
            product.grad_fn.next_functions[0][0].register_hook(lambda _, grads: kept.append(grads[0]))
        product.sum().backward()
        return leaf.grad

    with ab.record(path) as recording:
        for rows in (3, 4):
            passes(rows)
    assert not recording.skipped

    with ab.replay(path, strict=True):
        grad = passes(5)
    assert grad is not None and torch.equal(grad, kept[-1]) and grad.data_ptr() != kept[-1].data_ptr()
