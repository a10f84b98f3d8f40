"""Weights that are bound, rebound and dropped leak nothing (docs/reliability.md, rows 37 and 40)."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

import aot_backward as ab
from aot_backward_runtime import IncompatibleError, load, torch_api

from ..support import exports
from ..support.packages import put_together, python, taken_apart

WIDE = 256  # 256 KiB of weights


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.body(x)))


def net() -> Net:
    torch.manual_seed(0)
    return Net()


class Loss(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x).square().mean()


def _make(path: Path) -> None:
    own, x, target = Net(), torch.randn(8, WIDE), torch.randint(3, (8,))
    loss = nn.functional.cross_entropy
    ab.export(
        path,
        {
            "net": ab.Module(net(), [ab.Variant((x,))]),
            "loss": ab.Grad(Loss(), [ab.Variant((x,))], wrt=["body.weight"]),
            "fit": ab.Step(own, [ab.Variant((x, target))], torch.optim.SGD(own.parameters(), lr=0.1), loss_fn=loss),
        },
    )


def package() -> Path:
    return exports.shared("bound", _make)


# The process's descriptors, mappings and private memory are equal after 12 and 36 rounds, within 4 MB. A leak of 256 kB
# a round would be 6 MB.
FLAT = """
import copy, gc, os, sys, torch
from dataclasses import replace
from pathlib import Path
from aot_backward_runtime import load
def state():
    gc.collect()
    anonymous = next(int(line.split()[1]) for line in Path("/proc/self/smaps_rollup").read_text().splitlines() if line.startswith("Anonymous:"))
    return len(os.listdir("/proc/self/fd")), Path("/proc/self/maps").read_text().count("\\n"), anonymous
def flat(name, once):
    for _ in range(12): once()
    before = state()
    for _ in range(24): once()
    after = state()
    assert after[0] <= before[0] and after[1] - before[1] < 6 and after[2] - before[2] < 4096, (name, before, after)
x, target = torch.randn(8, 256), torch.randint(3, (8,))
"""


@pytest.mark.parametrize("mapped", [False, True])
def test_row_40_loaded_called_and_dropped(mapped: bool) -> None:
    code = """
def dropped():
    package = load(sys.argv[1], mmap=sys.argv[2] == "True")
    package.module("net")(x).sum().backward()
    package.grad("loss")(x)
    package.step("fit")(x, target)
flat("loaded and dropped", dropped)
"""
    done = python(FLAT + code, package(), mapped)
    assert done.returncode == 0, done.stderr


def test_row_40_bound_again() -> None:
    code = """
model, grad, step = load(sys.argv[1]).module("net"), load(sys.argv[1]).grad("loss"), load(sys.argv[1]).step("fit")
def call():
    model(x).sum().backward()
def data():
    for p in model.parameters(): p.data = p.data.clone()
    call()
def assign():
    model.load_state_dict({k: t.clone() for k, t in model.state_dict().items()}, assign=True)
    call()
def functional():
    torch.func.functional_call(model, {k: p.detach().clone().requires_grad_() for k, p in model.named_parameters()}, (x,)).sum().backward()
def of_a_grad():
    for p in grad.parameters.values(): p.data = p.data.clone()
    grad(x)
def of_a_step():
    for p in step.parameters.values(): p.data = p.data.clone()
    step(x, target)
def copied():
    copy.deepcopy(model)(x).sum().backward()
    copy.deepcopy(step)(x, target)
for once in (data, assign, functional, of_a_grad, of_a_step, copied): flat(once.__name__, once)
"""
    done = python(FLAT + code, package())
    assert done.returncode == 0, done.stderr


def test_these_checks_can_fail() -> None:
    done = python(FLAT + "kept = []\nflat('kept', lambda: kept.append(torch.ones(256, 256)))")
    assert done.returncode == 1 and "AssertionError: ('kept'" in done.stderr


def test_what_is_bound_again_gives_eagers_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """This includes the other kind of handles, as on a GPU, and tensors of inference mode, in any order."""
    x = torch.randn(8, WIDE)
    for on_cpu in (True, False):
        runner = torch_api.Runner
        made = lambda library, device: runner(library, device, on_cpu)  # noqa: B023, E731
        with monkeypatch.context() as patched:
            patched.setattr(torch_api, "Runner", made)
            model, eager = load(package()).module("net"), net()
            for seed, inside in enumerate((True, False, True, False)):
                torch.manual_seed(seed)
                fresh = {
                    name: torch.rand_like(t) if t.is_floating_point() else t.clone()
                    for name, t in eager.state_dict().items()
                }
                with torch.inference_mode(inside):
                    model.load_state_dict({n: t.clone() for n, t in fresh.items()}, assign=True)
                    eager.load_state_dict({n: t.clone() for n, t in fresh.items()}, assign=True)
                    torch.testing.assert_close(model(x), eager(x))


@pytest.mark.parametrize("without_layouts", [False, True])
def test_row_51_a_weight_that_is_not_what_the_code_was_compiled_for(
    tmp_path: Path, without_layouts: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A library states the weights that it was compiled for. In a library of 0.1.0 the handles of its constants tell
    them."""
    expected = r"was compiled for \S+ as float32 .*; the manifest says float32 \[3,5,7\]"
    if without_layouts:
        stated = torch_api.stated
        monkeypatch.setattr(torch_api, "stated", lambda path: replace(stated(path), layouts={}))
        expected = r"not compiled for these weights: the constant \w+ is torch.float32 of shape .* \[3, 5, 7\]"
    path = tmp_path / "lies.pt2"
    put_together(path, taken_apart(package()))
    library = next(iter(load(path).module("net")._aot_entry.libraries.values()))
    constants = {c.weight: torch.zeros(3, 5, 7) for c in library.spec.constants}
    for _ in range(2):  # not only at the first open
        with pytest.raises(IncompatibleError, match=expected):
            library.bind((constants, (1,)))
