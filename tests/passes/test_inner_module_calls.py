"""Modules that are called by a module which cannot be compiled: recorded, served and audited as outermost ones, with eager's numbers."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward_runtime.module_calls.audit import _aliased
from aot_backward_runtime.module_calls.live_module import memory_of

from ..support.exports import shared
from .test_module_calls import Reads, at, both, made, nothing, trained

pytestmark = pytest.mark.usefixtures("one_thread")


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lin, self.norm, self.drop = nn.Linear(6, 6, bias=False), nn.BatchNorm1d(6), nn.Dropout(0.2)
        self.gain = 0.5

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        out = self.drop(torch.tanh(self.norm(self.lin(Reads.apply(x)))))
        return out * (self.gain * times * float(os.environ.get("AOTB_TEST_FORWARD", "1")))


class Parent(nn.Module):
    """Its blocks are given what an eager layer made, whose parameters are trained, too."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first, self.second = nn.Linear(6, 6), Block(), Block()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return self.second(self.first(self.stem(x), 1), 2) + x


class Tied(Parent):
    def __init__(self) -> None:
        super().__init__()
        self.second.lin.weight = self.first.lin.weight
        self.stem.weight = self.first.lin.weight


class Twice(Parent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        h = self.first(self.first(self.stem(x), 1), 1)
        return self.first(h, 2) + self.first(h, 1)


class Half(nn.Module):
    def __init__(self, block: Block) -> None:
        super().__init__()
        self.block = block

    def forward(self, x: torch.Tensor, times: int) -> torch.Tensor:
        print(end="")
        return self.block(x, times) - x


class Sharing(Parent):
    def __init__(self) -> None:
        super().__init__()
        self.second = Half(self.first)
        self.first = Half(self.first)


class Drawing(Parent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(self.stem(x), random.choice((1, 2)))


class Held(nn.Module):
    """It has no parameters of its own."""

    def __init__(self, held: Parent) -> None:
        super().__init__()
        self.held = [held]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.held[0].first(self.held[0].stem(x), 1)


class Wrapped(Parent):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Held(self)(x)  # another one in each call, as a solver has it


class Partly(Parent):
    """Its second call of the block is one that was not recorded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        return self.first(self.first(self.first(self.stem(x), 1), 3), 2)


class Scale(nn.Module):
    """A layer of the script's own."""

    def __init__(self) -> None:
        super().__init__()
        self.by, self.gain = nn.Parameter(torch.ones(6)), 0.5

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.by * self.gain


class Quiet(nn.Module):
    """It is compiled as a whole."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Scale(), Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x))


class Deciding(Parent):
    """That it cannot be exported is seen when the recording has ended."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = Scale()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.scale(self.stem(x))
        return h if h.sum() > 0 else -h


class Overwriting(Parent):
    """It writes over what it gave to the block. The block has copied it."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        out = x
        for _ in range(3):
            h = self.stem(x)
            out = out + self.first(h, 1)
            h.mul_(2)
        return out


CALLS = {Parent: 2, Tied: 2, Twice: 4, Sharing: 2, Drawing: 1, Wrapped: 1, Deciding: 1}


def seeded(step: int, net: nn.Module) -> None:
    random.seed(step)


@pytest.fixture(scope="module")
def package() -> Path:
    def record(path: Path) -> None:
        with ab.record(path, modules=True, optimizer=False, tune="none", min_seen=100) as recording:
            trained(made(Parent), 7)
            trained(made(Quiet), 3)
            trained(made(Deciding), 3)
        assert {c.rpartition(".")[2] for c in recording.compiled_modules} == {"Block", "Quiet", "Scale"}, recording.skipped
        assert any("Parent (called at" in words and "its forward prints" in words for words in recording.skipped)

    return shared("inner-module-calls", record)


@pytest.mark.parametrize("kind", CALLS, ids=lambda k: k.__name__)
def test_calls_within_a_module_in_eager_are_served_and_equal_eager(kind: Any, package: Path) -> None:
    report = both(package, kind, 6, seeded, nothing)
    assert report.modules == 6 * CALLS[kind] and not report.eager_modules and not report.differed, str(report)
    assert report.through_modules == 6 and not report.misses and " (6 through modules)" in str(report)


def test_a_block_that_changes_goes_to_eager_by_name_and_the_other_is_served(package: Path) -> None:
    report = both(package, Parent, 6, at(3, lambda net: setattr(net.first, "gain", 2.0)), nothing)
    assert report.modules == 3 + 6 and not report.differed, str(report)
    (reason,) = report.eager_modules
    assert report.eager_modules[reason] == 3 and reason.endswith("Block: gain is 2.0; recorded was 0.5")


def test_a_hook_of_the_parent_is_called_and_one_of_a_block_sends_it_to_eager(package: Path) -> None:
    def hooked(net: Any) -> None:
        net.register_forward_hook(lambda m, args, out: out * 2)
        net.second.register_full_backward_hook(lambda m, gives, gets: (gives[0] * 3, None))

    report = both(package, Parent, 6, at(3, hooked), nothing)
    assert report.modules == 6 + 3 and not report.differed, str(report)
    (reason,) = report.eager_modules
    assert "Block: the module has a backward hook" in reason, reason


def test_what_is_written_over_between_call_and_backward_is_found_by_the_audit_before_it_matters(package: Path) -> None:
    """Eager has saved a copy of the argument, compiled code the argument itself. Before the first backward, all calls are audited."""
    for steps in (1, 4):
        report = both(package, Overwriting, steps, nothing, nothing)
        assert report.modules == 3 and len(report.differed) == 1 and "its backward could not be run" in report.differed[0], str(report)


def test_gradients_of_a_block_that_is_called_again_before_the_first_backward(package: Path) -> None:
    net, twin = made(Parent), made(Parent)
    x = torch.randn(5, 6)
    results = []
    for each in (net, twin):
        torch.manual_seed(1)
        with ab.replay(package, modules=each is net):
            h = each.stem(x)
            for _ in range(9):
                h = each.first(h, 1)
            h.sum().backward()
        results.append([h.detach(), *(p.grad for p in (*each.stem.parameters(), *each.first.parameters())), *each.first.buffers()])
    torch.testing.assert_close(*results, rtol=1e-3, atol=1e-5)


def test_a_call_that_eager_makes_between_served_ones_of_one_layer(package: Path) -> None:
    """Eager saves the averages of a batch normalization, and does not count that it writes them."""
    report = both(package, Partly, 4, nothing, nothing)
    assert report.modules == 2 * 4 and not report.differed, str(report)
    (reason,) = report.eager_modules
    assert report.eager_modules[reason] == 4 and "times is 3" in reason


def test_nothing_is_served_within_a_served_call_or_its_audit_and_the_rest_where_it_goes_to_eager(package: Path) -> None:
    report = both(package, Quiet, 6, at(4, lambda net: setattr(net.first, "gain", 2.0)), nothing)
    assert report.modules == 4 + 2 and not report.differed, str(report)
    assert sum(report.eager_modules.values()) == 4 and any("Quiet: first.gain is 2.0" in reason for reason in report.eager_modules)


@pytest.mark.parametrize("variable", ["AOTB_TEST_FORWARD", "AOTB_TEST_BACKWARD"])
def test_an_audit_catches_what_nothing_looks_at_and_gradients_go_on_through_the_block(
    variable: str, package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def each(step: int, net: nn.Module) -> None:
        if step == 3:
            monkeypatch.setenv(variable, "3")

    report = both(package, Parent, 5, each, lambda: monkeypatch.delenv(variable))
    assert report.modules == 2 * 4 and len(report.differed) == 2 and all("call 4" in words for words in report.differed), str(report)


def observed(script: Callable[[], object]) -> dict[str, Any]:
    """What a recording looks at, by class; nothing is compiled."""
    with ab.record(None, modules=True, optimizer=False) as recording:
        script()
    assert recording.observed_modules is not None
    return {type(seen.module).__name__: seen for seen in recording.observed_modules.modules.values()}


class Prints(nn.Module):
    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.ModuleList(inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        print(end="")
        for part in self.inner:
            x = part(x)
        return x


def test_layers_of_pytorch_are_not_looked_at_by_themselves() -> None:
    net = Prints(nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 6)), nn.ReLU(), nn.LSTM(6, 6), Scale())
    net.inner[3].forward = lambda x: x  # type: ignore[method-assign]
    assert observed(lambda: [net(torch.randn(5, 6)) for _ in range(3)]).keys() == {"Prints", "Scale"}
    net = Prints(nn.Sequential(nn.Linear(6, 6), nn.ReLU()))
    assert observed(lambda: [net(torch.randn(5, 6)) for _ in range(3)]).keys() == {"Prints", "Sequential"}


def test_how_deep_and_how_many() -> None:
    kinds = [type(f"Prints{i}", (Prints,), {}) for i in range(8)]
    net: nn.Module = Scale()
    for kind in kinds:
        net = kind(net)
    found = observed(lambda: [net(torch.randn(5, 6)) for _ in range(12)])
    assert found.keys() == {f"Prints{i}" for i in (7, 6, 5, 4, 3)}
    many = Prints(*(type(f"Scale{i}", (Scale,), {})() for i in range(40)))
    assert len(observed(lambda: [many(torch.randn(5, 6)) for _ in range(3)])) == 1 + 32


def test_a_module_within_others_that_are_made_for_each_call() -> None:
    scale = Scale()
    found = observed(lambda: [Prints(scale, Prints(scale))(torch.randn(5, 6)) for _ in range(50)])
    assert found.keys() == {"Prints", "Scale"} and sum(kind.count for kind in found["Scale"].kinds.values()) > 70
    net = made(Parent)
    assert observed(lambda: [Held(net)(torch.randn(5, 6)) for _ in range(3)]).keys() == {"Block"}


def test_what_is_differentiated_again_is_not_looked_into() -> None:
    net = Prints(Scale())

    def script() -> None:
        for _ in range(3):
            x = torch.randn(5, 6, requires_grad=True)
            (gradient,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
            gradient.square().sum().backward()

    assert observed(script).keys() == {"Prints"}


def test_an_audit_sees_whether_results_share_memory_with_what_the_call_was_given() -> None:
    x, other = torch.ones(2, 3), torch.ones(2, 3)
    assert not _aliased([x.t(), x * 2], memory_of([x]), [other[0], other * 2], memory_of([other]))
    assert "result 1 shares memory" in _aliased([x, x * 2], memory_of([x]), [other, other.detach()], memory_of([other]))


class Undecided(nn.Module):
    """Cannot be exported."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 1e9 else x + torch.tanh(self.lin(x))


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(Undecided(), Undecided())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x if x.sum() > 1e9 else self.blocks(x)


def test_what_is_left_out_names_the_line_of_the_script_also_where_it_was_called_again(tmp_path: Path) -> None:
    """Blocks are called by PyTorch's ``Sequential``, which is called again when the recording ends: by no line of the script."""
    with ab.record(tmp_path / "none.pt2", modules=True, optimizer=False, tune="none") as recording:
        trained(made(Chain), 3)
    line = Chain.forward.__code__.co_firstlineno + 1
    assert any(f"{Undecided.__qualname__} (called at {__file__}:{line})" in words for words in recording.skipped), recording.skipped
