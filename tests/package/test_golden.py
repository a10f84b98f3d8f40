"""Packages of every format version so far keep their meaning. Native code that cannot run here is refused by name."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from aot_backward.checks.stored_results import sketch
from aot_backward.checks.verify import verify_package
from aot_backward_runtime import IncompatibleError, InputError, load, replay
from aot_backward_runtime.format.manifest import FORMAT_VERSION, OperatorSpec
from aot_backward_runtime.native.weights import filled, load_examples, load_weights
from aot_backward_runtime.package.archive import open_package
from aot_backward_runtime.package.targets import targets_of

from .. import golden_operators
from ..support.golden_packages import (
    Curved,
    Gated,
    Pair,
    arguments,
    backward_passes,
    bend,
    bent,
    clipped,
    cubed,
    gated_gradients,
    grid,
    momentum,
    samples,
    training,
)
from ..support.oracle import assert_same, run

GOLDEN = Path(__file__).parents[1] / "golden"
FILES = sorted(GOLDEN.glob("*.pt2"))
KINDS = "pair passes step orders targets operators sketches speed standalone updates modules clippings layers digest metadata machines"
(
    PAIRS,
    PASSES,
    STEPS,
    ORDERS,
    TARGETS,
    OPERATORS,
    SKETCHES,
    SPEED,
    STANDALONE,
    UPDATES,
    MODULES,
    CLIPPINGS,
    LAYERS,
    DIGEST,
    METADATA,
    MACHINES,
) = ([p for p in FILES if p.stem.endswith(f"-{kind}")] for kind in KINDS.split())


def test_the_present_format_has_a_golden_package() -> None:
    assert [p for p in FILES if p.name.startswith(f"{FORMAT_VERSION[0]}.{FORMAT_VERSION[1]}-")]
    listed = (GOLDEN / "README.md").read_text()
    assert all(f"`{p.name}`" in listed for p in FILES)
    read = {
        *PAIRS,
        *PASSES,
        *STEPS,
        *ORDERS,
        *TARGETS,
        *OPERATORS,
        *SKETCHES,
        *SPEED,
        *STANDALONE,
        *UPDATES,
        *MODULES,
        *CLIPPINGS,
        *LAYERS,
        *DIGEST,
        *METADATA,
        *MACHINES,
    }
    assert read == {*FILES}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.name)
def test_it_is_whole(path: Path) -> None:
    open_package(path).verify_digests()


@pytest.mark.parametrize("path", PAIRS, ids=lambda p: p.name)
def test_a_pair_is_read(path: Path) -> None:
    archive = open_package(path)
    weights = load_weights(archive)
    expected = Pair()
    torch.testing.assert_close(weights["first.weight"], expected.first.weight.detach())
    entry = archive.manifest.entries["pair"]
    assert [s.name for s in entry.state if s.weight == "first.weight"] == ["first.weight", "second.weight"]
    assert [(s.label, s.minimum, s.maximum) for s in entry.variants[0].symbols] == [("rows", 2, 64)]
    assert entry.variants[0].verdict.status == "verified"


@pytest.mark.parametrize("path", PASSES, ids=lambda p: p.name)
def test_recorded_passes_are_read(path: Path) -> None:
    entry = open_package(path).manifest.entries["backward"]
    assert entry.kind == "replay"
    (structure,) = entry.structures
    (variant,) = structure.variants
    assert [n.rpartition("::")[2] for n in structure.nodes].count("AddmmBackward0") == 2
    assert variant.verdict.status == "verified" and [(s.minimum, s.maximum) for s in variant.symbols] == [(2, None)]
    sizes = variant.speed.sizes if variant.speed is not None else ()
    assert sizes == {"1.1": (), "1.8": ("s0=6",)}.get(path.name[:3], ("s0=6", "s0=9"))


@pytest.mark.parametrize("path", STEPS, ids=lambda p: p.name)
def test_a_step_is_read(path: Path) -> None:
    archive = open_package(path)
    assert archive.manifest.required_features == ("fill",)
    entry = archive.manifest.entries["fit"]
    step = entry.step
    assert (
        entry.kind == "step"
        and step is not None
        and step.fresh
        and step.norm
        and step.finite
        and step.update is not None
    )
    assert [g.parameters for g in step.groups] == [("0.weight", "1.weight", "1.bias"), ("3.weight", "3.bias")]
    assert [(n.group, n.value) for n in step.numbers if n.key == "lr"] == [(0, 1e-3), (1, 1e-2)]
    assert [n.value for n in step.numbers if n.key == "clip_norm"] == [0.5]
    assert {s.key for s in step.state} == {"step", "exp_avg", "exp_avg_sq"} and len(step.gradients) == 5
    (variant,) = entry.variants
    assert variant.step is not None and variant.accumulate is not None and variant.verdict.status == "verified"
    assert [(s.label, s.minimum, s.maximum) for s in variant.symbols] == [("rows", 4, 64)]
    keys = {s.name: s.weight for s in entry.state}
    zeros = filled(archive)
    assert {keys[s.state] for s in (*step.state, *step.gradients)} <= zeros.keys()
    assert torch.equal(zeros[keys["optimizer.exp_avg.0.weight"]], torch.zeros(8, 4))
    torch.testing.assert_close(
        load_weights(archive)[keys["module.0.weight"]], next(training().module.parameters()).detach()
    )


@pytest.mark.parametrize("path", ORDERS, ids=lambda p: p.name)
def test_orders_are_read(path: Path) -> None:
    archive = open_package(path)
    assert archive.manifest.required_features == ("consumes",)
    whole, head = archive.manifest.entries["curved"].variants
    for variant, targets in ((whole, 7), (head, 2)):
        assert variant.backward is not None and len(variant.backward.gradients) == targets
        (double,) = variant.orders[1:]
        assert double.random and len(double.gives) == targets and len(double.inputs) == 2
        assert double.forward is not None and double.backward is not None
    assert whole.backward is not None and whole.backward.consumes


@pytest.mark.parametrize("path", ORDERS, ids=lambda p: p.name)
def test_orders_run_on_the_torch_that_they_were_built_for(path: Path) -> None:
    """Compare a gradient penalty with eager, then the head alone."""
    if not runs_here(path):
        return
    results = []
    for module in (load(path).module(), Curved()):
        torch.manual_seed(12)
        x = torch.randn(9, 3, requires_grad=True)
        (gradient,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
        gradient.pow(2).sum().backward()
        found = [gradient.detach(), x.grad, *(p.grad for p in module.parameters())]
        module.body.requires_grad_(False)
        module.zero_grad()
        module(torch.ones(3, 3)).sum().backward()
        results.append([*found, *(p.grad for p in module.head.parameters())])
    for a, b in zip(*results, strict=True):
        assert (a is None) == (b is None)
        if b is not None:
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


def runs_here(path: Path) -> bool:
    """Return whether ``path`` was built for this torch. If not, check that it is refused by name."""
    built = open_package(path).manifest.torch.split(".")[:2]
    if built == torch.__version__.split(".")[:2]:
        return True
    with pytest.raises(IncompatibleError, match=rf"torch {'.'.join(built)}"):
        load(path)
    return False


@pytest.mark.parametrize("path", TARGETS, ids=lambda p: p.name)
def test_targets_run_on_the_torch_that_they_were_built_for(path: Path) -> None:
    manifest = open_package(path).manifest
    assert [t.label for t in targets_of(manifest)] == ["cpu:avx2", "cpu:sse4"]
    assert all(library.graph and library.graph in manifest.members for library in manifest.libraries.values())
    if not runs_here(path):
        return
    x = torch.randn(7, 3, generator=torch.Generator().manual_seed(5), requires_grad=True)
    expected = torch.autograd.grad(bend(x), x)[0]
    for target in ("cpu:avx2", "cpu:sse4"):
        _, gradients = load(path, target=target).grad()(x)
        torch.testing.assert_close(gradients["x"], expected)


@pytest.mark.parametrize("path", OPERATORS, ids=lambda p: p.name)
def test_operators_that_others_register_run_on_the_torch_that_they_were_built_for(path: Path) -> None:
    (spec,) = open_package(path).manifest.operators.items()
    assert spec == ("golden::cube", OperatorSpec("tests.golden_operators", "golden_operators.py"))
    if not runs_here(path):
        return
    x = torch.linspace(-1, 2, 4, requires_grad=True)
    expected = torch.autograd.grad(cubed(x), x)[0]
    _, gradients = load(path, imports=[golden_operators.__name__]).grad()(x.detach())
    torch.testing.assert_close(gradients["x"], expected)


@pytest.mark.parametrize("path", SKETCHES, ids=lambda p: p.name)
def test_a_sketch_is_of_the_same_numbers_on_every_torch(path: Path) -> None:
    stored, x = load_examples(open_package(path)), grid().requires_grad_()
    gradient = torch.autograd.grad(bend(x), x)[0]
    assert "bend/0/expected/gradient of x" not in stored
    difference = (sketch(gradient) - stored["bend/0/sketch/gradient of x"]).norm()
    assert difference <= stored["bend/0/allowed/gradient of x"] < 1e-4 * gradient.norm()
    if runs_here(path):
        (report,) = verify_package(path).variants
        assert not report.wrong and (report.tensors, report.sketched) == (2, 1)


@pytest.mark.parametrize("path", SPEED, ids=lambda p: p.name)
def test_what_was_measured_at_export_is_read(path: Path) -> None:
    speed = open_package(path).manifest.entries["bend"].variants[0].speed
    assert (
        speed is not None
        and speed.chosen == "whole"
        and speed.sizes == ("rows=4", "rows=16")
        and speed.target == "cpu:avx2"
    )
    assert [t.name for t in speed.timings] == ["eager", "whole"] and 0 < max(speed.ratios) < 1


@pytest.mark.parametrize("path", PASSES, ids=lambda p: p.name)
def test_recorded_passes_run_on_the_torch_that_they_were_built_for(path: Path) -> None:
    if not runs_here(path):
        return
    batches = (3, 17, 5, 2)
    expected = backward_passes(batches)
    with replay(path, strict=True) as replaying:
        actual = backward_passes(batches)
    torch.testing.assert_close(actual, expected)
    assert (replaying.report.bindings, replaying.report.hits) == (1, 3)
    assert not replaying.report.misses and not replaying.report.eager


@pytest.mark.parametrize("path", PAIRS, ids=lambda p: p.name)
def test_a_pair_runs_on_the_torch_that_it_was_built_for(path: Path) -> None:
    if not runs_here(path):
        return
    package = load(path)
    assert_same(run(package.module("pair"), arguments(), 2), run(Pair(), arguments(), 2))
    x = arguments()[0]
    value, gradients = package.grad("loss")(x.detach())
    first = Pair().first
    expected = first(x).square().sum()
    expected.backward()
    torch.testing.assert_close(value, expected.detach())
    torch.testing.assert_close(gradients, {"x": x.grad, "net.first.weight": first.weight.grad})


@pytest.mark.parametrize("path", STEPS, ids=lambda p: p.name)
def test_a_step_runs_on_the_torch_that_it_was_built_for(path: Path) -> None:
    """Compare with eager: updates, accumulation, a skipped update, a changing learning rate, and active clipping."""
    if not runs_here(path):
        return
    step, eager = load(path).step(), training()
    module, optimizer = eager.module, eager.optimizer
    for i, rows in enumerate((8, 64, 5, 17)):
        x, y = samples(rows)
        waits = i == 1
        loss = step(x, y, update=not waits)
        expected = nn.functional.cross_entropy(module(x), y)
        expected.backward()
        torch.testing.assert_close(loss, expected.detach())
        if not waits:
            norm = nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            assert step.grad_norm is not None
            torch.testing.assert_close(step.grad_norm, norm)
            optimizer.step()
            optimizer.zero_grad()
        for group, other in zip(step.param_groups, optimizer.param_groups, strict=True):
            group["lr"] = other["lr"] = other["lr"] * 1.5
    assert step.count == 3
    torch.testing.assert_close(
        dict(step.parameters), {n: p.detach() for n, p in module.named_parameters()}, rtol=1e-4, atol=1e-6
    )
    before = {n: p.clone() for n, p in step.parameters.items()}
    step(torch.full((8, 4), torch.inf), samples(8)[1])
    assert (step.count, step.skipped) == (3, 1) and all(torch.equal(p, before[n]) for n, p in step.parameters.items())


@pytest.mark.parametrize("path", [*STANDALONE, *DIGEST], ids=lambda p: p.name)
def test_what_runs_without_pytorch_is_read(path: Path) -> None:
    entries = open_package(path).manifest.entries
    assert {name: entry.standalone for name, entry in entries.items()} == {
        "bend": "verified",
        "swing": "verified" if path in DIGEST else "calls aten._linalg_det, aten.linalg_lu_solve",
    }


@pytest.mark.parametrize("path", METADATA, ids=lambda p: p.name)
def test_functions_and_metadata_are_read(path: Path) -> None:
    manifest = open_package(path).manifest
    entry = manifest.entries["bent"]
    assert (entry.kind, entry.json_metadata, manifest.metadata) == (
        "function",
        {"cutoff": 5.0, "species": ["H", "O"]},
        '{"author": "nobody"}',
    )
    assert [o.name for o in entry.variants[0].outputs] == ["value", "by.x"] and entry.standalone == "verified"
    if runs_here(path):
        x = torch.linspace(-1, 1, 30).reshape(10, 3)
        torch.testing.assert_close(load(path).function()(x), bent(x) | {"value": bent(x)["value"].detach()})


@pytest.mark.parametrize("path", MACHINES, ids=lambda p: p.name)
def test_code_for_two_machines(path: Path) -> None:
    manifest = open_package(path).manifest
    assert [(t.name, t.machine) for t in targets_of(manifest)] == [("cpu:avx2", "x86_64"), ("cpu:neon", "aarch64")]
    assert {name: entry.standalones for name, entry in manifest.entries.items()} == {"bend": ("verified",)}
    if runs_here(path):
        x = torch.linspace(-1, 1, 30).reshape(10, 3).requires_grad_()
        value, gradient = load(path).grad()(x.detach())
        bend(x).backward()
        torch.testing.assert_close((value, gradient["x"]), (bend(x).detach(), x.grad))


@pytest.mark.parametrize("path", UPDATES, ids=lambda p: p.name)
def test_recorded_optimizer_steps_run_on_the_torch_that_they_were_built_for(path: Path) -> None:
    (update,) = open_package(path).manifest.entries["backward"].updates
    assert (update.optimizer, len(update.trained), {s.key for s in update.state}) == (
        "torch.optim.sgd.SGD",
        3,
        {"momentum_buffer"},
    )
    assert update.verdict.status == "verified" and update.speed is not None
    if not runs_here(path):
        return
    with replay(path) as replaying:
        ours, _ = momentum(10)
    torch.testing.assert_close(ours, momentum(10)[0], rtol=1e-5, atol=1e-6)
    assert replaying.report.steps == 9


@pytest.mark.parametrize("path", CLIPPINGS, ids=lambda p: p.name)
def test_recorded_clippings_run_on_the_torch_that_they_were_built_for(path: Path) -> None:
    clippings = open_package(path).manifest.entries["backward"].clippings
    assert [(c.function, c.norm_type) for c in clippings] == [("clip_grad_norm_", "2.0"), ("clip_grad_value_", "")]
    assert all(c.verdict.status == "verified" and c.speed is not None for c in clippings)
    if not runs_here(path):
        return
    with replay(path) as replaying:
        ours = clipped(7)
    torch.testing.assert_close(ours, clipped(7))
    assert replaying.report.clippings == 2


@pytest.mark.parametrize("path", [*MODULES, *LAYERS], ids=lambda p: p.name)
def test_modules_are_attached_on_the_torch_that_they_were_built_for(path: Path) -> None:
    """Packages of format 1.12 were recorded from a script and lack the layers."""
    (name,) = (n for n, e in open_package(path).manifest.entries.items() if e.kind == "module")
    if not runs_here(path):
        return
    net, module = Gated(), load(path).module(name)
    if path in MODULES:
        with pytest.raises(InputError, match="from an older version, and stores no layers"):
            module.attach(net, strict=True)
        with pytest.warns(UserWarning, match="from an older version, and stores no layers"):
            attachment = module.attach(net)
    else:
        attachment = module.attach(net, strict=True)
    torch.testing.assert_close(gated_gradients(net, (4, 7, 6, 9)), gated_gradients(Gated(), (4, 7, 6, 9)))
    assert attachment.calls == 4
