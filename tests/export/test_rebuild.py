"""Packages for several targets, and packages rebuilt for another target without the model's source."""

from __future__ import annotations

import copy
import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim

import aot_backward as ab
from aot_backward_runtime import IncompatibleError, compatibility, load, replay
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.package.targets import targets_of

from ..conftest import aot_backward
from ..support.golden_packages import backward_passes
from ..support.oracle import assert_same, run
from ..support.packages import put_together, taken_apart
from ..support.versions import since

GOLDEN = Path(__file__).parents[1] / "golden"
GRAPHS = "package/extra/aot_backward/graphs"
ROWS = {0: Dim("rows", min=2)}


class Net(nn.Module):
    """A convolution, a mutated buffer, a mask, a tied weight, a branch into two outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.drop = nn.Conv2d(1, 4, 3, bias=False), nn.BatchNorm2d(4), nn.Dropout(0.25)
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor, *, shift: torch.Tensor) -> dict[str, torch.Tensor]:
        h = torch.nn.functional.gelu(self.norm(self.conv(x)))
        h = self.drop(h.mean((2, 3)))
        return {"out": self.second(torch.tanh(self.first(h))) + shift, "rows": h.sum(0)}


def network() -> Net:
    torch.manual_seed(0)
    return Net()


def samples(rows: int) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, 1, 6, 6, generator=generator, requires_grad=True), {
        "shift": torch.randn(4, generator=generator)
    }


def energy(x: torch.Tensor) -> torch.Tensor:
    return (torch.cdist(x, x) + torch.eye(x.shape[0])).log().sum() * x.square().mean()


def training() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
    return net, torch.optim.AdamW(net.parameters(), lr=1e-2)


def batch(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.randn(rows, 4, generator=torch.Generator().manual_seed(rows))
    return x, x[:, :3].argmax(1)


@pytest.fixture(scope="session")
def several(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a package of three kinds of entries for two levels of processors. Do not write to it."""
    path = tmp_path_factory.mktemp("targets") / "several.pt2"
    x, kwargs = samples(5)
    net, optimizer = training()
    ab.export(
        path,
        {
            "net": ab.Module(network(), [ab.Variant((x,), kwargs, dynamic_shapes={"x": ROWS, "shift": None})]),
            "energy": ab.Grad(energy, [ab.Variant((torch.randn(4, 3),))]),
            "fit": ab.Step(
                net, [ab.Variant(batch(6), dynamic_shapes=(ROWS, ROWS))], optimizer, loss_fn=nn.functional.cross_entropy
            ),
        },
        target="cpu:avx2,cpu:sse4",
    )
    return path


@pytest.fixture(scope="session")
def rebuilt(several: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Rebuild it for only the older processors, in a folder and a process without the model."""
    folder = tmp_path_factory.mktemp("rebuilt")
    shutil.copy(several, folder / "in.pt2")
    done = aot_backward("rebuild", "in.pt2", "-o", "out.pt2", "--target", "cpu:sse4", cwd=folder)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("wrote out.pt2 (")
    (folder / "in.pt2").unlink()
    return folder / "out.pt2"


def assert_as_eager(package: Any) -> None:
    """Compare every entry with eager, at sizes that no example had."""
    x, kwargs = samples(9)
    module, expected = package.module("net"), network()
    module.load_state_dict(expected.state_dict())
    assert_same(run(module, (x,), 4, kwargs), run(expected, (x,), 4, kwargs))
    x = torch.randn(4, 3, generator=torch.Generator().manual_seed(8), requires_grad=True)
    value, gradients = package.grad("energy")(x)
    torch.testing.assert_close(
        (value, gradients["x"]), (energy(x), torch.autograd.grad(energy(x), x)[0]), rtol=1e-4, atol=1e-5
    )
    net, optimizer = training()
    step = package.step("fit")
    for rows in (6, 11, 3):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(batch(rows)[0]), batch(rows)[1])
        loss.backward()
        optimizer.step()
        torch.testing.assert_close(step(*batch(rows)), loss.detach())
    for name, parameter in net.named_parameters():
        torch.testing.assert_close(step.parameters[name].detach(), parameter.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("target", ["cpu:avx2", "cpu:sse4"])
def test_each_target_equals_eager(several: Path, target: str) -> None:
    package = load(several, target=target)
    assert package.manifest.target.name == target
    assert_as_eager(package)


def test_the_package_says_what_each_target_needs_and_that_it_was_checked(several: Path) -> None:
    manifest = open_package(several).manifest
    newer, older = targets_of(manifest)
    assert (newer.name, older.name) == ("cpu:avx2", "cpu:sse4")
    assert (
        {"avx2", "fma"} <= set(newer.cpu_flags)
        and "sse4_2" in older.cpu_flags
        and not {"avx", "avx2"} & set(older.cpu_flags)
    )
    for entry in manifest.entries.values():
        for variant in entry.variants:
            assert [v.status for v in (variant.verdict, *variant.verdicts)] == ["verified"] * 2


@pytest.mark.parametrize(("level", "widest"), [("avx2", "ymm"), ("sse4", "xmm")])
def test_no_library_holds_wider_instructions_than_its_target(
    several: Path, tmp_path: Path, level: str, widest: str
) -> None:
    archive = open_package(several)
    archive.choose(["avx2", "sse4"].index(level))
    found = set[str]()
    for name in archive.manifest.libraries:
        listing = subprocess.run(
            ["objdump", "-d", "--no-show-raw-insn", archive.library(name)], capture_output=True, text=True, check=True
        ).stdout
        found |= set(re.findall(r"%([xyz]mm)\d", listing))
        if level == "sse4":  # instructions of AVX and later begin with a v
            assert not re.search(r"^\s+[0-9a-f]+:\s+v[a-z]", listing, re.MULTILINE), name
    assert max(found) == widest


FLAGS = {
    "old": ("cpu:sse4", "avx"),
    "usual": ("cpu:avx2", "avx512f"),
    "new": ("cpu:avx2", "nothing"),
}


@pytest.mark.parametrize("processor", FLAGS)
def test_the_choice_is_by_what_the_processor_reports(
    several: Path, processor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, without = FLAGS[processor]
    flags = frozenset(f for f in compatibility.cpu_flags() if not f.startswith(without))
    monkeypatch.setattr(compatibility, "cpu_flags", lambda: flags)
    assert load(several).manifest.target.name == expected


def test_none_fits(several: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = frozenset(f for f in compatibility.cpu_flags() if not f.startswith(("avx", "sse4")))
    monkeypatch.setattr(compatibility, "cpu_flags", lambda: flags)
    with pytest.raises(IncompatibleError) as caught:
        load(several)
    message = str(caught.value)
    assert (
        "2 targets, and none fits: cpu:avx2: it was built for x86-64-v3 and needs the CPU flags avx avx2, which this processor lacks"
        in message
    )
    assert "cpu:sse4: it was built for x86-64-v2 and needs the CPU flags sse4_1 sse4_2" in message
    assert f"aot-backward rebuild {several} -o OUT.pt2" in message and "\n" not in message


def test_cpu_is_short_for_the_usual_target(several: Path) -> None:
    assert load(several, target="cpu").manifest.target.name == "cpu:avx2"


def test_a_target_that_is_not_there(several: Path) -> None:
    with pytest.raises(IncompatibleError, match="has no target 'cpu:avx512'; it has: cpu:avx2, cpu:sse4"):
        load(several, target="cpu:avx512")


RUN = """
import sys, torch, aot_backward_runtime as rt
package = rt.load(sys.argv[1])
print(torch.backends.cpu.get_cpu_capability(), package.manifest.target.name)
value, gradients = package.grad("energy")(torch.linspace(-1, 1, 12).reshape(4, 3))
print(repr(gradients["x"].double().sum().item()))
"""


def ran(path: Path, **env: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(path)], capture_output=True, text=True, env={**os.environ, **env}, check=True
    )
    return done.stdout.split()


def test_the_choice_keeps_to_what_pytorch_is_kept_to(several: Path, rebuilt: Path) -> None:
    x = torch.linspace(-1, 1, 12).reshape(4, 3).requires_grad_()
    expected = float(torch.autograd.grad(energy(x), x)[0].double().sum())
    for path, capability, target in (
        (several, "default", "cpu:sse4"),
        (several, "avx2", "cpu:avx2"),
        (rebuilt, "default", "cpu:sse4"),
    ):
        found, chosen, total = ran(path, ATEN_CPU_CAPABILITY=capability)
        assert (found, chosen) == (capability.upper(), target)
        assert float(total) == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_a_rebuilt_package_equals_eager(rebuilt: Path, several: Path) -> None:
    old, new = open_package(several).manifest, open_package(rebuilt).manifest
    assert [t.name for t in targets_of(new)] == ["cpu:sse4"] and new.torch == torch.__version__
    assert new.weights == old.weights and new.libraries.keys() == old.libraries.keys()
    for name, entry in new.entries.items():
        for variant, before in zip(entry.variants, old.entries[name].variants, strict=True):
            assert variant.verdict.status == "verified" and not variant.verdicts
            assert (variant.symbols, variant.guards, variant.inputs) == (before.symbols, before.guards, before.inputs)
    assert "built with torch" in new.notes["rebuilt"] and "narrowed by rebuilding" not in new.notes
    assert_as_eager(load(rebuilt))
    done = aot_backward("verify", rebuilt)
    assert done.returncode == 0, done.stderr


def test_a_training_goes_on_in_the_rebuilt_package(several: Path, rebuilt: Path, tmp_path: Path) -> None:
    step = load(several, target="cpu:avx2").step("fit")
    for rows in (6, 11):
        step(*batch(rows))
    step.save(tmp_path / "state")
    other = load(rebuilt).step("fit")
    other.resume(tmp_path / "state")
    torch.testing.assert_close(other(*batch(3)), step(*batch(3)))
    for name, parameter in step.parameters.items():
        torch.testing.assert_close(other.parameters[name], parameter)


def test_a_gradient_that_is_zero_but_for_rounding_is_no_fault_of_a_rebuilt_step(tmp_path: Path) -> None:
    """Adam divides it by its own size."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))
    path = tmp_path / "step.pt2"
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-2)
    ab.export(path, {"fit": ab.Step(net, [ab.Variant(batch(6))], optimizer, loss_fn=nn.functional.cross_entropy)})
    ab.rebuild(path, path)
    assert open_package(path).manifest.entries["fit"].variants[0].verdict.status == "verified"


def test_verify_and_inspect_show_every_target(several: Path) -> None:
    done = aot_backward("verify", several)
    assert done.returncode == 0, done.stderr
    for target in ("cpu:avx2", "cpu:sse4"):
        assert f"entry 'fit' variant 0, {target}: " in done.stdout
    done = aot_backward("inspect", several)
    for label, machine in {"cpu:avx2": "cpu x86_64 x86-64-v3", "cpu:sse4": "cpu x86_64 x86-64-v2"}.items():
        assert f"\n  {label}  {machine}  " in done.stdout and done.stdout.count(f" {label}: verified") == 3


def test_second_derivatives_for_several_targets(tmp_path: Path) -> None:
    net, x = nn.Sequential(nn.Linear(3, 6), nn.Tanh(), nn.Linear(6, 1)), torch.randn(4, 3, requires_grad=True)
    path = tmp_path / "net.pt2"
    ab.export(path, {"net": ab.Module(net, [ab.Variant((x,))], order=2)}, target="cpu:avx2,cpu:sse4", tune="none")
    ab.rebuild(path, path, target="cpu:sse4,cpu:avx2")

    def twice(of: nn.Module) -> torch.Tensor:
        (gradient,) = torch.autograd.grad(of(x).sum(), x, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), x)[0]

    variant = open_package(path).manifest.entries["net"].variants[0]
    assert [v.status for v in (variant.verdict, *variant.verdicts)] == ["verified"] * 2
    for target in ("cpu:avx2", "cpu:sse4"):
        torch.testing.assert_close(twice(load(path, target=target).module()), twice(net))
    aot_backward("inspect", path, "--html", tmp_path / "net.html")
    page = (tmp_path / "net.html").read_text()
    assert "verified" in page and "with eager missing" not in page and ">not run" not in page


def test_recorded_passes_are_rebuilt(tmp_path: Path) -> None:
    path = tmp_path / "passes.pt2"
    with ab.record(path) as recording:
        backward_passes((3, 5, 6))
    assert not recording.skipped
    ab.rebuild(path, path, target="cpu:sse4,cpu:avx2")  # the same file
    manifest = open_package(path).manifest
    assert len(targets_of(manifest)) == 2
    batches = (3, 17, 5)
    expected = backward_passes(batches)
    with replay(path, strict=True) as replaying:
        actual = backward_passes(batches)
    torch.testing.assert_close(actual, expected)
    assert replaying.report.hits == 2
    with (
        pytest.raises(ab.ExportError, match=r"several targets \(cpu:sse4, cpu:avx2\).*record into a new file"),
        ab.record(path),
    ):
        backward_passes((2, 2))


def test_control_flow_with_a_dynamic_size(tmp_path: Path) -> None:
    path = tmp_path / "cond.pt2"

    def bend(x: torch.Tensor) -> torch.Tensor:
        return torch.cond(x.sum() > 0, lambda x: x.sin(), lambda x: x.cos() * 2, (x,)).sum()

    ab.export(path, {"e": ab.Grad(bend, [ab.Variant((torch.randn(4, 3),), dynamic_shapes=(ROWS,))])})
    ab.rebuild(path, path, target="cpu:sse4")
    grad = load(path).grad()
    for x in (torch.ones(7, 3), -torch.ones(2, 3)):
        x.requires_grad_()
        torch.testing.assert_close(grad(x)[1]["x"], torch.autograd.grad(bend(x), x)[0])


def embedded(rows: tuple[int, ...]) -> list[torch.Tensor]:
    """Run backward passes that read indices, and a factor with equal rows."""
    table, out = torch.ones(10, 4, requires_grad=True), []
    for n in rows:
        table.grad = None
        (table[torch.arange(n) % 10] * torch.arange(4.0).expand(n, 4)).square().sum().backward()
        assert table.grad is not None
        out.append(table.grad)
    return out


def test_the_check_of_recorded_passes_sees_code_that_is_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from aot_backward_exporters.inductor import compile

    path = tmp_path / "passes.pt2"
    with ab.record(path):
        embedded((3, 5, 6))
    ab.rebuild(path, path)
    verdict = next(iter(open_package(path).manifest.entries.values())).structures[0].variants[0].verdict
    assert verdict.status == "verified" and len(verdict.sizes) == 2
    compile_graphs = compile.compile_graphs

    def wrong(graphs: Any, **kwargs: Any) -> Any:
        changed = []
        for graph in graphs:
            module = torch.fx.GraphModule(graph.module, copy.deepcopy(graph.module.graph))
            for put in [n for n in module.graph.nodes if "index_put" in str(n.target)]:
                indices = next(a for a in put.args if isinstance(a, (list, tuple)))
                with module.graph.inserting_before(put):
                    zero = module.graph.call_function(torch.ops.aten.mul.Scalar, (indices[0], 0))
                zero.meta = dict(indices[0].meta)
                put.args = tuple([zero] if a is indices else a for a in put.args)
            changed.append(dataclasses.replace(graph, module=module))
        return compile_graphs(changed, **kwargs)

    monkeypatch.setattr(compile, "compile_graphs", wrong)
    with pytest.raises(
        ab.ExportError,
        match=r"is wrong: the code compiled from the portable graph .* differs from PyTorch's own operators",
    ):
        ab.rebuild(path, tmp_path / "wrong.pt2")
    assert not (tmp_path / "wrong.pt2").exists()


def test_without_weights(several: Path, tmp_path: Path) -> None:
    """Code needs no weights. The first load reports that it was not compared."""
    path = tmp_path / "bare.pt2"
    x = torch.randn(4, 3)
    net = nn.Linear(3, 3)
    ab.export(path, {"net": ab.Module(net, [ab.Variant((x,))])}, weights=False)
    ab.rebuild(path, path, target="cpu:sse4")
    manifest = open_package(path).manifest
    assert manifest.entries["net"].variants[0].verdict.status == "not run: the package has no weights"
    with pytest.warns(UserWarning, match="was not compared with eager"):
        module = load(path, weights=dict(net.state_dict())).module()
    assert_same(run(module, (x,), 1), run(net, (x,), 1))


@since("2.13", "keeps the line of the model for few nodes of a graph")
def test_lines_of_the_model_are_in_the_graphs_and_no_path_is(several: Path) -> None:
    archive = open_package(several)
    for role in ("forward", "backward"):
        text = archive.read_member(f"extra/aot_backward/graphs/net.0.{role}.json").decode()
        form = json.loads(text)
        lines = {(file, module): source for file, _, _, source, module in form["lines"]}
        assert lines["export/test_rebuild.py", "norm"].startswith("h = torch.nn.functional.gelu(self.norm(")
        placed = [
            p
            for p, node in zip(form["places"], form["nodes"], strict=True)
            if node[0] not in ("placeholder", "weight", "constant", "output")
        ]
        assert sum(p >= 0 for p in placed) > 0.8 * len(placed)
        writes = [p for p, node in zip(form["places"], form["nodes"], strict=True) if node[0] == "aten.copy_.default"]
        # BatchNorm's buffers, at the end of the forward
        assert set(writes) <= {-1} and bool(writes) == (role == "forward")
        assert str(Path(__file__).parents[2]) not in text and str(Path.home()) not in text


def test_a_program_of_no_graph_is_rebuilt(tmp_path: Path) -> None:
    path = tmp_path / "nothing.pt2"
    ab.export_module(nn.Identity(), (torch.randn(3, 4),), dynamic_shapes=(ROWS,), path=path)
    ab.rebuild(path, path)
    x = torch.randn(7, 4)
    assert torch.equal(load(path).module()(x), x)


def gathered(x: torch.Tensor, i: torch.Tensor) -> torch.Tensor:
    return x[i].square().sum()


def test_an_index_out_of_range_at_another_size_is_no_fault(tmp_path: Path) -> None:
    """The check tries sizes that do not fit the program's values, and operators raise errors other than
    RuntimeError."""
    path, targets = tmp_path / "gathered.pt2", ("cpu:sse4", "cpu:avx2")
    two = ({0: Dim("rows", min=2)}, {0: Dim("indices", min=2)})
    variant = ab.Variant((torch.randn(6, 4), torch.arange(5, -1, -1)), dynamic_shapes=two)
    ab.export(path, {"gathered": ab.Grad(gathered, [variant], wrt="x")}, target="cpu:avx2,cpu:sse4")
    ab.rebuild(path, path, target=",".join(targets))
    (variant,) = open_package(path).manifest.entries["gathered"].variants
    assert [v.status for v in (variant.verdict, *variant.verdicts)] == ["verified"] * 2
    x, i = torch.randn(3, 4, requires_grad=True), torch.tensor([2, 0])
    expected = gathered(x, i)
    for target in targets:
        value, gradient = load(path, target=target).grad()(x.detach(), i)
        torch.testing.assert_close((value, gradient), (expected.detach(), torch.autograd.grad(gathered(x, i), x)[0]))


def test_a_mask_that_rounding_decides(tmp_path: Path) -> None:
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0, norm_first=True).bfloat16()
    path = tmp_path / "layer.pt2"
    ab.export_module(layer, (torch.randn(8, 16, 32).bfloat16().requires_grad_(),), path=path)
    ab.rebuild(path, path)


def edited(source: Path, path: Path, name: str, edit: Callable[[dict[str, Any]], Any]) -> Path:
    """Write a package with a changed portable graph and matching digests."""
    members = taken_apart(source)
    form = json.loads(members[f"{GRAPHS}/{name}.json"])
    changed = edit(form)
    members[f"{GRAPHS}/{name}.json"] = changed if isinstance(changed, bytes) else json.dumps(form).encode()
    put_together(path, members)
    return path


def node(form: dict[str, Any], operator: str) -> int:
    return next(n for n, (kind, *_) in enumerate(form["nodes"]) if kind == operator)


def other_operator(form: dict[str, Any]) -> None:
    form["nodes"][node(form, "aten.tanh.default")][0] = "aten.sin.default"


def other_number(form: dict[str, Any]) -> None:
    place = next(
        n for n in form["nodes"] if n[0].startswith("aten.mul") and isinstance(n[1][1], dict) and "float" in n[1][1]
    )
    place[1][1] = {"float": (0.123).hex()}


def other_size(form: dict[str, Any]) -> None:
    form["sizes"] = {"s0": 1}


def unknown_operator(form: dict[str, Any]) -> None:
    form["nodes"][node(form, "aten.tanh.default")][0] = "nonsuch.tanh.default"


def forbidden(form: dict[str, Any]) -> None:
    form["nodes"][node(form, "aten.tanh.default")] = ["aten.from_file.default", ["/etc/passwd", False, 10], {}]


def python(form: dict[str, Any]) -> None:
    form["nodes"][node(form, "aten.tanh.default")] = ["operator:attrgetter", ["__class__"], {}]


def call(form: dict[str, Any], name: str, *args: Any) -> None:
    form["nodes"][node(form, "aten.tanh.default")] = [name, list(args), {"map": {}}]


def named(form: dict[str, Any], name: str) -> None:
    form["names"][node(form, "placeholder")] = name


def later(form: dict[str, Any]) -> None:
    form["nodes"][node(form, "aten.tanh.default")][1] = [{"node": len(form["nodes"]) - 1}]


def missing_weight(form: dict[str, Any]) -> None:
    form["nodes"][node(form, "weight")][1] = "nonsuch"


def fewer_outputs(form: dict[str, Any]) -> None:
    form["nodes"][-1][1] = form["nodes"][-1][1][:-1]


TAMPERED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "other operator": (other_operator, "does not give the results stored|differs from PyTorch's own operators"),
    "other number": (other_number, "does not give the results stored|differs from PyTorch's own operators"),
    "other size": (other_size, "was traced with another value of s0 than"),
    "unknown operator": (
        unknown_operator,
        "calls 'nonsuch.tanh.default', which is not registered in this process; import the library",
    ),
    "reads files": (forbidden, "calls 'aten.from_file.default', which is not allowed"),
    "Python": (python, "calls operator:attrgetter, which is not allowed"),
    "reads files, another overload": (
        lambda form: call(form, "aten.from_file.out", "/etc/passwd", True, 10),
        "from_file.out', which is not",
    ),
    "reads files, no overload": (
        lambda form: call(form, "aten.from_file", "/etc/passwd", True, 10),
        "calls 'aten.from_file', which is not allowed",
    ),
    "writes files": (
        lambda form: call(form, "aten.save.default", [1], "saved"),
        "calls 'aten.save.default', which is not allowed",
    ),
    "imports": (
        lambda form: call(form, "import_module.__call__", "this"),
        "calls 'import_module.__call__', which is not allowed",
    ),
    "opens a library": (
        lambda form: call(form, "load_library.__call__", "x.so"),
        "calls 'load_library.__call__', which is not allowed",
    ),
    "Python's own": (
        lambda form: call(form, "load_library.__globals__.get", "__builtins__"),
        "__globals__.get', which is not allowed",
    ),
    "code in a name": (
        lambda form: named(form, "a=__import__('os').abort()"),
        "abort.* is not a valid name for a node",
    ),
    "later node": (later, "which comes later"),
    "missing weight": (missing_weight, "reads the weight 'nonsuch', which the package does not have"),
    "fewer outputs": (fewer_outputs, "inputs and 1 outputs; its library|outputs; its library"),
    "no output": (
        lambda form: [form[k].pop() for k in ("nodes", "names", "looks", "places")] and None,
        "has no list of outputs",
    ),
    "donated": (lambda form: form.update(donated=[99]), "donates inputs that it does not have"),
    "no JSON": (lambda form: b"{", "the portable graph net.0.forward is not JSON"),
    "no graph": (lambda form: b"[]", "the portable graph net.0.forward is not an object with the lists nodes"),
    "a version to come": (lambda form: form.update(version=99), "expected version 1, got 99"),
    "a type for a list": (lambda form: form.update(nodes={"a": 1}), "is not an object with the lists nodes"),
    "nonsense in a node": (
        lambda form: form["nodes"].__setitem__(3, [1, 2, 3]),
        "the portable graph net.0.forward cannot be read",
    ),
}


def test_operators_that_an_older_version_left_to_kernels(several: Path, tmp_path: Path) -> None:
    name = "energy.0.gradient"

    def leave(form: dict[str, Any]) -> None:
        form["kernels"] = [n for n, node in enumerate(form["nodes"]) if node[0] == "aten.log.default"]

    path = edited(several, tmp_path / "in.pt2", name, leave)
    ab.rebuild(path, tmp_path / "out.pt2", target="cpu:avx2")
    for file, called in ((several, False), (tmp_path / "out.pt2", True)):
        assert ("aten::log" in load(file).manifest.libraries[name].operators) is called


@pytest.mark.parametrize("case", TAMPERED)
def test_a_graph_that_was_tampered_with(case: str, several: Path, tmp_path: Path) -> None:
    edit, message = TAMPERED[case]
    path, out = edited(several, tmp_path / "in.pt2", "net.0.forward", edit), tmp_path / "out.pt2"
    out.write_bytes(several.read_bytes())
    with pytest.raises((ab.PackageError, ab.ExportError), match=message) as caught:
        ab.rebuild(path, out, target="cpu:avx2")
    assert "\n" not in str(caught.value)
    assert out.read_bytes() == several.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in.pt2", "out.pt2"]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("cpu:sve", "unknown target 'cpu:sve'; known: cpu, cpu:sse4, cpu:avx2, cpu:avx512, cpu:neon, cpu:wasm, cuda"),
        ("cpu,cpu:avx2", "target cpu:avx2 is given twice (cpu is cpu:avx2)"),
        ("cpu:avx2,", "unknown target ''; known: "),
        ("cpu,cuda", "targets 'cpu,cuda': expected one device type, got several"),
        (
            "cuda:sm_42",
            "unknown target 'cuda:sm_42'; known: cpu, cpu:sse4, cpu:avx2, cpu:avx512, cpu:neon, cpu:wasm, cuda, cuda:sm_80",
        ),
    ],
)
def test_unknown_targets(several: Path, tmp_path: Path, target: str, message: str) -> None:
    with pytest.raises(ab.ExportError, match=re.escape(message)):
        ab.rebuild(several, tmp_path / "o.pt2", target=target)
    with pytest.raises(ab.ExportError, match=re.escape(message)):
        ab.export(tmp_path / "o.pt2", {"e": ab.Grad(energy, [ab.Variant((torch.randn(4, 3),))])}, target=target)
    assert not list(tmp_path.iterdir())


@pytest.mark.skipif(torch.version.cuda is not None, reason="this torch is a build for CUDA")
def test_a_gpu_needs_a_build_of_torch_for_it(several: Path, tmp_path: Path) -> None:
    install = r"pip install torch==2\.11\.0 triton==3\.6\.0 or pip install torch==2\.15\.0 triton==3\.9\.0, the build for CUDA"
    message = rf"target cuda:sm_\d0 needs a build of torch for CUDA, and this is .*: {install}"
    with pytest.raises(ab.ExportError, match=message):
        ab.rebuild(several, tmp_path / "o.pt2", target="cuda:sm_90")
    with pytest.raises(ab.ExportError, match=message):
        ab.export(
            tmp_path / "o.pt2",
            {"e": ab.Grad(energy, [ab.Variant((torch.randn(4, 3),))])},
            target="cuda:sm_80,cuda:sm_90",
        )


def test_without_portable_graphs(tmp_path: Path) -> None:
    path = tmp_path / "closed.pt2"
    ab.export(path, {"e": ab.Grad(energy, [ab.Variant((torch.randn(4, 3),))])}, portable=False)
    assert not [m for m in open_package(path).members() if "graphs" in m]
    for source in (path, GOLDEN / "1.0-pair.pt2"):
        with pytest.raises(
            ab.ExportError, match=r"has no portable graph of .*; export it again from the model's source"
        ):
            ab.rebuild(source, tmp_path / "o.pt2")


def test_a_tensor_that_the_function_holds_goes_along(tmp_path: Path) -> None:
    path = tmp_path / "table.pt2"
    table = torch.randn(3)

    def looked_up(x: torch.Tensor) -> torch.Tensor:
        return torch.func.grad(lambda v: (v.sin() * table).sum())(x).square().sum()

    ab.export(path, {"e": ab.Grad(looked_up, [ab.Variant((torch.randn(3),))])})
    ab.rebuild(path, path)
    x = torch.randn(3, requires_grad=True)
    torch.testing.assert_close(load(path).grad()(x)[1]["x"], torch.autograd.grad(looked_up(x), x)[0])


def test_killed_or_two_at_once(several: Path, tmp_path: Path) -> None:
    """The target is the old package or the whole new one."""
    out = tmp_path / "out.pt2"
    shutil.copy(several, out)
    argv = [sys.executable, "-m", "aot_backward.cli", "rebuild", str(several), "-o", str(out), "--target", "cpu:sse4"]
    killed = subprocess.Popen(argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    time.sleep(4)
    killed.send_signal(signal.SIGKILL)
    killed.wait()
    open_package(out).verify_digests()
    both = [subprocess.Popen(argv, stdout=subprocess.DEVNULL) for _ in range(2)]
    assert [p.wait(timeout=900) for p in both] == [0, 0]
    open_package(out).verify_digests()
    assert [t.name for t in targets_of(open_package(out).manifest)] == ["cpu:sse4"]
    assert [p.name for p in tmp_path.iterdir()] == ["out.pt2"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        load(out)
