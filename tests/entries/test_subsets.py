"""Variants for subsets of inputs and parameters that require grad compute nothing for the rest. A call uses the
smallest variant that covers its tensors that require grad."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.export import Dim
from torch.multiprocessing.reductions import StorageWeakRef

import aot_backward as ab
from aot_backward_runtime import GradientError, load
from aot_backward_runtime.entries import module_call
from aot_backward_runtime.errors import InputError, WeightsError
from aot_backward_runtime.native.bound_state import BoundState
from aot_backward_runtime.native.library import Library
from aot_backward_runtime.package.archive import open_package

from ..support import exports
from ..support.oracle import assert_same, run


class Net(nn.Module):
    """A body that can be frozen below a head. The head is tied to a second output."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 20), nn.Tanh(), nn.Linear(20, 20), nn.Tanh())
        self.head = nn.Linear(20, 4)
        self.tail = nn.Linear(20, 4, bias=False)
        self.tail.weight = self.head.weight

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.body(x)
        return self.head(h) * y, self.tail(h)


SUBSETS = (None, ("head",), ("x",), ("x", "body.0.bias"), ())
"""The variants' subsets in the order of export. None means the parameters."""


def net() -> Net:
    torch.manual_seed(5)
    return Net()


def exported() -> Path:
    def make(path: Path) -> None:
        x, y = torch.randn(3, 6), torch.randn(3, 4)
        rows = {0: Dim("rows", min=2, max=1000)}
        ab.export(
            path,
            {
                "net": ab.Module(
                    net(), [ab.Variant((x, y), dynamic_shapes=(rows, rows), requires_grad=s) for s in SUBSETS]
                )
            },
        )

    return exports.shared("subsets", make)


@pytest.fixture(scope="module")
def package() -> Path:
    return exported()


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Return a list that collects the libraries that ran, such as "0.forward"."""
    seen: list[str] = []
    original = Library.run

    def noted(self: Library, inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        seen.append(Path(self.spec.member).stem.partition(".")[2])
        return original(self, inputs)

    monkeypatch.setattr(Library, "run", noted)
    return seen


@pytest.mark.parametrize(
    ("needing", "variant"),
    [
        (("parameters",), 0),
        (("head.weight", "head.bias"), 1),
        (("head.bias",), 1),
        (("x",), 2),
        (("x", "body.0.bias"), 3),
        (("body.0.bias",), 3),
        (("body.0.weight", "head.bias"), 0),
        ((), 4),
    ],
)
def test_the_smallest_variant_that_covers_serves(
    package: Path, served: list[str], needing: tuple[str, ...], variant: int
) -> None:
    model, eager = load(package).module(), net()
    for each in (model, eager):
        for name, parameter in each.named_parameters():
            parameter.requires_grad_("parameters" in needing or name in needing)
    for rows in (7, 7, 2, 7):
        args = (torch.randn(rows, 6, requires_grad="x" in needing), torch.randn(rows, 4))
        assert_same(run(model, args, 11), run(eager, args, 11))
    expected = ["forward", "backward"] if needing else ["inference"]
    assert served == [f"{variant}.{what}" for what in expected] * 4


def test_parameters_that_take_turns_in_requiring_gradients(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator's step freezes the discriminator, and the discriminator's step thaws it, once a batch. The full check
    runs only once for each."""
    looked, check = list[str](), BoundState.check
    monkeypatch.setattr(BoundState, "check", lambda *given: looked.append("") or check(*given))
    loaded, eager = load(package).module("net"), net()
    loaded.load_state_dict(eager.state_dict())
    for number in range(24):
        if number == 12:
            looked.clear()
        x, y = torch.randn(3, 6, requires_grad=number % 3 == 0), torch.randn(3, 4)
        for module in (loaded, eager):
            module.requires_grad_(number % 3 != 0)
            module.body.requires_grad_(number % 3 == 1)
        assert_same(run(loaded, (x, y), 1), run(eager, (x, y), 1))
        with torch.no_grad():
            for ours, its in zip(loaded.parameters(), eager.parameters(), strict=True):
                ours.mul_(1.01)
                its.mul_(1.01)
    assert not looked
    loaded.head.weight.data = loaded.head.weight.data.clone()
    eager.requires_grad_(True)
    loaded.requires_grad_(True)
    assert_same(run(loaded, (x, y), 1), run(eager, (x, y), 1))
    assert len(looked) == 1


def test_memory_that_parameters_had_is_freed(package: Path) -> None:
    """It is freed when the code that read it runs again, even if different parameters require grad in each step."""
    loaded, freed = load(package).module("net"), list[StorageWeakRef]()
    for number in range(12):
        if number < 9:
            freed += [StorageWeakRef(p.untyped_storage()) for p in loaded.parameters()]
        for parameter in loaded.parameters():
            parameter.data = parameter.data.clone()
        loaded.body.requires_grad_(number % 2 == 0)
        run(loaded, (torch.randn(2 + number % 3, 6), torch.randn(2 + number % 3, 4)), 1)
    assert all(ref.expired() for ref in freed)


def test_what_needs_a_gradient_may_change_from_call_to_call(package: Path, served: list[str]) -> None:
    model, eager = load(package).module(), net()
    x, y = torch.randn(5, 6), torch.randn(5, 4)
    for frozen in (True, False, True):
        for each in (model, eager):
            each.body.requires_grad_(not frozen)
        assert_same(run(model, (x, y), 1), run(eager, (x, y), 1))
    with torch.no_grad():
        assert_same(run(model, (x, y), 1), run(eager, (x, y), 1))
    assert [s.partition(".")[0] for s in served] == ["1", "1", "0", "0", "1", "1", "4"]


def test_what_no_variant_covers_is_refused(package: Path) -> None:
    model = load(package).module()
    with pytest.raises(GradientError, match=r"input x requires a gradient.*requires_grad=\["):
        model(torch.randn(5, 6, requires_grad=True), torch.randn(5, 4))
    model.requires_grad_(False)
    with pytest.raises(GradientError, match=r"input y requires a gradient"):
        model(torch.randn(5, 6), torch.randn(5, 4, requires_grad=True))


def test_nothing_is_computed_for_what_is_frozen(package: Path) -> None:
    """Count the calls of matrix products in the code."""
    archive = open_package(package)
    counts = {}
    for name in archive.manifest.libraries:
        code = archive.library(name).read_bytes()
        counts[name.partition(".")[2]] = sum(
            code.count(f"aoti_torch_cpu_{product}(buf".encode()) for product in ("mm_out", "addmm_out", "bmm_out")
        )
    # three layers: four products forward; backward one for each weight's gradient and one to reach the previous layer
    assert counts["0.forward"] == counts["1.forward"] == 4
    assert counts["0.backward"] == 4 + 3
    assert counts["1.backward"] == 2
    assert counts["2.backward"] == 4
    assert counts["3.backward"] == 4
    assert "4.backward" not in counts and counts["4.inference"] == 4


def test_names_that_do_not_exist(tmp_path: Path) -> None:
    x, y = torch.randn(3, 6), torch.ones(3, 4, dtype=torch.int64)
    for names, message in (
        (
            ["heda"],
            r"requires_grad names 'heda', which is neither .* the inputs 'x', 'y' and the parameters 'body.0.weight'",
        ),
        (["y"], r"requires_grad names the input 'y', which is not a floating-point"),
        (["inputs", "tail.bias"], "requires_grad names 'tail.bias'"),
    ):
        with pytest.raises(ab.ExportError, match=message):
            ab.export_module(net(), (x, y), requires_grad=names, path=tmp_path / "a.pt2")
    frozen = net().requires_grad_(False)
    with pytest.raises(ab.ExportError, match="requires_grad='parameters': expected at least one parameter that"):
        ab.export_module(frozen, (x, y), requires_grad=["parameters"], path=tmp_path / "a.pt2")


class Decided(nn.Module):
    """Its output is not differentiable, though its parameters require grad."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.frozen = nn.Linear(4, 3), nn.Parameter(torch.ones(3), requires_grad=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.linear(x) * self.frozen + y).argmax(1)


def test_what_has_no_gradient_needs_none(tmp_path: Path) -> None:
    """An output that is not differentiable is served as in eager. A gradient not chosen at export is still an error."""
    eager = Decided()
    x, y = torch.randn(5, 4, requires_grad=True), torch.randn(5, 3)
    for number, variant in enumerate((ab.Variant((x, y)), ab.Variant((x, y), requires_grad=[]))):
        loaded = load(ab.export(tmp_path / f"{number}.pt2", {"module": ab.Module(eager, [variant])})).module()
        if number == 0:
            got = loaded(x, y)
            assert torch.equal(got, eager(x, y)) and not got.requires_grad
            with pytest.raises(GradientError, match="input y requires a gradient, and did not"):
                loaded(x, torch.randn(5, 3, requires_grad=True))
            loaded.frozen.requires_grad_()
            with pytest.raises(GradientError, match="frozen requires a gradient, and was frozen"):
                loaded(x, y)
        else:
            with pytest.raises(GradientError, match=r"linear\.\S+ requires a gradient"):
                loaded(x.detach(), y)


def test_gradients_that_another_thread_turns_off_meanwhile_are_not_forgotten(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If parameters are frozen between a call's checks, the call may omit their gradients. A later call does not."""
    loaded, x, y = load(package).module("net"), torch.randn(3, 6), torch.randn(3, 4)
    find = module_call.differentiated

    def frozen_meanwhile(*given: Any) -> Any:
        loaded.requires_grad_(False)
        found = find(*given)
        loaded.requires_grad_(True)
        return found

    monkeypatch.setattr(module_call, "differentiated", frozen_meanwhile)
    with contextlib.suppress(InputError):
        loaded(x, y)
    monkeypatch.undo()
    for _ in range(2):
        assert all(out.requires_grad for out in loaded(x, y))


def test_parameters_that_were_one_and_no_longer_are(package: Path) -> None:
    """They share memory, so the gradient of one would be that of both."""
    loaded = load(package).module("net")
    loaded(torch.randn(3, 6), torch.randn(3, 4))
    loaded.tail.weight = nn.Parameter(loaded.head.weight.data)
    with pytest.raises(WeightsError, match=r"were one tensor when the package was exported"):
        loaded(torch.randn(3, 6), torch.randn(3, 4))
    loaded.requires_grad_(False)
    assert not loaded(torch.randn(3, 6), torch.randn(3, 4))[0].requires_grad
