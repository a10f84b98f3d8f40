"""Packages of recorded passes: what the command line says of them, and what is refused of a manifest that was tampered with, before native
code runs."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import Result
from torch import Tensor, nn

import aot_backward as ab
from aot_backward_runtime.errors import PackageError
from aot_backward_runtime.package.archive import open_package

from ..commands.test_cli import called
from ..support.exports import shared
from ..support.packages import MANIFEST, Raw, put_together, taken_apart, write_raw

Change = Callable[[dict[str, Any]], object]


class Halve(torch.autograd.Function):
    """Its backward leaves a trace in Python, so no graph may hold it."""

    calls = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        Halve.calls += 1
        return grad * 0.5


class Plain:
    """A net, and its backward without and with Python code in it."""

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
    """Structure 0 is :meth:`Plain.plain`, structure 1 :meth:`Plain.hooked`. Do not write to it."""

    def make(path: Path) -> None:
        program = Plain()
        with ab.record(path) as recording:
            for rows in (4, 7, 12):
                program.plain(rows)
                program.hooked(rows)
        assert not recording.skipped

    return shared("recorded-plain-and-hooked", make)


def edited(package: Path, path: Path, change: Change, text: tuple[str, str] | None = None) -> Path:
    """A copy with another manifest; ``text``: replaced in it afterwards."""
    members = taken_apart(package)
    manifest = json.loads(members[MANIFEST])
    change(manifest)
    put_together(path, {**members, MANIFEST: json.dumps(manifest).encode()})
    if text is not None:
        members = taken_apart(path)
        assert members[MANIFEST].count(text[0].encode()) == 1
        members[MANIFEST] = members[MANIFEST].replace(text[0].encode(), text[1].encode())
        write_raw(path, [Raw(name, data) for name, data in members.items()])
    return path


def entry(manifest: dict[str, Any]) -> dict[str, Any]:
    return manifest["entries"]["backward"]  # type: ignore[no-any-return]


def variant(manifest: dict[str, Any], structure: int = 0) -> dict[str, Any]:
    return entry(manifest)["structures"][structure]["variants"][0]  # type: ignore[no-any-return]


def segments(manifest: dict[str, Any], structure: int = 0) -> list[dict[str, Any]]:
    return variant(manifest, structure)["segments"]  # type: ignore[no-any-return]


def graph(manifest: dict[str, Any], structure: int = 0) -> dict[str, Any]:
    """The structure's last compiled graph."""
    return [s for s in segments(manifest, structure) if s.get("library")][-1]


def called_out(manifest: dict[str, Any]) -> list[dict[str, Any]]:
    """The steps of structure 1 that call Python: the custom function, then the hook."""
    return [s for s in segments(manifest, 1) if not s.get("library") and not s.get("operands")]


def done(*arguments: object) -> Result:
    result = called(*arguments)
    assert result.exit_code == 0 and result.stderr == "", result.output
    return result


def test_inspect_in_words(recorded: Path) -> None:
    shown = done("inspect", recorded).stdout
    plain, hooked = (s.fingerprint[:12] for s in open_package(recorded).manifest.entries["backward"].structures)
    for words in (
        "entry 'backward': replay, backward passes of 2 structures",
        f"  structure {plain}: 12 nodes, 19 operations, ",
        " µs uncompiled",
        "    GraphRoot, MeanBackward0, PowBackward0, AddmmBackward0 x2, TBackward0 x2, AccumulateGrad x4, TanhBackward0\n",
        "    variant 0: 10 tensors, ",
        "      tensor 1 (of PowBackward0, node 2).shape[0] = s0: from 2\n",
        f"      runs pass.{plain}.0.0 (15 operations), then 4 gradients handed to the leaves\n",
        "      compared with the recorded numbers: verified, worst %v",
        "s0=4; s0=7\n",
        f"  structure {hooked}: ",
        "HalveBackward",
        "operations), then 1 operation as recorded (hooks, custom functions, leaves), then pass.",
    ):
        assert words in shown


def test_inspect_says_what_limits_a_variant(recorded: Path, tmp_path: Path) -> None:
    def change(manifest: dict[str, Any]) -> None:
        v = variant(manifest)
        v["symbols"] = [
            {**v["symbols"][0], "label": "rows", "maximum": 64, "scale": 2, "offset": 1},
            *({"name": f"s{i}", "label": f"s{i}", "input": -1, "dim": i, "minimum": 0, "maximum": None} for i in range(1, 11)),
        ]
        v["guards"] = ["s10 % 8 == 0", "s0 > s1"]
        v["ambient"] = {"autocast": "bfloat16"}
        v["scalars"] = [1, 2.5]

    shown = done("inspect", edited(recorded, tmp_path / "limits.pt2", change)).stdout
    for words in (
        "sizes, 2 scalars\n",
        "tensor 1 (of PowBackward0, node 2).shape[0] = 2 * s0 + 1 (rows): from 2 to 64\n",
        "size 10 of the pass = s10: from 0\n",
        "only where size 10 of the pass % 8 == 0\n",  # and not "size 1 of the pass0"
        "only where rows > size 1 of the pass\n",
        "under autocast bfloat16\n",
    ):
        assert words in shown


def test_inspect_as_json(recorded: Path) -> None:
    described = json.loads(done("inspect", recorded, "--json").stdout)
    manifest = json.loads(taken_apart(recorded)[MANIFEST])
    assert described["entries"]["backward"]["kind"] == "replay"
    for shown, stored in zip(described["entries"]["backward"]["structures"], entry(manifest)["structures"], strict=True):
        assert {k: shown[k] for k in ("fingerprint", "nodes", "operations")} == {k: stored[k] for k in ("fingerprint", "nodes", "operations")}
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
    assert "digests are right" in shown and line in shown
    assert "numbers were not compared: recorded passes store no example inputs" in shown
    shown = done("verify", recorded, "--no-run").stdout
    assert line in shown and "numbers were not compared: not asked for" in shown
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
    assert "tensors as eager's" in shown and "entry 'backward': recorded passes of 1 structure, 1 variant: compared" in shown
    assert "numbers were not compared" not in shown


def test_verify_of_passes_for_another_torch(recorded: Path, tmp_path: Path) -> None:
    path = edited(recorded, tmp_path / "other.pt2", lambda m: m.update(torch="1.13.0"))
    result = called("verify", path)
    assert result.exit_code == 3 and "built with torch 1.13.0" in result.stderr
    assert called("verify", path, "--no-run").exit_code == 0


def set_(value: Any, *path: str | int) -> Change:
    """Sets one field of structure 0's variant."""

    def change(manifest: dict[str, Any]) -> None:
        node: Any = variant(manifest)
        for step in path[:-1]:
            node = node[step]
        node[path[-1]] = value

    return change


def of_graph(field: str, edit: Callable[[list[Any]], Sequence[Any]]) -> Change:
    return lambda manifest: graph(manifest).update({field: list(edit(graph(manifest)[field]))})


def of_structure(**fields: Any) -> Change:
    return lambda manifest: entry(manifest)["structures"][0].update(fields)


def _twice(manifest: dict[str, Any]) -> None:
    first, second = entry(manifest)["structures"]
    second["fingerprint"] = first["fingerprint"]


def _two_at_once(manifest: dict[str, Any]) -> None:
    steps = segments(manifest)
    steps.append({"ops": steps.pop()["ops"] + steps.pop()["ops"]})


def _state(manifest: dict[str, Any]) -> None:
    entry(manifest)["state"] = [{"name": "w", "weight": "w", "parameter": True, "requires_grad": True}]
    manifest["weights"]["w"] = {"dtype": "float32", "shape": [1], "stride": [1], "sha256": ""}


def _from_nowhere(manifest: dict[str, Any]) -> None:
    step = graph(manifest, 1)
    step["operands"] = ["value:99" if o.startswith("value:") else o for o in step["operands"]]


AT_LOAD: dict[str, tuple[Change, str]] = {
    "unknown library": (lambda m: graph(m).update(library="nonsuch"), "refers to 'nonsuch', which the manifest does not have"),
    "input 99": (of_graph("operands", lambda o: ["input:99", *o[1:]]), "the operand input:99 does not exist: the pass has 10 tensors"),
    "negative input": (of_graph("operands", lambda o: ["input:-1", *o[1:]]), "'input:-1' is no operand"),
    "another kind of operand": (of_graph("operands", lambda o: ["result:0", *o[1:]]), "'result:0' is no operand"),
    "no number": (of_graph("operands", lambda o: ["value:one", *o[1:]]), "'value:one' is no operand"),
    "operands exchanged": (of_graph("operands", lambda o: [*o[:3], o[4], o[3], *o[5:]]), "input:5 is passed where pass.* takes tensor 3"),
    "size for a tensor": (of_graph("operands", lambda o: [*o[:5], "size:s0"]), "size:s0 is passed where .* takes a tensor of shape"),
    "size of no symbol": (of_graph("operands", lambda o: [*o[:5], "size:s7"]), "needs the unknown symbol 's7'"),
    "operand missing": (of_graph("operands", lambda o: o[:-1]), "takes 6 tensors and gives 4; listed are 5 operands and 4 results"),
    "result missing": (of_graph("results", lambda r: r[:-1]), "listed are 6 operands and 3 results"),
    "result twice": (of_graph("results", lambda r: [*r[:-1], r[0]]), "gives a value twice"),
    "negative result": (of_graph("results", lambda r: [*r[:-1], -1]), "one of a negative number"),
    "result also undefined": (lambda m: graph(m).update(undefined=graph(m)["results"][:1]), "gives a value twice"),
    "operation out of range": (of_graph("ops", lambda o: [*o[:-1], 99]), "do not run each of the operations 0 to 18 once"),
    "negative operation": (of_graph("ops", lambda o: [-1, *o[1:]]), "do not run each of the operations 0 to 18 once"),
    "operation twice": (of_graph("ops", lambda o: [o[1], *o[1:]]), "do not run each of the operations 0 to 18 once"),
    "operation missing": (of_graph("ops", lambda o: o[1:]), "run 18 operations; the structure has 19"),
    "endless operations": (of_structure(operations=1 << 62), "run 19 operations; the structure has 4611686018427387904"),
    "graph of nothing": (lambda m: segments(m).append({**graph(m), "ops": []}), "stands for no operation"),
    "two operations as they stand": (_two_at_once, "runs one operation"),
    "results without a graph": (lambda m: segments(m)[-1].update(results=[3]), "lists neither results nor operands"),
    "stale": (lambda m: segments(m)[-1].update(operands=["stale"]), "lists neither results nor operands"),
    "symbol of input 99": (set_(99, "symbols", 0, "input"), "symbol s0 is read from input 99; there are 10"),
    "symbol of input -2": (set_(-2, "symbols", 0, "input"), "symbol s0 is read from input -2"),
    "symbol of dimension 9": (set_(9, "symbols", 0, "dim"), "number 9 of the dimensions of input 1; there are 2"),
    "symbol of a size": (lambda m: variant(m)["symbols"][0].update(input=-1, dim=999), "number 999 of the sizes; there are "),
    "symbol of scale 0": (set_(0, "symbols", 0, "scale"), "symbol s0 has scale 0"),
    "symbol called max": (set_("max", "symbols", 0, "name"), "'max' is not a name for a symbol"),
    "symbol twice": (lambda m: variant(m)["symbols"].append(variant(m)["symbols"][0]), "'s0' is not a name for a symbol, or occurs twice"),
    "size of an unknown symbol": (set_("s9", "sizes", 0), "size 0: the expression 's9' needs the unknown symbol 's9'"),
    "size that does not parse": (set_("s0 +", "sizes", 0), "'s0 .' does not parse"),
    "guard of an unknown symbol": (set_(["s9 > 2"], "guards"), "a guard: the expression 's9 > 2' needs the unknown symbol 's9'"),
    "guard that names a function": (set_(["max"], "guards"), "names max or min without calling it"),
    "guard too deep": (set_(["not " * 2400 + "1"], "guards"), "nested too deep"),
    "strides missing": (set_([1], "inputs", 1, "stride"), "has 2 sizes and 1 strides"),
    "negative stride": (set_([-2, 1], "inputs", 1, "stride"), "has the size or stride -2"),
    "fingerprint twice": (_twice, "the fingerprint [0-9a-f]{64} occurs twice"),
    "fingerprint not hexadecimal": (of_structure(fingerprint="g" * 64), "'g{64}' is no fingerprint"),
    "fingerprint too short": (of_structure(fingerprint="0" * 63), "'0{63}' is no fingerprint"),
    "negative time": (of_structure(seconds=-1.0), "it takes -1.0 seconds"),
    "unknown verdict": (set_({"status": "splendid"}, "verdict"), "the verdict 'splendid' is neither 'verified' nor 'not run: reason'"),
    "structures of a module": (lambda m: entry(m).update(kind="module"), "it has no variants"),
    "value 99": (_from_nowhere, "step [0-9]+: value:99 is passed where pass.* takes the gradient %v[0-9]+"),
    "result of another operation": (
        lambda m: graph(m, 1).update(results=[77, *graph(m, 1)["results"][1:]]), "step [0-9]+: pass.* gives %v[0-9]+ as %v77",
    ),
    "state": (_state, "has structures, and neither variants nor state of its own"),
}  # fmt: skip


@pytest.mark.parametrize("case", AT_LOAD)
def test_what_the_manifest_alone_shows_is_refused_when_it_is_read(recorded: Path, tmp_path: Path, case: str) -> None:
    change, message = AT_LOAD[case]
    path = edited(recorded, tmp_path / "edited.pt2", change)
    with pytest.raises(PackageError, match=message) as caught:
        open_package(path)
    assert str(caught.value).startswith(f"corrupt package {path}: entry backward")


@pytest.mark.parametrize(("number", "message"), [("1e999", r"variants\[0\].scalars\[0\]: expected float, got 'inf'"), ("NaN", "NaN is not JSON")])
def test_numbers_that_are_none(recorded: Path, tmp_path: Path, number: str, message: str) -> None:
    path = edited(recorded, tmp_path / "edited.pt2", set_([123456.5], "scalars"), ("123456.5", number))
    with pytest.raises(PackageError, match=message):
        open_package(path)


def _cut_short(manifest: dict[str, Any]) -> None:
    """Without its last operation, and the structure says so too."""
    segments(manifest, 1).pop()
    entry(manifest)["structures"][1]["operations"] -= 1


def _swallow(step: int) -> Change:
    """A step that calls Python becomes part of the graph before it."""

    def change(manifest: dict[str, Any]) -> None:
        all_steps, gone = segments(manifest, 1), called_out(manifest)[step]
        place = all_steps.index(gone)
        before = next(s for s in reversed(all_steps[:place]) if s.get("library"))
        before["ops"] += gone["ops"]
        all_steps.remove(gone)

    return change


def _graph_last(manifest: dict[str, Any]) -> None:
    segments(manifest, 1).append(segments(manifest, 1).pop(0))


AT_BINDING: dict[str, tuple[Change, str]] = {
    "undefined result of another operation": (lambda m: graph(m, 1).update(undefined=[78]), "gives %v78, which is no result of its operations"),
    "an operation less": (_cut_short, "does not run each operation of its tape once"),
    "another order": (_graph_last, "step 0: %v0 is read, and no earlier step gives it|step 0: %v[0-9]+ is read"),
    "a custom function in a graph": (_swallow(0), r"stands for operation .*Halve.*, which no graph can hold"),
    "a hook in a graph": (_swallow(1), r"stands for operation .*tensor_pre_hook.*, which no graph can hold"),
    "a hook as a leaf": (lambda m: called_out(m)[1].update(operands=["fresh"]), "cannot hand over its gradient: no compiled graph made it"),
}  # fmt: skip


@pytest.mark.parametrize("case", AT_BINDING)
def test_steps_that_are_not_the_tapes_are_refused_when_they_are_bound(recorded: Path, tmp_path: Path, case: str) -> None:
    change, message = AT_BINDING[case]
    path = edited(recorded, tmp_path / "edited.pt2", change)
    program = Plain()
    with ab.replay(path) as replaying:
        program.plain(5)
        program.net.zero_grad()
        with pytest.raises(PackageError, match=message):
            program.hooked(5)
        assert all(p.grad is None for p in program.net.parameters())
        program.plain(6)
    assert (replaying.report.bindings, replaying.report.hits) == (2, 1)
    with ab.replay(recorded, strict=True):
        torch.testing.assert_close(program.hooked(5), Plain().hooked(5))


@pytest.mark.parametrize("change", [lambda v: v["inputs"].pop(), lambda v: v["sizes"].pop(), lambda v: v.update(scalars=[1.5])])
def test_a_variant_of_another_number_of_operands_serves_no_pass(recorded: Path, tmp_path: Path, change: Change) -> None:
    path = edited(recorded, tmp_path / "edited.pt2", lambda m: change(variant(m, 1)))
    with ab.replay(path) as replaying:
        actual = Plain().hooked(5)
    torch.testing.assert_close(actual, Plain().hooked(5), rtol=0, atol=0)
    (reason,) = replaying.report.misses
    assert reason.startswith("the pass has another number of tensors or sizes than the recorded one; ")


@pytest.mark.parametrize(("hook", "place", "message"), [("of the node", -2, "1 others read it"), ("of the leaf", -1, "no compiled graph made it")])
def test_a_gradient_that_is_not_the_leafs_alone_is_not_handed_to_it(tmp_path: Path, hook: str, place: int, message: str) -> None:
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

    def change(manifest: dict[str, Any]) -> None:
        assert not any(s.get("operands") == ["fresh"] for s in segments(manifest))
        segments(manifest)[place]["operands"] = ["fresh"]

    tampered = edited(path, tmp_path / "edited.pt2", change)
    with ab.replay(tampered), pytest.raises(PackageError, match=rf"accumulate.* cannot hand over its gradient: {message}"):
        passes(5)
    with ab.replay(path, strict=True):
        grad = passes(5)
    assert grad is not None and torch.equal(grad, kept[-1]) and grad.data_ptr() != kept[-1].data_ptr()
